"""Slots as the index knows them inside one write transaction: which hold pages, which are free, which go first.

Slots are noted by groups of neighbours (records.py). Changes are collected and written once per group, when the order
of eviction is asked for, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.storage.file.slab.records import (
    FREE,
    FREE_SLOTS,
    HELD,
    HELD_COLUMNS,
    HELD_PRIORITY,
    ORDER,
    PLACE,
    PRIORITY,
    SLOT_SIZE,
    Slab,
    slots_in_group,
)


class Group(NamedTuple):
    """A group of neighbours, and the lowest priority of their pages."""

    priority: int
    slab: int
    first: int


class Groups:
    """``groups``, ``order`` and ``free`` in one transaction."""

    def __init__(self, transaction: Any, groups_db: Any, order_db: Any, free_db: Any) -> None:
        self._transaction = transaction
        self._groups_db = groups_db
        self._order_db = order_db
        self._free_db = free_db
        # Per slot size and group: what its slots are to hold, by their offset as it is stored; None for no page.
        self._held: dict[tuple[int, bytes], dict[bytes, bytes | None]] = {}
        # Per slot size and group: the free slots as bits, as they are to be.
        self._free: dict[tuple[int, bytes], int] = {}

    # -- pages -----------------------------------------------------------------------------------------------------

    def hold(self, slab: Slab, slot: int, priority: int, full_key: bytes) -> None:
        """The slot has this page, with this priority."""
        size = slab.slot_size
        offset = slot % slots_in_group(size)
        held = HELD.pack(offset, priority, full_key)
        self._held.setdefault((size, PLACE.pack(slab.number, slot - offset)), {})[held[:2]] = held

    def hold_all(
        self,
        slab_of: Callable[[int], Slab],
        slots: Sequence[tuple[int, int]],
        priorities: npt.NDArray[np.uint64],
        full_keys: Sequence[bytes],
    ) -> None:
        """``hold`` for many slots (slab, slot), neighbours mostly one after the other."""
        columns = np.empty(len(slots), HELD_COLUMNS)
        columns["priority"] = priorities
        columns["key"] = np.frombuffer(b"".join(full_keys), columns["key"].dtype)
        offsets: list[int] = []
        changes: list[dict[bytes, bytes | None]] = []
        current, first, end = -1, 0, 0
        for number, slot in slots:
            if number != current or not first <= slot < end:
                size = slab_of(number).slot_size
                together = slots_in_group(size)
                current, first = number, slot - slot % together
                end = first + together
                of_group = self._held.setdefault((size, PLACE.pack(number, first)), {})
            offsets.append(slot - first)
            changes.append(of_group)
        columns["offset"] = offsets
        for of_group, held in zip(changes, _cut(columns.tobytes()), strict=True):
            of_group[held[:2]] = held

    def hold_no_more(self, slab: Slab, slot: int) -> None:
        """The slot has no page."""
        size = slab.slot_size
        offset = slot % slots_in_group(size)
        self._held.setdefault((size, PLACE.pack(slab.number, slot - offset)), {})[offset.to_bytes(2, "big")] = None

    def first_victim(self, slot_size: int) -> Group | None:
        """The group that has the page of this slot size that goes first."""
        self._save_held()
        with self._transaction.cursor(self._order_db) as cursor:
            if not cursor.set_range(SLOT_SIZE.pack(slot_size)):
                return None
            size, priority, slab, first = ORDER.unpack(cursor.key())
            return Group(priority, slab, first) if size == slot_size else None

    def held(self, group: Group) -> list[bytes]:
        """What the slots of a group hold (``HELD``)."""
        self._save_held()
        value = self._transaction.get(PLACE.pack(group.slab, group.first), db=self._groups_db)
        return _cut(value or b"")

    def let_go(self, slab: Slab, group: Group, held: Sequence[bytes], gone: Sequence[bytes]) -> None:
        """Of what the slots of a group hold, these pages are gone; their slots are free."""
        place = PLACE.pack(group.slab, group.first)
        size = SLOT_SIZE.pack(slab.slot_size)
        self._transaction.delete(size + PRIORITY.pack(group.priority) + place, db=self._order_db)
        if len(gone) == len(held):
            self._transaction.delete(place, db=self._groups_db)
        else:
            offsets = {of_slot[1] for of_slot in gone}
            left = [of_slot for of_slot in held if of_slot[1] not in offsets]
            self._transaction.put(place, b"".join(left), db=self._groups_db)
            self._transaction.put(size + _lowest(left) + place, b"", db=self._order_db)
        free = self._free_slots(slab, place)
        for of_slot in gone:
            free |= 1 << of_slot[1]
        self._free[slab.slot_size, place] = free

    def held_by_slab(self, slab: Slab) -> Iterator[tuple[bytes, list[bytes]]]:
        """Every group of a slab that has pages: its place and what its slots hold."""
        self._save_held()
        with self._transaction.cursor(self._groups_db) as cursor:
            if cursor.set_range(PLACE.pack(slab.number, 0)):
                for place, value in cursor:
                    if PLACE.unpack(place)[0] != slab.number:
                        return
                    yield place, _cut(value)

    def drop_slab(self, slab: Slab) -> None:
        """Forget all groups of a slab."""
        size = SLOT_SIZE.pack(slab.slot_size)
        for place, held in list(self.held_by_slab(slab)):
            self._transaction.delete(place, db=self._groups_db)
            self._transaction.delete(size + _lowest(held) + place, db=self._order_db)
        self._save_free()
        for first in range(0, slab.slots, slots_in_group(slab.slot_size)):
            self._transaction.delete(FREE.pack(slab.slot_size, slab.number, first), db=self._free_db)

    # -- free slots ------------------------------------------------------------------------------------------------

    def add_slab(self, slab: Slab) -> None:
        """All slots of a new slab are free."""
        together = slots_in_group(slab.slot_size)
        for first in range(0, slab.slots, together):
            free = (1 << min(together, slab.slots - first)) - 1
            self._free[slab.slot_size, PLACE.pack(slab.number, first)] = free

    def give_back(self, slab: Slab, slot: int) -> None:
        """The slot is free."""
        self._change_free(slab, slot, True)

    def put_to_use(self, slab: Slab, slot: int) -> None:
        """The slot is free no more."""
        self._change_free(slab, slot, False)

    def take_free(self, slot_size: int, count: int) -> list[tuple[int, int]]:
        """Up to ``count`` free slots (slab, slot), in order of place, free no more."""
        taken: list[tuple[int, int]] = []
        for place, free in self._free_groups(slot_size) if count > 0 else ():
            slab, first = PLACE.unpack(place)
            while free and len(taken) < count:
                lowest = free & -free
                taken.append((slab, first + lowest.bit_length() - 1))
                free ^= lowest
            self._free[slot_size, place] = free
            if len(taken) >= count:
                break
        return taken

    def count_free(self, slot_size: int, at_most: int) -> int:
        """How many slots of this size are free; ``at_most`` when there are more."""
        count = 0
        for _, free in self._free_groups(slot_size):
            count += free.bit_count()
            if count >= at_most:
                return at_most
        return count

    def _free_groups(self, slot_size: int) -> Iterator[tuple[bytes, int]]:
        self._save_free()
        size = SLOT_SIZE.pack(slot_size)
        with self._transaction.cursor(self._free_db) as cursor:
            if cursor.set_range(size):
                for where, free in cursor:
                    if not where.startswith(size):
                        return
                    yield where[SLOT_SIZE.size :], FREE_SLOTS.unpack(free)[0]

    def _change_free(self, slab: Slab, slot: int, free: bool) -> None:
        offset = slot % slots_in_group(slab.slot_size)
        place = PLACE.pack(slab.number, slot - offset)
        known = self._free_slots(slab, place)
        self._free[slab.slot_size, place] = known | 1 << offset if free else known & ~(1 << offset)

    def _free_slots(self, slab: Slab, place: bytes) -> int:
        known = self._free.get((slab.slot_size, place))
        if known is None:
            stored = self._transaction.get(SLOT_SIZE.pack(slab.slot_size) + place, db=self._free_db)
            known = FREE_SLOTS.unpack(stored)[0] if stored else 0
        return known

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write what was changed."""
        self._save_held()
        self._save_free()

    def _save_held(self) -> None:
        if not self._held:
            return
        get, put, delete = self._transaction.get, self._transaction.put, self._transaction.delete
        groups_db, order_db = self._groups_db, self._order_db
        changes, self._held = self._held, {}
        for (slot_size, place), change in changes.items():
            stored = _cut(get(place, db=groups_db) or b"")
            held = {of_slot[:2]: of_slot for of_slot in stored}
            for offset, of_slot in change.items():
                if of_slot is None:
                    held.pop(offset, None)
                else:
                    held[offset] = of_slot
            before = _lowest(stored) if stored else None
            after = _lowest(held.values()) if held else None
            size = SLOT_SIZE.pack(slot_size)
            if before is not None and before != after:
                delete(size + before + place, db=order_db)
            if after is None:
                delete(place, db=groups_db)
                continue
            if before != after:
                put(size + after + place, b"", db=order_db)
            # In the order of the slots, which mostly is that of a chain (chains.py).
            put(place, b"".join(sorted(held.values())), db=groups_db)

    def _save_free(self) -> None:
        changes, self._free = self._free, {}
        for (slot_size, place), free in changes.items():
            key = SLOT_SIZE.pack(slot_size) + place
            if free:
                self._transaction.put(key, FREE_SLOTS.pack(free), db=self._free_db)
            else:
                self._transaction.delete(key, db=self._free_db)


def _cut(value: bytes) -> list[bytes]:
    return [value[begin : begin + HELD.size] for begin in range(0, len(value), HELD.size)]


def _lowest(held: Iterable[bytes]) -> bytes:
    """The lowest priority, packed."""
    return min([of_slot[HELD_PRIORITY] for of_slot in held])

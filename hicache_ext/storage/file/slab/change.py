"""What can be done to the index of a slab directory inside one write transaction."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_ext.envelope import PAGE_HASH_LENGTH
from hicache_ext.storage.file.eviction import RANK_LENGTH, Ghost, Rank
from hicache_ext.storage.file.slab.groups import Group, Groups
from hicache_ext.storage.file.slab.placed import Placed
from hicache_ext.storage.file.slab.ranking import Ranking
from hicache_ext.storage.file.slab.records import (
    CREATED,
    GENERATION,
    HELD,
    HELD_KEY,
    HELD_PRIORITY,
    NUMBER,
    PAGE,
    PAGE_COLUMNS,
    PLACE,
    PRIORITY,
    SLAB,
    SLOT_SIZE,
    USES,
    USES_NAME,
    Place,
    Slab,
)
from hicache_ext.storage.file.slab.touches import Uses
from hicache_ext.storage.file.usage import writer_alive

if TYPE_CHECKING:
    from hicache_ext.storage.file.slab.index import SlabIndex


_HIGHEST_PRIORITY = (1 << 64) - 1
_LATEST = (1 << 32) - 1
_RANK_IN_PAGE = PAGE.size - RANK_LENGTH


class IndexChange:
    """Use ``SlabIndex.changing()``."""

    def __init__(self, index: SlabIndex, transaction: Any, slabs: dict[int, Slab]) -> None:
        # The index and its transactions are one thing in several classes; they share their databases.
        self._index = index
        self._transaction = transaction
        self._ranking = Ranking(slabs, transaction, index.state_db)
        self._groups = Groups(transaction, index.groups_db, index.order_db, index.free_db)
        self._slabs_changed = False
        self.evicted = 0

    def finish(self) -> bool:
        """At the end of the transaction; whether there are other slabs than before."""
        self._groups.save()
        self._ranking.save()
        return self._slabs_changed

    # -- slots -----------------------------------------------------------------------------------------------------

    def take_free_slots(self, slot_size: int, count: int) -> list[tuple[int, int]]:
        """Up to ``count`` free slots (slab, slot) of this size, which the caller puts to use or gives back.

        In order of place: slots taken together lie together and are written together.
        """
        return self._groups.take_free(slot_size, count)

    def evict(self, slot_size: int, count: int, spared: frozenset[bytes] = frozenset()) -> None:
        """Free the slots of at least ``count`` pages of this slot size, as long as there are any: those that go first.

        Pages with a hash in ``spared`` stay, unless those are so many that nothing else is left.
        Neighbours of such a page whose turn would come soon go with it: single slots here and there would each need a
        system call of their own (1.6 pages a call in a full directory, where this gives more than five).
        """
        gone: list[bytes] = []
        soon = self._ranking.soon(slot_size)
        may_spare = self._ranking.slots(slot_size) if spared else 0
        while len(gone) < count:
            group = self._groups.first_victim(slot_size)
            if group is None:
                break
            slab, held = self._ranking.slab(group.slab), self._groups.held(group)
            if may_spare and self._spare(slab, group, held, spared):
                may_spare -= 1
                continue
            # Compared as the bytes they are stored as: this runs once per page of every write.
            highest = PRIORITY.pack(min(group.priority + soon, _HIGHEST_PRIORITY))
            chosen = [of_slot for of_slot in held if of_slot[HELD_PRIORITY] <= highest]
            if may_spare:
                chosen = [of_slot for of_slot in chosen if of_slot[-PAGE_HASH_LENGTH:] not in spared]
            self._groups.let_go(slab, group, held, chosen)
            gone += [of_slot[HELD_KEY] for of_slot in chosen]
        self.evicted += len(gone)
        self._forget_pages(slot_size, gone)

    def _spare(self, slab: Slab, group: Group, held: Sequence[bytes], spared: frozenset[bytes]) -> bool:
        """Give the group's next victim, if it is one of ``spared``, the room of as many inserts as there are slots."""
        offset, priority, full_key = HELD.unpack(min(held, key=lambda of_slot: of_slot[HELD_PRIORITY]))
        if full_key[-PAGE_HASH_LENGTH:] not in spared:
            return False
        value = self._transaction.get(full_key, db=self._index.pages_db)
        rank = Rank.unpack(value[_RANK_IN_PAGE:])
        later = min(priority + self._ranking.slots(slab.slot_size), _HIGHEST_PRIORITY)
        self._put(full_key, value, slab, group.first + offset, Rank(later, rank.used, rank.hits))
        return True

    def _forget_pages(self, slot_size: int, gone: Sequence[bytes]) -> None:
        """Remove evicted pages from ``pages`` and keep their ghosts."""
        if not gone:
            return
        pop, pages_db = self._transaction.pop, self._index.pages_db
        ranks = b"".join([pop(full_key, db=pages_db)[_RANK_IN_PAGE:] for full_key in gone])
        table = self._index.ghosts(self._transaction, self._ranking.ghost_limit(slot_size))
        if table is not None:
            table.remember(gone, ranks)

    def free_slots(self, slot_size: int, at_most: int) -> int:
        """How many slots of this size are free; ``at_most`` when there are more."""
        return self._groups.count_free(slot_size, at_most)

    def pend(self, slots: Sequence[tuple[int, int]]) -> bytes:
        """Note that this process is writing these (slab, slot); the answer is the token for ``publish``."""
        token = self._index.writer + NUMBER.pack(self._index.next_portion())
        self._transaction.put(token, b"".join([PLACE.pack(*slot) for slot in slots]), db=self._index.pending_db)
        return token

    def give_back(self, slab: int, slot: int) -> None:
        """A slot that was taken is free again."""
        self._groups.give_back(self._ranking.slab(slab), slot)

    def publish(
        self, tokens: Sequence[bytes], keys: Sequence[bytes], placed: Placed, oldest: bytes = b""
    ) -> list[bool] | None:
        """Make pages of what was pended under ``tokens``; the other slots become free.

        ``keys`` is a chain; ``placed`` are those of its pages whose bytes are in their slots, by position. False for a
        page that another writer published first: its slot is free again. None, and nothing is published, when the slots
        are no longer this writer's: its process was taken for dead. ``oldest`` as for ``contains``.
        """
        index, transaction = self._index, self._transaction
        rest: set[tuple[int, int]] = set()
        for token in tokens:
            rest.update(PLACE.iter_unpack(transaction.pop(token, db=index.pending_db) or b""))
        places = list(zip(placed.slabs.tolist(), placed.slots.tolist(), strict=True))
        if not rest.issuperset(places):
            for number, slot in rest:
                self.give_back(number, slot)
            return None
        positions = placed.positions.tolist()
        chosen = keys if len(positions) == len(keys) else [keys[position] for position in positions]
        full_keys = index.full_keys(transaction, chosen)
        if oldest:
            self.remove_expired(full_keys, oldest)
        values = np.empty(len(places), PAGE_COLUMNS)
        values["created"] = np.void(CREATED.pack(int(time.time())))
        values["slab"], values["slot"], values["length"] = placed.slabs, placed.slots, placed.lengths
        for begin, end in self._chains(placed):
            size, depth = self._ranking.slab(places[begin][0]).slot_size, positions[begin]
            ghosts = self._recall(size, full_keys[begin:end])
            before = self._rank_of(keys[depth - 1]) if depth else None
            ranks = np.array(self._ranking.inserted_chain(size, before, depth, ghosts), np.uint64).T
            for name, column in zip(("priority", "used", "hits"), ranks, strict=True):
                values[name][begin:end] = column
        packed = values.tobytes()
        inserted = self._insert(full_keys, [packed[at : at + PAGE.size] for at in range(0, len(packed), PAGE.size)])
        priorities = values["priority"]
        if not all(inserted):
            places = list(itertools.compress(places, inserted))
            priorities = priorities[inserted]
            full_keys = list(itertools.compress(full_keys, inserted))
        self._groups.hold_all(self._ranking.slab, places, priorities, full_keys)
        rest.difference_update(places)
        for number, slot in rest:
            self.give_back(number, slot)
        return inserted

    def _insert(self, full_keys: Sequence[bytes], values: Sequence[bytes]) -> list[bool]:
        """Put these into ``pages`` where there are none; which were put."""
        items = list(zip(full_keys, values, strict=True))
        with self._transaction.cursor(self._index.pages_db) as cursor:
            _, added = cursor.putmulti(items, overwrite=False)
        if added == len(items):
            return [True] * added
        # Another writer was faster, or a key came twice. The place in a value is that of one page.
        get, pages_db = self._transaction.get, self._index.pages_db
        return [get(full_key, db=pages_db) == value for full_key, value in items]

    def adopt(self, key: bytes, place: Place, created_ms: int) -> bool:
        """For the rebuild: a free slot that holds ``key`` becomes its page; False when ``key`` is known already."""
        index, transaction = self._index, self._transaction
        full_key = self._full(key)
        if transaction.get(full_key, db=index.pages_db) is not None:
            return False
        slab = self._ranking.slab(place.slab)
        self._groups.put_to_use(slab, place.slot)
        (rank,) = self._ranking.inserted_chain(slab.slot_size, None, 0, [None])
        created = CREATED.pack(min(created_ms // 1000, _LATEST))
        value = PAGE.pack(created, place.slab, place.slot, place.length, rank.pack())
        self._put(full_key, value, slab, place.slot, rank)
        return True

    def release_dead_writers(self) -> int:
        """Free the slots that killed processes were writing; their number."""
        dead: list[tuple[bytes, bytes]] = []
        alive: dict[bytes, bool] = {}
        with self._transaction.cursor(self._index.pending_db) as cursor:
            for token, items in cursor:
                writer = bytes(token[: -NUMBER.size])
                if writer not in alive:
                    alive[writer] = writer_alive(writer.decode(), 0.0)
                if not alive[writer]:
                    dead.append((bytes(token), bytes(items)))
        freed = 0
        for token, items in dead:
            self._transaction.delete(token, db=self._index.pending_db)
            for slab, slot in PLACE.iter_unpack(items):
                self.give_back(slab, slot)
                freed += 1
        return freed

    # -- pages -----------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """The leading pages of a chain were used."""
        index, transaction = self._index, self._transaction
        before: Rank | None = None
        for depth, full_key in enumerate(index.full_keys(transaction, keys)):
            value = transaction.get(full_key, db=index.pages_db)
            if value is None:
                before = None
                continue
            _, number, slot, _, stored = PAGE.unpack(value)
            rank, slab = Rank.unpack(stored), self._ranking.slab(number)
            renewed = self._ranking.renewed(slab.slot_size, rank, depth, before)
            if renewed is not None:
                self._put(full_key, value, slab, slot, renewed)
            before = renewed or rank

    def add_uses(self, uses: Mapping[bytes, Uses]) -> None:
        """Pages of these identities were hit."""
        for digest, new in uses.items():
            known = self._index.uses(self._transaction, digest)
            added = new if known is None else known.and_(new)
            self._transaction.put(USES_NAME + digest, USES.pack(*added), db=self._index.state_db)

    def is_at(self, key: bytes, place: tuple[int, int]) -> bool:
        """Whether a page is in this (slab, slot)."""
        value = self._transaction.get(self._full(key), db=self._index.pages_db)
        return value is not None and PAGE.unpack(value)[1:3] == place

    def remove(self, key: bytes, only: tuple[int, int] | None = None) -> bool:
        """Forget a page and free its slot; with ``only``, if it is (still) in that slot. False when it was not."""
        return self._remove(self._full(key), only)

    def clear(self, digest: bytes) -> bool:
        """Put all pages of an identity out of reach at once; False when it has none."""
        full_key = self._full(digest)
        with self._transaction.cursor(self._index.pages_db) as cursor:
            if not cursor.set_range(full_key) or not bytes(cursor.key()).startswith(full_key):
                return False
        self._transaction.delete(USES_NAME + digest, db=self._index.state_db)
        generation = (GENERATION.unpack(full_key[: GENERATION.size])[0] + 1) % (1 << 16)
        self._transaction.put(b"generation" + digest, GENERATION.pack(generation), db=self._index.state_db)
        return True

    def remove_cleared(self, digest: bytes, limit: int) -> int:
        """Free the slots of up to ``limit`` pages of older generations of an identity; their number."""
        current = self._full(digest)
        removed = 0
        for generation in range(1 << 16):
            prefix = GENERATION.pack(generation) + digest
            if prefix >= current:
                break
            with self._transaction.cursor(self._index.pages_db) as cursor:
                keys: list[bytes] = []
                if cursor.set_range(prefix):
                    for full_key in cursor.iternext(keys=True, values=False):
                        if not full_key.startswith(prefix) or removed + len(keys) >= limit:
                            break
                        keys.append(bytes(full_key))
            for full_key in keys:
                self._remove(full_key, None)
            removed += len(keys)
            if removed >= limit:
                break
        return removed

    def identities(self) -> list[bytes]:
        """Digests that have pages, found or cleared."""
        return self._index.identities_in(self._transaction)

    def remove_expired(self, full_keys: Sequence[bytes], oldest: bytes) -> int:
        """Remove those of these pages that are (still) older than ``oldest``; their number."""
        removed = 0
        for full_key in full_keys:
            value = self._transaction.get(full_key, db=self._index.pages_db)
            if value is not None and value < oldest:
                removed += self._remove(full_key, None)
        return removed

    # -- slabs -----------------------------------------------------------------------------------------------------

    def slabs(self) -> list[Slab]:
        return self._ranking.slabs()

    def add_slab(self, slot_size: int, slots: int, number: int | None = None) -> Slab:
        """A new slab, all slots free. Its file must be there before the transaction ends."""
        transaction, index = self._transaction, self._index
        if number is None:
            number = self._next_slab_number()
        slab = Slab(number, slot_size, slots)
        transaction.put(SLOT_SIZE.pack(number), SLAB.pack(slot_size, slots), db=index.slabs_db)
        self._groups.add_slab(slab)
        self._ranking.add(slab)
        self._slabs_changed = True
        return slab

    def drop_slab(self, slab: Slab) -> bool:
        """Forget a slab with all its pages.

        False, and nothing changed, while one of its slots is being written, or when another process was faster.
        """
        transaction, index = self._transaction, self._index
        if slab not in self.slabs():
            return False
        with transaction.cursor(index.pending_db) as cursor:
            for _, items in cursor:
                if any(number == slab.number for number, _ in PLACE.iter_unpack(items)):
                    return False
        for _, held in list(self._groups.held_by_slab(slab)):
            for of_slot in held:
                transaction.delete(of_slot[HELD_KEY], db=index.pages_db)
        self._groups.drop_slab(slab)
        transaction.delete(SLOT_SIZE.pack(slab.number), db=index.slabs_db)
        self._ranking.drop(slab)
        self._slabs_changed = True
        return True

    def holds_any(self, slab: Slab, hashes: frozenset[bytes]) -> bool:
        """Whether a page of the slab has one of these hashes."""
        return any(
            of_slot[-PAGE_HASH_LENGTH:] in hashes for _, held in self._groups.held_by_slab(slab) for of_slot in held
        )

    def colder_slab(self, slot_size: int) -> Slab | None:
        """A slab of another slot size whose first victim would go before the first victim of this one."""
        others = {slab.slot_size for slab in self.slabs()} - {slot_size}
        own = self._groups.first_victim(slot_size) if others else None
        coldest = own.priority if own is not None else None
        chosen: Slab | None = None
        for size in others:
            victim = self._groups.first_victim(size)
            if victim is None:
                # Nothing but free slots: nobody will miss it.
                return next(slab for slab in self.slabs() if slab.slot_size == size)
            if coldest is None or victim.priority < coldest:
                coldest = victim.priority
                chosen = self._ranking.slab(victim.slab)
        return chosen

    def reserve_slab_numbers(self, below: int) -> None:
        """No new slab gets a number under ``below``: a reader may still have the file of an old one open."""
        stored = self._transaction.get(b"next slab", db=self._index.state_db)
        if stored is None or SLOT_SIZE.unpack(stored)[0] < below:
            self._transaction.put(b"next slab", SLOT_SIZE.pack(below), db=self._index.state_db)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _full(self, key: bytes) -> bytes:
        (full_key,) = self._index.full_keys(self._transaction, [key])
        return full_key

    def _chains(self, placed: Placed) -> Iterator[tuple[int, int]]:
        """Where pages that follow each other begin and end, those of one slot size."""
        known = {number: self._ranking.slab(number).slot_size for number in set(placed.slabs.tolist())}
        breaks = placed.positions[1:] != placed.positions[:-1] + 1
        if len(set(known.values())) > 1:
            sizes = np.array([known[number] for number in placed.slabs.tolist()])
            breaks |= sizes[1:] != sizes[:-1]
        borders = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(placed)]
        return itertools.pairwise(borders) if len(placed) else iter(())

    def _recall(self, slot_size: int, full_keys: Sequence[bytes]) -> list[Ghost | None]:
        """The ghosts of pages that are back; they are ghosts no more."""
        table = self._index.ghosts(self._transaction)
        if table is None:
            return [None] * len(full_keys)
        return table.recall(full_keys, self._ranking.ghost_limit(slot_size))

    def _rank_of(self, key: bytes | None) -> Rank | None:
        stored = None if key is None else self._transaction.get(self._full(key), db=self._index.pages_db)
        return None if stored is None else Rank.unpack(stored[_RANK_IN_PAGE:])

    def _remove(self, full_key: bytes, only: tuple[int, int] | None) -> bool:
        index, transaction = self._index, self._transaction
        value = transaction.get(full_key, db=index.pages_db)
        if value is None:
            return False
        _, number, slot, _, _ = PAGE.unpack(value)
        if only is not None and only != (number, slot):
            return False
        transaction.delete(full_key, db=index.pages_db)
        slab = self._ranking.slab(number)
        self._groups.hold_no_more(slab, slot)
        self._groups.give_back(slab, slot)
        return True

    def _put(self, full_key: bytes, value: bytes, slab: Slab, slot: int, rank: Rank) -> None:
        """The page, whose value was or is ``value``, has this rank."""
        self._transaction.put(full_key, value[:_RANK_IN_PAGE] + rank.pack(), db=self._index.pages_db)
        self._groups.hold(slab, slot, rank.priority, full_key)

    def _next_slab_number(self) -> int:
        stored = self._transaction.get(b"next slab", db=self._index.state_db)
        number: int = SLOT_SIZE.unpack(stored)[0] if stored else 0
        self.reserve_slab_numbers(number + 1)
        return number

"""An in-memory index of the packs that hold the pages of one identity, filled from pack names (page/pack.py).

A page takes 22 bytes: 16 in two sorted arrays, 6 in its pack; a pack takes about 400 more. Recently added pages are in
a dictionary (about 120 bytes a page) until they number an eighth of the rest.

The index knows only what names tell. A page that it finds may be gone, or be a different page with the same short hash;
the reader notices and reports that (``forget``, ``forget_pages``).
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.page.pack import Pack, Tombstone, short_numbers

_POSITION_BITS = 6
_POSITIONS = (1 << _POSITION_BITS) - 1
_FEWEST_MERGED = 4096
"""Fewest pages added before they are merged into the sorted arrays."""
_PACK_BYTES, _PAGE_BYTES = 400, 22
_MOST_TOMBSTONES = 4 * (_POSITIONS + 1)
"""Tombstones kept per pack: one for each page, and more for simultaneous removals by other processes."""
MOST_BYTES = 1 << 30
"""Memory limit of an index by these two sizes, whatever a medium lists: about 600,000 packs of 64 pages."""


class Place(NamedTuple):
    """The place of a page in a pack."""

    pack: Pack
    position: int

    @property
    def offset(self) -> int:
        """Return the offset of the page's header in the pack, in bytes."""
        return self.position * self.pack.page_bytes

    @property
    def mask(self) -> int:
        """Return the mask of a tombstone for this page."""
        return 1 << self.position


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pages of a pack."""

    pack: Pack
    first: int
    """Position of the first page in the pack."""
    members: list[int]
    """Position of each page among the places passed to ``runs``."""

    @property
    def offset(self) -> int:
        return self.first * self.pack.page_bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.members) * self.pack.page_bytes


class PackIndex:
    """The packs of one identity. Threads: any; no call waits for I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: list[Pack | None] = []
        """The packs by number; None for a forgotten pack whose pages are still in the arrays."""
        self._absent: list[int] = []
        """Masks, by pack number, of pages that lookups skip: dead pages and those passed to ``forget_pages``."""
        self._numbers: dict[str, int] = {}
        self._tombstones: dict[str, list[Tombstone]] = {}
        self._hashes: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Short hashes of the merged pages, sorted."""
        self._places: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Pack number and position in the pack, for each of the hashes."""
        self._recent: dict[int, tuple[int, ...]] = {}
        """Short hash -> places, for pages not merged yet."""
        self._stale = 0
        """Number of pages in the arrays whose packs are forgotten."""
        self._page_count = 0
        self._tombstone_count = 0

    @property
    def _is_full(self) -> bool:
        items = len(self._numbers) + self._tombstone_count
        return items * _PACK_BYTES + self._page_count * _PAGE_BYTES >= MOST_BYTES

    # -- what there is ---------------------------------------------------------------------------------------------

    def add(self, pack: Pack) -> bool:
        """Add a pack and return whether it was new. If the index is full, forget the packs known longest."""
        with self._lock:
            if pack.id in self._numbers:
                return False
            if self._is_full:
                # A batch at a time, because finding the first entry takes longer the more entries were deleted.
                for known_longest in list(islice(self._numbers, len(self._numbers) // 16 + 1)):
                    self._forget(known_longest)
            number = len(self._packs)
            self._packs.append(pack)
            self._absent.append(self._dead_mask(pack.id))
            self._numbers[pack.id] = number
            self._page_count += pack.count
            for position, found in enumerate(pack.numbers):
                self._recent[found] = (*self._recent.get(found, ()), number << _POSITION_BITS | position)
            if len(self._recent) > max(_FEWEST_MERGED, len(self._hashes) // 8):
                self._merge()
            return True

    def add_tombstone(self, tombstone: Tombstone) -> Pack | None:
        """Add a tombstone; return its pack if no page of it is alive any more. ``tombstones_of`` has its tombstones.

        A tombstone may come before its pack.
        """
        with self._lock:
            known = self._tombstones.get(tombstone.pack, [])
            if tombstone not in known and len(known) < _MOST_TOMBSTONES and not self._is_full:
                self._tombstones[tombstone.pack] = [*known, tombstone]
                self._tombstone_count += 1
            number = self._numbers.get(tombstone.pack)
            if number is None:
                return None
            self._absent[number] |= tombstone.mask
            pack = self._packs[number]
            assert pack is not None
            return pack if self._dead_mask(pack.id) & pack.all_dead == pack.all_dead else None

    def tombstones_of(self, pack_id: str) -> list[Tombstone]:
        with self._lock:
            return list(self._tombstones.get(pack_id, ()))

    def without_packs(self) -> list[list[Tombstone]]:
        """Return the tombstones of each unknown pack: directly after a complete listing, of each pack that is gone."""
        with self._lock:
            return [list(some) for pack_id, some in self._tombstones.items() if pack_id not in self._numbers]

    def forget(self, pack_id: str) -> None:
        """Forget a pack that is gone, and its tombstones."""
        with self._lock:
            self._forget(pack_id)

    def _forget(self, pack_id: str) -> None:
        self._tombstone_count -= len(self._tombstones.pop(pack_id, ()))
        number = self._numbers.pop(pack_id, None)
        if number is None:
            return
        pack = self._packs[number]
        assert pack is not None
        self._packs[number] = None
        self._page_count -= pack.count
        self._stale += pack.count
        if self._stale > max(_FEWEST_MERGED, self._page_count):
            self._merge()

    def forget_pages(self, pack_id: str, mask: int) -> None:
        """Skip these pages in lookups: they are gone, differ from their names, or are absent for this process only."""
        with self._lock:
            number = self._numbers.get(pack_id)
            if number is not None:
                self._absent[number] |= mask

    def ids(self) -> set[str]:
        """Return the ids of the known packs. Those missing from a complete listing that begins now are gone."""
        with self._lock:
            return set(self._numbers)

    @property
    def packs(self) -> list[Pack]:
        with self._lock:
            return [pack for pack in self._packs if pack is not None]

    def pack(self, pack_id: str) -> Pack | None:
        with self._lock:
            number = self._numbers.get(pack_id)
            return None if number is None else self._packs[number]

    def dead_mask(self, pack_id: str) -> int:
        """Return the mask of the pages of a pack that tombstones removed."""
        with self._lock:
            return self._dead_mask(pack_id)

    def _dead_mask(self, pack_id: str) -> int:
        return functools.reduce(operator.or_, (tombstone.mask for tombstone in self._tombstones.get(pack_id, ())), 0)

    @property
    def page_count(self) -> int:
        """Return the number of pages in all packs, including dead ones."""
        return self._page_count

    # -- looking up ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Place | None]:
        """Return the place of each page that is alive (the newest if there are several), else None."""
        wanted = short_numbers(keys)
        found: list[Place | None] = [None] * len(wanted)
        with self._lock:
            if not self._numbers:
                return found
            begins = np.searchsorted(self._hashes, wanted)
            counts = np.searchsorted(self._hashes, wanted, "right") - begins
            # One extra element, because ``begins`` may point past the end.
            first = np.append(self._places, 0)[begins]
            recent, packs, absent = self._recent, self._packs, self._absent
            members: Iterable[tuple[int, Sequence[int]]]
            if recent:
                members = enumerate(zip(wanted.tolist(), begins.tolist(), counts.tolist(), first.tolist(), strict=True))
            else:
                some = np.flatnonzero(counts)
                columns = np.stack([wanted, begins, counts, first], 1)[some].tolist()
                members = zip(some.tolist(), columns, strict=True)
            for member, (number, begin, count, place) in members:
                added = recent.get(number, ())
                if count + len(added) != 1:
                    if count or added:
                        several = [*added, *self._places[begin : begin + count].tolist()]
                        found[member] = max(self._living(several), key=_age, default=None)
                    continue
                # The usual case, so inlined without a call.
                place = place if count else added[0]
                pack, position = packs[place >> _POSITION_BITS], place & _POSITIONS
                if pack is None or absent[place >> _POSITION_BITS] >> position & 1:
                    continue
                # Equivalent to Place(pack, position) in a third of the time.
                found[member] = tuple.__new__(Place, (pack, position))
        return found

    def find_all(self, key: bytes) -> list[Place]:
        """Return every place where a page is alive, not ordered by age."""
        number = int(short_numbers([key])[0])
        with self._lock:
            begin, end = (np.searchsorted(self._hashes, number, side) for side in ("left", "right"))
            return self._living([*self._recent.get(number, ()), *self._places[begin:end].tolist()])

    def _living(self, places: Iterable[int]) -> list[Place]:
        living = []
        for place in places:
            number, position = place >> _POSITION_BITS, place & _POSITIONS
            pack = self._packs[number]
            if pack is not None and not self._absent[number] >> position & 1:
                living.append(Place(pack, position))
        return living

    # -- the arrays ------------------------------------------------------------------------------------------------

    def _merge(self) -> None:
        """Merge recent pages into the arrays and drop forgotten ones. Renumbers the packs."""
        kept = [number for number, pack in enumerate(self._packs) if pack is not None]
        new_numbers = np.full(len(self._packs), -1, np.int64)
        new_numbers[kept] = np.arange(len(kept))
        pairs = [(found, place) for found, places in self._recent.items() for place in places]
        added = np.array(pairs, np.int64).reshape(-1, 2)
        hashes = np.concatenate([self._hashes, added[:, 0]])
        places = np.concatenate([self._places, added[:, 1]])
        places = new_numbers[places >> _POSITION_BITS] << _POSITION_BITS | places & _POSITIONS
        order = np.argsort(hashes, kind="stable")
        order = order[places[order] >= 0]
        self._hashes, self._places = hashes[order], places[order]
        self._packs = [self._packs[number] for number in kept]
        self._absent = [self._absent[number] for number in kept]
        self._numbers = {pack.id: number for number, pack in enumerate(self._packs) if pack is not None}
        self._recent = {}
        self._stale = 0


def runs(places: Sequence[Place | None], most_bytes: int) -> list[Run]:
    """Group the places into runs of at most ``most_bytes`` (at least one page), ordered by pack and position."""
    known = [(place.pack.id, place.position, member) for member, place in enumerate(places) if place is not None]
    found: list[Run] = []
    for pack_id, position, member in sorted(known):
        last = found[-1] if found else None
        if (
            last is not None
            and last.pack.id == pack_id
            and last.first + len(last.members) == position
            and last.end + last.pack.page_bytes - last.offset <= most_bytes
        ):
            last.members.append(member)
        else:
            place = places[member]
            assert place is not None
            found.append(Run(place.pack, position, [member]))
    return found


def _age(place: Place) -> str:
    return place.pack.id

"""Which pages of one identity are in which packs: an index in memory, filled from names (page/pack.py).

A page takes 22 bytes: 16 in two sorted arrays, 6 in its pack; a pack takes about 400 beside them. What was added last
is in a dictionary (about 120 bytes a page) until there is an eighth as much of it as of the rest.

The index says what names say. A page that it finds may be gone, or be another one with the same short hash: who reads
it finds out, and says so (``forget``, ``forget_pages``).
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
"""Pages that are added before they are sorted in."""
_PACK_BYTES, _PAGE_BYTES = 400, 22
_MOST_TOMBSTONES = 4 * (_POSITIONS + 1)
"""Of a pack: of each page one, and some by others who removed it simultaneously."""
MOST_BYTES = 1 << 30
"""Of memory, by those two: whatever a medium lists, an index grows no further. 600,000 packs of 64 pages."""


class Place(NamedTuple):
    """Where a page is."""

    pack: Pack
    position: int

    @property
    def offset(self) -> int:
        """Of its header, in bytes from the start of the pack."""
        return self.position * self.pack.page_bytes

    @property
    def mask(self) -> int:
        """Of a tombstone for this page."""
        return 1 << self.position


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that stand one behind the other in a pack."""

    pack: Pack
    first: int
    """Position of the first one in the pack."""
    members: list[int]
    """What each one is to the caller: its position among the places that were given to ``runs``."""

    @property
    def offset(self) -> int:
        return self.first * self.pack.page_bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.members) * self.pack.page_bytes


class PackIndex:
    """The packs of one identity. Threads: any; nothing waits for I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: list[Pack | None] = []
        """By number; None: forgotten, its pages are still in the arrays."""
        self._absent: list[int] = []
        """Masks of pages that are not found, by number of the pack: the dead ones, and what ``forget_pages`` was told.
        """
        self._numbers: dict[str, int] = {}
        self._tombstones: dict[str, list[Tombstone]] = {}
        self._hashes: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Sorted."""
        self._places: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Number of the pack and position in it, for each of the hashes."""
        self._recent: dict[int, tuple[int, ...]] = {}
        """The same for what was added last."""
        self._stale = 0
        """Pages in the arrays whose packs are forgotten."""
        self._page_count = 0
        self._tombstone_count = 0

    @property
    def _is_full(self) -> bool:
        items = len(self._numbers) + self._tombstone_count
        return items * _PACK_BYTES + self._page_count * _PAGE_BYTES >= MOST_BYTES

    # -- what there is ---------------------------------------------------------------------------------------------

    def add(self, pack: Pack) -> bool:
        """Whether the pack was not known yet, and is now. Those that are known longest make room for it."""
        with self._lock:
            if pack.id in self._numbers:
                return False
            if self._is_full:
                # Some at a time: to look for the first one takes longer the more have gone.
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
        """The pack of which no page lives any more, if this was the last; its tombstones are ``tombstones_of`` it.

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
        """The tombstones of each pack that is not known: right after a whole listing, of each that is gone."""
        with self._lock:
            return [list(some) for pack_id, some in self._tombstones.items() if pack_id not in self._numbers]

    def forget(self, pack_id: str) -> None:
        """The pack is gone. Its tombstones go with it."""
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
        """They are not found any more: gone, other pages than their names say, or gone for this process alone."""
        with self._lock:
            number = self._numbers.get(pack_id)
            if number is not None:
                self._absent[number] |= mask

    def ids(self) -> set[str]:
        """Of the packs that are known: what a whole listing that begins now does not show is gone."""
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
        """The pages of a pack that tombstones took away."""
        with self._lock:
            return self._dead_mask(pack_id)

    def _dead_mask(self, pack_id: str) -> int:
        return functools.reduce(operator.or_, (tombstone.mask for tombstone in self._tombstones.get(pack_id, ())), 0)

    @property
    def page_count(self) -> int:
        """Pages of all packs, dead ones, too."""
        return self._page_count

    # -- looking up ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Place | None]:
        """Where each page is that lives: the newest one of several."""
        wanted = short_numbers(keys)
        found: list[Place | None] = [None] * len(wanted)
        with self._lock:
            if not self._numbers:
                return found
            begins = np.searchsorted(self._hashes, wanted)
            counts = np.searchsorted(self._hashes, wanted, "right") - begins
            # One more, for what would stand behind the last.
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
                # As nearly always, and so without a call.
                place = place if count else added[0]
                pack, position = packs[place >> _POSITION_BITS], place & _POSITIONS
                if pack is None or absent[place >> _POSITION_BITS] >> position & 1:
                    continue
                # Place(pack, position), in a third of the time.
                found[member] = tuple.__new__(Place, (pack, position))
        return found

    def find_all(self, key: bytes) -> list[Place]:
        """Every place of a page where it lives. Not in order of age."""
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
        """Sort in what was added, and leave out what is forgotten. Numbers of packs change."""
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
    """The places as runs of at most ``most_bytes`` (one page at least), in the order of packs and of pages in them."""
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

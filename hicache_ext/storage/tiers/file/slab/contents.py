"""Which pages the slabs hold, told again and again (``PageLister``): the index is looked at as a whole, and the header
of a page is read once, when the page is first seen in its slot.

The index says of a slot which page is there by a hash of its page hash. The page hash itself is in the header; one that
does not have that hash is of a page that has just left the slot, or is on its way, and the next look finds out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.lookup import hashes_of
from hicache_ext.storage.tiers.file.slab.rebuild import KEY, SlabFiles, read_headers
from hicache_ext.storage.tiers.file.slab.shapes import Slab, SlabFile
from hicache_ext.storage.tiers.file.slab.slot_code import Words

_PORTION = 1 << 13
"""Slots looked at, and headers read, at once: no other thread of the process waits for long."""
_FIRST_OF_PAGE_HASH = IDENTITY_LENGTH // 8
_NEVER = np.int64(-1) << 63
"""In place of a HASH: nothing is known of the slot. A page with this very HASH has its header read each time."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of the slots of one slab, a word each."""

    hashes: Words
    """HASH of the page whose header was read."""
    blocks: Words
    """Its block hash."""


class SlabContents:
    """Of one directory. 16 bytes a slot, from the first look on. For one thread at a time."""

    def __init__(self, directory: SlabFiles) -> None:
        self._directory = directory
        self._index = directory.index
        self._seen: dict[int, _Seen] = {}
        """By number of slab."""

    def block_hashes(self, digest: bytes, oldest: int) -> Words:
        """As ``PageLister``; pages written before ``oldest`` (wall-clock milliseconds) do not count. Raises OSError."""
        slabs = self._index.view().slabs
        self._seen = {number: seen for number, seen in self._seen.items() if number in slabs}
        found = [np.empty(0, np.int64)]
        identity = int(self._index.number_of(digest)[0])
        for slab in slabs.values():
            portions = range(0, slab.slots, _PORTION)
            found += [self._blocks(slab, at, min(at + _PORTION, slab.slots), identity, oldest) for at in portions]
        return np.concatenate(found)

    def _blocks(self, slab: Slab, begin: int, end: int, identity: int, oldest: int) -> Words:
        memory = self._index.memory
        rows = memory.rows[slab.first_row + begin : slab.first_row + end]
        # What a slot holds before that it holds it: a page becomes one when all else is written.
        hashes, states = rows[:, slot_code.HASH].copy(), rows[:, slot_code.STATE].copy()
        pages = (states & slot_code.STATES == slot_code.PAGE) & (states >> slot_code.NUMBER_SHIFT == identity)
        if not pages.any():
            return np.empty(0, np.int64)
        pages &= slot_code.is_current(memory.identities, states) & (rows[:, slot_code.CREATED] >= oldest)
        seen = self._seen.get(slab.number)
        if seen is None or len(seen.hashes) != slab.slots:
            # The table may call another one by its number.
            seen = self._seen[slab.number] = _Seen(np.full(slab.slots, _NEVER), np.zeros(slab.slots, np.int64))
        new = np.flatnonzero(pages & (seen.hashes[begin:end] != hashes))
        if len(new):
            self._read_headers(slab, begin + new, hashes[new], seen)
        blocks: Words = seen.blocks[begin:end][pages & (seen.hashes[begin:end] == hashes)]
        return blocks

    def _read_headers(self, slab: Slab, slots: Words, hashes: Words, seen: _Seen) -> None:
        """Of these slots, in order; ``hashes``: of the pages that the index has there."""
        first, last = int(slots[0]), int(slots[-1])
        try:
            with self._directory.opened(slab, SlabFile.HEADERS) as fd:
                headers = read_headers(fd, first, last - first + 1)
        except FileNotFoundError:
            # The slab was dropped meanwhile.
            return
        keys = np.ascontiguousarray(headers[slots - first][:, KEY])
        right = hashes_of(keys) == hashes
        seen.hashes[slots[right]] = hashes[right]
        seen.blocks[slots[right]] = keys[right, _FIRST_OF_PAGE_HASH].byteswap()

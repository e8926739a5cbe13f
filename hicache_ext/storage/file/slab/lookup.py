"""Pages looked up in the mapped words of an index, by compiled code or, without it, by numpy for all pages at once.

The lock is not needed (slot_code.py says what that means). ``generations``: one for all pages, or one each.
"""

from __future__ import annotations

import numpy as np

from hicache_ext.storage.file.slab import slot_code
from hicache_ext.storage.file.slab.jit import is_compiled
from hicache_ext.storage.file.slab.mapped import Words
from hicache_ext.storage.file.slab.slot_code import KEY_WORDS, LOW, NUMBER, OBJECT, PAGE, PLACE, STATE, TAG, USED


def find(records: Words, buckets: Words, keys: Words, generations: Words) -> Words:
    """The row of each page, -1 for nowhere."""
    if not is_compiled(slot_code.find):
        return _find(records, buckets, keys, generations)
    rows = np.empty(len(keys), np.int64)
    slot_code.find(records, buckets, keys, generations, rows, 0)
    return rows


def count_leading(records: Words, buckets: Words, keys: Words, generations: Words) -> int:
    """How many pages are there before the first one that is not."""
    if is_compiled(slot_code.find):
        return int(slot_code.find(records, buckets, keys, generations, np.empty(len(keys), np.int64), 1))
    missing = np.flatnonzero(_find(records, buckets, keys, generations) < 0)
    return int(missing[0]) if len(missing) else len(keys)


def locate(
    records: Words, buckets: Words, keys: Words, generations: Words, oldest: int, slabs: Words, fresh: Words
) -> Words:
    """The pages that are there and not written before ``oldest``: slabs, slots, object lengths, positions in ``keys``
    and how long after ``fresh[n]``, n the row in ``slabs`` of its slab, it was last used, a row each."""
    if is_compiled(slot_code.locate):
        placed = np.empty((5, len(keys)), np.int64)
        count = slot_code.locate(records, buckets, keys, generations, oldest, slabs, fresh, placed)
        return placed if count == len(keys) else placed[:, :count]
    rows = _find(records, buckets, keys, generations)
    positions = np.flatnonzero(rows >= 0)
    found = records[rows[positions]]
    young = found[:, OBJECT] >> 32 >= oldest
    positions, found = positions[young], found[young]
    objects, places = found[:, OBJECT], found[:, PLACE]
    of_slab = np.searchsorted(slabs[:, NUMBER], places >> 32)
    known = np.append(slabs[:, NUMBER], -1)[of_slab] == places >> 32
    after = np.where(known, found[:, USED] - np.append(fresh, 0)[of_slab], 0)
    return np.stack([places >> 32, places & LOW, objects & LOW, positions, after])


def _find(records: Words, buckets: Words, keys: Words, generations: Words) -> Words:
    """``slot_code.find``, a step of all pages at a time."""
    rows = np.full(len(keys), -1, np.int64)
    hashes = np.bitwise_xor.reduce(keys, axis=1) & np.int64((1 << 63) - 1)
    for shift in (32, 16, 8):
        hashes ^= hashes >> shift
    left = np.arange(len(keys))
    mask = len(buckets) - 1
    wanted = np.broadcast_to(generations, len(keys))
    for step in range(len(buckets)):
        if not len(left):
            break
        entries = buckets[hashes[left] + step & mask]
        left, entries = left[entries != 0], entries[entries != 0]
        candidates = (entries & LOW) - 1
        same = (entries >> 32 == hashes[left] & TAG) & (candidates >= 0) & (candidates < len(records))
        asked, candidates = left[same], candidates[same]
        found = records[candidates]
        same_page = (found[:, :KEY_WORDS] == keys[asked]).all(axis=1)
        same_page &= found[:, STATE] & 0xFF == PAGE
        same_page &= found[:, STATE] >> 16 == wanted[asked]
        rows[asked[same_page]] = candidates[same_page]
        left = left[rows[left] < 0]
    return rows

"""Pages looked up in the mapped words of an index, by compiled code or, without it, by numpy for all pages at once.

The lock is not needed (slot_code.py says what that means). ``generations``: one for all pages, or one each.
"""

from __future__ import annotations

import numpy as np

from hicache_ext.runtime.jit import is_compiled
from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.mapped import Words
from hicache_ext.storage.tiers.file.slab.slot_code import (
    IN_ORDER,
    KEY_WORDS,
    LENGTH,
    LOW,
    NUMBER,
    OBJECT,
    PAGE,
    PLACE,
    SEVERAL,
    SLAB,
    STALE,
    STATE,
    TAG,
    USED,
)

_FIRST_PORTION = 64
_PORTION = 4096
"""Keys of a chain that numpy looks up at once: a chain that ends early costs no more than that."""


def find(records: Words, buckets: Words, keys: Words, generations: Words, oldest: int) -> Words:
    """The row of each page, -1 for nowhere, or written before ``oldest``."""
    if not is_compiled(slot_code.find):
        return _find(records, buckets, keys, generations, oldest)
    rows = np.empty(len(keys), np.int64)
    slot_code.find(records, buckets, keys, generations, oldest, rows, 0)
    return rows


def count_leading(records: Words, buckets: Words, keys: Words, generations: Words, oldest: int) -> int:
    """How many pages are there, and not written before ``oldest``, before the first one that is not."""
    if is_compiled(slot_code.find):
        return int(slot_code.find(records, buckets, keys, generations, oldest, np.empty(len(keys), np.int64), 1))
    done, portion = 0, _FIRST_PORTION
    while done < len(keys):
        some = slice(done, done + portion)
        rows = _find(records, buckets, keys[some], generations[some] if len(generations) > 1 else generations, oldest)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            return done + int(missing[0])
        done += len(rows)
        portion = _PORTION
    return len(keys)


def locate(
    records: Words, buckets: Words, keys: Words, generations: Words, oldest: int, slabs: Words, fresh: Words
) -> tuple[Words, Words]:
    """The pages that are there and not written before ``oldest``: slabs, slots, payload lengths and positions in
    ``keys``, a row each; and what slot_code.py says of all of them (STALE). ``fresh[n]`` is of the slab in row ``n``:
    what was last used before is stale."""
    facts = np.empty(4, np.int64)
    if is_compiled(slot_code.locate):
        located = np.empty((4, len(keys)), np.int64)
        count = slot_code.locate(records, buckets, keys, generations, oldest, slabs, fresh, located, facts)
        return located if count == len(keys) else located[:, :count], facts
    rows = _find(records, buckets, keys, generations, oldest)
    positions = np.flatnonzero(rows >= 0)
    found = records[rows[positions]]
    objects, places = found[:, OBJECT] & LOW, found[:, PLACE]
    of_slab = np.searchsorted(slabs[:, NUMBER], places >> 32)
    known = np.append(slabs[:, NUMBER], -1)[of_slab] == places >> 32
    facts[STALE] = (known & (found[:, USED] < np.append(fresh, 0)[of_slab])).any()
    facts[IN_ORDER] = (places[1:] > places[:-1]).all() and (places[:1] > -1).all()
    facts[LENGTH] = _only(objects)
    facts[SLAB] = _only(places >> 32)
    return np.stack([places >> 32, places & LOW, objects, positions]), facts


def _only(values: Words) -> int:
    return int(values[0]) if len(values) and (values == values[0]).all() else SEVERAL


def _find(records: Words, buckets: Words, keys: Words, generations: Words, oldest: int) -> Words:
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
    there = np.flatnonzero(rows >= 0)
    rows[there[records[rows[there], OBJECT] >> 32 < oldest]] = -1
    return rows

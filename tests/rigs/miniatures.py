"""What ``learn`` of native/table.c does, in Python: too slow for a server, and the truth for its test."""

from __future__ import annotations

import numpy as np

from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.eviction import reuse_distance
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory
from hicache_ext.storage.tiers.file.slab.index_words import (
    CANDIDATES,
    DEPTH_BITS,
    DISTANCE_SUM,
    EVENTS,
    EXPECTED,
    HASH_OF_EVENT,
    HELD,
    HITS_BITS,
    LATELY,
    LEARNED,
    MINIATURE_HITS,
    MOMENT_OF_EVENT,
    MOST_DEPTH,
    MOST_HITS,
    POLICY,
    REUSES,
    SAMPLE,
    SCALES,
    SEEN,
    SERVED,
    SETS_USED,
    USES,
    WAYS,
    Words,
    scrambled,
)
from tests.rigs.ranks import RENEWAL_SHIFT, priority_of

MINIATURES = CANDIDATES + len(SCALES)

KEY, MOMENT = range(2)
"""Words of an entry: HASH of the page; the clock when its chain was used last << DEPTH_BITS | its place in the chain;
the clock at its last counted use << COUNTED_SHIFT | uses, up to MOST_HITS, << USES_SHIFT | for each miniature ABSENT,
NEW or KEPT."""
ABSENT, NEW, KEPT = 0, 1, 3
USES_SHIFT = 2 * MINIATURES
COUNTED_SHIFT = USES_SHIFT + HITS_BITS

PAGES, HITS = 0, MINIATURE_HITS
"""Words of ``small``, one for each miniature: pages held; all hits."""
SAMPLED, COUNTED = range(30, 32)
"""What the table was made for, besides SETS_USED; up to which use of all pages EXPECTED counts."""
RUN, PLACE, BEGAN = range(40, 43)
"""Whether each miniature held all pages of this chain so far, a bit each; the place of the last one in it; the clock at
its first one."""

_MOST_USES = 1 << 19
"""So many uses, and their hits are halved: what was long ago counts less and less."""
_LOW = (1 << 32) - 1


def is_sampled(hashed: int, sampled: int) -> bool:
    """Whether the miniatures see a page with this HASH, where they see so many of SAMPLE + 1."""
    return (hashed >> 24) & SAMPLE < sampled


def _halves(miniature: int) -> int:
    """The capacity of a miniature in halves of the tier's."""
    if miniature < CANDIDATES:
        return 2
    of_scale = miniature - CANDIDATES
    return 1 if of_scale == 0 else 4 if of_scale == 1 else 8


def _policy_of_now(header: Words) -> int:
    policy = header[POLICY]
    return int(policy if 0 <= policy < CANDIDATES else 0)


def _policy_of(miniature: int, header: Words) -> int:
    return int(miniature if miniature < CANDIDATES else _policy_of_now(header))


def _bits(held: int, miniature: int) -> int:
    return (held >> (2 * miniature)) & 3


def _slack_of(slots: int) -> int:
    """A miniature holds up to so many more than its slots, and is then cut to so many less: on average it is full."""
    return slots >> (4 if slots > 512 else 6)


def _slots_of(miniature: int, capacity: int, sampled: int) -> int:
    return max(1, (capacity * sampled * _halves(miniature) // 2) >> 20)


def _made_for(small: Words, entries: Words, sets: int, sampled: int) -> None:
    """Make the table fit another capacity: pages that are no longer in the sample go, all where its sets are others."""
    if small[SETS_USED] == sets and small[SAMPLED] == sampled:
        return
    for of_set in range(entries.shape[1]):
        for way in range(WAYS):
            if small[SETS_USED] != sets or not is_sampled(entries[KEY, of_set, way], sampled):
                entries[KEY, of_set, way] = entries[MOMENT, of_set, way] = entries[HELD, of_set, way] = 0
    small[SETS_USED], small[SAMPLED] = sets, sampled
    for miniature in range(MINIATURES):
        small[PAGES + miniature] = 0
        for of_set in range(sets):
            for way in range(WAYS):
                small[PAGES + miniature] += _bits(entries[HELD, of_set, way], miniature) != ABSENT


def _entry_of(small: Words, entries: Words, of_set: int, hashed: int) -> int:
    """The way of a page in its set; where it is not there, that of the page used longest ago which no miniature holds,
    or which any holds, forgotten."""
    chosen, oldest = 0, np.int64(eviction.MAX_PRIORITY)
    for way in range(WAYS):
        if entries[KEY, of_set, way] == hashed:
            return way
        age = entries[MOMENT, of_set, way]
        if entries[HELD, of_set, way] & ((1 << USES_SHIFT) - 1):
            age |= 1 << 62
        if age < oldest:
            chosen, oldest = way, age
    for miniature in range(MINIATURES):
        small[PAGES + miniature] -= _bits(entries[HELD, of_set, chosen], miniature) != ABSENT
    entries[KEY, of_set, chosen], entries[MOMENT, of_set, chosen] = hashed, -1
    entries[HELD, of_set, chosen] = 0
    return chosen


def _cut(header: Words, small: Words, entries: Words, sets: int, miniature: int, slots: int, capacity: int) -> None:
    """Have a miniature hold a little less than it has slots for: those with the lowest priorities go."""
    bit, policy = 2 * miniature, _policy_of(miniature, header)
    of_tier = max(1, capacity * _halves(miniature) // 2)
    distance = reuse_distance(of_tier, header[DISTANCE_SUM], header[REUSES])
    ranks, places, count = np.empty(sets * WAYS, np.int64), np.empty(sets * WAYS, np.int64), 0
    for of_set in range(sets):
        for way in range(WAYS):
            held = entries[HELD, of_set, way]
            if _bits(held, miniature) != ABSENT:
                moment, hits = entries[MOMENT, of_set, way], (held >> USES_SHIFT) & MOST_HITS
                clock, is_new = moment >> DEPTH_BITS, _bits(held, miniature) == NEW
                rank = priority_of(policy, of_tier, clock, distance, hits, is_new, moment & MOST_DEPTH)
                ranks[count] = rank
                places[count] = of_set * WAYS + way
                count += 1
    wanted = max(1, slots - _slack_of(slots))
    excess = count - wanted
    if excess > 0:
        threshold = np.sort(ranks[:count])[excess - 1]
        for of in range(count):
            if ranks[of] <= threshold and excess > 0:
                entries[HELD, places[of] // WAYS, places[of] % WAYS] &= ~(3 << bit)
                excess -= 1
        count = wanted
    small[PAGES + miniature] = count


def learn(memory: IndexMemory, capacity: int, sampled: int, most: int) -> int:
    """``Table.learn``."""
    header, small, entries, events = memory.header, memory.small, memory.entries, memory.events
    sets = 4
    while sets < len(entries[KEY]) and sets < capacity:
        sets *= 2
    _made_for(small, entries, sets, sampled)
    small[EXPECTED] += max(0, header[SEEN] - small[COUNTED]) * sampled
    small[COUNTED] = header[SEEN]
    done = min(most, header[EVENTS] - header[LEARNED])
    distance = reuse_distance(capacity, header[DISTANCE_SUM], header[REUSES])
    window = min(capacity, distance) >> RENEWAL_SHIFT
    for _ in range(done):
        at = header[LEARNED] % len(events)
        header[LEARNED] += 1
        hashed, moment = events[at, HASH_OF_EVENT], events[at, MOMENT_OF_EVENT]
        of_set = (scrambled(hashed) & _LOW) % sets
        way = _entry_of(small, entries, of_set, hashed)
        held, clock, place = entries[HELD, of_set, way], moment >> DEPTH_BITS, moment & MOST_DEPTH
        if place == 0 or place <= small[PLACE]:
            small[BEGAN] = clock
            # The tier lacks a page before it.
            small[RUN] = -1 if place == 0 else 0
        if sampled <= SAMPLE:
            small[RUN] = -1
        small[PLACE] = place
        entries[MOMENT, of_set, way] = min(clock, small[BEGAN]) << DEPTH_BITS | place
        counted, uses, counts = clock, (held >> USES_SHIFT) & MOST_HITS, False
        if held != 0:
            counts = clock - (held >> COUNTED_SHIFT) > window
            uses = min(uses + counts, MOST_HITS)
            counted = clock if counts else held >> COUNTED_SHIFT
        now_held = counted << COUNTED_SHIFT | uses << USES_SHIFT
        for miniature in range(MINIATURES):
            bits = _bits(held, miniature)
            if bits == ABSENT:
                small[RUN] &= ~(1 << miniature)
                small[PAGES + miniature] += 1
                bits = NEW
            elif counts:
                bits = KEPT
            hit = (small[RUN] >> miniature) & 1
            small[HITS + miniature] += hit
            if miniature < CANDIDATES:
                small[LATELY + miniature] += hit
            now_held |= bits << (2 * miniature)
        small[USES] += 1
        small[SERVED] += (small[RUN] >> _policy_of_now(header)) & 1
        entries[HELD, of_set, way] = now_held
        for miniature in range(MINIATURES):
            slots = _slots_of(miniature, capacity, sampled)
            if small[PAGES + miniature] > slots + _slack_of(slots):
                _cut(header, small, entries, sets, miniature, slots, capacity)
    if small[USES] >= _MOST_USES:
        for word in range(HITS, EXPECTED + 1):
            small[word] //= 2
    return int(done)

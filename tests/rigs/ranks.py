"""The ranks of native/table.c in Python: the truth for its tests. tiers/file/eviction.py says what they are for."""

from __future__ import annotations

from typing import Final

from hicache_ext.storage.tiers.file.eviction import KEEP_FIRST, LEARNED_DISTANCE, MAX_PRIORITY, ORIGIN, TICK

MAX_HITS: Final = 7
"""More uses count as this many: log2(8) = 3 reuse distances is the longest protection."""
_MAX_DEPTH: Final = 64
"""Depth beyond which a page is worth no less."""
_DEPTH_WEIGHT: Final = 2 * _MAX_DEPTH
"""At 64 pages half of min(D, capacity) is subtracted."""
_LEARNING_SHIFT: Final = 11
"""D is a mean over about the last 2**11 reuses: the pages of one request return together, and a shorter memory would
follow single requests."""
_MAX_DISTANCE_IN_CAPACITIES: Final = 64
"""Bounds D, and a multiple of it: a page that was hot is gone after 3 * 64 capacities at the latest."""
_LONGEST_CREDIT: Final = 4
"""The most reuse distances of credit for the first hit."""
RENEWAL_SHIFT: Final = 4
"""A use within 1/16 of min(D, capacity) after the last counted one is no hit and no reuse, but ranks the page anew."""
_KEPT_FOR: Final = 2
"""``KEEP_FIRST`` ranks what comes below all used in so many reuse distances."""
_LOG2: Final = (0, 256, 406, 512, 594, 662, 719, 768)
"""round(256 * log2(1 + hits))."""

MAX_REUSES: Final = (1 << 32) - 1


def learned(distance_sum: int, reuses: int, distance: int) -> tuple[int, int]:
    """The distances and reuses after one more: a plain mean first, then a moving one."""
    forgotten = distance_sum >> _LEARNING_SHIFT if reuses >= 1 << _LEARNING_SHIFT else 0
    return distance_sum - forgotten + distance, min(reuses + 1, MAX_REUSES)


def priority_of(policy: int, capacity: int, inserts: int, distance: int, hits: int, is_new: bool, depth: int) -> int:
    """The priority by a candidate (``POLICIES``) of a page written (``is_new``) or used at ``inserts``, not bounded by
    the page before it; ``distance`` is D."""
    credit, tail = 0, depth
    if policy == LEARNED_DISTANCE:
        # In 256ths.
        times = min(_LONGEST_CREDIT * 256, max(256, 64 * distance // capacity))
        credit = min(distance * times // 256, _MAX_DISTANCE_IN_CAPACITIES * capacity) * _LOG2[hits] // _LOG2[1]
        tail += TICK // _DEPTH_WEIGHT * min(distance, capacity) * min(depth, _MAX_DEPTH)
    elif policy == KEEP_FIRST and is_new:
        credit = -_KEPT_FOR * max(distance, capacity)
    return min(ORIGIN + TICK * (inserts + credit) - tail, MAX_PRIORITY)

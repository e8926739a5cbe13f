"""Which page is evicted first: the one with the lowest priority, computed at insert and at use from a small record.

No I/O, no tables. A page of a prefix cache is useful only while all pages before it are there. Its priority is a moment
on a clock that counts inserted pages: until then the page is worth its slot. There are three ways to say that moment
(``POLICIES``), none of which is best everywhere; miniatures.py tells which one the tier follows:

``LAST_USE``, the first one: now, deeper pages of a chain first. LRU that frees the tails of chains first.
``LEARNED_DISTANCE``: now + C * D * log2(1 + hits) - min(D, capacity) * min(depth, 64) / 128
``KEEP_FIRST``: now, but 2 * max(D, capacity) earlier for a page that was written since all that was there counted as
used (every four capacities, and when the tier begins to follow this policy). So what comes takes the place of what came
just before, and of a loop that is larger than the tier a part stays until it comes round.

``hits``      uses after the first one, including those before an earlier eviction (the ghost list remembers them).
``D``         the tier's mean reuse distance in inserted pages; measured (``reuse_distance``).
``C``         D / (4 * capacity), at least 1 and at most 4: where most pages return long after they are evicted, only
              those with hits are worth a slot.
``depth``     position in the request's chain: prompts that diverge share their heads, not their tails.

Sources, figures, and what was tried: docs/decisions/eviction.md.

A page ranks below the page before it in its chain, which keeps heads longer than their tails whatever is used first. A
new page may rank below everything cached: it then takes the slot of the page written before it, or goes next.

Integers only: all processes agree to the bit. One policy and one clock belong to one directory, whatever the sizes
of its slots: the pages of a prefix age together (docs/decisions/pools-share-a-fate.md).

native/table.c ranks pages with this, inside one write transaction, the pages of a request in chain order: a page that
is written, with its ghost if it has one, which is removed; and the leading run of present pages that are used. It
evicts the page with the lowest priority and keeps a ghost of it, at most ``ghost_limit`` of them, the oldest forgotten
first. benchmarks/eviction_policy.py has the same page by page, to read and to compare with.

The page before counts with its priority after its own step; where it is known and missing nobody can ask for the page,
which ranks lowest. There is none for a chain's first page, or when SGLang passed no prefix keys. Depth then counts from
the start of the batch: the pages of a later batch rank like heads, and a tail can outlive its head until the head is
inserted again (replayed: at most 0.0006 less).
"""

from __future__ import annotations

from typing import Final

TICK: Final = 1 << 10
"""Priorities from one inserted page to the next: the pages of one request fit in between."""
ORIGIN: Final = 1 << 50
"""Priority of the clock's start: leaves room below for depth."""
MAX_PRIORITY: Final = (1 << 63) - 1
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
_SMALLEST_GHOST_LIST: Final = 1 << 15
_LARGEST_GHOST_LIST: Final = 1 << 20
LAST_USE, LEARNED_DISTANCE, KEEP_FIRST = range(3)
POLICIES: Final = ("last-use", "learned-distance", "keep-first")
"""The candidates, by number."""
_KEPT_FOR: Final = 2
"""``KEEP_FIRST`` ranks what comes below all used in so many reuse distances."""
_LOG2: Final = (0, 256, 406, 512, 594, 662, 719, 768)
"""round(256 * log2(1 + hits))."""

MAX_REUSES: Final = (1 << 32) - 1


def reuse_distance(capacity: int, distance_sum: int, reuses: int) -> int:
    """D: the mean distance measured, one capacity before anything was, never more than 64 capacities.

    ``distance_sum``: that mean times the number of reuses it is a mean over, at most 2**11.

    native/ranks.h has this and the two functions that follow, too."""
    if reuses == 0:
        return capacity
    mean = distance_sum // min(reuses, 1 << _LEARNING_SHIFT)
    return min(mean, _MAX_DISTANCE_IN_CAPACITIES * capacity)


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


def ghost_limit(capacity: int) -> int:
    """Ghosts worth keeping: reuse distances do not shrink with the cache, so a small cache needs many of them."""
    return min(max(capacity, _SMALLEST_GHOST_LIST), _LARGEST_GHOST_LIST)

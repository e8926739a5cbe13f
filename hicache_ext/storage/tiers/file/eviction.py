"""Which page is evicted first: the one with the lowest priority, computed at insert and at use by native/table.c.

A page of a prefix cache is useful only while all pages before it are there. Its priority is a moment on a clock that
counts inserted pages: until then the page is worth its slot. There are three ways to say that moment (``POLICIES``),
none of which is best everywhere; miniatures tell which one the tier follows:

``LAST_USE``, the first one: now, deeper pages of a chain first. LRU that frees the tails of chains first.
``LEARNED_DISTANCE``: now + C * D * log2(1 + hits) - min(D, capacity) * min(depth, 64) / 128
``KEEP_FIRST``: now, but 2 * max(D, capacity) earlier for a page that was written since all that was there counted as
used (every four capacities, and when the tier begins to follow this policy). So what comes takes the place of what came
just before, and of a loop that is larger than the tier a part stays until it comes round.

``hits``      uses after the first one, including those before an earlier eviction (the ghost list remembers them).
``D``         the tier's mean reuse distance in inserted pages, over about the last 2**11 reuses: the pages of one
              request return together, and a shorter memory would follow single requests.
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

MAX_PRIORITY: Final = (1 << 63) - 1
TICK: Final = 1 << 10
"""Priorities from one inserted page to the next: the pages of one request fit in between."""
ORIGIN: Final = 1 << 50
"""Priority of the clock's start: leaves room below for depth."""
LAST_USE, LEARNED_DISTANCE, KEEP_FIRST = range(3)
POLICIES: Final = ("last-use", "learned-distance", "keep-first")
"""The candidates, by number."""
_SMALLEST_GHOST_LIST: Final = 1 << 15
_LARGEST_GHOST_LIST: Final = 1 << 20
_MOST_GHOSTS_PER_SLOT: Final = 32


def ghost_limit(capacity: int) -> int:
    """Ghosts worth keeping: reuse distances do not shrink with the cache, so a small cache needs many of them.
    Of a very small one, what returned so late says less of what it can hold than what it has."""
    return min(max(capacity, _SMALLEST_GHOST_LIST), _LARGEST_GHOST_LIST, _MOST_GHOSTS_PER_SLOT * capacity)


def reuse_distance(capacity: int, distance_sum: int, reuses: int) -> int:
    """D: the mean distance measured, one capacity before anything was, never more than 64 capacities.

    ``distance_sum``: that mean times the number of reuses it is a mean over, at most 2**11."""
    return min(distance_sum // min(reuses, 1 << 11), 64 * capacity) if reuses > 0 else capacity

"""The eviction policies: the page with the lowest priority, computed at insert and use by native/table.c, goes first.

A page of a prefix cache is useful only while all pages before it are there. Its priority is a moment on a clock that
counts inserted pages: until then the page is worth its slot. Three policies compute that moment (``POLICIES``), none of
which is best everywhere; miniatures decide which one the tier follows:

``LAST_USE``, the initial one: now, slightly less for deeper pages of a chain. LRU that frees the tails of chains first.
``LEARNED_DISTANCE``: now + C * D * log2(1 + hits) - min(D, capacity) * min(depth, 64) / 128
``KEEP_FIRST``: now, but 2 * max(D, capacity) earlier for a page written since all pages present last counted as used
(every four capacities, and when the tier starts to follow this policy). So new pages replace the newest ones, and part
of a loop that is larger than the tier stays until the loop comes round.

``hits``      uses after the first one, including those before an earlier eviction (the ghost list remembers them).
``D``         the tier's mean reuse distance in inserted pages, over about the last 2**11 reuses: the pages of one
              request return together, and a shorter memory would follow single requests.
``C``         D / (4 * capacity), at least 1 and at most 4: if most pages return long after their eviction, only those
              with hits are worth a slot.
``depth``     position in the request's chain: prompts that diverge share their heads, not their tails.

Sources, figures, and what was tried: docs/decisions/eviction.md.

A page ranks below the page before it in its chain, so heads stay longer than their tails whatever is used first. A new
page may rank below everything cached: it then takes the slot of the page written before it, or is evicted next.

Only integers are used, so all processes agree to the bit. A directory has one policy and one clock, whatever the sizes
of its slots: the pages of a prefix age together (docs/decisions/pools-share-a-fate.md).

native/table.c ranks the pages of a request in chain order, inside one write transaction: pages that are written, with
their ghosts, which are then removed, and the leading run of present pages that are used. It evicts the page with the
lowest priority and keeps a ghost of it, at most ``ghost_limit`` ghosts, forgetting the oldest first.
benchmarks/eviction_policy.py does the same page by page, to read and to compare with.

The previous page counts with its priority after its own step; if it is known and missing, nobody can request the page,
which ranks lowest. A chain's first page has no previous page, nor has a batch for which SGLang passed no prefix keys.
Depth then counts from the start of the batch: the pages of a later batch rank like heads, and a tail can outlive its
head until the head is inserted again (replayed: at most 0.0006 less).
"""

from __future__ import annotations

from typing import Final

MAX_PRIORITY: Final = (1 << 63) - 1
TICK: Final = 1 << 10
"""Priorities between one inserted page and the next: the pages of one request fit in between."""
ORIGIN: Final = 1 << 50
"""Priority at the clock's start, which leaves room below for depth."""
LAST_USE, LEARNED_DISTANCE, KEEP_FIRST = range(3)
POLICIES: Final = ("last-use", "learned-distance", "keep-first")
"""Names of the candidates, by number."""
_SMALLEST_GHOST_LIST: Final = 1 << 15
_LARGEST_GHOST_LIST: Final = 1 << 20
_MOST_GHOSTS_PER_SLOT: Final = 32


def ghost_limit(capacity: int) -> int:
    """Return the ghosts worth keeping: reuse distances do not shrink with the cache, so a small cache needs many. A
    very small one gets fewer: such late returns say less about what it can hold than its own pages do."""
    return min(max(capacity, _SMALLEST_GHOST_LIST), _LARGEST_GHOST_LIST, _MOST_GHOSTS_PER_SLOT * capacity)


def reuse_distance(capacity: int, distance_sum: int, reuses: int) -> int:
    """Return D: the measured mean distance, at most 64 capacities; one capacity before anything was measured.

    ``distance_sum`` is that mean times the number of reuses behind it, at most 2**11."""
    return min(distance_sum // min(reuses, 1 << 11), 64 * capacity) if reuses > 0 else capacity

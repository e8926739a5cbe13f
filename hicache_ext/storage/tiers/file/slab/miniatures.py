"""Miniatures: caches of a sample of the pages, one for each candidate of eviction.py, and which of them serves most.

A page is in the sample by its hash, whatever its chain (``is_sampled`` of table.c), and a miniature has the same share
of the slots, so it serves about the share of uses that a tier under this policy would (Waldspurger et al., Cache
Modeling and Optimization using Miniature Simulations, 2017). A page is served only with all pages before it. Where all
pages are in the sample the miniatures count so, too; in a part of them each page counts by itself, which makes no
difference there: pages before it are used whenever it is, so they outrank it. docs/decisions/eviction.md says what was
measured.

Uses are noted in a ring (``Table.touch``, ``publish``) and looked at under the change lock, by whoever writes
(``learn`` of native/table.c).

``small``: counts and scores. Its miniatures are, by number, the candidates at the tier's capacity, and then the policy
of now at other capacities (``SCALES``): the curve.
"""

from __future__ import annotations

from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.slab.index_words import HITS_BITS, SAMPLE

CANDIDATES = len(eviction.POLICIES)
SCALES = (1, 4, 8)
"""Halves of the tier's capacity: of the miniatures behind the candidates."""
MINIATURES = CANDIDATES + len(SCALES)
SAMPLED_SLOTS = 1 << 12
"""Slots of a miniature at the tier's capacity, at most."""

KEY, MOMENT, HELD = range(3)
"""Words of an entry: HASH of the page; the clock when its chain was used last << DEPTH_BITS | its place in the chain;
the clock at its last counted use << COUNTED_SHIFT | uses, up to MOST_HITS, << USES_SHIFT | for each miniature ABSENT,
NEW or KEPT."""
ABSENT, NEW, KEPT = 0, 1, 3
USES_SHIFT = 2 * MINIATURES
COUNTED_SHIFT = USES_SHIFT + HITS_BITS
ENTRY_WORDS = 3

PAGES, SCORES, HITS = 0, 8, 16
"""Words of ``small``, one for each miniature: pages held; hits of late, in 65,536ths; all hits."""
USES, SERVED, EXPECTED, NEXT, SWITCHES, SETS_USED, SAMPLED, COUNTED = range(24, 32)
"""All uses seen; those that the candidate followed at that time had; the uses of all pages that fall to the sample,
times SAMPLE + 1; the clock at which candidates are compared next; how often another one was chosen; what the table was
made for; up to which use of all pages EXPECTED counts."""
LATELY = 32
"""Of each candidate the hits since the last comparison."""
RUN, PLACE, BEGAN, NEXT_STOCK = range(40, 44)
"""Whether each miniature held all pages of this chain so far, a bit each; the place of the last one in it; the clock at
its first one; the clock at which all that is there counts as kept (``eviction.KEEP_FIRST``)."""
LAST_SCORES = 48
"""Of each candidate, like SCORES: hits of the last moments alone."""
NOISE, LAST_NOISE = 64, 96
"""Of each two candidates: squares of how many hits one had more between two comparisons, added up like SCORES and
like LAST_SCORES."""
SMALL_WORDS = 128


def sampled_of(capacity: int) -> int:
    """How many of SAMPLE + 1 pages the miniatures of a tier with so many slots see."""
    return min(SAMPLE + 1, max(1, SAMPLED_SLOTS * (SAMPLE + 1) // capacity))

"""The file tier's learned-distance policy (tiers/file/eviction.py) page by page, with records that are objects.

The tier's own code (native/table.c) does the same in arrays; tests compare the two. A request goes through its pages
in chain order: ``renewed`` for a present page, None where nothing is to be written; ``inserted`` for a page that is
written, whose ghost is then removed. The victim is the page with the lowest ``Rank.priority``. ``before`` is the rank
of the preceding page as it is after its own step.
"""

from __future__ import annotations

from typing import NamedTuple

from hicache_ext.storage.tiers.file.eviction import LEARNED_DISTANCE, reuse_distance
from tests.rigs.ranks import MAX_HITS, RENEWAL_SHIFT, learned, priority_of


class Rank(NamedTuple):
    """The record of a cached page; the lowest ``priority`` is evicted first."""

    priority: int
    used: int
    """The clock's inserts at the last use that counted."""
    hits: int


class Ghost(NamedTuple):
    """What is remembered of an evicted page."""

    used: int
    hits: int

    @classmethod
    def of(cls, evicted: Rank) -> Ghost:
        return cls(evicted.used, evicted.hits)


class Clock(NamedTuple):
    """What all pages share: the time and the measured reuse distance. Stored once, changed with every insert."""

    inserts: int = 0
    """Pages inserted so far: the time."""
    distance_sum: int = 0
    """The mean reuse distance D, times the number of reuses it is a mean over (at most 2**11)."""
    reuses: int = 0
    """Reuses measured so far."""


class PageByPage:
    """Pure: records in, records out."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: at least one slot")
        self.capacity = capacity

    def reuse_distance(self, clock: Clock) -> int:
        return reuse_distance(self.capacity, clock.distance_sum, clock.reuses)

    def inserted(
        self, clock: Clock, depth: int, before: Rank | None = None, ghost: Ghost | None = None
    ) -> tuple[Clock, Rank]:
        """The new clock, and the record of a page written now, ``depth`` pages after the first of its chain."""
        clock, hits = clock._replace(inserts=clock.inserts + 1), 0
        if ghost is not None:
            clock = after_reuse(clock, max(0, clock.inserts - ghost.used))
            hits = min(ghost.hits + 1, MAX_HITS)
        return clock, Rank(_bounded(self._priority(clock, hits, depth), before), clock.inserts, hits)

    def renewed(self, clock: Clock, rank: Rank, depth: int, before: Rank | None = None) -> tuple[Clock, Rank] | None:
        """The new clock and the record of a present page that was used; None when nothing worth a write changes."""
        used, hits = rank.used, rank.hits
        if used < clock.inserts - (min(self.capacity, self.reuse_distance(clock)) >> RENEWAL_SHIFT):
            clock = after_reuse(clock, max(0, clock.inserts - used))
            used, hits = clock.inserts, min(hits + 1, MAX_HITS)
        renewed = Rank(_bounded(max(rank.priority, self._priority(clock, hits, depth)), before), used, hits)
        return None if renewed == rank else (clock, renewed)

    def _priority(self, clock: Clock, hits: int, depth: int) -> int:
        distance = self.reuse_distance(clock)
        return priority_of(LEARNED_DISTANCE, self.capacity, clock.inserts, distance, hits, False, depth)


def after_reuse(clock: Clock, distance: int) -> Clock:
    """A page was used again ``distance`` inserts after its last use."""
    return Clock(clock.inserts, *learned(clock.distance_sum, clock.reuses, distance))


def _bounded(priority: int, before: Rank | None) -> int:
    return priority if before is None else max(0, min(priority, before.priority - 1))

"""Which page is evicted first: the one with the lowest priority, computed at insert and at use from a small record.

No I/O, no tables. A page of a prefix cache is useful only while all pages before it are there. Its priority is a moment
on a clock that counts inserted pages: until then the page is worth its slot::

    priority = now + D * log2(1 + hits) - min(D, capacity) * min(depth, 64) / 128
    priority = min(priority, priority of the page before it in the chain - 1)

``hits``      uses after the first one, including those before an earlier eviction (the ghost list remembers them).
``D``         the tier's mean reuse distance in inserted pages; measured, see ``Clock``.
``depth``     position in the request's chain: prompts that diverge share their heads, not their tails.

``now`` alone is LRU. Sources of the rest, figures, and what was tried: docs/decisions/eviction.md.

The bound by the page before keeps heads longer than their tails, in whatever order pages are used. A new page may rank
below everything cached: it then takes the slot of the page written before it, or is the next victim itself. So one-time
chains pass through a full cache without displacing it.

Integers only: all processes and the simulator (benchmarks/replay_trace.py) agree to the bit. One policy and one
``Clock`` belong to one pool of slots of one size.

How the index calls it, inside one write transaction, the pages of a request in chain order:
  1. ``renewed(clock, rank, depth, before)`` for the leading run of present pages; None: nothing to write. The same call
     in a read transaction tells beforehand whether there is anything to write.
  2. ``inserted(clock, depth, before, ghost)`` for each page written; its ghost, if any, is removed.
  3. The victim is the page with the lowest ``Rank.priority``; ``Ghost.of(rank)`` is kept for its key, at most
     ``policy.ghost_limit`` of them, the oldest forgotten first.
``before`` is the rank of the preceding page as it is after its own step; None for a chain's first page, or when it is
not known because SGLang passed no prefix keys. Depth then counts from the start of the batch: the pages of a later
batch rank like heads, and a tail can outlive its head until the head is inserted again (replayed: at most 0.0006 less).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_ORIGIN: Final = 1 << 40
"""Priority of the clock's start: leaves room below for depth."""
MAX_PRIORITY: Final = (1 << 63) - 1
MAX_HITS: Final = 7
"""More uses count as this many: log2(8) = 3 reuse distances is the longest protection."""
_MAX_DEPTH: Final = 64
"""Depth beyond which pages have equal priority; the bound by the page before still orders them."""
_DEPTH_WEIGHT: Final = 2 * _MAX_DEPTH
"""At 64 pages half of min(D, capacity) is subtracted."""
_LEARNING_SHIFT: Final = 11
"""D is a mean over about the last 2**11 reuses: the pages of one request return together, and a shorter memory would
follow single requests."""
_MAX_DISTANCE_IN_CAPACITIES: Final = 64
"""Bounds D: a page that was hot is gone after 3 * 64 capacities at the latest."""
RENEWAL_SHIFT: Final = 4
"""A use within 1/16 of min(D, capacity) after the last counted one changes nothing: hits in a row cost no writes.
Rare uses, as in the conversation trace, are mostly further apart and do cost one."""
_SMALLEST_GHOST_LIST: Final = 1 << 15
_LARGEST_GHOST_LIST: Final = 1 << 20
_LOG2: Final = (0, 256, 406, 512, 594, 662, 719, 768)
"""round(256 * log2(1 + hits))."""

_CLOCK = struct.Struct("<QQI")
_RANK = struct.Struct("<QQB")
MAX_REUSES: Final = (1 << 32) - 1


def reuse_distance(capacity: int, distance_sum: int, reuses: int) -> int:
    """``EvictionPolicy.reuse_distance``. This and what follows are plain functions of numbers, because slot_code.py
    compiles them."""
    if reuses == 0:
        return capacity
    mean = distance_sum // min(reuses, 1 << _LEARNING_SHIFT)
    return min(mean, _MAX_DISTANCE_IN_CAPACITIES * capacity)


def learned(distance_sum: int, reuses: int, distance: int) -> tuple[int, int]:
    """The distances and reuses after one more: a plain mean first, then a moving one."""
    forgotten = distance_sum >> _LEARNING_SHIFT if reuses >= 1 << _LEARNING_SHIFT else 0
    return distance_sum - forgotten + distance, min(reuses + 1, MAX_REUSES)


def priority_of(capacity: int, inserts: int, distance: int, hits: int, depth: int) -> int:
    """The priority of a page used now, not bounded by the page before it; ``distance`` is D."""
    protection = distance * _LOG2[hits] // _LOG2[1]
    tail = min(distance, capacity) * min(depth, _MAX_DEPTH) // _DEPTH_WEIGHT
    return min(_ORIGIN + inserts + protection - tail, MAX_PRIORITY)


class Clock(NamedTuple):
    """What all pages share: the time and the measured reuse distance. Stored once, changed with every insert."""

    inserts: int = 0
    """Pages inserted so far: the time."""
    distance_sum: int = 0
    """The mean reuse distance D, times the number of reuses it is a mean over (at most 2**11)."""
    reuses: int = 0
    """Reuses measured so far."""

    @classmethod
    def unpack(cls, stored: bytes | None) -> Clock:
        """The stored clock; a new one for None (nothing stored yet)."""
        return cls() if stored is None else cls(*_CLOCK.unpack(stored))

    def pack(self) -> bytes:
        """20 bytes."""
        return _CLOCK.pack(self.inserts, self.distance_sum, self.reuses)

    def after_insert(self) -> Clock:
        return Clock(self.inserts + 1, self.distance_sum, self.reuses)

    def after_reuse(self, distance: int) -> Clock:
        """A page was used again ``distance`` inserts after its last use: a plain mean first, then a moving one."""
        return Clock(self.inserts, *learned(self.distance_sum, self.reuses, distance))


class Rank(NamedTuple):
    """The record of a cached page; the lowest ``priority`` is evicted first."""

    priority: int
    used: int
    """The clock's inserts at the last use that counted."""
    hits: int

    @classmethod
    def unpack(cls, stored: bytes) -> Rank:
        return cls(*_RANK.unpack(stored))

    def pack(self) -> bytes:
        """``RANK_LENGTH`` bytes."""
        return _RANK.pack(self.priority, self.used, self.hits)


RANK_LENGTH: Final = _RANK.size
_rank = functools.partial(tuple.__new__, Rank)
"""``Rank`` at a third of the price, for what is made once per page written."""


class Ghost(NamedTuple):
    """What is remembered of an evicted page, under its key or a fingerprint of it."""

    used: int
    hits: int

    @classmethod
    def of(cls, evicted: Rank) -> Ghost:
        return cls(evicted.used, evicted.hits)


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """The policy for ``capacity`` slots. Pure: records in, records out; from any thread."""

    capacity: int

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity {self.capacity}: at least one slot")

    @property
    def ghost_limit(self) -> int:
        """Ghosts worth keeping: reuse distances do not shrink with the cache, so a small cache needs many of them."""
        return min(max(self.capacity, _SMALLEST_GHOST_LIST), _LARGEST_GHOST_LIST)

    def reuse_distance(self, clock: Clock) -> int:
        """D: the mean distance measured, one capacity before anything was, never more than 64 capacities."""
        return reuse_distance(self.capacity, clock.distance_sum, clock.reuses)

    def inserted(
        self, clock: Clock, depth: int, before: Rank | None = None, ghost: Ghost | None = None
    ) -> tuple[Clock, Rank]:
        """The new clock, and the record of a page written now, ``depth`` pages after the first of its chain."""
        clock = clock.after_insert()
        if ghost is None:
            return clock, Rank(_bounded(self._priority(clock, 0, depth), before), clock.inserts, 0)
        clock = clock.after_reuse(max(0, clock.inserts - ghost.used))
        hits = min(ghost.hits + 1, MAX_HITS)
        return clock, Rank(_bounded(self._priority(clock, hits, depth), before), clock.inserts, hits)

    def inserted_chain(
        self, clock: Clock, before: Rank | None, first_depth: int, ghosts: Sequence[Ghost | None]
    ) -> tuple[Clock, list[Rank]]:
        """``inserted`` for pages each of which follows the one before it, the first one ``before``; one ghost, or None,
        per page. Written out, because every page of every write passes here."""
        ranks: list[Rank] = []
        inserts, distance = clock.inserts, min(self.reuse_distance(clock), self.capacity)
        highest = MAX_PRIORITY if before is None else max(0, before.priority - 1)
        for depth, ghost in enumerate(ghosts, first_depth):
            if ghost is None:
                inserts += 1
                priority = _ORIGIN + inserts - distance * (depth if depth < _MAX_DEPTH else _MAX_DEPTH) // _DEPTH_WEIGHT
                if priority > highest:
                    priority = highest
                before = _rank((priority, inserts, 0))
            else:
                clock = Clock(inserts, clock.distance_sum, clock.reuses)
                clock, before = self.inserted(clock, depth, before, ghost)
                inserts, distance = clock.inserts, min(self.reuse_distance(clock), self.capacity)
                priority = before.priority
            highest = priority - 1 if priority else 0
            ranks.append(before)
        return Clock(inserts, clock.distance_sum, clock.reuses), ranks

    def renewed(self, clock: Clock, rank: Rank, depth: int, before: Rank | None = None) -> tuple[Clock, Rank] | None:
        """The new clock and the record of a present page that was used; None when nothing worth a write changes."""
        distance = max(0, clock.inserts - rank.used)
        if rank.used >= self.oldest_fresh_use(clock):
            # Only the order within the chain may need a write: the page before was lost and inserted anew, lower.
            priority = _bounded(rank.priority, before)
            return None if priority == rank.priority else (clock, Rank(priority, rank.used, rank.hits))
        clock = clock.after_reuse(distance)
        hits = min(rank.hits + 1, MAX_HITS)
        priority = _bounded(max(rank.priority, self._priority(clock, hits, depth)), before)
        return clock, Rank(priority, clock.inserts, hits)

    def oldest_fresh_use(self, clock: Clock) -> int:
        """A page whose last counted use (``Rank.used``) is not before this is not renewed by a use now."""
        return clock.inserts - (min(self.capacity, self.reuse_distance(clock)) >> RENEWAL_SHIFT)

    def _priority(self, clock: Clock, hits: int, depth: int) -> int:
        return priority_of(self.capacity, clock.inserts, self.reuse_distance(clock), hits, depth)


def _bounded(priority: int, before: Rank | None) -> int:
    return priority if before is None else max(0, min(priority, before.priority - 1))

"""The eviction policy of each slot size, as one transaction of the index sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache_ext.storage.file.eviction import Clock, EvictionPolicy, Ghost, Rank
from hicache_ext.storage.file.slab.records import SLOT_SIZE, Slab

_BYTES_PER_GHOST = 8192
"""One ghost (about 100 bytes of index) per so many bytes of slots at most: bounds what a small directory spends."""

_SOON_SHIFT = 4
"""Pages of a chain lie up to 64 steps of capacity / 128 apart (eviction.py): a sixteenth takes eight of them."""


class Ranking:
    """Clocks are read once and kept; ``save`` writes those that moved."""

    def __init__(self, slabs: dict[int, Slab], transaction: Any, state: Any) -> None:
        self._slabs = slabs
        self._transaction = transaction
        self._state = state
        self._policies: dict[int, EvictionPolicy] = {}
        self._clocks: dict[int, Clock] = {}
        self._changed: set[int] = set()

    def slab(self, number: int) -> Slab:
        return self._slabs[number]

    def slabs(self) -> list[Slab]:
        return list(self._slabs.values())

    def add(self, slab: Slab) -> None:
        self._slabs = {**self._slabs, slab.number: slab}
        self._policies.pop(slab.slot_size, None)

    def drop(self, slab: Slab) -> None:
        self._slabs = {number: other for number, other in self._slabs.items() if number != slab.number}
        self._policies.pop(slab.slot_size, None)

    def inserted_chain(
        self, slot_size: int, before: Rank | None, first_depth: int, ghosts: Sequence[Ghost | None]
    ) -> list[Rank]:
        policy, clock = self._policy(slot_size), self._clock(slot_size)
        clock, ranks = policy.inserted_chain(clock, before, first_depth, ghosts)
        self._set_clock(slot_size, clock)
        return ranks

    def renewed(self, slot_size: int, rank: Rank, depth: int, before: Rank | None) -> Rank | None:
        answer = self._policy(slot_size).renewed(self._clock(slot_size), rank, depth, before)
        if answer is None:
            return None
        self._set_clock(slot_size, answer[0])
        return answer[1]

    def oldest_fresh_use(self, slot_size: int) -> int:
        """A page last used before this is worth an index write when it is used now."""
        return self._policy(slot_size).oldest_fresh_use(self._clock(slot_size))

    def slots(self, slot_size: int) -> int:
        """Slots of this size."""
        return self._policy(slot_size).capacity

    def soon(self, slot_size: int) -> int:
        """A page whose priority is that far above the lowest would be evicted within so many inserts."""
        return self._policy(slot_size).capacity >> _SOON_SHIFT

    def ghost_limit(self, slot_size: int) -> int:
        policy = self._policy(slot_size)
        return min(policy.ghost_limit, policy.capacity * slot_size // _BYTES_PER_GHOST)

    def save(self) -> None:
        for size in self._changed:
            self._transaction.put(_clock_name(size), self._clocks[size].pack(), db=self._state)

    def _policy(self, slot_size: int) -> EvictionPolicy:
        policy = self._policies.get(slot_size)
        if policy is None:
            slots = sum(slab.slots for slab in self._slabs.values() if slab.slot_size == slot_size)
            policy = self._policies[slot_size] = EvictionPolicy(max(1, slots))
        return policy

    def _clock(self, slot_size: int) -> Clock:
        clock = self._clocks.get(slot_size)
        if clock is None:
            stored = self._transaction.get(_clock_name(slot_size), db=self._state)
            clock = self._clocks[slot_size] = Clock.unpack(stored)
        return clock

    def _set_clock(self, slot_size: int, clock: Clock) -> None:
        self._clocks[slot_size] = clock
        self._changed.add(slot_size)


def _clock_name(slot_size: int) -> bytes:
    return b"clock" + SLOT_SIZE.pack(slot_size)

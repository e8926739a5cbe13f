"""Which page goes first: least recently used, and of one chain the tails before the heads.

A page of a prefix cache is useful only while all pages before it are there. Recency is therefore coarse (quanta of the
shared clock, so that all pages of one request fall in one), and within a quantum the deeper page goes first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_QUANTUM_BITS = 10
_DEPTH_BITS = 24
_MAX_DEPTH = (1 << _DEPTH_BITS) - 1

_CLOCK = struct.Struct("<Q")
_RANK = struct.Struct("<Q")
RANK_LENGTH = _RANK.size


@dataclass(frozen=True, slots=True)
class Clock:
    """Shared state of the ranking: how many times a page was put or renewed."""

    uses: int = 0

    @classmethod
    def unpack(cls, stored: bytes | None) -> Clock:
        return cls() if stored is None else cls(*_CLOCK.unpack(stored))

    def pack(self) -> bytes:
        return _CLOCK.pack(self.uses)

    def after_use(self) -> Clock:
        return Clock(self.uses + 1)

    def after_eviction(self, priority: int) -> Clock:
        return self


@dataclass(frozen=True, slots=True)
class Rank:
    """A page's place in the order of eviction: the lowest priority goes first."""

    priority: int

    @classmethod
    def unpack(cls, stored: bytes) -> Rank:
        return cls(*_RANK.unpack(stored))

    def pack(self) -> bytes:
        return _RANK.pack(self.priority)


def first_rank(clock: Clock, depth: int) -> Rank:
    """The rank of a page that is written now, ``depth`` pages after the first of its chain (as far as is known)."""
    return Rank(((clock.uses >> _QUANTUM_BITS) << _DEPTH_BITS) | (_MAX_DEPTH - min(depth, _MAX_DEPTH)))


def renewed_rank(clock: Clock, rank: Rank, depth: int) -> Rank | None:
    """The rank after a use; None while it would hardly change, so that hits cost no index writes."""
    if rank.priority >> _DEPTH_BITS == clock.uses >> _QUANTUM_BITS:
        return None
    return first_rank(clock, depth)

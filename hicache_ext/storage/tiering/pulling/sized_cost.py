"""The cost of computing a prefix, learnt by size.

By size, because after every pull a node computes the few tokens that are left. A line through the last batches would
know only those, and its value for a whole prompt would be an extrapolation by a factor of a hundred.

An estimate that is too high would never be corrected: everything is pulled then, and nothing computed. So estimates
fall faster than they rise. What was seen once (the first batch of its size takes many times as long) or long ago is
uncertain: where the uncertainty decides, the prefix is computed, which measures it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_NEW_LOWER = 0.7
_NEW_HIGHER = 0.3
"""Weight of a higher observation against the estimate of its size."""
_DOUBT_ONCE = 20.0
_DOUBT_OLD = 3.0
_OLD = 60.0
"""Seconds without an observation after which an estimate is uncertain."""
_SHORT = 4
"""A batch of at most a fourth of a prefix shows what is left to compute when the prefix is pulled."""


@dataclass(slots=True)
class _Known:
    amount: float
    seconds: float
    observed: float
    """When, by the clock."""
    observations: int = 1


class SizedCost:
    """Seconds by amount, one figure per power of two. Thread-safe.

    Where no similar size was seen, the lower bound is taken: computing is then tried, and measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_size: dict[int, _Known] = {}

    def observe(self, amount: int, seconds: float) -> None:
        with self._lock:
            known = self._by_size.get(amount.bit_length())
            if known is None:
                self._by_size[amount.bit_length()] = _Known(amount, seconds, self._clock())
                return
            weight = _NEW_LOWER if seconds * known.amount < known.seconds * amount else _NEW_HIGHER
            known.amount += (amount - known.amount) * weight
            known.seconds += (seconds - known.seconds) * weight
            known.observed = self._clock()
            known.observations += 1

    def predict(self, amount: float) -> float | None:
        """Seconds for ``amount``; None before the first observation."""
        with self._lock:
            known = [(one.amount, one.seconds) for _, one in sorted(self._by_size.items())]
        if not known:
            return None
        if amount <= known[0][0]:
            return known[0][1] * amount / known[0][0]
        for (below, seconds_below), (above, seconds_above) in itertools.pairwise(known):
            if amount <= above:
                return seconds_below + (seconds_above - seconds_below) * (amount - below) / (above - below)
        if len(known) == 1:
            return known[0][1]
        (below, seconds_below), (last, seconds_last) = known[-2:]
        return seconds_last + max(0.0, seconds_last - seconds_below) * (amount - last) / (last - below)

    def doubt(self, amount: int) -> float:
        """The factor, 1 or more, by which the estimate for ``amount`` may be too high."""
        with self._lock:
            if not self._by_size:
                return 1.0
            wanted = amount.bit_length()
            nearest = self._by_size[min(self._by_size, key=lambda size: abs(size - wanted))]
            if nearest.observations == 1:
                return _DOUBT_ONCE
            return _DOUBT_OLD if self._clock() - nearest.observed > _OLD else 1.0

    def saved_by(self, amount: float) -> float | None:
        """Seconds saved by not computing ``amount``; a short rest is computed in any case."""
        with self._lock:
            shortest = self._by_size[min(self._by_size)] if self._by_size else None
        whole = self.predict(amount)
        if shortest is None or whole is None or shortest.amount * _SHORT > amount:
            return whole
        return max(0.0, whole - shortest.seconds)

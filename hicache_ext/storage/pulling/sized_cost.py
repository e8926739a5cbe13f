"""What computing a prefix costs, learnt by size: an answer for a long one is not worn away by many short ones.

After every pull a node computes the few tokens that are left. A line through the last batches would know nothing but
those, and what it says about a whole prompt then would be a guess a hundred times their size.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

_NEW = 0.5
"""Weight of an observation against what was known of its size."""
_SHORT = 4
"""A batch of at most a fourth of a prefix shows what is left to compute when the prefix is pulled."""


@dataclass(slots=True)
class _Known:
    amount: float
    seconds: float


class SizedCost:
    """Seconds by amount, one figure per power of two. Thread-safe.

    Where nothing near was seen the cheap side is taken: computing is then tried, and measured.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_size: dict[int, _Known] = {}

    def observe(self, amount: int, seconds: float) -> None:
        with self._lock:
            known = self._by_size.get(amount.bit_length())
            if known is None:
                self._by_size[amount.bit_length()] = _Known(amount, seconds)
            else:
                known.amount += (amount - known.amount) * _NEW
                known.seconds += (seconds - known.seconds) * _NEW

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

    def saved_by(self, amount: float) -> float | None:
        """Seconds that not computing ``amount`` saves, where something short is computed in any case."""
        with self._lock:
            shortest = self._by_size[min(self._by_size)] if self._by_size else None
        whole = self.predict(amount)
        if shortest is None or whole is None or shortest.amount * _SHORT > amount:
            return whole
        return max(0.0, whole - shortest.seconds)

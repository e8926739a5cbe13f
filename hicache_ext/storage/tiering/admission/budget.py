"""How much may be written to a tier: so many bytes a second, an hour's worth of which may be saved up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_SAVED = 3600.0
"""Seconds."""
_ABOUT_ALL = 0.9


class WriteBudget:
    """Threads: the caller locks."""

    def __init__(self, bytes_a_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_a_second
        self._now = now
        self._left = self._most = bytes_a_second * _SAVED
        self._looked = now()

    @property
    def left(self) -> float:
        """Bytes that may be written now. Less than none while writes that were queued before are still counted."""
        now = self._now()
        self._left = min(self._most, self._left + max(0.0, now - self._looked) * self._rate)
        self._looked = now
        return self._left

    @property
    def to_spend(self) -> float:
        """Bytes a second to write at now: the budget while half of what may be saved is left, nothing when nothing is,
        and no limit while about all of it is: what cannot be saved would be lost."""
        left = self.left
        return math.inf if left > _ABOUT_ALL * self._most else max(0.0, 2 * left / _SAVED)

    def written(self, size: int) -> None:
        """So many bytes were written."""
        self._left = self.left - size

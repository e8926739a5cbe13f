"""Maps the eviction clock, which counts inserted pages, to seconds, which operators want."""

from __future__ import annotations

import bisect

_INTERVAL = 1.0
"""Seconds between two values that are kept, at first."""
_MOST = 4096
"""Values kept; beyond that every other one is dropped, and the interval doubles."""


class ClockTimes:
    """The history of one clock, as far as this process saw it. One thread at a time."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._times: list[float] = []
        self._interval = _INTERVAL

    def note(self, value: int, now: float) -> None:
        """The clock is at ``value``; ``now`` in wall-clock seconds."""
        if self._times and now - self._times[-1] < self._interval:
            return
        self._values.append(value)
        self._times.append(now)
        if len(self._times) >= _MOST:
            self._values, self._times = self._values[::2], self._times[::2]
            self._interval *= 2

    def when(self, value: int) -> float | None:
        """When the clock passed ``value``, rather too early; None before the first note."""
        after = bisect.bisect_right(self._values, value)
        return self._times[after - 1] if after else None

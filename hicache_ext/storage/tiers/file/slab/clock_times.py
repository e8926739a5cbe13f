"""When the clock of evictions had which value: it counts inserted pages, and operators want seconds."""

from __future__ import annotations

import bisect

_INTERVAL = 1.0
"""Seconds between two values that are kept, at first."""
_MOST = 4096
"""Values kept; then every other one goes, and twice as much time lies between those that follow."""


class ClockTimes:
    """What one clock said when, as far as this process saw it. One thread at a time."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._times: list[float] = []
        self._interval = _INTERVAL

    def note(self, value: int, now: float) -> None:
        """The clock says ``value``; ``now`` in wall-clock seconds."""
        if self._times and now - self._times[-1] < self._interval:
            return
        self._values.append(value)
        self._times.append(now)
        if len(self._times) >= _MOST:
            self._values, self._times = self._values[::2], self._times[::2]
            self._interval *= 2

    def when(self, value: int) -> float | None:
        """When the clock went past ``value``, early rather than late; None for before the first look at it."""
        after = bisect.bisect_right(self._values, value)
        return self._times[after - 1] if after else None

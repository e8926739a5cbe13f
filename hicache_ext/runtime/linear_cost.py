"""The cost of work, learnt from earlier measurements: seconds = start-up + amount * seconds per unit."""

from __future__ import annotations

import threading

_DECAY = 0.7
"""Weight of all earlier observations against the newest: about three count, so that a slower tier is noticed."""
_SURPRISE = 2.0
"""Two consecutive observations that are off by this factor in the same direction discard all earlier ones."""


class LinearCost:
    """A line through decayed observations. Thread-safe; an observation costs about a microsecond.

    Equal amounts do not determine a line. A smaller amount is then assumed to cost as much as those seen, and a larger
    one proportionally more: the upper bound of all lines through them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._last_point = (0.0, 0.0)
        self._last_surprise = 0

    def observe(self, amount: float, seconds: float) -> None:
        with self._lock:
            surprise = self._surprise(amount, seconds)
            if surprise and surprise == self._last_surprise:
                self._weight = self._x = self._y = self._xx = self._xy = 0.0
                self._add(*self._last_point)
                surprise = 0
            self._add(amount, seconds)
            self._last_point, self._last_surprise = (amount, seconds), surprise

    def _surprise(self, amount: float, seconds: float) -> int:
        """Return 1 if ``seconds`` is much more than expected, -1 if much less, else 0."""
        expected = self._predict(amount)
        if expected is None:
            return 0
        return (seconds > expected * _SURPRISE) - (seconds * _SURPRISE < expected)

    def _add(self, amount: float, seconds: float) -> None:
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + amount
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + amount * amount
        self._xy = self._xy * _DECAY + amount * seconds

    @property
    def is_surprised(self) -> bool:
        """Return whether the last observation was far off; the next one decides whether that lasts."""
        return self._last_surprise != 0

    def predict(self, amount: float) -> float | None:
        """Return the expected seconds for ``amount``; None before the first observation."""
        with self._lock:
            return self._predict(amount)

    def per_unit(self) -> float | None:
        """Return an upper bound of the seconds per additional unit; None before the first observation. If observations
        do not determine the start-up, all of the cost is attributed to units."""
        with self._lock:
            if not self._weight or not self._x:
                return None
            slope, mean_x, mean_y = self._slope(), self._x / self._weight, self._y / self._weight
            return mean_y / mean_x if slope is None or mean_y < slope * mean_x else slope

    def _predict(self, amount: float) -> float | None:
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        slope = self._slope()
        if slope is None:
            return mean_y * max(1.0, amount / mean_x) if mean_x else mean_y
        start_up = mean_y - slope * mean_x
        if start_up < 0:
            return mean_y / mean_x * amount
        return start_up + slope * amount

    def _slope(self) -> float | None:
        """Return the slope, or None if the amounts are about equal and determine no line."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        covariance = self._xy / self._weight - mean_x * mean_y
        return None if variance <= 0.05 * mean_x * mean_x else max(0.0, covariance / variance)

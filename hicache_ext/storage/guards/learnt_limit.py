"""How long a call may take, learnt from how long such calls took lately.

A tier that answers within milliseconds and then hangs should not cost the whole timeout. A call gets four times what
the slowest of the last 32 calls of its size took, at least ``least`` (a busy machine, a new connection) and at most
``longest`` (what is configured). Where too little is known of a size and of all larger ones it gets ``longest``.

A call that was cut counts as one that took as long as it was given: the next one of its size gets four times that. So a
tier that has become slower is in use again after a call or two, without anybody's help.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_FACTOR = 4.0
"""Twice what the sizes of one class differ by, so that a call may still take twice as long as the slowest before it."""
_RECENT_CALLS = 32
_FEWEST_CALLS = 8
"""With fewer, nothing is known of a size."""
_LIFE = 300.0
"""Seconds for which a call teaches something: an idle tier's connections are cold, its pages swapped out."""


class LearntLimit:
    """Of calls of one kind; an amount is bytes or keys. Threads: any."""

    def __init__(self, longest: float, least: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.longest = longest
        self._least = least
        self._clock = clock
        self._lock = threading.Lock()
        self._by_size: dict[int, deque[tuple[float, float]]] = {}
        """(when, seconds) of recent calls, by the power of two of their amount."""

    def seconds(self, amount: int) -> float:
        """For a call of ``amount``."""
        since = self._clock() - _LIFE
        with self._lock:
            for size in sorted(size for size in self._by_size if size >= amount.bit_length()):
                recent = [seconds for when, seconds in self._by_size[size] if when >= since]
                if len(recent) >= _FEWEST_CALLS:
                    return min(self.longest, max(self._least, _FACTOR * max(recent)))
        return self.longest

    def observe(self, amount: int, seconds: float) -> None:
        """A call of ``amount`` has ended, or was cut, after ``seconds``."""
        with self._lock:
            calls = self._by_size.setdefault(amount.bit_length(), deque(maxlen=_RECENT_CALLS))
            calls.append((self._clock(), seconds))

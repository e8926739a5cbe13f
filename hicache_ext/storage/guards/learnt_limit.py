"""How long a call may take, learnt from how long such calls took lately.

A tier that answers within milliseconds and then hangs should not cost the whole timeout. A call gets four times what
the slowest of the last 32 calls of its size took, at least ``least`` (a busy machine, a new connection) and at most
``longest`` (what is configured). Where too little is known of a size and of all larger ones it gets ``longest``.

Of a size with few calls of its own, those of the next larger sizes count too, and its own still do.

A call that was cut at a learnt limit shows that what was learnt no longer holds, and not only for its size: the next
one of any size gets four times that. So a tier that has become slower is in use again after a call or two, without
anybody's help, and one that hangs does not cost the same limit again for each size. A call that was cut at ``longest``
says nothing about other sizes: a large one may need that long every time.
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
            recent: list[float] = []
            for size in sorted(size for size in self._by_size if size >= amount.bit_length()):
                recent += [seconds for when, seconds in self._by_size[size] if when >= since]
                if len(recent) >= _FEWEST_CALLS:
                    return min(self.longest, max(self._least, _FACTOR * max(recent)))
        return self.longest

    def observe(self, amount: int, seconds: float) -> None:
        """A call of ``amount`` has ended, or was cut at ``longest``, after ``seconds``."""
        with self._lock:
            self._calls_of(amount).append((self._clock(), seconds))

    def observe_cut(self, amount: int, seconds: float) -> None:
        """A call of ``amount`` was cut at a learnt limit, after ``seconds``."""
        with self._lock:
            self._calls_of(amount)
            for calls in self._by_size.values():
                calls.append((self._clock(), seconds))

    def _calls_of(self, amount: int) -> deque[tuple[float, float]]:
        """The lock is held."""
        return self._by_size.setdefault(amount.bit_length(), deque(maxlen=_RECENT_CALLS))

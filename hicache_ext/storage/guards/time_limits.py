"""How long a call may take: the configured timeout, or less where calls of the tier took less lately.

A tier that answers within milliseconds and then hangs should not cost the whole timeout. A call gets four times what
the slowest of the last 32 calls of its size took, at least ``least`` (a busy machine, a new connection) and at most
``longest`` (the configured timeout). A size with few calls also uses those of the next larger sizes; if these are too
few as well, it gets ``longest``.

A call cut at a learnt limit shows that the limits of all sizes are too low: the next call of any size gets four times
as much. So a tier that became slower is in use again after a call or two, and a tier that hangs does not cost one limit
per size. A call cut at ``longest`` says nothing about other sizes: a large call may always need that long.
Measurements: docs/decisions/time-limits-of-calls.md.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hicache_ext.runtime.call_deadline import Unanswered

AT_LIMIT = 0.9
"""A call that took this share of its limit was cut; a look-up cannot report that itself."""
_FACTOR = 4.0
"""Sizes of one class differ by a factor of two; the other two are for a call slower than all before it."""
_RECENT_CALLS = 32
_FEWEST_CALLS = 8
"""With fewer calls a size counts as unknown."""
_LIFE = 300.0
"""Seconds for which a call counts: connections of an idle tier are cold, its pages swapped out."""


@dataclass(slots=True)
class Call:
    """One call on its way through the guards. Seconds, by the clock of the guards."""

    name: str
    """Of the PageStore's method."""
    pages: int
    begun: float
    seconds: float
    """Its limit; infinite without a timeout."""
    amount: int = 0
    """Bytes or keys."""
    limits: LearntLimit | None = None
    """What learns from it, if anything does."""
    learnt: bool = False
    """Whether its limit is shorter than configured."""
    queued: float = 0.0
    """How long it has waited for its place."""
    unanswered: Unanswered = field(default_factory=Unanswered)
    """What a look-up could not find out."""

    @property
    def deadline(self) -> float:
        return self.begun + self.seconds

    def ended(self, shown: int, now: float) -> None:
        """Learn from it. ``shown``: the amount that its answer is evidence for: absent pages take no time, and failed
        ones are no evidence."""
        if self.limits is None:
            return
        taken = now - self.begun
        if taken >= self.seconds * AT_LIMIT:
            (self.limits.observe_cut if self.learnt else self.limits.observe)(self.amount, taken)
        elif shown:
            self.limits.observe(shown, taken)


class LearntLimit:
    """The limit of calls of one kind; an amount is bytes or keys. Threads: any."""

    def __init__(self, least: float, clock: Callable[[], float] = time.monotonic, longest: float = math.inf) -> None:
        """Nothing is learnt where ``longest`` is infinite, or no more than ``least``."""
        self.longest = longest
        """May change, for calls that begin from then on. What was learnt stays."""
        self._least = least
        self._clock = clock
        self._lock = threading.Lock()
        self._by_size: dict[int, deque[tuple[float, float]]] = {}
        """log2 of the amount -> (when, seconds) of recent calls."""

    def begin(self, name: str, pages: int, amount: int) -> Call:
        """A call of ``amount`` that begins now."""
        longest, seconds = self.longest, self.seconds(amount)
        return Call(name, pages, self._clock(), seconds, amount, self, seconds < longest)

    def seconds(self, amount: int) -> float:
        """The limit of a call of ``amount``."""
        if not self._least < self.longest < math.inf:
            return self.longest
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

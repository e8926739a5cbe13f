"""The circuit breaker's rules, without threads or stores: when a tier is given up, and how it comes back.

CLOSED: all calls go through. A call that ran into the deadline opens the breaker at once, because the next one would
cost as much again; so do failed or slow calls when they are half of the recent ones, and reads whose pages were damaged
when they are half of the recent reads: writes and look-ups say nothing about that.
OPEN: no call goes through; somebody probes the tier in the background (breaker_store.py), more and more seldom. A call
that ran into a deadline which was only learnt leaves a *doubt*: the tier hangs, or it was slower than it used to be. It
is then probed at once, and a good probe before the first regular one closes the breaker without a slow start.
HALF_OPEN, the slow start: after a good probe a share of the calls goes through that grows over ``slow_start`` seconds,
so that a store that has just come up is not run over. One bad call opens the breaker again.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_PROBE_INTERVAL = 30.0

_RECENT_CALLS = 10
_RECENT_SECONDS = 60.0
_LEAST_BAD_CALLS = 3
_BAD_SHARE = 0.5
_FIRST_SHARE = 0.1
"""Of the calls, at the beginning of the slow start."""
_PAUSE_IN_DOUBT = 0.1
"""Seconds until the first probe in doubt; a client may first have to connect anew."""


class BreakerState(enum.Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Outcome(enum.Enum):
    """What a call says about its tier."""

    GOOD = "good"
    SLOW = "slow"
    FAILED = "failed"
    TIMEOUT = "timeout"
    LATE = "late"
    """Cut by a learnt deadline: the tier hangs, or was slower than it used to be."""
    UNKNOWN = "unknown"
    """Nothing: the call may not have reached the medium."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Seconds; see config/guards.py."""

    slow_call: float = 0.5
    probe_interval: float = 1.0
    slow_start: float = 5.0


class Breaker:
    """``on_change(state, reason)`` is called after every change of state, under no lock. Threads: any."""

    def __init__(
        self,
        settings: BreakerSettings,
        on_change: Callable[[BreakerState, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_RECENT_CALLS)
        """(when, whether bad)."""
        self._reads: deque[tuple[float, bool]] = deque(maxlen=_RECENT_CALLS)
        """(when, whether damaged), of reads that got pages."""
        self._recovering_since = 0.0
        self._credit = 0.0
        """Calls that the slow start has still to let through."""
        self._opened = 0
        """How often, since it was last closed."""
        self._generation = 0
        """Raised at each change of state: what began before says nothing about the tier after it."""
        self._in_doubt = False

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def probe_interval(self) -> float:
        """Seconds until the first probe of this opening: longer each time the tier came back and failed again."""
        with self._lock:
            if self._in_doubt:
                return min(_PAUSE_IN_DOUBT, self._settings.probe_interval)
            return min(LONGEST_PROBE_INTERVAL, self._settings.probe_interval * 2.0 ** min(16, max(0, self._opened - 1)))

    def admit(self) -> int | None:
        """A ticket for ``record`` if a call may go through, else None."""
        state = self._state
        if state is BreakerState.CLOSED:
            return self._generation
        with self._lock:
            state = self._state
            if state is BreakerState.OPEN:
                return None
            if state is BreakerState.CLOSED:
                return self._generation
            share = self._share()
            if share < 1:
                self._credit += share
                if self._credit < 1:
                    return None
                self._credit -= 1
                return self._generation
            self._close()
            ticket = self._generation
        self._on_change(BreakerState.CLOSED, "")
        return ticket

    def end_slow_start(self) -> None:
        """Close, if the slow start is over: a tier that nobody asks is in full use again, too."""
        with self._lock:
            if self._state is not BreakerState.HALF_OPEN or self._share() < 1:
                return
            self._close()
        self._on_change(BreakerState.CLOSED, "")

    def record(self, ticket: int, outcome: Outcome, reason: str = "") -> None:
        """How the call ended that ``ticket`` was given for; ``reason`` is for the log."""
        if outcome is Outcome.UNKNOWN:
            return
        now = self._clock()
        with self._lock:
            if ticket != self._generation or self._state is BreakerState.OPEN:
                return
            bad = outcome is not Outcome.GOOD
            self._recent.append((now, bad))
            if not bad:
                return
            at_once = outcome in (Outcome.TIMEOUT, Outcome.LATE)
            if self._state is BreakerState.CLOSED and not at_once and not _is_too_much(self._recent):
                return
            # A tier that has just come back was in no doubt before.
            self._in_doubt = outcome is Outcome.LATE and self._state is BreakerState.CLOSED
            self._change(BreakerState.OPEN)
            self._opened += 1
        self._on_change(BreakerState.OPEN, reason)

    def record_read(self, ticket: int, damaged: bool, reason: str) -> None:
        """Whether the pages that a call read, beside how it ended, were mostly not what somebody had written."""
        now = self._clock()
        with self._lock:
            if ticket != self._generation or self._state is BreakerState.OPEN:
                return
            self._reads.append((now, damaged))
            if not damaged or (self._state is BreakerState.CLOSED and not _is_too_much(self._reads)):
                return
            self._change(BreakerState.OPEN)
            self._opened += 1
        self._on_change(BreakerState.OPEN, reason)

    def recover(self) -> None:
        """A probe went well."""
        with self._lock:
            if self._state is not BreakerState.OPEN:
                return
            state = BreakerState.CLOSED if self._in_doubt else BreakerState.HALF_OPEN
            if self._in_doubt:
                self._close()
            else:
                self._change(BreakerState.HALF_OPEN)
                self._recovering_since = self._clock()
                self._credit = 1.0  # the first call goes through, so that a tier that is asked seldom comes back, too
        self._on_change(state, "")

    def end_doubt(self) -> None:
        """No probe went well for as long as the first regular one is waited for: it is no hiccup."""
        with self._lock:
            self._in_doubt = False

    def take_over(self, before: Breaker) -> None:
        """Begin with the state of another one that judged the same tier, and with what it knew of it."""
        with before._lock, self._lock:
            self._state, self._opened, self._in_doubt = before._state, before._opened, before._in_doubt
            self._recovering_since, self._credit = before._recovering_since, before._credit
            self._recent, self._reads = before._recent.copy(), before._reads.copy()

    def _close(self) -> None:
        self._change(BreakerState.CLOSED)
        self._opened = 0
        self._in_doubt = False

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._generation += 1
        self._recent.clear()
        self._reads.clear()

    def _share(self) -> float:
        """Of the calls, now, in HALF_OPEN."""
        if self._settings.slow_start <= 0:
            return 1.0
        part = (self._clock() - self._recovering_since) / self._settings.slow_start
        return _FIRST_SHARE + (1 - _FIRST_SHARE) * part if part < 1 else 1.0


def _is_too_much(calls: deque[tuple[float, bool]]) -> bool:
    """Whether enough of the calls of the last minute were bad; the newest call is the present."""
    now = calls[-1][0]
    recent = [was_bad for when, was_bad in calls if now - when <= _RECENT_SECONDS]
    return sum(recent) >= _LEAST_BAD_CALLS and sum(recent) >= _BAD_SHARE * len(recent)

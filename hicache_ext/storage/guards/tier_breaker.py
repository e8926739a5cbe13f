"""When a tier is given up: the rule of its circuit breaker, without stores.

A call that ran into its deadline opens the breaker at once, because the next one would cost as much. Half of the recent
calls failed or slow open it, too; so do reads with damaged pages, if they are half of the recent reads. After a call
that ran into a learnt deadline the breaker is in *doubt*: the tier hangs, or is slower than it was.
Reasons: docs/decisions/time-limits-of-calls.md.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker, BreakerState

LONGEST_PROBE_INTERVAL = 30.0

_RECENT_CALLS = 10
_RECENT_SECONDS = 60.0
_LEAST_BAD_CALLS = 3
_BAD_SHARE = 0.5


class Outcome(enum.Enum):
    """What a call shows about its tier."""

    GOOD = "good"
    SLOW = "slow"
    FAILED = "failed"
    TIMEOUT = "timeout"
    LATE = "late"
    """Cut by a learnt deadline: the tier hangs, or is slower than it was."""
    UNKNOWN = "unknown"
    """Nothing: the call may not have reached the medium."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Seconds; see config/guards.py."""

    slow_call: float = 0.5
    probe_interval: float = 1.0
    slow_start: float = 5.0


class TierBreaker(Breaker):
    """A Breaker that judges calls. Threads: any."""

    def __init__(
        self,
        name: str,
        settings: BreakerSettings,
        probe: Callable[[], bool],
        on_change: Callable[[BreakerState, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_RECENT_CALLS)
        """(when, whether bad)."""
        self._reads: deque[tuple[float, bool]] = deque(maxlen=_RECENT_CALLS)
        """(when, whether damaged), of reads that got pages."""
        super().__init__(
            f"hicache-{name}-probe",
            probe,
            Backoff(settings.probe_interval, LONGEST_PROBE_INTERVAL),
            on_change=on_change,
            slow_start=settings.slow_start,
            clock=clock,
        )

    def record(self, ticket: int, outcome: Outcome, reason: str = "") -> None:
        """How the call ended that ``ticket`` was given for; ``reason`` is for the log."""
        if outcome is Outcome.UNKNOWN:
            return
        too_much = self._is_too_much(self._recent, ticket, outcome is not Outcome.GOOD)
        if too_much or outcome in (Outcome.TIMEOUT, Outcome.LATE):
            self.trip(reason, ticket, in_doubt=outcome is Outcome.LATE)

    def record_read(self, ticket: int, damaged: bool, reason: str) -> None:
        """Whether the pages that a call read, beside how it ended, were mostly not what somebody had written."""
        if self._is_too_much(self._reads, ticket, damaged):
            self.trip(reason, ticket)

    def take_over(self, before: Breaker) -> None:
        super().take_over(before)
        if isinstance(before, TierBreaker):
            with before._lock, self._lock:
                self._recent, self._reads = before._recent.copy(), before._reads.copy()

    def _change(self, state: BreakerState) -> None:
        super()._change(state)
        self._recent.clear()
        self._reads.clear()

    def _is_too_much(self, calls: deque[tuple[float, bool]], ticket: int, bad: bool) -> bool:
        """Note a call; whether enough of those of the last minute were bad. In the slow start one is enough."""
        now = self._clock()
        with self._lock:
            if ticket != self._generation or self._state is BreakerState.OPEN:
                return False
            calls.append((now, bad))
            recent = [was_bad for when, was_bad in calls if now - when <= _RECENT_SECONDS]
            half = sum(recent) >= _LEAST_BAD_CALLS and sum(recent) >= _BAD_SHARE * len(recent)
            return bad and (half or self._state is not BreakerState.CLOSED)

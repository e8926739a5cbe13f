"""The circuit breaker of a tier: judges its calls, gives it up, and probes it in the background.

Reads and writes are scored separately, because a store may refuse only one of them. Three things open the breaker: one
read or look-up that ran into its deadline (immediately, because the next one would cost as much); half of the recent
reads and look-ups failed or slow; and damaged pages in half of the recent reads. After a call that ran into a learnt
deadline the breaker is in *doubt*: the tier hangs, or is slower than it was. By the same measures, writes pause only
writes (``WritePause``), and a write that ran into a deadline triggers a probe of the tier. A lost connection counts for
both.

A probe reads the page whose read failed, or an absent one, and looks it up. It runs on its own thread into its own
memory, never on SGLang's threads or into host pages.
States, slow start and pauses: runtime/breaker.py. Reasons: docs/decisions/guards.md.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import WRITE_PAUSES, Breaker, BreakerState, WritePause
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.guards.time_limits import AT_LIMIT, Call

logger = logging.getLogger(__name__)

R = TypeVar("R", GetResult, SetResult)

SLOW_CALL = 0.5
PROBE_INTERVAL = 1.0
"""Seconds before the first probe of a tier that was given up."""
LONGEST_PROBE_INTERVAL = 30.0
SLOW_START = 5.0
"""Seconds during which a recovered tier gets a growing share of the calls."""

_RECENT_CALLS = 10
_RECENT_SECONDS = 60.0
_LEAST_BAD_CALLS = 3
_BAD_SHARE = 0.5
_ANSWERS = (GetResult.HIT, GetResult.MISS, GetResult.CORRUPT)
_LEARNT = ", the limit learnt from earlier ones"
_LOG_INTERVAL = 60.0
"""Seconds between two log lines about writes."""
_PROBE_KEY = b"hicache_ext/prob" + bytes(32)
"""Key of a page that nobody stores."""
_SLOWEST_BANDWIDTH = 100e6
"""Bytes per second. A slower read takes longer than computing the pages again."""
_SLOWEST_LOOK_UP = 0.001
"""Seconds per key found, beyond ``slow_call``. Computing a page takes several times as long."""


class Outcome(enum.Enum):
    """What the result of a call says about its tier."""

    GOOD = "good"
    SLOW = "slow"
    FAILED = "failed"
    TIMEOUT = "timeout"
    LATE = "late"
    """Cut by a learnt deadline: the tier hangs, or is slower than it was."""
    UNKNOWN = "unknown"
    """No evidence: the call may not have reached the medium."""


Judgement = tuple[Outcome, str]
"""An outcome with its reason, for the log."""


class TierBreaker(Breaker):
    """A Breaker that judges calls, for a pipeline. Threads: any."""

    def __init__(
        self,
        store: PageStore,
        read: Callable[[PageBatch], list[GetResult]],
        look_up: Callable[[bytes], bool],
        *,
        slow_call: float = SLOW_CALL,
        probe_interval: float = PROBE_INTERVAL,
        slow_start: float = SLOW_START,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``store`` provides name and metrics. The probe calls ``read`` and ``look_up``, with the whole timeout;
        ``look_up`` returns whether it was answered."""
        self._store = store
        self.slow_call = slow_call
        """Seconds, in addition to what the bytes take at 100 MB/s, after which a call is slow. May change."""
        self._read = read
        self._look_up = look_up
        self.writes = WritePause(clock)
        self._log = LimitedLog(logger, _LOG_INTERVAL, clock)
        self._recent: dict[str, deque[tuple[float, bool]]] = {
            score: deque(maxlen=_RECENT_CALLS) for score in ("reads and look-ups", "writes", "pages that arrived")
        }
        """Score -> (time, whether the call was bad or its pages damaged) of recent calls."""
        self._suspect: tuple[bytes, int] | None = None
        """Key and payload bytes of a page whose read failed."""
        self._opened_at = 0.0
        super().__init__(
            f"hicache-{store.name}-probe",
            self._is_healthy,
            Backoff(probe_interval, LONGEST_PROBE_INTERVAL),
            on_change=self._changed,
            slow_start=slow_start,
            clock=clock,
        )

    # -- what a call shows -----------------------------------------------------------------------------------------

    def transferred(self, ticket: int, call: Call, batch: PageBatch, results: list[R], seconds: float) -> None:
        """Judge a ``get`` or ``set`` that took ``seconds``, excluding time in our own queue, which is no evidence."""
        outcome, reason = self._judge_transfer(call, batch, results, seconds) if results else (Outcome.UNKNOWN, "")
        if call.name == "set":
            self.record_write(ticket, outcome, reason)
            if outcome is Outcome.FAILED and call.unanswered.connection_lost:
                self.record(ticket, outcome, reason)
            return
        if outcome is not Outcome.GOOD and results:
            self._suspect = (batch.keys[0], batch.sizes[0])
        self.record(ticket, outcome, reason)
        # A damaged page is computed again. If most pages are damaged, reads are wasted transfers.
        read: list[Any] = results
        damaged, good = read.count(GetResult.CORRUPT), read.count(GetResult.HIT)
        if damaged or good:
            self.record_read(ticket, damaged >= good, f"{damaged} of {damaged + good} pages were damaged")

    def answered(self, ticket: int, call: Call, found: int, seconds: float) -> None:
        """Judge a look-up or a removal that has ended. Keys it did not find are no evidence about the tier."""
        late = not found and seconds >= (call.seconds - call.queued) * AT_LIMIT
        unanswered = call.unanswered
        if call.name == "remove":
            if late:
                self.record_write(ticket, *_ran_out_of_time(call, "removal", seconds))
        elif late:
            self.record(ticket, *_ran_out_of_time(call, "look-up", seconds))
        elif unanswered.pages and 2 * unanswered.pages >= unanswered.of:
            reason = f"{unanswered.pages} of {unanswered.of} pages could not be looked up ({unanswered.reason})"
            self.record(ticket, Outcome.FAILED, reason)
        elif seconds > self.slow_call + found * _SLOWEST_LOOK_UP:
            self.record(ticket, Outcome.SLOW, f"a look-up took {seconds:.2g} s")
        elif found:
            self.record(ticket, Outcome.GOOD)

    def _judge_transfer(self, call: Call, batch: PageBatch, results: list[R], seconds: float) -> Judgement:
        kind = type(results[0])
        timeouts, errors = results.count(kind.TIMEOUT), results.count(kind.ERROR)
        # A write of a page that EXISTS is no evidence.
        answers = (SetResult.STORED,) if call.name == "set" else _ANSWERS
        answered = sum(result in answers for result in results)
        if timeouts and not answered:
            return _ran_out_of_time(call, "call", seconds)
        if timeouts:
            arrived = sum([size for size, r in zip(batch.sizes, results, strict=True) if r in answers])
            if arrived >= seconds * _SLOWEST_BANDWIDTH:
                # Slow for this size, but the pages that came in time are useful.
                return Outcome.GOOD, ""
            return Outcome.SLOW, f"{timeouts} of {len(results)} pages did not arrive within {seconds:.2g} s"
        if errors and errors >= answered:
            return Outcome.FAILED, f"{errors} of {len(results)} pages failed"
        if not answered:
            return Outcome.UNKNOWN, ""
        if seconds > self.slow_call + sum(batch.sizes) / _SLOWEST_BANDWIDTH:
            return Outcome.SLOW, f"a call took {seconds:.2g} s"
        return Outcome.GOOD, ""

    def raised(self, ticket: int, call: Call, error: Exception) -> None:
        """Judge a call that raised, which the contract forbids."""
        reason = f"a call raised {type(error).__name__}"
        writes = call.name in ("set", "remove")
        if writes:
            self.record_write(ticket, Outcome.FAILED, reason)
        if not writes or isinstance(error, ConnectionError):
            self.record(ticket, Outcome.FAILED, reason)

    def record_write(self, ticket: int, outcome: Outcome, reason: str = "") -> None:
        """Record how a write ended, like ``record``; it can pause only writes."""
        name = self._store.name
        if outcome is Outcome.GOOD:
            self._is_too_much("writes", ticket, False)
            if self.writes.end():
                self._log.log(logging.WARNING, "again", "hicache_ext: tier %s takes writes again", name)
        elif outcome is not Outcome.UNKNOWN:
            too_much = self._is_too_much("writes", ticket, True) or self.writes.in_doubt
            late = outcome in (Outcome.TIMEOUT, Outcome.LATE)
            if (too_much or late) and self.writes.begin(reason):
                words = (
                    "hicache_ext: tier %s: writes pause: %s; it is read as before, and written again after %g to %g s"
                )
                self._log.log(logging.WARNING, "pause", words, name, reason, WRITE_PAUSES.first, WRITE_PAUSES.longest)
            if late:
                # The tier may hang entirely; a probe should find that out, not the next call.
                self.examine(reason)

    def _examined(self) -> None:
        # A write that was cut early was merely slow, and the next one has more time.
        if self.writes.reason.endswith(_LEARNT):
            self.writes.end()

    def record(self, ticket: int, outcome: Outcome, reason: str = "") -> None:
        """Record how the read or look-up of ``ticket`` ended; ``reason`` is for the log."""
        if outcome is Outcome.UNKNOWN:
            return
        too_much = self._is_too_much("reads and look-ups", ticket, outcome is not Outcome.GOOD)
        if too_much or outcome in (Outcome.TIMEOUT, Outcome.LATE):
            self.trip(reason, ticket, in_doubt=outcome is Outcome.LATE)

    def record_read(self, ticket: int, damaged: bool, reason: str) -> None:
        """Record, separately from how a read ended, whether most of its pages were damaged."""
        if self._is_too_much("pages that arrived", ticket, damaged):
            self.trip(reason, ticket)

    def _is_too_much(self, score: str, ticket: int, bad: bool) -> bool:
        """Note a call; return whether enough calls of the last minute were bad. During slow start one is enough."""
        now = self._clock()
        with self._lock:
            if ticket != self._generation or self._state is BreakerState.OPEN:
                return False
            self._recent[score].append((now, bad))
            recent = [was_bad for when, was_bad in self._recent[score] if now - when <= _RECENT_SECONDS]
            half = sum(recent) >= _LEAST_BAD_CALLS and sum(recent) >= _BAD_SHARE * len(recent)
            return bad and (half or self._state is not BreakerState.CLOSED)

    def _change(self, state: BreakerState) -> None:
        super()._change(state)
        for calls in self._recent.values():
            calls.clear()

    def _changed(self, state: BreakerState, reason: str) -> None:
        name = self._store.name
        self._store.metrics.add("breaker", state.value)
        match state:
            case BreakerState.OPEN:
                self._opened_at = self._clock()
                logger.warning(
                    "hicache_ext: tier %s is left out: %s; its pages are misses until it answers", name, reason
                )
            case BreakerState.HALF_OPEN:
                down, slow_start = self._clock() - self._opened_at, self._slow_start
                words = "hicache_ext: tier %s answers again after %.2g s; calls come back over %g s"
                logger.warning(words, name, down, slow_start)
            case BreakerState.CLOSED:
                # Writes were paused on evidence from before the tier recovered.
                self.writes.end()
                logger.warning("hicache_ext: tier %s is in full use again", name)

    # -- probing ---------------------------------------------------------------------------------------------------

    def _is_healthy(self) -> bool:
        """Return whether a read and a look-up are answered in time."""
        key, size = self._suspect or (_PROBE_KEY, 1)
        begun, healthy, longest = self._clock(), False, self.slow_call
        try:
            (result,) = self._read(PageBatch([key], [[memoryview(bytearray(size))]]))
            if result in _ANSWERS and self._clock() - begun <= longest + size / _SLOWEST_BANDWIDTH:
                begun = self._clock()
                healthy = self._look_up(key) and self._clock() - begun <= longest
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is not well
            logger.debug("hicache_ext: tier %s: the probe raised %r", self._store.name, error)
            healthy = False
        self._store.metrics.add("breaker_probe", "good" if healthy else "bad")
        return healthy


def _ran_out_of_time(call: Call, what: str, seconds: float) -> Judgement:
    reason = f"a {what} did not end within {seconds:.2g} s"
    return (Outcome.LATE, f"{reason}{_LEARNT}") if call.learnt else (Outcome.TIMEOUT, reason)

"""The circuit breaker around a store: judges its calls, refuses them while it is open, probes it in the background.

A probe reads the page whose read failed, or one that is absent, on a thread of its own into memory of its own: never on
SGLang's threads, never into host pages. The thread lives until the breaker is closed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.breaker import BreakerState
from hicache_ext.runtime.call_deadline import call_limit, ending_within
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult, StoreInfo
from hicache_ext.storage.contract.wrapper import DelegatingStore
from hicache_ext.storage.guards.concurrency import counting_seconds_queued, seconds_queued
from hicache_ext.storage.guards.tier_breaker import BreakerSettings, Outcome, TierBreaker
from hicache_ext.storage.guards.time_limit import AT_LIMIT

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_KEY = b"hicache_ext/prob" + bytes(32)
"""A page that nobody stores."""
_SLOWEST_BANDWIDTH = 100e6
"""Bytes per second. A slower read takes longer than to compute the pages again."""
_SLOWEST_LOOK_UP = 0.001
"""Seconds per key found, beyond ``slow_call``: to compute a page takes several times as long."""
_CLOSE_WAIT = 10.0
_NOT_ANSWERED = frozenset({"timeout", "error", "rejected"})


class BreakerStore(DelegatingStore):
    """Answers REJECTED and False at once while the tier is given up. Threads: any."""

    def __init__(
        self,
        inner: PageStore,
        settings: BreakerSettings,
        timeout: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``timeout``: of a read or look-up of ``inner`` without a shorter limit; None: no timeout."""
        super().__init__(inner)
        self._settings = settings
        self._timeout = timeout
        self._clock = clock
        self._breaker = TierBreaker(inner.name, settings, self._is_healthy, self._changed, clock)
        self._suspect: tuple[bytes, int] | None = None
        """Key and payload bytes of a page whose read failed."""
        self._opened_at = 0.0

    def take_over(self, before: BreakerStore) -> None:
        """Continue from the state of the former breaker of the same store. Before the first call.

        Probing continues with ``resume``, because these guards may never be put in force.
        """
        self._breaker.take_over(before._breaker)
        self._suspect, self._opened_at = before._suspect, before._opened_at

    def resume(self) -> None:
        """These guards are in force now: probe the tier if its former breaker was open."""
        self._breaker.resume()

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def describe(self) -> StoreInfo:
        info = self.inner.describe()
        return StoreInfo(info.name, info.type, info.shared, {**info.details, "breaker": self.state.value})

    def gauges(self) -> dict[str, float]:
        return {"breaker_state": self.state.level}

    # -- calls -----------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        def judge(results: list[GetResult], seconds: float) -> tuple[Outcome, str]:
            outcome, reason = self._judged_transfer([result.value for result in results], batch, seconds)
            if outcome is not Outcome.GOOD and batch.keys:
                self._suspect = (batch.keys[0], batch.sizes[0])
            return outcome, reason

        return self._guarded(
            lambda: self.inner.get(batch),
            [GetResult.REJECTED] * len(batch),
            [GetResult.ERROR] * len(batch),
            judge,
            len(batch),
            self._judge_pages,
        )

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._guarded(
            lambda: self.inner.set(batch),
            [SetResult.REJECTED] * len(batch),
            [SetResult.ERROR] * len(batch),
            lambda results, seconds: self._judged_transfer([result.value for result in results], batch, seconds),
            len(batch),
        )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        absent = [False] * len(keys)
        return self._guarded(
            lambda: self.inner.contains(keys),
            absent,
            absent,
            lambda present, seconds: self._judged_answer(sum(present), seconds),
            len(keys),
        )

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self._guarded(
            lambda: self.inner.count_leading(keys),
            0,
            0,
            self._judged_answer,
            len(keys),
        )

    def remove(self, keys: Sequence[bytes]) -> int:
        return self._guarded(
            lambda: self.inner.remove(keys),
            0,
            0,
            self._judged_answer,
            len(keys),
        )

    # clear() and register_identity() are rare, and a refused one is lost: they pass in every state.

    def close(self) -> None:
        self._breaker.close(0)
        self.inner.close()
        self._breaker.close(_CLOSE_WAIT)

    def _guarded(
        self,
        work: Callable[[], T],
        refused: T,
        failed: T,
        judge: Callable[[T, float], tuple[Outcome, str]],
        pages: int,
        judge_pages: Callable[[int, T], None] = lambda ticket, answer: None,
    ) -> T:
        if self._breaker.closing:
            raise StoreClosedError(self.name)
        ticket = self._breaker.admit()
        if ticket is None:
            self.metrics.add("rejected", "breaker", pages)
            return refused
        begun = self._clock()
        with counting_seconds_queued():
            try:
                answer = work()
            except StoreClosedError:
                raise
            except Exception as error:  # noqa: BLE001 - a store that breaks its promise is a store that failed
                logger.warning("hicache_ext: tier %s: a call raised %r", self.name, error)
                self.metrics.add("error", "raised")
                self._breaker.record(ticket, Outcome.FAILED, f"a call raised {type(error).__name__}")
                return failed
            # Our own queue is no evidence against the tier.
            outcome, reason = judge(answer, self._clock() - begun - seconds_queued())
        self._breaker.record(ticket, outcome, reason)
        judge_pages(ticket, answer)
        return answer

    # -- judgement -------------------------------------------------------------------------------------------------

    def _judged_transfer(self, results: Sequence[str], batch: PageBatch, seconds: float) -> tuple[Outcome, str]:
        timeouts, errors = results.count("timeout"), results.count("error")
        answered = sum(result not in _NOT_ANSWERED for result in results)
        if timeouts and not answered:
            return _ran_out_of_time("call", seconds)
        if timeouts:
            arrived = sum(
                size for size, result in zip(batch.sizes, results, strict=True) if result not in _NOT_ANSWERED
            )
            if arrived >= seconds * _SLOWEST_BANDWIDTH:
                # Slow for this size, but the pages that came in time are of use.
                return Outcome.GOOD, ""
            return Outcome.SLOW, f"{timeouts} of {len(results)} pages did not arrive within {seconds:.2g} s"
        if errors and errors >= answered:
            return Outcome.FAILED, f"{errors} of {len(results)} pages failed"
        if not answered:
            return Outcome.UNKNOWN, ""
        if seconds > self._settings.slow_call + sum(batch.sizes) / _SLOWEST_BANDWIDTH:
            return Outcome.SLOW, f"a call took {seconds:.2g} s"
        return Outcome.GOOD, ""

    def _judge_pages(self, ticket: int, results: Sequence[GetResult]) -> None:
        """A damaged page is computed again. If most pages are damaged, reads cost their transfers for nothing."""
        damaged, good = results.count(GetResult.CORRUPT), results.count(GetResult.HIT)
        if damaged or good:
            self._breaker.record_read(ticket, damaged >= good, f"{damaged} of {damaged + good} pages were damaged")

    def _judged_answer(self, found: int, seconds: float) -> tuple[Outcome, str]:
        """The outcome of a look-up: failures look like absence, so only time and pages found are evidence."""
        limit = call_limit()
        timeout = self._timeout if limit is None else limit.seconds
        if not found and timeout is not None and seconds >= (timeout - seconds_queued()) * AT_LIMIT:
            return _ran_out_of_time("look-up", seconds)
        if seconds > self._settings.slow_call + found * _SLOWEST_LOOK_UP:
            return Outcome.SLOW, f"a look-up took {seconds:.2g} s"
        return (Outcome.GOOD, "") if found else (Outcome.UNKNOWN, "")

    # -- probing ---------------------------------------------------------------------------------------------------

    def _changed(self, state: BreakerState, reason: str) -> None:
        self.metrics.add("breaker", state.value)
        match state:
            case BreakerState.OPEN:
                self._opened_at = self._clock()
                logger.warning(
                    "hicache_ext: tier %s is left out: %s; its pages are misses until it answers", self.name, reason
                )
            case BreakerState.HALF_OPEN:
                logger.warning(
                    "hicache_ext: tier %s answers again after %.2g s; calls come back over %g s",
                    self.name,
                    self._clock() - self._opened_at,
                    self._settings.slow_start,
                )
            case BreakerState.CLOSED:
                logger.warning("hicache_ext: tier %s is in full use again", self.name)

    def _is_healthy(self) -> bool:
        """Whether a read is answered in time."""
        key, size = self._suspect or (_PROBE_KEY, 1)
        begun = self._clock()
        try:
            with nullcontext() if self._timeout is None else ending_within(self._timeout):
                (result,) = self.inner.get(PageBatch([key], [[memoryview(bytearray(size))]]))
        except Exception as error:  # noqa: BLE001 - whatever it raises, it is not well
            logger.debug("hicache_ext: tier %s: the probe raised %r", self.name, error)
            result = GetResult.ERROR
        quick = self._clock() - begun <= self._settings.slow_call + size / _SLOWEST_BANDWIDTH
        healthy = quick and result in (GetResult.HIT, GetResult.MISS, GetResult.CORRUPT)
        self.metrics.add("breaker_probe", "good" if healthy else "bad")
        return healthy


def _ran_out_of_time(what: str, seconds: float) -> tuple[Outcome, str]:
    limit = call_limit()
    reason = f"a {what} did not end within {seconds:.2g} s"
    if limit is not None and limit.learnt:
        return Outcome.LATE, f"{reason}, the limit learnt from earlier ones"
    return Outcome.TIMEOUT, reason

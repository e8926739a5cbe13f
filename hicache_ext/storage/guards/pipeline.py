"""The guards of a tier: which of them it gets, and the pipeline that applies them to every call of the tier.

The order of its rules, from SGLang inwards, and the reason for each position:

1. *Exists budget*: look-ups of SGLang's scheduler run on another thread. This is the outermost rule, because everything
   below may wait. Absence of a page is never cached: SGLang asks for a chain again because somebody may have written it
   meanwhile, and it asks every time it schedules, which no fixed number of seconds here could match.
2. *Time limit* (time_limits.py): from here on a call has a deadline, which the queue, the retries and the store share.
   The breaker's probes enter behind it and have the whole timeout, not the learnt one. Reads and look-ups delay a first
   token; writes do not, and may take longer. Each kind learns separately.
3. *Breaker* (breaker.py): refuses calls while the tier is given up. While only writes are paused, a write just looks up
   which pages the tier already has. A refused call takes no place in the queue.
4. *Concurrency limit*: bounds the calls in flight (reads, writes, promotion, prefetch together); removals are rare and
   bypass it. The queue is this process's own and is no evidence about the tier. So a call waits at most half of its
   time, which leaves the tier twice what its slowest recent call took; the breaker subtracts the wait.
5. *Deadline* (time_limits.py): ends the call, for a store that cannot do so itself. A call that waits for a place holds
   no bounce memory.
6. *Retry*: pages whose transfer failed are retried while there is time, on the thread of the deadline.

The store comes last; a store that opens late (late_open.py) is treated like any other here. clear() and
register_identity() are rare, and a refused one would be lost: they pass in every state.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache_ext.config.tier import READ_TIMEOUT, WRITE_TIMEOUT, TierConfig
from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.call_deadline import Unanswered, ending_at, must_answer_at_once
from hicache_ext.runtime.file_systems import is_on_network
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import leading, one_for_each
from hicache_ext.storage.contract.store import DelegatingStore, GetResult, PageBatch, PageStore, SetResult, StoreInfo
from hicache_ext.storage.guards.breaker import PROBE_INTERVAL, SLOW_CALL, SLOW_START, TierBreaker
from hicache_ext.storage.guards.time_limits import Call, Deadline, LearntLimit

logger = logging.getLogger(__name__)

R = TypeVar("R", GetResult, SetResult)
T = TypeVar("T")

RETRIES = 1
_LONGEST_CLOSE = 60.0
"""Seconds that close() waits for a tier whose timeout was switched off."""
CONCURRENCY = 16
EXISTS_BUDGET = 0.005
BOUNCE_MEMORY = 256 * 1024 * 1024
"""Bytes for all calls in flight on a tier; only what is used is allocated."""

LEAST_READ = 0.25
"""Seconds. A lower limit would cut good calls: a busy machine, a server that forks, a new connection."""
LEAST_WRITE = 1.0
_RETRY_PAUSES = Backoff(0.015, math.inf)
"""Seconds before a retry."""
_LATEST_RETRY = 0.25
"""Share of the limit after which no retry begins: a retry may take as long as the first attempt."""
_CLOSE_WAIT = 10.0


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """The guards of one tier, every "auto" resolved. Seconds and bytes."""

    timeout: float = math.inf
    """Limit of a read or a look-up."""
    write_timeout: float | None = None
    """Limit of a write; None: ``timeout``."""
    bounce_memory: int = 0
    """0: the store enforces its timeout itself."""
    retries: int = 0
    slow_call: float = SLOW_CALL
    """Parameter of ``TierBreaker``, like the next two."""
    probe_interval: float = PROBE_INTERVAL
    slow_start: float = SLOW_START
    concurrency: int = CONCURRENCY
    exists_budget: float = EXISTS_BUDGET


def plan_guards(tier: TierConfig) -> GuardPlan:
    """Return the guards for a tier as configured, on this node.

    A tier on local disks has none unless they are configured: its reads go straight into host pages,
    and a copy through bounce memory would cost more than it protects from (docs/guards.md).
    """
    remote = tier.remote or any(is_on_network(path) for path in tier.directories())
    timeout = tier.timeout if tier.timeout is not None else READ_TIMEOUT if remote else math.inf
    limited = timeout != math.inf
    # A longer timeout means that slow calls are expected. A local disk without a timeout is never slow.
    slow_call = SLOW_CALL if remote and not limited else max(SLOW_CALL, timeout / 2)
    return GuardPlan(
        timeout=timeout,
        write_timeout=WRITE_TIMEOUT if remote and tier.timeout is None else None,
        bounce_memory=BOUNCE_MEMORY if limited and not tier.keeps_timeout else 0,
        retries=RETRIES if remote else 0,
        slow_call=slow_call,
    )


class GuardedStore(DelegatingStore):
    """A store behind the guards of a plan. Threads: any."""

    def __init__(
        self,
        inner: PageStore,
        plan: GuardPlan,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._sleep = sleep
        self._reads, self._look_ups = LearntLimit(LEAST_READ, clock), LearntLimit(LEAST_READ, clock)
        self._writes = LearntLimit(LEAST_WRITE, clock)
        self._retries = plan.retries
        self._places = threading.Semaphore(plan.concurrency)
        self._budget = ExistsBudget(inner, plan.exists_budget, clock)
        self.deadline: Deadline | None = None
        self.breaker = TierBreaker(
            inner,
            self._read_to_probe,
            self._look_up_to_probe,
            probe_interval=plan.probe_interval,
            slow_start=plan.slow_start,
            clock=clock,
        )
        self.put_limits(plan)

    # -- state and limits ----------------------------------------------------------------------------------------------

    def describe(self) -> StoreInfo:
        info = self.inner.describe()
        details = {**info.details, "breaker": self.breaker.state.value}
        return StoreInfo(info.name, info.type, info.shared, details)

    def gauges(self) -> dict[str, float]:
        return {"breaker_state": self.breaker.state.level}

    def put_limits(self, plan: GuardPlan) -> None:
        """Apply the timeouts of ``plan`` to calls that begin from now on. All else stays: a tier that is down is not up
        because its limits have changed."""
        if plan.bounce_memory and self.deadline is None:
            self.deadline = Deadline(self.inner, plan.bounce_memory)
        self._reads.longest = self._look_ups.longest = plan.timeout
        self._writes.longest = plan.timeout if plan.write_timeout is None else plan.write_timeout
        self.breaker.slow_call = plan.slow_call

    def being_written(self) -> set[bytes]:
        """Return the pages whose write may still reach the store, even if its caller was answered TIMEOUT."""
        return set() if self.deadline is None else self.deadline.being_written()

    def close(self) -> None:
        self.breaker.close(0)
        try:
            if self.deadline is None:
                self.inner.close()
            else:
                self.deadline.close(self.inner.close, min(self._writes.longest, _LONGEST_CLOSE))
        finally:
            self.breaker.close(_CLOSE_WAIT)
            self._budget.close()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = self._read(batch)
        if self._budget.knows_some and results.count(GetResult.HIT) < len(results):
            gone = [key for key, result in zip(batch.keys, results, strict=True) if result is not GetResult.HIT]
            self._budget.forget(gone)
        return results

    def set(self, batch: PageBatch) -> list[SetResult]:
        self._check_open()
        if self.breaker.examining or self.breaker.writes.reason:
            # While the tier is examined it isn't asked for present pages either: if it hangs, that costs a deadline.
            present = [False] * len(batch) if self.breaker.examining else self.contains(batch.keys)
            self.metrics.add("rejected", "paused", present.count(False))
            return [SetResult.EXISTS if there else SetResult.REJECTED for there in present]
        call = self._writes.begin("set", len(batch), sum(batch.sizes))
        return self._transfer(call, batch, self.inner.set, SetResult, SetResult.STORED)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._check_open()
        if must_answer_at_once():
            return self._budget.contains(keys, self._ask_each)
        return self._ask_each(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        self._check_open()
        if must_answer_at_once():
            return self._budget.count_leading(keys, self._ask_leading)
        return self._ask_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        call = Call("remove", len(keys), self._clock(), self._writes.longest)
        try:
            return self._ask(call, self.inner.remove, keys, 0, int)
        finally:
            self._budget.forget(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        try:
            return self.inner.clear(digests)
        finally:
            self._budget.forget()

    def _check_open(self) -> None:
        if self.breaker.closing:
            raise StoreClosedError(self.name)

    # -- calls: to the store -------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        call = self._reads.begin("get", len(batch), sum(batch.sizes))
        return self._transfer(call, batch, self.inner.get, GetResult, GetResult.HIT)

    def _read_to_probe(self, batch: PageBatch) -> list[GetResult]:
        """Read for the breaker's probe, with the whole timeout."""
        call = Call("get", len(batch), self._clock(), self._reads.longest, unanswered=Unanswered(is_probe=True))
        work = functools.partial(self._in_time, call, batch, self.inner.get, GetResult)
        return self._in_turn(call, work, [GetResult.REJECTED])

    def _look_up_to_probe(self, key: bytes) -> bool:
        """Look up a page for the breaker's probe, with the whole timeout; return whether it was answered."""
        call = Call("contains", 1, self._clock(), self._look_ups.longest, unanswered=Unanswered(is_probe=True))
        ask: Callable[[], list[bool] | None] = functools.partial(self.inner.contains, [key])
        deadline = self._deadline_of(call)
        work = ask if deadline is None else functools.partial(deadline.answer, call, ask, None)
        return self._in_turn(call, work, None) is not None and not call.unanswered.pages

    def _transfer(
        self, call: Call, batch: PageBatch, move: Callable[[PageBatch], list[R]], kind: type[R], moved: R
    ) -> list[R]:
        def judge(ticket: int, results: list[R], seconds: float) -> int:
            self.breaker.transferred(ticket, call, batch, results, seconds)
            return batch.bytes_of(moved, results)

        work = functools.partial(self._in_time, call, batch, move, kind)
        return self._passed(call, work, [kind.REJECTED] * call.pages, [kind.ERROR] * call.pages, judge)

    def _in_time(self, call: Call, batch: PageBatch, move: Callable[[PageBatch], list[R]], kind: type[R]) -> list[R]:
        """Move the batch, with retries, by the deadline of the call."""

        def move_with_retries(part: PageBatch) -> list[R]:
            return self._with_retries(call, part, move, kind.ERROR)

        deadline = self._deadline_of(call)
        return move_with_retries(batch) if deadline is None else deadline.transfer(call, batch, move_with_retries, kind)

    def _deadline_of(self, call: Call) -> Deadline | None:
        """Return the guard that ends this call; None if the store does so itself or the call has no limit."""
        return self.deadline if call.seconds < math.inf else None

    def _ask_each(self, keys: Sequence[bytes]) -> list[bool]:
        call = self._look_ups.begin("contains", len(keys), len(keys))
        return self._ask(call, self.inner.contains, keys, [False] * len(keys), sum)

    def _ask_leading(self, keys: Sequence[bytes]) -> int:
        call = self._look_ups.begin("count_leading", len(keys), len(keys))
        return self._ask(call, self.inner.count_leading, keys, 0, int)

    def _ask(
        self,
        call: Call,
        ask: Callable[[Sequence[bytes]], T],
        keys: Sequence[bytes],
        nothing: T,
        found: Callable[[T], int],
    ) -> T:
        def ask_in_time() -> T:
            if (deadline := self._deadline_of(call)) is None:
                return ask(keys)
            # A copy, because a call that is left behind must not see later changes to the caller's list.
            return deadline.answer(call, functools.partial(ask, list(keys)), nothing)

        def judge(ticket: int, answer: T, seconds: float) -> int:
            number = found(answer)
            self.breaker.answered(ticket, call, number, seconds)
            # contains() has looked at all keys, count_leading() only up to the first gap.
            return call.amount if number and call.name == "contains" else number

        return self._passed(call, ask_in_time, nothing, nothing, judge)

    # -- the rules that every call passes ------------------------------------------------------------------------------

    def _passed(
        self, call: Call, work: Callable[[], T], refused: T, failed: T, judge: Callable[[int, T, float], int]
    ) -> T:
        """Return the answer of ``work``. ``judge(ticket, answer, seconds)`` informs the breaker and returns the amount
        that the answer is evidence for."""
        self._check_open()
        ticket = self.breaker.admit()
        if ticket is None:
            self.metrics.add("rejected", "breaker", call.pages)
            return refused
        begun = self._clock()
        evidence = 0
        try:
            answer = self._in_turn(call, work, refused)
            # Our own queue is no evidence against the tier.
            evidence = judge(ticket, answer, self._clock() - begun - call.queued)
        except StoreClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - a store that breaks its promise is a store that failed
            logger.warning("hicache_ext: tier %s: a call raised %r", self.name, error)
            self.metrics.add("error", "raised")
            answer = failed
            self.breaker.raised(ticket, call, error)
        call.ended(evidence, self._clock())
        return answer

    def _in_turn(self, call: Call, work: Callable[[], T], refused: T) -> T:
        """Run ``work`` within the concurrency limit, with the deadline of its call."""
        is_limited = call.name != "remove"
        if is_limited:
            patience = 0.0 if must_answer_at_once() else min(call.seconds, self._reads.longest) / 2
            begun = self._clock()
            admitted = self._places.acquire(timeout=None if patience == math.inf else patience)
            call.queued = self._clock() - begun
            if not admitted:
                self.metrics.add("rejected", "concurrency", call.pages)
                return refused
        try:
            with ending_at(call.deadline, call.unanswered):
                return work()
        finally:
            if is_limited:
                self._places.release()

    def _with_retries(self, call: Call, batch: PageBatch, move: Callable[[PageBatch], list[R]], error: R) -> list[R]:
        """Move the batch; retry pages that ended in ERROR: MISS, CORRUPT, REJECTED and TIMEOUT are answers."""
        latest = self._clock() + call.seconds * _LATEST_RETRY
        results = one_for_each(move(batch), len(batch))
        for attempt in range(1, self._retries + 1):
            pause = _RETRY_PAUSES.pause(attempt)
            if error not in results or self._clock() + pause > latest:
                break
            self._sleep(pause)
            failed = [position for position, result in enumerate(results) if result is error]
            self.metrics.add("retry", call.name, len(failed))
            results = list(results)
            batch.move_at(failed, move, results)
        return results


# -- exists budget -----------------------------------------------------------------------------------------------------
#
# Decode nodes look pages up on SGLang's scheduler thread, where a store that hangs would stop every request. So the
# look-up runs on another thread. Pages not found within the budget are answered as absent; what the look-up finds
# later is kept for a few seconds for the next one.


_MOST_ENTRIES = 65536
"""Entries of the cache of found pages; about 10 MB."""
_FOUND_LIFE = 5.0
"""Seconds for which a found page is answered as present. A hint only: the read may still miss."""
_MOST_CALLS = 4
"""Number of calls left behind from which further look-ups are answered only from the cache."""


class ExistsBudget:
    """Answers the scheduler's look-ups within ``budget`` seconds. Threads: any."""

    def __init__(self, store: PageStore, budget: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._budget = budget
        self._clock = clock
        self.threads = ThreadPool(f"hicache-{store.name}-exists")
        self._lock = threading.Lock()
        self._found: dict[bytes, float] = {}
        """Key -> time until which it is answered as present, in order of that time: all entries live equally long."""
        self._forgotten: dict[object, set[bytes]] = {}
        """Look-up in flight -> keys forgotten since it began, because it may have looked before that. A look-up that is
        no longer listed here caches nothing, because everything was forgotten."""

    def contains(self, keys: Sequence[bytes], ask: Callable[[list[bytes]], list[bool]]) -> list[bool]:
        known = self._known(keys)
        asked = [key for key, present in zip(keys, known, strict=True) if not present]
        found = set(
            self._found_in_time(asked, lambda: [k for k, there in zip(asked, ask(asked), strict=True) if there])
        )
        return [present or key in found for key, present in zip(keys, known, strict=True)]

    def count_leading(self, keys: Sequence[bytes], count: Callable[[list[bytes]], int]) -> int:
        known = leading(self._known(keys))
        asked = list(keys[known:])
        return known + len(self._found_in_time(asked, lambda: asked[: count(asked)]))

    @property
    def knows_some(self) -> bool:
        return bool(self._found or self._forgotten)

    def forget(self, keys: Sequence[bytes] | None = None) -> None:
        """Forget what is cached about ``keys`` (None: all), because it may have changed."""
        with self._lock:
            if keys is None:
                self._found.clear()
                self._forgotten.clear()
            elif self.knows_some:
                for key in keys:
                    self._found.pop(key, None)
                for forgotten in self._forgotten.values():
                    forgotten.update(keys)

    def close(self) -> None:
        if self.threads.close(_CLOSE_WAIT):
            words = "hicache_ext: tier %s: a look-up hangs in the store; its thread ends with it"
            logger.warning(words, self._store.name)

    def _known(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            # Keys in numeric form need not be converted while nothing is cached.
            if not self._found or self._found.keys().isdisjoint(keys):
                return [False] * len(keys)
            now = self._clock()
            return [self._found.get(key, 0.0) > now for key in keys]

    def _remember(self, keys: Iterable[bytes]) -> None:
        """Cache ``keys`` as present; drop expired entries. The lock is held."""
        now = self._clock()
        for key in keys:
            self._found.pop(key, None)
            self._found[key] = now + _FOUND_LIFE
        while self._found:
            oldest = next(iter(self._found))
            if len(self._found) <= _MOST_ENTRIES and self._found[oldest] > now:
                break
            del self._found[oldest]

    def _found_in_time(self, asked: Sequence[bytes], find: Callable[[], list[bytes]]) -> list[bytes]:
        """Return what ``find`` finds of ``asked``, on another thread; nothing if it did not end within the budget."""

        def look() -> list[bytes]:
            found, look_up = list[bytes](), object()
            with self._lock:
                self._forgotten[look_up] = set()
            try:
                found = find()
            except StoreClosedError:
                pass  # the store was closed during the look-up
            except Exception as error:  # noqa: BLE001 - nobody may be waiting for it any more
                logger.warning("hicache_ext: tier %s: a look-up raised %r", self._store.name, error)
            finally:
                with self._lock:
                    forgotten = self._forgotten.pop(look_up, None)
                    if forgotten is not None:
                        self._remember([key for key in found if key not in forgotten])
            return found

        if not asked:
            return []
        if self.threads.left_behind >= _MOST_CALLS:
            self._store.metrics.add("exists_budget", "busy")
            return []
        try:
            call = self.threads.start(look)
        except RuntimeError:
            return []
        if call.ended_within(self._budget):
            return call.result()
        self._store.metrics.add("exists_budget", "exceeded")
        return []

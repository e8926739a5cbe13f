"""How long a call may take: the configured timeout, or less if recent calls of the tier took less.

A tier that answers within milliseconds and then hangs should not cost the whole timeout. A call gets four times what
the slowest of the last 32 calls of its size took, at least ``least`` (a busy machine, a new connection) and at most
``longest`` (the configured timeout). A size with few calls also uses those of the next larger sizes; if these are too
few as well, it gets ``longest``.

A call cut at a learnt limit shows that the limits of all sizes are too low: the next call of any size gets four times
as much. So a tier that became slower is in use again after a call or two, and a tier that hangs does not cost one limit
per size. A call cut at ``longest`` says nothing about other sizes: a large call may always need that long.
Measurements: docs/decisions/guards.md.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hicache_ext.errors import NotBegunError, StoreClosedError, TooLateError
from hicache_ext.page.page_object import gather, scatter
from hicache_ext.runtime.call_deadline import Unanswered
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.threads import ThreadPool, call_within
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult, portions, put_back
from hicache_ext.storage.contract.transforming.page_memory import Lease, LentMemory

logger = logging.getLogger(__name__)

R = TypeVar("R", GetResult, SetResult)
T = TypeVar("T")

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
    """One call on its way through the guards. Times are seconds by the clock of the guards."""

    name: str
    """Name of the PageStore's method."""
    pages: int
    begun: float
    seconds: float
    """Limit of the call; infinite without a timeout."""
    amount: int = 0
    """Bytes or keys."""
    limits: LearntLimit | None = None
    """The limit that learns from this call, if any."""
    learnt: bool = False
    """Whether the limit is shorter than configured."""
    queued: float = 0.0
    """Time spent waiting for a place in the concurrency limit."""
    unanswered: Unanswered = field(default_factory=Unanswered)
    """Pages whose presence a look-up could not determine."""

    @property
    def deadline(self) -> float:
        return self.begun + self.seconds

    def ended(self, shown: int, now: float) -> None:
        """Learn from the call. ``shown``: the amount that its answer is evidence for: absent pages take no time, and
        failed ones are no evidence."""
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
        """Nothing is learnt if ``longest`` is infinite or at most ``least``."""
        self.longest = longest
        """May change; applies to calls that begin later. What was learnt stays."""
        self._least = least
        self._clock = clock
        self._lock = threading.Lock()
        self._by_size: dict[int, deque[tuple[float, float]]] = {}
        """log2 of the amount -> (end time, seconds) of recent calls."""

    def begin(self, name: str, pages: int, amount: int) -> Call:
        """Begin a call of ``amount`` now."""
        longest, seconds = self.longest, self.seconds(amount)
        return Call(name, pages, self._clock(), seconds, amount, self, seconds < longest)

    def seconds(self, amount: int) -> float:
        """Return the limit of a call of ``amount``."""
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
        """Learn from a call of ``amount`` that has ended, or was cut at ``longest``, after ``seconds``."""
        with self._lock:
            self._calls_of(amount).append((self._clock(), seconds))

    def observe_cut(self, amount: int, seconds: float) -> None:
        """Learn from a call of ``amount`` that was cut at a learnt limit, after ``seconds``."""
        with self._lock:
            self._calls_of(amount)
            for calls in self._by_size.values():
                calls.append((self._clock(), seconds))

    def _calls_of(self, amount: int) -> deque[tuple[float, float]]:
        """Return the recent calls of this size class. The lock is held."""
        return self._by_size.setdefault(amount.bit_length(), deque(maxlen=_RECENT_CALLS))


# -- the deadline guard ------------------------------------------------------------------------------------------------
#
# No call takes longer than its limit, and a late one touches no host page. The guard is for stores that cannot end a
# call themselves (a hung NFS mount, a client library that waits). The call runs on another thread, with
# *bounce memory* of the guard in place of SGLang's host pages: a read is copied into the host pages only if it ended in
# time; a write goes out from a copy. A late call is left behind and keeps its piece of that memory until it ends. When
# too many calls are left behind, or they hold too much memory, further calls are REJECTED immediately.


MOST_STUCK_CALLS = 8
"""Number of calls left behind from which further ones are refused: each holds a thread."""
_PORTIONS = 4
"""A batch takes at most 1/_PORTIONS of the bounce memory at a time, so that several calls can have some."""


class Deadline:
    """Ends each call of ``store`` by its own deadline. Threads: any."""

    def __init__(self, store: PageStore, bounce_memory: int) -> None:
        """``bounce_memory``: bytes for all calls in flight; a page that is larger waits until they have ended."""
        self._store = store
        self.bounce = LentMemory(bounce_memory)
        self._portion = bounce_memory // _PORTIONS
        self._threads = ThreadPool(f"hicache-{store.name}-deadline")
        self._calls = CallGate(store.name)
        self._being_written: dict[int, PageBatch] = {}
        """Writes in flight, including those left behind."""

    def being_written(self) -> set[bytes]:
        """Return the pages whose write may still reach the store, even if its caller was answered TIMEOUT."""
        return {key for batch in list(self._being_written.values()) for key in batch.keys}

    @property
    def stuck_calls(self) -> int:
        """Number of calls that were left behind and have not ended."""
        return self._threads.left_behind

    def answer(self, call: Call, work: Callable[[], T], otherwise: T) -> T:
        """Return or raise what ``work`` does; return ``otherwise`` if it does not end in time."""
        with self._calls:
            try:
                return self._ended(work, call.deadline)
            except TooLateError:
                self._count("timeout", call.name)
            except NotBegunError:
                self._count("rejected", "stuck")
            return otherwise

    def transfer(self, call: Call, batch: PageBatch, move: Callable[[PageBatch], list[R]], kind: type[R]) -> list[R]:
        """Move the batch over bounce memory, portion by portion; pages that are not done in time are TIMEOUT."""
        results = [kind.TIMEOUT] * len(batch)
        with self._calls:
            try:
                for portion in portions(range(len(batch)), batch.sizes, self._portion):
                    try:
                        answers = self._transfer_portion(call, batch.select(portion), move)
                    except (TooLateError, NotBegunError, StoreClosedError):
                        raise
                    except Exception as error:
                        # If a store breaks its contract by raising, only the pages of this portion are lost.
                        if len(portion) == len(batch):
                            raise
                        logger.warning("hicache_ext: tier %s: a part of a call raised %r", self._store.name, error)
                        self._store.metrics.add("error", "raised")
                        answers = [kind.ERROR] * len(portion)
                    put_back(results, portion, answers)
            except TooLateError:
                self._count("timeout", call.name, results.count(kind.TIMEOUT))
            except NotBegunError:
                results = [kind.REJECTED if result is kind.TIMEOUT else result for result in results]
                self._count("rejected", "stuck", results.count(kind.REJECTED))
        return results

    def close(self, close_store: Callable[[], None], seconds: float) -> None:
        """Wait for calls in flight, including the store's own close(), for at most ``seconds``."""
        if not self._calls.shut():
            return
        name, deadline = self._store.name, time.monotonic() + seconds
        try:
            closing = call_within(seconds, f"hicache-{name}-close", close_store)
        except RuntimeError:
            closing = None
        if closing is None:
            logger.warning("hicache_ext: tier %s: did not close within %g s", name, seconds)
        left = self._threads.close(max(0.0, deadline - time.monotonic()))
        if left:
            logger.warning("hicache_ext: tier %s: %d calls hang in the store; their threads end with them", name, left)
        if closing is not None:
            closing.result()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _transfer_portion(self, call: Call, given: PageBatch, move: Callable[[PageBatch], list[R]]) -> list[R]:
        with self._lent(given, call.deadline) as (lease, bounced):
            if call.name == "set":
                for segments, (target,) in zip(given.buffers, bounced.buffers, strict=True):
                    gather(segments, target)
                self._being_written[id(bounced)] = bounced

            def carry_out() -> list[R]:
                try:
                    return move(bounced)
                finally:
                    self._being_written.pop(id(bounced), None)

            try:
                answers = self._ended(carry_out, call.deadline, lease)
            except NotBegunError:
                self._being_written.pop(id(bounced), None)
                raise
            if call.name == "get":
                read: list[Any] = answers
                for answer, segments, (source,) in zip(read, given.buffers, bounced.buffers, strict=True):
                    if answer is GetResult.HIT:
                        scatter(source, segments)
            return answers

    @contextmanager
    def _lent(self, batch: PageBatch, deadline: float) -> Iterator[tuple[Lease, PageBatch]]:
        """Yield a lease of bounce memory and the batch over it, one segment per page."""
        lease = self.bounce.take(batch.sizes, deadline)
        if lease is None:
            raise TooLateError if time.monotonic() >= deadline else NotBegunError
        try:
            yield lease, PageBatch(batch.keys, [[piece] for piece in lease.pieces], batch.sizes)
        finally:
            if not lease.in_use:
                self.bounce.give_back(lease)

    def _ended(self, work: Callable[[], T], deadline: float, lease: Lease | None = None) -> T:
        """Return or raise what ``work`` does if it ends by ``deadline``; else raise TooLateError or NotBegunError."""

        def end_late() -> None:
            if lease is not None:
                self.bounce.give_back(lease, stuck=True)
            self._count("late", "")

        if self.stuck_calls >= MOST_STUCK_CALLS:
            raise NotBegunError
        try:
            # The copied context carries the deadline of this call.
            running = self._threads.start(functools.partial(contextvars.copy_context().run, work), end_late)
        except RuntimeError:
            raise NotBegunError from None
        if lease is not None:
            lease.in_use = True
        if not running.ended_within(deadline - time.monotonic()):
            if lease is not None:
                # Safe even if the call ends between the lines above and this: both sides only add and subtract.
                self.bounce.leave_behind(lease)
            raise TooLateError
        if lease is not None:
            lease.in_use = False
        return running.result()

    def _count(self, event: str, reason: str, amount: int = 1) -> None:
        if amount:
            self._store.metrics.add(event, reason, amount)

"""A thread pool for all work besides the caller's.

``run``: does the pieces of one call in parallel with the help of the caller, who waits for all of them.
``share``: does pieces of one call that wait for a medium. The calls in flight take turns, one piece each; the caller
leaves at its deadline.
``start``: does one call on a separate thread, which the caller may leave behind.

The threads are daemons. A pool of concurrent.futures would not do: the interpreter joins it on exit, so a call that
hangs forever would keep the server from stopping. Its futures also cost 20 us per piece, while a batch of small pages
takes 500 us (docs/decisions/rooms.md has the costs here).
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MOST_IDLE = 8
"""Most idle threads that a growing pool keeps for the next calls."""

_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


def run_alone() -> None:
    """Make ``run`` of any pool use only the calling thread, in this context from now on: there are already as many
    threads as processors, and more would compete for them."""
    _alone.set(True)


class _Pieces:
    """Work that the caller waits for."""

    __slots__ = ("_count", "_ended", "_ended_count", "_error", "_next", "_results", "_work")

    def __init__(self, count: int, work: Callable[[int], Any]) -> None:
        self._count = count
        self._work = work
        self._results: list[Any] = [None] * count
        # next() on a counter is one step under the GIL: no two threads get the same number.
        self._next = itertools.count()
        self._ended_count = itertools.count(1)
        self._ended = threading.Lock()
        self._error: BaseException | None = None
        if count:
            self._ended.acquire()

    def help(self) -> bool:
        """Do all remaining pieces; return False: there are none left to begin. Never raises what the work raises."""
        while (piece := next(self._next)) < self._count:
            try:
                self._results[piece] = self._work(piece)
            except BaseException as error:  # noqa: BLE001
                self._error = error
            if next(self._ended_count) == self._count:
                self._ended.release()
        return False

    def finish(self) -> list[Any]:
        """Help, wait until every piece has ended, and return the results in order, or re-raise a piece's exception."""
        self.help()
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._ended:
                    break
            except KeyboardInterrupt as error:
                # Other threads still use the memory and descriptors that the caller would release.
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if self._error is not None:
            raise self._error
        return self._results


class Call(Generic[Result]):
    """Work on other threads that its caller may leave behind: ``work(position, call)`` for each position, in order.

    Work that has begun cannot be interrupted. It runs on after the call is over, but may no longer touch the call's
    memory (``memory``), and its result is dropped.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[int, Call[Result]], Result | None],
        on_late_end: Callable[[], None] | None = None,
        left_behind: list[None] | None = None,
    ) -> None:
        """``left_behind`` has one more entry while the call goes on without its caller."""
        self.results: list[Result | None] = [None] * count
        """Results by position; None if the work did not end in time, was not begun after ``stop``, or raised."""
        self.error: BaseException | None = None
        """The last exception that the work raised."""
        self._work = work
        self._on_late_end = on_late_end
        self._left_behind = [] if left_behind is None else left_behind
        self._changed = threading.Condition()
        self._next = 0
        self._end = count
        self._running = 0
        self._in_memory = 0
        self._over = False
        self._late = False

    @property
    def ended(self) -> bool:
        """Return whether no position is running or still to begin."""
        with self._changed:
            return self._is_done()

    def stop(self, end: int = 0) -> None:
        """Begin no further positions from ``end`` on."""
        with self._changed:
            self._end = min(self._end, max(end, self._next))
            self._changed.notify_all()

    @contextmanager
    def memory(self) -> Iterator[bool]:
        """Guard every access to the call's memory: yield False if the call is over and the memory is no longer ours."""
        with self._changed:
            mine = not self._over
            self._in_memory += mine
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._in_memory -= 1
                    # Only then somebody waits for this; waking the caller once per page would cost it the GIL.
                    if self._over:
                        self._changed.notify_all()

    def ended_within(self, seconds: float, *, begin_no_more: bool = False) -> bool:
        """Wait; if this returns False, the call is left behind, and ``on_late_end`` is called once when it has ended.

        ``begin_no_more``: positions that were not begun never will be. After the return nothing touches the call's
        memory, and ``results`` and ``error`` do not change.
        """
        with self._changed:
            done = self._changed.wait_for(self._is_done, max(0.0, min(seconds, threading.TIMEOUT_MAX)))
            self._over = True
            self._late = not done
            if self._late:
                self._left_behind.append(None)
            if begin_no_more:
                self._end = self._next
            # A copy in memory takes microseconds, so this does not wait for a medium.
            self._changed.wait_for(lambda: self._in_memory == 0)
            return done

    def result(self) -> Result:
        """Return the result of the only position, or raise its exception. Only after ``ended_within`` was True."""
        if self.error is not None:
            raise self.error
        return self.results[0]  # type: ignore[return-value]  # it has ended

    def help(self) -> bool:
        """Do one position and return whether there are more to begin. Never raises what the work raises."""
        with self._changed:
            if self._next >= self._end:
                return False
            position = self._next
            self._next += 1
            self._running += 1
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = self._work(position, self)
        except BaseException as raised:  # noqa: BLE001 - includes a panic inside a client library
            error = raised
        with self._changed:
            self._running -= 1
            if not self._over:
                self.results[position] = result
                self.error = error or self.error
            done = self._is_done()
            if done:
                self._changed.notify_all()
            late = done and self._late
            more = self._next < self._end
        if late:
            try:
                if self._on_late_end is not None:
                    self._on_late_end()
            finally:
                self._left_behind.pop()
        return more

    def _is_done(self) -> bool:
        return self._running == 0 and self._next >= self._end


class ThreadPool:
    """A pool of daemon threads. Threads: any."""

    def __init__(self, name: str, threads: int | None = None, *, niceness: int = 0) -> None:
        """``threads``: how many to start now; raises RuntimeError when the machine has none left. None: ``start`` and
        ``run`` make as many as are needed at the same time, and some are kept.

        ``niceness`` is added to that of the process, for calls that spin while they wait, so that real work goes first.
        """
        self._name = name
        self._niceness = niceness
        self._grows = threads is None
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Pieces | Call[Any] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._left_behind: list[None] = []
        self._closed = False
        try:
            for number in range(threads or 0):
                self._add(f"{name}_{number}")
        except RuntimeError:
            self.close()
            raise

    @property
    def left_behind(self) -> int:
        """Return how many calls of ``start`` were left by their callers and have not ended."""
        return len(self._left_behind)

    def run(self, count: int, work: Callable[[int], Any], at_once: int | None = None) -> list[Any]:
        """Run ``work(0..count-1)`` on this thread and others, at most ``at_once`` in total; return the results, or
        raise, only when all have ended."""
        if count <= 1 or _alone.get():
            return [work(i) for i in range(count)]
        job = _Pieces(count, work)
        if self._grows:
            # If the pool was closed or no thread can be started, the caller does the work.
            with contextlib.suppress(RuntimeError):
                for _ in range(min(at_once or count, count) - 1):
                    self._submit(job)
        else:
            for _ in range(min(at_once or len(self._threads), len(self._threads), count) - 1):
                self._jobs.put(job)
        return job.finish()

    def share(
        self, count: int, work: Callable[[int, Call[Result]], Result | None], seconds: float
    ) -> tuple[list[Result | None], bool]:
        """Run ``work(position, call)`` for all positions, for at most ``seconds``; return results and if all ended."""
        if count == 0:
            return [], True
        call = Call(count, work)
        for _ in range(min(count, len(self._threads))):
            self._jobs.put(call)
        done = call.ended_within(seconds, begin_no_more=True)
        if call.error is not None:
            logger.error(
                "%s: a piece of a call ended in an error that nobody expected", self._name, exc_info=call.error
            )
        return call.results, done

    def start(self, work: Callable[[], Result], on_late_end: Callable[[], None] | None = None) -> Call[Result]:
        """Begin ``work`` on a separate thread. Only for growing pools.

        Raises RuntimeError when the machine has no thread left, or after close.
        """
        call: Call[Result] = Call(1, lambda position, call: work(), on_late_end, self._left_behind)
        self._submit(call)
        return call

    def close(self, seconds: float | None = None) -> int:
        """End the threads; return how many were still in a call after ``seconds``. Those end with their calls."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._jobs.put(None)
        deadline = None if seconds is None else time.monotonic() + seconds
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)

    def _submit(self, job: _Pieces | Call[Any]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle:
                self._idle -= 1
            else:
                self._add(self._name)
            self._jobs.put(job)

    def _add(self, name: str) -> None:
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def _serve(self) -> None:
        if self._niceness:
            # On Linux this affects only this thread. A sandbox may forbid it.
            with contextlib.suppress(OSError):
                os.nice(self._niceness)
        while (job := self._jobs.get()) is not None:
            try:
                if job.help():
                    self._jobs.put(job)
            except Exception:
                logger.exception("%s: after a late call", self._name)
            del job  # it holds a batch and its memory
            if self._grows:
                with self._lock:
                    if self._idle >= _MOST_IDLE and not self._closed:
                        self._threads.discard(threading.current_thread())
                        return
                    self._idle += 1


def call_within(
    seconds: float, name: str, work: Callable[[], Result], on_late_end: Callable[[], None] | None = None
) -> Call[Result] | None:
    """Run ``work`` once on a separate thread; return the call if it ended in time, None if it is left behind.

    Raises RuntimeError when the machine has no thread left.
    """
    pool = ThreadPool(name)
    call = pool.start(work, on_late_end)
    ended = call.ended_within(seconds)
    # After a call that has ended, the thread has nothing left to do, so this does not block.
    pool.close(None if ended else 0)
    return call if ended else None

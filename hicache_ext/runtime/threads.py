"""One pool of threads for everything that is done beside the caller.

``run``: pieces of one call, done in parallel with the help of the caller, who waits for all of them.
``share``: pieces of one call that wait for a medium. The calls under way take turns, a piece each; the caller leaves at
its deadline.
``start``: one call on a thread of its own, which the caller may leave behind.

The threads are daemons, and no pool of concurrent.futures would do: it is joined when the interpreter exits, and a call
that hangs for ever would keep the server from stopping. Its futures cost 20 us a piece, too, where a batch of small
pages takes 500 (docs/decisions/rooms.md has the costs here).
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
"""Threads of a pool that grows which are kept for the next calls."""

_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


def run_alone() -> None:
    """From now on, in this context, ``run`` of any pool asks no other thread for help: this thread is one of as many as
    there are processors, and more of them would take them from each other."""
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
        """Do all that is left; False: there is no more to begin. Never raises what the work raises."""
        while (piece := next(self._next)) < self._count:
            try:
                self._results[piece] = self._work(piece)
            except BaseException as error:  # noqa: BLE001
                self._error = error
            if next(self._ended_count) == self._count:
                self._ended.release()
        return False

    def finish(self) -> list[Any]:
        """Help, then wait: the results, in order, or what one of them raised, once every piece has ended."""
        self.help()
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._ended:
                    break
            except KeyboardInterrupt as error:
                # Others still move what the caller would take back: memory, and descriptors.
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if self._error is not None:
            raise self._error
        return self._results


class Call(Generic[Result]):
    """Work on other threads that its caller may leave behind: ``work(position, call)`` for each position, in order.

    Nothing can interrupt what was begun. It goes on to its own end, finds the call over, may not touch the call's
    memory any more (``memory``), and its result is dropped.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[int, Call[Result]], Result | None],
        on_late_end: Callable[[], None] | None = None,
        left_behind: list[None] | None = None,
    ) -> None:
        """``left_behind`` has one entry more while the call goes on without its caller."""
        self.results: list[Result | None] = [None] * count
        """None where the work has not ended in time, was not begun because the call was stopped, or raised."""
        self.error: BaseException | None = None
        """What the work raised last."""
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
        """Whether nothing of it is running or still to begin."""
        with self._changed:
            return self._is_done()

    def stop(self, end: int = 0) -> None:
        """Begin no position from ``end`` on that was not begun yet."""
        with self._changed:
            self._end = min(self._end, max(end, self._next))
            self._changed.notify_all()

    @contextmanager
    def memory(self) -> Iterator[bool]:
        """Around every touch of the call's memory: False when the call is over and the memory is not ours any more."""
        with self._changed:
            mine = not self._over
            self._in_memory += mine
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._in_memory -= 1
                    # Nobody else waits for that, and to be woken once per page costs the caller's turn of the GIL.
                    if self._over:
                        self._changed.notify_all()

    def ended_within(self, seconds: float, *, begin_no_more: bool = False) -> bool:
        """Wait; False leaves the call to itself: ``on_late_end`` is called once, when it has ended.

        ``begin_no_more``: of what is left behind, positions that were not begun never will be. From the return on
        nothing touches the call's memory, and ``results`` and ``error`` do not change.
        """
        with self._changed:
            done = self._changed.wait_for(self._is_done, max(0.0, min(seconds, threading.TIMEOUT_MAX)))
            self._over = True
            self._late = not done
            if self._late:
                self._left_behind.append(None)
            if begin_no_more:
                self._end = self._next
            # A copy in memory takes microseconds: this wait is no wait for a medium.
            self._changed.wait_for(lambda: self._in_memory == 0)
            return done

    def result(self) -> Result:
        """Of the only position; raises what it raised. Only after ``ended_within`` was True."""
        if self.error is not None:
            raise self.error
        return self.results[0]  # type: ignore[return-value]  # it has ended

    def help(self) -> bool:
        """Do one position; whether there is more to begin. Never raises what the work raises."""
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
        except BaseException as raised:  # noqa: BLE001 - also what is no Exception: a panic inside a client library
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
    """Threads: any."""

    def __init__(self, name: str, threads: int | None = None, *, niceness: int = 0) -> None:
        """``threads``: how many, started now; raises RuntimeError when the machine has none left. None: ``start`` and
        ``run`` make as many as are needed at once, and some are kept.

        ``niceness`` is added to that of the process, for calls that spin while they wait: work goes first.
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
        """Calls of ``start`` that were left by their callers and have not ended."""
        return len(self._left_behind)

    def run(self, count: int, work: Callable[[int], Any], at_once: int | None = None) -> list[Any]:
        """``work(0..count-1)`` by this thread and the others, ``at_once`` of them at most; returns, or raises, only
        when all of it has ended."""
        if count <= 1 or _alone.get():
            return [work(i) for i in range(count)]
        job = _Pieces(count, work)
        if self._grows:
            # Closed meanwhile, or no thread to be had: the caller does it.
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
        """``work(position, call)`` for all positions, for at most ``seconds``; results, and whether all have ended."""
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
        """Begin ``work`` on a thread of its own; of a pool that grows.

        Raises RuntimeError when the machine has no thread left, or after close.
        """
        call: Call[Result] = Call(1, lambda position, call: work(), on_late_end, self._left_behind)
        self._submit(call)
        return call

    def close(self, seconds: float | None = None) -> int:
        """End the threads; the number of those that were still in a call after ``seconds``. They end with it."""
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
            # On Linux of this thread alone. A sandbox may forbid it.
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
    """``work`` on a thread of its own, once: the call if it has ended in time, None if it is left behind.

    Raises RuntimeError when the machine has no thread left.
    """
    pool = ThreadPool(name)
    call = pool.start(work, on_late_end)
    ended = call.ended_within(seconds)
    # Of a call that has ended the thread has nothing left to do.
    pool.close(None if ended else 0)
    return call if ended else None

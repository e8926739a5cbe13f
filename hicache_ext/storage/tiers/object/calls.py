"""Threads that make the requests of calls, so that a call returns at its deadline whatever its requests do.

obstore's synchronous calls release the GIL and cost one wait each. Its asynchronous ones need the GIL twice per await
(once to wake the loop from a foreign thread, once in the loop); measured on loopback with pages of 128 KiB they reached
0.75 of the rate of threads, and they would compete with SGLang's scheduler for the GIL.

A request cannot be interrupted. One that outlives its call goes on until its own timeout and finds the call over: it
may not touch the call's memory any more (``Call.memory``), and its result is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Call(Generic[Result]):
    """One batch: its positions are handed out in order and worked on by several threads."""

    def __init__(self, count: int, work: Callable[[int, Call[Result]], Result | None]) -> None:
        self.results: list[Result | None] = [None] * count
        """None where the work has not ended in time, or was not begun because the call was stopped."""
        self._work = work
        self._condition = threading.Condition()
        self._next = 0
        self._end = count
        self._running = 0
        self._in_memory = 0
        self._over = False

    def stop(self, end: int = 0) -> None:
        """Begin no position from ``end`` on that was not begun yet."""
        with self._condition:
            self._end = min(self._end, max(end, self._next))
            self._condition.notify_all()

    @contextmanager
    def memory(self) -> Iterator[bool]:
        """Around every touch of the batch's memory: False when the call is over and the memory is not ours any more."""
        with self._condition:
            mine = not self._over
            self._in_memory += mine
        try:
            yield mine
        finally:
            if mine:
                with self._condition:
                    self._in_memory -= 1
                    # Nobody else waits for that, and to be woken once per page costs the caller's turn of the GIL.
                    if self._over:
                        self._condition.notify_all()

    @property
    def over(self) -> bool:
        return self._over

    def wait(self, deadline: float) -> bool:
        """Wait until all is done, or until ``deadline`` (monotonic); False when something is left undone.

        From the return on nothing touches the batch's memory and ``results`` does not change.
        """
        with self._condition:
            done = self._condition.wait_for(self._is_done, max(0.0, deadline - time.monotonic()))
            self._over = True
            # A copy in memory takes microseconds: this wait is no wait for the network.
            self._condition.wait_for(lambda: self._in_memory == 0)
            return done

    def take(self) -> tuple[int, bool] | None:
        """The next position and whether there are more behind it; for the threads."""
        with self._condition:
            if self._over or self._next >= self._end:
                return None
            position = self._next
            self._next += 1
            self._running += 1
            return position, self._next < self._end

    def do(self, position: int) -> None:
        """Work on one position; for the threads."""
        result: Result | None = None
        try:
            result = self._work(position, self)
        except BaseException:
            # Also what is no Exception (a panic inside the client library): the thread serves other calls after this.
            logger.exception("a request ended in an error that nobody expected")
        with self._condition:
            self._running -= 1
            if not self._over:
                self.results[position] = result
            if self._is_done():
                self._condition.notify_all()

    def _is_done(self) -> bool:
        return self._running == 0 and self._next >= self._end


class RequestThreads:
    """``threads`` threads shared by all calls of a store; calls under way take turns, one position each."""

    def __init__(self, name: str, threads: int) -> None:
        """Raises RuntimeError when the machine has no threads left."""
        self._condition = threading.Condition()
        self._calls: deque[Call[Any]] = deque()
        self._closed = False
        # Daemons: a store that nobody closed must not keep its process alive.
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except RuntimeError:
            self._threads = started
            self.close()
            raise

    def run(
        self, count: int, work: Callable[[int, Call[Result]], Result | None], timeout: float
    ) -> tuple[list[Result | None], bool]:
        """``work(position, call)`` for all positions, for at most ``timeout`` seconds; results, and if all ended."""
        call = Call(count, work)
        if count == 0:
            return [], True
        deadline = time.monotonic() + timeout
        with self._condition:
            self._calls.append(call)
            self._condition.notify(count)
        done = call.wait(deadline)
        return call.results, done

    def close(self) -> None:
        """End the threads; waits for the requests under way, which end by their own timeouts."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._calls or self._closed)
                if self._closed:
                    return
                call = self._calls.popleft()
                taken = call.take()
                if taken is None:
                    continue
                position, more = taken
                if more:
                    self._calls.append(call)
            call.do(position)

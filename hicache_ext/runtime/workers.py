"""Threads of the file tier: the pages of one call done in parallel, and calls counted so that close() can wait."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from hicache_ext.errors import StoreClosedError


class _Job:
    """Pieces of work that several threads share."""

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

    def help(self) -> None:
        """Do pieces until none is left to begin. Never raises."""
        while (piece := next(self._next)) < self._count:
            try:
                self._results[piece] = self._work(piece)
            except BaseException as error:  # noqa: BLE001
                self._error = error
            if next(self._ended_count) == self._count:
                self._ended.release()

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


class Workers:
    """A few threads that help whichever thread has work.

    Not a ThreadPoolExecutor: its futures cost 20 us a piece where a batch of small pages takes 500.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Starts the threads. Raises RuntimeError when the machine has none left."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                # Daemons: an interpreter that ends must not wait for a store that nobody has closed.
                thread = threading.Thread(target=self._serve, name=f"{name}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close()
            raise

    def run(self, count: int, work: Callable[[int], Any], at_once: int | None = None) -> list[Any]:
        """``work(0..count-1)`` by this thread and the helpers, ``at_once`` of them at most; returns, or raises, only
        when all of it has ended."""
        if count <= 1:
            return [work(i) for i in range(count)]
        job = _Job(count, work)
        for _ in range(min(at_once or len(self._threads), len(self._threads), count) - 1):
            self._jobs.put(job)
        return job.finish()

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.help()


class CallGate:
    """Counts calls under way, so that close() waits for them and later ones are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        # One entry for each call under way. Every call passes several gates: to append and to pop is a step without a
        # lock, which would be five times as dear.
        self._under_way: deque[None] = deque()
        self._left = threading.Condition()
        self._closed = False

    def __enter__(self) -> None:
        self._under_way.append(None)
        # Only now: shut() looks at the calls after it has closed the gate.
        if self._closed:
            self.__exit__()
            raise StoreClosedError(self._name)

    def __exit__(self, *_: object) -> None:
        self._under_way.pop()
        if self._closed:
            with self._left:
                self._left.notify_all()

    def shut(self) -> bool:
        """Close the gate and wait until nobody is inside; False when it was closed already."""
        with self._left:
            if self._closed:
                return False
            self._closed = True
            self._left.wait_for(lambda: not self._under_way)
            return True

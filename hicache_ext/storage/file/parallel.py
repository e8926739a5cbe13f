"""Threads of the file tier: the pages of one call done in parallel, and calls counted so that close() can wait."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from hicache_ext.errors import StoreClosedError


class Workers:
    """A few threads that help whichever thread calls ``run``."""

    def __init__(self, name: str, threads: int) -> None:
        """Starts the threads. Raises RuntimeError when the machine has none left."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        # All threads start here: a pool that fails to start one later has queued the work all the same, and would do
        # it, into the caller's memory, after the caller has left.
        started = threading.Barrier(threads + 1)
        try:
            for _ in range(threads):
                self._pool.submit(started.wait)
            started.wait()
        except RuntimeError:
            started.abort()
            self._pool.shutdown(wait=True)
            raise

    def run(self, count: int, work: Callable[[int], Any]) -> list[Any]:
        """``work(0..count-1)`` by this thread and the helpers; returns, or raises, only when all of it has ended."""
        if count <= 1:
            return [work(i) for i in range(count)]
        results: list[Any] = [None] * count
        positions = itertools.count()

        def run_next() -> None:
            # next() on a counter is one step under the GIL: no two threads get the same position.
            for position in iter(lambda: next(positions), -1):
                if position >= count:
                    return
                results[position] = work(position)

        helpers: list[Future[None]] = []
        try:
            helpers.extend(self._pool.submit(run_next) for _ in range(min(self._threads, count) - 1))
        except RuntimeError:
            # The interpreter is shutting down and takes no more work: the calling thread does it alone.
            pass
        try:
            run_next()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
        return results

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class CallGate:
    """Counts calls under way, so that close() waits for them and later ones are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._under_way = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._condition:
            if self._closed:
                raise StoreClosedError(self._name)
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._under_way -= 1
            self._condition.notify_all()

    def shut(self) -> bool:
        """Close the gate and wait until nobody is inside; False when it was closed already."""
        with self._condition:
            if self._closed:
                return False
            self._closed = True
            self._condition.wait_for(lambda: self._under_way == 0)
            return True

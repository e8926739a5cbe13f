"""Background work: one loop for work that is done periodically, on demand, or again after a failure.

The *step* decides when it runs again. A step that raises or returns RETRY runs again after a pause that doubles up to a
limit. The thread is a daemon: an interpreter that exits must not wait for a store that nobody has closed.

After a fork the child has no thread of the loop; the next ``wake`` starts one. As with every lock, a fork during a call
of another thread leaves the loop unusable in the child. Nothing of ours forks: SGLang spawns its processes.
"""

from __future__ import annotations

import enum
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache_ext.runtime.log_limit import LimitedLog

logger = logging.getLogger(__name__)
_log = LimitedLog(logger)


class Retry(enum.Enum):
    """Result of a step that failed: run it again, after a longer pause each time."""

    RETRY = enum.auto()


RETRY = Retry.RETRY

Step = Callable[[], "float | Retry | None"]
"""One unit of work. Returns the seconds until the next step, ``math.inf`` to wait for ``wake``, RETRY after a failure,
or None when there is nothing left to do: the thread then ends, and ``wake`` starts another."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before the next attempt: ``first``, doubled after each failure up to ``longest``."""

    first: float = 1.0
    longest: float = 60.0

    def pause(self, failures: int) -> float:
        """Return the pause after this many consecutive failures, randomly shortened by up to half, so that processes
        that lost the same server do not all return to it simultaneously."""
        return self.limit(failures) * random.uniform(0.5, 1.0)

    def limit(self, failures: int) -> float:
        """Return ``pause`` without the random part."""
        return min(self.longest, self.first * 2.0 ** min(max(0, failures - 1), 62))


class BackgroundLoop:
    """Runs ``step`` on a separate thread, one at a time. The first ``wake`` starts the thread. Threads: any."""

    def __init__(self, name: str, step: Step, backoff: Backoff | None = None) -> None:
        """``name``: the thread's name. Each type of exception from the step is logged once until a step succeeds."""
        self._name = name
        self._step = step
        self._backoff = backoff or Backoff()
        self._changed = threading.Condition()
        self._due = math.inf
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._logged: set[type[BaseException]] = set()

    @property
    def stopping(self) -> bool:
        """Return whether ``stop`` was called; long steps then end early."""
        return self._stopping

    @property
    def running(self) -> bool:
        """Return whether the thread is running now."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wake(self, after: float = 0.0) -> bool:
        """Run a step in ``after`` seconds at the latest, cutting the current pause short. Does not wait.

        Returns False if the loop was stopped, or if the machine has no thread left: the next ``wake`` tries again.
        """
        with self._changed:
            if self._stopping:
                return False
            self._due = min(self._due, time.monotonic() + after)
            if self.running:
                self._changed.notify_all()
                return True
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.log(logging.ERROR, self._name, "hicache_ext: %s: no thread to be had: %s", self._name, error)
                return False
            self._thread = thread
            return True

    def rest(self, seconds: float) -> bool:
        """Wait ``seconds`` within a step, but only until ``stop``; return whether the loop continues."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._stopping, seconds)

    def stop(self, seconds: float | None = None) -> bool:
        """Begin no further step and wait at most ``seconds`` for the current one; return whether the thread has ended.

        Idempotent. Does not wait if called on the loop's own thread.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while self._wait():
            after = self._take_step()
            with self._changed:
                if after is not None:
                    self._due = min(self._due, time.monotonic() + after)
                elif self._due == math.inf:
                    self._thread = None
                    return

    def _wait(self) -> bool:
        with self._changed:
            while not self._stopping:
                left = self._due - time.monotonic()
                if left <= 0:
                    self._due = math.inf
                    return True
                self._changed.wait(None if left == math.inf else min(left, threading.TIMEOUT_MAX))
            return False

    def _take_step(self) -> float | None:
        try:
            after = self._step()
        except BaseException as error:
            known = type(error) in self._logged
            self._logged.add(type(error))
            logger.log(logging.DEBUG if known else logging.ERROR, "hicache_ext: %s", self._name, exc_info=error)
            after = RETRY
        if isinstance(after, Retry):
            self._failures += 1
            return self._backoff.pause(self._failures)
        self._failures = 0
        self._logged.clear()
        return after

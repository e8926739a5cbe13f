"""I/O priority: reads that SGLang waits for come first, then prefetch, then promotion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class IoPriority:
    """Counts the foreground reads and the prefetches under way on far tiers; work of lower priority waits for them.

    Thread-safe. Entering never waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._reads = 0
        self._fetches = 0
        self._open_for_good = False

    @contextmanager
    def read(self) -> Iterator[None]:
        """Around a read that SGLang waits for."""
        with self._condition:
            self._reads += 1
        try:
            yield
        finally:
            with self._condition:
                self._reads -= 1
                if not self._reads:
                    self._condition.notify_all()

    @contextmanager
    def fetch(self) -> Iterator[None]:
        """Around a prefetch: SGLang is going to wait for its read."""
        with self._condition:
            self._fetches += 1
        try:
            yield
        finally:
            with self._condition:
                self._fetches -= 1
                if not self._fetches:
                    self._condition.notify_all()

    def wait_for_quiet(self, patience: float) -> None:
        """Return when no foreground read is under way, after ``patience`` seconds in any case: on a busy tier the
        background would otherwise never run, and it is what relieves the tier."""
        self._wait(lambda: not self._reads, patience)

    def wait_until_idle(self, patience: float) -> None:
        """Return when neither a foreground read nor a fetch is under way, after ``patience`` seconds in any case."""
        self._wait(lambda: not self._reads and not self._fetches, patience)

    def _wait(self, condition: Callable[[], bool], patience: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: condition() or self._open_for_good, patience)

    def close(self) -> None:
        """Let all waiters go on: the store is being closed."""
        with self._condition:
            self._open_for_good = True
            self._condition.notify_all()

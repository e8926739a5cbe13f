"""I/O priority: reads that SGLang waits for come first, then prefetch, then promotion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class IoPriority:
    """Counts the foreground reads and the prefetches under way on far tiers; work of lower priority waits for them.

    Thread-safe. Entering never waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._under_way = {"read": 0, "fetch": 0}
        self._open_for_good = False

    def read(self) -> AbstractContextManager[None]:
        """Around a read that SGLang waits for."""
        return self._entered("read")

    def fetch(self) -> AbstractContextManager[None]:
        """Around a prefetch: SGLang is going to wait for its read."""
        return self._entered("fetch")

    @contextmanager
    def _entered(self, kind: str) -> Iterator[None]:
        with self._condition:
            self._under_way[kind] += 1
        try:
            yield
        finally:
            with self._condition:
                self._under_way[kind] -= 1
                if not self._under_way[kind]:
                    self._condition.notify_all()

    def wait_for_quiet(self, patience: float) -> None:
        """Return when no foreground read is under way, after ``patience`` seconds in any case: on a busy tier the
        background would otherwise never run, and it is what relieves the tier."""
        self._wait(lambda: not self._under_way["read"], patience)

    def wait_until_idle(self, patience: float) -> None:
        """Return when neither a foreground read nor a fetch is under way, after ``patience`` seconds in any case."""
        self._wait(lambda: not any(self._under_way.values()), patience)

    def _wait(self, condition: Callable[[], bool], patience: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: condition() or self._open_for_good, patience)

    def close(self) -> None:
        """Let all waiters go on: the store is being closed."""
        with self._condition:
            self._open_for_good = True
            self._condition.notify_all()

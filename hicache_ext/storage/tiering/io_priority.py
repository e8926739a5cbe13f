"""I/O priority: reads that SGLang waits for come first, then prefetch, then promotion."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class IoPriority:
    """Counts the foreground reads and the prefetches under way on far tiers; work of lower priority waits for them.

    Thread-safe. Entering never waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._reads: dict[object, float] = {}
        """When each began that is under way."""
        self._fetches: dict[object, float] = {}
        self._open_for_good = False

    def read(self) -> AbstractContextManager[None]:
        """Around a read that SGLang waits for."""
        return self._entered(self._reads)

    def fetch(self) -> AbstractContextManager[None]:
        """Around a prefetch: SGLang is going to wait for its read."""
        return self._entered(self._fetches)

    @contextmanager
    def _entered(self, under_way: dict[object, float]) -> Iterator[None]:
        this = object()
        with self._condition:
            under_way[this] = time.monotonic()
        try:
            yield
        finally:
            with self._condition:
                del under_way[this]
                if not under_way:
                    self._condition.notify_all()

    def wait_for_quiet(self, patience: float) -> None:
        """Return when no foreground read is under way, after ``patience`` seconds in any case: on a busy tier the
        background would otherwise never run, and it is what relieves the tier."""
        self._wait(patience, self._reads)

    def wait_until_idle(self, patience: float) -> None:
        """Return when neither a foreground read nor a fetch is under way, after ``patience`` seconds in any case."""
        self._wait(patience, self._reads, self._fetches)

    def _wait(self, patience: float, *kinds: dict[object, float]) -> None:
        def is_over() -> bool:
            # Not for what has been under way for longer than that: it hangs, and would delay each batch of others.
            since = time.monotonic() - patience
            return self._open_for_good or not any(begun > since for kind in kinds for begun in kind.values())

        with self._condition:
            self._condition.wait_for(is_over, patience)

    def close(self) -> None:
        """Let all waiters go on: the store is being closed."""
        with self._condition:
            self._open_for_good = True
            self._condition.notify_all()

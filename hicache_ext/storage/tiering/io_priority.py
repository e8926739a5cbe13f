"""I/O priority: reads that SGLang waits for come first, then prefetch, then promotion."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager


class IoPriority:
    """Counts the foreground reads and the prefetches under way on far tiers; work of lower priority waits for them.

    Thread-safe. Entering never waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._begun: dict[str, dict[object, float]] = {"read": {}, "fetch": {}}
        """When each began that is under way."""
        self._open_for_good = False

    def read(self) -> AbstractContextManager[None]:
        """Around a read that SGLang waits for."""
        return self._entered("read")

    def fetch(self) -> AbstractContextManager[None]:
        """Around a prefetch: SGLang is going to wait for its read."""
        return self._entered("fetch")

    @contextmanager
    def _entered(self, kind: str) -> Iterator[None]:
        this = object()
        with self._condition:
            self._begun[kind][this] = time.monotonic()
        try:
            yield
        finally:
            with self._condition:
                del self._begun[kind][this]
                if not self._begun[kind]:
                    self._condition.notify_all()

    def wait_for_quiet(self, patience: float) -> None:
        """Return when no foreground read is under way, after ``patience`` seconds in any case: on a busy tier the
        background would otherwise never run, and it is what relieves the tier."""
        self._wait(lambda: not self._busy(["read"], patience), patience)

    def wait_until_idle(self, patience: float) -> None:
        """Return when neither a foreground read nor a fetch is under way, after ``patience`` seconds in any case."""
        self._wait(lambda: not self._busy(["read", "fetch"], patience), patience)

    def _busy(self, kinds: Iterable[str], patience: float) -> bool:
        """Not by what has been under way for longer than that: it hangs, and would delay each batch of others."""
        since = time.monotonic() - patience
        return any(begun > since for kind in kinds for begun in self._begun[kind].values())

    def _wait(self, condition: Callable[[], bool], patience: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: condition() or self._open_for_good, patience)

    def close(self) -> None:
        """Let all waiters go on: the store is being closed."""
        with self._condition:
            self._open_for_good = True
            self._condition.notify_all()

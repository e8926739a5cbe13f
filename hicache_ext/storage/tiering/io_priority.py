"""Demand first: reads that SGLang waits for, and the work in the background that steps aside for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DemandGate:
    """Counts demand reads under way of what lies further out, and fetches ahead of them. Thread-safe; entering it never
    waits. Demand comes first, then what is fetched ahead, then what is promoted.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._reads = 0
        self._fetches = 0
        self._open_for_good = False

    @contextmanager
    def demand(self) -> Iterator[None]:
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
        """Around work ahead of a read that SGLang is going to wait for."""
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
        """Return when no demand read is under way, after ``patience`` seconds in any case: a tier that is always in
        demand would otherwise never be relieved by what the background does."""
        self._wait(lambda: not self._reads, patience)

    def wait_until_idle(self, patience: float) -> None:
        """Return when neither a demand read nor a fetch is under way, after ``patience`` seconds in any case."""
        self._wait(lambda: not self._reads and not self._fetches, patience)

    def _wait(self, condition: Callable[[], bool], patience: float) -> None:
        deadline = time.monotonic() + patience
        with self._condition:
            while not condition() and not self._open_for_good:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._condition.wait(left)

    def close(self) -> None:
        """Let everything in the background go on at once: the store is being closed."""
        with self._condition:
            self._open_for_good = True
            self._condition.notify_all()

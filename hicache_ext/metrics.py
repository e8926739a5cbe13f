"""Counters of one tier and the bridge to SGLang's StorageMetrics.

Counting happens once per batch on SGLang's storage threads. Reading is free of work, since SGLang's scheduler asks
thousands of times a second: ``TransferSamples.drain`` swaps two lists.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class TierMetrics:
    """Monotonic counters of one tier, keyed (event, reason), e.g. ("get", "hit") or ("corrupt", "checksum").

    Thread-safe. ``add`` costs about a microsecond; callers add per batch, not per page, where they can.
    """

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, event: str, reason: str = "", amount: int = 1) -> None:
        with self._lock:
            self._counts[event, reason] += amount

    def add_many(self, event: str, amounts: Mapping[str, int]) -> None:
        with self._lock:
            for reason, amount in amounts.items():
                self._counts[event, reason] += amount

    def value(self, event: str, reason: str = "") -> int:
        with self._lock:
            return self._counts[event, reason]

    def total(self, event: str) -> int:
        with self._lock:
            return sum(amount for (name, _), amount in self._counts.items() if name == event)

    def snapshot(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)


class TransferSamples:
    """Pages and bandwidth of finished transfers since the last look, as SGLang's StorageMetrics wants them.

    Written by storage threads, drained by the scheduler thread. Bounded: with nobody draining, the oldest half goes.
    """

    _LIMIT = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: list[int] = []
        self._bandwidths: list[float] = []

    def record(self, pages: int, payload_bytes: int, seconds: float) -> None:
        """One transfer of ``pages`` pages and ``payload_bytes`` bytes in ``seconds``; bandwidth is GB/s (1e9)."""
        with self._lock:
            self._pages.append(pages)
            if payload_bytes and seconds > 0:
                self._bandwidths.append(payload_bytes / seconds / 1e9)
            if len(self._pages) > self._LIMIT:
                del self._pages[: self._LIMIT // 2]
                del self._bandwidths[: self._LIMIT // 2]

    @property
    def empty(self) -> bool:
        return not self._pages

    def drain(self) -> tuple[list[int], list[float]]:
        with self._lock:
            pages, self._pages = self._pages, []
            bandwidths, self._bandwidths = self._bandwidths, []
        return pages, bandwidths

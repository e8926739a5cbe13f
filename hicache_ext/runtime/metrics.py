"""Counters of one tier and the bridge to SGLang's StorageMetrics.

Counting happens once per batch on SGLang's storage threads. Reading must cost next to nothing, because SGLang's
scheduler reads thousands of times a second: ``TransferSamples`` needs no lock.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

LATENCY_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds, in seconds, of the buckets of every latency histogram; one more bucket lies above the last."""

Observer = Callable[[str, float], None]
"""Called with an operation and its seconds, on the thread that measured them."""


class TierMetrics:
    """Monotonic counters of one tier, keyed (event, reason), e.g. ("get", "hit") or ("corrupt", "checksum").

    Also levels (bytes in a queue) and latencies of whole calls, which observers receive. Thread-safe. ``add`` costs
    about a microsecond; callers add per batch, not per page, if they can.

    Counters of other components (the pull rule, the decode writer) have a ``prefix`` for the exported names.
    """

    def __init__(self, tier: str, *, prefix: str = "") -> None:
        self.tier = tier
        self.prefix = prefix
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._passed_on: dict[tuple[str, str], int] = {}
        self._levels: dict[tuple[str, str], float] = {}
        self._calls: Counter[str] = Counter()
        self._observers: tuple[Observer, ...] = ()

    def declare(self, counts: Mapping[str, Iterable[str]], operations: Iterable[str] = ()) -> None:
        """Create these counts (event -> reasons) and the latencies of these operations at 0.

        Otherwise a rate would miss the event with which a series begins.
        """
        with self._lock:
            for event, reasons in counts.items():
                for reason in reasons:
                    self._counts[event, reason] += 0
            for operation in operations:
                self._calls[operation] += 0

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

    def growth(self) -> Iterator[tuple[str, str, int]]:
        """Yield (event, reason, amount) for counts that grew since the last time. For one exporter: no growth is
        yielded twice, and an item whose processing raised is yielded again next time.

        A new count is yielded even at 0, so that its series exists from the start.
        """
        for key, count in self.snapshot().items():
            if count != (before := self._passed_on.get(key)):
                yield *key, count - (before or 0)
                self._passed_on[key] = count

    def set_level(self, name: str, reason: str, value: float) -> None:
        """Set a value that goes up and down, e.g. ("queue_bytes", "promotion")."""
        with self._lock:
            self._levels[name, reason] = value

    def levels(self) -> dict[tuple[str, str], float]:
        with self._lock:
            return dict(self._levels)

    def observe(self, operation: str, seconds: float) -> None:
        """Record that one call of ``operation`` took ``seconds``."""
        with self._lock:
            self._calls[operation] += 1
        for observer in self._observers:
            observer(operation, seconds)

    def calls(self) -> dict[str, int]:
        """Return how many calls of each operation were observed."""
        with self._lock:
            return dict(self._calls)

    def watch(self, observer: Observer) -> None:
        """Call ``observer`` with every later observation; it must be quick and never raise."""
        with self._lock:
            self._observers = (*self._observers, observer)

    def unwatch(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(known for known in self._observers if known != observer)


class TransferSamples:
    """Pages and bandwidths of transfers finished since the last ``drain``, in the form SGLang's StorageMetrics needs.

    Written by storage threads, drained by the scheduler thread. Bounded: if undrained, the oldest samples are dropped.
    """

    _LIMIT = 4096

    def __init__(self) -> None:
        self._pages: deque[int] = deque(maxlen=self._LIMIT)
        self._bandwidths: deque[float] = deque(maxlen=self._LIMIT)

    def record(self, pages: int, payload_bytes: int, seconds: float) -> None:
        """Record a transfer of ``pages`` pages and ``payload_bytes`` bytes in ``seconds``; bandwidth is GB/s (1e9)."""
        self._pages.append(pages)
        if payload_bytes and seconds > 0:
            self._bandwidths.append(payload_bytes / seconds / 1e9)

    @property
    def empty(self) -> bool:
        return not self._pages

    def drain(self) -> tuple[list[int], list[float]]:
        # Samples appended in the meantime stay for the next call.
        pages = [self._pages.popleft() for _ in range(len(self._pages))]
        return pages, [self._bandwidths.popleft() for _ in range(len(self._bandwidths))]

"""The concurrency limit: a bounded number of calls of a tier at once (reads, writes, promotion, prefetch together).

The queue is this process's own and says nothing about the tier. So a call waits at most half of its time, which leaves
the tier twice what its slowest recent call took (learnt_limit.py), and the breaker subtracts the wait
(``seconds_queued``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from hicache_ext.runtime.call_deadline import call_limit
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.wrapper import DelegatingStore
from hicache_ext.storage.guards.scheduler import must_answer_at_once

_queued: ContextVar[float] = ContextVar("hicache_ext_queued", default=0.0)


@contextmanager
def counting_seconds_queued() -> Iterator[None]:
    """Around a call whose ``seconds_queued`` is wanted."""
    token = _queued.set(0.0)
    try:
        yield
    finally:
        _queued.reset(token)


def seconds_queued() -> float:
    """How long the current call has waited for its place."""
    return _queued.get()


class ConcurrencyLimitStore(DelegatingStore):
    """At most ``calls`` calls of ``inner`` at once; a further one waits up to ``patience`` seconds, then is REJECTED.

    It waits no longer than half of its own limit (call_deadline.py). ``patience`` None: for as long as it takes.
    Threads: any. Administration (remove, clear, identities) is rare and goes past the limit.
    """

    def __init__(self, inner: PageStore, calls: int, patience: float | None) -> None:
        super().__init__(inner)
        self._free = threading.Semaphore(calls)
        self._patience = patience

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self._admitted(len(batch)) as admitted:
            return self.inner.get(batch) if admitted else [GetResult.REJECTED] * len(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        with self._admitted(len(batch)) as admitted:
            return self.inner.set(batch) if admitted else [SetResult.REJECTED] * len(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._admitted(len(keys)) as admitted:
            return self.inner.contains(keys) if admitted else [False] * len(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        with self._admitted(len(keys)) as admitted:
            return self.inner.count_leading(keys) if admitted else 0

    @contextmanager
    def _admitted(self, pages: int) -> Iterator[bool]:
        patience = self._patience
        if must_answer_at_once():
            patience = 0.0
        elif patience is not None and (limit := call_limit()) is not None:
            patience = max(0.0, min(patience, limit.seconds / 2, limit.deadline - time.monotonic()))
        begun = time.monotonic()
        admitted = self._free.acquire(timeout=patience)
        _queued.set(_queued.get() + time.monotonic() - begun)
        if not admitted:
            self.metrics.add("rejected", "concurrency", pages)
        try:
            yield admitted
        finally:
            if admitted:
                self._free.release()

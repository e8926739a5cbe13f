"""Writes in the background: what is cleared while it is being written, and what does not fit into the queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiering import write_behind
from hicache_ext.storage.tiering.write_behind import AsyncStore, QueueSettings
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from tests.storage.guards.hung import eventually


class HeldStore(MemoryPageStore):
    """Pages are there before the call that wrote them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()
        self.go_on = threading.Event()

    def set(self, batch: PageBatch) -> list[SetResult]:
        results = super().set(batch)
        self.written.set()
        assert self.go_on.wait(30)
        return results


def test_pages_that_are_cleared_while_they_are_written_are_absent_at_once() -> None:
    inner = HeldStore()
    store = AsyncStore(inner)
    keys = page_keys(3)
    try:
        store_pages(store, keys)
        assert inner.written.wait(30)
        # Cleared above the store: what is in it already is taken out when the write has ended.
        store._queue.forget_identities(None)
        assert inner.contains(keys)[0]
        assert read_pages(store, keys)[0] == [GetResult.MISS] * 3
        assert store.contains(keys) == [False] * 3
        assert store.count_leading(keys) == 0
        assert store._queue.forget_identities(None) == 0
        inner.go_on.set()
        assert store.wait_until_written(30)
        assert inner.contains(keys) == [False] * 3
    finally:
        inner.go_on.set()
        store.close()


PAGE = 1000


class PacedStore(MemoryPageStore):
    """Takes a batch for each ``allow()``."""

    def __init__(self, result: SetResult | None = None) -> None:
        super().__init__()
        self._result = result
        self._allowed = threading.Semaphore(0)
        self.batches = 0

    def allow(self, batches: int = 1) -> None:
        self._allowed.release(batches)

    def set(self, batch: PageBatch) -> list[SetResult]:
        assert self._allowed.acquire(timeout=60)
        self.batches += 1
        return super().set(batch) if self._result is None else [self._result] * len(batch)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda seconds: monkeypatch.setattr(write_behind, "_PATIENCE", seconds)


def test_a_batch_that_is_larger_than_the_queue_is_written_whole_while_the_store_takes_pages(
    patience: Callable[[float], None],
) -> None:
    """Without waiting every batch of large pages would lose its end, however fast the store is."""
    patience(60.0)
    inner = PacedStore()
    inner.allow(1000)
    store = AsyncStore(inner, QueueSettings(capacity=4 * PAGE))
    keys = page_keys(50)
    assert store_pages(store, keys, (PAGE,)) == [SetResult.STORED] * 50
    assert store.wait_until_written(60)
    assert inner.contains(keys) == [True] * 50
    assert store.metrics.total("dropped_pages") == 0
    store.close()


def test_a_store_that_hangs_is_waited_for_once_and_what_does_not_fit_is_counted(
    patience: Callable[[float], None],
) -> None:
    patience(0.01)
    inner = PacedStore()
    store = AsyncStore(inner, QueueSettings(capacity=4 * PAGE))
    assert store_pages(store, page_keys(6), (PAGE,)) == [SetResult.STORED] * 4 + [SetResult.REJECTED] * 2
    store._queue._settings = replace(store._queue._settings, patience=3600.0)
    assert store_pages(store, page_keys(2, "more"), (PAGE,)) == [SetResult.REJECTED] * 2  # at once
    assert store.metrics.value("dropped_pages", "async") == 4
    inner.allow(1000)
    assert store.wait_until_written(60)
    assert store_pages(store, page_keys(30, "after"), (PAGE,)) == [SetResult.STORED] * 30
    store.close()


def test_pages_that_a_pool_refuses_leave_the_queue_and_are_counted(patience: Callable[[float], None]) -> None:
    """As many as a synchronous write would have lost: a breaker refuses them, and nobody waits."""
    patience(60.0)
    inner = PacedStore(SetResult.REJECTED)
    inner.allow(1000)
    store = AsyncStore(inner, QueueSettings(capacity=4 * PAGE))
    store_pages(store, page_keys(50), (PAGE,))
    assert store.wait_until_written(60)
    assert store.metrics.value("dropped_pages", "async_failed") == 50
    store.close()


def test_closing_ends_the_wait_for_room(patience: Callable[[float], None]) -> None:
    patience(3600.0)
    inner = PacedStore()
    store = AsyncStore(inner, QueueSettings(capacity=2 * PAGE, drain=0.01))
    results: list[SetResult] = []
    writer = threading.Thread(target=lambda: results.extend(store_pages(store, page_keys(4), (PAGE,))))
    writer.start()
    eventually(lambda: store.metrics.levels().get(("queue_pages", "async")) == 2)
    closer = threading.Thread(target=store.close)
    closer.start()
    writer.join(60)
    assert results == [SetResult.STORED] * 2 + [SetResult.REJECTED] * 2
    inner.allow(1000)
    closer.join(60)


def test_a_page_larger_than_the_queue_is_refused_at_once(patience: Callable[[float], None]) -> None:
    patience(3600.0)
    store = AsyncStore(MemoryPageStore(), QueueSettings(capacity=PAGE - 1))
    assert store_pages(store, page_keys(1), (PAGE,)) == [SetResult.REJECTED]
    store.close()

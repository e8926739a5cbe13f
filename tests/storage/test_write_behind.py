"""Writes in the background: what is cleared while it is being written."""

from __future__ import annotations

import threading

from hicache_ext.storage.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.write_behind import AsyncStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from hicache_ext.testing.memory_store import MemoryPageStore


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

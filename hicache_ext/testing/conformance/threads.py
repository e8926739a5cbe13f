"""The part of the PageStore suite about several threads at once, and about the end of a store."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from hicache_ext.errors import StoreClosedError
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.testing.conformance.cases import PageStoreCases
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    HostPages,
    assert_hits,
    assert_pages,
    page_keys,
    payload_of,
    read_pages,
    settle,
    store_pages,
)


class ThreadCases(PageStoreCases):
    def test_eight_threads_use_one_store(self, store: PageStore) -> None:
        keys = page_keys(60)

        def use(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(12):
                chosen = chance.sample(keys, 8)
                assert all(result.durable for result in store_pages(store, chosen, [3000, 1000]))
                assert_hits(store, chosen, [3000, 1000])
                asked = chance.sample(keys, 20)
                results, payloads = read_pages(store, asked, [3000, 1000])
                for key, result, payload in zip(asked, results, payloads, strict=True):
                    assert result in (GetResult.HIT, GetResult.MISS)
                    assert result is GetResult.MISS or payload == payload_of(key, 4000)
                store.count_leading(asked)

        self.in_threads(*[partial(use, seed) for seed in range(8)])

    def test_batches_written_at_once_lose_no_page(self, store: PageStore, medium: Medium) -> None:
        """Each of four threads writes pages of its own and some that all write, every thread other bytes."""
        common = page_keys(10, "common")
        wrote: dict[bytes, set[int]] = {}
        begin = threading.Barrier(4)

        def write(fill: int) -> None:
            own = page_keys(10, f"own-{fill}")
            keys = own + common if fill % 2 else common + own
            pages = HostPages([[3000]] * 20, fill=fill)
            begin.wait(self.patience)
            results = store.set(PageBatch(keys, pages.buffers))
            assert all(result.durable for result in results), results
            for key, result in zip(keys, results, strict=True):
                if result is SetResult.STORED:
                    wrote.setdefault(key, set()).add(fill)

        self.in_threads(*[partial(write, fill) for fill in range(1, 5)])
        if medium.writes_later:
            settle(store)
        keys = common + [key for fill in range(1, 5) for key in page_keys(10, f"own-{fill}")]
        results, payloads = read_pages(store, keys, [3000])
        assert results == [GetResult.HIT] * 50
        for key, payload in zip(keys, payloads, strict=True):
            assert len(set(payload)) == 1 and payload[0] in wrote[key], "not the bytes of one that answered STORED"
        settle(store)
        assert_pages(store, keys, payloads, [3000])  # nothing changes once it is stored

    def test_pages_are_whole_while_they_are_removed_and_written_again(self, store: PageStore) -> None:
        keys = page_keys(4)
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                results = store_pages(store, keys, [2000])
                # A write that meets the removal of what it stands on is no error.
                assert SetResult.ERROR not in results and SetResult.TIMEOUT not in results
                store.remove(keys[:2])
                store.clear([IDENTITY])

        def read() -> None:
            try:
                for _ in range(60):
                    results, payloads = read_pages(store, keys, [2000])
                    for key, result, payload in zip(keys, results, payloads, strict=True):
                        assert result in (GetResult.HIT, GetResult.MISS)
                        assert result is not GetResult.HIT or payload == payload_of(key, 2000)
            finally:
                stop.set()

        self.in_threads(churn, churn, read)
        assert self.count(store, "error") == 0

    def test_close_waits_for_calls_under_way(self, store: PageStore) -> None:
        keys, closed = page_keys(16), threading.Event()
        store_pages(store, keys, [20_000])
        problems: list[str] = []
        memory = HostPages([[20_000]] * 16)

        def use() -> None:
            with contextlib.suppress(StoreClosedError):
                while True:
                    store_pages(store, keys, [20_000])
                    read_pages(store, keys, [20_000])

        def read_into_one_memory() -> None:
            with contextlib.suppress(StoreClosedError):
                while True:
                    late = closed.is_set()
                    store.get(PageBatch(keys, memory.buffers))
                    if late:
                        problems.append("a call after close() was answered")
                        return

        def close() -> None:
            time.sleep(0.05)
            store.close()
            closed.set()

        self.in_threads(use, use, read_into_one_memory, close)
        assert problems == []

    def test_a_closed_store_refuses_calls_and_may_be_closed_again(self, store: PageStore) -> None:
        keys = page_keys(1)
        store_pages(store, keys)
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: read_pages(store, keys),
            lambda: store_pages(store, keys),
            lambda: store.contains(keys),
            lambda: store.count_leading(keys),
            lambda: store.remove(keys),
            lambda: store.clear([IDENTITY]),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()

    def test_close_leaves_no_thread_behind(self, threads_before: set[threading.Thread], store: PageStore) -> None:
        keys = page_keys(64)
        store_pages(store, keys)
        assert_hits(store, keys)
        store.clear([IDENTITY])
        store.close()
        assert [thread.name for thread in threading.enumerate() if thread not in threads_before] == []

    def test_close_leaves_no_open_file_behind(self, store: PageStore, medium: Medium) -> None:
        def open_stores(stores: int) -> None:
            for _ in range(stores):
                another = medium.open()
                store_pages(another, page_keys(40))
                assert_hits(another, page_keys(40))
                another.clear([IDENTITY])
                another.close()

        def files_open() -> int:
            # A client library closes its connections when the last reference to it goes, in a thread of its own.
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        open_stores(2)  # what is opened once in a process may stay
        first = files_open()
        open_stores(7)
        deadline = time.monotonic() + 30
        while (more := files_open() - first) >= 7:
            assert time.monotonic() < deadline, f"{more} more open files after 7 more stores"
            time.sleep(0.05)

    def test_calls_leave_no_file_open(self, store: PageStore) -> None:
        def files_open_after_calls(name: str) -> int:
            keys = page_keys(100, name)
            for begin in range(0, 100, 5):
                store_pages(store, keys[begin : begin + 5])
                assert_hits(store, keys[begin : begin + 5])
                store.contains(keys)
            store.remove(keys)
            return len(os.listdir("/proc/self/fd"))

        counts = [files_open_after_calls(f"round {number}") for number in range(3)]
        assert counts[-1] - counts[0] < 50, f"open files: {counts}"

    @pytest.fixture
    def threads_before(self) -> set[threading.Thread]:
        return set(threading.enumerate())

    def test_pages_outlive_the_store(self, store: PageStore, medium: Medium) -> None:
        keys = page_keys(30)
        store_pages(store, keys)
        store.close()
        again = medium.open()
        try:
            assert again.contains(keys) == [True] * 30
            assert_hits(again, keys)
            assert medium.writes_later or store_pages(again, keys[:3]) == [SetResult.EXISTS] * 3
        finally:
            again.close()

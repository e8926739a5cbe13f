"""The part of the PageStore suite about several stores over one medium: none works on what it remembers alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache_ext.page.envelope import page_seal
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.abilities import RemovesCopies
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.testing.conformance.cases import PageStoreCases
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    cut,
    page_key,
    page_keys,
    payload_of,
    read_pages,
    settle,
    store_pages,
)

_LARGE = 8_000_000
_IN_THE_WAY = 1.0
"""Seconds after which another store that has not written is taken to wait for a lock of the reader."""

_WAYS: dict[str, Callable[[PageStore, list[bytes]], int]] = {
    "remove": lambda store, keys: store.remove(keys),
    "clear": lambda store, keys: store.clear([IDENTITY]) * len(keys),
    "clear of everything": lambda store, keys: store.clear(None) * len(keys),
}


class SeveralStoresCases(PageStoreCases):
    @pytest.fixture
    def other(self, store: PageStore, medium: Medium) -> Iterator[PageStore]:
        """A store that was opened over the medium while it was empty. It is closed before ``store``."""
        other = medium.open()
        yield other
        other.close()

    @pytest.mark.parametrize("way", list(_WAYS))
    def test_what_another_store_takes_away_is_gone(self, store: PageStore, other: PageStore, way: str) -> None:
        """Whatever the first one remembers of pages that it wrote, read and asked for."""
        keys = page_keys(12)
        for _ in range(2):
            assert store_pages(store, keys) == [SetResult.STORED] * 12
            settle(store)
            assert_hits(store, keys)
            assert store.contains(keys) == [True] * 12
            assert _WAYS[way](other, keys) == 12, "the other store has not seen the pages"
            settle(other)
            assert store.contains(keys) == [False] * 12
            assert store.count_leading(keys) == 0
            assert read_pages(store, keys)[0] == [GetResult.MISS] * 12
        assert store_pages(store, keys) == [SetResult.STORED] * 12
        settle(store)
        assert_hits(other, keys)

    def test_clear_of_everything_takes_identities_that_another_store_brought(
        self, store: PageStore, other: PageStore, medium: Medium
    ) -> None:
        keys = page_keys(5) + page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys)
        settle(store)
        assert other.clear(None) == (2 if medium.counts_all_identities else 1)
        settle(other)
        for each in (store, other):
            assert read_pages(each, keys)[0] == [GetResult.MISS] * 10

    def test_a_page_is_absent_until_it_is_whole(self, store: PageStore, other: PageStore, medium: Medium) -> None:
        """What a reader sees meanwhile is what a kill -9 would leave."""
        sizes = cut(min(_LARGE, medium.largest_page), 2)
        for number in range(4):
            key = page_key(f"large {number}")
            seen: set[GetResult] = set()
            written = threading.Event()

            def read(key: bytes = key, seen: set[GetResult] = seen, written: threading.Event = written) -> None:
                last = False
                while not last:
                    last = written.is_set()
                    results, payloads = read_pages(other, [key], sizes)
                    seen.add(results[0])
                    assert results[0] is not GetResult.HIT or payloads[0] == payload_of(key, sum(sizes))
                    # On a busy machine a reader without a pause keeps the writer from Python for minutes.
                    time.sleep(0.001)

            def write(key: bytes = key, written: threading.Event = written) -> None:
                try:
                    # EXISTS: the reader found it in an outer tier, and brought it to the inner one first.
                    assert store_pages(store, [key], sizes)[0] in (SetResult.STORED, SetResult.EXISTS)
                    settle(store)
                finally:
                    written.set()

            self.in_threads(read, write)
            assert seen <= {GetResult.MISS, GetResult.HIT}
            assert_hits(store, [key], sizes)

    @pytest.mark.parametrize("bad", [b"?", b"??"], ids=["of the same length", "of another length"])
    def test_a_good_copy_that_replaced_a_bad_one_stays(
        self, store: PageStore, other: PageStore, medium: Medium, monkeypatch: pytest.MonkeyPatch, bad: bytes
    ) -> None:
        """Between the read of a bad copy and its removal another store may have taken it away and written a good one:
        a reader that removes by name takes that one. It is counted in between, which is where the other store comes
        in here; one that has to wait for the reader comes afterwards."""
        keys = page_keys(3)
        store_pages(store, keys)
        settle(store)
        for key in keys:
            medium.write(key, (medium.read(key) or b"")[:-1] + bad)
        writers: list[threading.Thread] = []
        replaced: list[list[SetResult]] = []

        def replace() -> None:
            other.remove(keys)
            replaced.append(store_pages(other, keys))

        def then_replace(count: Callable[..., None]) -> Callable[..., None]:
            def add(metrics: TierMetrics, event: str, *amount: Any, **named: Any) -> None:
                count(metrics, event, *amount, **named)
                if event == "corrupt" and not writers:
                    writers.append(threading.Thread(target=replace, daemon=True))
                    writers[0].start()
                    writers[0].join(_IN_THE_WAY)

            return add

        for name in ("add", "add_many"):
            monkeypatch.setattr(TierMetrics, name, then_replace(getattr(TierMetrics, name)))
        read_pages(store, keys)
        monkeypatch.undo()
        for writer in writers:
            writer.join(self.patience)
            assert not writer.is_alive(), "the other store hangs"
        assert writers, "the bad copies are not counted"
        assert len(replaced) == 1
        settle(other)
        settle(store)
        assert_hits(store, keys)

    def test_of_a_page_that_another_store_has_replaced_the_new_copy_stays(
        self, store: PageStore, other: PageStore
    ) -> None:
        """Where a store can remove a page as long as it is the copy that somebody has seen (``RemovesCopies``)."""
        if not isinstance(store, RemovesCopies):
            pytest.skip("declared: no RemovesCopies; another case shows it")
        if isinstance(store, TierStore) and type(store)._remove_copies is TierStore._remove_copies:
            pytest.skip("declared: it cannot compare; another case shows it")
        keys = page_keys(4)
        seen = {key: page_seal(key, 100, [memoryview(payload_of(key, 100))]) for key in keys}
        store_pages(store, keys, [100])
        settle(store)
        replaced = memoryview(bytearray(b"x" * 100))
        other.remove(keys[:2])
        settle(other)
        other.set(PageBatch(keys[:1], [[replaced]]))
        settle(other)
        # More where it does not know yet what the other one took away.
        assert store.remove_copies(seen) >= 2
        settle(store)
        results, payloads = read_pages(store, keys, [100])
        assert results == [GetResult.HIT] + [GetResult.MISS] * 3
        assert payloads[0] == replaced

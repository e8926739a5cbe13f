"""Every promise of ``storage/contract/store.py`` as a test. For any PageStore, bare or wrapped.

A store's test file::

    class TestMyStore(PageStoreTests):
        @pytest.fixture
        def store(self, tmp_path):
            store = MyStore(tmp_path)
            yield store
            store.close()

Three more fixtures may be overridden. Without them their tests are skipped with that reason: ``raw``, a second way to
the stored objects that bypasses the store; ``reopen``, a function that opens another store over the same medium; and,
where other machines see the same pages, ``damaged_reader``, another store over the same medium whose path damages much
of what it reads, every time in another place. A store that looks at damaged pages again in the background has
``wait_until_examined(timeout)``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from hicache_ext.errors import StoreClosedError
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.testing.conformance.damage import DamageTests
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    HostPages,
    assert_hits,
    cut,
    filled,
    page_key,
    page_keys,
    payload_of,
    read_pages,
    settle,
    store_pages,
)
from hicache_ext.testing.conformance.second_reader import read_page_object, write_page_object


class RawAccess(Protocol):
    """The stored objects, past the store."""

    def read(self, key: bytes) -> bytes | None:
        """The whole object under ``key``; None when there is none."""

    def write(self, key: bytes, stored: bytes) -> None:
        """Put these bytes under ``key``, whatever was there."""

    def keys(self) -> list[bytes]:
        """The keys of all objects."""


class PageStoreTests(DamageTests):
    """Inherit, override ``store``, and where possible ``raw`` and ``reopen``."""

    @pytest.fixture
    def store(self) -> PageStore:
        """A fresh, empty store with room for at least 64 MiB. An override closes it, too, when the test is over."""
        raise NotImplementedError("override the fixture `store`")

    @pytest.fixture
    def raw(self, store: PageStore) -> RawAccess | None:
        return None

    @pytest.fixture
    def reopen(self, store: PageStore) -> Callable[[], PageStore] | None:
        return None

    @pytest.fixture
    def damaged_reader(self, store: PageStore) -> PageStore | None:
        return None

    def count(self, store: PageStore, event: str) -> int:
        """How often ``event`` was counted in the metrics of the store, or of the stores it is made of."""
        tiers: Sequence[PageStore] = getattr(store, "tiers", [store])
        return sum(tier.metrics.total(event) for tier in tiers)

    def settle(self, store: PageStore) -> None:
        """Wait for what ``store`` still writes and takes away in the background, if it does such things."""
        settle(store)

    # -- round trips -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "sizes",
        [
            pytest.param([4096], id="one block"),
            pytest.param([131072], id="128 KiB"),
            pytest.param([1], id="1 byte"),
            pytest.param([4097], id="odd size"),
            pytest.param([1, 2, 3, 4095, 5000], id="unequal segments"),
            pytest.param(cut(20480, 64), id="64 segments"),
            pytest.param(cut(17501, 2500), id="more segments than one system call takes"),
            pytest.param([3_000_001], id="3 MB"),
        ],
    )
    def test_a_stored_page_is_read_back(self, store: PageStore, sizes: list[int]) -> None:
        key = page_key("round trip")
        assert store_pages(store, [key], sizes) == [SetResult.STORED]
        assert_hits(store, [key], sizes)

    def test_a_page_is_the_same_however_its_bytes_are_cut_into_segments(self, store: PageStore) -> None:
        key = page_key("recut")
        store_pages(store, [key], [1000, 24])
        assert_hits(store, [key], cut(1024, 7))

    def test_pages_of_different_sizes_share_a_batch(self, store: PageStore) -> None:
        keys = page_keys(6)
        sizes = [[100], [5000], [1], [300, 300], [4096, 1], [65536]]
        assert store.set(PageBatch(keys, filled(keys, sizes).buffers)) == [SetResult.STORED] * 6
        pages = HostPages(sizes)
        assert store.get(PageBatch(keys, pages.buffers)) == [GetResult.HIT] * 6
        assert [pages.payload(i) for i in range(6)] == [
            payload_of(key, sum(page)) for key, page in zip(keys, sizes, strict=True)
        ]

    def test_a_batch_of_500_pages_is_stored_and_read(self, store: PageStore) -> None:
        keys = page_keys(500)
        assert store_pages(store, keys, [700, 324]) == [SetResult.STORED] * 500
        assert_hits(store, list(reversed(keys)), [700, 324])

    def test_an_empty_batch_answers_nothing(self, store: PageStore) -> None:
        assert store.get(PageBatch([], [])) == []
        assert store.set(PageBatch([], [])) == []
        assert store.contains([]) == []
        assert store.count_leading([]) == 0
        assert store.remove([]) == 0
        assert store.clear([]) == 0

    def test_a_key_twice_in_a_batch_is_stored_and_read_twice(self, store: PageStore) -> None:
        first, second = page_keys(2)
        results = store_pages(store, [first, second, first])
        assert all(result.durable for result in results) and SetResult.STORED in (results[0], results[2])
        assert_hits(store, [first, second, first])

    def test_an_absent_page_is_a_miss(self, store: PageStore) -> None:
        keys = page_keys(3)
        store_pages(store, keys[1:2])
        results, _ = read_pages(store, keys)
        assert results == [GetResult.MISS, GetResult.HIT, GetResult.MISS]
        assert self.count(store, "corrupt") == 0

    def test_the_first_writer_wins(self, store: PageStore) -> None:
        key = page_key("first")
        store_pages(store, [key])
        other = HostPages([[1000]], fill=0xEE)
        assert store.set(PageBatch([key], other.buffers)) == [SetResult.EXISTS]
        assert_hits(store, [key])

    def test_the_same_page_hash_under_another_identity_is_another_page(self, store: PageStore) -> None:
        mine, theirs = page_key("same"), page_key("same", OTHER_IDENTITY)
        store_pages(store, [mine])
        assert read_pages(store, [theirs])[0] == [GetResult.MISS]
        assert store_pages(store, [theirs]) == [SetResult.STORED]
        assert_hits(store, [mine, theirs])

    def test_results_are_lists_of_the_right_type(self, store: PageStore) -> None:
        keys = page_keys(3)
        written = store_pages(store, keys)
        read, _ = read_pages(store, keys)
        present = store.contains(keys)
        assert isinstance(written, list) and all(isinstance(result, SetResult) for result in written)
        assert isinstance(read, list) and all(isinstance(result, GetResult) for result in read)
        assert isinstance(present, list) and all(isinstance(known, bool) for known in present)
        assert type(store.count_leading(keys)) is int and type(store.remove(keys)) is int
        assert store.describe().name == store.name

    # -- what is really stored -------------------------------------------------------------------------------------

    def test_what_is_stored_is_what_the_page_format_says(self, store: PageStore, raw: RawAccess | None) -> None:
        if raw is None:
            pytest.skip("this store has no `raw` access")
        keys = page_keys(4)
        before = int(time.time() * 1000)
        store_pages(store, keys, [900, 124])
        assert sorted(raw.keys()) == sorted(keys)
        for key in keys:
            stored = raw.read(key)
            assert stored is not None
            page = read_page_object(stored)
            assert (page.key, page.payload) == (key, payload_of(key, 1024))
            assert before - 1000 <= page.created_ms <= time.time() * 1000 + 1000

    def test_a_page_of_another_writer_is_a_hit(self, store: PageStore, raw: RawAccess | None) -> None:
        if raw is None:
            pytest.skip("this store has no `raw` access")
        sample, key = page_keys(2)
        store_pages(store, [sample])
        header_length = read_page_object(raw.read(sample) or b"").header_length
        raw.write(key, write_page_object(key, payload_of(key, 1000), header_length=header_length))
        assert store.contains([key]) == [True]
        assert_hits(store, [key])
        assert store_pages(store, [key]) == [SetResult.EXISTS]

    # -- presence --------------------------------------------------------------------------------------------------

    def test_contains_answers_page_by_page(self, store: PageStore) -> None:
        keys = page_keys(6)
        store_pages(store, [keys[0], keys[2], keys[5]])
        assert store.contains(keys) == [True, False, True, False, False, True]

    @pytest.mark.parametrize(("missing", "leading"), [(0, 0), (1, 1), (4, 4), (None, 5)])
    def test_count_leading_ends_at_the_first_gap(self, store: PageStore, missing: int | None, leading: int) -> None:
        keys = page_keys(5)
        store_pages(store, [key for number, key in enumerate(keys) if number != missing])
        assert store.count_leading(keys) == leading

    def test_ten_thousand_keys_are_answered(self, store: PageStore) -> None:
        keys = page_keys(10_000)
        store_pages(store, keys[:100])
        store_pages(store, keys[101:110])
        assert store.count_leading(keys) == 100
        present = store.contains(keys)
        assert len(present) == 10_000
        assert [number for number, known in enumerate(present) if known] == [*range(100), *range(101, 110)]

    # -- removal ---------------------------------------------------------------------------------------------------

    def test_removed_pages_are_gone_and_can_be_stored_again(self, store: PageStore) -> None:
        keys = page_keys(4)
        store_pages(store, keys[:3])
        assert store.remove([keys[0], keys[3], keys[2]]) == 2
        assert store.contains(keys) == [False, True, False, False]
        assert read_pages(store, keys[:1])[0] == [GetResult.MISS]
        assert store_pages(store, keys[:1]) == [SetResult.STORED]
        assert_hits(store, keys[:2])

    def test_clear_leaves_other_identities_alone(self, store: PageStore) -> None:
        mine, theirs = page_keys(5), page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, mine + theirs)
        assert store.clear([IDENTITY]) == 1
        assert store.contains(mine + theirs) == [False] * 5 + [True] * 5
        assert_hits(store, theirs)
        assert store_pages(store, mine) == [SetResult.STORED] * 5
        assert_hits(store, mine)

    def test_clear_of_everything_leaves_no_page(self, store: PageStore) -> None:
        keys = page_keys(5) + page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys)
        assert store.clear(None) == 2
        assert store.contains(keys) == [False] * 10
        assert read_pages(store, keys)[0] == [GetResult.MISS] * 10
        self.settle(store)
        assert store.clear(None) == 0

    def test_an_identity_whose_pages_were_removed_is_not_counted_by_clear(self, store: PageStore) -> None:
        keys = page_keys(3)
        store_pages(store, keys)
        assert store.remove(keys) == 3
        self.settle(store)
        assert store.clear(None) == 0

    def test_register_identity_takes_any_document_twice(self, store: PageStore) -> None:
        for _ in range(2):
            store.register_identity(IDENTITY, {"model": {"id": "a/b"}, "pool": {"name": "kv"}})
        store_pages(store, page_keys(1))
        assert_hits(store, page_keys(1))

    # -- memory ----------------------------------------------------------------------------------------------------

    def test_nothing_beside_the_segments_is_touched(self, store: PageStore) -> None:
        keys = page_keys(20)
        sizes = [cut(4000 + number, 9) for number in range(20)]
        source = filled(keys, sizes)
        before = source.snapshot()
        store.set(PageBatch(keys, source.buffers))
        assert source.snapshot() == before, "set() changed the memory it was to store"
        target = HostPages(sizes)
        store.get(PageBatch(keys, target.buffers))
        assert target.snapshot() == before

    def test_memory_is_left_alone_once_a_read_has_returned(self, store: PageStore) -> None:
        keys = page_keys(40)
        store_pages(store, keys[::2], [50_000])
        pages = HostPages([[50_000]] * 40)
        store.get(PageBatch(keys, pages.buffers))
        for number in range(40):
            pages.write(number, b"\x5a" * 50_000)
        returned = pages.snapshot()
        time.sleep(0.3)
        assert pages.snapshot() == returned

    def test_memory_may_be_reused_once_a_write_has_returned(self, store: PageStore) -> None:
        keys = page_keys(40)
        pages = filled(keys, [[50_000]] * 40)
        store.set(PageBatch(keys, pages.buffers))
        for number in range(40):
            pages.write(number, b"\x5a" * 50_000)
        time.sleep(0.1)
        assert_hits(store, keys, [50_000])

    # -- threads ---------------------------------------------------------------------------------------------------

    def test_eight_threads_use_one_store(self, store: PageStore) -> None:
        keys = page_keys(60)
        problems: list[BaseException] = []

        def use(seed: int) -> None:
            chance = random.Random(seed)
            try:
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
            except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
                problems.append(error)

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []

    def test_pages_are_whole_while_they_are_removed_and_written_again(self, store: PageStore) -> None:
        keys = page_keys(4)
        stop = threading.Event()
        problems: list[BaseException] = []

        def churn() -> None:
            try:
                while not stop.is_set():
                    store_pages(store, keys, [2000])
                    store.remove(keys[:2])
                    store.clear([IDENTITY])
            except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
                problems.append(error)

        threads = [threading.Thread(target=churn) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                results, payloads = read_pages(store, keys, [2000])
                for key, result, payload in zip(keys, results, payloads, strict=True):
                    assert result in (GetResult.HIT, GetResult.MISS)
                    assert result is not GetResult.HIT or payload == payload_of(key, 2000)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert problems == []

    # -- the end ---------------------------------------------------------------------------------------------------

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

    @pytest.fixture
    def threads_before(self) -> set[threading.Thread]:
        return set(threading.enumerate())

    def test_pages_outlive_the_store(self, store: PageStore, reopen: Callable[[], PageStore] | None) -> None:
        if reopen is None:
            pytest.skip("this store has no `reopen`")
        keys = page_keys(30)
        store_pages(store, keys)
        store.close()
        again = reopen()
        try:
            assert again.contains(keys) == [True] * 30
            assert_hits(again, keys)
            assert store_pages(again, keys[:3]) == [SetResult.EXISTS] * 3
        finally:
            again.close()

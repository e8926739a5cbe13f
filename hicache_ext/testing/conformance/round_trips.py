"""The part of the PageStore suite about pages going in and coming out, and the memory they come from and go to."""

from __future__ import annotations

import time

import pytest

from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.testing.conformance.cases import PageStoreCases
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
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


class RoundTripCases(PageStoreCases):
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
            pytest.param([10_000_001, 10_000_002], id="20 MB"),
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

    def test_the_first_writer_wins(self, store: PageStore, medium: Medium) -> None:
        key = page_key("first")
        store_pages(store, [key])
        stored = medium.read(key)
        (result,) = store.set(PageBatch([key], HostPages([[1000]], fill=0xEE).buffers))
        if medium.writes_later:
            # It does not ask before it answers; what is stored is the first writer's all the same.
            settle(store)
        else:
            assert result is SetResult.EXISTS
        assert medium.read(key) == stored
        assert_hits(store, [key])

    def test_the_same_page_hash_under_another_identity_is_another_page(self, store: PageStore) -> None:
        mine, theirs = page_key("same"), page_key("same", OTHER_IDENTITY)
        store_pages(store, [mine])
        assert read_pages(store, [theirs])[0] == [GetResult.MISS]
        assert store_pages(store, [theirs]) == [SetResult.STORED]
        assert_hits(store, [mine, theirs])

    def test_keys_that_differ_in_one_byte_are_different_pages(self, store: PageStore) -> None:
        """Whatever bytes they are: a key is no text."""
        name = page_key("alike")
        keys = [name]
        for place in range(48):
            for byte in (0, 0x0A, 0x2F, 0xFF):
                changed = bytearray(name)
                changed[place] = byte
                keys.append(bytes(changed))
        # Also the end and the beginning alone, and nothing but zeros.
        keys += [name[:16] + bytes(32), name[:47] + b"\0", name[:40] + bytes(8), bytes(16) + name[16:], bytes(48)]
        keys = list(dict.fromkeys(keys))
        for key in keys[::2]:
            assert store_pages(store, [key], [70]) == [SetResult.STORED], key.hex()
        assert store.contains(keys) == [number % 2 == 0 for number in range(len(keys))]
        assert_hits(store, keys[::2], [70])
        assert read_pages(store, keys[1::2], [70])[0] == [GetResult.MISS] * (len(keys) // 2)
        assert store.remove(keys[1::2]) == 0
        assert_hits(store, keys[::2], [70])

    def test_results_are_lists_of_the_right_type(self, store: PageStore) -> None:
        keys = page_keys(3)
        written = store_pages(store, keys)
        read, _ = read_pages(store, keys)
        present = store.contains(keys)
        assert isinstance(written, list) and all(isinstance(result, SetResult) for result in written)
        assert isinstance(read, list) and all(isinstance(result, GetResult) for result in read)
        assert isinstance(present, list) and all(isinstance(known, bool) for known in present)
        assert type(store.count_leading(keys)) is int and type(store.remove(keys)) is int

    def test_what_is_stored_is_what_the_page_format_says(self, store: PageStore, medium: Medium) -> None:
        keys = page_keys(4)
        before = int(time.time() * 1000)
        store_pages(store, keys, [900, 124])
        assert sorted(medium.keys()) == sorted(keys)
        for key in keys:
            stored = medium.read(key)
            assert stored is not None
            page = read_page_object(stored)
            assert (page.key, page.payload) == (key, payload_of(key, 1024))
            assert before - 1000 <= page.created_ms <= time.time() * 1000 + 1000

    def test_a_page_of_another_writer_is_a_hit(self, store: PageStore, medium: Medium) -> None:
        sample, key = page_keys(2)
        store_pages(store, [sample])
        header_length = read_page_object(medium.read(sample) or b"").header_length
        medium.write(key, write_page_object(key, payload_of(key, 1000), header_length=header_length))
        assert store.contains([key]) == [True]
        stored = medium.read(key)
        assert_hits(store, [key])
        (result,) = store_pages(store, [key])
        # A store that writes later would have to ask and wait.
        assert result is SetResult.EXISTS or (medium.writes_later and result is SetResult.STORED)
        assert medium.read(key) == stored

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

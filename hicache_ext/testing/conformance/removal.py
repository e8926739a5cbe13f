"""The part of the PageStore suite about remove() and clear()."""

from __future__ import annotations

import threading
from functools import partial

from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.testing.conformance.cases import PageStoreCases
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    HostPages,
    assert_hits,
    assert_pages,
    page_keys,
    read_pages,
    settle,
    store_pages,
)


class RemovalCases(PageStoreCases):
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

    def test_clear_tells_identities_apart_that_look_alike(self, store: PageStore) -> None:
        """They begin or end with the same bytes, or with what is a pattern or an end of text to somebody."""
        digests = [IDENTITY, IDENTITY[:15] + b"\xff", IDENTITY[:8] + bytes(8), b"\xff" + IDENTITY[1:], bytes(16)]
        digests += [bytes([byte]) * 16 for byte in b"*?%_/\n\xff"] + [b"[!a]" * 4]
        pages = {digest: page_keys(2, digest.hex(), digest) for digest in digests}
        keys = [key for digest in digests for key in pages[digest]]
        assert store_pages(store, keys, [70]) == [SetResult.STORED] * len(keys)
        for number, digest in enumerate(digests):
            assert store.clear([digest]) == 1, digest.hex()
            expected = [GetResult.MISS] * 2 * (number + 1) + [GetResult.HIT] * 2 * (len(digests) - number - 1)
            assert read_pages(store, keys, [70])[0] == expected, digest.hex()

    def test_clear_of_everything_leaves_no_page(self, store: PageStore) -> None:
        keys = page_keys(5) + page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys)
        assert store.clear(None) == 2
        assert store.contains(keys) == [False] * 10
        assert read_pages(store, keys)[0] == [GetResult.MISS] * 10
        settle(store)
        assert store.clear(None) == 0

    def test_an_identity_whose_pages_were_removed_is_not_counted_by_clear(self, store: PageStore) -> None:
        keys = page_keys(3)
        store_pages(store, keys)
        assert store.remove(keys) == 3
        settle(store)
        assert store.clear(None) == 0

    def test_remove_counts_each_page_that_was_there_once(self, store: PageStore) -> None:
        keys = page_keys(3)
        store_pages(store, keys[:2])
        assert store.remove([keys[0], keys[2], keys[0]]) == 1
        assert store.remove([keys[0]]) == 0
        assert store.contains(keys) == [False, True, False]

    # The one rule of clear(): a write after clear() returned counts, it is visible and stays; a page stored before
    # clear() never comes back.

    def test_a_write_after_clear_counts(self, store: PageStore, medium: Medium) -> None:
        keys = page_keys(60)
        for digests, fill in (([IDENTITY], 0x42), (None, 0x43)):
            store_pages(store, keys)
            store.clear(digests)
            assert store.set(PageBatch(keys, HostPages([[1000]] * 60, fill=fill).buffers)) == [SetResult.STORED] * 60
            for _ in range(2):
                assert store.contains(keys) == [True] * 60
                assert_pages(store, keys, [bytes([fill]) * 1000] * 60)
                settle(store)
        assert_pages(store, keys, [bytes([fill]) * 1000] * 60)
        store.close()
        again = medium.open()
        try:
            assert_pages(again, keys, [bytes([fill]) * 1000] * 60)
        finally:
            again.close()

    def test_a_page_from_before_clear_never_comes_back(self, store: PageStore, medium: Medium) -> None:
        keys, theirs = page_keys(60), page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys + theirs)
        assert store.clear([IDENTITY]) == 1
        assert store.contains(keys) == [False] * 60
        # The first write makes the identity's place again; the old pages must not be found in it.
        store_pages(store, keys[:20])
        assert_hits(store, keys[:20])
        assert store.contains(keys) == [True] * 20 + [False] * 40
        settle(store)
        assert store.contains(keys) == [True] * 20 + [False] * 40
        assert store.count_leading(keys) == 20
        assert read_pages(store, keys[20:])[0] == [GetResult.MISS] * 40
        store.close()
        assert sorted(medium.keys()) == sorted(keys[:20] + theirs)
        again = medium.open()
        try:
            assert again.contains(keys + theirs) == [True] * 20 + [False] * 40 + [True] * 5
            assert_hits(again, keys[:20] + theirs)
        finally:
            again.close()

    def test_clear_of_an_identity_without_pages_is_zero_and_removes_nothing(self, store: PageStore) -> None:
        keys = page_keys(3)
        store_pages(store, keys)
        assert store.clear([OTHER_IDENTITY]) == 0
        assert_hits(store, keys)

    def test_writes_of_several_threads_count_once_all_have_cleared(self, store: PageStore) -> None:
        """Each thread clears and writes; whoever clears last, what is written after that stays."""
        keys = [page_keys(10, f"thread-{number}") for number in range(4)]
        all_cleared = threading.Barrier(4)

        def clear_and_write(mine: list[bytes]) -> None:
            for _ in range(3):
                store_pages(store, mine)
                store.clear([IDENTITY])
            all_cleared.wait(self.patience)
            assert store_pages(store, mine) == [SetResult.STORED] * 10

        self.in_threads(*[partial(clear_and_write, mine) for mine in keys])
        settle(store)
        everything = [key for mine in keys for key in mine]
        assert store.contains(everything) == [True] * 40
        assert_hits(store, everything)

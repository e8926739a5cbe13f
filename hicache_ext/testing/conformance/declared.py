"""The part of the PageStore suite about what a store says of itself, and about a medium that fails."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hicache_ext.storage.contract.abilities import IdentityKeeper, ability
from hicache_ext.storage.contract.store import GetResult, PageStore, SetResult
from hicache_ext.testing.conformance.cases import PageStoreCases
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    page_keys,
    read_pages,
    settle,
    store_pages,
)

_TROUBLE = (GetResult.ERROR, GetResult.TIMEOUT, GetResult.REJECTED)
_LARGE = (300_000, 700_000)
_DOCUMENTS: dict[bytes, dict[str, Any]] = {
    IDENTITY: {"model": {"id": "org/model", "revision": "ä"}, "pool": {"name": "kv", "segments": [1024, 512]}},
    OTHER_IDENTITY: {"model": {"id": "org/other"}, "pool": {"name": "kv"}},
}


class DeclaredCases(PageStoreCases):
    def test_describe_tells_name_type_and_sharing(self, store: PageStore, medium: Medium) -> None:
        info = store.describe()
        assert (info.name, info.type, info.shared) == (store.name, medium.type, medium.shared)

    def test_a_closed_store_still_describes_itself(self, store: PageStore) -> None:
        store_pages(store, page_keys(3))
        before = store.describe()
        store.close()
        after = store.describe()
        assert (after.name, after.type, after.shared) == (before.name, before.type, before.shared)

    def test_another_machine_sees_the_pages_exactly_if_describe_says_shared(
        self, store: PageStore, medium: Medium
    ) -> None:
        keys = page_keys(5)
        store_pages(store, keys)
        settle(store)
        elsewhere = medium.open_elsewhere()
        try:
            expected = GetResult.HIT if store.describe().shared else GetResult.MISS
            assert read_pages(elsewhere, keys)[0] == [expected] * 5
        finally:
            elsewhere.close()

    def test_stored_means_on_the_medium_unless_it_is_declared_to_write_later(
        self, store: PageStore, medium: Medium
    ) -> None:
        keys = page_keys(5)
        assert store_pages(store, keys) == [SetResult.STORED] * 5
        if medium.writes_later:
            assert hasattr(store, "wait_until_written")
            settle(store)
        assert all(medium.read(key) for key in keys)

    def test_calls_are_counted_by_result_and_in_bytes(self, store: PageStore, medium: Medium) -> None:
        def counts() -> dict[tuple[str, str], int]:
            events = (("get", "hit"), ("set", "stored"), ("bytes", "get"), ("bytes", "set"), ("get", "miss"))
            return {event: self.count(store, *event) for event in events}

        def growth() -> dict[tuple[str, str], int]:
            return {event: count - before[event] for event, count in counts().items()}

        keys, absent = page_keys(7), page_keys(3, "absent")
        before = counts()
        store_pages(store, keys, [900, 124])
        settle(store)
        written = {("set", "stored"): 7 * medium.copies, ("bytes", "set"): 7 * 1024 * medium.copies}
        assert growth() == dict.fromkeys(before, 0) | written
        before = counts()
        assert_hits(store, keys[:4], [900, 124])
        assert growth() == dict.fromkeys(before, 0) | {("get", "hit"): 4, ("bytes", "get"): 4096}
        before = counts()
        read_pages(store, absent, [1024])
        assert growth()["get", "miss"] >= 3 and growth()["bytes", "get"] == 0

    def test_identities_are_kept_exactly_if_that_is_declared(self, store: PageStore, medium: Medium) -> None:
        keeper = ability(store, IdentityKeeper)
        assert (keeper is not None) == medium.keeps_identities
        for digest, document in _DOCUMENTS.items():
            store.register_identity(digest, document)
        store_pages(store, page_keys(2) + page_keys(2, identity=OTHER_IDENTITY))
        settle(store)
        if keeper is not None:
            assert keeper.identities() == _DOCUMENTS
            other = medium.open()
            try:
                kept = ability(other, IdentityKeeper)
                assert kept is not None and kept.identities() == _DOCUMENTS
            finally:
                other.close()

    def test_register_identity_takes_any_document_twice(self, store: PageStore) -> None:
        for _ in range(2):
            store.register_identity(IDENTITY, {"model": {"id": "a/b"}, "pool": {"name": "kv"}})
        store_pages(store, page_keys(1))
        assert_hits(store, page_keys(1))

    @pytest.mark.parametrize("call", ["get", "set", "contains", "count_leading", "remove", "clear", "identity"])
    def test_a_medium_that_fails_is_a_result_and_no_error(self, store: PageStore, medium: Medium, call: str) -> None:
        keys, new = page_keys(4), page_keys(4, "new")
        assert store_pages(store, keys) == [SetResult.STORED] * 4
        settle(store)
        with medium.failing():
            before = self._troubles(store)
            match call:
                case "get":
                    results, _ = read_pages(store, keys)
                    assert all(result in _TROUBLE for result in results), results
                    assert self._troubles(store) > before, "the trouble is not counted"
                case "set":
                    written = store_pages(store, new)
                    assert medium.writes_later or not any(result.durable for result in written), written
                    self._settle_in_trouble(store, medium, before)
                case "contains":
                    present = store.contains(keys + new)
                    assert len(present) == 8 and not any(present[4:])
                    assert all(present[:4]) or self._troubles(store) > before, "absent, and the trouble is not counted"
                case "count_leading":
                    assert store.count_leading(new) == 0
                    before = self._troubles(store)
                    assert store.count_leading(keys) == 4 or self._troubles(store) > before, (
                        "the trouble is not counted"
                    )
                case "remove":
                    removed = store.remove(keys)
                    assert removed == 4 or self._troubles(store) > before, "the trouble is not counted"
                case "clear":
                    cleared = store.clear([IDENTITY])
                    assert cleared == 1 or self._troubles(store) > before, "the trouble is not counted"
                case "identity":
                    store.register_identity(IDENTITY, {"model": {"id": "a/b"}})
            assert store.describe().name == store.name
        self._works_again(store)

    def test_a_medium_that_is_full_refuses_pages_and_keeps_what_it_has(self, store: PageStore, medium: Medium) -> None:
        keys, new = page_keys(4), page_keys(6, "new")
        store_pages(store, keys, _LARGE)
        settle(store)
        with medium.full():
            before = self._troubles(store)
            written = store_pages(store, new, _LARGE)
            assert medium.writes_later or not any(result.durable for result in written), written
            self._settle_in_trouble(store, medium, before)
            assert_hits(store, keys, _LARGE)
            results, _ = read_pages(store, keys + new, _LARGE)
            # What waits to be written is read from where it waits.
            none = {GetResult.MISS, GetResult.HIT} if medium.writes_later else {GetResult.MISS}
            assert set(results[4:]) <= none, "half a page has the name of a whole one"
        settle(store)
        if medium.writes_later:
            assert set(keys) <= set(medium.keys()) <= {*keys, *new}
            assert_hits(store, [key for key, result in zip(new, written, strict=True) if result.durable], _LARGE)
        else:
            assert sorted(medium.keys()) == sorted(keys)
        self._works_again(store)

    def _settle_in_trouble(self, store: PageStore, medium: Medium, before: int) -> None:
        """After a write that the medium does not take. A store that writes later may wait until it does."""
        deadline = time.monotonic() + self.patience
        while medium.writes_later and self._troubles(store) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        if not medium.writes_later:
            settle(store)
        assert self._troubles(store) > before, "the trouble is not counted"

    def _troubles(self, store: PageStore) -> int:
        """Failed reads by their result, whatever the reason is called."""
        return sum(self.count(store, event) for event in ("error", "timeout", "rejected", "failure"))

    def _works_again(self, store: PageStore) -> None:
        """As soon as the medium does: guards and paths out of service may take a while to come back."""
        deadline = time.monotonic() + self.patience
        for attempt in range(1_000_000):
            keys = page_keys(3, f"afterwards-{attempt}")
            written = store_pages(store, keys)
            settle(store)
            if all(result is SetResult.STORED for result in written) and all(store.contains(keys)):
                assert_hits(store, keys)
                return
            assert time.monotonic() < deadline, written
            time.sleep(0.05)

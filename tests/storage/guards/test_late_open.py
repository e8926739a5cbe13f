"""Late opening: a tier that cannot start is in use as soon as it can."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hicache_ext.errors import ConfigError, StoreClosedError, StoreSetupError
from hicache_ext.storage.contract.store import GetResult, PageStore, SetResult
from hicache_ext.storage.guards.late_open import LateStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, assert_hits, read_pages, store_pages
from tests.storage.guards.hung import KEY
from tests.waiting import wait_until


class RegisteringStore(MemoryPageStore):
    def __init__(self) -> None:
        super().__init__("pool")
        self.registered_before_first_page: int | None = None

    def set(self, batch: Any) -> list[SetResult]:
        self.registered_before_first_page = len(self.identities())
        return super().set(batch)


class Place:
    """Where a store can be opened once ``there`` is set."""

    def __init__(self) -> None:
        self.there = False
        self.attempts = 0
        self.store = RegisteringStore()

    def open(self) -> PageStore:
        self.attempts += 1
        if not self.there:
            raise StoreSetupError("pool", "connection refused")
        return self.store


def late(opener: Callable[[], PageStore], first_wait: float = 10.0) -> LateStore:
    return LateStore("pool", "memory", opener, first_wait=first_wait, first_pause=0.01)


def test_a_tier_that_comes_up_later_is_used_without_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    store = late(place.open)
    store.register_identity(IDENTITY, {"model": 1})
    store.register_identity(OTHER_IDENTITY, {"model": 2})
    assert read_pages(store, [KEY])[0] == [GetResult.REJECTED]
    assert store_pages(store, [KEY]) == [SetResult.REJECTED]
    assert store.contains([KEY]) == [False]
    assert (store.count_leading([KEY]), store.remove([KEY]), store.clear(None)) == (0, 0, 0)
    assert store.describe().details == {"state": "not open", "problem": "connection refused"}
    wait_until(lambda: place.attempts >= 3)
    place.there = True
    wait_until(lambda: store.inner is not None)
    assert store_pages(store, [KEY]) == [SetResult.STORED]
    assert_hits(store, [KEY])
    assert place.store.registered_before_first_page == 2
    assert place.store.identities() == {IDENTITY: {"model": 1}, OTHER_IDENTITY: {"model": 2}}
    assert "connection refused; going on without it (required: false) and trying again" in caplog.text
    wait_until(lambda: "tier pool is open now and in use" in caplog.text)
    store.register_identity(bytes(16), {"model": 3})
    assert len(place.store.identities()) == 3
    store.close()


def test_a_tier_that_is_there_at_the_start_is_in_use_at_once(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.there = True
    store = late(place.open)
    assert store_pages(store, [KEY]) == [SetResult.STORED]
    assert caplog.text == ""
    store.close()


def test_an_opening_that_hangs_holds_up_neither_the_start_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_ext.storage.guards.late_open._CLOSE_WAIT", 0.05)
    before = set(threading.enumerate())
    go_on = threading.Event()
    opened = MemoryPageStore()

    def hang() -> PageStore:
        go_on.wait(120)
        return opened

    store = late(hang, first_wait=0.05)
    assert store.contains([KEY]) == [False]
    store.close()
    with pytest.raises(StoreClosedError):
        store.contains([KEY])
    go_on.set()
    wait_until(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(StoreClosedError):
        opened.contains([KEY])  # what was opened too late is closed again


def test_an_opener_with_a_bug_is_tried_again() -> None:
    place = Place()
    place.there = True
    bugs = [ValueError("bug"), OSError(5, "EIO")]

    def open_() -> PageStore:
        if bugs:
            raise bugs.pop()
        return place.open()

    store = late(open_)
    wait_until(lambda: store.inner is not None)
    store.close()


def test_a_wrong_configuration_still_stops_the_start() -> None:
    def refuse() -> PageStore:
        raise ConfigError("hicache_ext.tiers.pool.io", "'direct' is not in this version")

    with pytest.raises(ConfigError, match=r"tiers\.pool\.io"):
        late(refuse)


def test_close_ends_the_attempts() -> None:
    before = set(threading.enumerate())
    store = late(Place().open)
    store.close()
    assert set(threading.enumerate()) <= before

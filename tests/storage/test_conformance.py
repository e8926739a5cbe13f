"""The PageStore suite against the stores of this package that need no server, and the faulty stores of testing/."""

from __future__ import annotations

import time

import pytest

from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.rigs.faults import (
    DroppingStore,
    FailingStore,
    LyingStore,
    PageStoreWrapper,
    RaisingStore,
    SlowStore,
)
from tests.storage.media import Memory, Over, PageFiles, TwoTiers

MIB = 1 << 20


class TestMemoryPageStore(PageStoreTests):
    @pytest.fixture
    def medium(self):
        return Memory()


class TestWrappedStore(PageStoreTests):
    @pytest.fixture
    def medium(self):
        return Over(Memory(), PageStoreWrapper)


class TestPageFileStore(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return PageFiles(tmp_path)


class TestPageFileStoreWithACapacity(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return PageFiles(tmp_path, capacity=128 * MIB)


class TestTieredStore(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return TwoTiers(tmp_path)


class TestTieredStoreThatWritesTheFarTierInTheBackground(PageStoreTests):
    """Every page is written to the near tier first; with promotion and prefetch on."""

    @pytest.fixture
    def medium(self, tmp_path):
        return TwoTiers(tmp_path, far_in_the_background=True)


class WrittenLater(Over):
    """A medium that is looked at once its stores have written what they have in their queues."""

    def __init__(self, inner, wrap, **declared):
        super().__init__(inner, wrap, writes_later=True, **declared)
        self._opened = []

    def open(self):
        self._opened.append(super().open())
        return self._opened[-1]

    def _settle(self):
        assert all(store.wait_until_written(30) for store in self._opened)

    def read(self, key):
        self._settle()
        return super().read(key)

    def write(self, key, stored):
        self._settle()
        super().write(key, stored)

    def keys(self):
        self._settle()
        return super().keys()

    def __reduce__(self):
        return Memory, ()


class TestTieredStoreThatOnlyWritesInTheBackground(PageStoreTests):
    """As a decode node that stores to a pool alone, and reads it, too."""

    @pytest.fixture
    def medium(self):
        settings = TieringSettings(async_tiers=frozenset({"memory"}))
        declared = {"type": "tiered", "keeps_identities": False}
        return WrittenLater(Memory(), lambda far: TieredStore([far], [far], settings=settings), **declared)


def _assert_it_stores(store):
    assert store_pages(store, page_keys(3)) == [SetResult.STORED] * 3
    assert_hits(store, page_keys(3))


@pytest.mark.parametrize("wrapper", [LyingStore, DroppingStore, FailingStore])
def test_a_wrapper_that_is_not_active_keeps_every_promise(wrapper):
    store = wrapper(MemoryPageStore())
    store.active = False
    _assert_it_stores(store)


def test_a_slow_store_takes_longer_and_answers_the_same():
    store = SlowStore(MemoryPageStore(), 0.05)
    begun = time.monotonic()
    _assert_it_stores(store)
    assert time.monotonic() - begun >= 0.05 * store.calls > 0


def test_a_raising_store_raises_what_it_was_told_to():
    store = RaisingStore(MemoryPageStore(), lambda: ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError):
        store.contains([])

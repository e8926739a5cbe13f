"""The PageStore suite against the slab layout."""

from __future__ import annotations

import pytest

from hicache_ext.storage.file.slab.store import SlabStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.storage.raw_access import RawSlots

MIB = 1 << 20


class TestSlabStore(PageStoreTests):
    def open(self, directory):
        return SlabStore("disk", directory, capacity=256 * MIB)

    @pytest.fixture
    def store(self, tmp_path):
        store = self.open(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def raw(self, store):
        return RawSlots(store)

    @pytest.fixture
    def reopen(self, tmp_path):
        return lambda: self.open(tmp_path)

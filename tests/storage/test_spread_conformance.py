"""The PageStore suite against the file tier as a configuration opens it: two paths, both layouts, direct I/O."""

from __future__ import annotations

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.tiers.file.opening import open_file_tier
from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.storage.raw_access import RawFiles, RawSlots, SpreadRaw

pytestmark = pytest.mark.slow

PATHS = ("a", "b")


class SpreadTests(PageStoreTests):
    layout: str
    io = "buffered"

    def open(self, directory):
        paths = [str(directory / name) for name in PATHS]
        disk = {"type": "file", "path": paths, "capacity": 512 << 20, "layout": self.layout, "io": self.io}
        disk["threads"] = 4
        return open_file_tier("disk", load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"])

    @pytest.fixture
    def store(self, tmp_path):
        store = self.open(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def reopen(self, tmp_path):
        return lambda: self.open(tmp_path)


class TestSpreadPageFiles(SpreadTests):
    layout = "pages"

    @pytest.fixture
    def raw(self, tmp_path):
        paths = [tmp_path / name for name in PATHS]
        return SpreadRaw(paths, [RawFiles(path) for path in paths])


class TestSpreadSlabs(SpreadTests):
    layout = "slab"

    @pytest.fixture
    def raw(self, store, tmp_path):
        return SpreadRaw([tmp_path / name for name in PATHS], [RawSlots(part) for part in store.parts])


class TestSpreadSlabsDirect(TestSpreadSlabs):
    io = "direct"

"""The PageStore suite against the file tier as a configuration opens it: two paths, both layouts, direct I/O."""

from __future__ import annotations

import itertools

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.file import open_file_tier
from hicache_ext.storage.file.path_choice import PathChoice
from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.storage.raw_access import RawFiles, RawSlots

pytestmark = pytest.mark.slow

PATHS = ("a", "b")


class SpreadRaw:
    """The stored objects, each where its path's own raw access finds them."""

    def __init__(self, paths, raws) -> None:
        self._choice = PathChoice([str(path) for path in paths])
        self._raws = raws

    def _raw(self, key):
        (number,) = self._choice.choose([key], range(len(self._raws)))
        return self._raws[number]

    def read(self, key):
        return self._raw(key).read(key)

    def write(self, key, stored):
        self._raw(key).write(key, stored)

    def keys(self):
        return list(itertools.chain.from_iterable(raw.keys() for raw in self._raws))


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

"""The PageStore suite against the file tier as a configuration opens it: two paths, both layouts, direct I/O."""

from __future__ import annotations

import pytest

from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.storage.media import TwoPaths

pytestmark = pytest.mark.slow


class TestSpreadPageFiles(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return TwoPaths(tmp_path, "pages")


class TestSpreadSlabs(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return TwoPaths(tmp_path, "slab")


class TestSpreadSlabsDirect(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return TwoPaths(tmp_path, "slab", "direct")

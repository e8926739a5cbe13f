"""The PageStore suite over every transform: what happens to pages on their way changes nothing that callers see."""

from __future__ import annotations

import pytest

from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.storage.media import Memory, PageFiles, Slabs
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, Transformed

pytestmark = pytest.mark.slow


class TestAuthenticatedMemory(PageStoreTests):
    @pytest.fixture
    def medium(self):
        return Transformed(Memory(), AUTHENTICATE)


class TestEncryptedMemory(PageStoreTests):
    @pytest.fixture
    def medium(self):
        return Transformed(Memory(), ENCRYPT)


class TestEncodedMemory(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Transformed(Memory(), None, tmp_path / "shelf")


class TestEncodedAndEncryptedMemory(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Transformed(Memory(), ENCRYPT, tmp_path / "shelf")


class TestAuthenticatedSlabs(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Transformed(Slabs(tmp_path), AUTHENTICATE, block=4096)


class TestEncodedAndEncryptedSlabs(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Transformed(Slabs(tmp_path / "disk"), ENCRYPT, tmp_path / "shelf", block=4096)


class TestEncryptedPageFiles(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Transformed(PageFiles(tmp_path), ENCRYPT, block=4096)

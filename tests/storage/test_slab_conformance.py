"""The PageStore suite against the slab layout: pages known by their views and by their addresses."""

from __future__ import annotations

import pytest

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.memory import PageMemory, addresses_of
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, SetResult
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.storage.media import Slabs


class TestSlabStore(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Slabs(tmp_path)


class ByAddress(SlabStore):
    """Makes of each batch what the backend makes: a chain's keys in one piece, and addresses where views are not asked
    for."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        return super().get(_by_address(batch))

    def set(self, batch: PageBatch) -> list[SetResult]:
        return super().set(_by_address(batch))


def _by_address(batch: PageBatch) -> PageBatch:
    known = addresses_of(batch.buffers, writable=False)
    if known is None:
        return batch
    keys, identities = batch.keys, {key[:IDENTITY_LENGTH] for key in batch.keys}
    if len(identities) == 1:
        keys = PageKeys.of_joined(identities.pop(), b"".join([key[IDENTITY_LENGTH:] for key in keys]))
    return PageBatch(keys, PageMemory(known, lambda: list(batch.buffers)), batch.sizes)


class TestSlabStoreByAddress(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Slabs(tmp_path, ByAddress)

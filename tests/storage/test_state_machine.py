"""Any order of calls on a store beside a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

from hicache_ext.storage.file.pages import PageFileStore
from hicache_ext.storage.tiered import TieredStore
from hicache_ext.testing.conformance.state_machine import StoreUnderTest, page_store_machine
from hicache_ext.testing.memory_store import MemoryPageStore
from tests.storage.raw_access import RawFiles, RawObjects

_PROFILE = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def _memory() -> StoreUnderTest:
    store = MemoryPageStore()
    return StoreUnderTest(
        store,
        dispose=lambda: None,
        raw=RawObjects(store),
        reopen=lambda: MemoryPageStore(objects=store.objects),
    )


def _files(paths: int = 1, capacity: int | None = None) -> StoreUnderTest:
    directory = Path(tempfile.mkdtemp(prefix="hicache-machine-"))
    places = [directory / str(number) for number in range(paths)]

    def reopen() -> PageFileStore:
        return PageFileStore("disk", places, capacity=capacity)

    return StoreUnderTest(
        reopen(),
        dispose=lambda: shutil.rmtree(directory),
        raw=RawFiles(*places),
        reopen=reopen,
        evicts=capacity is not None,
    )


def _tiers() -> StoreUnderTest:
    near, far = MemoryPageStore("near"), MemoryPageStore("far")
    return StoreUnderTest(TieredStore([near, far], [near, far]), dispose=lambda: None)


TestMemoryPageStore = page_store_machine(_memory).TestCase
TestPageFileStore = page_store_machine(_files).TestCase
TestPageFileStoreOverTwoPaths = page_store_machine(lambda: _files(paths=2)).TestCase
TestPageFileStoreThatEvicts = page_store_machine(lambda: _files(capacity=80 * 1024)).TestCase
TestTieredStore = page_store_machine(_tiers).TestCase

for _case in (
    TestMemoryPageStore,
    TestPageFileStore,
    TestPageFileStoreOverTwoPaths,
    TestPageFileStoreThatEvicts,
    TestTieredStore,
):
    _case.settings = _PROFILE
del _case

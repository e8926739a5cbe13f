"""Any order of calls on a store beside a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.file.device_errors import Trouble
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.state_machine import StoreUnderTest, page_store_machine
from tests.storage.raw_access import RawFiles, RawObjects, SpreadRaw

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


def _files(capacity: int | None = None) -> StoreUnderTest:
    directory = Path(tempfile.mkdtemp(prefix="hicache-machine-"))

    def reopen() -> PageFileStore:
        return PageFileStore("disk", directory, capacity=capacity)

    return StoreUnderTest(
        reopen(),
        dispose=lambda: shutil.rmtree(directory),
        raw=RawFiles(directory),
        reopen=reopen,
        evicts=capacity is not None,
    )


def _spread() -> StoreUnderTest:
    directory = Path(tempfile.mkdtemp(prefix="hicache-machine-"))
    paths = [directory / "a", directory / "b"]
    metrics = TierMetrics("disk")

    def open_path(path: Path, trouble: Trouble) -> PageFileStore:
        return PageFileStore("disk", path, capacity=None, metrics=metrics, trouble=trouble)

    def reopen() -> SpreadStore:
        return SpreadStore("disk", paths, open_path, metrics)

    return StoreUnderTest(
        reopen(),
        dispose=lambda: shutil.rmtree(directory),
        raw=SpreadRaw(paths, [RawFiles(path) for path in paths]),
        reopen=reopen,
    )


def _tiers() -> StoreUnderTest:
    near, far = MemoryPageStore("near"), MemoryPageStore("far")
    return StoreUnderTest(TieredStore([near, far], [near, far]), dispose=lambda: None)


TestMemoryPageStore = page_store_machine(_memory).TestCase
TestPageFileStore = page_store_machine(_files).TestCase
TestPageFileStoreThatEvicts = page_store_machine(lambda: _files(capacity=80 * 1024)).TestCase
TestSpreadStore = page_store_machine(_spread).TestCase
TestTieredStore = page_store_machine(_tiers).TestCase

for _case in (
    TestMemoryPageStore,
    TestPageFileStore,
    TestPageFileStoreThatEvicts,
    TestSpreadStore,
    TestTieredStore,
):
    _case.settings = _PROFILE
del _case

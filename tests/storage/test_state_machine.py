"""Any order of calls on a store beside a dict."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.file.devices import Trouble
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.testing.conformance.state_machine import page_store_machine
from tests.storage.media import Memory, OfDirectory, PageFiles, TwoTiers
from tests.storage.raw_access import RawFiles, SpreadRaw

_PROFILE = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class _Spread(OfDirectory):
    def __init__(self) -> None:
        super().__init__()
        self._paths = [self.directory / "a", self.directory / "b"]
        self._metrics = TierMetrics("disk")
        self.raw = SpreadRaw(self._paths, [RawFiles(path) for path in self._paths])

    def _open_path(self, path: Path, trouble: Trouble) -> PageFileStore:
        return PageFileStore("disk", path, capacity=None, metrics=self._metrics, trouble=trouble)

    def open_in(self, directory: Path) -> SpreadStore:
        return SpreadStore("disk", self._paths, self._open_path, self._metrics)


TestMemoryPageStore = page_store_machine(Memory).TestCase
TestPageFileStore = pytest.mark.thorough(page_store_machine(PageFiles).TestCase)
TestPageFileStoreThatEvicts = page_store_machine(lambda: PageFiles(capacity=80 * 1024), evicts=True).TestCase
TestSpreadStore = pytest.mark.thorough(pytest.mark.slow(page_store_machine(_Spread).TestCase))
TestTieredStore = pytest.mark.thorough(pytest.mark.slow(page_store_machine(TwoTiers).TestCase))

for _case in (
    TestMemoryPageStore,
    TestPageFileStore,
    TestPageFileStoreThatEvicts,
    TestSpreadStore,
    TestTieredStore,
):
    _case.settings = _PROFILE
del _case

"""Stores and clocks for tests of guards."""

from __future__ import annotations

import functools
import threading
from typing import Annotated, Any, Literal

import pytest

from hicache_ext.config import RemoteTierConfig
from hicache_ext.config.schema import Allowed
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.guards import pipeline
from hicache_ext.storage.guards.breaker import TierBreaker
from hicache_ext.storage.guards.pipeline import GuardedStore, GuardPlan
from hicache_ext.testing.conformance.pages import IDENTITY, page_key
from tests.rigs.faults import BeforeEachCall

KEY = page_key("one")
OTHER = page_key("other", IDENTITY)


class PoolConfig(RemoteTierConfig):
    type: Annotated[Literal["pool"], Allowed("pool")] = "pool"


class Clock:
    """A clock that only tests advance; sleeping on it advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def guard(store: PageStore, *, clock: Clock | None = None, **plan: Any) -> GuardedStore:
    """``store`` behind the guards of this plan. Time passes by ``clock``, if there is one. Where the plan says nothing
    of the breaker, it never opens: other guards are tested without it."""
    timing: dict[str, Any] = {} if clock is None else {"clock": clock, "sleep": clock.sleep}
    guards = GuardedStore(store, GuardPlan(**plan), **timing)
    if not {"slow_call", "probe_interval", "slow_start"} & plan.keys():
        guards.breaker = _NeverOpens(store, lambda batch: [GetResult.ERROR], lambda key: False)
    return guards


class _NeverOpens(TierBreaker):
    def record(self, *_: Any) -> None: ...

    def record_read(self, *_: Any) -> None: ...

    def record_write(self, *_: Any) -> None: ...


def set_timeout(store: GuardedStore, seconds: float) -> None:
    """From now on each call of ``store`` has so long."""
    for limits in (store._reads, store._look_ups, store._writes):
        limits.longest = seconds


def configured_breakers_have(monkeypatch: pytest.MonkeyPatch, **settings: float) -> None:
    """Breakers of tiers that are opened from now on have these settings, which no key sets."""
    monkeypatch.setattr(pipeline, "GuardPlan", functools.partial(GuardPlan, **settings))


class HungStore(BeforeEachCall):
    """Every call waits while ``hang()`` is in force, and ``waiting`` counts those that do."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self._free = threading.Event()
        self._free.set()
        self._lock = threading.Lock()
        self.waiting = 0
        self.calls = 0

    def hang(self) -> None:
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def before_call(self) -> None:
        with self._lock:
            self.calls += 1
            self.waiting += 1
        assert self._free.wait(120), "nobody let the store go"
        with self._lock:
            self.waiting -= 1


class ScribblingStore(HungStore):
    """Writes all over the memory it was given, before and after it hangs, as a late DMA would."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        self.scribble(batch, 0x11)
        results = super().get(batch)
        self.scribble(batch, 0x22)
        return results

    @staticmethod
    def scribble(batch: PageBatch, fill: int) -> None:
        for segments in batch.buffers:
            for segment in segments:
                segment[:] = bytes([fill]) * segment.nbytes


class CountingStore(BeforeEachCall):
    """Counts calls by doing nothing else."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.calls = 0

    def before_call(self) -> None:
        self.calls += 1

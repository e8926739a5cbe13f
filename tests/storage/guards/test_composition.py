"""Which guards a tier gets."""

from __future__ import annotations

import math
import threading
from typing import Any, ClassVar

import pytest

from hicache_ext.config import ExtraConfig, TierConfig, load_config
from hicache_ext.errors import StoreClosedError
from hicache_ext.storage.contract.abilities import HintBoard, IdentityKeeper, Resizable, ability
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.guards import pipeline
from hicache_ext.storage.guards.pipeline import GuardedStore, GuardPlan, plan_guards
from hicache_ext.storage.tiering.reload import guard
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import store_pages
from tests.storage.guards.hung import KEY, PoolConfig


class TimelyPoolConfig(PoolConfig):
    keeps_timeout: ClassVar[bool] = True


def file_tier(**settings: Any) -> TierConfig:
    tier = {"type": "file", "path": "/mnt/cache", "capacity": "1GiB", **settings}
    return load_config(ExtraConfig.around({"tiers": {"disk": tier}})).tiers["disk"]


def names(store: PageStore) -> list[str]:
    """The guards that it has of those that not every guarded tier has, outermost first."""
    assert isinstance(store, GuardedStore)
    rules = {
        "time limit": store._reads.longest < math.inf,
        "deadline": store.deadline is not None,
        "retry": store._retries > 0,
    }
    return [name for name, there in rules.items() if there]


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "is_on_network", lambda path: path.startswith("/nfs"))


def test_a_local_disk_has_no_guards_so_that_reads_go_straight_into_host_pages() -> None:
    store = MemoryPageStore()
    assert guard(file_tier(), store) is store
    assert plan_guards(file_tier()) == GuardPlan(slow_call=math.inf)


def test_a_network_file_system_and_a_pool_get_all_of_them() -> None:
    everything = ["time limit", "deadline", "retry"]
    for tier in (file_tier(path="/nfs/cache"), file_tier(path=["/mnt/a", "/nfs/b"]), PoolConfig()):
        store = GuardedStore(MemoryPageStore(), plan_guards(tier))
        assert names(store) == everything
        store.close()


def test_what_a_first_token_waits_for_ends_after_a_second_and_a_write_after_five() -> None:
    for tier in (file_tier(path="/nfs/cache"), PoolConfig()):
        assert (plan_guards(tier).timeout, plan_guards(tier).write_timeout) == (1.0, 5.0)


def test_a_configured_timeout_bounds_every_call() -> None:
    for tier in (file_tier(path="/nfs/cache", timeout="3s"), PoolConfig(timeout="3s"), file_tier(timeout="3s")):
        assert (plan_guards(tier).timeout, plan_guards(tier).write_timeout) == (3.0, None)


def test_a_store_that_keeps_its_timeout_reads_straight_into_host_pages() -> None:
    plan = plan_guards(TimelyPoolConfig(timeout="2s"))
    assert plan.timeout == 2.0 and plan.bounce_memory == 0
    assert "deadline" not in names(GuardedStore(MemoryPageStore(), plan))


def test_a_timeout_on_a_local_disk_brings_what_makes_it_useful() -> None:
    store = GuardedStore(MemoryPageStore(), plan_guards(file_tier(timeout="2s")))
    assert names(store) == ["time limit", "deadline"]
    store.close()


def test_the_timeout_of_a_network_file_system_can_be_switched_off() -> None:
    plan = plan_guards(file_tier(path="/nfs/cache", timeout="off"))
    assert plan.timeout == math.inf
    assert "deadline" not in names(GuardedStore(MemoryPageStore(), plan))


@pytest.mark.parametrize(("timeout", "slow"), [(None, 0.5), ("200ms", 0.5), ("1s", 0.5), ("5s", 2.5)])
def test_a_call_is_slow_after_half_of_the_time_that_it_has(timeout: str | None, slow: float) -> None:
    assert plan_guards(PoolConfig(timeout=timeout)).slow_call == slow


def test_another_timeout_leaves_the_guards_as_they_are() -> None:
    store = GuardedStore(MemoryPageStore(), plan_guards(file_tier(path="/nfs/cache", timeout="off")))
    assert isinstance(store, GuardedStore)
    store.breaker.trip("gone")
    for timeout, seconds in (("4s", 4.0), ("off", math.inf), ("auto", 1.0)):
        plan = plan_guards(file_tier(path="/nfs/cache", timeout=timeout))
        before = store._reads.longest
        assert store._reads.seconds(1) == before
        store.put_limits(plan)
        assert (store._reads.seconds(1), store._look_ups.seconds(1)) == (seconds, seconds)
        assert store._writes.seconds(1) == (5.0 if timeout == "auto" else seconds)
        assert store.breaker.slow_call == plan.slow_call
    assert store.describe().details["breaker"] == "open"
    store.close()


def test_with_its_timeout_switched_off_a_tier_reads_straight_into_host_pages_again() -> None:
    class Watched(MemoryPageStore):
        def _read(self, batch: PageBatch) -> list[GetResult]:
            given.append(batch.buffers[0][0])
            return super()._read(batch)

    given: list[memoryview] = []
    store = GuardedStore(Watched(), plan_guards(file_tier(timeout="9s")))
    assert isinstance(store, GuardedStore)
    store_pages(store, [KEY], [64])
    page = memoryview(bytearray(64))
    for timeout, straight in (("8s", False), ("off", True), ("7s", False)):
        store.put_limits(plan_guards(file_tier(timeout=timeout)))
        assert store.get(PageBatch([KEY], [[page]])) == [GetResult.HIT]
        assert (given[-1] is page) == straight
    store.put_limits(plan_guards(file_tier(timeout="off")))
    # Nor is its disk slow any more, however long it takes.
    assert store.breaker.slow_call == math.inf
    store.close()
    assert not [thread for thread in threading.enumerate() if "memory-deadline" in thread.name]
    with pytest.raises(StoreClosedError):
        store.contains([KEY])


def test_abilities_are_found_behind_guards() -> None:
    class Board(MemoryPageStore):
        def can_resize(self, capacity: int | None) -> bool:
            return False

        def resize(self, capacity: int | None) -> None:
            raise AssertionError

    bare = Board()
    store = GuardedStore(bare, plan_guards(TimelyPoolConfig()))
    assert ability(store, Resizable) is bare
    assert ability(store, IdentityKeeper) is bare
    assert ability(store, HintBoard) is None
    assert ability(store, GuardedStore) is store and ability(bare, GuardedStore) is None

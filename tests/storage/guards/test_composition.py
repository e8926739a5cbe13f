"""Which guards a tier gets."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import pytest

from hicache_ext.config import ExtraConfig, RemoteTierConfig, TierConfig, load_config
from hicache_ext.config.schema import Allowed
from hicache_ext.storage.contract.abilities import IdentityKeeper, Resizable, ability
from hicache_ext.storage.contract.hint_board import HintBoard
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.guards import pipeline
from hicache_ext.storage.guards.breaker import BreakerSettings
from hicache_ext.storage.guards.pipeline import GuardedStore, GuardPlan, guarded, plan_guards
from hicache_ext.storage.tiers.memory import MemoryPageStore


class PoolConfig(RemoteTierConfig):
    type: Annotated[Literal["pool"], Allowed("pool")] = "pool"


class TimelyPoolConfig(PoolConfig):
    keeps_timeout: ClassVar[bool] = True


def file_tier(**settings: Any) -> TierConfig:
    tier = {"type": "file", "path": "/mnt/cache", "capacity": "1GiB", **settings}
    return load_config(ExtraConfig.around({"tiers": {"disk": tier}})).tiers["disk"]


def names(store: PageStore) -> list[str]:
    """The guards that it has, outermost first."""
    assert isinstance(store, GuardedStore)
    rules = {
        "exists budget": store._budget is not None,
        "negative cache": store._absent is not None,
        "time limit": store._reads.longest < math.inf,
        "breaker": store.breaker is not None,
        "concurrency": store._places is not None,
        "deadline": store.deadline is not None,
        "retry": store._retries > 0,
    }
    return [name for name, there in rules.items() if there]


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "is_on_network", lambda path: path.startswith("/nfs"))


def test_a_local_disk_has_no_guards_so_that_reads_go_straight_into_host_pages() -> None:
    assert plan_guards(file_tier()).timeout is None
    store = MemoryPageStore()
    assert guarded(store, plan_guards(file_tier())) is store


def test_a_network_file_system_and_a_pool_get_all_of_them() -> None:
    everything = ["exists budget", "negative cache", "time limit", "breaker", "concurrency", "deadline", "retry"]
    for tier in (file_tier(path="/nfs/cache"), file_tier(path=["/mnt/a", "/nfs/b"]), PoolConfig()):
        store = guarded(MemoryPageStore(), plan_guards(tier))
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
    assert "deadline" not in names(guarded(MemoryPageStore(), plan))


def test_a_timeout_on_a_local_disk_brings_what_makes_it_useful() -> None:
    store = guarded(MemoryPageStore(), plan_guards(file_tier(timeout="2s")))
    assert names(store) == ["exists budget", "time limit", "breaker", "concurrency", "deadline"]
    store.close()


def test_the_timeout_of_a_network_file_system_can_be_switched_off() -> None:
    plan = plan_guards(file_tier(path="/nfs/cache", timeout="off"))
    assert plan.timeout is None
    assert "deadline" not in names(guarded(MemoryPageStore(), plan))


def test_every_key_reaches_its_guard() -> None:
    guards = {
        "retries": 3,
        "breaker": True,
        "concurrency": 6,
        "exists_budget": "7ms",
    }
    assert plan_guards(file_tier(timeout="9s", guards=guards)) == GuardPlan(
        timeout=9.0,
        bounce_memory=256 << 20,
        retries=3,
        breaker=BreakerSettings(slow_call=4.5),
        concurrency=6,
        exists_budget=0.007,
    )


@pytest.mark.parametrize(("timeout", "slow"), [(None, 0.5), ("200ms", 0.5), ("1s", 0.5), ("5s", 2.5)])
def test_a_call_is_slow_after_half_of_the_time_that_it_has(timeout: str | None, slow: float) -> None:
    breaker = plan_guards(PoolConfig(timeout=timeout)).breaker
    assert breaker is not None and breaker.slow_call == slow


def test_every_guard_that_has_a_key_can_be_left_out() -> None:
    off = {"retries": 0, "breaker": False, "exists_budget": False}
    store = guarded(MemoryPageStore(), plan_guards(TimelyPoolConfig(guards=off)))
    assert names(store) == ["negative cache", "time limit", "concurrency"]


def test_abilities_are_found_behind_guards() -> None:
    class Board(MemoryPageStore):
        def can_resize(self, capacity: int | None) -> bool:
            return False

        def resize(self, capacity: int | None) -> None:
            raise AssertionError

    bare = Board()
    store = guarded(bare, plan_guards(TimelyPoolConfig()))
    assert ability(store, Resizable) is bare
    assert ability(store, IdentityKeeper) is bare
    assert ability(store, HintBoard) is None
    assert ability(store, GuardedStore) is store and ability(bare, GuardedStore) is None

"""Which guards a tier gets."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest

from hicache_ext.config import ExtraConfig, RemoteTierConfig, TierConfig, load_config
from hicache_ext.config.schema import Allowed
from hicache_ext.storage.contract.abilities import IdentityKeeper, Resizable, ability
from hicache_ext.storage.contract.hint_board import HintBoard
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.wrapper import DelegatingStore
from hicache_ext.storage.guards import composition
from hicache_ext.storage.guards.breaker_store import BreakerStore
from hicache_ext.storage.guards.composition import GuardPlan, guarded, plan_guards
from hicache_ext.storage.guards.tier_breaker import BreakerSettings
from hicache_ext.storage.tiers.memory import MemoryPageStore


class PoolConfig(RemoteTierConfig):
    type: Annotated[Literal["pool"], Allowed("pool")] = "pool"


class TimelyPoolConfig(PoolConfig):
    keeps_timeout: ClassVar[bool] = True


def file_tier(**settings: Any) -> TierConfig:
    tier = {"type": "file", "path": "/mnt/cache", "capacity": "1GiB", **settings}
    return load_config(ExtraConfig.around({"tiers": {"disk": tier}})).tiers["disk"]


def names(store: PageStore) -> list[str]:
    found = []
    while isinstance(store, DelegatingStore):
        found.append(type(store).__name__.removesuffix("Store"))
        store = store.inner
    return found


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "is_on_network", lambda path: path.startswith("/nfs"))


def test_a_local_disk_has_no_guards_so_that_reads_go_straight_into_host_pages() -> None:
    assert plan_guards(file_tier()).timeout is None
    store = MemoryPageStore()
    assert guarded(store, plan_guards(file_tier())) is store


def test_a_network_file_system_and_a_pool_get_all_of_them() -> None:
    everything = ["ExistsBudget", "NegativeCache", "TimeLimit", "Breaker", "ConcurrencyLimit", "Deadline", "Retry"]
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
    assert plan.timeout == 2.0 and plan.store_keeps_timeout
    assert "Deadline" not in names(guarded(MemoryPageStore(), plan))


def test_a_timeout_on_a_local_disk_brings_what_makes_it_useful() -> None:
    store = guarded(MemoryPageStore(), plan_guards(file_tier(timeout="2s")))
    assert names(store) == ["ExistsBudget", "TimeLimit", "Breaker", "ConcurrencyLimit", "Deadline"]
    store.close()


def test_the_timeout_of_a_network_file_system_can_be_switched_off() -> None:
    plan = plan_guards(file_tier(path="/nfs/cache", timeout="off"))
    assert plan.timeout is None
    assert "Deadline" not in names(guarded(MemoryPageStore(), plan))


def test_every_key_reaches_its_guard() -> None:
    guards = {
        "retries": 3,
        "breaker": True,
        "slow_call": "2s",
        "probe_interval": "3s",
        "slow_start": "4s",
        "negative_cache": "5s",
        "concurrency": 6,
        "exists_budget": "7ms",
        "bounce_memory": "8MiB",
    }
    assert plan_guards(file_tier(timeout="9s", guards=guards)) == GuardPlan(
        timeout=9.0,
        bounce_memory=8 << 20,
        retries=3,
        breaker=BreakerSettings(2.0, 3.0, 4.0),
        negative_cache=5.0,
        concurrency=6,
        exists_budget=0.007,
    )


def test_every_guard_can_be_left_out() -> None:
    off = {"retries": 0, "breaker": False, "negative_cache": "off", "exists_budget": False}
    store = guarded(MemoryPageStore(), plan_guards(TimelyPoolConfig(guards=off)))
    assert names(store) == ["TimeLimit", "ConcurrencyLimit"]


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
    breaker = ability(store, BreakerStore)
    assert breaker is not None and ability(breaker.inner, BreakerStore) is None

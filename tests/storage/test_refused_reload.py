"""A reload that is refused half way leaves nothing behind: no open tier, no thread, and the old tiers as they were."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.errors import StoreClosedError, StoreError, StoreSetupError
from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.store import PageStore, SetResult
from hicache_ext.storage.guards.breaker import TierBreaker
from hicache_ext.storage.guards.pipeline import GuardedStore
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering import reload
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import store_pages
from tests.storage.guards.hung import KEY


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., HicacheExtConfig]:
    """A tier "disk" with these settings, and more with none."""

    def configured(*more: str, **settings: Any) -> HicacheExtConfig:
        tiers = {
            name: {"type": "file", "path": str(tmp_path / name), "capacity": "64MiB", "layout": "pages"}
            for name in ("disk", *more)
        }
        tiers["disk"] |= settings
        return load_config(ExtraConfig.around({"tiers": tiers}))

    return configured


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[PageStore]:
    """Every tier that was opened, without its guards."""
    stores: list[PageStore] = []
    real = reload.open_tier

    def open_tier(name: str, config: Any) -> PageStore:
        stores.append(real(name, config))
        return stores[-1]

    monkeypatch.setattr(reload, "open_tier", open_tier)
    return stores


@pytest.fixture
def store(config: Callable[..., HicacheExtConfig], opened: list[PageStore]) -> Iterator[ReloadableStore]:
    store = open_tiers(config(timeout="60s"))
    yield store
    store.close()
    assert all(is_closed(tier) for tier in opened)


def is_closed(store: PageStore) -> bool:
    try:
        store.contains([KEY])
    except StoreClosedError:
        return True
    return False


def breaker(store: ReloadableStore) -> TierBreaker:
    (tier,) = store._live.values()
    found = ability(tier, GuardedStore)
    assert found is not None and found.breaker is not None
    return found.breaker


def probers() -> int:
    return sum(thread.name.endswith("-probe") for thread in threading.enumerate())


def test_a_tier_that_does_not_close_delays_a_refused_start_by_its_timeout_alone(
    config: Callable[..., HicacheExtConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, closing = threading.Event(), []

    class NeverCloses(MemoryPageStore):
        def close(self) -> None:
            closing.append(None)
            let_go.wait(20)

    def open_tier(name: str, _: Any) -> PageStore:
        if name == "more":
            raise StoreSetupError(name, "no such server")
        return NeverCloses(name)

    monkeypatch.setattr(reload, "open_tier", open_tier)
    begun = time.monotonic()
    with pytest.raises(StoreSetupError, match="no such server"):
        open_tiers(config("more", timeout="100ms"))
    assert time.monotonic() - begun < 10
    assert len(closing) == 1
    let_go.set()


def test_tiers_that_cannot_be_put_together_are_closed_and_those_in_use_stay(
    config: Callable[..., HicacheExtConfig],
    opened: list[PageStore],
    store: ReloadableStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    before = store.arrangement
    with monkeypatch.context() as patch:
        patch.setattr(reload, "Arrangement", no_thread)
        with pytest.raises(StoreError, match=r"the new tiers cannot be used: .*can't start new thread"):
            store.reload(config("more", timeout="50s"))
    assert [is_closed(tier) for tier in opened] == [False, True]
    assert store.arrangement is before
    assert store.reload(config(timeout="50s")) == ["tier disk: new timeout"]


def test_a_capacity_that_cannot_be_changed_refuses_the_reload_and_changes_nothing(
    config: Callable[..., HicacheExtConfig], store: ReloadableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards that were closed, and pages as bad as lost, were in force from the next reload on."""
    before, real = store.arrangement, reload._resize
    told: list[object] = []

    def full(tier: Any, wanted: Any) -> None:
        told.append(wanted.capacity)
        if len(told) == 1:
            raise OSError(errno.EIO, "the disk")
        real(tier, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(reload, "_resize", full)
        with pytest.raises(StoreError, match="the disk"):
            store.reload(config("more", timeout="50s", capacity="32MiB"))
    assert told == [32 << 20, 64 << 20]
    assert store.arrangement is before
    assert store_pages(store, [KEY]) == [SetResult.STORED]
    assert store.reload(config("more", timeout="60s"))
    assert store_pages(store.tiers[0], [KEY]) == [SetResult.EXISTS]


@pytest.mark.parametrize("step", ["open_tier", "guard"])
def test_whatever_a_new_tier_raises_is_an_error_of_the_reload(
    config: Callable[..., HicacheExtConfig],
    opened: list[PageStore],
    store: ReloadableStore,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    before = store.arrangement
    with monkeypatch.context() as patch:
        patch.setattr(reload, step, no_thread)
        with pytest.raises(StoreError, match=r"the new tiers cannot be used: .*can't start new thread"):
            store.reload(config("more", timeout="50s"))
    assert [is_closed(tier) for tier in opened] == [False, True][: len(opened)]
    assert store.arrangement is before

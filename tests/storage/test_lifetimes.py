"""Tiers as one keep their word: over reloads, outages, clears and closes. Each test is something that was seen."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.runtime.call_deadline import answering_at_once
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.guards.pipeline import GuardedStore, GuardPlan
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering import reload, tiered
from hicache_ext.storage.tiering.background_work import FETCH, READ, IoPriority
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.storage.tiering.tier_handle import TierHandle
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    page_keys,
    read_pages,
    store_pages,
)
from tests.storage.guards.hung import guard
from tests.waiting import count_fetched, wait_until

LONG = 60.0


class Held(MemoryPageStore):
    """Calls of ``holds`` wait until ``go_on``; while ``out``, nothing is taken or found."""

    def __init__(self, name: str = "memory", *, shared: bool = False) -> None:
        super().__init__(name)
        self.shared = shared
        self.holds: set[str] = set()
        self.go_on = threading.Event()
        self.entered: set[str] = set()
        self.out = False
        self.raises = False

    def _enter(self, call: str) -> bool:
        self.entered.add(call)
        if call in self.holds:
            assert self.go_on.wait(LONG)
        if self.raises:
            raise ConnectionError("gone")
        return not self.out

    def get(self, batch: PageBatch) -> list[GetResult]:
        return super().get(batch) if self._enter("get") else [GetResult.ERROR] * len(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return super().set(batch) if self._enter("set") else [SetResult.ERROR] * len(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._enter("contains"):
            return super().contains(keys)
        self.metrics.add("error", "gone")
        return [False] * len(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return super().count_leading(keys) if self._enter("contains") else 0

    def remove(self, keys: Sequence[bytes]) -> int:
        if self._enter("remove"):
            return super().remove(keys)
        self.metrics.add("error", "gone")
        return 0

    def clear(self, digests: Sequence[bytes] | None) -> int:
        self._enter("clear")
        return super().clear(digests)

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        self._enter("register")
        super().register_identity(digest, document)

    def close(self) -> None:
        self._enter("close")
        super().close()


@pytest.fixture
def made() -> Iterator[list[Held]]:
    stores: list[Held] = []
    yield stores
    for store in stores:
        store.go_on.set()


@pytest.fixture
def held(made: list[Held]) -> Callable[..., Held]:
    def make(name: str = "memory", **settings: Any) -> Held:
        made.append(Held(name, **settings))
        return made[-1]

    return make


@pytest.fixture
def reloadable(held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ReloadableStore]]:
    """Tiers "near" and "far" of a configuration; the second is written in the background."""
    opened: list[ReloadableStore] = []
    monkeypatch.setattr(reload, "open_tier", lambda name, _: held(name, shared=name != "near"))

    def open_them(**section: Any) -> ReloadableStore:
        opened.append(open_tiers(config(**section)))
        return opened[-1]

    yield open_them
    for store in opened:
        store.close()


def config(**section: Any) -> HicacheExtConfig:
    tiers = {
        name: {"type": "file", "path": f"/nowhere/{name}", "capacity": "1GiB", "layout": "pages", "shared": shared}
        for name, shared in (("near", False), ("far", True))
    }
    return load_config(ExtraConfig.around({"tiers": tiers, **section}))


FAR_ALONE: dict[str, Any] = {
    "retrieve_locations": ["far"],
    "store_locations": ["far"],
    "store_policies": {"far": "async"},
}
BOTH: dict[str, Any] = {"store_policies": {"near": "sync", "far": "async"}}


def bare(store: ReloadableStore, name: str) -> Held:
    tier = store._live[name].bare
    assert isinstance(tier, Held)
    return tier


def later(*names: str, **settings: Any) -> TieringSettings:
    settings.setdefault("prefetch_buffer", 0)
    return TieringSettings(async_tiers=frozenset(names), **settings)


# -- reloads -----------------------------------------------------------------------------------------------------------


def test_a_reload_loses_nothing_that_waits_and_all_of_it_is_found(reloadable: Callable[..., ReloadableStore]) -> None:
    """Of 1,000 pages 936 were lost, and 64 could be found right after it."""
    store = reloadable(**FAR_ALONE)
    far = bare(store, "far")
    far.out = True
    keys = page_keys(1000)
    assert store_pages(store, keys) == [SetResult.STORED] * 1000
    for memory in ("64MiB", "65MiB", "66MiB"):
        assert store.reload(config(prefetch={"buffer": memory}, **FAR_ALONE))
        assert store.count_leading(keys) == 1000
        assert_hits(store, keys)
        assert store.tiers[0].metrics.levels()["queue_pages", "async"] == 1000
    far.out = False
    assert store.wait_until_written(LONG)
    assert len(far.objects) == 1000


@pytest.mark.parametrize("how", ["clear", "remove"])
def test_what_is_cleared_while_a_reload_is_made_does_not_come_back(
    reloadable: Callable[..., ReloadableStore], how: str
) -> None:
    """872 cleared pages were readable again."""
    store = reloadable(**FAR_ALONE)
    far = bare(store, "far")
    far.holds = {"set"}
    keys = page_keys(200)
    store_pages(store, keys)
    wait_until(lambda: "set" in far.entered)
    changed = config(prefetch={"buffer": "64MiB"}, **FAR_ALONE)
    reload = threading.Thread(target=lambda: store.reload(changed))
    reload.start()
    if how == "clear":
        store.clear([IDENTITY])
    else:
        store.remove(keys)
    assert not any(store.contains(keys))
    far.go_on.set()
    reload.join(LONG)
    assert store.wait_until_written(LONG)
    assert not far.objects and not any(store.contains(keys))


def test_a_tier_that_becomes_synchronous_writes_what_waits_and_one_that_goes_writes_it_before(
    reloadable: Callable[..., ReloadableStore],
) -> None:
    store = reloadable(**BOTH)
    far = bare(store, "far")
    far.out = True
    keys = page_keys(50)
    store_pages(store, keys)
    store.reload(config(store_policies={"near": "sync", "far": "sync"}))
    far.out = False
    assert store.wait_until_written(LONG)
    assert far.count_leading(keys) == 50
    far.holds = {"set"}
    more = page_keys(50, "more")
    store.reload(config(**BOTH))
    store_pages(store, more)
    near_only = config(retrieve_locations=["near"], store_locations=["near"])
    reload = threading.Thread(target=lambda: store.reload(near_only))
    reload.start()
    far.go_on.set()
    reload.join(LONG)
    assert {*keys, *more} <= far.objects.keys()


# -- outages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guards", [False, True])
def test_pages_stored_while_all_tiers_are_out_are_there_when_they_are_back(
    held: Callable[..., Held], guards: bool
) -> None:
    """6,144 were STORED and none of them was there after two seconds of outage."""
    pool = held(shared=True)
    plan = GuardPlan(timeout=0.05, bounce_memory=1 << 22, probe_interval=0.01, slow_start=0.01)
    store = TieredStore(*[[GuardedStore(pool, plan) if guards else pool]] * 2, settings=later("memory"))
    pool.out = True
    keys = page_keys(1000)
    assert store_pages(store, keys) == [SetResult.STORED] * 1000
    time.sleep(0.3)
    assert store.count_leading(keys) == 1000
    pool.out = False
    assert store.wait_until_written(LONG)
    assert pool.count_leading(keys) == 1000
    assert pool.metrics.total("dropped_pages") == 0
    store.close()


def test_what_waits_in_this_process_is_not_in_the_pool(held: Callable[..., Held]) -> None:
    pool = held(shared=True)
    store = TieredStore([pool], [pool], settings=later("memory"))
    pool.holds = {"set"}
    keys = page_keys(300)
    store_pages(store, keys)
    assert store.count_leading(keys) == 300
    assert store.count_leading_in_pool(keys) == 0
    pool.go_on.set()
    assert store.wait_until_written(LONG)
    assert store.count_leading_in_pool(keys) == 300
    store.close()


def test_a_page_that_leaves_the_queue_while_it_is_looked_for_is_found(held: Callable[..., Held]) -> None:
    """It was not in the store yet, and no longer in the queue."""
    pool = held()
    tier = TierHandle(pool)
    keys = page_keys(3)
    pool.holds = {"set"}
    tier.set_later(PageBatch(keys, [[memoryview(bytes(1000))]] * 3))
    wait_until(lambda: "set" in pool.entered)

    def contains(asked: Sequence[bytes]) -> list[bool]:
        answers = MemoryPageStore.contains(pool, asked)
        pool.go_on.set()
        assert tier.writes.wait_until_written(LONG)
        return answers

    pool.contains = contains  # type: ignore[method-assign]
    assert tier.contains(keys) == [True] * 3
    tier.close()


# -- clears ------------------------------------------------------------------------------------------------------------


def test_a_clear_of_the_scheduler_returns_at_once_and_is_carried_out_although_the_tier_is_busy(
    held: Callable[..., Held],
) -> None:
    """It was never begun, and answered as if it were done."""
    pool = held()
    tier = guard(pool, timeout=0.05, bounce_memory=1 << 20, exists_budget=0.005)
    store = TieredStore([tier], [tier])
    keys = page_keys(50)
    store_pages(store, keys)
    pool.holds = {"get", "clear", "register"}
    for _ in range(20):  # more calls than a guard leaves behind
        read_pages(store, keys[:1])
    with answering_at_once():
        begun = time.monotonic()
        store.clear([IDENTITY])
        store.register_identity(OTHER_IDENTITY, {"model": {"id": "m"}})
        assert time.monotonic() - begun < LONG / 3
    assert not any(store.contains(keys))
    assert store_pages(store, keys) == [SetResult.REJECTED] * 50
    assert pool.objects
    pool.go_on.set()
    assert store.wait_until_written(LONG)
    assert not pool.objects
    assert OTHER_IDENTITY in pool.identities()
    wait_until(lambda: store_pages(store, keys) == [SetResult.STORED] * 50)
    store.close()


def test_a_clear_that_fails_is_made_again_and_its_pages_are_hidden_until_then(held: Callable[..., Held]) -> None:
    pool = held()
    store = TieredStore([pool], [pool])
    keys = page_keys(20)
    store_pages(store, keys)
    pool.raises = True
    with answering_at_once():
        store.clear(None)
    wait_until(lambda: "clear" in pool.entered)
    pool.raises = False
    assert not any(store.contains(keys))
    assert read_pages(store, keys)[0] == [GetResult.MISS] * 20
    assert store.wait_until_written(LONG)
    assert not pool.objects
    store.close()


@pytest.mark.parametrize("begun", ["get", "bring_inward"])
def test_what_was_read_before_a_clear_is_not_promoted_after_it(held: Callable[..., Held], begun: str) -> None:
    """32 pages were readable again, and nothing removed them."""
    near, far = held("near"), held("far")
    store = TieredStore([near, far], [near, far], promote_to=near, settings=later())
    store.register_identity(IDENTITY, {"pool": {"segments": [1000]}})
    keys = page_keys(32)
    store_pages(far, keys)
    held_get = functools.partial(MemoryPageStore.get, far)

    def get(batch: PageBatch) -> list[GetResult]:
        results = held_get(batch)
        far.entered.add("got")
        assert far.go_on.wait(LONG)
        return results

    far.get = get  # type: ignore[method-assign]
    call = store.bring_inward if begun == "bring_inward" else functools.partial(read_pages, store)
    reader = threading.Thread(target=lambda: call(keys))
    reader.start()
    wait_until(lambda: "got" in far.entered)
    store.clear([IDENTITY])
    far.go_on.set()
    reader.join(LONG)
    assert store.wait_until_written(LONG)
    assert not near.objects and not any(store.contains(keys))
    store.close()


def test_pages_that_a_write_left_behind_brings_late_are_removed_again(held: Callable[..., Held]) -> None:
    """SGLang was told TIMEOUT; the store goes on with the write after it was cleared."""
    pool = held()
    tier = guard(pool, timeout=0.05, bounce_memory=1 << 20)
    store = TieredStore([tier], [tier])
    keys = page_keys(5)
    pool.holds = {"set"}
    assert store_pages(store, keys) == [SetResult.TIMEOUT] * 5
    store.clear([IDENTITY])
    pool.go_on.set()
    assert store.wait_until_written(LONG)
    assert not pool.objects and not any(store.contains(keys))
    store.close()


def test_a_page_that_was_being_written_when_it_was_cleared_stays_hidden_while_its_tier_is_out(
    held: Callable[..., Held],
) -> None:
    """It can be removed only when the tier is back."""
    pool = held()
    store = TieredStore([pool], [pool], settings=later("memory"))
    keys = page_keys(5)
    pool.holds = {"set"}
    store_pages(store, keys)
    wait_until(lambda: "set" in pool.entered)
    store.clear([IDENTITY])
    inner_set = MemoryPageStore.set
    pool.out = False
    pool.holds = set()
    original = pool.set
    pool.set = lambda batch: inner_set(pool, batch)  # type: ignore[method-assign]
    pool.go_on.set()
    wait_until(lambda: len(pool.objects) == 5 or store.wait_until_written(0.0))
    pool.out = True
    pool.set = original  # type: ignore[method-assign]
    assert not any(store.contains(keys))
    pool.out = False
    assert store.wait_until_written(LONG)
    assert not pool.objects
    store.close()


def test_a_tier_that_opens_late_makes_up_for_clears_before_it_is_used(held: Callable[..., Held]) -> None:
    from hicache_ext.errors import StoreSetupError
    from hicache_ext.storage.guards.late_open import LateStore

    pool, there = held(), threading.Event()
    keys, other = page_keys(10), page_keys(10, identity=OTHER_IDENTITY)
    store_pages(pool, keys)
    store_pages(pool, other)

    def open_it() -> PageStore:
        if not there.is_set():
            raise StoreSetupError("memory", "not yet")
        return pool

    late = LateStore("memory", "memory", open_it, first_wait=0.1, first_pause=0.01)
    store = TieredStore([late], [late])
    store.clear([IDENTITY])
    there.set()
    wait_until(lambda: store.count_leading(other) == 10)
    assert not any(store.contains(keys))
    store.close()


def test_a_promotion_after_a_clear_does_not_wait_for_the_write_under_way(held: Callable[..., Held]) -> None:
    """A read took 5.7 s."""
    near, far = held("near"), held("far")
    store = TieredStore([near, far], [far], promote_to=near, settings=later())
    keys = page_keys(8)
    store_pages(far, keys)
    near.holds = {"set"}
    assert_hits(store, keys)
    wait_until(lambda: "set" in near.entered)
    store.clear([IDENTITY])
    store_pages(far, keys)
    done = threading.Event()

    def read() -> None:
        assert_hits(store, keys)
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(LONG / 2)
    near.go_on.set()
    assert store.wait_until_written(LONG)
    store.close()


@pytest.mark.parametrize("begun", ["get", "count_leading"])
def test_what_is_read_while_pages_are_removed_does_not_bring_them_back(held: Callable[..., Held], begun: str) -> None:
    """The outer tier was slow to remove: what a read found there meanwhile was promoted, or staged."""
    near, far = held("near"), held("far")
    settings = later(prefetch_buffer=(1 << 20) * (begun == "count_leading"))
    store = TieredStore([near, far], [near, far], promote_to=near, settings=settings)
    store.register_identity(IDENTITY, {"pool": {"segments": [1000]}})
    keys = page_keys(3)
    store_pages(far, keys)
    far.holds = {"remove"}
    remover = threading.Thread(target=lambda: store.remove(keys))
    remover.start()
    wait_until(lambda: "remove" in far.entered)
    if begun == "get":
        assert_hits(store, keys)
    else:
        assert store.count_leading(keys) == 3
        wait_until(lambda: count_fetched(store.prefetcher, keys) == 3)
    far.go_on.set()
    remover.join(LONG)
    assert store.wait_until_written(LONG)
    assert not near.objects and not far.objects
    assert read_pages(store, keys)[0] == [GetResult.MISS] * 3
    store.close()


def test_a_page_stored_after_a_clear_is_not_erased_by_it(held: Callable[..., Held]) -> None:
    """It left the queue between the look for a clear and the clear."""
    pool = held()
    tier = TierHandle(pool)
    keys, other = page_keys(3), page_keys(1, identity=OTHER_IDENTITY)
    looked, go_on = threading.Event(), threading.Event()
    may_write = tier.may_write

    def slowly() -> bool:
        answer = may_write()
        if not looked.is_set():
            looked.set()
            go_on.wait(0.2)
        return answer

    tier.may_write = slowly  # type: ignore[method-assign]
    tier.set_later(PageBatch(other, [[memoryview(bytes(1000))]]))
    assert looked.wait(LONG)
    pool.holds = {"clear"}
    with answering_at_once():
        tier.clear([IDENTITY])
    assert tier.set_later(PageBatch(keys, [[memoryview(bytes(1000))]] * 3)) == [SetResult.STORED] * 3
    go_on.set()
    time.sleep(0.1)
    assert tier.contains(keys) == [True] * 3
    pool.go_on.set()
    assert tier.wait_until_written(LONG)
    assert pool.count_leading(keys) == 3
    tier.close()


def test_what_a_look_up_found_before_a_clear_is_not_remembered_after_it(held: Callable[..., Held]) -> None:
    pool = held()
    budget = GuardedStore(pool, GuardPlan(exists_budget=0.01))
    tier = TierHandle(budget, bare=pool)
    keys = page_keys(5)
    store_pages(pool, keys)
    found, go_on = threading.Event(), threading.Event()

    def contains(asked: Sequence[bytes]) -> list[bool]:
        answers = MemoryPageStore.contains(pool, asked)
        found.set()
        assert go_on.wait(LONG)
        return answers

    pool.contains = contains  # type: ignore[method-assign]
    with answering_at_once():
        tier.contains(keys)
    assert found.wait(LONG)
    tier.clear(None)
    go_on.set()
    del pool.contains
    wait_until(lambda: budget._budget.threads.left_behind == 0)
    with answering_at_once():
        assert tier.contains(keys) == [False] * 5
    tier.close()


def test_clears_of_a_tier_that_hangs_do_not_pile_up(held: Callable[..., Held]) -> None:
    pool = held()
    store = TieredStore([pool], [pool])
    keys = page_keys(5)
    store_pages(store, keys)
    pool.holds = {"clear"}
    with answering_at_once():
        for number in range(1000):
            store.clear([number.to_bytes(16)])
        store.clear([IDENTITY])
    (tier,) = store.arrangement.tiers
    assert len(tier._work) <= 3
    assert not any(store.contains(keys))
    pool.go_on.set()
    assert store.wait_until_written(LONG)
    assert not pool.objects
    store.close()


def test_a_clear_is_carried_out_once_and_says_what_it_met(held: Callable[..., Held]) -> None:
    pool = held()
    store = TieredStore([pool], [pool])
    store_pages(store, page_keys(5))
    assert store.clear([IDENTITY]) == 1
    assert store.clear([IDENTITY]) == 0
    store.close()


def test_a_clear_reaches_what_waits_for_a_tier_that_a_reload_takes_out(
    reloadable: Callable[..., ReloadableStore],
) -> None:
    store = reloadable(**BOTH)
    far = bare(store, "far")
    far.holds = {"set"}
    keys = page_keys(200)
    store_pages(store, keys)
    wait_until(lambda: "set" in far.entered)
    near_only = config(retrieve_locations=["near"], store_locations=["near"])
    reload = threading.Thread(target=lambda: store.reload(near_only))
    reload.start()
    wait_until(lambda: len(store.arrangement.tiers) == 1)
    store.clear([IDENTITY])
    far.go_on.set()
    reload.join(LONG)
    assert not far.objects


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", ["set", "close"])
def test_all_tiers_close_at_once_and_one_that_hangs_costs_the_bound_alone(
    held: Callable[..., Held], hangs: str
) -> None:
    """Four tiers at a second a call took 8.9 s, each its own deadline after the other."""
    pools = [held(f"pool{number}") for number in range(20)]
    store = TieredStore(pools, pools, settings=later(*[pool.name for pool in pools], drain=0.3))
    for pool in pools:
        pool.holds = {hangs}
    store_pages(store, page_keys(10))
    begun = time.monotonic()
    store.close()
    # One after the other would take at least 20 drains and seconds.
    assert time.monotonic() - begun < 20 * 1.3 / 2
    store.close()


def test_a_helper_that_hangs_costs_close_the_bound_alone(
    held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 2.0
    monkeypatch.setattr(tiered, "_CLOSE_WAIT", bound)
    pools = [held(f"pool{number}") for number in range(2)]
    store = TieredStore(pools, pools, settings=later(drain=0.1))
    for pool in pools:
        pool.holds = {"set"}
    writer = threading.Thread(target=lambda: store_pages(store, page_keys(1)), daemon=True)
    writer.start()
    wait_until(lambda: all("set" in pool.entered for pool in pools))
    begun = time.monotonic()
    store.close()
    # It was twice as much.
    assert time.monotonic() - begun < 0.1 + 1.5 * bound
    for pool in pools:
        pool.go_on.set()
    writer.join(LONG)


def test_close_does_not_wait_for_a_call_that_hangs(held: Callable[..., Held]) -> None:
    pool = held()
    store = TieredStore([pool], [pool], settings=later(drain=0.1))
    pool.holds = {"get"}
    reader = threading.Thread(target=lambda: read_pages(store, page_keys(1)), daemon=True)
    reader.start()
    wait_until(lambda: "get" in pool.entered)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(LONG / 2)
    assert not closer.is_alive()
    pool.go_on.set()
    reader.join(LONG)


# -- tiers beside each other -------------------------------------------------------------------------------------------


def test_a_tier_that_hangs_stops_the_prefetch_of_no_other(held: Callable[..., Held]) -> None:
    near, hung, well = held("near"), held("hung"), held("well")
    store = TieredStore([near, hung, well], [near], promote_to=near, settings=later(prefetch_buffer=1 << 20))
    store.register_identity(IDENTITY, {"pool": {"segments": [1000]}})
    far, further = page_keys(200, "far"), page_keys(50, "further")
    store_pages(hung, far)
    store_pages(well, further)
    hung.holds = {"get"}
    assert store.count_leading(far) == 200
    wait_until(lambda: "get" in hung.entered)
    assert store.count_leading(further) == 50
    wait_until(lambda: count_fetched(store.prefetcher, further) == 50)
    hung.go_on.set()
    store.close()


@pytest.mark.parametrize("error", [MemoryError("full"), type("Panic", (BaseException,), {})("a client library")])
def test_a_fetch_that_ends_in_anything_lets_go_who_waits_for_it(
    held: Callable[..., Held], error: BaseException
) -> None:
    near, far = held("near"), held("far")
    store = TieredStore(
        [near, far], [near], promote_to=near, settings=later(prefetch_buffer=1 << 20, prefetch_streams=1)
    )
    store.register_identity(IDENTITY, {"pool": {"segments": [1000]}})
    keys = page_keys(5)
    store_pages(far, keys)
    real, calls = far.get, []

    def get(batch: PageBatch) -> list[GetResult]:
        calls.append(None)
        if len(calls) == 1:
            assert far.go_on.wait(LONG)
            raise error
        return real(batch)

    far.get = get  # type: ignore[method-assign]
    assert store.count_leading(keys) == 5
    wait_until(lambda: bool(calls))
    done: list[GetResult] = []
    reader = threading.Thread(target=lambda: done.extend(read_pages(store, keys)[0]))
    reader.start()
    far.go_on.set()
    reader.join(LONG / 2)
    assert len(done) == 5
    assert store.prefetcher._held == 0
    store.close()


def test_a_tier_that_hangs_leaves_their_part_of_the_buffer_to_others(held: Callable[..., Held]) -> None:
    near, hung, well = held("near"), held("hung"), held("well")
    settings = later(prefetch_buffer=100_000)
    store = TieredStore([near, hung, well], [near], promote_to=near, settings=settings)
    store.register_identity(IDENTITY, {"pool": {"segments": [1000]}})
    far, further = page_keys(200, "far"), page_keys(40, "further")
    store_pages(hung, far)
    store_pages(well, further)
    hung.holds = {"get"}
    store.count_leading(far)
    wait_until(lambda: "get" in hung.entered)
    assert store.count_leading(further) == 40
    wait_until(lambda: count_fetched(store.prefetcher, further) == 40)
    hung.go_on.set()
    store.close()


def test_a_prefetch_that_hangs_does_not_delay_promotions_for_long() -> None:
    gate = IoPriority()
    with gate.entered(FETCH):
        gate.wait(0.2, READ, FETCH)
        begun = time.monotonic()
        for _ in range(100):
            gate.wait(0.2, READ, FETCH)
        assert time.monotonic() - begun < 100 * 0.2 / 4


def test_a_page_offered_by_several_at_once_is_counted_once(held: Callable[..., Held]) -> None:
    pool = held()
    tier = TierHandle(pool, settings=TieringSettings(store_buffer=4000))
    pool.holds = {"set"}
    keys = page_keys(1, "same")
    tier.set_later(PageBatch(page_keys(4), [[memoryview(bytes(1000))]] * 4))
    threads = [
        threading.Thread(target=lambda: tier.set_later(PageBatch(keys, [[memoryview(bytes(1000))]]))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    pool.go_on.set()
    for thread in threads:
        thread.join(LONG)
    assert tier.wait_until_written(LONG)
    assert tier.writes._bytes == 0
    tier.close()


def test_threads_of_the_prefetch_that_have_nothing_to_do_do_not_wake_each_other(held: Callable[..., Held]) -> None:
    near, far = held("near"), held("far")
    settings = later(prefetch_buffer=1 << 20, prefetch_streams=4)
    store = TieredStore([near, far], [near], promote_to=near, settings=settings)
    store.register_identity(IDENTITY, {"pool": {"segments": [1000]}})
    keys = page_keys(5)
    store_pages(far, keys)
    assert store.count_leading(keys) == 5
    wait_until(lambda: count_fetched(store.prefetcher, keys) == 5)
    looks: list[None] = []
    real = store.prefetcher._expire
    store.prefetcher._expire = lambda now: (looks.append(None), real(now))[1]  # type: ignore[method-assign]
    time.sleep(0.2)
    assert len(looks) < 100
    store.close()


def test_the_plan_of_the_prefetch_is_bounded(held: Callable[..., Held]) -> None:
    """906,000 pages were planned, and look-ups waited for a second."""
    near, far = held("near"), held("far")
    settings = later(prefetch_buffer=1 << 20, prefetch_streams=1)
    store = TieredStore([near, far], [near], promote_to=near, settings=settings)
    store.register_identity(IDENTITY, {"pool": {"segments": [100]}})
    far.holds = {"get"}
    for number in range(30):
        keys = page_keys(2000, f"{number}")
        far.objects.update(dict.fromkeys(keys, b""))
        assert store.count_leading(keys) == 2000
    prefetcher = store.prefetcher
    assert len(prefetcher._pages) <= 16384
    assert sum(map(len, prefetcher._plans.values())) <= 16384
    far.go_on.set()
    store.close()


def test_an_unguarded_tier_that_raises_fills_no_log(
    held: Callable[..., Held], caplog: pytest.LogCaptureFixture
) -> None:
    """16,000 lines in 0.2 s."""
    tier = held()
    store = TieredStore([tier], [tier])
    tier.raises = True
    for _ in range(500):
        read_pages(store, page_keys(2))
        store_pages(store, page_keys(2))
        store.count_leading(page_keys(2))
    raised = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 0 < len(raised) <= 3
    assert store.tiers[0].metrics.total("failure") == 1500
    tier.raises = False
    store.close()


def test_the_counts_of_an_export_that_fails_are_not_lost() -> None:
    metrics = TierMetrics("t")
    metrics.add("get", "hit", 5)
    metrics.add("get", "miss", 7)
    passed_on: list[tuple[str, str, int]] = []

    def export_until_there_is_no_room() -> None:
        for counted in metrics.growth():
            if "miss" in counted:
                raise OSError("no room")
            passed_on.append(counted)

    with pytest.raises(OSError, match="no room"):
        export_until_there_is_no_room()
    metrics.add("get", "miss", 1)
    passed_on += metrics.growth()
    assert passed_on == [("get", "hit", 5), ("get", "miss", 8)]

"""What operators see of each tier: whether it is up, how full it is, and every series from the start."""

from __future__ import annotations

import ast
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.breaker import BreakerState
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.abilities import ability, gauges_of
from hicache_ext.storage.contract.registry import series_of_type, tier_type_names
from hicache_ext.storage.contract.reports import (
    OF_ANSWERS,
    OF_EVERY_TIER,
    OF_SEALED_TIERS,
    UNKNOWN,
    LastLook,
    RecentMean,
    reported,
)
from hicache_ext.storage.contract.store import DelegatingStore, PageBatch
from hicache_ext.storage.guards.breaker import Outcome, TierBreaker
from hicache_ext.storage.guards.late_open import LateStore
from hicache_ext.storage.guards.pipeline import GuardedStore
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.storage.tiering.tier_handle import TierHandle
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiers.file.slab.allocator import ClockTimes
from hicache_ext.storage.tiers.memory import MemoryPageStore, MemoryTier
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from hicache_ext.testing.server import free_port
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.storage.guards.hung import configured_breakers_have
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]

Section = dict[str, Any]


def config(tiers: dict[str, Section], **section: Any) -> HicacheExtConfig:
    return load_config(ExtraConfig.around({"tiers": tiers, **section}))


@pytest.fixture
def opened() -> Iterator[Callable[..., ReloadableStore]]:
    stores: list[ReloadableStore] = []

    def open_(tiers: dict[str, Section], **section: Any) -> ReloadableStore:
        stores.append(open_tiers(config(tiers, **section)))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def file_tier(path: Path, **settings: Any) -> Section:
    return {"type": "file", "path": str(path), "capacity": "64MiB", "layout": "pages", **settings}


def levels(store: ReloadableStore, tier: str) -> dict[str, float]:
    """What an exporter is told of one tier now."""
    (report,) = [told for told in reported(store.tiers) if told.tier == tier]
    return {name: value for (name, reason), value in report.levels().items() if not reason}


# -- up ----------------------------------------------------------------------------------------------------------------


def unreachable(kind: str, monkeypatch: pytest.MonkeyPatch) -> Section:
    port = free_port()
    if kind == "redis":
        return {"type": "redis", "url": f"redis://127.0.0.1:{port}"}
    if kind == "mooncake":
        pytest.importorskip("mooncake", reason="missing: mooncake")
        return {"type": "mooncake", "master": f"127.0.0.1:{port}"}
    pytest.importorskip("obstore", reason="missing: obstore")
    monkeypatch.setenv("TEST_KEY", "x")
    credentials = {key: {"env": "TEST_KEY"} for key in ("access_key", "secret_key")}
    return {
        "type": "object",
        "url": "s3://bucket/p",
        "endpoint": f"http://127.0.0.1:{port}",
        "allow_http": True,
        **credentials,
    }


@pytest.mark.parametrize("kind", ["redis", "mooncake", "object"])
def test_a_pool_that_was_never_reached_is_not_up_and_has_every_series(
    kind: str, tmp_path: Path, opened: Callable[..., ReloadableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = {**unreachable(kind, monkeypatch), "required": False, "timeout": "300ms"}
    store = opened({"disk": file_tier(tmp_path / "disk"), "pool": pool})
    assert levels(store, "pool")["tier_up"] == 0
    assert levels(store, "disk")["tier_up"] == 1
    (report,) = [told for told in reported(store.tiers) if told.tier == "pool"]
    counted = report.snapshot()
    assert set(counted.values()) == {0}
    for event, reasons in OF_EVERY_TIER.items():
        assert {(event, reason) for reason in reasons} <= set(counted)
    for event, reasons in series_of_type(kind).items():
        assert {(event, reason) for reason in reasons} <= set(counted)
    assert {name for name, reason in report.levels() if not reason} == set(UNKNOWN)
    assert {"get", "set", "exists"} <= set(report.calls())


class LatePool(LateStore):
    """Nobody is there until ``come()``."""

    def __init__(self) -> None:
        self._there = threading.Event()
        super().__init__("pool", "memory", self._opened_pool, first_wait=10.0, first_pause=0.01)

    def _opened_pool(self) -> MemoryPageStore:
        if not self._there.is_set():
            raise StoreSetupError("pool", "nobody is there")
        return MemoryPageStore("pool")

    def come(self) -> None:
        self._there.set()
        wait_until(lambda: self.inner is not None)


def test_a_tier_that_is_opened_late_is_up_from_then_on() -> None:
    store = LatePool()
    (report,) = reported([store])
    assert report.levels()["tier_up", ""] == 0
    assert report.levels()["pages", ""] == 0
    store.come()
    (report,) = reported([store])
    assert report.levels()["tier_up", ""] == 1
    store.close()


def test_a_file_tier_is_up_while_one_of_its_paths_is_in_service(
    tmp_path: Path, opened: Callable[..., ReloadableStore]
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    store = opened({"disk": {**file_tier(paths[0]), "path": [str(path) for path in paths]}})
    (spread,) = store.tiers
    while hasattr(spread, "inner"):
        spread = spread.inner
    for number in (0, 1):
        assert levels(store, "disk")["tier_up"] == 1
        spread._parts[number].breaker.trip("gone")
    assert levels(store, "disk")["tier_up"] == 0


def test_a_redis_server_tells_how_full_it_is_and_is_not_up_when_it_has_gone(
    tmp_path: Path, opened: Callable[..., ReloadableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server or valkey-server")
    monkeypatch.setattr("hicache_ext.storage.tiers.redis.store._LOOK_INTERVAL", 0.0)
    with RedisServer(tmp_path / "redis", [("maxmemory", "64mb")]) as server:
        store = opened({"pool": {"type": "redis", "url": server.url, "required": False}})
        wait_until(lambda: levels(store, "pool")["capacity_bytes"] == 64 << 20)
        told = levels(store, "pool")
        assert told["tier_up"] == 1
        assert 0 < told["used_bytes"] < 64 << 20
        assert told["used_bytes"] + told["free_bytes"] == 64 << 20
    store.contains(page_keys(1))
    wait_until(lambda: levels(store, "pool")["tier_up"] == 0)


def test_an_object_store_is_up_once_it_has_answered(tmp_path: Path, opened: Callable[..., ReloadableStore]) -> None:
    pytest.importorskip("obstore", reason="missing: obstore")
    store = opened({"pool": {"type": "object", "url": f"file://{tmp_path / 'objects'}", "required": False}})
    assert levels(store, "pool")["tier_up"] == 1


def test_a_tier_that_was_taken_out_is_reported_no_more(tmp_path: Path, opened: Callable[..., ReloadableStore]) -> None:
    near, far = file_tier(tmp_path / "near"), file_tier(tmp_path / "far")
    store = opened({"near": near, "far": far})
    before = {report.tier: report for report in reported(store.tiers)}
    store.reload(config({"near": near}))
    assert reported(store.tiers) == [before["near"]]


# -- the breaker over a reload -----------------------------------------------------------------------------------------


def breaker(store: ReloadableStore, tier: str) -> TierBreaker:
    (found,) = [ability(known, GuardedStore) for known in store.tiers if known.name == tier]
    assert found is not None and found.breaker is not None
    return found.breaker


def open_breaker(store: ReloadableStore, tier: str) -> None:
    rules = breaker(store, tier)
    ticket = rules.admit()
    assert ticket is not None
    rules.record(ticket, Outcome.TIMEOUT, "a call did not end")


def guarded(path: Path) -> Section:
    return file_tier(path, timeout="60s")


@pytest.mark.parametrize("change", [{}, {"capacity": "32MiB"}, {"timeout": "20s"}])
def test_a_breaker_stays_open_over_a_reload(
    change: Section, tmp_path: Path, opened: Callable[..., ReloadableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seldom probed: nothing comes back while the test looks.
    configured_breakers_have(monkeypatch, probe_interval=60.0)
    far, other = guarded(tmp_path / "far"), file_tier(tmp_path / "other")
    store = opened({"far": far})
    assert levels(store, "far")["breaker_state"] == 0
    open_breaker(store, "far")
    assert levels(store, "far")["breaker_state"] == 2
    keys = page_keys(3)

    assert store.reload(config({"far": {**far, **change}, "other": other}))
    assert breaker(store, "far").state is BreakerState.OPEN
    assert levels(store, "far")["breaker_state"] == 2
    assert store.contains(keys) == [False] * 3
    rejected = next(tier for tier in store.tiers if tier.name == "far").metrics.value("rejected", "breaker")
    assert rejected >= 3


def test_a_breaker_that_is_open_over_a_reload_still_comes_back_by_itself(
    tmp_path: Path, opened: Callable[..., ReloadableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured_breakers_have(monkeypatch, probe_interval=0.1, slow_start=0.0)
    far = guarded(tmp_path / "far")
    store = opened({"far": far})
    before = breaker(store, "far")
    open_breaker(store, "far")
    store.reload(config({"far": {**far, "capacity": "32MiB", "timeout": "50s"}}))
    assert breaker(store, "far") is before
    wait_until(lambda: breaker(store, "far").state is BreakerState.CLOSED)


# -- how full ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_file_tier_tells_how_full_it_is_and_how_old_what_it_evicts(
    layout: str, tmp_path: Path, opened: Callable[..., ReloadableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_ext.storage.tiers.file.multipath._LOOK_INTERVAL", 0.0)
    monkeypatch.setattr("hicache_ext.storage.tiers.file.pages.store._COUNT_INTERVAL", 0.0)
    store = opened({"disk": file_tier(tmp_path / "l3", layout=layout, capacity="16MiB")})
    size = 64 * 1024

    def pages(count: int) -> dict[str, float]:
        # The look that an exporter is told of may have begun while the pages were on their way: reserved, not stored.
        most = count * (size + 16 * 1024)
        wait_until(lambda: levels(store, "disk")["pages"] == count and levels(store, "disk")["used_bytes"] <= most)
        return levels(store, "disk")

    empty = pages(0)
    assert empty["capacity_bytes"] == 16 << 20
    assert empty["evicted_age_seconds"] == 0
    store_pages(store, page_keys(20), (size,))
    some = pages(20)
    assert 20 * size <= some["used_bytes"] <= 20 * (size + 16 * 1024)
    assert some["free_bytes"] < empty["free_bytes"]
    assert some["used_bytes"] + some["free_bytes"] <= 16 << 20
    time.sleep(1.1)
    for number in range(30):
        store_pages(store, page_keys(10, prefix=f"more {number}"), (size,))
    assert store.tiers[0].metrics.total("evicted") > 50
    wait_until(lambda: levels(store, "disk")["free_bytes"] < some["free_bytes"])
    full = levels(store, "disk")
    assert full["used_bytes"] <= 16 << 20
    ages = reported(store.tiers)[0].levels()["evicted_age_seconds", ""]
    assert 0 < ages < 60


def test_a_directory_without_a_limit_has_no_capacity_and_the_free_bytes_of_its_disk(
    tmp_path: Path, opened: Callable[..., ReloadableStore]
) -> None:
    store = opened({"disk": file_tier(tmp_path / "l3", capacity="unlimited")})
    wait_until(lambda: levels(store, "disk")["free_bytes"] > 0)
    assert math.isnan(levels(store, "disk")["capacity_bytes"])
    assert levels(store, "disk")["used_bytes"] == 0


def test_a_disk_that_hangs_holds_up_nobody_who_looks_at_the_metrics() -> None:
    let_go = threading.Event()
    looks: list[int] = []

    def look() -> dict[str, float]:
        looks.append(1)
        assert let_go.wait(60)
        return {"pages": 7.0}

    last = LastLook("disk", look, 0.0)
    started = threading.Event()
    known: list[Any] = []
    asking = threading.Thread(target=lambda: known.extend([last.known(), last.known(), started.set()]))
    asking.start()
    assert started.wait(30), "it waited for the disk"
    assert known[:2] == [{}, {}]
    wait_until(lambda: len(looks) == 1)
    let_go.set()
    wait_until(lambda: last.known() == {"pages": 7.0})
    last.close(10)


def test_a_look_that_ends_before_its_caller_goes_on_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look() -> dict[str, float]:
        looks.append(time.monotonic())
        return {"used_bytes": float(len(looks))}

    last = LastLook("file", look, interval=0.0)
    monkeypatch.setattr(last._loop, "wake", lambda: last._look_now() == math.inf)  # its thread is that fast
    last.known()
    last.known()
    assert last.known() == {"used_bytes": 3.0}


def test_a_look_that_fails_leaves_what_is_known() -> None:
    answers: list[dict[str, float] | None] = [{"pages": 1.0}]

    def look() -> dict[str, float]:
        answer = answers.pop() if answers else None
        if answer is None:
            raise OSError("gone")
        return answer

    last = LastLook("disk", look, 0.0)
    wait_until(lambda: last.known() == {"pages": 1.0})
    for _ in range(20):
        assert last.known() == {"pages": 1.0}
    last.close(10)


def test_a_store_that_cannot_say_how_it_is_hides_no_other() -> None:
    class Silent(MemoryPageStore):
        def gauges(self) -> dict[str, float]:
            raise RuntimeError("no")

    silent, other = Silent("silent"), MemoryPageStore("other")
    told = reported([silent, other])
    assert [report.tier for report in told] == ["silent", "other"]
    assert told[1].levels()["tier_up", ""] == 1


def test_a_type_that_cannot_say_its_series_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(MemoryTier, "series", broken)
    store, other = MemoryPageStore("mine"), DelegatingStore(MemoryPageStore("other"))
    told = reported([store, other])
    assert [report.tier for report in told] == ["mine", "other"]
    assert all(report.snapshot()["get", "hit"] == 0 for report in told)


def test_the_age_of_what_is_evicted_is_the_mean_since_the_last_look() -> None:
    mean = RecentMean()
    assert mean.take() == 0
    mean.note(10, 3)
    mean.note(50)
    assert mean.take() == 20
    assert mean.take() == 20
    mean.note(5)
    assert mean.take() == 5


def test_a_clock_of_inserted_pages_is_read_in_seconds() -> None:
    times = ClockTimes()
    assert times.when(5) is None
    for second in range(10):
        times.note(100 * second, 1000.0 + second)
        times.note(100 * second + 1, 1000.2 + second)  # not worth keeping
    assert times.when(0) == 1000.0
    assert times.when(350) == 1003.0
    assert times.when(5000) == 1009.0
    assert times.when(-1) is None


def test_a_clock_of_a_long_life_keeps_few_values() -> None:
    times = ClockTimes()
    for second in range(20000):
        times.note(second, float(second))
    assert len(times._known) < 4096
    assert times.when(10000) == pytest.approx(10000, abs=64)


# -- every series ------------------------------------------------------------------------------------------------------


def test_whatever_a_tier_counts_under_a_known_name_is_there_from_the_start() -> None:
    """A series that begins with its first event hides that event from every rate."""
    everywhere = [OF_ANSWERS, OF_EVERY_TIER, OF_SEALED_TIERS, *map(series_of_type, tier_type_names())]
    declared = {(event, reason) for series in everywhere for event, reasons in series.items() for reason in reasons}
    counted: set[tuple[str, str]] = set()
    for path in sorted((ROOT / "hicache_ext" / "storage").rglob("*.py")):
        if path.name in ("pulling.py", "hints.py", "kv_hints.py", "events.py", "backend.py", "recording.py"):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            target = ast.unparse(call.func.value)
            if call.func.attr == "add" and "metrics" in target and isinstance(call.args[0], ast.Constant):
                reason = call.args[1] if len(call.args) > 1 else ast.Constant("")
                if isinstance(reason, ast.Constant):
                    counted.add((call.args[0].value, reason.value))
    assert len(counted) > 25
    assert counted <= declared


def test_what_a_tier_counts_is_added_to_what_was_there_from_the_start() -> None:
    metrics = TierMetrics("t")
    metrics.declare({"get": ("hit", "miss")}, ["get"])
    passed_on: list[tuple[str, str, int]] = []
    for _ in range(2):
        passed_on += metrics.growth()
        assert passed_on == [("get", "hit", 0), ("get", "miss", 0)]
    metrics.add("get", "hit", 3)
    metrics.declare({"get": ("hit",)})
    passed_on += metrics.growth()
    assert passed_on[2:] == [("get", "hit", 3)]
    assert metrics.calls()["get"] == 0


def test_the_counts_of_a_queue_in_front_of_a_late_tier_are_not_lost() -> None:
    """They went to metrics that nobody exports any more once the tier was open."""
    late = LatePool()
    store = TierHandle(late, settings=TieringSettings(store_buffer=500))
    late.come()
    store.set_later(PageBatch(page_keys(3), [[memoryview(bytes(1000))]] * 3))
    assert late.inner is not None
    assert late.inner.metrics.value("dropped_pages", "async") == 3
    assert ("queue_bytes", "async") in late.inner.metrics.levels()
    store.close()


def test_a_wrapper_says_of_its_store_what_that_says() -> None:
    class Half(MemoryPageStore):
        def gauges(self) -> dict[str, float]:
            return {"tier_up": 0.0}

    assert gauges_of(DelegatingStore(Half("h"))) == {"tier_up": 0.0}
    outermost = DelegatingStore(Half("h"))
    outermost.gauges = lambda: {"tier_up": 1.0, "breaker_state": 2.0}
    assert gauges_of(outermost) == {"tier_up": 1.0, "breaker_state": 2.0}
    assert gauges_of(DelegatingStore(MemoryPageStore("m"))) == {}
    assert read_pages(DelegatingStore(MemoryPageStore("m")), page_keys(1))

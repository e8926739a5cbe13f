"""Each trouble is made, what is exported then is recorded, and promtool plays it to docs/alerts.yml.

Exactly the alert that is about it fires. A metric that is renamed, or counted no more, is an alert that is missing.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.abilities import gauges_of
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from hicache_ext.testing.server import free_port
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.storage.guards.hung import HungStore, configured_breakers_have
from tests.storage.raw_access import RawFiles
from tests.storage.test_reports import file_tier, open_breaker
from tests.waiting import wait_until
from tests.watching.recording import Recording
from tests.watching.timeline import Timeline

RUNBOOK = Path(__file__).parents[2] / "docs/runbook.md"

REST = 30
"""Minutes before a trouble: nothing may fire then."""

pytest.importorskip("prometheus_client", reason="missing: prometheus_client")
pytestmark = pytest.mark.slow


@pytest.fixture
def opened() -> Iterator[Callable[..., ReloadableStore]]:
    stores: list[ReloadableStore] = []

    def open_(tiers: dict[str, Any], **section: Any) -> ReloadableStore:
        stores.append(open_tiers(load_config(ExtraConfig.around({"tiers": tiers, **section}))))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def up(recording: Recording, tier: str) -> float:
    (value,) = [
        value
        for (name, labels), value in recording.look().items()
        if name == "hicache_ext_tier_up" and ("tier", tier) in labels
    ]
    return value


# -- tiers that cannot be reached --------------------------------------------------------------------------------------


def test_a_pool_that_goes_down_is_told_once_and_only_until_it_is_back(
    tmp_path: Path, opened: Callable[..., ReloadableStore]
) -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server or valkey-server")
    keys = page_keys(4)
    with RedisServer(tmp_path / "redis") as server:
        pool = {"type": "redis", "url": server.url, "required": False, "timeout": "300ms"}
        store = opened({"disk": file_tier(tmp_path / "disk"), "pool": pool})
        recording = Recording.of_store(store)
        wait_until(lambda: up(recording, "pool") == 1)
        store_pages(store, keys)
        healthy = recording.look()
        server.kill()
        store.tiers[1].contains(page_keys(4, prefix="absent"))
        wait_until(lambda: up(recording, "pool") == 0)
        down = recording.look()
    timeline = Timeline()
    timeline.at_rest(REST, healthy)
    timeline.firing()
    timeline.goes_on(3, healthy, down)
    timeline.firing(("HicacheTierDown", "pool"))
    timeline.at_rest(60, down)
    timeline.firing(("HicacheTierDown", "pool"))
    timeline.at_rest(10, healthy)
    timeline.firing()
    timeline.play(tmp_path)


def test_a_pool_that_nobody_ever_reached_is_told(tmp_path: Path, opened: Callable[..., ReloadableStore]) -> None:
    pool = {"type": "redis", "url": f"redis://127.0.0.1:{free_port()}", "required": False, "timeout": "300ms"}
    store = opened({"disk": file_tier(tmp_path / "disk"), "pool": pool})
    never = Recording.of_store(store).look()
    timeline = Timeline()
    timeline.at_rest(3, never)
    timeline.firing()  # it may still come
    timeline.at_rest(REST, never)
    timeline.firing(("HicacheTierNeverUp", "pool"))
    timeline.play(tmp_path)


def test_a_tier_whose_breaker_is_open_is_told(
    tmp_path: Path, opened: Callable[..., ReloadableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured_breakers_have(monkeypatch, probe_interval=60.0)
    store = opened({"far": file_tier(tmp_path / "far", timeout="60s")})
    recording = Recording.of_store(store)
    closed = recording.look()
    open_breaker(store, "far")
    is_open = recording.look()
    timeline = Timeline()
    timeline.at_rest(REST, closed)
    timeline.firing()
    timeline.goes_on(5, closed, is_open)
    timeline.firing(("HicacheTierLeftOut", "far"))
    timeline.play(tmp_path)


@pytest.mark.parametrize("kind", ["write", "read", "look_up"])
def test_a_kind_of_call_that_fails_through_and_through_is_told_until_one_is_answered(
    kind: str, tmp_path: Path, opened: Callable[..., ReloadableStore], caplog: pytest.LogCaptureFixture
) -> None:
    """With an error that nobody has thought of."""
    store = opened({"disk": file_tier(tmp_path / "disk")})
    (part,) = store.tiers[0].inner.parts if hasattr(store.tiers[0], "inner") else store.tiers[0].parts  # type: ignore[attr-defined]
    keys = page_keys(3)
    store_pages(store, keys)
    recording = Recording.of_store(store)
    healthy = recording.look()
    hooks = {"write": ("_write",), "read": ("_read",), "look_up": ("_has", "_lead")}[kind]
    with pytest.MonkeyPatch.context() as patch:
        for hook in hooks:
            patch.setattr(part, hook, lambda *_: (_ for _ in ()).throw(OSError(errno.EL2NSYNC, "whatever that is")))
        for number in range(4):
            store_pages(store, page_keys(2, f"{number}"))
            read_pages(store.tiers[0], keys)
            store.tiers[0].contains(keys)
        failing = recording.look()
    read_pages(store.tiers[0], keys)
    store_pages(store, page_keys(2, "after"))
    store.tiers[0].contains(keys)
    (line,) = [text for record in caplog.records if "fails (" in (text := record.getMessage())]
    assert line.startswith(f"tier disk: every {kind.replace('_', '-')} fails (EL2NSYNC)")
    timeline = Timeline()
    timeline.at_rest(REST, healthy)
    timeline.firing()
    timeline.goes_on(3, healthy, failing)
    timeline.firing()
    timeline.at_rest(20, failing)
    timeline.firing(("HicacheCallsFail", "disk"))
    timeline.goes_on(1, failing, recording.look())
    timeline.at_rest(5, recording.look())
    timeline.firing()
    timeline.play(tmp_path)


def test_a_path_that_goes_out_is_told_until_it_is_back(
    tmp_path: Path, opened: Callable[..., ReloadableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    store = opened({"disk": {**file_tier(paths[0]), "path": [str(path) for path in paths]}})
    recording = Recording.of_store(store)
    healthy = recording.look()
    spread: Any = store.tiers[0]
    while hasattr(spread, "inner"):
        spread = spread.inner
    spread._parts[0].breaker.trip(os.strerror(errno.EIO))
    out = recording.look()
    wait_until(lambda: not spread.out_of_service())
    back = recording.look()
    timeline = Timeline()
    timeline.at_rest(REST, healthy)
    timeline.firing()
    timeline.goes_on(1, healthy, out)
    timeline.at_rest(20, out)
    timeline.firing(("HicachePathOut", "disk"))
    timeline.goes_on(1, out, back)
    timeline.at_rest(5, back)
    timeline.firing()
    timeline.play(tmp_path)


# -- what is stored ----------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    directory.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(directory)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("missing: root, to mount a small file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_full_disk_is_told(
    layout: str,
    tmp_path: Path,
    opened: Callable[..., ReloadableStore],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also once the disk is asked for room so seldom that errors do not tell, and in the words of the runbook."""
    monkeypatch.setattr("hicache_ext.storage.tiers.file.multipath._LOOK_INTERVAL", 0.0)
    with small_disk(tmp_path / "small") as disk:
        store = opened({"disk": file_tier(disk / "l3", layout=layout)})
        recording = Recording.of_store(store)
        empty = recording.look()
        results = [result for n in range(5) for result in store_pages(store, page_keys(60, f"{n}"), (64 << 10,))]
        # The coldest pages make room for them.
        assert set(results) == {SetResult.STORED}
        wait_until(lambda: gauges_of(store.tiers[0]).get("no_space_since_seconds", 0) > 0)
        full = recording.look()
        store.close()
    timeline = Timeline()
    timeline.at_rest(REST, empty)
    timeline.firing()
    timeline.goes_on(1, empty, full)
    timeline.at_rest(30, full)
    timeline.firing(("HicacheNoSpace", "disk"))
    timeline.play(tmp_path)
    (line,) = [text for record in caplog.records if "no space" in (text := record.getMessage())]
    section = RUNBOOK.read_text().partition("## HicacheNoSpace")[2].partition("\n## ")[0]
    assert [words for words in re.findall('"([^"]*)"', section) if words.replace("PATH", str(disk / "l3")) in line]


def test_a_damaged_page_is_told_and_forgotten_after_a_while(
    tmp_path: Path, opened: Callable[..., ReloadableStore]
) -> None:
    store = opened({"disk": file_tier(tmp_path / "l3")})
    keys, raw = page_keys(3), RawFiles(tmp_path / "l3")
    store_pages(store, keys)
    recording = Recording.of_store(store)
    good = recording.look()
    stored = bytearray(raw.read(keys[1]) or b"")
    stored[-1] ^= 1
    raw.write(keys[1], bytes(stored))
    assert read_pages(store, keys)[0] == [GetResult.HIT, GetResult.CORRUPT, GetResult.HIT]
    bad = recording.look()
    timeline = Timeline()
    timeline.at_rest(REST, good)
    timeline.firing()
    timeline.goes_on(1, good, bad)
    timeline.at_rest(3, bad)
    timeline.firing(("HicacheCorruptPages", "disk"))
    timeline.at_rest(30, bad)
    timeline.firing()
    timeline.play(tmp_path)


def test_a_tier_that_is_too_small_is_told(tmp_path: Path, opened: Callable[..., ReloadableStore]) -> None:
    store = opened({"disk": file_tier(tmp_path / "l3", layout="slab", capacity="16MiB")})
    recording = Recording.of_store(store)
    empty = recording.look()
    for number in range(8):
        store_pages(store, page_keys(60, prefix=f"{number}"), (64 << 10,))
    evicting = recording.look()
    timeline = Timeline()
    timeline.at_rest(REST, empty)
    timeline.firing()
    timeline.goes_on(60, empty, evicting)
    timeline.firing(("HicacheEvictedTooSoon", "disk"))
    timeline.play(tmp_path)


def test_writes_that_are_dropped_for_long_are_told_and_a_burst_is_not(
    tmp_path: Path, opened: Callable[..., ReloadableStore]
) -> None:
    tiers = {"near": file_tier(tmp_path / "near"), "far": file_tier(tmp_path / "far")}
    policies = {"store_policies": {"near": "sync", "far": "async"}}
    store = opened(tiers, **policies, background={"store_buffer": "1MiB"})
    recording = Recording.of_store(store)
    idle = recording.look()
    far: Any = next(tier for tier in store.tiers if tier.name == "far")
    slow = HungStore(far.inner)
    far.inner = slow
    slow.hang()
    store_pages(store, page_keys(40), (64 << 10,))
    slow.let_go()
    wait_until(lambda: not len(far.writes))
    dropping = recording.look()
    timeline = Timeline()
    timeline.at_rest(REST, idle)
    timeline.goes_on(2, idle, dropping)
    timeline.at_rest(20, dropping)
    timeline.firing()
    timeline.goes_on(25, idle, dropping)
    timeline.firing(("HicacheWritesDropped", "far"))
    timeline.play(tmp_path)


def test_hits_that_collapse_are_told(tmp_path: Path, opened: Callable[..., ReloadableStore]) -> None:
    store = opened({"disk": file_tier(tmp_path / "l3")})
    stored, absent = page_keys(100), page_keys(100, prefix="absent")
    store_pages(store, stored)
    recording = Recording.of_store(store)
    begin = recording.look()
    assert store.count_leading(stored) == 100
    read_pages(store, stored)
    hits = recording.look()
    assert store.count_leading(absent) == 0
    store.count_absent(100)
    misses = recording.look()
    timeline = Timeline()
    timeline.goes_on(6 * 60, begin, hits)
    timeline.firing()
    timeline.goes_on(20, hits, misses)
    timeline.firing()
    timeline.goes_on(50, hits, misses)
    timeline.firing(("HicacheHitShareCollapsed", ""))
    timeline.at_rest(120, misses)  # a night without requests says nothing about hits
    timeline.firing()
    timeline.play(tmp_path)


# -- a decode node -----------------------------------------------------------------------------------------------------


def test_pages_that_a_decode_node_drops_are_told(tmp_path: Path) -> None:
    metrics = TierMetrics("pd_write", prefix="pd_write_")  # as sglang/decode_manager.py has them
    recording = Recording(lambda: [metrics])
    quiet = recording.look()
    metrics.add("dropped", "oldest", 5)  # as pd/decode_writer.py does
    dropping = recording.look()
    timeline = Timeline()
    timeline.at_rest(REST, quiet)
    timeline.firing()
    timeline.goes_on(30, quiet, dropping)
    timeline.firing(("HicacheWritesDropped", "pd_write"))
    timeline.play(tmp_path)


def test_a_failure_of_a_decode_node_is_told_for_an_hour(tmp_path: Path) -> None:
    metrics = TierMetrics("pd_write", prefix="pd_write_")
    recording = Recording(lambda: [metrics])
    quiet = recording.look()
    metrics.add("failure", "RuntimeError")  # as pd/decode_writer.py does
    failed = recording.look()
    timeline = Timeline()
    timeline.at_rest(90, quiet)
    timeline.firing()
    timeline.goes_on(1, quiet, failed)
    timeline.at_rest(10, failed)
    timeline.firing(("HicacheCallFailed", "pd_write"))
    timeline.at_rest(60, failed)
    timeline.firing()
    timeline.play(tmp_path)

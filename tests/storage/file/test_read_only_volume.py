"""A tier that is only read, on a volume that cannot be written: a snapshot that many servers mount, a file system that
became read-only before a restart."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.registry import examine_tier, open_tier
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.reload import used_tiers
from hicache_ext.storage.tiers.file import read_only
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.inspector import Inspector
from hicache_ext.storage.tiers.file.read_only import ReadOnlyStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.waiting import wait_until

KEYS = page_keys(12)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "volume"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("missing: root, to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def remount(volume: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(volume)], check=True)


def config(volume: Path, layout: str, **section: Any) -> Any:
    tier = {"type": "file", "path": str(volume / "l3"), "layout": layout, "capacity": "16MiB"}
    return load_config(ExtraConfig.around({"tiers": {"disk": tier}, **section}))


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_tier_that_is_only_read_opens_on_a_read_only_volume_and_writes_not_a_byte(volume: Path, layout: str) -> None:
    with_writes = open_tiers(config(volume, layout))
    assert set(store_pages(with_writes, KEYS, (5000,))) == {SetResult.STORED}
    with_writes.close()
    remount(volume, "ro")
    only_read = config(volume, layout, store_locations=[])
    store = open_tiers(only_read)
    assert_hits(store, KEYS, (5000,))
    assert store.contains([*KEYS, *page_keys(1, "absent")]) == [True] * 12 + [False]
    assert store.count_leading([*KEYS, *page_keys(1, "absent")]) == 12
    assert read_pages(store, page_keys(1, "absent"))[0] == [GetResult.MISS]
    assert read_pages(store, KEYS[:1], (7,))[0] == [GetResult.CORRUPT]
    store.close()
    (tier,) = used_tiers(only_read).values()
    assert [finding.level for finding in examine_tier("disk", tier)] == [Level.OK]


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_tier_that_is_written_does_not_start_on_a_read_only_volume(volume: Path, layout: str) -> None:
    open_tiers(config(volume, layout)).close()
    remount(volume, "ro")
    with pytest.raises(StoreSetupError, match="Read-only file system"):
        open_tiers(config(volume, layout))


def opened_to_read(path: Path, **settings: Any) -> ReadOnlyStore:
    tier = FileTierConfig.model_validate({"type": "file", "path": str(path), "capacity": "16MiB", **settings})
    return ReadOnlyStore("disk", tier)


def written(path: Path, layout: str) -> None:
    tier = FileTierConfig.model_validate({"type": "file", "path": str(path), "layout": layout, "capacity": "16MiB"})
    store = open_tier("disk", tier)
    assert set(store_pages(store, KEYS, (5000,))) == {SetResult.STORED}
    store.close()


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_nobody_waits_while_it_is_listed(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "l3", layout)
    may_list, real = threading.Event(), read_only.open_inspector
    opened = []

    def slow(path: Path) -> Inspector:
        opened.append(path)
        if len(opened) % 2 == 0:
            assert may_list.wait(60)
        return real(path)

    monkeypatch.setattr(read_only, "open_inspector", slow)
    monkeypatch.setattr(read_only, "_FIRST_LISTING", 0.01)
    store = opened_to_read(tmp_path / "l3")
    assert store.count_leading(KEYS) == 0
    assert read_pages(store, KEYS, (5000,))[0] == [GetResult.MISS] * 12
    may_list.set()
    wait_until(lambda: store.count_leading(KEYS) == 12)
    may_list.clear()
    # It is listed again: what the last list has is found and read meanwhile.
    opened.append(tmp_path)
    store._listing.wake()
    wait_until(lambda: len(opened) == 4)
    assert_hits(store, KEYS, (5000,))
    may_list.set()
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-disk-list"]


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_page_that_cannot_be_read_is_absent_until_the_next_listing(tmp_path: Path, layout: str) -> None:
    written(tmp_path / "l3", layout)
    store = opened_to_read(tmp_path / "l3")
    content = payload_of(KEYS[1], 5000)[1000:1064]
    (file,) = [file for file in (tmp_path / "l3").rglob("*") if file.is_file() and content in file.read_bytes()]
    file.write_bytes(file.read_bytes().replace(content, bytes(64)))
    assert store.count_leading(KEYS) == 12
    assert read_pages(store, KEYS, (5000,))[0].count(GetResult.CORRUPT) == 1
    assert store.contains(KEYS) == [True, False] + [True] * 10
    assert read_pages(store, KEYS, (5000,))[0][1] is GetResult.MISS
    store.close()


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_what_is_cleared_or_removed_there_is_hidden_at_once(tmp_path: Path, layout: str) -> None:
    written(tmp_path / "l3", layout)
    for clear in ([IDENTITY], None):
        store = opened_to_read(tmp_path / "l3")
        assert store.remove(KEYS[:1]) == 0
        assert store.contains(KEYS) == [False] + [True] * 11
        assert store.clear([OTHER_IDENTITY]) == 0
        assert read_pages(store, KEYS[1:], (5000,))[0] == [GetResult.HIT] * 11
        assert store.clear(clear) == 0
        store._list()
        assert store.contains(KEYS) == [False] * 12
        assert read_pages(store, KEYS, (5000,))[0] == [GetResult.MISS] * 12
        store.close()


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_expired_pages_are_absent_there_too(volume: Path, layout: str) -> None:
    with_writes = open_tiers(config(volume, layout))
    store_pages(with_writes, KEYS, (5000,))
    with_writes.close()
    remount(volume, "ro")
    wanted = config(volume, layout, store_locations=[])
    tier = wanted.tiers["disk"].model_copy(update={"ttl": 1e-9})
    store = open_tiers(wanted.model_copy(update={"tiers": {"disk": tier}}))
    assert store.contains(KEYS) == [False] * 12
    assert read_pages(store, KEYS, (5000,))[0] == [GetResult.MISS] * 12
    store.close()

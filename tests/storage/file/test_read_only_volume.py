"""A tier that is only read, on a volume that cannot be written: a snapshot that many servers mount, a file system that
became read-only before a restart."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.registry import examine_tier
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.reload import used_tiers
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, read_pages, store_pages

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


def test_expired_pages_are_absent_there_too(volume: Path) -> None:
    with_writes = open_tiers(config(volume, "pages"))
    store_pages(with_writes, KEYS, (5000,))
    with_writes.close()
    remount(volume, "ro")
    wanted = config(volume, "pages", store_locations=[])
    tier = wanted.tiers["disk"].model_copy(update={"ttl": 1e-9})
    store = open_tiers(wanted.model_copy(update={"tiers": {"disk": tier}}))
    assert read_pages(store, KEYS, (5000,))[0] == [GetResult.MISS] * 12
    store.close()

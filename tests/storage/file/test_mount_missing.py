"""Disks that are not mounted, and disks and directories that are replaced under a running server."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime import breaker
from hicache_ext.runtime.file_systems import on_root_file_system
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiers.file import opening as file_tier
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.waiting import wait_until


def configuration(*paths: Path, **keys: Any) -> dict[str, Any]:
    disk = {"type": "file", "path": [str(path) for path in paths], "capacity": "64MiB", **keys}
    return ExtraConfig.around({"tiers": {"disk": disk}})


def opened(*paths: Path, **keys: Any) -> Any:
    return open_tiers(load_config(configuration(*paths, **keys)))


@pytest.fixture(autouse=True)
def root_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's directory is on the root file system, wherever it is, and what is mounted below it is not."""
    monkeypatch.setattr(file_tier, "_warned_of_root", set())
    overlay = tmp_path / "mountinfo"
    overlay.write_text("22 1 0:77 / / rw - overlay overlay rw\n")

    def on_root(path: str) -> str | None:
        mounted = any(
            (tmp_path / name).is_mount() and Path(path).is_relative_to(tmp_path / name) for name in ("a", "b")
        )
        return None if mounted else on_root_file_system("/", overlay)

    monkeypatch.setattr(file_tier, "on_root_file_system", on_root)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[list[Path]]:
    """Two disks."""
    disks = [tmp_path / name for name in ("a", "b")]
    for disk in disks:
        disk.mkdir()
        made = subprocess.run(["mount", "-t", "tmpfs", "none", str(disk)], capture_output=True, text=True)
        if made.returncode:
            pytest.skip("missing: root, to mount a file system")
    yield disks
    for disk in disks:
        subprocess.run(["umount", "-l", str(disk)], capture_output=True)


def test_a_path_on_the_root_file_system_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        opened(tmp_path / "l3").close()
    lines = [record.getMessage() for record in caplog.records if "root file system" in record.getMessage()]
    assert lines == [
        f"tier disk: {tmp_path / 'l3'} is on the root file system (overlay): a container's own, which is gone with it, "
        "or its host's; if a disk of its own is meant, it is not mounted (require_mount: true refuses that)"
    ]


def test_a_mounted_path_is_not_warned_of(mounted: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    assert on_root_file_system(str(mounted[0])) is None
    opened(*(disk / "l3" for disk in mounted), require_mount=True).close()
    assert "root file system" not in caplog.text


@pytest.mark.parametrize("layout", ["auto", "pages", "slab"])
def test_with_require_mount_a_start_without_the_disk_is_refused_and_makes_nothing(
    tmp_path: Path, mounted: list[Path], layout: str
) -> None:
    """One of two disks is there, and the other one's directory is not."""
    with pytest.raises(StoreSetupError) as refused:
        opened(mounted[0] / "l3", tmp_path / "other" / "l3", require_mount=True, layout=layout)
    assert str(refused.value) == (
        f"tier 'disk' cannot start: '{tmp_path / 'other' / 'l3'}' is on the root file system (overlay): a container's "
        "own, which is gone with it, or its host's, and require_mount is true; mount its disk, or set "
        "require_mount: false"
    )
    assert not (tmp_path / "other").exists()


def test_the_doctor_says_that_a_server_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.dumps(configuration(tmp_path / "l3", require_mount=True))
    assert main(["doctor", document]) == 1
    assert "require_mount is true; mount its disk" in capsys.readouterr().out
    assert not (tmp_path / "l3").exists()


def test_a_tier_that_is_not_required_comes_when_its_disk_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    store = opened(tmp_path / "a" / "l3", require_mount=True, required=False)
    assert not (tmp_path / "a" / "l3").exists()
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path / "a")], capture_output=True).returncode:
        store.close()
        pytest.skip("missing: root, to mount a file system")
    try:
        wait_until(lambda: (tmp_path / "a" / "l3" / "v3" / "members").exists())
        wait_until(lambda: store_pages(store, page_keys(3))[0].durable)
        assert_hits(store, page_keys(3))
    finally:
        store.close()
        subprocess.run(["umount", "-l", str(tmp_path / "a")], capture_output=True)


def test_where_a_mount_has_vanished_nothing_is_written_below_it(mounted: list[Path], tmp_path: Path) -> None:
    """Pages go to the other disk, and a restart is refused."""
    paths = [disk / "l3" for disk in mounted]
    store = opened(*paths, require_mount=True, layout="pages")
    store_pages(store, page_keys(40))
    subprocess.run(["umount", "-l", str(mounted[0])], check=True)
    for number in range(10):
        store_pages(store, page_keys(20, f"later {number}"))
    store.close()
    assert list(mounted[0].iterdir()) == []
    with pytest.raises(StoreSetupError, match="require_mount is true"):
        opened(*paths, require_mount=True)
    assert list(mounted[0].iterdir()) == []


# -- changed under a running server ------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are looked at all the time."""
    monkeypatch.setattr(breaker, "WATCH_INTERVAL", 0.05)


def spread(path: Path, layout: str) -> SpreadStore:
    disk = load_config(configuration(path, layout=layout, io="buffered", threads=2)).tiers["disk"]
    return file_tier.open_paths("disk", disk)  # type: ignore[arg-type]


def times(store: SpreadStore, event: str) -> int:
    (path,) = store.describe().details["paths"]
    return store.metrics.value(event, path)


def pages_below(path: Path) -> bool:
    return any(path.rglob("*.slab")) or any(path.rglob("*.page")) or any(path.rglob("*.pack"))


def devices_in_use() -> set[int]:
    """Of what this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.fstat(int(fd)).st_dev)
    return found


def assert_it_serves_what_is_there_now(store: SpreadStore, path: Path) -> None:
    wait_until(lambda: times(store, "path_back_in_service") == 1)
    assert store.contains(page_keys(40)) == [False] * 40
    assert not pages_below(path)
    # Page files are refused while the other one that comes back begins the account anew.
    wait_until(lambda: SetResult.REJECTED not in store_pages(store, page_keys(20, "later")))
    assert_hits(store, page_keys(20, "later"))
    assert pages_below(path)


@pytest.mark.parametrize("layout", ["slab", "pages"])
@pytest.mark.parametrize("below", ["", "l3"])
def test_another_disk_in_the_place_of_a_detached_one_is_served_and_the_detached_one_is_let_go(
    mounted: list[Path], layout: str, below: str, watched: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A server wrote to the detached file system, as "up", for as long as it ran. Nobody has to write for it."""
    path = mounted[0] / below
    store, device = spread(path, layout), mounted[0].stat().st_dev
    store_pages(store, page_keys(40))
    subprocess.run(["umount", "-l", str(mounted[0])], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mounted[0])], check=True)
    wait_until(lambda: times(store, "path_out_of_service") == 1)
    assert_it_serves_what_is_there_now(store, path)
    assert f"path {path} is out of service: its files are not there any more" in caplog.text
    assert device not in devices_in_use()
    store.close()


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_disk_that_is_detached_and_comes_again_has_its_pages(mounted: list[Path], layout: str, watched: None) -> None:
    """In between nothing is begun on the disk below."""
    subprocess.run(["umount", str(mounted[1])], check=True)
    subprocess.run(["mount", "--bind", str(mounted[0]), str(mounted[1])], check=True)
    store = spread(mounted[0], layout)
    store_pages(store, page_keys(40))
    subprocess.run(["umount", "-l", str(mounted[0])], check=True)
    wait_until(lambda: times(store, "path_out_of_service") == 1)
    wait_until(lambda: store.parts == [] and store._parts[0].store is None)
    store_pages(store, page_keys(40, "later"))
    assert list(mounted[0].iterdir()) == []
    subprocess.run(["mount", "--bind", str(mounted[1]), str(mounted[0])], check=True)
    wait_until(lambda: times(store, "path_back_in_service") == 1)
    assert_hits(store, page_keys(40))
    store.close()


def test_a_look_at_a_device_that_died_says_nothing_and_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead XFS answers with EIO also for what is open; calls that fail take the path out."""
    store = spread(tmp_path / "l3", "pages")
    (part,) = store._parts

    def dead(fd: int) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fstat", dead)
    assert part.why_replaced() is None
    monkeypatch.undo()
    store.close()


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_directory_that_was_emptied_begins_anew(
    tmp_path: Path, layout: str, watched: None, caplog: pytest.LogCaptureFixture
) -> None:
    """``rm -rf PATH/*`` under two running servers: whoever needs the room now. The first one to look begins anew."""
    path = tmp_path / "l3"
    store, other = spread(path, layout), spread(path, layout)
    store_pages(store, page_keys(40))
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    wait_until(lambda: times(store, "path_out_of_service") == 1)
    assert_it_serves_what_is_there_now(store, path)
    assert f"path {path} is out of service: its files are not there any more" in caplog.text
    wait_until(lambda: times(other, "path_back_in_service") == 1)
    assert_hits(other, page_keys(20, "later"))
    store.close()
    other.close()


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_another_directory_in_the_place_of_a_renamed_one_is_served(
    tmp_path: Path, layout: str, watched: None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "l3"
    store = spread(path, layout)
    store_pages(store, page_keys(40))
    path.rename(tmp_path / "old")
    path.mkdir()
    wait_until(lambda: times(store, "path_out_of_service") == 1)
    assert_it_serves_what_is_there_now(store, path)
    assert f"path {path} is out of service: its files are not there any more" in caplog.text
    store.close()

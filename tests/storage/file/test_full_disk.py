"""A disk that is full before the tier is: what is stored stays useful, and the disk is not asked again and again."""

from __future__ import annotations

import errno
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_ext.cli.main import main
from hicache_ext.runtime.background import Backoff
from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiers.file import multipath
from hicache_ext.storage.tiers.file.examination import diagnose
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.pages import store as page_files
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.slab import allocator
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.rigs.slab_tier import open_slab_tier
from tests.waiting import wait_until

SIZE = 100_000
CAPACITY = 64 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("missing: root, to mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_disk_that_is_full_before_the_tier_is_says_so_everywhere_until_a_write_finds_room(
    layout: str,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`stats` said "full 12 %", and nothing else a word."""
    monkeypatch.setattr(allocator, "NO_SPACE_PAUSES", Backoff(0.01, 0.01))
    monkeypatch.setattr(page_files, "NO_SPACE_PAUSES", Backoff(0.01, 0.01))
    monkeypatch.setattr(multipath, "_LOOK_INTERVAL", 0.0)
    store = open_slab_tier(small_disk / "l3", capacity=CAPACITY, layout=layout)
    began = int(time.time())

    def seen() -> tuple[float, float | None]:
        assert main(["stat", str(small_disk / "l3"), "--json"]) == 0
        store.gauges()
        return store.gauges()["no_space_since_seconds"], json.loads(capsys.readouterr().out)[0]["no_space_since"]

    store_pages(store, page_keys(10), [SIZE])
    wait_until(lambda: "no_space_since_seconds" in store.gauges())
    assert seen() == (0, None)
    for number in range(12):
        store_pages(store, page_keys(30, f"{number}"), [SIZE])
        time.sleep(0.02)
    wait_until(lambda: seen()[0] > 0)
    since, of_stat = seen()
    assert began <= since == of_stat <= time.time()
    assert main(["stat", str(small_disk / "l3")]) == 0
    assert "no space    since " in capsys.readouterr().out
    # Page files that were evicted may make room for a write: then that is said, too.
    lines = [text for record in caplog.records if "no space left" in (text := record.getMessage())]
    assert len(lines) == 1
    assert lines[0].startswith(f"tier disk: no space left for {small_disk / 'l3'} below its capacity (No space left on")
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    for number in range(12):
        store_pages(store, page_keys(30, f"again {number}"), [SIZE])
        time.sleep(0.02)
    wait_until(lambda: seen() == (0, None))
    lines = [text for record in caplog.records if "space" in (text := record.getMessage())]
    assert "no space left" in lines[0] and "has space again" in lines[-1]
    assert sum("no space left" in line for line in lines) == 1
    store.close()


class FullDisk:
    """Slabs can be made while ``room`` is true."""

    def __init__(self) -> None:
        self.room = True
        self.code = errno.ENOSPC
        self.refused = 0
        self.room_of_dropped = False

    def around(self, create: Callable[..., None]) -> Callable[..., None]:
        def create_slab_files(*arguments: object) -> None:
            if not self.room:
                self.refused += 1
                raise OSError(self.code, "no room")
            create(*arguments)

        return create_slab_files


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    disk = FullDisk()
    monkeypatch.setattr(allocator, "NO_SPACE_PAUSES", Backoff(3600.0, 3600.0))
    monkeypatch.setattr(SlabDirectory, "create_slab_files", disk.around(SlabDirectory.create_slab_files))
    delete = SlabDirectory.delete_slab_files

    def delete_slab_files(*arguments: object) -> None:
        delete(*arguments)  # type: ignore[arg-type]
        disk.room = disk.room or disk.room_of_dropped

    monkeypatch.setattr(SlabDirectory, "delete_slab_files", delete_slab_files)
    return disk


@pytest.fixture
def store(tmp_path: Path, disk: FullDisk) -> Iterator[SpreadStore]:
    store = open_slab_tier(tmp_path, capacity=CAPACITY)
    store_pages(store, page_keys(100, "first"), [SIZE])
    disk.room = False
    yield store
    store.close()


def write(store: SpreadStore, name: str, batches: int = 20, pages: int = 16) -> list[SetResult]:
    keys = page_keys(batches * pages, name)
    return [
        result
        for first in range(0, len(keys), pages)
        for result in store_pages(store, keys[first : first + pages], [SIZE])
    ]


def test_new_pages_take_the_room_of_the_coldest_ones(store: SpreadStore) -> None:
    assert set(write(store, "more")) == {SetResult.STORED}
    assert_hits(store, page_keys(20 * 16, "more")[-16:], [SIZE])
    assert store.metrics.value("evicted", "capacity") > 100


def test_the_disk_is_asked_for_room_once_in_a_while_and_not_by_every_write(store: SpreadStore, disk: FullDisk) -> None:
    write(store, "more", batches=50)
    assert disk.refused == 1


def test_the_tier_grows_again_when_there_is_room(
    store: SpreadStore, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "NO_SPACE_PAUSES", Backoff(0.01, 0.01))
    write(store, "more")
    disk.room = True
    time.sleep(0.02)
    write(store, "last")
    assert_hits(store, page_keys(20 * 16, "last"), [SIZE])


def test_a_slot_size_without_slabs_gets_the_room_of_another_one(store: SpreadStore, disk: FullDisk) -> None:
    disk.room_of_dropped = True
    keys = page_keys(8, "small")
    assert store_pages(store, keys, [1000]) == [SetResult.STORED] * 8
    assert_hits(store, keys, [1000])


def test_room_that_others_take_at_once_costs_one_slab_in_a_while(store: SpreadStore, disk: FullDisk) -> None:
    for number in range(20):
        assert set(store_pages(store, page_keys(8, f"small {number}"), [1000])) == {SetResult.REJECTED}
    assert disk.refused == 2
    left = store.contains(page_keys(100, "first")).count(True)
    assert left >= 100 - 2 * CAPACITY // 16 // SIZE


def test_room_that_others_take_again_and_again_is_asked_for_less_and_less_often(
    store: SpreadStore, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab was given up every second for nothing: the tier of a busy disk was gone in minutes."""
    now = [time.monotonic()]
    monkeypatch.setattr(allocator, "NO_SPACE_PAUSES", Backoff(1.0, 300.0))
    monkeypatch.setattr(allocator.time, "monotonic", lambda: now[0])
    for number in range(300):
        store_pages(store, page_keys(1, f"small {number}"), [1000])
        now[0] += 1.0
    assert 5 <= disk.refused <= 18


def test_a_disk_that_cannot_be_written_evicts_nothing(store: SpreadStore, disk: FullDisk) -> None:
    disk.code = errno.EROFS
    before = store.metrics.value("evicted", "capacity")
    write(store, "more", batches=1, pages=100)
    assert store.metrics.value("evicted", "capacity") == before
    assert_hits(store, page_keys(100, "first"), [SIZE])


def test_a_tier_that_never_had_room_refuses_and_says_why(tmp_path: Path, disk: FullDisk) -> None:
    disk.room = False
    store = open_slab_tier(tmp_path, capacity=CAPACITY)
    try:
        assert set(write(store, "any", batches=3)) == {SetResult.REJECTED}
        assert store.metrics.value("error", "ENOSPC") == disk.refused == 1
    finally:
        store.close()


# -- page files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_inodes(small_disk: Path) -> Path:
    subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=400", str(small_disk)], check=True)
    return small_disk / "l3"


def write_pages(store: SpreadStore, name: str, pages: int, size: int, at_once: int = 1) -> list[bytes]:
    """The pages, each of which is stored at once."""
    keys = page_keys(pages, name)
    for first in range(0, pages, at_once):
        results = store_pages(store, keys[first : first + at_once], [size])
        assert set(results) == {SetResult.STORED}, (name, first)
    return keys


def open_page_files(path: Path) -> SpreadStore:
    return open_slab_tier(path, capacity=CAPACITY, layout="pages")


def test_a_file_system_without_inodes_keeps_the_newest_page_files_also_after_a_restart(few_inodes: Path) -> None:
    """It refused all that was new for ever, and kept the oldest pages."""
    store = open_page_files(few_inodes)
    oldest = write_pages(store, "first", 100, 10_000)
    # Of fewer inodes than the smaller ones need that follow.
    write_pages(store, "large", 100, 300_000)
    newest = write_pages(store, "small", 300, 5000)
    assert_hits(store, newest[-100:], [5000])
    assert not any(store.contains(oldest))
    store.close()
    store = open_page_files(few_inodes)
    newest = write_pages(store, "after a restart", 100, 5000)
    assert_hits(store, newest[-50:], [5000])
    store.close()


@pytest.mark.parametrize(("capacity", "level"), [(64 << 20, Level.OK), (100 << 20, Level.WARNING)])
def test_doctor_looks_at_inodes(small_disk: Path, capacity: int, level: Level) -> None:
    subprocess.run(["mount", "-o", "remount,size=1g,nr_inodes=300", str(small_disk)], check=True)
    store = open_slab_tier(small_disk / "l3", capacity=capacity, layout="pages")
    (found,) = (one for one in diagnose([small_disk], capacity, store) if one.subject == "capacity")
    assert found.level is level
    assert ("inodes" in found.seen) == (level is Level.WARNING)
    store.close()


class Quota:
    """No more than ``most`` files of pages and packs."""

    def __init__(self, path: Path, most: int, code: int) -> None:
        self.path, self.most, self.code, self.refused = path, most, code, 0

    def around(self, open_unpublished: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
        def within(*arguments: object) -> tuple[int, str]:
            if sum(1 for kind in ("*.page", "*.pack") for _ in self.path.rglob(kind)) >= self.most:
                self.refused += 1
                raise OSError(self.code, "no room")
            return open_unpublished(*arguments)

        return within


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Quota:
    found = Quota(tmp_path, 40, request.param)
    monkeypatch.setattr(PageDirectory, "open_unpublished", found.around(PageDirectory.open_unpublished))
    return found


@pytest.mark.parametrize("quota", [errno.ENOSPC, errno.EDQUOT], indirect=True)
@pytest.mark.parametrize("at_once", [1, 8])
def test_a_quota_below_the_capacity_keeps_the_newest_page_files_and_packs(
    quota: Quota, tmp_path: Path, at_once: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_page_files(tmp_path)
    # On a slow machine the pages were tried to grow again before all of them were written.
    now = [time.monotonic()]
    monkeypatch.setattr(page_files.time, "monotonic", lambda: now[0])
    keys = write_pages(store, "any", 100 * at_once, SIZE, at_once)
    assert_hits(store, keys[-30 * at_once :], [SIZE])
    assert quota.refused <= 20
    quota.most = 1000
    assert "has space again" not in caplog.text
    for number in range(100):
        write_pages(store, f"more {number}", 5, 5000)
        if "has space again" in caplog.text:
            break
        now[0] += 0.1
    assert "has space again" in caplog.text
    store.close()


@pytest.mark.parametrize("quota", [errno.ENOSPC], indirect=True)
def test_room_that_others_take_at_once_costs_a_few_page_files_in_a_while(
    quota: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota.most = 1000
    store = open_page_files(tmp_path)
    keys = write_pages(store, "first", 300, 5000)
    quota.most = 0
    now = [time.monotonic()]
    monkeypatch.setattr(page_files.time, "monotonic", lambda: now[0])
    for number in range(300):
        assert store_pages(store, page_keys(1, f"more {number}"), [5000]) == [SetResult.REJECTED]
        now[0] += 1.0
    assert 5 <= quota.refused <= 20
    assert sum(store.contains(keys)) >= 250
    store.close()

"""Several paths as one tier: spreading, and paths that fail, stay away and come back."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime import breaker
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file import multipath
from hicache_ext.storage.tiers.file.multipath import CALLS_BEFORE_OUT, SpreadStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    HostPages,
    assert_hits,
    page_keys,
    read_pages,
    store_pages,
)
from tests.waiting import wait_until

KEYS = page_keys(64)
LONG = 60.0


class FragileStore(MemoryPageStore):
    """A path in memory whose device can be broken. Its pages survive as those of a disk do."""

    def __init__(self, disk: FragileDisk, trouble) -> None:
        super().__init__("disk", objects=disk.objects)
        self.disk = disk
        self.trouble = trouble
        self.closed = False

    def get(self, batch):
        if self.disk.error is None:
            return super().get(batch)
        self.trouble(OSError(self.disk.error, os.strerror(self.disk.error)))
        return [GetResult.ERROR] * len(batch)

    def set(self, batch):
        error = self.disk.error or self.disk.write_error
        if error is None:
            return super().set(batch)
        there = [self.disk.error is None and is_there for is_there in self.contains(batch.keys)]
        if not all(there):
            self.trouble(OSError(error, os.strerror(error)))
        return [SetResult.EXISTS if is_there else SetResult.ERROR for is_there in there]

    def _clear(self, digests):
        if not self.disk.clears:
            raise OSError(errno.EROFS, "no write is taken")
        return super()._clear(digests)

    def can_resize(self, capacity: int | None) -> bool:
        return True

    def _close(self) -> None:
        self.disk.closed += 1
        self.closed = True


class FragileDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.objects: dict[bytes, bytes] = {}
        self.error: int | None = None
        self.write_error: int | None = None
        self.clears = True
        self.closed = 0
        self.opened: list[FragileStore] = []


class Rig:
    def __init__(self, root: Path, paths: int = 3) -> None:
        self.disks = [FragileDisk(root / f"nvme{number}") for number in range(paths)]
        for disk in self.disks:
            disk.path.mkdir()
            (disk.path / "pages").mkdir()
            (disk.path / "members").touch()
        self.metrics = TierMetrics("disk")
        self.stores: list[SpreadStore] = []

    def open_path(self, path, trouble):
        (disk,) = [disk for disk in self.disks if disk.path == path]
        if disk.error is not None:
            cause = OSError(disk.error, os.strerror(disk.error))
            raise StoreSetupError("disk", f"directory {str(path)!r}: {cause.strerror}") from cause
        disk.opened.append(FragileStore(disk, trouble))
        return disk.opened[-1]

    def store(self) -> SpreadStore:
        paths = [disk.path for disk in self.disks]
        self.stores.append(SpreadStore("disk", paths, self.open_path, self.metrics, first_probe=0.01))
        return self.stores[-1]


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    for store in rig.stores:
        store.close()


def get(store, keys=KEYS):
    return read_pages(store, keys)[0]


def test_every_path_gets_a_share_and_all_pages_come_back(rig):
    store = rig.store()
    assert store_pages(store, KEYS) == [SetResult.STORED] * len(KEYS)
    assert all(len(disk.objects) > 8 for disk in rig.disks)
    assert_hits(store, KEYS)
    assert store.count_leading([*KEYS, *page_keys(1, "other")]) == len(KEYS)


def test_the_parts_of_a_call_run_at_the_same_time(rig):
    store = rig.store()
    together = threading.Barrier(3)
    for part in store.parts:
        inner = part.contains
        part.contains = lambda keys, inner=inner: (together.wait(LONG), inner(keys))[1]
    assert store.contains(KEYS) == [False] * len(KEYS)


def broken(rig, store, number=0, code=errno.EIO):
    """Break one disk and call until it is noticed."""
    rig.disks[number].error = code
    for _ in range(CALLS_BEFORE_OUT):
        get(store)
    assert store.out_of_service() == [rig.disks[number].path]


def test_a_path_that_keeps_failing_goes_out_of_service_and_the_rest_goes_on(rig, caplog):
    store = rig.store()
    store_pages(store, KEYS)
    lost = {key for key in KEYS if key in rig.disks[0].objects}
    broken(rig, store)
    results = dict(zip(KEYS, get(store), strict=True))
    assert {key for key, result in results.items() if result is GetResult.HIT} == set(KEYS) - lost
    assert {results[key] for key in lost} == {GetResult.MISS}
    assert f"path {rig.disks[0].path} is out of service: [Errno 5]" in caplog.text
    assert caplog.text.count("is out of service") == 1
    assert store.metrics.value("path_out_of_service", str(rig.disks[0].path)) == 1
    assert store.describe().details["out_of_service"] == [str(rig.disks[0].path)]


def test_what_a_lost_path_held_can_be_written_elsewhere_and_read(rig):
    store = rig.store()
    store_pages(store, KEYS)
    broken(rig, store)
    store_pages(store, KEYS)
    assert_hits(store, KEYS)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_path_that_takes_no_writes_is_read_and_its_share_goes_to_the_others(rig, caplog, monkeypatch, code):
    monkeypatch.setattr(breaker, "WRITE_PAUSES", Backoff(LONG, LONG))
    store = rig.store()
    writes = store._parts[0].writes
    store_pages(store, KEYS)
    its = [key for key in KEYS if key in rig.disks[0].objects]
    rig.disks[0].write_error = code
    lost = page_keys(64, "lost")
    for _ in range(CALLS_BEFORE_OUT):
        assert SetResult.ERROR in store_pages(store, lost)
    new = page_keys(64, "new")
    assert store_pages(store, new) == [SetResult.STORED] * 64
    assert caplog.text.count("takes no writes") == 1 and os.strerror(code) in caplog.text
    assert store.out_of_service() == []
    assert store_pages(store, its) == [SetResult.EXISTS] * len(its)
    assert store.count_leading(new) == store.count_leading(KEYS) == 64
    assert_hits(store, KEYS)
    assert_hits(store, new)
    assert store.remove(new[:9]) == 9
    writes._until = 0.0
    # It is tried again, in vain, and what went elsewhere is found all the while.
    assert SetResult.ERROR in store_pages(store, page_keys(64, "tried"))
    assert_hits(store, new[9:])
    assert store_pages(store, page_keys(64, "newer")) == [SetResult.STORED] * 64
    rig.disks[0].write_error = None
    writes._until = 0.0
    newest = page_keys(64, "newest")
    assert store_pages(store, newest) == [SetResult.STORED] * 64
    assert any(key in rig.disks[0].objects for key in newest)
    assert "takes writes again" in caplog.text


def test_it_comes_back_by_itself_with_its_pages(rig, caplog):
    store = rig.store()
    store_pages(store, KEYS)
    broken(rig, store)
    wait_until(lambda: rig.disks[0].closed == 1)
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    assert_hits(store, KEYS)
    assert len(rig.disks[0].opened) == 2
    wait_until(lambda: "is back in service" in caplog.text)
    assert store.metrics.value("path_back_in_service", str(rig.disks[0].path)) == 1


def test_what_was_cleared_meanwhile_does_not_come_back(rig):
    store = rig.store()
    other = page_keys(64, identity=OTHER_IDENTITY)
    store_pages(store, KEYS)
    store_pages(store, other)
    broken(rig, store)
    store.clear([IDENTITY])
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    assert GetResult.HIT not in get(store)
    assert_hits(store, other)


def during_the_first_clear(monkeypatch, happens):
    """``happens(path's store)`` while a path clears for the first time from now on; what each clears, as it comes."""
    real, cleared = FragileStore._clear, []

    def clear(part, digests):
        cleared.append(list(digests))
        if len(cleared) == 1:
            happens(part)
        return real(part, digests)

    monkeypatch.setattr(FragileStore, "_clear", clear)
    return cleared


def test_what_is_cleared_while_a_path_comes_back_does_not_come_back(rig, monkeypatch):
    store = rig.store()
    store_pages(store, KEYS)
    broken(rig, store)
    store.clear([OTHER_IDENTITY])
    cleared = during_the_first_clear(monkeypatch, lambda _: store.clear([IDENTITY]))
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    assert cleared[0] == [OTHER_IDENTITY] and set(cleared[-1]) == {IDENTITY, OTHER_IDENTITY}
    assert GetResult.HIT not in get(store)


def test_an_identity_that_is_registered_while_a_path_comes_back_is_known_there(rig, monkeypatch):
    store = rig.store()
    broken(rig, store)
    store.clear([OTHER_IDENTITY])
    during_the_first_clear(monkeypatch, lambda _: store.register_identity(IDENTITY, {"model": {"id": "x"}}))
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    assert rig.disks[0].opened[-1].identities() == {IDENTITY: {"model": {"id": "x"}}}


def test_an_error_of_the_device_while_a_path_comes_back_has_its_clears_repeated(rig, monkeypatch):
    """What the path cleared just then may be lost with its disk, however late that shows."""
    monkeypatch.setattr(multipath, "_CLEAR_IN_DOUBT", 0.05)
    store = rig.store()
    store_pages(store, KEYS)
    broken(rig, store)
    store.clear([IDENTITY])
    late = OSError(errno.EIO, "of a write that nobody waits for")
    cleared = during_the_first_clear(monkeypatch, lambda part: part.trouble(late))
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    time.sleep(0.1)
    broken(rig, store)
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    assert cleared == [[IDENTITY], [IDENTITY]]


def test_a_path_on_which_nothing_can_be_cleared_is_not_back_in_service(rig):
    store = rig.store()
    store_pages(store, KEYS)
    broken(rig, store)
    store.clear([IDENTITY])
    rig.disks[0].clears = False
    rig.disks[0].error = None
    wait_until(lambda: rig.disks[0].closed >= 3)
    assert store.out_of_service() and GetResult.HIT not in get(store)
    rig.disks[0].clears = True
    wait_until(lambda: not store.out_of_service())
    assert GetResult.HIT not in get(store)


@pytest.mark.parametrize("digests", [[IDENTITY], None])
def test_what_was_cleared_before_it_was_known_that_the_disk_had_lost_it_does_not_come_back(rig, digests):
    store = rig.store()
    other = page_keys(64, identity=OTHER_IDENTITY)
    store_pages(store, KEYS)
    store_pages(store, other)
    on_the_disk = dict(rig.disks[0].objects)
    store.clear(digests)
    for _ in range(2):
        broken(rig, store)
        rig.disks[0].objects.update(on_the_disk)
        rig.disks[0].error = None
        wait_until(lambda: not store.out_of_service())
        assert GetResult.HIT not in get(store)
    assert (GetResult.HIT in get(store, other)) == (digests is not None)


def test_a_clear_of_long_ago_is_not_done_again(rig, monkeypatch):
    store = rig.store()
    monkeypatch.setattr(multipath, "_CLEAR_IN_DOUBT", 0.0)
    store.clear([IDENTITY])
    # Nothing is cleared afterwards: the next error itself is what counts.
    store_pages(store, KEYS)
    broken(rig, store)
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    assert_hits(store, KEYS)


def test_a_vanished_mount_is_not_begun_anew_on_the_disk_below(rig, monkeypatch):
    store = rig.store()
    monkeypatch.setattr(multipath, "mount_points", lambda path: ("", frozenset()))
    members = rig.disks[0].path / "members"
    members.unlink()
    broken(rig, store)
    rig.disks[0].error = None
    wait_until(lambda: rig.disks[0].closed)
    time.sleep(0.2)
    assert len(rig.disks[0].opened) == 1
    members.touch()
    wait_until(lambda: not store.out_of_service())


def test_failures_between_successes_take_nothing_out_of_service(rig):
    store = rig.store()
    for _ in range(5 * CALLS_BEFORE_OUT):
        store.parts[0].trouble(OSError(errno.EIO, "one bad block"))
        store_pages(store, KEYS)
    assert store.out_of_service() == []


@pytest.mark.parametrize("result", [SetResult.STORED, SetResult.EXISTS])
def test_a_write_in_which_a_page_is_there_is_no_failed_one_for_one_bad_block(rig, result):
    """In doubt a write reads what is there, and one of these pages may lie on the bad block."""
    store = rig.store()
    part = store._parts[0]
    for _ in range(5 * CALLS_BEFORE_OUT):
        errors, part.store = part.errors, OneBadBlock(part, result)
        store._call(0, "set", PageBatch([], []), [])
        assert part.errors > errors
    assert store.out_of_service() == []


class OneBadBlock:
    def __init__(self, part, result: SetResult) -> None:
        self.part, self.result = part, result

    def set(self, batch: PageBatch) -> list[SetResult]:
        self.part.note(OSError(errno.EIO, "one bad block"))
        return [SetResult.ERROR, self.result]

    def close(self) -> None:
        """It holds nothing."""


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM])
def test_a_full_disk_or_a_process_out_of_descriptors_is_no_broken_path(rig, code):
    store = rig.store()
    rig.disks[0].error = code
    for _ in range(2 * CALLS_BEFORE_OUT):
        store_pages(store, KEYS)
    assert store.out_of_service() == []


def test_a_path_broken_at_start_is_left_out_and_joins_later(rig, caplog):
    rig.disks[1].error = errno.EROFS
    store = rig.store()
    assert store.out_of_service() == [rig.disks[1].path]
    assert "Read-only file system" in caplog.text
    store.register_identity(IDENTITY, {"model": {"id": "x"}})
    store_pages(store, KEYS)
    assert_hits(store, KEYS)
    rig.disks[1].error = None
    wait_until(lambda: not store.out_of_service())
    assert rig.disks[1].opened[0].identities() == {IDENTITY: {"model": {"id": "x"}}}


def test_with_every_path_broken_the_tier_cannot_start(rig):
    for disk in rig.disks:
        disk.error = errno.ENODEV
    with pytest.raises(StoreSetupError, match="No such device"):
        rig.store()


def test_a_path_that_must_not_be_used_stops_the_start_and_closes_the_others(rig):
    def open_path(path, trouble):
        if path == rig.disks[2].path:
            raise StoreSetupError("disk", "holds another layout")
        return rig.open_path(path, trouble)

    with pytest.raises(StoreSetupError, match="another layout"):
        SpreadStore("disk", [disk.path for disk in rig.disks], open_path, rig.metrics)
    assert all(store.closed for disk in rig.disks[:2] for store in disk.opened)


def test_with_no_path_left_everything_is_refused_and_nothing_raises(rig):
    store = rig.store()
    for disk in rig.disks:
        disk.error = errno.EIO
    for _ in range(CALLS_BEFORE_OUT):
        get(store)
    assert len(store.out_of_service()) == 3
    assert get(store) == [GetResult.REJECTED] * len(KEYS)
    assert store_pages(store, KEYS) == [SetResult.REJECTED] * len(KEYS)
    assert store.contains(KEYS) == [False] * len(KEYS)
    assert store.count_leading(KEYS) == store.remove(KEYS) == store.clear(None) == 0
    for disk in rig.disks:
        disk.error = None
    wait_until(lambda: not store.out_of_service())


def test_an_error_that_nobody_expected_does_not_end_the_probing(rig, monkeypatch):
    store = rig.store()
    real, surprises = store._open_path, []

    def open_path(path, trouble):
        if len(surprises) < 2:
            surprises.append(path)
            raise RuntimeError("a surprise")
        return real(path, trouble)

    monkeypatch.setattr(store, "_open_path", open_path)
    broken(rig, store)
    rig.disks[0].error = None
    wait_until(lambda: not store.out_of_service())
    assert len(surprises) == 2


def test_close_ends_the_probe_of_a_path_that_stays_broken(rig):
    store = rig.store()
    broken(rig, store)
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-disk-paths"]


def test_calls_go_on_while_a_path_goes_and_comes(rig):
    store = rig.store()
    store_pages(store, KEYS)
    stop = threading.Event()
    problems: list[object] = []

    def work() -> None:
        pages = HostPages([(1000,)] * len(KEYS))
        while not stop.is_set():
            try:
                results = store.get(PageBatch(KEYS, pages.buffers))
                store.contains(KEYS)
                problems.extend(result for result in results if result is GetResult.CORRUPT)
            except Exception as error:  # noqa: BLE001
                problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        rig.disks[0].error = errno.EIO
        wait_until(store.out_of_service)
        rig.disks[0].error = None
        wait_until(lambda: not store.out_of_service())
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert_hits(store, KEYS)


def test_one_path_beside_a_stopped_process_and_a_broken_one_are_no_refusal(rig):
    """The first comes back by itself."""
    real = rig.open_path

    def open_path(path, trouble):
        if path == rig.disks[0].path and not stopped.is_set():
            raise StoreSetupError("disk", "another process is stopped") from TimeoutError(errno.ETIMEDOUT, "stopped")
        return real(path, trouble)

    stopped = threading.Event()
    rig.open_path = open_path
    for disk in rig.disks[1:]:
        disk.error = errno.EIO
    store = rig.store()
    assert len(store.out_of_service()) == 3
    stopped.set()
    wait_until(lambda: rig.disks[0].path not in store.out_of_service())
    assert SetResult.STORED in store_pages(store, KEYS)


def test_paths_are_opened_at_the_same_time(rig):
    together, real = threading.Barrier(3), rig.open_path
    rig.open_path = lambda path, trouble: (together.wait(LONG), real(path, trouble))[1]
    assert not rig.store().out_of_service()


def test_a_shared_tier_is_shared_while_no_path_is_in_service(rig):
    def open_path(path, trouble):
        raise StoreSetupError("disk", "another process is stopped") from TimeoutError(errno.ETIMEDOUT, "stopped")

    for shared in (False, True):
        store = SpreadStore("disk", [rig.disks[0].path], open_path, rig.metrics, shared=shared)
        rig.stores.append(store)
        assert store.describe().shared is shared


def test_the_capacity_cannot_be_lifted_while_it_is_not_known_what_a_path_holds(rig):
    store = rig.store()
    assert store.can_resize(None)
    broken(rig, store)
    assert not store.can_resize(None)
    assert store.can_resize(1 << 30)

"""What may be found in a page's place, and a disk that fails: a counted miss or a refused write, and then it works."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache_ext.errors import ClearLaterError, StoreSetupError
from hicache_ext.runtime.background import Backoff
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.file.pages import directory as directory_module
from hicache_ext.storage.tiers.file.pages import packs as packs_module
from hicache_ext.storage.tiers.file.pages import store as pages
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    page_key,
    page_keys,
    payload_of,
    read_pages,
)
from tests.rigs.disk_faults import DiskFaults
from tests.storage.file.page_files import store_one_by_one
from tests.storage.raw_access import RawFiles, account_and_walk

NOBODY = 65534
KEY = page_key("the page")


@pytest.fixture
def page(store, raw) -> Path:
    """The file of a stored page."""
    store_one_by_one(store, [KEY, page_key("another")])
    return raw.path(KEY)


def _assert_counted_healed_and_works(store: PageFileStore, reason: str) -> None:
    assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
    assert store.metrics.value("corrupt", reason) == 1
    assert store.contains([KEY]) == [False]
    assert read_pages(store, [KEY])[0] == [GetResult.MISS]
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert_hits(store, [KEY, page_key("another")])
    assert store.metrics.total("corrupt") == 1


# -- what is found in a page's place -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 100, 128, 600, 1127])
def test_a_truncated_page_is_counted_and_replaced(store, page, length):
    os.truncate(page, length)
    _assert_counted_healed_and_works(store, "truncated")


def test_a_page_that_was_damaged_on_the_way_here_stays_for_others(store, page, monkeypatch):
    """A reader of a shared directory with bad memory or a bad link removed everybody's good pages."""
    read_into = packs_module.vectored.read_into

    def damaging(fd, segments, offset, flags):
        filled = read_into(fd, segments, offset, flags)
        monkeypatch.setattr(packs_module.vectored, "read_into", read_into)
        segments[1][7] ^= 1
        return filled

    monkeypatch.setattr(packs_module.vectored, "read_into", damaging)
    assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
    assert page.exists()
    assert store.metrics.value("suspect", "good") == 1
    assert store.metrics.total("corrupt") == 0
    assert_hits(store, [KEY])


@pytest.mark.parametrize("length", [1129, 5000])
def test_a_longer_page_is_counted_and_replaced(store, page, length):
    os.truncate(page, length)
    _assert_counted_healed_and_works(store, "longer")


@pytest.mark.parametrize(("offset", "reason"), [(0, "magic"), (70, "header_checksum"), (127, "header_checksum")])
def test_a_flipped_header_bit_is_counted_and_replaced(store, page, offset, reason):
    _flip(page, offset)
    _assert_counted_healed_and_works(store, reason)


@pytest.mark.parametrize("offset", [128, 700, 1127])
def test_a_flipped_payload_bit_is_counted_and_replaced(store, page, offset):
    _flip(page, offset)
    _assert_counted_healed_and_works(store, "checksum")


def _flip(page: Path, offset: int) -> None:
    content = bytearray(page.read_bytes())
    content[offset] ^= 4
    page.write_bytes(content)


def test_an_empty_directory_in_a_pages_place_is_replaced(store, page):
    page.unlink()
    page.mkdir()
    _assert_counted_healed_and_works(store, "not_a_file")


def test_what_is_no_file_and_cannot_be_removed_is_not_said_to_be_removed(store, open_store, page, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    page.unlink()
    page.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(store._directory, "remove_page", refuse)
        assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
        assert store_one_by_one(store, [KEY]) == [SetResult.REJECTED]
    assert "is removed" not in caplog.text
    assert "is bad (not_a_file) and cannot be removed" in caplog.text
    assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
    assert "was bad (not_a_file) and is removed" in caplog.text
    assert store_one_by_one(open_store(), [KEY]) == [SetResult.STORED]
    assert store.contains([KEY]) == [True]


def test_a_name_that_is_taken_in_tmp_makes_no_page_exist(store, place, monkeypatch):
    """Left there by a process that was killed."""
    monkeypatch.setattr(directory_module, "_TEMP_NUMBERS", itertools.repeat(7))
    (place / "tmp" / f"{store._directory.members.id}.7.tmp").write_bytes(b"half")
    assert store_one_by_one(store, [KEY]) == [SetResult.ERROR]
    assert store.contains([KEY]) == [False]


def test_a_look_into_a_directory_that_cannot_be_read_is_one_error(store, monkeypatch):
    lstat = os.lstat

    def refuse(path, *arguments, **options):
        if str(path).endswith(".page"):
            raise OSError(errno.EACCES, "Permission denied", path)
        return lstat(path, *arguments, **options)

    monkeypatch.setattr(os, "lstat", refuse)
    assert store.contains(page_keys(20)) == [False] * 20
    assert store.metrics.value("error", "EACCES") == 1


def test_a_directory_with_files_in_a_pages_place_is_moved_aside_whole(store, page):
    page.unlink()
    page.mkdir()
    (page / "thesis.tex").write_text("years of work")
    _assert_counted_healed_and_works(store, "not_a_file")
    assert [file.read_text() for file in page.parent.glob("*/thesis.tex")] == ["years of work"]


def test_a_symlink_in_a_pages_place_is_replaced_and_its_target_stays(store, page, tmp_path):
    target = tmp_path / "target"
    page.rename(target)
    page.symlink_to(target)
    assert store.contains([KEY]) == [False]
    _assert_counted_healed_and_works(store, "unreadable")
    assert target.read_bytes()[128:] == payload_of(KEY, 1000)


def test_a_pipe_in_a_pages_place_is_replaced_and_nobody_waits_for_its_writer(store, page):
    page.unlink()
    os.mkfifo(page)
    begun = time.monotonic()
    _assert_counted_healed_and_works(store, "not_a_file")
    assert time.monotonic() - begun < 60


def test_a_socket_in_a_pages_place_is_replaced(store, page):
    page.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        # The path is too long to bind to as it is.
        folder = os.open(page.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/{page.name}")
        os.close(folder)
        _assert_counted_healed_and_works(store, "unreadable")


@pytest.mark.parametrize("kind", ["directory", "symlink", "pipe", "short"])
def test_a_write_replaces_what_is_no_page_without_a_read_before(store, page, kind):
    page.unlink()
    match kind:
        case "directory":
            page.mkdir()
        case "symlink":
            page.symlink_to("/nonexistent")
        case "pipe":
            os.mkfifo(page)
        case "short":
            page.write_bytes(b"x" * 10)
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert_hits(store, [KEY])


def test_a_directory_that_is_taken_away_amid_a_write_is_made_again(store, directory, monkeypatch):
    """clear(), or the eviction of another process, between making a page's directory and writing to it."""
    open_unpublished = store._directory.open_unpublished
    interruptions = iter(range(2))

    def interrupted():
        if next(interruptions, None) is not None:
            directory.remove_empty_directories()
        return open_unpublished()

    monkeypatch.setattr(store._directory, "open_unpublished", interrupted)
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert_hits(store, [KEY])


def test_a_file_in_place_of_a_fan_out_directory_is_moved_aside_by_a_write(store, page):
    shutil.rmtree(page.parent)
    page.parent.write_text("in the way")
    assert read_pages(store, [KEY])[0] == [GetResult.MISS]
    assert store.contains([KEY]) == [False]
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert_hits(store, [KEY])


def test_a_bad_page_that_another_writer_has_replaced_meanwhile_is_left_alone(store, page, open_store, monkeypatch):
    """Two readers find one bad page; the slower one must not remove the good copy written since."""
    other = open_store()
    _flip(page, 500)
    read_into = packs_module.vectored.read_into

    def read_slowly(*arguments):
        filled = read_into(*arguments)
        monkeypatch.undo()
        assert read_pages(other, [KEY])[0] == [GetResult.CORRUPT]
        assert store_one_by_one(other, [KEY]) == [SetResult.STORED]
        return filled

    monkeypatch.setattr(packs_module.vectored, "read_into", read_slowly)
    assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
    monkeypatch.undo()
    assert_hits(store, [KEY])


def test_damaged_files_do_not_make_the_account_smaller_than_what_is_stored(store, raw, open_store):
    """A page blown up to 1 MiB must not take 1 MiB out of the account when it is removed."""
    keys = page_keys(20)
    store_one_by_one(store, keys)
    os.truncate(raw.path(keys[0]), 1 << 20)
    os.truncate(raw.path(keys[1]), 0)
    read_pages(store, keys[:2])
    used, walked = account_and_walk(store)
    assert used >= walked
    store.close()
    again = open_store()
    assert again.used_bytes() == account_and_walk(again)[1] == walked


# -- permissions -------------------------------------------------------------------------------------------------------


@contextmanager
def _as_nobody():
    if os.geteuid() != 0:
        pytest.skip("missing: root, to drop privileges from")
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def open_place():
    """A directory that other users reach, unlike pytest's."""
    place = Path(tempfile.mkdtemp(prefix="hicache-open-"))
    place.chmod(0o755)
    yield place / "tier"
    shutil.rmtree(place)


def _open_to_all(place: Path) -> None:
    """As in a directory of an older release, or of another account."""
    for entry in [place, *place.rglob("*")]:
        entry.chmod(0o755 if entry.is_dir() else 0o644)


def _unreadable_page(place: Path) -> tuple[PageFileStore, Path]:
    store = PageFileStore("disk", place, capacity=None)
    store_one_by_one(store, [KEY, page_key("another")])
    _open_to_all(place)
    page = RawFiles(place).path(KEY)
    page.chmod(0)
    return store, page


def test_an_unreadable_page_in_our_own_directory_is_counted_and_replaced(open_place):
    store, _ = _unreadable_page(open_place)
    for folder in [open_place, *(folder for folder in open_place.rglob("*") if folder.is_dir())]:
        os.chown(folder, NOBODY, NOBODY)
    with _as_nobody():
        _assert_counted_healed_and_works(store, "unreadable")
    store.close()


def test_an_unreadable_page_that_cannot_be_removed_is_absent_until_it_can_be(open_place):
    """It must not be said to exist: SGLang would plan with it, and never write it again."""
    store, page = _unreadable_page(open_place)
    with _as_nobody():
        assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
        assert store.contains([KEY]) == [False]
        assert store.count_leading([KEY]) == 0
        assert store_one_by_one(store, [KEY]) == [SetResult.REJECTED]
        assert store.metrics.value("rejected", "obstacle") == 1
        assert_hits(store, [page_key("another")])
    for place in (page.parent, store._directory.temporary):
        os.chown(place, NOBODY, NOBODY)
    with _as_nobody():
        assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
        assert_hits(store, [KEY])
        assert store.contains([KEY]) == [True]
    store.close()


def test_a_directory_without_write_permission_is_read_and_refuses_writes(open_place):
    store = PageFileStore("disk", open_place, capacity=None)
    store_one_by_one(store, [KEY])
    _open_to_all(open_place)
    with _as_nobody():
        assert_hits(store, [KEY])
        assert store_one_by_one(store, page_keys(3)) == [SetResult.ERROR] * 3
        assert store.metrics.value("error", "EACCES") == 3
    assert store_one_by_one(store, page_keys(3)) == [SetResult.STORED] * 3
    store.close()


def test_a_page_that_cannot_even_be_removed_by_root_is_absent_until_it_can_be(store, page):
    _flip(page, 400)
    with _immutable(page):
        assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
        assert store.contains([KEY]) == [False]
        assert store_one_by_one(store, [KEY]) == [SetResult.REJECTED]
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert_hits(store, [KEY])


@contextmanager
def _immutable(file: Path):
    if os.geteuid() != 0 or subprocess.run(["chattr", "+i", file], check=False, capture_output=True).returncode:
        pytest.skip("missing: chattr +i (root, and a file system that has it)")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", file], check=True)


# -- a disk that is full or fails --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("missing: root, to mount a small file system")
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount_point], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("missing: the right to mount a small file system")
    yield mount_point
    subprocess.run(["umount", "-l", mount_point], check=True)


@pytest.mark.parametrize("capacity", [None, 1 << 30])
def test_on_a_full_disk_new_pages_take_the_place_of_the_oldest(small_disk, capacity):
    store = PageFileStore("disk", small_disk / "tier", capacity=capacity)
    keys = page_keys(60)
    assert store_one_by_one(store, keys, [60_000]) == [SetResult.STORED] * 60
    assert store.metrics.value("error", "ENOSPC") > 0
    assert store.no_space_since
    present = store.contains(keys)
    assert 10 <= sum(present) <= 17 and all(present[-10:])
    assert_hits(store, keys[-10:], [60_000])
    assert list((small_disk / "tier" / "tmp").iterdir()) == []
    assert account_and_walk(store)[0] == account_and_walk(store)[1]
    store.close()


def test_a_full_disk_is_not_tried_again_for_every_page(store, place, monkeypatch):
    monkeypatch.setattr(pages, "NO_SPACE_PAUSES", Backoff(3600.0, 3600.0))
    with DiskFaults(place, rate=1, errors=(errno.ENOSPC,), short=False, calls=("pwritev",)) as faults:
        store_one_by_one(store, page_keys(1))
        assert store_one_by_one(store, page_keys(50, prefix="more")) == [SetResult.REJECTED] * 50
        assert sum(faults.injected.values()) == 1
    assert store.metrics.value("rejected", "no_space") == 51


def test_a_disk_too_full_to_start_on_is_refused_in_a_sentence(small_disk):
    (small_disk / "ballast").write_bytes(bytes(1 << 19))
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/more", "bs=4096"], check=False, capture_output=True)
    with pytest.raises(StoreSetupError, match="tier 'disk' cannot start") as raised:
        PageFileStore("disk", small_disk / "tier", capacity=None)
    assert "No space left" in str(raised.value)


@pytest.mark.parametrize("call", ["preadv", "open"])
def test_a_read_that_fails_is_an_error_and_the_next_write_replaces_the_page(store, page, place, call):
    """A bad block: the page must not stay there, unreadable, refused by every write as existing."""
    with DiskFaults(place, rate=1, errors=(errno.EIO,), short=False, calls=(call,)):
        assert read_pages(store, [KEY])[0] == [GetResult.ERROR]
    assert store.metrics.value("error", "EIO") == 1
    assert store.contains([KEY]) == [False]
    inode = page.stat().st_ino, page.stat().st_ctime_ns
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert (page.stat().st_ino, page.stat().st_ctime_ns) != inode
    assert_hits(store, [KEY])


def test_a_page_in_place_of_one_that_could_not_be_read_is_present_at_once(store, page, place):
    with DiskFaults(place, rate=1, errors=(errno.EIO,), short=False, calls=("preadv",)):
        assert read_pages(store, [KEY])[0] == [GetResult.ERROR]
    page.unlink()
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert store.contains([KEY]) == [True]
    assert store_one_by_one(store, [KEY]) == [SetResult.EXISTS]
    assert store.metrics.total("corrupt") == 0


def test_a_read_that_fails_once_and_then_works_is_a_hit_again(store, page, place):
    with DiskFaults(place, rate=1, errors=(errno.EIO,), short=False, calls=("preadv",)):
        assert read_pages(store, [KEY])[0] == [GetResult.ERROR]
    assert_hits(store, [KEY])
    assert store.contains([KEY]) == [True]


@pytest.mark.parametrize("call", ["open", "pwritev", "link", "mkdir"])
@pytest.mark.parametrize(("code", "result"), [(errno.EIO, SetResult.ERROR), (errno.ENOSPC, SetResult.REJECTED)])
def test_a_write_that_fails_leaves_nothing_behind(store, place, monkeypatch, call, code, result):
    monkeypatch.setattr(pages, "NO_SPACE_PAUSES", Backoff(0.0, 0.0))
    with DiskFaults(place, rate=1, errors=(code,), short=False, calls=(call,)):
        assert store_one_by_one(store, [KEY]) == [result]
    assert store.metrics.value("error", errno.errorcode[code]) == 1
    assert store.contains([KEY]) == [False]
    assert account_and_walk(store)[0] == account_and_walk(store)[1]
    assert list((place / "tmp").iterdir()) == []
    assert store_one_by_one(store, [KEY]) == [SetResult.STORED]
    assert_hits(store, [KEY])
    assert account_and_walk(store)[0] == account_and_walk(store)[1]


@pytest.mark.parametrize("seed", range(6))
def test_a_disk_that_fails_at_random_never_gives_a_wrong_page_or_an_exception(store, place, monkeypatch, seed):
    monkeypatch.setattr(pages, "NO_SPACE_PAUSES", Backoff(0.0, 0.0))
    keys = page_keys(30)
    with DiskFaults(place, seed=seed, rate=0.2) as faults:
        for _ in range(10):
            for result in store_one_by_one(store, keys, [2000, 500]):
                assert result is not SetResult.TIMEOUT
            results, payloads = read_pages(store, keys, [2000, 500])
            for key, result, payload in zip(keys, results, payloads, strict=True):
                assert result is not GetResult.HIT or payload == payload_of(key, 2500)
            store.remove(keys[::3])
    assert sum(faults.injected.values()) > 100
    assert account_and_walk(store)[0] >= account_and_walk(store)[1]
    assert all(result.durable for result in store_one_by_one(store, keys, [2000, 500]))
    assert_hits(store, keys, [2000, 500])


def test_an_account_that_fails_is_a_refused_write_and_not_an_exception(store, page, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    store_one_by_one(store, [page_key("a third")])
    monkeypatch.setattr("hicache_ext.runtime.file_lock.try_lock_byte", fail)
    assert store_one_by_one(store, page_keys(3)) == [SetResult.ERROR] * 3
    assert_hits(store, [KEY])
    _flip(page, 300)
    assert read_pages(store, [KEY])[0] == [GetResult.CORRUPT]
    assert store.remove([page_key("another")]) == 1
    assert store.clear(None) == 1
    monkeypatch.undo()
    assert store_one_by_one(store, [KEY, *page_keys(3)]) == [SetResult.STORED] * 4
    assert_hits(store, [KEY, *page_keys(3)])
    assert store.clear(None) == 1
    store._clearing.wait(60)
    assert account_and_walk(store) == (0, 0), "told what it could not be told before"


def test_a_pipe_is_never_counted_as_present(store, page):
    page.unlink()
    os.mkfifo(page)
    assert store.contains([KEY]) == [False]
    assert stat.S_ISFIFO(page.lstat().st_mode)


def test_each_identity_that_could_not_be_cleared_is_counted(store, monkeypatch):
    codes = {IDENTITY: errno.EIO, OTHER_IDENTITY: errno.EACCES}

    def fail(digest):
        raise OSError(codes[digest], os.strerror(codes[digest]), digest.hex())

    monkeypatch.setattr(store._directory, "detach_identity", fail)
    with pytest.raises(ClearLaterError):
        store.clear(list(codes))
    assert [store.metrics.value("error", reason) for reason in ("EIO", "EACCES")] == [1, 1]


def test_clear_clears_although_somebody_has_removed_the_directory_it_moves_pages_to(store):
    keys = page_keys(20)
    store_one_by_one(store, keys)
    shutil.rmtree(store._directory.temporary)
    assert store.clear(None) == 1
    assert store.contains(keys) == [False] * 20
    assert store_one_by_one(store, keys) == [SetResult.STORED] * 20

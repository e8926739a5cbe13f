"""One directory of page files: creation, names, publication, clearing, left-overs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.access import make_directory, move_aside
from hicache_ext.runtime.members import living_members
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory, unlink_quietly
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pages.tree import load_document
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    page_key,
    page_keys,
    read_pages,
    store_pages,
)
from tests.storage.file.page_files import store_one_by_one
from tests.storage.raw_access import account_and_walk, occupied_in

_SPAWN = multiprocessing.get_context("spawn")


def _open_and_write(place: str, start, number: int) -> None:
    start.wait()
    store = PageFileStore("disk", Path(place), capacity=None)
    store.register_identity(IDENTITY, {"model": "m"})
    keys = page_keys(20, prefix="shared")
    assert all(result.durable for result in store_pages(store, keys))
    assert_hits(store, keys)
    store.close()


def _stand_still(place: str, ready) -> None:
    directory = PageDirectory(Path(place), "disk")
    fd, temp_path = directory.open_unpublished()
    os.write(fd, b"half a page")
    ready.put(temp_path)
    time.sleep(60)


def test_four_processes_create_one_directory_at_once(place):
    start = _SPAWN.Barrier(4)
    processes = [_SPAWN.Process(target=_open_and_write, args=(str(place), start, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    store = PageFileStore("disk", place, capacity=None)
    assert_hits(store, page_keys(20, prefix="shared"))
    assert account_and_walk(store)[0] == account_and_walk(store)[1]
    store.close()
    assert list((place / "tmp").iterdir()) == []


def test_a_directory_is_named_and_laid_out_as_documented(place, store):
    key = page_key("layout")
    store.register_identity(IDENTITY, {"model": {"id": "m"}})
    store_pages(store, [key])
    page_hash = key[16:].hex()
    found = sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
    assert found == [
        f"identities/{IDENTITY.hex()}.json",
        "members",
        f"pages/{IDENTITY.hex()}/{page_hash[:2]}/{page_hash}.page",
        "usage",
    ]
    store_pages(store, page_keys(2))
    (pack,) = place.glob("pages/*/*/*.pack")
    assert pack.parent.parent.name == IDENTITY.hex()
    assert re.fullmatch(r"[0-9a-f]{11}", pack.parent.name)
    assert re.fullmatch(r"[0-9a-f]{11}-[0-9a-f]{10}-2x1128-[A-Za-z0-9_-]{16}\.pack", pack.name)
    store.remove(page_keys(2)[1:])
    assert [file.name for file in place.glob("pages/*/*/*.pack")] == [pack.name.replace(".pack", ".2.pack")]
    assert load_document(place, IDENTITY) == {"model": {"id": "m"}}
    assert load_document(place, OTHER_IDENTITY) is None


def test_a_file_where_the_directory_should_be_is_refused(place):
    place.write_text("not a directory")
    with pytest.raises(StoreSetupError, match=str(place)):
        PageFileStore("disk", place, capacity=None)


def test_a_file_where_the_pages_should_be_is_moved_aside(place):
    place.mkdir()
    (place / "pages").write_text("somebody's")
    PageDirectory(place, "disk").close()
    (aside,) = place.glob("pages.not-ours-*")
    assert aside.read_text() == "somebody's"


@pytest.mark.parametrize("level", [0, 1], ids=["identity", "fan-out"])
def test_a_file_in_the_place_of_a_directory_of_pages_costs_those_pages(place, open_store, level):
    keys = page_keys(3)
    store = open_store(capacity=1 << 20)
    store_one_by_one(store, keys)
    home = Path(store._directory.page_path(keys[0])).parents[1 - level]
    shutil.rmtree(home)
    home.write_text("somebody's")
    assert read_pages(store, keys[:1])[0] == [GetResult.MISS]
    assert store.remove(keys[:1]) == 0
    assert store_pages(store, keys[:1]) == [SetResult.STORED]
    assert_hits(store, keys[:1])
    (aside,) = home.parent.glob("*.not-ours-*")
    assert aside.read_text() == "somebody's"


@pytest.mark.parametrize("name", ["usage", "members"])
@pytest.mark.parametrize("kind", ["directory", "symlink", "pipe"])
def test_what_is_no_file_in_the_place_of_one_is_moved_aside_whole(place, open_store, name, kind, tmp_path):
    keys = page_keys(5)
    first = open_store(capacity=1 << 20)
    store_pages(first, keys)
    first.close()
    (place / name).unlink()
    match kind:
        case "directory":
            (place / name).mkdir()
            (place / name / "thesis.tex").write_text("years of work")
        case "symlink":
            (tmp_path / "theirs").write_text("years of work")
            (place / name).symlink_to(tmp_path / "theirs")
        case "pipe":
            os.mkfifo(place / name)
    store = open_store(capacity=1 << 20)
    assert_hits(store, keys)
    assert all(result.durable for result in store_pages(store, page_keys(10)))
    assert account_and_walk(store)[0] == account_and_walk(store)[1]
    (aside,) = place.glob(f"{name}.not-ours-*")
    if kind == "directory":
        assert (aside / "thesis.tex").read_text() == "years of work"
    if kind == "symlink":
        assert aside.is_symlink() and (tmp_path / "theirs").read_text() == "years of work"


def test_an_account_that_cannot_be_opened_is_refused(place, directory, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("hicache_ext.runtime.file_lock.try_lock_byte", fail)
    with pytest.raises(StoreSetupError, match="no locks available"):
        PageFileStore("disk", place, capacity=None)


def test_of_two_writers_the_first_to_publish_wins(directory):
    path = directory.page_path(page_key("race"))
    sum(directory.create_parent(path))
    first, second = directory.open_unpublished(), directory.open_unpublished()
    os.write(first[0], b"first")
    os.write(second[0], b"second")
    assert not os.path.exists(path)
    directory.publish(second[1], path)
    with pytest.raises(FileExistsError):
        directory.publish(first[1], path)
    for fd, temp_path in (first, second):
        os.close(fd)
        unlink_quietly(temp_path)
    assert Path(path).read_bytes() == b"second"
    assert list(directory.temporary.iterdir()) == []


def test_the_file_of_a_killed_writer_is_removed_and_that_of_a_living_one_stays(place):
    ready = _SPAWN.Queue()
    process = _SPAWN.Process(target=_stand_still, args=(str(place), ready))
    process.start()
    left = Path(ready.get(timeout=60))
    PageFileStore("disk", place, capacity=None).close()
    assert left.exists()
    process.kill()
    process.join()
    PageFileStore("disk", place, capacity=None).close()
    assert not left.exists()


def test_only_what_was_made_is_charged_for_directories(directory):
    first, same = directory.page_path(page_key(1)), directory.page_path(page_key(1)[:-1] + b"\0")
    assert sum(directory.create_parent(first)) == 2 * 4096
    assert sum(directory.create_parent(same)) == 0
    assert sum(directory.create_parent(directory.page_path(page_key(2)))) == 4096
    assert occupied_in(directory) == 3 * 4096


# -- strangers ---------------------------------------------------------------------------------------------------------


def _put_strangers(place: Path, key: bytes) -> list[Path]:
    identity = place / "pages" / key[:16].hex()
    fan_out = identity / key[16:17].hex()
    fan_out.mkdir(parents=True, exist_ok=True)
    strangers = [
        place / "important.txt",
        place / "pages" / "README",
        place / "tmp" / "scratch",
        identity / "notes",
        identity / "ab.txt",
        fan_out / "backup.page",
        fan_out / f"{key[16:].hex()}.page.bak",
        fan_out / "sub" / "deep.page",
    ]
    for number, stranger in enumerate(strangers):
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text(f"stranger {number}")
    return strangers


def _are_kept(place: Path, strangers: list[Path], cleared: bool) -> bool:
    """Whether the files are where they were; those among the pages of an identity that was ``cleared`` are aside."""
    found = strangers
    if cleared:
        (aside,) = place.glob("tmp/*.clear.not-ours-*")
        found = [aside / file.relative_to(strangers[3].parent) if n >= 3 else file for n, file in enumerate(strangers)]
    return [file.read_text() for file in found] == [f"stranger {n}" for n in range(len(strangers))]


def test_clear_moves_strangers_files_aside_with_the_directory_around_them(place, store):
    keys = page_keys(20)
    store_pages(store, keys)
    strangers = _put_strangers(place, keys[0])
    assert store.clear(None) == 1
    assert store.contains(keys) == [False] * 20
    store.close()
    assert _are_kept(place, strangers, cleared=True)
    assert len(list((place / "tmp").iterdir())) == 2
    assert list(place.glob("tmp/*/*/" + 64 * "[0-9a-f]" + ".page")) == []
    again = PageFileStore("disk", place, capacity=None)
    used, walked = account_and_walk(again)
    assert used >= walked
    again.close()


def test_eviction_leaves_strangers_files_alone(place, open_store):
    store = open_store(capacity=100 * 1024)
    strangers = _put_strangers(place, page_key("x"))
    for number in range(60):
        store_pages(store, [page_key(number)], [8000])
    assert store.metrics.value("evicted", "capacity") > 20
    assert _are_kept(place, strangers, cleared=False)


def test_a_symlink_among_the_pages_is_not_followed_when_clearing(place, store, tmp_path):
    keys = page_keys(1)
    store_pages(store, keys)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{'ab' * 32}.page").write_text("theirs")
    (place / "pages" / IDENTITY.hex() / "ab").symlink_to(outside)
    store.clear(None)
    store.close()
    assert (outside / f"{'ab' * 32}.page").read_text() == "theirs"


def test_clearing_that_a_kill_interrupted_is_finished_by_the_next_start(place, open_store):
    store = open_store()
    keys = page_keys(10)
    store_pages(store, keys)
    store_one_by_one(store, page_keys(3, "alone"))
    strangers = _put_strangers(place, page_key("alone-0"))
    tree = store._directory.detach_identity(IDENTITY)
    # Gone, as after a kill: nobody has its number locked any more.
    store.close()
    again = open_store()
    assert tree is not None
    assert not tree.exists()
    assert again.contains(keys) == [False] * 10
    assert _are_kept(place, strangers, cleared=True)


def test_a_directory_removed_under_a_server_is_shared_again_with_the_next_one(place, open_store):
    """Each took the other for dead, and the account of the first one was that of a removed file."""
    first = open_store(capacity=1 << 20)
    store_pages(first, page_keys(10, prefix="before"))
    for entry in list(place.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    second = open_store(capacity=1 << 20)
    for number in range(10):
        assert store_pages(first, [page_key(f"first {number}")]) == [SetResult.STORED]
        assert store_pages(second, [page_key(f"second {number}")]) == [SetResult.STORED]
    assert first.used_bytes() == second.used_bytes() == occupied_in(second._directory)
    assert len(living_members(place / "members")) == 2
    assert not second._usage.in_doubt()


def _make_together(root: Path, barrier: Any, count: int) -> None:
    for number in range(count):
        barrier.wait(30)
        make_directory(root / str(number))


def test_of_two_processes_that_make_one_directory_none_moves_it_aside(tmp_path: Path) -> None:
    """It was there between two looks of the slower one: 20 of 4,000 were moved, with what was in them."""
    spawn = multiprocessing.get_context("fork")
    barrier = spawn.Barrier(2)
    processes = [spawn.Process(target=_make_together, args=(tmp_path, barrier, 1000)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(1000))


def test_what_is_ours_by_now_is_not_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "members").write_text("")
    move_aside(tmp_path / "pages", unless=stat.S_ISDIR)
    move_aside(tmp_path / "members", unless=stat.S_ISREG)
    assert {path.name for path in tmp_path.iterdir()} == {"pages", "members"}


def test_a_link_to_a_disk_that_is_not_mounted_stays_and_refuses_the_start(place: Path) -> None:
    PageDirectory(place, "disk").close()
    shutil.rmtree(place / "pages")
    (place / "pages").symlink_to(place.parent / "disk of its own")
    with pytest.raises(OSError, match="a link that leads nowhere"):
        PageDirectory(place, "disk")
    (place.parent / "disk of its own").mkdir()
    PageDirectory(place, "disk").close()
    assert (place / "pages").is_symlink()

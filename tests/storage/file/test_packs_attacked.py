"""Packs of page files in bad company: directories of others, a disk that fails, somebody who is faster."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.runtime import vectored
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.pages import catalogue
from hicache_ext.testing.conformance.pages import IDENTITY, HostPages, assert_hits, page_keys, read_pages, store_pages
from tests.storage.raw_access import account_and_walk

KEYS = page_keys(6)


def _packs(place: Path) -> list[Path]:
    return sorted(place.glob("pages/*/*/*.pack"), key=lambda file: file.name)


@pytest.fixture
def pack(store, place) -> Path:
    """The file of a pack with the pages ``KEYS``."""
    assert store_pages(store, KEYS) == [SetResult.STORED] * 6
    return _packs(place)[0]


def _refused(monkeypatch: pytest.MonkeyPatch, bucket: Path, *calls: str, code: int = errno.EACCES) -> None:
    """These calls of the module os fail for this bucket and what is in it."""

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
            if any(str(one).startswith(str(bucket)) for one in (path, *arguments)):
                raise OSError(code, os.strerror(code), str(path))
            return call(path, *arguments, **options)

        return refuse

    for call in calls:
        monkeypatch.setattr(os, call, refusing(getattr(os, call)))


# -- directories -------------------------------------------------------------------------------------------------------


def test_a_bucket_that_cannot_be_written_to_does_not_stop_all_writes(store, open_store, place, pack, monkeypatch):
    """It was the newest one: each write of the identity went there, and failed."""
    _refused(monkeypatch, pack.parent, "open", "rename")
    more = page_keys(4, "more")
    store_pages(store, more)
    assert store_pages(store, more) in ([SetResult.STORED] * 4, [SetResult.EXISTS] * 4)
    assert_hits(store, more)
    assert_hits(open_store(), more)


def test_a_bucket_that_cannot_be_read_hides_no_other(open_store, place, monkeypatch):
    monkeypatch.setattr(catalogue, "PACKS_IN_A_BUCKET", 1)
    first = open_store()
    rounds = [page_keys(2, f"round {number}") for number in range(3)]
    for keys in rounds:
        store_pages(first, keys)
    newest = sorted(place.glob("pages/*/*"))[-1]
    _refused(monkeypatch, newest, "listdir")
    again = open_store()
    for keys in rounds[:2]:
        assert_hits(again, keys)


def test_a_bucket_with_the_last_name_of_all_is_followed_by_others_that_are_filled(open_store, place, monkeypatch):
    """Behind it each pack had a bucket of its own."""
    monkeypatch.setattr(catalogue, "PACKS_IN_A_BUCKET", 2)
    (place / "pages" / IDENTITY.hex() / ("f" * 11)).mkdir(parents=True)
    store = open_store()
    rounds = [page_keys(2, f"round {number}") for number in range(5)]
    for keys in rounds:
        assert store_pages(store, keys) == [SetResult.STORED] * 2
    again = open_store()
    for keys in rounds:
        assert_hits(again, keys)
    assert account_and_walk(store)[0] == account_and_walk(store)[1]
    # One may take a pack more: its names are read while it is written to.
    assert len(list(place.glob("pages/*/*"))) <= 3


def test_packs_of_others_are_found_where_directories_have_no_time_of_change(store, open_store, pack, monkeypatch):
    """As in FUSE over an object store: what others had written was absent for ever."""
    monkeypatch.setattr(catalogue, "_mtime", lambda path: int(os.path.isdir(path)))
    other = open_store()
    for number in range(3):
        keys = page_keys(3, f"round {number}")
        assert other.contains(keys) == [False] * 3
        store_pages(store, keys)
        deadline = time.monotonic() + 10
        while other.contains(keys) != [True] * 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("longest", [143, 60, 20])
def test_names_of_packs_are_no_longer_than_the_file_system_has_them(open_store, place, longest, monkeypatch):
    monkeypatch.setattr(os, "pathconf", lambda path, name: longest)
    store = open_store()
    keys = page_keys(48)
    store_pages(store, keys)
    store.remove(keys[::3])
    names = [file.name for file in _packs(place)]
    assert max(map(len, names), default=0) <= longest
    assert bool(names) == (longest == 143)
    assert_hits(store, keys[1::3])


# -- a disk that fails -------------------------------------------------------------------------------------------------


def test_a_bad_page_that_cannot_be_read_a_second_time_costs_no_neighbour(store, pack, monkeypatch):
    content = bytearray(pack.read_bytes())
    content[2 * 1128 + 500] ^= 4
    pack.write_bytes(content)
    reads = []
    read_into = vectored.read_into

    def once(*arguments: Any) -> int:
        reads.append(arguments)
        if len(reads) > 1:
            raise OSError(errno.EIO, "bad block")
        return read_into(*arguments)

    monkeypatch.setattr(vectored, "read_into", once)
    results, _ = read_pages(store, KEYS)
    monkeypatch.undo()
    assert results[2] in (GetResult.CORRUPT, GetResult.ERROR)
    assert results[:2] + results[3:] == [GetResult.HIT] * 5
    assert store.contains(KEYS)[:2] + store.contains(KEYS)[3:] == [True] * 5
    assert store_pages(store, KEYS) == [SetResult.EXISTS] * 2 + [SetResult.STORED] + [SetResult.EXISTS] * 3
    assert_hits(store, KEYS)


@pytest.mark.parametrize("when", ["pwritev", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_in_the_middle_of_a_pack_leaves_nothing_of_it(store, place, monkeypatch, when, code):
    full = [True]

    def filling(call: Callable[..., Any]) -> Callable[..., Any]:
        def fill(*arguments: Any, **options: Any) -> Any:
            if full[0]:
                if when == "pwritev":
                    # Half of it is written before.
                    os.write(arguments[0], bytes(5000))
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)

        return fill

    monkeypatch.setattr(os, when, filling(getattr(os, when)))
    assert store_pages(store, KEYS) == [SetResult.REJECTED] * 6
    assert not _packs(place)
    assert not list((place / "tmp").iterdir())
    assert account_and_walk(store)[0] == account_and_walk(store)[1]
    full[0] = False
    monkeypatch.setattr(store, "_no_writes_until", 0.0)
    monkeypatch.setattr(store, "_no_growth_until", 0.0)
    assert store_pages(store, KEYS) == [SetResult.STORED] * 6
    assert_hits(store, KEYS)


# -- somebody who is faster --------------------------------------------------------------------------------------------


def test_a_page_that_was_stored_while_its_bucket_was_listed_is_there(store, place, pack, monkeypatch):
    """The list was older than the page: the page was taken for gone."""
    listed, go_on = threading.Event(), threading.Event()
    listdir, bucket = os.listdir, str(pack.parent)

    def slow(path: Any) -> list[str]:
        names = listdir(path)
        if path == bucket and threading.current_thread() is look:
            listed.set()
            assert go_on.wait(30)
        return names

    monkeypatch.setattr(os, "listdir", slow)
    known = store._catalogue.of(IDENTITY)
    place_of = known.find([KEYS[0]])[0]
    look = threading.Thread(target=known.look_for, args=(place_of.pack,))
    look.start()
    assert listed.wait(30)
    young = page_keys(3, "young")
    assert store._write_file(*_batch(young))[0] is SetResult.STORED
    go_on.set()
    look.join()
    assert [each is not None for each in known.find(young, again=False)] == [True] * 3


def _batch(keys: list[bytes]) -> tuple[PageBatch, list[int]]:
    pages = HostPages([[1000]] * len(keys))
    return PageBatch(keys, pages.buffers), list(range(len(keys)))


def test_a_pack_that_others_renamed_before_its_age_was_renewed_is_no_trouble_of_the_disk(
    store, open_store, pack, monkeypatch
):
    errors: list[Exception] = []
    monkeypatch.setattr(store, "_trouble", errors.append)
    old = time.time() - 3600
    os.utime(pack, (old, old))
    found = store._find(KEYS[1:2])[0]
    open_store().remove(KEYS[:1])
    store._touch(found.path, found.status)
    assert errors == []


def test_a_count_during_which_a_page_was_taken_away_is_repeated(store, place, pack):
    """A rename may hide a pack from who lists its bucket at that moment, or show it twice."""
    parts = store._directory.occupied_parts()

    def walk():
        for number, part in enumerate(parts):
            if number == 100:
                assert store.remove(KEYS[:1]) == 1
            yield part

    store._usage.count(walk())
    assert store._usage.in_doubt()


def _damaged_name(pack: Path, size: int = 100_000) -> Path:
    """A file beside a pack that begins with its id, under a name that no pack has."""
    damaged = pack.with_name(pack.name.replace("-6x", "-007x"))
    damaged.write_bytes(os.urandom(size))
    return damaged


def test_a_page_is_written_again_where_a_damaged_name_has_the_id_of_its_pack(store, open_store, place, pack):
    """What was gone was looked for under that name for ever: the page was STORED, then MISS."""
    _damaged_name(pack)
    reader = open_store()
    assert_hits(reader, KEYS)
    pack.unlink()
    assert read_pages(reader, KEYS[:1])[0] == [GetResult.MISS]
    assert store_pages(reader, KEYS[:1]) == [SetResult.STORED]
    assert_hits(reader, KEYS[:1])


def test_files_with_damaged_names_are_evicted_first_and_cleared(store, open_store, place, pack):
    """They stayed for ever, in no account."""
    capacity = 4 << 20
    damaged = _damaged_name(pack, 2 * capacity)
    small = open_store(capacity=capacity)
    for number in range(20):
        store_pages(small, page_keys(24, f"round {number}"), (10_000,))
    assert not damaged.exists() and small.metrics.value("evicted", "capacity") > 0
    store_pages(store, KEYS)
    damaged = _damaged_name(_packs(place)[-1])
    store.clear([IDENTITY])
    assert not damaged.exists() and not list((place / "pages").iterdir())


# -- capacity ----------------------------------------------------------------------------------------------------------


def test_pages_of_a_few_bytes_leave_no_more_room_unused_than_large_ones(open_store):
    """Room for a file was reserved for each page, ten times what it takes in a pack."""
    capacity = 16 << 20
    store = open_store(capacity=capacity)
    fullest = 0
    number = 0
    while not store.metrics.value("evicted", "capacity"):
        store_pages(store, page_keys(128, f"round {number}"))
        fullest = max(fullest, store.used_bytes())
        number += 1
    assert fullest > capacity * 0.98


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["symlink", "socket", "pipe", "directory"])
@pytest.mark.parametrize("command", ["ls", "stat", "verify"])
def test_tools_go_on_where_something_else_has_the_name_of_a_pack(store, place, pack, kind, command, capsys):
    good = page_keys(3, "good")
    store_pages(store, good)
    pack.unlink()
    match kind:
        case "symlink":
            pack.symlink_to("/nonexistent")
        case "socket":
            here = os.open(pack.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"/proc/self/fd/{here}/{pack.name}")
            os.close(here)
        case "pipe":
            os.mkfifo(pack)
        case "directory":
            pack.mkdir()
    assert main([command, str(place)]) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err

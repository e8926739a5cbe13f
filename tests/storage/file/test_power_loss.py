"""What a power loss leaves of the small files, and that they are on the disk before anything relies on them."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime import whole_file
from hicache_ext.runtime.whole_file import create_whole, write_whole
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pages.tree import load_document
from hicache_ext.storage.tiers.file.pins import add_pin, read_pins
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, read_pages, store_pages

DOCUMENT = {"model": {"id": "example"}, "pool": {"name": "kv"}}
GARBAGE = b'\x00\xff\x80{"format": ['


def opened(path: Path, layout: str, **tier: Any) -> Any:
    disk = {"type": "file", "path": str(path), "capacity": "64MiB", "layout": layout, "threads": 2, **tier}
    return open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": disk}})))


def first_start(path: Path, layout: str, **tier: Any) -> list[Path]:
    """A server's first half minute; the small files it made."""
    store = opened(path, layout, ttl="1d", **tier)
    store.register_identity(IDENTITY, DOCUMENT)
    store_pages(store, page_keys(20))
    add_pin(path, "prompt", [key[16:] for key in page_keys(3)], None)
    add_pin(path, "another", [key[16:] for key in page_keys(3)], None)
    store.close()
    names = ["pins/prompt.json", "pins/another.json", f"identities/{IDENTITY.hex()}.json"]
    names += ["v3/members", "v3/lock"] if layout == "slab" else ["members", "usage"]
    return [path / name for name in names]


def spoil(file: Path, how: str) -> None:
    content = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "garbage": GARBAGE}[how])


@pytest.mark.parametrize("how", ["empty", "cut", "garbage"])
@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_with_all_small_files_spoilt_a_server_starts_and_has_its_pages(tmp_path: Path, layout: str, how: str) -> None:
    for file in first_start(tmp_path / "l3", layout):
        spoil(file, how)
    for named in (layout, "auto"):
        store = opened(tmp_path / "l3", named)
        assert store.tiers[0].describe().details["layout"] == layout
        assert_hits(store, page_keys(20))
        store.register_identity(IDENTITY, DOCUMENT)
        store.close()
    assert load_document(tmp_path / "l3", IDENTITY) == DOCUMENT


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_whatever_small_files_are_empty_a_server_starts_and_the_others_count(tmp_path: Path, layout: str) -> None:
    """All combinations, one after the other in one directory: each start makes anew what it needs."""
    files = first_start(tmp_path, layout)
    kept = {file: file.read_bytes() for file in files}
    for number, chosen in enumerate(itertools.product([False, True], repeat=len(files))):
        for file, empty in zip(files, chosen, strict=True):
            file.write_bytes(b"" if empty else kept[file])
        if number % 8 == 0:
            store = opened(tmp_path, layout)
            assert_hits(store, page_keys(20))
            store.close()
        else:
            # Without what is measured and logged around it.
            bare: Any = (SlabStore if layout == "slab" else PageFileStore)("disk", tmp_path, capacity=64 << 20)
            assert bare.contains(page_keys(20)) == [True] * 20
            bare.close()
        spoilt = {file.stem for file, empty in zip(files, chosen, strict=True) if empty and file.parent.name == "pins"}
        assert {pin.name for pin in read_pins(tmp_path)} == {"prompt", "another"} - spoilt


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_a_directory_keeps_its_layout_from_the_first_start_on(tmp_path: Path, layout: str) -> None:
    opened(tmp_path, layout).close()
    other = "slab" if layout == "pages" else "pages"
    for _ in range(2):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(StoreSetupError, match=f"layout '{layout}'; this tier writes"):
            opened(tmp_path, other)
        assert sorted(tmp_path.rglob("*")) == before, "a start that is refused makes nothing"
        store = opened(tmp_path, "auto")
        store_pages(store, page_keys(20))
        assert_hits(store, page_keys(20))
        store.close()
        (tmp_path / ("v3/members" if layout == "slab" else "members")).unlink()


@pytest.mark.parametrize("instead", [False, True], ids=["nothing", "a file"])
@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_a_directory_that_lost_its_pages_is_used_again(tmp_path: Path, layout: str, instead: bool) -> None:
    first_start(tmp_path, layout)
    pages = tmp_path / ("pages" if layout == "pages" else "v3/slabs")
    shutil.rmtree(pages)
    if instead:
        pages.write_bytes(b"")
    store = opened(tmp_path, layout)
    store_pages(store, page_keys(20))
    assert_hits(store, page_keys(20))
    store.close()


def test_pages_cleared_before_a_power_loss_do_not_come_back_where_the_note_of_it_is_spoilt(tmp_path: Path) -> None:
    for spoilt in (b"", b"17", GARBAGE):
        store = SlabStore("disk", tmp_path, capacity=64 << 20)
        store_pages(store, page_keys(20))
        assert store.clear([IDENTITY]) == 1
        store.close()
        file = tmp_path / "identities" / f"{IDENTITY.hex()}.cleared"
        # By the clock of the file system, which may be a tick behind.
        times = (file.stat().st_atime_ns, int(file.read_text().split()[0]) * 1_000_000 - 10_000_000)
        file.write_bytes(spoilt)
        os.utime(file, ns=times)
        store = SlabStore("disk", tmp_path, capacity=64 << 20)
        assert store.contains(page_keys(20)) == [False] * 20
        store.close()


# -- the order in which things reach the disk --------------------------------------------------------------------------


class _Disk:
    """Notes what is written, synced and named, by path, and passes it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        for name in ("fsync", "rename", "link", "write"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name: str, call: Any) -> Any:
        def noting(*arguments: Any, **options: Any) -> Any:
            what = arguments[1] if name in ("rename", "link") else os.readlink(f"/proc/self/fd/{arguments[0]}")
            self.calls.append((name, Path(os.fsdecode(what)).name))
            if name == "fsync":
                self.threads.add(threading.get_ident())
            return call(*arguments, **options)

        return noting


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> _Disk:
    return _Disk(monkeypatch)


@pytest.mark.parametrize(("write", "naming"), [(write_whole, "rename"), (create_whole, "link")])
def test_bytes_reach_the_disk_before_the_name_and_the_name_before_anybody_goes_on(
    tmp_path: Path, disk: _Disk, write: Any, naming: str
) -> None:
    write(tmp_path / "file", "text")
    assert [name for name, _ in disk.calls] == ["write", "fsync", naming, "fsync"]
    assert disk.calls[2][1] == "file"
    assert disk.calls[1][1].startswith(".file.")
    assert disk.calls[3][1] == tmp_path.name
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_every_small_file_of_a_start_is_synced_with_its_directory(tmp_path: Path, disk: _Disk, layout: str) -> None:
    first_start(tmp_path / "l3", layout)
    named = [(at, name) for at, (call, name) in enumerate(disk.calls) if call in ("rename", "link")]
    names = {name for _, name in named if not name.endswith((".page", ".pack"))}
    assert names >= {"prompt.json", f"{IDENTITY.hex()}.json"}
    for at, name in named:
        if name.endswith((".page", ".pack", ".tmp")):
            continue
        assert any(call == "fsync" and synced.startswith(f".{name}.") for call, synced in disk.calls[:at]), name
        assert disk.calls[at + 1][0] == "fsync", name


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_pages_are_stored_read_and_cleared_without_waiting_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """SGLang's scheduler thread clears; threads of its own store and read."""
    store = opened(tmp_path, layout)
    store.register_identity(IDENTITY, DOCUMENT)
    disk = _Disk(monkeypatch)
    store_pages(store, page_keys(20))
    assert_hits(store, page_keys(20))
    assert "fsync" not in [name for name, _ in disk.calls]
    store.clear([IDENTITY])
    assert threading.get_ident() not in disk.threads
    store.close()
    if layout == "slab":
        assert ("fsync", f"{IDENTITY.hex()}.cleared") in disk.calls


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    write_whole(tmp_path / "file", "old")

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(whole_file.os, failing, fail)
    with pytest.raises(OSError, match="Input/output"):
        write_whole(tmp_path / "file", "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]


def test_a_trap_under_the_temporary_name_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_file.secrets, "randbelow", lambda _: 7)
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / f".file.{os.getpid()}.7").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", "ours")
    assert victim.read_text() == "theirs"
    assert not (tmp_path / "file").exists()


def test_processes_with_equal_pids_write_one_small_file_under_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers: one removed and remade what the other was about to give its name, half written."""
    names: set[Path] = set()
    write_beside = whole_file._write_beside

    def noted(*arguments: Any) -> Path:
        names.add(write_beside(*arguments))
        return max(names, key=lambda name: name.exists())

    monkeypatch.setattr(whole_file, "_write_beside", noted)
    for content in ("one", "two"):
        write_whole(tmp_path / "file", content)
    assert len(names) == 2


def test_a_damaged_pin_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "bad.json").write_bytes(b"[" * 99999)
    for _ in range(3):
        assert read_pins(tmp_path) == []
    assert caplog.text.count("cannot be read and does not count") == 1


def test_after_a_power_loss_pages_are_read_or_missed_and_can_be_written_again(tmp_path: Path) -> None:
    for layout in ("pages", "slab"):
        path = tmp_path / layout
        for file in first_start(path, layout):
            spoil(file, "empty")
        store = opened(path, layout)
        results, _ = read_pages(store, page_keys(25))
        assert results == [GetResult.HIT] * 20 + [GetResult.MISS] * 5
        store_pages(store, page_keys(25))
        assert_hits(store, page_keys(25))
        store.close()

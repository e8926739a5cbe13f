"""Versions of slabs beside each other in one directory: an upgrade destroys nothing, a downgrade stops no server."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.errors import StoreError, StoreSetupError
from hicache_ext.storage.tiers.file import former_slabs
from hicache_ext.storage.tiers.file.former_slabs import FormerSlabs
from hicache_ext.storage.tiers.file.inspection import open_editor, open_inspector
from hicache_ext.storage.tiers.file.layout_choice import choose_layout
from hicache_ext.storage.tiers.file.manifest import (
    adopt_pages,
    adopt_slabs,
    check_before_start,
    check_manifest_is_there,
    layout_in,
    manifest_text,
    slab_home,
)
from hicache_ext.storage.tiers.file.usage import occupied_bytes
from tests.rigs.former_release import SLOT_SIZE, SLOTS, former_server, former_start, make_former_slabs

CAPACITY = 64 << 20


@pytest.fixture
def former(tmp_path: Path) -> Path:
    make_former_slabs(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_slabs, "_SECONDS", 0.0)


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def blocks(*places: Path) -> int:
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*"))]
    return sum(file.stat().st_blocks * 512 for file in files if file.is_file())


def make_slabs(path: Path) -> Path:
    """A directory that this version has used for slabs."""
    path.mkdir(exist_ok=True)
    adopt_slabs(path, "disk")
    for suffix in ("slab", "headers"):
        (slab_home(path) / "slabs" / f"00000000-4096.{suffix}").write_bytes(b"x" * 40960)
    return path


MANIFEST_OF_SLABS = {"format": 3, "layout": "slab", "checksum": 368090112}


def make_pages(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "pages").mkdir()
    (path / "pages" / bytes(16).hex()).mkdir()
    (path / "hicache_ext.json").write_text('{"format": 1, "layout": "pages"}')
    return path


def make_newer(path: Path) -> Path:
    newer = path / "v4"
    newer.mkdir(parents=True)
    (newer / "hicache_ext.json").write_text(manifest_text(4, "slab"))
    (newer / "data").write_bytes(b"n" * (1 << 20))
    return newer


# -- where things are --------------------------------------------------------------------------------------------------


def test_slabs_of_this_version_are_in_a_directory_of_their_own_with_their_manifest(tmp_path: Path) -> None:
    adopt_slabs(tmp_path, "disk")
    assert json.loads((tmp_path / "v3" / "hicache_ext.json").read_text()) == MANIFEST_OF_SLABS
    assert slab_home(tmp_path) == tmp_path / "v3"
    assert [entry.name for entry in tmp_path.iterdir()] == ["v3"]
    before = content(tmp_path)
    adopt_slabs(tmp_path, "disk")
    assert content(tmp_path) == before


def test_a_former_release_starts_empty_beside_slabs_of_this_version(tmp_path: Path) -> None:
    assert former_start(make_slabs(tmp_path)) == "is empty"


def test_a_former_release_goes_on_with_its_slabs_beside_ours(former: Path) -> None:
    before = content(former)
    make_slabs(former)
    assert {name: data for name, data in content(former).items() if not name.startswith("v3/")} == before
    assert former_start(former) == "trusts its index"


def _spoilt(path: Path) -> Path:
    (slab_home(make_slabs(path)) / "hicache_ext.json").write_bytes(b"")
    return path


def _without_manifest(path: Path) -> Path:
    (slab_home(make_slabs(path)) / "hicache_ext.json").unlink()
    return path


def _first_start_spoilt(path: Path) -> Path:
    adopt_slabs(path, "disk")
    (slab_home(path) / "hicache_ext.json").write_bytes(b"\0\0")
    return path


def _former(number: int) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        make_former_slabs(path, number=number)
        return path

    return make


def _former_spoilt(path: Path) -> Path:
    make_former_slabs(path)
    (path / "hicache_ext.json").write_bytes(b"")
    return path


OURS: dict[str, Callable[[Path], Path]] = {
    "this version": make_slabs,
    "a spoilt manifest": _spoilt,
    "no manifest": _without_manifest,
    "a spoilt first start": _first_start_spoilt,
    "format 1": _former(1),
    "format 2": _former(2),
    "format 2, its manifest spoilt": _former_spoilt,
    "this version beside a former": lambda path: make_slabs(_former(2)(path)),
    "this version beside a newer": lambda path: make_newer(make_slabs(path)).parent,
}


@pytest.mark.parametrize("state", OURS)
def test_slabs_of_any_version_make_a_directory_one_of_slabs(tmp_path: Path, state: str) -> None:
    path = OURS[state](tmp_path)
    assert layout_in(path) == "slab"
    assert choose_layout(path, CAPACITY, shared=True).layout == "slab", "auto keeps it"
    check_before_start(path, "slab", "disk")
    before = content(path)
    with pytest.raises(StoreSetupError, match=r"holds format [123], layout 'slab'; this tier writes format 1, layout"):
        adopt_pages(path, "disk")
    assert content(path) == before
    adopt_slabs(path, "disk")
    assert json.loads((path / "v3" / "hicache_ext.json").read_text()) == MANIFEST_OF_SLABS


def test_page_files_keep_their_directory_and_slabs_are_refused_there(tmp_path: Path) -> None:
    path = make_pages(tmp_path)
    assert (layout_in(path), choose_layout(path, CAPACITY).layout) == ("pages", "pages")
    with pytest.raises(StoreSetupError, match="holds format 1, layout 'pages'; this tier writes format 3"):
        adopt_slabs(path, "disk")
    assert not slab_home(path).exists()
    adopt_pages(path, "disk")


def test_page_files_and_slabs_in_one_directory_are_refused_whichever_is_asked_for(tmp_path: Path) -> None:
    path = make_pages(make_slabs(tmp_path))
    assert layout_in(path) == "pages"
    with pytest.raises(StoreSetupError, match=r"v3' holds format 3, layout 'slab'.* remove that directory"):
        check_before_start(path, "pages", "disk")
    with pytest.raises(StoreSetupError, match="holds format 1, layout 'pages'"):
        check_before_start(path, "slab", "disk")


def test_a_directory_named_v3_of_somebody_else_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "index.html").write_text("theirs")
    assert layout_in(tmp_path) is None
    adopt_pages(tmp_path, "disk")


def test_a_manifest_of_somebody_else_in_a_directory_named_v3_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "hicache_ext.json").write_text("my own notes")
    before = content(tmp_path)
    with pytest.raises(StoreSetupError, match=r"v3/hicache_ext\.json' is not a manifest of this package"):
        adopt_slabs(tmp_path, "disk")
    assert content(tmp_path) == before


@pytest.mark.parametrize("number", [0, 3, 4])
def test_an_unknown_format_in_the_directory_itself_is_refused_and_kept(tmp_path: Path, number: int) -> None:
    (tmp_path / "hicache_ext.json").write_text(manifest_text(number, "slab"))
    with pytest.raises(StoreSetupError, match=f"holds format {number}, layout 'slab'"):
        adopt_slabs(tmp_path, "disk")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hicache_ext.json"]


def test_a_disk_that_is_gone_is_seen_by_its_manifests(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_manifest_is_there(tmp_path)
    for make in (make_slabs, make_pages):
        (tmp_path / make.__name__).mkdir()
        check_manifest_is_there(make(tmp_path / make.__name__))


# -- a newer version ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adopt", [adopt_slabs, adopt_pages])
def test_a_newer_version_is_left_alone_and_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, adopt: Callable[[Path, str], None]
) -> None:
    newer = make_newer(tmp_path)
    (tmp_path / "v9").mkdir()  # somebody else's: no manifest in it
    (tmp_path / "v2").mkdir()
    before = content(newer)
    assert layout_in(tmp_path) is None, "this version begins empty there"
    adopt(tmp_path, "disk")
    assert content(newer) == before
    (record,) = [record for record in caplog.records if "newer release" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert str(newer) in record.getMessage() and "v9" not in record.getMessage() and "v2" not in record.getMessage()


def test_several_newer_versions_are_named_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("v10", "v4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hicache_ext.json").write_text("{}")
    adopt_slabs(tmp_path, "disk")
    assert f"{tmp_path}/v4, {tmp_path}/v10 holds" in caplog.text


def test_what_counts_in_the_capacity_is_this_version_and_former_ones(tmp_path: Path) -> None:
    make_former_slabs(tmp_path)
    assert occupied_bytes(tmp_path) == blocks(tmp_path / "index", tmp_path / "slabs") > 3 * SLOTS * SLOT_SIZE
    make_slabs(tmp_path)
    make_newer(tmp_path)
    (tmp_path / "theirs").write_bytes(b"t" * 50_000)
    assert occupied_bytes(tmp_path) == blocks(tmp_path / "index", tmp_path / "slabs", tmp_path / "v3")


# -- former versions: their room ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_former_slabs_are_counted_and_emptied_and_the_former_release_starts_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    make_former_slabs(tmp_path, number=number)
    make_slabs(tmp_path)
    ours = content(tmp_path / "v3")
    taken = blocks(tmp_path / "index", tmp_path / "slabs")
    found = FormerSlabs(tmp_path)
    assert found.bytes() == taken
    assert found.make_room("disk") == taken
    assert found.bytes() == 0
    assert former_start(tmp_path) == "is empty"
    assert content(tmp_path / "v3") == ours
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == [
        "hicache_ext.json",
        "lock",
        "ttl.json",
    ]
    assert len(list((tmp_path / "identities").iterdir())) == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"tier disk: {tmp_path}: slabs of a former release were removed to make room, ")
    assert found.make_room("disk") == 0
    assert len(caplog.records) == 1


def test_only_files_with_our_names_are_counted_and_removed(former: Path) -> None:
    theirs = ["slabs/notes.txt", "slabs/0-1.slab", "index/vectors.db", "index/data.mdb.bak", "trust.me"]
    for name in theirs:
        (former / name).write_bytes(b"t" * 10_000)
    (former / "slabs" / "0000000f-4096.slab").mkdir()
    (former / "slabs" / "0000000e-4096.slab").symlink_to(former / "trust.me")
    taken = blocks(former / "index", former / "slabs") - blocks(*(former / name for name in theirs[:4]))
    taken -= blocks(former / "slabs" / "0000000e-4096.slab")
    found = FormerSlabs(former)
    assert (found.bytes(), found.make_room("disk")) == (taken, taken)
    assert all((former / name).read_bytes() == b"t" * 10_000 for name in theirs)
    assert (former / "slabs" / "0000000f-4096.slab").is_dir()
    assert (former / "slabs" / "0000000e-4096.slab").is_symlink()


@pytest.mark.parametrize(
    "state", ["nothing", "pages", "this version", "an index of somebody else", "an unknown format"]
)
def test_what_is_no_slab_of_a_former_release_is_neither_counted_nor_removed(tmp_path: Path, state: str) -> None:
    if state == "pages":
        make_pages(tmp_path)
    elif state == "this version":
        make_slabs(tmp_path)
    if state in ("pages", "this version", "an index of somebody else", "an unknown format"):
        (tmp_path / "index").mkdir()
        (tmp_path / "index" / "data.mdb").write_bytes(b"t" * 10_000)
    if state == "an unknown format":
        (tmp_path / "hicache_ext.json").write_text(manifest_text(7, "slab"))
    before = content(tmp_path)
    found = FormerSlabs(tmp_path)
    assert (found.bytes(), found.make_room("disk"), found.in_words()) == (0, 0, "")
    assert content(tmp_path) == before


def test_while_a_process_of_the_former_release_is_there_nothing_goes_and_that_is_said_once(
    former: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = content(former)
    found = FormerSlabs(former)
    with former_server(former):
        assert [found.make_room("disk") for _ in range(3)] == [0, 0, 0]
        assert content(former) == before
        assert found.bytes() > 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith(
        "of slabs of a former release, which count in the capacity and stay: a process of that release is there"
    )
    assert found.make_room("disk") > 0
    assert former_start(former) == "is empty"


class _Killed(BaseException):
    pass


def test_killed_at_any_moment_of_the_emptying_the_former_release_starts_without_a_wrong_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_former_slabs(tmp_path / "whole")
    files = len(content(tmp_path / "whole"))
    unlink, seen = os.unlink, []
    for last in range(files + 1):
        place = tmp_path / str(last)
        shutil.copytree(tmp_path / "whole", place)
        left = iter(range(last))

        def dies(file: Any, *, left: Any = left, **options: Any) -> None:
            if next(left, None) is None:
                raise _Killed
            unlink(file, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", dies)
            try:
                FormerSlabs(place).make_room("disk")
            except _Killed:
                seen.append(former_start(place))
            else:
                seen.append("done")
        FormerSlabs(place).make_room("disk")
        assert former_start(place) == "is empty", "the next server goes on"
    assert seen[0] == "trusts its index", "nothing had gone yet"
    assert seen[1] == "rebuilds 3 slabs"
    assert "trusts its index" not in seen[1:] and "is refused" not in seen
    assert {"rebuilds 2 slabs", "rebuilds 1 slabs", "done"} < set(seen)


def test_the_note_that_the_index_is_in_order_is_gone_from_the_disk_before_the_index_goes(
    former: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    unlink, fsync = os.unlink, os.fsync
    monkeypatch.setattr(
        os, "unlink", lambda file, **options: (calls.append(Path(file).name), unlink(file, **options))[1]
    )
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), fsync(fd))[1])
    FormerSlabs(former).make_room("disk")
    assert calls[:2] == ["trust", "sync"]


def test_a_lock_that_cannot_be_opened_keeps_former_slabs_and_raises_nothing(
    former: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (former / "lock").unlink()
    (former / "lock").symlink_to(former / "trust")
    before = content(former)
    found = FormerSlabs(former)
    assert [found.make_room("disk") for _ in range(2)] == [0, 0]
    assert content(former) == before
    assert len(caplog.records) == 1


def test_their_size_is_looked_up_every_few_seconds_only(former: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_slabs, "_SECONDS", 1000.0)
    found = FormerSlabs(former)
    taken = found.bytes()
    monkeypatch.setattr(os, "scandir", None)
    assert [found.bytes() for _ in range(3)] == [taken] * 3


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [open_inspector, open_editor])
def test_tools_say_that_only_former_slabs_are_there_and_begin_nothing(
    former: Path, opening: Callable[[Path], Any]
) -> None:
    before = content(former)
    with pytest.raises(StoreError) as refused:
        opening(former)
    assert str(refused.value).startswith(f"'{former}' holds ") and str(refused.value).endswith(
        "of slabs of a former release (format 2), which this release cannot read, and which a server removes when it "
        "needs the room"
    )
    assert content(former) == before

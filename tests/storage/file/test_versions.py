"""Layouts and versions in one directory: what is not of this version and layout is refused or left alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.tiers.file import layouts
from hicache_ext.storage.tiers.file.layouts import (
    Layout,
    adopt,
    check_before_start,
    choose_layout,
    layout_in,
    slab_home,
)
from hicache_ext.storage.tiers.file.usage import occupied_bytes

CAPACITY = 64 << 20


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def make_slabs(path: Path) -> Path:
    """A directory that this version has used for slabs."""
    path.mkdir(exist_ok=True)
    adopt(path, "slab", "disk")
    for suffix in ("slab", "headers"):
        (slab_home(path) / "slabs" / f"00000000-4096.{suffix}").write_bytes(b"x" * 40960)
    return path


def make_pages(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "pages").mkdir()
    (path / "pages" / bytes(16).hex()).mkdir()
    return path


def make_newer(path: Path) -> Path:
    newer = path / "v4"
    newer.mkdir(parents=True)
    (newer / "members").touch()
    (newer / "data").write_bytes(b"n" * (1 << 20))
    return newer


# -- where things are --------------------------------------------------------------------------------------------------


def test_slabs_of_this_version_are_in_a_directory_of_their_own(tmp_path: Path) -> None:
    adopt(tmp_path, "slab", "disk")
    assert slab_home(tmp_path) == tmp_path / "v3"
    assert {entry.name for entry in tmp_path.iterdir()} == {"identities", "v3"}
    before = content(tmp_path)
    adopt(tmp_path, "slab", "disk")
    assert content(tmp_path) == before


@pytest.mark.parametrize("state", ["this version", "without members", "nothing stored", "beside a newer"])
def test_slabs_make_a_directory_one_of_slabs(tmp_path: Path, state: str) -> None:
    path = make_slabs(tmp_path)
    if state == "without members":
        (slab_home(path) / "members").unlink()
    elif state == "nothing stored":
        for file in (slab_home(path) / "slabs").iterdir():
            file.unlink()
    elif state == "beside a newer":
        make_newer(path)
    assert layout_in(path) == "slab"
    assert choose_layout(path, CAPACITY, shared=True)[0] == "slab", "auto keeps it"
    check_before_start(path, "slab", "disk")
    before = content(path)
    with pytest.raises(StoreSetupError, match=r"holds format 3, layout 'slab'; this tier writes format 2, layout"):
        adopt(path, "pages", "disk")
    assert content(path) == before
    adopt(path, "slab", "disk")


def test_page_files_keep_their_directory_and_slabs_are_refused_there(tmp_path: Path) -> None:
    path = make_pages(tmp_path)
    assert (layout_in(path), choose_layout(path, CAPACITY)[0]) == ("pages", "pages")
    with pytest.raises(StoreSetupError, match="holds format 2, layout 'pages'; this tier writes format 3"):
        adopt(path, "slab", "disk")
    assert not slab_home(path).exists()
    adopt(path, "pages", "disk")


def test_page_files_and_slabs_in_one_directory_are_refused_whichever_is_asked_for(tmp_path: Path) -> None:
    path = make_pages(make_slabs(tmp_path))
    assert layout_in(path) == "pages"
    with pytest.raises(StoreSetupError, match=r"v3' holds format 3, layout 'slab'.* remove that directory"):
        check_before_start(path, "pages", "disk")
    with pytest.raises(StoreSetupError, match="holds format 2, layout 'pages'"):
        check_before_start(path, "slab", "disk")


def test_a_directory_named_v3_of_somebody_else_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "index.html").write_text("theirs")
    assert layout_in(tmp_path) is None
    adopt(tmp_path, "pages", "disk")


def test_a_layout_that_another_process_begins_meanwhile_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = layouts.make_directory

    def other_is_first(directory: Path) -> None:
        monkeypatch.setattr(layouts, "make_directory", real)
        (tmp_path / "pages").mkdir()
        adopt(tmp_path, "pages", "disk")
        real(directory)

    monkeypatch.setattr(layouts, "make_directory", other_is_first)
    with pytest.raises(StoreSetupError, match="holds format 2, layout 'pages'"):
        adopt(tmp_path, "slab", "disk")


def test_a_disk_that_is_gone_is_seen_by_the_files_that_are_not_there(tmp_path: Path) -> None:
    assert layout_in(tmp_path) is None
    for make, layout in ((make_slabs, "slab"), (make_pages, "pages")):
        (tmp_path / layout).mkdir()
        assert layout_in(make(tmp_path / layout)) == layout


# -- a newer version ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_newer_version_is_left_alone_and_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: Layout
) -> None:
    newer = make_newer(tmp_path)
    (tmp_path / "v9").mkdir()  # somebody else's: nobody uses it
    (tmp_path / "v2").mkdir()
    before = content(newer)
    assert layout_in(tmp_path) is None, "this version begins empty there"
    adopt(tmp_path, layout, "disk")
    assert content(newer) == before
    (record,) = [record for record in caplog.records if "newer release" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert str(newer) in record.getMessage() and "v9" not in record.getMessage() and "v2" not in record.getMessage()


def test_several_newer_versions_are_named_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("v10", "v4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "members").touch()
    adopt(tmp_path, "slab", "disk")
    assert f"{tmp_path}/v4, {tmp_path}/v10 holds" in caplog.text


def test_only_this_version_counts_in_the_capacity(tmp_path: Path) -> None:
    make_slabs(tmp_path)
    make_newer(tmp_path)
    (tmp_path / "theirs").write_bytes(b"t" * 50_000)
    files = [file for file in (tmp_path / "v3").rglob("*") if file.is_file()]
    assert occupied_bytes(tmp_path) == sum(file.stat().st_blocks * 512 for file in files) > 0

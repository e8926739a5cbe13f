"""Layouts and versions in one directory: what is not of this version and layout is refused or left alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.tiers.file.manifest import (
    Layout,
    adopt,
    check_before_start,
    check_manifest_is_there,
    choose_layout,
    layout_in,
    manifest_text,
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


MANIFEST_OF_SLABS = {"format": 3, "layout": "slab", "checksum": 368090112}


def make_pages(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "pages").mkdir()
    (path / "pages" / bytes(16).hex()).mkdir()
    (path / "hicache_ext.json").write_text(manifest_text(2, "pages"))
    return path


def make_newer(path: Path) -> Path:
    newer = path / "v4"
    newer.mkdir(parents=True)
    (newer / "hicache_ext.json").write_text(manifest_text(4, "slab"))
    (newer / "data").write_bytes(b"n" * (1 << 20))
    return newer


# -- where things are --------------------------------------------------------------------------------------------------


def test_slabs_of_this_version_are_in_a_directory_of_their_own_with_their_manifest(tmp_path: Path) -> None:
    adopt(tmp_path, "slab", "disk")
    assert json.loads((tmp_path / "v3" / "hicache_ext.json").read_text()) == MANIFEST_OF_SLABS
    assert slab_home(tmp_path) == tmp_path / "v3"
    assert [entry.name for entry in tmp_path.iterdir()] == ["v3"]
    before = content(tmp_path)
    adopt(tmp_path, "slab", "disk")
    assert content(tmp_path) == before


def _spoilt(path: Path) -> Path:
    (slab_home(make_slabs(path)) / "hicache_ext.json").write_bytes(b"")
    return path


def _without_manifest(path: Path) -> Path:
    (slab_home(make_slabs(path)) / "hicache_ext.json").unlink()
    return path


def _first_start_spoilt(path: Path) -> Path:
    adopt(path, "slab", "disk")
    (slab_home(path) / "hicache_ext.json").write_bytes(b"\0\0")
    return path


OURS: dict[str, Callable[[Path], Path]] = {
    "this version": make_slabs,
    "a spoilt manifest": _spoilt,
    "no manifest": _without_manifest,
    "a spoilt first start": _first_start_spoilt,
    "this version beside a newer": lambda path: make_newer(make_slabs(path)).parent,
}


@pytest.mark.parametrize("state", OURS)
def test_slabs_make_a_directory_one_of_slabs_whatever_became_of_its_manifest(tmp_path: Path, state: str) -> None:
    path = OURS[state](tmp_path)
    assert layout_in(path) == "slab"
    assert choose_layout(path, CAPACITY, shared=True)[0] == "slab", "auto keeps it"
    check_before_start(path, "slab", "disk")
    before = content(path)
    with pytest.raises(StoreSetupError, match=r"holds format 3, layout 'slab'; this tier writes format 2, layout"):
        adopt(path, "pages", "disk")
    assert content(path) == before
    adopt(path, "slab", "disk")
    assert json.loads((path / "v3" / "hicache_ext.json").read_text()) == MANIFEST_OF_SLABS


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


def test_page_files_of_the_former_format_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    """Their packs were in a directory of their own: they would take room that nobody counts."""
    path = make_pages(tmp_path)
    (path / "packs" / bytes(16).hex()).mkdir(parents=True)
    (path / "hicache_ext.json").write_text(manifest_text(1, "pages"))
    before = content(path)
    assert layout_in(path) == "pages"
    for layout in ("pages", "slab"):
        with pytest.raises(StoreSetupError, match="holds format 1, layout 'pages'"):
            check_before_start(path, layout, "disk")
    with pytest.raises(StoreSetupError, match=r"holds format 1, layout 'pages'.* remove that directory"):
        adopt(path, "pages", "disk")
    assert content(path) == before


def test_pages_alone_of_the_former_format_are_those_of_this_one(tmp_path: Path) -> None:
    path = make_pages(tmp_path)
    (path / "packs").mkdir()
    (path / "hicache_ext.json").write_text("spoilt")
    adopt(path, "pages", "disk")
    assert (path / "hicache_ext.json").read_text() == manifest_text(2, "pages")


def test_a_directory_named_v3_of_somebody_else_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "index.html").write_text("theirs")
    assert layout_in(tmp_path) is None
    adopt(tmp_path, "pages", "disk")


def test_a_manifest_of_somebody_else_in_a_directory_named_v3_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "hicache_ext.json").write_text("my own notes")
    before = content(tmp_path)
    with pytest.raises(StoreSetupError, match=r"v3/hicache_ext\.json' is not a manifest of this package"):
        adopt(tmp_path, "slab", "disk")
    assert content(tmp_path) == before


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_an_unknown_format_in_the_directory_itself_is_refused_and_kept(tmp_path: Path, number: int) -> None:
    (tmp_path / "hicache_ext.json").write_text(manifest_text(number, "slab"))
    with pytest.raises(StoreSetupError, match=f"holds format {number}, layout 'slab'"):
        adopt(tmp_path, "slab", "disk")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hicache_ext.json"]


def test_a_disk_that_is_gone_is_seen_by_its_manifests(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_manifest_is_there(tmp_path)
    for make in (make_slabs, make_pages):
        (tmp_path / make.__name__).mkdir()
        check_manifest_is_there(make(tmp_path / make.__name__))


# -- a newer version ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slab", "pages"])
def test_a_newer_version_is_left_alone_and_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: Layout
) -> None:
    newer = make_newer(tmp_path)
    (tmp_path / "v9").mkdir()  # somebody else's: no manifest in it
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
        (tmp_path / name / "hicache_ext.json").write_text("{}")
    adopt(tmp_path, "slab", "disk")
    assert f"{tmp_path}/v4, {tmp_path}/v10 holds" in caplog.text


def test_only_this_version_counts_in_the_capacity(tmp_path: Path) -> None:
    make_slabs(tmp_path)
    make_newer(tmp_path)
    (tmp_path / "theirs").write_bytes(b"t" * 50_000)
    files = [file for file in (tmp_path / "v3").rglob("*") if file.is_file()]
    assert occupied_bytes(tmp_path) == sum(file.stat().st_blocks * 512 for file in files) > 0

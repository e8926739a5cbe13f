"""``hicache-ext caches``: all that is kept outside of tiers is found, and only that is removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hicache_ext.cli.main import main
from hicache_ext.runtime import code_cache
from hicache_ext.runtime.code_cache import CodeCache
from hicache_ext.storage.serving.control import DIRECTORY_VARIABLE


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of a test's own for everything that may be kept."""
    monkeypatch.setattr(code_cache, "_PACKAGE", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "run"))
    return tmp_path


@pytest.fixture
def kept(places: Path) -> set[str]:
    """Compiled code in each of its places and of two versions, a calibration."""
    compiled = [places / "package" / "__pycache__", places / "cache" / "hicache_ext", places / "numba"]
    for directory in compiled:
        directory.mkdir(parents=True)
        for version in ("now", "before"):
            CodeCache(version, (), ()).keep({}, directory)
    (places / "cache" / "hicache_ext" / "kernels").mkdir()
    (places / "cache" / "hicache_ext" / "kernels" / "gpu.json").write_text("{}")
    files = _files(places)
    assert len(files) == 7
    # Of others, in the same places.
    (places / "package" / "__pycache__" / "errors.cpython-311.pyc").write_text("bytecode")
    (places / "numba" / "somebody-else.nbi").write_text("index")
    return files


def _files(directory: Path) -> set[str]:
    return {str(path) for path in directory.rglob("*") if not path.is_dir()}


def test_everything_is_listed_and_nothing_changes(
    places: Path, kept: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(places)
    assert main(["caches", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {file["path"] for file in listed["files"]} == kept
    assert {file["kind"] for file in listed["files"]} == {*("compiled code", "calibration of copies")}
    assert not listed["removed"] and _files(places) == before


def test_looking_makes_no_directory(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caches"]) == 0
    assert capsys.readouterr().out == "Nothing is kept outside of tiers.\n"
    assert list(places.iterdir()) == []


def test_what_is_listed_is_removed_and_what_others_keep_there_stays(
    places: Path, kept: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(places)
    assert main(["caches", "--remove"]) == 0
    assert capsys.readouterr().out.endswith("7 of 7 removed\n")
    assert _files(places) == before - kept
    assert not (places / "cache" / "hicache_ext").exists()
    assert main(["caches", "--remove"]) == 0


def test_a_file_that_cannot_be_removed_is_named(
    places: Path, kept: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stubborn = str(places / "numba" / f"hicache_ext-now.{os.geteuid()}.compiled")
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if str(path) == stubborn:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["caches", "--remove"]) == 1
    told = capsys.readouterr()
    assert told.out.endswith("6 of 7 removed\n") and told.err == f"{stubborn}: Operation not permitted\n"


def test_a_linked_directory_is_not_followed(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (places / "cache" / "hicache_ext").mkdir(parents=True)
    (places / "precious").mkdir()
    (places / "precious" / "file").write_text("keep me")
    (places / "cache" / "hicache_ext" / "link").symlink_to(places / "precious")
    assert main(["caches", "--remove"]) == 0
    assert (places / "precious" / "file").read_text() == "keep me"
    assert not (places / "cache" / "hicache_ext").exists()
    shutil.rmtree(places / "precious")

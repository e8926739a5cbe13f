"""What is read where a small file belongs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_ext.runtime.whole_file import LARGEST_SMALL, read_document, read_small


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        _socket,
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: path.symlink_to(path),
    ],
    ids=["directory", "pipe", "socket", "link", "link to itself"],
)
def test_what_is_no_plain_file_is_empty(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "f")
    assert read_small(tmp_path / "f") == b""


def test_a_file_that_has_grown_beyond_all_measure_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("{}")
    assert read_document(file) == {}
    os.truncate(file, LARGEST_SMALL + 1)
    assert read_small(file) == b""
    assert read_document(file) is None


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "f")

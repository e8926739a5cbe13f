"""Entries of a directory by their names, and the bytes of disk that a file takes. Reads only."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

BLOCK = 4096
"""The space of a file is rounded up to a multiple of this."""

ABSENT = (FileNotFoundError, NotADirectoryError)
"""Of a page: something else may have the name of its directory."""


def occupied(size: int) -> int:
    """Bytes of disk a file of ``size`` bytes takes."""
    return -(-size // BLOCK) * BLOCK


def entries(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as listing:
            yield from (entry for entry in listing if name.fullmatch(entry.name))
    except ABSENT:
        return


def directories(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Matching directories, no symbolic links: these lead to files of others."""
    return (entry for entry in entries(directory, name) if entry.is_dir(follow_symlinks=False))


def is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False

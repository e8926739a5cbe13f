"""Files of int64 words that several processes map.

A file has all its blocks before it is mapped, and the file system writes changed blocks in place: otherwise a full disk
would be a SIGBUS (layout_choice.py).
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.access import open_file

Words = npt.NDArray[np.int64]
WORD = 8


def map_words(path: Path, words: int, *, to_change: bool = True) -> Words:
    """Map the first ``words`` words of a file. Raises OSError, ValueError when it has fewer."""
    if words == 0:
        return np.empty(0, np.int64)
    fd = os.open(path, (os.O_RDWR if to_change else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        access = mmap.ACCESS_WRITE if to_change else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, words * WORD, access=access), np.int64)
    finally:
        os.close(fd)


def extend(path: Path, words: int) -> None:
    """Make the file at least ``words`` words long, with zeros. Raises OSError (ENOSPC)."""
    fd = open_file(path, os.O_RDWR)
    try:
        before = os.fstat(fd).st_size
        if before < words * WORD:
            try:
                os.posix_fallocate(fd, before, words * WORD - before)
            except OSError:
                os.ftruncate(fd, before)
                raise
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Sync to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

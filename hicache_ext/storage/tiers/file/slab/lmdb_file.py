"""Checks that LMDB's file is as long as its header says: LMDB maps it, and a page beyond its end is a SIGBUS.

A file system, a copy or a person may have cut it. The layout is that of LMDB 0.9's ``MDB_meta`` (mdb.c),
in the file's first two pages, with the machine's byte order.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import lmdb

_META = struct.Struct("=16x II 16x I 92x Q")
"""A page's header; magic and version; address and size of the map; the page size, which is the first word of the first
of two databases of 48 bytes; the last page in use."""
_MAGIC_AND_VERSION = (0xBEEFC0DE, 1)
_PAGE_SIZES = [1 << power for power in range(8, 17)]


def check_length(file: Path) -> None:
    """Raises lmdb.Error if ``file`` is shorter than its two meta pages say, or lacks one of them; OSError.

    An empty file is fine: LMDB has not written it yet.
    """
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not os.fstat(fd).st_size:
            return
        page_size, last = _read_meta(fd, 0)
        last = max(last, _read_meta(fd, page_size)[1])
        # Read after them: a writer makes the file longer before a meta page says so.
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if size < (last + 1) * page_size:
        raise lmdb.Error(f"{file.name} was cut: it has {size} bytes of {(last + 1) * page_size}")


def _read_meta(fd: int, offset: int) -> tuple[int, int]:
    """Page size and last page."""
    content = os.pread(fd, _META.size, offset)
    if len(content) == _META.size:
        magic, version, page_size, last = _META.unpack(content)
        if (magic, version) == _MAGIC_AND_VERSION and page_size in _PAGE_SIZES:
            return page_size, last
    raise lmdb.Error("the index has no whole meta page of LMDB")

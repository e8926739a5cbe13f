"""One page file: how it is written whole, and what is checked when it is read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from hicache_ext import envelope
from hicache_ext.storage.file import vectored
from hicache_ext.storage.file.directory import PageDirectory

HEADER_LENGTH = envelope.FIELDS_LENGTH


def object_size(segments: Sequence[memoryview]) -> int:
    """Size of the page file whose payload is ``segments``."""
    return HEADER_LENGTH + sum(segment.nbytes for segment in segments)


def read_page(fd: int, status: os.stat_result, key: bytes, segments: Sequence[memoryview]) -> str | None:
    """Read the page ``key`` into ``segments`` and check it; the reason why it is not the page, None when it is.

    ``status`` is that of ``fd``. Raises OSError as the disk does.
    """
    if not stat.S_ISREG(status.st_mode):
        return "not_a_file"
    header = bytearray(HEADER_LENGTH)
    expected = object_size(segments)
    if status.st_size != expected:
        return "truncated" if status.st_size < expected else "longer"
    if vectored.read_into(fd, [memoryview(header), *segments], 0) != expected:
        return "truncated"
    return envelope.reason_to_refuse(header, key, segments)


def write_page(directory: PageDirectory, path: str, key: bytes, segments: Sequence[memoryview]) -> bool:
    """Write the page ``key`` and give it its name ``path``, at once and whole; False when another writer was first.

    Its directory must be there. Raises OSError as the disk does; then nothing is left behind.
    """
    header = envelope.encode_header(key, segments, header_length=HEADER_LENGTH)
    fd, temp_path = directory.open_unpublished(path)
    published = False
    try:
        if vectored.write_from(fd, [memoryview(header), *segments], 0) != object_size(segments):
            raise OSError(errno.ENOSPC, "short write", path)
        published = directory.publish(fd, temp_path, path)
    finally:
        os.close(fd)
        if not published:
            directory.discard(temp_path)
    return published

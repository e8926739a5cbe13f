"""One page file: how it is written whole, and what is checked when it is read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.runtime import vectored
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory

HEADER_LENGTH = envelope.FIELDS_LENGTH

TOUCH_INTERVAL = 60.0
"""Seconds between two renewals of a file's recency (its mtime): eviction needs no finer order."""
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO)
"""Errors of open() that say: what has this name is nothing this tier can have written and may read."""


def object_size(segments: Sequence[memoryview]) -> int:
    """Size of the page file whose payload is ``segments``."""
    return HEADER_LENGTH + sum(segment.nbytes for segment in segments)


EXPIRED = "expired"
"""The reason for a sound page older than the ttl."""


def read_page(
    fd: int,
    status: os.stat_result,
    key: bytes,
    segments: Sequence[memoryview],
    flags: int = 0,
    oldest_valid_ms: int = 0,
) -> str | None:
    """Read the page ``key`` into ``segments`` and check it; returns why it is not the page, None when it is.

    ``status`` is that of ``fd``. Raises OSError as the disk does.
    """
    if not stat.S_ISREG(status.st_mode):
        return "not_a_file"
    header = bytearray(HEADER_LENGTH)
    expected = object_size(segments)
    if status.st_size != expected:
        return "truncated" if status.st_size < expected else "longer"
    if vectored.read_into(fd, [memoryview(header), *segments], 0, flags) != expected:
        return "truncated"
    reason = envelope.reason_to_refuse(header, key, segments)
    if reason is None and oldest_valid_ms and envelope.decode_header(header).created_ms < oldest_valid_ms:
        return EXPIRED
    return reason


def is_page(fd: int, status: os.stat_result, key: bytes, segments: Sequence[memoryview]) -> bool:
    """Whether the file is the page ``key``, by a second read: past the page cache where the kernel drops it, and into
    other memory than ``segments``. Raises OSError."""
    if not stat.S_ISREG(status.st_mode):
        return False
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    elsewhere = [memoryview(bytearray(segment.nbytes)) for segment in segments]
    return read_page(fd, status, key, elsewhere) is None


def created_before(path: str, oldest_valid_ms: int) -> bool:
    """Whether a page file was written before, by its header. Never raises: False for an unreadable file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return envelope.decode_header(os.pread(fd, HEADER_LENGTH, 0)).created_ms < oldest_valid_ms
    except (OSError, FormatError):
        return False
    finally:
        os.close(fd)


def write_page(directory: PageDirectory, path: str, key: bytes, segments: Sequence[memoryview], flags: int = 0) -> bool:
    """Write the page ``key`` and give it its name ``path``, at once and whole; False when another writer was first.

    Its directory must exist. Raises OSError; nothing is left behind then.
    """
    header = envelope.encode_header(key, segments)
    fd, temp_path = directory.open_unpublished(path)
    published = False
    try:
        if vectored.write_from(fd, [memoryview(header), *segments], 0, flags) != object_size(segments):
            raise OSError(errno.ENOSPC, "short write", path)
        published = directory.publish(fd, temp_path, path)
    finally:
        os.close(fd)
        if not published:
            directory.discard(temp_path)
    return published

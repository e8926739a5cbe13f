"""Small files that are whole or absent, even after a power loss.

A rename alone is not enough: the disk may have the new name before the bytes, and the file is then empty. So the bytes
are synced first, then the file gets its name, then the directory is synced. That costs two round trips to the disk
(milliseconds, more under load), so no pages are written this way, and SGLang's scheduler thread uses it only with
``sync=False``. Reasons: docs/decisions/shared-directories.md.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hicache_ext.runtime.access import open_file, opened, sync_directory

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV)
"""Errors of file systems without hard links, or without hard links between directories."""

FileSignature = tuple[int, int, int, int]

LARGEST_SMALL = 128 << 20
"""Most bytes of a small file: more than a pin of a million pages takes."""


def write_whole(path: Path, text: str, *, sync: bool = True) -> None:
    """Replace the file at ``path`` by ``text``; readers see the old file or the new one. Raises OSError.

    Without ``sync``, a power loss within half a minute may leave an empty file, unless ``sync_whole`` is called.
    """
    temporary = _write_beside(path, text, sync)
    try:
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def create_whole(path: Path, text: str) -> bool:
    """Create the file at ``path`` like ``write_whole``; return False if ``path`` exists. Raises OSError.

    If the file system has hard links, exactly one of two concurrent processes creates it.
    """
    temporary = _write_beside(path, text, sync=True)
    try:
        link_new(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def link_new(source: Path | str, target: Path | str) -> None:
    """Link a file to an unused name; if the file system has no hard links, rename it instead. Raises OSError;
    FileExistsError if the name is taken. Without hard links, two simultaneous callers may both succeed, and the last
    one wins."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(source, target)


def sync_whole(path: Path) -> None:
    """Sync a file that ``write_whole`` wrote with ``sync=False``. Raises OSError."""
    with suppress(FileNotFoundError):
        with opened(path) as fd:
            os.fsync(fd)
        sync_directory(path.parent)


def read_small(path: Path) -> bytes:
    """Return the content of a small file; empty if it is larger than ``LARGEST_SMALL`` or not a plain file, because
    reading a pipe would block forever. Raises OSError; FileNotFoundError if it is missing."""
    try:
        with opened(path) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_SMALL:
                return b""
            with open(fd, "rb", closefd=False) as file:
                return file.read()
    except OSError:
        if not stat.S_ISREG(path.lstat().st_mode):
            return b""
        raise


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a small file, or None if the file is missing or holds no JSON object."""
    try:
        return parsed(read_small(path))
    except OSError:
        return None


def parsed(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object in the bytes of a file, or None for anything else."""
    try:
        document = json_in(content)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def file_signature(file: str | os.PathLike[str]) -> FileSignature | None:
    """Return a value that changes with every write of a file, or when it becomes a link to another one (a Kubernetes
    ConfigMap). None if it cannot be determined.
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _finite(word: str) -> float:
    if not math.isfinite(number := float(word)):
        raise ValueError(f"{word} is no number")
    return number


def number_of(value: object) -> float:
    """Return a number of a JSON document. Raises ValueError for anything else: a string, NaN, or a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def json_in(text: str | bytes, number: Callable[[str], float] = _finite) -> Any:
    """Return the JSON value in untrusted text. Raises ValueError, whatever is wrong.

    ``number`` converts text to a float; the default refuses infinity and NaN.
    """
    try:
        return json.loads(text, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _write_beside(path: Path, text: str, sync: bool) -> Path:
    # A random part is needed because processes in different containers may have equal pids.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.randbelow(1 << 63)}")
    fd = open_file(temporary, os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW)
    try:
        content = text.encode()
        while content:
            content = content[os.write(fd, content) :]
        if sync:
            os.fsync(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return temporary

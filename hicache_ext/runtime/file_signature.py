"""Whether a file or directory is another one than before, without reading it."""

from __future__ import annotations

import os

FileSignature = tuple[int, int, int, int]


def file_signature(file: str | os.PathLike[str]) -> FileSignature | None:
    """Changes with every write of a file, also where it is a link to another one by then (a Kubernetes ConfigMap).

    None where it cannot be seen.
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def why_replaced(fd: int, directory: str | os.PathLike[str]) -> str | None:
    """How ``directory`` has become another one than the one that is open as ``fd``, in words; None while it is the
    same, or cannot be seen. Raises OSError for a bad ``fd``."""
    opened = os.fstat(fd)
    try:
        now = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return "the directory that was opened is not there any more"
    except OSError:
        return None
    if os.path.samestat(opened, now):
        return None
    return f"another {'directory' if opened.st_dev == now.st_dev else 'file system'} is there than was opened"

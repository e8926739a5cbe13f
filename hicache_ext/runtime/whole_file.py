"""Small files that are there whole or not at all, also after a power loss.

A rename alone is not enough: the disk may have the new name before the bytes behind it, and the file is empty then. So
the bytes go to the disk first, then the file gets its name, then the directory that has the name goes there. That costs
two round trips to the disk (milliseconds, under load more), which is why nothing here is written per page, and nothing
on SGLang's scheduler thread but with ``sync=False``.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from hicache_ext.runtime.access import open_file, sync_directory

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK)
"""What file systems without hard links answer."""


def write_whole(path: Path, text: str, *, sync: bool = True) -> None:
    """Put ``text`` in place of what is at ``path``; readers see the old file or the new one. Raises OSError.

    Without ``sync`` a power loss within half a minute may leave an empty file, unless ``sync_whole`` comes after.
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
    """``write_whole`` unless there is something at ``path``: then False. Raises OSError.

    Of two processes one creates it, where the file system has hard links.
    """
    temporary = _write_beside(path, text, sync=True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            return False
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def sync_whole(path: Path) -> None:
    """What ``write_whole`` left out without ``sync``. Raises OSError."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(path.parent)


def remove_whole(path: Path) -> None:
    """Remove a file, if there is one, so that it does not come back after a power loss. Raises OSError."""
    with suppress(FileNotFoundError):
        path.unlink()
        sync_directory(path.parent)


def read_document(path: Path) -> dict[str, Any] | None:
    """The JSON object in a small file; None where there is none, or something that cannot be read as one."""
    try:
        return parsed(path.read_bytes())
    except OSError:
        return None


def parsed(content: bytes) -> dict[str, Any] | None:
    """The JSON object in the bytes of a file; None where something else is there, whatever it is."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _write_beside(path: Path, text: str, sync: bool) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    # Left by a process that had this number before; or a trap, where others may write into the directory.
    temporary.unlink(missing_ok=True)
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

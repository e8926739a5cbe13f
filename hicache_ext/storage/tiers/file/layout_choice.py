"""The layout that suits a directory.

Slabs have an index in memory that one machine's processes share, and are preallocated. A file system that other
machines may see, or that writes a changed block elsewhere, so that preallocated files keep no room, gets page files.
Reasons: docs/decisions/layout-and-io-auto.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.runtime.mounts import MOUNTINFO
from hicache_ext.storage.tiers.file.manifest import layout_in

Layout = Literal["pages", "slab"]

_FALLOCATE_PROBE = 1 << 20


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    layout: Layout
    reason: str


def choose_layout(
    path: Path, capacity: int | None, mountinfo: Path = MOUNTINFO, *, shared: bool = False
) -> LayoutChoice:
    """What ``layout: auto`` means for ``path``. A directory that is a tier already keeps its layout. Never raises."""
    kept = _layout_of_manifest(path)
    if kept is not None:
        return LayoutChoice(kept, "the directory has that layout already")
    if shared:
        return LayoutChoice("pages", "shared is true, and slabs belong to one machine")
    if capacity is None:
        return LayoutChoice("pages", "capacity is unlimited, and slabs are preallocated")
    file_system = file_system_of(path, mountinfo)
    if not file_system.local:
        return LayoutChoice("pages", file_system.reason)
    if not file_system.in_place:
        elsewhere = "writes changed blocks elsewhere, so that preallocated slabs reserve no room"
        return LayoutChoice("pages", f"{file_system.reason}, but {elsewhere}")
    refusal = _cannot_allocate(path)
    if refusal is not None:
        return LayoutChoice("pages", f"{file_system.type} is local and cannot preallocate: {refusal}")
    return LayoutChoice("slab", file_system.reason)


def _layout_of_manifest(path: Path) -> Layout | None:
    try:
        layout = layout_in(path)
    except OSError:
        # The store reports what is wrong.
        return None
    return "pages" if layout == "pages" else "slab" if layout == "slab" else None


def _cannot_allocate(path: Path) -> str | None:
    """Why the file system cannot preallocate, None when it can.

    By the system call: posix_fallocate would write zeros itself where the file system cannot preallocate.
    """
    directory = path
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # The store reports a directory that cannot be written; one without unnamed files can still preallocate.
        return None if error.errno in (errno.EACCES, errno.EROFS, errno.EOPNOTSUPP, errno.EISDIR) else error.strerror
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(_FALLOCATE_PROBE)) == 0:
            return None
        return os.strerror(ctypes.get_errno())
    finally:
        os.close(fd)

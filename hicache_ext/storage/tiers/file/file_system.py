"""Which file system a directory is on, and the layout that suits it.

The slab layout maps its index into memory and trusts locks between processes, which hold only on a file system that
one machine has to itself. And it changes what is mapped, which is safe only where a block that a file has is written
where it is: elsewhere there may be no room for it on a full disk, and the kernel kills the process (SIGBUS). Whatever
is not known to be both gets a file per page.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hicache_ext.runtime.mounts import MOUNTINFO, NETWORK_FILE_SYSTEMS, Mount, followed, mount_of, read_mounts
from hicache_ext.storage.tiers.file.manifest import layout_in

Layout = Literal["pages", "slab"]

_LOCAL = frozenset(
    ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"],
)
_WRITES_ELSEWHERE = frozenset(["bcachefs", "btrfs", "f2fs", "nilfs2", "zfs"])
_FALLOCATE_PROBE = 1 << 20


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system of a directory. ``type`` as the kernel spells it, "unknown" where it does not say."""

    type: str
    local: bool
    """Known to belong to this machine alone."""
    reason: str
    """Why it counts as local or not, for a log line."""
    in_place: bool = True
    """Not known to write changed blocks elsewhere."""
    shared: bool = False
    """Other machines can have the same files."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether other machines have the same pages, and why, for people."""

    shared: bool
    reason: str

    def __str__(self) -> str:
        return f"{'shared' if self.shared else 'private'} ({self.reason})"


WHY_IN_PLACE = "writes changed blocks elsewhere, and on a full disk the mapped index of slabs would end the server"


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    layout: Layout
    reason: str


def file_system_of(path: Path, mountinfo: Path = MOUNTINFO) -> FileSystem:
    """The file system that the absolute ``path`` is or will be on. Never raises, and never asks a server."""
    try:
        mounts = read_mounts(mountinfo)
    except OSError as error:
        return FileSystem("unknown", False, f"{mountinfo} cannot be read: {error.strerror or error}")
    return _judge(Path(followed(str(path), mounts)), mounts, depth=0)


def sharing_of_paths(
    paths: Sequence[str], told: bool | None = None, *, slabs: bool = False, mountinfo: Path = MOUNTINFO
) -> Sharing:
    """Of a tier in these directories; ``told`` is what its configuration says. Asks no server."""
    if told is not None:
        return Sharing(told, "as configured")
    if slabs:
        return Sharing(False, "slabs belong to one machine")
    # A page may be on any of the paths: all of them must be shared.
    found = [file_system_of(Path(path), mountinfo) for path in paths]
    decisive = next((one for one in found if not one.shared), found[0])
    return Sharing(decisive.shared, decisive.reason)


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
        return LayoutChoice("pages", f"{file_system.reason}, but {WHY_IN_PLACE}")
    refusal = _cannot_allocate(path)
    if refusal is not None:
        return LayoutChoice("pages", f"{file_system.type} is local and cannot preallocate: {refusal}")
    return LayoutChoice("slab", file_system.reason)


def _judge(path: Path, mounts: list[Mount], depth: int) -> FileSystem:
    mount = mount_of(str(path), mounts)
    if mount is None:
        return FileSystem("unknown", False, f"no mount of {str(path)!r} is known")
    if mount.type in _LOCAL:
        return FileSystem(mount.type, True, f"{mount.type} is local", mount.type not in _WRITES_ELSEWHERE)
    if name := NETWORK_FILE_SYSTEMS.get(mount.type):
        return FileSystem(mount.type, False, f"{mount.type} ({name}) may be shared between machines", shared=True)
    if mount.type == "overlay":
        return _judge_overlay(mount, mounts, depth)
    if mount.is_fuse:
        words = "maybe shared" if mount.is_shared else "over this machine's own"
        reason = f"{mount.type} ({mount.source}) is a FUSE file system, {words}"
        return FileSystem(mount.type, False, reason, shared=mount.is_shared)
    return FileSystem(mount.type, False, f"{mount.type} is not known to be local")


def _judge_overlay(mount: Mount, mounts: list[Mount], depth: int) -> FileSystem:
    """What is written goes to the upper layer. In a container that is a directory of the host, out of sight."""
    upper = mount.options.get("upperdir")
    if upper is None:
        return FileSystem("overlay", False, "overlay without an upper layer cannot be written")
    if depth == 0 and os.path.isdir(upper):
        below = _judge(Path(followed(upper, mounts)), mounts, depth + 1)
        return FileSystem("overlay", below.local, f"overlay over {below.reason}", below.in_place, below.shared)
    # The kernel takes no NFS, and what container runtimes put there is their host's own disk.
    return FileSystem("overlay", True, "overlay, whose upper layer is a disk of the host")


def _layout_of_manifest(path: Path) -> Layout | None:
    try:
        layout = layout_in(path)
    except OSError:
        # What is wrong with it is for the store to say.
        return None
    return "pages" if layout == "pages" else "slab" if layout == "slab" else None


def _cannot_allocate(path: Path) -> str | None:
    """Why the file system cannot preallocate, None when it can.

    Asks the kernel and not posix_fallocate, which would write the zeros itself where the file system cannot.
    """
    directory = path
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # A directory that cannot be written is for the store to report; one without unnamed files can still allocate.
        return None if error.errno in (errno.EACCES, errno.EROFS, errno.EOPNOTSUPP, errno.EISDIR) else error.strerror
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(_FALLOCATE_PROBE)) == 0:
            return None
        return os.strerror(ctypes.get_errno())
    finally:
        os.close(fd)

"""Which file system a directory is on, whether it belongs to this machine alone, and whether it writes in place.

Found in the kernel's table of mounts (mounts.py): no server is asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hicache_ext.runtime.mounts import MOUNTINFO, NETWORK_FILE_SYSTEMS, Mount, followed, mount_of, read_mounts

_LOCAL = frozenset(
    ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"],
)
_WRITES_ELSEWHERE = frozenset(["bcachefs", "btrfs", "f2fs", "nilfs2", "zfs"])


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


def file_system_of(path: Path, mountinfo: Path = MOUNTINFO) -> FileSystem:
    """The file system that the absolute ``path`` is or will be on. Never raises, and never asks a server."""
    try:
        mounts = read_mounts(mountinfo)
    except OSError as error:
        return FileSystem("unknown", False, f"{mountinfo} cannot be read: {error.strerror or error}")
    return _judge(Path(followed(str(path), mounts)), mounts, depth=0)


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

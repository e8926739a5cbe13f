"""The file system of a path, from the kernel's mount table; whether it belongs to this machine alone, and whether it
writes in place.

The path itself is not touched, because that would hang if its server is dead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

NETWORK_FILE_SYSTEMS = {
    "9p": "9P, another machine's directory",
    "acfs": "Oracle ACFS",
    "afs": "AFS",
    "beegfs": "BeeGFS",
    "ceph": "CephFS",
    "cifs": "SMB",
    "gfs2": "GFS2",
    "glusterfs": "GlusterFS",
    "gpfs": "GPFS",
    "lustre": "Lustre",
    "mmfs": "GPFS",
    "nfs": "NFS",
    "nfs4": "NFS",
    "ocfs2": "OCFS2",
    "panfs": "PanFS",
    "pvfs2": "OrangeFS",
    "quobyte": "Quobyte",
    "smb3": "SMB",
    "smbfs": "SMB",
    "vastnfs": "NFS",
    "virtiofs": "virtiofs, another machine's directory",
    "wekafs": "WekaFS",
}
"""File system types, as the kernel spells them, whose bytes come from a server or other machines, with readable names.
FUSE (``fuse``, ``fuseblk``, ``fuse.*``) counts, too: ``Mount.is_network``."""

_LOCAL_FUSE = frozenset(
    [
        "fuseblk",
        "fuse.bindfs",
        "fuse.cryfs",
        "fuse.encfs",
        "fuse.exfat",
        "fuse.fuse-overlayfs",
        "fuse.gocryptfs",
        "fuse.lxcfs",
        "fuse.mergerfs",
        "fuse.ntfs",
        "fuse.ntfs-3g",
        "fuse.overlayfs",
        "fuse.portal",
        "fuse.snapfuse",
        "fuse.squashfuse",
        "fuse.unionfs",
        "fuse.unionfs-fuse",
        "fuse.zfs",
    ]
)
"""FUSE file systems over a disk or directory of this machine. Others are mostly network clients (3FS, JuiceFS,
GlusterFS, s3fs, sshfs)."""

_LOCAL = frozenset(
    ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"],
)
_WRITES_ELSEWHERE = frozenset(["bcachefs", "btrfs", "f2fs", "nilfs2", "zfs"])

_MOST_LINKS = 40
"""The kernel's own limit."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table, and facts about its file system. ``type`` is spelled as by the kernel, or "unknown"
    if the kernel does not tell."""

    point: str
    type: str
    source: str
    device: str = ""
    """Device number of the file system, major:minor."""

    @property
    def is_network(self) -> bool:
        """Return whether reads go through a server or a daemon."""
        return self.type in NETWORK_FILE_SYSTEMS or self.type.startswith("fuse")

    @property
    def shared(self) -> bool:
        """Return whether other machines can have the same files."""
        return self.is_network and self.type not in _LOCAL_FUSE

    @property
    def local(self) -> bool:
        """Return whether it is known to belong to this machine alone."""
        # The kernel does not accept NFS as the upper layer of an overlay, and container runtimes put their host's own
        # disk there.
        return self.type in _LOCAL or self.type == "overlay"

    @property
    def in_place(self) -> bool:
        """Return whether it is not known to write changed blocks elsewhere."""
        return self.type not in _WRITES_ELSEWHERE

    @property
    def reason(self) -> str:
        """Return why it counts as local or not, for a log line."""
        if self.type == "overlay":
            return "overlay, whose upper layer is a disk of the host"
        if name := NETWORK_FILE_SYSTEMS.get(self.type):
            return f"{self.type} ({name}) may be shared between machines"
        if self.is_network:
            words = "maybe shared" if self.shared else "over this machine's own"
            return f"{self.type} ({self.source}) is a FUSE file system, {words}"
        if self.type == "unknown":
            return "its mount is not known"
        return f"{self.type} is {'local' if self.local else 'not known to be local'}"


def read_mounts(mountinfo: Path = MOUNTINFO) -> list[Mount]:
    """Read the mounts of this process; proc(5) describes the format. Raises OSError."""
    mounts: list[Mount] = []
    for line in mountinfo.read_text(errors="surrogateescape").splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or not rest[0]:
            continue
        mounts.append(Mount(_unescaped(fields[4]), rest[0], _unescaped("".join(rest[1:2])), fields[2]))
    return mounts


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that the absolute ``path`` is or will be on, or None if the table has none. Does no I/O."""
    wanted = os.path.normpath(path).rstrip("/") + "/"
    found: Mount | None = None
    for mount in mounts:
        # Of two mounts over one point, the later hides the other.
        if wanted.startswith(mount.point.rstrip("/") + "/") and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def followed(path: str, mounts: Sequence[Mount]) -> str:
    """Return the absolute ``path`` with its symbolic links resolved, as far as local file systems go.

    Touches nothing beyond the first directory on the network.
    """
    done, links = "/", 0
    parts = path.split("/")[::-1]
    while parts:
        at = os.path.normpath(os.path.join(done, parts.pop()))
        mount = mount_of(at, mounts)
        if mount is not None and mount.is_network:
            return os.path.normpath(os.path.join(at, *reversed(parts)))
        try:
            target = os.readlink(at)
        except OSError:
            done = at  # a directory, or nothing yet
            continue
        links += 1
        if links > _MOST_LINKS:
            break
        parts += target.split("/")[::-1]
        done = "/" if target.startswith("/") else done
    return done


def mount_points(path: str, mountinfo: Path = MOUNTINFO) -> tuple[str, frozenset[str]]:
    """Return where the file system of the absolute ``path`` is mounted ("" if unknown), and all mount points (empty if
    unknown). Follows symbolic links without asking a server."""
    mount, mounts = _followed_mount(path, mountinfo)
    return "" if mount is None else mount.point, frozenset(mount.point for mount in mounts)


def file_system_of(path: Path | str, mountinfo: Path = MOUNTINFO) -> Mount:
    """Return the file system that the absolute ``path`` is or will be on. Never raises, and never asks a server."""
    return _followed_mount(str(path), mountinfo)[0] or Mount("", "unknown", "")


def is_on_network(path: str, mountinfo: Path = MOUNTINFO) -> bool:
    """Return whether reads of the absolute ``path`` go through a server or a daemon. Asks no server."""
    return file_system_of(path, mountinfo).is_network


def on_root_file_system(path: str, mountinfo: Path = MOUNTINFO) -> str | None:
    """Describe the file system of ``/`` if the absolute ``path`` is or will be on it; return None if it is not, or if
    that is unknown.

    Bind mounts of that file system count. Follows symbolic links without asking a server.
    """
    mount, mounts = _followed_mount(path, mountinfo)
    root = mount_of("/", mounts)
    if mount is None or root is None:
        return None
    if mount.point != "/" and (mount.device != root.device or not mount.device):
        return None
    words = f"the root file system ({root.type})"
    return f"{words}: a container's own, which is gone with it, or its host's" if root.type == "overlay" else words


def _followed_mount(path: str, mountinfo: Path) -> tuple[Mount | None, list[Mount]]:
    """Return the mount of ``path`` after following links (None if unknown), and all mounts (none if unreadable)."""
    try:
        mounts = read_mounts(mountinfo)
    except OSError:
        return None, []
    return mount_of(followed(path, mounts), mounts), mounts


def _unescaped(text: str) -> str:
    """Decode the octal escapes of blanks and similar characters."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)

"""The kernel's table of mounts: on which file system a path is, found without touching the path.

That matters where the path is on a server that is dead: to look at it would wait for the server.
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
"""Types as the kernel spells them where a server or other machines stand between a read and its bytes, and their names
for people. FUSE counts, too: ``fuse``, ``fuseblk``, ``fuse.*``."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table; ``type`` as the kernel spells it."""

    point: str
    type: str
    source: str
    options: dict[str, str]

    @property
    def is_fuse(self) -> bool:
        return self.type.startswith("fuse")


def read_mounts(mountinfo: Path = MOUNTINFO) -> list[Mount]:
    """The mounts of this process; proc(5) has the format. Raises OSError."""
    mounts: list[Mount] = []
    for line in mountinfo.read_text(errors="surrogateescape").splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or not rest[0]:
            continue
        source, options = [*rest[1:3], "", ""][:2]
        pairs = (option.partition("=")[::2] for option in options.split(","))
        values = {name: _unescaped(value) for name, value in pairs}
        mounts.append(Mount(_unescaped(fields[4]), rest[0], _unescaped(source), values))
    return mounts


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that the absolute ``path`` is or will be on; None when the table has none. Touches nothing.

    Symbolic links are not followed: that would look at every part of the path.
    """
    wanted = os.path.normpath(path).rstrip("/") + "/"
    found: Mount | None = None
    for mount in mounts:
        # Of two mounts over one point the later one is seen.
        if wanted.startswith(_directory(mount.point)) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def is_on_network(path: str, mountinfo: Path = MOUNTINFO) -> bool:
    """Whether a server or a daemon stands between a read of the absolute ``path`` and its bytes. Touches nothing."""
    try:
        mount = mount_of(path, read_mounts(mountinfo))
    except OSError:
        return False
    return mount is not None and (mount.type in NETWORK_FILE_SYSTEMS or mount.is_fuse)


def _directory(point: str) -> str:
    return point.rstrip("/") + "/"


def _unescaped(text: str) -> str:
    """Blanks and the like are written as octal numbers."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)

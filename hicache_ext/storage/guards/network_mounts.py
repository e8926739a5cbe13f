"""On what kind of file system a directory is, found without touching it: a dead NFS server would hold us up."""

from __future__ import annotations

import os
import re
from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "afs", "ceph", "lustre", "gpfs", "beegfs"),
        *("glusterfs", "pvfs2", "wekafs", "panfs", "vastnfs", "ocfs2", "gfs2", "fuse", "fuseblk", "acfs", "quobyte"),
    }
)
"""Where a server, a daemon or other machines stand between a read and its bytes. ``fuse.*`` counts, too."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_type(path: str, mounts: str | None = None) -> str:
    """The kernel's name for the file system that ``path`` is or will be on; "" when it cannot be told.

    ``mounts`` is the text of /proc/self/mountinfo.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
    # No realpath(): it looks at every part of the path. A symbolic link to a network file system has to be configured
    # by where it leads, or be given a timeout.
    wanted = os.path.abspath(path).rstrip("/") + "/"
    longest, found = -1, ""
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        point = _ESCAPED.sub(lambda escape: chr(int(escape[1], 8)), before.split(" ")[4]).rstrip("/") + "/"
        # Of two mounts on one place the later one is on top.
        if wanted.startswith(point) and len(point) >= longest:
            longest, found = len(point), after.split(" ")[0]
    return found


def is_on_network(path: str, mounts: str | None = None) -> bool:
    kind = file_system_type(path, mounts)
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")

"""Who may use the files of a tier: the account that made them alone, or the members of one group as well.

What is in PATH is KV of prompts, so it is private unless the configuration says ``mode: group``: directories 0700 and
files 0600, or 02770 and 0660, whatever the umask. Who makes a file looks at the mode of ``PATH/identities``, which is
always the tier's own (PATH may be somebody else's, such as a mount point): so servers and tools agree without asking
the configuration.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

IDENTITIES = "identities"


@dataclass(frozen=True, slots=True)
class Access:
    """``gid``: the group of ``mode: group``; None keeps the one that the directory has. ``uid``: the account to which
    root leaves what it makes; None keeps it."""

    group: bool = False
    gid: int | None = None
    uid: int | None = None

    @property
    def directory_mode(self) -> int:
        # With the set-group-ID bit: what is made in it gets its group.
        return 0o2770 if self.group else 0o700

    @property
    def file_mode(self) -> int:
        return 0o660 if self.group else 0o600

    def __str__(self) -> str:
        return f"{self.directory_mode:04o} and {self.file_mode:04o}"


PRIVATE = Access()


def access_in(directory: Path) -> Access:
    """What is made in ``directory``, which is a tier's PATH or a directory below it, is for."""
    for place in (directory / IDENTITIES, directory):
        try:
            status = place.stat()
        except OSError:
            continue
        # A tool that root runs must not make files that the server cannot read.
        uid = status.st_uid if os.geteuid() == 0 and status.st_uid != 0 else None
        return Access(group=status.st_mode & 0o2077 == 0o2070, uid=uid)
    return PRIVATE


def open_file(path: Path, flags: int) -> int:
    """A descriptor of the file ``path``, made with the mode that belongs there if it is missing. Raises OSError."""
    access = access_in(path.parent)
    # Not through a link: where others may write into the directory, it could lead to any file of this account.
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd, made = os.open(path, flags | os.O_EXCL, access.file_mode), True
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        fd, made = os.open(path, flags, access.file_mode), False
    try:
        if made:
            settle(fd, access.file_mode)
        if access.uid is not None:
            os.chown(fd, access.uid, -1)
    except BaseException:
        os.close(fd)
        raise
    return fd


def settle(file: int | Path, mode: int) -> None:
    """Give an open file, or one at a path, this mode if it is this account's and the umask left it another one."""
    status = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    if stat.S_IMODE(status.st_mode) == mode or status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        return
    try:
        os.chmod(file, mode)
    except OSError as error:
        # Some file systems have one mode for all files. What that means is said when the tier starts.
        logger.debug("mode of %s: %s", file, error)


def make_directory(path: Path, access: Access | None = None) -> None:
    """Make ``path``, unless it is there, so that a power loss does not take it back. Raises OSError.

    ``access``: what it is for; left out, what its parent is for.
    """
    wanted = access or access_in(path.parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    if wanted.gid is not None or wanted.uid is not None:
        os.chown(path, -1 if wanted.uid is None else wanted.uid, -1 if wanted.gid is None else wanted.gid)
    if wanted.group:
        os.chmod(path, wanted.directory_mode)
    with suppress(PermissionError):
        # A directory above that this account may not read.
        sync_directory(path.parent)


def make_tier_directory(path: Path, access: Access = PRIVATE) -> None:
    """Make PATH and what is above it, where missing. Raises OSError."""
    for place in (*reversed(path.parents), path):
        if not place.exists():
            make_directory(place, access)


def sync_directory(path: Path) -> None:
    """To the disk: the names in a directory. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems (SMB, FUSE) cannot, and write names at once or as they like.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)

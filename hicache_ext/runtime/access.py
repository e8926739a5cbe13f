"""Access rights to the files of a tier: for the account that made them, or also for the members of one group.

PATH holds KV of prompts, so it is private (directories 0700, files 0600) unless the configuration says ``mode: group``
(02770, 0660), whatever the umask. A process that makes a file takes the mode from ``PATH/identities``, which always
belongs to the tier (PATH itself may be a mount point), so servers and tools agree without the configuration.
Reasons: docs/decisions/shared-directories.md.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

IDENTITIES = "identities"

_LOCK_BOUND = 1.0
"""Seconds that a process waits for others before it moves something aside."""


@dataclass(frozen=True, slots=True)
class Access:
    """``gid``: the group of ``mode: group``; None keeps the directory's. ``uid``: the owner of files that root makes;
    None keeps root."""

    group: bool = False
    gid: int | None = None
    uid: int | None = None

    @property
    def directory_mode(self) -> int:
        # The set-group-ID bit gives new entries the directory's group.
        return 0o2770 if self.group else 0o700

    @property
    def file_mode(self) -> int:
        return 0o660 if self.group else 0o600

    def __str__(self) -> str:
        return f"{self.directory_mode:04o} and {self.file_mode:04o}"


PRIVATE = Access()


def access_in(directory: Path) -> Access:
    """Return the access to give new entries of ``directory``, which is a tier's PATH or a directory below it."""
    for place in (directory / IDENTITIES, directory):
        try:
            status = place.stat()
        except OSError:
            continue
        # A tool that root runs must not make files that the server cannot read.
        uid = status.st_uid if os.geteuid() == 0 and status.st_uid != 0 else None
        return Access(group=is_for_group(status), uid=uid)
    return PRIVATE


def is_for_group(status: os.stat_result) -> bool:
    """Return whether a directory with this status was made for a group (``Access.directory_mode``)."""
    return status.st_mode & 0o2077 == 0o2070


def open_file(path: Path, flags: int) -> int:
    """Open ``path``; a missing file is made with the mode of its directory (``access_in``). Raises OSError."""
    access = access_in(path.parent)
    # Follow no link: if others may write into the directory, it could lead to any file of this account.
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


@contextmanager
def opened(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0, *, dir_fd: int | None = None
) -> Iterator[int]:
    """Open ``path``, relative to the directory ``dir_fd`` if given, and yield the descriptor. Follows no link and does
    not wait for the writer of a pipe. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def open_plain_file(path: Path, flags: int) -> int:
    """Open a file that belongs to the tier (``open_file``), after moving aside whatever has its name but is not a plain
    file (a directory, a link, a pipe). Raises OSError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            move_aside(path, unless=stat.S_ISREG)
    return open_file(path, flags)


def move_aside(path: Path, unless: Callable[[int], bool] = lambda mode: False) -> None:
    """Rename a foreign entry that occupies the name of one of ours. Raises OSError.

    ``unless``: returns True for a mode (st_mode) of ours. Checked again here, because of several processes one moves
    the entry and may have made ours since the caller looked.
    """
    with _exclusively_in(path.parent), suppress(FileNotFoundError):
        # True if another process was faster.
        if unless(path.lstat().st_mode):
            return
        aside = path.with_name(f"{path.name}.not-ours-{secrets.token_hex(4)}")
        path.rename(aside)
        logger.warning("%s is not ours; it is moved to %s", path, aside)


@contextmanager
def _exclusively_in(directory: Path) -> Iterator[None]:
    """Exclude other processes from moving anything aside in ``directory``, as far as its file system has locks and
    their holder makes progress."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_BOUND
        with suppress(OSError):
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.001)
                else:
                    break
        yield
    finally:
        os.close(fd)


def settle(file: int, mode: int) -> None:
    """Give an open file this mode if the umask gave it another. Leaves files of other accounts alone."""
    status = os.fstat(file)
    if stat.S_IMODE(status.st_mode) == mode or status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        return
    try:
        os.chmod(file, mode)
    except OSError as error:
        # Some file systems have one mode for all files. The tier warns about that at startup.
        logger.debug("mode of %s: %s", file, error)


def make_directory(path: Path, access: Access | None = None) -> None:
    """Make a directory that belongs to the tier if it is missing, so that it survives a power loss. Whatever has its
    name but is not a directory is moved aside. Raises OSError.

    ``access``: by default that of its parent.
    """
    if os.path.lexists(path) and not path.is_dir():
        if path.is_symlink() and not path.exists():
            # The link may lead to a disk that is not mounted now.
            raise FileNotFoundError(errno.ENOENT, "a link that leads nowhere", str(path))
        move_aside(path, unless=stat.S_ISDIR)
    _make_directory(path, access or access_in(path.parent))


def _make_directory(path: Path, wanted: Access) -> None:
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
        # This account may not be allowed to read the parent directory.
        sync_directory(path.parent)


def make_tier_directory(path: Path, access: Access = PRIVATE) -> None:
    """Make PATH and its missing parents. Raises OSError."""
    for place in (*reversed(path.parents), path):
        if not place.exists():
            _make_directory(place, access)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems (SMB, FUSE) cannot sync a directory.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)

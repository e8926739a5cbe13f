"""The processes that use a directory: each holds a lock on one byte of an empty file there.

The byte's offset is the random id of the process. The kernel releases the lock when the process ends, however it ends,
so an id is alive exactly while its byte is locked: in any PID or UTS namespace, and also while the process is stopped.
Reasons: docs/decisions/shared-directories.md.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from pathlib import Path

from hicache_ext.runtime.access import open_plain_file, opened
from hicache_ext.runtime.file_lock import close_in_forks, lock_among, try_lock_byte

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

ID_LIMIT = 1 << 40
"""Ids range from 1 to this, exclusive. Locks on byte 0, and on bytes from this one on, are free for other uses."""


class Members:
    """One membership, which begins on construction. Thread-safe. Calls raise the OSErrors of the file system.

    In a child that Python forked it takes a new id on first use there, so callers must read ``id`` for each use instead
    of keeping it.
    """

    def __init__(self, path: Path) -> None:
        """``path``: the file, which is created if missing."""
        self._path = path
        self._lock = threading.Lock()
        self._closed = False
        self._id = 0
        self._own = self._all = -1
        close_in_forks(self)
        with self._lock:
            self._join()

    @property
    def id(self) -> int:
        """Return the id of this member: random, below 2**40, never 0."""
        with self._lock:
            self._join()
            return self._id

    def is_alive(self, member: int) -> bool:
        """Return whether the process with this id, possibly this one, may be running. Raises nothing.

        Also True if the lock cannot be read, because a live process must never be taken for dead.
        """
        if not 0 < member < ID_LIMIT:
            return False
        try:
            with self._lock:
                self._join()
                return lock_among(self._all, member, 1) is not None
        except OSError:
            return True

    def renew(self) -> None:
        """Rejoin with another id if the file was removed, because processes that came later see only the new file.

        For callers that keep ids only in files that were removed together with it.
        """
        with self._lock:
            self._join()
            if not os.fstat(self._own).st_nlink:
                self._leave()
                self._join()

    def close(self) -> None:
        """Leave. A second call does nothing. Afterwards ``is_alive`` always returns True, and other calls raise."""
        with self._lock:
            self._closed = True
            self._leave()

    def after_fork_in_child(self) -> None:
        # The parent's lock lives as long as any of its descriptors, including the child's.
        self._lock = threading.Lock()
        self._leave()

    def _join(self) -> None:
        """Take an id unless there is one. The thread lock is held."""
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self._path))
        if self._all >= 0:
            return
        try:
            self._own = open_plain_file(self._path, os.O_RDWR)
            self._id = _new_id()
            while not try_lock_byte(self._own, self._id):
                self._id = _new_id()
            # A second description, which can see the first one's lock. Opening by path could find another file by now.
            self._all = os.open(f"/proc/self/fd/{self._own}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        # Forget the descriptors before closing them, because their numbers are reused immediately.
        fds, self._own, self._all = (self._own, self._all), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def living_members(path: Path) -> list[int]:
    """Return the ids of the processes that use the directory with the file ``path``, for observers.

    Creates nothing; returns none if the file is missing or not a plain file. Raises OSError.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return []
        with opened(path) as fd:
            return _locked_bytes(fd)
    except FileNotFoundError:
        return []


def boot_id() -> str | None:
    """Return the kernel's id of this boot of the machine, or None if it does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def _new_id() -> int:
    return 1 + secrets.randbelow(ID_LIMIT - 1)


def _locked_bytes(fd: int) -> list[int]:
    found: list[int] = []
    ranges = [(1, ID_LIMIT)]
    while ranges:
        start, end = ranges.pop()
        if start >= end:
            continue
        # The kernel reports only one of possibly many locks, so search on both sides of it.
        lock = lock_among(fd, start, end - start)
        if lock is None:
            continue
        first, length = lock
        if length == 1:
            found.append(first)
        ranges.append((start, first))
        ranges.append((first + length if length else end, end))
    return sorted(found)

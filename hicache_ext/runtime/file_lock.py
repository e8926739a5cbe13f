"""Locks between processes, on bytes of a file, owned by an open file description (OFD locks, fcntl(2)).

The kernel releases them when the last descriptor of the description is closed, however the process ended, and shows
them to processes of any PID namespace. Two descriptions exclude each other within one process, too. A child made by
``os.fork`` inherits the description and would keep the parent's locks: ``close_in_forks`` prevents that.

Waits are bounded, because the holder may be stopped (SIGSTOP, freezer) or hang on its disk. ``ChangeLock`` is for locks
that calls hold and wait for only briefly. Reasons: docs/decisions/shared-directories.md.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hicache_ext.runtime.access import open_plain_file
from hicache_ext.runtime.background import Backoff

logger = logging.getLogger(__name__)

CHANGE_LOCK_BOUND = 1.0
"""Seconds that a call waits for the holder of a lock, which may be a stopped process."""
_OWN_THREADS_BOUND = 10.0
"""Seconds that a call waits for other threads of its process, which make progress unless the CPU is overloaded."""
_ATTEMPTS_AT_ONCE = 3
_SHORT_ATTEMPTS = Backoff(0.00005, 0.001)


# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (must be 0, or the kernel refuses). The same on
# x86-64 and aarch64.
_FLOCK = struct.Struct("@hhqqi0q")


class Inherited(Protocol):
    def after_fork_in_child(self) -> None:
        """Close descriptors that carry the parent's locks, and replace locks held by threads that the child lacks.

        Must not wait or touch a disk, because it runs inside fork.
        """


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_in_forks(holder: Inherited) -> None:
    """Call ``holder.after_fork_in_child()`` in every child that Python forks, as long as ``holder`` lives."""
    _inherited.add(holder)


def _in_child() -> None:
    for holder in list(_inherited):
        holder.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)


def try_lock_byte(fd: int, byte: int) -> bool:
    """Take the write lock on a byte without waiting; return False if another description holds it.

    ``fd`` must be open for writing. Raises OSError on other failures.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def lock_among(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """Return (start, length) of one lock that another description holds on some of these bytes, or None.

    ``fd`` may be open for reading only. Length 0 reaches to the end of any file. Raises OSError.
    """
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, found_start, found_length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))
    return None if kind == fcntl.F_UNLCK else (found_start, found_length)


class OfdLock:
    """A lock on one byte of a file between processes, and between the threads of one process. Not reentrant.

    Each instance opens its own description, so two instances on one file exclude each other within a process, too. A
    process that ends releases it, however it ends; a stopped one keeps it. In a child that Python forked it starts
    free, whatever the parent holds. Calls raise the OSErrors of the file system.
    """

    def __init__(self, file: Path, byte: int = 0) -> None:
        """``file`` is created if missing. ``byte``: the offset of the byte, which need not exist."""
        self._file = file
        self._byte = byte
        self._threads = threading.Lock()
        self._held = False
        self._closed = False
        self._fd = -1
        close_in_forks(self)
        with self._threads:
            self._open()

    def acquire(self, within: float) -> bool:
        """Take the lock; return False if another thread or process still holds it after ``within`` seconds."""
        deadline = time.monotonic() + within
        if not self._threads.acquire(timeout=max(0.0, within)):
            return False
        mine = False
        try:
            mine = self._take(deadline)
        finally:
            if not mine:
                self._leave()
        return mine

    def try_acquire(self) -> bool:
        """Take the lock without waiting; return whether it was free."""
        return self.acquire(0.0)

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held, as in a forked child of the holder."""
        if not self._held:
            return
        self._held = False
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self._byte, 1, 0))
        except OSError:
            # Closing the file makes the kernel release the lock. The next acquire reopens it.
            self._forget()
            raise
        finally:
            self._leave()

    @property
    def fd(self) -> int:
        """Return the descriptor of the file, for the holder of the lock."""
        return self._fd

    def close(self) -> None:
        """Close the file, at the latest when the thread that holds the lock releases it. A second call does nothing.

        Later acquires raise OSError.
        """
        self._closed = True
        if self._threads.acquire(timeout=CHANGE_LOCK_BOUND):
            self._leave()

    def after_fork_in_child(self) -> None:
        self._threads = threading.Lock()
        self._held = False
        self._forget()

    def _take(self, deadline: float) -> bool:
        """Take the lock between processes; the caller holds the one between threads."""
        self._open()
        attempts = 0
        while not self._try_file():
            left = deadline - time.monotonic()
            if left <= 0.0:
                return False
            attempts += 1
            if attempts > _ATTEMPTS_AT_ONCE:
                time.sleep(min(left, _SHORT_ATTEMPTS.pause(attempts - _ATTEMPTS_AT_ONCE)))
        self._held = True
        return True

    def _try_file(self) -> bool:
        if not try_lock_byte(self._fd, self._byte):
            return False
        if os.fstat(self._fd).st_nlink:
            return True
        # The file was removed: others lock the file that has its name now.
        self._forget()
        self._open()
        return False

    def _open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self._file))
        if self._fd < 0:
            self._fd = open_plain_file(self._file, os.O_RDWR)

    def _leave(self) -> None:
        """Release the lock between threads."""
        if self._closed:
            self._forget()
        self._threads.release()

    def _forget(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ChangeLock(OfdLock):
    """A lock for changes of shared data. Waits for another process at most ``bound`` seconds, once.

    The other process may be stopped. So after one wait has failed, each call tries only once without waiting, until one
    succeeds. Both transitions are logged. Threads of this process keep running, so calls wait for them. Thread-safe.
    """

    def __init__(
        self,
        file: Path,
        byte: int,
        name: str,
        bound: float = CHANGE_LOCK_BOUND,
        threads: float = _OWN_THREADS_BOUND,
    ) -> None:
        """``name``: what is locked, for the log. ``threads``: seconds to wait for threads of this process."""
        super().__init__(file, byte)
        self._name = name
        self._bound = bound
        self._threads_bound = threads
        self._stuck = False
        """The last wait failed, and no thread of this process has had the lock since."""

    def check_is_free(self, problem: str) -> None:
        """Raise TimeoutError with ``problem`` if a holder does not release the lock in time. Raises OSError."""
        if not self.acquire(self._bound):
            raise TimeoutError(errno.ETIMEDOUT, problem)
        self.release()

    def acquire_to_change(self) -> bool:
        """Take the lock as the class describes and return whether it is held. Raises the file system's OSErrors."""
        if not self._threads.acquire(timeout=self._threads_bound):
            return False
        mine = False
        try:
            was_stuck = self._stuck
            mine = self._take(time.monotonic() + (0.0 if was_stuck else self._bound))
            if mine == was_stuck:
                self._stuck = not mine
                self._log_transition()
        finally:
            if not mine:
                self._leave()
        return mine

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock inside the block, if it can be had: ``with lock.held() as mine: if not mine: ...``."""
        mine = self.acquire_to_change()
        try:
            yield mine
        finally:
            if mine:
                self.release()

    def _log_transition(self) -> None:
        if self._stuck:
            logger.warning(
                "%s has been held for %g s by another process, stopped perhaps; nothing is stored until it goes on",
                self._name,
                self._bound,
            )
        else:
            logger.info("%s is free again", self._name)

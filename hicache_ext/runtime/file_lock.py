"""Locks between processes: on bytes of a file, of an open file description (OFD locks, fcntl(2)).

The kernel takes them back when the last descriptor of the description is closed, however the process ended, and shows
them to processes of any PID namespace. Two descriptions exclude each other within one process, too. A child made by
``os.fork`` inherits the description and would keep the parent's locks: ``close_in_forks`` ends that.

Waits are bounded: the holder may be stopped (SIGSTOP, freezer) or hang on its disk. ``ChangeLock`` is for what calls
need: held briefly, waited for briefly. Reasons: docs/decisions/shared-directories.md.
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
"""Seconds that a call waits for the holder of a lock, who may be stopped."""
_OWN_THREADS_BOUND = 10.0
"""Seconds that a call waits for other threads of its process: they run, or the processor is short."""
_ATTEMPTS_AT_ONCE = 3
_SHORT_ATTEMPTS = Backoff(0.00005, 0.001)


# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (0, or the kernel refuses). The same on x86-64
# and aarch64.
_FLOCK = struct.Struct("@hhqqi0q")


class Inherited(Protocol):
    def after_fork_in_child(self) -> None:
        """Close descriptors that carry locks of the parent; replace locks of threads that the child does not have.

        Must not wait, nor touch a disk: it runs inside fork.
        """


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_in_forks(holder: Inherited) -> None:
    """Have ``holder.after_fork_in_child()`` called in every child that Python forks, as long as ``holder`` lives."""
    _inherited.add(holder)


def _in_child() -> None:
    for holder in list(_inherited):
        holder.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)


def try_lock_byte(fd: int, byte: int) -> bool:
    """Take the write lock on a byte, without waiting; False when another description holds it.

    ``fd`` must be open for writing. Raises OSError for anything else.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def lock_among(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """(start, length) of one lock that another description holds on some of these bytes; None where there is none.

    Reading is enough for ``fd``. Length 0 reaches to the end of any file. Raises OSError.
    """
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, found_start, found_length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))
    return None if kind == fcntl.F_UNLCK else (found_start, found_length)


class OfdLock:
    """A lock on one byte of a file between processes, and between the threads of one process. Not reentrant.

    Each opens a description of its own, so two of one process on one file exclude each other. A process that ends
    gives it back, however it ends; one that is stopped keeps it. In a child that Python forked it begins anew: free,
    whatever the parent holds. Calls raise OSError as the file system does.
    """

    def __init__(self, file: Path, byte: int = 0) -> None:
        """``file`` is made where it is missing. ``byte``: its offset; it need not exist."""
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
        """Take the lock; False where another thread or process still holds it after ``within`` seconds."""
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
        """``acquire`` without waiting."""
        return self.acquire(0.0)

    def release(self) -> None:
        """Give the lock back. Does nothing where it is not held, as in a fork child of the holder."""
        if not self._held:
            return
        self._held = False
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self._byte, 1, 0))
        except OSError:
            # So the kernel takes it back. The next acquire opens the file anew.
            self._forget()
            raise
        finally:
            self._leave()

    @property
    def fd(self) -> int:
        """The descriptor of the file, for who holds the lock."""
        return self._fd

    def close(self) -> None:
        """Give it back, at the latest when the thread that holds it does. A second call does nothing.

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
        """Take the lock from other processes, for the one thread that is in."""
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
        # The file was removed: others lock the one that has its name now.
        self._forget()
        self._open()
        return False

    def _open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self._file))
        if self._fd < 0:
            self._fd = open_plain_file(self._file, os.O_RDWR)

    def _leave(self) -> None:
        """Let the next thread in."""
        if self._closed:
            self._forget()
        self._threads.release()

    def _forget(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ChangeLock(OfdLock):
    """A lock for changes of what processes share. Another process is waited for at most ``bound`` seconds, once.

    It may be stopped. So after a wait that was in vain nobody waits: each call tries once, until one succeeds. Both
    turns are logged once. Threads of this process go on, and are waited for. Thread-safe.
    """

    def __init__(
        self,
        file: Path,
        byte: int,
        name: str,
        bound: float = CHANGE_LOCK_BOUND,
        threads: float = _OWN_THREADS_BOUND,
    ) -> None:
        """``name``: what is locked, for the log. ``threads``: seconds that threads of this process are waited for."""
        super().__init__(file, byte)
        self._name = name
        self._bound = bound
        self._threads_bound = threads
        self._stuck = False
        """The last wait was in vain, and nobody has had the lock since."""

    def check_is_free(self, problem: str) -> None:
        """Raises TimeoutError with ``problem`` where somebody has it and goes on with nothing, OSError."""
        if not self.acquire(self._bound):
            raise TimeoutError(errno.ETIMEDOUT, problem)
        self.release()

    def acquire_to_change(self) -> bool:
        """Raises OSError as the file system does."""
        if not self._threads.acquire(timeout=self._threads_bound):
            return False
        mine = False
        try:
            was_stuck = self._stuck
            mine = self._take(time.monotonic() + (0.0 if was_stuck else self._bound))
            if mine == was_stuck:
                self._stuck = not mine
                self._say_turn()
        finally:
            if not mine:
                self._leave()
        return mine

    @contextmanager
    def held(self) -> Iterator[bool]:
        """``with lock.held() as mine: if not mine: ...``"""
        mine = self.acquire_to_change()
        try:
            yield mine
        finally:
            if mine:
                self.release()

    def _say_turn(self) -> None:
        if self._stuck:
            logger.warning(
                "%s has been held for %g s by another process, stopped perhaps; nothing is stored until it goes on",
                self._name,
                self._bound,
            )
        else:
            logger.info("%s is free again", self._name)

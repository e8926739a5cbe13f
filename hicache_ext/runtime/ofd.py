"""Locks on bytes of a file that belong to an open file description (OFD locks, fcntl(2)).

The kernel takes them back when the last descriptor of the description is closed, however the process ended, and shows
them to processes of any PID namespace. Two descriptions exclude each other within one process, too. A child made by
``os.fork`` inherits the description and would keep the parent's locks: ``close_in_forks`` ends that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref
from typing import Protocol

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


def try_lock_bytes(fd: int, start: int, length: int = 1) -> bool:
    """Take the write lock on these bytes, without waiting; False when another description holds one of them.

    ``fd`` must be open for writing. Raises OSError for anything else.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def unlock_bytes(fd: int, start: int, length: int = 1) -> None:
    """Raises OSError."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))


def lock_among(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """(start, length) of one lock that another description holds on some of these bytes; None where there is none.

    Reading is enough for ``fd``. Length 0 reaches to the end of any file. Raises OSError.
    """
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, found_start, found_length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))
    return None if kind == fcntl.F_UNLCK else (found_start, found_length)

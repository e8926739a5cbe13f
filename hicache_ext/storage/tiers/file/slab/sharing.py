"""Gives the memory of an index from process to process, over a Unix socket in the directory.

Each process listens at ``<its id>.sock`` (members.py). Who joins asks those that live and that it trusts
(``_is_trusted``), all at once, and takes the first answer. A socket in a directory is found by its path alone: from any
PID, network or UTS namespace that has the directory. A process that is stopped does not answer, and costs a bounded
wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from hicache_ext.runtime import ofd
from hicache_ext.runtime.access import access_in, is_for_group
from hicache_ext.runtime.background import BackgroundLoop

_GREETING = b"hicache-ext index\n"
_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("iII")
_MOST_GROUPS = 256
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.05


class IndexSharing:
    """Answers all who ask for the memory of an index, on a thread of its own, until it is closed.

    Not in a child that Python forked: it makes another one, under its own id."""

    def __init__(self, home: Path, home_fd: int, member: int, fd: int) -> None:
        """``home_fd``: the open directory ``home``. ``fd``: the memory, which belongs to this object from now on.
        Raises OSError where the file system has no sockets."""
        self._fd = fd
        self._is_inherited = False
        self._home_fd = home_fd
        self._name = _name_of(member)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=home_fd)
            # Through the descriptor: a path may be longer than a socket's name.
            self._socket.bind(f"/proc/self/fd/{home_fd}/{self._name}")
            os.chmod(self._name, access_in(home).file_mode, dir_fd=home_fd)
            self._socket.listen(64)
        except BaseException:
            self._socket.close()
            os.close(fd)
            raise
        self._loop = BackgroundLoop("hicache-index-sharing", self._serve)
        ofd.close_in_forks(self)
        self._loop.wake()

    def close(self) -> None:
        if not self._is_inherited:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._home_fd)
            with contextlib.suppress(OSError):
                # Wakes the thread.
                self._socket.shutdown(socket.SHUT_RDWR)
            self._loop.stop()
        self._socket.close()
        os.close(self._fd)

    def after_fork_in_child(self) -> None:
        # Name and socket are the parent's: to remove or shut them down would end them there.
        self._is_inherited = True
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except ConnectionError:
                continue
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    return
                # Others still come by this process, once it has a descriptor again.
                time.sleep(_PAUSE)
                continue
            with connection, contextlib.suppress(OSError):
                # It is empty: this never waits.
                socket.send_fds(connection, [_GREETING], [self._fd])


def shared_index(home_fd: int, members: Sequence[int], seconds: float) -> int | None:
    """The descriptor of the memory that these members have; None where none of them that is trusted answers within
    ``seconds``."""
    deadline = time.monotonic() + seconds
    waiting: dict[int, socket.socket] = {}
    try:
        for member in members:
            asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            asked.setblocking(False)
            try:
                asked.connect(f"/proc/self/fd/{home_fd}/{_name_of(member)}")
                trusted = _is_trusted(asked, home_fd)
            except OSError:
                # It is going, or its queue is full.
                trusted = False
            if not trusted:
                asked.close()
                continue
            waiting[asked.fileno()] = asked
        poll = select.poll()
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(1000 * left):
                fd = _received(waiting[number])
                if fd is not None:
                    return fd
                poll.unregister(number)
                waiting.pop(number).close()
    finally:
        for asked in waiting.values():
            asked.close()
    return None


def remove_left_sockets(home_fd: int, living: Sequence[int]) -> None:
    """Remove the sockets of processes that are gone. Raises OSError."""
    known = {_name_of(member) for member in living}
    for name in os.listdir(home_fd):
        if name.endswith(".sock") and name not in known:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(name, dir_fd=home_fd).st_mode):
                    os.unlink(name, dir_fd=home_fd)


def _is_trusted(asked: socket.socket, home_fd: int) -> bool:
    """Whether what the other end gives may be taken for the index of this directory: it runs under this account, root
    or the owner of the directory; or, where the directory is for a group and this account is in it, under one that is,
    too. So a tool of root believes the owner alone. Raises OSError."""
    home = os.fstat(home_fd)
    _, uid, gid = _CREDENTIALS.unpack(asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid in (0, os.geteuid(), home.st_uid):
        return True
    if not is_for_group(home) or home.st_gid not in (os.getegid(), *os.getgroups()):
        return False
    groups = asked.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    return home.st_gid in (gid, *struct.unpack(f"{len(groups) // 4}I", groups))


def _received(asked: socket.socket) -> int | None:
    try:
        greeting, fds, _, _ = socket.recv_fds(asked, len(_GREETING), 1)
    except OSError:
        return None
    if greeting == _GREETING and len(fds) == 1:
        os.set_inheritable(fds[0], False)
        return fds[0]
    for fd in fds:
        os.close(fd)
    return None


def _name_of(member: int) -> str:
    return f"{member:x}.sock"

"""The memory of an index, mapped by all processes on a directory: words that are not in any file on disk.

It is a memfd. The first process on a directory makes it; others get its descriptor over a Unix socket in the directory.
It disappears with the last process, and the next one rebuilds it from the headers of the pages (``Rebuild``). So none
of it can be damaged, cut or lost with a disk: mapping a file of a device that dies would end the process (SIGBUS).

Other processes hand it over, so a descriptor of anything else is never mapped, and the positions of slabs are checked
before use (``slab_table``). The words of the other parts are checked where they are used (index_words.py).

Its parts are as large as the directory may ever need, and take memory only where they were written: 64 bytes a slot in
``rows``, 18 to 37 in ``sets``; 1.6 MiB for the miniatures. What the words mean: index_words.py.

Each process listens at ``<its id>.sock`` (members.py). A joining process asks all live ones that it trusts
(``_is_trusted``) simultaneously, and takes the first answer. A socket in a directory is found by its path alone, from
any PID, network or UTS namespace that has the directory. A stopped process does not answer, and costs a bounded wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import math
import mmap
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from hicache_ext.runtime.access import access_in, is_for_group
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.file_lock import close_in_forks
from hicache_ext.runtime.members import living_members
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index_words import Table, Words

INDEX_FORMAT = 0x68696361 << 8 | 16
"""Processes with another format cannot share an index; they get a directory of their own (layouts.py)."""

_BLOCK = 4096
_WORD = 8
_ROW_BYTES = index_words.ROW_WORDS * _WORD
MOST_SLABS = 4096
_MOST_IDENTITIES = 1 << 20
_LEAST_ROWS = 1 << 16
_ROWS_PER_SET = 7
"""Maximum, on average: one page in a thousand finds no place among the 16 of its set and replaces a colder one."""
_BYTES_PER_GHOST = 8192
_MOST_GHOSTS = 1 << 20
_LEAST_GHOSTS = 1 << 15
_EVENTS = 1 << 12
_SMALL_SETS = 1 << 12
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
LARGEST_NUMBER = (1 << 31) - 1
LARGEST_SLOT = (1 << 32) - _BLOCK


class IndexMemory:
    """The mapped words. Threads: any."""

    def __init__(self, fd: int, *, to_change: bool = True) -> None:
        """Map the memory behind ``fd``, and close ``fd``. Raises OSError, and ValueError if it is not an index of this
        format."""
        try:
            status = os.fstat(fd)
            length = status.st_size
            if length < _HEADER_BYTES:
                raise ValueError("too short for an index")
            # A file can be cut, and huge pages can run out: accessing either would then end the process.
            if status.st_dev != _device_of_memory() or ~fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("not the sealed memory of an index")
            access = mmap.PROT_READ | (mmap.PROT_WRITE if to_change else 0)
            mapped = mmap.mmap(fd, length, mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0), access)
        finally:
            os.close(fd)
        with suppress(OSError, ValueError):
            # Keep it out of core dumps: it identifies prompts that people have sent.
            mapped.madvise(getattr(mmap, "MADV_DONTDUMP", 16))
        self._mapped = mapped
        all_words: Words = np.frombuffer(mapped, np.int64)
        self.header = all_words[: index_words.HEADER_WORDS]
        rows_most, ghost_sets = int(self.header[index_words.ROWS_MOST]), int(self.header[index_words.GHOST_SETS])
        sound = 0 < rows_most <= index_words.ROW and 0 < ghost_sets <= _MOST_GHOSTS
        if not sound or self.header[index_words.FORMAT] != INDEX_FORMAT or length != _size(rows_most, ghost_sets):
            raise ValueError("an index of another format")
        parts = [all_words[at : at + math.prod(shape)].reshape(shape) for at, shape in _parts(rows_most, ghost_sets)]
        self.slabs, self.identities, self.ghosts, self.events, self.small, self.entries, *more = parts[1:]
        self.tenants, self.sets, self.rows = more
        parts = [self.rows, self.sets, self.identities, self.events, self.header, self.small, self.tenants]
        self.table = Table(*parts, ghosts=self.ghosts, entries=self.entries)
        self._rows_at = _parts(rows_most, ghost_sets)[-1][0] * _WORD

    def close(self) -> None:
        """Release the memory once no thread uses it any more; later uses raise AttributeError."""
        for name in [name for name, part in vars(self).items() if isinstance(part, np.ndarray | Table)]:
            delattr(self, name)
        # A thread left behind keeps it mapped until it ends.
        with suppress(BufferError):
            self._mapped.close()

    def slab_table(self) -> Words:
        """Return a copy of the slabs, with impossible ones set to NO_SLAB: outside the rows, overlapping another one,
        or with an invalid number or slot size. Trust nothing else about where a slab is."""
        table = self.slabs.copy()
        number, size, slots, first = table[
            :, [index_words.SLAB_NUMBER, index_words.SLOT_SIZE, index_words.SLOTS, index_words.FIRST]
        ].T
        states = table[:, index_words.SLAB_STATE]
        there = (states > index_words.NO_SLAB) & (states <= index_words.DROPPING)
        there &= (number >= 0) & (number <= LARGEST_NUMBER)
        there &= (size > 0) & (size <= LARGEST_SLOT) & (size % _BLOCK == 0)
        there &= (slots > 0) & (slots <= len(self.rows)) & (first >= 0) & (first <= len(self.rows) - slots)
        positions = np.flatnonzero(there)
        positions = positions[first[positions].argsort(kind="stable")]
        ends = first + slots
        if (first[positions[1:]] < ends[positions[:-1]]).any():
            behind = 0
            for position in positions.tolist():
                there[position] = first[position] >= behind
                # Only valid slabs reserve their rows: otherwise new slabs that overlap an invalid one would be dropped.
                behind = int(ends[position]) if there[position] else behind
        table[~there] = 0
        return table

    def forget_rows(self, first: int, count: int) -> None:
        """Set rows to zero and release their memory; rows that nobody wrote never took any."""
        begin, end = self._rows_at + first * _ROW_BYTES, self._rows_at + (first + count) * _ROW_BYTES
        inner, behind = begin + -begin % _BLOCK, end - end % _BLOCK
        if inner < behind:
            self._mapped.madvise(mmap.MADV_REMOVE, inner, behind - inner)
            self.rows[first : first + (inner - begin) // _ROW_BYTES] = 0
            self.rows[first + count - (end - behind) // _ROW_BYTES : first + count] = 0
        else:
            self.rows[first : first + count] = 0

    def sets_for(self, slots: int) -> int:
        """Return the sets that ``slots`` want: a power of two, or some would have twice as many pages as others."""
        return max(index_words.LEAST_SETS, min(len(self.sets), _power_of_two(-(-slots // _ROWS_PER_SET))))


def new_index(capacity: int) -> int:
    """Make the memory of an empty index and return its descriptor. It has room for slabs of up to twice ``capacity``
    bytes, and more if slots are larger than a block. Raises OSError."""
    rows_most = max(_LEAST_ROWS, 2 * capacity // _BLOCK)
    rows_most += -rows_most % 512
    ghosts = min(max(capacity // _BYTES_PER_GHOST, _LEAST_GHOSTS), _MOST_GHOSTS)
    # Twice as many places as ghosts: sets fill unevenly.
    ghost_sets = -(-2 * ghosts // index_words.WAYS)
    fd = os.memfd_create("hicache-ext-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _size(rows_most, ghost_sets))
        # No receiver can cut it: access past the end would be a SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        header = np.zeros(index_words.HEADER_WORDS, np.int64)
        header[index_words.FORMAT] = INDEX_FORMAT
        header[index_words.ROWS_MOST], header[index_words.GHOST_SETS] = rows_most, ghost_sets
        header[index_words.SETS] = index_words.LEAST_SETS
        os.pwrite(fd, header.tobytes(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


@functools.cache
def _device_of_memory() -> int:
    """Return the device of all memory that ``new_index`` makes; no file has it."""
    fd = os.memfd_create("hicache-ext-device", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


def _parts(rows_most: int, ghost_sets: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return where each part begins, in words, and its shape."""
    shapes: Sequence[tuple[int, ...]] = (
        (index_words.HEADER_WORDS,),
        (MOST_SLABS, index_words.SLAB_WORDS),
        (_MOST_IDENTITIES, index_words.IDENTITY_WORDS),
        # Ghosts.
        (3, ghost_sets, index_words.WAYS),
        # A ring of uses that the miniatures have not processed; what the miniatures know; the pages they know.
        (_EVENTS, 2),
        (index_words.SMALL_WORDS,),
        (index_words.ENTRY_WORDS, _SMALL_SETS, index_words.WAYS),
        (index_words.TENANTS, index_words.TENANT_WORDS),
        # Sets and rows.
        (_power_of_two(-(-rows_most // _ROWS_PER_SET)), index_words.WAYS),
        (rows_most, index_words.ROW_WORDS),
    )
    parts, at = [], 0
    for shape in shapes:
        parts.append((at, shape))
        at += -(-math.prod(shape) // (_BLOCK // _WORD)) * (_BLOCK // _WORD)
    return parts


def _size(rows_most: int, ghost_sets: int) -> int:
    at, shape = _parts(rows_most, ghost_sets)[-1]
    return (at + math.prod(shape)) * _WORD


_HEADER_BYTES = index_words.HEADER_WORDS * _WORD


_GREETING = b"hicache-ext index\n"
_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("iII")
_MOST_GROUPS = 256
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.05
_PAUSE_OF_ASKING = 0.02


class IndexSharing:
    """Hands the memory of an index to all who ask, on a thread of its own, until it is closed.

    It does not serve in a forked child, which makes another one under its own id."""

    def __init__(self, home: Path, home_fd: int, member: int, fd: int) -> None:
        """``home_fd`` is the open directory ``home``; ``fd`` is the memory, which this object now owns. Raises OSError
        if the file system has no sockets, or the machine no thread left."""
        self._fd = fd
        self._is_inherited = False
        self._home_fd = home_fd
        self._name = _name_of(member)
        self._loop = BackgroundLoop("hicache-index-sharing", self._serve)
        with contextlib.ExitStack() as unless_served:
            unless_served.callback(os.close, fd)
            self._socket = unless_served.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=home_fd)
            # Bind through the descriptor, because the path may be too long for a socket's name.
            self._socket.bind(f"/proc/self/fd/{home_fd}/{self._name}")
            os.chmod(self._name, access_in(home).file_mode, dir_fd=home_fd)
            self._socket.listen(64)
            if not self._loop.wake():
                raise OSError(errno.EAGAIN, "no thread to be had")
            unless_served.pop_all()
        close_in_forks(self)

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
        # Name and socket belong to the parent: removing or shutting them down here would end them there.
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
                # Others can ask again once this process has a free descriptor.
                time.sleep(_PAUSE)
                continue
            with connection, contextlib.suppress(OSError):
                # The socket's buffer is empty, so this never blocks.
                socket.send_fds(connection, [_GREETING], [self._fd])


def shared_index(home_fd: int, members: Sequence[int], seconds: float) -> int | None:
    """Return the descriptor of the memory that these members share; None if no trusted one answers within
    ``seconds``."""
    deadline = time.monotonic() + seconds
    waiting: dict[int, socket.socket] = {}
    try:
        for member in members:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(f"/proc/self/fd/{home_fd}/{_name_of(member)}")
                trusted = _is_trusted(connection, home_fd)
            except OSError:
                # The member is ending, or its queue is full.
                trusted = False
            if not trusted:
                connection.close()
                continue
            waiting[connection.fileno()] = connection
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
        for connection in waiting.values():
            connection.close()
    return None


def index_of_others(home: Path, home_fd: int, seconds: float) -> tuple[int | None, list[int]]:
    """Ask the processes that use the directory ``home`` for ``shared_index`` until ``seconds`` have passed; return it
    and their ids. A process that is starting or ending has no socket, so the request is repeated."""
    deadline = time.monotonic() + seconds
    while living := living_members(home / "members"):
        left = deadline - time.monotonic()
        fd = shared_index(home_fd, living, left)
        if fd is not None or left <= 0:
            return fd, living
        time.sleep(_PAUSE_OF_ASKING)
    return None, []


def remove_left_sockets(home_fd: int, living: Sequence[int]) -> None:
    """Remove the sockets of processes that are gone. Raises OSError."""
    known = {_name_of(member) for member in living}
    for name in os.listdir(home_fd):
        if name.endswith(".sock") and name not in known:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.lstat(name, dir_fd=home_fd).st_mode):
                    os.unlink(name, dir_fd=home_fd)


def _is_trusted(connection: socket.socket, home_fd: int) -> bool:
    """Return whether to accept what the other end gives as the index of this directory: it runs as this account, root
    or the owner of the directory; or, if the directory is shared with a group that this account is in, as a member of
    that group, too. So a tool run by root trusts only root and the owner. Raises OSError."""
    home = os.fstat(home_fd)
    _, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid in (0, os.geteuid(), home.st_uid):
        return True
    if not is_for_group(home) or home.st_gid not in (os.getegid(), *os.getgroups()):
        return False
    groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    return home.st_gid in (gid, *struct.unpack(f"{len(groups) // 4}I", groups))


def _received(connection: socket.socket) -> int | None:
    try:
        greeting, fds, _, _ = socket.recv_fds(connection, len(_GREETING), 1)
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

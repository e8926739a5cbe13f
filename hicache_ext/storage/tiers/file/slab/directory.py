"""One directory of slabs: its files, and the index that all processes on it share.

::

    PATH/v3/members                             which processes use it: each locks a byte (members.py)
    PATH/v3/lock                                bytes to lock: changes of the index, joining, rebuild, notes of clears
    PATH/v3/<member>.sock                       where a process gives the index to others (index_memory.py)
    PATH/v3/slabs/<number>-<slot size>.slab     slots: the payloads of pages
    PATH/v3/slabs/<number>-<slot size>.headers  the headers of those pages, in the order of the slots
    PATH/identities/<identity>.json             the facts behind an identity digest
    PATH/identities/<identity>.cleared          time of an identity's last clear (ms): only later pages count
    PATH/identities/all.cleared                 the same for all identities

The index is only in memory (index_memory.py). All names are looked up in the directory that was opened: somebody may
have removed it since and made another one, which other processes use.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from hicache_ext.errors import IndexBusyError
from hicache_ext.runtime.access import access_in, move_aside, opened, settle
from hicache_ext.runtime.background import RETRY, BackgroundLoop, Backoff, Retry
from hicache_ext.runtime.file_lock import CHANGE_LOCK_BOUND, ChangeLock, OfdLock
from hicache_ext.runtime.members import Members
from hicache_ext.runtime.whole_file import read_small, sync_whole, write_whole
from hicache_ext.storage.tiers.file.layouts import SLAB_FILE, adopt, slab_home
from hicache_ext.storage.tiers.file.pages.tree import BLOCK
from hicache_ext.storage.tiers.file.slab.index import EVERY, SlabIndex
from hicache_ext.storage.tiers.file.slab.index_memory import (
    LARGEST_NUMBER,
    LARGEST_SLOT,
    MOST_SLABS,
    IndexMemory,
    IndexSharing,
    index_of_others,
    new_index,
    remove_left_sockets,
)
from hicache_ext.storage.tiers.file.slab.index_words import BAD_HEADERS, STATE, STATES, UNKNOWN, Words
from hicache_ext.storage.tiers.file.slab.shapes import (
    CREATED_MS,
    HEADER,
    KEY,
    PAYLOAD_LENGTH,
    Numbers,
    Slab,
    SlabFile,
    checked_headers,
    read_headers,
)

logger = logging.getLogger(__name__)

CHANGING, JOINING, REBUILDING, NOTING = range(4)
"""Bytes of PATH/v3/lock."""
_JOINING_BOUND = CHANGE_LOCK_BOUND
"""Seconds that opening waits for processes that may be stopped."""
_NO_CHANGE = "a process that changes its index does not go on: stopped, perhaps"
_REBUILD_AWAITED = 1.0
"""Seconds that opening waits for a rebuild: enough for some hundred thousand pages."""
_NOTE = re.compile(rb"([0-9]{13}) ([0-9a-f]{8})")
"""Milliseconds and their checksum."""
_LONGEST_TICK = 10
"""Milliseconds by which a file's timestamp may lag behind the clock: a tick of the kernel."""
OPEN_FILES = 512
"""Descriptors of slabs that a process keeps open per path, at most."""


class OpenFile:
    """An open file of a slab, closed when the last reference to it is gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class SlabDirectory:
    """One store's handle on a directory of slabs. Thread-safe; close it."""

    def __init__(self, path: Path, tier: str, capacity: int) -> None:
        """``capacity`` in bytes bounds the index that is made if no process has one. Raises OSError, ValueError, and
        StoreSetupError if the directory has another layout."""
        self.path = path = path.resolve()
        self.home = slab_home(path)
        self._open = functools.lru_cache(OPEN_FILES)(self._open_uncached)
        self._resources = ExitStack()
        try:
            adopt(path, "slab", tier)
            self._home_fd = self._open_directory(self.home)
            self._slabs_fd = self._open_directory(self.home / "slabs")
            self._noting = OfdLock(self.home / "lock", NOTING)
            self._resources.callback(self._noting.close)
            self.index = self._join(capacity)
            self.rebuild = Rebuild(tier, self, OfdLock(self.home / "lock", REBUILDING))
            self._resources.callback(self.rebuild.close)
        except BaseException:
            self._resources.close()
            raise
        self.rebuild.wait(_REBUILD_AWAITED)

    # -- joining and leaving ---------------------------------------------------------------------------------------

    def _join(self, capacity: int) -> SlabIndex:
        """Return the others' index, or a new one. Raises OSError (TimeoutError with a sentence), ValueError."""
        joining = OfdLock(self.home / "lock", JOINING)
        try:
            if not joining.acquire(_JOINING_BOUND):
                raise TimeoutError(
                    errno.ETIMEDOUT, "another process that is opening it does not go on: stopped, perhaps"
                )
            found: list[Slab] = []
            fd, living = index_of_others(self.home, self._home_fd, _JOINING_BOUND)
            is_new = fd is None
            if fd is None and living:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"{len(living)} processes use it and none of them gives its index: they are stopped, run under "
                    "accounts that are neither the directory's owner nor in its group, or do not share memory with "
                    "this one (another machine or virtual machine)",
                )
            if fd is None:
                found = self._found_slabs()
                fd = new_index(max(capacity, sum(slab.size for slab in found)))
            shared = fd
            self._resources.callback(os.close, shared)
            members = Members(self.home / "members")
            self._resources.callback(members.close)
            memory = IndexMemory(os.dup(shared))
            self._resources.callback(memory.close)
            lock = ChangeLock(self.home / "lock", CHANGING, f"the index of {self.path}")
            self._resources.callback(lock.close)
            lock.check_is_free(_NO_CHANGE)

            def share(member: int) -> None:
                sharing = IndexSharing(self.home, self._home_fd, member, os.dup(shared))
                self._resources.callback(sharing.close)

            index = SlabIndex(memory, lock, members, functools.partial(cleared_at, self.path), share)
            if is_new:
                index.add_found_slabs(found)
            with suppress(OSError):
                remove_left_sockets(self._home_fd, living)
            try:
                index.join()
            except IndexBusyError:
                raise TimeoutError(errno.ETIMEDOUT, _NO_CHANGE) from None
            return index
        finally:
            # Release before closing, which waits for the holder: that may be this thread.
            joining.release()
            joining.close()

    def _found_slabs(self) -> list[Slab]:
        """Return ``slabs_in`` this directory, removing what only has the name of a slab file. Raises OSError."""
        slabs, others = slabs_in(Path(f"/proc/self/fd/{self._slabs_fd}"))
        for name in others:
            try:
                os.unlink(name, dir_fd=self._slabs_fd)
            except OSError:
                with suppress(OSError):
                    move_aside(self.home / "slabs" / name)
        return slabs

    def close(self) -> None:
        """Release everything except what other processes use."""
        self._resources.close()
        self.close_files()

    def _open_directory(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._resources.callback(os.close, fd)
        return fd

    # -- files -----------------------------------------------------------------------------------------------------

    def create_slab_files(self, slab: Slab) -> None:
        """Make the files of a slab with all their blocks. Raises OSError (ENOSPC) and then leaves no file."""
        try:
            # Headers first, because a rebuild needs them.
            for file, length in ((SlabFile.HEADERS, slab.headers_size), (SlabFile.SLOTS, slab.size)):
                self.allocate(slab, file, length)
        except OSError:
            with suppress(OSError):
                self.delete_slab_files(slab)
            raise

    def allocate(self, slab: Slab, file: SlabFile, length: int) -> None:
        """Give a file of a slab this length and all its blocks, creating it if missing. Raises OSError (ENOSPC)."""
        access = access_in(self.home / "slabs")
        with opened(_name(slab, file), os.O_RDWR | os.O_CREAT, access.file_mode, dir_fd=self._slabs_fd) as fd:
            settle(fd, access.file_mode)
            if os.fstat(fd).st_size > length:
                os.ftruncate(fd, length)
            os.posix_fallocate(fd, 0, length)

    def delete_slab_files(self, slab: Slab) -> None:
        """Delete the files of a dropped slab. Their blocks are free immediately, even while others have them open."""
        failed: OSError | None = None
        for file in (SlabFile.SLOTS, SlabFile.HEADERS):
            name = _name(slab, file)
            try:
                # Others may keep it open for a while: an empty file takes no space. A non-file is only unlinked.
                with suppress(OSError), opened(name, os.O_WRONLY, dir_fd=self._slabs_fd) as fd:
                    os.ftruncate(fd, 0)
                os.unlink(name, dir_fd=self._slabs_fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def has_files(self, slab: Slab) -> bool:
        """Return whether both files exist. Raises OSError."""
        try:
            for file in (SlabFile.SLOTS, SlabFile.HEADERS):
                os.stat(_name(slab, file), dir_fd=self._slabs_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def opened(self, slab: Slab, file: SlabFile = SlabFile.SLOTS) -> Iterator[int]:
        """Yield a descriptor of a file of the slab, valid inside the block; it stays cached. Raises OSError."""
        opened = self._open(slab, file)
        yield opened.fd

    def open_all(self, slabs: Sequence[Slab], file: SlabFile, *, headers: bool) -> tuple[Words, list[OpenFile]]:
        """Open those of these slabs that can be opened. Return a row per slab for moves.c (number, descriptor, that of
        its headers or -1, first row), and the files that the caller holds while it uses the descriptors."""
        used: list[OpenFile] = []
        rows: list[tuple[int, int, int, int]] = []
        for slab in slabs:
            with suppress(OSError):
                used.append(self._open(slab, file))
                fd, headers_fd = used[-1].fd, -1
                if headers:
                    used.append(self._open(slab, SlabFile.HEADERS))
                    headers_fd = used[-1].fd
                rows.append((slab.number, fd, headers_fd, slab.first_row))
        return np.array(rows, np.int64).reshape(-1, 4), used

    def _open_uncached(self, slab: Slab, file: SlabFile) -> OpenFile:
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_DIRECT if file is SlabFile.DIRECT else 0
        return OpenFile(os.open(_name(slab, file), flags, dir_fd=self._slabs_fd))

    def close_files(self) -> None:
        """Drop all cached files of slabs when one slab is dropped. Slab numbers are unique, so a file of a slab that
        others drop does no harm: it takes no space, and leaves the cache in time."""
        self._open.cache_clear()

    # -- identities ------------------------------------------------------------------------------------------------

    def note_cleared(self, digest: bytes, moment: int) -> None:
        """Note when an identity, or EVERY one, was cleared (milliseconds), so that a rebuild does not bring its pages
        back. The note of a later clear() is kept. The note survives a power loss after ``sync_cleared``. Raises
        OSError."""
        place = _cleared_path(self.path, digest)
        if not self._noting.acquire(CHANGE_LOCK_BOUND):
            raise TimeoutError(errno.ETIMEDOUT, "a process that notes a clear() does not go on: stopped, perhaps")
        try:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(place.lstat().st_mode):
                    move_aside(place)
            if _noted(place) < moment:
                write_whole(place, _note(moment), sync=False)
        finally:
            self._noting.release()

    def sync_cleared(self, digest: bytes) -> None:
        sync_whole(_cleared_path(self.path, digest))


def slabs_in(place: Path) -> tuple[list[Slab], set[str]]:
    """Return the slabs in a directory, judged by names and sizes of both files, and the names of entries that are named
    like a slab file but are not one. Raises OSError."""
    names = {name for name in os.listdir(place) if SLAB_FILE.fullmatch(name)}
    sizes: dict[str, int] = {}
    for name in names:
        with suppress(FileNotFoundError):  # the slab was dropped meanwhile
            if stat.S_ISREG((status := os.stat(place / name, follow_symlinks=False)).st_mode):
                sizes[name] = status.st_size
    found: dict[int, Slab] = {}
    for name in sorted(sizes):
        match = SLAB_FILE.fullmatch(name)
        assert match is not None
        number, slot_size, headers = int(match[1], 16), int(match[2]), f"{name.removesuffix('slab')}headers"
        sound = match[3] == "slab" and number <= LARGEST_NUMBER and number not in found and headers in sizes
        if sound and 0 < slot_size <= LARGEST_SLOT and slot_size % BLOCK == 0 and len(found) < MOST_SLABS:
            # Either file may have been cut, or extended by a hole.
            slots = min(sizes[name] // slot_size, sizes[headers] // HEADER)
            if slots:
                found[number] = Slab(number, slot_size, slots)
                names -= {name, headers}
    return list(found.values()), names


def cleared_at(path: Path, digest: bytes) -> int:
    """Return when an identity was last cleared (ms), alone or with all: only later pages count. -1: never cleared."""
    return max(_noted(_cleared_path(path, digest)), _noted(_cleared_path(path, EVERY)))


def _cleared_path(path: Path, digest: bytes) -> Path:
    return path / "identities" / f"{digest.hex() or 'all'}.cleared"


def _noted(file: Path) -> int:
    try:
        content, written = read_small(file), file.lstat().st_mtime_ns // 1_000_000
    except OSError:
        return -1
    whole = _NOTE.fullmatch(content)
    if whole is not None and _note(int(whole[1])).encode() == content:
        return int(whole[1])
    # A damaged file still tells when it was written, at most a tick too early.
    return written + _LONGEST_TICK


def _note(moment: int) -> str:
    return f"{moment:013d} {zlib.crc32(str(moment).encode()):08x}"


def _name(slab: Slab, file: SlabFile) -> str:
    return f"{slab.number:08x}-{slab.slot_size}.{'headers' if file is SlabFile.HEADERS else 'slab'}"


# -- rebuild ----------------------------------------------------------------------------------------------------------

_PORTION = 1 << 13
"""Headers read at once: 1 MiB."""
_REBUILD_INTERVAL = 0.5
"""Seconds between two checks whether the process that rebuilds has ended."""
_LOG_INTERVAL = 10.0
_LOST = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EFBIG)
"""Errors of a slab whose files are incomplete and cannot be repaired."""
_OUR_OWN = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EINTR,
    errno.ETIMEDOUT,
    errno.EACCES,
    errno.EPERM,
)
"""Errors of this process, which say nothing about the slab."""
_MOST_FAILURES = 6
"""Attempts, over some seconds, after which a slab that fails for another reason (EIO) is given up."""


class Rebuild:
    """Rebuilds an index from the headers of the pages, in the background, while the tier serves the pages found.

    Slots not read yet are UNKNOWN: nobody reads or takes them. One process at a time rebuilds, under a lock that the
    kernel releases when the process ends; another one then continues with the remaining slabs. Payloads are checked
    when they are read.
    """

    def __init__(self, tier: str, directory: SlabDirectory, lock: OfdLock) -> None:
        self._tier = tier
        self._directory = directory
        self._index = directory.index
        self._lock = lock
        self._begun = self._logged = time.monotonic()
        self._slots = 0
        self._failures: dict[int, int] = {}
        """Slab number -> how often the slab could not be read."""
        self._bad: set[int] = set()
        """Numbers of slabs with damaged headers."""
        self._report_damage: Callable[[int], object] = lambda _: None
        self._loop = BackgroundLoop(f"hicache-{tier}-rebuild", self._step, Backoff(0.1, 5.0))
        if not self._index.rebuilt:
            self._loop.wake()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the rebuild; return False if it does not come in time."""
        deadline = time.monotonic() + seconds
        while not self._index.rebuilt:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def tell_of_damage(self, report: Callable[[int], object]) -> None:
        """Call ``report`` with the number of each slab with damaged headers, past and future."""
        self._report_damage = report
        for number in list(self._bad):
            report(number)

    def close(self) -> None:
        self._loop.stop()
        self._lock.close()

    def _step(self) -> float | Retry | None:
        if self._index.rebuilt:
            return None
        if not self._lock.try_acquire():
            return _REBUILD_INTERVAL
        try:
            slabs = self._index.unknown_slabs()
            self._slots = sum(slab.slots for slab in slabs)
            logger.info("tier %s: %s: the index is made anew: %d slots", self._tier, self._directory.path, self._slots)
            done, incomplete = 0, False
            for slab in slabs:
                if not self._scan(slab, done):
                    if self._loop.stopping:
                        return None
                    # The other slabs need not wait for it.
                    incomplete = True
                done += slab.slots
            if incomplete:
                return RETRY
            self._index.end_rebuild()
            logger.info(
                "tier %s: %s: the index is complete: %d pages in %.1f s, %d damaged headers",
                *(self._tier, self._directory.path, self._index.found, time.monotonic() - self._begun),
                self._index.memory.header[BAD_HEADERS],
            )
            return None
        except IndexBusyError:
            return RETRY
        finally:
            self._lock.release()

    def _scan(self, slab: Slab, done: int) -> bool:
        """Find the pages of one slab; return False if it is not finished."""
        try:
            self._directory.allocate(slab, SlabFile.HEADERS, slab.headers_size)
            self._directory.allocate(slab, SlabFile.SLOTS, slab.size)
            with self._directory.opened(slab, SlabFile.HEADERS) as fd:
                for begin in range(0, slab.slots, _PORTION):
                    if self._loop.stopping:
                        return False
                    count = min(_PORTION, slab.slots - begin)
                    self._adopt(slab, begin, read_headers(fd, begin, count))
                    self._log_progress(done + begin + count)
        except OSError as error:
            if not self._is_lost(slab, error):
                return False
            # Its blocks are missing or its headers cannot be read: its pages are lost, and its room becomes free.
            logger.warning("tier %s: %s: slab %d: %s", self._tier, self._directory.path, slab.number, error)
            if not self._index.drop_slab(slab):
                # One of its slots is being written.
                return False
            self._directory.delete_slab_files(slab)
            self._index.forget_slab(slab)
            return True
        self._index.end_slab(slab)
        if slab.number in self._bad:
            self._report_damage(slab.number)
        return True

    def _is_lost(self, slab: Slab, error: OSError) -> bool:
        """Return whether an error means that a slab has no blocks or is no slab, rather than that this process lacks a
        resource or that a device hiccups. A slab whose errors do not end is lost, too."""
        if error.errno in _LOST:
            return True
        self._failures[slab.number] = failures = self._failures.get(slab.number, 0) + 1
        if failures == 1:
            words = "tier %s: %s: slab %d cannot be looked at now: %s; it is tried again"
            logger.warning(words, self._tier, self._directory.path, slab.number, error)
        return failures >= _MOST_FAILURES and error.errno not in _OUR_OWN

    def _adopt(self, slab: Slab, begin: int, headers: Numbers) -> None:
        seals, valid = checked_headers(headers)
        first = slab.first_row + begin
        states = self._index.memory.rows[first : first + len(headers), STATE] & STATES
        # Headers counted by an earlier scan are no longer UNKNOWN.
        if bad := int((headers.any(axis=1) & ~valid & (states == UNKNOWN)).sum()):
            self._bad.add(slab.number)
            # Count them for all processes, which do not read the headers.
            self._index.memory.header[BAD_HEADERS] += bad
        keys = np.ascontiguousarray(headers[:, KEY])
        numbers = np.full(len(headers), -1, np.int64)
        remaining = valid.copy()
        while remaining.any():
            # All mostly have the same identity.
            words = keys[int(remaining.argmax()), :2]
            same = remaining & (keys[:, 0] == words[0]) & (keys[:, 1] == words[1])
            digest = words.tobytes()
            numbers[same] = self._index.register([digest])[digest]
            remaining &= ~same
        lengths, created = (np.ascontiguousarray(headers[:, word]) for word in (PAYLOAD_LENGTH, CREATED_MS))
        self._index.adopt(slab, begin, keys, numbers, lengths, created, seals.view(np.int64))

    def _log_progress(self, done: int) -> None:
        if time.monotonic() - self._logged >= _LOG_INTERVAL:
            self._logged = time.monotonic()
            words = "tier %s: %s: the index is made anew: %d of %d slots, %d pages"
            logger.info(words, self._tier, self._directory.path, done, self._slots, self._index.found)

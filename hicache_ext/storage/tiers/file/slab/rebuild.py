"""Makes an index anew from the headers of the pages, in the background, while the tier serves what was found so far.

Slots that were not looked at yet are UNKNOWN: nobody reads or takes them. One process at a time does it, under a lock
that the kernel takes back; when it ends, another one goes on where it was. Payloads are checked when they are read.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.errors import IndexBusyError
from hicache_ext.page import envelope
from hicache_ext.runtime.background import RETRY, BackgroundLoop, Backoff, Retry
from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import BAD_HEADERS
from hicache_ext.storage.tiers.file.slab.shapes import HEADER, Slab, SlabFile

logger = logging.getLogger(__name__)

_PORTION = 1 << 13
"""Headers read at once: 1 MiB."""
_LOOK_INTERVAL = 0.5
"""Seconds between two looks whether the process that rebuilds has ended."""
_LOG_INTERVAL = 10.0
HEADER_WORDS = HEADER // 8
KEY, PAYLOAD_LENGTH, CREATED_MS = slice(2, 8), 8, 11
"""Words of a header (docs/page-format.md)."""
_START = np.frombuffer(bytearray(envelope.PAGE_START), np.int64)

Headers = npt.NDArray[np.int64]


class SlabFiles(Protocol):
    """What a rebuild needs of a ``SlabDirectory``."""

    path: Path
    index: SlabIndex

    def allocate(self, slab: Slab, file: SlabFile, length: int) -> None: ...

    def opened(self, slab: Slab, file: SlabFile) -> AbstractContextManager[int]: ...

    def written_at(self, slab: Slab) -> float: ...

    def delete_slab_files(self, slab: Slab) -> None: ...


_LOST = (errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EFBIG)
"""Errors of a slab whose files are not whole and cannot be made so."""
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
"""Errors that say nothing of the slab."""
_MOST_FAILURES = 6
"""How often a slab may fail for another reason (EIO), over some seconds."""


class Rebuild:
    """Of one directory, until it is over or this is closed."""

    def __init__(self, tier: str, directory: SlabFiles, lock: OfdLock) -> None:
        self._tier = tier
        self._directory = directory
        self._index = directory.index
        self._lock = lock
        self._begun = self._logged = time.monotonic()
        self._slots = 0
        self._failures: dict[int, int] = {}
        """Number of a slab -> how often it could not be read."""
        self._bad: set[int] = set()
        """Numbers of slabs with damaged headers."""
        self._told: Callable[[int], object] = lambda _: None
        self._loop = BackgroundLoop(f"hicache-{tier}-rebuild", self._step, Backoff(0.1, 5.0))
        if not self._index.rebuilt:
            self._loop.wake()

    def wait(self, seconds: float) -> bool:
        """Wait for the end; False when it does not come in time."""
        deadline = time.monotonic() + seconds
        while not self._index.rebuilt:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def tell_of_damage(self, told: Callable[[int], object]) -> None:
        """Have ``told`` hear the number of each slab with damaged headers."""
        self._told = told
        for number in list(self._bad):
            told(number)

    def close(self) -> None:
        self._loop.stop()
        self._lock.close()

    def _step(self) -> float | Retry | None:
        if self._index.rebuilt:
            return None
        if not self._lock.try_acquire():
            return _LOOK_INTERVAL
        try:
            slabs = sorted(self._index.unknown_slabs(), key=self._directory.written_at, reverse=True)
            self._slots = sum(slab.slots for slab in slabs)
            logger.info("tier %s: %s: the index is made anew: %d slots", self._tier, self._directory.path, self._slots)
            done, left = 0, False
            for slab in slabs:
                if not self._look_at(slab, done):
                    if self._loop.stopping:
                        return None
                    # The others need not wait for it.
                    left = True
                done += slab.slots
            if left:
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

    def _look_at(self, slab: Slab, done: int) -> bool:
        """Find the pages of one slab; False when it is not done."""
        try:
            self._directory.allocate(slab, SlabFile.HEADERS, slab.headers_size)
            self._directory.allocate(slab, SlabFile.SLOTS, slab.size)
            with self._directory.opened(slab, SlabFile.HEADERS) as fd:
                begin = self._index.looked_at(slab)
                while begin < slab.slots:
                    if self._loop.stopping:
                        return False
                    count = min(_PORTION, slab.slots - begin)
                    self._adopt(slab, begin, read_headers(fd, begin, count))
                    begin += count
                    self._say(done + begin)
        except OSError as error:
            if not self._is_lost(slab, error):
                return False
            # Without blocks, or headers that can be read: its pages are lost, and its room is free.
            logger.warning("tier %s: %s: slab %d: %s", self._tier, self._directory.path, slab.number, error)
            if not self._index.drop_slab(slab):
                # A slot of it is being written.
                return False
            self._directory.delete_slab_files(slab)
            self._index.forget_slab(slab)
            return True
        complete = self._index.end_slab(slab)
        if complete and slab.number in self._bad:
            self._told(slab.number)
        return complete

    def _is_lost(self, slab: Slab, error: OSError) -> bool:
        """Whether an error says that a slab has no blocks, or that it is no slab; and not that this process is short of
        something, or that a device hiccups. One whose errors do not end is lost, too."""
        if error.errno in _LOST:
            return True
        self._failures[slab.number] = failures = self._failures.get(slab.number, 0) + 1
        if failures == 1:
            words = "tier %s: %s: slab %d cannot be looked at now: %s; it is tried again"
            logger.warning(words, self._tier, self._directory.path, slab.number, error)
        return failures >= _MOST_FAILURES and error.errno not in _OUR_OWN

    def _adopt(self, slab: Slab, begin: int, headers: Headers) -> None:
        seals, valid = checked_headers(headers)
        if bad := int((headers.any(axis=1) & ~valid).sum()):
            self._bad.add(slab.number)
            # For all processes: nobody else sees the headers.
            self._index.memory.header[BAD_HEADERS] += bad
        keys = np.ascontiguousarray(headers[:, KEY])
        numbers = np.full(len(headers), -1, np.int64)
        left = valid.copy()
        while left.any():
            # Mostly all are of one identity.
            words = keys[int(left.argmax()), :2]
            same = left & (keys[:, 0] == words[0]) & (keys[:, 1] == words[1])
            digest = words.tobytes()
            numbers[same] = self._index.register([digest])[digest]
            left &= ~same
        lengths, created = (np.ascontiguousarray(headers[:, word]) for word in (PAYLOAD_LENGTH, CREATED_MS))
        self._index.adopt(slab, begin, keys, numbers, lengths, created, seals.view(np.int64))

    def _say(self, done: int) -> None:
        if time.monotonic() - self._logged >= _LOG_INTERVAL:
            self._logged = time.monotonic()
            words = "tier %s: %s: the index is made anew: %d of %d slots, %d pages"
            logger.info(words, self._tier, self._directory.path, done, self._slots, self._index.found)


def read_headers(fd: int, begin: int, count: int) -> Headers:
    """So many headers, a row each, from that of slot ``begin`` on; zeros behind the end of the file. Raises OSError."""
    content = bytearray(os.pread(fd, count * HEADER, begin * HEADER))
    content.extend(bytes(count * HEADER - len(content)))
    return np.frombuffer(content, np.int64).reshape(-1, HEADER_WORDS)


class CheckHeaders(native.Arguments):
    function = "hicache_check_headers"
    _fields_ = native.words("headers header_count start seals valid")


def checked_headers(headers: Headers) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """The seals of these headers, a row each, and which of them are headers of pages."""
    seals, valid = np.zeros((len(headers), 2), np.uint64), np.zeros(len(headers), np.bool_)
    native.needed()(CheckHeaders(native.address(headers), len(headers), *map(native.address, [_START, seals, valid])))
    return seals, valid

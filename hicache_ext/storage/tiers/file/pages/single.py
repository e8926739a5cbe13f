"""Pages that are files of their own: how they are found, read, written and taken away."""

from __future__ import annotations

import enum
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext import native
from hicache_ext.page.envelope import IDENTITY_LENGTH, seal_of
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, SetResult, identities_of, key_words
from hicache_ext.storage.tiers.file.pages import page_file as page_io
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.scanning import ABSENT, occupied
from hicache_ext.storage.tiers.file.path_store import oldest_valid_ms
from hicache_ext.storage.tiers.file.usage import Usage

logger = logging.getLogger(__name__)

_WRITE_ATTEMPTS = 3
_UNHEALED_LIMIT = 65536
_NATIVE_FROM = 32
"""Keys in a look-up from which the native core looks."""


class FindPageFiles(native.Arguments):
    function = "hicache_find_page_files"
    _fields_ = native.words("keys key_count directory least oldest present")


class Found(enum.Enum):
    """What has a page's name when the page is to be written."""

    PAGE = enum.auto()
    NOTHING = enum.auto()
    OBSTACLE = enum.auto()


class PageFiles:
    """Those of one directory. Thread-safe."""

    def __init__(
        self,
        tier: str,
        directory: PageDirectory,
        usage: Usage,
        metrics: TierMetrics,
        note_error: Callable[[OSError], None],
        flags: tuple[int, int],
        ttl: float | None,
        failed_write: Callable[[str, OSError], SetResult],
    ) -> None:
        """``flags``: of preadv2 and of pwritev2. ``failed_write`` says what became of a page that was not written."""
        self._tier = tier
        self._directory = directory
        self._usage = usage
        self._metrics = metrics
        self._note_error = note_error
        self._read_flags, self._write_flags = flags
        self._ttl = ttl
        self._failed_write = failed_write
        self._pages_text = str(directory.pages)
        # Loaded now, and not in front of the first look-up.
        native.core()
        # Paths under which this process found no page it could read, and which it could not free: absent to callers,
        # freed by the next write where that has become possible.
        self._unhealed: set[str] = set()

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, key: bytes, segments: Sequence[memoryview]) -> GetResult:
        path = self._directory.page_path(key)
        size = page_io.object_size(segments)
        try:
            # O_NONBLOCK: opening a pipe that has a page's name would wait for its writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except ABSENT:
            return GetResult.MISS
        except OSError as error:
            if error.errno not in page_io.UNREADABLE:
                return self._failed_read(path, error)
            self._heal(key, path, size, "unreadable")
            return GetResult.CORRUPT
        try:
            status = os.fstat(fd)
            reason = page_io.read_page(fd, status, key, segments, self._read_flags, oldest_valid_ms(self._ttl))
            if reason is None:
                self._touch(fd, status)
            elif reason != page_io.EXPIRED and page_io.is_page(fd, status, key, segments):
                # Damaged on the way here, by a network, a cache or this machine's memory: the page is not ours alone.
                self._metrics.add("suspect", "good")
                return GetResult.CORRUPT
        except OSError as error:
            return self._failed_read(path, error)
        finally:
            os.close(fd)
        if reason is None:
            self._unhealed.discard(path)
            return GetResult.HIT
        if reason == page_io.EXPIRED:
            self._remove_expired(key, path, size, status)
            return GetResult.MISS
        self._heal(key, path, size, reason, status)
        return GetResult.CORRUPT

    def _touch(self, file: int | str, status: os.stat_result) -> None:
        """Renew a page's recency."""
        if time.time() - status.st_mtime > page_io.TOUCH_INTERVAL:
            try:
                os.utime(file)
            except OSError as error:
                self._note_error(error)

    def _failed_read(self, path: str, error: OSError) -> GetResult:
        self._note_error(error)
        # Whether one block or the whole device is bad, this page cannot be had: the next write may replace it.
        self._remember_unhealed(path)
        logger.debug("tier %s: reading %s: %s", self._tier, path, error)
        return GetResult.ERROR

    def _heal(self, key: bytes, path: str, size: int, reason: str, seen: os.stat_result | None = None) -> bool:
        """Remove a copy that is not the page its name says, so that the next write replaces it; False when it stays.

        ``seen`` is the status of the file that was found bad: one that has replaced it since is left alone.
        """
        self._metrics.add("corrupt", reason)
        try:
            self._remove_page(key, path, size, seen)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note_error(error)
            self._remember_unhealed(path)
            logger.warning("tier %s: %s is bad (%s) and cannot be removed: %s", self._tier, path, reason, error)
            return False
        self._unhealed.discard(path)
        logger.warning("tier %s: %s was bad (%s) and is removed", self._tier, path, reason)
        return True

    def _remember_unhealed(self, path: str) -> None:
        if len(self._unhealed) >= _UNHEALED_LIMIT:
            self._unhealed.clear()
        self._unhealed.add(path)

    def _remove_page(self, key: bytes, path: str, size: int | None, seen: os.stat_result | None = None) -> None:
        """Free a page's name, and the account of the page's ``size`` if it is known.

        Raises OSError as ``PageDirectory.remove_page`` does.
        """
        with self._usage.removing() as removal:
            found = self._directory.remove_page(path, seen)
            # A damaged file must not take more out of the account than its page once put in.
            removal.freed = occupied(found if size is None else min(found, size))
            removal.uncertain = size is not None and found != size

    def remove_copy(self, key: bytes, page_seal: bytes) -> bool:
        """Remove a page if it is the one with this ``envelope.page_seal``; whether it was. Raises OSError."""
        path = self._directory.page_path(key)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status, header = os.fstat(fd), os.pread(fd, page_io.HEADER_LENGTH, 0)
        finally:
            os.close(fd)
        if seal_of(header) != page_seal:
            return False
        self._remove_page(key, path, None, status)
        return True

    # -- presence --------------------------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are files of their own."""
        core = native.core() if len(keys) >= _NATIVE_FROM else None
        if core is None:
            return [self._present(key) for key in keys]
        # Each call of the system by itself would give the GIL to whoever computes, for milliseconds each time.
        present = self._found_by(core, keys)
        if self._unhealed:
            paths = [self._directory.page_path(key) if known else "" for key, known in zip(keys, present, strict=True)]
            present = [known and path not in self._unhealed for known, path in zip(present, paths, strict=True)]
        return present

    def _found_by(self, core: native.Core, keys: Sequence[bytes]) -> list[bool]:
        """As ``_present``, but for what is unhealed. Raises OSError where the directory of an identity cannot be looked
        into."""
        oldest = 0 if self._ttl is None else math.ceil(time.time() - self._ttl)
        present, words = np.zeros(len(keys), np.bool_), key_words(keys)
        identities = identities_of(keys)
        for identity in identities:
            which: Any = slice(None)
            if len(identities) > 1:
                which = (words[:, : IDENTITY_LENGTH // 8] == np.frombuffer(identity, np.int64)).all(axis=1)
            try:
                directory = os.open(f"{self._pages_text}/{identity.hex()}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                continue
            some = words[which]
            found = np.zeros(len(some), np.bool_)
            try:
                of_core = native.address(some), len(some), directory, page_io.HEADER_LENGTH, oldest
                core(FindPageFiles(*of_core, native.address(found)))
            finally:
                os.close(directory)
            present[which] = found
        answers: list[bool] = present.tolist()
        return answers

    def _present(self, key: bytes) -> bool:
        path = self._directory.page_path(key)
        try:
            status = os.lstat(path)
        except OSError:
            return False
        if self._ttl is not None and status.st_mtime < time.time() - self._ttl:
            # Not even used since. When it was written only the page itself tells: an expired page that was used lately
            # counts as present until it is read or swept.
            return False
        return status.st_size >= page_io.HEADER_LENGTH and stat.S_ISREG(status.st_mode) and path not in self._unhealed

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, key: bytes, segments: Sequence[memoryview]) -> tuple[SetResult, int]:
        """Write one page; its result and the bytes of disk that took, with directories and also when it failed."""
        path = self._directory.page_path(key)
        added = 0
        for attempt in range(1, _WRITE_ATTEMPTS + 1):
            try:
                for made in self._directory.create_parent(path):
                    added += made
                stored = page_io.write_page(self._directory, path, key, segments, self._write_flags)
            except ABSENT as error:
                # clear() or an eviction took the directory away in between.
                if attempt == _WRITE_ATTEMPTS:
                    return self._failed_write(path, error), added
                self._directory.clear_the_way(path)
            except OSError as error:
                return self._failed_write(path, error), added
            else:
                if not stored:
                    return SetResult.EXISTS, added
                return SetResult.STORED, added + occupied(page_io.object_size(segments))
        raise AssertionError("unreachable")

    def find(self, key: bytes, size: int) -> Found:
        """What has this page's name; anything but a page of this size is removed where it can be."""
        path = self._directory.page_path(key)
        try:
            status = os.lstat(path)
        except OSError:
            return Found.NOTHING
        if path in self._unhealed:
            return Found.NOTHING if self._heal(key, path, size, "unreadable") else Found.OBSTACLE
        if self._expired(path, status):
            return Found.NOTHING if self._remove_expired(key, path, size, status) else Found.OBSTACLE
        if status.st_size == size and stat.S_ISREG(status.st_mode):
            self._touch(path, status)
            return Found.PAGE
        return Found.NOTHING if self._heal(key, path, size, "length") else Found.OBSTACLE

    # -- removal ---------------------------------------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """True, or FileNotFoundError. Raises OSError."""
        self._remove_page(key, self._directory.page_path(key), None)
        return True

    def remove_expired(self, loop: BackgroundLoop) -> int:
        """Remove the pages older than the ttl, until ``loop`` is stopped; how many that were."""
        removed = 0
        for fan_out in self._directory.fan_out_directories():
            identity = bytes.fromhex(Path(fan_out).parent.name)
            for path, status in self._directory.page_files(fan_out):
                if loop.stopping:
                    return removed
                if self._expired(path, status):
                    key = identity + bytes.fromhex(Path(path).stem)
                    removed += self._remove_expired(key, path, status.st_size, status)
        return removed

    def _expired(self, path: str, status: os.stat_result) -> bool:
        if self._ttl is None or not stat.S_ISREG(status.st_mode):
            return False
        # The mtime is that of the last use: never before the page was written.
        return status.st_mtime < time.time() - self._ttl or page_io.created_before(path, oldest_valid_ms(self._ttl))

    def _remove_expired(self, key: bytes, path: str, size: int, status: os.stat_result) -> bool:
        """False when it stays."""
        try:
            self._remove_page(key, path, size, status)
        except FileNotFoundError:
            # Somebody was faster; what has the name now is another page.
            return True
        except OSError as error:
            self._note_error(error)
            return False
        self._metrics.add("evicted", "ttl")
        return True

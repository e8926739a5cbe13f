"""The per-page-file layout of the file tier: one file per page, for file systems that several machines share.

No index and no mapped memory, only what NFS, Lustre and 3FS keep their word on: create, link, rename, unlink, flock.
Pages of a batch are read and written in parallel by a few threads, straight into and out of host memory (preadv and
pwritev release the GIL). A page gets its name only when it is whole.
"""

from __future__ import annotations

import enum
import errno
import logging
import math
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import StoreSetupError
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.device_probe import flags_of
from hicache_ext.storage.tiers.file.expiry import oldest_valid_ms
from hicache_ext.storage.tiers.file.pages import page_file as page_io
from hicache_ext.storage.tiers.file.pages.contents import TreeContents
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.eviction import Evictor
from hicache_ext.storage.tiers.file.pages.tree import ABSENT, BLOCK, occupied
from hicache_ext.storage.tiers.file.pages.upkeep import Upkeep
from hicache_ext.storage.tiers.file.path_store import Fullness, PathStore
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.slab.loading import compiled_code
from hicache_ext.storage.tiers.file.usage import Grant, Removal, Usage

logger = logging.getLogger(__name__)

_TOUCH_INTERVAL = 60.0
"""Seconds between two renewals of a page's recency (its mtime): eviction needs no finer order."""
_EVICTION_SHARE = 1 / 16
"""Share of the capacity freed at once, so that the walk is paid for by many batches."""
_NO_SPACE_PAUSE = 1.0
"""Seconds without writes after the file system said that it is full."""

_PORTIONS = 8
"""A write takes at most this part of the capacity at once, so that several processes can have one under way."""
_WRITE_ATTEMPTS = 3
_UNHEALED_LIMIT = 65536
_FAN_OUTS_COUNTED = 64
"""Fan-out directories listed to say how many pages there are: hashes fill all of them evenly."""
_COUNT_INTERVAL = 60.0
"""Seconds between two such counts."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO)
"""Errors of open() that say: what has this page's name is nothing this tier can have written and may read."""


_COMPILED_FROM = 32
"""Keys in a look-up from which compiled code looks."""
_LEADING_AT_ONCE = 1024


class _Found(enum.Enum):
    """What has a page's name when the page is to be written."""

    PAGE = enum.auto()
    NOTHING = enum.auto()
    OBSTACLE = enum.auto()


class PageFileStore(PathStore):
    """PageStore over one directory."""

    layout = "pages"
    removes_expired = True

    def _open(self, path: Path, evicted_age: RecentMean) -> None:
        # Headers of 128 bytes exclude O_DIRECT.
        self._read_flags, self._write_flags = flags_of(self._plan.read), flags_of(self._plan.write)
        self._directory = PageDirectory(path, self.name)
        self._pages_text = str(self._directory.pages)
        # Loaded now, and not in front of the first look-up.
        compiled_code()
        self._resources.callback(self._directory.close)
        self._open_account()
        self._pins = PinnedPages(self.name, path, _pin_limit(self._capacity), self._directory.occupied_by)
        self._evictor = Evictor(self._directory, self.metrics, self._pins, evicted_age)
        self._contents = TreeContents(self._directory)
        self._no_writes_until = 0.0
        self._pages = 0
        self._count_pages_at = 0.0
        # Paths under which this process found no page it could read, and which it could not free: absent to callers,
        # freed by the next write where that has become possible.
        self._unhealed: set[str] = set()

    def _open_account(self) -> None:
        directory = self._directory
        path = directory.path / "usage"
        try:
            self._usage = Usage(path, directory.members, directory.members_path, directory.writers)
            self._resources.callback(self._usage.close)
            self._resources.callback(Upkeep(self.name, directory, self._usage).close)
        except OSError as error:
            raise StoreSetupError(self.name, f"account {str(path)!r}: {error.strerror or error}") from error

    def _block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        return self._contents.block_hashes(digest)

    def resize(self, capacity: int | None) -> None:
        """Pages beyond the capacity are evicted by the next write."""
        super().resize(capacity)
        self._pins.set_limit(_pin_limit(capacity))

    def used_bytes(self) -> int:
        """Bytes of disk that pages and reservations take, over all processes."""
        return self._usage.used(self._capacity)

    def fullness(self) -> Fullness:
        """The number of pages is exact in a small directory and estimated in a large one. Raises OSError."""
        with self._calls:
            used, capacity = self.used_bytes(), self._capacity
            if capacity is None:
                disk = os.statvfs(self._directory.path)
                free = disk.f_bavail * disk.f_frsize
            else:
                free = max(0, capacity - used)
            if time.monotonic() >= self._count_pages_at:
                self._pages = self._directory.count_pages(_FAN_OUTS_COUNTED)
                self._count_pages_at = time.monotonic() + _COUNT_INTERVAL
            return Fullness(capacity, used, free, self._pages)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        return self._workers.run(len(batch), lambda i: self._get_page(batch.keys[i], batch.buffers[i]))

    def _get_page(self, key: bytes, segments: Sequence[memoryview]) -> GetResult:
        path = self._directory.page_path(key)
        size = page_io.object_size(segments)
        try:
            # O_NONBLOCK: opening a pipe that has a page's name would wait for its writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except ABSENT:
            return GetResult.MISS
        except OSError as error:
            if error.errno not in _UNREADABLE:
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
                self.metrics.add("suspect", "good")
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
        if time.time() - status.st_mtime > _TOUCH_INTERVAL:
            try:
                os.utime(file)
            except OSError as error:
                self._count_error(error)

    def _failed_read(self, path: str, error: OSError) -> GetResult:
        self._count_error(error)
        # Whether one block or the whole device is bad, this page cannot be had: the next write may replace it.
        self._remember_unhealed(path)
        logger.debug("tier %s: reading %s: %s", self.name, path, error)
        return GetResult.ERROR

    def _heal(self, key: bytes, path: str, size: int, reason: str, seen: os.stat_result | None = None) -> bool:
        """Remove a copy that is not the page its name says, so that the next write replaces it; False when it stays.

        ``seen`` is the status of the file that was found bad: one that has replaced it since is left alone.
        """
        self.metrics.add("corrupt", reason)
        try:
            self._remove_page(key, path, size, seen)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._count_error(error)
            self._remember_unhealed(path)
            logger.warning("tier %s: %s is bad (%s) and cannot be removed: %s", self.name, path, reason, error)
            return False
        self._unhealed.discard(path)
        logger.warning("tier %s: %s was bad (%s) and is removed", self.name, path, reason)
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

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        code = compiled_code() if len(keys) >= _COMPILED_FROM else None
        if code is None:
            return [self._present(key) for key in keys]
        # Each call of the system by itself would give the GIL to whoever computes, for milliseconds each time.
        oldest = 0 if self._ttl is None else math.ceil(time.time() - self._ttl)
        present: list[bool] = (
            code.has_page_files(self._pages_text, keys, page_io.HEADER_LENGTH, oldest).astype(bool).tolist()
        )
        if self._unhealed:
            paths = [self._directory.page_path(key) if known else "" for key, known in zip(keys, present, strict=True)]
            present = [known and path not in self._unhealed for known, path in zip(present, paths, strict=True)]
        return present

    def _lead(self, keys: Sequence[bytes]) -> int:
        for first in range(0, len(keys), _LEADING_AT_ONCE):
            present = self._has(keys[first : first + _LEADING_AT_ONCE])
            if False in present:
                return first + present.index(False)
        return len(keys)

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

    def _write(self, batch: PageBatch) -> list[SetResult]:
        sizes = [page_io.object_size(segments) for segments in batch.buffers]
        results = [SetResult.REJECTED] * len(batch)
        missing: list[int] = []
        for position, (key, size) in enumerate(zip(batch.keys, sizes, strict=True)):
            match self._find_stored(key, size):
                case _Found.PAGE:
                    results[position] = SetResult.EXISTS
                case _Found.NOTHING:
                    missing.append(position)
                case _Found.OBSTACLE:
                    self.metrics.add("rejected", "obstacle")
        if time.monotonic() < self._no_writes_until:
            self.metrics.add("rejected", "no_space", len(missing))
            return results
        self._set_missing(batch, sizes, missing, results)
        return results

    def _set_missing(self, batch: PageBatch, sizes: list[int], positions: list[int], results: list[SetResult]) -> None:
        """Write the pages at ``positions`` within the capacity, in portions that the capacity can hold."""
        for portion in self._portions(positions, sizes, _room, _PORTIONS):
            reserved = sum(_room(sizes[i]) for i in portion)
            try:
                grant = self._usage.reserve(reserved, self._capacity, self._evict)
            except OSError as error:
                self._count_error(error)
                for position in portion:
                    results[position] = SetResult.ERROR
                continue
            if grant is not Grant.GRANTED:
                self.metrics.add("rejected", "capacity" if grant is Grant.NO_ROOM else "held", len(portion))
                continue
            stored = 0
            try:
                for position, (result, added) in zip(portion, self._set_pages(batch, portion), strict=True):
                    results[position] = result
                    stored += added
            finally:
                self._usage.commit(reserved, stored)

    def _set_pages(self, batch: PageBatch, positions: list[int]) -> list[tuple[SetResult, int]]:
        return self._workers.run(
            len(positions), lambda n: self._set_page(batch.keys[positions[n]], batch.buffers[positions[n]])
        )

    def _set_page(self, key: bytes, segments: Sequence[memoryview]) -> tuple[SetResult, int]:
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

    def _failed_write(self, path: str, error: OSError) -> SetResult:
        self._count_error(error)
        if error.errno in _NO_SPACE:
            if time.monotonic() >= self._no_writes_until:
                logger.warning("tier %s: no space left for %s; writes pause %.0f s", self.name, path, _NO_SPACE_PAUSE)
            self._no_writes_until = time.monotonic() + _NO_SPACE_PAUSE
            return SetResult.REJECTED
        logger.debug("tier %s: writing %s: %s", self.name, path, error)
        return SetResult.ERROR

    def _find_stored(self, key: bytes, size: int) -> _Found:
        """What has this page's name; anything but a page of this size is removed where it can be."""
        path = self._directory.page_path(key)
        try:
            status = os.lstat(path)
        except OSError:
            return _Found.NOTHING
        if path in self._unhealed:
            return _Found.NOTHING if self._heal(key, path, size, "unreadable") else _Found.OBSTACLE
        if self._expired(path, status):
            return _Found.NOTHING if self._remove_expired(key, path, size, status) else _Found.OBSTACLE
        if status.st_size == size and stat.S_ISREG(status.st_mode):
            self._touch(path, status)
            return _Found.PAGE
        return _Found.NOTHING if self._heal(key, path, size, "length") else _Found.OBSTACLE

    def _evict(self, need: int) -> Iterator[int]:
        return self._evictor.evict(need, int((self._capacity or 0) * _EVICTION_SHARE))

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        removed = 0
        for key in keys:
            try:
                self._remove_page(key, self._directory.page_path(key), None)
                removed += 1
            except ABSENT:
                continue
            except OSError as error:
                self._count_error(error)
        return removed

    def remove_expired(self, loop: BackgroundLoop) -> int:
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
            self._count_error(error)
            return False
        self.metrics.add("evicted", "ttl")
        return True

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Out of sight at once, for everybody: the trees of these identities are moved away, then deleted."""
        wanted = self._directory.known_identities() if digests is None else digests
        had_pages, failed = 0, None
        for digest in wanted:
            try:
                had_pages += self._detach(digest)
            except OSError as error:
                # The others are cleared all the same.
                self._count_clearing(error, digest.hex())
                failed = error
        if failed is not None:
            raise failed
        return had_pages

    def _detach(self, digest: bytes) -> bool:
        """Whether the identity had pages. Raises OSError."""
        with ExitStack() as operation:
            # Under way before the tree moves: killed from here on, the account is known to be off.
            removal = operation.enter_context(self._usage.detaching())
            tree = self._directory.detach_identity(digest)
            if tree is None:
                return False
            had_pages = self._directory.has_pages(tree)
            self._clearing.clear([digest], partial(self._delete, tree, removal, operation.pop_all()))
            return had_pages

    def _delete(self, tree: Path, removal: Removal, operation: ExitStack, _: Cleared) -> None:
        try:
            with operation:
                removal.freed = self._directory.delete_detached(tree)
        except OSError as error:
            self._count_clearing(error, str(tree))

    def _count_clearing(self, error: OSError, what: str) -> None:
        self.count_error(error)
        logger.warning("tier %s: clearing %s: %s", self.name, what, error)


def _room(size: int) -> int:
    """Bytes of disk reserved for a page file: with its directories in full, corrected by what was really made."""
    return occupied(size) + 2 * BLOCK


def _pin_limit(capacity: int | None) -> int | None:
    return None if capacity is None else capacity // 2

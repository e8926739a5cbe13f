"""The per-page-file layout of the file tier: one file per page, for file systems that several machines share.

No index and no mapped memory, only what NFS, Lustre and 3FS keep their word on: create, link, rename, unlink, flock.
Pages of a batch are read and written in parallel by a few threads, straight into and out of host memory (preadv and
pwritev release the GIL). A page gets its name only when it is whole.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from hicache_ext import envelope
from hicache_ext.errors import StoreClosedError
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.file import vectored
from hicache_ext.storage.file.directory import BLOCK, PageDirectory, occupied
from hicache_ext.storage.file.usage import Usage
from hicache_ext.storage.store import GetResult, PageBatch, SetResult, StoreInfo

logger = logging.getLogger(__name__)

DEFAULT_THREADS = 4

_HEADER_LENGTH = envelope.FIELDS_LENGTH
_TOUCH_INTERVAL = 60.0
"""Seconds between two renewals of a page's recency (its mtime): eviction needs no finer order."""
_EVICTION_SAMPLE = 4096
"""Page files looked at to find the oldest; a directory with fewer is evicted in exact order of recency."""
_EVICTION_SHARE = 1 / 16
"""Share of the capacity freed at once, so that the walk is paid for by many batches."""
_NO_SPACE_PAUSE = 1.0
"""Seconds without writes after the file system said that it is full."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP)
"""Errors of open() that say: what has this page's name is nothing this tier can have written and may read."""

_Answer = TypeVar("_Answer", GetResult, SetResult)


class PageFileStore:
    """PageStore over one or several directories; pages are spread by page hash, the capacity evenly.

    Threads: any. Memory of a batch is touched only until the call returns: the workers of a call are always awaited.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        *,
        capacity: int | None,
        threads: int | None = None,
    ) -> None:
        """``capacity`` in bytes for all paths and processes together, None without a limit.

        Raises StoreSetupError when a directory cannot be used.
        """
        self._name = name
        self._metrics = TierMetrics(name)
        self._capacity = capacity
        self._capacity_per_path = None if capacity is None else capacity // len(paths)
        self._directories = [PageDirectory(path, name) for path in paths]
        self._usages = [Usage(directory.path / "usage", directory.count_occupied) for directory in self._directories]
        self._threads = threads or DEFAULT_THREADS
        self._workers = ThreadPoolExecutor(self._threads, thread_name_prefix=f"hicache-{name}")
        self._no_writes_until = 0.0
        self._undeletable: set[str] = set()
        self._cleaners: list[threading.Thread] = []
        self._calls = _CallGate(name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def metrics(self) -> TierMetrics:
        return self._metrics

    def describe(self) -> StoreInfo:
        return StoreInfo(
            name=self._name,
            type="file",
            shared=False,
            details={
                "layout": "pages",
                "paths": [str(directory.path) for directory in self._directories],
                "capacity": self._capacity,
                "threads": self._threads,
            },
        )

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        for directory in self._directories:
            try:
                directory.save_identity(digest, document)
            except OSError as error:
                logger.warning("tier %s: identity %s not recorded: %s", self._name, digest.hex(), error)

    def used_bytes(self) -> int:
        """Bytes of disk that pages and reservations take, over all paths and processes."""
        return sum(usage.total() for usage in self._usages)

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self._calls:
            results = self._in_parallel(len(batch), lambda i: self._get_page(batch.keys[i], batch.buffers[i]))
        self._metrics.add_many("get", Counter(result.value for result in results))
        self._metrics.add(
            "bytes", "get", sum(batch.payload_bytes(i) for i, r in enumerate(results) if r is GetResult.HIT)
        )
        return results

    def _get_page(self, key: bytes, segments: Sequence[memoryview]) -> GetResult:
        directory = self._directory(key)
        path = directory.page_path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return GetResult.MISS
        except OSError as error:
            if error.errno not in _UNREADABLE:
                return self._failed_read(path, error)
            self._heal(key, path, "unreadable")
            return GetResult.CORRUPT
        try:
            reason = self._read_page(fd, key, segments)
        except IsADirectoryError:
            reason = "not_a_file"
        except OSError as error:
            return self._failed_read(path, error)
        finally:
            os.close(fd)
        if reason is None:
            return GetResult.HIT
        self._heal(key, path, reason)
        return GetResult.CORRUPT

    def _read_page(self, fd: int, key: bytes, segments: Sequence[memoryview]) -> str | None:
        """Read and check one page; the reason why it is not the page, None when it is."""
        status = os.fstat(fd)
        header = bytearray(_HEADER_LENGTH)
        expected = _HEADER_LENGTH + sum(segment.nbytes for segment in segments)
        if vectored.read_into(fd, [memoryview(header), *segments], 0) != expected:
            return "truncated"
        if status.st_size != expected:
            return "longer"
        reason = envelope.reason_to_refuse(header, key, segments)
        if reason is None:
            self._touch(fd, status)
        return reason

    def _touch(self, file: int | str, status: os.stat_result) -> None:
        """Renew a page's recency."""
        if time.time() - status.st_mtime > _TOUCH_INTERVAL:
            try:
                os.utime(file)
            except OSError as error:
                self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))

    def _failed_read(self, path: str, error: OSError) -> GetResult:
        self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
        logger.debug("tier %s: reading %s: %s", self._name, path, error)
        return GetResult.ERROR

    def _heal(self, key: bytes, path: str, reason: str) -> None:
        """Remove a copy that is not the page its name says, so that the next write replaces it."""
        self._metrics.add("corrupt", reason)
        try:
            freed = self._directory(key).remove_page(path)
            self._usage(key).removed(freed)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
        logger.warning("tier %s: %s was bad (%s) and is removed", self._name, path, reason)

    # -- presence --------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._calls:
            return [self._present(key) for key in keys]

    def count_leading(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            for position, key in enumerate(keys):
                if not self._present(key):
                    return position
        return len(keys)

    def _present(self, key: bytes) -> bool:
        try:
            return os.stat(self._directory(key).page_path(key)).st_size >= _HEADER_LENGTH
        except OSError:
            return False

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, batch: PageBatch) -> list[SetResult]:
        with self._calls:
            results = self._set(batch)
        self._metrics.add_many("set", Counter(result.value for result in results))
        self._metrics.add(
            "bytes", "set", sum(batch.payload_bytes(i) for i, r in enumerate(results) if r is SetResult.STORED)
        )
        return results

    def _set(self, batch: PageBatch) -> list[SetResult]:
        sizes = [_HEADER_LENGTH + batch.payload_bytes(i) for i in range(len(batch))]
        results = [
            SetResult.EXISTS if self._already_stored(key, size) else SetResult.REJECTED
            for key, size in zip(batch.keys, sizes, strict=True)
        ]
        missing = [i for i, result in enumerate(results) if result is not SetResult.EXISTS]
        if time.monotonic() < self._no_writes_until:
            self._metrics.add("rejected", "no_space", len(missing))
            return results
        for number in range(len(self._directories)):
            positions = [i for i in missing if self._directory_number(batch.keys[i]) == number]
            self._set_in_directory(number, batch, sizes, positions, results)
        return results

    def _set_in_directory(
        self, number: int, batch: PageBatch, sizes: list[int], positions: list[int], results: list[SetResult]
    ) -> None:
        """Write the pages at ``positions`` within the capacity, in portions that the capacity can hold."""
        for portion in self._portions(positions, sizes):
            # The fan-out directories of new pages are charged in full and corrected by what was really made.
            reserved = sum(occupied(sizes[i]) + 2 * BLOCK for i in portion)
            if not self._usages[number].reserve(reserved, self._capacity_per_path, self._make_room(number)):
                self._metrics.add("rejected", "capacity", len(portion))
                continue
            stored = 0
            try:
                written = self._in_parallel(len(portion), lambda n: self._set_page(batch, portion[n]))  # noqa: B023
                for position, (result, added) in zip(portion, written, strict=True):
                    results[position] = result
                    stored += added
            finally:
                self._usages[number].commit(reserved, stored)

    def _portions(self, positions: list[int], sizes: list[int]) -> list[list[int]]:
        """``positions`` cut so that no portion needs more than half the capacity of a path."""
        limit = None if self._capacity_per_path is None else self._capacity_per_path // 2
        portions: list[list[int]] = []
        filled = 0
        for position in positions:
            need = occupied(sizes[position]) + 2 * BLOCK
            if not portions or (limit is not None and filled + need > limit):
                portions.append([])
                filled = 0
            portions[-1].append(position)
            filled += need
        return portions

    def _set_page(self, batch: PageBatch, position: int) -> tuple[SetResult, int]:
        """Write one page; its result and the bytes of disk it added."""
        key, segments = batch.keys[position], batch.buffers[position]
        directory = self._directory(key)
        path = directory.page_path(key)
        try:
            return self._write_page(directory, path, key, segments)
        except FileNotFoundError:
            # clear() took the directory away in between.
            try:
                return self._write_page(directory, path, key, segments)
            except OSError as error:
                return self._failed_write(path, error), 0
        except OSError as error:
            return self._failed_write(path, error), 0

    def _write_page(
        self, directory: PageDirectory, path: str, key: bytes, segments: Sequence[memoryview]
    ) -> tuple[SetResult, int]:
        added = directory.create_parent(path)
        header = envelope.encode_header(key, segments, header_length=_HEADER_LENGTH)
        fd, temp_path = directory.open_unpublished(path)
        published = False
        try:
            written = vectored.write_from(fd, [memoryview(header), *segments], 0)
            if written != len(header) + sum(segment.nbytes for segment in segments):
                raise OSError(errno.ENOSPC, "short write")
            published = directory.publish(fd, temp_path, path)
        finally:
            os.close(fd)
            if not published:
                directory.discard(temp_path)
        return (SetResult.STORED, added + occupied(written)) if published else (SetResult.EXISTS, added)

    def _failed_write(self, path: str, error: OSError) -> SetResult:
        self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
        if error.errno in _NO_SPACE:
            if time.monotonic() >= self._no_writes_until:
                logger.warning("tier %s: no space left for %s; writes pause %.0f s", self._name, path, _NO_SPACE_PAUSE)
            self._no_writes_until = time.monotonic() + _NO_SPACE_PAUSE
            return SetResult.REJECTED
        logger.debug("tier %s: writing %s: %s", self._name, path, error)
        return SetResult.ERROR

    def _already_stored(self, key: bytes, size: int) -> bool:
        """Whether a page of this size is there; anything else under its name is removed."""
        path = self._directory(key).page_path(key)
        try:
            status = os.lstat(path)
        except OSError:
            return False
        if status.st_size == size and stat.S_ISREG(status.st_mode):
            self._touch(path, status)
            return True
        self._heal(key, path, "length")
        return False

    # -- eviction --------------------------------------------------------------------------------------------------

    def _make_room(self, number: int) -> Callable[[int], int]:
        assert self._capacity_per_path is None or self._capacity_per_path >= 0
        share = int((self._capacity_per_path or 0) * _EVICTION_SHARE)
        return lambda need: self._evict(self._directories[number], max(need, share))

    def _evict(self, directory: PageDirectory, need: int) -> int:
        """Remove the pages not used for longest until ``need`` bytes are free; bytes freed.

        The order is exact in a small directory. In a large one it is that of a random sample of fan-out directories,
        which hashes fill evenly.
        """
        freed = evicted = 0
        fan_outs = directory.fan_out_directories()
        random.shuffle(fan_outs)
        remaining = iter(fan_outs)
        while freed < need:
            sample: list[tuple[float, str, int]] = []
            for fan_out in remaining:
                for path, status in directory.page_files(fan_out):
                    if path not in self._undeletable:
                        sample.append((status.st_mtime, path, occupied(status.st_size)))
                if len(sample) >= _EVICTION_SAMPLE:
                    break
            if not sample:
                break
            sample.sort()
            for _, path, size in sample:
                if freed >= need:
                    break
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    # One file that cannot be removed must not wedge eviction for ever.
                    self._undeletable.add(path)
                    self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
                    continue
                freed += size
                evicted += 1
        self._metrics.add("evicted", "capacity", evicted)
        self._metrics.add("bytes", "evicted", freed)
        return freed

    # -- removal ---------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes]) -> int:
        removed = 0
        with self._calls:
            for key in keys:
                directory = self._directory(key)
                try:
                    self._usage(key).removed(directory.remove_page(directory.page_path(key)))
                    removed += 1
                except OSError:
                    continue
        return removed

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Take all pages of the identities out of sight at once and delete them in the background.

        Returns the number of identities that had pages. Never blocks on the size of the directory.
        """
        cleared: set[bytes] = set()
        with self._calls:
            for directory, usage in zip(self._directories, self._usages, strict=True):
                for digest in directory.known_identities() if digests is None else digests:
                    try:
                        tree = directory.detach_identity(digest)
                    except OSError as error:
                        logger.warning("tier %s: clearing %s: %s", self._name, digest.hex(), error)
                        continue
                    if tree is not None:
                        cleared.add(digest)
                        self._start_cleaner(directory, usage, tree)
        return len(cleared)

    def _start_cleaner(self, directory: PageDirectory, usage: Usage, tree: Path) -> None:
        def clean() -> None:
            try:
                usage.removed(directory.delete_detached(tree))
            except OSError as error:
                logger.warning("tier %s: clearing %s: %s", self._name, tree, error)

        cleaner = threading.Thread(target=clean, name=f"hicache-{self._name}-clear", daemon=True)
        self._cleaners = [thread for thread in self._cleaners if thread.is_alive()] + [cleaner]
        cleaner.start()

    def close(self) -> None:
        if not self._calls.shut():
            return
        self._workers.shutdown(wait=True)
        for cleaner in self._cleaners:
            cleaner.join()
        for usage in self._usages:
            usage.close()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _directory_number(self, key: bytes) -> int:
        # The last bytes of the hash: the first ones choose the fan-out directory.
        return int.from_bytes(key[-4:], "little") % len(self._directories)

    def _directory(self, key: bytes) -> PageDirectory:
        return self._directories[self._directory_number(key)]

    def _usage(self, key: bytes) -> Usage:
        return self._usages[self._directory_number(key)]

    def _in_parallel(self, count: int, work: Callable[[int], Any]) -> list[Any]:
        """``work(0..count-1)`` by this thread and the workers; returns, or raises, only when all of it has ended."""
        if count <= 1:
            return [work(i) for i in range(count)]
        results: list[Any] = [None] * count
        positions = itertools.count()

        def run() -> None:
            # next() on a counter is one step under the GIL: no two threads get the same position.
            for position in iter(lambda: next(positions), -1):
                if position >= count:
                    return
                results[position] = work(position)

        helpers = [self._workers.submit(run) for _ in range(min(self._threads, count) - 1)]
        try:
            run()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
        return results


class _CallGate:
    """Counts calls under way, so that close() waits for them and later ones are refused."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._under_way = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._condition:
            if self._closed:
                raise StoreClosedError(self._name)
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._under_way -= 1
            self._condition.notify_all()

    def shut(self) -> bool:
        """Close the gate and wait until nobody is inside; False when it was closed already."""
        with self._condition:
            if self._closed:
                return False
            self._closed = True
            self._condition.wait_for(lambda: self._under_way == 0)
            return True

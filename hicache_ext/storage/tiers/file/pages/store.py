"""The file tier's layout for file systems that several machines share: files of pages (packs.py). Small pages written
together share one file, a pack; every other page has a file of its own.

The layout uses no mapped memory, and no index except an in-memory one of the packs' names. It relies only on operations
that NFS, Lustre and 3FS implement correctly: create, link, rename, unlink and locks. A few threads read and write the
files of a batch in parallel, directly into and out of host memory (preadv and pwritev release the GIL). A file gets its
name only when it is complete.

When room is needed, the least recently used files are evicted; a pack is evicted whole. In the background, one process
at a time removes left-overs of killed processes and expired pages, and recounts the account; no call needs its lock.
"""

from __future__ import annotations

import logging
import math
import os
import random
import stat
import threading
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.runtime.members import ID_LIMIT
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.base import error_reason
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiers.file.pages.directory import remove_directory
from hicache_ext.storage.tiers.file.pages.packs import PageFiles
from hicache_ext.storage.tiers.file.pages.tree import (
    BLOCK,
    PackFile,
    accounted_bytes,
    file_length,
    hashes_in,
    is_alone,
    occupied,
    page_files,
    short_hash_of,
)
from hicache_ext.storage.tiers.file.path_store import NO_SPACE, NO_SPACE_PAUSES, Fullness, clear_each
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.usage import NO_ROOM, Removal

logger = logging.getLogger(__name__)

_EVICTION_SHARE = 1 / 16
"""Share of the capacity that one eviction frees, so that many batches share the cost of its directory walk."""
_FULL_DISK_SHARE = 1 / 64
"""The same as ``_EVICTION_SHARE``, for a file system that is full before the tier is."""
_GROWN_SHARE = 33 / 32
"""Pages that take more than this multiple of what they took on a full file system have found new space. A little more
fits whenever files of other sizes are evicted, so that smaller growth proves nothing."""
_CLEARED_SHARE = 3 / 4
"""A tier that takes less than this share of what it took on the full file system was cleared."""

_PORTIONS = 8
"""A write reserves at most one such part of the capacity at a time, so that several processes can write together."""
_FAN_OUTS_COUNTED = 64
"""Fan-out directories listed to estimate the number of pages: hashes fill all of them evenly."""
_COUNT_INTERVAL = 60.0
"""Seconds between two such counts."""

_SAMPLE = 4096
"""Files examined to find the oldest; with fewer, eviction follows the exact order of recency."""
_PARTS = 4
"""Eviction removes the oldest of this many equal parts of a sample."""
_PASSES = 64
"""Most passes over a directory by one eviction: after these, a hundred millionth of its pages would be left."""
_QUICK = 0.25
"""Seconds for which an eviction may go on to free more than it must."""

_UPKEEP_BYTE = ID_LIMIT
"""Byte of the members file that no member has as its id. Locking it lets one process at a time do the upkeep."""
_UPKEEP_INTERVAL = 60.0
"""Seconds between two checks whether a recount is needed."""
_SHORT_WORK = 0.005
_LONGEST_REST = 0.2
_WAIT_AT_START = 1.0
_WAIT_AT_END = 5.0
"""Seconds that close() waits for upkeep, which a slow disk or the removal of many files may delay."""
_SWEEPS_PER_TTL = 16
_SHORTEST_SWEEP_INTERVAL = 0.5
_LONGEST_SWEEP_INTERVAL = 600.0


_Candidate = tuple[float, str, int, PackFile]
"""A file that can be evicted: last use, path, bytes of disk, and its parsed name."""


class PageFileStore(PageFiles):
    """PageStore over one directory."""

    layout = "pages"

    @property
    def no_space_since(self) -> int:
        return self._usage.no_space_since()

    @no_space_since.setter
    def no_space_since(self, since: int) -> None:
        with self._usage.locked() as record:
            record.no_space_since = since

    def _open(self, path: Path, evicted_age: RecentMean) -> None:
        if tenants.in_force() is not None:
            logger.warning("tier %s: %s is of page files, where tenants share nothing out", self.name, path)
        super()._open(path, evicted_age)
        self._times_full = int(bool(self.no_space_since))
        """Times that writes have found the file system full since it last had space."""
        self._start_upkeep()
        self.pins = PinnedPages(self.name, path, _pin_limit(self._capacity), self._directory.occupied_by)
        self._evicted_age = evicted_age
        self._undeletable: set[str] = set()
        self._no_writes_until = 0.0
        self._no_growth_until = 0.0
        self._full_at = 0
        """Bytes that the pages took when the file system was found full."""
        self._pages = 0
        self._count_pages_at = 0.0

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        super()._register(digest, document)
        self._catalogue.of(digest)

    def _block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        return self._catalogue.of(digest).blocks()

    def resize(self, capacity: int | None) -> None:
        """Change the capacity; the next write evicts what exceeds it."""
        super().resize(capacity)
        self.pins.set_limit(_pin_limit(capacity))

    def clean_up(self) -> int:
        """Remove left-overs of killed processes; return their number."""
        return self._directory.remove_left_overs()

    def used_bytes(self) -> int:
        """Return the bytes of disk that pages and reservations of all processes take."""
        return self._usage.used(self._capacity)

    def fullness(self) -> Fullness:
        """Return how full the directory is. The page count is exact if small, else estimated. Raises OSError."""
        with self._calls:
            if time.monotonic() >= self._count_pages_at:
                self._pages = self._directory.count_pages(_FAN_OUTS_COUNTED)
                self._count_pages_at = time.monotonic() + _COUNT_INTERVAL
            # Read after the count, so that the account includes the bytes of every counted page.
            used, capacity = self.used_bytes(), self._capacity
            if capacity is None:
                disk = os.statvfs(self._directory.path)
                free = disk.f_bavail * disk.f_frsize
            else:
                free = max(0, capacity - used)
            return Fullness(capacity, used, free, self._pages, self.no_space_since)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_absent(self, batch: PageBatch) -> list[SetResult]:
        sizes = [HEADER_LENGTH + size for size in batch.sizes]
        results = [SetResult.REJECTED] * len(batch)
        missing: dict[bytes, int] = {}
        in_packs = self._find(batch.keys)
        for pack in {found.path: found for found in in_packs if found is not None}.values():
            self._touch(pack.path, pack.status)
        for position, (key, size, found) in enumerate(zip(batch.keys, sizes, in_packs, strict=True)):
            # A copy of another size does not count: a newer copy may exist.
            if found is not None and found.page_bytes == size:
                results[position] = SetResult.EXISTS
                continue
            match self._check_alone(key, size):
                case None:
                    # Write a page once even if it occurs twice in the batch.
                    missing.setdefault(key, position)
                case SetResult.REJECTED:
                    self.metrics.add("rejected", "obstacle")
                case result:
                    results[position] = result
        if time.monotonic() < self._no_writes_until:
            self.metrics.add("rejected", "no_space", len(missing))
            return results
        self._make_way({key: sizes[position] for key, position in missing.items()})
        self._set_missing(batch, list(missing.values()), results)
        if len(missing) < len(batch):
            for position, key in enumerate(batch.keys):
                if results[position] is SetResult.REJECTED and results[missing.get(key, position)].durable:
                    results[position] = SetResult.EXISTS
        return results

    def _set_missing(self, batch: PageBatch, positions: list[int], results: list[SetResult]) -> None:
        """Write the pages at ``positions``, in portions that fit into the capacity."""
        portions = self._portions(
            positions, batch.sizes, lambda size: _room(HEADER_LENGTH + size), self._limit(), _PORTIONS
        )
        for number, portion in enumerate(portions):
            left = self._set_portion(batch, portion, results)
            if left and self._is_kept_small():
                self._note_size()
                left = self._set_portion(batch, left, results, again=True)
                if left:
                    self._no_writes_until = self._no_growth_until
                    # Nobody can look up the tail of a chain without its head.
                    self.metrics.add("rejected", "no_space", sum(map(len, portions[number + 1 :])))
                    return

    def _limit(self) -> int | None:
        """Return the bytes that the pages may take now; None without a limit."""
        if not self._is_kept_small():
            return self._capacity
        return min(self._full_at, self._capacity or self._full_at)

    def _set_portion(
        self, batch: PageBatch, portion: Sequence[int], results: list[SetResult], *, again: bool = False
    ) -> Sequence[int]:
        """Write some pages; return those that found no disk space. ``again``: they found none a moment ago, either."""
        files = self._files_of(batch, portion)
        lengths = [file_length(len(members), HEADER_LENGTH + batch.sizes[members[0]]) for members in files]
        reserved = sum(map(_room, lengths))
        kept_small = self._is_kept_small()
        limit, share, least_files = self._limit(), (self._capacity or 0) * _EVICTION_SHARE, 0
        if kept_small:
            share = self._full_at * _FULL_DISK_SHARE
        if again:
            # Other processes may take the space this frees. Inodes may be what is missing: each file needs one, and a
            # new directory another.
            share, least_files = 0, 2 * len(lengths)
        try:
            refused = self._usage.reserve(reserved, limit, lambda need: self._evict(need, int(share), least_files))
        except OSError as error:
            self._count_error(error)
            for position in portion:
                results[position] = SetResult.ERROR
            return []
        if refused is not None:
            is_disk_full = kept_small and refused == NO_ROOM
            if again or not is_disk_full:
                self.metrics.add("rejected", "no_space" if is_disk_full else refused, len(portion))
            return portion if is_disk_full else []
        stored = 0
        try:
            written = self._workers.run(len(files), lambda number: self._write_file(batch, files[number]))
            for members, (result, added) in zip(files, written, strict=True):
                stored += added
                file_result = self._failed_write(result) if isinstance(result, OSError) else result
                for position in members:
                    results[position] = file_result
        finally:
            self._usage.commit(reserved, stored)
        left = [position for position in portion if results[position] is SetResult.REJECTED]
        if stored and not left and self._times_full and not self._is_kept_small():
            self._note_regained_space()
        return left

    def _is_kept_small(self) -> bool:
        """Return whether the file system was full a moment ago."""
        return time.monotonic() < self._no_growth_until

    def _note_size(self) -> None:
        try:
            self._full_at = self.used_bytes()
        except OSError as error:
            self._count_error(error)

    def _note_regained_space(self) -> None:
        """Note that there is space again if the pages have grown or were cleared; eviction frees no new space."""
        try:
            before, used = self._full_at, self.used_bytes()
            if not before:
                # Another process, or an earlier one, found the disk full: measure growth from here on.
                self._full_at = used
            elif not _CLEARED_SHARE * before < used <= _GROWN_SHARE * before and self._note_space(None):
                self._times_full = 0
        except OSError as error:
            self._count_error(error)

    def _failed_write(self, error: OSError) -> SetResult:
        self._count_error(error)
        if error.errno in NO_SPACE:
            if not self._is_kept_small():
                self._times_full += 1
                self._note_size()
                self._no_growth_until = time.monotonic() + NO_SPACE_PAUSES.limit(self._times_full)
                self._note_space(error)
            return SetResult.REJECTED
        logger.debug("tier %s: writing into %s: %s", self.name, self._directory.path, error)
        return SetResult.ERROR

    # -- removal ---------------------------------------------------------------------------------------------------

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Move the identities' trees out of every process's sight immediately, then delete them in the background."""
        wanted = self._directory.known_identities() if digests is None else digests

        def note(error: OSError) -> None:
            self._count_error(error)
            logger.warning("tier %s: clearing: %s", self.name, error)

        return sum(clear_each(self._detach, wanted, note))

    def _detach(self, digest: bytes) -> bool:
        """Move an identity's tree away; return whether it had pages. Raises OSError."""
        with ExitStack() as operation:
            # Begin before the tree moves: if killed after this point, the account is known to need a recount.
            removal = operation.enter_context(self._usage.detaching())
            tree = self._directory.detach_identity(digest)
            self._catalogue.forget_identity(digest)
            if tree is None:
                return False
            had_pages = self._directory.has_pages(tree)
            self._clearing.clear([digest], partial(self._delete, tree, removal, operation.pop_all()))
            return had_pages

    def _delete(self, tree: Path, removal: Removal, operation: ExitStack, _: Cleared) -> None:
        try:
            with operation:
                removal.freed += self._directory.delete_detached(tree)
        except OSError as error:
            self.count_error(error)
            logger.warning("tier %s: clearing %s: %s", self.name, tree, error)

    # -- room ----------------------------------------------------------------------------------------------------------

    def _evict(self, need: int, share: int, least_files: int = 0) -> int:
        """Evict pages until ``need`` bytes and ``least_files`` files are freed, if possible. Then go on to ``share``
        bytes while that is quick (other evictors wait meanwhile): many batches then share the cost of the walk.

        Return the bytes freed. Never raises OSError. The order is exact in a small directory. In a large one, it is
        that of random samples of fan-out directories, which hashes fill evenly. One thread of one process at a time.
        """
        freed = files = 0
        quick_until = time.monotonic() + _QUICK
        buckets: set[str] = set()
        try:
            for used, path, size, found in self._candidates():
                if freed >= need and files >= least_files and (freed >= share or time.monotonic() > quick_until):
                    break
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    # One file that cannot be removed must not stop eviction forever.
                    self._undeletable.add(path)
                    self.metrics.add("error", error_reason(error))
                    continue
                freed += size
                files += 1
                if not is_alone(found.pack):
                    buckets.add(os.path.dirname(path))
                if used:  # Demoting a page (packs.py) erases the time of its last use.
                    self._evicted_age.note(max(0.0, time.time() - used))
                self.metrics.add("evicted", "capacity", len(found.living))
            freed += sum(map(remove_directory, buckets))
            if freed < need:
                # In a small capacity, empty directories of old identities would take the space of pages.
                freed += self._directory.remove_empty_directories()
                # Nothing else is left: retry what could not be removed (the disk may have been read-only).
                self._undeletable.clear()
        except OSError as error:
            self.metrics.add("error", error_reason(error))
        self.metrics.add("bytes", "evicted", freed)
        return freed

    def _candidates(self) -> Iterator[_Candidate]:
        """Yield the files to evict, in eviction order, until none are left."""
        spared = set(map(short_hash_of, self.pins.spared()))
        for _ in range(_PASSES):
            directories = self._directory.file_directories()
            random.shuffle(directories)
            remaining = iter(directories)
            is_all = True
            while sample := self._sample(remaining, spared):
                is_all = is_all and len(sample) < _SAMPLE
                sample.sort(key=itemgetter(0))
                # A sample is part of the directory: take only its older pages, or pages just written would go.
                yield from sample if is_all else sample[: -(-len(sample) // _PARTS)]
            if is_all:
                return

    def _sample(self, directories: Iterator[str], spared: Set[bytes]) -> list[_Candidate]:
        """Return at least ``_SAMPLE`` files of the next directories, if there are that many, except files that hold a
        page whose short hash is ``spared``."""
        sample: list[_Candidate] = []
        for directory in directories:
            for entry, found in page_files(directory):
                if entry.path in self._undeletable or (spared and not spared.isdisjoint(hashes_in(found))):
                    continue
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        size = accounted_bytes(found, status)
                        # A pack larger than its name says is evicted first: the account misses its extra bytes.
                        used = status.st_mtime if occupied(status.st_size) == size else 0.0
                        sample.append((used, entry.path, size, found))
            if len(sample) >= _SAMPLE:
                break
        return sample

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def _start_upkeep(self) -> None:
        """Start upkeep and wait a second at most, enough to tidy a small directory. Raises OSError."""
        self._sweep_interval = math.inf
        if self._ttl is not None:
            shortest = max(_SHORTEST_SWEEP_INTERVAL, self._ttl / _SWEEPS_PER_TTL)
            self._sweep_interval = min(shortest, _LONGEST_SWEEP_INTERVAL)
        self._sweep_at = time.monotonic() + self._sweep_interval
        self._turn = OfdLock(self._directory.members_path, _UPKEEP_BYTE)
        self._resources.callback(self._turn.close)
        self._first_upkeep = threading.Event()
        self._upkeep = BackgroundLoop(f"hicache-{self.name}-upkeep", self._keep_up)
        self._resources.callback(self._end_upkeep)
        if self._upkeep.wake():
            self._first_upkeep.wait(_WAIT_AT_START)

    def _end_upkeep(self) -> None:
        """Stop upkeep; a recount in progress ends early."""
        if not self._upkeep.stop(_WAIT_AT_END):
            logger.warning("tier %s: upkeep of %s has not ended yet", self.name, self._directory.path)

    def _keep_up(self) -> float:
        try:
            is_due = time.monotonic() >= self._sweep_at
            if (is_due or not self._first_upkeep.is_set() or self._usage.in_doubt()) and self._turn.try_acquire():
                try:
                    if is_due:
                        self._sweep_at = time.monotonic() + self._sweep_interval
                        if removed := self._remove_expired(self._upkeep):
                            path = self._directory.path
                            logger.info("tier %s: %d expired pages of %s removed", self.name, removed, path)
                    self._recount_if_in_doubt()
                finally:
                    self._turn.release()
        except OSError as error:
            logger.warning("tier %s: upkeep of %s: %s", self.name, self._directory.path, error)
        finally:
            self._first_upkeep.set()
        return min(_UPKEEP_INTERVAL, self._sweep_interval)

    def _recount_if_in_doubt(self) -> None:
        self._directory.remove_left_overs()
        if self._upkeep.stopping or not self._usage.in_doubt():
            return
        begun, before = time.monotonic(), self._usage.used()
        if not self._usage.count(self._walk_gently()):
            return
        took = time.monotonic() - begun
        logger.log(
            logging.INFO if took > _WAIT_AT_START else logging.DEBUG,
            "tier %s: %s was counted in %.1f s: its pages take %d bytes; the account said %d",
            self.name,
            self._directory.path,
            took,
            self._usage.used(),
            before,
        )

    def _walk_gently(self) -> Iterator[tuple[float, int]]:
        """Yield the parts of a walk over the directory, resting half of the time to leave the CPU to others."""
        begun = time.monotonic()
        for part in self._directory.occupied_parts():
            yield part
            took = time.monotonic() - begun
            if self._upkeep.stopping or (took > _SHORT_WORK and not self._upkeep.rest(min(took, _LONGEST_REST))):
                return
            if took > _SHORT_WORK:
                begun = time.monotonic()


def _room(size: int) -> int:
    """Return the bytes of disk to reserve for a file, as if its two directories were new; commit() corrects this."""
    return occupied(size) + 2 * BLOCK


def _pin_limit(capacity: int | None) -> int | None:
    return None if capacity is None else capacity // 2

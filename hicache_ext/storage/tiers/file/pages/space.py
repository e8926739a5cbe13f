"""The room of one directory of page files: which files go when it is full, and the account of it put right.

Packs go whole.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator, Set

from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.runtime.members import ID_LIMIT
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.tree import (
    PackFile,
    counted_for,
    hashes_in,
    is_alone,
    occupied,
    short_hash_of,
)
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.usage import Usage

logger = logging.getLogger(__name__)

_SAMPLE = 4096
"""Files examined to find the oldest; with fewer, eviction follows the exact order of recency."""
_PARTS = 4
"""Of a sample the oldest of so many parts is removed."""
_PASSES = 64
"""Over a directory: a hundred millionth of its pages would be left."""
_QUICK = 0.25
"""Seconds that an eviction takes beyond what it must free."""
_TELL_INTERVAL = 0.1
"""Seconds between two reports of what was freed."""


class Evictor:
    """Removes the least recently used files of one directory. For one thread of one process at a time."""

    def __init__(
        self, directory: PageDirectory, metrics: TierMetrics, pins: PinnedPages, evicted_age: RecentMean
    ) -> None:
        """``evicted_age``: told the seconds since the last use of evicted pages."""
        self._directory = directory
        self._metrics = metrics
        self._pins = pins
        self._evicted_age = evicted_age
        self._undeletable: set[str] = set()

    def evict(self, need: int, share: int, least_files: int = 0) -> Iterator[int]:
        """Remove pages until ``need`` bytes and ``least_files`` files are freed, if possible, and up to ``share`` bytes
        as long as that is quick: the walk is then paid for by many batches, and others wait for their turn meanwhile.

        Yields the bytes freed, every so often. Never raises OSError. The order is exact in a small directory. In a
        large one it is that of random samples of fan-out directories, which hashes fill evenly.
        """
        freed = told = files = 0
        begun = told_at = time.monotonic()
        buckets: set[str] = set()
        try:
            for used, path, size in self._oldest():
                now = time.monotonic()
                if freed >= need and files >= least_files and (freed >= share or now - begun > _QUICK):
                    break
                if now - told_at > _TELL_INTERVAL:
                    yield freed - told
                    told, told_at = freed, now
                if self._removed(path):
                    freed += size
                    files += 1
                    found = PackFile.parse(os.path.basename(path))
                    if found is None or not is_alone(found.pack):
                        buckets.add(os.path.dirname(path))
                    if used:  # A page that was demoted (packs.py) was used nobody knows when.
                        self._evicted_age.note(max(0.0, time.time() - used))
                    self._metrics.add("evicted", "capacity", 1 if found is None else len(found.living))
            freed += self._directory.remove_buckets_if_empty(buckets)
            if freed < need:
                # Empty directories of old identities would take the space of pages in a small capacity.
                freed += self._directory.remove_empty_directories()
                # Nothing else is left: try again what could not be removed (the disk may have been read-only).
                self._undeletable.clear()
        except OSError as error:
            self._count_error(error)
        self._metrics.add("bytes", "evicted", freed)
        yield freed - told

    def _oldest(self) -> Iterator[tuple[float, str, int]]:
        """(last use, path, bytes of disk) of the pages to remove, in this order, until there are none."""
        spared = self._pins.spared()
        short = {short_hash_of(page_hash) for page_hash in spared}
        for _ in range(_PASSES):
            directories = self._directory.file_directories()
            random.shuffle(directories)
            remaining = iter(directories)
            is_all = True
            while sample := self._sample(remaining, spared, short):
                is_all = is_all and len(sample) < _SAMPLE
                sample.sort()
                # Of a part of the directory the older pages only: those just written would go, too.
                yield from sample if is_all else sample[: -(-len(sample) // _PARTS)]
            if is_all:
                return

    def _sample(
        self, directories: Iterator[str], spared: Set[bytes], short: Set[bytes]
    ) -> list[tuple[float, str, int]]:
        """At least ``_SAMPLE`` files of the next directories, if there are that many."""
        sample: list[tuple[float, str, int]] = []
        for directory in directories:
            for path, status in self._directory.files_in(directory):
                if (
                    stat.S_ISREG(status.st_mode)
                    and path not in self._undeletable
                    and not (spared and _is_spared(path, spared, short))
                ):
                    sample.append((_last_use(path, status), path, counted_for(path, status)))
            if len(sample) >= _SAMPLE:
                break
        return sample

    def _removed(self, path: str) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            # One file that cannot be removed must not stop eviction for ever.
            self._undeletable.add(path)
            self._count_error(error)
            return False
        return True

    def _count_error(self, error: OSError) -> None:
        self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))


def _last_use(path: str, status: os.stat_result) -> float:
    """Never, of a pack that is larger than it says: what it takes is in no account."""
    return status.st_mtime if occupied(status.st_size) == counted_for(path, status) else 0.0


def _is_spared(path: str, spared: Set[bytes], short: Set[bytes]) -> bool:
    found = PackFile.parse(os.path.basename(path))
    if found is None:
        return False
    if is_alone(found.pack):
        return bytes.fromhex(found.pack.id) in spared
    return not short.isdisjoint(hashes_in(found))


_BYTE = ID_LIMIT
"""Of the file of members, which nobody has as its id: one process at a time does this."""
_INTERVAL = 60.0
"""Seconds between two looks at whether a count is needed."""
_SHORT_WORK = 0.005
_LONGEST_REST = 0.2
_WAIT_AT_START = 1.0
_WAIT_AT_END = 5.0
"""Seconds that close() waits: a disk may hold it up, or many files are being removed."""
_SWEEPS_PER_TTL = 16
_SHORTEST_SWEEP_INTERVAL = 0.5
_LONGEST_SWEEP_INTERVAL = 600.0


class Upkeep:
    """Removes left-overs of killed processes and expired pages, and puts the account right by a count, beside the
    calls: on a thread of its own, of one process at a time, without a lock that a call needs. Threads: any."""

    def __init__(
        self,
        tier: str,
        directory: PageDirectory,
        usage: Usage,
        ttl: float | None,
        expire: Callable[[BackgroundLoop], int],
    ) -> None:
        """Begins. Small directories are in order when it returns; it waits a second at most. Raises OSError.

        ``expire`` removes pages older than the ``ttl`` until the loop is stopped; how many that were."""
        self._tier = tier
        self._directory = directory
        self._usage = usage
        self._expire = expire
        self._sweep_interval = math.inf
        if ttl is not None:
            self._sweep_interval = max(_SHORTEST_SWEEP_INTERVAL, min(ttl / _SWEEPS_PER_TTL, _LONGEST_SWEEP_INTERVAL))
        self._sweep_at = time.monotonic() + self._sweep_interval
        self._turn = OfdLock(directory.members_path, _BYTE)
        self._first = threading.Event()
        self._loop = BackgroundLoop(f"hicache-{tier}-upkeep", self._run)
        if self._loop.wake():
            self._first.wait(_WAIT_AT_START)

    def close(self) -> None:
        """Waits for a count under way, which ends early."""
        if not self._loop.stop(_WAIT_AT_END):
            logger.warning("tier %s: upkeep of %s has not ended yet", self._tier, self._directory.path)
        self._turn.close()

    def _run(self) -> float:
        try:
            is_due = time.monotonic() >= self._sweep_at
            if (is_due or not self._first.is_set() or self._usage.in_doubt()) and self._turn.try_acquire():
                try:
                    if is_due:
                        self._sweep()
                    self._put_right()
                finally:
                    self._turn.release()
        except OSError as error:
            logger.warning("tier %s: upkeep of %s: %s", self._tier, self._directory.path, error)
        finally:
            self._first.set()
        return min(_INTERVAL, self._sweep_interval)

    def _sweep(self) -> None:
        self._sweep_at = time.monotonic() + self._sweep_interval
        if removed := self._expire(self._loop):
            logger.info("tier %s: %d expired pages of %s removed", self._tier, removed, self._directory.path)

    def _put_right(self) -> None:
        self._directory.remove_left_overs()
        if self._loop.stopping or not self._usage.in_doubt():
            return
        begun, before = time.monotonic(), self._usage.used()
        if not self._usage.count(self._parts()):
            return
        took = time.monotonic() - begun
        logger.log(
            logging.INFO if took > _WAIT_AT_START else logging.DEBUG,
            "tier %s: %s was counted in %.1f s: its pages take %d bytes; the account said %d",
            self._tier,
            self._directory.path,
            took,
            self._usage.used(),
            before,
        )

    def _parts(self) -> Iterator[tuple[float, int]]:
        """A walk that leaves the processor to others half of the time."""
        begun = time.monotonic()
        for part in self._directory.occupied_parts():
            yield part
            took = time.monotonic() - begun
            if self._loop.stopping or (took > _SHORT_WORK and not self._loop.rest(min(took, _LONGEST_REST))):
                return
            if took > _SHORT_WORK:
                begun = time.monotonic()

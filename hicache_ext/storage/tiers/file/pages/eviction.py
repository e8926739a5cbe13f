"""Eviction of page files: which pages go when a directory is full."""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Callable

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory, page_hash_in
from hicache_ext.storage.tiers.file.pages.tree import occupied
from hicache_ext.storage.tiers.file.pins import PinnedPages

_SAMPLE = 4096
"""Page files examined to find the oldest; with fewer, eviction follows the exact order of recency."""


class Evictor:
    """Removes the least recently used pages of one directory. Called under the lock of its usage record."""

    def __init__(
        self,
        directory: PageDirectory,
        metrics: TierMetrics,
        pins: PinnedPages,
        evicted_age: RecentMean,
        going_on: Callable[[], None] = lambda: None,
    ) -> None:
        """``evicted_age``: told the seconds since the last use of evicted pages. ``going_on`` is called now and then,
        to show progress to those who wait for the lock."""
        self._directory = directory
        self._metrics = metrics
        self._pins = pins
        self._evicted_age = evicted_age
        self._going_on = going_on
        self._undeletable: set[str] = set()

    def evict(self, need: int) -> int:
        """Remove pages until ``need`` bytes are freed, if possible; returns the bytes freed. Never raises OSError.

        The order is exact in a small directory. In a large one it is that of a random sample of fan-out directories,
        which hashes fill evenly.
        """
        freed = evicted = 0
        spared = {page_hash.hex() for page_hash in self._pins.spared()}
        try:
            fan_outs = self._directory.fan_out_directories()
            random.shuffle(fan_outs)
            remaining = iter(fan_outs)
            while freed < need:
                sample: list[tuple[float, str, int]] = []
                for fan_out in remaining:
                    self._going_on()
                    for path, status in self._directory.page_files(fan_out):
                        if (
                            stat.S_ISREG(status.st_mode)
                            and path not in self._undeletable
                            and not (spared and page_hash_in(path) in spared)
                        ):
                            sample.append((status.st_mtime, path, occupied(status.st_size)))
                    if len(sample) >= _SAMPLE:
                        break
                if not sample:
                    break
                sample.sort()
                for used, path, size in sample:
                    if freed >= need:
                        break
                    if self._removed(path):
                        self._evicted_age.note(max(0.0, time.time() - used))
                        freed += size
                        evicted += 1
            if freed < need:
                # Empty directories of old identities would take the space of pages in a small capacity.
                freed += self._directory.remove_empty_directories()
                # Nothing else is left: try again what could not be removed (the disk may have been read-only).
                self._undeletable.clear()
        except OSError as error:
            self._count_error(error)
        self._metrics.add("evicted", "capacity", evicted)
        self._metrics.add("bytes", "evicted", freed)
        return freed

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

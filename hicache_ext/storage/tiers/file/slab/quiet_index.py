"""The index as SlabStore uses it: its errors are counted and reported, and answered as if nothing were in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import lmdb

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.file.device_errors import Trouble
from hicache_ext.storage.tiers.file.slab.change import IndexChange
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.records import Slab
from hicache_ext.storage.tiers.file.slab.slot_references import NO_SLOTS, SlotReferences

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class QuietIndex:
    """The index of one directory. Thread-safe; no call raises lmdb.Error or OSError."""

    def __init__(self, tier: str, directory: SlabDirectory, metrics: TierMetrics, trouble: Trouble) -> None:
        self._tier = tier
        self._path = directory.path
        self._index = directory.index
        self._metrics = metrics
        self._trouble = trouble

    def locate(self, keys: Sequence[bytes], oldest: int) -> tuple[SlotReferences, bool]:
        try:
            return self._index.locate(keys, oldest)
        except (lmdb.Error, OSError) as error:
            return self._failed(error, (NO_SLOTS, False))

    def contains(self, keys: Sequence[bytes], oldest: int) -> list[bool]:
        try:
            return self._index.contains(keys, oldest)
        except (lmdb.Error, OSError) as error:
            return self._failed(error, [False] * len(keys))

    def count_leading(self, keys: Sequence[bytes], oldest: int) -> int:
        try:
            return self._index.count_leading(keys, oldest)
        except (lmdb.Error, OSError) as error:
            return self._failed(error, 0)

    def slabs(self) -> list[Slab] | None:
        """None when the index cannot be read."""
        try:
            return self._index.slabs()
        except (lmdb.Error, OSError) as error:
            return self._failed(error, None)

    def change(self, action: Callable[[IndexChange], _Answer]) -> _Answer | None:
        """``action`` in one write transaction; None when the index cannot be written."""
        try:
            with self._index.changing() as change:
                return action(change)
        except (lmdb.Error, OSError) as error:
            return self._failed(error, None)

    def free_cleared(self, digests: Sequence[bytes]) -> None:
        try:
            for digest in digests:
                self._index.free_cleared(digest)
        except (lmdb.Error, OSError) as error:
            self._failed(error, None)

    def _failed(self, error: lmdb.Error | OSError, answer: _Answer) -> _Answer:
        self._metrics.add("error", type(error).__name__)
        logger.error("tier %s: index of %s: %s", self._tier, self._path, error)
        self._trouble(error)
        return answer

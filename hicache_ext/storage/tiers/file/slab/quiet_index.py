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
_Otherwise = TypeVar("_Otherwise")


class QuietIndex:
    """The index of one directory. Thread-safe; no call raises lmdb.Error or OSError."""

    def __init__(self, tier: str, directory: SlabDirectory, metrics: TierMetrics, trouble: Trouble) -> None:
        self._tier = tier
        self._path = directory.path
        self._index = directory.index
        self._metrics = metrics
        self._trouble = trouble

    def locate(self, keys: Sequence[bytes], oldest: int) -> tuple[SlotReferences, bool]:
        return self._answer(lambda: self._index.locate(keys, oldest), (NO_SLOTS, False))

    def contains(self, keys: Sequence[bytes], oldest: int) -> list[bool]:
        return self._answer(lambda: self._index.contains(keys, oldest), [False] * len(keys))

    def count_leading(self, keys: Sequence[bytes], oldest: int) -> int:
        return self._answer(lambda: self._index.count_leading(keys, oldest), 0)

    def slabs(self) -> list[Slab] | None:
        """None when the index cannot be read."""
        return self._answer(self._index.slabs, None)

    def change(self, action: Callable[[IndexChange], _Answer]) -> _Answer | None:
        """``action`` in one write transaction; None when the index cannot be written."""

        def act() -> _Answer:
            with self._index.changing() as change:
                return action(change)

        return self._answer(act, None)

    def free_cleared(self, digests: Sequence[bytes]) -> None:
        self._answer(lambda: [self._index.free_cleared(digest) for digest in digests], None)

    def _answer(self, ask: Callable[[], _Answer], otherwise: _Otherwise) -> _Answer | _Otherwise:
        try:
            return ask()
        except (lmdb.Error, OSError) as error:
            self._metrics.add("error", type(error).__name__)
            logger.error("tier %s: index of %s: %s", self._tier, self._path, error)
            self._trouble(error)
            return otherwise

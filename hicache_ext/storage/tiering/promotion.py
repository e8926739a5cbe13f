"""Promotion: pages found in a far tier are written to a nearer one, at the lowest I/O priority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiering.generations import StillWanted
from hicache_ext.storage.tiering.write_behind import QueueOwner, QueueSettings, WriteBehind

PROMOTION_PATIENCE = 1.0
"""Seconds for which a batch of promotions waits for foreground reads and prefetches."""


class PromotionQueue(WriteBehind):
    """Pages to be promoted to a tier, which are written when neither a foreground read nor a prefetch is under way.

    The caller chooses the pages: those of the leading run of a read that came from a tier further out. A page that is
    queued is not queued again. Counted in the metrics of the tier, event ``promotion``: queued, waiting (was queued
    already), dropped (queue full, or cleared meanwhile), and then stored, exists or failed.
    """

    def __init__(self, tier: QueueOwner, settings: QueueSettings, wait_for_quiet: Callable[[], None]) -> None:
        super().__init__(tier, settings, queue="promotion", waits=False, before_batch=wait_for_quiet)

    def promote(self, batch: PageBatch, positions: Sequence[int], still_wanted: StillWanted) -> int:
        """Queue the pages at ``positions``, which were read; their bytes are copied before this returns.

        Returns how many of them are in the queue.
        """
        outcomes = Counter(_QUEUED[result] for result in self.offer(batch, positions, still_wanted))
        self._tier.metrics.add_many("promotion", outcomes)
        return outcomes["queued"] + outcomes["waiting"]

    def _written(self, results: Sequence[SetResult]) -> None:
        outcomes = Counter(result.value if result.durable else "failed" for result in results)
        self._tier.metrics.add_many("promotion", outcomes)


_QUEUED = {SetResult.STORED: "queued", SetResult.EXISTS: "waiting", SetResult.REJECTED: "dropped"}

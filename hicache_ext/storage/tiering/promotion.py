"""Promotion: pages found in a far tier are written to a nearer one, at the lowest I/O priority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hicache_ext.storage.contract.store import PageBatch, PageStore, SetResult
from hicache_ext.storage.tiering.io_priority import IoPriority
from hicache_ext.storage.tiering.write_behind import QueueSettings, WriteBehind

_PATIENCE = 1.0
"""Seconds for which a batch of promotions waits for foreground reads and prefetches."""


class Promoter(WriteBehind):
    """Copies pages into a bounded queue and writes them to ``target`` when neither a foreground read nor a prefetch is
    under way.

    The caller chooses the pages: those of the leading run of a read that came from a tier behind ``target``. A page
    that is queued is not queued again. Counted in the metrics of ``target``, event ``promotion``: queued, waiting (was
    queued already), dropped (queue full), and then stored, exists or failed.
    """

    def __init__(self, target: PageStore, settings: QueueSettings, gate: IoPriority) -> None:
        self.target = target
        super().__init__(target, settings, queue="promotion", before_batch=lambda: gate.wait_until_idle(_PATIENCE))

    def promote(self, batch: PageBatch, positions: Sequence[int]) -> int:
        """Queue the pages at ``positions``, which were read; their bytes are copied before this returns.

        Returns how many of them are in the queue.
        """
        outcomes = Counter(_QUEUED[result] for result in self.offer(batch, positions))
        self.target.metrics.add_many("promotion", outcomes)
        return outcomes["queued"] + outcomes["waiting"]

    def _written(self, results: Sequence[SetResult]) -> None:
        outcomes = Counter(result.value if result.durable else "failed" for result in results)
        self.target.metrics.add_many("promotion", outcomes)


_QUEUED = {SetResult.STORED: "queued", SetResult.EXISTS: "waiting", SetResult.REJECTED: "dropped"}

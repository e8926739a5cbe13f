"""Admission in front of a tier: what ``AdmissionPolicy`` does not want is REFUSED, and everything else is written.

Around what SGLang stores. Promotions, warming and hints go past it: somebody has just asked for those pages; their
bytes count for the budget. A mistake in here costs no page: it is logged, and everything is written.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hicache_ext.config import TierConfig
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract.abilities import gauges_of
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult, key_words
from hicache_ext.storage.tiering.admission.budget import WriteBudget
from hicache_ext.storage.tiering.admission.policy import KEEP, AdmissionPolicy, Chosen, Words

logger = logging.getLogger(__name__)

_FEWEST_PAGES = 1000
"""Pages in a tier before their mean size is taken from it."""
_MOST_READS = 64
"""Reads that wait to be learnt from."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Of one tier in one process."""

    learned: bool
    """False: only for the budget is anything refused."""
    budget: float | None
    """Bytes a second that this process may write."""
    writers: int
    """Ranks that share the tier's capacity."""

    @classmethod
    def of(cls, tier: TierConfig, role: str) -> AdmissionSettings | None:
        """None where everything is written. A decode node learns nothing: it never sees who reads its pages."""
        budget, learned = tier.bytes_a_second, tier.admission == "learned" and role != "decode"
        if not learned and budget is None:
            return None
        return cls(learned, None if budget is None else budget / tier.writers, tier.writers)


class Admission:
    """Threads: any. Calls wait for each other for as long as a decision takes."""

    def __init__(self, settings: AdmissionSettings, tier: PageStore, now: Callable[[], float] = time.monotonic) -> None:
        """``tier`` is asked how full it is, and counts."""
        self.settings = settings
        self._tier = tier
        self._now = now
        self._lock = threading.Lock()
        self._log = LimitedLog(logger, 60.0)
        self._budget = None if settings.budget is None else WriteBudget(settings.budget, now)
        self._reads: deque[Words] = deque()
        self._pages = self._parts = self._bytes = 0.0
        """Of what was offered: for the mean page."""
        self._used_before = 0
        self._looked = now()
        keep = KEEP if settings.learned else None
        self.policy = AdmissionPolicy(self._capacity, keep, self._most_writes)

    def write(self, batch: PageBatch, write: Callable[[PageBatch], list[SetResult]]) -> list[SetResult]:
        """``write`` what is admitted. The other pages are REFUSED."""
        try:
            wanted = self._wanted(batch)
        except Exception:  # noqa: BLE001 - a page that is stored in vain costs less than a call that fails
            self._failed()
            wanted = None
        if wanted is None:
            return write(batch)
        results = [SetResult.REFUSED] * len(batch)
        if wanted:
            for position, result in zip(wanted, write(batch.select(wanted)), strict=True):
                results[position] = result
        return results

    def written(self, batch: PageBatch, results: Sequence[SetResult]) -> list[SetResult]:
        """The results of a write to the tier, whatever it was for."""
        if self._budget is not None:
            size = batch.bytes_of(SetResult.STORED, results)
            with self._lock:
                self._budget.written(size)
        return list(results)

    def read(self, keys: Sequence[bytes], results: Sequence[GetResult]) -> None:
        """What a read of the tier has found. Learnt from when a page is offered next: a reader waits for nothing."""
        try:
            words = key_words(keys)
            if results.count(GetResult.HIT) < len(results):
                words = words[[result is GetResult.HIT for result in results]]
            if len(words):
                self._reads.append(words)
            if len(self._reads) >= _MOST_READS:
                with self._lock:
                    self._learn_reads()
        except Exception:  # noqa: BLE001 - a page that is stored in vain costs less than a call that fails
            self._failed()

    def looked_up(self, keys: Sequence[bytes], leading: int) -> None:
        """A chain of which the tiers have the first ``leading`` pages. Waits for no decision."""
        try:
            self.policy.continuations.looked_up(keys, leading)
        except Exception:  # noqa: BLE001 - a page that is stored in vain costs less than a call that fails
            self._failed()

    def _learn_reads(self) -> None:
        """Of what was read until now. The caller locks."""
        while self._reads:
            words = self._reads.popleft()
            self.policy.read(words[_first_parts(words)])

    def _wanted(self, batch: PageBatch) -> list[int] | None:
        """The positions of the pages to write; None for all of them."""
        if not len(batch):
            return None
        words = key_words(batch.keys)
        firsts = _first_parts(words)
        with self._lock:
            self._pages += len(firsts)
            self._parts += len(batch)
            self._bytes += sum(batch.sizes)
            self._learn_reads()
            wanted, known = self.policy.offered(words[firsts])
            affordable = wanted & self._affordable(batch, firsts, wanted)
            if affordable.sum() < wanted.sum():
                self.policy.cut()
        self._tier.metrics.add_many(
            "admission",
            {
                "admitted_first": int((affordable & ~known).sum()),
                "admitted_again": int((affordable & known).sum()),
                "refused_first": int((~wanted & ~known).sum()),
                "refused_behind": int((~wanted & known).sum()),
                "refused_budget": int((wanted & ~affordable).sum()),
            },
        )
        if affordable.all():
            return None
        parts = np.diff(firsts, append=len(batch))
        positions: list[int] = np.flatnonzero(np.repeat(affordable, parts)).tolist()
        return positions

    def _affordable(self, batch: PageBatch, firsts: Words, wanted: Chosen) -> Chosen:
        """Which pages, from the first on, the budget is enough for."""
        if self._budget is None:
            return wanted
        sizes = np.add.reduceat(np.array(batch.sizes, np.int64), firsts)
        enough: Chosen = np.cumsum(np.where(wanted, sizes, 0)) <= self._budget.left
        return enough

    def _capacity(self) -> float:
        """Pages of the tier that this process may count on."""
        gauges = gauges_of(self._tier)
        capacity = gauges.get("capacity_bytes", math.nan)
        if not capacity > 0 or not self._pages:
            return math.inf
        used, parts = gauges.get("used_bytes", math.nan), gauges.get("pages", math.nan)
        size = used / parts if parts >= _FEWEST_PAGES and used > 0 else self._bytes / self._parts
        return capacity / self.settings.writers / (size * self._parts / self._pages)

    def _most_writes(self) -> float:
        """Pages that may be written for each page used."""
        used, now = self.policy.experience.clock, self._now()
        uses, seconds = used - self._used_before, now - self._looked
        self._used_before, self._looked = used, now
        if self._budget is None or not self._pages or not uses:
            return math.inf
        return self._budget.to_spend * seconds / (self._bytes / self._pages) / uses

    def _failed(self) -> None:
        self._log.log(
            logging.WARNING, "failed", "hicache_ext: tier %s: admission failed", self._tier.name, exc_info=True
        )


def _first_parts(words: Words) -> Words:
    """Where each page begins: the parts of a page stand one after the other."""
    begins = np.ones(len(words), np.bool_)
    begins[1:] = (words[1:, 2:] != words[:-1, 2:]).any(axis=1)
    return np.flatnonzero(begins)

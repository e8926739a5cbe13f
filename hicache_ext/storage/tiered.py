"""Several stores as one: read in the order of ``retrieve``, written to every store of ``store``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.store import GetResult, PageBatch, PageStore, SetResult, StoreInfo

logger = logging.getLogger(__name__)

_WORST_LAST = (SetResult.STORED, SetResult.EXISTS, SetResult.REJECTED, SetResult.TIMEOUT, SetResult.ERROR)


class TieredStore:
    """A PageStore over PageStores. An outer store is asked only for what the inner ones did not have.

    A page counts as written when one store has it: a store that is down must not end SGLang's whole backup.
    """

    def __init__(self, retrieve: Sequence[PageStore], store: Sequence[PageStore]) -> None:
        self._retrieve = list(retrieve)
        self._store = list(store)
        self._all = list({id(tier): tier for tier in [*retrieve, *store]}.values())
        self._metrics = TierMetrics(self.name)

    @property
    def name(self) -> str:
        return "+".join(tier.name for tier in self._all)

    @property
    def metrics(self) -> TierMetrics:
        return self._metrics

    @property
    def tiers(self) -> list[PageStore]:
        return list(self._all)

    def describe(self) -> StoreInfo:
        return StoreInfo(
            name=self.name,
            type="tiered",
            shared=any(tier.describe().shared for tier in self._all),
            details={
                "retrieve": [tier.name for tier in self._retrieve],
                "store": [tier.name for tier in self._store],
            },
        )

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        for tier in self._all:
            tier.register_identity(digest, document)

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = [GetResult.MISS] * len(batch)
        missing = list(range(len(batch)))
        for tier in self._retrieve:
            if not missing:
                break
            for position, result in zip(missing, tier.get(batch.select(missing)), strict=True):
                # What went wrong further in is more telling than that a tier further out lacks the page.
                if result is not GetResult.MISS:
                    results[position] = result
            missing = [position for position in missing if results[position] is not GetResult.HIT]
        return results

    def set(self, batch: PageBatch) -> list[SetResult]:
        best = [SetResult.REJECTED] * len(batch)
        for number, tier in enumerate(self._store):
            answers = tier.set(batch)
            best = (
                answers
                if number == 0
                else [min(pair, key=_WORST_LAST.index) for pair in zip(best, answers, strict=True)]
            )
        return best

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        present = [False] * len(keys)
        for tier in self._retrieve:
            missing = [position for position, known in enumerate(present) if not known]
            if not missing:
                break
            for position, known in zip(missing, tier.contains([keys[i] for i in missing]), strict=True):
                present[position] = known
        return present

    def count_leading(self, keys: Sequence[bytes]) -> int:
        if len(self._retrieve) == 1:
            return self._retrieve[0].count_leading(keys)
        present = self.contains(keys)
        return present.index(False) if False in present else len(present)

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys need not be written: every tier that writes go to has them."""
        answers = [tier.contains(keys) for tier in self._store]
        return [all(known) for known in zip(*answers, strict=True)] if answers else [False] * len(keys)

    def count_leading_in_pool(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run that another node finds: in the shared tiers that writes go to (if any is)."""
        pool = [tier for tier in self._store if tier.describe().shared] or self._store
        return max((tier.count_leading(keys) for tier in pool), default=0)

    def remove(self, keys: Sequence[bytes]) -> int:
        wanted = list(dict.fromkeys(keys))
        # A page of two tiers is one page: their own counts cannot be added.
        present = [tier.contains(wanted) for tier in self._all]
        for tier in self._all:
            tier.remove(wanted)
        return sum(any(known) for known in zip(*present, strict=True))

    def clear(self, digests: Sequence[bytes] | None) -> int:
        return max((tier.clear(digests) for tier in self._all), default=0)

    def close(self) -> None:
        _close_all([tier.close for tier in self._all])


def _close_all(closers: Sequence[Callable[[], None]]) -> None:
    """Close every one, also when an earlier one raises; the first error comes out last."""
    first: Exception | None = None
    for closer in closers:
        try:
            closer()
        except Exception as error:
            logger.exception("closing a tier")
            first = first or error
    if first is not None:
        raise first

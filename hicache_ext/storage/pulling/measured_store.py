"""A tier that knows how long it takes: feeds the pull rule, changes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hicache_ext.storage.delegating import DelegatingStore
from hicache_ext.storage.pulling.linear_cost import LinearCost
from hicache_ext.storage.store import GetResult, PageBatch, PageStore

_COUNTED = (GetResult.HIT, GetResult.TIMEOUT, GetResult.ERROR)


class MeasuredStore(DelegatingStore):
    """``inner``, measured. ``read_cost`` is in bytes; ``take_found`` tells where a look-up found its pages."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.read_cost = LinearCost()
        self._found = threading.local()

    def get(self, batch: PageBatch) -> list[GetResult]:
        started = time.perf_counter()
        results = self.inner.get(batch)
        seconds = time.perf_counter() - started
        # A read that failed counts as if it had delivered: the time it took is what the next one may take.
        counted = [size for size, result in zip(batch.sizes, results, strict=True) if result in _COUNTED]
        if counted:
            self.read_cost.observe(sum(counted), seconds)
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        known = self.inner.contains(keys)
        self._count_found(sum(known))
        return known

    def count_leading(self, keys: Sequence[bytes]) -> int:
        leading = self.inner.count_leading(keys)
        self._count_found(leading)
        return leading

    def take_found(self) -> int:
        """Keys found by look-ups of this thread since the last call."""
        found: int = getattr(self._found, "count", 0)
        self._found.count = 0
        return found

    def _count_found(self, count: int) -> None:
        self._found.count = getattr(self._found, "count", 0) + count

"""The retry guard: pages whose transfer failed are tried again a few times, while there is time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.call_deadline import call_limit
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.wrapper import DelegatingStore

R = TypeVar("R", GetResult, SetResult)

_PAUSES = Backoff(0.015, math.inf)
"""Seconds before a retry."""
_LATEST_BEGIN = 0.25
"""Share of the timeout after which no retry begins: a retry may take as long as the first attempt."""


class RetryStore(DelegatingStore):
    """Tries ERROR pages again, and only those: MISS, CORRUPT, REJECTED and TIMEOUT are answers. Threads: any."""

    def __init__(
        self,
        inner: PageStore,
        retries: int,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``timeout``: seconds for a whole call without a shorter limit of its own."""
        super().__init__(inner)
        self._retries = retries
        self._timeout = timeout
        self._clock = clock
        self._sleep = sleep

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self._moved(batch, self.inner.get, GetResult.ERROR, "get")

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._moved(batch, self.inner.set, SetResult.ERROR, "set")

    def _moved(self, batch: PageBatch, move: Callable[[PageBatch], list[R]], error: R, call: str) -> list[R]:
        limit = call_limit()
        seconds = self._timeout if limit is None else min(self._timeout, limit.seconds)
        latest = self._clock() + seconds * _LATEST_BEGIN
        results = move(batch)
        for attempt in range(1, self._retries + 1):
            failed = _positions(results, error)
            pause = _PAUSES.pause(attempt)
            if not failed or self._clock() + pause > latest:
                break
            self._sleep(pause)
            self.metrics.add("retry", call, len(failed))
            results = list(results)
            for position, result in zip(failed, move(batch.select(failed)), strict=True):
                results[position] = result
        return results


def _positions(results: Sequence[R], wanted: R) -> list[int]:
    return [position for position, result in enumerate(results) if result is wanted]

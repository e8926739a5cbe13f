"""The time limit of each call: the configured timeout, or less where recent calls of the tier took less.

This guard only sets the limit (call_deadline.py). The store keeps to it, or the deadline guard for a store that cannot.
Reads and look-ups delay a first token; writes do not, and may take longer. Each kind learns separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_ext.runtime.call_deadline import ending_within
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.wrapper import DelegatingStore
from hicache_ext.storage.guards.learnt_limit import LearntLimit

LEAST_READ = 0.25
"""Seconds. Less would cut good calls: a busy machine, a server that forks, a new connection."""
LEAST_WRITE = 1.0
AT_LIMIT = 0.9
"""A call that took this share of its limit was cut; a look-up cannot report that itself."""

T = TypeVar("T")


class TimeLimitStore(DelegatingStore):
    """Sets the limit of each call of ``inner``. Threads: any."""

    def __init__(
        self,
        inner: PageStore,
        timeout: float,
        write_timeout: float,
        slow_call: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``timeout``: of a read or a look-up. ``slow_call``: the breaker's limit for a slow call; no call gets less
        than half of it, so that it is the one number to raise for a tier whose calls differ much. None: without a
        breaker nobody would try a tier again that was cut too early, so nothing is learnt.
        """
        super().__init__(inner)
        self._learns = slow_call is not None
        least = (slow_call or 0.0) / 2
        self._clock = clock
        self._reads = LearntLimit(timeout, max(LEAST_READ, least), clock)
        self._look_ups = LearntLimit(timeout, max(LEAST_READ, least), clock)
        self._writes = LearntLimit(write_timeout, max(LEAST_WRITE, least), clock)

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self._limited(
            self._reads,
            sum(batch.sizes),
            lambda: self.inner.get(batch),
            lambda results: batch.bytes_of(GetResult.HIT, results),
        )

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._limited(
            self._writes,
            sum(batch.sizes),
            lambda: self.inner.set(batch),
            lambda results: batch.bytes_of(SetResult.STORED, results),
        )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._limited(
            self._look_ups,
            len(keys),
            lambda: self.inner.contains(keys),
            lambda present: len(keys) if any(present) else 0,
        )

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self._limited(self._look_ups, len(keys), lambda: self.inner.count_leading(keys), lambda leading: leading)

    def remove(self, keys: Sequence[bytes]) -> int:
        with ending_within(self._writes.longest):
            return self.inner.remove(keys)

    def _limited(self, limit: LearntLimit, amount: int, call: Callable[[], T], seen: Callable[[T], int]) -> T:
        """``seen``: the amount that an answer is evidence for: absent pages take no time, and failed ones are no
        evidence."""
        seconds = limit.seconds(amount) if self._learns else limit.longest
        begun = self._clock()
        learnt = seconds < limit.longest
        with ending_within(seconds, learnt=learnt):
            answer = call()
        taken = self._clock() - begun
        if taken >= seconds * AT_LIMIT:
            (limit.observe_cut if learnt else limit.observe)(amount, taken)
        elif observed := seen(answer):
            limit.observe(observed, taken)
        return answer

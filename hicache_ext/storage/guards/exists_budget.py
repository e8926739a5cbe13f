"""The exists budget: look-ups on SGLang's scheduler thread are answered within milliseconds.

Decode nodes look pages up on the scheduler's thread, where a store that hangs would stop every request. There a look-up
runs on another thread. What is not known within the budget is answered as absent; what the look-up finds later is kept
for a few seconds for the next one. Calls of other threads go straight through.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.contract.wrapper import DelegatingStore
from hicache_ext.storage.guards.scheduler import must_answer_at_once

logger = logging.getLogger(__name__)

_LIFE = 5.0
"""Seconds for which a found page is answered as present. A hint only: the read may still miss."""
_MOST_ENTRIES = 65536
_MOST_CALLS = 4
"""With so many calls left behind, further look-ups are answered from memory alone."""
_CLOSE_WAIT = 10.0


class ExistsBudgetStore(DelegatingStore):
    """Answers the scheduler's look-ups within ``budget`` seconds. Threads: any."""

    def __init__(self, inner: PageStore, budget: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._budget = budget
        self._clock = clock
        self._threads = ThreadPool(f"hicache-{inner.name}-exists")
        self._lock = threading.Lock()
        self._epoch = 0
        """Counts removals."""
        self._present: dict[bytes, float] = {}
        """Key -> end of life."""
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if not must_answer_at_once():
            return self.inner.contains(keys)
        self._check_open()
        known = self._known(keys)
        asked = [key for key, present in zip(keys, known, strict=True) if not present]
        if asked and self._ends_in_time(lambda: self._look_up(asked)):
            known = self._known(keys)
        return known

    def count_leading(self, keys: Sequence[bytes]) -> int:
        if not must_answer_at_once():
            return self.inner.count_leading(keys)
        self._check_open()
        known = leading(self._known(keys))
        asked, epoch = list(keys[known:]), self._epoch
        if asked and self._ends_in_time(lambda: self._remember(asked[: self.inner.count_leading(asked)], epoch)):
            known = leading(self._known(keys))
        return known

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = self.inner.get(batch)
        gone = [key for key, result in zip(batch.keys, results, strict=True) if result is not GetResult.HIT]
        if self._present:
            self._forget(gone)
        return results

    def remove(self, keys: Sequence[bytes]) -> int:
        try:
            return self.inner.remove(keys)
        finally:
            self._forget(keys)

    def forget_look_ups(self) -> None:
        with self._lock:
            self._epoch += 1
            self._present.clear()

    def close(self) -> None:
        self._closed = True
        try:
            self.inner.close()
        finally:
            if self._threads.close(_CLOSE_WAIT):
                logger.warning("hicache_ext: tier %s: a look-up hangs in the store; its thread ends with it", self.name)

    def _look_up(self, keys: Sequence[bytes]) -> None:
        epoch = self._epoch
        present = self.inner.contains(keys)
        self._remember([key for key, known in zip(keys, present, strict=True) if known], epoch)

    def _ends_in_time(self, work: Callable[[], None]) -> bool:
        """Run ``work`` on another thread; whether it ended within the budget."""

        def caught() -> None:
            try:
                work()
            except StoreClosedError:
                pass  # the store was closed during the look-up
            except Exception as error:  # noqa: BLE001 - nobody may be waiting for it any more
                logger.warning("hicache_ext: tier %s: a look-up raised %r", self.name, error)

        if self._threads.left_behind >= _MOST_CALLS:
            self.metrics.add("exists_budget", "busy")
            return False
        try:
            call = self._threads.start(caught)
        except RuntimeError:
            return False
        if call.ended_within(self._budget):
            return True
        self.metrics.add("exists_budget", "exceeded")
        return False

    def _known(self, keys: Sequence[bytes]) -> list[bool]:
        now = self._clock()
        with self._lock:
            return [self._present.get(key, 0.0) > now for key in keys]

    def _remember(self, keys: Iterable[bytes], epoch: int) -> None:
        """``epoch``: when the look-up began. What was removed or cleared since must not be remembered."""
        now = self._clock()
        with self._lock:
            if epoch != self._epoch:
                return
            for key in keys:
                self._present.pop(key, None)
                self._present[key] = now + _LIFE
            while self._present:
                oldest = next(iter(self._present))
                if len(self._present) <= _MOST_ENTRIES and self._present[oldest] > now:
                    break
                del self._present[oldest]

    def _forget(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._epoch += 1
            for key in keys:
                self._present.pop(key, None)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(self.name)

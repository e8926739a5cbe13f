"""The negative cache: a page that was just absent is not asked for again for a short time.

SGLang asks for the same chain again and again while a prompt waits, and each time the first missing page costs a remote
tier a round trip. Writes of this process are visible at once, those of others when the entry expires. A look-up during
which the tier counted trouble is not remembered: its answers may mean that the tier could not be asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.wrapper import DelegatingStore

_MOST_ENTRIES = 65536
"""About 10 MB."""

_Keys = set[bytes]


class NegativeCacheStore(DelegatingStore):
    """For ``life`` seconds after ``inner`` answered MISS or False, answers the same from memory. Threads: any."""

    def __init__(self, inner: PageStore, life: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._life = life
        self._clock = clock
        self._lock = threading.Lock()
        self._epoch = 0
        self._absent: dict[bytes, float] = {}
        """Key -> when it expires, in that order: all entries live equally long."""
        self._written: list[_Keys] = []
        """For each look-up under way, the keys written since it began: it may have looked before the write."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        known = self._known_absent(batch.keys)
        wanted = [position for position, absent in enumerate(known) if not absent]
        results = [GetResult.MISS] * len(batch)
        with self._looking() as written:
            answers = self.inner.get(batch if len(wanted) == len(batch) else batch.select(wanted)) if wanted else []
            for position, answer in zip(wanted, answers, strict=True):
                results[position] = answer
            self._remember([batch.keys[i] for i in wanted if results[i] is GetResult.MISS], written)
        self._count(len(batch) - len(wanted))
        return results

    def set(self, batch: PageBatch) -> list[SetResult]:
        try:
            return self.inner.set(batch)
        finally:
            with self._lock:
                for key in batch.keys:
                    self._absent.pop(key, None)
                for written in self._written:
                    written.update(batch.keys)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        known = self._known_absent(keys)
        wanted = [position for position, absent in enumerate(known) if not absent]
        present = [False] * len(keys)
        if not wanted and keys:
            self._count(len(keys))
            return present
        with self._looking() as written:
            trouble = self._trouble()
            asked = keys if len(wanted) == len(keys) else [keys[i] for i in wanted]
            for position, answer in zip(wanted, self.inner.contains(asked), strict=True):
                present[position] = answer
            if self._trouble() == trouble:
                self._remember([keys[i] for i in wanted if not present[i]], written)
        self._count(len(keys) - len(wanted))
        return present

    def forget_look_ups(self) -> None:
        """Pages may have come on a way that this guard has not seen."""
        with self._lock:
            self._epoch += 1
            self._absent.clear()

    def count_leading(self, keys: Sequence[bytes]) -> int:
        known = self._known_absent(keys)
        asked = keys[: known.index(True)] if True in known else keys
        self._count(len(keys) - len(asked))
        if not asked and keys:
            return 0
        with self._looking() as written:
            trouble = self._trouble()
            leading = self.inner.count_leading(asked)
            if self._trouble() == trouble:
                self._remember(asked[leading : leading + 1], written)
        return leading

    def _trouble(self) -> int:
        return sum(self.metrics.total(event) for event in ("error", "timeout", "rejected"))

    def _known_absent(self, keys: Sequence[bytes]) -> list[bool]:
        now = self._clock()
        with self._lock:
            return [self._absent.get(key, 0.0) > now for key in keys] if self._absent else [False] * len(keys)

    @contextmanager
    def _looking(self) -> Iterator[tuple[_Keys, int]]:
        written: _Keys = _Keys()
        with self._lock:
            epoch = self._epoch
            self._written.append(written)
        try:
            yield written, epoch
        finally:
            with self._lock:
                # Compared by identity: two look-ups may hold equal sets.
                self._written = [other for other in self._written if other is not written]

    def _remember(self, keys: Iterable[bytes], looking: tuple[_Keys, int]) -> None:
        now, (written, epoch) = self._clock(), looking
        with self._lock:
            for key in keys:
                if key not in written and epoch == self._epoch:
                    self._absent.pop(key, None)
                    self._absent[key] = now + self._life
            while self._absent:
                oldest = next(iter(self._absent))
                if len(self._absent) <= _MOST_ENTRIES and self._absent[oldest] > now:
                    break
                del self._absent[oldest]

    def _count(self, answered: int) -> None:
        if answered:
            self.metrics.add("negative_cache", "hit", answered)

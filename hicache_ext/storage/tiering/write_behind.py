"""Writing in the background: pages are copied out of host memory into a bounded queue, and a thread writes them.

``WriteBehind`` is the queue, also of promotion.py. ``AsyncStore`` is a PageStore with the policy ``async``. A queued
page is served from the queue, so that STORED means readable: in this process at once, in others when it is written.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hicache_ext.errors import StoreClosedError
from hicache_ext.page.copying import scatter
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.wrapper import DelegatingStore

logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 64
_PATIENCE = 5.0
"""Seconds; a store with a deadline ends its call by then, and its pages leave the queue in any case."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """``capacity`` in bytes of payload; ``drain`` in seconds: how long close() goes on writing.

    ``patience``: seconds for which an offer waits for space while nothing leaves the queue. A batch may be larger than
    the queue: without waiting, its end would always be dropped.
    """

    capacity: int = 256 * 1024 * 1024
    drain: float = 5.0
    patience: float = 0.0


class WriteBehind:
    """Pages to be written to one store, in order, each key once. Thread-safe. Its thread starts with the first page.

    Counted in the metrics of the store under the name of the queue: ``dropped_pages``, the levels ``queue_pages`` and
    ``queue_bytes``. A store that opens late changes its metrics then, so they are asked for each time.
    """

    def __init__(
        self,
        store: PageStore,
        settings: QueueSettings,
        *,
        queue: str,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_batch`` is called before each batch is taken, and may wait."""
        self._store = store
        self._settings = settings
        self._queue = queue
        self._before_batch = before_batch
        self._condition = threading.Condition()
        self._waiting: dict[bytes, bytes] = {}
        """Key -> payload, oldest first, including the batch under way."""
        self._bytes = 0
        self._under_way: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        """Keys of the batch under way that were forgotten: removed from the store after the write."""
        self._closing = False
        self._deadline = 0.0
        self._batches_done = 0
        self._stalled = False
        """An offer has waited in vain: nobody waits again until something has left the queue."""
        self._loop = BackgroundLoop(f"hicache-{queue}", self._write_waiting)
        self._publish_levels()

    @property
    def _metrics(self) -> TierMetrics:
        return self._store.metrics

    def offer(self, batch: PageBatch, positions: Iterable[int]) -> list[SetResult]:
        """Copy the pages at ``positions`` into the queue: STORED, EXISTS (queued already) or REJECTED (no space).

        Waits for space as ``patience`` says.
        """
        results: list[SetResult] = []
        with self._condition:
            for position in positions:
                key, size = batch.keys[position], batch.sizes[position]
                if key not in self._waiting:
                    self._wait_for_memory(size)
                while key in self._forgotten:
                    self._condition.wait()
                if self._closing or self._bytes + size > self._settings.capacity:
                    results.append(SetResult.EXISTS if key in self._waiting else SetResult.REJECTED)
                elif key in self._waiting:
                    results.append(SetResult.EXISTS)
                else:
                    self._waiting[key] = b"".join(batch.buffers[position])
                    self._bytes += size
                    results.append(SetResult.STORED)
            if SetResult.STORED in results:
                self._loop.wake()
            self._publish_levels()
        if dropped := results.count(SetResult.REJECTED):
            self._metrics.add("dropped_pages", self._queue, dropped)
        return results

    def _wait_for_memory(self, size: int) -> None:
        """Wait while the queue moves; the condition is held."""
        capacity = self._settings.capacity
        if not self._settings.patience or size > capacity:
            return
        done, deadline = self._batches_done, time.monotonic() + self._settings.patience
        while self._bytes + size > capacity and not self._closing and not self._stalled:
            self._loop.wake()
            self._publish_levels()
            self._condition.wait(max(0.0, deadline - time.monotonic()))
            if self._batches_done != done:
                done, deadline = self._batches_done, time.monotonic() + self._settings.patience
            elif time.monotonic() >= deadline:
                self._stalled = True

    def payload(self, key: bytes) -> bytes | None:
        """The page, while it is queued."""
        with self._condition:
            return None if key in self._forgotten else self._waiting.get(key)

    def waiting(self, keys: Sequence[bytes]) -> list[bool]:
        with self._condition:
            return [key in self._waiting and key not in self._forgotten for key in keys]

    def forgotten(self) -> set[bytes]:
        """Keys that are being written and will be removed again."""
        with self._condition:
            return set(self._forgotten)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop pages; one that is being written is removed from the store afterwards."""
        with self._condition:
            for key in keys:
                if key in self._under_way:
                    self._forgotten.add(key)
                elif key in self._waiting:
                    self._bytes -= len(self._waiting.pop(key))
            self._publish_levels()
            self._condition.notify_all()

    def forget_identities(self, digests: Sequence[bytes] | None) -> int:
        """Drop the pages of these identities (None: all); returns how many identities had some."""
        chosen = None if digests is None else set(digests)
        with self._condition:
            wanted = [key for key in self._waiting if key not in self._forgotten]
            keys = [key for key in wanted if chosen is None or key[:IDENTITY_LENGTH] in chosen]
        self.forget(keys)
        return len({key[:IDENTITY_LENGTH] for key in keys})

    def wait_for_batch_under_way(self) -> None:
        """Return when the batch under way is written, and its forgotten pages are removed."""
        with self._condition:
            under_way = set(self._under_way)
            self._condition.wait_for(lambda: under_way.isdisjoint(self._under_way))

    def wait_until_written(self, timeout: float) -> bool:
        """Whether the queue became empty within ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """Write until the drain deadline, drop and count the rest, end the thread. Idempotent."""
        with self._condition:
            if not self._closing:
                self._closing = True
                self._deadline = time.monotonic() + self._settings.drain
            self._condition.notify_all()
        self.wait_until_written(self._deadline - time.monotonic())
        self._loop.stop()
        with self._condition:
            if self._waiting:
                logger.warning("hicache_ext: %d pages of %s were dropped at the end", len(self._waiting), self._queue)
                self._metrics.add("dropped_pages", self._queue, len(self._waiting))
            self._waiting.clear()
            self._bytes = 0
            self._publish_levels()
            self._condition.notify_all()

    def _write_waiting(self) -> float:
        """Until nothing waits, or close() has waited long enough."""
        while True:
            with self._condition:
                if not self._waiting or (self._closing and time.monotonic() > self._deadline):
                    return math.inf
                closing = self._closing
            if not closing:
                self._before_batch()
            with self._condition:
                keys = [key for key, _ in zip(self._waiting, range(_PAGES_AT_ONCE), strict=False)]
                self._under_way = set(keys)
                batch = PageBatch(keys, [[memoryview(self._waiting[key])] for key in keys])
            self._write(batch)

    def _write(self, batch: PageBatch) -> None:
        if not len(batch):
            return
        try:
            results = self._store.set(batch)
        except Exception:
            # A store that raises breaks its promise; the pages are lost, the thread goes on.
            logger.exception("hicache_ext: writing %d pages of %s", len(batch), self._queue)
            results = [SetResult.ERROR] * len(batch)
        if failed := sum(not result.durable for result in results):
            self._metrics.add("dropped_pages", f"{self._queue}_failed", failed)
        self._written(results)
        removed: set[bytes] = set()
        while True:
            with self._condition:
                unwanted = self._forgotten - removed
                if not unwanted:
                    self._finish_batch(batch.keys)
                    return
            self._remove(list(unwanted))
            removed |= unwanted

    def _written(self, results: Sequence[SetResult]) -> None:
        """Count how the pages of a batch were written, beside what is counted here."""

    def _finish_batch(self, keys: Sequence[bytes]) -> None:
        self._batches_done += 1
        self._stalled = False
        for key in keys:
            self._bytes -= len(self._waiting.pop(key))
        self._under_way.clear()
        self._forgotten.clear()
        self._publish_levels()
        self._condition.notify_all()

    def _remove(self, keys: list[bytes]) -> None:
        try:
            self._store.remove(keys)
        except Exception:
            logger.exception("hicache_ext: removing pages of %s", self._queue)

    def _publish_levels(self) -> None:
        self._metrics.set_level("queue_pages", self._queue, len(self._waiting))
        self._metrics.set_level("queue_bytes", self._queue, self._bytes)


class AsyncStore(DelegatingStore):
    """A PageStore that writes to ``inner`` in the background. Closing it drains the queue and closes ``inner``."""

    def __init__(self, inner: PageStore, settings: QueueSettings | None = None) -> None:
        super().__init__(inner)
        self._queue = WriteBehind(inner, replace(settings or QueueSettings(), patience=_PATIENCE), queue="async")
        self._closed = False

    def get(self, batch: PageBatch) -> list[GetResult]:
        forgotten = self._queue.forgotten()
        results = [self._get_waiting(key, segments) for key, segments in zip(batch.keys, batch.buffers, strict=True)]
        taken = results.count(GetResult.HIT)
        # A page that is not queued now was written or never offered: ask the store.
        absent = [i for i, result in enumerate(results) if result is None and batch.keys[i] not in forgotten]
        if absent or self._closed:
            for position, result in zip(absent, self.inner.get(batch.select(absent)), strict=True):
                results[position] = result
        self.metrics.add("get", "hit", taken)
        return [result or GetResult.MISS for result in results]

    def _get_waiting(self, key: bytes, segments: Sequence[memoryview]) -> GetResult | None:
        payload = self._queue.payload(key)
        if payload is None:
            return None
        if len(payload) != sum(segment.nbytes for segment in segments):
            self._queue.forget([key])
            return GetResult.CORRUPT
        scatter(memoryview(payload), segments)
        return GetResult.HIT

    def set(self, batch: PageBatch) -> list[SetResult]:
        if self._closed:
            raise StoreClosedError(self.name)
        return self._queue.offer(batch, range(len(batch)))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        waiting, forgotten = self._queue.waiting(keys), self._queue.forgotten()
        written = self.inner.contains(keys)
        return [a or (b and key not in forgotten) for key, a, b in zip(keys, waiting, written, strict=True)]

    def count_leading(self, keys: Sequence[bytes]) -> int:
        if not any(self._queue.waiting(keys)) and self._queue.forgotten().isdisjoint(keys):
            return self.inner.count_leading(keys)
        return leading(self.contains(keys))

    def remove(self, keys: Sequence[bytes]) -> int:
        wanted = list(dict.fromkeys(keys))
        present = sum(self.contains(wanted))
        self._queue.forget(wanted)
        self._queue.wait_for_batch_under_way()
        self.inner.remove(wanted)
        return present

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Does not wait for a batch under way: its pages are removed after the write.

        Until then a second call may count the same identity again.
        """
        waiting = self._queue.forget_identities(digests)
        return max(waiting, self.inner.clear(digests))

    def wait_until_written(self, timeout: float) -> bool:
        return self._queue.wait_until_written(timeout)

    def drain(self) -> None:
        """Write what waits, as long as the settings say; nothing more is taken."""
        self._closed = True
        self._queue.close()

    def close(self) -> None:
        self.drain()
        self.inner.close()

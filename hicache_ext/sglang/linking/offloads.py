"""Device pages on their way to the store: gathered into staging memory by one thread, written by another.

What counts as room is decided by what SGLang has handed over and not yet taken back, which all ranks see alike: SGLang
keeps one list of what is under way, and a rank that refused on its own would answer for another rank's pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.sglang.backend import HiCacheExtBackend
from hicache_ext.sglang.linking.staging import Pages, Portion, Staging
from hicache_ext.sglang.served_pools import BoundPool

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 1.0
"""Seconds after which a wait for staging memory looks whether it is still wanted."""
_GATHER_WAIT = 2.0
"""Seconds that a flush waits for pages to leave the device. SGLang flushes when nothing runs: they are written."""


@dataclass(slots=True, eq=False)
class _Offload:
    """What SGLang handed over in one call. ``left``: portions that are not written yet, and one for the gathering."""

    pages: list[Pages]
    pools: dict[str, BoundPool]
    events: Sequence[Any]
    counts: Counter[str]
    """Pages by pool that has memory, equal on all ranks."""
    generation: int
    begun: float = field(default_factory=time.monotonic)
    left: int = 1
    good: bool = True


class Offloads:
    """See the module docstring. Threads: ``offload``, ``completed``, ``pop`` and ``reset`` on the scheduler's."""

    def __init__(self, staging: Staging, metrics: TierMetrics, writer: HiCacheExtBackend) -> None:
        self._staging, self._metrics, self._writer = staging, metrics, writer
        self._log = LimitedLog(logger)
        self._lock = threading.Lock()
        self._moved_on = threading.Condition(self._lock)
        """A call was gathered, or has ended."""
        self._reading_device = threading.Lock()
        self._on_device = self._under_way = 0
        """Calls that are not gathered, and calls that are not written either."""
        self._handed_over: deque[_Offload] = deque()
        """What SGLang has not taken back, in order; it counts against the room until then."""
        self._generation = 0
        self._closed = False
        self._to_gather: SimpleQueue[_Offload | None] = SimpleQueue()
        self._to_write: SimpleQueue[tuple[_Offload, Portion] | None] = SimpleQueue()
        self._threads = ThreadPool("hicache-link-offload")
        self._threads.start(self._gather_all)
        self._threads.start(self._write_all)

    def has_room(self, pages: Sequence[Pages]) -> bool:
        """Whether these pages may be handed over now; alike on all ranks. Something always may when nothing is."""
        with self._lock:
            taken = sum((job.counts for job in self._handed_over), _counts(pages))
            fits = all(count <= self._staging.most_pages(source) for source, count in taken.items())
            return fits or not self._handed_over

    def offload(self, pages: Sequence[Pages], pools: dict[str, BoundPool] | None, events: Sequence[Any]) -> None:
        """Take over pages; ``pools`` are those that this rank writes. None: they cannot be stored, and count as failed
        once it is their turn."""
        job = _Offload(list(pages) if pools else [], pools or {}, events, _counts(pages), self._generation)
        job.good = pools is not None
        wanted = bool(job.pages) and not self._closed
        with self._lock:
            self._handed_over.append(job)
            self._under_way += 1
            self._on_device += wanted
        if wanted:
            self._to_gather.put(job)
        else:
            self._ended(job)

    def completed(self) -> int:
        """How many of what was handed over are done, none of them behind one that is not."""
        with self._lock:
            return next((done for done, job in enumerate(self._handed_over) if job.left), len(self._handed_over))

    def pop(self) -> bool:
        """Take back what is done and was handed over first; whether it was stored."""
        with self._lock:
            done = bool(self._handed_over) and not self._handed_over[0].left
            return done and self._handed_over.popleft().good

    def waiting(self) -> int:
        """Calls of SGLang's that are not done."""
        with self._lock:
            return sum(bool(job.left) for job in self._handed_over)

    def reset(self, seconds: float = _GATHER_WAIT) -> None:
        """Forget what SGLang waits for. What was gathered is written; what could not be within ``seconds`` is dropped.
        From the return on no page of the device is read for what was handed over before."""
        with self._moved_on:
            self._moved_on.wait_for(lambda: not self._on_device, seconds)
            self._generation += 1
            self._handed_over.clear()
        with self._reading_device:
            pass

    def close(self, seconds: float, drain: float = 0.0) -> bool:
        """Write what was handed over, for ``drain`` seconds, and end the threads; False where one was still in a call
        after ``seconds`` more."""
        with self._moved_on:
            self._moved_on.wait_for(lambda: not self._under_way, drain)
        self._closed = True
        self.reset(0.0)
        self._to_gather.put(None)
        self._to_write.put(None)
        return self._threads.close(seconds) == 0

    # -- threads ---------------------------------------------------------------------------------------------------

    def _gather_all(self) -> None:
        self._staging.enter_thread()
        while (job := self._to_gather.get()) is not None:
            try:
                self._gather(job)
            except Exception as error:  # noqa: BLE001 - one call's trouble must not end the thread
                self._failed(job, "copy", error)
            finally:
                with self._moved_on:
                    self._on_device -= 1
                    self._moved_on.notify_all()
                self._ended(job)
            del job  # it holds indices

    def _gather(self, job: _Offload) -> None:
        for event in job.events:
            event.synchronize()
        for pages in job.pages:
            if not any(name in job.pools for name in self._staging.pools_on[pages.source]):
                continue
            for some in pages.portions(self._staging.portion_pages(pages.source)):
                portion = self._memory(job, some)
                if portion is None:
                    return
                with self._reading_device:
                    if self._over(job):
                        portion.release()
                        return
                    try:
                        self._staging.gather(portion)
                    except BaseException:
                        portion.release()
                        raise
                with self._lock:
                    job.left += 1
                self._to_write.put((job, portion))

    def _memory(self, job: _Offload, pages: Pages) -> Portion | None:
        while not self._over(job):
            if (portion := self._staging.take("offload", pages, _LOOK_AGAIN)) is not None:
                return portion
        return None

    def _write_all(self) -> None:
        while (given := self._to_write.get()) is not None:
            job, portion = given
            try:
                if not self._closed and job.good and not self._write(job, portion):
                    self._failed(job, "store")
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(job, "store", error)
            finally:
                portion.release()
                self._ended(job)
            del given, job, portion

    def _write(self, job: _Offload, portion: Portion) -> bool:
        """The pools beside a component come before its own: where that is found, they are there."""
        for name in self._staging.pools_on[portion.pages.source]:
            pool = job.pools.get(name)
            if pool is not None and not self._writer.write_whole(pool, portion.pages.keys, portion.host_indices):
                return False
        return True

    def _over(self, job: _Offload) -> bool:
        """Whether nobody wants the rest of it."""
        return self._closed or not job.good or job.generation != self._generation

    def _failed(self, job: _Offload, why: str, error: BaseException | None = None) -> None:
        job.good = False
        if job.generation == self._generation:
            self._metrics.add("offload_failed", why)
        if error is not None:
            self._log.log(logging.ERROR, why, "hicache_ext: pages were not stored: %s", error, exc_info=error)

    def _ended(self, job: _Offload) -> None:
        """A part of it has ended."""
        with self._lock:
            job.good = job.good and not self._closed
            job.left -= 1
            if not job.left:
                self._metrics.add("offload", "stored" if job.good else "failed")
                self._metrics.observe("offload", time.monotonic() - job.begun)
                self._under_way -= 1
                self._moved_on.notify_all()


def _counts(pages: Sequence[Pages]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for some in pages:
        counts[some.source] += len(some.keys)
    return counts

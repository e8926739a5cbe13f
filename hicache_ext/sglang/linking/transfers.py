"""Pages on their way through the external linker: from the tiers to the device, and from the device to the tiers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.threads import Call, ThreadPool
from hicache_ext.sglang.linking.staging import Link, Pages, Portion
from hicache_ext.sglang.served_pools import BoundPool

logger = logging.getLogger(__name__)


# -- loads -------------------------------------------------------------------------------------------------------------
# Stored pages on their way to the device.
#
# A request's pages are read and verified before SGLang is told that they will come: what cannot be read is computed,
# and no request of a batch can fail because a page was missing. Most were read while it was in the queue (ahead.py).
# They wait in staging memory; what does not fit there moves on to the device at once, whose slots nobody but the
# request has. When the batch starts, what waits moves layer by layer. Reasons: docs/decisions/linker.md.


@dataclass(slots=True, eq=False)
class _Load:
    """The pages of one request that are to be read. ``waiting`` are those in staging memory, the oldest first."""

    pages: list[Pages] = field(default_factory=list)
    events: Sequence[Any] = ()
    begun: float = field(default_factory=time.monotonic)
    waiting: deque[Portion] = field(default_factory=deque)
    over: bool = False
    """Nothing of it may touch the device any more."""
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while its pages go to the device, and to say that it is over."""


class Loads:
    """See the module docstring. Threads: every call on the scheduler's."""

    def __init__(self, link: Link, counter: Any, make_place: Callable[[], bool]) -> None:
        """``counter``: SGLang's LayerWiseLoadCounter. ``make_place`` gives staging memory back that no load has;
        whether there was any."""
        self._staging, self._reader = link.staging, link.backend
        self._metrics, self._threads, self._seconds = link.metrics, link.threads, link.seconds
        self._counter = counter
        self._make_other_place = make_place
        self._log = LimitedLog(logger)
        self._lock = threading.Lock()
        self._ready: dict[str, _Load] = {}
        """Of requests whose batch has not started."""
        self._started: dict[int, Call[None]] = {}
        self._closed = False

    def read(
        self, rid: str, pages: list[Pages], events: Callable[[], Sequence[Any]], ahead: Sequence[Portion] = ()
    ) -> bool:
        """Whether all pages of a request were read; they wait for ``start`` then. What it raises leaves nothing behind.

        ``events`` records when the device slots may be written; ``ahead`` was read before.
        """
        load = _Load(waiting=deque(ahead))
        outcome = "error"
        try:
            load.pages = _given_places(load.waiting, pages)
            # After the places: those of pages that were read ahead are picked on the device, on the same stream.
            load.events = events()
            outcome = self._outcome(rid, load)
        finally:
            if outcome != "read":
                self._end(load)
        self._metrics.add("load", outcome)
        self._metrics.observe("load", time.monotonic() - load.begun)
        return outcome == "read"

    def _outcome(self, rid: str, load: _Load) -> str:
        if self._closed or rid in self._ready:
            return "refused"
        if load.pages:
            if self._threads.left_behind:
                # A store has not answered in time, and still has not: others would wait for it as long.
                return "refused"
            try:
                call = self._threads.start(lambda: self._read(load))
            except RuntimeError:  # no thread to be had
                return "refused"
            if not call.ended_within(self._seconds):
                return "late"
            if (error := call.error) is not None:
                self._log.log(logging.ERROR, "read", "hicache_ext: pages were not loaded: %s", error, exc_info=error)
                return "error"
            if not call.result():
                return "missing"
        with self._lock:
            self._ready[rid] = load
        return "read"

    def cancel(self, rid: str) -> bool:
        """Forget a request whose batch has not started; from the return on its slots are not written."""
        with self._lock:
            load = self._ready.pop(rid, None)
        if load is None:
            return False
        self._end(load)
        return True

    def start(self, events: Sequence[Any]) -> int:
        """Begin to move the pages of all requests that are ready; the batch's number, -1 where there are none."""
        with self._lock:
            loads, self._ready = list(self._ready.values()), {}
        if not loads:
            return -1
        portions = [portion for load in loads for portion in _taken_out(load)]
        index: int = self._counter.update_producer()
        try:
            self._started[index] = self._threads.start(lambda: self._move(index, portions, events))
        except RuntimeError as error:
            self._fail(index, portions, error)
        return index

    def finish(self, index: int) -> bool:
        """Wait until the batch is on the device; whether all of it is. Nothing of it is written any more then."""
        landed = bool(self._counter.finish(index))
        call = self._started.pop(index, None)
        if call is not None:
            # Its layers are done: what is left of it is to give memory back.
            call.ended_within(threading.TIMEOUT_MAX)
        return landed

    def reset(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """Forget everything that was not started, and wait for what was: it only copies."""
        with self._lock:
            ready, self._ready = list(self._ready.values()), {}
        for load in ready:
            self._end(load)
        for call in self._started.values():
            call.ended_within(seconds)
        self._started.clear()
        self._counter.reset()

    def close(self, seconds: float) -> None:
        self._closed = True
        self.reset(seconds)

    # -- threads ---------------------------------------------------------------------------------------------------

    def _read(self, load: _Load) -> bool:
        """Read everything, a portion at a time; whether all of it is there."""
        self._staging.enter_thread()
        for pages in load.pages:
            for some in pages.portions(self._staging.reserved_pages(pages.source)):
                portion = self._memory(load, some)
                if portion is None:
                    return False
                if not portion.read(self._reader):
                    return False
                with load.writing:
                    if load.over:
                        portion.release()
                        return False
                    load.waiting.append(portion)
        return True

    def _memory(self, load: _Load, pages: Pages) -> Portion | None:
        """Staging memory; where there is none, what waits there the longest makes place and goes to the device."""
        while not load.over:
            if (portion := self._staging.take("load", pages)) is not None:
                return portion
            if not self._make_place(load):
                # A batch that has started has it, and only copies: what is read ahead leaves some to loads.
                return self._staging.take("load", pages, self._seconds / 2)
        return None

    def _make_place(self, load: _Load) -> bool:
        with self._lock:
            others = list(self._ready.values())
        for candidate in [load, *others]:
            with candidate.writing:
                if candidate.over or not candidate.waiting:
                    continue
                portion = candidate.waiting[0]
                _wait_for(candidate.events)
                self._staging.scatter([portion])
                candidate.waiting.popleft().release()
                return True
        return self._make_other_place()

    def _move(self, index: int, portions: Sequence[Portion], events: Sequence[Any]) -> None:
        try:
            self._staging.enter_thread()
            _wait_for(events)
            if portions:
                self._staging.scatter(portions, lambda layer: self._counter.complete(index, layer))
            else:
                for layer in range(self._staging.layers):
                    self._counter.complete(index, layer)
        except BaseException as error:  # noqa: BLE001 - SGLang waits for every layer
            self._fail(index, portions, error)
        finally:
            for portion in portions:
                portion.release()

    def _fail(self, index: int, portions: Sequence[Portion], error: BaseException) -> None:
        self._metrics.add("load", "copy_failed")
        self._log.log(logging.ERROR, "copy", "hicache_ext: a batch was not loaded: %s", error, exc_info=error)
        for portion in portions:
            portion.release()
        self._counter.fail(index, error)

    def _end(self, load: _Load) -> None:
        """Give its memory back; waits for a copy to the device, not for a store."""
        for portion in _taken_out(load):
            portion.release()


def _given_places(ahead: deque[Portion], wanted: Sequence[Pages]) -> list[Pages]:
    """Give pages that were read before their places on the device, and let go of the rest: it has none. What is wanted
    and is not among them."""
    by_source = {pages.source: pages for pages in wanted}
    found: dict[str, set[str]] = {source: set() for source in by_source}
    for portion in list(ahead):
        source = portion.pages.source
        keys = portion.give_places(by_source[source]) if source in by_source else []
        if keys:
            found[source].update(keys)
        else:
            ahead.remove(portion)
            portion.release()
    left = []
    for pages in wanted:
        if not found[pages.source]:
            left.append(pages)
        elif others := [number for number, key in enumerate(pages.keys) if key not in found[pages.source]]:
            places = pages.device_indices.view(-1, pages.page_size)[others].reshape(-1)
            left.append(Pages(pages.source, [pages.keys[number] for number in others], places, pages.page_size))
    return left


def _taken_out(load: _Load) -> list[Portion]:
    """What waits of a load; from now on nobody else moves it. Waits for a copy under way."""
    with load.writing:
        load.over = True
        portions = list(load.waiting)
        load.waiting.clear()
    return portions


def _wait_for(events: Sequence[Any]) -> None:
    for event in events:
        event.synchronize()


# -- offloads ----------------------------------------------------------------------------------------------------------
# Device pages on their way to the store: gathered into staging memory by one thread, written by another.
#
# What counts as room is decided by what SGLang has handed over and not yet taken back, which all ranks see alike:
# SGLang keeps one list of what is under way, and a rank that refused on its own would answer for another rank's pages.

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
    generation: int
    begun: float = field(default_factory=time.monotonic)
    left: int = 1
    good: bool = True


class Offloads:
    """See the module docstring. Threads: ``offload``, ``completed``, ``pop`` and ``reset`` on the scheduler's."""

    def __init__(self, link: Link) -> None:
        self._staging, self._writer, self._metrics = link.staging, link.backend, link.metrics
        sources = link.staging.pools_on
        self._room = sum(self._bytes_of_page(source) * link.staging.most_pages(source) for source in sources)
        self._log = LimitedLog(logger)
        self._lock = threading.Lock()
        self._moved_on = threading.Condition(self._lock)
        """A call was gathered, or has ended."""
        self._reading_device = threading.Lock()
        self._on_device = self._under_way = 0
        """Calls that are not gathered, and calls that are not written either."""
        self._costs: deque[int] = deque()
        """Of what SGLang has handed over and not taken back, in order."""
        self._unfinished: deque[_Offload] = deque()
        self._results: deque[bool] = deque()
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
            return not self._costs or sum(self._costs) + self._cost(pages) <= self._room

    def offload(self, pages: Sequence[Pages], pools: dict[str, BoundPool] | None, events: Sequence[Any]) -> None:
        """Take over pages; ``pools`` are those that this rank writes. None: they cannot be stored, and count as failed
        once it is their turn."""
        job = _Offload(list(pages) if pools else [], pools or {}, events, self._generation)
        job.good = pools is not None
        wanted = bool(job.pages) and not self._closed
        with self._lock:
            self._costs.append(self._cost(pages))
            self._unfinished.append(job)
            self._under_way += 1
            self._on_device += wanted
        if wanted:
            self._to_gather.put(job)
        else:
            self._ended(job)

    def completed(self) -> int:
        return len(self._results)

    def pop(self) -> bool:
        with self._lock:
            if self._costs:
                self._costs.popleft()
            return self._results.popleft() if self._results else False

    def waiting(self) -> int:
        """Calls of SGLang's that are not done."""
        return len(self._unfinished)

    def reset(self, seconds: float = _GATHER_WAIT) -> None:
        """Forget what SGLang waits for. What was gathered is written; what could not be within ``seconds`` is dropped.
        From the return on no page of the device is read for what was handed over before."""
        with self._moved_on:
            self._moved_on.wait_for(lambda: not self._on_device, seconds)
            self._generation += 1
            self._costs.clear()
            self._unfinished.clear()
            self._results.clear()
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
        """A part of it has ended. What is done counts in the order in which it came."""
        with self._lock:
            job.good = job.good and not self._closed
            job.left -= 1
            if not job.left:
                self._metrics.add("offload", "stored" if job.good else "failed")
                self._metrics.observe("offload", time.monotonic() - job.begun)
                self._under_way -= 1
                self._moved_on.notify_all()
            while self._unfinished and not self._unfinished[0].left:
                self._results.append(self._unfinished.popleft().good)

    def _cost(self, pages: Sequence[Pages]) -> int:
        """What pages count against the room, equal on all ranks."""
        return sum(self._bytes_of_page(some.source) * len(some.keys) for some in pages)

    def _bytes_of_page(self, source: str) -> int:
        pools = [self._staging.host_pools[name] for name in self._staging.pools_on[source]]
        return sum(int(pool.size_per_token) for pool in pools) * self._staging.page_sizes[source]

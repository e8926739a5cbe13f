"""Stored pages on their way to the device.

A request's pages are read and verified before SGLang is told that they will come: what cannot be read is computed, and
no request of a batch can fail because a page was missing. They wait in staging memory; what does not fit there moves on
to the device at once, whose slots nobody but the request has. When the batch starts, what waits moves layer by layer.
Reasons: docs/decisions/linker.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import Call, ThreadPool
from hicache_ext.sglang.linking.moves import Pages
from hicache_ext.sglang.linking.staging import Portion, Staging
from hicache_ext.sglang.served_pools import BoundPool

logger = logging.getLogger(__name__)


class PageReader(Protocol):
    def served_pool(self, name: str) -> BoundPool | None: ...

    def read_whole(self, pool: BoundPool, keys: Sequence[str], host_indices: torch.Tensor) -> bool: ...


class LayerCounter(Protocol):
    """SGLang's LayerWiseLoadCounter."""

    def update_producer(self) -> int: ...
    def complete(self, index: int, layer: int) -> None: ...
    def fail(self, index: int, error: BaseException) -> None: ...
    def finish(self, index: int) -> bool: ...
    def reset(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Load:
    """The pages of one request. ``waiting`` are those in staging memory, the oldest first."""

    pages: list[Pages]
    events: Sequence[Any]
    begun: float = field(default_factory=time.monotonic)
    waiting: deque[Portion] = field(default_factory=deque)
    over: bool = False
    """Nothing of it may touch the device any more."""
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while its pages go to the device, and to say that it is over."""


class Loads:
    """See the module docstring. Threads: every call on the scheduler's."""

    def __init__(
        self, staging: Staging, reader: PageReader, counter: LayerCounter, metrics: TierMetrics, seconds: float
    ) -> None:
        """``seconds``: how long the pages of one request are waited for."""
        self._staging = staging
        self._reader = reader
        self._counter = counter
        self._metrics = metrics
        self._seconds = seconds
        self._log = LimitedLog(logger)
        self._threads = ThreadPool("hicache-link-load")
        self._lock = threading.Lock()
        self._ready: dict[str, _Load] = {}
        """Of requests whose batch has not started."""
        self._started: dict[int, Call[None]] = {}
        self._closed = False

    def read(self, rid: str, pages: list[Pages], events: Sequence[Any]) -> bool:
        """Whether all pages of a request were read; they wait for ``start`` then. Never raises.

        ``events`` say when the device slots may be written.
        """
        load = _Load(pages, events)
        outcome = self._outcome(rid, load)
        self._metrics.add("load", outcome)
        self._metrics.observe("load", time.monotonic() - load.begun)
        return outcome == "read"

    def _outcome(self, rid: str, load: _Load) -> str:
        if self._closed or rid in self._ready:
            return "refused"
        if self._threads.left_behind:
            # A store has not answered in time, and still has not: others would wait for it as long.
            return "refused"
        try:
            call = self._threads.start(lambda: self._read(load))
        except RuntimeError:  # no thread to be had
            return "refused"
        if not call.ended_within(self._seconds):
            self._end(load)
            return "late"
        if call.error is not None:
            self._log.log(
                logging.ERROR, "read", "hicache_ext: pages were not loaded: %s", call.error, exc_info=call.error
            )
        if call.error is not None or not call.result():
            self._end(load)
            return "missing" if call.error is None else "error"
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
        index = self._counter.update_producer()
        try:
            self._started[index] = self._threads.start(lambda: self._move(index, portions, events))
        except RuntimeError as error:
            self._fail(index, portions, error)
        return index

    def finish(self, index: int) -> bool:
        """Wait until the batch is on the device; whether all of it is. Nothing of it is written any more then."""
        landed = self._counter.finish(index)
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

    def close(self, seconds: float) -> bool:
        """False where a read of a store that hangs is left behind."""
        self._closed = True
        self.reset(seconds)
        return self._threads.close(seconds) == 0

    # -- threads ---------------------------------------------------------------------------------------------------

    def _read(self, load: _Load) -> bool:
        """Read everything, a portion at a time; whether all of it is there."""
        self._staging.enter_thread()
        for pages in load.pages:
            for some in pages.portions(self._staging.portion_pages(pages.source)):
                portion = self._memory(load, some)
                if portion is None:
                    return False
                if not self._filled(portion):
                    portion.release()
                    return False
                with load.writing:
                    if load.over:
                        portion.release()
                        return False
                    load.waiting.append(portion)
        return True

    def _filled(self, portion: Portion) -> bool:
        try:
            for name in self._staging.pools_on[portion.pages.source]:
                pool = self._reader.served_pool(name)
                if pool is None or not self._reader.read_whole(pool, portion.pages.keys, portion.host_indices):
                    return False
        except BaseException:
            portion.release()
            raise
        return True

    def _memory(self, load: _Load, pages: Pages) -> Portion | None:
        """Staging memory; where there is none, what waits there the longest makes place and goes to the device."""
        while not load.over:
            if (portion := self._staging.take("load", pages)) is not None:
                return portion
            if not self._make_place(load):
                return None
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
        return False

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
        with load.writing:
            load.over = True
            while load.waiting:
                load.waiting.popleft().release()


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

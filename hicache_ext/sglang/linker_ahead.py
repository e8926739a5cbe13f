"""Stored pages that are read while their request waits in SGLang's queue, so that its scheduler waits for no store.

SGLang asks a linker only when it admits a request: ``lookup``, and at once ``load``, on its scheduler's thread. So each
waiting request is asked about before (``hold``, called by the hook in scheduler_hooks.py), what can be restored of it
is read into staging memory by another thread, and the request is kept out of SGLang's sight until that has ended. Then
``lookup`` is answered from memory, and ``load`` finds the pages there. What was not read so is computed: nothing else
reads from a store.

Which requests are held back is the same on every rank: it depends on SGLang's queue, on what SGLang asked, and on what
the ranks agreed upon. Nothing else may enter into it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import Call, ThreadPool
from hicache_ext.sglang.backend import HiCacheExtBackend
from hicache_ext.sglang.lifecycle import name_of
from hicache_ext.sglang.model_pools import Pages, Portion, Staging, release
from hicache_ext.sglang.served_pools import KV

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Requests that are read at once; others of the queue wait for their turn."""
_MOST_READS = 2 * AT_ONCE
"""Reads that have not ended, with those whose requests are gone: a store that hangs may keep them for long."""
_NAP = 0.002
"""Seconds that a scheduler which can run nothing else waits for pages, instead of asking again: its thread would take
the interpreter's lock from those that read."""
OUTCOMES = ("read", "partly", "nothing", "missing", "late", "refused", "error")


@dataclass(slots=True, eq=False)
class _Request:
    """One request of SGLang's queue."""

    begun: float
    deadline: float
    keys: list[str] = field(default_factory=list)
    """Of KV, from the first page that is not on the device."""
    asked: dict[str, int] = field(default_factory=dict)
    """Component -> how many of its last pages SGLang asked for."""
    beside: list[Any] = field(default_factory=list)
    call: Call[None] | None = None
    settled: bool = False
    """All ranks know that it has ended."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Below the lock.
    over: bool = False
    """What is read from here on is not wanted."""
    outcome: str = "refused"
    restorable: list[int] = field(default_factory=list)
    portions: list[Portion] = field(default_factory=list)
    digests: dict[str, tuple[bytes, ...]] = field(default_factory=dict)

    def take(self) -> list[Portion]:
        """What was read, which is the caller's from here on; what comes later is not wanted."""
        with self.lock:
            self.over = True
            portions, self.portions = self.portions, []
        return portions


class ReadAhead:
    """See the module docstring. Threads: the scheduler's."""

    def __init__(
        self,
        staging: Staging,
        metrics: TierMetrics,
        threads: ThreadPool,
        reader: HiCacheExtBackend,
        seconds: float,
        agreed: Callable[[Sequence[bool]], Sequence[bool]],
    ) -> None:
        """``seconds``: how long a request waits for its pages, at most. ``agreed``: what is so on all ranks."""
        self._staging, self._metrics, self._threads = staging, metrics, threads
        self._reader, self._seconds, self._agreed = reader, seconds, agreed
        self._log = LimitedLog(logger)
        self._requests: dict[str, _Request] = {}
        self._asking: tuple[str, _Request] | None = None
        self._something_ended = threading.Event()
        self._reading: list[None] = []
        """An entry for each read that has not ended."""
        self._taking = threading.Lock()
        """Held while a request takes staging memory: two that each have half of what they need would wait for ever."""

    # -- SGLang's queue ------------------------------------------------------------------------------------------------

    def hold(self, rids: Sequence[str], ask: Callable[[str], None]) -> set[str]:
        """Those of the waiting requests that SGLang shall not see in this round.

        ``ask`` makes SGLang's tree look a request up, which comes back as ``restorable``.
        """
        waiting = set(rids)
        for rid in [rid for rid in self._requests if rid not in waiting]:
            self._drop(self._requests.pop(rid))
        self._settle()
        under_way = sum(not request.settled for request in self._requests.values())
        held = set()
        for rid in rids:
            request = self._requests.get(rid)
            if request is None:
                if under_way >= AT_ONCE:
                    held.add(rid)
                    continue
                request = self._begun(rid, ask)
                under_way += not request.settled
            if not request.settled:
                held.add(rid)
        return held

    def nap(self) -> None:
        """For a scheduler that has nothing to run: until a read has ended, a moment at most."""
        self._something_ended.wait(_NAP)
        self._something_ended.clear()

    def restorable(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Every prefix length in pages at which all pools have what they need, as SGLang asks its linker: of what was
        read ahead."""
        by_name = {name_of(transfer.name): transfer for transfer in transfers}
        kv, beside = by_name.get(KV), self._beside(by_name)
        if kv is None or not kv.keys or beside is None:
            return []
        keys = list(kv.keys)
        if self._asking is not None and self._asking[0] == rid:
            request = self._asking[1]
            request.keys, request.beside = keys, beside
            request.asked = {source: len(by_name[source].keys) for source in self._staging.pools_on}
            return []
        return self._known(rid, keys)

    def _beside(self, by_name: Mapping[str, Any]) -> list[Any] | None:
        """What is asked of the pools beside KV; None where SGLang asks for too few: nothing can be restored then."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        beside = []
        for source, names in self._staging.pools_on.items():
            asked = by_name.get(source)
            if asked is None or not asked.keys:
                return None
            for name in names:
                if name != KV:
                    policy = asked.hit_policy if name == source else self._staging.policies[name]
                    beside.append(PoolTransfer(PoolName(name), keys=asked.keys, hit_policy=policy))
        return beside

    def _known(self, rid: str, keys: Sequence[str]) -> list[int]:
        request = self._requests.get(rid)
        if request is None or not request.settled:
            return []
        if keys[0] not in request.keys:
            if not request.keys or request.keys[0] in keys:
                # What is before them has left the device: if it still waits in the next round, all of it is read.
                self._drop(self._requests.pop(rid))
            return []
        # More of the prompt may be on the device than when it was read, and SGLang's cache-aware policies ask for more
        # of it than is admitted. A key stands for all before it.
        first = request.keys.index(keys[0])
        known = min(len(keys), len(request.keys) - first)
        if request.keys[first + known - 1] != keys[known - 1]:
            return []
        return [pages - first for pages in request.restorable if first < pages <= first + known]

    def pages_of(self, rid: str) -> list[Portion]:
        """What was read for a request, which is the caller's from here on."""
        request = self._requests.get(rid)
        if request is None:
            return []
        # If SGLang does not take the pages, it computes them in another round: they are not read a second time.
        portions, request.restorable = request.take(), []
        if request.digests == self._digests(request):
            return portions
        # Of other weights.
        release(portions)
        return []

    def reset(self) -> None:
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            self._drop(request)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _begun(self, rid: str, ask: Callable[[str], None]) -> _Request:
        now = time.monotonic()
        request = self._requests[rid] = _Request(now, now + self._seconds)
        self._asking = (rid, request)
        try:
            ask(rid)
        finally:
            self._asking = None
        if not request.keys:
            # Nothing of it can be in a store: the same on every rank.
            request.settled = True
        elif not self._threads.left_behind and len(self._reading) < _MOST_READS:
            # Else a store has not answered in time, and still has not: others would wait for it as long.
            self._reading.append(None)
            try:
                request.call = self._threads.start(lambda: self._read(request))
            except RuntimeError:  # no thread to be had
                self._reading.pop()
                logger.debug("no thread", exc_info=True)
        return request

    def _settle(self) -> None:
        pending = [request for request in self._requests.values() if not request.settled]
        if not pending:
            return
        now = time.monotonic()
        ended = [request.call is None or request.call.ended or now > request.deadline for request in pending]
        for request, everywhere in zip(pending, self._agreed(ended), strict=True):
            if everywhere:
                self._end(request)

    def _end(self, request: _Request) -> None:
        request.settled = True
        call = request.call
        if call is not None and not call.ended_within(0.0):
            self._drop(request)
            request.outcome, request.restorable = "late", []
        elif call is not None and call.error is not None:
            error = call.error
            self._log.log(logging.ERROR, "ahead", "hicache_ext: pages were not read: %s", error, exc_info=error)
            request.outcome, request.restorable = "error", []
        self._metrics.add("ahead", request.outcome)
        self._metrics.observe("load", time.monotonic() - request.begun)

    def _drop(self, request: _Request) -> None:
        release(request.take())

    # -- threads -------------------------------------------------------------------------------------------------------

    def _read(self, request: _Request) -> None:
        portions: list[Portion] = []
        try:
            self._staging.enter_thread()
            outcome, restorable, digests = self._read_into(request, portions)
            with request.lock:
                if not request.over:
                    request.outcome, request.restorable, request.digests = outcome, restorable, digests
                    if restorable:
                        request.portions, portions = portions, []
        finally:
            self._reading.pop()
            release(portions)
            self._something_ended.set()

    def _read_into(
        self, request: _Request, portions: list[Portion]
    ) -> tuple[str, list[int], dict[str, tuple[bytes, ...]]]:
        """Append memory with what was read; the outcome, the prefix lengths that can be restored, and whose pages they
        are. Where none can, not all of the memory was filled."""
        restorable = list(self._reader.batch_exists_v2(request.keys, request.beside).restorable_prefix_pages or [])
        if not restorable:
            return "nothing", [], {}
        if (digests := self._digests(request)) is None:
            return "missing", [], {}
        fitting = [length for length in restorable if self._fits(request, length)]
        if fitting and not self._memory(request, fitting[-1], portions):
            fitting = [length for length in fitting if _is_covered(request, length, fitting[-1], portions)]
        if not fitting:
            release(portions)
            portions.clear()
        for portion in portions:
            if request.over or not portion.read(self._reader):
                return "missing", [], {}
        if len(fitting) == len(restorable):
            return "read", fitting, digests
        if request.over:
            return "missing", [], {}
        self._log.log(
            logging.WARNING,
            "partly",
            "hicache_ext: %d of %d pages of a prompt that are stored found room in staging memory, the rest is "
            "computed: set hicache_ext.linker.staging to more",
            fitting[-1] if fitting else 0,
            restorable[-1],
        )
        return "partly", fitting, digests

    def _digests(self, request: _Request) -> dict[str, tuple[bytes, ...]] | None:
        """Of the pools that a request needs, as they are now; None where one may not be used."""
        pools = [
            self._reader.served.usable(name) for source in request.asked for name in self._staging.pools_on[source]
        ]
        known = {pool.name: pool.digests for pool in pools if pool is not None}
        return known if len(known) == len(pools) else None

    def _fits(self, request: _Request, length: int) -> bool:
        """Whether empty staging memory has room for a prefix, and for what lies beside its end."""
        return all(
            (length if source == KV else min(length, pages)) <= self._staging.limits[source]
            for source, pages in request.asked.items()
        )

    def _memory(self, request: _Request, length: int, portions: list[Portion]) -> bool:
        """Append memory for the first ``length`` pages and what lies beside their end; whether that is all of it."""
        # Half of the time that is left: some is needed to read in, and who waits for memory is no store that hangs.
        until = (time.monotonic() + request.deadline) / 2
        if not self._taking.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        try:
            # KV last: what lies beside is needed for any of it.
            for source, pages in sorted(request.asked.items(), key=lambda item: item[0] == KV):
                keys = request.keys[0 if source == KV else max(0, length - pages) : length]
                size = self._staging.page_sizes[source]
                nowhere = torch.full((len(keys) * size,), -1, dtype=torch.int64)  # known when they are wanted
                for some in Pages(source, keys, nowhere, size).portions(self._staging.portion_pages(source)):
                    seconds = max(0.0, until - time.monotonic())
                    portion = None if request.over else self._staging.take("load", some, seconds)
                    if portion is None:
                        return False
                    portions.append(portion)
        finally:
            self._taking.release()
        return True


def _is_covered(request: _Request, length: int, longest: int, portions: Sequence[Portion]) -> bool:
    """Whether the memory that a prefix needs was taken, of what was to be taken for ``longest``."""
    return length <= sum(len(portion.pages.keys) for portion in portions if portion.pages.source == KV) and all(
        length == longest or longest <= pages for source, pages in request.asked.items() if source != KV
    )

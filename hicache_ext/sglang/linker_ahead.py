"""Reads stored pages while their request waits in SGLang's queue, so that its scheduler never waits for a store.

SGLang calls a linker only when it admits a request: ``lookup``, immediately followed by ``load``, on its scheduler's
thread. So each waiting request is looked up earlier (``hold``, called by the hook in scheduler_hooks.py), another
thread reads its restorable pages into staging memory, and the request is hidden from SGLang until that has ended.
``lookup`` is then answered from memory, and ``load`` finds the pages there. Pages that were not read ahead are
computed: nothing else reads from a store.

The same requests are held back on every rank, because that depends only on SGLang's queue, on what SGLang looked up,
and on what the ranks agreed upon. Nothing else may influence it.
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

MAX_CONCURRENT = 16
"""Requests that are read concurrently; the rest of the queue waits for its turn."""
_MAX_READS = 2 * MAX_CONCURRENT
"""Most reads in flight, including those whose requests are gone: a hanging store may keep them for long."""
_NAP = 0.002
"""Seconds that an idle scheduler waits for pages instead of polling, which would take the GIL from the readers."""
OUTCOMES = ("read", "partly", "nothing", "missing", "late", "refused", "error")


@dataclass(slots=True, eq=False)
class _Request:
    """One request of SGLang's queue."""

    begun: float
    deadline: float
    keys: list[str] = field(default_factory=list)
    """Keys of the KV, starting at the first page that is not on the device."""
    requested: dict[str, int] = field(default_factory=dict)
    """Component -> number of its last pages that SGLang requested."""
    sidecars: list[Any] = field(default_factory=list)
    call: Call[None] | None = None
    settled: bool = False
    """Whether all ranks know that the read has ended."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The lock guards all fields below.
    cancelled: bool = False
    """Whether pages read from now on are unwanted."""
    outcome: str = "refused"
    restorable: list[int] = field(default_factory=list)
    portions: list[Portion] = field(default_factory=list)
    digests: dict[str, tuple[bytes, ...]] = field(default_factory=dict)

    def take(self) -> list[Portion]:
        """Return what was read, which the caller now owns, and cancel the rest."""
        with self.lock:
            self.cancelled = True
            portions, self.portions = self.portions, []
        return portions


class ReadAhead:
    """See the module docstring. Scheduler thread only, apart from the reads."""

    def __init__(
        self,
        staging: Staging,
        metrics: TierMetrics,
        threads: ThreadPool,
        reader: HiCacheExtBackend,
        seconds: float,
        agreed: Callable[[Sequence[bool]], Sequence[bool]],
    ) -> None:
        """``seconds`` limits how long a request waits for its pages; ``agreed`` returns what holds on all ranks."""
        self._staging, self._metrics, self._threads = staging, metrics, threads
        self._reader, self._seconds, self._agreed = reader, seconds, agreed
        self._log = LimitedLog(logger)
        self._requests: dict[str, _Request] = {}
        self._looking_up: tuple[str, _Request] | None = None
        self._read_ended = threading.Event()
        self._reading: list[None] = []
        """One entry per read in flight."""
        self._allocating = threading.Lock()
        """Held while a request takes staging memory: two that each hold half of what they need would wait forever."""

    # -- SGLang's queue ------------------------------------------------------------------------------------------------

    def hold(self, rids: Sequence[str], look_up: Callable[[str], None]) -> set[str]:
        """Return the waiting requests that SGLang must not see in this round.

        ``look_up`` makes SGLang's tree look a request up, which calls ``restorable``.
        """
        waiting = set(rids)
        for rid in [rid for rid in self._requests if rid not in waiting]:
            self._drop(self._requests.pop(rid))
        self._settle()
        in_flight = sum(not request.settled for request in self._requests.values())
        held = set()
        for rid in rids:
            request = self._requests.get(rid)
            if request is None:
                if in_flight >= MAX_CONCURRENT:
                    held.add(rid)
                    continue
                request = self._begin(rid, look_up)
                in_flight += not request.settled
            if not request.settled:
                held.add(rid)
        return held

    def nap(self) -> None:
        """Wait until a read has ended, for ``_NAP`` at most; called by a scheduler that has nothing to run."""
        self._read_ended.wait(_NAP)
        self._read_ended.clear()

    def restorable(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Return, from what was read ahead, every prefix length in pages at which all pools have what SGLang needs.
        During ``hold`` only record the lookup and return []."""
        by_name = {name_of(transfer.name): transfer for transfer in transfers}
        kv, sidecars = by_name.get(KV), self._sidecar_transfers(by_name)
        if kv is None or not kv.keys or sidecars is None:
            return []
        keys = list(kv.keys)
        if self._looking_up is not None and self._looking_up[0] == rid:
            request = self._looking_up[1]
            request.keys, request.sidecars = keys, sidecars
            request.requested = {source: len(by_name[source].keys) for source in self._staging.pools_on}
            return []
        return self._known(rid, keys)

    def _sidecar_transfers(self, by_name: Mapping[str, Any]) -> list[Any] | None:
        """Return the transfers of all pools but KV; None if SGLang left a pool out: nothing can be restored then."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        sidecars = []
        for source, names in self._staging.pools_on.items():
            transfer = by_name.get(source)
            if transfer is None or not transfer.keys:
                return None
            for name in names:
                if name != KV:
                    policy = transfer.hit_policy if name == source else self._staging.policies[name]
                    sidecars.append(PoolTransfer(PoolName(name), keys=transfer.keys, hit_policy=policy))
        return sidecars

    def _known(self, rid: str, keys: Sequence[str]) -> list[int]:
        request = self._requests.get(rid)
        if request is None or not request.settled:
            return []
        if keys[0] not in request.keys:
            if not request.keys or request.keys[0] in keys:
                # Earlier pages have left the device: if the request still waits in the next round, read all of it.
                self._drop(self._requests.pop(rid))
            return []
        # More of the prompt may be on the device than at the time of the read, and SGLang's cache-aware policies look
        # up more than they admit. A key implies all keys before it.
        first = request.keys.index(keys[0])
        known = min(len(keys), len(request.keys) - first)
        if request.keys[first + known - 1] != keys[known - 1]:
            return []
        return [pages - first for pages in request.restorable if first < pages <= first + known]

    def pages_of(self, rid: str) -> list[Portion]:
        """Return what was read for a request; the caller now owns it."""
        request = self._requests.get(rid)
        if request is None:
            return []
        # If SGLang does not use the pages, it computes them in another round: they are not read a second time.
        portions, request.restorable = request.take(), []
        if request.digests == self._digests(request):
            return portions
        # The weights have changed since the read.
        release(portions)
        return []

    def reset(self) -> None:
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            self._drop(request)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _begin(self, rid: str, look_up: Callable[[str], None]) -> _Request:
        now = time.monotonic()
        request = self._requests[rid] = _Request(now, now + self._seconds)
        self._looking_up = (rid, request)
        try:
            look_up(rid)
        finally:
            self._looking_up = None
        if not request.keys:
            # No store can have any of its pages, on any rank.
            request.settled = True
        elif not self._threads.left_behind and len(self._reading) < _MAX_READS:
            # Otherwise a store has missed its deadline and still hangs: further requests would wait as long.
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
                if not request.cancelled:
                    request.outcome, request.restorable, request.digests = outcome, restorable, digests
                    if restorable:
                        request.portions, portions = portions, []
        finally:
            self._reading.pop()
            release(portions)
            self._read_ended.set()

    def _read_into(
        self, request: _Request, portions: list[Portion]
    ) -> tuple[str, list[int], dict[str, tuple[bytes, ...]]]:
        """Append the memory that was filled; return the outcome, the restorable prefix lengths, and the digests of
        their pools. Without a restorable prefix, part of the memory may be unfilled."""
        restorable = list(self._reader.batch_exists_v2(request.keys, request.sidecars).restorable_prefix_pages or [])
        if not restorable:
            return "nothing", [], {}
        if (digests := self._digests(request)) is None:
            return "missing", [], {}
        fitting = [length for length in restorable if self._fits(request, length)]
        if fitting and not self._allocate(request, fitting[-1], portions):
            fitting = [length for length in fitting if _is_covered(request, length, fitting[-1], portions)]
        if not fitting:
            release(portions)
            portions.clear()
        for portion in portions:
            if request.cancelled or not portion.read(self._reader):
                return "missing", [], {}
        if len(fitting) == len(restorable):
            return "read", fitting, digests
        if request.cancelled:
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
        """Return the current digests of the pools that a request needs; None if one of them may not be used."""
        pools = [
            self._reader.served.usable(name) for source in request.requested for name in self._staging.pools_on[source]
        ]
        known = {pool.name: pool.digests for pool in pools if pool is not None}
        return known if len(known) == len(pools) else None

    def _fits(self, request: _Request, length: int) -> bool:
        """Return whether empty staging memory has room for a prefix and the tails of the other pools."""
        return all(
            (length if source == KV else min(length, pages)) <= self._staging.limits[source]
            for source, pages in request.requested.items()
        )

    def _allocate(self, request: _Request, length: int, portions: list[Portion]) -> bool:
        """Append memory for the first ``length`` pages and the other pools' tails; return whether all was available."""
        # Wait half of the remaining time: reading needs some, and waiting for memory must not count as a hanging store.
        until = (time.monotonic() + request.deadline) / 2
        if not self._allocating.acquire(timeout=max(0.0, until - time.monotonic())):
            return False
        try:
            # Take KV last: without the other pools' tails none of it is usable.
            for source, pages in sorted(request.requested.items(), key=lambda item: item[0] == KV):
                keys = request.keys[0 if source == KV else max(0, length - pages) : length]
                size = self._staging.page_sizes[source]
                no_slots = torch.full((len(keys) * size,), -1, dtype=torch.int64)  # assigned by ``load``
                for pages_part in Pages(source, keys, no_slots, size).portions(self._staging.portion_pages(source)):
                    seconds = max(0.0, until - time.monotonic())
                    portion = None if request.cancelled else self._staging.take("load", pages_part, seconds)
                    if portion is None:
                        return False
                    portions.append(portion)
        finally:
            self._allocating.release()
        return True


def _is_covered(request: _Request, length: int, longest: int, portions: Sequence[Portion]) -> bool:
    """Return whether the memory that was taken suffices for ``length`` pages, though not for ``longest``."""
    return length <= sum(len(portion.pages.keys) for portion in portions if portion.pages.source == KV) and all(
        length == longest or longest <= pages for source, pages in request.requested.items() if source != KV
    )

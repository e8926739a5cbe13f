"""HiCacheExtLinker: what SGLang loads as its external linker (``--unified-cache-external-linker-backend dynamic``).

SGLang's second interface to the same tiers: pages move between the device and storage, without a host cache. It stores
the bytes that HiCache stores in the layout page_first, so that servers of both kinds share a pool. It wraps the backend
of the first interface (backend.py) and with it identity, weights, tiers, configuration file and metrics.

SGLang calls everything on its scheduler's thread, which never waits for a store. Other threads read and verify the
pages of queued requests before they are admitted (linker_ahead.py): ``lookup`` and ``load`` find the pages in memory,
or the request is computed. ``offload`` returns immediately. docs/decisions/linker.md has the reasons.

No call but the constructor raises. A failure counts as a miss, or as pages that were not stored.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from hicache_ext.config import ExtraConfig, check_document, load_config, read_document
from hicache_ext.config.model import SECTION
from hicache_ext.config.problems import did_you_mean
from hicache_ext.errors import ConfigError, UnsupportedError
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import Call, ThreadPool
from hicache_ext.sglang.backend import HiCacheExtBackend
from hicache_ext.sglang.launch_arguments import configuration_given_as
from hicache_ext.sglang.lifecycle import answering, guarded_calls, refuse_release_without
from hicache_ext.sglang.linker_ahead import OUTCOMES, ReadAhead
from hicache_ext.sglang.model_pools import Pages, Portion, Staging, pages_of, release
from hicache_ext.sglang.plugin import not_in_force
from hicache_ext.sglang.releases import end_registration, installed_release
from hicache_ext.sglang.served_pools import KV, BoundPool
from hicache_ext.sglang.used_names import LINKER

logger = logging.getLogger(__name__)

_COUNTS = {
    "ahead": OUTCOMES,
    "load": ("read", "missing", "error", "copy_failed", "other_rank"),
    "offload": ("stored", "failed", "full"),
    "offload_failed": ("copy", "store"),
}
_CLOSE_WAIT = 10.0
"""Seconds that ``close`` waits for threads; SGLang waits as long for its own."""
_RECHECK = 1.0
"""Seconds after which a wait for staging memory checks whether it is still wanted."""
_GATHER_WAIT = 2.0
"""Seconds that a flush waits for pages to leave the device. SGLang flushes when idle, so they do get written."""


class HiCacheExtLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is untyped here
    """See the module docstring. Scheduler thread only."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
        **_: Any,
    ) -> None:
        """Raises ConfigError, StoreSetupError or UnsupportedError with one sentence: SGLang then does not start."""
        refuse_release_without(LINKER, "the linker", "use --enable-hierarchical-cache")
        if not_in_force([LINKER]):
            reason = "SGLang has not loaded the plug-in hicache_ext, which reads pages while their request waits"
            remedy = "leave SGLANG_PLUGINS unset or let it name hicache_ext; --enable-hierarchical-cache serves without"
            raise UnsupportedError("the external linker", reason, remedy)
        self.forward_stream = forward_stream
        document, file = launched_with(extra_config)
        config = load_config(document)
        settings = config.linker
        self._drain = config.background.drain
        self._params = params
        self._staging = Staging(params, set(components), settings.staging)
        self._closed = False
        with ExitStack() as undoing:
            undoing.callback(self._staging.destroy)
            from sglang.srt.runtime_context import get_serving

            # What SGLang would give a storage backend: model, ranks, and the configuration.
            model = get_serving().served_model_name
            ranks = self._staging.controller._generate_storage_config(model, dict(document))
            with configuration_given_as(None if file is None else f"@{file}"):
                self._backend = HiCacheExtBackend(ranks, {})
            undoing.callback(self._backend.close)
            self._register_pools()
            self._writer = bool(ranks.is_storage_writer)
            self.pools = {entry.name: entry.host_pool for entry in self._staging.group.entries}
            self.layer_done_counter = LayerWiseLoadCounter(self._staging.layers)
            if self._staging.has_request_states:
                params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
            self._metrics = TierMetrics("linker", prefix="linker_")
            self._metrics.declare(_COUNTS, ("load", "offload"))
            self._threads = ThreadPool("hicache-link-load")
            shared = self._staging, self._metrics
            self._ahead = ReadAhead(
                *shared, self._threads, self._backend, settings.load_timeout, lambda mine: agreed(self._params, mine)
            )
            self._ready: dict[str, list[Portion]] = {}
            """Request id -> portions to load, for requests whose batch has not started."""
            self._started: dict[int, Call[None]] = {}
            """Batch number -> load in flight."""
            self._log = LimitedLog(logger)
            self._offloads = Offloads(*shared, self._backend)
            self._backend.export_also(self._metrics, self._set_levels)
            self._backend.declare_failures(guarded_calls(type(self)))
            undoing.pop_all()
        logger.info(
            "hicache_ext: external linker of SGLang %s, pools %s, %d layers, %d MiB of staging memory",
            installed_release(),
            ", ".join(self._staging.host_pools),
            self._staging.layers,
            settings.staging >> 20,
        )

    # -- SGLang's queue --------------------------------------------------------------------------------------------

    @answering(lambda *_, **__: set())
    def requests_to_hold(self, queue: Sequence[Any], tree: Any) -> set[str]:
        """Return the ids of waiting requests that must not be scheduled yet, because their pages are being read.

        Called by scheduler_hooks.py. ``tree`` is SGLang's prefix cache.
        """
        if self._closed:
            return set()
        requests = {request.rid: request for request in queue}

        def look_up(rid: str) -> None:
            request = requests[rid]
            # The lookup would lend the session's KV to a turn of a streaming session, and a waiting request may not
            # hold it: nothing is restored for such a turn.
            if request.session is None or not request.session.streaming:
                request.init_next_round_input(tree, cow_mamba=False)

        return self._ahead.hold(list(requests), look_up)

    @answering(lambda *_, **__: None)
    def nap(self) -> None:
        self._ahead.nap()

    # -- lookups ---------------------------------------------------------------------------------------------------

    @answering(lambda *_, **__: [])
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        # Forward the lookup even if nothing may be served now: each rank has to know what SGLang looked up.
        return [] if self._closed else self._ahead.restorable(rid, transfers)

    # -- loads -----------------------------------------------------------------------------------------------------
    # Pages are read and verified while their request is queued, before SGLang is promised any: missing ones are
    # computed, and no request of a batch can fail because a page was missing. When the batch starts, they move layer by
    # layer.

    @answering(lambda *_, **__: False)
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Return whether the pages of a request were read ahead on every rank and will be on the device.

        An error of one rank is caught inside, since the other ranks would wait for its vote. The call may return early
        only for arguments that SGLang passes to all ranks alike.
        """
        pages = pages_of(transfers, self._staging.page_sizes)
        if not pages:
            return False
        read = self._load_here(rid, pages)
        everywhere = self._agreed_alone(read)
        if read and not everywhere:
            self._metrics.add("load", "other_rank")
            self.cancel_queued_load(rid)
        return everywhere

    @answering(lambda *_, **__: False)
    def _load_here(self, rid: str, wanted: list[Pages]) -> bool:
        """Return whether all wanted pages of a request were read ahead; if so, queue them for the next batch."""
        ahead = self._ahead.pages_of(rid)
        outcome = "error"
        try:
            # A request in ``_ready`` was already promised to SGLang: don't replace its pages.
            complete = rid not in self._ready and _assign_slots(ahead, wanted)
            outcome = "read" if complete else "missing"
        finally:
            self._metrics.add("load", outcome)
            if outcome == "read":
                self._ready[rid] = ahead
            else:
                release(ahead)
        return complete

    @answering(lambda *_, **__: False)
    def _agreed_alone(self, read: bool) -> bool:
        return agreed(self._params, [read])[0]

    @answering(lambda *_, **__: -1)
    def start_layer_wise_loading(self) -> int:
        """Begin to move the pages of all ready requests; return the batch's number, or -1 without any."""
        # The events tell when the device slots may be written: recorded on the same stream after ``load`` picked them.
        events = self.record_offload_ready()
        portions = [portion for ready in self._ready.values() for portion in ready]
        self._ready.clear()
        if not portions:
            return -1
        index: int = self.layer_done_counter.update_producer()
        try:
            self._started[index] = self._threads.start(lambda: self._move(index, portions, events))
        except RuntimeError as error:
            self._fail(index, error)
            release(portions)
        return index

    @answering(lambda *_, **__: False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch's copies to the device have ended; return whether all of it arrived."""
        landed = bool(self.layer_done_counter.finish(counter_index))
        call = self._started.pop(counter_index, None)
        if call is not None:
            # Its layers are done; the thread has only its memory left to release.
            call.ended_within(threading.TIMEOUT_MAX)
        return landed

    @answering(lambda *_, **__: False)
    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a request whose batch has not started; its slots are not written after the return."""
        portions = self._ready.pop(rid, [])
        release(portions)
        return bool(portions)

    def _end_loads(self, seconds: float) -> None:
        """Forget loads that were not started, and wait for those in flight, which only copy."""
        for rid in list(self._ready):
            release(self._ready.pop(rid))
        for call in self._started.values():
            call.ended_within(seconds)
        self._started.clear()
        self.layer_done_counter.reset()

    def _move(self, index: int, portions: Sequence[Portion], events: Sequence[Any]) -> None:
        """Copy a batch to the device layer by layer [one thread per batch]."""
        try:
            self._staging.enter_thread()
            for event in events:
                event.synchronize()
            self._staging.scatter(portions, lambda layer: self.layer_done_counter.complete(index, layer))
        except BaseException as error:  # noqa: BLE001 - SGLang waits for every layer
            self._fail(index, error)
        finally:
            release(portions)

    def _fail(self, index: int, error: BaseException) -> None:
        self._metrics.add("load", "copy_failed")
        self._log.log(logging.ERROR, "copy", "hicache_ext: a batch was not loaded: %s", error, exc_info=error)
        self.layer_done_counter.fail(index, error)

    # -- offloads --------------------------------------------------------------------------------------------------

    @answering(lambda *_, **__: False)
    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        pages = pages_of(transfers, self._staging.page_sizes)
        # All ranks must return the same, whatever happens to their pages: SGLang counts offloads in flight on each.
        if not any(part.source == KV for part in pages):
            return False
        if not self._offloads.has_room(pages):
            self._metrics.add("offload", "full")
            return False
        # Clone: SGLang may change its own indices while it splits the node that holds them.
        pages = [Pages(part.source, part.keys, part.device_indices.clone(), part.page_size) for part in pages]
        self._offloads.offload(pages, self._pools_written(pages), self.record_offload_ready())
        return True

    @answering(lambda *_, **__: 0)
    def num_completed_offloads(self) -> int:
        return self._offloads.completed()

    @answering(lambda *_, **__: False)
    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    # -- administration --------------------------------------------------------------------------------------------

    @answering(lambda *_, **__: None)
    def reset(self) -> None:
        """Forget what SGLang waits for. Pages already handed over are stored as far as they left the device within
        ``_GATHER_WAIT``; after the return the device is neither read nor written."""
        self._ahead.reset()
        self._end_loads(threading.TIMEOUT_MAX)
        self._offloads.reset()

    @answering(lambda *_, **__: None)
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ahead.reset()
        self._end_loads(_CLOSE_WAIT)
        ended = self._threads.close(_CLOSE_WAIT) == 0
        ended = self._offloads.close(_CLOSE_WAIT, self._drain) and ended
        self._backend.close()
        if ended:
            # Otherwise a hanging call may still write into the memory.
            self._staging.destroy()

    def report_failure(self, call: str, error: BaseException) -> None:
        self._backend.report_failure(call, error)

    def _set_levels(self) -> None:
        """Set the gauges to the current levels."""
        self._metrics.set_level("staging_pages", "load", float(self._staging.pages_in_use("load")))
        self._metrics.set_level("staging_pages", "offload", float(self._staging.pages_in_use("offload")))
        self._metrics.set_level("waiting", "", float(self._offloads.waiting()))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _register_pools(self) -> None:
        """Register the pools as SGLang does its host pools. Raises UnsupportedError for one that cannot be served."""
        group = self._staging.group
        for entry in group.entries:
            self._backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
        end_registration(self._backend)
        for name, reason in self._backend.served.unserved.items():
            raise UnsupportedError(f"pool {name!r} of this model", reason)
        page_size = self._staging.page_sizes[KV]
        tokens = self._staging.limits[KV] * page_size
        self._backend.warn_of_sizes(page_size, tokens, "staging memory", "hicache_ext.linker.staging")

    def _pools_written(self, pages: Sequence[Pages]) -> dict[str, BoundPool] | None:
        """Return the pools that this rank writes, as bound now: pages belong to these weights, whenever they are
        stored. None if nothing may be stored now."""
        pools = {}
        for part in pages:
            for name in self._staging.pools_on[part.source]:
                pool = self._backend.served.usable(name)
                if pool is None:
                    return None
                if self._writer or self._backend.served.on_every_rank(name):
                    pools[name] = pool
        return pools


def _assign_slots(ahead: list[Portion], wanted: Sequence[Pages]) -> bool:
    """Assign device slots to the pages that were read ahead, and release those that have none; return whether all
    wanted pages are among them."""
    by_source = {pages.source: pages for pages in wanted}
    for portion in list(ahead):
        pages = by_source.get(portion.pages.source)
        if pages is not None:
            portion.assign_slots(pages)
        if pages is None or not portion.pages.keys:
            ahead.remove(portion)
            portion.release()
    found = {(portion.pages.source, key) for portion in ahead for key in portion.pages.keys}
    return all((pages.source, key) in found for pages in wanted for key in pages.keys)


# -- offloads ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Offload:
    """The pages of one call of SGLang's. ``left`` counts the portions not yet written, plus one while gathering."""

    pages: list[Pages]
    pools: dict[str, BoundPool]
    events: Sequence[Any]
    counts: Counter[str]
    """Number of pages per pool with memory of its own; equal on all ranks."""
    generation: int
    begun: float = field(default_factory=time.monotonic)
    left: int = 1
    good: bool = True


class Offloads:
    """Moves device pages to the store: one thread gathers them into staging memory, another writes them.

    Room depends only on what SGLang has handed over and not yet popped, which all ranks see alike: SGLang keeps one
    list of offloads in flight, and a rank that refused on its own would answer for another rank's pages. The scheduler
    thread calls ``offload``, ``completed``, ``pop`` and ``reset``.
    """

    def __init__(self, staging: Staging, metrics: TierMetrics, writer: HiCacheExtBackend) -> None:
        self._staging, self._metrics, self._writer = staging, metrics, writer
        self._log = LimitedLog(logger)
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        """Notified when an offload was gathered or has ended."""
        self._reading_device = threading.Lock()
        self._on_device = self._in_flight = 0
        """Number of offloads not yet gathered, and of those not yet ended."""
        self._handed_over: deque[_Offload] = deque()
        """Offloads that SGLang has not popped, in order; they count against the room until then."""
        self._generation = 0
        self._closed = False
        self._to_gather: SimpleQueue[_Offload | None] = SimpleQueue()
        self._to_write: SimpleQueue[tuple[_Offload, Portion] | None] = SimpleQueue()
        self._threads = ThreadPool("hicache-link-offload")
        self._threads.start(self._gather_all)
        self._threads.start(self._write_all)

    def has_room(self, pages: Sequence[Pages]) -> bool:
        """Return whether these pages may be handed over now, alike on all ranks; always True if nothing is pending."""
        with self._lock:
            taken = sum((job.counts for job in self._handed_over), _counts(pages))
            fits = all(count <= self._staging.limits[source] for source, count in taken.items())
            return fits or not self._handed_over

    def offload(self, pages: Sequence[Pages], pools: dict[str, BoundPool] | None, events: Sequence[Any]) -> None:
        """Take over pages. ``pools`` are those that this rank writes; with None the pages cannot be stored, and count
        as failed once it is their turn."""
        job = _Offload(list(pages) if pools else [], pools or {}, events, _counts(pages), self._generation)
        job.good = pools is not None
        wanted = bool(job.pages) and not self._closed
        with self._lock:
            self._handed_over.append(job)
            self._in_flight += 1
            self._on_device += wanted
        if wanted:
            self._to_gather.put(job)
        else:
            self._end_part(job)

    def completed(self) -> int:
        """Return how many leading offloads are done, in the order in which they were handed over."""
        with self._lock:
            return next((done for done, job in enumerate(self._handed_over) if job.left), len(self._handed_over))

    def pop(self) -> bool:
        """Remove the oldest offload if it is done; return whether it was stored."""
        with self._lock:
            done = bool(self._handed_over) and not self._handed_over[0].left
            return done and self._handed_over.popleft().good

    def waiting(self) -> int:
        """Return the number of offloads that are not done."""
        with self._lock:
            return sum(bool(job.left) for job in self._handed_over)

    def reset(self, seconds: float = _GATHER_WAIT) -> None:
        """Forget what SGLang waits for. Gathered pages are written; what isn't gathered within ``seconds`` is dropped.
        After the return no device page is read for earlier offloads."""
        with self._progress:
            self._progress.wait_for(lambda: not self._on_device, seconds)
            self._generation += 1
            self._handed_over.clear()
        with self._reading_device:
            pass

    def close(self, seconds: float, drain: float = 0.0) -> bool:
        """Write pending offloads for up to ``drain`` seconds, then end the threads; return False if one was still in a
        call after ``seconds`` more."""
        with self._progress:
            self._progress.wait_for(lambda: not self._in_flight, drain)
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
            except Exception as error:  # noqa: BLE001 - the failure of one offload must not end the thread
                self._fail_job(job, "copy", error)
            finally:
                with self._progress:
                    self._on_device -= 1
                    self._progress.notify_all()
                self._end_part(job)
            del job  # it holds device indices

    def _gather(self, job: _Offload) -> None:
        for event in job.events:
            event.synchronize()
        for pages in job.pages:
            if not any(name in job.pools for name in self._staging.pools_on[pages.source]):
                continue
            for part in pages.portions(self._staging.portion_pages(pages.source)):
                portion = self._take_memory(job, part)
                if portion is None:
                    return
                with self._reading_device:
                    if self._is_abandoned(job):
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

    def _take_memory(self, job: _Offload, pages: Pages) -> Portion | None:
        while not self._is_abandoned(job):
            if (portion := self._staging.take("offload", pages, _RECHECK)) is not None:
                return portion
        return None

    def _write_all(self) -> None:
        while (item := self._to_write.get()) is not None:
            job, portion = item
            try:
                if not self._closed and job.good and not self._write(job, portion):
                    self._fail_job(job, "store")
            except Exception as error:  # noqa: BLE001 - as above
                self._fail_job(job, "store", error)
            finally:
                portion.release()
                self._end_part(job)
            del item, job, portion

    def _write(self, job: _Offload, portion: Portion) -> bool:
        """Write a portion to all its pools; return whether all were stored. A component's own pool comes last: whoever
        finds that finds the others."""
        for name in self._staging.pools_on[portion.pages.source]:
            pool = job.pools.get(name)
            if pool is not None and not self._writer.write_whole(pool, portion.pages.keys, portion.host_indices):
                return False
        return True

    def _is_abandoned(self, job: _Offload) -> bool:
        """Return whether nobody wants the rest of the offload."""
        return self._closed or not job.good or job.generation != self._generation

    def _fail_job(self, job: _Offload, why: str, error: BaseException | None = None) -> None:
        job.good = False
        if job.generation == self._generation:
            self._metrics.add("offload_failed", why)
        if error is not None:
            self._log.log(logging.ERROR, why, "hicache_ext: pages were not stored: %s", error, exc_info=error)

    def _end_part(self, job: _Offload) -> None:
        """Count one part of the offload as ended."""
        with self._lock:
            job.good = job.good and not self._closed
            job.left -= 1
            if not job.left:
                self._metrics.add("offload", "stored" if job.good else "failed")
                self._metrics.observe("offload", time.monotonic() - job.begun)
                self._in_flight -= 1
                self._progress.notify_all()


def _counts(pages: Sequence[Pages]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part in pages:
        counts[part.source] += len(part.keys)
    return counts


# -- what all ranks of a deployment must decide alike ------------------------------------------------------------------


def agreed(params: Any, mine: Sequence[bool]) -> list[bool]:
    """Return which of ``mine`` hold on every rank that computes the same requests; all ranks must call, with equal
    lengths. The groups are those of SGLang's cache (``UnifiedRadixCache._all_reduce_attn_groups``)."""
    ranks = torch.distributed
    groups = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and ranks.get_world_size(group=group) > 1
    ]
    if not groups and params.tp_cache_group is not None and ranks.get_world_size(group=params.tp_cache_group) > 1:
        groups = [params.tp_cache_group]
    votes = torch.tensor([int(vote) for vote in mine], dtype=torch.int)
    for group in groups:
        ranks.all_reduce(votes, op=ranks.ReduceOp.MIN, group=group)
    return [bool(vote) for vote in votes.tolist()]


# -- configuration -----------------------------------------------------------------------------------------------------
# Parsing of ``linker_extra_config`` in ``--unified-cache-external-linker-config``.

FILE = "config_file"
PLACE = "linker_extra_config"
_ALLOWED = f"{{{SECTION}: {{tiers: ...}}}}, or {{{FILE}: /path/hicache.yaml}}"


def launched_with(extra_config: Mapping[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    """Return the document that HiCache would be given, and the path of its file, if any. Raises ConfigError.

    A file may hold keys that SGLang reads for HiCache only (``prefetch_threshold``, ...); they mean nothing here.
    """
    given = dict(extra_config or {})
    for key in given:
        if key not in (SECTION, FILE):
            raise ConfigError(f"{PLACE}.{key}", f"unknown key{did_you_mean(key, (SECTION, FILE))}", _ALLOWED)
    if len(given) != 1:
        problem = "holds nothing" if not given else f"holds both {SECTION} and {FILE}"
        raise ConfigError(PLACE, problem, _ALLOWED)
    if SECTION in given:
        if not isinstance(given[SECTION], Mapping):
            raise ConfigError(f"{PLACE}.{SECTION}", "is no mapping", _ALLOWED)
        return ExtraConfig.around(given[SECTION]), None
    file = given[FILE]
    if not isinstance(file, str) or not file.strip():
        raise ConfigError(f"{PLACE}.{FILE}", "is no path", "/path/hicache.yaml")
    file = os.path.abspath(file.removeprefix("@"))
    document = read_document(file)
    check_document(document)
    return ExtraConfig.around(document[SECTION]), file

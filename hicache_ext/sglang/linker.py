"""HiCacheExtLinker: what SGLang loads as its external linker (``--unified-cache-external-linker-backend dynamic``).

SGLang's second door to the same tiers: pages move between the device and storage, without a host cache. What is stored
is what HiCache stores in the layout page_first, so that servers of both kinds share a pool. Behind the door is the
backend of the first one (backend.py): identity, weights, tiers, configuration file, metrics.

SGLang calls everything on its scheduler's thread, which waits for no store. Pages of a request that waits in its queue
are read and verified by other threads before it is admitted (linker_ahead.py): ``lookup`` and ``load`` find them in
memory, or the request is computed. ``offload`` answers at once. docs/decisions/linker.md has the reasons.

No call but the constructor raises. Trouble is a miss, or pages that were not stored.
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
"""Seconds for threads to end at the close; SGLang waits as long for its own."""
_LOOK_AGAIN = 1.0
"""Seconds after which a wait for staging memory looks whether it is still wanted."""
_GATHER_WAIT = 2.0
"""Seconds that a flush waits for pages to leave the device. SGLang flushes when nothing runs: they are written."""


class HiCacheExtLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is untyped here
    """See the module docstring. Threads: the scheduler's."""

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
            if self._staging.states_beside_the_pools:
                params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
            self._metrics = TierMetrics("linker", prefix="linker_")
            self._metrics.declare(_COUNTS, ("load", "offload"))
            self._threads = ThreadPool("hicache-link-load")
            shared = self._staging, self._metrics
            self._ahead = ReadAhead(
                *shared, self._threads, self._backend, settings.load_timeout, lambda mine: agreed(self._params, mine)
            )
            self._ready: dict[str, list[Portion]] = {}
            """Loads of requests whose batch has not started."""
            self._started: dict[int, Call[None]] = {}
            """Those under way, by the number of their batch."""
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
        """Ids of the waiting requests that are not to be scheduled yet, because their pages are being read.

        Called by scheduler_hooks.py. ``tree`` is SGLang's.
        """
        if self._closed:
            return set()
        requests = {request.rid: request for request in queue}

        def ask(rid: str) -> None:
            request = requests[rid]
            # A look-up lends a turn of a streaming session the session's KV, which a request that waits may not have:
            # of such a turn nothing is restored.
            if request.session is None or not request.session.streaming:
                request.init_next_round_input(tree, cow_mamba=False)

        return self._ahead.hold(list(requests), ask)

    @answering(lambda *_, **__: None)
    def nap(self) -> None:
        self._ahead.nap()

    # -- look-ups --------------------------------------------------------------------------------------------------

    @answering(lambda *_, **__: [])
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        # Also where nothing may be served now: each rank has to know what SGLang asked.
        return [] if self._closed else self._ahead.restorable(rid, transfers)

    # -- loads -----------------------------------------------------------------------------------------------------
    # Pages were read and verified while their request was in the queue, before SGLang is told that they will come: what
    # is not there is computed, and no request of a batch can fail because a page was missing. When the batch starts,
    # they move layer by layer.

    @answering(lambda *_, **__: False)
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Whether the pages of a request were read ahead, on every rank, and will be on the device.

        What a rank meets alone is caught inside: the ranks would wait for its vote. Only what SGLang hands to all of
        them alike may end the call before.
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
        """Whether all wanted pages of a request are among those that were read ahead; they wait for the start then."""
        ahead = self._ahead.pages_of(rid)
        outcome = "error"
        try:
            # For pages that were added before, SGLang has been given the word.
            complete = rid not in self._ready and _given_places(ahead, wanted)
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
        """Begin to move the pages of all requests that are ready; the batch's number, -1 where there are none."""
        # They say when the device slots may be written: recorded after ``load``, which picks them, on the same stream.
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
        """Wait until the batch is on the device; whether all of it is. Nothing of it is written any more then."""
        landed = bool(self.layer_done_counter.finish(counter_index))
        call = self._started.pop(counter_index, None)
        if call is not None:
            # Its layers are done: what is left of it is to give memory back.
            call.ended_within(threading.TIMEOUT_MAX)
        return landed

    @answering(lambda *_, **__: False)
    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a request whose batch has not started; from the return on its slots are not written."""
        portions = self._ready.pop(rid, [])
        release(portions)
        return bool(portions)

    def _end_loads(self, seconds: float) -> None:
        """Forget everything that was not started, and wait for what was: it only copies."""
        for rid in list(self._ready):
            release(self._ready.pop(rid))
        for call in self._started.values():
            call.ended_within(seconds)
        self._started.clear()
        self.layer_done_counter.reset()

    def _move(self, index: int, portions: Sequence[Portion], events: Sequence[Any]) -> None:
        """[a thread of each batch]"""
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
        # All ranks answer alike, whatever happens to their pages: SGLang counts what is under way on each.
        if not any(some.source == KV for some in pages):
            return False
        if not self._offloads.has_room(pages):
            self._metrics.add("offload", "full")
            return False
        # SGLang may change its own indices while the node that holds them is split.
        pages = [Pages(some.source, some.keys, some.device_indices.clone(), some.page_size) for some in pages]
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
        """Forget what SGLang waits for. What it handed over is stored, as far as it could leave the device within
        seconds; from the return on the device is neither read nor written."""
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
            # A call that hangs may still write into it.
            self._staging.destroy()

    def report_failure(self, call: str, error: BaseException) -> None:
        self._backend.report_failure(call, error)

    def _set_levels(self) -> None:
        """How full it is at the moment of asking."""
        self._metrics.set_level("staging_pages", "load", float(self._staging.pages_in_use("load")))
        self._metrics.set_level("staging_pages", "offload", float(self._staging.pages_in_use("offload")))
        self._metrics.set_level("waiting", "", float(self._offloads.waiting()))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _register_pools(self) -> None:
        """As SGLang does with its host pools. Raises UnsupportedError for one that cannot be served."""
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
        """The pools that this rank writes, as they are now: their pages are of these weights, whenever they are stored.
        None where nothing may be stored now."""
        pools = {}
        for some in pages:
            for name in self._staging.pools_on[some.source]:
                pool = self._backend.served.usable(name)
                if pool is None:
                    return None
                if self._writer or self._backend.served.on_every_rank(name):
                    pools[name] = pool
        return pools


def _given_places(ahead: list[Portion], wanted: Sequence[Pages]) -> bool:
    """Give pages that were read ahead their places on the device, and let go of those that have none; whether all
    that are wanted are among them."""
    by_source = {pages.source: pages for pages in wanted}
    for portion in list(ahead):
        pages = by_source.get(portion.pages.source)
        if pages is not None:
            portion.give_places(pages)
        if pages is None or not portion.pages.keys:
            ahead.remove(portion)
            portion.release()
    found = {(portion.pages.source, key) for portion in ahead for key in portion.pages.keys}
    return all((pages.source, key) in found for pages in wanted for key in pages.keys)


# -- offloads ----------------------------------------------------------------------------------------------------------


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
    """Device pages on their way to the store: gathered into staging memory by one thread, written by another.

    What counts as room is decided by what SGLang has handed over and not yet taken back, which all ranks see alike:
    SGLang keeps one list of what is under way, and a rank that refused on its own would answer for another rank's
    pages. Threads: ``offload``, ``completed``, ``pop`` and ``reset`` on the scheduler's.
    """

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
            fits = all(count <= self._staging.limits[source] for source, count in taken.items())
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


# -- what all ranks of a deployment must decide alike ------------------------------------------------------------------


def agreed(params: Any, mine: Sequence[bool]) -> list[bool]:
    """Which of them are so on every rank that computes the same requests; each rank must ask, for as many.

    The groups are those in which SGLang's cache agrees (``UnifiedRadixCache._all_reduce_attn_groups``).
    """
    ranks = torch.distributed
    groups = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and ranks.get_world_size(group=group) > 1
    ]
    if not groups and params.tp_cache_group is not None and ranks.get_world_size(group=params.tp_cache_group) > 1:
        groups = [params.tp_cache_group]
    answer = torch.tensor([int(one) for one in mine], dtype=torch.int)
    for group in groups:
        ranks.all_reduce(answer, op=ranks.ReduceOp.MIN, group=group)
    return [bool(one) for one in answer.tolist()]


# -- configuration -----------------------------------------------------------------------------------------------------
# What ``linker_extra_config`` of ``--unified-cache-external-linker-config`` may hold, and what is made of it.

FILE = "config_file"
PLACE = "linker_extra_config"
_ALLOWED = f"{{{SECTION}: {{tiers: ...}}}}, or {{{FILE}: /path/hicache.yaml}}"


def launched_with(extra_config: Mapping[str, Any] | None) -> tuple[dict[str, Any], str | None]:
    """The document that HiCache would be given, and the file that holds it, if one does. Raises ConfigError.

    A file may hold the keys that SGLang reads for HiCache alone (``prefetch_threshold``, ...); they mean nothing here.
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

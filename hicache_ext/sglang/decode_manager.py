"""Our manager of a decode node's offload, which replaces SGLang's ``DecodeKVCacheOffloadManager``.

A single hook gives SGLang our manager instead of its own, unless the backend is not ours or ``pd.write`` is off. Ours
reads the configuration as a prefill node does, builds SGLang's host pools of the model with a DecodeWriter on them, and
keeps the manager's promises to the scheduler: a finished request's memory on the device is released once, after the
last copy out of it, and ``ongoing_offload`` lists the copies in flight.

A decode node whose pages no prefill node could use refuses to start, with one sentence.
"""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from hicache_ext.config import load_config
from hicache_ext.config.model import BACKEND_NAME, WriteConfig
from hicache_ext.errors import UnsupportedError
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.sglang import process
from hicache_ext.sglang.launch_arguments import configuration_given_as
from hicache_ext.sglang.process import attached_backends
from hicache_ext.sglang.releases import comes_with, installed_release, release_request
from hicache_ext.sglang.scheduler_hooks import is_unstored
from hicache_ext.sglang.served_pools import KV
from hicache_ext.storage.serving.kv_hints import Said, said_by

if TYPE_CHECKING:
    from hicache_ext.pd.decode_writer import DecodeWriter, Piece
    from hicache_ext.sglang.model_pools import ModelPools

logger = logging.getLogger(__name__)

SWA, MAMBA = PoolName.SWA.value, PoolName.MAMBA.value
MANAGER = "sglang.srt.disaggregation.decode_kvcache_offload_manager.DecodeKVCacheOffloadManager"
_CONFIG_FIELD = "hicache_storage_backend_extra_config"
_STOP_TIMEOUT = 20.0
_REFUSED = "hicache_ext: copies to host memory were refused, their pages will not be written"


def replace_manager(*arguments: Any, **named: Any) -> Any:
    """Construct the manager [scheduler thread, before the first request]. Raises ConfigError or UnsupportedError."""
    from sglang.srt.runtime_context import get_context, get_memory

    make: Callable[..., Any] = inspect.unwrap(pkgutil.resolve_name(MANAGER))
    written = getattr(get_memory(), _CONFIG_FIELD)
    extra_config: dict[str, Any] = {}
    if get_memory().hicache_storage_backend == "dynamic":
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        extra_config = HybridCacheController.parse_storage_backend_extra_config(written)[0]
    if extra_config.get("backend_name") != BACKEND_NAME:
        return make(*arguments, **named)
    config = load_config(extra_config)
    if config.pd.write.enabled:
        named |= {"config": config.pd.write, "extra_config": extra_config}
        make = _make_manager
    else:
        logger.info("hicache_ext: pd.write is off, SGLang's own decode offload writes")
    try:
        # Change the flag itself: SGLang's own manager parses only inline JSON, and code that builds the pools reads
        # the flag again (allocator: shm).
        get_context().override("hicache_ext", **{_CONFIG_FIELD: json.dumps(extra_config)})
        with configuration_given_as(written):
            manager = make(*arguments, **named)
    finally:
        get_context().override("hicache_ext", **{_CONFIG_FIELD: written})
    if not config.pd.write.enabled:
        skip_unstored(manager)
    return manager


def skip_unstored(manager: Any) -> None:
    """Make SGLang's own manager skip requests of which nothing may be written."""
    offload = manager.offload_kv_cache
    manager.offload_kv_cache = lambda req, *later, **named: not is_unstored(req) and offload(req, *later, **named)


class DecodeManager:
    """See the module docstring. Scheduler thread only.

    A request can be weakly referenced and hashed; only this class knows more about it.
    """

    writer: DecodeWriter

    def __init__(
        self,
        pools: ModelPools,
        req_to_token_pool: Any,
        tree_cache: Any,
        page_size: int,
        track_interval: int = 0,
        bigrams: bool = False,
    ) -> None:
        """Set ``writer`` before SGLang's first call. ``track_interval`` is the number of tokens between two recurrent
        states that SGLang keeps; ``bigrams`` says whether prefill nodes key their tree by pairs of tokens."""
        self.page_size = page_size
        self.ongoing_offload: deque[tuple[Any, Piece]] = deque()
        """Copies that were queued and not yet taken, in order; SGLang reads only its length."""
        self._queued = 0
        """Number of its last copies that were not started."""
        self._operations: deque[tuple[Any, int]] = deque()
        """Started operations: the event recorded at the end (None if refused) and the number of copies."""
        self.tails: dict[str, int] = {}
        """Pool -> number of its last pages that a prefill node needs at the boundary where it continues."""
        if SWA in pools.pools_on:
            self.tails[SWA] = -(-tree_cache.swa_retain_window // page_size)
        if MAMBA in pools.pools_on:
            self.tails[MAMBA] = 1
        self.pools = pools
        self._track_interval = track_interval
        self._bigrams = bigrams
        self._req_to_token_pool = req_to_token_pool
        self._allocator: Any = getattr(tree_cache, "token_to_kv_pool_allocator", None)
        self._tree_cache = tree_cache
        self._log = LimitedLog(logger, 1.0)

    # -- what SGLang calls -----------------------------------------------------------------------------------------

    def offload_kv_cache(self, req: Any, *_: Any, **__: Any) -> bool:
        """Handle a request that has advanced; called per request and step. Return whether a copy began."""
        try:
            return self.writer.request_advanced(req, req.output_ids, req.finished())
        except Exception:
            # False: the scheduler releases a finished request immediately, as if it had nothing to write.
            logger.exception("hicache_ext: a request's KV will not be written")
            return False

    def check_offload_progress(self, *_: Any, **__: Any) -> None:
        """Advance the writer; called once per step."""
        try:
            self.writer.step()
        except Exception as error:  # noqa: BLE001 - it would end the scheduler
            # This step's pages are not cached; the next step continues.
            self._log.log(logging.ERROR, "step", "hicache_ext: a step of the decode writer failed", exc_info=error)

    def drain_before_retraction(self, *_: Any, **__: Any) -> None:
        self.writer.finish_copies()

    def finalize_release_on_finish(self, req: Any, *_: Any, **__: Any) -> None:
        """Release a finished request, for which no copy began now, unless one is in flight."""
        if not self._is_copied(req):
            self.release(req)

    def has_inflight_device_transfer(self) -> bool:
        return bool(self.ongoing_offload)

    def release_host_resources(self, *_: Any, **__: Any) -> None:
        """Shut down at exit: host memory is freed only after the last write out of it."""
        self.writer.log_summary()
        if not self.writer.stop(_STOP_TIMEOUT):
            logger.warning("hicache_ext: a write is still under way after %g s; its memory is kept", _STOP_TIMEOUT)
            return
        close = getattr(self.pools.controller.storage_backend, "close", None)
        if close is not None:
            close()
        self.pools.group.destroy()

    # -- requests --------------------------------------------------------------------------------------------------

    def is_on_device(self, request: Any) -> bool:
        return request.kv.req_pool_idx not in (None, -1)

    def facts(self, request: Any) -> tuple[Sequence[int], PageChain, Said]:
        """Return the prompt, an empty chain that hashes the request's pages as a prefill node does, and what the
        request says about its KV."""
        chain = PageChain(self.page_size, request.extra_key, request.cache_salt, bigrams=self._bigrams)
        return request.origin_input_ids, chain, said_of(request)

    def boundary(self, request: Any, end_page: int, since: int) -> int:
        """Return the last page boundary up to ``end_page`` at which all pools can be copied now, a window's pages from
        page ``since`` on; 0 if there is no such boundary."""
        kv = request.kv
        if process.drafts() and request.retraction_count:
            # SGLang restored only the target's KV: the new slots hold draft KV of other requests.
            return 0
        if MAMBA in self.tails:
            # SGLang's forward has saved the state at this length itself. No other state is exact, since the next
            # forward may be running.
            tracked = kv.mamba_last_track_seqlen or 0
            if tracked % self.page_size or tracked > end_page * self.page_size:
                return 0
            end_page = tracked // self.page_size
        window_begins = max(end_page - self.tails.get(SWA, 0), since)
        return 0 if self._freed_window_tokens(kv) > window_begins * self.page_size else end_page

    def _freed_window_tokens(self, kv: Any) -> int:
        """Return how many leading tokens of a request have had their window memory freed by SGLang."""
        if SWA not in self.tails:
            return 0
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import ComponentType

        return int(kv.get_evicted_seqlen(ComponentType.SWA))

    def _is_torn(self, request: Any, piece: Piece) -> bool:
        """Return whether the memory of a tail may have been reused before its copy ended; called when it has ended."""
        if MAMBA in self.tails:
            # Slots are used in turn (only one, if batches do not overlap); SGLang may be one forward ahead of us.
            slots = len(request.kv.mamba_ping_pong_track_buffer)
            overwritten_at = piece.end_page * self.page_size + slots * self._track_interval
            if len(request.origin_input_ids) + len(request.output_ids) + 2 >= overwritten_at:
                return True
        window_begins = piece.end_page - piece.pages_of.get(SWA, 0)
        return self._freed_window_tokens(request.kv) > window_begins * self.page_size

    # -- copies --------------------------------------------------------------------------------------------------------
    # The copies of a step form one operation of SGLang's controller, to pay its cost once. An operation that only this
    # rank cannot start counts as ended, in its place in the order: all ranks take it in the same step, as refused.

    def queue_copy(self, request: Any, piece: Piece) -> None:
        """Queue the piece's pages for the next operation."""
        self._queued += 1
        self.ongoing_offload.append((request, piece))
        try:
            self.pools.controller.write_queue.append(self.pools.operation(self._parts(request, piece)))
        except Exception:
            logger.exception(_REFUSED)

    def start_copies(self) -> None:
        """Start the queued copies, provided SGLang's controller has all of them."""
        if not self._queued:
            return
        controller, event = self.pools.controller, None
        try:
            if len(controller.write_queue) == self._queued:
                controller.start_writing()
                event = controller.ack_write_queue.pop().finish_event
        except Exception:
            logger.exception(_REFUSED)
        controller.write_queue.clear()
        self._operations.append((event, self._queued))
        self._queued = 0

    def copies_ended(self, *, wait: bool = False) -> tuple[int, int]:
        """Return how many leading operations have ended, counting none behind a refused one, and the number of the
        refused one (``sys.maxsize`` if none). ``wait`` waits for all."""
        for number, (event, _) in enumerate(self._operations):
            if event is None:
                return number + 1, number
            if wait:
                event.synchronize()
            elif not event.query():
                return number, sys.maxsize
        return len(self._operations), sys.maxsize

    def take_copies(self) -> list[Piece]:
        """Return the pieces of the first operation, which has ended. Release every finished request after the last copy
        out of it; a failure to release one does not affect the others."""
        pieces = []
        for _ in range(self._operations.popleft()[1]):
            request, piece = self.ongoing_offload.popleft()
            try:
                piece.torn = self._is_torn(request, piece)
            except Exception:
                logger.exception("hicache_ext: whether a copy is whole is not known, its pages will not be written")
                piece.torn = True
            pieces.append(piece)
            if request.finished() and not self._is_copied(request):
                self.release(request)
        return pieces

    def _is_copied(self, request: Any) -> bool:
        return any(copied is request for copied, _ in self.ongoing_offload)

    def release(self, request: Any) -> None:
        """Release a request's device memory. Never raises, so that others are released, too."""
        try:
            self._release(request)
        except Exception:
            logger.exception("hicache_ext: a finished request's memory on the device was not released")

    def _release(self, request: Any) -> None:
        if self.is_on_device(request):
            release_request(request, self._tree_cache)

    def _parts(self, request: Any, piece: Piece) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return component, host indices and device indices of each part of a piece."""
        row = self._req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        tokens = row[piece.first_page * self.page_size : piece.end_page * self.page_size].to(torch.int64)
        parts = [(KV, piece.host_indices[KV], tokens)]
        if SWA in self.tails:
            tokens = row[(piece.end_page - piece.pages_of[SWA]) * self.page_size : piece.end_page * self.page_size]
            slots = self._allocator.translate_loc_from_full_to_swa(tokens).to(torch.int64)
            parts.append((SWA, piece.host_indices[SWA], slots))
        if MAMBA in self.tails:
            slot = request.kv.mamba_ping_pong_track_buffer[request.kv.mamba_last_track_idx]
            parts.append((MAMBA, piece.host_indices[MAMBA], slot.reshape(1).to(torch.int64, copy=True)))
        return parts


def said_of(request: Any) -> Said:
    """Return a request's wishes for its KV, from ``sampling_params.custom_params``::

        {"sampling_params": {"custom_params": {"hicache_ext": {"store": false, "priority": 2}}}, ...}

    This field is the only free mapping that SGLang carries from every entry point (/generate and the OpenAI calls,
    which have it at the top level) to the scheduler's Req; otherwise only custom logit processors read it. extra_key
    and cache_salt would change the page hashes, and SGLang's ``priority`` the scheduling. SGLang's ``kv_hints`` express
    the same and more (storage/serving/kv_hints.py). Absent or invalid values take their defaults.
    """
    parameters = getattr(getattr(request, "sampling_params", None), "custom_params", None)
    return said_by(getattr(request, "kv_hints", None), parameters) or Said()


class PageChain:
    """Hashes of the pages 0, 1, 2, ... of a growing token sequence, computed by SGLang's code. Not thread-safe.

    They equal those of a prefill node: sha256(previous hash || token ids of the page), the first one seeded from
    ``extra_key`` and ``cache_salt``. Under EAGLE SGLang keys its tree by pairs of tokens (``bigrams``), because a
    draft's KV at a token also depends on the next token: a page's hash then includes the token behind it.
    """

    def __init__(self, page_size: int, extra_key: str | None, cache_salt: str | None, *, bigrams: bool = False) -> None:
        self.page_size = page_size
        self._seeds = {"extra_key": extra_key, "cache_salt": cache_salt, "is_bigram": bigrams}
        self._bigrams = bigrams
        self._hashes: list[str] = []

    def __len__(self) -> int:
        """Return the number of pages hashed so far."""
        return len(self._hashes)

    def tokens_for(self, first_page: int, end_page: int) -> slice:
        """Return the slice of tokens that the pages from ``first_page`` up to ``end_page`` are hashed from."""
        return slice(first_page * self.page_size, end_page * self.page_size + self._bigrams)

    def pages_in(self, tokens: int) -> int:
        """Return the number of whole pages that a prefill node stores of a prompt of ``tokens`` tokens."""
        return max(0, tokens - self._bigrams) // self.page_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the next pages from exactly their tokens: ``tokens_for(len(self), ...)``."""
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        if pages := self.pages_in(len(tokens)):
            whole = tokens[self.tokens_for(0, pages)]
            key = RadixKey(whole if isinstance(whole, array) else array("q", whole), **self._seeds)
            before = self._hashes[-1] if self._hashes else None
            self._hashes += get_storage_hash_str(key, before, page_size=self.page_size)

    def hashes(self, first_page: int, end_page: int) -> list[str]:
        """Return the hashes of pages already hashed. Raises IndexError for later pages."""
        if end_page > len(self._hashes):
            raise IndexError(f"{end_page} pages asked for, {len(self._hashes)} hashed")
        return self._hashes[first_page:end_page]


# -- construction ------------------------------------------------------------------------------------------------------


def _make_manager(
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    tp_group: Any,
    tree_cache: Any,
    *,
    config: WriteConfig,
    extra_config: dict[str, Any],
) -> DecodeManager:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import ComponentType
    from sglang.srt.runtime_context import get_memory, get_schedule, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from hicache_ext.pd.decode_writer import DecodeWriter, PoolWriter
    from hicache_ext.sglang.host_pool import is_logical_anchor
    from hicache_ext.sglang.model_pools import ModelPools

    # Until 0.5.21 a decode node's tree has no components, and our pools serve only the full one there.
    components = set(getattr(tree_cache, "components", None) or {ComponentType.FULL})
    kv_cache = token_to_kv_pool_allocator.get_kvcache()
    _refuse_unusable(kv_cache, len(components), shares=not getattr(tree_cache, "disable", False))
    speculation = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        page_size=get_schedule().page_size,
        tp_cache_group=tp_group,
        **_draft_pools(speculation),
    )
    track_interval = _track_interval(params.page_size) if "MAMBA" in {part.name for part in components} else 0
    pools = ModelPools(
        params,
        components,
        storage_backend=get_memory().hicache_storage_backend,
        storage_backend_extra_config=extra_config,
    )
    # Not through the controller: SGLang's fault injector may be wrapped around its reference.
    backend = next(
        backend
        for backend in attached_backends()
        if getattr(backend, "mem_pool_host", None) is pools.controller.storage_host_pool
    )
    backend.fed_by_decode_writer = True
    metrics = backend.pd_metrics

    def minimum(numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=tp_group)
        return [int(number) for number in tensor.tolist()]

    def written_here(name: str) -> bool:
        own = not pools.controller.backup_skip or bool(backend.served.on_every_rank(name))
        return own and not is_logical_anchor(pools.host_pools[name])

    manager = DecodeManager(
        pools, req_to_token_pool, tree_cache, params.page_size, track_interval, bigrams=speculation.is_eagle()
    )
    manager.writer = DecodeWriter(
        manager,
        config,
        PoolWriter(backend, metrics, {on: [*filter(written_here, names)] for on, names in pools.pools_on.items()}),
        metrics,
        minimum=minimum if torch.distributed.get_world_size(group=tp_group) > 1 else list,
        hints=backend.hint_sender,
    )
    backend.export_also(metrics, manager.writer.set_levels)
    logger.info("hicache_ext: decode writer in force: %s", config)
    return manager


def _track_interval(page_size: int) -> int:
    """Return the tokens between kept states. Raises UnsupportedError if SGLang keeps none at page boundaries."""
    from sglang.srt.runtime_context import get_exec, mamba_track_grid

    if not get_exec().mamba.enable_mamba_extra_buffer or get_exec().mamba.enable_mamba_extra_buffer_lazy:
        raise UnsupportedError(
            "decode-side writing of recurrent states",
            "SGLang keeps them at page boundaries only beside its radix cache",
            "add --disaggregation-decode-enable-radix-cache --mamba-radix-cache-strategy extra_buffer, or "
            + _WITHOUT_WRITER,
        )
    return int(mamba_track_grid(page_size))


_WITHOUT_WRITER = (
    "leave out --disaggregation-decode-enable-offload-kvcache, or, for MHA and MLA, set pd.write.enabled: false"
)


def _draft_pools(speculation: Any) -> dict[str, tuple[Any, ...]]:
    """Return the fields of CacheInitParams for where a prefill node of this launch keeps draft KV: in the target's
    pages, or in separate pools. SGLang leaves them empty on decode nodes, which have no HiCache; but the drafts' pools
    there use the target's slots and hold the KV of every token whose successor is known, as on prefill nodes."""
    runners = tuple(model.runner for model in process.drafts())
    if not runners:
        return {}
    from sglang.srt.speculative.base_spec_worker import _can_pack_hicache_mtp

    pools = tuple(runner.token_to_kv_pool for runner in runners)
    if _can_pack_hicache_mtp(speculation, runners):
        return {"mtp_draft_device_pools": pools}
    return {"sidecar_draft_device_pools": pools[:1]}


def _refuse_unusable(kv_cache: Any, components: int, shares: bool) -> None:
    """Raise UnsupportedError if no prefill node could use our pages. ``shares``: requests use SGLang's radix cache."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.runtime_context import get_parallel, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    speculation = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    draft_pools = [model.runner.token_to_kv_pool for model in process.drafts()]
    plain = (memory_pool.MHATokenToKVPool, memory_pool.MLATokenToKVPool)
    windows = (SWAKVPool, v4.DeepSeekV4TokenToKVPool)
    several = (memory_pool.HybridLinearKVPool, *windows)
    subject, reason = f"decode-side writing of {type(kv_cache).__name__}", None
    if type(kv_cache) in (memory_pool.DSATokenToKVPool, *several) and components < 3:
        if not comes_with(installed_release(), "0.5.23"):
            reason = f"SGLang {installed_release()} keeps too little of it on a decode node"
        elif get_parallel().dcp_enabled or (type(kv_cache) in several and not speculation.is_none()):
            reason = "with speculation or decode context parallelism its pools have another order"
        elif shares and isinstance(kv_cache, windows):
            reason = "with SGLang's radix cache a request does not tell which memory of its window is its own"
        # A decode step leaves the inputs of V4's compressors where a prefill does: next to the page of the window
        # (c_plan.cuh). This was not checked for V4.1, nor where SGLang keeps anything per request.
        elif isinstance(kv_cache, v4.DeepSeekV4TokenToKVPool) and not all(
            ratio in (0, 4, 128) and type(pool) is v4.DeepSeekV4SingleKVPool and pool.kv_layout.value == "v4"
            for ratio, pool in ((0, kv_cache.swa_kv_pool), *kv_cache.kv_pools.items())
        ):
            reason = "of V4.1, HiSparse, unified KV and layouts but v4 not all is known to lie on pages of tokens"
    elif isinstance(kv_cache, memory_pool.DSATokenToKVPool) or not isinstance(kv_cache, plain):
        reason = "it has side pools that a decode node does not write"
    if reason is None and (speculation.is_eagle() or draft_pools):
        subject = f"decode-side writing with {get_spec().speculative_algorithm}"
        if not comes_with(installed_release(), "0.5.23"):
            reason = f"SGLang {installed_release()} does not say where a prefill node keeps the draft model's KV"
        elif not speculation.is_eagle() or speculation.is_frozen_kv_mtp() or not draft_pools:
            reason = "a decode node does not keep such drafts as a prefill node does"
        elif len(draft_pools) > 1:
            reason = "SGLang hands a decode node the KV of the first of several drafts alone"
        elif get_spec().speculative_adaptive:
            reason = "adaptive speculation leaves tokens without drafts"
        elif not all(type(pool) in (*plain, memory_pool.DSATokenToKVPool) for pool in draft_pools):
            reason = f"drafts in {type(draft_pools[0]).__name__} are not written"
    if reason is not None:
        raise UnsupportedError(subject, reason, _WITHOUT_WRITER)

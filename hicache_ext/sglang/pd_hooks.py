"""The hooks that put the DecodeWriter under SGLang's ``DecodeKVCacheOffloadManager``.

Every method that the scheduler calls is wrapped (``HookType.AROUND``). If the backend is not ours, or ``pd.write`` is
off, a wrapper calls the original. Otherwise:

- the constructor reads the configuration as the prefill node does (``@file``, without SGLang's own keys), because the
  original only parses inline JSON; then it makes a DecodeWriter;
- the working methods go to that writer.

A decode node whose pages no prefill node could use is stopped at start with one sentence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hicache_ext.config import load_config
from hicache_ext.config.model import BACKEND_NAME
from hicache_ext.config.sections import WriteConfig
from hicache_ext.errors import UnsupportedError
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.sglang.launch_facts import configuration_given_as
from hicache_ext.sglang.process import attached_backends
from hicache_ext.sglang.scheduler_hooks import is_unstored

if TYPE_CHECKING:
    from hicache_ext.pd.decode_writer import DecodeWriter

logger = logging.getLogger(__name__)

MANAGER = "sglang.srt.disaggregation.decode_kvcache_offload_manager.DecodeKVCacheOffloadManager"
_CONFIG_FIELD = "hicache_storage_backend_extra_config"
_WRITER = "_hicache_ext_writer"
_STOP_TIMEOUT = 20.0

_log = LimitedLog(logger, 1.0)


def around_init(original: Callable[..., None], manager: Any, *arguments: Any, **keywords: Any) -> None:
    """Construction [scheduler thread, before the first request]. Raises ConfigError or UnsupportedError."""
    from sglang.srt.runtime_context import get_context, get_memory

    written = getattr(get_memory(), _CONFIG_FIELD)
    extra_config: dict[str, Any] = {}
    if get_memory().hicache_storage_backend == "dynamic":
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

        extra_config = HybridCacheController.parse_storage_backend_extra_config(written)[0]
    if extra_config.get("backend_name") != BACKEND_NAME:
        original(manager, *arguments, **keywords)
        return
    config = load_config(extra_config)
    try:
        # Some of SGLang reads the flag again while it builds the pools (allocator: shm), so the flag itself is changed.
        get_context().override("hicache_ext", **{_CONFIG_FIELD: json.dumps(extra_config)})
        with configuration_given_as(written):
            original(manager, *arguments, **keywords)
    finally:
        get_context().override("hicache_ext", **{_CONFIG_FIELD: written})
    if not config.pd.write.enabled:
        logger.info("hicache_ext: pd.write is off, SGLang's own decode offload writes")
        return
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # Whether prefill nodes of this launch key their tree by bigrams.
    bigrams = bool(SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm).is_eagle())
    _refuse_what_prefill_cannot_use(manager.kv_cache, bigrams)
    setattr(manager, _WRITER, _make_writer(manager, config.pd.write))
    logger.info("hicache_ext: decode writer in force: %s", config.pd.write)


def around_offload(original: Callable[..., bool], manager: Any, req: Any, *later: Any, **named: Any) -> bool:
    """``offload_kv_cache``: a request has advanced [scheduler thread, per request and step]."""
    writer = getattr(manager, _WRITER, None)
    if writer is None:
        return not is_unstored(req) and original(manager, req, *later, **named)
    try:
        return bool(writer.request_advanced(req, req.output_ids, req.finished()))
    except Exception:
        # False: the scheduler releases a finished request immediately, as if it had nothing to write.
        logger.exception("hicache_ext: a request's KV will not be written")
        return False


def around_check(original: Callable[..., None], manager: Any, *later: Any, **named: Any) -> None:
    """``check_offload_progress`` [scheduler thread, once per step]."""
    writer = getattr(manager, _WRITER, None)
    if writer is None:
        original(manager, *later, **named)
        return
    try:
        writer.step()
    except Exception as error:  # noqa: BLE001 - it would end the scheduler
        # This step's pages are lost to the cache; the next step goes on.
        _log.log(logging.ERROR, "step", "hicache_ext: a step of the decode writer failed", exc_info=error)


def around_drain(original: Callable[..., None], manager: Any, *later: Any, **named: Any) -> None:
    """``drain_before_retraction`` [scheduler thread]."""
    writer = getattr(manager, _WRITER, None)
    if writer is not None:
        writer.finish_copies()
    else:
        original(manager, *later, **named)


def around_release(original: Callable[..., None], manager: Any, *later: Any, **named: Any) -> None:
    """``release_host_resources`` [scheduler thread, at exit]: host memory goes only after the last write out of it."""
    writer = getattr(manager, _WRITER, None)
    if writer is not None:
        writer.log_summary()
        if not writer.stop(_STOP_TIMEOUT):
            logger.warning("hicache_ext: a write is still under way after %g s; its memory is kept", _STOP_TIMEOUT)
            return
    close = getattr(manager.cache_controller.storage_backend, "close", None)
    if writer is not None and close is not None:
        close()
    original(manager, *later, **named)


def _refuse_what_prefill_cannot_use(kv_cache: Any, bigrams: bool) -> None:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool

    remedy = "set pd.write.enabled: false, or leave out --disaggregation-decode-enable-offload-kvcache"
    subject, reason = f"decode-side writing of {type(kv_cache).__name__}", None
    if isinstance(kv_cache, DSATokenToKVPool):
        reason = (
            "a decode node writes the latent without its indexer, and no prefill node can use one without the other"
        )
    elif not isinstance(kv_cache, MHATokenToKVPool | MLATokenToKVPool):
        reason = "it has side pools that a decode node does not write"
    elif bigrams:
        subject = "decode-side writing with speculation"
        reason = (
            "with EAGLE or MTP a prefill node stores the draft model's KV beside the target's or packed in its pages,"
            " and a decode node writes the target's only"
        )
    if reason is not None:
        raise UnsupportedError(subject, reason, remedy)


def _make_writer(manager: Any, config: WriteConfig) -> DecodeWriter:
    import torch

    # What is off is not imported: only a decode node needs these.
    from hicache_ext.pd.decode_writer import DecodeWriter, PoolWriter
    from hicache_ext.sglang.offload import ManagerOffload

    # Not through the controller: SGLang's fault injector may be wrapped around its reference.
    backend = next(
        backend
        for backend in attached_backends()
        if getattr(backend, "mem_pool_host", None) is manager.cache_controller.storage_host_pool
    )
    metrics = TierMetrics("pd_write", prefix="pd_write_")
    backend.export_also(metrics)

    def minimum(numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=manager.tp_group)
        return [int(number) for number in tensor.tolist()]

    return DecodeWriter(
        ManagerOffload(manager),
        config,
        PoolWriter(backend, metrics, writes=not manager.cache_controller.backup_skip),
        metrics,
        minimum=minimum if manager.tp_world_size > 1 else None,
        hints=backend.hint_sender(metrics),
    )

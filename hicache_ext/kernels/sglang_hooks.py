"""The hooks that put a copy engine of ours under SGLang's host pools.

``load_to_device_per_layer`` and ``backup_from_device_all_layer`` of the plain MHA and MLA host pools are wrapped
(``HookType.AROUND``). A hook serves the pools whose byte layout :mod:`hicache_ext.kernels.geometry` describes and calls
the original for everything else: page_unified, Mamba, DSA indexer, NVFP4, MXFP8, asymmetric, HiSparse and unknown
pools, the Ascend backend, and combinations of layout and I/O backend that SGLang refuses (so that its own error shows).

On a machine without an accelerator SGLang has no copy operations at all, so there the reference engine is registered;
on an accelerator SGLang's own path stays.

SGLang is imported inside functions only: the CPU launcher has to prepare the process before that import.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hicache_ext.kernels.geometry import CopyEngine, LayerCopy, device_rows, host_rows
from hicache_ext.kernels.reference import ReferenceEngine

_Layouts = Mapping[str, tuple[str, ...]]  # I/O backend -> host layouts

_MHA = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_MLA = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost"
_MHA_LAYOUTS: _Layouts = {
    "kernel": ("layer_first", "page_first", "page_head"),
    "direct": ("layer_first", "page_first_direct"),
}
_MLA_LAYOUTS: _Layouts = {"kernel": ("layer_first", "page_first"), "direct": ("layer_first", "page_first_direct")}
# SGLang backs layer-sharded MLA pools up layer by layer, which exists for fewer combinations.
_MLA_SHARDED_BACKUP_LAYOUTS: _Layouts = {"kernel": ("layer_first", "page_first"), "direct": ("layer_first",)}
# Device buffers whose token t starts t rows after the first one; head-major and vectorised ones differ.
_TOKEN_MAJOR_BUFFERS = ("nhd", "paged_nhd")

_engine: CopyEngine = ReferenceEngine()


def has_accelerator() -> bool:
    """Whether torch sees a CUDA, ROCm, XPU or Ascend device."""
    if torch.cuda.is_available():  # ROCm devices answer here too
        return True
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return True
    return importlib.util.find_spec("torch_npu") is not None


def register() -> None:
    """Register the hooks with SGLang's HookRegistry if this machine has no accelerator; once per process.

    They take effect when SGLang applies its hooks (``load_plugins``); :func:`verify` tells whether they did.
    """
    if has_accelerator():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _hooks().items():
        if not any(registered is hook for _, registered, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType.AROUND)


def verify() -> list[str]:
    """The dotted names of hook targets that are not wrapped; empty when all hooks took or none is wanted.

    Call after SGLang applied its hooks: a hook that failed to apply is only logged by SGLang.
    """
    if has_accelerator():
        return []
    missing = []
    for target in _hooks():
        try:
            wrapped = hasattr(pkgutil.resolve_name(target), "__wrapped__")
        except (ImportError, AttributeError):
            wrapped = False
        if not wrapped:
            missing.append(target)
    return missing


def load_mha_layer(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """AROUND ``MHATokenToKVPoolHost.load_to_device_per_layer``: one layer's K and V, host to device.

    Indices are int64 token indices, one per token. Layers that are not this pool's target layers are skipped; draft
    layers follow the target layers. Scheduler thread, inside the load stream.
    """
    if not _serves_mha(pool, io_backend):
        original(pool, device_pool, host_indices, device_indices, layer_id, io_backend, is_draft=is_draft)
        return
    if not is_draft and not 0 <= layer_id < pool.target_layer_num:
        return
    _engine.load(_mha_copies(pool, layer_id), host_indices, device_indices)


def back_up_mha_layers(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str,
) -> None:
    """AROUND ``MHATokenToKVPoolHost.backup_from_device_all_layer``: K and V of all layers, drafts included."""
    if not _serves_mha(pool, io_backend):
        original(pool, device_pool, host_indices, device_indices, io_backend)
        return
    copies = [copy for layer in range(pool.layer_num) for copy in _mha_copies(pool, layer)]
    _engine.back_up(copies, host_indices, device_indices)


def load_mla_layer(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """AROUND ``MLATokenToKVPoolHost.load_to_device_per_layer``: one layer's latent rows, host to device.

    ``layer_id`` is the controller's: a layer another rank owns is skipped, and host row and device buffer are looked
    up in the pool's own maps. Indices are widened ones under decode context parallelism.
    """
    if not _serves_mla(pool, io_backend, _MLA_LAYOUTS):
        original(pool, device_pool, host_indices, device_indices, layer_id, io_backend, is_draft=is_draft)
        return
    if not is_draft and layer_id not in pool._target_layer_indices:
        return
    host_indices, device_indices = _local_rows(pool, host_indices), _local_rows(pool, device_indices)
    _engine.load([_mla_copy(pool, layer_id)], host_indices, device_indices)


def back_up_mla_layers(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str,
) -> None:
    """AROUND ``MLATokenToKVPoolHost.backup_from_device_all_layer``: the layers this rank owns, then the drafts."""
    sharded = getattr(pool, "_layer_shard_enabled", False)
    if not _serves_mla(pool, io_backend, _MLA_SHARDED_BACKUP_LAYOUTS if sharded else _MLA_LAYOUTS):
        original(pool, device_pool, host_indices, device_indices, io_backend)
        return
    drafts = range(pool._device_layer_num, pool._device_layer_num + pool._draft_layer_num)
    copies = [_mla_copy(pool, layer_id) for layer_id in (*pool._target_layer_indices, *drafts)]
    host_indices, device_indices = _local_rows(pool, host_indices), _local_rows(pool, device_indices)
    _engine.back_up(copies, host_indices, device_indices)


def _hooks() -> dict[str, Callable[..., None]]:
    return {
        f"{_MHA}.load_to_device_per_layer": load_mha_layer,
        f"{_MHA}.backup_from_device_all_layer": back_up_mha_layers,
        f"{_MLA}.load_to_device_per_layer": load_mla_layer,
        f"{_MLA}.backup_from_device_all_layer": back_up_mla_layers,
    }


def _dotted_name(pool_class: type) -> str:
    return f"{pool_class.__module__}.{pool_class.__qualname__}"


def _serves_mha(pool: Any, io_backend: str) -> bool:
    return (
        _dotted_name(type(pool)) == _MHA
        and pool.layout in _MHA_LAYOUTS.get(io_backend, ())
        and pool.head_dim == pool.v_head_dim
        and all(
            info.scales is None and info.transfer_buffers is None and info.buffers.layout.value in _TOKEN_MAJOR_BUFFERS
            for info in pool._buffer_infos
        )
    )


def _serves_mla(pool: Any, io_backend: str, layouts: _Layouts) -> bool:
    return (
        _dotted_name(type(pool)) == _MLA
        and not pool._is_dummy
        and pool._native_buffers is None
        and pool.layout in layouts.get(io_backend, ())
    )


def _mha_copies(pool: Any, layer: int) -> Sequence[LayerCopy]:
    segment_bytes = pool.head_dim * pool.dtype.itemsize
    return [
        _layer_copy(pool, host_buffer, layer, device_buffers[layer], pool.head_num, segment_bytes)
        for host_buffer, device_buffers in (
            (pool.k_buffer, pool.device_k_buffers),
            (pool.v_buffer, pool.device_v_buffers),
        )
    ]


def _mla_copy(pool: Any, layer_id: int) -> LayerCopy:
    host_layer = pool._host_layer_by_controller[layer_id]
    device_buffer = pool.device_kv_buffers[pool._buffer_index_by_layer[layer_id]]
    return _layer_copy(pool, pool.kv_buffer, host_layer, device_buffer, 1, pool.token_stride_size)


def _layer_copy(
    pool: Any,
    host_buffer: torch.Tensor,
    host_layer: int,
    device_buffer: torch.Tensor,
    segments: int,
    segment_bytes: int,
) -> LayerCopy:
    host = host_rows(
        host_buffer,
        layout=pool.layout,
        layer=host_layer,
        layer_num=pool.layer_num,
        page_size=pool.page_size,
        token_count=pool.size,
        segments=segments,
        segment_bytes=segment_bytes,
    )
    device = device_rows(
        device_buffer,
        page_size=pool.page_size,
        row_stride=pool.device_row_stride_bytes,
        segment_bytes=segment_bytes,
    )
    return LayerCopy(host, device, pool.page_size, segments, segment_bytes)


def _local_rows(pool: Any, indices: torch.Tensor) -> torch.Tensor:
    """This rank's rows of page-aligned widened indices, under decode context parallelism."""
    if pool.dcp_size == 1:
        return indices
    return indices[pool.dcp_rank :: pool.dcp_size] // int(pool.dcp_size)

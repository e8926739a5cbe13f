"""The hooks that put our copy engines under SGLang's host pools.

``load_to_device_per_layer`` and ``backup_from_device_all_layer`` of the plain MHA and MLA host pools are wrapped
(``HookType.AROUND``). A hook serves the pools whose byte layout :mod:`hicache_ext.kernels.geometry` describes and calls
the original for everything else: page_unified, Mamba, DSA indexer, NVFP4, MXFP8, asymmetric, HiSparse and unknown
pools, the Ascend backend, and combinations of layout and I/O backend that SGLang refuses (so that its own error shows).
For the rest :mod:`hicache_ext.kernels.selection` decides, once per operation. On CUDA it also picks the original unless
a calibration or the operator says otherwise; without an accelerator, where SGLang has no copy operations at all, it
picks the reference engine.

SGLang calls the hooks on its scheduler thread, inside its transfer stream, and records an event after every layer; the
hooks keep that. The first call of a load plans the operation; the calls for the other layers find it by the index
tensors, which are the same objects. A hook raises nothing that the original would not raise.

SGLang is imported only inside functions, because the CPU launcher has to prepare the process before that import.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hicache_ext.config import KernelsConfig
from hicache_ext.errors import ConfigError
from hicache_ext.kernels.engine import Direction, Operation
from hicache_ext.kernels.geometry import LayerStack, device_rows, host_rows
from hicache_ext.kernels.selection import Selector, make_selector
from hicache_ext.sglang import releases

logger = logging.getLogger(__name__)

MHA = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
MLA = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost"
# The host layouts of each I/O backend.
_LAYOUTS = {"kernel": ("layer_first", "page_first", "page_head"), "direct": ("layer_first", "page_first_direct")}
# The attribute in which SGLang records the ranges that it registered with the driver, one per call.
_REGISTERED_RANGES = "_sglang_cuda_host_registered_ranges"

_LOADS_IN_FLIGHT = 4
"""Loads that a pool remembers: one of the target layers and some of drafts."""

_selector: Selector | None = None
_broken = False


def use(selector: Selector | None) -> None:
    """Set the configured selector; None means the default one, made at the next copy. Call it before the first copy."""
    global _selector, _broken
    _selector, _broken = selector, False
    _bindings.clear()


def has_accelerator() -> bool:
    """Return whether torch sees a CUDA, ROCm, XPU or Ascend device."""
    if torch.cuda.is_available():  # ROCm devices answer here too
        return True
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return True
    return importlib.util.find_spec("torch_npu") is not None


def wants_hooks() -> bool:
    """Return whether the hooks are for this machine: one with a CUDA device, or without any accelerator."""
    return not has_accelerator() or (torch.cuda.is_available() and torch.version.hip is None)


def around_load(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *later: Any,
    is_draft: bool = False,
    **named: Any,
) -> None:
    """AROUND ``load_to_device_per_layer``: copies the rows of one layer (K and V, or latents) from host to device.

    Indices are int64 token indices, one per token, and widened under decode context parallelism. ``layer_id`` is the
    controller's: a layer that is not among this pool's target layers (another rank owns it) is skipped; draft layers
    follow the target layers. Scheduler thread, inside the load stream.
    """
    kind = _dotted_name(type(pool))
    refusal = _unknown_arguments(original, later, named) or _refusal(pool, kind, io_backend, Direction.LOAD)
    if refusal is None and not is_draft:
        targets = releases.mla_layers(pool)[0] if kind == MLA else range(pool.target_layer_num)
        if layer_id not in targets:
            return
    is_counted = refusal is None or layer_id == 0  # once per operation
    if not is_counted or not _serves(
        Direction.LOAD, refusal, lambda: bound(pool).load(pool, host_indices, device_indices, layer_id)
    ):
        named["is_draft"] = is_draft
        original(pool, device_pool, host_indices, device_indices, layer_id, io_backend, *later, **named)


def around_back_up(
    original: Callable[..., None],
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str,
    *later: Any,
    **named: Any,
) -> None:
    """AROUND ``backup_from_device_all_layer``: copies the layers that this rank owns, then the drafts."""
    refusal = _unknown_arguments(original, later, named)
    refusal = refusal or _refusal(pool, _dotted_name(type(pool)), io_backend, Direction.BACK_UP)
    copies = pool, Direction.BACK_UP, host_indices, device_indices
    if not _serves(Direction.BACK_UP, refusal, lambda: bound(pool).begin(*copies)()):
        original(pool, device_pool, host_indices, device_indices, io_backend, *later, **named)


def _unknown_arguments(original: Callable[..., None], later: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Refuse, like ``_refusal``, a call with arguments of a later SGLang that are not at their defaults: it may request
    a copy that ours does not implement."""
    if not later and not named:
        return None
    defaults = {name: parameter.default for name, parameter in inspect.signature(original).parameters.items()}
    at_defaults = not later and all(name in defaults and value is defaults[name] for name, value in named.items())
    return None if at_defaults else "later_argument"


def _dotted_name(pool_class: type) -> str:
    return f"{pool_class.__module__}.{pool_class.__qualname__}"


def _refusal(pool: Any, kind: str, io_backend: str, direction: Direction) -> str | None:
    """Return why no engine may serve ``pool``, as a metric label; None if one may. ``kind`` is its class name."""
    if kind not in (MHA, MLA):
        return "pool_class"
    if kind == MLA and pool._is_dummy:
        return "no_buffer"
    refused = ["page_head"] if kind == MLA else []
    if kind == MLA and direction is Direction.BACK_UP and getattr(pool, "_layer_shard_enabled", False):
        # SGLang backs these up layer by layer, and has that for fewer combinations.
        refused.append("page_first_direct")
    if pool.layout not in _LAYOUTS.get(io_backend, ()) or pool.layout in refused:
        return f"layout_{pool.layout}_{io_backend}"
    if kind == MHA and pool.head_dim != releases.pool_fact(pool, "v_head_dim"):
        return "asymmetric"
    return releases.foreign_device_layout(pool)


class _Binding:
    """The stack of one pool, its layer for each of the controller's layers, and the loads in flight."""

    def __init__(self, pool: Any) -> None:
        # A layer has the same number on both sides unless other ranks own layers.
        _, host_layers, buffer_numbers = releases.mla_layers(pool)
        # K and V, or the latent: the host buffer of all layers, and the name of the device buffers.
        if _dotted_name(type(pool)) == MLA:
            sides, segments, segment_bytes = [(pool.kv_buffer, "kv")], 1, pool.token_stride_size
        else:
            sides = [(pool.k_buffer, "k"), (pool.v_buffer, "v")]
            segments, segment_bytes = pool.head_num, pool.head_dim * pool.dtype.itemsize
        shape = {"page_size": pool.page_size, "segments": segments, "segment_bytes": segment_bytes}
        in_layout = {**shape, "layout": pool.layout, "layer_num": pool.layer_num, "token_count": pool.size}
        stride = releases.device_row_stride(pool)
        layers = [
            [
                (
                    host_rows(buffer, layer=host_layer, **in_layout),
                    device_rows(
                        releases.device_buffers(pool, name)[buffer_numbers[layer_id]],
                        page_size=pool.page_size,
                        row_stride=stride,
                        segment_bytes=segment_bytes,
                    ),
                )
                for buffer, name in sides
            ]
            for layer_id, host_layer in host_layers.items()
        ]
        # The host memory that is page-locked, in the pieces in which it was registered.
        registrations = tuple(getattr(pool.kv_buffer, _REGISTERED_RANGES, ())) if pool.pin_memory else ()
        self.stack = LayerStack(layers, **shape, layout=pool.layout, registrations=registrations)
        self._layer_of = {layer_id: layer for layer, layer_id in enumerate(host_layers)}
        self._buffers = _buffers(pool)
        self._loads: list[tuple[torch.Tensor, torch.Tensor, set[int], Callable[..., bool]]] = []
        """Index tensors, submitted layers and submit function per load. It keeps the tensors alive, because they are
        recognised by identity, which no other tensor may take."""

    def fits(self, pool: Any) -> bool:
        """Return whether the pool still has the buffers that this binding was made from."""
        return all(known is current for known, current in zip(self._buffers, _buffers(pool), strict=True))

    def load(self, pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, layer_id: int) -> bool:
        """Submit a layer of the load of these tokens, which may be in flight already or begin here.

        SGLang passes the same tensors for every layer of a load, and each layer once; draft layers come in between,
        sometimes with tensors of their own.
        """
        layer = self._layer_of[layer_id]
        for host, device, submitted, submit in self._loads:
            if host is host_indices and device is device_indices and layer not in submitted:
                submitted.add(layer)
                return submit(*self.stack.layers[layer])
        submit = self.begin(pool, Direction.LOAD, host_indices, device_indices)
        self._loads = [(host_indices, device_indices, {layer}, submit), *self._loads[: _LOADS_IN_FLIGHT - 1]]
        return submit(*self.stack.layers[layer])

    def begin(self, pool: Any, direction: Direction, *indices: torch.Tensor) -> Callable[..., bool]:
        """Begin an operation; ``indices`` are those of the host, then those of the device."""
        local = [_local_rows(pool, side) for side in indices]
        return _current_selector().begin(Operation(self.stack, direction, *local))


_bindings: weakref.WeakKeyDictionary[Any, _Binding] = weakref.WeakKeyDictionary()


def _serves(direction: Direction, refusal: str | None, submit: Callable[[], bool]) -> bool:
    """Submit copies; return False if SGLang's own path has to make them. After a failure that is all of them."""
    global _broken
    if _broken:
        return False
    try:
        if refusal is not None:
            _current_selector().count(direction, None, refusal)
            return False
        return submit()
    except Exception as error:  # fall back to SGLang's own path, whatever is wrong with ours
        _broken = True
        trace = None if isinstance(error, ConfigError) else error
        logger.error("copies between host and device stay with SGLang's own path: %s", error, exc_info=trace)
        return False


def _current_selector() -> Selector:
    global _selector
    if _selector is None:
        _selector = make_selector(KernelsConfig())
    return _selector


def bound(pool: Any) -> _Binding:
    """Return the binding of an MHA or MLA host pool that the hooks serve."""
    binding = _bindings.get(pool)
    if binding is None or not binding.fits(pool):
        binding = _bindings[pool] = _Binding(pool)
    return binding


def _buffers(pool: Any) -> list[Any]:
    names = ("kv",) if _dotted_name(type(pool)) == MLA else ("k", "v")
    return [pool.kv_buffer, *[buffer for name in names for buffer in releases.device_buffers(pool, name)]]


def _local_rows(pool: Any, indices: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of page-aligned indices, which decode context parallelism widens."""
    if pool.dcp_size == 1:
        return indices
    return indices[pool.dcp_rank :: pool.dcp_size] // int(pool.dcp_size)

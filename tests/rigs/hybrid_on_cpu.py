"""What hybrid models need in SGLang on a machine without a GPU, besides what ``hicache_ext.testing.sglang_cpu`` mends.

Servers get it by their environment: ``hybrid_environment()`` (server_hooks.py).

======================================  ==============================================================================
missing on CPU                          mended by
======================================  ==============================================================================
the choice of experts                   SGLang's own torch path
the gate of a shared expert             a line of torch
Gated DeltaNet's kernels                ``tests.rigs.gdn_reference``
pinned host memory of Mamba states      it is not pinned
Mamba states, host <-> device           SGLang's own torch path, the one for Ascend
states kept for the prefix cache        SGLang's gate for them (CUDA and others) opened, and their copy in torch
======================================  ==============================================================================

Not mended: FP8 and DeepSeek's sparse attention.

Nothing of SGLang is imported here before ``register``, which names to SGLang's hook registry what it is to wrap: only
modules that models without these layers import, too, or that cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hicache_ext.sglang.kernel_hooks import has_accelerator
from hicache_ext.sglang.releases import TESTED, comes_with, installed_release
from tests.rigs import gdn_reference

_MAMBA_KERNELS = ("causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu")
_OPERATORS = ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")


def register() -> None:
    """Give the stand-in for ``sgl_kernel`` what Gated DeltaNet calls, and SGLang's registry the hooks; before SGLang
    imports these layers. Again is free. Not on a machine with a GPU, nor with releases before the newest tested one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if has_accelerator() or not comes_with(installed_release(), TESTED[-1]):
        return
    for name in _MAMBA_KERNELS if "sgl_kernel.mamba" in sys.modules else ():
        setattr(sys.modules["sgl_kernel.mamba"], name, getattr(gdn_reference, name))
    for name in _OPERATORS:
        setattr(torch.ops.sgl_kernel, name, getattr(gdn_reference, name))
    for target, hook, kind in _hooks():
        if not any(registered is hook for _, registered, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, HookType(kind))


def _hooks() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """What to wrap in SGLang, with what, and how."""
    kernels = "sglang.kernels.ops"
    pool = "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost"
    yield "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", _yes, "replace"
    yield "sglang.srt.layers.moe.topk.TopK.forward_cpu", _experts_in_torch, "around"
    yield f"{pool}.__init__", _without_pinned_states, "before"
    yield f"{pool}._copy_tensor_pf_lf", _in_torch, "before"
    yield f"{pool}._copy_tensor_all_layers_lf_pf", _in_torch, "before"
    yield (
        f"{kernels}.mamba.mamba_state_scatter_triton._launch_track_mamba_states",
        gdn_reference.track_mamba_states,
        "replace",
    )
    yield f"{kernels}.elementwise.elementwise._launch_fused_gate_sigmoid_mul", _gate_shared_expert, "replace"
    yield f"{kernels}.attention.fla.fused_norm_gate.rms_norm_gated", gdn_reference.rms_norm_gated, "replace"


def _experts_in_torch(_: Callable[..., Any], choice: Any, *args: Any, **named: Any) -> Any:
    return choice.forward_native(*args, **named)


def _gate_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(-1)
    gated = gate * shared_output.float()
    output.copy_(gated + output.float() if do_add else gated)


def _yes() -> bool:
    return True


def _without_pinned_states(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "pin_memory": False}


def _in_torch(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "io_backend": "kernel_ascend"}

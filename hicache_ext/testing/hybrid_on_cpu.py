"""What hybrid models need in SGLang on a machine without a GPU: used by ``hicache_ext.testing.sglang_cpu``.

======================================  ==============================================================================
missing on CPU                          mended by
======================================  ==============================================================================
attention over a window's own pool      ``hicache_ext.testing.torch_attention``, in place of torch_native
the choice of experts                   SGLang's own torch path
the gate of a shared expert             a line of torch
Gated DeltaNet's kernels                ``hicache_ext.testing.gdn_reference``
Mamba states, host <-> device           SGLang's own torch path, the one for Ascend
states kept for the prefix cache        SGLang's gate for them (CUDA and others) opened, and their copy in torch
======================================  ==============================================================================

Not mended: FP8 and DeepSeek's sparse attention.

Nothing of SGLang is imported here: ``hooks`` names what SGLang's hook registry is to wrap, and only the modules
that models without these layers import, too, or that cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

import torch

from hicache_ext.testing import gdn_reference

Kind = Literal["before", "around", "replace"]

_MAMBA_KERNELS = ("causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu")
_OPERATORS = ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")


def add_kernels(sgl_kernel: ModuleType) -> dict[str, ModuleType]:
    """Give the stand-in for ``sgl_kernel`` what Gated DeltaNet calls: its submodules, by their names."""
    mamba = ModuleType("sgl_kernel.mamba")
    for name in _MAMBA_KERNELS:
        setattr(mamba, name, getattr(gdn_reference, name))
    for name in _OPERATORS:
        setattr(torch.ops.sgl_kernel, name, getattr(gdn_reference, name))
    sgl_kernel.mamba = mamba  # type: ignore[attr-defined]
    return {mamba.__name__: mamba}


def hooks() -> Iterator[tuple[str, Callable[..., Any], Kind]]:
    """What to wrap in SGLang, with what, and how."""
    kernels = "sglang.kernels.ops"
    pool = "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost"
    setup = "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
    yield f"{setup}._build_full_attention_backend_from_str", _attention, "around"
    yield "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", _yes, "replace"
    yield "sglang.srt.layers.moe.topk.TopK.forward_cpu", _experts_in_torch, "around"
    yield f"{pool}._copy_tensor_pf_lf", _in_torch, "before"
    yield f"{pool}._copy_tensor_all_layers_lf_pf", _in_torch, "before"
    yield (
        f"{kernels}.mamba.mamba_state_scatter_triton._launch_track_mamba_states",
        gdn_reference.track_mamba_states,
        "replace",
    )
    yield f"{kernels}.elementwise.elementwise._launch_fused_gate_sigmoid_mul", _gate_shared_expert, "replace"
    yield f"{kernels}.attention.fla.fused_norm_gate.rms_norm_gated", gdn_reference.rms_norm_gated, "replace"


def _attention(original: Callable[..., Any], **named: Any) -> Any:
    if named["backend_str"] != "torch_native":
        return original(**named)
    from hicache_ext.testing.torch_attention import TorchAttention

    return TorchAttention(named["model_runner"])


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


def _in_torch(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "io_backend": "kernel_ascend"}

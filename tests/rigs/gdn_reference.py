"""Gated DeltaNet (Qwen3-Next, Qwen3.5) on the CPU: what SGLang calls in ``sgl_kernel``, from transformers' reference.

SGLang has these kernels for CUDA, and for CPUs in its compiled ``sgl_kernel`` with AMX; here they are a few lines of
torch around ``torch_chunk_gated_delta_rule`` and ``torch_recurrent_gated_delta_rule`` of transformers. Names, arguments
and results are those of SGLang's call sites (srt/layers/attention/linear/).

Shapes: T tokens of all sequences, one after the other, as ``cu_seqlens`` cuts them; H heads of keys of K dimensions; V
heads of values of D dimensions; N sequences. Recurrent states are [slots, V, D, K], convolution states
[slots, channels, width - 1]; both are updated in place. A slot of -1 is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional

CHUNK = 64
"""Tokens from one recurrent state that SGLang may keep for its prefix cache to the next."""


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay in log space and beta, float32 [1, T, V], of the projections ``a`` and ``b``, [T, V]."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The convolution of whole sequences: [channels, T], each from its state where it has one."""
    result = torch.empty_like(x)
    starts: Sequence[int] = query_start_loc.tolist()
    for number, (slot, continues) in enumerate(zip(cache_indices.tolist(), has_initial_state.tolist(), strict=True)):
        begin, end = starts[number], starts[number + 1]
        if slot < 0 or begin == end:
            continue
        state = conv_states[slot] if continues else torch.zeros_like(conv_states[slot])
        result[:, begin:end], conv_states[slot] = _convolve(x[:, begin:end], state, weight, bias, activation)
    return result


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The convolution of one new token for each of N sequences: [N, channels]."""
    result = torch.zeros_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            column, conv_states[slot] = _convolve(x[number].unsqueeze(1), conv_states[slot], weight, bias, activation)
            result[number] = column.squeeze(1)
    return result


def _convolve(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence, [channels, tokens]: the result and the new state."""
    inputs = torch.cat([state.to(x.dtype), x], dim=1)
    result = functional.conv1d(inputs.unsqueeze(0), weight.unsqueeze(1), bias, groups=weight.shape[0]).squeeze(0)
    if activation in ("silu", "swish"):
        result = functional.silu(result)
    return result.to(x.dtype), inputs[:, inputs.shape[1] - state.shape[1] :].to(state.dtype)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Whole sequences; q and k are [1, T, H, K], v is [1, T, V, D], g and beta are [1, T, V].

    The output [1, T, V, D], nothing, and the state before each chunk of each sequence, [1, chunks, V, D, K].
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = _a_key_per_value(q, v), _a_key_per_value(k, v)
    output = torch.zeros_like(v)
    before_chunks = []
    starts: Sequence[int] = cu_seqlens.tolist()
    for number, slot in enumerate(initial_state_indices.tolist()):
        # A copy: what is handed out as the state before the first chunk must not become the one after the last.
        state = initial_state[slot].float().clone().transpose(-1, -2).unsqueeze(0)
        for begin in range(starts[number], starts[number + 1], CHUNK):
            before_chunks.append(state.transpose(-1, -2))
            span = slice(begin, min(begin + CHUNK, starts[number + 1]))
            output[:, span], state = torch_chunk_gated_delta_rule(
                q[:, span],
                k[:, span],
                v[:, span],
                g[:, span],
                beta[:, span],
                chunk_size=CHUNK,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
        if slot >= 0:
            initial_state[slot] = state[0].transpose(-1, -2).to(initial_state.dtype)
    return output, None, torch.stack(before_chunks, dim=1)


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    disable_state_update: bool = False,
    **_: Any,
) -> torch.Tensor:
    """A new token for each of N sequences; q and k are [1, N, H, K], v and the result [1, N, V, D], a and b [N, V]."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    if disable_state_update:
        raise NotImplementedError("speculative decoding of a hybrid model needs the real sgl_kernel")
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots = initial_state_indices.to(torch.int64)
    states = initial_state_source[slots].float().transpose(-1, -2)
    # Of a batch the reference makes one token for each of N sequences.
    tokens = [_a_key_per_value(q, v), _a_key_per_value(k, v), v, g, beta]
    output: torch.Tensor
    output, states = torch_recurrent_gated_delta_rule(
        *(tensor.transpose(0, 1) for tensor in tokens),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    real = slots >= 0
    initial_state_source[slots[real]] = states[real].transpose(-1, -2).to(initial_state_source.dtype)
    return output.transpose(0, 1)


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "silu",
    *,
    eps: float,
    **_: Any,
) -> torch.Tensor:
    """RMS norm of ``x``, then the gate ``g``: what SGLang's Triton kernel of this name does, for [rows, D]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    gate = g.float()
    return (normed * (gate.sigmoid() if activation == "sigmoid" else functional.silu(gate))).to(x.dtype)


def track_mamba_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    track_mask: torch.Tensor,
    track_indices: torch.Tensor,
    batch_size: int,
    *_: Any,
) -> None:
    """Copy the states of the sequences in ``track_mask`` to other slots: one layer, or all with a leading axis."""
    mask = track_mask[:batch_size]
    sources, targets = cache_indices[:batch_size][mask].long(), track_indices[:batch_size][mask].long()
    for states, rank in ((conv_states, 3), (ssm_states, 4)):
        slots = states if states.dim() == rank else states.transpose(0, 1)
        slots[targets] = slots[sources]


def _a_key_per_value(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each key head as often as value heads share it."""
    return keys.repeat_interleave(values.shape[2] // keys.shape[2], dim=2)

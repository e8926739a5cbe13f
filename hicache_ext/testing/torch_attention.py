"""Self-attention in torch for the CPU rig, in place of two loops of SGLang 0.5.23's torch_native.

- Its extend attends for the whole sequence, with queries that nobody wrote for the tokens that were there before.
  Where those hold denormal numbers, a restored prompt takes longer than a computed one (2,017 tokens: 8 to 27 s instead
  of 0.2). This one attends for the new tokens alone.
- It writes a window's own pool by that pool's slots and reads it by those of full attention. As long as both are handed
  out in the same order that is the same; after a restore, where only the window's tokens get slots, it reads other
  tokens. This one translates, and reads nothing outside the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention


class TorchAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """Causal self-attention, with and without a window, without sinks; the rest is left to torch_native."""

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The length of rows that pad a batch, as SGLang's other attention for CPUs has it (DP attention asks)."""
        return 1

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        if layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        new_tokens = forward_batch.extend_seq_lens.tolist()
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, new_tokens)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Any:
        if layer.is_cross_attention:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        new_tokens = [1] * forward_batch.batch_size
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, new_tokens)

    def _attend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, new_tokens: Sequence[int]
    ) -> torch.Tensor:
        """``new_tokens`` of each sequence are in ``q``, one sequence after the other."""
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        in_window_pool = self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output: torch.Tensor = queries.new_empty((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), new_tokens, strict=True)
        begin = 0
        for request, length, new in rows:
            first = max(0, length - new - window) if window > -1 else 0
            slots = self.req_to_token_pool.req_to_token[request, first:length].long()
            if in_window_pool:
                slots = pool.translate_loc_from_full_to_swa(slots).long()
            whole = new == length and window < 0
            seen = None if whole or (new == 1 and window < 0) else _seen(first, length, new, window)
            output[begin : begin + new] = scaled_dot_product_attention(
                queries[begin : begin + new].transpose(0, 1).unsqueeze(0),
                keys[slots].to(queries.dtype).transpose(0, 1).unsqueeze(0),
                values[slots].to(queries.dtype).transpose(0, 1).unsqueeze(0),
                attn_mask=seen,
                is_causal=whole,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                scale=layer.scaling,
            )[0].transpose(0, 1)
            begin += new
        return output.reshape(output.shape[0], -1)


def _seen(first: int, length: int, new: int, window: int) -> torch.Tensor:
    """Return which of the tokens ``first`` to ``length`` the last ``new`` attend to: bool[new, length - first]."""
    query_at = torch.arange(length - new, length).unsqueeze(1)
    key_at = torch.arange(first, length).unsqueeze(0)
    seen = key_at <= query_at
    return seen & (key_at >= query_at - window) if window > -1 else seen

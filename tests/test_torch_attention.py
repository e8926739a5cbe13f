"""The CPU rig's attention: the numbers of SGLang's torch_native, computed for the new tokens alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_ext.testing.sglang_cpu import prepare_process

pytestmark = pytest.mark.sglang

HEADS, KV_HEADS, DIM = 6, 2, 8
SLOTS, CONTEXT = 256, 64
LENGTHS, NEW = [40, 17, 33, 9], [7, 17, 1, 4]


class Pool:
    """A token pool of one layer whose unwritten slots hold what a used one would: any numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.keys = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator)
        self.values = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values

    def set_kv_buffer(self, layer: Any, where: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[where.loc], self.values[where.loc] = keys.view(-1, KV_HEADS, DIM), values.view(-1, KV_HEADS, DIM)


def attend(backend: type, window: int | None, new: list[int], *, decode: bool = False) -> torch.Tensor:
    """The output for the last ``new`` tokens of each of four sequences, whose slots lie in no order."""
    pool = Pool()
    generator = torch.Generator().manual_seed(2)
    slots = torch.randperm(SLOTS, generator=generator)[: len(LENGTHS) * CONTEXT].view(len(LENGTHS), CONTEXT)
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=slots.int()), token_to_kv_pool=pool
    )
    attention = backend(runner)
    lengths = torch.tensor(LENGTHS)
    batch = SimpleNamespace(
        batch_size=len(LENGTHS),
        req_pool_indices=torch.tensor([2, 0, 3, 1]),
        seq_lens=lengths,
        extend_prefix_lens=lengths - torch.tensor(new),
        extend_seq_lens=torch.tensor(new),
        encoder_lens=None,
        out_cache_loc=torch.cat([slots[row, n - k : n] for row, n, k in zip([2, 0, 3, 1], LENGTHS, new, strict=True)]),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
        is_cross_attention=False,
        attn_type="decoder",
        sliding_window_size=window,
    )
    q, k, v = (torch.randn(sum(new), heads * DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return (attention.forward_decode if decode else attention.forward_extend)(q, k, v, layer, batch)


@pytest.mark.parametrize("window", [None, -1, 5, 31, 100])
@pytest.mark.parametrize("new", [NEW, LENGTHS], ids=["after a prefix", "whole prompts"])
def test_extend_gives_what_torch_native_gives(window: int | None, new: list[int]) -> None:
    prepare_process()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from hicache_ext.testing.torch_attention import TorchAttention

    expected = attend(TorchNativeAttnBackend, window, new)
    torch.testing.assert_close(attend(TorchAttention, window, new), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, -1, 5, 100])
def test_decode_gives_what_torch_native_gives(window: int | None) -> None:
    prepare_process()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from hicache_ext.testing.torch_attention import TorchAttention

    expected = attend(TorchNativeAttnBackend, window, [1] * 4, decode=True)
    torch.testing.assert_close(attend(TorchAttention, window, [1] * 4, decode=True), expected, rtol=1e-5, atol=1e-5)


def test_a_window_that_is_off_by_one_would_show() -> None:
    prepare_process()
    from hicache_ext.testing.torch_attention import TorchAttention

    assert not torch.allclose(attend(TorchAttention, 5, NEW), attend(TorchAttention, 6, NEW), rtol=1e-3, atol=1e-3)

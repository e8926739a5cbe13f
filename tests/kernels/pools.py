"""Real SGLang host pools on the CPU with device buffers of every kind, and copies checked byte for byte.

What is expected comes from a loop over tokens that knows shapes but no addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

PAGES = 6
LAYERS = 3
MHA_COMBINATIONS = [
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
]
MLA_COMBINATIONS = [combination for combination in MHA_COMBINATIONS if combination[0] != "page_head"]


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes seen as ``dtype``: NaN payloads must survive a copy too."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


def fill(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).copy_(torch.randint(0, 256, tensor.view(torch.uint8).shape, dtype=torch.uint8))


def device_buffers(
    layers: int, page_size: int, heads: int, dim: int, dtype: torch.dtype, *, strided: bool
) -> list[torch.Tensor]:
    """Per-layer buffers (tokens, heads, dim): apart, or interleaved token by token as in a unified pool."""
    tokens = (PAGES + 1) * page_size
    if strided:
        together = noise((tokens, layers, heads, dim), dtype)
        return [together[:, layer] for layer in range(layers)]
    # Tokens of somebody else before and behind, which no copy may touch.
    return [noise((tokens + 2, heads, dim), dtype)[1:-1] for _ in range(layers)]


def pointers(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)


def mha_pool(
    layout: str,
    page_size: int,
    *,
    strided: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    dim: int = 8,
    drafts: int = 0,
    pool_class: type | None = None,
) -> Any:
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    k = device_buffers(LAYERS + drafts, page_size, heads, dim, dtype, strided=strided)
    v = device_buffers(LAYERS + drafts, page_size, heads, dim, dtype, strided=strided)

    def info(first: int, last: int) -> Any:
        return MHABufferInfo(
            buffers=KVBuffers(
                k=tuple(k[first:last]),
                v=tuple(v[first:last]),
                k_data_ptrs=pointers(k[first:last]),
                v_data_ptrs=pointers(v[first:last]),
                layout=KVBufferLayout.NHD,
            ),
            page_size=page_size,
            head_num=heads,
            head_dim=dim,
            v_head_dim=dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    pool = (pool_class or MHATokenToKVPoolHost)(
        info(0, LAYERS),
        2,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * page_size,
        start_layer=0,
        end_layer=LAYERS,
        draft_buffer_infos=[info(LAYERS + depth, LAYERS + depth + 1) for depth in range(drafts)],
    )
    fill(pool.kv_buffer)
    return pool


def mla_pool(
    layout: str,
    page_size: int,
    *,
    strided: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    owned: tuple[int, ...] = tuple(range(LAYERS)),
    drafts: int = 0,
    reserved: int | None = None,
    dcp: tuple[int, int] = (0, 1),
) -> Any:
    """An MLA host pool whose rank owns the device layers ``owned`` and keeps rows for ``reserved`` of them."""
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    rank, dim = 10, 6
    buffers = device_buffers(len(owned) + drafts, page_size, 1, rank + dim, dtype, strided=strided)

    def info(chosen: list[torch.Tensor], indices: tuple[int, ...], layer_num: int) -> Any:
        return MLABufferInfo(
            buffers=tuple(chosen),
            data_ptrs=pointers(chosen),
            layer_indices=indices,
            device_layer_num=layer_num,
            page_size=page_size,
            kv_lora_rank=rank,
            qk_rope_head_dim=dim,
            kv_cache_dim=rank + dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    dcp_rank, dcp_size = dcp
    pool = MLATokenToKVPoolHost(
        info(buffers[: len(owned)], owned, LAYERS),
        2,
        0,
        page_size * dcp_size,
        layout,
        pin_memory=False,
        draft_buffer_infos=[info([buffers[len(owned) + depth]], (0,), 1) for depth in range(drafts)],
        dcp_size=dcp_size,
        dcp_rank=dcp_rank,
        device_capacity_tokens=PAGES * page_size,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=len(owned) if reserved is None else reserved,
        layer_shard_enabled=len(owned) != LAYERS,
    )
    fill(pool.kv_buffer)
    return pool


def host_row(pool: Any, component: torch.Tensor, layer: int, token: int) -> torch.Tensor:
    """One token's row, (heads, dim), by plain indexing into the documented shapes."""
    page, slot = divmod(token, pool.page_size)
    if pool.layout == "layer_first":
        return component[layer, token]
    if pool.layout == "page_first":
        return component[token, layer]
    if pool.layout == "page_first_direct":
        return component[page, layer, slot]
    assert pool.layout == "page_head"
    return component[page, :, slot, layer]


def pages_of_tokens(page_size: int, pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def some_tokens(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole pages, out of order, different on both sides, the last page of each side included."""
    host_pages = [pool.page_num - 1, 0, 4, 3]
    return pages_of_tokens(pool.page_size, host_pages), pages_of_tokens(pool.page_size, [2, PAGES, 1, 5])


def unchanged(*_: Any, **__: Any) -> None:
    raise AssertionError("the original was called")


def components(pool: Any) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """(host buffer, device buffers) of K and V, or of the latent."""
    if hasattr(pool, "device_kv_buffers"):
        return [(pool.kv_buffer, pool.device_kv_buffers)]
    return [(pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)]


def device_storages(pool: Any) -> list[torch.Tensor]:
    """All bytes of the memory that the device buffers lie in, those around the buffers included."""
    storages = {buffer.untyped_storage().data_ptr(): buffer for _, buffers in components(pool) for buffer in buffers}
    return [torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()) for buffer in storages.values()]


def snapshot(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for tensor in tensors]


def restore(tensors: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]) -> None:
    for tensor, content in zip(tensors, contents, strict=True):
        tensor.view(torch.uint8).copy_(content)


def assert_same(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for index, (tensor, wanted) in enumerate(zip(tensors, expected, strict=True)):
        assert torch.equal(tensor.view(torch.uint8), wanted), f"buffer {index} differs"


Tokens = tuple[torch.Tensor, torch.Tensor]


def check_load(
    pool: Any,
    hook: Callable[..., None],
    io_backend: str,
    layers: list[tuple[int, int, int, bool]],
    tokens: Tokens | None = None,
    passed: Tokens | None = None,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Load ``layers`` (controller layer, host layer, device buffer, is_draft) and compare every byte of both sides."""
    tokens = tokens or some_tokens(pool)
    memory = device_storages(pool)
    host_before, device_before = snapshot([pool.kv_buffer]), snapshot(memory)
    for host_buffer, buffers in components(pool):
        for _, host_layer, device_layer, _ in layers:
            for host_token, device_token in zip(*(side.tolist() for side in tokens), strict=True):
                buffers[device_layer][device_token] = host_row(pool, host_buffer, host_layer, host_token)
    expected = snapshot(memory)
    restore(memory, device_before)
    for layer_id, _, _, is_draft in layers:
        hook(unchanged, pool, None, *(passed or tokens), layer_id, io_backend, is_draft=is_draft)
    finish()
    assert_same(memory, expected)
    assert_same([pool.kv_buffer], host_before)


def check_back_up(
    pool: Any,
    hook: Callable[..., None],
    io_backend: str,
    layers: list[tuple[int, int]],
    tokens: Tokens | None = None,
    passed: Tokens | None = None,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Back up all ``layers`` (host layer, device buffer) and compare every byte of both sides."""
    tokens = tokens or some_tokens(pool)
    memory = device_storages(pool)
    device_before, host_before = snapshot(memory), snapshot([pool.kv_buffer])
    for host_buffer, buffers in components(pool):
        for host_layer, device_layer in layers:
            for host_token, device_token in zip(*(side.tolist() for side in tokens), strict=True):
                host_row(pool, host_buffer, host_layer, host_token).copy_(buffers[device_layer][device_token])
    expected = snapshot([pool.kv_buffer])
    restore([pool.kv_buffer], host_before)
    hook(unchanged, pool, None, *(passed or tokens), io_backend)
    finish()
    assert_same([pool.kv_buffer], expected)
    assert_same(memory, device_before)

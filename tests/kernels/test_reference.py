"""The reference engine under real SGLang host pools, against a per-token loop that knows shapes but no addresses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hicache_ext.kernels import sglang_hooks
from hicache_ext.kernels.geometry import LayerCopy, Rows
from hicache_ext.kernels.reference import ReferenceEngine
from hicache_ext.testing.sglang_cpu import prepare_process

pytestmark = pytest.mark.sglang

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


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> Iterator[None]:
    if importlib.util.find_spec("sglang") is None:  # not importorskip: the import has to wait for prepare_process
        pytest.skip("sglang is not installed")
    prepare_process()
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    # SGLang keeps 10 GiB of host memory free, which a small machine does not have.
    with host_memory_budget_scope(1 << 30):
        yield


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
    return [noise((tokens, heads, dim), dtype) for _ in range(layers)]


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


def as_bytes(tensors: Any) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


def assert_same(actual: Any, expected: list[torch.Tensor]) -> None:
    for index, (tensor, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(tensor.contiguous().view(torch.uint8), wanted), f"buffer {index} differs"


def components(pool: Any) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """(host buffer, device buffers) of K and V, or of the latent."""
    if hasattr(pool, "device_kv_buffers"):
        return [(pool.kv_buffer, pool.device_kv_buffers)]
    return [(pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)]


def check_load(
    pool: Any,
    hook: Callable[..., None],
    io_backend: str,
    layers: list[tuple[int, int, int, bool]],
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    passed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Load ``layers`` (controller layer, host layer, device buffer, is_draft) and compare every byte of both sides."""
    host_tokens, device_tokens = tokens or some_tokens(pool)
    host_before = as_bytes([pool.kv_buffer])
    expected = []
    for host_buffer, buffers in components(pool):
        copies = [buffer.clone() for buffer in buffers]
        for _, host_layer, device_layer, _ in layers:
            for host_token, device_token in zip(host_tokens.tolist(), device_tokens.tolist(), strict=True):
                copies[device_layer][device_token] = host_row(pool, host_buffer, host_layer, host_token)
        expected += as_bytes(copies)
    for layer_id, _, _, is_draft in layers:
        hook(unchanged, pool, None, *(passed or (host_tokens, device_tokens)), layer_id, io_backend, is_draft=is_draft)
    assert_same([buffer for _, buffers in components(pool) for buffer in buffers], expected)
    assert_same([pool.kv_buffer], host_before)


def check_back_up(
    pool: Any,
    hook: Callable[..., None],
    io_backend: str,
    layers: list[tuple[int, int]],
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    passed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Back up all ``layers`` (host layer, device buffer) and compare every byte of both sides."""
    host_tokens, device_tokens = tokens or some_tokens(pool)
    device_before = as_bytes(buffer for _, buffers in components(pool) for buffer in buffers)
    before = pool.kv_buffer.clone()
    for host_buffer, buffers in components(pool):
        for host_layer, device_layer in layers:
            for host_token, device_token in zip(host_tokens.tolist(), device_tokens.tolist(), strict=True):
                host_row(pool, host_buffer, host_layer, host_token).copy_(buffers[device_layer][device_token])
    expected = as_bytes([pool.kv_buffer])
    pool.kv_buffer.view(torch.uint8).copy_(before.view(torch.uint8))
    hook(unchanged, pool, None, *(passed or (host_tokens, device_tokens)), io_backend)
    assert_same([pool.kv_buffer], expected)
    assert_same([buffer for _, buffers in components(pool) for buffer in buffers], device_before)


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_mha_copies_are_byte_exact_and_leave_other_bytes_alone(
    layout: str, io_backend: str, page_size: int, strided: bool
) -> None:
    pool = mha_pool(layout, page_size, strided=strided)
    assert pool.device_rows_packed is not strided
    check_load(pool, sglang_hooks.load_mha_layer, io_backend, [(1, 1, 1, False)])
    every_layer = [(layer, layer) for layer in range(LAYERS)]
    check_back_up(pool, sglang_hooks.back_up_mha_layers, io_backend, every_layer)


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("layout", "io_backend"), MLA_COMBINATIONS)
def test_mla_copies_are_byte_exact_and_leave_other_bytes_alone(
    layout: str, io_backend: str, page_size: int, strided: bool
) -> None:
    pool = mla_pool(layout, page_size, strided=strided)
    assert pool.device_rows_packed is not strided
    check_load(pool, sglang_hooks.load_mla_layer, io_backend, [(1, 1, 1, False)])
    every_layer = [(layer, layer) for layer in range(LAYERS)]
    check_back_up(pool, sglang_hooks.back_up_mla_layers, io_backend, every_layer)


@pytest.mark.parametrize("dim", [3, 10, 12])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_rows_of_any_dtype_and_odd_width_are_copied(layout: str, dtype: torch.dtype, dim: int) -> None:
    pool = mha_pool(layout, 4, dtype=dtype, heads=3, dim=dim)
    check_load(pool, sglang_hooks.load_mha_layer, "kernel", [(0, 0, 0, False), (2, 2, 2, False)])
    every_layer = [(layer, layer) for layer in range(LAYERS)]
    check_back_up(pool, sglang_hooks.back_up_mha_layers, "kernel", every_layer)


@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_single_tokens_of_a_page_are_copied_alone(layout: str, io_backend: str) -> None:
    pool = mha_pool(layout, 16)
    tokens = torch.tensor([5, 100, 17]), torch.tensor([33, 2, 90])
    check_load(pool, sglang_hooks.load_mha_layer, io_backend, [(0, 0, 0, False)], tokens)
    check_back_up(
        pool, sglang_hooks.back_up_mha_layers, io_backend, [(layer, layer) for layer in range(LAYERS)], tokens
    )


@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_no_tokens_change_nothing(layout: str, io_backend: str) -> None:
    pool = mha_pool(layout, 16)
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    check_load(pool, sglang_hooks.load_mha_layer, io_backend, [(0, 0, 0, False)], nothing)
    check_back_up(pool, sglang_hooks.back_up_mha_layers, io_backend, [], nothing)


@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_mha_draft_layers_follow_the_target_layers(layout: str, io_backend: str) -> None:
    pool = mha_pool(layout, 16, drafts=2)
    check_load(pool, sglang_hooks.load_mha_layer, io_backend, [(LAYERS + 1, LAYERS + 1, LAYERS + 1, True)])
    check_back_up(pool, sglang_hooks.back_up_mha_layers, io_backend, [(layer, layer) for layer in range(LAYERS + 2)])


def test_a_layer_that_is_not_a_target_layer_is_skipped() -> None:
    mha, mla = mha_pool("page_first", 16, drafts=1), mla_pool("page_first", 16, drafts=1)
    for pool, hook in ((mha, sglang_hooks.load_mha_layer), (mla, sglang_hooks.load_mla_layer)):
        before = as_bytes(buffer for _, buffers in components(pool) for buffer in buffers)
        for layer_id in (-1, LAYERS, LAYERS + 7):
            hook(unchanged, pool, None, *some_tokens(pool), layer_id, "kernel", is_draft=False)
        assert_same([buffer for _, buffers in components(pool) for buffer in buffers], before)


@pytest.mark.parametrize(
    ("layout", "io_backend"), [("layer_first", "kernel"), ("layer_first", "direct"), ("page_first", "kernel")]
)
def test_a_layer_sharded_mla_rank_copies_its_own_layers_and_the_drafts(layout: str, io_backend: str) -> None:
    # This rank owns device layer 2 of 3, but every rank reserves rows for two layers; the draft comes after those.
    pool = mla_pool(layout, 16, owned=(2,), drafts=1, reserved=2)
    check_load(pool, sglang_hooks.load_mla_layer, io_backend, [(2, 0, 0, False), (LAYERS, 2, 1, True)])
    check_back_up(pool, sglang_hooks.back_up_mla_layers, io_backend, [(0, 0), (2, 1)])
    before = as_bytes(pool.device_kv_buffers)
    sglang_hooks.load_mla_layer(unchanged, pool, None, *some_tokens(pool), 0, io_backend)
    assert_same(pool.device_kv_buffers, before)


@pytest.mark.parametrize(("layout", "io_backend"), MLA_COMBINATIONS)
def test_a_dcp_rank_copies_its_share_of_widened_indices(layout: str, io_backend: str) -> None:
    rank, size = 1, 2
    pool = mla_pool(layout, 16, dcp=(rank, size))
    local = pages_of_tokens(16, [3, 1]), pages_of_tokens(16, [0, 5])
    widened = pages_of_tokens(16 * size, [3, 1]), pages_of_tokens(16 * size, [0, 5])
    check_load(pool, sglang_hooks.load_mla_layer, io_backend, [(0, 0, 0, False)], local, widened)
    check_back_up(
        pool, sglang_hooks.back_up_mla_layers, io_backend, [(layer, layer) for layer in range(LAYERS)], local, widened
    )


def calls_original(pool: Any, io_backend: str) -> bool:
    mla = hasattr(pool, "device_kv_buffers")
    load = sglang_hooks.load_mla_layer if mla else sglang_hooks.load_mha_layer
    back_up = sglang_hooks.back_up_mla_layers if mla else sglang_hooks.back_up_mha_layers
    calls: list[str] = []
    load(lambda *_, **__: calls.append("load"), pool, None, *some_tokens(pool), 0, io_backend)
    back_up(lambda *_, **__: calls.append("back up"), pool, None, *some_tokens(pool), io_backend)
    assert calls in ([], ["load", "back up"])
    return bool(calls)


def test_pools_and_combinations_without_a_known_geometry_go_to_the_original() -> None:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    assert calls_original(mha_pool("page_unified", 16), "kernel")
    assert calls_original(mha_pool("page_first", 16), "kernel_ascend")
    assert calls_original(mha_pool("page_first_direct", 16), "kernel")
    assert calls_original(mha_pool("page_head", 16), "direct")
    assert calls_original(mla_pool("page_first", 16), "direct")

    class Unknown(MHATokenToKVPoolHost):
        pass

    assert calls_original(mha_pool("page_first", 16, pool_class=Unknown), "kernel")
    assert not calls_original(mha_pool("page_first", 16), "kernel")


def test_a_sharded_backup_that_sglang_refuses_goes_to_the_original() -> None:
    pool = mla_pool("page_first_direct", 16, owned=(2,))
    calls: list[str] = []
    sglang_hooks.back_up_mla_layers(lambda *_: calls.append("original"), pool, None, *some_tokens(pool), "direct")
    assert calls == ["original"]


@pytest.mark.skipif(sglang_hooks.has_accelerator(), reason="SGLang's own copies stay on accelerators")
def test_the_hooks_are_in_place_once_however_often_they_are_registered() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    sglang_hooks.register()
    sglang_hooks.register()
    prepare_process()
    assert sglang_hooks.verify() == []
    target = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer"
    assert len(HookRegistry._hooks[target]) == 1


@pytest.mark.skipif(sglang_hooks.has_accelerator(), reason="SGLang's own copies stay on accelerators")
def test_the_pools_own_methods_copy_on_a_machine_without_a_gpu() -> None:
    pool = mha_pool("page_first", 16)
    host_tokens, device_tokens = some_tokens(pool)
    pool.load_to_device_per_layer(None, host_tokens, device_tokens, 0, "kernel")
    rows = torch.stack([host_row(pool, pool.k_buffer, 0, token) for token in host_tokens.tolist()])
    assert_same([pool.device_k_buffers[0][device_tokens]], as_bytes([rows]))


@pytest.mark.skipif(sglang_hooks.has_accelerator(), reason="SGLang's own copies stay on accelerators")
def test_a_hook_that_did_not_take_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    wrapped = MLATokenToKVPoolHost.load_to_device_per_layer
    monkeypatch.setattr(MLATokenToKVPoolHost, "load_to_device_per_layer", wrapped.__wrapped__)
    assert sglang_hooks.verify() == ["sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.load_to_device_per_layer"]


def test_unequal_numbers_of_tokens_are_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    rows = Rows(memory.untyped_storage(), memory.data_ptr(), 8, 8, 8, 8)
    with pytest.raises(ValueError, match=r"2 source tokens.*3 target"):
        ReferenceEngine().load([LayerCopy(rows, rows, 1, 1, 8)], torch.arange(2), torch.arange(3))

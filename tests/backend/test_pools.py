"""Which pools of which ranks share pages, which never meet, and which are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_ext.errors import UnsupportedError
from hicache_ext.sglang.launch_arguments import LaunchFacts
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices
from tests.rigs.host_pool_kinds import MHA_LAYOUTS, MLA_LAYOUTS, mla_pools

pytestmark = pytest.mark.sglang

KEYS = page_keys(4)


def content(host: Any, page: int) -> bytes:
    return bytes(host.get_data_page(page * host.page_size).contiguous().view(torch.uint8).numpy().tobytes())


def move(backend: Any, call: str, pages: list[int], page_size: int = PAGE_SIZE) -> list[bool]:
    result: list[bool] = getattr(backend, call)(KEYS[: len(pages)], page_indices(page_size, pages))
    return result


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("make", "layout"),
    [(mha_pools, layout) for layout in MHA_LAYOUTS] + [(mla_pools, layout) for layout in MLA_LAYOUTS],
    ids=[f"mha {layout}" for layout in MHA_LAYOUTS] + [f"mla {layout}" for layout in MLA_LAYOUTS],
)
def test_every_layout_and_page_size_comes_back_byte_for_byte(
    open_backend: Callable[..., Any], make: Callable[..., Any], layout: str, page_size: int
) -> None:
    host = make(layout=layout, page_size=page_size).host
    backend = open_backend(host, is_mla_model=make is mla_pools)
    before = [content(host, page) for page in (5, 1, 9)]
    assert move(backend, "batch_set_v1", [5, 1, 9], page_size) == [True] * 3
    host.kv_buffer.view(torch.uint8).zero_()
    assert move(backend, "batch_get_v1", [2, 3, 16], page_size) == [True] * 3
    assert [content(host, page) for page in (2, 3, 16)] == before


def test_no_combination_of_dtype_page_size_layout_tp_and_revision_meets_another(
    open_backend: Callable[..., Any],
) -> None:
    combinations = list(
        itertools.product(("bf16", "fp8"), (16, 32), ("page_first", "page_first_direct"), (1, 2), ("a", "b"))
    )
    backends = []
    for dtype, page_size, layout, tp_size, revision in combinations:
        host = mha_pools(
            layout=layout,
            page_size=page_size,
            head_dim=32 if dtype == "bf16" else 64,
            dtype=torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn,
        ).host
        ours = {"model": {"revision": revision}, "kv_dtype": "fp8_e4m3" if dtype == "fp8" else None}
        backends.append(open_backend(host, ours, tp_size=tp_size))
    for number, (backend, (_, page_size, *_rest)) in enumerate(zip(backends, combinations, strict=True)):
        assert backend.batch_exists(KEYS) == 0, combinations[number]
        assert move(backend, "batch_get_v1", [0, 1, 2, 3], page_size) == [False] * 4
        assert move(backend, "batch_set_v1", [0, 1, 2, 3], page_size) == [True] * 4
    assert all(backend.batch_exists(KEYS) == 4 for backend in backends)


def test_fp8_e4m3_and_e5m2_never_meet_although_both_are_uint8(open_backend: Callable[..., Any]) -> None:
    host = mha_pools(page_size=PAGE_SIZE, dtype=torch.float8_e4m3fn).host
    assert move(open_backend(host, {"kv_dtype": "fp8_e4m3"}), "batch_set_v1", [0]) == [True]
    assert open_backend(host, {"kv_dtype": "fp8_e5m2"}).batch_exists(KEYS[:1]) == 0
    assert open_backend(host, {"kv_dtype": "fp8_e4m3"}).batch_exists(KEYS[:1]) == 1


def test_a_uint8_pool_of_unknown_meaning_is_refused(open_backend: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"set hicache_ext\.kv_dtype"):
        open_backend(mha_pools(page_size=PAGE_SIZE, dtype=torch.float8_e4m3fn).host)


def test_mla_ranks_share_what_the_writer_rank_wrote(open_backend: Callable[..., Any]) -> None:
    writer, reader = mla_pools(page_size=PAGE_SIZE).host, mla_pools(page_size=PAGE_SIZE).host
    before = content(writer, 3)
    assert move(open_backend(writer, is_mla_model=True, tp_rank=0, tp_size=4), "batch_set_v1", [3]) == [True]
    reader.kv_buffer.zero_()
    assert move(open_backend(reader, is_mla_model=True, tp_rank=3, tp_size=4), "batch_get_v1", [7]) == [True]
    assert content(reader, 7) == before
    # Replicated bytes are the same under any TP size.
    assert open_backend(reader, is_mla_model=True, tp_rank=1, tp_size=8).batch_exists(KEYS[:1]) == 1


def test_ranks_of_a_context_parallel_group_share_latents(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gathers them on every rank, and each rank stored a copy of its own."""
    from hicache_ext.sglang import lifecycle, served_pools

    host, second = mla_pools(page_size=PAGE_SIZE).host, {"attn_cp_rank": 1, "attn_cp_size": 2}
    first = {"attn_cp_rank": 0, "attn_cp_size": 2, "tp_size": 1}
    assert move(open_backend(host, is_mla_model=True, **first), "batch_set_v1", [3]) == [True]
    assert open_backend(host, is_mla_model=True, **second).batch_exists(KEYS[:1]) == 1
    assert open_backend(host, is_mla_model=True).batch_exists(KEYS[:1]) == 1
    # Heads, stripes of pages, layers of their own, and tokens dealt out over ranks are other bytes on each.
    heads = mha_pools(page_size=PAGE_SIZE).host
    assert move(open_backend(heads, **first), "batch_set_v1", [3]) == [True]
    assert open_backend(heads, **second).batch_exists(KEYS[:1]) == 0
    facts = LaunchFacts(parts_of_pages=True)
    monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: facts)
    assert open_backend(host, is_mla_model=True, **first).batch_exists(KEYS[:1]) == 0
    monkeypatch.setattr(served_pools, "dcp_shard", lambda ranks, pool: (0, 2))
    monkeypatch.setattr(lifecycle, "read_launch_facts", LaunchFacts)
    shards = [
        open_backend(host, is_mla_model=True, **ranks).served.bound["kv"].identities[0].shard
        for ranks in (first, second)
    ]
    assert [shard.cp for shard in shards] == [(0, 2), (1, 2)]


def test_split_heads_let_tp_2_read_what_tp_4_wrote_and_the_other_way_round(open_backend: Callable[..., Any]) -> None:
    """page_head with tp_lcm_size: rank 1 of 2 holds the heads of ranks 2 and 3 of 4."""
    common = {"layout": "page_head", "page_size": PAGE_SIZE, "layers": 3}
    wide = mha_pools(heads=4, **common).host
    narrow = [mha_pools(heads=2, **common).host for _ in range(2)]

    def open_rank(host: Any, rank: int, size: int) -> Any:
        return open_backend(host, tp_rank=rank, tp_size=size, tp_lcm_size=4, should_split_heads=size < 4)

    before = wide.kv_buffer[:, 5].clone().view(torch.uint8)
    assert move(open_rank(wide, 1, 2), "batch_set_v1", [5]) == [True]
    for part, host in enumerate(narrow):
        backend = open_rank(host, 2 + part, 4)
        assert backend.batch_exists(KEYS[:1]) == 1
        assert move(backend, "batch_get_v1", [7]) == [True]
        assert torch.equal(host.kv_buffer[:, 7].view(torch.uint8), before[:, 2 * part : 2 * part + 2])
    assert open_rank(narrow[0], 0, 4).batch_exists(KEYS[:1]) == 0

    # The other way: a page exists for TP 2 only once both halves have been written.
    half, other_half = open_rank(narrow[0], 0, 4), open_rank(narrow[1], 1, 4)
    reader = open_rank(wide, 0, 2)
    assert move(half, "batch_set_v1", [7]) == [True]
    assert reader.batch_exists(KEYS[:1]) == 0
    assert move(reader, "batch_get_v1", [9]) == [False]
    assert move(other_half, "batch_set_v1", [7]) == [True]
    assert move(reader, "batch_get_v1", [9]) == [True]
    assert torch.equal(wide.kv_buffer[:, 9, :2].view(torch.uint8), narrow[0].kv_buffer[:, 7].view(torch.uint8))
    assert torch.equal(wide.kv_buffer[:, 9, 2:].view(torch.uint8), narrow[1].kv_buffer[:, 7].view(torch.uint8))


def test_a_logical_anchor_leaves_the_verdict_to_its_sidecars(open_backend: Callable[..., Any]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    backend = open_backend()
    backend.register_mem_pool_host(LogicalHostPool(16 * PAGE_SIZE, PAGE_SIZE))
    sidecar = mla_pools(page_size=PAGE_SIZE).host
    backend.register_mem_host_pool_v2(sidecar, PoolName.DEEPSEEK_V4_C4)
    assert backend.batch_set_v1(KEYS, page_indices(PAGE_SIZE, [0, 1, 2, 3])) == [True] * 4
    assert backend.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.DEEPSEEK_V4_C4)]).kv_hit_pages == 0
    backend.batch_set_v2(
        [PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, keys=KEYS[:3], host_indices=page_indices(PAGE_SIZE, [0, 1, 2]))]
    )
    assert backend.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.DEEPSEEK_V4_C4)]).kv_hit_pages == 3


def test_a_layout_without_pages_is_refused_with_one_sentence(open_backend: Callable[..., Any]) -> None:
    host = mha_pools(page_size=PAGE_SIZE).host
    host.layout = "page_unified"
    with pytest.raises(UnsupportedError) as refused:
        open_backend(host)
    assert str(refused.value) == (
        "host pool 'kv' (MHATokenToKVPoolHost, layout page_unified) cannot be served: it exposes no page buffers "
        "(ValueError: Unsupported layout: page_unified), and it gives no flat pages "
        "(ValueError: Unsupported layout: page_unified); choose another --hicache-mem-layout"
    )

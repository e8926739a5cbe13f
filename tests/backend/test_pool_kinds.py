"""Real host pools of every kind of model in every layout, and the two ways of their pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hicache_ext.errors import UnsupportedError
from hicache_ext.sglang import host_pool
from hicache_ext.sglang.host_pool import CopiedPages, HostPages, pages_of
from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.testing.conformance.storage_backend import page_keys
from hicache_ext.testing.host_pools import page_indices
from tests.backend import pool_table
from tests.releases.needs import needs_release
from tests.rigs.host_pool_kinds import (
    LAYOUTS,
    MODELS,
    fill_pools_with_noise,
    mamba_host,
    mha_host,
    minimax_index_host,
    minimax_nvfp4_hosts,
    mla_host,
    page_content,
)

pytestmark = [pytest.mark.sglang, needs_release("0.5.23", "host pools are made as it makes them")]

KEYS = page_keys(4)


def states_of_slots(layout: str = "page_first") -> Any:
    """A pool that has no page buffers, whatever the layout."""
    host = mamba_host(layout, conv=((24, 3),), temporal=(2, 8, 8), states=True)
    fill_pools_with_noise({"mamba": host})
    return host


def transfer(name: str, keys: list[str], pages: list[int], host: Any, **more: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return PoolTransfer(PoolName(name), host_indices=page_indices(host.page_size, pages), keys=keys, **more)


def levels(backend: Any) -> dict[tuple[str, str], float]:
    return {key: value for source in backend._export_sources() for key, value in source.levels().items()}


# -- byte for byte -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_pool_of_every_kind_of_model_comes_back_byte_for_byte(model: str, layout: str) -> None:
    """The asserts are in pool_table.py, which makes the table of docs/pools.md of the same answers."""
    outcomes = pool_table.outcomes_of(model, layout)
    assert not outcomes or "kv" in outcomes


def test_the_table_in_the_docs_is_what_these_tests_see() -> None:
    assert pool_table.in_document() == pool_table.table(), "python -m tests.backend.pool_table"


def test_side_states_of_slots_come_back_with_their_states(open_backend: Callable[..., Any]) -> None:
    host = states_of_slots()
    backend = open_backend(mha_host("page_first", page_size=1))
    backend.register_mem_host_pool_v2(host, "mamba")
    before = [state[4].clone() for state in host.slot_state_buffers]
    assert backend.batch_set_v2([transfer("mamba", KEYS[:1], [4], host)]) == {"mamba": [True]}
    for state in host.slot_state_buffers:
        state.zero_()
    assert backend.batch_get_v2([transfer("mamba", KEYS[:1], [2], host)]) == {"mamba": [True]}
    assert all(torch.equal(state[2], was) for state, was in zip(host.slot_state_buffers, before, strict=True))


# -- pages through copies ----------------------------------------------------------------------------------------------


def test_a_damaged_page_never_reaches_a_pool_that_is_copied(open_backend: Callable[..., Any], tmp_path: Path) -> None:
    host = states_of_slots()
    # Page files, or a pack: the damage needs no knowledge of slots.
    tier = {"type": "file", "path": str(tmp_path / "files"), "capacity": "64MiB", "layout": "pages", "io": "buffered"}
    backend = open_backend(mha_host("page_first", page_size=1), {"tiers": {"disk": tier}})
    backend.register_mem_host_pool_v2(host, "mamba")
    assert backend.batch_set_v2([transfer("mamba", KEYS[:2], [0, 1], host)]) == {"mamba": [True, True]}
    files = [file for end in ("page", "pack") for file in (tmp_path / "files").rglob(f"*.{end}")]
    damaged = sorted(files)[0]
    stored = bytearray(damaged.read_bytes())
    # Behind the header of the first page.
    stored[130] ^= 1
    damaged.write_bytes(stored)
    before = [page_content(host, page) for page in range(13)]
    (moved,) = backend.batch_get_v2([transfer("mamba", KEYS[:2], [6, 7], host)]).values()
    assert sorted(moved) == [False, True]
    kept, taken = 6 + moved.index(False), 6 + moved.index(True)
    assert page_content(host, kept) == before[kept]
    assert page_content(host, taken) == before[moved.index(True)]


@pytest.mark.parametrize("result", [result for result in GetResult if result is not GetResult.HIT])
def test_only_a_hit_is_put_into_the_pool(result: GetResult) -> None:
    host = states_of_slots()
    before = [page_content(host, page) for page in range(13)]

    def half_written(batch: PageBatch) -> list[GetResult]:
        for segments in batch.buffers:
            segments[0][:] = b"\xee" * segments[0].nbytes
        return [result, GetResult.HIT, result]

    pages = CopiedPages(host, "mamba")
    keys = host_pool.PageKeys.of_hashes(bytes(16), KEYS[:3])
    assert pages.read([keys], np.array([1, 4, 8]), half_written) == [result, GetResult.HIT, result]
    after = [page_content(host, page) for page in range(13)]
    assert after[4] == b"\xee" * pages.page_bytes
    assert after[:4] + after[5:] == before[:4] + before[5:]


def test_a_pool_that_refuses_a_page_is_a_miss(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = states_of_slots()
    backend = open_backend(mha_host("page_first", page_size=1))
    backend.register_mem_host_pool_v2(host, "mamba")
    assert backend.batch_set_v2([transfer("mamba", KEYS[:2], [0, 1], host)]) == {"mamba": [True, True]}
    monkeypatch.setattr(host, "set_from_flat_data_page", lambda *_: (_ for _ in ()).throw(ValueError("another size")))
    assert backend.batch_get_v2([transfer("mamba", KEYS[:2], [6, 7], host)]) == {"mamba": [False, False]}


@pytest.mark.parametrize("limit", [1, 20_000, 1 << 30])
def test_the_memory_of_copies_is_bounded(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(host_pool, "COPY_BATCH_BYTES", limit)
    host = states_of_slots()
    backend = open_backend(mha_host("page_first", page_size=1))
    backend.register_mem_host_pool_v2(host, "mamba")
    page_bytes = backend.served.bound["mamba"].pages.page_bytes
    given: list[int] = []
    for call in ("get", "set"):
        original = getattr(backend._store, call)
        monkeypatch.setattr(
            backend._store,
            call,
            lambda batch, original=original: given.append(sum(batch.sizes)) or original(batch),
        )
    keys, before = page_keys(12), [page_content(host, page) for page in range(12)]
    assert backend.batch_set_v2([transfer("mamba", keys, list(range(12)), host)]) == {"mamba": [True] * 12}
    host.temporal_buffer.zero_()
    assert backend.batch_get_v2([transfer("mamba", keys, list(range(12))[::-1], host)]) == {"mamba": [True] * 12}
    assert [page_content(host, page) for page in range(12)][::-1] == before
    assert sum(given) == 24 * page_bytes
    assert max(given) <= max(limit, page_bytes)


def test_bad_indices_of_a_copied_pool_are_misses(open_backend: Callable[..., Any]) -> None:
    host = states_of_slots()
    backend = open_backend(mha_host("page_first", page_size=1))
    backend.register_mem_host_pool_v2(host, "mamba")
    assert backend.batch_set_v2([transfer("mamba", KEYS[:3], [0, 99, 1], host)]) == {"mamba": [True, False, True]}
    assert backend.batch_get_v2([transfer("mamba", KEYS[:3], [4, 5, 6], host)]) == {"mamba": [True, False, True]}
    assert [page_content(host, page) for page in (4, 6)] == [page_content(host, page) for page in (0, 1)]


def test_a_decode_nodes_writer_stores_copied_pages(open_backend: Callable[..., Any]) -> None:
    host, _ = minimax_nvfp4_hosts("layer_first")
    fill_pools_with_noise({"kv": host})
    backend = open_backend(host, {"kv_dtype": "nvfp4"})
    indices = page_indices(host.page_size, [3, 4])
    assert [result.durable for result in backend.store_pages(KEYS[:2], indices)] == [True, True]
    assert backend.stored(KEYS[:3]) == [True, True, False]
    before = page_content(host, 4)
    assert backend.batch_get_v1(KEYS[1:2], page_indices(host.page_size, [9])) == [True]
    assert page_content(host, 9) == before


# -- which pages meet --------------------------------------------------------------------------------------------------


def test_pages_in_place_and_copied_pages_of_one_pool_never_meet() -> None:
    # One run a page: nothing but the way tells them apart.
    host = minimax_index_host("page_first", mha_host("page_first"))
    in_place, copied = HostPages(host, "indexer"), CopiedPages(host, "indexer")
    assert in_place.segment_sizes == copied.segment_sizes
    assert in_place.describe("bfloat16") != copied.describe("bfloat16")


def test_other_side_states_of_the_same_size_are_other_pages() -> None:
    host, other = states_of_slots(), states_of_slots()
    same = CopiedPages(host, "mamba").describe("bfloat16")
    assert CopiedPages(other, "mamba").describe("bfloat16") == same
    # Twenty bytes each: five floats, or ten halves.
    other.slot_state_buffers[1] = torch.zeros((13, 10), dtype=torch.float16)
    assert CopiedPages(other, "mamba").describe("bfloat16") != same


# -- what cannot be served ---------------------------------------------------------------------------------------------


def test_addresses_that_do_not_follow_from_the_page_number_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    host = mha_host("page_first")
    honest = host.get_page_buffer_meta

    def shuffled(host_indices: torch.Tensor) -> Any:
        addresses, sizes = honest(host_indices)
        return [address + (64 if int(host_indices[0]) > host.page_size else 0) for address in addresses], sizes

    monkeypatch.setattr(host, "get_page_buffer_meta", shuffled)
    assert isinstance(pages_of(host, "kv"), CopiedPages)


def test_a_pool_whose_flat_pages_have_another_size_than_promised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = states_of_slots()
    monkeypatch.setattr(host, "get_dummy_flat_data_page", lambda: torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match=r"its flat pages have \[\d+\] bytes where it promises 100"):
        pages_of(host, "mamba")


@pytest.fixture
def without_pages() -> Any:
    """A pool as SGLang's for MXFP8: neither addresses nor flat pages."""

    def unsupported(*_: Any) -> Any:
        raise NotImplementedError("does not expose flat storage (L3) pages yet")

    names = ("get_page_buffer_meta", "get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page")
    methods = dict.fromkeys(names, unsupported)
    return SimpleNamespace(page_size=16, size=160, layout="page_first", dtype=torch.bfloat16, **methods)


def test_an_anchor_without_pages_stops_the_start_with_one_sentence(
    open_backend: Callable[..., Any], without_pages: Any
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        open_backend(without_pages)
    assert str(refused.value) == (
        "host pool 'kv' (SimpleNamespace, layout page_first) cannot be served: it exposes no page buffers "
        "(NotImplementedError: does not expose flat storage (L3) pages yet), and it gives no flat pages "
        "(NotImplementedError: does not expose flat storage (L3) pages yet); choose another --hicache-mem-layout"
    )


def test_a_pool_that_comes_later_and_cannot_be_served_is_named_once_and_ends_nothing(
    open_backend: Callable[..., Any], without_pages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    kv = mha_host("page_first")
    backend = open_backend(kv)
    indices = page_indices(kv.page_size, [0, 1, 2, 3])
    assert backend.batch_set_v1(KEYS, indices) == [True] * 4
    assert levels(backend)["serving", ""] == 1
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            backend.register_mem_host_pool_v2(without_pages, PoolName.DRAFT)
    (line,) = [record.getMessage() for record in caplog.records if "draft" in record.getMessage()]
    assert line.startswith("hicache_ext: nothing is stored or served, for lack of pool draft: host pool 'draft'")
    # Nothing that would be of no use is stored, nor counted as there.
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_exists_v2(KEYS, [transfer("draft", KEYS, [0, 1, 2, 3], without_pages)]).kv_hit_pages == 0
    assert backend.batch_set_v1(page_keys(4, "b"), indices) == [False] * 4
    assert backend.batch_get_v1(KEYS, indices) == [False] * 4
    moved = backend.batch_set_v2([transfer("draft", KEYS, [0, 1, 2, 3], without_pages)])
    assert moved == {PoolName.DRAFT: [False] * 4}
    assert levels(backend)["serving", ""] == 0
    assert levels(backend)["unserved_pool", "draft"] == 1
    # A pool of that name that can be served makes all well.
    backend.register_mem_host_pool_v2(mha_host("page_first", layers=1), PoolName.DRAFT)
    assert backend.batch_exists(KEYS) == 4
    assert (levels(backend)["serving", ""], levels(backend)["unserved_pool", "draft"]) == (1, 0)


@pytest.mark.parametrize(
    "pool", [None, object(), SimpleNamespace(page_size=0, size=0), SimpleNamespace(kv_buffer=None)]
)
def test_whatever_is_registered_later_ends_nothing(open_backend: Callable[..., Any], pool: Any) -> None:
    backend = open_backend(mha_host("page_first"))
    backend.register_mem_host_pool_v2(pool, "something new")
    assert "something new" in backend.served.unserved
    assert backend.batch_exists(KEYS) == 0


# -- drafts with heads beside an MLA target ----------------------------------------------------------------------------


@pytest.fixture
def _drafts_hooked() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from hicache_ext.sglang import plugin, used_names

    plugin.register([used_names.DRAFTS])
    HookRegistry.apply_hooks()
    assert not plugin.not_in_force([used_names.DRAFTS])


@pytest.fixture
def open_rank(open_backend: Callable[..., Any]) -> Callable[[int], tuple[Any, Any, Any, Any]]:
    """``open_rank(rank)`` of 2: SGLang's controller, its backend, the latents and the draft of that rank."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

    def open_(rank: int) -> tuple[Any, Any, Any, Any]:
        latents, draft = mla_host("page_first"), mha_host("page_first", layers=1)
        fill_pools_with_noise({"kv": latents})
        draft.kv_buffer.view(torch.uint8).fill_(10 + rank)
        backend = open_backend(latents, is_mla_model=True, tp_rank=rank, tp_size=2)
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        controller = HybridCacheController.__new__(HybridCacheController)
        controller.storage_backend, controller.storage_backend_type = backend, "dynamic"
        controller.storage_config = backend.served._ranks
        controller.page_size = latents.page_size
        controller.page_set_func = controller._page_set_zero_copy
        controller.mem_pool_host = HostPoolGroup(
            [
                PoolEntry(PoolName.KV, latents, None, lambda layer: layer, is_primary_index_anchor=True),
                PoolEntry(PoolName.DRAFT, draft, None, lambda layer: layer),
            ]
        )
        return controller, backend, latents, draft

    return open_


def back_up(controller: Any, page_size: int) -> None:
    """What SGLang's backup thread does on each rank with a node of two pages."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

    draft = PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)
    indices = page_indices(page_size, [3, 4])
    operation = StorageOperation(indices, list(range(2 * page_size)), hash_value=KEYS[:2], pool_transfers=[draft])
    controller._page_backup(operation)
    assert operation.completed_tokens == 2 * page_size


@pytest.mark.usefixtures("_drafts_hooked")
def test_each_rank_keeps_the_heads_of_its_draft_beside_latents_of_all(open_rank: Callable[[int], Any]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    ranks = [open_rank(rank) for rank in range(2)]
    asked = [PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)]
    back_up(ranks[0][0], 16)
    # The latents are there for both, and so far the draft of rank 0 alone.
    assert [backend.batch_exists(KEYS) for _, backend, *_ in ranks] == [2, 2]
    assert [backend.batch_exists_v2(KEYS, asked).kv_hit_pages for _, backend, *_ in ranks] == [2, 0]
    back_up(ranks[1][0], 16)
    for rank, (_, backend, latents, draft) in enumerate(ranks):
        assert backend.batch_exists_v2(KEYS, asked).kv_hit_pages == 2
        draft.kv_buffer.zero_()
        assert backend.batch_get_v2([transfer("draft", KEYS[:2], [6, 7], draft)]) == {PoolName.DRAFT: [True, True]}
        assert page_content(draft, 6) == page_content(draft, 7) == bytes([10 + rank]) * len(page_content(draft, 6))
        assert backend.batch_get_v1(KEYS[:2], page_indices(latents.page_size, [8, 9])) == [True, True]
        assert page_content(latents, 8) == page_content(ranks[0][2], 3)


@pytest.mark.usefixtures("_drafts_hooked")
def test_other_pools_of_an_mla_model_stay_with_rank_0(open_rank: Callable[[int], Any]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    controller, backend, _, _ = open_rank(1)
    backend.register_mem_host_pool_v2(mla_host("page_first"), PoolName.INDEXER)
    written = [name for name in PoolName if controller.should_backup(PoolTransfer(name))]
    assert written == [PoolName.MAMBA, PoolName.DRAFT]
    # A backend that is not this controller's says nothing about it.
    controller.storage_backend = object()
    assert not controller.should_backup(PoolTransfer(PoolName.DRAFT))
    # SGLang's fault injector stands around ours.
    controller.storage_backend = SimpleNamespace(_backend=backend)
    assert controller.should_backup(PoolTransfer(PoolName.DRAFT))


def test_without_the_hook_such_a_draft_is_not_served_and_named(
    open_rank: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache_ext.sglang import plugin

    monkeypatch.setattr(plugin, "_is_hooked", lambda target: not target.endswith("should_backup"))
    for rank in range(2):
        _, backend, *_ = open_rank(rank)
        assert "the hook on" in backend.served.unserved["draft"]
        assert "rank 0 alone writes the draft of an MLA model" in backend.served.unserved["draft"]
        assert backend.batch_exists(KEYS) == 0

"""Every engine under the hooks of real SGLang host pools, byte for byte; and what goes to SGLang's own path."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hicache_ext.kernels.selection import Selector
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.sglang import kernel_hooks as sglang_hooks
from hicache_ext.sglang.plugin import not_in_force, register
from hicache_ext.sglang.used_names import COPIES
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.kernels.conftest import Rig
from tests.kernels.pools import (
    LAYERS,
    MHA_COMBINATIONS,
    MLA_COMBINATIONS,
    Tokens,
    assert_same,
    check_back_up,
    check_load,
    components,
    host_row,
    mha_pool,
    mla_pool,
    pages_of_tokens,
    snapshot,
    some_tokens,
    unchanged,
)

pytestmark = [pytest.mark.sglang, pytest.mark.pairs, pytest.mark.usefixtures("sglang")]

EVERY_LAYER = [(layer, layer) for layer in range(LAYERS)]


def check_mha(rig: Rig, pool: Any, io_backend: str, tokens: Tokens | None = None, layer: int = 1) -> None:
    """Load one layer and back up all, with the engine of ``rig``; where it refuses, the original is called."""
    finish = rig.gpu.synchronize
    check_load(pool, sglang_hooks.around_load, io_backend, [(layer, layer, layer, False)], tokens, finish=finish)
    layers = [(number, number) for number in range(pool.layer_num)]
    check_back_up(pool, sglang_hooks.around_back_up, io_backend, layers, tokens, finish=finish)
    assert rig.gpu.refusals == []


def check_mla(rig: Rig, pool: Any, io_backend: str) -> None:
    finish = rig.gpu.synchronize
    check_load(pool, sglang_hooks.around_load, io_backend, [(1, 1, 1, False)], finish=finish)
    check_back_up(pool, sglang_hooks.around_back_up, io_backend, EVERY_LAYER, finish=finish)
    assert rig.gpu.refusals == []


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_mha_copies_are_byte_exact_and_leave_other_bytes_alone(
    rig: Rig, layout: str, io_backend: str, page_size: int, strided: bool
) -> None:
    pool = rig.attach(mha_pool(layout, page_size, strided=strided))
    assert pool.device_rows_packed is not strided
    check_mha(rig, pool, io_backend)


@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("layout", "io_backend"), MLA_COMBINATIONS)
def test_mla_copies_are_byte_exact_and_leave_other_bytes_alone(
    rig: Rig, layout: str, io_backend: str, page_size: int, strided: bool
) -> None:
    pool = rig.attach(mla_pool(layout, page_size, strided=strided))
    assert pool.device_rows_packed is not strided
    check_mla(rig, pool, io_backend)


@pytest.mark.parametrize("border", [1, 777, 4096])
@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_no_copy_spans_two_registrations_wherever_they_meet(
    rig: Rig, layout: str, io_backend: str, border: int
) -> None:
    # The fake driver refuses a copy across a border, as the real one does.
    pool = rig.attach(mha_pool(layout, 16), borders=(border, border + 3000, border + 3001))
    check_mha(rig, pool, io_backend)


@pytest.mark.parametrize("dim", [3, 10, 12])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_rows_of_any_dtype_and_odd_width_are_copied(rig: Rig, layout: str, dtype: torch.dtype, dim: int) -> None:
    check_mha(rig, rig.attach(mha_pool(layout, 4, dtype=dtype, heads=3, dim=dim)), "kernel")


@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_single_tokens_of_a_page_are_copied_alone(rig: Rig, layout: str, io_backend: str) -> None:
    tokens = torch.tensor([5, 100, 17]), torch.tensor([33, 2, 90])
    check_mha(rig, rig.attach(mha_pool(layout, 16)), io_backend, tokens)


@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_no_tokens_change_nothing(rig: Rig, layout: str, io_backend: str) -> None:
    pool = rig.attach(mha_pool(layout, 16))
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    check_load(pool, sglang_hooks.around_load, io_backend, [(0, 0, 0, False)], nothing, finish=rig.gpu.synchronize)
    check_back_up(pool, sglang_hooks.around_back_up, io_backend, [], nothing, finish=rig.gpu.synchronize)
    assert rig.gpu.calls == rig.gpu.refusals == []


@pytest.mark.parametrize(("layout", "io_backend"), MHA_COMBINATIONS)
def test_mha_draft_layers_follow_the_target_layers(rig: Rig, layout: str, io_backend: str) -> None:
    pool = rig.attach(mha_pool(layout, 16, drafts=2))
    # In the order in which SGLang submits them: the first draft after the first target layer.
    order = [0, LAYERS, 1, LAYERS + 1, 2]
    layers = [(layer, layer, layer, layer >= LAYERS) for layer in order]
    check_load(pool, sglang_hooks.around_load, io_backend, layers, finish=rig.gpu.synchronize)
    check_back_up(
        pool,
        sglang_hooks.around_back_up,
        io_backend,
        [(layer, layer) for layer in range(LAYERS + 2)],
        finish=rig.gpu.synchronize,
    )
    engine = rig.engine().name
    assert rig.metrics.snapshot() == {("load", f"{engine}: configured"): 1, ("back_up", f"{engine}: configured"): 1}


def test_a_layer_that_is_not_a_target_layer_is_skipped(rig: Rig) -> None:
    for pool in (mha_pool("page_first", 16, drafts=1), mla_pool("page_first", 16, drafts=1)):
        rig.attach(pool)
        buffers = [buffer for _, buffers in components(pool) for buffer in buffers]
        before = snapshot(buffers)
        for layer_id in (-1, LAYERS, LAYERS + 7):
            sglang_hooks.around_load(unchanged, pool, None, *some_tokens(pool), layer_id, "kernel", is_draft=False)
        rig.gpu.synchronize()
        assert_same(buffers, before)


@pytest.mark.parametrize(
    ("layout", "io_backend"), [("layer_first", "kernel"), ("layer_first", "direct"), ("page_first", "kernel")]
)
def test_a_layer_sharded_mla_rank_copies_its_own_layers_and_the_drafts(rig: Rig, layout: str, io_backend: str) -> None:
    # This rank owns device layer 2 of 3, but every rank reserves rows for two layers; the draft comes after those.
    pool = rig.attach(mla_pool(layout, 16, owned=(2,), drafts=1, reserved=2))
    finish = rig.gpu.synchronize
    layers = [(2, 0, 0, False), (LAYERS, 2, 1, True)]
    check_load(pool, sglang_hooks.around_load, io_backend, layers, finish=finish)
    check_back_up(pool, sglang_hooks.around_back_up, io_backend, [(0, 0), (2, 1)], finish=finish)
    before = snapshot(pool.device_kv_buffers)
    sglang_hooks.around_load(unchanged, pool, None, *some_tokens(pool), 0, io_backend)
    finish()
    assert_same(pool.device_kv_buffers, before)


@pytest.mark.parametrize(("layout", "io_backend"), MLA_COMBINATIONS)
def test_a_dcp_rank_copies_its_share_of_widened_indices(rig: Rig, layout: str, io_backend: str) -> None:
    rank, size = 1, 2
    pool = rig.attach(mla_pool(layout, 16, dcp=(rank, size)))
    local = pages_of_tokens(16, [3, 1]), pages_of_tokens(16, [0, 5])
    widened = pages_of_tokens(16 * size, [3, 1]), pages_of_tokens(16 * size, [0, 5])
    finish = rig.gpu.synchronize
    check_load(pool, sglang_hooks.around_load, io_backend, [(0, 0, 0, False)], local, widened, finish=finish)
    check_back_up(pool, sglang_hooks.around_back_up, io_backend, EVERY_LAYER, local, widened, finish=finish)


def test_the_same_tensors_with_other_tokens_are_a_new_load(rig: Rig) -> None:
    pool = rig.attach(mha_pool("page_first_direct", 16))
    host, device = some_tokens(pool)
    layers = [(0, 0, 0, False), (1, 1, 1, False)]
    check_load(pool, sglang_hooks.around_load, "direct", layers, (host, device), finish=rig.gpu.synchronize)
    host[:16] -= 16
    check_load(pool, sglang_hooks.around_load, "direct", layers, (host, device), finish=rig.gpu.synchronize)


# -- what goes to SGLang's own path ------------------------------------------------------------------------------------


def calls_original(pool: Any, io_backend: str) -> bool:
    calls: list[str] = []
    sglang_hooks.around_load(lambda *_, **__: calls.append("load"), pool, None, *some_tokens(pool), 0, io_backend)
    sglang_hooks.around_back_up(lambda *_, **__: calls.append("back up"), pool, None, *some_tokens(pool), io_backend)
    assert calls in ([], ["load", "back up"])
    return bool(calls)


def refusals(metrics: TierMetrics) -> set[str]:
    return {reason.removeprefix("sglang: ") for (_, reason) in metrics.snapshot() if reason.startswith("sglang: ")}


@pytest.mark.usefixtures("own_selector")
def test_pools_and_combinations_without_a_known_geometry_go_to_the_original_with_a_reason() -> None:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    class Unknown(MHATokenToKVPoolHost):
        pass

    cases = [
        (mha_pool("page_unified", 16), "kernel", "layout_page_unified_kernel"),
        (mha_pool("page_first", 16), "kernel_ascend", "layout_page_first_kernel_ascend"),
        (mha_pool("page_first_direct", 16), "kernel", "layout_page_first_direct_kernel"),
        (mha_pool("page_head", 16), "direct", "layout_page_head_direct"),
        (mla_pool("page_first", 16), "direct", "layout_page_first_direct"),
        (mha_pool("page_first", 16, pool_class=Unknown), "kernel", "pool_class"),
    ]
    for pool, io_backend, reason in cases:
        rig = Rig("reference")
        rig.install()
        assert calls_original(pool, io_backend)
        assert rig.metrics.snapshot() == {("load", f"sglang: {reason}"): 1, ("back_up", f"sglang: {reason}"): 1}
    assert not calls_original(mha_pool("page_first", 16), "kernel")


@pytest.mark.usefixtures("own_selector")
def test_a_sharded_backup_that_sglang_refuses_goes_to_the_original() -> None:
    pool = mla_pool("page_first_direct", 16, owned=(2,))
    calls: list[str] = []
    sglang_hooks.around_back_up(lambda *_: calls.append("original"), pool, None, *some_tokens(pool), "direct")
    assert calls == ["original"]


@pytest.mark.usefixtures("own_selector")
def test_what_dma_cannot_take_goes_to_the_original_with_a_reason() -> None:
    rig = Rig("batched_dma")
    rig.install()
    pool = mha_pool("page_first_direct", 16)
    assert calls_original(pool, "direct")
    assert refusals(rig.metrics) == {"unpinned"}

    rig.attach(pool)
    sglang_hooks.use(None)
    rig.install()
    rig.gpu.current_stream = 0
    assert calls_original(pool, "direct")
    rig.gpu.current_stream, rig.gpu.capturing = 7, True
    assert calls_original(pool, "direct")
    assert refusals(rig.metrics) == {"unpinned", "default_stream", "graph_capture"}
    rig.gpu.capturing = False
    assert not calls_original(pool, "direct")
    assert rig.gpu.refusals == []  # never asked in vain


@pytest.mark.usefixtures("own_selector")
def test_half_registered_memory_counts_as_unpinned() -> None:
    rig = Rig("batched_dma")
    rig.install()
    pool = rig.attach(mha_pool("page_first_direct", 16))
    (start, size), *_ = rig.gpu.registrations
    pool.kv_buffer._sglang_cuda_host_registered_ranges = [(start, size // 2), (start + size // 2 + 64, size // 2 - 64)]
    assert calls_original(pool, "direct")
    assert refusals(rig.metrics) == {"unpinned"}


@pytest.mark.usefixtures("own_selector")
def test_a_layer_that_the_driver_fails_is_copied_by_the_original_and_the_engine_given_up() -> None:
    rig = Rig("batched_dma")
    rig.install()
    pool = rig.attach(mha_pool("page_first_direct", 16))
    rig.gpu.fail_next = 1
    by_original: list[int] = []
    host, device = some_tokens(pool)
    for layer in range(LAYERS):
        sglang_hooks.around_load(
            lambda *arguments, **_: by_original.append(arguments[4]), pool, None, host, device, layer, "direct"
        )
    assert by_original == [0, 1, 2]
    assert calls_original(pool, "direct")
    assert rig.metrics.value("load", "sglang: failed") == 1
    assert rig.metrics.value("load", "sglang: unavailable") == 1


@pytest.mark.usefixtures("own_selector")
def test_trouble_in_the_hooks_themselves_leaves_everything_to_the_original(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("a defect of ours")

    sglang_hooks.use(Selector({"triton": broken}, engine="triton"))
    pool = mha_pool("page_first", 16)
    with caplog.at_level(logging.ERROR):
        assert calls_original(pool, "kernel")
        assert calls_original(pool, "kernel")
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


@pytest.mark.usefixtures("own_selector")
def test_a_pool_that_got_new_buffers_is_looked_at_again() -> None:
    pool = mha_pool("page_first", 16)
    check_load(pool, sglang_hooks.around_load, "kernel", [(0, 0, 0, False)])
    pool.device_k_buffers = tuple(buffer.clone() for buffer in pool.device_k_buffers)
    check_load(pool, sglang_hooks.around_load, "kernel", [(0, 0, 0, False)])


# -- registration ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sglang_hooks.wants_hooks(), reason="SGLang's own copies stay on this accelerator")
def test_the_hooks_are_in_place_once_however_often_they_are_registered() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    register([COPIES])
    register([COPIES])
    prepare_process()
    assert not_in_force([COPIES]) == {}
    target = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer"
    assert len(HookRegistry._hooks[target]) == 1


@pytest.mark.skipif(sglang_hooks.has_accelerator(), reason="SGLang's own copies stay on accelerators")
def test_the_pools_own_methods_copy_on_a_machine_without_a_gpu() -> None:
    pool = mha_pool("page_first", 16)
    host_tokens, device_tokens = some_tokens(pool)
    pool.load_to_device_per_layer(None, host_tokens, device_tokens, 0, "kernel")
    rows = torch.stack([host_row(pool, pool.k_buffer, 0, token) for token in host_tokens.tolist()])
    assert_same([pool.device_k_buffers[0][device_tokens]], snapshot([rows]))


@pytest.mark.skipif(not sglang_hooks.wants_hooks(), reason="SGLang's own copies stay on this accelerator")
def test_a_hook_that_did_not_take_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    wrapped = MLATokenToKVPoolHost.load_to_device_per_layer
    monkeypatch.setattr(MLATokenToKVPoolHost, "load_to_device_per_layer", wrapped.__wrapped__)
    target = "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.load_to_device_per_layer"
    assert target in not_in_force([COPIES])[COPIES]

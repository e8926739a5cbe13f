"""Our manager in SGLang's place: it fits this SGLang, refuses what would be useless, and never ends a scheduler."""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from hicache_ext.errors import UnsupportedError  # noqa: E402
from hicache_ext.sglang import decode_manager, process  # noqa: E402
from hicache_ext.sglang.decode_manager import DecodeManager  # noqa: E402
from hicache_ext.sglang.used_names import DECODE_WRITER, HOOKS  # noqa: E402
from hicache_ext.testing.host_pools import mha_device_pool  # noqa: E402
from tests.releases.needs import needs, needs_release  # noqa: E402


class BrokenWriter:
    def request_advanced(self, request: Any, output: list[int], finished: bool) -> bool:
        raise RuntimeError("a bug")

    def step(self) -> None:
        raise RuntimeError("a bug")


@needs(DECODE_WRITER)
def test_our_manager_has_every_method_of_sglangs_that_the_scheduler_calls() -> None:
    """A new release that calls another method of the manager must be looked at."""
    theirs = inspect.unwrap(pkgutil.resolve_name(decode_manager.MANAGER))
    public = {name for name, _ in inspect.getmembers(theirs, inspect.isfunction) if not name.startswith("_")}
    assert public == {
        *("offload_kv_cache", "check_offload_progress", "drain_before_retraction", "release_host_resources"),
        *("finalize_release_on_finish", "has_inflight_device_transfer"),
    }
    assert all(callable(getattr(DecodeManager, name)) for name in public)
    (hook,) = [hook for hook in HOOKS if DECODE_WRITER in hook.features]
    assert hook.target == decode_manager.MANAGER


@needs(DECODE_WRITER)
def test_sglang_replaces_its_class_by_what_makes_ours_and_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation import decode_kvcache_offload_manager as module
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    original = inspect.unwrap(module.DecodeKVCacheOffloadManager)
    monkeypatch.setattr(module, "DecodeKVCacheOffloadManager", original)
    calls: list[Any] = []
    HookRegistry._apply_target(
        decode_manager.MANAGER, [(HookType.REPLACE, lambda *args, **named: calls.append((args, named)), None)]
    )
    replaced: Any = module.DecodeKVCacheOffloadManager
    replaced(1, tree_cache=2)
    assert calls == [((1,), {"tree_cache": 2})]
    assert inspect.unwrap(replaced) is original and replaced is not original


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What of the launch decides, to be changed."""
    from sglang.srt import runtime_context

    mamba = SimpleNamespace(enable_mamba_extra_buffer=True, enable_mamba_extra_buffer_lazy=False)
    facts = SimpleNamespace(speculative_algorithm=None, speculative_adaptive=False, dcp_enabled=False, mamba=mamba)
    for name in ("get_spec", "get_parallel", "get_exec"):
        monkeypatch.setattr(runtime_context, name, lambda: facts)
    return facts


def made(pool: str, **attributes: Any) -> Any:
    """One of SGLang's pools without memory."""
    kv_cache = object.__new__(pkgutil.resolve_name(f"sglang.srt.mem_cache.{pool}"))
    vars(kv_cache).update(attributes)
    return kv_cache


def refuse(pool: str, components: int = 2, shares: bool = False, **attributes: Any) -> None:
    kv_cache = made(pool, **attributes)
    decode_manager._refuse_unusable(kv_cache, components, shares)


@pytest.mark.parametrize(
    "pool",
    [
        "memory_pool.MiniMaxSparseKVPool",
        "qsa_kv_pool.QSATokenToKVPool",
        "unified_memory_pool.UnifiedSWAKVPool",
        pytest.param(
            "page_interleave_pool.PageInterleaveDSATokenToKVPool", marks=needs_release("0.5.22", "interleaved pages")
        ),
    ],
)
def test_pools_that_a_prefill_node_could_not_use_are_refused(launched: SimpleNamespace, pool: str) -> None:
    with pytest.raises(UnsupportedError, match=r"pd\.write\.enabled: false"):
        refuse(pool)


V4 = "deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool"
SEVERAL = ["memory_pool.DSATokenToKVPool", "memory_pool.HybridLinearKVPool", "swa_memory_pool.SWAKVPool"]


@needs_release("0.5.23", "older releases write one pool")
@pytest.mark.parametrize("pool", SEVERAL)
def test_models_of_several_pools_are_served_without_speculation(launched: SimpleNamespace, pool: str) -> None:
    refuse(pool)
    with pytest.raises(UnsupportedError, match="side pools"):
        refuse(pool, components=3)
    for launched.speculative_algorithm, launched.dcp_enabled in (("NGRAM", False), ("EAGLE", False), (None, True)):
        if "DSA" in pool and launched.speculative_algorithm == "NGRAM":
            refuse(pool)  # all that it has lies on the pages of its KV
            continue
        with pytest.raises(UnsupportedError, match=r"pd\.write\.enabled: false"):
            refuse(pool)


@needs_release("0.5.23", "older releases write one pool")
def test_windows_whose_memory_may_be_the_trees_are_refused(launched: SimpleNamespace) -> None:
    refuse("memory_pool.HybridLinearKVPool", shares=True)
    for pool in ("swa_memory_pool.SWAKVPool", V4):
        with pytest.raises(UnsupportedError, match="radix cache"):
            refuse(pool, shares=True)


@needs_release("0.5.23", "older releases write one pool")
def test_deepseek_v4_is_served_where_its_states_lie_beside_the_pages_of_its_window(launched: SimpleNamespace) -> None:
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    rows = made("deepseek_v4_memory_pool.DeepSeekV4SingleKVPool")
    served = {"swa_kv_pool": rows, "kv_pools": {4: rows, 128: rows}}
    refuse(V4, **served)
    hisparse, uniform = (
        made(f"deepseek_v4_memory_pool.{kind}") for kind in ("HiSparseC4DevicePool", "DeepSeekV4UniformFP8KVPool")
    )
    of_v41 = made("deepseek_v4_memory_pool.DeepSeekV4SingleKVPool", kv_layout=KVLayout.V41)
    for other in (
        {"swa_kv_pool": None},  # unified KV, replay of windows
        {"kv_pools": {4: None, 128: None}},
        {"kv_pools": {4: hisparse, 128: rows}},
        {"swa_kv_pool": uniform},
        {"swa_kv_pool": of_v41},
        {"kv_pools": {4: rows, 128: of_v41}},
        {"kv_pools": {1: rows, 2: rows}},
    ):
        with pytest.raises(UnsupportedError, match=r"V4\.1, HiSparse, unified KV"):
            refuse(V4, **served | other)
    for launched.speculative_algorithm, launched.dcp_enabled in (("NGRAM", False), ("EAGLE", False), (None, True)):
        with pytest.raises(UnsupportedError, match="another order"):
            refuse(V4, **served)
    launched.dcp_enabled = False
    with pytest.raises(UnsupportedError, match="side pools"):
        refuse(V4, components=3, **served)


@pytest.mark.parametrize("pool", [*SEVERAL, V4])
def test_an_older_release_writes_one_pool(
    launched: SimpleNamespace, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_manager, "installed_release", lambda: "0.5.22")
    with pytest.raises(UnsupportedError, match=r"0\.5\.22"):
        refuse(pool)


@needs_release("0.5.23", "drafts")
def test_speculation_is_refused_where_a_prefill_node_keeps_drafts_that_a_decode_node_does_not(
    launched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse("memory_pool.MHATokenToKVPool")
    launched.speculative_algorithm = "NGRAM"
    refuse("memory_pool.MHATokenToKVPool")

    def draft_in(pool: str) -> None:
        runner = SimpleNamespace(token_to_kv_pool=object.__new__(pkgutil.resolve_name(f"sglang.srt.mem_cache.{pool}")))
        monkeypatch.setattr(process, "loaded", [process.LoadedModel(runner, True, None)])  # type: ignore[arg-type]

    launched.speculative_algorithm = "EAGLE"
    with pytest.raises(UnsupportedError, match="as a prefill node does"):
        refuse("memory_pool.MHATokenToKVPool")
    draft_in("memory_pool.MHATokenToKVPool")
    refuse("memory_pool.MHATokenToKVPool")
    refuse("memory_pool.DSATokenToKVPool")
    launched.speculative_adaptive = True
    with pytest.raises(UnsupportedError, match="adaptive"):
        refuse("memory_pool.MHATokenToKVPool")
    launched.speculative_adaptive = False
    monkeypatch.setattr(process, "loaded", process.loaded * 2)
    with pytest.raises(UnsupportedError, match="the first of several drafts"):
        refuse("memory_pool.MHATokenToKVPool")
    for launched.speculative_algorithm in ("STANDALONE", "FROZEN_KV_MTP"):
        with pytest.raises(UnsupportedError, match="as a prefill node does"):
            refuse("memory_pool.MHATokenToKVPool")
    launched.speculative_algorithm = "EAGLE"
    draft_in("unified_draft_pool.UnifiedDraftKVPool")
    with pytest.raises(UnsupportedError, match="UnifiedDraftKVPool are not written"):
        refuse("memory_pool.MHATokenToKVPool")
    draft_in("memory_pool.MHATokenToKVPool")
    monkeypatch.setattr(decode_manager, "installed_release", lambda: "0.5.22")
    with pytest.raises(UnsupportedError, match=r"0\.5\.22"):
        refuse("memory_pool.MHATokenToKVPool")


@needs_release("0.5.23", "older releases write one pool")
@pytest.mark.parametrize("kept", [(False, False), (True, True)])
def test_recurrent_states_that_sglang_does_not_keep_are_refused(
    launched: SimpleNamespace, kept: tuple[bool, bool]
) -> None:
    launched.mamba.enable_mamba_extra_buffer, launched.mamba.enable_mamba_extra_buffer_lazy = kept
    with pytest.raises(UnsupportedError, match="--disaggregation-decode-enable-radix-cache"):
        decode_manager._track_interval(16)


@pytest.fixture
def made_by_sglang(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What SGLang's own class was constructed with, and what its configuration was then."""
    from sglang.srt import runtime_context

    calls: list[Any] = []
    monkeypatch.setattr(pkgutil, "resolve_name", lambda _: lambda *args: calls.append(args) or "SGLang's own")
    memory = SimpleNamespace(hicache_storage_backend="file", hicache_storage_backend_extra_config=None)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    return calls


def test_a_backend_that_is_not_ours_needs_nothing_but_its_name(
    made_by_sglang: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that lacks something for our writer ran no decode node at all."""
    from sglang.srt import runtime_context

    monkeypatch.delattr(runtime_context, "get_spec")
    for module in ("speculative.spec_info", "mem_cache.hybrid_cache.hybrid_cache_controller"):
        monkeypatch.setitem(sys.modules, f"sglang.srt.{module}", None)
    assert decode_manager.replace_manager(1, 2) == "SGLang's own"
    assert made_by_sglang == [(1, 2)]


def test_with_the_writer_off_sglangs_own_manager_reads_our_configuration_as_json(
    made_by_sglang: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from sglang.srt import runtime_context

    memory = runtime_context.get_memory()
    memory.hicache_storage_backend = "dynamic"
    memory.hicache_storage_backend_extra_config = json.dumps(
        {
            "backend_name": "hicache_ext",
            "module_path": "hicache_ext.storage.backend",
            "class_name": "HiCacheExtBackend",
            "interface_v1": 1,
            "hicache_ext": {
                "tiers": {"pool": {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}},
                "pd": {"write": {"enabled": False}},
            },
        }
    )
    told: list[Any] = []
    context = SimpleNamespace(override=lambda _, **named: told.append(named[decode_manager._CONFIG_FIELD]))
    monkeypatch.setattr(runtime_context, "get_context", lambda: context)
    own = SimpleNamespace(offload_kv_cache=lambda _: True)
    monkeypatch.setattr(pkgutil, "resolve_name", lambda _: lambda *args: own)
    assert decode_manager.replace_manager(1, 2) is own
    assert json.loads(told[0])["hicache_ext"]["pd"] == {"write": {"enabled": False}}
    assert told[1] == memory.hicache_storage_backend_extra_config


def test_a_bug_of_ours_releases_the_request_and_does_not_reach_the_scheduler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = DecodeManager(SimpleNamespace(controller=None, pools_on={}), None, None, 16)  # type: ignore[arg-type]
    broken.writer = BrokenWriter()  # type: ignore[assignment]
    request = SimpleNamespace(output_ids=[1], finished=lambda: False)
    assert broken.offload_kv_cache(request) is False
    assert "a bug" in caplog.text
    broken.check_offload_progress()
    assert "a request's KV will not be written" in caplog.text
    assert "a step of the decode writer failed" in caplog.text


class ServedRequest:
    """SGLang's own request, its rows and its tree, which is off as on a decode node."""

    def __init__(self) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.sampling.sampling_params import SamplingParams

        pool = mha_device_pool(16, 16, 1)
        self.allocator = PagedTokenToKVPoolAllocator(256, 16, torch.bfloat16, "cpu", pool, need_sort=False)
        self.rows = ReqToTokenPool(4, 256, "cpu", enable_memory_saver=False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=True,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=16,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.free = self.allocator.available_size(), self.rows.available_size()
        self.request = Req("r", "", list(range(40)), SamplingParams())
        self.rows.alloc([self.request])
        slots = self.allocator.alloc(48)
        self.rows.req_to_token[self.request.kv.req_pool_idx, :48] = slots
        self.request.kv.kv_allocated_len = self.request.kv.kv_committed_len = 43
        self.request.output_ids.extend([1, 2, 3, 4])


@needs_release("0.5.23", "older releases have other trees on a decode node")
def test_a_released_request_gives_sglang_all_of_its_memory_back_once() -> None:
    from tests.backend import linker_rig as rig

    with rig.server_context():
        served = ServedRequest()
        assert served.allocator.available_size() < served.free[0]
        manager = DecodeManager(
            SimpleNamespace(controller=None, pools_on={}),
            served.rows,
            served.tree,
            16,  # type: ignore[arg-type]
        )
        for _ in range(2):
            manager.finalize_release_on_finish(served.request)
            assert (served.allocator.available_size(), served.rows.available_size()) == served.free
        assert not served.request.kv.holds_kv

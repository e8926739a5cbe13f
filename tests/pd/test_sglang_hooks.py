"""Our manager in SGLang's place: it fits this SGLang, refuses what would be useless, and never ends a scheduler."""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from hicache_ext.errors import UnsupportedError  # noqa: E402
from hicache_ext.sglang import decode_manager  # noqa: E402
from hicache_ext.sglang.decode_manager import DecodeManager  # noqa: E402
from hicache_ext.sglang.used_names import DECODE_WRITER, HOOKS  # noqa: E402
from tests.releases.needs import needs  # noqa: E402


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


@pytest.mark.parametrize("pool", ["DSATokenToKVPool", "HybridLinearKVPool"])
def test_pools_that_a_prefill_node_could_not_use_are_refused(pool: str) -> None:
    cls = pkgutil.resolve_name(f"sglang.srt.mem_cache.memory_pool.{pool}")
    with pytest.raises(UnsupportedError, match=r"pd\.write\.enabled: false"):
        decode_manager._refuse_what_prefill_cannot_use(object.__new__(cls), bigrams=False)


def test_speculation_is_refused() -> None:
    cls = pkgutil.resolve_name("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool")
    pool = object.__new__(cls)
    decode_manager._refuse_what_prefill_cannot_use(pool, bigrams=False)
    with pytest.raises(UnsupportedError, match="EAGLE or MTP"):
        decode_manager._refuse_what_prefill_cannot_use(pool, bigrams=True)


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
    assert decode_manager.replace_manager(1, 2) == "SGLang's own"
    assert json.loads(told[0])["hicache_ext"]["pd"] == {"write": {"enabled": False}}
    assert told[1] == memory.hicache_storage_backend_extra_config


def test_a_bug_of_ours_releases_the_request_and_does_not_reach_the_scheduler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = DecodeManager(SimpleNamespace(controller=None), None, None, 16)  # type: ignore[arg-type]
    broken.writer = BrokenWriter()  # type: ignore[assignment]
    request = SimpleNamespace(output_ids=[1], finished=lambda: False)
    assert broken.offload_kv_cache(request) is False
    assert "a bug" in caplog.text
    broken.check_offload_progress()
    assert "a request's KV will not be written" in caplog.text
    assert "a step of the decode writer failed" in caplog.text

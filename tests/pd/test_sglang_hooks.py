"""The hooks on SGLang's manager: they fit this SGLang, refuse what would be useless, and never end a scheduler."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from hicache_ext.errors import UnsupportedError  # noqa: E402
from hicache_ext.sglang import pd_hooks as sglang_hooks  # noqa: E402
from hicache_ext.sglang.used_names import DECODE_WRITER, HOOKS  # noqa: E402
from tests.releases.needs import needs  # noqa: E402


class BrokenWriter:
    def request_advanced(self, request: Any, output: list[int], finished: bool) -> bool:
        raise RuntimeError("a bug")

    def step(self) -> None:
        raise RuntimeError("a bug")


def manager(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


@needs(DECODE_WRITER)
def test_every_method_that_the_scheduler_calls_and_that_moves_pages_is_hooked() -> None:
    """A new release that calls another method of the manager must be looked at."""
    scheduler_side = {"offload_kv_cache", "check_offload_progress", "drain_before_retraction", "release_host_resources"}
    untouched = {"finalize_release_on_finish", "has_inflight_device_transfer"}
    cls = pkgutil.resolve_name(sglang_hooks.MANAGER)
    public = {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    assert public == scheduler_side | untouched
    assert {hook.target.rpartition(".")[2] for hook in HOOKS if DECODE_WRITER in hook.features} == scheduler_side | {
        "__init__"
    }


@pytest.mark.parametrize("pool", ["DSATokenToKVPool", "HybridLinearKVPool"])
def test_pools_that_a_prefill_node_could_not_use_are_refused(pool: str) -> None:
    cls = pkgutil.resolve_name(f"sglang.srt.mem_cache.memory_pool.{pool}")
    with pytest.raises(UnsupportedError, match=r"pd\.write\.enabled: false"):
        sglang_hooks._refuse_what_prefill_cannot_use(object.__new__(cls), bigrams=False)


def test_speculation_is_refused() -> None:
    cls = pkgutil.resolve_name("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool")
    pool = object.__new__(cls)
    sglang_hooks._refuse_what_prefill_cannot_use(pool, bigrams=False)
    with pytest.raises(UnsupportedError, match="EAGLE or MTP"):
        sglang_hooks._refuse_what_prefill_cannot_use(pool, bigrams=True)


def test_a_backend_that_is_not_ours_needs_nothing_but_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that lacks something for our writer ran no decode node at all."""
    from sglang.srt import runtime_context

    memory = SimpleNamespace(hicache_storage_backend="file", hicache_storage_backend_extra_config=None)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    monkeypatch.delattr(runtime_context, "get_spec")
    for module in ("speculative.spec_info", "mem_cache.hybrid_cache.hybrid_cache_controller"):
        monkeypatch.setitem(sys.modules, f"sglang.srt.{module}", None)
    calls: list[str] = []
    sglang_hooks.around_init(lambda *_: calls.append("init"), manager())
    assert calls == ["init"]


def test_without_our_writer_sglangs_own_methods_run() -> None:
    calls: list[str] = []
    plain = manager()
    assert sglang_hooks.around_offload(lambda *_: calls.append("offload") or True, plain, object()) is True  # type: ignore[func-returns-value]
    sglang_hooks.around_check(lambda *_: calls.append("check"), plain)
    sglang_hooks.around_drain(lambda *_: calls.append("drain"), plain)
    assert calls == ["offload", "check", "drain"]


def test_a_bug_of_ours_releases_the_request_and_does_not_reach_the_scheduler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = manager(_hicache_ext_writer=BrokenWriter())
    request = SimpleNamespace(output_ids=[1], finished=lambda: False)
    assert sglang_hooks.around_offload(pytest.fail, broken, request) is False
    assert "a bug" in caplog.text
    sglang_hooks.around_check(pytest.fail, broken)
    assert "a request's KV will not be written" in caplog.text
    assert "a step of the decode writer failed" in caplog.text

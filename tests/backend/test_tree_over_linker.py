"""SGLang's own radix tree, allocator and device pool on the CPU, with our linker behind them.

What SGLang's tests of its door ask of a linker (attachment, locks, refusals, cancelling, flushing, closing, the
factory) is asked of ours.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.testing.host_pools import mha_device_pool
from tests.backend.linker_rig import put_hooks_in_force, wait_for

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]

PAGE_SIZE = 16
LAYERS = 3
PAGES = 64


def tokens(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + 31 * position * position + position) % 50_000 for position in range(count)]


def launch(directory: Path, **linker: Any) -> dict[str, Any]:
    """What ``--unified-cache-external-linker-config`` is given."""
    disk = {"type": "file", "path": str(directory), "capacity": "64MiB", "io": "buffered", "threads": 2}
    return {
        "linker": "HiCacheExtLinker",
        "linker_module_path": "hicache_ext.sglang.linker",
        "linker_extra_config": {"hicache_ext": {"tiers": {"disk": disk}, "linker": {"staging": "2MiB", **linker}}},
    }


class Served:
    """A tree over its device pool, and the linker behind it."""

    def __init__(self, config: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.pool = mha_device_pool(PAGES, PAGE_SIZE, LAYERS)
        self.allocator = PagedTokenToKVPoolAllocator(
            PAGES * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, "cpu", self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, PAGES * PAGE_SIZE, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_SIZE,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.linker = create_unified_cache_linker(
            None, params, backend="dynamic", config=config, components=set(self.tree.components)
        )
        self.tree.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    # -- what SGLang's scheduler does ------------------------------------------------------------------------------

    def compute(self, prompt: list[int]) -> list[torch.Tensor]:
        """Insert a prompt whose KV is noise; that noise."""
        slots = self.allocator.alloc(len(prompt))
        assert slots is not None
        for tensor in self.tensors():
            tensor[slots] = torch.randn(len(prompt), *tensor.shape[1:]).to(tensor.dtype)
        computed = self.at(slots)
        self.insert(prompt, slots)
        return computed

    def insert(self, prompt: list[int], slots: torch.Tensor) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        self.tree.insert(InsertParams(key=self.key(prompt), value=slots))

    def evict(self, count: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=count))

    def match(self, prompt: list[int], rid: str) -> tuple[Any, Any]:
        """A request of that name, and what the tree and the store have for it."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        request = SimpleNamespace(rid=rid, session=None, last_node=None, kv=None, swa_branching_seqlen=None)
        found = self.tree.match_prefix(MatchPrefixParams(key=self.key(prompt), req=request))
        request.last_node = found.last_device_node
        return request, found

    def waiting(self, prompt: list[int], rid: str) -> Any:
        """A request of SGLang's queue."""

        def look_up(tree: Any, cow_mamba: bool) -> None:
            self.match(prompt, rid)

        return SimpleNamespace(rid=rid, session=None, init_next_round_input=look_up)

    def wait(self, prompt: list[int], rid: str) -> None:
        """A request comes to the queue, and waits there until what is stored of it was read."""
        self.linker.requests_to_hold([], self.tree)
        wait_for(self.linker, [self.waiting(prompt, rid)])

    def load(self, prompt: list[int], rid: str) -> torch.Tensor:
        """Queue what the store has; the slots it will be in."""
        self.wait(prompt, rid)
        request, found = self.match(prompt, rid)
        if not found.host_hit_length:
            return torch.empty(0, dtype=torch.int64)
        loaded, _ = self.tree.linker.load_back(request)
        slots: torch.Tensor = self.tree.linker.private_load_indices.get(rid, torch.empty(0, dtype=torch.int64))
        assert loaded == len(slots)
        return slots

    def forward(self) -> list[str]:
        """A forward over the loads that are queued; the requests whose loads failed."""
        index = self.tree.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(LAYERS):
            self.pool.get_key_buffer(layer)
        failed: list[str] = self.tree.linker.finish_loads()
        return failed

    def store_everything(self) -> None:
        """Step until no offload is under way."""
        deadline = time.monotonic() + 30
        while self.tree.linker.pending_offloads:
            assert time.monotonic() < deadline, "an offload never ended"
            self.tree.check_hicache_events()
            time.sleep(0.005)

    # -- looking ---------------------------------------------------------------------------------------------------

    def tensors(self) -> list[torch.Tensor]:
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def at(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[slots].clone() for tensor in self.tensors()]

    @staticmethod
    def key(prompt: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", prompt))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))


@pytest.fixture
def _context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What SGLang's processes know of their launch."""
    from sglang.srt.runtime_context import get_context, get_parallel

    from hicache_ext.sglang import lifecycle
    from hicache_ext.sglang.launch_arguments import LaunchFacts

    put_hooks_in_force()
    monkeypatch.setattr(lifecycle, "read_launch_facts", LaunchFacts)
    with (
        get_context().override_server_args(device="cpu", page_size=PAGE_SIZE),
        get_parallel().override(tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dcp_rank=0),
    ):
        yield


@pytest.fixture
def serve(tmp_path: Path, _context: None) -> Iterator[Callable[..., Served]]:
    """``serve(staging=...)``: trees over one directory, closed at the end."""
    opened: list[Served] = []

    def serve_(**linker: Any) -> Served:
        opened.append(Served(launch(tmp_path / "l3", **linker)))
        return opened[-1]

    yield serve_
    for served in opened:
        served.tree.release_host_resources()


def test_an_attached_linker_is_asked_to_store_at_the_first_use(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.tree.write_through_threshold == 1
    assert served.tree.linker.layer_done_counter is served.linker.layer_done_counter
    served.compute(tokens(4 * PAGE_SIZE))
    assert len(served.tree.linker.pending_offloads) == 1


def test_a_node_is_locked_until_its_offload_was_counted(serve: Callable[..., Served]) -> None:
    served = serve()
    served.compute(tokens(4 * PAGE_SIZE))
    assert (served.tree.full_protected_size(), served.tree.evictable_size()) == (4 * PAGE_SIZE, 0)
    served.store_everything()
    assert (served.tree.full_protected_size(), served.tree.evictable_size()) == (0, 4 * PAGE_SIZE)


def test_what_was_stored_comes_back_into_slots_of_the_request_alone(serve: Callable[..., Served]) -> None:
    served, prompt = serve(), tokens(8 * PAGE_SIZE)
    computed = served.compute(prompt)
    served.store_everything()
    served.tree.reset()
    served.allocator.clear()
    for tensor in served.tensors():
        tensor.zero_()
    slots = served.load([*prompt, 1, 2, 3], "asks")
    assert len(slots) == len(prompt)
    assert served.forward() == []
    assert same(served.at(slots), computed)
    # The tree gets them from the request, once its forward is over.
    assert served.tree.evictable_size() == 0
    served.insert(prompt, slots)
    _, found = served.match([*prompt, 1, 2, 3], "again")
    assert (found.device_prefix_len, found.host_hit_length) == (len(prompt), 0)


def with_its_head_on_the_device(served: Served, prompt: list[int]) -> Any:
    """Have all of a prompt stored and its first three pages restored; what was computed of it."""
    computed = served.compute(prompt)
    served.store_everything()
    served.tree.reset()
    served.allocator.clear()
    head = served.load(prompt[: 3 * PAGE_SIZE], "head")
    assert served.forward() == []
    served.insert(prompt[: 3 * PAGE_SIZE], head)
    return computed


def test_a_prompt_whose_beginning_left_the_device_is_read_again_where_it_waits_on(
    serve: Callable[..., Served],
) -> None:
    """SGLang evicts for those that run, and asks for what waits in every round."""
    served, prompt = serve(), tokens(8 * PAGE_SIZE)
    computed = with_its_head_on_the_device(served, prompt)
    served.store_everything()
    waiting = served.waiting(prompt, "waits")
    wait_for(served.linker, [waiting])
    _, found = served.match(prompt, "waits")
    assert (found.device_prefix_len, found.host_hit_length) == (3 * PAGE_SIZE, 5 * PAGE_SIZE)
    served.evict(3 * PAGE_SIZE)
    _, found = served.match(prompt, "waits")
    assert (found.device_prefix_len, found.host_hit_length) == (0, 0)
    assert served.linker.requests_to_hold([waiting], served.tree) == {"waits"}
    wait_for(served.linker, [waiting])
    slots = served.load(prompt, "waits")
    assert len(slots) == len(prompt)
    assert served.forward() == []
    assert same(served.at(slots), computed)


def test_the_tail_behind_what_is_on_the_device_is_restored(serve: Callable[..., Served]) -> None:
    served, prompt = serve(), tokens(8 * PAGE_SIZE)
    computed = with_its_head_on_the_device(served, prompt)
    tail = served.load(prompt, "whole")
    assert len(tail) == 5 * PAGE_SIZE
    assert served.forward() == []
    assert same(served.at(tail), [rows[3 * PAGE_SIZE :] for rows in computed])


def test_an_offload_without_room_is_refused_at_once_and_its_node_stays_free(serve: Callable[..., Served]) -> None:
    served = serve()
    for number in range(1, 16):
        served.compute(tokens(4 * PAGE_SIZE, number))
    under_way = len(served.tree.linker.pending_offloads)
    assert served.tree.full_protected_size() == under_way * 4 * PAGE_SIZE
    served.store_everything()
    assert served.tree.full_protected_size() == 0


def test_the_pages_of_a_node_that_is_split_while_it_is_stored_are_found_in_both_halves(
    serve: Callable[..., Served],
) -> None:
    served, prompt = serve(), tokens(8 * PAGE_SIZE)
    served.compute(prompt)
    served.match(prompt[: 4 * PAGE_SIZE] + tokens(2 * PAGE_SIZE, 5), "splits")
    served.store_everything()
    served.tree.reset()
    served.allocator.clear()
    served.wait(prompt[: 4 * PAGE_SIZE], "half")
    _, half = served.match(prompt[: 4 * PAGE_SIZE], "half")
    served.wait(prompt, "whole")
    _, whole = served.match(prompt, "whole")
    assert (half.host_hit_length, whole.host_hit_length) == (4 * PAGE_SIZE, 8 * PAGE_SIZE)


def test_a_load_that_is_cancelled_writes_no_slot_and_the_next_one_is_served(serve: Callable[..., Served]) -> None:
    served, prompt = serve(), tokens(8 * PAGE_SIZE)
    computed = served.compute(prompt)
    served.store_everything()
    served.tree.reset()
    served.allocator.clear()
    cancelled = served.load(prompt, "leaves")
    for tensor in served.tensors():
        tensor.zero_()
    served.tree.linker.release_request("leaves")
    assert served.forward() == []
    time.sleep(0.2)
    assert all(not rows.any() for rows in served.at(cancelled))
    slots = served.load(prompt, "stays")
    assert served.forward() == []
    assert same(served.at(slots), computed)


def test_two_requests_of_one_batch_are_loaded_together(serve: Callable[..., Served]) -> None:
    served = serve()
    prompts = {rid: tokens(4 * PAGE_SIZE, seed) for rid, seed in (("one", 1), ("other", 2))}
    computed = {rid: served.compute(prompt) for rid, prompt in prompts.items()}
    served.store_everything()
    served.tree.reset()
    served.allocator.clear()
    slots = {rid: served.load(prompt, rid) for rid, prompt in prompts.items()}
    assert served.forward() == []
    for rid in prompts:
        assert same(served.at(slots[rid]), computed[rid])


def test_a_flush_waits_for_what_is_under_way_and_lets_every_node_go(serve: Callable[..., Served]) -> None:
    served, prompt = serve(), tokens(8 * PAGE_SIZE)
    computed = served.compute(prompt)
    served.store_everything()
    served.compute(tokens(8 * PAGE_SIZE, 2))
    served.load(prompt + tokens(PAGE_SIZE, 3), "asks")
    served.tree.reset()
    served.allocator.clear()
    before = [tensor.clone() for tensor in served.tensors()]
    assert served.tree.linker.pending_offloads == []
    assert served.linker.num_completed_offloads() == 0
    assert served.tree.ready_to_load_host_cache() == -1
    time.sleep(0.2)
    assert same(served.tensors(), before)
    slots = served.load(prompt, "after")
    assert served.forward() == []
    assert same(served.at(slots), computed)


class _StillComputing:
    """The event of a forward that is over a moment later."""

    def __init__(self, seconds: float) -> None:
        self._over = threading.Event()
        threading.Timer(seconds, self._over.set).start()

    def synchronize(self) -> None:
        assert self._over.wait(30)


def test_what_was_handed_over_before_a_flush_is_stored(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang waits for HiCache's writes before it flushes, and for nothing of a linker: that is up to ``reset``."""
    served, prompt = serve(), tokens(8 * PAGE_SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(served.linker, "record_offload_ready", lambda: [_StillComputing(0.3)])
        computed = served.compute(prompt)
        served.tree.reset()
    served.allocator.clear()
    for tensor in served.tensors():
        tensor.zero_()
    deadline = time.monotonic() + 10
    while not (slots := served.load(prompt, "asks")).numel():
        assert time.monotonic() < deadline, "the pages were lost"
        time.sleep(0.05)
    assert served.forward() == []
    assert same(served.at(slots), computed)


def test_a_close_lets_every_node_go_and_may_come_twice(serve: Callable[..., Served]) -> None:
    served = serve()
    served.compute(tokens(8 * PAGE_SIZE))
    served.tree.release_host_resources()
    assert served.tree.linker.pending_offloads == []
    assert served.tree.full_protected_size() == 0
    served.linker.close()


@pytest.mark.usefixtures("_context")
def test_sglang_checks_the_launch_without_importing_the_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from sglang.srt.arg_groups.hicache_hook import handle_hicache
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    line = ["--model-path", "dummy", "--enable-unified-cache-external-linker"]
    line += ["--unified-cache-external-linker-backend", "dynamic"]
    line += ["--unified-cache-external-linker-config", json.dumps(launch(tmp_path))]
    parsed = parser.parse_args(line)
    assert parsed.unified_cache_external_linker_config == launch(tmp_path)

    def refuse(name: str, *_: Any) -> Any:
        raise AssertionError(f"{name} was imported")

    fields = {
        "model_path": "dummy",
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": launch(tmp_path),
    }
    monkeypatch.setattr(importlib, "import_module", refuse)
    handle_hicache(ServerArgs(**fields))
    for beside in ({"enable_hierarchical_cache": True}, {"hicache_storage_backend": "dynamic"}):
        with pytest.raises(ValueError, match="external-linker"):
            handle_hicache(ServerArgs(**fields, **beside))


@pytest.mark.usefixtures("_context")
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "linker_extra_config"),
        ({"hicache_ex": {}}, "hicache_ext"),
        ({"config_file": "/nowhere/hicache.yaml"}, "No such file"),
        ({"hicache_ext": {"tiers": {}}, "config_file": "/hicache.yaml"}, "both"),
    ],
)
def test_a_launch_that_names_no_configuration_is_refused_with_one_sentence(extra: dict[str, Any], words: str) -> None:
    from hicache_ext.errors import ConfigError

    config = launch(Path("/nowhere")) | {"linker_extra_config": extra}
    with pytest.raises(ConfigError, match=words) as refused:
        Served(config)
    assert "\n" not in str(refused.value)

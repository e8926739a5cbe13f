"""SGLang's own radix tree on the CPU: a request of which nothing is kept stays out of it, part by part."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_ext.sglang import scheduler_hooks
from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.testing.host_pools import mha_device_pool
from tests.backend.linker_rig import server_context

pytestmark = pytest.mark.sglang

PAGE_SIZE, PAGES, WINDOW_PAGES = 16, 64, 8
PROMPT = array("q", range(PAGE_SIZE * 6))
PART = PAGE_SIZE * 2
BEFORE_0_5_22 = not comes_with(installed_release(), "0.5.22")


class Tree:
    """What holds SGLang's KV, and the steps of its scheduler."""

    def __init__(self, *, window: bool = False) -> None:
        """``window``: half of the layers see two pages, and have room for eight."""
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.allocator: Any
        self.window = window
        sizes: dict[str, Any] = {"size": PAGES * PAGE_SIZE, "page_size": PAGE_SIZE, "dtype": torch.bfloat16}
        if window:
            sizes["size_swa"] = WINDOW_PAGES * PAGE_SIZE
            layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3]}
            windows = SWAKVPool(**sizes, **layers, head_num=2, head_dim=32, device="cpu")
            self.allocator = SWATokenToKVPoolAllocator(**sizes, device="cpu", kvcache=windows, need_sort=False)
        else:
            pool = mha_device_pool(PAGES, PAGE_SIZE, 2)
            self.allocator = PagedTokenToKVPoolAllocator(**sizes, device="cpu", kvcache=pool, need_sort=False)
        self.rows = ReqToTokenPool(4, PAGES * PAGE_SIZE, "cpu", enable_memory_saver=False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE_SIZE,
                tree_components=(ComponentType.FULL, ComponentType.SWA)[: 1 + window],
                sliding_window_size=2 * PAGE_SIZE if window else None,
            )
        )

    def allocate(self) -> torch.Tensor:
        if not self.window:
            return self.allocator.alloc(PART)
        if self.allocator.swa_available_size() < PART:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=PART))
        places, windows = (
            each.alloc(PART) for each in (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
        )
        assert windows is not None, "no room for the next part"
        self.allocator.set_full_to_swa_mapping(places, windows)
        return places

    def compute(self, *, private: bool, prompt: array[int] = PROMPT) -> list[int]:
        """A request in parts, from its queue to its end; where each part began."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
        from sglang.srt.mem_cache import common
        from sglang.srt.sampling.sampling_params import SamplingParams

        said = {"hicache_ext": {"hints": [{"action_type": "no_store"}]}} if private else None
        request = Req("rid", "", prompt, SamplingParams(max_new_tokens=1, custom_params=said), vocab_size=1 << 20)
        scheduler = SimpleNamespace(tree_cache=self.tree, spec_algorithm=SimpleNamespace(is_eagle=lambda: False))
        scheduler_hooks.before_queued(scheduler, request)
        request.init_next_round_input(self.tree)
        self.rows.alloc([request])
        begun: list[int] = []
        while not begun or begun[-1] + PART < len(prompt):
            if begun:
                request.init_next_round_input()
            begin = len(request.prefix_indices) if BEFORE_0_5_22 else request.prefix_len
            assert begin not in begun, "the same part again"
            begun.append(begin)
            self.rows.req_to_token[request.kv.req_pool_idx, begin : begin + PART] = self.allocate().int()
            request.kv.kv_committed_len = request.kv.kv_allocated_len = begin + PART
            if BEFORE_0_5_22:
                request.set_extend_range(begin, begin + PART)
                original = common.maybe_cache_unfinished_req
                scheduler_hooks.around_unfinished(original, request, self.tree, chunked=True)
            else:
                request.extend_end = begin + PART
                scheduler_hooks.around_checkpoint(common.checkpoint_kv_cache, request, self.tree)
        request.finished_reason = FINISH_LENGTH(1)
        how = {"is_insert": True} if BEFORE_0_5_22 else {"checkpoint": True}
        common.release_kv_cache(request, self.tree, **how)
        return begun


@pytest.mark.parametrize("private", [True, False])
def test_each_part_goes_on_behind_the_one_before_and_only_what_may_be_kept_is(
    monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    backend = SimpleNamespace(take_hints=lambda said, request, ignore: None)
    monkeypatch.setattr(scheduler_hooks, "attached_backends", lambda: [backend])
    with server_context():
        tree = Tree()
        free = tree.allocator.available_size()
        assert tree.compute(private=private) == [0, PART, 2 * PART]
        kept = 0 if private else len(PROMPT)
        assert free - tree.allocator.available_size() == kept
        assert tree.tree.total_size() == (kept, 0)


@pytest.mark.parametrize("private", [True, False])
def test_a_long_prompt_gives_back_what_is_behind_its_window(monkeypatch: pytest.MonkeyPatch, private: bool) -> None:
    """Its windows would fill their pool four times."""
    backend = SimpleNamespace(take_hints=lambda said, request, ignore: None)
    monkeypatch.setattr(scheduler_hooks, "attached_backends", lambda: [backend])
    with server_context():
        tree = Tree(window=True)
        free = tree.allocator.full_available_size(), tree.allocator.swa_available_size()
        parts = 4 * WINDOW_PAGES * PAGE_SIZE // PART
        assert len(tree.compute(private=private, prompt=array("q", range(parts * PART)))) == parts
        left = tree.allocator.full_available_size(), tree.allocator.swa_available_size()
        assert (left == free) is private

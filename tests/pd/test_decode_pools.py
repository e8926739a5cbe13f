"""What a decode node writes of every pool of a model: byte for byte, at its own boundary, on SGLang's own pools.

A prefill node is a second set of SGLang's host pools over the same tier, which reads what the decode node wrote and
moves it to other places of the device.
"""

from __future__ import annotations

import ctypes
import functools
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from hicache_ext.config.model import ExtraConfig, WriteConfig
from hicache_ext.sglang import process
from hicache_ext.sglang.process import LoadedModel
from hicache_ext.sglang.releases import comes_with, installed_release
from hicache_ext.testing.host_pools import mha_device_pool
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.backend import linker_rig as rig
from tests.pd.test_decode_writer import idle
from tests.rigs.host_pool_kinds import MHA_LAYOUTS, MLA_LAYOUTS

prepare_process()

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="older releases write one pool"),
]

WINDOWS = {"swa": 40, "v4": 128}
"""Tokens, by kind: three pages, as SGLang counts windows, and one."""
INTERVAL = 32
"""Tokens from one recurrent state that SGLang keeps to the next: two pages."""
FIRST = 5
"""Whole pages of the prompt."""

DRAFTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mha+mtp": lambda: (mha_device_pool(rig.PAGES, rig.PAGE, 1),),
    "mha+eagle": lambda: (mha_device_pool(rig.PAGES, rig.PAGE, 1, heads=1),),
    "mla+mtp": lambda: (rig.mla_pool(1),),
    "mla+eagle": lambda: (rig.mla_pool(1),),
    "mla+eagle of heads": lambda: (mha_device_pool(rig.PAGES, rig.PAGE, 1),),
    "dsa+mtp": lambda: (rig.dsa_pool([False]),),
    "dsa+eagle": lambda: (rig.dsa_pool([False]),),
}
"""Pools of drafts, by the kind of the target and what SGLang's HiCache does with them: those of MTP are packed in the
target's pages, those of EAGLE have pools beside it."""


def device_of(kind: str) -> rig.Device:
    target, _, draft = kind.partition("+")
    device = rig.DEVICES[target]()
    pools = DRAFTS[kind]() if draft else ()
    packed = draft == "mtp"
    for pool in pools:
        buffers = {"kv" if packed else "draft": getattr(pool, "kv_buffer", None) or [*pool.k_buffer, *pool.v_buffer]}
        if target == "dsa":
            buffers["indexer" if packed else "draft_indexer"] = pool.index_k_with_scale_buffer
        for name, more in buffers.items():
            device.buffers[name] = [*device.buffers.get(name, ()), *more]
            device.page_sizes[name] = device.page_sizes["indexer" if "indexer" in name else "kv"]
    device.params.mtp_draft_device_pools = pools if packed else ()
    device.params.sidecar_draft_device_pools = () if packed else pools
    return device


TAILS = {"swa": "swa", "mamba": "mamba", "v4": "swa"}
"""The pool of which a prefill node needs the last pages, by kind."""
COMPRESSORS = {
    "deepseek_v4_c4_state": "compress_state_pools",
    "deepseek_v4_c4_indexer_state": "indexer_compress_state_pools",
}


class Evicted:
    """The memory of a request, as SGLang's ReqKvInfo has it."""

    def __init__(self) -> None:
        self.req_pool_idx: int | None = 0
        self.window_begins = 0
        self.mamba_ping_pong_track_buffer = torch.tensor([60, 61])
        self.mamba_last_track_idx = 0
        self.mamba_last_track_seqlen: int | None = None

    def get_evicted_seqlen(self, component: Any) -> int:
        return self.window_begins


class Request:
    def __init__(self, prompt: int) -> None:
        self.origin_input_ids = array("q", range(prompt))
        self.output_ids: list[int] = []
        self.extra_key = self.cache_salt = self.sampling_params = None
        self.kv = Evicted()
        self.done = False
        self.retraction_count = 0

    def finished(self) -> bool:
        return self.done


def launched_with(layout: str) -> dict[str, Any]:
    """The launch arguments of a node on memory."""
    return {
        "hicache_mem_layout": layout,
        "hicache_io_backend": "direct" if layout == "page_first_direct" else "kernel",
        "hicache_ratio": 1.0,
        "hicache_storage_backend": "dynamic",
    }


class DecodeNode:
    """Our manager over a model's device pools, with what SGLang's scheduler, forward and window do to them."""

    windows: list[bytes]

    def __init__(self, kind: str, directory: Path, layout: str) -> None:
        import torch.distributed
        from sglang.srt.runtime_context import get_memory, get_spec

        from hicache_ext.sglang import decode_manager

        self.page = rig.PAGE
        self.bigrams = "+" in kind
        self.device = device_of(kind)
        self.device.fill()
        self.window = WINDOWS.get(kind, 0)
        self.windows = self.device.content("swa", list(range(9, 40))) if self.window else []
        # By page of the request: what is right.
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.FileStore(str(directory / "ranks"), 1), rank=0, world_size=1
            )
        # Token t of the request lies in slot t of page t // page + 7, and its window two pages further.
        self.row = torch.arange(40 * self.page) + 7 * self.page
        allocator = self.device.params.token_to_kv_pool_allocator
        allocator.translate_loc_from_full_to_swa = lambda slots: slots + 2 * self.page
        allocator.set_hicache_transfer_done_event = lambda *_: None
        requests = self.device.params.req_to_token_pool or SimpleNamespace()
        requests.req_to_token = self.row[None].to(torch.int32)
        self.document = config(directory)
        tree = SimpleNamespace(
            components=dict.fromkeys(self.device.components),
            swa_retain_window=self.window,
            disable=True,
            token_to_kv_pool_allocator=allocator,
        )
        drafts = [LoadedModel(runner, True, None) for runner in self.draft_runners(kind)]  # type: ignore[arg-type]
        with (
            get_memory().override(**launched_with(layout)),
            get_spec().override(speculative_algorithm="EAGLE" if drafts else None),
            mock.patch.object(process, "loaded", drafts),
        ):
            self.manager = decode_manager._make_manager(
                requests,
                allocator,
                torch.distributed.group.WORLD,
                tree,
                config=WriteConfig(),
                extra_config=self.document,
            )
        self.manager.writer._stride = 4 * self.page
        self.manager.writer._prefix_grace = 0.0
        self.released: list[Any] = []
        self.manager._release = self.released.append  # type: ignore[method-assign]
        self.prompt = FIRST * self.page + 3
        for position in range(self.prompt):
            self.write_compressor_input(position)
        self.request = Request(self.prompt)
        self.free_before = self.free_pages()

    def draft_runners(self, kind: str) -> Iterator[Any]:
        """Those that SGLang has loaded, of which only this is looked at."""
        params = self.device.params
        for pool in (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools):
            model = SimpleNamespace(num_nextn_predict_layers=1 if kind.endswith("+mtp") else None)
            yield SimpleNamespace(token_to_kv_pool=pool, model_config=model)

    @property
    def pools(self) -> Any:
        return self.manager.pools

    def free_pages(self) -> dict[str, int]:
        return {name: self.pools.free_pages(name) for name in self.pools.pools_on}

    def store_prompt(self) -> None:
        """What the prefill node does."""
        keys = self.keys()[:FIRST]
        indices = self.pools.alloc("kv", len(keys))
        backend = self.pools.controller.storage_backend
        for name in self.pools.pools_on["kv"]:
            if name in self.device.buffers:
                assert all(result.durable for result in backend.store_pages(keys, indices, name))
        self.pools.free("kv", indices)

    def keys(self) -> list[str]:
        """As a prefill node hashes them."""
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        tokens = array("q", [*self.request.origin_input_ids, *self.request.output_ids])
        whole = RadixKey(tokens, is_bigram=self.bigrams).page_aligned(self.page)
        return list(get_storage_hash_str(whole, None, page_size=self.page))

    def generate(self, tokens: int, *, finish: bool = False, settle: bool = True) -> None:
        """As SGLang does: the window slides before a forward, which keeps the state of a boundary in the next slot."""
        for number in range(tokens):
            request, kv = self.request, self.request.kv
            length = self.prompt + len(request.output_ids)  # tokens that have KV after this forward
            self.slide_window((length - 1 - self.window) // self.page)
            self.write_compressor_input(length - 1)
            if length % INTERVAL == 0:
                kv.mamba_last_track_idx = (kv.mamba_last_track_idx + 1) % len(kv.mamba_ping_pong_track_buffer)
                kv.mamba_last_track_seqlen = length
                self.write_state(length)
            request.output_ids.append(number % 90 + 5)
            request.done = finish and number == tokens - 1
            if not self.manager.offload_kv_cache(request) and request.done:
                self.manager.finalize_release_on_finish(request)
            self.manager.check_offload_progress()
        if settle:
            self.settle()

    def slide_window(self, page: int) -> None:
        """Free the window's memory before a page; what was there is another request's from then on."""
        kv = self.request.kv
        for freed in range(kv.window_begins // self.page, page):
            for name in self.pools.pools_on.get("swa", ()):
                for buffer in self.device.buffers[name]:
                    buffer[rig.indices_of(self.device.page_sizes[name], [freed + 9])] = 0
        kv.window_begins = max(kv.window_begins, page * self.page)

    def compressors(self) -> Iterator[tuple[str, int, Any]]:
        """Of DeepSeek V4: pool, layer in it, and where that layer keeps its compressor's last inputs."""
        for name, attribute in COMPRESSORS.items():
            states = getattr(self.device.kvcache, attribute, ())
            for layer, state in enumerate(state for state in states if state is not None and state.ratio == 4):
                yield name, layer, state

    def write_compressor_input(self, position: int) -> None:
        """As a forward does (c_plan.cuh): in the ring beside the token's page of the window."""
        for _, layer, state in self.compressors():
            # SGLang's own words for what the kernels compute.
            slot = state.translate_from_swa_loc_to_state_loc(self.row[position : position + 1] + 2 * self.page)
            state.kv_score_buffer.kv_score[slot] = self.compressor_input(position, layer)

    @staticmethod
    def compressor_input(position: int, layer: int) -> float:
        return position + layer / 4

    def inputs_before(self, end_page: int) -> dict[str, bytes]:
        """By pool: what the compressors need at a page's end, which is a matter of the last tokens alone."""
        right: dict[str, bytes] = {}
        for name, layer, state in self.compressors():
            end, width = end_page * self.page, state.kv_score_buffer.kv_score.shape[1]
            rows = [[self.compressor_input(at, layer)] * width for at in range(end - state.ring_size, end)]
            right[name] = right.get(name, b"") + torch.tensor(rows).numpy().tobytes()
        return right

    def write_state(self, length: int) -> None:
        """The state after so many tokens: its bytes are a matter of the length alone."""
        slot = int(self.request.kv.mamba_ping_pong_track_buffer[self.request.kv.mamba_last_track_idx])
        for buffer in self.device.buffers.get("mamba", ()):
            buffer[slot] = self.state(length, buffer[slot])

    @staticmethod
    def state(length: int, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(length)).to(like.dtype)

    def settle(self) -> None:
        deadline = time.monotonic() + 60
        while not idle(self.manager.writer):
            assert time.monotonic() < deadline
            self.manager.check_offload_progress()
            time.sleep(0.002)

    def close(self) -> None:
        assert self.manager.writer.stop(60)
        self.pools.controller.detach_storage_backend()


def config(directory: Path) -> dict[str, Any]:
    tier = {"type": "file", "path": str(directory / "pool"), "capacity": "64MiB", "io": "buffered", "threads": 2}
    return ExtraConfig.around({"tiers": {"pool": tier}, "model": {"id": rig.MODEL}, "kv_dtype": "fp8_e4m3"})


class PrefillNode:
    """SGLang's host pools of another process, which finds pages and moves them to its own device."""

    opened: ClassVar[list[PrefillNode]] = []
    """Closed with the decode nodes: each has seven threads."""

    def __init__(self, kind: str, directory: Path, layout: str) -> None:
        from sglang.srt.runtime_context import get_memory

        from hicache_ext.sglang.model_pools import ModelPools

        self.device = device_of(kind)
        with get_memory().override(**launched_with(layout)):
            self.pools = ModelPools(
                self.device.params,
                self.device.components,
                storage_backend="dynamic",
                storage_backend_extra_config=config(directory),
            )
        self.backend = self.pools.controller.storage_backend
        self.opened.append(self)

    def close(self) -> None:
        self.pools.controller.detach_storage_backend()

    def restorable(self, keys: list[str], tails: dict[str, int]) -> int:
        """Pages that SGLang would restore: where all pools have what their policy asks for."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        transfers = [
            PoolTransfer(PoolName(name), keys=["placeholder"] * tails.get(source, 1), hit_policy=policy)
            for source in self.pools.pools_on
            for policy in [PoolHitPolicy.TRAILING_PAGES if source in tails else PoolHitPolicy.ALL_PAGES]
            for name in self.pools.pools_on[source]
            if name != "kv"
        ]
        return max(self.backend.batch_exists_v2(keys, transfers).restorable_prefix_pages, default=0)

    def load(self, source: str, keys: list[str], places: list[int]) -> list[bool]:
        """Read pages of one component and all that lies on them, and move them to ``places`` of the device."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        host = self.pools.alloc(source, len(keys))
        found = [True] * len(keys)
        for name in self.pools.pools_on[source]:
            moved = self.backend.batch_get_v2([PoolTransfer(PoolName(name), host_indices=host, keys=keys)])
            found = [was and now for was, now in zip(found, moved[PoolName(name)], strict=True)]
        operation = self.pools.operation([(source, host, rig.indices_of(self.pools.page_sizes[source], places))])
        controller = self.pools.controller
        controller.l2_transfer_engine.submit_host_to_device(
            controller._l2_load_transfers(*controller.move_hybrid_indices(operation)),
            transfer_layer_id_max=controller.transfer_layer_id_max,
            on_layer_done=lambda *_, **__: None,
        )
        self.pools.free(source, host)
        return found


def states_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers of the rig have them (hybrid_on_cpu.py): host memory that is not pinned, copies in torch."""
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    for kind in (MambaPoolHost, DSAIndexerPoolHost, DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool):
        monkeypatch.setattr(kind, "__init__", functools.partialmethod(kind.__init__, pin_memory=False))
    for name in ("_copy_tensor_pf_lf", "_copy_tensor_all_layers_lf_pf"):
        copy = functools.partial(getattr(MambaPoolHost, name), io_backend="kernel_ascend")
        monkeypatch.setattr(MambaPoolHost, name, staticmethod(_in_torch(copy)))


def page_rows_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's kernels for index keys and the pools of DeepSeek V4 do, in plain words."""
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.pool_host import dsa

    def move(
        to: int, source: int, size: int, dst_indices: Any, src_indices: Any, stride: int, from_stride: int
    ) -> None:
        for there, here in zip(dst_indices.tolist(), src_indices.tolist(), strict=True):
            ctypes.memmove(to + there * stride, source + here * from_stride, size)

    def all_layers(
        *, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, item_size: int, **_: Any
    ) -> None:
        for source, to in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
            move(to, source, item_size, dst_indices, src_indices, item_size, item_size)

    def all_layers_to_pages(
        *, src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int, dst_layout_dim: int, **_: Any
    ) -> None:
        for layer, source in enumerate(src_layers.tolist()):
            to = dst.data_ptr() + layer * item_size
            move(to, source, item_size, dst_indices, src_indices, dst_layout_dim, item_size)

    def layer(*, src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int) -> None:
        move(dst.data_ptr(), src.data_ptr(), item_size, dst_indices, src_indices, item_size, item_size)

    def layer_of_pages(
        *, src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, item_size: int, src_layout_dim: int
    ) -> None:
        source = src.data_ptr() + layer_id * item_size
        move(dst.data_ptr(), source, item_size, dst_indices, src_indices, item_size, src_layout_dim)

    def direct(*, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        for source, to in zip(src_layers, dst_layers, strict=True):
            to[dst_indices] = source[src_indices]

    def direct_to_pages(*, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        for number, source in enumerate(src_ptrs):
            dst_ptrs[0][dst_indices, number, 0] = source[src_indices]

    def direct_layer_of_pages(
        *, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
    ) -> None:
        dst_ptrs[0][dst_indices] = src_ptrs[0][src_indices, layer_id, 0]

    for name, function in {
        "all_layer_mla": all_layers,
        "all_layer_mla_lf_pf": all_layers_to_pages,
        "per_layer_mla": layer,
        "per_layer_mla_pf_lf": layer_of_pages,
        "direct": direct,
        "all_layer_direct_lf_pf": direct_to_pages,
        "per_layer_direct_pf_lf": direct_layer_of_pages,
    }.items():
        for module in (dsa, memory_pool_host):
            monkeypatch.setattr(module, f"transfer_kv_{name}", function, raising=False)


def _in_torch(copy: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, io_backend=None, **named: copy(*arguments, **named)


@pytest.fixture
def node_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DecodeNode]]:
    from hicache_ext.sglang import decode_manager

    nodes: list[DecodeNode] = []
    monkeypatch.setattr(decode_manager, "_track_interval", lambda page_size: INTERVAL)
    states_without_a_gpu(monkeypatch)
    page_rows_without_a_gpu(monkeypatch)
    with ExitStack() as stack:

        def make(kind: str, layout: str = "page_first", *, prompt_stored: bool = True) -> DecodeNode:
            # SGLang's index keys, and DeepSeek V4, have no other pages.
            monkeypatch.setattr(rig, "PAGE", {"dsa": 64, "v4": 256}.get(kind.partition("+")[0], 16))
            if kind == "v4":
                monkeypatch.setattr(rig, "PAGES", 56)
            stack.enter_context(rig.server_context())
            nodes.append(DecodeNode(kind, tmp_path, layout))
            if prompt_stored:
                nodes[-1].store_prompt()
            return nodes[-1]

        yield make
        for node in (*nodes, *PrefillNode.opened):
            node.close()
        PrefillNode.opened.clear()


LAYOUTS = {
    "mha": MHA_LAYOUTS,
    "mla": MLA_LAYOUTS,
    "swa": MHA_LAYOUTS,
    "dsa": MLA_LAYOUTS,
    "v4": MLA_LAYOUTS,
    "mamba": ("page_first", "page_first_direct"),
}
"""All that SGLang has of each."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in (*LAYOUTS, *DRAFTS) for layout in LAYOUTS[kind.partition("+")[0]]],
)
def test_a_prefill_node_gets_the_bytes_of_every_pool(
    node_of: Callable[..., DecodeNode], tmp_path: Path, kind: str, layout: str
) -> None:
    node = node_of(kind, layout)
    node.generate(6 * node.page, finish=True)
    keys = node.keys()
    # 5 pages and 3 tokens of prompt, 6 pages generated, the last token without KV: 11 whole pages; a state at 10.
    end = 10 if kind == "mamba" else 11
    prefill = PrefillNode(kind, tmp_path, layout)
    assert prefill.restorable(keys, node.manager.tails) == end
    places = list(range(30, 30 + end - FIRST))
    assert all(prefill.load("kv", keys[FIRST:end], places))
    everything = {name for names in node.pools.pools_on.values() for name in names}
    assert everything == {*node.device.buffers, "kv"}  # SGLang's anchor of DeepSeek V4 has no bytes
    for name in {*node.pools.pools_on["kv"]} & {*node.device.buffers}:
        assert prefill.device.content(name, places) == node.device.content(
            name, [7 + page for page in range(FIRST, end)]
        )
    if kind in WINDOWS:
        tail = range(end - node.manager.tails["swa"], end)
        there = [page - tail.start + 1 for page in tail]
        assert all(prefill.load("swa", keys[tail.start : end], there))
        for name in node.pools.pools_on["swa"]:
            assert prefill.device.content(name, there) == node.device.content(name, [9 + page for page in tail])
        for name, right in node.inputs_before(end).items():
            assert prefill.device.content(name, there[-1:]) == [right]
    if kind == "mamba":
        assert prefill.load("mamba", [keys[end - 1]], [3]) == [True]
        for buffer in prefill.device.buffers["mamba"]:
            assert torch.equal(buffer[3], DecodeNode.state(end * node.page, buffer[3]))
    assert node.free_pages() == node.free_before
    assert node.released == [node.request]


def tails_found(node: DecodeNode, prefill: PrefillNode, kind: str) -> list[int]:
    """At which pages of the request a prefill node finds a window's page, or a state. All that it finds is right."""
    found = []
    for page, key in enumerate(node.keys()):
        if not prefill.load(TAILS[kind], [key], [3])[0]:
            continue
        found.append(page)
        if kind in WINDOWS:
            assert prefill.device.content("swa", [3]) == [node.windows[page]]
            for name, right in node.inputs_before(page + 1).items():
                assert prefill.device.content(name, [3]) == [right]
        else:
            for buffer in prefill.device.buffers["mamba"]:
                assert torch.equal(buffer[3], DecodeNode.state((page + 1) * node.page, buffer[3]))
    return found


@pytest.mark.parametrize("kind", TAILS)
def test_every_window_and_state_that_is_stored_is_of_its_own_boundary(
    node_of: Callable[..., DecodeNode], tmp_path: Path, kind: str
) -> None:
    node = node_of(kind)
    node.generate(13 * node.page + 5, finish=True)  # 88 + 208 tokens: 18 whole pages
    prefill = PrefillNode(kind, tmp_path, "page_first")
    # Copied at 9, 13, 17 and 18 pages, the window at each; states at the boundaries before.
    pages = {"swa": [6, 7, 8, 10, 11, 12, 14, 15, 16, 17], "v4": [8, 12, 16, 17], "mamba": [7, 11, 15, 17]}
    assert tails_found(node, prefill, kind) == pages[kind]
    assert prefill.restorable(node.keys(), node.manager.tails) == 18
    # A shorter prefix is restored where a boundary was, and nowhere else.
    lengths = {prefill.restorable(node.keys()[:length], node.manager.tails) for length in range(FIRST, 18)}
    assert lengths == ({0, 9, 13, 17} if kind in WINDOWS else {0, 8, 12, 16})


@pytest.mark.parametrize("kind", TAILS)
def test_memory_that_was_given_away_before_its_copy_ended_is_never_stored(
    node_of: Callable[..., DecodeNode], tmp_path: Path, kind: str
) -> None:
    node = node_of(kind)
    start = node.manager.start_copies
    node.manager.start_copies = lambda: None  # type: ignore[method-assign]
    # The copy is queued at 9 pages (10, with states) and made when the window has left, or a third state been kept.
    node.generate(9 * node.page, settle=False)
    node.manager.start_copies = start  # type: ignore[method-assign]
    node.settle()
    prefill = PrefillNode(kind, tmp_path, "page_first")
    assert tails_found(node, prefill, kind) == []
    assert prefill.restorable(node.keys(), node.manager.tails) == 0
    assert node.manager.writer.metrics.value("copy", "torn") == 1

    # What the request has from then on is whole again.
    node.generate(5 * node.page, finish=True)
    assert prefill.restorable(node.keys(), node.manager.tails) >= 18
    assert tails_found(node, prefill, kind)
    assert node.free_pages() == node.free_before


@pytest.mark.parametrize("kind", ["mha", "v4"])
def test_behind_a_prompt_that_is_not_in_the_pool_nothing_is_written(
    node_of: Callable[..., DecodeNode], kind: str
) -> None:
    node = node_of(kind, prompt_stored=False)
    node.generate(6 * node.page, finish=True)
    assert node.manager.writer.metrics.value("lost", "prefix_missing") > 0
    assert node.manager.writer.metrics.value("page", "stored") == 0
    assert node.free_pages() == node.free_before


def test_where_batches_do_not_overlap_the_next_boundary_takes_the_one_slot(
    node_of: Callable[..., DecodeNode], tmp_path: Path
) -> None:
    node = node_of("mamba")
    node.request.kv.mamba_ping_pong_track_buffer = node.request.kv.mamba_ping_pong_track_buffer[:1]
    node.request.kv.mamba_last_track_idx = 0
    start = node.manager.start_copies
    node.manager.start_copies = lambda: None  # type: ignore[method-assign]
    while not node.manager.ongoing_offload:
        node.generate(1, settle=False)
    node.generate(INTERVAL, settle=False)
    node.manager.start_copies = start  # type: ignore[method-assign]
    node.settle()
    assert node.manager.writer.metrics.value("copy", "torn") == 1
    assert tails_found(node, PrefillNode("mamba", tmp_path, "page_first"), "mamba") == []


def test_what_sglang_makes_of_one_request_is_the_matter_of_that_one(node_of: Callable[..., DecodeNode]) -> None:
    node = node_of("mha")
    released = node.released

    def fail(request: Any) -> None:
        released.append(request)
        raise AssertionError("start_p == end_p")

    node.manager._release = fail  # type: ignore[method-assign]
    node.generate(9 * node.page, finish=True)
    assert released == [node.request] and not node.manager.ongoing_offload
    node.manager.finalize_release_on_finish(node.request)
    assert node.free_pages() == node.free_before


def test_a_copy_that_cannot_be_queued_holds_no_host_memory(
    node_of: Callable[..., DecodeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    node = node_of("mha")
    monkeypatch.setattr(node.pools, "operation", fail)
    node.generate(9 * node.page, finish=True)
    assert node.released == [node.request]
    assert node.free_pages() == node.free_before


def test_a_state_that_is_not_at_a_page_boundary_of_the_request_is_none(node_of: Callable[..., DecodeNode]) -> None:
    node = node_of("mamba")
    kv = node.request.kv
    for tracked, boundary in ((None, 0), (7 * 16 + 1, 0), (9 * 16, 0), (8 * 16, 8), (6 * 16, 6)):
        kv.mamba_last_track_seqlen = tracked
        assert node.manager.boundary(node.request, 8, 0) == boundary


def test_after_a_weight_update_nothing_of_the_writer_is_stored(node_of: Callable[..., DecodeNode]) -> None:
    """SGLang's flush, after which a backend serves again, does not empty the writer's queues."""
    node = node_of("mha")
    assert not node.pools.controller.storage_backend.flushes_with_cache


@pytest.mark.parametrize(
    ("kind", "cases"),
    [("swa", ((5, 0, 8), (6, 0, 0), (6, 6, 8), (7, 6, 0))), ("v4", ((7, 0, 8), (8, 0, 0), (7, 7, 8), (8, 7, 0)))],
)
def test_a_window_counts_only_whole(node_of: Callable[..., DecodeNode], kind: str, cases: Any) -> None:
    node = node_of(kind)
    for window_begins, since, boundary in cases:
        node.request.kv.window_begins = window_begins * node.page
        assert node.manager.boundary(node.request, 8, since) == boundary


@pytest.mark.parametrize("kind", TAILS)
def test_where_host_memory_of_a_tail_is_full_the_run_is_dropped_and_counted(
    node_of: Callable[..., DecodeNode], tmp_path: Path, kind: str
) -> None:
    node = node_of(kind)
    held = node.pools.alloc(TAILS[kind], node.pools.free_pages(TAILS[kind]))
    node.generate(13 * node.page, finish=True)
    prefill = PrefillNode(kind, tmp_path, "page_first")
    assert prefill.restorable(node.keys(), node.manager.tails) == 0
    assert node.manager.writer.metrics.value("lost", "no_host_memory") > 0
    assert node.released == [node.request]
    node.pools.free(TAILS[kind], held)
    assert node.free_pages() == node.free_before


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        *(("swa", "swa"), ("mamba", "mamba"), ("dsa", "indexer")),
        *(("mla+eagle of heads", "draft"), ("dsa+eagle", "draft_indexer")),
        *(("v4", "swa"), ("v4", "deepseek_v4_c4_state"), ("v4", "deepseek_v4_c4_indexer_state")),
        *(("v4", "deepseek_v4_c4"), ("v4", "deepseek_v4_c4_indexer")),
    ],
)
def test_a_boundary_whose_tail_could_not_be_stored_gets_no_kv_either(
    node_of: Callable[..., DecodeNode], kind: str, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hicache_ext.pd import decode_writer
    from hicache_ext.storage.contract.store import SetResult

    monkeypatch.setattr(decode_writer, "_RETRIES", 0)
    node = node_of(kind)
    backend = node.pools.controller.storage_backend
    store_pages = backend.store_pages

    def fail(keys: list[str], indices: torch.Tensor, name: str) -> list[SetResult]:
        return [SetResult.ERROR] * len(keys) if name == beside else store_pages(keys, indices, name)

    monkeypatch.setattr(backend, "store_pages", fail)
    node.generate(6 * node.page, finish=True)
    assert backend.stored_leading(node.keys(), "deepseek_v4_c128" if kind == "v4" else "kv") == FIRST
    assert node.manager.writer.metrics.value("lost", "failed") > 0
    assert node.free_pages() == node.free_before

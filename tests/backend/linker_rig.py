"""A linker over SGLang's real device pools, small and on the CPU, without a server around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hicache_ext.sglang import launch_arguments
from hicache_ext.sglang.launch_arguments import LaunchFacts
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.testing.host_pools import mha_device_pool
from tests.rigs.faults import PageStoreWrapper
from tests.waiting import wait_until

PAGE = 16
PAGES = 96
"""Of the device pools."""
LAYERS = 4
MODEL = "tiny"


def extra_config(directory: Path, **ours: Any) -> dict[str, Any]:
    """``linker_extra_config`` with one file tier; nothing is measured at its start, and its end waits for no store."""
    disk = {"type": "file", "path": str(directory), "capacity": "64MiB", "io": "buffered", "threads": 2}
    section = {"tiers": {"disk": disk}, "model": {"id": MODEL}, "linker": {"staging": "1MiB"}}
    section |= {"background": {"drain": "100ms"}, **ours}
    return {"hicache_ext": section}


@dataclass(slots=True)
class Device:
    """The pools of a model on the device. ``buffers`` by pool name: tensors whose first axis is a token or a slot."""

    kvcache: Any
    components: set[Any]
    buffers: dict[str, list[torch.Tensor]]
    params: Any
    page_sizes: dict[str, int]

    def fill(self, seed: int = 1, only: list[int] | None = None) -> None:
        """The same noise for the same seed; ``only`` these pages of KV, or everything."""
        generator = torch.Generator().manual_seed(seed)
        for pool, buffers in self.buffers.items():
            for buffer in buffers:
                noise = torch.randint(0, 256, (buffer.numel() * buffer.element_size(),), generator=generator)
                filled = noise.to(torch.uint8).view(buffer.dtype).view(buffer.shape)
                if only is None:
                    buffer.copy_(filled)
                elif pool == "kv":
                    buffer[indices_of(PAGE, only)] = filled[indices_of(PAGE, only)]

    def layer_content(self, layer: int, pages: list[int]) -> list[bytes]:
        """The bytes of each page of KV in one layer of a model that has KV in all of them."""
        buffers = self.buffers["kv"][layer :: self.params.token_to_kv_pool_allocator.get_kvcache().layer_num]
        return [b"".join(_bytes(buffer[indices_of(PAGE, [page])]) for buffer in buffers) for page in pages]

    def content(self, pool: str, pages: list[int]) -> list[bytes]:
        """The bytes of each page in all layers."""
        return [
            b"".join(_bytes(buffer[indices_of(self.page_sizes[pool], [page])]) for buffer in self.buffers[pool])
            for page in pages
        ]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def indices_of(page_size: int, pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages]).to(torch.int64)


def hashes(count: int, first: int = 1) -> list[str]:
    return [f"{first + number:064x}" for number in range(count)]


class _Allocator:
    def alloc(self, size: int) -> None: ...
    def free(self, indices: Any) -> None: ...


def _params(kvcache: Any, requests: Any = None) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    allocator = SimpleNamespace(get_kvcache=lambda: kvcache, swa_attn_allocator=_Allocator())
    return CacheInitParams(
        disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=PAGE
    )


def mha_device() -> Device:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    pool = mha_device_pool(PAGES, PAGE, LAYERS)
    return Device(pool, {ComponentType.FULL}, {"kv": [*pool.k_buffer, *pool.v_buffer]}, _params(pool), {"kv": PAGE})


def mla_device() -> Device:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    pool = mla_pool(LAYERS)
    return Device(pool, {ComponentType.FULL}, {"kv": list(pool.kv_buffer)}, _params(pool), {"kv": PAGE})


def mla_pool(layers: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def swa_device() -> Device:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    pool = SWAKVPool(
        size=PAGES * PAGE,
        size_swa=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=32,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        device="cpu",
    )
    full, window = pool.full_kv_pool, pool.swa_kv_pool
    buffers = {"kv": [*full.k_buffer, *full.v_buffer], "swa": [*window.k_buffer, *window.v_buffer]}
    components = {ComponentType.FULL, ComponentType.SWA}
    return Device(pool, components, buffers, _params(pool), {"kv": PAGE, "swa": PAGE})


def mamba_device() -> Device:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    shape = SimpleNamespace(conv=[(24, 3)], temporal=(2, 8, 8))
    cache = SimpleNamespace(
        shape=shape, dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32), is_kda=False
    )
    states = MambaPool(size=PAGES, spec_state_size=0, cache_params=cache, mamba_layer_ids=[0, 2], device="cpu")
    pool = HybridLinearKVPool(
        size=PAGES * PAGE,
        dtype=torch.bfloat16,
        page_size=PAGE,
        head_num=2,
        head_dim=32,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=states,
    )
    requests = SimpleNamespace(
        mamba_pool=states, mamba_allocator=_Allocator(), register_layer_transfer_counter=lambda counter: None
    )
    full, state = pool.full_kv_pool, states.mamba_cache
    buffers = {
        "kv": [*full.k_buffer, *full.v_buffer],
        "mamba": [*state.temporal, *[layer for conv in state.conv for layer in conv]],
    }
    components = {ComponentType.FULL, ComponentType.MAMBA}
    return Device(pool, components, buffers, _params(pool, requests), {"kv": PAGE, "mamba": 1})


def dsa_device() -> Device:
    """Latents and their index keys, whose pages have 64 tokens (``PAGE``); one layer has no keys of its own."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    pool = dsa_pool([False, True, False, False])
    index = [buffer for buffer in pool.index_k_with_scale_buffer if buffer.numel()]
    buffers = {"kv": list(pool.kv_buffer), "indexer": index}
    return Device(pool, {ComponentType.FULL}, buffers, _params(pool), {"kv": PAGE, "indexer": 1})


def dsa_pool(without_keys: list[bool]) -> Any:
    """``without_keys``: by layer."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    return DSATokenToKVPool(
        size=PAGES * PAGE,
        page_size=PAGE,
        kv_lora_rank=64,
        dtype=torch.bfloat16,
        qk_rope_head_dim=16,
        layer_num=len(without_keys),
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=80,
        index_buf_size=PAGES * PAGE,
        skip_topk_layers=without_keys,
    )


def v4_device() -> Device:
    """DeepSeek V4 (``PAGE``: 256 tokens): a layer with a window alone, two that keep one row for 4 tokens, one for 128;
    beside each page of the window the last inputs of the compressors of 4."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    ring = 8
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=2,
        swa_size=PAGES * PAGE,
        c4_size=PAGES * PAGE // 4,
        c128_size=PAGES * PAGE // 128,
        c4_state_pool_size=PAGES * ring,
        c128_state_pool_size=2 * 128,
        page_size=PAGE,
        swa_page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[0, 4, 128, 4],
        start_layer=0,
        end_layer=LAYERS,
    )
    buffers = {
        "swa": pool.swa_kv_pool.kv_buffer,
        "deepseek_v4_c4": pool.c4_kv_pool.kv_buffer,
        "deepseek_v4_c4_indexer": pool.c4_indexer_kv_pool.index_k_with_scale_buffer,
        "deepseek_v4_c128": pool.c128_kv_pool.kv_buffer,
    }
    rows = dict.fromkeys(buffers, 1)
    for name, states in {
        "deepseek_v4_c4_state": pool.compress_state_pools,
        "deepseek_v4_c4_indexer_state": pool.indexer_compress_state_pools,
    }.items():
        buffers[name] = [state.kv_score_buffer.kv_score for state in states if state is not None and state.ratio == 4]
        rows[name] = ring
    components = {ComponentType.FULL, ComponentType.SWA}
    return Device(pool, components, buffers, _params(pool), {"kv": PAGE, **rows})


DEVICES: dict[str, Callable[[], Device]] = {
    "dsa": dsa_device,
    "mha": mha_device,
    "mla": mla_device,
    "swa": swa_device,
    "mamba": mamba_device,
    "v4": v4_device,
}


@contextmanager
def server_context(**parallel: int) -> Iterator[None]:
    """What a scheduler of SGLang has around it: resolved arguments and ranks."""
    from sglang.srt.runtime_context import get_context, get_parallel

    ranks = {"tp_rank": 0, "pp_rank": 0, "attn_dcp_rank": 0, **parallel}
    with ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(device="cpu", page_size=PAGE, served_model_name=MODEL))
        stack.enter_context(get_parallel().override(**ranks))
        stack.enter_context(mock.patch("hicache_ext.sglang.lifecycle.read_launch_facts", _facts))
        yield


def _facts() -> LaunchFacts:
    """Nothing of a server but the file, which is the linker's to say."""
    return LaunchFacts(config_file=launch_arguments._config_file())


def put_hooks_in_force() -> None:
    """Those without which the linker does not start, as SGLang does when it loads its plug-ins. Again is free."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from hicache_ext.sglang.plugin import register
    from hicache_ext.sglang.used_names import LINKER

    register([LINKER])
    HookRegistry.apply_hooks()


def linker_of(device: Device, extra: dict[str, Any]) -> Any:
    from hicache_ext.sglang.linker import HiCacheExtLinker

    put_hooks_in_force()
    return HiCacheExtLinker(None, device.params, components=device.components, extra_config=extra)


def pools_of_hicache(device: Device) -> Any:
    """What SGLang makes for HiCache of these pools, twice as large."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _select_strategy
    from sglang.srt.runtime_context import get_memory

    settings = {
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_host_memory_mode": "cache",
    }
    cache = SimpleNamespace(components=dict.fromkeys(device.components), page_size=PAGE)
    with get_memory().override(**settings):
        return _select_strategy(device.kvcache, device.components).build(
            cache=cache,
            kvcache=device.kvcache,
            params=device.params,
            server_args=None,
            load_cache_event=threading.Event(),
            model_name=MODEL,
        )


def transfer(pool: str, keys: list[str], indices: torch.Tensor | None = None, *, trailing: bool = False) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    policy = PoolHitPolicy.TRAILING_PAGES if trailing else PoolHitPolicy.ALL_PAGES
    return PoolTransfer(PoolName(pool), device_indices=indices, keys=keys, hit_policy=policy)


def pages(device: Device, pool: str, keys: list[str], numbers: list[int]) -> Any:
    """A transfer of whole pages of the device."""
    return transfer(pool, keys, indices_of(device.page_sizes[pool], numbers), trailing=pool != "kv")


def stored(linker: Any, seconds: float = 20.0) -> bool:
    """The result of the oldest offload, once it is done."""
    deadline = time.monotonic() + seconds
    while not linker.num_completed_offloads():
        assert time.monotonic() < deadline, "an offload is not done"
        time.sleep(0.001)
    return bool(linker.pop_completed_offload())


def forward(linker: Any, index: int, at_layer: Callable[[int], None] = lambda layer: None) -> bool:
    """What SGLang does with a batch: it waits for each layer and computes it (``at_layer``), and waits for the end."""
    counter = linker.layer_done_counter
    counter.set_consumer(index)
    for layer in range(counter.num_layers):
        counter.wait_until(layer)
        at_layer(layer)
    counter.set_consumer(-1)
    return bool(linker.finish_layer_wise_loading(index))


class Waiting:
    """A request of SGLang's queue whose tree asks for ``transfers`` when it is looked up."""

    def __init__(self, linker: Any, rid: str, *transfers: Any) -> None:
        self.rid = rid
        self.session: Any = None
        self.asked = 0
        self._linker = linker
        self._transfers = list(transfers)

    def init_next_round_input(self, tree: Any, cow_mamba: bool) -> None:
        assert cow_mamba is False
        self.asked += 1
        if self._transfers:
            assert self._linker.lookup(self.rid, self._transfers) == []


def wait_for(linker: Any, queue: Sequence[Any]) -> None:
    """Until none of the requests in SGLang's queue is held back."""
    wait_until(lambda: not linker.requests_to_hold(queue, None))


def waited(linker: Any, rid: str, transfers: list[Any]) -> list[int]:
    """What SGLang is answered when it admits a request that has waited in its queue, alone, for its pages."""
    wait_for(linker, [Waiting(linker, rid, *transfers)])
    return list(linker.lookup(rid, transfers))


def loaded(linker: Any, rid: str, transfers: list[Any]) -> bool:
    return bool(linker.load(rid, transfers)) and forward(linker, linker.start_layer_wise_loading())


def staging_in_use(linker: Any) -> int:
    return int(linker._staging.pages_in_use("load") + linker._staging.pages_in_use("offload"))


class TroubledStore(PageStoreWrapper):
    """Reads and writes do what ``mode`` says: ``well``, ``fail``, ``raise``, ``slow``, ``hang`` (until it says
    something else). Look-ups do well."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.mode = "well"
        self.reads = self.look_ups = 0
        self.callers: set[threading.Thread] = set()
        """Threads whose calls came here."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._looked_up()
        return super().contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        self._looked_up()
        return super().count_leading(keys)

    def get(self, batch: PageBatch) -> list[GetResult]:
        self.reads += 1
        return [GetResult.ERROR] * len(batch) if self._trouble() else super().get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return [SetResult.ERROR] * len(batch) if self._trouble() else super().set(batch)

    def _looked_up(self) -> None:
        self.look_ups += 1
        self.callers.add(threading.current_thread())

    def _trouble(self) -> bool:
        self.callers.add(threading.current_thread())
        if self.mode == "raise":
            raise OSError("on purpose")
        if self.mode == "slow":
            time.sleep(0.05)
        while self.mode == "hang":
            time.sleep(0.01)
        return self.mode == "fail"


@contextmanager
def troubled_stores() -> Iterator[list[TroubledStore]]:
    """The tiers that are opened meanwhile, each with trouble around it; they are well again at the end."""
    from hicache_ext.storage.tiering import reload

    original, opened = reload.open_tier, []

    def open_tier(*arguments: Any, **named: Any) -> TroubledStore:
        opened.append(TroubledStore(original(*arguments, **named)))
        return opened[-1]

    with mock.patch.object(reload, "open_tier", open_tier):
        try:
            yield opened
        finally:
            for store in opened:
                store.mode = "well"

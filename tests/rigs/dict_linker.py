"""A linker that keeps pages in a dictionary of its process: it shows that the CPU rig's door to linkers can be trusted.

A restored layer lands at the last moment, only after the forward has begun to wait on it; until then its slots hold
NaN. A forward that reads a layer without waiting answers something else. As long as ``no-wait`` lies in the directory
``extra_config["directory"]``, waiting returns at once: a test sees so that it would notice.

``journal`` in the directory gets a JSON list for each event: its name, the batch, the layer.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

Buffers = dict[int, list[torch.Tensor]]
"""Of each layer of the model its tensors, rows of token slots."""


class DictLinker(UnifiedCacheLinker):
    """For one process: MHA pools, with and without a pool for sliding windows."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.directory = Path(extra_config["directory"])
        self._page_size = params.page_size
        kv_pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = device_buffers(kv_pool)
        self.layer_done_counter = LastMomentCounter(kv_pool.layer_num, self)
        self._pages: dict[tuple[PoolName, str], dict[int, list[torch.Tensor]]] = {}
        self._queued: dict[str, list[PoolTransfer]] = {}
        self._started: dict[int, list[PoolTransfer]] = {}
        self._offloaded: deque[bool] = deque()
        self._writes = threading.Lock()

    def note(self, *event: Any) -> None:
        with self._writes, (self.directory / "journal").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        keys = next(transfer.keys for transfer in transfers if transfer.name == PoolName.KV)
        windows = {transfer.name: len(transfer.keys) for transfer in transfers if transfer.name != PoolName.KV}
        restorable = []
        for count, key in enumerate(keys, 1):
            if (PoolName.KV, key) not in self._pages:
                break
            if all(
                (pool, in_window) in self._pages
                for pool, window in windows.items()
                for in_window in keys[max(0, count - window) : count]
            ):
                restorable.append(count)
        return restorable

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        self._queued[rid] = transfers
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        index = self.layer_done_counter.update_producer()
        self._started[index] = [transfer for transfers in self._queued.values() for transfer in transfers]
        self._queued.clear()
        for transfer in self._started[index]:
            for tensors in self.pools[transfer.name].values():
                for tensor in tensors:
                    tensor[transfer.device_indices] = float("nan")
        self.note("starts", index, None)
        return index

    def land(self, index: int, layer: int) -> None:
        """Copy one layer of a batch onto the device and complete it; nothing if that was done."""
        if self.layer_done_counter.futures[index][layer].done():
            return
        for transfer in self._started[index]:
            for page, key in enumerate(transfer.keys):
                slots = transfer.device_indices[page * self._page_size :][: self._page_size]
                stored = self._pages[transfer.name, key].get(layer, ())
                for tensor, rows in zip(self.pools[transfer.name].get(layer, ()), stored, strict=True):
                    tensor[slots] = rows
        self.note("lands", index, layer)
        self.layer_done_counter.complete(index, layer)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        for layer in range(self.layer_done_counter.num_layers):
            self.land(counter_index, layer)
        self.note("finishes", counter_index, None)
        del self._started[counter_index]
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        for event in self.record_offload_ready():
            event.synchronize()
        for transfer in transfers:
            for page, key in enumerate(transfer.keys):
                slots = transfer.device_indices[page * self._page_size :][: self._page_size]
                self._pages[transfer.name, key] = {
                    layer: [tensor[slots].clone() for tensor in tensors]
                    for layer, tensors in self.pools[transfer.name].items()
                }
        self._offloaded.append(True)
        return True

    def num_completed_offloads(self) -> int:
        return len(self._offloaded)

    def pop_completed_offload(self) -> bool:
        return self._offloaded.popleft()

    def reset(self) -> None:
        self._queued.clear()
        self._started.clear()
        self._offloaded.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()


class LastMomentCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """Lets a layer land only when it is waited for."""

    def __init__(self, layers: int, linker: DictLinker) -> None:
        super().__init__(layers)
        self._linker = linker

    def wait_until(self, threshold: int) -> None:
        index = self.consumer_index
        if index not in self.futures:
            return
        self._linker.note("waits", index, threshold)
        if (self._linker.directory / "no-wait").exists():
            return
        landing = threading.Thread(target=self._linker.land, args=(index, threshold))
        if not self.futures[index][threshold].done():
            landing.start()
        super().wait_until(threshold)


def device_buffers(kv_pool: Any) -> dict[PoolName, Buffers]:
    """The device tensors of the pools behind an MHA pool, or behind one that has a second for windows."""
    if not hasattr(kv_pool, "swa_kv_pool"):
        layers = {kv_pool.start_layer + index: index for index in range(len(kv_pool.k_buffer))}
        return {PoolName.KV: _by_layer(kv_pool, layers, kv_pool.start_layer)}
    found = {}
    for name, pool, in_window in (
        (PoolName.KV, kv_pool.full_kv_pool, False),
        (PoolName.SWA, kv_pool.swa_kv_pool, True),
    ):
        layers = {layer: index for layer, (index, windowed) in kv_pool.layers_mapping.items() if windowed is in_window}
        found[name] = _by_layer(pool, layers, kv_pool.start_layer)
    return found


def _by_layer(pool: Any, layers: dict[int, int], first: int) -> Buffers:
    return {layer - first: [pool.k_buffer[index], pool.v_buffer[index]] for layer, index in layers.items()}

"""SGLang's host pools of one model, made as its HiCache makes them, and what moves pages between them and the device.

So what is copied through them is byte for byte what HiCache stores, under the same identity. The linker's staging
memory (staging.py) and the host memory of a decode node (decode_manager.py) are such pools.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import CacheOperation
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _select_strategy, build_hicache_draft_sidecars
from sglang.srt.runtime_context import get_serving

from hicache_ext.errors import HicacheExtError, UnsupportedError
from hicache_ext.sglang.lifecycle import name_of


class ModelPools:
    """The pools of a model by component: the pool that a component names, and those that lie on its pages."""

    def __init__(self, params: Any, components: Iterable[Any], **storage: Any) -> None:
        """``params``: SGLang's CacheInitParams. ``storage``: what its controller is to know of a storage backend.

        Raises UnsupportedError for a model that HiCache does not serve either.
        """
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        try:
            built = _select_strategy(kvcache, set(components)).build(
                cache=SimpleNamespace(components=dict.fromkeys(components), page_size=params.page_size),
                kvcache=kvcache,
                params=params,
                server_args=None,
                load_cache_event=threading.Event(),
                model_name=get_serving().served_model_name,
                **storage,
            )
            if getattr(params, "sidecar_draft_device_pools", ()):
                # SGLang's tree adds these to what its strategies have built.
                specs, entries = build_hicache_draft_sidecars(
                    draft_device_pools=params.sidecar_draft_device_pools,
                    tree_cache=SimpleNamespace(cache_controller=built.cache_controller),
                )
                for entry in entries:
                    built.cache_controller.register_host_pool_entry(entry)
                built.sidecars += specs
        except HicacheExtError:
            raise
        except Exception as error:
            kind = type(kvcache).__name__
            raise UnsupportedError(f"the KV pool {kind}", f"SGLang makes no host pools for it ({error})") from error
        self.group = built.host_pool_group
        self.controller = built.cache_controller
        self.states_beside_the_pools = bool(built.register_req_to_token_counter)
        """Whether the pool of requests has layers to wait for, too (Mamba)."""
        self.host_pools = {name_of(name): entry.host_pool for name, entry in self.group.entry_map.items()}
        beside = {name_of(spec.pool_name): name_of(spec.indices_from_pool) for spec in built.sidecars}
        self.policies = {name_of(spec.pool_name): spec.hit_policy for spec in built.sidecars}
        self.pools_on = {
            source: [*[name for name, of in beside.items() if of == source and name in self.host_pools], source]
            for source in self.host_pools
            if source not in beside
        }
        """Component -> the pools that lie on its pages; its own comes last."""
        self.page_sizes = {source: int(self.host_pools[source].page_size) for source in self.pools_on}

    def operation(self, parts: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> Any:
        """What SGLang's controller moves: the pages of the anchor, and beside it those of the other pools.

        ``parts``: component, host indices, device indices.
        """
        host: dict[str, list[torch.Tensor]] = {}
        device: dict[str, list[torch.Tensor]] = {}
        for source, host_indices, device_indices in parts:
            for name in self.pools_on[source]:
                host.setdefault(name, []).append(host_indices)
                device.setdefault(name, []).append(device_indices)
        nothing = torch.empty(0, dtype=torch.int64)
        anchor = name_of(self.group.anchor_entry.name)
        on_device = nothing.to(self.controller.device)
        return CacheOperation(
            _joined(host.pop(anchor, [nothing])),
            _joined(device.pop(anchor, [on_device])),
            -1,  # nobody asks for it by number
            pool_transfers=[
                PoolTransfer(PoolName(name), host_indices=_joined(host[name]), device_indices=_joined(device[name]))
                for name in host
            ],
        )

    def alloc(self, source: str, pages: int) -> torch.Tensor | None:
        """Indices of so many pages of a component; None where there are not so many."""
        indices: torch.Tensor | None = self.group.alloc(pages * self.page_sizes[source], pool=PoolName(source))
        return indices

    def free(self, source: str, indices: torch.Tensor) -> None:
        self.group.free(indices, pool=PoolName(source))

    def free_pages(self, source: str) -> int:
        return int(self.host_pools[source].available_size()) // self.page_sizes[source]

    def used_tokens(self) -> int:
        """Of the anchor."""
        anchor = self.group.anchor_entry.host_pool
        return int(anchor.size - anchor.available_size())


def _joined(indices: list[torch.Tensor]) -> torch.Tensor:
    """Without a copy on the device where there is nothing to join."""
    return indices[0] if len(indices) == 1 else torch.cat(indices)

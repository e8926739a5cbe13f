"""SGLang's host pools of one model, made as its HiCache makes them, and what moves pages between them and the device.

So what is copied through them is byte for byte what HiCache stores, under the same identity. The linker's staging
memory (``Staging``) and the host memory of a decode node (decode_manager.py) are such pools.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from sglang.srt.managers.cache_controller import CacheOperation
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _select_strategy, build_hicache_draft_sidecars
from sglang.srt.runtime_context import get_serving

from hicache_ext.errors import HicacheExtError, UnsupportedError
from hicache_ext.sglang.backend import HiCacheExtBackend
from hicache_ext.sglang.lifecycle import name_of
from hicache_ext.sglang.served_pools import KV


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


# -- staging memory of the external linker (linker.py) -----------------------------------------------------------------

PORTION_PAGES = 128
"""Pages of a portion, at most: as many as SGLang gives its storage at once."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one component: ``page_size`` device indices for each key."""

    source: str
    keys: list[str]
    device_indices: torch.Tensor
    page_size: int

    def portions(self, pages: int) -> Iterator[Pages]:
        for begin in range(0, len(self.keys), pages):
            keys = self.keys[begin : begin + pages]
            tokens = self.device_indices[begin * self.page_size : (begin + len(keys)) * self.page_size]
            yield Pages(self.source, keys, tokens, self.page_size)


def pages_of(transfers: Sequence[Any], page_sizes: Mapping[str, int]) -> list[Pages]:
    """The pages of SGLang's transfers that have both keys and places on the device; KV last.

    KV last: where it is found, what lies beside it was written before. Raises UnsupportedError where the indices are
    not whole pages.
    """
    found = []
    for transfer in transfers:
        name, keys, indices = name_of(transfer.name), transfer.keys, transfer.device_indices
        if name not in page_sizes or not keys or indices is None:
            continue
        if indices.numel() != len(keys) * page_sizes[name]:
            given = f"{indices.numel()} indices for {len(keys)} pages of {page_sizes[name]}"
            raise UnsupportedError(f"a transfer of pool {name!r}", given)
        found.append(Pages(name, list(keys), indices, page_sizes[name]))
    return sorted(found, key=lambda pages: pages.source == KV)


Side = Literal["load", "offload"]

_LEAST_PAGES = 4
"""Pages of each pool, two for each direction."""


@dataclass(slots=True, eq=False)
class Portion:
    """Pages of one component in staging memory. ``release`` gives the memory back; again is free."""

    pages: Pages
    side: Side
    staging: Staging
    host_indices: torch.Tensor
    """Of ``pages``."""
    memory: torch.Tensor
    """All that was taken."""
    _held: bool = field(default=True)

    def release(self) -> None:
        staging, source = self.staging, self.pages.source
        with staging.changed:
            if self._held:
                self._held = False
                staging.free(source, self.memory)
                staging.used[self.side, source] -= self.memory.numel() // staging.page_sizes[source]
                staging.changed.notify_all()

    def read(self, reader: HiCacheExtBackend) -> bool:
        """Fill it with stored pages of all its pools; whether all of them are there. Where not, it is released."""
        for name in self.staging.pools_on[self.pages.source]:
            pool = reader.served.usable(name)
            if pool is None or not reader.read_whole(pool, self.pages.keys, self.host_indices):
                self.release()
                return False
        return True

    def give_places(self, wanted: Pages) -> None:
        """Keep those of its pages that are wanted, with their places on the device."""
        place = {key: number for number, key in enumerate(wanted.keys)}
        kept = [(number, place[key]) for number, key in enumerate(self.pages.keys) if key in place]
        size = wanted.page_size
        mine, theirs = self.host_indices.view(-1, size), wanted.device_indices.view(-1, size)
        keys = [wanted.keys[number] for _, number in kept]
        self.host_indices = mine[[number for number, _ in kept]].reshape(-1)
        self.pages = Pages(wanted.source, keys, theirs[[number for _, number in kept]].reshape(-1), size)


def release(portions: Sequence[Portion]) -> None:
    for portion in portions:
        portion.release()


class Staging(ModelPools):
    """The host memory through which a linker's pages pass between the device and the tiers.

    In the layout page_first, a small fraction of the size of HiCache's pools. Pages move between it and the device as
    HiCache moves them, through the copy engines or SGLang's own path. Each direction has half of it, so that a slow
    store that nobody reads from keeps no request from its pages. Threads: any; copies go one after the other.
    """

    def __init__(self, params: Any, components: set[Any], size: int) -> None:
        """``size`` in bytes, of all pools together. Raises UnsupportedError for a model that HiCache does not serve
        either, or where ``size`` is too small for it."""
        with _small_pools(params, size):
            super().__init__(params, components)
        self.layers: int = self.controller.transfer_layer_id_max
        self.changed = threading.Condition()
        """Around ``used``, and told when some of it is given back."""
        self._copying = threading.Lock()
        self.limits: dict[str, int] = {}
        """Component -> the pages that each direction has, at most."""
        self.used: dict[tuple[Side, str], int] = {}
        for source, page_size in self.page_sizes.items():
            pages = int(self.host_pools[source].available_size()) // page_size
            if pages < _LEAST_PAGES:
                least = f"pool {source!r} gets {pages} pages of it, and needs {_LEAST_PAGES}"
                raise UnsupportedError("this staging memory", least, "set hicache_ext.linker.staging to more")
            self.limits[source] = pages // 2
            self.used["load", source] = self.used["offload", source] = 0
        self._module = torch.get_device_module(self.controller.device)
        self._device = self._module.current_device()
        self._stream = self._module.Stream()

    # -- memory ----------------------------------------------------------------------------------------------------

    def portion_pages(self, source: str) -> int:
        """Pages that pass at once; two portions fit into each direction's half."""
        return max(1, min(PORTION_PAGES, self.limits[source] // 2))

    def take(self, side: Side, pages: Pages, seconds: float) -> Portion | None:
        """Memory for these pages, waiting for it; None where none becomes free."""
        count = len(pages.keys)
        with self.changed:
            place = (side, pages.source)
            if not self.changed.wait_for(lambda: self.used[place] + count <= self.limits[pages.source], seconds):
                return None
            indices = self.alloc(pages.source, count)
            if indices is None:
                return None
            self.used[place] += count
        return Portion(pages, side, self, indices, indices)

    def pages_in_use(self, side: Side) -> int:
        with self.changed:
            return sum(used for (of, _), used in self.used.items() if of == side)

    def destroy(self) -> None:
        """Give the memory back to the system; nothing may use it any more."""
        self.group.destroy()

    def enter_thread(self) -> None:
        """To be called by a thread before it waits for events or copies: its device is the first one otherwise."""
        self._module.set_device(self._device)

    # -- copies ----------------------------------------------------------------------------------------------------

    def gather(self, portion: Portion) -> None:
        """Copy from the device; returns when it is done. Raises what SGLang raises."""
        with self._submitting():
            operation = self._operation([portion])
            moved = self.controller._move_write_operation(operation)
            completion = self.controller.l2_transfer_engine.submit_device_to_host(self.controller._l2_transfers(*moved))
        completion.finish_event.synchronize()

    def scatter(self, portions: Sequence[Portion], layer_done: Callable[[int], None] | None = None) -> None:
        """Copy to the device, layer by layer; ``layer_done`` is told of each in turn, once it is there.

        Returns when all of it is done; also when it raises, nothing is written any more.
        """
        events: list[Any] = []

        def submitted(*_: Any, **__: Any) -> None:
            events.append(self._module.Event())
            events[-1].record()

        with self._submitting():
            moved = self.controller.move_hybrid_indices(self._operation(portions))
            completion = self.controller.l2_transfer_engine.submit_host_to_device(
                self.controller._l2_load_transfers(*moved),
                transfer_layer_id_max=self.layers,
                on_layer_done=submitted,
            )
        try:
            for layer, event in enumerate(events):
                event.synchronize()
                if layer_done is not None:
                    layer_done(layer)
        finally:
            completion.finish_event.synchronize()

    @contextmanager
    def _submitting(self) -> Iterator[None]:
        # SGLang's engine, and ours under it, are made for one thread.
        with self._copying, self._module.stream(self._stream):
            yield

    def _operation(self, portions: Sequence[Portion]) -> Any:
        return self.operation([(p.pages.source, p.host_indices, p.pages.device_indices) for p in portions])


@contextmanager
def _small_pools(params: Any, size: int) -> Iterator[None]:
    """In which SGLang makes host pools of ``size`` bytes together, where a linker can use them at all."""
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.runtime_context import get_memory, get_parallel

    if params.pp_size > 1:
        raise UnsupportedError("--pp-size", "the stages of a pipeline do not agree on what a linker loads", "use --tp")
    if get_parallel().attn_dcp_size > 1:
        raise UnsupportedError("--dcp-size", "a page is spread over ranks", "use --enable-hierarchical-cache")
    if params.sidecar_draft_device_pools:
        # SGLang adds these to its host pools in another place.
        reason = "it has pools of its own beside the target's"
        raise UnsupportedError("this draft model", reason, "use --enable-hierarchical-cache")
    for name in ("base", "mamba", "unified"):
        logging.getLogger(f"sglang.srt.mem_cache.pool_host.{name}").addFilter(_says_something_else)
    settings = {
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_host_memory_mode": "cache",
        "hicache_size": size / 1e9,
        "hicache_ratio": 1.0,
        "hicache_write_policy": "write_through",
    }
    # Twice: SGLang rounds each pool up by a page, and makes some as large as others.
    with get_memory().override(**settings), host_memory_budget_scope(2 * size + (1 << 30)):
        yield


def _says_something_else(record: logging.LogRecord) -> bool:
    """Whether it is not SGLang's warning that host pools are smaller than the device's: these are meant to be, and a
    server with a linker has no others."""
    return "smaller than the device pool" not in str(record.msg)

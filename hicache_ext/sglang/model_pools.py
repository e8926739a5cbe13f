"""SGLang's host pools of one model, built as its HiCache builds them, and the copies between them and the device.

Pages copied through them are therefore byte for byte those that HiCache stores, under the same identity. The linker's
staging memory (``Staging``) and the host memory of a decode node (decode_manager.py) are such pools.
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
    """The pools of a model by component: the component's own pool, and those that share its page indices."""

    def __init__(self, params: Any, components: Iterable[Any], **storage: Any) -> None:
        """``params`` is SGLang's CacheInitParams; ``storage`` describes the storage backend to its controller.

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
                # SGLang's tree, not its strategies, adds these pools.
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
        self.has_request_states = bool(built.register_req_to_token_counter)
        """Whether the pool of requests has layers to wait for, too (Mamba)."""
        self.host_pools = {name_of(name): entry.host_pool for name, entry in self.group.entry_map.items()}
        owners = {name_of(spec.pool_name): name_of(spec.indices_from_pool) for spec in built.sidecars}
        self.policies = {name_of(spec.pool_name): spec.hit_policy for spec in built.sidecars}
        self.pools_on = {
            source: [*[name for name, owner in owners.items() if owner == source and name in self.host_pools], source]
            for source in self.host_pools
            if source not in owners
        }
        """Component -> the pools that share its page indices; its own comes last."""
        self.page_sizes = {source: int(self.host_pools[source].page_size) for source in self.pools_on}

    def operation(self, parts: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> Any:
        """Return an operation for SGLang's controller: the pages of the anchor, with those of the other pools attached.

        ``parts`` yields component, host indices, device indices.
        """
        host: dict[str, list[torch.Tensor]] = {}
        device: dict[str, list[torch.Tensor]] = {}
        for source, host_indices, device_indices in parts:
            for name in self.pools_on[source]:
                host.setdefault(name, []).append(host_indices)
                device.setdefault(name, []).append(device_indices)
        empty = torch.empty(0, dtype=torch.int64)
        anchor = name_of(self.group.anchor_entry.name)
        device_empty = empty.to(self.controller.device)
        return CacheOperation(
            _join(host.pop(anchor, [empty])),
            _join(device.pop(anchor, [device_empty])),
            -1,  # the node id, which nobody uses
            pool_transfers=[
                PoolTransfer(PoolName(name), host_indices=_join(host[name]), device_indices=_join(device[name]))
                for name in host
            ],
        )

    def alloc(self, source: str, pages: int) -> torch.Tensor | None:
        """Allocate ``pages`` pages of a component; return their indices, or None if there are not enough."""
        indices: torch.Tensor | None = self.group.alloc(pages * self.page_sizes[source], pool=PoolName(source))
        return indices

    def free(self, source: str, indices: torch.Tensor) -> None:
        self.group.free(indices, pool=PoolName(source))

    def free_pages(self, source: str) -> int:
        return int(self.host_pools[source].available_size()) // self.page_sizes[source]

    def used_tokens(self) -> int:
        """Return the tokens in use in the anchor pool."""
        anchor = self.group.anchor_entry.host_pool
        return int(anchor.size - anchor.available_size())


def _join(indices: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate ``indices``; a single tensor is returned without a copy on the device."""
    return indices[0] if len(indices) == 1 else torch.cat(indices)


# -- staging memory of the external linker (linker.py) -----------------------------------------------------------------

PORTION_PAGES = 128
"""Most pages of a portion: as many as SGLang passes to its storage in one call."""


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
    """Return the pages of SGLang's transfers that have both keys and device indices.

    KV comes last: whoever finds it can rely on the other pools having been written. Raises UnsupportedError if the
    indices are not whole pages.
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

_MIN_PAGES = 4
"""Fewest pages of each pool: two for each direction."""


@dataclass(slots=True, eq=False)
class Portion:
    """Pages of one component in staging memory. ``release`` returns the memory; it is idempotent."""

    pages: Pages
    side: Side
    staging: Staging
    host_indices: torch.Tensor
    """Host indices of ``pages``."""
    memory: torch.Tensor
    """Host indices of all the memory that was taken."""
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
        """Read its pages from the store, for all its pools; return whether all were found. If not, release it."""
        for name in self.staging.pools_on[self.pages.source]:
            pool = reader.served.usable(name)
            if pool is None or not reader.read_whole(pool, self.pages.keys, self.host_indices):
                self.release()
                return False
        return True

    def assign_slots(self, wanted: Pages) -> None:
        """Keep only the wanted ones of its pages, with the device indices from ``wanted``."""
        position = {key: number for number, key in enumerate(wanted.keys)}
        kept = [(number, position[key]) for number, key in enumerate(self.pages.keys) if key in position]
        size = wanted.page_size
        host, device = self.host_indices.view(-1, size), wanted.device_indices.view(-1, size)
        keys = [wanted.keys[number] for _, number in kept]
        self.host_indices = host[[number for number, _ in kept]].reshape(-1)
        self.pages = Pages(wanted.source, keys, device[[number for _, number in kept]].reshape(-1), size)


def release(portions: Sequence[Portion]) -> None:
    for portion in portions:
        portion.release()


class Staging(ModelPools):
    """The host memory through which a linker's pages pass between the device and the tiers.

    Its layout is page_first, its size a small fraction of HiCache's pools. Pages move between it and the device as
    HiCache moves them, through the copy engines or SGLang's own path. Each direction has half of it, so that offloads
    to a slow store never keep a request from loading its pages. Thread-safe; copies are serialised.
    """

    def __init__(self, params: Any, components: set[Any], size: int) -> None:
        """``size`` is the total of all pools in bytes. Raises UnsupportedError for a model that HiCache does not serve
        either, or if ``size`` is too small for it."""
        with _small_pools(params, size):
            super().__init__(params, components)
        self.layers: int = self.controller.transfer_layer_id_max
        self.changed = threading.Condition()
        """Guards ``used``; notified when memory is returned."""
        self._copying = threading.Lock()
        self.limits: dict[str, int] = {}
        """Component -> most pages that each direction may hold."""
        self.used: dict[tuple[Side, str], int] = {}
        for source, page_size in self.page_sizes.items():
            pages = int(self.host_pools[source].available_size()) // page_size
            if pages < _MIN_PAGES:
                least = f"pool {source!r} gets {pages} pages of it, and needs {_MIN_PAGES}"
                raise UnsupportedError("this staging memory", least, "set hicache_ext.linker.staging to more")
            self.limits[source] = pages // 2
            self.used["load", source] = self.used["offload", source] = 0
        self._module = torch.get_device_module(self.controller.device)
        self._device = self._module.current_device()
        self._stream = self._module.Stream()

    # -- memory ----------------------------------------------------------------------------------------------------

    def portion_pages(self, source: str) -> int:
        """Return the pages per portion; two portions fit into each direction's half."""
        return max(1, min(PORTION_PAGES, self.limits[source] // 2))

    def take(self, side: Side, pages: Pages, seconds: float) -> Portion | None:
        """Take memory for these pages, waiting up to ``seconds``; None if none becomes free."""
        count = len(pages.keys)
        with self.changed:
            usage = (side, pages.source)
            if not self.changed.wait_for(lambda: self.used[usage] + count <= self.limits[pages.source], seconds):
                return None
            indices = self.alloc(pages.source, count)
            if indices is None:
                return None
            self.used[usage] += count
        return Portion(pages, side, self, indices, indices)

    def pages_in_use(self, side: Side) -> int:
        with self.changed:
            return sum(used for (used_by, _), used in self.used.items() if used_by == side)

    def destroy(self) -> None:
        """Return the memory to the system; nothing may use it afterwards."""
        self.group.destroy()

    def enter_thread(self) -> None:
        """Select the device. Each thread must call this before it waits for events or copies, or it uses device 0."""
        self._module.set_device(self._device)

    # -- copies ----------------------------------------------------------------------------------------------------

    def gather(self, portion: Portion) -> None:
        """Copy from the device; return when the copy is done. Raises what SGLang raises."""
        with self._submitting():
            operation = self._operation([portion])
            moved = self.controller._move_write_operation(operation)
            completion = self.controller.l2_transfer_engine.submit_device_to_host(self.controller._l2_transfers(*moved))
        completion.finish_event.synchronize()

    def scatter(self, portions: Sequence[Portion], layer_done: Callable[[int], None] | None = None) -> None:
        """Copy to the device, layer by layer; call ``layer_done`` with each layer in order, once it has arrived.

        Returns when all copies are done; even if it raises, no copy is still in flight.
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
        # SGLang's engine, and ours under it, allow one thread at a time.
        with self._copying, self._module.stream(self._stream):
            yield

    def _operation(self, portions: Sequence[Portion]) -> Any:
        return self.operation([(p.pages.source, p.host_indices, p.pages.device_indices) for p in portions])


@contextmanager
def _small_pools(params: Any, size: int) -> Iterator[None]:
    """Make SGLang build host pools of ``size`` bytes in total. Raises UnsupportedError if a linker can't use them."""
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.runtime_context import get_memory, get_parallel

    if params.pp_size > 1:
        raise UnsupportedError("--pp-size", "the stages of a pipeline do not agree on what a linker loads", "use --tp")
    if get_parallel().attn_dcp_size > 1:
        raise UnsupportedError("--dcp-size", "a page is spread over ranks", "use --enable-hierarchical-cache")
    if params.sidecar_draft_device_pools:
        # SGLang adds these pools to its host pools elsewhere.
        reason = "it has pools of its own beside the target's"
        raise UnsupportedError("this draft model", reason, "use --enable-hierarchical-cache")
    for name in ("base", "mamba", "unified"):
        logging.getLogger(f"sglang.srt.mem_cache.pool_host.{name}").addFilter(_is_no_size_warning)
    settings = {
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_host_memory_mode": "cache",
        "hicache_size": size / 1e9,
        "hicache_ratio": 1.0,
        "hicache_write_policy": "write_through",
    }
    # Allow twice the size: SGLang rounds each pool up by a page, and makes some as large as others.
    with get_memory().override(**settings), host_memory_budget_scope(2 * size + (1 << 30)):
        yield


def _is_no_size_warning(record: logging.LogRecord) -> bool:
    """Return False for SGLang's warning that host pools are smaller than the device's: these are meant to be, and a
    server with a linker has no others."""
    return "smaller than the device pool" not in str(record.msg)

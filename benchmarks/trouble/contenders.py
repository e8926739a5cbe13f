"""The contenders: storage backends as their users open them, each driven through its own public interface.

A contender is opened in a process of its own (clients.py) over a ``Place`` with the ``Facts`` of a server. Pages are
``PAGE_BYTES`` random bytes under SGLang's page hashes (64 hexadecimal digits). Nothing here mends what a contender
does: what it raises goes to the caller, what it serves is compared by the row.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 64, 2, 4, 32
PAGE_BYTES = 2 * LAYERS * PAGE_SIZE * HEADS * HEAD_DIM * 2
"""64 KiB: keys and values, two bytes each."""
POOL_PAGES = 64
MODEL_NAME = "tiny"


@dataclass(frozen=True, slots=True)
class Place:
    """Where pages lie: a directory, or the address of a server; ``capacity`` in bytes where the contender takes one."""

    directory: str
    address: str = ""
    capacity: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server knows of its model; ``weights`` None: rows that are not about models leave it out."""

    weights: str | None = None
    tp_rank: int = 0
    tp_size: int = 1
    dtype: str = "bfloat16"
    adapter: str | None = None


@dataclass(slots=True)
class Contender:
    """One backend, open. Methods raise what the backend raises."""

    place: Place
    facts: Facts
    opened: dict[str, Any] = field(default_factory=dict)

    name: ClassVar[str]
    medium: ClassVar[str]
    """``directory``, ``redis``, ``mooncake`` or ``s3``."""
    bounded: ClassVar[bool] = True
    """Whether it takes a limit in bytes."""
    clears: ClassVar[bool] = True
    open_keys: ClassVar[bool] = True
    """Whether a caller may give any text as a key."""

    @classmethod
    def load(cls) -> None:
        """Import what it needs. Raises ImportError with what this machine lacks."""

    def open(self) -> None:
        raise NotImplementedError

    def write(self, keys: Sequence[str], pages: Sequence[bytes]) -> list[bool]:
        raise NotImplementedError

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        raise NotImplementedError

    def clear(self, keys: Sequence[str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def page_keys(self, count: int, prompt: int) -> list[str]:
        """The keys of the pages of one prompt, of the adapter of ``facts``, as this engine's server makes them."""
        raise NotImplementedError


class OfSglang(Contender):
    """A ``HiCacheStorage`` over a real host pool, called as SGLang's controller calls it: ask, then move a batch."""

    layout: ClassVar[str] = "page_first"

    @classmethod
    def load(cls) -> None:
        from hicache_ext.testing.sglang_cpu import prepare_process

        prepare_process()
        import sglang.srt.mem_cache.hicache_storage
        import sglang.srt.mem_cache.pool_host.mha  # noqa: F401

    def backend(self, config: Any) -> Any:
        raise NotImplementedError

    def extra_config(self) -> dict[str, Any]:
        return {}

    def open(self) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import PoolName

        from hicache_ext.sglang.releases import end_registration
        from hicache_ext.testing.host_pools import make_storage_config, mha_pools

        config = make_storage_config(
            model_name=MODEL_NAME,
            tp_rank=self.facts.tp_rank,
            tp_size=self.facts.tp_size,
            extra_config=self.extra_config(),
        )
        shape = {"layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "pages": POOL_PAGES}
        pool = mha_pools(layout=self.layout, dtype=getattr(torch, self.facts.dtype), **shape).host
        backend = self.backend(config)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        end_registration(backend)
        self.opened = {"pool": pool, "backend": backend}

    def write(self, keys: Sequence[str], pages: Sequence[bytes]) -> list[bool]:
        import torch

        pool = self.opened["pool"]
        for number, page in enumerate(pages):
            flat = torch.frombuffer(bytearray(page), dtype=torch.uint8).view(pool.dtype)
            pool.set_from_flat_data_page(number * PAGE_SIZE, flat)
        return self._moved("set", keys)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        import torch

        pool, backend = self.opened["pool"], self.opened["backend"]
        pool.kv_buffer.view(torch.uint8).zero_()
        known = [key for key in keys if backend.batch_exists([key]) == 1]
        moved = dict(zip(known, self._moved("get", known) if known else [], strict=True))
        places = {key: number * PAGE_SIZE for number, key in enumerate(known)}
        return [_bytes_of(pool.get_data_page(places[key])) if moved.get(key) else None for key in keys]

    def _moved(self, call: str, keys: Sequence[str]) -> list[bool]:
        from hicache_ext.testing.host_pools import page_indices

        move = getattr(self.opened["backend"], f"batch_{call}_v1")
        return [bool(went) for went in move(list(keys), page_indices(PAGE_SIZE, list(range(len(keys)))))]

    def clear(self, keys: Sequence[str]) -> None:
        """Everything, whatever the keys."""
        self.opened["backend"].clear()

    def close(self) -> None:
        if hasattr(self.opened["backend"], "close"):
            self.opened["backend"].close()

    def page_keys(self, count: int, prompt: int) -> list[str]:
        from hicache_ext.page.hashes import namespace_seed, page_hashes

        tokens = range(prompt * 10_000, prompt * 10_000 + count * PAGE_SIZE)
        return [one.hex() for one in page_hashes(tokens, PAGE_SIZE, namespace_seed(self.adapter_key(), None))]

    def adapter_key(self) -> str | None:
        """SGLang's name of an adapter of ``--lora-paths``, which it hashes with the tokens: of its name and path."""
        from sglang.srt.lora.lora_registry import LoRARef

        return self.facts.adapter and LoRARef.deterministic_id("adapter", self.facts.adapter)


class SglangFile(OfSglang):
    name, medium = "SGLang file", "directory"

    def extra_config(self) -> dict[str, Any]:
        return {"max_size": self.place.capacity}

    def backend(self, config: Any) -> Any:
        from hicache_ext.testing.host_pools import sglang_file_backend

        return sglang_file_backend(config, Path(self.place.directory))

    def _moved(self, call: str, keys: Sequence[str]) -> list[bool]:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        from hicache_ext.testing.host_pools import page_indices

        indices = page_indices(PAGE_SIZE, list(range(len(keys))))
        transfer = PoolTransfer(name=PoolName.KV, host_indices=indices, keys=list(keys))
        moved = getattr(self.opened["backend"], f"batch_{call}_v2")([transfer])[PoolName.KV]
        return [bool(went) for went in moved]


class SglangNixl(OfSglang):
    """With buffered files, and without its cleaner, which empties a disk that others have filled to 80 %."""

    name, medium = "SGLang nixl (POSIX)", "directory"
    bounded = clears = False

    @classmethod
    def load(cls) -> None:
        super().load()
        import sglang.srt.mem_cache.storage.nixl.hicache_nixl  # noqa: F401

    def extra_config(self) -> dict[str, Any]:
        return {"plugin": {"posix": {"active": True}}, "use_direct_io": False, "l3_cleaner_enabled": False}

    def backend(self, config: Any) -> Any:
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        return HiCacheNixl(config, self.place.directory)


class SglangMooncake(OfSglang):
    name, medium = "SGLang mooncake", "mooncake"

    @classmethod
    def load(cls) -> None:
        super().load()
        os.environ.setdefault("MC_LOG_LEVEL", "FATAL")
        import sglang.srt.mem_cache.storage.mooncake_store.mooncake_store  # noqa: F401

    def extra_config(self) -> dict[str, Any]:
        return {
            "master_server_address": self.place.address,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "global_segment_size": 0,
        }

    def backend(self, config: Any) -> Any:
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

        return MooncakeStore(config)


class Ours(OfSglang):
    """This package, guards and all else as they are by default."""

    tier: ClassVar[Callable[[Place], dict[str, Any]]]

    def extra_config(self) -> dict[str, Any]:
        return {
            "backend_name": "hicache_ext",
            "module_path": "hicache_ext.storage.backend",
            "class_name": "HiCacheExtBackend",
            "interface_v1": 1,
            "hicache_ext": {"tiers": {"tier": type(self).tier(self.place)}},
        }

    def backend(self, config: Any) -> Any:
        from hicache_ext.sglang import lifecycle
        from hicache_ext.sglang.backend import HiCacheExtBackend
        from hicache_ext.sglang.launch_arguments import LaunchFacts

        # What it reads from the arguments of a running server.
        facts = LaunchFacts(model_path=self.facts.weights, kv_cache_dtype=self.facts.dtype)
        setattr(lifecycle, "read_launch_facts", lambda: facts if self.facts.weights else LaunchFacts())  # noqa: B010
        return HiCacheExtBackend(config, {})

    def open(self) -> None:
        super().open()
        # Until all weights are read, and a pool is reached, nothing is stored or served.
        deadline = time.monotonic() + 30
        while not self.write(["probe"], [bytes(PAGE_BYTES)])[0] and time.monotonic() < deadline:
            time.sleep(0.05)

    def adapter_key(self) -> str | None:
        """The digest of what the adapter's files hold; what the plug-in puts in the place of SGLang's name."""
        from types import SimpleNamespace

        from safetensors.torch import load_file

        from hicache_ext.page.hashes import namespaced_extra_key
        from hicache_ext.sglang.model_weights import adapter_digest

        if self.facts.adapter is None:
            return None
        adapter = SimpleNamespace(
            config=SimpleNamespace(hf_config={}, added_tokens_config=None),
            layers=[SimpleNamespace(weights=load_file(Path(self.facts.adapter) / "adapter_model.safetensors"))],
            embedding_layers={},
            added_tokens_embeddings={},
        )
        return namespaced_extra_key(None, adapter_digest(adapter, ()))


def _file_tier(place: Place, layout: str) -> dict[str, Any]:
    return {"type": "file", "path": place.directory, "capacity": place.capacity, "layout": layout, "io": "buffered"}


class OursSlab(Ours):
    name, medium = "ours, slabs", "directory"
    tier = staticmethod(lambda place: _file_tier(place, "slab"))


class OursPacks(Ours):
    name, medium = "ours, page files", "directory"
    tier = staticmethod(lambda place: _file_tier(place, "pages"))


class OursRedis(Ours):
    name, medium = "ours, Redis", "redis"
    bounded = False
    tier = staticmethod(lambda place: {"type": "redis", "url": f"redis://{place.address}"})


class OursMooncake(Ours):
    name, medium = "ours, Mooncake", "mooncake"
    bounded = False
    tier = staticmethod(
        lambda place: {
            "type": "mooncake",
            "master": place.address,
            "protocol": "tcp",
            "local_hostname": "127.0.0.1",
        }
    )

    @classmethod
    def load(cls) -> None:
        super().load()
        os.environ.setdefault("MC_LOG_LEVEL", "FATAL")
        import mooncake.store  # noqa: F401


class OursObject(Ours):
    name, medium = "ours, S3", "s3"
    bounded = False
    tier = staticmethod(
        lambda place: {
            "type": "object",
            "url": "s3://hicache/trouble",
            "endpoint": f"http://{place.address}",
            "allow_http": True,
            "access_key": {"env": "HICACHE_TEST_S3_KEY"},
            "secret_key": {"env": "HICACHE_TEST_S3_KEY"},
        }
    )


class OfLmcache(Contender):
    """An L2 adapter of LMCache's storage manager: tasks are submitted and asked for, as its controllers do."""

    bounded = open_keys = False

    @classmethod
    def load(cls) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        import lmcache.v1.distributed.l2_adapters.fs_l2_adapter
        import lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter
        import lmcache.v1.distributed.l2_adapters.resp_l2_adapter
        import lmcache.v1.memory_management  # noqa: F401

    def config(self) -> Any:
        raise NotImplementedError

    def open(self) -> None:
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

        self.opened = {"adapter": create_l2_adapter_from_registry(self.config())}

    def _keys(self, keys: Sequence[str]) -> list[Any]:
        from lmcache.v1.distributed.api import ObjectKey

        size, rank = self.facts.tp_size, self.facts.tp_rank
        kv_rank = ObjectKey.ComputeKVRank(size, rank, size, rank)
        return [ObjectKey(bytes.fromhex(key), MODEL_NAME, kv_rank) for key in keys]

    def write(self, keys: Sequence[str], pages: Sequence[bytes]) -> list[bool]:
        adapter = self.opened["adapter"]
        # The caller's until the task is done.
        memory = [_memory(page) for page in pages]
        task = adapter.submit_store_task(self._keys(keys), memory)
        results: dict[Any, Any] = {}

        def stored() -> Any:
            results.update(adapter.pop_completed_store_tasks())
            return results.get(task)

        return [_awaited(stored).is_successful()] * len(memory)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        adapter, asked = self.opened["adapter"], self._keys(keys)
        task = adapter.submit_lookup_and_lock_task(asked, {})
        found = _awaited(lambda: adapter.query_lookup_and_lock_result(task))
        known = [number for number in range(len(keys)) if found.test(number)]
        pages: list[bytes | None] = [None] * len(keys)
        if known:
            wanted, memory = [asked[number] for number in known], [_memory(bytes(PAGE_BYTES)) for _ in known]
            load = adapter.submit_load_task(wanted, memory)
            loaded = _awaited(lambda: adapter.query_load_result(load))
            adapter.submit_unlock(wanted)
            for place, number in enumerate(known):
                if loaded.test(place):
                    pages[number] = bytes(memory[place].byte_array)
        return pages

    def clear(self, keys: Sequence[str]) -> None:
        """It removes named keys; what it holds is known to its controller."""
        self.opened["adapter"].delete(self._keys(keys))

    def close(self) -> None:
        self.opened["adapter"].close()

    def page_keys(self, count: int, prompt: int) -> list[str]:
        """Its hash of tokens, which the engine above it computes, stands for itself here."""
        return [hashlib.sha256(b"%d %d" % (prompt, number)).hexdigest() for number in range(count)]


class LmcacheFs(OfLmcache):
    name, medium = "LMCache fs", "directory"

    def config(self) -> Any:
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig

        return FSL2AdapterConfig.from_dict({"base_path": self.place.directory})


class LmcacheRedis(OfLmcache):
    name, medium = "LMCache Redis", "redis"

    def config(self) -> Any:
        from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig

        host, _, port = self.place.address.partition(":")
        return RESPL2AdapterConfig.from_dict({"host": host, "port": int(port)})


CONTENDERS: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        *(SglangFile, SglangNixl, LmcacheFs, OursSlab, OursPacks),
        *(SglangMooncake, OursMooncake, LmcacheRedis, OursRedis, OursObject),
    )
}


def _awaited(ask: Callable[[], Any]) -> Any:
    """Its callers wait for an event without a limit; the row has one."""
    while (answer := ask()) is None:
        time.sleep(0.001)
    return answer


def _memory(page: bytes) -> Any:
    import torch
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    flat = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    return TensorMemoryObj(flat, MemoryObjMetadata(flat.shape, torch.uint8, 0, PAGE_BYTES, 1), None)


def _bytes_of(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

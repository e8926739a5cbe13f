"""The contenders of the file benchmark: ours per layout, SGLang's own, plain aiofiles, NIXL, and the raw limit.

All of them move the same pages between one real SGLang host pool and a directory. Each is driven as SGLang's controller
would drive it, from page hashes in hex and token indices, so that no contender's conversions stay out of the figures.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.bench.file_report import HICACHE_FILE
from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import BenchmarkError, ConfigError, HicacheExtError
from hicache_ext.page.envelope import payload_checksum
from hicache_ext.runtime import vectored
from hicache_ext.storage.contract.registry import open_tier

if TYPE_CHECKING:
    import torch

PAGE_SIZE = 16
"""Tokens per page."""
LAYER_BYTES = 16 * 1024
"""Bytes of a page in one layer, K and V together: payloads are multiples of it."""
GEOMETRIES = ("mha", "mla")
RAW_THREADS = (1, 2, 4)

_STAMP = 8
_LARGEST_RUN = 1 << 20
"""Bytes the raw limit moves by one call at most."""


# -- host memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Pages of the host pool that one call takes: their numbers, and the token indices SGLang would pass."""

    pages: range
    indices: torch.Tensor


class HostBuffers:
    """One SGLang host pool, half of it pages to write (noise), half of it pages to read into.

    ``stamp`` makes the pages to write those of a numbered batch, ``check`` compares the pages read with them.
    """

    def __init__(self, geometry: str, payload: int, batch: int) -> None:
        import torch

        from hicache_ext.sglang.host_pool import HostPages
        from hicache_ext.testing.host_pools import mha_pools, mla_pools, page_indices

        layers, small = divmod(payload, LAYER_BYTES)
        if small:
            layers = 1
        width = payload // layers // (2 * PAGE_SIZE)  # elements of two bytes per token and layer
        if payload != width * layers * 2 * PAGE_SIZE or width % 16:
            raise BenchmarkError(f"a page of {payload} bytes cannot be made: take a multiple of {LAYER_BYTES}")
        if geometry == "mha":
            pools = mha_pools(page_size=PAGE_SIZE, pages=2 * batch, layers=layers, heads=2, head_dim=width // 4)
        else:
            rope = width // 8
            pools = mla_pools(
                page_size=PAGE_SIZE,
                pages=2 * batch,
                layers=layers,
                kv_lora_rank=width - rope,
                qk_rope_head_dim=rope,
            )
        self.pool: Any = pools.host
        self.geometry = geometry
        self.payload = payload
        self.batch = batch
        self.pages = HostPages(pools.host, "bench")
        if self.pages.page_bytes != payload:
            raise BenchmarkError(f"the host pool's pages have {self.pages.page_bytes} bytes, not {payload}")
        flat: npt.NDArray[np.uint8] = pools.host.kv_buffer.view(torch.uint8).numpy()
        segments = len(self.pages.segment_sizes)
        self._bytes = flat.reshape(segments, -1, payload // segments)
        self.sources, self.targets = (
            HostBatch(pages, page_indices(PAGE_SIZE, list(pages))) for pages in (range(batch), range(batch, 2 * batch))
        )

    def stamp(self, number: int) -> None:
        """Make the pages to write those of batch ``number``: their first bytes say which page it is."""
        self._bytes[:, : self.batch, :_STAMP] = self._stamps(number)

    def wipe(self) -> None:
        """Forget what was read."""
        self._bytes[:, self.batch : 2 * self.batch] = 0

    def check(self, number: int, contender: str) -> None:
        """Raise BenchmarkError unless the pages read are, byte for byte, those of batch ``number``."""
        self.stamp(number)
        for page in range(self.batch):
            self._compare(page, number, contender)

    def check_page(self, page: int, number: int, contender: str) -> None:
        """``check`` for one page of the batch."""
        self.stamp(number)
        self._compare(page, number, contender)

    def _compare(self, page: int, number: int, contender: str) -> None:
        for segment in self._bytes:
            if not np.array_equal(segment[self.batch + page], segment[page]):
                raise BenchmarkError(f"{contender}: page {page} of batch {number} came back with other bytes")

    def first_sources(self, count: int) -> HostBatch:
        """The first ``count`` pages to write."""
        return HostBatch(self.sources.pages[:count], self.sources.indices[: count * PAGE_SIZE])

    def target(self, position: int) -> HostBatch:
        """One page to read into."""
        begin = position * PAGE_SIZE
        return HostBatch(self.targets.pages[position : position + 1], self.targets.indices[begin : begin + PAGE_SIZE])

    def _stamps(self, number: int) -> npt.NDArray[np.uint8]:
        segments = len(self._bytes)
        first = number * self.batch * segments
        return np.arange(first, first + self.batch * segments, dtype=np.uint64).view(np.uint8).reshape(segments, -1, 8)


def page_keys(name: str, count: int) -> list[str]:
    """``count`` keys as SGLang makes them: a chain of SHA-256, in hex."""
    keys: list[str] = []
    previous = name.encode()
    for _ in range(count):
        previous = hashlib.sha256(previous).digest()
        keys.append(previous.hex())
    return keys


# -- what a contender is -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workplace:
    """What a contender is opened with."""

    directory: Path
    """Fresh and empty."""
    host: HostBuffers
    capacity: int
    """Bytes it may occupy."""
    pages: int
    """Pages it must hold at the same time (the raw limit preallocates exactly these)."""
    threads: int


class FileContender(Protocol):
    """One opened contender. Reads and writes may run at the same time, from one thread each."""

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        """Store host pages under keys; how many pages of them the contender says it has now."""

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        """Fetch keys into host pages; the leading pages SGLang could use."""

    def count_leading(self, keys: Sequence[str]) -> int:
        """What ``batch_exists`` answers."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the tables: its name, how to open it, what it cannot do and why."""

    name: str
    open: Callable[[Workplace], FileContender]
    missing: str | None = None
    """Why it cannot take part at all."""
    cannot: dict[str, str] = field(default_factory=dict)
    """Modes that it cannot do, with the reason."""
    raw: bool = False
    """One of the attempts whose best is the raw limit."""


_NO_EVICTION = {"overwrite": "it has no eviction"}
_NO_LOOKUP = {"exists": "it has no index"}

LAYOUTS: dict[str, tuple[str, str]] = {
    "pages": ("pages", "auto"),
    "slab": ("slab", "auto"),
    "slab-direct": ("slab", "direct"),
}
"""Ours: name -> (layout, io) of the file tier's configuration."""


def all_contenders(directory: Path) -> list[Contender]:
    """Every contender, those that cannot take part with the reason. ``directory`` is for trying them out."""
    contenders = [
        Contender(f"hicache_ext {name}", _opener_of_layout(name), missing=_missing_layout(name, directory / name))
        for name in LAYOUTS
    ]
    contenders.append(Contender(HICACHE_FILE, HiCacheFileContender))
    contenders.append(
        Contender(
            "aiofiles",
            AiofilesContender,
            missing=None if importlib.util.find_spec("aiofiles") else "not installed: aiofiles",
            cannot={**_NO_EVICTION, **_NO_LOOKUP},
        )
    )
    contenders.append(
        Contender(
            "NIXL POSIX",
            NixlContender,
            missing=_missing_nixl(directory / "nixl"),
            cannot={"overwrite": "SGLang evicts its files by how full the disk is"},
        )
    )
    contenders += [
        Contender(
            f"raw, {threads} thread{'s' if threads > 1 else ''}", _opener_of_raw(threads), cannot=_NO_LOOKUP, raw=True
        )
        for threads in RAW_THREADS
    ]
    contenders += [
        Contender("raw and checksum, 2 threads", _opener_of_raw(2, checksums=True), cannot=_NO_LOOKUP),
        Contender("raw, O_DIRECT, 4 threads", _opener_of_raw(4, direct=True), cannot=_NO_LOOKUP),
    ]
    return contenders


# -- ours --------------------------------------------------------------------------------------------------------------


class OurContender:
    """The backend of this package over a file tier: the whole path, from SGLang's keys and indices on."""

    def __init__(self, place: Workplace, layout: str, io: str) -> None:
        from hicache_ext.sglang.backend import HiCacheExtBackend
        from hicache_ext.storage.tiers.file.slab.compiled_code import wait_for_compiled_code

        wait_for_compiled_code()
        tier = _tier(place.directory, place.capacity, place.threads, layout, io)
        section = {"tiers": {"bench": tier}, "model": {"id": "bench", "fingerprint": "off"}}
        self._backend = HiCacheExtBackend(_storage_config(place.host.geometry, ExtraConfig.around(section)), {})
        self._backend.register_mem_pool_host(place.host.pool)

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        return sum(self._backend.batch_set_v1(list(keys), batch.indices))

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        return _leading(self._backend.batch_get_v1(list(keys), batch.indices))

    def count_leading(self, keys: Sequence[str]) -> int:
        return int(self._backend.batch_exists(list(keys)))

    def close(self) -> None:
        self._backend.close()


def _opener_of_layout(name: str) -> Callable[[Workplace], FileContender]:
    layout, io = LAYOUTS[name]
    return lambda place: OurContender(place, layout, io)


def _tier(directory: Path, capacity: int, threads: int, layout: str, io: str) -> dict[str, Any]:
    """The configuration of a file tier."""
    return {
        "type": "file",
        "path": str(directory),
        "capacity": capacity,
        "threads": threads,
        "layout": layout,
        "io": io,
    }


def _missing_layout(name: str, directory: Path) -> str | None:
    document = ExtraConfig.around({"tiers": {"bench": _tier(directory, 64 << 20, 1, *LAYOUTS[name])}})
    try:
        open_tier("bench", load_config(document).tiers["bench"]).close()
    except ConfigError as error:
        return f"not in this version: {error}"
    except (HicacheExtError, ImportError) as error:
        return str(error)
    return None


# -- SGLang's ----------------------------------------------------------------------------------------------------------


class HiCacheFileContender:
    """SGLang's HiCacheFile, driven as ``_generic_page_get`` and ``_generic_page_set`` of its controller do."""

    def __init__(self, place: Workplace) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        _forget_environment("SGLANG_HICACHE_FILE_BACKEND_")
        self._pool = place.host.pool
        self._backend = HiCacheFile(
            _storage_config(place.host.geometry, {"max_size": place.capacity}), str(place.directory)
        )

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        data = [self._pool.get_data_page(batch.indices[i * PAGE_SIZE]) for i in range(len(keys))]
        return len(keys) if self._backend.batch_set(list(keys), data) else 0

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        targets = [self._pool.get_dummy_flat_data_page() for _ in keys]
        found = self._backend.batch_get(list(keys), targets)
        for position, data in enumerate(found):
            if data is None:
                return position
            self._pool.set_from_flat_data_page(batch.indices[position * PAGE_SIZE], data)
        return len(keys)

    def count_leading(self, keys: Sequence[str]) -> int:
        return int(self._backend.batch_exists(list(keys)))

    def close(self) -> None:
        pass


def _storage_config(geometry: str, extra_config: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=geometry == "mla",
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config=extra_config,
    )


def _forget_environment(prefix: str) -> None:
    """A setting of the caller's shell must not send a contender to another directory."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]


# -- aiofiles ----------------------------------------------------------------------------------------------------------


class AiofilesContender:
    """A file per page through aiofiles, the pages of a batch at once; no envelope, no atomic publication."""

    def __init__(self, place: Workplace) -> None:
        # Not an import statement: the type checker must accept it with and without the package.
        self._open: Any = importlib.import_module("aiofiles").open
        self._directory = place.directory
        self._pages = place.host.pages
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(place.threads))
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-aiofiles", daemon=True)
        self._thread.start()

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        return self._run([self._write_page(key, page) for key, page in zip(keys, batch.pages, strict=False)])

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        return self._run([self._read_page(key, page) for key, page in zip(keys, batch.pages, strict=False)])

    def _run(self, pages: list[Coroutine[Any, Any, bool]]) -> int:
        async def all_pages() -> list[bool]:
            return await asyncio.gather(*pages)

        return _leading(asyncio.run_coroutine_threadsafe(all_pages(), self._loop).result())

    async def _write_page(self, key: str, page: int) -> bool:
        async with self._open(self._directory / key, "wb", buffering=0) as file:
            return all([await file.write(segment) == segment.nbytes for segment in self._pages.buffers(page)])

    async def _read_page(self, key: str, page: int) -> bool:
        async with self._open(self._directory / key, "rb", buffering=0) as file:
            return all([await file.readinto(segment) == segment.nbytes for segment in self._pages.buffers(page)])

    def count_leading(self, keys: Sequence[str]) -> int:
        raise NotImplementedError

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


# -- NIXL --------------------------------------------------------------------------------------------------------------


class NixlContender:
    """SGLang's HiCacheNixl with NIXL's POSIX plugin, through the page cache like all the others, its cleaner off."""

    def __init__(self, place: Workplace) -> None:
        self._backend = _open_nixl(place.directory, place.host.geometry)
        self._backend.register_mem_pool_host(place.host.pool)

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        return sum(bool(stored) for stored in self._backend.batch_set_v1(list(keys), batch.indices, None))

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        return _leading([bool(hit) for hit in self._backend.batch_get_v1(list(keys), batch.indices, None)])

    def count_leading(self, keys: Sequence[str]) -> int:
        return int(self._backend.batch_exists(list(keys)))

    def close(self) -> None:
        self._backend.close()


def _open_nixl(directory: Path, geometry: str) -> Any:
    if importlib.util.find_spec("nixl") is None and "nixl" not in sys.modules:
        # The meta package, which SGLang imports, only hands on to this one; it would pull gigabytes of CUDA.
        for name in ("", "._api"):
            sys.modules[f"nixl{name}"] = importlib.import_module(f"nixl_cu12{name}")
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    _forget_environment("SGLANG_HICACHE_NIXL_")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    logging.getLogger("nixl").setLevel(logging.ERROR)
    settings = {"plugin": {"posix": {"active": True}}, "use_direct_io": False, "l3_cleaner_enabled": False}
    return HiCacheNixl(_storage_config(geometry, settings), str(directory))


def _missing_nixl(directory: Path) -> str | None:
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12")):
        return "not installed: nixl"
    try:
        _open_nixl(directory, "mha").close()
    except Exception as error:  # noqa: BLE001 - a peer that cannot start must not stop the benchmark
        return f"cannot start: {type(error).__name__}: {error}"
    return None


# -- the raw limit -----------------------------------------------------------------------------------------------------


class RawContender:
    """Threads of preadv/pwritev over one preallocated file: the same segments, and nothing else.

    No envelope, no checksum, no index but a dictionary, no eviction but writing over the oldest slots. With
    ``checksums`` those of our envelopes are made and compared as well, a run at a time: what is left to anything in
    Python that checks what it returns. ``direct`` goes past the page cache.
    """

    def __init__(self, place: Workplace, threads: int, *, checksums: bool = False, direct: bool = False) -> None:
        self._pages = place.host.pages
        self._payload = place.host.payload
        self._slots = place.pages
        self._slot_of: dict[str, int] = {}
        self._key_in: dict[int, str] = {}
        self._checksums: dict[int, bytes] | None = {} if checksums else None
        self._written = 0
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._fd = os.open(place.directory / "slots", flags, 0o600)
        os.posix_fallocate(self._fd, 0, self._slots * self._payload)

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        for key in keys:
            slot = self._written % self._slots
            self._slot_of.pop(self._key_in.get(slot, ""), None)
            self._slot_of[key], self._key_in[slot] = slot, key
            self._written += 1
        return self._transfer(self._write_run, keys, batch)

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        return self._transfer(self._read_run, keys[: _leading([key in self._slot_of for key in keys])], batch)

    def _write_run(self, run: list[tuple[int, int]], segments: list[Sequence[memoryview]]) -> int:
        if self._checksums is not None:
            for (slot, _), of_page in zip(run, segments, strict=True):
                self._checksums[slot] = payload_checksum(of_page)
        return vectored.write_from(self._fd, [*chain(*segments)], run[0][0] * self._payload)

    def _read_run(self, run: list[tuple[int, int]], segments: list[Sequence[memoryview]]) -> int:
        done = vectored.read_into(self._fd, [*chain(*segments)], run[0][0] * self._payload)
        if self._checksums is not None:
            for (slot, _), of_page in zip(run, segments, strict=True):
                done -= self._payload * (self._checksums[slot] != payload_checksum(of_page))
        return done

    def _transfer(
        self,
        move: Callable[[list[tuple[int, int]], list[Sequence[memoryview]]], int],
        keys: Sequence[str],
        batch: HostBatch,
    ) -> int:
        places = [(self._slot_of[key], page) for key, page in zip(keys, batch.pages, strict=False)]
        share = max(1, -(-len(places) // self._threads))

        def transfer_share(begin: int) -> int:
            done = 0
            for run in self._runs(places[begin : begin + share]):
                done += move(run, self._pages.buffers_of([page for _, page in run]))
            return done // self._payload

        if self._threads == 1:
            return transfer_share(0)
        return sum(self._executor.map(transfer_share, range(0, len(places), share)))

    def _runs(self, places: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """``places`` cut into runs of neighbouring slots, each moved by one call."""
        longest = max(1, _LARGEST_RUN // self._payload)
        runs: list[list[tuple[int, int]]] = []
        for place in places:
            if not runs or len(runs[-1]) == longest or runs[-1][-1][0] + 1 != place[0]:
                runs.append([])
            runs[-1].append(place)
        return runs

    def count_leading(self, keys: Sequence[str]) -> int:
        raise NotImplementedError

    def close(self) -> None:
        self._executor.shutdown()
        os.close(self._fd)


def _opener_of_raw(
    threads: int, *, checksums: bool = False, direct: bool = False
) -> Callable[[Workplace], FileContender]:
    return lambda place: RawContender(place, threads, checksums=checksums, direct=direct)


def _leading(flags: Sequence[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)

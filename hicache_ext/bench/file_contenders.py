"""The contenders of the file benchmark: ours per layout, SGLang's own, and the raw limit.

All of them move the same pages between one real SGLang host pool and a directory. Each is driven as SGLang's controller
would drive it, from page hashes in hex and token indices, so that no contender's conversions stay out of the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import BenchmarkError, ConfigError, HicacheExtError
from hicache_ext.page.hashes import page_hashes
from hicache_ext.runtime import vectored
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.registry import open_tier

if TYPE_CHECKING:
    import torch


# -- host memory -------------------------------------------------------------------------------------------------------

PAGE_SIZE = 16
"""Tokens per page."""
LAYER_BYTES = 16 * 1024
"""Bytes of a page in one layer, K and V together: payloads are multiples of it."""
GEOMETRIES = ("mha", "mla")
_STAMP = 8


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
        segments = len(self._bytes)
        first = number * self.batch * segments
        stamps = np.arange(first, first + self.batch * segments, dtype=np.uint64).view(np.uint8)
        self._bytes[:, : self.batch, :_STAMP] = stamps.reshape(segments, -1, _STAMP)

    def wipe(self) -> None:
        """Forget what was read."""
        self._bytes[:, self.batch : 2 * self.batch] = 0

    def check(self, number: int, contender: str, page: int | None = None) -> None:
        """Raise BenchmarkError unless the pages read, or this one, are byte for byte those of batch ``number``."""
        self.stamp(number)
        for place in range(self.batch) if page is None else (page,):
            if not np.array_equal(self._bytes[:, self.batch + place], self._bytes[:, place]):
                raise BenchmarkError(f"{contender}: page {place} of batch {number} came back with other bytes")

    def first_sources(self, count: int) -> HostBatch:
        """The first ``count`` pages to write."""
        return HostBatch(self.sources.pages[:count], self.sources.indices[: count * PAGE_SIZE])

    def target(self, position: int) -> HostBatch:
        """One page to read into."""
        begin = position * PAGE_SIZE
        return HostBatch(self.targets.pages[position : position + 1], self.targets.indices[begin : begin + PAGE_SIZE])


def page_keys(name: str, count: int) -> list[str]:
    """``count`` keys as SGLang makes them: a chain of SHA-256, in hex."""
    return [page_hash.hex() for page_hash in page_hashes(range(count), 1, name.encode())]


HICACHE_FILE = "SGLang HiCacheFile"
"""The contender that the others are compared with."""
TRANSFER_MODES = ("write", "overwrite", "read-warm", "read-cold", "mixed")
EXISTS_CASES = ("exists, all", "exists, half", "exists, first missing")
MODES = (*TRANSFER_MODES, "exists")


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


NO_LOOKUP = {"exists": "it has no index"}

LAYOUTS = {"pages": ("pages", "auto"), "slab": ("slab", "auto"), "slab-direct": ("slab", "direct")}
"""Ours: name -> (layout, io) of the file tier's configuration."""


def all_ours(directory: Path) -> list[Contender]:
    """Return our layouts, those that cannot take part with the reason. ``directory`` is for trying them out."""
    contenders = []
    for name, (layout, io) in LAYOUTS.items():
        missing = None
        tier = _tier(directory / name, capacity=64 << 20, threads=1, layout=layout, io=io)
        try:
            open_tier("bench", load_config(ExtraConfig.around({"tiers": {"bench": tier}})).tiers["bench"]).close()
        except ConfigError as error:
            missing = f"not in this version: {error}"
        except (HicacheExtError, ImportError) as error:
            missing = str(error)
        opened = partial(OurContender, layout=layout, io=io)
        contenders.append(Contender(f"hicache_ext {name}", opened, missing=missing))
    return contenders


# -- ours --------------------------------------------------------------------------------------------------------------


class OurContender:
    """The backend of this package over a file tier: the whole path, from SGLang's keys and indices on."""

    def __init__(self, place: Workplace, layout: str, io: str) -> None:
        from hicache_ext.sglang.backend import HiCacheExtBackend
        from hicache_ext.testing.host_pools import make_storage_config

        tier = _tier(place.directory, capacity=place.capacity, threads=place.threads, layout=layout, io=io)
        section = {"tiers": {"bench": tier}, "model": {"id": "bench", "fingerprint": "off"}}
        mla = place.host.geometry == "mla"
        config = make_storage_config(is_mla_model=mla, extra_config=ExtraConfig.around(section))
        self._backend = HiCacheExtBackend(config, {})
        self._backend.register_mem_pool_host(place.host.pool)

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        return sum(self._backend.batch_set_v1(list(keys), batch.indices))

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        return leading(self._backend.batch_get_v1(list(keys), batch.indices))

    def count_leading(self, keys: Sequence[str]) -> int:
        return int(self._backend.batch_exists(list(keys)))

    def close(self) -> None:
        self._backend.close()


def _tier(directory: Path, **settings: object) -> dict[str, Any]:
    """The configuration of a file tier."""
    return {"type": "file", "path": str(directory), **settings}


# -- SGLang's ----------------------------------------------------------------------------------------------------------


class HiCacheFileContender:
    """SGLang's HiCacheFile, driven as ``_generic_page_get`` and ``_generic_page_set`` of its controller do."""

    def __init__(self, place: Workplace) -> None:
        from hicache_ext.testing.host_pools import make_storage_config, sglang_file_backend

        forget_environment("SGLANG_HICACHE_FILE_BACKEND_")
        self._pool = place.host.pool
        mla = place.host.geometry == "mla"
        config = make_storage_config(is_mla_model=mla, extra_config={"max_size": place.capacity})
        self._backend = sglang_file_backend(config, place.directory)

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


def forget_environment(prefix: str) -> None:
    """A setting of the caller's shell must not send a contender to another directory."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]


# -- the raw limit -----------------------------------------------------------------------------------------------------

_LARGEST_RUN = 1 << 20
"""Bytes the raw limit moves by one call at most."""


def all_raw() -> list[Contender]:
    """Return the attempts whose best is the raw limit."""
    only_lookup = dict.fromkeys(TRANSFER_MODES, "it only answers whether a page is there")
    raw = [
        Contender(
            f"raw, {n} thread{'s' if n > 1 else ''}", partial(RawContender, threads=n), cannot=NO_LOOKUP, raw=True
        )
        for n in (1, 2, 4)
    ]
    return [*raw, Contender("os.stat", StatContender, cannot=only_lookup, raw=True)]


Run = list[tuple[int, int]]
"""(slot, page) of neighbouring slots, moved by one call."""
Move = Callable[[int, list[memoryview], int], int]
"""``write_from`` or ``read_into``: a file, segments, and where in the file."""


class RawContender:
    """Threads of preadv/pwritev over one preallocated file: the same segments, and nothing else.

    No envelope, no checksum, no index but a dictionary, no eviction but writing over the oldest slots.
    """

    def __init__(self, place: Workplace, threads: int, flags: int = 0) -> None:
        self._pages = place.host.pages
        self._payload = place.host.payload
        self._slots = place.pages
        self._slot_of: dict[str, int] = {}
        self._key_in: dict[int, str] = {}
        self._written = 0
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads)
        self._fd = os.open(place.directory / "slots", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        os.posix_fallocate(self._fd, 0, self._slots * self._payload)

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        for key in keys:
            slot = self._written % self._slots
            self._slot_of.pop(self._key_in.get(slot, ""), None)
            self._slot_of[key], self._key_in[slot] = slot, key
            self._written += 1
        return self._transfer(vectored.write_from, keys, batch)

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        return self._transfer(vectored.read_into, keys[: leading([key in self._slot_of for key in keys])], batch)

    def _transfer(self, move: Move, keys: Sequence[str], batch: HostBatch) -> int:
        places = [(self._slot_of[key], page) for key, page in zip(keys, batch.pages, strict=False)]
        share = max(1, -(-len(places) // self._threads))

        def transfer_share(begin: int) -> int:
            """Move one thread's share in runs of neighbouring slots, each by one call."""
            longest = max(1, _LARGEST_RUN // self._payload)
            runs: list[Run] = []
            for place in places[begin : begin + share]:
                if not runs or len(runs[-1]) == longest or runs[-1][-1][0] + 1 != place[0]:
                    runs.append([])
                runs[-1].append(place)
            return sum(self._move(move, run) for run in runs) // self._payload

        if self._threads == 1:
            return transfer_share(0)
        return sum(self._executor.map(transfer_share, range(0, len(places), share)))

    def _move(self, move: Move, run: Run) -> int:
        """Return the bytes that were moved."""
        segments = [*chain(*self._pages.buffers_of([page for _, page in run]))]
        return move(self._fd, segments, run[0][0] * self._payload)

    def count_leading(self, keys: Sequence[str]) -> int:
        raise NotImplementedError

    def close(self) -> None:
        self._executor.shutdown()
        os.close(self._fd)


class StatContender:
    """The floor for ``exists`` without an index: one os.stat per page file."""

    def __init__(self, place: Workplace) -> None:
        self._prefix = f"{place.directory}/"

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        for key in keys:
            Path(self._prefix + key).touch()
        return len(keys)

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        raise NotImplementedError

    def count_leading(self, keys: Sequence[str]) -> int:
        for position, key in enumerate(keys):
            try:
                os.stat(self._prefix + key)
            except FileNotFoundError:
                return position
        return len(keys)

    def close(self) -> None:
        pass

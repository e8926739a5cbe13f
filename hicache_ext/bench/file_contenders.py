"""The contenders of the file benchmark: ours per layout, SGLang's own, and the raw limit.

All of them move the same pages between one real SGLang host pool and a directory. Each is driven as SGLang's controller
would drive it, from page hashes in hex and token indices, so that no contender's conversions stay out of the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hicache_ext.bench.file_memory import PAGE_SIZE, HostBatch, HostBuffers
from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import ConfigError, HicacheExtError
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.registry import open_tier

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

LAYOUTS: dict[str, tuple[str, str]] = {
    "pages": ("pages", "auto"),
    "slab": ("slab", "auto"),
    "slab-direct": ("slab", "direct"),
}
"""Ours: name -> (layout, io) of the file tier's configuration."""


def all_ours(directory: Path) -> list[Contender]:
    """Our layouts, those that cannot take part with the reason. ``directory`` is for trying them out."""
    return [
        Contender(
            f"hicache_ext {name}",
            partial(OurContender, layout=layout, io=io),
            missing=_missing_layout(layout, io, directory / name),
        )
        for name, (layout, io) in LAYOUTS.items()
    ]


# -- ours --------------------------------------------------------------------------------------------------------------


class OurContender:
    """The backend of this package over a file tier: the whole path, from SGLang's keys and indices on."""

    def __init__(self, place: Workplace, layout: str, io: str) -> None:
        from hicache_ext.sglang.backend import HiCacheExtBackend
        from hicache_ext.storage.tiers.file.slab.loading import wait_for_compiled_code
        from hicache_ext.testing.host_pools import make_storage_config

        wait_for_compiled_code()
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


def _missing_layout(layout: str, io: str, directory: Path) -> str | None:
    tier = _tier(directory, capacity=64 << 20, threads=1, layout=layout, io=io)
    document = ExtraConfig.around({"tiers": {"bench": tier}})
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

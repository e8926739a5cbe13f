"""Rivals of the file tier: plain aiofiles, NIXL through SGLang, the raw limit with checksums or past the page cache."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiofiles

from hicache_ext.bench.file_contenders import (
    NO_LOOKUP,
    Contender,
    HostBatch,
    Move,
    RawContender,
    Run,
    Workplace,
    forget_environment,
    leading,
)
from hicache_ext.page.envelope import payload_checksum
from hicache_ext.runtime import vectored
from hicache_ext.testing.host_pools import make_storage_config


def rivals(directory: Path) -> list[Contender]:
    """Every rival, those that cannot take part with the reason. ``directory`` is for trying them out."""
    return [
        Contender("aiofiles", AiofilesContender, cannot={"overwrite": "it has no eviction", **NO_LOOKUP}),
        Contender(
            "NIXL POSIX",
            NixlContender,
            missing=_missing_nixl(directory / "nixl"),
            cannot={"overwrite": "SGLang evicts its files by how full the disk is"},
        ),
        Contender("raw and checksum, 2 threads", lambda place: CheckedRawContender(place, 2), cannot=NO_LOOKUP),
        Contender("raw, O_DIRECT, 4 threads", lambda place: RawContender(place, 4, os.O_DIRECT), cannot=NO_LOOKUP),
    ]


class CheckedRawContender(RawContender):
    """The raw limit that also makes and compares the checksums of our envelopes: what is left to anything in Python
    that checks what it returns."""

    def __init__(self, place: Workplace, threads: int) -> None:
        super().__init__(place, threads)
        self._checksums: dict[int, bytes] = {}

    def _move(self, move: Move, run: Run) -> int:
        done = super()._move(move, run)
        segments = self._pages.buffers_of([page for _, page in run])
        for (slot, _), of_page in zip(run, segments, strict=True):
            if move is vectored.write_from:
                self._checksums[slot] = payload_checksum(of_page)
            else:
                done -= self._payload * (self._checksums[slot] != payload_checksum(of_page))
        return done


# -- aiofiles ----------------------------------------------------------------------------------------------------------


class AiofilesContender:
    """A file per page through aiofiles, the pages of a batch at once; no envelope, no atomic publication."""

    def __init__(self, place: Workplace) -> None:
        self._open: Any = aiofiles.open
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

        return leading(asyncio.run_coroutine_threadsafe(all_pages(), self._loop).result())

    async def _write_page(self, key: str, page: int) -> bool:
        async with self._open(self._directory / key, "wb", buffering=0) as file:
            return all([await file.write(segment) == segment.nbytes for segment in self._pages.buffers_of([page])[0]])

    async def _read_page(self, key: str, page: int) -> bool:
        async with self._open(self._directory / key, "rb", buffering=0) as file:
            return all(
                [await file.readinto(segment) == segment.nbytes for segment in self._pages.buffers_of([page])[0]]
            )

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
        return leading([bool(hit) for hit in self._backend.batch_get_v1(list(keys), batch.indices, None)])

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

    forget_environment("SGLANG_HICACHE_NIXL_")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    logging.getLogger("nixl").setLevel(logging.ERROR)
    settings = {"plugin": {"posix": {"active": True}}, "use_direct_io": False, "l3_cleaner_enabled": False}
    return HiCacheNixl(make_storage_config(is_mla_model=geometry == "mla", extra_config=settings), str(directory))


def _missing_nixl(directory: Path) -> str | None:
    if not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12")):
        return "not installed: nixl"
    try:
        _open_nixl(directory, "mha").close()
    except Exception as error:  # noqa: BLE001 - a peer that cannot start must not stop the benchmark
        return f"cannot start: {type(error).__name__}: {error}"
    return None

"""``hicache-ext bench file``: the file tier against SGLang's HiCacheFile and against what the disk can do.

All contenders move the same pages, one call a batch, between the same memory and a directory of their own, which is
deleted afterwards. Writes end in the page cache, for each of them; dirty pages are written back between the modes.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.bench.frame import (
    Point,
    Results,
    Sample,
    add_measuring_arguments,
    fresh_directory,
    machine_facts,
    what_to_measure,
)
from hicache_ext.bench.pool import Case, OurClient, Pages, PoolClient, page_keys, run_calls
from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.values import format_size
from hicache_ext.errors import CommandError
from hicache_ext.packages import need
from hicache_ext.runtime import vectored
from hicache_ext.runtime.commands import terminated_in_order
from hicache_ext.storage.contract.registry import open_tier

_BATCHES_AT_LEAST = 4
_THREADS = 4
MODES = ("write", "read-warm", "read-cold")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("."),
        help="on the disk to measure; everything is written to new directories in it and deleted (default: here)",
    )
    add_measuring_arguments(parser, ("32KiB", "1MiB"), "256MiB")


def run(arguments: argparse.Namespace, rivals: Mapping[str, Open] | None = None) -> int:
    """Measure, print, write; 0, or 1 when a contender failed or answered wrongly (it then has no figures)."""
    directory = arguments.directory
    payloads, total, rounds = what_to_measure(arguments)
    if not directory.is_dir():
        raise CommandError(f"--directory {directory}: no such directory")
    need("sglang", "torch")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    machine = machine_facts(directory, ("hicache-ext", "sglang", "torch", "aiofiles", "xxhash"))
    contenders = {**OURS, HICACHE_FILE: HiCacheFileContender, **(rivals or {}), **RAW}
    results = Results(tuple(contenders), {"HiCacheFile": (HICACHE_FILE,), "raw limit": tuple(RAW)})
    with terminated_in_order():
        for payload in payloads:
            size = f"pages of {format_size(payload)}"
            case = Case.of(payload, 1, total, _BATCHES_AT_LEAST)
            wanted, free = 2 * case.total + (256 << 20), shutil.disk_usage(directory).free
            if wanted > free:
                raise CommandError(f"{size}: needs {wanted >> 20} MiB of disk, {free >> 20} are free; lower --total")
            points = {mode: Point(mode, (("payload_bytes", payload),)) for mode in MODES}
            pages = Pages(payload, case.batch, 0)
            measure = {name: partial(_measure, name, contenders[name], case, pages, directory) for name in contenders}
            results.take_turns(f"{size}, {case.batches} calls", points, measure, rounds)
    settings = {"payloads": payloads, "total": total, "rounds": rounds, "threads": _THREADS}
    return results.finish(arguments, "file", machine, settings)


# -- contenders --------------------------------------------------------------------------------------------------------


Open = Callable[[Path, int, int], PoolClient]
"""Opens a contender in a fresh directory: the bytes it may occupy, and those of a page."""


def _open_ours(directory: Path, capacity: int, payload: int, **settings: str) -> PoolClient:
    path = str(directory / "tier")
    tier = {"type": "file", "path": path, "capacity": capacity, "threads": _THREADS, **settings}
    return OurClient(open_tier("bench", load_config(ExtraConfig.around({"tiers": {"bench": tier}})).tiers["bench"]))


class HiCacheFileContender:
    """SGLang's HiCacheFile, straight from and into the memory of pages: its controller copies each once more."""

    def __init__(self, directory: Path, capacity: int, payload: int) -> None:
        from hicache_ext.testing.host_pools import make_storage_config, sglang_file_backend
        from hicache_ext.testing.sglang_cpu import prepare_process

        prepare_process()
        for name in [name for name in os.environ if name.startswith("SGLANG_HICACHE_FILE_BACKEND_")]:
            del os.environ[name]  # It must not send the pages to another directory.
        self._tensor: Any = importlib.import_module("torch").from_numpy
        config = make_storage_config(is_mla_model=False, extra_config={"max_size": capacity})
        self.backend = sglang_file_backend(config, directory)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        data = [self._tensor(page) for page in pages.sources[: len(keys)]]
        return len(keys) if self.backend.batch_set([key.hex() for key in keys], data) else 0

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self.read_into(keys, pages.targets)

    def read_into(self, keys: Sequence[bytes], memory: npt.NDArray[np.uint8]) -> int:
        found = self.backend.batch_get([key.hex() for key in keys], [self._tensor(page) for page in memory])
        return next((place for place, page in enumerate(found) if page is None), len(keys))

    def remove(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


class RawContender:
    """The raw limit: threads of preadv and pwritev over one preallocated file, up to 1 MiB a call, and nothing else.

    No envelope, no checksum, no index but a dictionary.
    """

    def __init__(self, directory: Path, capacity: int, payload: int, threads: int) -> None:
        self._payload = payload
        self._slots: dict[bytes, int] = {}
        self._free = list(range(capacity // payload))
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads)
        self._fd = os.open(directory / "slots", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, capacity)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        self._slots.update(zip(keys, self._free, strict=False))
        del self._free[: len(keys)]
        return self._transfer(vectored.write_from, keys, pages.sources)

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self._transfer(vectored.read_into, keys, pages.targets)

    def _transfer(
        self, move: Callable[[int, list[memoryview], int], int], keys: Sequence[bytes], memory: npt.NDArray[np.uint8]
    ) -> int:
        """Move a batch, whose slots are neighbours, in as many runs as keep all threads busy."""
        first = self._slots[keys[0]]
        step = max(1, min((1 << 20) // self._payload, -(-len(keys) // self._threads)))

        def move_run(begin: int) -> int:
            return move(self._fd, [memory[begin : begin + step].reshape(-1).data], (first + begin) * self._payload)

        return sum(self._executor.map(move_run, range(0, len(keys), step))) // self._payload

    def remove(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None:
        self._executor.shutdown()
        os.close(self._fd)


HICACHE_FILE = "SGLang HiCacheFile"
OURS: Mapping[str, Open] = {
    "hicache_ext pages": partial(_open_ours, layout="pages"),
    "hicache_ext slab": partial(_open_ours, layout="slab"),
    "hicache_ext slab-direct": partial(_open_ours, layout="slab", io="direct"),
}
RAW: Mapping[str, Open] = {
    "raw, 1 thread": partial(RawContender, threads=1),
    "raw, 4 threads": partial(RawContender, threads=4),
}

# -- what is timed -----------------------------------------------------------------------------------------------------


def _measure(name: str, open_contender: Open, case: Case, pages: Pages, parent: Path) -> Mapping[str, Sample]:
    """Write everything once, and read it with the page cache warm and dropped. Raises CommandError for a wrong
    answer."""
    # Room for every contender's headers, directories and reservations: nothing is evicted.
    room = case.total * 3 // 2 + case.batch * case.batches * 16384 + (64 << 20)
    keys = [page_keys(f"{number}", case.batch) for number in range(case.batches)]

    def run(move: Callable[[Sequence[bytes], Pages], int], *, reads: bool = False) -> Sample:
        return run_calls(case, lambda _, number: move(keys[number], pages), [pages], name, reads=reads)

    with fresh_directory(parent) as directory:
        client = open_contender(directory, room, case.payload)
        try:
            samples = {"write": run(client.write)}
            os.sync()  # No mode pays for what was written before it.
            samples["read-warm"] = run(client.read, reads=True)
            drop_from_page_cache(directory)
            return samples | {"read-cold": run(client.read, reads=True)}
        finally:
            client.close()


def drop_from_page_cache(directory: Path) -> None:
    """Make the next reads of the files below ``directory`` come from the disk."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():  # and not the slab tier's socket
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

#!/usr/bin/env python3
"""What seals and codecs cost: pages plain, encoded, sealed and both, in turns, in the file tier, Redis, an object tier.

``python -m benchmarks.bench_seals --markdown FILE [--tiers "file warm,redis"] [--rounds 5] [--callers 4]``

Each tier is opened from its configuration; a call moves as many pages as SGLang's do (128, or 64 MiB of larger ones)
between the medium and memory that was touched before. *Warm*: in the page cache. *Cold*: read past it (``io: direct``).
Redis and the object store (in memory, one process of Node.js) are of this machine, over loopback. Pages hold normally
distributed numbers (bf16): their exponents shrink about as those of real KV do. GB/s are of payload, of all callers
together; processor seconds are those of this process, all threads, per GB. Medians of the rounds. Every page that is
read is compared, outside the timed part.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.store import GetResult, PageBatch, SetResult

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lossless": {"codec": "lossless"},
    "authenticate": {"seal": {"mode": "authenticate"}},
    "encrypt": {"seal": {"mode": "encrypt"}},
    "both": {"codec": "lossless", "seal": {"mode": "encrypt"}},
}
KEYS = [{"id": "bench", "env": "HICACHE_BENCH_SEAL"}]
SIZES = (32 << 10, 128 << 10, 1 << 20, 4 << 20)
PAGES = 128
CALL = 64 << 20
CALLS = 4
Pages = list[memoryview]
TIERS = ("file warm", "file cold", "redis", "object")


class _Store:
    """One tier in one way."""

    def __init__(self, tier: dict[str, Any], way: str, size: int) -> None:
        keys = {name: {**value, "keys": KEYS} if name == "seal" else value for name, value in WAYS[way].items()}
        config = load_config(ExtraConfig.around({"tiers": {"bench": {**tier, **keys}}}))
        self.store = open_tier("bench", config.tiers["bench"])
        self.pages = min(PAGES, CALL // size)
        self.size = size
        self.identity = os.urandom(16)
        pool = {"name": "kv", "dtype": "bfloat16", "segments": [size]}
        self.store.register_identity(self.identity, {"model": {"id": "bench"}, "pool": pool})

    def round(self, sources: list[Pages], targets: list[Pages]) -> dict[str, tuple[float, float]]:
        """(GB/s, processor seconds per GB) of writes and of reads. ``sources``, ``targets``: pages of each caller."""
        of_callers = [
            [[self.identity + os.urandom(32) for _ in range(self.pages)] for _ in range(CALLS)] for _ in sources
        ]
        found = {}
        for name, memories, move, wanted in (
            ("write", sources, self.store.set, SetResult.STORED),
            ("read", targets, self.store.get, GetResult.HIT),
        ):

            def call(number: int, memories: list[Pages] = memories, move: Any = move, wanted: Any = wanted) -> bool:
                buffers = [[page] for page in memories[number][: self.pages]]
                answers = [move(PageBatch(keys, buffers)) for keys in of_callers[number]]
                return all(answer.count(wanted) == self.pages for answer in answers)

            with ThreadPoolExecutor(len(sources)) as threads:
                list(threads.map(abs, range(len(sources))))
                began, processor = time.perf_counter(), time.process_time()
                assert all(threads.map(call, range(len(sources)))), (name, self.store.metrics.snapshot())
                seconds, processor = time.perf_counter() - began, time.process_time() - processor
            payload = len(sources) * CALLS * self.pages * self.size / 1e9
            found[name] = payload / seconds, processor / payload
        for source, target in zip(sources, targets, strict=True):
            for one, other in zip(source[: self.pages], target[: self.pages], strict=True):
                assert np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
                other[:64] = bytes(64)
        for calls in of_callers:
            for keys in calls:
                self.store.remove(keys)
        return found


@contextmanager
def _tier(kind: str, directory: Path) -> Iterator[dict[str, Any]]:
    if kind.startswith("file"):
        io = "direct" if kind == "file cold" else "buffered"
        yield {
            "type": "file",
            "path": str(directory / secrets.token_hex(4)),
            "capacity": "2GiB",
            "layout": "slab",
            "io": io,
        }
    elif kind == "redis":
        from tests.rigs.redis_servers import RedisServer

        with RedisServer(directory / "redis") as server:
            yield {"type": "redis", "url": server.url, "timeout": "30s", "connections": 4}
    else:
        from tests.rigs.s3_server import FarS3Server

        with FarS3Server(directory) as server:
            os.environ |= server.environment()
            yield server.tier(secrets.token_hex(4), region="us-east-1", timeout="30s")


def _measured(kind: str, sizes: list[int], rounds: int, callers: int, directory: Path) -> list[str]:
    lines = []
    memory = [[_touched(CALL) for _ in range(callers)] for _ in range(2)]
    for one in memory[0]:
        one[:] = _numbers(CALL)
    for size in sizes:
        sources, targets = (
            [[one.data[at : at + size] for at in range(0, CALL, size)][:PAGES] for one in of_call] for of_call in memory
        )
        with ExitStack() as stack:
            stores = {}
            for way in WAYS:
                tier = stack.enter_context(_tier(kind, directory / f"{kind}-{size}-{way}".replace(" ", "-")))
                stores[way] = stack.enter_context(_closing(_Store(tier, way, size)))
            for store in stores.values():
                store.round(sources, targets)
            found: dict[str, list[dict[str, tuple[float, float]]]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way, store in stores.items():
                    found[way].append(store.round(sources, targets))
        for call in ("write", "read"):
            speed, cost = (
                {way: statistics.median(one[call][which] for one in found[way]) for way in WAYS} for which in (0, 1)
            )
            cells = [f"{speed['plain']:.2f}, {cost['plain']:.2f}"]
            cells += [
                f"{speed[way]:.2f} ({speed[way] / speed['plain']:.2f}), {cost[way]:.2f}"
                for way in WAYS
                if way != "plain"
            ]
            name = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
            where = kind if callers == 1 else f"{kind}, {callers} callers"
            lines.append(f"| {where} | {name} | {call} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def _numbers(length: int) -> Any:
    """Normally distributed, as bf16."""
    numbers = np.random.default_rng(1).standard_normal(length // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@contextmanager
def _closing(store: _Store) -> Iterator[_Store]:
    try:
        yield store
    finally:
        store.store.close()


def _touched(length: int) -> Any:
    """Aligned to blocks, as SGLang's page-aligned host pool is."""
    whole = np.zeros(length + 4096, np.uint8)
    first = -whole.ctypes.data % 4096
    return whole[first : first + length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--callers", type=int, default=1, help="threads that call the tier at once")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    os.environ["HICACHE_BENCH_SEAL"] = secrets.token_hex(32)
    directory = Path(tempfile.mkdtemp(prefix="bench-seals-", dir=arguments.directory))
    try:
        lines = [
            "| tier | page | call | plain: GB/s, s/GB | " + " | ".join(list(WAYS)[1:]) + " |",
            "|---|---|---|--:|--:|--:|--:|--:|",
        ]
        for kind in arguments.tiers.split(","):
            sizes = [int(size) for size in arguments.sizes.split(",")]
            lines += _measured(kind, sizes, arguments.rounds, arguments.callers, directory)
    finally:
        shutil.rmtree(directory)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a seal costs: plain, authenticated and encrypted pages, in turns, in the file tier, Redis and an object store.

``python -m benchmarks.bench_seals --markdown FILE [--tiers file,redis] [--rounds 5]``

Each tier is opened from its configuration; a call moves as many pages as SGLang's do (128, or 64 MiB of larger ones)
between the medium and memory that was touched before. *Warm*: in the page cache. *Cold*: read past it (``io: direct``).
Redis and the object store (in memory, one process of Node.js) are of this machine, over loopback. GB/s are of payload;
processor seconds are those of this process, all threads, per GB. Medians of the rounds. Every page that is read is
compared, outside the timed part.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from hicache_ext.config import ExtraConfig, load_config  # noqa: E402
from hicache_ext.storage.contract.registry import open_tier  # noqa: E402
from hicache_ext.storage.store import GetResult, PageBatch, SetResult  # noqa: E402
from hicache_ext.storage.tiers.file.slab.loading import wait_for_compiled_code  # noqa: E402

WAYS = ("plain", "authenticate", "encrypt")
SIZES = (32 << 10, 128 << 10, 1 << 20, 4 << 20)
PAGES = 128
CALL = 64 << 20
CALLS = 4
TIERS = ("file warm", "file cold", "redis", "object")


class _Store:
    """One tier in one way."""

    def __init__(self, tier: dict[str, Any], way: str, size: int) -> None:
        seal = {} if way == "plain" else {"seal": {"mode": way, "keys": [{"id": "bench", "env": "HICACHE_BENCH_SEAL"}]}}
        config = load_config(ExtraConfig.around({"tiers": {"bench": {**tier, **seal}}}))
        self.store = open_tier("bench", config.tiers["bench"])
        self.pages = min(PAGES, CALL // size)
        self.size = size
        self.identity = os.urandom(16)
        self.store.register_identity(self.identity, {"model": {"id": "bench"}, "pool": {"name": "kv"}})

    def round(self, source: list[memoryview], target: list[memoryview]) -> dict[str, tuple[float, float]]:
        """(GB/s, processor seconds per GB) of writes and of reads."""
        calls = [[self.identity + os.urandom(32) for _ in range(self.pages)] for _ in range(CALLS)]
        found = {}
        for name, memory, move, wanted in (
            ("write", source, self.store.set, SetResult.STORED),
            ("read", target, self.store.get, GetResult.HIT),
        ):
            buffers = [[page] for page in memory[: self.pages]]
            began, processor = time.perf_counter(), time.process_time()
            answers = [move(PageBatch(keys, buffers)) for keys in calls]
            seconds, processor = time.perf_counter() - began, time.process_time() - processor
            assert all(answer.count(wanted) == self.pages for answer in answers), (name, self.store.metrics.snapshot())
            payload = CALLS * self.pages * self.size / 1e9
            found[name] = payload / seconds, processor / payload
        assert all(one == other for one, other in zip(source[: self.pages], target[: self.pages], strict=True))
        for page in target:
            page[:64] = bytes(64)
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
        from far_objects import _InMemory

        with _InMemory(0.0) as server:
            os.environ |= server.environment()
            secret = {"env": "HICACHE_TEST_S3_KEY"}
            yield {
                "type": "object", "url": server.url(secrets.token_hex(4)), "endpoint": server.endpoint,
                "region": "us-east-1", "allow_http": True, "timeout": "30s", "access_key": secret, "secret_key": secret,
            }  # fmt: skip


def _measured(kind: str, sizes: list[int], rounds: int, directory: Path) -> list[str]:
    lines = []
    memory = [_touched(CALL), _touched(CALL)]
    memory[0][:] = np.frombuffer(os.urandom(CALL), np.uint8)
    for size in sizes:
        source, target = ([one.data[at : at + size] for at in range(0, CALL, size)][:PAGES] for one in memory)
        with ExitStack() as stack:
            stores = {}
            for way in WAYS:
                tier = stack.enter_context(_tier(kind, directory / f"{kind}-{size}-{way}".replace(" ", "-")))
                stores[way] = stack.enter_context(_closing(_Store(tier, way, size)))
            for store in stores.values():
                store.round(source, target)
            found: dict[str, list[dict[str, tuple[float, float]]]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way, store in stores.items():
                    found[way].append(store.round(source, target))
        for call in ("write", "read"):
            speed, cost = (
                {way: statistics.median(one[call][which] for one in found[way]) for way in WAYS} for which in (0, 1)
            )
            cells = [f"{speed['plain']:.2f}"]
            cells += [f"{speed[way]:.2f} ({speed[way] / speed['plain']:.2f})" for way in WAYS[1:]]
            cells += [f"{cost[way]:.2f}" for way in WAYS]
            name = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
            lines.append(f"| {kind} | {name} | {call} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


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
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    os.environ["HICACHE_BENCH_SEAL"] = secrets.token_hex(32)
    wait_for_compiled_code()
    directory = Path(tempfile.mkdtemp(prefix="bench-seals-", dir=arguments.directory))
    try:
        lines = [
            "| tier | page | call | plain GB/s | authenticate | encrypt | plain s/GB | authenticate | encrypt |",
            "|---|---|---|--:|--:|--:|--:|--:|--:|",
        ]
        for kind in arguments.tiers.split(","):
            lines += _measured(kind, [int(size) for size in arguments.sizes.split(",")], arguments.rounds, directory)
    finally:
        shutil.rmtree(directory)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

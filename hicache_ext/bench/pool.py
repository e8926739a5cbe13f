"""``hicache-ext bench pool``: what the pool tiers of a configuration give on this machine."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.bench.frame import (
    Point,
    Results,
    Sample,
    add_measuring_arguments,
    machine_facts,
    positive,
    what_to_measure,
)
from hicache_ext.config import load_config
from hicache_ext.config.values import format_size
from hicache_ext.errors import CommandError, ConfigError
from hicache_ext.page.memory import Addresses, PageMemory
from hicache_ext.runtime.commands import terminated_in_order
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiers.file.config import FileTierConfig

_BATCH = 128
"""Pages that SGLang names in one call (cache_controller.py)."""
_BATCH_BYTES = 16 << 20
MODES = ("write", "read")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="a configuration; its tiers are written to and cleaned again"
    )
    parser.add_argument(
        "--tier", action="append", metavar="NAME", help="may be repeated (default: all that are not of type file)"
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", action="append", type=positive, help="client threads; may be repeated (default: 1 and 4)"
    )
    add_measuring_arguments(parser, ("128KiB", "1MiB", "4MiB"), "64MiB")


def run(arguments: argparse.Namespace) -> int:
    """Measure the tiers of the configuration against each other; see ``compare``."""
    # A path: an inline configuration would stand, secrets and all, in the command line that the document holds.
    tiers = load_config(arguments.config).tiers
    for name in arguments.tier or ():
        if name not in tiers:
            raise ConfigError("--tier", f"no tier is named {name!r}", ", ".join(tiers))
    chosen = arguments.tier or [name for name, tier in tiers.items() if not isinstance(tier, FileTierConfig)]
    if not chosen:
        raise ConfigError("--tier", "every tier of the configuration is of type file", "the name of one of them")

    def opener(name: str) -> Open:
        return lambda memory: OurClient(open_tier(name, tiers[name]))

    return compare(arguments, "tiers", {f"{name} ({tiers[name].type})": opener(name) for name in chosen})


def compare(
    arguments: argparse.Namespace, engine: str, contenders: Mapping[str, Open], own_clients: Collection[str] = ()
) -> int:
    """Measure, print, write; 0, or 1 when nothing could be measured, or a contender failed or answered wrongly (it then
    has no figures). Ratios are to the fastest of ``own_clients``."""
    payloads, total, rounds = what_to_measure(arguments)
    threads = arguments.threads or ([1] if arguments.quick else [1, 4])
    machine = machine_facts(
        Path.cwd(), ("hicache-ext", "obstore", "redis", "mooncake-transfer-engine", "xxhash", "numpy")
    )
    results = Results(tuple(contenders), {"own client": own_clients} if own_clients else {})
    with terminated_in_order():
        for payload in payloads:
            for count in threads:
                _measure_case(engine, contenders, Case.of(payload, count, total), results, rounds)
    settings = {"payloads": payloads, "threads": threads, "total": total, "rounds": rounds}
    return results.finish(arguments, "pool", machine, settings)


def _measure_case(engine: str, contenders: Mapping[str, Open], case: Case, results: Results, rounds: int) -> None:
    facts = (("engine", engine), ("payload", case.payload), ("threads", case.threads))
    memory = [Pages(case.payload, case.batch, seed) for seed in range(case.threads)]
    clients: dict[str, PoolClient] = {}

    def measured(name: str) -> Mapping[str, Sample]:
        if name not in clients:
            clients[name] = contenders[name](memory)
        return measure(name, clients[name], case, memory)

    title = f"{engine}: pages of {format_size(case.payload)} and {case.threads} threads"
    try:
        points = {mode: Point(mode, facts) for mode in MODES}
        results.take_turns(title, points, {name: partial(measured, name) for name in contenders}, rounds)
    finally:
        for client in clients.values():
            client.close()


# -- pages, clients, measuring -----------------------------------------------------------------------------------------

SEGMENTS = 2
"""Segments of a page, as K and V are."""
_STAMP = 8


class Pages:
    """Host memory of one client thread: a batch of pages to write, and one to read into."""

    def __init__(self, payload: int, batch: int, seed: int) -> None:
        if payload % (SEGMENTS * _STAMP):
            raise CommandError(f"a page of {payload} bytes cannot be made: take a multiple of {SEGMENTS * _STAMP}")
        self.payload = payload
        self.batch = batch
        self.seed = seed
        noise = np.random.default_rng(seed)
        self.sources: npt.NDArray[np.uint8] = noise.integers(0, 256, (batch, payload), np.uint8)
        self.targets: npt.NDArray[np.uint8] = np.zeros((batch, payload), np.uint8)
        self.received: Sequence[Any] | None = None
        """Pages read by a client that has buffers of its own."""

    def stamp(self, number: int) -> None:
        """Make the pages to write those of batch ``number``."""
        first = (self.seed << 32) + number * self.batch
        self.sources[:, :_STAMP] = np.arange(first, first + self.batch, dtype=np.uint64).view(np.uint8).reshape(-1, 8)

    def segments(self, pages: npt.NDArray[np.uint8]) -> PageMemory:
        """Return pages as a backend hands them over: addresses, by arithmetic, and memoryviews for who wants them."""
        size = self.payload // SEGMENTS
        starts = pages.ctypes.data + self.payload * np.arange(len(pages), dtype=np.int64)
        addresses = starts[:, None] + size * np.arange(SEGMENTS, dtype=np.int64)
        return PageMemory(
            Addresses(addresses, np.full(SEGMENTS, size, np.int64), self.payload),
            lambda: [[page.data[i * size : (i + 1) * size] for i in range(SEGMENTS)] for page in pages],
        )

    def check(self, number: int, contender: str) -> None:
        """Raise CommandError unless what was read is byte for byte batch ``number``."""
        self.stamp(number)
        received = self.targets if self.received is None else self.received
        for page in range(self.batch):
            if not np.array_equal(np.frombuffer(received[page], np.uint8), self.sources[page]):
                raise CommandError(f"{contender}: page {page} of batch {number} came back with other bytes")


class PoolClient(Protocol):
    """One opened contender; used by several threads simultaneously."""

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Store the pages to write; return how many of them are stored."""

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Fetch pages; return how many were found, from the first one on."""

    def remove(self, keys: Sequence[bytes]) -> object: ...

    def close(self) -> None: ...


Open = Callable[[Sequence[Pages]], PoolClient]
"""Opens a contender, which is told the memory that its pages will be in."""


class OurClient:
    """A tier of this package."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self.remove = store.remove
        self.close = store.close

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        return sum(result.durable for result in self._store.set(self._batch(keys, pages, pages.sources)))

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        return leading([result is GetResult.HIT for result in self._store.get(self._batch(keys, pages, pages.targets))])

    @staticmethod
    def _batch(keys: Sequence[bytes], pages: Pages, memory: npt.NDArray[np.uint8]) -> PageBatch:
        return PageBatch(keys, pages.segments(memory), [pages.payload] * len(keys))


@dataclass(frozen=True, slots=True)
class Case:
    """Pages of one size, moved by some threads: each its own batches, one call a batch."""

    payload: int
    threads: int
    batch: int
    batches: int
    """Batches per thread."""

    @classmethod
    def of(cls, payload: int, threads: int, total: int, batches_at_least: int = 1) -> Case:
        # Memory of a batch is bounded: 128 pages of 4 MiB would be half a gigabyte a thread, twice.
        batch = max(1, min(_BATCH, _BATCH_BYTES // payload, total // payload))
        return cls(payload, threads, batch, max(batches_at_least, -(-total // (payload * threads * batch))))

    @property
    def total(self) -> int:
        """Bytes each mode moves."""
        return self.payload * self.threads * self.batch * self.batches


def page_keys(name: str, count: int) -> list[bytes]:
    """Return page keys as stores take them: identity digest and page hash."""
    identity = hashlib.sha256(b"hicache_ext/bench").digest()[:16]
    return [identity + hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]


def measure(name: str, client: PoolClient, case: Case, memory: Sequence[Pages]) -> dict[str, Sample]:
    """Write and read everything once, under new keys, and remove it again.

    Raises CommandError for an answer that is wrong or not complete.
    """
    turn = secrets.token_hex(8)
    keys = [[page_keys(f"{turn}/{t}/{n}", case.batch) for n in range(case.batches)] for t in range(case.threads)]
    try:
        written = run_calls(case, lambda t, n: client.write(keys[t][n], memory[t]), memory, name, reads=False)
        read = run_calls(case, lambda t, n: client.read(keys[t][n], memory[t]), memory, name, reads=True)
    finally:
        for of_thread in keys:
            for batch in of_thread:
                client.remove(batch)
    return {"write": written, "read": read}


def run_calls(
    case: Case, move: Callable[[int, int], int], memory: Sequence[Pages], name: str, *, reads: bool
) -> Sample:
    """Let all threads go through their batches, and meet after each. Stamping and comparing stop the clock.

    Raises CommandError for an answer that is wrong or not complete, and what ``move`` raises.
    """
    calls: list[float] = []
    seconds = cpu = 0.0

    def call(thread: int, number: int) -> float:
        began = time.perf_counter()
        moved = move(thread, number)
        taken = time.perf_counter() - began
        if moved != case.batch:
            raise CommandError(f"{name}: {moved} pages of {case.batch} were moved")
        return taken

    with ThreadPoolExecutor(case.threads) as threads:
        for number in range(case.batches):
            for pages in memory:
                pages.received = None
                if reads:
                    pages.targets[:] = 0
                else:
                    pages.stamp(number)
            cpu_began, began = time.process_time(), time.perf_counter()
            calls += threads.map(call, range(case.threads), [number] * case.threads)
            seconds += time.perf_counter() - began
            cpu += time.process_time() - cpu_began
            if reads:
                for pages in memory:
                    pages.check(number, name)
    return Sample(case.total, seconds, cpu, tuple(calls))

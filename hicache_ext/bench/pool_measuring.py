"""What the pool benchmark measures: batches of pages, moved by several client threads, between host memory and a store.

What was read is compared outside the timed part.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.bench.comparison import Measured
from hicache_ext.bench.harness import Sample
from hicache_ext.errors import BenchmarkError, HicacheExtError
from hicache_ext.page.memory import Addresses, PageMemory
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore

MODES = ("write", "read")
SEGMENTS = 2
"""Segments of a page, as K and V are."""
_STAMP = 8


class Pages:
    """Host memory of one client thread: a batch of pages to write, and one to read into."""

    def __init__(self, payload: int, batch: int, seed: int) -> None:
        if payload % (SEGMENTS * _STAMP):
            raise BenchmarkError(f"a page of {payload} bytes cannot be made: take a multiple of {SEGMENTS * _STAMP}")
        self.payload = payload
        self.batch = batch
        self.seed = seed
        noise = np.random.default_rng(seed)
        self.sources: npt.NDArray[np.uint8] = noise.integers(0, 256, (batch, payload), np.uint8)
        self.targets: npt.NDArray[np.uint8] = np.zeros((batch, payload), np.uint8)
        self.received: Sequence[Any] | None = None
        """What a client that has buffers of its own has read."""

    def stamp(self, number: int) -> None:
        """Make the pages to write those of batch ``number``."""
        first = (self.seed << 32) + number * self.batch
        self.sources[:, :_STAMP] = np.arange(first, first + self.batch, dtype=np.uint64).view(np.uint8).reshape(-1, 8)

    def segments(self, pages: npt.NDArray[np.uint8]) -> PageMemory:
        """As a backend hands them over: addresses, by arithmetic, and memoryviews for who wants them."""
        size = self.payload // SEGMENTS
        starts = pages.ctypes.data + self.payload * np.arange(len(pages), dtype=np.int64)
        addresses = starts[:, None] + size * np.arange(SEGMENTS, dtype=np.int64)
        return PageMemory(
            Addresses(addresses, np.full(SEGMENTS, size, np.int64), self.payload),
            lambda: [[page.data[i * size : (i + 1) * size] for i in range(SEGMENTS)] for page in pages],
        )

    def check(self, number: int, contender: str) -> None:
        """Raise BenchmarkError unless what was read is, byte for byte, batch ``number``."""
        self.stamp(number)
        received = self.targets if self.received is None else self.received
        for page in range(self.batch):
            if not np.array_equal(np.frombuffer(received[page], np.uint8), self.sources[page]):
                raise BenchmarkError(f"{contender}: page {page} of batch {number} came back with other bytes")


class PoolClient(Protocol):
    """One opened contender; used by several threads at once."""

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Store the pages to write; how many of them are stored."""

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Fetch pages; how many were found."""

    def remove(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the tables. ``open`` takes what the engine's server gave and the memory pages will be in."""

    name: str
    open: Callable[[Any, Sequence[Pages]], PoolClient]
    ours: bool = False
    floor: bool = False
    """No client that anybody would use: what the server itself can do, or what a copy costs. Ratios are not to it."""
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: ``serve(directory)`` starts its server and answers what contenders are opened with."""

    name: str
    serve: Callable[[Path], AbstractContextManager[Any]]
    contenders: tuple[Contender, ...]
    missing: str | None = None
    """Why its server cannot be started here."""


class OurClient:
    """A tier of this package."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        return sum(result.durable for result in self._store.set(self._batch(keys, pages, pages.sources)))

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self._store.get(self._batch(keys, pages, pages.targets)).count(GetResult.HIT)

    @staticmethod
    def _batch(keys: Sequence[bytes], pages: Pages, memory: npt.NDArray[np.uint8]) -> PageBatch:
        return PageBatch(keys, pages.segments(memory), [pages.payload] * len(keys))

    def remove(self, keys: Sequence[bytes]) -> None:
        self._store.remove(keys)

    def close(self) -> None:
        self._store.close()


@contextmanager
def serving(engine: Engine) -> Iterator[Any]:
    """The engine's server, in a directory of its own. Raises BenchmarkError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory, ExitStack() as stack:
        try:
            place = stack.enter_context(engine.serve(Path(directory)))
        except (RuntimeError, OSError, HicacheExtError) as error:
            raise BenchmarkError(f"{engine.name}: {error}") from error
        yield place


@dataclass(frozen=True, slots=True)
class Case:
    """Pages of one size, moved by some threads: each its own batches, one call a batch."""

    payload: int
    threads: int
    batch: int
    batches: int
    """Of each thread."""

    @property
    def total(self) -> int:
        """Bytes each mode moves."""
        return self.payload * self.threads * self.batch * self.batches


def measure(name: str, client: PoolClient, case: Case, memory: Sequence[Pages]) -> Measured:
    """Write and read everything once, under new keys; removes it again.

    Raises BenchmarkError for an answer that is wrong or not complete.
    """
    turn = secrets.token_hex(8)
    keys = [
        [_keys(f"{turn}/{thread}/{number}", case.batch) for number in range(case.batches)]
        for thread in range(case.threads)
    ]
    try:
        written = _run(case, lambda t, n: client.write(keys[t][n], memory[t]), memory, name, reads=False)
        read = _run(case, lambda t, n: client.read(keys[t][n], memory[t]), memory, name, reads=True)
    finally:
        for of_thread in keys:
            for batch in of_thread:
                client.remove(batch)
    return Measured({"write": written, "read": read})


def _run(case: Case, move: Callable[[int, int], int], memory: Sequence[Pages], name: str, *, reads: bool) -> Sample:
    """All threads at once through their batches. Stamping and comparing stop the clock: threads meet before each batch.

    The time of a batch number is that from the moment all threads begin it to the moment the last has ended.
    """
    calls: list[float] = []
    failures: list[BaseException] = []
    seconds = cpu = 0.0
    for number in range(case.batches):
        for pages in memory[: case.threads]:
            pages.received = None
            if reads:
                pages.targets[:] = 0
            else:
                pages.stamp(number)
        barrier = threading.Barrier(case.threads + 1)

        def work(thread: int, number: int = number, barrier: threading.Barrier = barrier) -> None:
            try:
                barrier.wait()
                began = time.perf_counter()
                moved = move(thread, number)
                calls.append(time.perf_counter() - began)
                if moved != case.batch:
                    raise BenchmarkError(f"{moved} pages of {case.batch} were moved")
            except BaseException as error:  # noqa: BLE001 - raised again by the measuring thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(case.threads)]
        for thread in threads:
            thread.start()
        cpu_began = time.process_time()
        barrier.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds += time.perf_counter() - began
        cpu += time.process_time() - cpu_began
        if failures:
            raise BenchmarkError(f"{name}: {type(failures[0]).__name__}: {failures[0]}") from failures[0]
        if reads:
            for pages in memory[: case.threads]:
                pages.check(number, name)
    return Sample(case.total, seconds, cpu, tuple(calls))


def _keys(name: str, count: int) -> list[bytes]:
    """Page keys as stores take them: identity digest and page hash."""
    identity = hashlib.sha256(b"hicache_ext/bench").digest()[:16]
    return [identity + hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(count)]

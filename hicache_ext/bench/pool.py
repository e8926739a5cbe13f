"""``hicache-ext bench pool``: what the pool tiers of a configuration give on this machine."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.bench.frame import (
    Baseline,
    Clock,
    Measured,
    Point,
    Results,
    Sample,
    Throughput,
    Turns,
    add_output_arguments,
    machine_facts,
    positive,
)
from hicache_ext.config import load_config
from hicache_ext.config.values import format_size, parse_size
from hicache_ext.errors import BenchmarkError, ConfigError, HicacheExtError
from hicache_ext.page.memory import Addresses, PageMemory
from hicache_ext.runtime.signals import terminated_in_order
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiers.file.config import FileTierConfig

_PAYLOADS = ("128KiB", "1MiB", "4MiB")
_THREADS = (1, 4)
_PACKAGES = ("hicache-ext", "obstore", "redis", "mooncake-transfer-engine", "xxhash", "numpy")
_METHOD = """\
The same pages for every contender, between host memory of this process and the store. Rounds are interleaved,
{warm_ups} warm-up round thrown away; the column says how many were measured, of {rounds} that were asked for: medians,
quartiles in brackets. A batch of {batch} pages is one call; with several threads each makes its own calls at the same
time. What was read is compared byte for byte outside the timed part. CPU is this process's, not the server's. MB are
10^6 bytes of payload. Ratios above 1 are faster.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="a configuration; its tiers are written to and cleaned again"
    )
    parser.add_argument(
        "--tier", action="append", metavar="NAME", help="may be repeated (default: all that are not of type file)"
    )
    add_measuring_arguments(parser)
    parser.set_defaults(run=run)


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """What is moved, for how long, and where the figures go."""
    parser.add_argument(
        "--payload",
        action="append",
        metavar="SIZE",
        help=f"bytes of a page; may be repeated (default: {', '.join(_PAYLOADS)})",
    )
    parser.add_argument(
        "--threads", action="append", type=positive, help="client threads; may be repeated (default: 1 and 4)"
    )
    parser.add_argument("--total", metavar="SIZE", help="bytes each mode moves in a round (default: 64MiB)")
    parser.add_argument("--batch", type=positive, help="pages per call at most (default: 128, 16 MiB of them at most)")
    parser.add_argument("--rounds", type=positive, help="measured rounds, after one warm-up round (default: 5)")
    parser.add_argument(
        "--minutes", type=positive, default=15, help="a longer run has fewer rounds, and says so (default: 15)"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: shows that it works, no more")
    add_output_arguments(parser)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured: the arguments with their defaults filled in."""

    payloads: tuple[int, ...]
    threads: tuple[int, ...]
    total: int
    batch: int
    rounds: int
    minutes: int
    warm_ups: int = 1

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Settings:
        quick: bool = arguments.quick
        payloads = arguments.payload or (_PAYLOADS[:1] if quick else _PAYLOADS)
        return cls(
            payloads=tuple(parse_size(text, "--payload") for text in payloads),
            threads=tuple(arguments.threads or (_THREADS[:1] if quick else _THREADS)),
            total=parse_size(arguments.total or ("2MiB" if quick else "64MiB"), "--total"),
            batch=arguments.batch or (8 if quick else 128),
            rounds=arguments.rounds or (2 if quick else 5),
            minutes=arguments.minutes,
        )

    def cases(self) -> list[Case]:
        return [self._case(payload, threads) for payload in self.payloads for threads in self.threads]

    def _case(self, payload: int, threads: int) -> Case:
        # Memory of a batch is bounded: 128 pages of 4 MiB would be half a gigabyte a thread, twice.
        batch = max(1, min(self.batch, (16 << 20) // payload))
        return Case(payload, threads, batch, max(1, -(-self.total // (payload * threads * batch))))


def run(arguments: argparse.Namespace) -> int:
    """Measure the tiers of the configuration beside each other; see ``compare``."""
    # A path: an inline configuration would stand, secrets and all, in the command line that a report holds.
    tiers = load_config(arguments.config).tiers
    for name in arguments.tier or ():
        if name not in tiers:
            raise ConfigError("--tier", f"no tier is named {name!r}", ", ".join(tiers))
    chosen = arguments.tier or [name for name, tier in tiers.items() if not isinstance(tier, FileTierConfig)]
    if not chosen:
        raise ConfigError("--tier", "every tier of the configuration is of type file", "the name of one of them")

    def opener(name: str) -> Callable[[Any, Sequence[Pages]], OurClient]:
        return lambda place, memory: OurClient(open_tier(name, tiers[name]))

    contenders = tuple(Contender(f"{name} ({tiers[name].type})", opener(name), ours=True) for name in chosen)
    engine = Engine("tiers", lambda directory: nullcontext(), contenders)
    return compare(arguments, [engine], hidden={arguments.config: "CONFIG"})


def compare(
    arguments: argparse.Namespace,
    engines: Sequence[Engine],
    method: str = "",
    hidden: Mapping[Path, str] | None = None,
) -> int:
    """Measure, print, write; 0, or 1 when nothing could be measured, or a contender failed or answered wrongly (it then
    has no figures). ``method`` is what the page says of the contenders, ``hidden`` the paths
    that it does not name."""
    settings = Settings.of(arguments)
    machine = machine_facts(Path.cwd(), _PACKAGES)
    started = time.monotonic()
    contenders = [contender for engine in engines for contender in engine.contenders]
    own = frozenset(contender.name for contender in contenders if not contender.ours and not contender.floor)
    baselines = (Baseline("own client", "ratio_to_own_client", own),) if own else ()
    results = Results(tuple(dict.fromkeys(contender.name for contender in contenders)), baselines)
    clock = Clock(60.0 * settings.minutes, len(engines) * len(settings.cases()))
    turns = Turns(settings.rounds, settings.warm_ups, clock, results)
    for engine in engines:
        if engine.missing:
            results.absent[engine.name] = engine.missing
            continue
        try:
            with (
                terminated_in_order(),
                tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory,
                ExitStack() as stack,
            ):
                try:
                    place = stack.enter_context(engine.serve(Path(directory)))
                except (RuntimeError, OSError, HicacheExtError) as error:
                    raise BenchmarkError(f"{engine.name}: {error}") from error
                _measure_engine(engine, place, settings, turns)
        except BenchmarkError as error:
            results.absent[engine.name] = f"failed: {error}"
            results.failures.append(str(error))
    return results.finish(arguments, "pool", "Pool benchmark", machine, settings, _METHOD + method, hidden, started)


def _measure_engine(engine: Engine, place: Any, settings: Settings, turns: Turns) -> None:
    absent = turns.results.absent
    absent.update({f"{engine.name}, {c.name}": c.missing for c in engine.contenders if c.missing})
    able = [contender for contender in engine.contenders if not contender.missing]
    for case in settings.cases():
        memory = [Pages(case.payload, case.batch, seed) for seed in range(case.threads)]
        with ExitStack() as stack:
            ready: dict[str, Callable[[], Measured]] = {}
            for contender in list(able):
                try:
                    client = contender.open(place, memory)
                except (HicacheExtError, OSError, ImportError) as error:
                    able.remove(contender)
                    absent[f"{engine.name}, {contender.name}"] = f"failed: {error}"
                    turns.results.failures.append(f"{engine.name}, {contender.name}: {error}")
                    continue
                stack.callback(client.close)
                ready[contender.name] = partial(measure, contender.name, client, case, memory)
            plural = "s" if case.threads > 1 else ""
            title = f"{engine.name}: pages of {format_size(case.payload)} and {case.threads} thread{plural}"
            turns.take(title, {mode: point(engine.name, mode, case.payload, case.threads) for mode in MODES}, ready)


def point(engine: str, mode: str, payload: int, threads: int) -> Point:
    """Reading or writing pages of ``payload`` bytes with some client threads."""
    size, several = format_size(payload), "s" if threads > 1 else ""
    return Point(
        mode,
        f"{engine}, {mode}: pages of {size}, {threads} thread{several}",
        (("engine", engine), ("payload", payload), ("threads", threads)),
        Throughput("MB/s", 1e6),
        f"{engine}: {mode}, {threads} thread{several}",
        size,
    )


# -- pages, contenders, measuring --------------------------------------------------------------------------------------

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
    turn, identity = secrets.token_hex(8), hashlib.sha256(b"hicache_ext/bench").digest()[:16]

    def keys_of(batch: str) -> list[bytes]:
        """Return page keys as stores take them: identity digest and page hash."""
        return [identity + hashlib.sha256(f"{turn}/{batch}/{n}".encode()).digest() for n in range(case.batch)]

    keys = [[keys_of(f"{thread}/{n}") for n in range(case.batches)] for thread in range(case.threads)]
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

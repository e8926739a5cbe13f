#!/usr/bin/env python3
"""Prefetch under a queue of requests whose prefixes lie in a pool with latency.

SGLang's two storage threads are played exactly: one asks exists() for request after request, the other reads the hits
one at a time, at most 128 pages a call; in between, the scheduler takes note of hits once every ``--tick``. All
contenders read the same bytes from page files on the same disk; one of them writes them to a near tier in the
background besides, as a node with a disk of its own does. The pool's round trip takes ``--latency`` and carries
``--parallel`` pages: 128 is a store that answers any call at once (Redis), 16 one with that many connections (an object
store). HiCacheFile is given the same, although it reads page after page: a file system with that latency
would cost it ``--latency`` a page. Contenders take turns, round by round; the first round warms up and checks every
byte.

Measured per request: the share of its pages that were inside when SGLang asked for them, and the time from the arrival
of the queue until its last page was in host memory, which is when its prefill can begin. Afterwards the same queue with
half of its requests aborted between exists() and the read: what was fetched in vain. The defaults take about four
minutes: ``python -m benchmarks.bench_prefetch --json build/prefetch.json``.
"""

from __future__ import annotations

import argparse
import math
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.bench.file import HiCacheFileContender
from hicache_ext.bench.frame import (
    Quartiles,
    Table,
    add_json_argument,
    fresh_directory,
    interleaved,
    machine_facts,
    number,
    report,
)
from hicache_ext.bench.pool import Pages, page_keys
from hicache_ext.cli.main import without_traceback
from hicache_ext.errors import CommandError
from hicache_ext.runtime.commands import terminated_in_order
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, StoreInfo
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from tests.rigs.faults import PageStoreWrapper
from tests.waiting import count_fetched

PAGE_SIZE = 16
MOST_PAGES_A_CALL = 128
PREFETCH, PROMOTION, NO_PREFETCH = "prefetch", "prefetch and promotion", "no prefetch"
CAPACITY = 64 << 30
_WASTE_SHARE = 8
"""Of the buffer, that the run with aborted requests gets."""


class Reader(Protocol):
    """What one contender is to the two threads."""

    def exists(self, keys: Sequence[bytes]) -> int: ...

    def inside(self, keys: Sequence[bytes]) -> int: ...

    def read(self, keys: Sequence[bytes], memory: npt.NDArray[np.uint8]) -> int: ...

    def close(self) -> dict[str, float]: ...


@dataclass(slots=True)
class Round:
    """Seconds until each request was in, and the share of each that was inside when it was asked for."""

    done: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)


class Pool(PageStoreWrapper):
    """A store at a distance."""

    def __init__(self, inner: PageStore, latency: float, parallel: int) -> None:
        super().__init__(inner)
        self._latency = latency
        self._parallel = parallel

    def describe(self) -> StoreInfo:
        return replace(super().describe(), shared=True)

    def get(self, batch: PageBatch) -> list[GetResult]:
        time.sleep(self._latency * -(-len(batch) // self._parallel))
        return super().get(batch)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        time.sleep(self._latency)
        return super().count_leading(keys)


class OurReader:
    """The pool, alone or behind an empty near tier that pages are promoted to."""

    def __init__(self, pool: PageStore, near: PageStore | None, host: Pages, settings: TieringSettings) -> None:
        self._host = host
        self._pool = pool
        inner = [] if near is None else [near]
        self._store = TieredStore([*inner, pool], inner, promote_to=near, settings=settings)
        self._store.register_identity(page_keys("", 1)[0][:16], {"pool": {"segments": [host.payload]}})

    def exists(self, keys: Sequence[bytes]) -> int:
        return self._store.count_leading(keys)

    def inside(self, keys: Sequence[bytes]) -> int:
        return count_fetched(self._store.prefetcher, keys)

    def read(self, keys: Sequence[bytes], memory: npt.NDArray[np.uint8]) -> int:
        return self._store.get(PageBatch(keys, self._host.segments(memory))).count(GetResult.HIT)

    def held(self) -> float:
        return self._store.metrics.levels().get(("prefetch_buffer_bytes", ""), 0.0)

    def close(self) -> dict[str, float]:
        self._store.close()
        counts = self._pool.metrics.snapshot()
        return {f"{event} {reason}": value for (event, reason), value in counts.items() if event.startswith("prefetch")}


class SglangReader:
    """HiCacheFile over the same bytes; every call delayed once."""

    def __init__(self, directory: Path, page_bytes: int, latency: float, parallel: int) -> None:
        self._contender = HiCacheFileContender(directory, CAPACITY, page_bytes)
        self._latency = latency
        self._parallel = parallel

    def exists(self, keys: Sequence[bytes]) -> int:
        time.sleep(self._latency)
        return int(self._contender.backend.batch_exists([key.hex() for key in keys]))

    def inside(self, keys: Sequence[bytes]) -> int:
        return 0

    def read(self, keys: Sequence[bytes], memory: npt.NDArray[np.uint8]) -> int:
        time.sleep(self._latency * -(-len(keys) // self._parallel))
        return self._contender.read_into(keys, memory)

    def close(self) -> dict[str, float]:
        self._contender.close()
        return {}


def play(
    reader: Reader,
    requests: Sequence[Sequence[bytes]],
    host: Pages,
    aborted: frozenset[int],
    tick: float,
    check: bool,
) -> Round:
    """Let the two threads work off the queue. Raises CommandError for a page that is missing or wrong."""
    hits: queue.Queue[tuple[int, int, float] | None] = queue.Queue()
    result = Round()
    errors: list[BaseException] = []
    started = time.perf_counter()

    def ask() -> None:
        try:
            for request, keys in enumerate(requests):
                hits.put((request, reader.exists(keys), time.perf_counter()))
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)
        finally:
            hits.put(None)

    asking = threading.Thread(target=ask)
    asking.start()
    while (hit := hits.get()) is not None:
        request, leading, answered = hit
        if request in aborted:
            continue
        if tick:
            # Until the scheduler has seen the hit and allocated host memory.
            seen = started + tick * math.ceil((answered - started) / tick)
            time.sleep(max(0.0, seen - time.perf_counter()))
        keys = requests[request]
        if leading != len(keys):
            raise CommandError(f"exists() answered {leading} of {len(keys)} pages")
        if check:
            host.targets[:] = 0
        inside = 0
        for first in range(0, len(keys), MOST_PAGES_A_CALL):
            portion = keys[first : first + MOST_PAGES_A_CALL]
            inside += reader.inside(portion)
            if reader.read(portion, host.targets[first : first + len(portion)]) != len(portion):
                raise CommandError("a page of a hit was not read")
        result.done.append(time.perf_counter() - started)
        result.inside.append(inside / len(keys))
        if check:
            host.check(request, type(reader).__name__)
    asking.join()
    if errors:
        raise errors[0]
    return result


@dataclass(frozen=True, slots=True)
class Measured:
    """What all contenders did against one pool."""

    parallel: int
    rounds: dict[str, list[Round]]
    wasted: dict[str, float]


def main() -> int:
    arguments = _parse()
    begun = time.monotonic()
    with terminated_in_order(), fresh_directory(arguments.directory or Path(tempfile.gettempdir())) as directory:
        facts = machine_facts(directory, ("sglang",))
        measured = _measure(arguments, directory)
    print(f"{time.monotonic() - begun:.0f} s in all")
    pools = [
        {
            "parallel": one.parallel,
            "rounds": {
                name: [{"done": played.done, "inside": played.inside, **played.facts} for played in of_name]
                for name, of_name in one.rounds.items()
            },
            "aborted": one.wasted,
        }
        for one in measured
    ]
    report(arguments, "prefetch", facts, {"pools": pools}, [])
    return 0


def _measure(arguments: argparse.Namespace, directory: Path) -> list[Measured]:
    """Measure against each pool, and print what came out as soon as it is known."""
    pages = arguments.tokens // PAGE_SIZE
    host = Pages(arguments.page_bytes, pages, 0)
    requests = [page_keys(f"request-{number}", pages) for number in range(arguments.requests)]
    theirs = directory / "sglang"
    theirs.mkdir()
    _fill(directory / "pool", theirs, host, requests)
    measured = []
    for parallel in arguments.parallel:
        one = _measure_pool(arguments, directory, theirs, host, requests, parallel)
        print(f"{_table(arguments, one).text()}\n\n{_waste_sentence(arguments, one)}\n", flush=True)
        measured.append(one)
    return measured


def _measure_pool(
    arguments: argparse.Namespace,
    directory: Path,
    theirs: Path,
    host: Pages,
    requests: Sequence[Sequence[bytes]],
    parallel: int,
) -> Measured:
    latency = arguments.latency / 1000
    numbers = iter(range(1_000_000))

    def ours(buffer: int, lifetime: float = 60.0, *, near: PageStore | None = None) -> OurReader:
        pool = Pool(PageFileStore("pool", directory / "pool", capacity=None), latency, parallel)
        return OurReader(
            pool,
            near,
            host,
            TieringSettings(prefetch_buffer=buffer, prefetch_lifetime=lifetime, prefetch_streams=arguments.streams),
        )

    def empty_near_tier() -> PageStore:
        return PageFileStore("near", directory / f"near-{parallel}-{next(numbers)}", capacity=None)

    contenders: dict[str, Callable[[], Reader]] = {
        PREFETCH: lambda: ours(arguments.buffer),
        PROMOTION: lambda: ours(arguments.buffer, near=empty_near_tier()),
        NO_PREFETCH: lambda: ours(0),
        "HiCacheFile": lambda: SglangReader(theirs, arguments.page_bytes, latency, parallel),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    for _, name, counts in interleaved(list(contenders), arguments.rounds):
        reader = contenders[name]()
        played = play(reader, requests, host, frozenset(), arguments.tick / 1000, check=not counts)
        played.facts = reader.close()
        if counts:
            rounds[name].append(played)
        for near in directory.glob(f"near-{parallel}-*"):
            shutil.rmtree(near)
    return Measured(parallel, rounds, _measure_waste(arguments, requests, host, ours))


def _table(arguments: argparse.Namespace, measured: Measured) -> Table:
    pages = arguments.tokens // PAGE_SIZE
    base = Quartiles.of([float(np.mean(played.done)) for played in measured.rounds[NO_PREFETCH]]).median
    rows = []
    for name, of_name in measured.rounds.items():
        first = Quartiles.of([played.done[0] for played in of_name])
        mean = Quartiles.of([float(np.mean(played.done)) for played in of_name])
        last = Quartiles.of([played.done[-1] for played in of_name])
        inside = 100 * float(np.mean([share for played in of_name for share in played.inside]))
        joined = np.mean([played.facts.get("prefetch joined", 0) for played in of_name])
        rows.append(
            (
                name,
                f"{inside:.0f} %" if name in (PREFETCH, PROMOTION) else "-",
                f"{100 * joined / (pages * arguments.requests):.0f} %" if name in (PREFETCH, PROMOTION) else "-",
                number(first.median * 1000),
                number(mean.median * 1000),
                f"{number(mean.lower * 1000)}-{number(mean.upper * 1000)}",
                number(last.median * 1000),
                f"{mean.median / base:.2f}",
            )
        )
    size = arguments.page_bytes * pages * arguments.requests / 1e6
    return Table(
        f"{arguments.requests} requests of {pages} pages ({size:.0f} MB), "
        f"{arguments.latency:g} ms a round trip of {measured.parallel} pages, "
        f"buffer {arguments.buffer / 2**20:g} MiB, {arguments.rounds} rounds; times in ms",
        ("", "inside", "under way", "first", "mean", "quartiles", "last", "mean / no prefetch"),
        tuple(rows),
    )


def _waste_sentence(arguments: argparse.Namespace, measured: Measured) -> str:
    wasted = measured.wasted
    return (
        f"Half of the requests aborted before the read: {wasted['fetched'] / 1e6:.0f} MB fetched, "
        f"{wasted['wasted'] / 1e6:.0f} MB in vain, at most {wasted['most_held'] / 1e6:.0f} MB held "
        f"(buffer {wasted['buffer'] / 1e6:.0f} MB), {wasted['held_after'] / 1e6:.0f} MB after the lifetime"
    )


def _measure_waste(
    arguments: argparse.Namespace,
    requests: Sequence[Sequence[bytes]],
    host: Pages,
    ours: Callable[[int, float], OurReader],
) -> dict[str, float]:
    lifetime = 1.5
    # Small enough that the bound is met.
    buffer = arguments.buffer // _WASTE_SHARE
    reader = ours(buffer, lifetime)
    most = 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, reader.held())

    watching = threading.Thread(target=watch)
    watching.start()
    play(reader, requests, host, frozenset(range(0, len(requests), 2)), arguments.tick / 1000, check=False)
    time.sleep(2 * lifetime)
    held = reader.held()
    ended.set()
    watching.join()
    facts = reader.close()
    if most > buffer or held:
        raise CommandError(f"prefetch held {most:.0f} bytes, and {held:.0f} after their lifetime: it is not bounded")
    return {
        "fetched": facts.get("prefetch_bytes fetched", 0),
        "wasted": facts.get("prefetch_bytes wasted", 0),
        "buffer": buffer,
        "most_held": most,
        "held_after": held,
    }


def _fill(pool: Path, theirs: Path, host: Pages, requests: Sequence[Sequence[bytes]]) -> None:
    """Write every request to the pool and to HiCacheFile's directory."""
    store = PageFileStore("pool", pool, capacity=None)
    sglang = HiCacheFileContender(theirs, CAPACITY, host.payload)
    for request, keys in enumerate(requests):
        host.stamp(request)
        written = store.set(PageBatch(keys, host.segments(host.sources)))
        if not all(result.durable for result in written) or sglang.write(keys, host) != len(keys):
            raise CommandError("the pool could not be filled")
    store.close()
    sglang.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="of each prefix; a page has 16")
    parser.add_argument("--page-bytes", type=int, default=64 * 1024)
    parser.add_argument("--latency", type=float, default=20.0, help="of a call on the pool, in ms")
    parser.add_argument(
        "--parallel", type=int, nargs="+", default=[16, 128], help="pages that a round trip carries; one pool for each"
    )
    parser.add_argument("--tick", type=float, default=20.0, help="of SGLang's scheduler, in ms")
    parser.add_argument("--buffer", type=int, default=256 << 20, help="of the prefetch, in bytes")
    parser.add_argument("--streams", type=int, default=TieringSettings().prefetch_streams, help="of the prefetch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where the pages go (default: the temporary one)")
    add_json_argument(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(without_traceback(main))

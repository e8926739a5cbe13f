#!/usr/bin/env python3
"""Prefetch under a queue of requests whose prefixes lie in a pool with latency.

SGLang's two storage threads are played exactly: one asks exists() for request after request, the other reads the hits
one at a time, at most 128 pages a call; in between, the scheduler takes note of hits once every ``--tick``. All
contenders read the same bytes from page files on the same disk, behind a pool whose round trip takes ``--latency`` and
carries ``--parallel`` pages: 128 is a store that answers any call at once (Redis), 16 one with that many connections
(an object store). HiCacheFile is given the same, although it reads page after page: a file system with that latency
would cost it ``--latency`` a page. Contenders take turns, round by round; the first round warms up and checks every
byte.

Measured per request: the share of its pages that were inside when SGLang asked for them, and the time from the arrival
of the queue until its last page was in host memory, which is when its prefill can begin. Afterwards the same queue with
half of its requests aborted between exists() and the read: what was fetched in vain.
"""

from __future__ import annotations

import argparse
import math
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hicache_ext.bench.file_command import _prepare_sglang
from hicache_ext.bench.file_contenders import (
    PAGE_SIZE,
    HiCacheFileContender,
    HostBatch,
    HostBuffers,
    Workplace,
    page_keys,
)
from hicache_ext.bench.harness import (
    BenchmarkError,
    Spread,
    Table,
    command_line,
    interleaved,
    machine_facts,
    number,
    today,
    write_json,
)
from hicache_ext.errors import HicacheExtError
from hicache_ext.storage.file.pages import PageFileStore
from hicache_ext.storage.prefetch import PrefetchSettings
from hicache_ext.storage.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiered import TieredStore, TieringSettings
from hicache_ext.testing.faults import PageStoreWrapper

IDENTITY = bytes(16)
MOST_PAGES_A_CALL = 128
CAPACITY = 64 << 30


class Reader(Protocol):
    """What one contender is to the two threads."""

    def exists(self, keys: Sequence[str]) -> int: ...

    def inside(self, keys: Sequence[str]) -> int: ...

    def read(self, keys: Sequence[str], batch: HostBatch) -> int: ...

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

    def get(self, batch: PageBatch) -> list[GetResult]:
        time.sleep(self._latency * -(-len(batch) // self._parallel))
        return super().get(batch)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        time.sleep(self._latency)
        return super().count_leading(keys)


class OurReader:
    """An empty near tier that pages are promoted to, and the pool behind it."""

    def __init__(self, pool: PageStore, near: PageStore, host: HostBuffers, buffer: int, lifetime: float) -> None:
        self._host = host
        self._near = near
        self._pool = pool
        settings = TieringSettings(prefetch=PrefetchSettings(buffer=buffer, lifetime=lifetime))
        self._store = TieredStore([self._near, self._pool], [self._near], promote_to=self._near, settings=settings)
        self._store.register_identity(IDENTITY, {"pool": {"segments": [host.payload]}})

    def exists(self, keys: Sequence[str]) -> int:
        return self._store.count_leading(_stored(keys))

    def inside(self, keys: Sequence[str]) -> int:
        return self._store.prefetcher.inside(_stored(keys))

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        buffers = [self._host.pages.buffers(page) for page in batch.pages]
        return self._store.get(PageBatch(_stored(keys), buffers)).count(GetResult.HIT)

    def held(self) -> float:
        return self._store.metrics.levels().get(("prefetch_buffer_bytes", ""), 0.0)

    def close(self) -> dict[str, float]:
        self._store.close()
        counts = self._pool.metrics.snapshot()
        return {f"{event} {reason}": value for (event, reason), value in counts.items() if event.startswith("prefetch")}


class SglangReader:
    """HiCacheFile over the same bytes; every call delayed once."""

    def __init__(self, place: Workplace, latency: float, parallel: int) -> None:
        self._contender = HiCacheFileContender(place)
        self._latency = latency
        self._parallel = parallel

    def exists(self, keys: Sequence[str]) -> int:
        time.sleep(self._latency)
        return self._contender.count_leading(keys)

    def inside(self, keys: Sequence[str]) -> int:
        return 0

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        time.sleep(self._latency * -(-len(keys) // self._parallel))
        return self._contender.read(keys, batch)

    def close(self) -> dict[str, float]:
        self._contender.close()
        return {}


def play(
    reader: Reader,
    requests: Sequence[Sequence[str]],
    host: HostBuffers,
    aborted: frozenset[int],
    tick: float,
    check: bool,
) -> Round:
    """Let the two threads work off the queue. Raises BenchmarkError for a page that is missing or wrong."""
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
            raise BenchmarkError(f"exists() answered {leading} of {len(keys)} pages")
        if check:
            host.wipe()
        inside = 0
        for first in range(0, len(keys), MOST_PAGES_A_CALL):
            portion = keys[first : first + MOST_PAGES_A_CALL]
            inside += reader.inside(portion)
            pages = host.targets.pages[first : first + len(portion)]
            indices = host.targets.indices[first * PAGE_SIZE : (first + len(portion)) * PAGE_SIZE]
            if reader.read(portion, HostBatch(pages, indices)) != len(portion):
                raise BenchmarkError("a page of a hit was not read")
        result.done.append(time.perf_counter() - started)
        result.inside.append(inside / len(keys))
        if check:
            host.check(request, type(reader).__name__)
    asking.join()
    if errors:
        raise errors[0]
    return result


def main() -> int:
    arguments = _parse()
    _prepare_sglang()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-prefetch-") as text:
        directory = Path(text)
        try:
            document = _measure(arguments, directory)
        except HicacheExtError as error:
            print(error, file=sys.stderr)
            return 1
    if arguments.json:
        write_json(arguments.json, document)
    return 0


def _measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    pages = arguments.tokens // PAGE_SIZE
    host = HostBuffers("mha", arguments.page_bytes, pages)
    requests = [page_keys(f"request-{number}", pages) for number in range(arguments.requests)]
    latency = arguments.latency / 1000
    everything = pages * len(requests)
    theirs = Workplace(directory=directory / "sglang", host=host, capacity=CAPACITY, pages=everything, threads=1)
    theirs.directory.mkdir()
    _fill(directory / "pool", theirs, host, requests)

    numbers = iter(range(1_000_000))

    def ours(buffer: int, lifetime: float = 60.0) -> OurReader:
        pool = Pool(PageFileStore("pool", [directory / "pool"], capacity=None), latency, arguments.parallel)
        near = PageFileStore("near", [directory / f"near-{next(numbers)}"], capacity=None)
        return OurReader(pool, near, host, buffer, lifetime)

    contenders: dict[str, Callable[[], Reader]] = {
        "prefetch": lambda: ours(arguments.buffer),
        "no prefetch": lambda: ours(0),
        "HiCacheFile": lambda: SglangReader(theirs, latency, arguments.parallel),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    for _, name, counts in interleaved(list(contenders), arguments.rounds):
        reader = contenders[name]()
        played = play(reader, requests, host, frozenset(), arguments.tick / 1000, check=not counts)
        played.facts = reader.close()
        if counts:
            rounds[name].append(played)

    base = np.mean([np.mean(played.done) for played in rounds["no prefetch"]])
    rows = []
    for name, of_name in rounds.items():
        first = Spread.of([played.done[0] for played in of_name])
        mean = Spread.of([float(np.mean(played.done)) for played in of_name])
        last = Spread.of([played.done[-1] for played in of_name])
        inside = 100 * float(np.mean([share for played in of_name for share in played.inside]))
        joined = np.mean([played.facts.get("prefetch joined", 0) for played in of_name])
        rows.append(
            (
                name,
                f"{inside:.0f} %" if name == "prefetch" else "-",
                f"{100 * joined / (pages * len(requests)):.0f} %" if name == "prefetch" else "-",
                number(first.median * 1000),
                number(mean.median * 1000),
                f"{number(mean.lower * 1000)}-{number(mean.upper * 1000)}",
                number(last.median * 1000),
                f"{mean.median / base:.2f}",
            )
        )
    size = arguments.page_bytes * pages * len(requests) / 1e6
    table = Table(
        f"{len(requests)} requests of {pages} pages ({size:.0f} MB), "
        f"{arguments.latency:g} ms a round trip of {arguments.parallel} pages, "
        f"buffer {arguments.buffer / 2**20:g} MiB, {arguments.rounds} rounds; times in ms",
        ("", "inside", "under way", "first", "mean", "quartiles", "last", "mean / no prefetch"),
        tuple(rows),
    )
    print(table.text())
    wasted = _measure_waste(arguments, requests, host, ours)
    print(
        f"\nhalf of the requests aborted before the read: {wasted['fetched'] / 1e6:.0f} MB fetched, "
        f"{wasted['wasted'] / 1e6:.0f} MB in vain, at most {wasted['most_held'] / 1e6:.0f} MB held "
        f"(buffer {arguments.buffer / 1e6:.0f} MB), {wasted['held_after'] / 1e6:.0f} MB after the lifetime"
    )
    return {
        "command": command_line(),
        "date": today(),
        "machine": machine_facts(directory, ("sglang",)),
        "rounds": {
            name: [{"done": played.done, "inside": played.inside, **played.facts} for played in of_name]
            for name, of_name in rounds.items()
        },
        "aborted": wasted,
    }


def _measure_waste(
    arguments: argparse.Namespace,
    requests: Sequence[Sequence[str]],
    host: HostBuffers,
    ours: Callable[[int, float], OurReader],
) -> dict[str, float]:
    lifetime = 1.5
    reader = ours(arguments.buffer, lifetime)
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
    return {
        "fetched": facts.get("prefetch_bytes fetched", 0),
        "wasted": facts.get("prefetch_bytes wasted", 0),
        "most_held": most,
        "held_after": held,
    }


def _fill(pool: Path, theirs: Workplace, host: HostBuffers, requests: Sequence[Sequence[str]]) -> None:
    """Write every request to the pool and to HiCacheFile's directory."""
    store = PageFileStore("pool", [pool], capacity=None)
    sglang = HiCacheFileContender(theirs)
    for request, keys in enumerate(requests):
        host.stamp(request)
        batch = host.first_sources(len(keys))
        written = store.set(PageBatch(_stored(keys), [host.pages.buffers(page) for page in batch.pages]))
        if not all(result.durable for result in written) or sglang.write(keys, batch) != len(keys):
            raise BenchmarkError("the pool could not be filled")
    store.close()
    sglang.close()


def _stored(keys: Sequence[str]) -> list[bytes]:
    return [IDENTITY + bytes.fromhex(key) for key in keys]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="of each prefix; a page has 16")
    parser.add_argument("--page-bytes", type=int, default=64 * 1024)
    parser.add_argument("--latency", type=float, default=20.0, help="of a call on the pool, in ms")
    parser.add_argument("--parallel", type=int, default=16, help="pages that a round trip carries")
    parser.add_argument("--tick", type=float, default=20.0, help="of SGLang's scheduler, in ms")
    parser.add_argument("--buffer", type=int, default=256 << 20, help="of the prefetch, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where the pages go (default: the temporary one)")
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Kill writers, evictors, cleaners and index rebuilds of the slab layout at random moments, four processes at a time.

::

    python -m tests.campaigns.kill_slabs --kills 1000 --seed 1 --report docs/reports/kills-slab.md

Three processes work on one directory of slabs while this one reads and verifies all the time; one of them after the
other is killed with SIGKILL and replaced. The bytes of a page follow from its key, so any process can tell a wrong
one. Every so often all are killed, the index is thrown away, and a process that rebuilds it from the envelopes is
killed too. After that, and at the end: the index does not contradict itself, no slot is lost, the slabs are within the
capacity, and every key can be written and read.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.io_plan import IoPlan
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory, slab_directory
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, HostPages, cut, page_key, payload_of

KEYS = [page_key(number, identity) for identity in (IDENTITY, OTHER_IDENTITY) for number in range(96)]
SIZES = {key: cut(random.Random(key).choice([1000, 12_288, 65_536, 131_072]), 3) for key in KEYS}
OF_ONE_SIZE = [[key for key in KEYS if sum(SIZES[key]) == size] for size in sorted({sum(SIZES[key]) for key in KEYS})]
CAPACITY = 6 << 20
"""Less than half of what all keys need: every writer evicts."""
INDEX_GROWTH = 512 << 10
"""What the index may have grown by since the last write looked at it; the next one takes that back from the slabs."""
WORKERS = 3
KILLS_BETWEEN_REBUILDS = 25
LATEST_KILL = 0.05
HITS_BESIDE_WRITERS = 100
"""Between two rebuilds so many pages at least are read and verified while others work."""
LONG = 60.0
AFTER_KILLS_AND_REBUILD = "at the first read after kills and a rebuild"
PROCESSES = multiprocessing.get_context("forkserver")
"""Forked from a process that has compiled code already: loading it takes longer than most of them live."""
PROCESSES.set_forkserver_preload(["tests.campaigns.compiled_beforehand"])


@dataclass
class Findings:
    """What was seen; ``problems`` is what must not be."""

    kills: int = 0
    rebuilds_killed: int = 0
    pages_rebuilt: int = 0
    hits: int = 0
    hits_beside_writers: int = 0
    misses: int = 0
    refused: int = 0
    """Damaged pages that rebuilds right after kills brought back."""
    problems: Counter[str] = field(default_factory=Counter)


def open_store(place: Path) -> SlabStore:
    return SlabStore("disk", place, capacity=CAPACITY, plan=IoPlan(threads=2))


def some_keys(chance: random.Random, most: int) -> list[bytes]:
    """Half of the time of one size: only such batches are moved by compiled code."""
    among = chance.choice([KEYS, chance.choice(OF_ONE_SIZE)])
    return chance.sample(among, min(chance.randint(1, most), len(among)))


def work(place: str, seed: int, ready: Connection) -> None:
    """The process that is killed: writes (and so evicts), reads, removes, clears."""
    chance = random.Random(seed)
    payloads = {key: payload_of(key, sum(SIZES[key])) for key in KEYS}
    store = open_store(Path(place))
    ready.send("working")
    # Nobody is left behind where the campaign itself is killed.
    campaign = multiprocessing.parent_process()
    while campaign is None or campaign.is_alive():
        keys = some_keys(chance, 24)
        pages = HostPages([SIZES[key] for key in keys])
        for position, key in enumerate(keys):
            pages.write(position, payloads[key])
        store.set(PageBatch(keys, pages.buffers))
        choice = chance.random()
        if choice < 0.05:
            store.clear([chance.choice([IDENTITY, OTHER_IDENTITY])])
        elif choice < 0.2:
            store.remove(chance.sample(KEYS, 24))
        elif choice < 0.5:
            store.get(PageBatch(keys, pages.buffers))


def only_open(place: str, ready: Connection) -> None:
    """The process that is killed while it rebuilds the index."""
    ready.send("opening")
    open_store(Path(place))
    time.sleep(60)


def verify(store: SlabStore, keys: Sequence[bytes], findings: Findings, when: str) -> list[GetResult]:
    pages = HostPages([SIZES[key] for key in keys])
    results = store.get(PageBatch(keys, pages.buffers))
    for position, (key, result) in enumerate(zip(keys, results, strict=True)):
        if result is GetResult.HIT:
            findings.hits += 1
            if pages.payload(position) != payload_of(key, sum(SIZES[key])):
                findings.problems[f"a wrong page, {when}"] += 1
        elif result is GetResult.MISS:
            findings.misses += 1
        elif result is GetResult.CORRUPT and when == AFTER_KILLS_AND_REBUILD:
            findings.refused += 1
        else:
            findings.problems[f"{result.name}, {when}"] += 1
    return results


class Reader:
    """Reads random pages in a thread until it is stopped, and verifies every hit."""

    def __init__(self, place: Path, findings: Findings, seed: int) -> None:
        self._store = open_store(place)
        self._findings = findings
        self._chance = random.Random(seed)
        self._hits = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            results = verify(self._store, some_keys(self._chance, 8), self._findings, "while others work")
            self._hits += results.count(GetResult.HIT)
            time.sleep(0.001)

    def wait_for_hits(self, count: int) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + LONG
        while self._hits < count:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise TimeoutError(f"{self._hits} pages were read while others worked")
            time.sleep(0.01)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._findings.hits_beside_writers += self._hits
        self._store.close()


def start(target: object, *arguments: object) -> BaseProcess:
    mine, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=target, args=(*arguments, theirs))  # type: ignore[arg-type]
    process.start()
    if not mine.poll(60):
        raise TimeoutError("a worker did not start")
    return process


def kill(process: BaseProcess) -> None:
    if not process.is_alive():
        raise ChildProcessError("a worker ended by itself")
    process.kill()
    process.join()


def look_at_index(place: Path, findings: Findings, when: str) -> None:
    """Nobody else has the directory open: index and files must agree, and no slot may be lost."""
    with slab_directory(place, "disk") as directory:
        index = directory.index
        with index.changing() as change:
            change.release_dead_writers()
        for fault in index.check():
            findings.problems[f"the index contradicts itself, {when}: {fault}"] += 1
        if index.counts()["pending"]:
            findings.problems[f"slots are still pending, {when}"] += 1
        slabs = index.slabs()
        wrong = pages_with_other_headers(directory)
        if wrong:
            findings.problems[f"{wrong} pages whose header or seal is another's, {when}"] += 1
        files = {path.name: path.stat().st_size for path in directory.slabs_path.iterdir()}
        expected = {directory.slab_path(slab).name: slab.size for slab in slabs}
        if files != expected | {directory.headers_path(slab).name: slab.headers_size for slab in slabs}:
            findings.problems[f"index and slab files differ, {when}"] += 1
        used = sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())
        if used > CAPACITY + INDEX_GROWTH:
            findings.problems[f"{used} bytes used, {CAPACITY} allowed, {when}"] += 1


def pages_with_other_headers(directory: SlabDirectory) -> int:
    """How many pages of the index do not have the header and the seal of their key and length."""
    index, wrong = directory.index, 0
    slabs = {slab.number: slab for slab in index.slabs()}
    headers = {number: directory.headers_path(slab).read_bytes() for number, slab in slabs.items()}
    for page in index.pages():
        number, slot = page.place.slab, page.place.slot
        fields = headers[number][slot * 128 : (slot + 1) * 128]
        seal = index.seals[slabs[number].first_record + slot].tobytes()
        try:
            header = envelope.decode_header(fields)
        except FormatError:
            wrong += 1
            continue
        wrong += (header.key, header.payload_length, envelope.seal_of(fields)) != (page.key, page.place.length, seal)
    return wrong


def every_key_works(place: Path, findings: Findings) -> None:
    store = open_store(place)
    try:
        for key in KEYS:
            pages = HostPages([SIZES[key]])
            pages.write(0, payload_of(key, sum(SIZES[key])))
            if store.set(PageBatch([key], pages.buffers)) not in ([SetResult.STORED], [SetResult.EXISTS]):
                findings.problems["a key that cannot be written"] += 1
            elif verify(store, [key], findings, "after it was written again") != [GetResult.HIT]:
                findings.problems["a key that cannot be read"] += 1
    finally:
        store.close()


def read_all(place: Path, findings: Findings, when: str) -> None:
    store = open_store(place)
    try:
        verify(store, KEYS, findings, when)
    finally:
        store.close()


def kill_rebuilds(place: Path, chance: random.Random, findings: Findings) -> None:
    """Throw the index away, kill processes that rebuild it, then let one finish."""
    for _ in range(3):
        shutil.rmtree(place / "index", ignore_errors=True)
        (place / "trust").unlink(missing_ok=True)
        process = start(only_open, str(place))
        time.sleep(chance.random() * 0.1)
        kill(process)
        findings.kills += 1
        findings.rebuilds_killed += 1
    # As after a power loss: the trust is that of another boot.
    (place / "trust").write_text("another boot")
    with slab_directory(place, "disk") as directory:
        findings.pages_rebuilt += directory.rebuilt
        for fault in directory.index.check():
            findings.problems[f"the rebuilt index contradicts itself: {fault}"] += 1


def run(kills: int, seed: int) -> Findings:
    chance = random.Random(seed)
    findings = Findings()
    root = Path(tempfile.mkdtemp(prefix="hicache-kills-"))
    place = root / "disk"
    try:
        while findings.kills < kills:
            workers = [start(work, str(place), chance.randrange(1 << 30)) for _ in range(WORKERS)]
            reader = Reader(place, findings, chance.randrange(1 << 30))
            try:
                for _ in range(min(KILLS_BETWEEN_REBUILDS, kills - findings.kills)):
                    time.sleep(chance.random() * LATEST_KILL)
                    kill(workers.pop(0))
                    findings.kills += 1
                    workers.append(start(work, str(place), chance.randrange(1 << 30)))
                reader.wait_for_hits(HITS_BESIDE_WRITERS)
            finally:
                for worker in workers:
                    worker.kill()
                    worker.join()
                reader.close()
            look_at_index(place, findings, "after kills")
            if chance.random() < 0.5:
                every_key_works(place, findings)
                kill_rebuilds(place, chance, findings)
            else:
                kill_rebuilds(place, chance, findings)
                read_all(place, findings, AFTER_KILLS_AND_REBUILD)
            every_key_works(place, findings)
            look_at_index(place, findings, "after a rebuild")
    finally:
        shutil.rmtree(root)
    return findings


def report(found: Findings, seed: int, seconds: float) -> str:
    problems = sum(found.problems.values())
    return "\n".join(
        [
            "# Killed slab writers",
            "",
            f"`python -m tests.campaigns.kill_slabs --kills {found.kills} --seed {seed}`: four processes on one "
            f"directory of {CAPACITY >> 20} MiB, {seconds:.0f} s on {os.cpu_count()} cores, "
            f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}.",
            "",
            "| | |",
            "|---|---|",
            f"| processes killed with SIGKILL | {found.kills} |",
            f"| of them while rebuilding the index | {found.rebuilds_killed} |",
            f"| pages brought back by rebuilds | {found.pages_rebuilt} |",
            f"| pages read and verified | {found.hits} |",
            f"| of them while others worked | {found.hits_beside_writers} |",
            f"| misses | {found.misses} |",
            f"| refused at the first read after kills and a rebuild | {found.refused} |",
            f"| problems | {problems} |",
            "",
            "Checked: no wrong byte, no CORRUPT and no ERROR in what another process read meanwhile; after all were"
            " killed, and after each rebuild, an index that does not contradict itself, files, headers and seals that"
            " agree with it, no slot lost, everything within the capacity, every key written and read again. Half of"
            " the rebuilds follow kills at once: what they bring back that is damaged (the header of an evicted page"
            " over one that was being written) is refused at its first read.",
            "",
            "Problems: none." if not problems else "Problems:",
            *(f"- {count} x {problem}" for problem, count in found.problems.most_common(20)),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a file to write the report to, besides standard output")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    begun = time.monotonic()
    findings = run(options.kills, options.seed)
    text = report(findings, options.seed, time.monotonic() - begun)
    print(text)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill writers, evictors, cleaners and index rebuilds of the slab layout at random moments, four processes at a time.

::

    python -m tests.campaigns.kill_slabs --kills 1000 --seed 1 --report build/reports/kills-slab.md
    python -m tests.campaigns.kill_slabs --kills 1000 --namespaces --stops --report build/reports/kills-slab-pods.md

Some processes work on one directory of slabs while this one reads and verifies all the time; one of them after the
other is killed with SIGKILL and replaced. The bytes of a page follow from its key, so any process can tell a wrong
one. Every so often all are killed and nobody is left who has the index; of the processes that make it anew from the
headers of the pages, those that come first are killed, too.

``--namespaces``: each worker has PID, host name, /proc, network and IPC of its own, as a pod's container has; the tools
of the host look after left-overs meanwhile. ``--stops``: workers are stopped (SIGSTOP) for 0.1 to 4 seconds, some for
20, and go on, at the same time as others are killed.

``--transforms``: pages are encoded and encrypted on their way.

What must hold: no wrong byte, nothing CORRUPT (a published page was overwritten) and no ERROR in what any process gets
or writes; no call of a process that is not stopped itself takes longer than ``LONGEST_CALL``; the index never
contradicts itself or the files; no slot is lost; the disk holds no more than the capacity; each rebuild finds what was
published; every key can be written and read.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from hicache_ext.errors import StoreError
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.tiers.file.inspection import open_editor
from hicache_ext.testing.conformance.pages import HostPages
from tests.campaigns.reporting import problem_lines, publish
from tests.campaigns.slab_insides import faults, slots_by_state, unknown_files, wait_until_rebuilt
from tests.campaigns.slab_workers import (
    CAPACITY,
    KEYS,
    LONG,
    SIZES,
    Crew,
    Findings,
    only_open,
    open_store,
    payload,
    some_keys,
)
from tests.campaigns.stops import LONGEST_CALL
from tests.rigs.workers import Worker, WorkerError

SMALL_FILES = 512 << 10
"""Bytes on disk beside headers and slots."""
WORKERS = 3
KILLS_BETWEEN_REBUILDS = 25
LATEST_KILL = 0.05
LATEST_KILL_BESIDE_STOPS = 0.2
"""Seconds: workers must live long enough to go on after a stop."""
GC = 0.1
"""How often the tools of the host look for left-overs, per kill."""
HITS_BESIDE_WRITERS = 100
"""Between two rebuilds so many pages at least are read and verified while others work."""
MOST_BROKEN_PHASES = 10
BESIDE_WRITERS = "while others work"
AFTER_KILLS_AND_REBUILD = "at the first read after kills and a rebuild"


# -- the process that looks on -----------------------------------------------------------------------------------------


@contextmanager
def timed(findings: Findings, kind: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    findings.note_calls({kind: time.monotonic() - begun})


def verify(store: PageStore, keys: Sequence[bytes], findings: Findings, when: str) -> list[GetResult]:
    pages = HostPages([SIZES[key] for key in keys])
    with timed(findings, "get"):
        results = store.get(PageBatch(keys, pages.buffers))
    for position, (key, result) in enumerate(zip(keys, results, strict=True)):
        if result is GetResult.HIT:
            findings.hits += 1
            if pages.payload(position) != payload(key):
                findings.problems[f"a wrong page, {when}"] += 1
        elif result is GetResult.MISS:
            findings.misses += 1
        elif result is GetResult.CORRUPT and when == AFTER_KILLS_AND_REBUILD:
            findings.refused += 1
        elif result is GetResult.CORRUPT and when == BESIDE_WRITERS:
            findings.problems["a published page was overwritten"] += 1
        else:
            findings.problems[f"{result.name}, {when}"] += 1
    return results


class Reader:
    """Reads random pages in a thread until it is stopped, and verifies every hit."""

    def __init__(self, store: PageStore, findings: Findings, seed: int) -> None:
        self._store = store
        self._findings = findings
        self._chance = random.Random(seed)
        self._hits = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            keys = some_keys(self._chance, 8)
            with timed(self._findings, "contains"):
                self._store.contains(keys)
            self._hits += verify(self._store, keys, self._findings, BESIDE_WRITERS).count(GetResult.HIT)
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


def clean_up(place: Path) -> None:
    """``hicache-ext gc``"""
    with closing(open_editor(place)) as editor:
        editor.clean_up()


def look_at_directory(place: Path, findings: Findings, when: str) -> None:
    """This process alone has the directory open: index and files must agree, and no slot may be lost. (Files that
    belong to no slab are looked for after rebuilds: a process killed while it made a slab leaves one.)"""
    clean_up(place)
    for fault in faults(place):
        findings.problems[f"{fault}, {when}"] += 1
    if slots_by_state(place)["pending"]:
        findings.problems[f"slots are still pending, {when}"] += 1
    used = sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())
    if used > CAPACITY + SMALL_FILES:
        findings.problems[f"{used} bytes used, {CAPACITY} allowed, {when}"] += 1


def every_key_works(store: PageStore, findings: Findings) -> list[bytes]:
    """Write and read each; the keys that were written now."""
    written = []
    for key in KEYS:
        pages = HostPages([SIZES[key]])
        pages.write(0, payload(key))
        (result,) = store.set(PageBatch([key], pages.buffers))
        if not result.durable:
            findings.problems["a key that cannot be written"] += 1
        elif verify(store, [key], findings, "after it was written again") != [GetResult.HIT]:
            findings.problems["a key that cannot be read"] += 1
        elif result is SetResult.STORED:
            written.append(key)
    return written


def kill_rebuilds(
    place: Path,
    transforms: bool,
    chance: random.Random,
    findings: Findings,
    published: Sequence[bytes],
    namespaces: bool,
) -> None:
    """Nobody has the directory open. Kill processes that make its index anew, then let one finish what they began:
    it must find the pages ``published``."""
    last: Worker | None = None
    for number in range(3):
        workers = [Worker(only_open, str(place), transforms, namespaces=namespaces) for _ in range(2)]
        for worker in workers:
            worker.answer(LONG)
        if number == 2:
            last = workers.pop()
        for worker in workers:
            time.sleep(chance.random() * 0.05)
            worker.close()
            findings.kills += 1
            findings.rebuilds_killed += 1
    try:
        with closing(open_store(place, transforms)) as store:
            if not wait_until_rebuilt(place, LONG):
                findings.problems["a rebuild that did not end"] += 1
            findings.pages_rebuilt += sum(store.contains(KEYS))
            if lost := store.contains(published).count(False):
                findings.problems["a published page was lost by a rebuild"] += lost
            for fault in faults(place):
                findings.problems[f"{fault}, after a rebuild"] += 1
            if unknown := unknown_files(place):
                findings.problems["files of no slab, after a rebuild"] += len(unknown)
    finally:
        if last is not None:
            last.close()
            findings.kills += 1


# -- the campaign ------------------------------------------------------------------------------------------------------


def run(kills: int, seed: int, *, namespaces: bool = False, stops: bool = False, transforms: bool = False) -> Findings:
    """Ends early, with a problem, where starts are refused again and again."""
    chance = random.Random(seed)
    findings = Findings()
    root = Path(tempfile.mkdtemp(prefix="hicache-kills-"))
    place = root / "disk"
    try:
        while findings.kills < kills and findings.broken_phases < MOST_BROKEN_PHASES:
            with closing(open_store(place, transforms)) as store:
                _kill_workers(place, transforms, store, kills, chance, findings, namespaces, stops)
                look_at_directory(place, findings, "after kills")
                quiet = chance.random() < 0.5
                written = every_key_works(store, findings) if quiet else []
                present = store.contains(written)
                # Files of slabs that killed processes left are slabs again after a rebuild, and cost pages their room.
                left = unknown_files(place)
            published = [key for key, known in zip(written, present, strict=True) if known and not left]
            kill_rebuilds(place, transforms, chance, findings, published, namespaces)
            with closing(open_store(place, transforms)) as store:
                if not quiet:
                    wait_until_rebuilt(place, LONG)
                    verify(store, KEYS, findings, AFTER_KILLS_AND_REBUILD)
                every_key_works(store, findings)
                look_at_directory(place, findings, "after a rebuild")
    finally:
        shutil.rmtree(root)
    return findings


def _kill_workers(
    place: Path,
    transforms: bool,
    store: PageStore,
    kills: int,
    chance: random.Random,
    findings: Findings,
    namespaces: bool,
    stops: bool,
) -> None:
    crew = Crew(place, transforms, chance, findings, namespaces, stops)
    reader = Reader(store, findings, chance.randrange(1 << 30))
    try:
        for _ in range(WORKERS + stops):
            crew.start_one()
        crew.wait_until_all_work()
        for _ in range(min(KILLS_BETWEEN_REBUILDS, kills - findings.kills)):
            time.sleep(chance.random() * (LATEST_KILL_BESIDE_STOPS if stops else LATEST_KILL))
            crew.replace_one()
            if chance.random() < GC:
                # It may say that somebody is stopped amid a change.
                with timed(findings, "gc"), suppress(StoreError) if stops else nullcontext():
                    clean_up(place)
        reader.wait_for_hits(HITS_BESIDE_WRITERS)
    except WorkerError as error:
        findings.broken_phases += 1
        findings.problems[f"a worker that could not start: {str(error).replace(str(place), 'the directory')}"] += 1
    finally:
        crew.end()
        reader.close()


def report(found: Findings, seed: int, seconds: float, namespaces: bool, stops: bool, transforms: bool) -> str:
    problems = sum(found.problems.values())
    switches = " --namespaces" * namespaces + " --stops" * stops + " --transforms" * transforms
    rows = [
        ("processes killed with SIGKILL", found.kills),
        ("of them while making the index anew", found.rebuilds_killed),
        *([("processes stopped for a while", found.stops)] if stops else []),
        *([("of them amid a change of the index", found.stops_amid_a_change)] if stops else []),
        ("pages brought back by rebuilds", found.pages_rebuilt),
        ("pages read and verified", found.hits + found.workers_results["get hit"]),
        ("of them by this process while others worked", found.hits_beside_writers),
        ("pages stored by the workers", found.workers_results["set stored"]),
        ("pages that workers were refused to store", found.workers_results["set rejected"]),
        ("misses", found.misses),
        ("refused at the first read after kills and a rebuild", found.refused),
        (
            "longest call of each kind, without the caller's own stops",
            ", ".join(f"{kind} {longest:.1f} s" for kind, longest in sorted(found.longest.items()) if longest >= 0.05),
        ),
        ("problems", problems),
    ]
    return "\n".join(
        [
            "# Killed slab writers",
            "",
            f"`python -m tests.campaigns.kill_slabs --kills {found.kills} --seed {seed}{switches}`: "
            f"{WORKERS + stops + 1} processes on one directory of {CAPACITY >> 20} MiB"
            + ", each worker in PID, host name, mount, network and IPC namespaces of its own" * namespaces
            + ", pages encoded (lossless) and sealed (encrypt)" * transforms
            + f", {seconds:.0f} s on {os.cpu_count()} cores, "
            f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Checked: no wrong byte, no CORRUPT and no ERROR in what any process read or wrote; no call of a process"
            f" that was not stopped itself longer than {LONGEST_CALL:g} s; after all were killed, and after each"
            " rebuild, an index that does not contradict itself, files, headers and seals that agree with it, no slot"
            " lost, everything within the capacity, every key written and read again. Half of the rebuilds follow a"
            " quiet moment and must find every page that was published; the others follow kills at once: what they"
            " bring back that is damaged (the header of an evicted page over one that was being written) is refused at"
            " its first read.",
            "",
            *problem_lines(found.problems),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--namespaces", action="store_true", help="each worker in namespaces of its own, as root")
    parser.add_argument("--stops", action="store_true", help="workers are stopped for a while, too")
    parser.add_argument("--transforms", action="store_true", help="pages are encoded and encrypted")
    parser.add_argument("--report", type=Path, help="a file to write the report to, besides standard output")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)
    begun = time.monotonic()
    switches = {name: getattr(options, name) for name in ("namespaces", "stops", "transforms")}
    findings = run(options.kills, options.seed, **switches)
    text = report(findings, options.seed, time.monotonic() - begun, **switches)
    publish(text, options.report)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())

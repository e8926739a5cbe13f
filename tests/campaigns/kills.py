"""Kill writers, evictors, cleaners and index rebuilds of a file tier at random moments, four processes at a time.

::

    python -m tests.campaigns.kills --kills 1000 --seed 1 --report build/reports/kills-slab.md
    python -m tests.campaigns.kills --kills 200 --layout pages --namespaces --stops --report build/reports/kills-pods.md

Some processes work on one directory while this one reads and verifies all the time; one of them after the other is
killed with SIGKILL and replaced. The bytes of a page follow from its key, so any process can tell a wrong one. Every
so often all are killed and nobody is left who has the index of slabs, or keeps the account of page files. Of the
processes that make the index anew from the headers of the pages, those that come first are killed, too.

``--namespaces``: each worker has PID, host name, /proc, network and IPC of its own, as a pod's container has; the tools
of the host look after left-overs meanwhile. ``--stops``: workers are stopped (SIGSTOP) for 0.1 to 4 seconds, some for
20, and go on, at the same time as others are killed.

``--transforms``: pages are encoded and encrypted on their way.

What must hold: no wrong byte, nothing CORRUPT (a published page was overwritten) and no ERROR in what any process gets
or writes; no call of a process that is not stopped itself takes longer than ``LONGEST_CALL``; every key can be written
and read, within the capacity. Of slabs: the index never contradicts itself or the files; no slot is lost; each rebuild
finds what was published; the disk holds no more than the capacity at any look. Of page files: where one process writes,
the account is not below what a walk finds; the next start removes what the killed processes left, and its account
equals a walk. (While many write and somebody counts, the account is an estimate, and so is what is on the disk.)
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from hicache_ext.errors import StoreError
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.tiers.file.inspection import open_editor
from hicache_ext.testing.conformance.pages import HostPages
from tests.campaigns import page_insides, slab_insides
from tests.campaigns.crew import CAPACITY, KEYS, LONG, SIZES, Crew, Findings, Setting, only_open, payload, some_keys
from tests.campaigns.reporting import arguments_of, command_of, conduct, report_of
from tests.campaigns.stops import LONGEST_CALL
from tests.campaigns.tier_process import packs_in, problems_of_packs
from tests.rigs.workers import Worker, WorkerError

SMALL_FILES = 512 << 10
"""Bytes on disk beside headers and slots."""
WORKERS = 3
KILLS_BETWEEN_STARTS = {"slab": 25, "pages": 5}
"""Until nobody has the directory open any more."""
LATEST_KILL = 0.05
LATEST_KILL_BESIDE_STOPS = 0.2
"""Seconds: workers must live long enough to go on after a stop."""
GC = 0.1
"""How often the tools of the host look for left-overs, per kill."""
HITS_BESIDE_WRITERS = 100
"""Between two rebuilds so many pages at least are read and verified while others work."""
MOST_BROKEN_PHASES = 10
UPKEEP = 75.0
"""Seconds, generous, until the next upkeep of a directory of page files (pages/store.py) is over."""
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


def look_at_directory(setting: Setting, findings: Findings, when: str, within: float = 0.0) -> None:
    """This process alone has the directory open: index or account and files must agree, after ``within`` seconds at
    most, and no slot may be lost. (Files that belong to no slab are looked for after rebuilds: a process killed while
    it made a slab leaves one.)"""
    place = setting.place
    clean_up(place)
    for fault in slab_insides.faults(place) if setting.layout == "slab" else page_insides.faults(place, within):
        findings.problems[f"{fault}, {when}"] += 1
    if setting.layout == "slab" and slab_insides.slots_by_state(place)["pending"]:
        findings.problems[f"slots are still pending, {when}"] += 1


def look_at_capacity(place: Path, findings: Findings, when: str) -> None:
    used = sum(path.stat().st_blocks * 512 for path in place.rglob("*") if path.is_file())
    if used > CAPACITY + SMALL_FILES:
        findings.problems[f"{used} bytes used, {CAPACITY} allowed, {when}"] += 1


def look_at_left_files(place: Path, findings: Findings) -> None:
    """What killed writers of page files have left, and nobody has put right."""
    findings.packs.update(packs_in(place))
    findings.left_files += len(list((place / "tmp").iterdir()))


def kill_one_alone(setting: Setting, chance: random.Random, findings: Findings) -> None:
    """The account of page files is right, and nobody else writes: what a killed process leaves is not more than it has
    noted. (While many write, a count is an estimate.)"""
    crew = Crew(replace(setting, stops=False), chance, findings)
    try:
        crew.start_one()
        crew.wait_until_all_work()
        time.sleep(2 * chance.random() * LATEST_KILL)
    finally:
        crew.end()
    findings.kills += 1
    if page_insides.noted_bytes(setting.place) < page_insides.occupied_by_walk(setting.place):
        findings.problems["the account is below what is stored, after a kill"] += 1


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


def kill_rebuilds(setting: Setting, chance: random.Random, findings: Findings, published: Sequence[bytes]) -> None:
    """Nobody has the slabs open. Kill processes that make their index anew, then let one finish what they began: it
    must find the pages ``published``."""
    place = setting.place
    last: Worker | None = None
    for number in range(3):
        workers = [Worker(only_open, setting, namespaces=setting.namespaces) for _ in range(2)]
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
        with closing(setting.opened()) as store:
            if not slab_insides.wait_until_rebuilt(place, LONG):
                findings.problems["a rebuild that did not end"] += 1
            findings.pages_rebuilt += sum(store.contains(KEYS))
            if lost := store.contains(published).count(False):
                findings.problems["a published page was lost by a rebuild"] += lost
            for fault in slab_insides.faults(place):
                findings.problems[f"{fault}, after a rebuild"] += 1
            if unknown := slab_insides.unknown_files(place):
                findings.problems["files of no slab, after a rebuild"] += len(unknown)
    finally:
        if last is not None:
            last.close()
            findings.kills += 1


# -- the campaign ------------------------------------------------------------------------------------------------------


def run(kills: int, seed: int, layout: str = "slab", **switches: bool) -> Findings:
    """``switches``: those of ``Setting``. Ends early, with a problem, where starts are refused again and again."""
    chance = random.Random(seed)
    findings = Findings()
    root = Path(tempfile.mkdtemp(prefix="hicache-kills-"))
    setting = Setting(root / "disk", layout, **switches)
    try:
        while findings.kills < kills and findings.broken_phases < MOST_BROKEN_PHASES:
            with closing(setting.opened()) as store:
                _kill_workers(setting, store, kills, chance, findings)
                if layout == "pages":
                    look_at_left_files(setting.place, findings)
                    written = []
                else:
                    look_at_directory(setting, findings, "after kills")
                    look_at_capacity(setting.place, findings, "after kills")
                    written = every_key_works(store, findings) if chance.random() < 0.5 else []
                present = store.contains(written)
            if layout == "slab":
                # Files of slabs that killed processes left are slabs again after a rebuild, and cost pages their room.
                left = slab_insides.unknown_files(setting.place)
                published = [key for key, known in zip(written, present, strict=True) if known and not left]
                kill_rebuilds(setting, chance, findings, published)
            with closing(setting.opened()) as store:
                if layout == "pages":
                    look_at_directory(setting, findings, "after the next start", UPKEEP)
                    verify(store, KEYS, findings, "after the next start")
                elif not written:
                    slab_insides.wait_until_rebuilt(setting.place, LONG)
                    verify(store, KEYS, findings, AFTER_KILLS_AND_REBUILD)
                every_key_works(store, findings)
                look_at_directory(setting, findings, "after every key was written", LONG)
                look_at_capacity(setting.place, findings, "after every key was written")
                if layout == "pages":
                    kill_one_alone(setting, chance, findings)
    finally:
        shutil.rmtree(root)
    if layout == "pages":
        findings.problems.update(problems_of_packs(findings.packs))
    return findings


def _kill_workers(setting: Setting, store: PageStore, kills: int, chance: random.Random, findings: Findings) -> None:
    crew = Crew(setting, chance, findings)
    reader = Reader(store, findings, chance.randrange(1 << 30))
    try:
        for _ in range(WORKERS + setting.stops):
            crew.start_one()
        crew.wait_until_all_work()
        for _ in range(min(KILLS_BETWEEN_STARTS[setting.layout], kills - findings.kills)):
            time.sleep(chance.random() * (LATEST_KILL_BESIDE_STOPS if setting.stops else LATEST_KILL))
            crew.replace_one()
            if chance.random() < GC:
                # It may say that somebody is stopped amid a change.
                with timed(findings, "gc"), suppress(StoreError) if setting.stops else nullcontext():
                    clean_up(setting.place)
        reader.wait_for_hits(HITS_BESIDE_WRITERS)
    except WorkerError as error:
        findings.broken_phases += 1
        said = str(error).replace(str(setting.place), "the directory")
        findings.problems[f"a worker that could not start: {said}"] += 1
    finally:
        crew.end()
        reader.close()


def report(found: Findings, options: argparse.Namespace, took: str) -> str:
    packs = f"{found.packs['packs']}, {found.packs['pages']}"
    longest = [f"{kind} {seconds:.1f} s" for kind, seconds in sorted(found.longest.items()) if seconds >= 0.05]
    of_slabs = [
        ("of them while making the index anew", found.rebuilds_killed),
        ("processes stopped amid a change of the index", found.stops_amid_a_change),
        ("pages brought back by rebuilds", found.pages_rebuilt),
        ("refused at the first read after kills and a rebuild", found.refused),
    ]
    of_page_files = [
        ("of them amid an operation", found.kills_under_way),
        ("left-overs that the next starts removed", found.left_files),
        ("packs left, pages in them", packs),
    ]
    return report_of(
        "Killed processes",
        f"{command_of('kills', options)}: {WORKERS + options.stops + 1} processes on one directory of"
        f" {CAPACITY >> 20} MiB, {took}.",
        [
            ("processes killed with SIGKILL", found.kills),
            *(of_slabs if options.layout == "slab" else of_page_files),
            ("processes stopped for a while", found.stops),
            ("pages read and verified", found.hits + found.workers_results["get hit"]),
            ("of them by this process while others worked", found.hits_beside_writers),
            ("pages stored by the workers", found.workers_results["set stored"]),
            ("pages that workers were refused to store", found.workers_results["set rejected"]),
            ("misses", found.misses),
            ("longest call of each kind, without the caller's own stops", ", ".join(longest)),
            ("problems", found.problems.total()),
        ],
        "Checked: no wrong byte, no CORRUPT and no ERROR in what any process read or wrote; no call of a process that"
        f" was not stopped itself longer than {LONGEST_CALL:g} s; after all were killed, every key written and read"
        " again, within the capacity. Slabs: no more than the capacity at any look; an index that does not contradict"
        " itself, files, headers and seals that agree with it, and no slot lost. Half of the rebuilds follow a quiet"
        " moment and must find every page that was published; the others follow kills at once: what they bring back"
        " that is damaged (the header of an evicted page over one that was being written) is refused at its first read."
        " Page files: where one process writes, the account not below what is stored; after the next start no temporary"
        " file and no cleared tree, and the account equal to a walk.",
        problems=found.problems,
    )


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--layout", choices=("slab", "pages"), default="slab")
    parser.add_argument("--namespaces", action="store_true", help="each worker in namespaces of its own, as root")
    parser.add_argument("--stops", action="store_true", help="workers are stopped for a while, too")
    parser.add_argument("--transforms", action="store_true", help="pages are encoded and encrypted")
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    switches = {name: getattr(options, name) for name in ("namespaces", "stops", "transforms")}
    return conduct(options, functools.partial(run, options.kills, options.seed, options.layout, **switches), report)


if __name__ == "__main__":
    sys.exit(main())

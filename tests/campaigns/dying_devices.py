"""The device of a tier dies while a process reads, writes, looks up and clears; later it is back.

::

    python -m tests.campaigns.dying_devices --runs 25 --seed 1 --report build/reports/dying-devices.md

The device is a loop mount of ext4 or XFS, and dies by the shutdown ioctl of the file system: every call to it then
fails with EIO, and a page of a mapped file that is not in memory, or not writable yet, is a SIGBUS. It dies while the
process does everything at once, only reads, writes, looks up, or nothing; with what was written still in memory or
synced before; with the files in the page cache or out of it. Some runs have a second path, which lives on.

The process must live, every call must be answered, and the path must go out of service and leave no file of its device
open. Once the file system is mounted again the path comes back, stores and reads.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hicache_ext.storage.contract.store import SetResult
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY
from tests.campaigns.reporting import Found, arguments_of, command_of, conduct, report_of
from tests.campaigns.tier_process import (
    ProcessFailedError,
    Tier,
    TierProcess,
    close_tier,
    describe,
    keys_of,
    open_tier,
    pack_row,
    packs_in,
    problems_of_keys,
    problems_of_packs,
    read_keys,
    store_keys,
)
from tests.rigs.loop_file_systems import FILE_SYSTEMS, Flush, LoopFileSystem, StillInUseError

LAYOUTS = ("slab", "pages")
CAPACITY = 64 << 20
KEYS = keys_of(IDENTITY, 300)
"""What is read and written all the time; they fit."""
QUIET_KEYS = keys_of(OTHER_IDENTITY, 60)
"""Stored at the beginning and then left alone, but for a ``clear``."""
BATCH = 24
THREADS = 3
OUT_WITHIN = 30.0
BACK_WITHIN = 120.0
"""Seconds. A path is tried after one second, then after two, four ...; a busy machine needs more for all of it."""
LONGEST_CALL = 15.0
"""Seconds that a call may take on a device that fails at once; one waits for others a second at most."""
DOINGS = ("everything", "reading", "writing", "looking up", "nothing")


@dataclass(frozen=True)
class Case:
    """How a device dies."""

    file_system: str
    layout: str
    doing: str
    synced: bool
    """What was written has reached the disk: the pages of mapped files are clean, and write-protected."""
    cold: bool
    """And nothing of it is in the page cache."""
    direct: bool
    cleared: str
    """When QUIET_KEYS are cleared: before the process knows that the device is dead, once it does, or not."""
    paths: int

    def __str__(self) -> str:
        return (
            f"{self.file_system}, {self.layout}{' with O_DIRECT' if self.direct else ''}, {self.paths} path(s), "
            f"{self.doing}, {'synced' if self.synced else 'not synced'}{' and cold' if self.cold else ''}, "
            f"cleared {self.cleared}"
        )


@dataclass
class Findings(Found):
    runs: Counter[str] = field(default_factory=Counter)
    doings: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    longest_call: float = 0.0
    seconds_out: list[float] = field(default_factory=list)
    """From the death until the path was out of service, where calls came that needed it."""
    seconds_back: list[float] = field(default_factory=list)
    """From the mount until the path was in service again."""
    synced: int = 0
    synced_hits: int = 0
    """Pages that were synced before the death, and those of them that are hits after it."""
    packs: Counter[str] = field(default_factory=Counter)
    """Before the deaths."""


# -- in the process ----------------------------------------------------------------------------------------------------


class Load:
    """Threads that use the tier, each as ``doing`` says."""

    def __init__(self, tier: Tier, seed: int) -> None:
        self._tier = tier
        self.doing = "nothing"
        self.failed: list[BaseException] = []
        self.calls = 0
        self.wrong = 0
        self.longest = 0.0
        self.last_stored = 0.0
        """When the last call began that stored a page."""
        self._lock = threading.Lock()
        for number in range(THREADS):
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"),), daemon=True).start()

    def _run(self, chance: random.Random) -> None:
        while True:
            doing = self.doing
            begun = time.monotonic()
            try:
                stored, wrong = self._do(doing, chance)
            except BaseException as error:  # noqa: BLE001 -- the campaign reports it
                with self._lock:
                    self.failed.append(error)
                continue
            with self._lock:
                self.calls += doing != "nothing"
                self.wrong += wrong
                self.longest = max(self.longest, time.monotonic() - begun)
                if stored:
                    self.last_stored = max(self.last_stored, begun)

    def _do(self, doing: str, chance: random.Random) -> tuple[bool, int]:
        store = self._tier.opened
        keys = chance.sample(KEYS, BATCH)
        if doing == "everything":
            doing = chance.choices(["reading", "writing", "looking up", "removing", "clearing"], [6, 6, 4, 1, 1])[0]
        if doing == "reading":
            return False, read_keys(self._tier, keys)[1]
        if doing == "writing":
            # What is there already would not be written.
            store.remove(keys[:4])
            return SetResult.STORED in store_keys(self._tier, keys), 0
        if doing == "looking up":
            store.contains(keys)
            store.count_leading(keys)
        elif doing == "removing":
            store.remove(keys)
        elif doing == "clearing":
            store.clear([IDENTITY])
        else:
            time.sleep(0.01)
        return False, 0


def begin(tier: Tier, seed: int) -> None:
    """Fill the tier, and start threads that wait for something to do."""
    keys = KEYS + QUIET_KEYS
    for first in range(0, len(keys), BATCH):
        store_keys(tier, keys[first : first + BATCH])
    tier.extra["load"] = Load(tier, seed)


def do(tier: Tier, doing: str) -> None:
    tier.extra["load"].doing = doing


def rest(tier: Tier) -> float:
    """Let the threads do nothing, once their calls have ended; when a page was stored last."""
    load = tier.extra["load"]
    load.doing = "nothing"
    calls = -1
    while calls != load.calls:
        calls = load.calls
        time.sleep(0.3)
    return float(load.last_stored)


def seen(tier: Tier) -> tuple[int, float, int]:
    """(calls, seconds of the longest, wrong pages). Raises what a call raised."""
    load = tier.extra["load"]
    for error in load.failed:
        raise error
    return load.calls, load.longest, load.wrong


def clear_quiet(tier: Tier) -> None:
    tier.opened.clear([OTHER_IDENTITY])


def quiet_pages(tier: Tier) -> int:
    """How many of QUIET_KEYS are found."""
    return sum(tier.opened.contains(QUIET_KEYS))


def out_of_service(tier: Tier) -> list[str]:
    return list(describe(tier)["out_of_service"])


# -- a run -------------------------------------------------------------------------------------------------------------


class Run:
    """One device, one process, one death."""

    def __init__(self, case: Case, chance: random.Random, findings: Findings, directory: Path) -> None:
        self._case = case
        self._chance = chance
        self._findings = findings
        self._directory = directory
        self._problems: Counter[str] = Counter()
        self._details: list[str] = []

    def run(self) -> None:
        case, findings = self._case, self._findings
        try:
            with ExitStack() as resources:
                disks = [
                    resources.enter_context(LoopFileSystem(case.file_system, self._directory))
                    for _ in range(case.paths)
                ]
                process = resources.enter_context(TierProcess(self._directory / "log"))
                self._run(process, disks)
        except (ProcessFailedError, StillInUseError) as error:
            problem, _, details = str(error).partition("\n")
            if isinstance(error, StillInUseError):
                problem, details = "files of a dead device that stay open", str(error)
            self._problems[problem] += 1
            self._details.append(details)
        kind = f"{case.file_system}, {case.layout}"
        findings.runs[kind] += 1
        findings.doings[case.doing] += 1
        findings.note_case(kind, [str(case)], self._problems, self._details)

    def _run(self, process: TierProcess, disks: Sequence[LoopFileSystem]) -> None:
        case, dying = self._case, disks[0]
        paths = [str(disk.path / "tier") for disk in disks]
        process.call(
            open_tier,
            {
                "path": paths,
                "capacity": CAPACITY * len(paths),
                "layout": case.layout,
                "io": "direct" if case.direct else "buffered",
            },
        )
        process.call(begin, self._chance.randrange(1 << 30))
        self._findings.packs.update(packs_in(Path(paths[0])))
        process.call(do, "everything")
        time.sleep(self._chance.uniform(0, 0.3))
        process.call(do, case.doing)
        time.sleep(self._chance.uniform(0, 0.3))
        if case.synced:
            process.call(rest)
            dying.sync()
            if case.cold:
                _drop_from_memory(dying.path, process.pid)
            process.call(do, case.doing)
            # Some are hit at the first call after it, some later.
            time.sleep(self._chance.choice([0.0, self._chance.uniform(0, 0.2)]))
        dying.shut_down(Flush.NOTHING)
        dead = time.monotonic()
        if case.cleared == "before":
            process.call(clear_quiet)
        time.sleep(self._chance.uniform(0.1, 1.5))
        process.call(seen)
        process.call(do, "everything")
        asked = time.monotonic()
        self._wait_until(process, [paths[0]], OUT_WITHIN, "a path that does not go out of service")
        self._findings.seconds_out.append(time.monotonic() - asked)
        if case.cleared == "after":
            process.call(clear_quiet)
        last_stored = process.call(rest)
        if case.paths == 1 and last_stored > dead:
            self._problems["a page that is STORED on a dead device"] += 1
        if case.paths > 1:
            self._add(process.call(problems_of_keys, KEYS), "on the path that lives")
        process.call(do, "everything")
        time.sleep(self._chance.uniform(0, 1))
        process.call(rest)
        dying.remount()
        mounted = time.monotonic()
        self._wait_until(process, [], BACK_WITHIN, "a path that does not come back")
        self._findings.seconds_back.append(time.monotonic() - mounted)
        self._look_at_quiet_pages(process)
        self._add(process.call(problems_of_keys, KEYS), "after the path is back")
        process.call(do, "everything")
        time.sleep(0.2)
        process.call(rest)
        calls, longest, wrong = process.call(seen)
        self._findings.calls += calls
        self._findings.longest_call = max(self._findings.longest_call, longest)
        if wrong:
            self._problems["a wrong page"] += wrong
        if longest > LONGEST_CALL:
            self._problems["a call that took long"] += 1
            self._details.append(f"{longest:.1f} s")
        process.call(close_tier)

    def _wait_until(self, process: TierProcess, paths: list[str], within: float, problem: str) -> None:
        """Wait until just ``paths`` are out of service."""
        deadline = time.monotonic() + within
        while (out := process.call(out_of_service)) != paths:
            if time.monotonic() > deadline:
                raise ProcessFailedError(f"{problem}\nout of service: {out}\n{process.said()}")
            time.sleep(0.02)

    def _look_at_quiet_pages(self, process: TierProcess) -> None:
        """Cleared ones stay away. Of the others, those that were synced should be back: an index may be made anew."""
        cleared = self._case.cleared != "not"
        expected = len(QUIET_KEYS) if self._case.synced and self._case.paths == 1 and not cleared else 0
        deadline = time.monotonic() + 5.0
        while (found := process.call(quiet_pages)) < expected and time.monotonic() < deadline:
            time.sleep(0.05)
        self._findings.synced += expected
        self._findings.synced_hits += found if expected else 0
        if cleared:
            # An index that is made anew in the background brings pages back bit by bit.
            time.sleep(0.5)
            if found := process.call(quiet_pages):
                self._problems[f"pages that come back although they were cleared {self._case.cleared}"] += 1
                self._details.append(f"{found} of {len(QUIET_KEYS)} pages")

    def _add(self, problems: Counter[str], when: str) -> None:
        self._problems.update({f"{problem}, {when}": count for problem, count in problems.items()})


_PROCESS_MADVISE = 440
_MADV_PAGEOUT = 21


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _drop_from_memory(path: Path, pid: int) -> None:
    """Take the files of ``path`` out of the page cache, what process ``pid`` has mapped of them first."""
    library = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if f"{path}/" not in line:
                continue
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            mapped = _Range(begin, end - begin)
            library.syscall(_PROCESS_MADVISE, process, ctypes.byref(mapped), 1, _MADV_PAGEOUT, 0)
    finally:
        os.close(process)
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cases(chance: random.Random, runs: int, file_system: str) -> list[Case]:
    """``runs`` cases, in which layouts and doings take turns."""
    turns = itertools.cycle(itertools.product(DOINGS, LAYOUTS))
    found = []
    for doing, layout in itertools.islice(turns, runs):
        synced = chance.random() < 0.6
        found.append(
            Case(
                file_system,
                layout,
                doing,
                synced,
                cold=synced and chance.random() < 0.5,
                direct=layout == "slab" and chance.random() < 0.4,
                cleared=chance.choice(["not", "not", "before", "after"]),
                paths=2 if chance.random() < 0.25 else 1,
            )
        )
    return found


def run(runs: int, seed: int, file_systems: Sequence[str] = FILE_SYSTEMS) -> Findings:
    """``runs`` deaths of each file system. Prints what is seen."""
    findings = Findings()
    directory = Path(tempfile.mkdtemp(prefix="hicache-dying-"))
    try:
        for file_system in file_systems:
            chance = random.Random(f"{seed}/{file_system}")
            for case in cases(chance, runs, file_system):
                Run(case, chance, findings, directory).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    findings.problems.update(problems_of_packs(findings.packs))
    return findings


def report(found: Findings, options: argparse.Namespace, took: str) -> str:
    def span(values: Sequence[float]) -> str:
        if not values:
            return "-"
        ordered = sorted(values)
        return f"{ordered[len(ordered) // 2]:.2f}, {ordered[-1]:.2f}"

    return report_of(
        "Devices that die",
        f"{command_of('dying_devices', options)}: loop mounts, shut down under a tier of {CAPACITY >> 20} MiB a path,"
        f" {took}.",
        [
            *((f"deaths: {name}", count) for name, count in sorted(found.runs.items())),
            *((f"deaths while doing {name}", count) for name, count in found.doings.items()),
            ("calls", found.calls),
            ("seconds of the longest call", f"{found.longest_call:.2f}"),
            ("seconds until out of service, once calls need the device: median, most", span(found.seconds_out)),
            ("seconds from the mount until in service: median, most", span(found.seconds_back)),
            ("pages synced before the death, hits after it", f"{found.synced}, {found.synced_hits}"),
            pack_row(found.packs),
            ("runs with problems", len(found.stories)),
        ],
        "Checked: no signal, no exception, no wrong byte; no call of more than"
        f" {LONGEST_CALL:.0f} s; the path goes out of service and keeps no file of the dead device open (it can be"
        " unmounted); nothing is STORED on a dead device; with a second path every key is stored and read there;"
        " after the mount the path comes back, every key is stored and read, and what was cleared meanwhile stays"
        " away.",
        problems=found.problems,
    )


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--runs", type=int, default=25, help="deaths of each file system")
    options = parser.parse_args()
    return conduct(options, lambda: run(options.runs, options.seed), report)


if __name__ == "__main__":
    sys.exit(main())

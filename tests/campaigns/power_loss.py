"""Cut the power of a tier at random moments, and start again.

::

    python -m tests.campaigns.power_loss --cuts 50 --seed 1 --report build/reports/power-loss.md

A process stores, reads, removes and clears on a file system of its own (a loop mount of ext4 or XFS with the usual
options). At a random moment the file system is shut down, without its log and what is in memory (as a power loss does)
or after it has brought everything to the disk, and the process is killed. The file system is mounted again, which
recovers its log, and another process opens the tier. Some lives begin in an empty directory and end while it opens.

With ``--transforms`` pages are encoded and encrypted on their way.

The process notes in a journal, elsewhere, what each call is about to do and what it answered. So it is known which
pages a ``sync`` has brought to the disk, and which were cleared.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, settle
from tests.campaigns.reporting import Found, arguments_of, command_of, conduct, report_of
from tests.campaigns.tier_process import (
    SLACK,
    ProcessFailedError,
    Tier,
    TierProcess,
    bytes_on_disk,
    close_tier,
    keys_of,
    open_tier,
    pack_row,
    packs_in,
    problems_of_keys,
    problems_of_packs,
    read_keys,
    store_keys,
    wait_for_pages,
)
from tests.rigs.both_transforms import both_configured
from tests.rigs.loop_file_systems import FILE_SYSTEMS, Flush, LoopFileSystem, StillInUseError

LAYOUTS = ("slab", "pages")
IDENTITIES = (IDENTITY, OTHER_IDENTITY)
KEYS = [key for identity in IDENTITIES for key in keys_of(identity, 150)]
ROOMY, TIGHT = 64 << 20, 6 << 20
"""Capacities: all keys fit and nothing is evicted, or about half of them."""
BATCH = 12
FIRST_STARTS = 0.25
"""Share of the lives that begin in an empty directory."""
NOTE_SECONDS = 5.0
"""What was cleared so long before the cut is on the disk: the note of it is synced in the background at once."""
REBUILT_WITHIN = 20.0
"""Seconds in which pages that are on the disk are found again."""


@dataclass
class Findings(Found):
    cuts: Counter[str] = field(default_factory=Counter)
    flushes: Counter[str] = field(default_factory=Counter)
    first_starts: int = 0
    opening: int = 0
    """Cuts while the tier was being opened."""
    calls: int = 0
    on_disk: Counter[str] = field(default_factory=Counter)
    """Pages that were on the disk when the power went: "roomy" and "tight", and the hits among them."""
    first_reads: Counter[str] = field(default_factory=Counter)
    packs: Counter[str] = field(default_factory=Counter)
    """After the cuts."""
    cleared: int = 0
    """Pages whose clear was on the disk."""
    back: int = 0
    """Pages that came back because the clear was younger than that."""
    slowest_open: float = 0.0
    slowest_wait: float = 0.0
    """Seconds until the pages on the disk were found."""


# -- in the process ----------------------------------------------------------------------------------------------------


def live(tier: Tier, disk: dict[str, Any], journal: str, seed: int) -> None:
    """Open the tier and use it until the power goes; what a call meets after that is of no interest."""
    chance = random.Random(seed)
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(what: str, keys: Sequence[int] = (), identity: int = 0) -> None:
        os.write(fd, json.dumps([time.monotonic(), what, list(keys), identity]).encode() + b"\n")

    note("opening")
    open_tier(tier, disk)
    note("opened")
    while True:
        numbers = sorted(chance.sample(range(len(KEYS)), chance.randint(1, BATCH)))
        keys = [KEYS[number] for number in numbers]
        call = chance.choices(["set", "get", "remove", "clear", "sync", "pause"], [50, 20, 5, 1, 3, 3])[0]
        if call == "set":
            note("setting", numbers)
            results = store_keys(tier, keys)
            note("stored", [n for n, result in zip(numbers, results, strict=True) if result is SetResult.STORED])
        elif call == "get":
            results, wrong = read_keys(tier, keys)
            if wrong:
                note("wrong", numbers)
            note("read", [n for n, result in zip(numbers, results, strict=True) if result is GetResult.HIT])
        elif call == "remove":
            note("removing", numbers)
            tier.opened.remove(keys)
        elif call == "clear":
            identity = chance.randrange(len(IDENTITIES))
            note("clearing", identity=identity)
            tier.opened.clear([IDENTITIES[identity]])
            note("cleared", identity=identity)
        elif call == "sync":
            # What is left to the background belongs to what was answered before.
            settle(tier.opened.tiers[0])
            note("syncing")
            if _sync(disk["path"]):
                note("synced")
        else:
            time.sleep(chance.uniform(0, 0.3))


def _sync(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return ctypes.CDLL(None).syncfs(fd) == 0
    finally:
        os.close(fd)


def read_all(tier: Tier) -> tuple[list[str], int]:
    """Name of the result of each of KEYS, and the wrong pages."""
    names: list[str] = []
    wrong = 0
    for begin in range(0, len(KEYS), BATCH):
        results, wrong_here = read_keys(tier, KEYS[begin : begin + BATCH])
        names += [result.name for result in results]
        wrong += wrong_here
    return names, wrong


# -- what the journal says ---------------------------------------------------------------------------------------------


@dataclass
class Known:
    """What is known of the disk when the power goes, of pages by their number in KEYS."""

    on_disk: set[int] = field(default_factory=set)
    """Stored or read, then synced, and neither removed nor cleared since."""
    gone: set[int] = field(default_factory=set)
    """Cleared, with that on the disk, and not stored since."""
    cleared: set[int] = field(default_factory=set)
    """Cleared, and not stored since; the disk may not know."""
    calls: int = 0
    wrong: int = 0
    opened: bool = False


def known_from(journal: Path, before: set[int], cut: float, flush: Flush) -> Known:
    """``before``: the pages that were on the disk at the beginning. ``cut``: when the power went (monotonic)."""
    known = Known(on_disk=set(before))
    stored: set[int] = set()
    syncing: tuple[set[int], set[int]] = (set(), set())
    cleared_at: dict[int, float] = {}
    of_identity = [{n for n, key in enumerate(KEYS) if key.startswith(identity)} for identity in IDENTITIES]
    lines = [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]] if journal.exists() else []
    for at, what, numbers, identity in lines:
        if at >= cut:
            break
        known.calls += 1
        if what == "opened":
            known.opened = True
        elif what == "wrong":
            known.wrong += 1
        elif what == "setting":
            known.cleared.difference_update(numbers)
            known.gone.difference_update(numbers)
        elif what in ("stored", "read"):
            stored.update(numbers)
        elif what == "removing":
            for pages in (stored, known.on_disk, syncing[0]):
                pages.difference_update(numbers)
        elif what == "clearing":
            for pages in (stored, known.on_disk, syncing[0]):
                pages.difference_update(of_identity[identity])
        elif what == "cleared":
            known.cleared |= of_identity[identity]
            cleared_at.update(dict.fromkeys(of_identity[identity], at))
        elif what == "syncing":
            syncing = (set(stored), set(known.cleared))
        elif what == "synced":
            known.on_disk |= syncing[0]
            known.gone |= syncing[1] & known.cleared
    known.gone |= {number for number in known.cleared if cleared_at[number] < cut - NOTE_SECONDS}
    if flush is Flush.EVERYTHING:
        known.on_disk |= stored
        known.gone |= known.cleared
    # What came while the power went may be on the disk, or not.
    for at, what, numbers, identity in lines:
        if at >= cut:
            known.gone.difference_update(numbers if what == "setting" else ())
            known.cleared.difference_update(numbers if what == "setting" else ())
            known.on_disk.difference_update(numbers if what == "removing" else ())
            known.on_disk.difference_update(of_identity[identity] if what == "clearing" else ())
    return known


# -- a life ------------------------------------------------------------------------------------------------------------


class Machine:
    """A tier on one file system, through several cuts."""

    def __init__(
        self,
        disk: LoopFileSystem,
        layout: str,
        chance: random.Random,
        findings: Findings,
        directory: Path,
        transforms: bool,
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._chance = chance
        self._findings = findings
        self._log = directory / "log"
        self._journal = directory / "journal"
        # Its key lies where no power is lost.
        self._transforms = both_configured(directory) if transforms else {}
        self._path = disk.path / "tier"
        self._on_disk: set[int] = set()
        self._capacity = ROOMY

    def cut(self, number: int) -> None:
        """One life, its end, and what is there afterwards."""
        chance, findings = self._chance, self._findings
        first = number == 0 or chance.random() < FIRST_STARTS
        if first:
            shutil.rmtree(self._path, ignore_errors=True)
            self._on_disk = set()
            self._capacity = chance.choice([ROOMY, TIGHT])
        flush = chance.choice([Flush.NOTHING, Flush.NOTHING, Flush.EVERYTHING])
        lasts = chance.choice(
            [chance.uniform(0, 0.3), chance.uniform(0, 2), chance.uniform(0, 2), chance.uniform(2, 9)]
        )
        self._journal.unlink(missing_ok=True)
        # So that the last words are those of this life.
        self._log.unlink(missing_ok=True)
        problems: Counter[str] = Counter()
        details: list[str] = []
        known = Known()
        try:
            known = self._life(lasts, flush)
            findings.calls += known.calls
            findings.opening += not known.opened
            if known.wrong:
                problems["a wrong page, before the cut"] += known.wrong
            self._disk.remount()
            findings.packs.update(packs_in(self._path))
            self._start_again(known, problems, details)
        except (ProcessFailedError, StillInUseError) as error:
            problem, _, more = str(error).partition("\n")
            problems[problem] += 1
            details.append(more)
            # The next one begins anew.
            self._forget()
        of_case = f"{self._disk.type}, {self._layout}"
        findings.cuts[of_case] += 1
        findings.flushes[flush.name] += 1
        findings.first_starts += first
        size = "roomy" if self._capacity == ROOMY else "tight"
        story = f"{of_case}, cut {number}: {size}, {'first start, ' if first else ''}{lasts:.2f} s, {flush.name}"
        findings.note_case(of_case, [story], problems, details)

    def _life(self, lasts: float, flush: Flush) -> Known:
        with TierProcess(self._log) as process:
            process.post(live, self._keys(), str(self._journal), self._chance.randrange(1 << 30))
            # From its first step on, however long it takes to start the process.
            deadline = time.monotonic() + 60
            while not self._journal.exists() and not process.has_died() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(lasts)
            if process.has_died() or process.has_answered():
                process.answer()
            cut = time.monotonic()
            self._disk.shut_down(flush)
        return known_from(self._journal, self._on_disk, cut, flush)

    def _start_again(self, known: Known, problems: Counter[str], details: list[str]) -> None:
        findings = self._findings
        roomy = self._capacity == ROOMY
        with TierProcess(self._log) as process:
            begun = time.monotonic()
            process.call(open_tier, self._keys())
            findings.slowest_open = max(findings.slowest_open, time.monotonic() - begun)
            if roomy:
                expected = [KEYS[number] for number in sorted(known.on_disk)]
                waited = process.call(wait_for_pages, expected, REBUILT_WITHIN)
                findings.slowest_wait = max(findings.slowest_wait, waited)
            else:
                # Some may have been evicted; an index that is made anew is soon complete for so few.
                time.sleep(0.3)
            results, wrong = process.call(read_all)
            if wrong:
                problems["a wrong page"] += wrong
            findings.first_reads.update(results)
            hits = {number for number, result in enumerate(results) if result == "HIT"}
            size = "roomy" if roomy else "tight"
            findings.on_disk[size] += len(known.on_disk)
            findings.on_disk[f"{size}, hits"] += len(known.on_disk & hits)
            if roomy and (lost := known.on_disk - hits):
                problems["synced pages that are lost"] += 1
                details.append(
                    f"{len(lost)} of {len(known.on_disk)}: {Counter(results[number] for number in lost).most_common()}"
                )
            findings.cleared += len(known.gone)
            findings.back += len((known.cleared - known.gone) & hits)
            if back := known.gone & hits:
                problems["cleared pages that come back"] += 1
                details.append(f"{len(back)} of {len(known.gone)}")
            if failed := results.count("ERROR"):
                problems["pages that cannot be read: ERROR"] += failed
            of_keys = process.call(problems_of_keys, KEYS)
            problems.update(of_keys)
            if of_keys:
                details.append(process.said())
            process.call(close_tier)
            process.end()
        used = bytes_on_disk(self._path)
        if used > self._capacity + SLACK:
            problems["more on the disk than the capacity"] += 1
            details.append(f"{used} bytes used, {self._capacity} allowed")
        # Where the next life begins: all keys are there, and on the disk.
        self._disk.sync()
        self._on_disk = set(range(len(KEYS))) if roomy and not of_keys else set()

    def _keys(self) -> dict[str, Any]:
        return {
            "path": str(self._path),
            "capacity": self._capacity,
            "layout": self._layout,
            "io": "direct" if self._layout == "slab" and self._chance.random() < 0.4 else "buffered",
            **self._transforms,
        }

    def _forget(self) -> None:
        self._disk.stop()
        self._disk.start()
        self._path = self._disk.path / "tier"
        self._on_disk = set()


def run(
    cuts: int,
    seed: int,
    file_systems: Sequence[str] = FILE_SYSTEMS,
    layouts: Sequence[str] = LAYOUTS,
    *,
    transforms: bool = False,
) -> Findings:
    """``cuts`` of each file system and layout. Prints what is seen."""
    findings = Findings()
    directory = Path(tempfile.mkdtemp(prefix="hicache-power-"))
    try:
        for file_system in file_systems:
            for layout in layouts:
                chance = random.Random(f"{seed}/{file_system}/{layout}")
                with LoopFileSystem(file_system, directory) as disk:
                    machine = Machine(disk, layout, chance, findings, directory, transforms)
                    for number in range(cuts):
                        machine.cut(number)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if "pages" in layouts:
        findings.problems.update(problems_of_packs(findings.packs))
    return findings


def report(found: Findings, options: argparse.Namespace, took: str) -> str:
    return report_of(
        "Power losses",
        f"{command_of('power_loss', options)}: {took}. Loop mounts with default options, cut off by the shutdown"
        " ioctl. What a device loses of that which it has acknowledged is not imitated.",
        [
            *((f"cuts: {name}", count) for name, count in sorted(found.cuts.items())),
            ("without the log and what is in memory", found.flushes["NOTHING"]),
            ("after everything was brought to the disk", found.flushes["EVERYTHING"]),
            ("of lives that began in an empty directory", found.first_starts),
            ("while the tier was being opened", found.opening),
            ("steps before the cuts", found.calls),
            *(
                (f"pages on the disk, {what}: found again", f"{found.on_disk[size]}: {found.on_disk[f'{size}, hits']}")
                for size, what in (("roomy", "tier not full"), ("tight", "tier full, may be evicted"))
            ),
            *((f"pages at the first read: {name}", count) for name, count in found.first_reads.most_common()),
            pack_row(found.packs),
            ("pages whose clear was on the disk", found.cleared),
            ("pages back because the clear was not", found.back),
            ("seconds of the slowest opening", f"{found.slowest_open:.2f}"),
            ("seconds until pages on the disk were found, at most", f"{found.slowest_wait:.2f}"),
            ("cuts with problems", len(found.stories)),
        ],
        "Checked at the one restart after each cut: no exception, no signal, no wrong byte; what was stored before"
        " a sync is a hit; what was cleared before a sync, or"
        f" {NOTE_SECONDS:.0f} s before the cut, stays away; every key is stored and read (what was STORED is a HIT"
        f" at once); the files take no more than the capacity and {SLACK >> 20} MiB.",
        problems=found.problems,
    )


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--cuts", type=int, default=50, help="of each file system and layout")
    parser.add_argument("--transforms", action="store_true", help="pages are encoded and encrypted")
    options = parser.parse_args()
    return conduct(options, lambda: run(options.cuts, options.seed, transforms=options.transforms), report)


if __name__ == "__main__":
    sys.exit(main())

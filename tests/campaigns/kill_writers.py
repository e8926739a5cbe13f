"""Kill writers of a file tier at random moments, and look at what they leave.

::

    python -m tests.campaigns.kill_writers --kills 200 --seed 1 --report build/reports/kills.md
    python -m tests.campaigns.kill_writers --kills 1000 --contained --stops

Over one directory per mode: a process works (writes; writes and evicts; removes and clears) and is killed with SIGKILL
at a random moment, while this process reads and verifies all the time. The bytes of a page follow from its key, so any
process can tell a wrong one. After each kill:

- nothing the reader was given is wrong, nothing was CORRUPT or an ERROR;
- the account on disk is not below what a walk finds;
- the next start removes every temp file and cleared tree, and its account equals a walk;
- every key can be written and read.

With ``--contained`` the process that is killed has PID and UTS namespaces of its own. With ``--stops`` it is stopped
now and then before (SIGSTOP), while this process writes, which must not wait longer than a stated bound. With
``--transforms`` pages are encoded and encrypted on their way.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, HostPages, cut, page_key
from tests.campaigns.reporting import publish
from tests.campaigns.tier_process import packs_in, problems_of_packs
from tests.rigs.both_transforms import both, numbers_of
from tests.rigs.container import Program

CHAINS = [
    [(page_key(f"{size} {number}", identity), size) for number in range(16)]
    for identity in (IDENTITY, OTHER_IDENTITY)
    for size in (1000, 4096, 16_384, 131_072)
]
"""Pages of one size and one identity: what is written of a chain at once is a pack."""
KEYS = [key for chain in CHAINS for key, _ in chain]
SIZES = {key: cut(size, 5) for chain in CHAINS for key, size in chain}
BLOCK = 4096
ENCODED = 16_384
"""Bytes of the pages that a codec encodes, where there is one."""
LATEST_KILL = 0.08
"""Seconds after the first finished batch within which the kill comes."""


UPKEEP = 75.0
"""Seconds, generous, until the next upkeep of a directory (pages/store.py) is over."""
BOUND = 5.0
"""Seconds, generous, of one call beside a process that is stopped."""
WORK = """
import sys
from pathlib import Path
from tests.campaigns import kill_writers
kill_writers.work(Path(sys.argv[1]), kill_writers.MODES[int(sys.argv[2])], int(sys.argv[3]), sys.argv[4] == "True")
"""


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    capacity: int | None
    removes: bool


MODES = [
    Mode("writes", None, False),
    Mode("evicts", 3 << 20, False),
    Mode("removes and clears", None, True),
]


@dataclass
class Findings:
    """Of one mode. ``problems`` is what must not be; the rest shows that the kills hit something."""

    kills: int = 0
    hits: int = 0
    misses: int = 0
    killed_under_way: int = 0
    """Kills after which the account named operations that were never ended."""
    longest_call: float = 0.0
    """Seconds, of writes beside a process that was stopped."""
    left_files: int = 0
    """Temp files and cleared trees that kills left behind, and the next start had to remove."""
    packs: Counter[str] = field(default_factory=Counter)
    """That killed processes left, and pages in them."""
    problems: Counter[str] = field(default_factory=Counter)


# -- the process that is killed ----------------------------------------------------------------------------------------


def work(place: Path, mode: Mode, seed: int, transforms: bool) -> None:
    chance = random.Random(seed)
    store = open_store(place, mode, transforms)
    for number in range(1_000_000):
        keys = some_of_two_chains(chance)
        pages = HostPages([SIZES[key] for key in keys])
        for position, key in enumerate(keys):
            pages.write(position, payload(key))
        store.set(PageBatch(keys, pages.buffers))
        if number == 0:
            print("working", flush=True)
        if mode.removes and chance.random() < 0.3:
            store.clear([chance.choice([IDENTITY, OTHER_IDENTITY])])
        elif mode.capacity is None:
            store.remove(chance.sample(KEYS, 24))


def some_of_two_chains(chance: random.Random) -> list[bytes]:
    pages = [key for chain in chance.sample(CHAINS, 2) for key, _ in chain]
    return chance.sample(pages, chance.randint(1, 24))


def open_store(place: Path, mode: Mode, transforms: bool) -> PageStore:
    store = PageFileStore("disk", place, capacity=mode.capacity)
    return both(store, (IDENTITY, OTHER_IDENTITY), ENCODED) if transforms else store


def used_bytes(store: PageStore) -> int:
    files = ability(store, PageFileStore)
    assert files is not None
    return files.used_bytes()


@functools.cache
def payload(key: bytes) -> bytes:
    return numbers_of(key, sum(SIZES[key]))


# -- the process that looks on -----------------------------------------------------------------------------------------


class Reader:
    """Reads random pages in a thread until it is stopped, and verifies every hit."""

    def __init__(self, place: Path, findings: Findings, seed: int, transforms: bool) -> None:
        self._store = open_store(place, MODES[0], transforms)
        self._findings = findings
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            verify(self._store, self._chance.sample(KEYS, 8), self._findings, "while another process works")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._store.close()


def verify(store: PageStore, keys: Sequence[bytes], findings: Findings, when: str) -> list[GetResult]:
    pages = HostPages([SIZES[key] for key in keys])
    results = store.get(PageBatch(keys, pages.buffers))
    for position, (key, result) in enumerate(zip(keys, results, strict=True)):
        if result is GetResult.HIT:
            findings.hits += 1
            if pages.payload(position) != payload(key):
                findings.problems[f"a wrong page, {when}"] += 1
        elif result is GetResult.MISS:
            findings.misses += 1
        else:
            findings.problems[f"{result.name}, {when}"] += 1
    return results


def occupied_by_walk(place: Path) -> int:
    """Bytes of disk of the pages, packs and their directories, without the package's help."""
    total = 0
    for entry in (place / "pages").glob("**/*"):
        total += BLOCK if entry.is_dir() else -(-entry.stat().st_size // BLOCK) * BLOCK
    return total


def look_after_kill(place: Path, findings: Findings) -> None:
    """What the killed process has left, before anybody opens the directory."""
    account = json.loads((place / "usage").read_bytes().partition(b"\n")[0].partition(b" ")[2])
    reserved = sum(bytes_reserved for bytes_reserved, _ in account["under_way"].values())
    if account["stored"] + reserved < occupied_by_walk(place):
        findings.problems["the account is below what is stored, after the kill"] += 1
    findings.killed_under_way += bool(account["under_way"])
    findings.packs.update(packs_in(place))
    findings.left_files += len(list((place / "tmp").iterdir()))


def look_after_start(place: Path, mode: Mode, findings: Findings, transforms: bool) -> None:
    """The next start: left-overs gone, account right, every key works."""
    store = open_store(place, mode, transforms)
    try:
        if not _comes_true(lambda: not list((place / "tmp").iterdir())):
            findings.problems["files left in tmp/, after the next start"] += 1
        if not _comes_true(lambda: used_bytes(store) == occupied_by_walk(place)):
            findings.problems["the account differs from a walk, after the next start"] += 1
        verify(store, KEYS, findings, "after the next start")
        for key in KEYS:
            pages = HostPages([SIZES[key]])
            pages.write(0, payload(key))
            if store.set(PageBatch([key], pages.buffers)) not in ([SetResult.STORED], [SetResult.EXISTS]):
                findings.problems["a key that cannot be written"] += 1
            if verify(store, [key], findings, "after it was written again") != [GetResult.HIT]:
                findings.problems["a key that cannot be read"] += 1
        if used_bytes(store) != occupied_by_walk(place):
            findings.problems["the account differs from a walk, after writing every key"] += 1
        store.remove(KEYS)
    finally:
        store.close()


def _comes_true(is_so: Callable[[], bool]) -> bool:
    """Whether it is so within the time of the next upkeep: on a busy machine a start does not wait for its end."""
    deadline = time.monotonic() + UPKEEP
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def write_beside(store: PageStore, chance: random.Random, findings: Findings) -> None:
    """Write while the other process is stopped."""
    keys = some_of_two_chains(chance)
    pages = HostPages([SIZES[key] for key in keys])
    for position, key in enumerate(keys):
        pages.write(position, payload(key))
    begun = time.monotonic()
    results = store.set(PageBatch(keys, pages.buffers))
    took = time.monotonic() - begun
    findings.longest_call = max(findings.longest_call, took)
    if took > BOUND:
        findings.problems[f"a write took longer than {BOUND:g} s beside a process that was stopped"] += 1
    for result in set(results) - {SetResult.STORED, SetResult.EXISTS, SetResult.REJECTED}:
        findings.problems[f"{result.name}, written beside a process that was stopped"] += 1


def kill_once(
    place: Path,
    mode: Mode,
    chance: random.Random,
    findings: Findings,
    contained: bool,
    beside: PageStore | None,
    transforms: bool,
) -> None:
    """``beside``: what this process writes to while the other one is stopped."""
    seed = chance.randrange(1 << 30)
    with Program(WORK, place, MODES.index(mode), seed, transforms, contained=contained) as process:
        if process.line() != "working":
            raise ChildProcessError("the worker did not start")
        for _ in range(chance.randint(1, 3) if beside is not None else 0):
            time.sleep(chance.random() * LATEST_KILL)
            with process.stopped():
                write_beside(beside, chance, findings)
        time.sleep(chance.random() * LATEST_KILL)
        process.kill()
    findings.kills += 1
    look_after_kill(place, findings)
    look_after_start(place, mode, findings, transforms)


def run(
    kills: int, seed: int, contained: bool = False, stops: bool = False, transforms: bool = False
) -> dict[Mode, Findings]:
    """``kills`` kills, spread over the modes."""
    chance = random.Random(seed)
    all_findings = {mode: Findings() for mode in MODES}
    root = Path(tempfile.mkdtemp(prefix="hicache-kills-"))
    try:
        for number, (mode, findings) in enumerate(all_findings.items()):
            place = root / str(number)
            reader = Reader(place, findings, seed, transforms)
            beside = open_store(place, mode, transforms) if stops else None
            try:
                for _ in range(kills // len(MODES) + (number < kills % len(MODES))):
                    kill_once(place, mode, chance, findings, contained, beside, transforms)
            finally:
                reader.close()
                if beside is not None:
                    beside.close()
            findings.problems.update(problems_of_packs(findings.packs))
    finally:
        shutil.rmtree(root)
    return all_findings


def report(all_findings: dict[Mode, Findings], command: str, seconds: float) -> str:
    total = sum(findings.kills for findings in all_findings.values())
    problems = sum((findings.problems for findings in all_findings.values()), Counter())
    lines = [
        "# Killed writers",
        "",
        f"`python -m tests.campaigns.kill_writers {command}`: {total} processes killed with "
        f"SIGKILL while they worked on a file tier, in {seconds:.0f} s on {os.cpu_count()} cores, "
        f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}.",
        "",
        "| the killed process | kills | killed amid an operation | left-overs the next start removed | packs left |"
        " pages in them | pages verified | misses | longest write beside a stopped process | problems |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, found in all_findings.items():
        seen = [found.kills, found.killed_under_way, found.left_files, found.packs["packs"], found.packs["pages"]]
        seen += [found.hits, found.misses, f"{found.longest_call:.2f} s" if found.longest_call else "-"]
        lines.append(" | ".join([f"| {mode.name}", *map(str, seen), f"{sum(found.problems.values())} |"]))
    lines += [
        "",
        "Checked after every kill: no wrong byte, no CORRUPT and no ERROR in what another process read meanwhile and"
        " afterwards; the account not below what is stored; after the next start no temp file and no cleared tree"
        " left, the account equal to a walk over the directory; every key written and read again.",
        "",
        "Problems: none." if not problems else "Problems:",
        *(f"- {count} x {problem}" for problem, count in problems.most_common()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--contained", action="store_true", help="in namespaces of its own")
    parser.add_argument("--stops", action="store_true", help="stopped now and then before it is killed")
    parser.add_argument("--transforms", action="store_true", help="pages are encoded and encrypted")
    parser.add_argument("--report", type=Path, help="a file to write the report to, besides standard output")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    begun = time.monotonic()
    findings = run(options.kills, options.seed, options.contained, options.stops, options.transforms)
    command = f"--kills {options.kills} --seed {options.seed}"
    command += " --contained" * options.contained + " --stops" * options.stops + " --transforms" * options.transforms
    text = report(findings, command, time.monotonic() - begun)
    publish(text, options.report)
    return 1 if any(found.problems for found in findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Damage any file of a tier's directory at random, with nobody there and under a running process, and start again.

::

    python -m tests.campaigns.damages --damages 1000 --seed 1 --report build/reports/damages.md

Each round fills a small tier of one layout, damages it once or several times at once, and starts a process on it. That
one restart is all that may be needed: every key can be stored and read, no byte is wrong, nothing raises, dies or
hangs, files of others are as they were, and what is on the disk is within the capacity. A round depends on the seed and
its number alone: ``--only NUMBER`` repeats one.
"""

from __future__ import annotations

import argparse
import enum
import os
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.cli.main import main as hicache_ext_command
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY
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
)

LAYOUTS = ("slab", "pages")
CAPACITY = 4 << 20
KEYS = [key for identity in (IDENTITY, OTHER_IDENTITY) for key in keys_of(identity, 80)]
"""All together more than the capacity: the tier evicts."""
PINNED = 4
BATCH = 16
SEVERAL_AT_ONCE = 0.3
"""Share of the rounds that damage the tier more than once."""
ABSURD = ("0", "1", "-1", "007", "4097", "65536", "99999999", "4294967296", "18446744073709551616", "9" * 60)
"""Numbers that take the place of one in a name of ours."""
OTHERS = b"Nobody but its owner writes into this file.\n"


class When(enum.Enum):
    """What the process that filled the tier does when the damage is done."""

    CLOSED = "closed in order before"
    KILLED = "killed before"
    RUNNING = "works on, then ends"
    BESIDE = "works on, also beside the next start, and then ends"


@dataclass
class Findings(Found):
    rounds: int = 0
    damages: Counter[str] = field(default_factory=Counter)
    whens: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    first_reads: Counter[str] = field(default_factory=Counter)
    packs: Counter[str] = field(default_factory=Counter)
    """Before the damage."""
    slowest_round: float = 0.0


# -- damages -----------------------------------------------------------------------------------------------------------


class Damage:
    """Damages of the files under ``directory``; what a round does depends on ``chance`` and the files' names alone."""

    def __init__(self, directory: Path, stranger: Path, chance: random.Random) -> None:
        """``stranger``: a file outside that links may lead to."""
        self._directory = directory
        self._stranger = stranger
        self._chance = chance
        self._kinds: list[Callable[[], str | None]] = [
            self.bits_flipped,
            self.zeros,
            self.garbage,
            self.cut,
            self.emptied,
            self.grown,
            self.grown_sparse,
            self.blocks_swapped,
            self.files_swapped,
            self.deleted,
            self.a_directory_instead,
            self.a_link_instead,
            self.a_fifo_instead,
            self.a_socket_instead,
            self.subdirectory_removed,
            self.a_file_instead_of_a_subdirectory,
            self.a_file_added,
            self.a_file_copied,
        ]

    def do(self) -> tuple[str, str]:
        """(kind, what exactly)."""
        for _ in range(1000):
            kind = self._chance.choice(self._kinds)
            # A running process may have taken the file away, or written it again.
            with suppress(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError):
                what = kind()
                if what is not None:
                    return kind.__name__.replace("_", " "), what
        return "nothing", "no file is left"

    def bits_flipped(self) -> str | None:
        file = self._file()
        if not (size := _size(file)):
            return None
        offsets = [self._chance.randrange(size) for _ in range(self._chance.choice([1, 1, 8, 64]))]
        with open(file, "r+b") as opened:
            for offset in offsets:
                opened.seek(offset)
                byte = opened.read(1)
                opened.seek(offset)
                opened.write(bytes([byte[0] ^ 1 << self._chance.randrange(8)]) if byte else b"")
        return f"{len(offsets)} bits of {self._name(file)}, the first at {offsets[0]}"

    def zeros(self) -> str | None:
        return self._overwritten(lambda length: bytes(length))

    def garbage(self) -> str | None:
        return self._overwritten(self._chance.randbytes)

    def cut(self) -> str | None:
        file = self._file()
        if not (size := _size(file)):
            return None
        length = self._chance.choice([self._chance.randrange(size), size - 1, size // 4096 * 4096 // 2])
        os.truncate(file, length)
        return f"{self._name(file)} from {size} to {length}"

    def emptied(self) -> str | None:
        file = self._file()
        os.truncate(file, 0)
        return self._name(file)

    def grown(self) -> str | None:
        file = self._file()
        more = self._chance.choice([1, 128, 4096, 2 * CAPACITY])
        with open(file, "ab") as opened:
            opened.write(self._chance.randbytes(more))
        return f"{self._name(file)} by {more}"

    def grown_sparse(self) -> str | None:
        file = self._file()
        size = self._chance.choice([1 << 20, 1 << 32, 1 << 40])
        if _size(file) >= size:
            return None
        os.truncate(file, size)
        return f"{self._name(file)} to {size}"

    def blocks_swapped(self) -> str | None:
        file, unit = self._file(), self._chance.choice([64, 128, 512, 4096, 16384])
        if (blocks := _size(file) // unit) < 2:
            return None
        one, other = self._chance.sample(range(blocks), 2)
        with open(file, "r+b") as opened:
            contents = []
            for block in (one, other):
                opened.seek(block * unit)
                contents.append(opened.read(unit))
            for block, content in zip((other, one), contents, strict=True):
                opened.seek(block * unit)
                opened.write(content)
        return f"blocks {one} and {other} of {unit} bytes in {self._name(file)}"

    def files_swapped(self) -> str | None:
        one, other = self._file(), self._file()
        if one == other:
            return None
        beside = one.with_name("swapping")
        os.rename(one, beside)
        os.rename(other, one)
        os.rename(beside, other)
        return f"{self._name(one)} and {self._name(other)}"

    def deleted(self) -> str | None:
        file = self._file()
        file.unlink()
        return self._name(file)

    def a_directory_instead(self) -> str | None:
        file = self._file()
        file.unlink()
        file.mkdir()
        if full := self._chance.random() < 0.5:
            (file / "something").write_bytes(b"in it")
        return f"{self._name(file)}{', with something in it' if full else ''}"

    def a_link_instead(self) -> str | None:
        file = self._file()
        target = self._chance.choice([self._file(), self._stranger, file, Path("nowhere"), self._directory])
        file.unlink()
        file.symlink_to(target)
        return f"{self._name(file)} -> {self._name(target)}"

    def a_fifo_instead(self) -> str | None:
        file = self._file()
        file.unlink()
        os.mkfifo(file, 0o600)
        return self._name(file)

    def a_socket_instead(self) -> str | None:
        file = self._file()
        file.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            # Its address may be longer than a socket's may be.
            here = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                listener.bind(f"/proc/self/fd/{here}/{file.name}")
            finally:
                os.close(here)
        return self._name(file)

    def subdirectory_removed(self) -> str | None:
        subdirectory = self._subdirectory()
        if subdirectory is None:
            return None
        shutil.rmtree(subdirectory, ignore_errors=True)
        return self._name(subdirectory)

    def a_file_instead_of_a_subdirectory(self) -> str | None:
        subdirectory = self._subdirectory()
        if subdirectory is None:
            return None
        shutil.rmtree(subdirectory, ignore_errors=True)
        subdirectory.write_bytes(self._chance.randbytes(self._chance.choice([0, 100])))
        return self._name(subdirectory)

    def a_file_added(self) -> str | None:
        """Garbage under a name like one that is there, with another number in it."""
        added = self._like(self._file())
        if added is None or added.exists():
            return None
        size = self._chance.choice([0, 128, 4096, 100_000, 2 * CAPACITY])
        added.write_bytes(self._chance.randbytes(size))
        return f"{self._name(added)} of {size} bytes"

    def a_file_copied(self) -> str | None:
        """What is in one of ours, under a name like it."""
        file = self._file()
        added = self._like(file)
        if added is None or added.exists():
            return None
        added.write_bytes(file.read_bytes())
        return f"{self._name(file)} as {self._name(added)}"

    def _overwritten(self, content: Callable[[int], bytes]) -> str | None:
        file = self._file()
        if not (size := _size(file)):
            return None
        begin = self._chance.randrange(size)
        length = min(size - begin, self._chance.choice([1, 8, 64, 512, 4096, 65_536]))
        with open(file, "r+b") as opened:
            opened.seek(begin)
            opened.write(content(length))
        return f"{length} bytes of {self._name(file)} at {begin}"

    def _file(self) -> Path:
        """Any file; one of which there are many is not taken more often than one that is alone."""
        kinds: dict[str, list[Path]] = {}
        for entry in _entries(self._directory):
            if entry.is_file() and not entry.is_symlink():
                kinds.setdefault(re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", self._name(entry)), []).append(entry)
        if not kinds:
            raise FileNotFoundError("all files are gone")
        return self._chance.choice(kinds[self._chance.choice(sorted(kinds))])

    def _subdirectory(self) -> Path | None:
        found = [entry for entry in _entries(self._directory) if entry.is_dir() and not entry.is_symlink()]
        # Those at the top hold most, and are few beside the others.
        top = [entry for entry in found if entry.parent == self._directory]
        return self._chance.choice(self._chance.choice([top, found])) if top else None

    def _like(self, file: Path) -> Path | None:
        """A name of ours with another number in it."""
        numbers = list(re.finditer(r"[0-9]+", file.name))
        if not numbers:
            return None
        number = self._chance.choice(numbers)
        return file.with_name(file.name[: number.start()] + self._chance.choice(ABSURD) + file.name[number.end() :])

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._directory)) if path.is_relative_to(self._directory) else str(path)


def _entries(directory: Path) -> Iterator[Path]:
    for root, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted([*directories, *names]):
            yield Path(root, name)


def _size(file: Path) -> int:
    return file.stat().st_size


# -- in the processes --------------------------------------------------------------------------------------------------


def fill(tier: Tier, directory: str, seed: int) -> None:
    """Something of everything that a tier's directory can hold."""
    chance = random.Random(seed)
    for begin in range(0, len(KEYS), BATCH):
        store_keys(tier, KEYS[begin : begin + BATCH])
    tier.opened.clear([OTHER_IDENTITY])
    tier.opened.remove(chance.sample(KEYS, 5))
    for begin in range(0, len(KEYS), BATCH):
        store_keys(tier, KEYS[begin : begin + BATCH])
    read_keys(tier, chance.sample(KEYS, BATCH))
    pins = Path(directory).parent / "pins.txt"
    pins.write_text("".join(f"{key[16:].hex()}\n" for key in KEYS[-PINNED:]))
    assert hicache_ext_command(["pin", directory, "--name", "prompt", "--keys", str(pins)]) == 0


def work(tier: Tier, seed: int) -> None:
    """Use the tier in a thread of its own until ``end_work``."""
    stop = tier.extra["stop"] = threading.Event()
    failed = tier.extra["failed"] = []
    chance = random.Random(seed)
    counts = tier.extra["work"] = Counter[str]()

    def run() -> None:
        try:
            while not stop.is_set():
                keys = chance.sample(KEYS, BATCH)
                tier.opened.count_leading(keys)
                results, wrong = read_keys(tier, keys)
                counts.update(f"{result.name}" for result in results)
                counts["wrong"] += wrong
                store_keys(tier, keys)
                if chance.random() < 0.1:
                    tier.opened.remove(keys[:2])
                if chance.random() < 0.05:
                    tier.opened.clear([OTHER_IDENTITY])
        except BaseException as error:
            failed.append(error)
            raise

    tier.extra["worker"] = threading.Thread(target=run)
    tier.extra["worker"].start()


def end_work(tier: Tier) -> int:
    """Wrong pages that it has read. Raises what its thread raised."""
    tier.extra["stop"].set()
    tier.extra["worker"].join()
    for error in tier.extra["failed"]:
        raise error
    return int(tier.extra["work"]["wrong"])


def first_reads(tier: Tier) -> Counter[str]:
    counts: Counter[str] = Counter()
    for begin in range(0, len(KEYS), BATCH):
        results, wrong = read_keys(tier, KEYS[begin : begin + BATCH])
        counts.update(result.name for result in results)
        counts["wrong"] += wrong
    return counts


# -- a round -----------------------------------------------------------------------------------------------------------


class Round:
    """One tier, damaged and started again."""

    def __init__(self, root: Path, seed: int, number: int, findings: Findings) -> None:
        self._chance = random.Random(f"{seed}/{number}")
        self._seed, self._number = seed, number
        self._findings = findings
        self._root = root / f"{number}"
        self._directory = self._root / "tier"
        self._stranger = self._root / "stranger"
        self._layout = self._chance.choice(LAYOUTS)
        self._when = self._chance.choices(list(When), [4, 2, 3, 1])[0]
        self._problems: Counter[str] = Counter()
        self._damages: list[tuple[str, str]] = []
        self._details: list[str] = []

    def run(self) -> None:
        begun = time.monotonic()
        self._root.mkdir()
        self._stranger.write_bytes(OTHERS)
        try:
            self._run()
        except ProcessFailedError as error:
            self._failed(error, "while the tier was filled")
        finally:
            shutil.rmtree(self._root, ignore_errors=True)
        found = self._findings
        found.rounds += 1
        found.whens[self._when.value] += 1
        found.layouts[self._layout] += len(self._damages)
        found.damages.update(kind for kind, _ in self._damages)
        found.slowest_round = max(found.slowest_round, time.monotonic() - begun)
        story = [f"seed {self._seed}, round {self._number}, {self._layout}, process {self._when.value}:"]
        story += [f"  damage: {kind}: {what}" for kind, what in self._damages]
        found.note_case(self._layout, story, self._problems, self._details)

    def _run(self) -> None:
        with TierProcess(self._root / "log") as before:
            before.call(open_tier, self._disk())
            before.call(fill, str(self._directory), self._chance.randrange(1 << 30))
            if self._when is When.CLOSED:
                before.call(close_tier)
                before.end()
            elif self._when is When.KILLED:
                before.kill()
            else:
                before.call(work, self._chance.randrange(1 << 30))
                time.sleep(self._chance.uniform(0, 0.05))
            self._findings.packs.update(packs_in(self._directory))
            damage = Damage(self._directory, self._stranger, self._chance)
            several = self._chance.random() < SEVERAL_AT_ONCE
            for _ in range(self._chance.randint(2, 6) if several else 1):
                self._damages.append(damage.do())
            if self._when is When.BESIDE:
                with self._noted("beside the process before"), TierProcess(self._root / "log") as beside:
                    beside.call(open_tier, self._disk())
                    self._note_reads(beside.call(first_reads))
                    beside.call(close_tier)
                    beside.end()
            if self._when in (When.RUNNING, When.BESIDE):
                with self._noted("in the process that was there"):
                    time.sleep(self._chance.uniform(0.02, 0.2))
                    if wrong := before.call(end_work):
                        self._problems["a wrong page, in the process that was there"] += wrong
                    if self._chance.random() < 0.5:
                        before.call(close_tier)
                        before.end()
        with self._noted("at the next start"):
            self._start_again()
        if not self._stranger.exists() or self._stranger.read_bytes() != OTHERS:
            self._problems["the file of somebody else was changed"] += 1
        used = bytes_on_disk(self._directory)
        if used > CAPACITY + SLACK:
            self._problems["more on the disk than the capacity"] += 1
            self._details.append(f"{used} bytes used, {CAPACITY} allowed: {self._largest()}")

    def _start_again(self) -> None:
        with TierProcess(self._root / "log") as process:
            process.call(open_tier, self._disk())
            self._note_reads(process.call(first_reads))
            broken = process.call(problems_of_keys, KEYS)
            self._problems.update(broken)
            if broken:
                self._details.append(process.said())
            process.call(close_tier)
            process.end()

    def _note_reads(self, counts: Counter[str]) -> None:
        if wrong := counts.pop("wrong"):
            self._problems["a wrong page"] += wrong
        self._findings.first_reads.update(counts)

    def _disk(self) -> dict[str, Any]:
        return {
            "path": str(self._directory),
            "capacity": CAPACITY,
            "layout": self._layout,
            "io": "buffered",
            "ttl": "1d",
        }

    @contextmanager
    def _noted(self, when: str) -> Iterator[None]:
        """What fails inside is noted as a problem of the round, which goes on."""
        try:
            yield
        except ProcessFailedError as error:
            self._failed(error, when)

    def _failed(self, error: ProcessFailedError, when: str) -> None:
        problem, _, details = str(error).partition("\n")
        self._problems[f"{problem}, {when}"] += 1
        # Of a chain of errors the first and the last are worth reading.
        lines = details.splitlines()
        self._details.append("\n".join(lines if len(lines) < 30 else [*lines[:14], "...", *lines[-8:]]))

    def _largest(self) -> str:
        files = [(os.lstat(entry).st_blocks * 512, entry.name) for entry in _entries(self._directory)]
        return ", ".join(f"{name} {size}" for size, name in sorted(files, reverse=True)[:6])


def run(damages: int, seed: int, only: int | None = None) -> Findings:
    """Rounds until there were ``damages``; or the one of number ``only``. Prints what is seen."""
    findings = Findings()
    root = Path(tempfile.mkdtemp(prefix="hicache-damages-"))
    try:
        while findings.damages.total() < damages and not (only is not None and findings.rounds):
            Round(root, seed, findings.rounds if only is None else only, findings).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if only is None:
        findings.problems.update(problems_of_packs(findings.packs))
    return findings


def report(found: Findings, options: argparse.Namespace, took: str) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.damages.most_common())
    return report_of(
        "Damaged files",
        f"{command_of('damages', options)}: tiers of {CAPACITY >> 20} MiB, {took}.",
        [
            ("rounds: a tier filled, damaged, started again", found.rounds),
            *((f"damages, layout {layout}", count) for layout, count in sorted(found.layouts.items())),
            *((f"rounds whose process before was: {when}", count) for when, count in found.whens.most_common()),
            *((f"pages at the first read: {name}", count) for name, count in found.first_reads.most_common()),
            pack_row(found.packs),
            ("the slowest round, seconds", f"{found.slowest_round:.1f}"),
            ("rounds with problems", len(found.stories)),
        ],
        f"Damages: {kinds}.",
        "Checked after each round: within one restart every key is stored and read again (what was STORED is a HIT"
        " at once); no wrong byte, no exception, no signal, no call that hangs, also in the process that ran"
        " meanwhile; a file outside that a link led to is as it was; the files take no more than the capacity and"
        f" {SLACK >> 20} MiB.",
        problems=found.problems,
    )


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="repeat this round of the seed")
    options = parser.parse_args()
    return conduct(options, lambda: run(options.damages, options.seed, options.only), report)


if __name__ == "__main__":
    sys.exit(main())

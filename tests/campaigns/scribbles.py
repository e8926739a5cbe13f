"""Write words into the index that a running store shares, as any process can that has its memory.

::

    python -m tests.campaigns.scribbles --rounds 20000 --seed 1 --report build/reports/scribbles.md

Each round writes up to three words into one part of the index (extremes, bounds of the parts, flipped bits, chance),
uses the store and a tool that lists the directory, and mostly puts the words back. With ``--beside`` a thread goes on
writing them while the store works. Whatever the words say: the process lives, no call raises or hangs, no byte is wrong
and none beside the pages is changed. It may cost any page, and some room on the disk.

The store is in a process of its own: one that ends by a signal, SIGSEGV above all, is a problem as any other. A round
depends on the seed and its number alone: ``--only NUMBER`` repeats it, as far as the rounds before it left nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hicache_ext.runtime.members import living_members
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.tiers.file.layouts import slab_home
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory, shared_index
from hicache_ext.storage.tiers.file.slab.index_words import Words
from hicache_ext.storage.tiers.file.slab.listing import SlabListing
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.campaigns.reporting import Found, arguments_of, problem_lines, publish

CAPACITY = 2 << 20
SIZES = ((3000,), (4096,), (20_000, 5), (65_536,))
CHAINS = [page_keys(60, f"chain {n}", identity) for n in range(4) for identity in (IDENTITY, OTHER_IDENTITY)]
ROUNDS_OF_A_STORE = 40
"""Then all of it is made anew from the headers."""
LONGEST_ROUND = 60
"""Seconds; one takes some milliseconds."""
MOST_MEMORY = 8 << 30
"""Of address space: what a word says must not be what is allocated."""
MOST_DISK = 16 * CAPACITY
"""Slabs that are out of the table keep their files until the index is made anew."""
EXTREMES = [
    *(0, 1, 2, 7, 15, 16, 63, 64, 65, 4095, 4096, 4097, 65_535, 65_536, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32),
    *(1 << 39, (1 << 40) - 1, 1 << 40, 1 << 47, 1 << 57, 1 << 58, 1 << 61, 1 << 62, (1 << 63) - 1),
    *(-1, -2, -16, -4096, -(1 << 31), -(1 << 40), -(1 << 57), -(1 << 62), -(1 << 63), 1 - (1 << 63)),
]
_OFTEN = 4096
"""Words of a part among which those that are not zero are looked for."""


@dataclass
class Findings(Found):
    rounds: int = 0
    parts: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)


def run(*, rounds: int, seed: int, beside: bool = False, first: int = 0, within: float = 3600.0) -> Findings:
    """Rounds in processes of their own; one that ends is followed by another."""
    found, number = Findings(), first
    with tempfile.TemporaryDirectory(prefix="hicache-scribbles-") as place:
        while number < first + rounds and len(found.stories) < 20:
            said = Path(place, "said")
            said.write_text("")
            command = [sys.executable, "-m", "tests.campaigns.scribbles", "--in", place]
            command += ["--seed", str(seed), "--first", str(number), "--rounds", str(first + rounds - number)]
            ended = subprocess.run(
                [*command, *(["--beside"] if beside else [])],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=within,
                check=False,
            )
            lines = [json.loads(line) for line in said.read_text().splitlines()]
            for line in lines:
                _take_in(found, line)
            number = lines[-1]["number"] + 1 if lines else number + 1
            if ended.returncode:
                name = signal.Signals(-ended.returncode).name if ended.returncode < 0 else f"exit {ended.returncode}"
                name = {"SIGALRM": "a round that does not end"}.get(name, f"the process ended: {name}")
                found.problems[name] += 1
                _, crash, where = ended.stderr.decode(errors="replace").rpartition("Current thread")
                where = where.splitlines()[:10] if crash else where.splitlines()[-10:]
                found.stories.append("\n".join([f"{lines[-1] if lines else {}}: {name}", *where]))
    return found


def _take_in(found: Findings, line: Mapping[str, object]) -> None:
    if "words" in line:
        found.rounds += 1
        found.parts[str(line["part"])] += 1
    for name, counts in (("reads", found.reads), ("writes", found.writes)):
        counts.update(line.get(name, {}))  # type: ignore[arg-type]
    if problem := line.get("problem"):
        found.problems[str(problem).splitlines()[0]] += 1
        found.stories.append(f"round {line['number']}: {problem}")


# -- in the process ----------------------------------------------------------------------------------------------------


class Attacker:
    """Another mapping of the memory that the store has, and words for it."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        home = slab_home(path)
        home_fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fd = shared_index(home_fd, living_members(home / "members"), LONGEST_ROUND)
        finally:
            os.close(home_fd)
        assert fd is not None
        memory = IndexMemory(fd)
        self._chance = chance
        names = ("header", "slabs", "identities", "ghosts", "events", "small", "entries", "sets")
        self.parts: dict[str, Words] = {name: getattr(memory, name).reshape(-1) for name in (*names, "rows")}
        self._bounds = [bound for part in self.parts.values() for bound in (len(part), len(part) // 8, len(part) // 16)]

    def words(self) -> tuple[str, list[tuple[int, int]]]:
        """A part, and what to write where."""
        chance = self._chance
        name = chance.choice(["header", "header", "slabs", "slabs", *self.parts])
        part = self.parts[name]
        used = np.flatnonzero(part[:_OFTEN].copy())
        words = []
        for _ in range(chance.choice([1, 1, 2, 3])):
            if name == "header":
                at = chance.randrange(index_words.SEEN + 1)
            elif len(used) and chance.random() < 0.8:
                # Near one that says something: the next word of a row may be zero, too.
                at = min(int(chance.choice(used)) // 8 * 8 + chance.randrange(8), len(part) - 1)
            else:
                at = chance.randrange(min(len(part), _OFTEN))
            words.append((at, self._word(int(part[at]))))
        return name, words

    def _word(self, now: int) -> int:
        chance = self._chance
        word = chance.choice(
            [
                chance.choice(EXTREMES),
                chance.choice(self._bounds) + chance.choice([-1, 0, 1]),
                now ^ 1 << chance.randrange(64),
                now + chance.choice([-1, 1, 1 << 20, -(1 << 20)]),
                chance.getrandbits(64),
            ]
        )
        return (word + (1 << 63)) % (1 << 64) - (1 << 63)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Write words all the time, on a thread."""
        ended = threading.Event()

        def scribble() -> None:
            while not ended.is_set():
                name, words = self.words()
                for at, word in words:
                    before = int(self.parts[name][at])
                    for _ in range(50):
                        self.parts[name][at] = word
                        self.parts[name][at] = before

        thread = threading.Thread(target=scribble, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Uses:
    """What is done with a store."""

    def __init__(self, store: SlabStore, path: Path, chance: random.Random) -> None:
        self._store = store
        self._path = path
        self._chance = chance
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        often = [self.write, self.write, self.read, self.read, self.look]
        self._all: list[Callable[[], str | None]] = [*often, self.clear, self.report, self.list, self.resize]

    def some(self) -> str | None:
        """What was wrong."""
        for use in (self.write, self.read, *self._chance.choices(self._all, k=3)):
            try:
                problem = use()
            except Exception as error:  # noqa: BLE001 - any of them is what is looked for
                at = error.__traceback__
                while at is not None and at.tb_next is not None:
                    at = at.tb_next
                where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at is not None else ""
                problem = f"{use.__name__} raised {type(error).__name__} in {where}\n{error}"
            if problem is not None:
                return problem
        return None

    def _chain(self) -> tuple[list[bytes], tuple[int, ...]]:
        of = self._chance.randrange(len(CHAINS))
        return CHAINS[of][: self._chance.choice([1, 5, 60])], SIZES[of % len(SIZES)]

    def write(self) -> str | None:
        self.writes.update(result.name for result in store_pages(self._store, *self._chain()))
        taken = 0
        for file in (slab_home(self._path) / "slabs").iterdir():
            # The store drops slabs in the background, too.
            with suppress(FileNotFoundError):
                taken += file.stat().st_blocks * 512
        return "the disk fills" if taken > MOST_DISK else None

    def read(self) -> str | None:
        keys, sizes = self._chain()
        results, payloads = read_pages(self._store, keys, sizes)
        self.reads.update(result.name for result in results)
        for key, result, payload in zip(keys, results, payloads, strict=True):
            if result is GetResult.HIT and payload != payload_of(key, sum(sizes)):
                return "wrong bytes"
        return None

    def look(self) -> str | None:
        keys, _ = self._chain()
        there, leading = self._store.contains(keys), self._store.count_leading(keys)
        return None if len(there) == len(keys) and 0 <= leading <= len(keys) else "an answer of another length"

    def clear(self) -> str | None:
        if self._chance.random() < 0.2:
            self._store.clear(self._chance.choice([None, [IDENTITY]]))
        return None

    def report(self) -> str | None:
        self._store.fullness()
        self._store.block_hashes(IDENTITY)
        return None

    def list(self) -> str | None:
        """As tools do, with root's rights perhaps."""
        listing = SlabListing(self._path)
        for page in listing.pages():
            listing.read(page)
        listing.evicted(CHAINS[0])
        listing.uses(IDENTITY)
        listing.left_overs()
        return None

    def resize(self) -> str | None:
        if self._chance.random() < 0.1:
            self._store.resize(self._chance.choice([CAPACITY, CAPACITY // 2]))
        return None


def _rounds(place: Path, seed: int, first: int, rounds: int, beside: bool) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore", RuntimeWarning)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    number, behind = first, first + rounds
    with (place / "said").open("a") as said:

        def say(**line: object) -> None:
            said.write(json.dumps({"number": number, **line}) + "\n")
            said.flush()

        while number < behind:
            path = place / f"tier {number}"
            store = SlabStore("disk", path, capacity=CAPACITY)
            uses = Uses(store, path, random.Random(f"{seed} {number} uses"))
            attacker = Attacker(path, random.Random(f"{seed} {number} words"))
            for _ in range(2):
                uses.some()
            while number < behind and (number - first + 1) % ROUNDS_OF_A_STORE:
                name, words = attacker.words()
                say(part=name, words=words)
                # Its default ends the process, in native code, too.
                signal.alarm(LONGEST_ROUND)
                faulthandler.dump_traceback_later(LONGEST_ROUND - 5)
                part = attacker.parts[name]
                before = [int(part[at]) for at, _ in words]
                for at, word in words:
                    part[at] = word
                with attacker.beside() if beside else nullcontext():
                    problem = uses.some()
                if random.Random(f"{seed} {number}").random() < 0.8:
                    for (at, _), word in zip(words, before, strict=True):
                        part[at] = word
                signal.alarm(0)
                if problem is not None:
                    say(problem=problem)
                number += 1
            say(reads=uses.reads, writes=uses.writes)
            number += 1
            signal.alarm(LONGEST_ROUND)
            store.close()
            SlabStore("disk", path, capacity=CAPACITY).close()
            signal.alarm(0)
            with suppress(OSError):
                for file in (slab_home(path) / "slabs").iterdir():
                    file.unlink()


# -- the report --------------------------------------------------------------------------------------------------------


def report_of(found: Mapping[str, Findings], arguments: argparse.Namespace) -> str:
    lines = [
        "# Words written into the index of a running store",
        "",
        f"`python -m tests.campaigns.scribbles --rounds {arguments.rounds} --seed {arguments.seed}`",
        "",
    ]
    for title, of in found.items():
        parts, reads, writes = (
            ", ".join(f"{name} {count}" for name, count in counts.most_common())
            for counts in (of.parts, of.reads, of.writes)
        )
        lines += [
            f"## {title}",
            "",
            f"{of.rounds} rounds. Words of: {parts}.",
            f"Reads: {reads}. Writes: {writes}.",
            "",
        ]
        lines += problem_lines(of.problems)
    return "\n".join(lines)


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--beside", action="store_true", help="go on writing while the store works")
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--only", type=int, help="this round alone")
    parser.add_argument("--in", dest="place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        arguments.first, arguments.rounds = arguments.only, 1
    if arguments.place is not None:
        _rounds(arguments.place, arguments.seed, arguments.first, arguments.rounds, arguments.beside)
        return 0
    found = {}
    for beside in (False, True) if not arguments.beside else (True,):
        title = "Written all the time" if beside else "Written between calls"
        rounds = max(1, arguments.rounds // (10 if beside and not arguments.beside else 1))
        found[title] = run(rounds=rounds, seed=arguments.seed, beside=beside, first=arguments.first)
    publish(report_of(found, arguments), arguments.report)
    for of in found.values():
        for story in of.stories:
            print(story, file=sys.stderr)
    return int(any(of.problems for of in found.values()))


if __name__ == "__main__":
    sys.exit(main())

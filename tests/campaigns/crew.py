"""The processes that ``kills`` kills and stops: what they do, and what is known of them when they are dead."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import random
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hicache_ext.errors import ClearLaterError
from hicache_ext.runtime.members import living_members
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, HostPages, cut, page_key
from tests.campaigns.page_insides import account_of
from tests.campaigns.reporting import Found
from tests.campaigns.slab_insides import follow, is_being_changed
from tests.campaigns.stops import LONGEST_CALL, Diary, Stopper
from tests.rigs.both_transforms import both, numbers_of
from tests.rigs.slab_tier import open_slab_tier
from tests.rigs.workers import Worker

IDENTITIES = (IDENTITY, OTHER_IDENTITY)
KEYS = [page_key(number, identity) for identity in IDENTITIES for number in range(96)]
SIZES = {key: cut(random.Random(key).choice([1000, 12_288, 65_536, 131_072]), 3) for key in KEYS}
OF_ONE_SIZE = [[key for key in KEYS if sum(SIZES[key]) == size] for size in sorted({sum(SIZES[key]) for key in KEYS})]
CHAINS = [[key for key in keys if key.startswith(identity)] for keys in OF_ONE_SIZE for identity in IDENTITIES]
"""What page files keep together, where it is written together."""
ENCODED = 65_536
"""Bytes of the pages that a codec encodes, where there is one."""
CAPACITY = 6 << 20
"""Less than half of what all keys need: every writer evicts."""
LONG = 60.0
"""Seconds in which anything must have come to its end."""
_LONGEST_PAUSE_BETWEEN_STOPS = 0.2


@dataclass(frozen=True, slots=True)
class Setting:
    """The directory, and how processes work on it."""

    place: Path
    layout: str = "slab"
    namespaces: bool = False
    """Each worker has PID, host name, /proc, network and IPC of its own, as a pod's container has."""
    stops: bool = False
    transforms: bool = False
    """Pages are encoded and encrypted on their way."""

    def opened(self) -> PageStore:
        store = open_slab_tier(self.place, capacity=CAPACITY, layout=self.layout)
        return both(store, IDENTITIES, ENCODED) if self.transforms else store


@dataclass
class Findings(Found):
    kills: int = 0
    kills_under_way: int = 0
    """Of writers of page files amid an operation, as the account has it."""
    left_files: int = 0
    """Temporary files and cleared trees that killed writers of page files left."""
    packs: Counter[str] = field(default_factory=Counter)
    """That they left, and pages in them."""
    rebuilds_killed: int = 0
    stops: int = 0
    stops_amid_a_change: int = 0
    pages_rebuilt: int = 0
    hits: int = 0
    hits_beside_writers: int = 0
    misses: int = 0
    refused: int = 0
    """Damaged pages that rebuilds right after kills brought back."""
    broken_phases: int = 0
    longest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the longest call of each kind, of processes that were not stopped themselves."""
    workers_results: Counter[str] = field(default_factory=Counter)

    def note_calls(self, longest: dict[str, float]) -> None:
        for kind, seconds in longest.items():
            self.longest[kind] = max(self.longest[kind], seconds)
            if seconds > LONGEST_CALL:
                self.problems[f"a call of {kind} that took longer than {LONGEST_CALL:g} s"] += 1


@functools.cache
def payload(key: bytes) -> bytes:
    return numbers_of(key, sum(SIZES[key]))


def some_keys(chance: random.Random, most: int) -> list[bytes]:
    """Two times in three of one size, which native code moves, or of one chain besides, which is written as a pack."""
    among = chance.choice([KEYS, chance.choice(OF_ONE_SIZE), chance.choice(CHAINS)])
    return chance.sample(among, min(chance.randint(1, most), len(among)))


def work(channel: Connection, setting: Setting, diary: str, seed: int) -> None:
    """Writes (and so evicts), reads, removes, clears, leaves and comes back, for ever. Now and then the tier is made to
    follow another policy."""
    logging.disable(logging.CRITICAL)
    chance = random.Random(seed)
    notes = Diary(Path(diary))
    with notes.call("open"):
        store = setting.opened()
    channel.send("working")
    # Nobody is left behind where the campaign itself is killed.
    campaign = multiprocessing.parent_process()
    while campaign is None or campaign.is_alive():
        keys = some_keys(chance, 24)
        pages = HostPages([SIZES[key] for key in keys])
        for position, key in enumerate(keys):
            pages.write(position, payload(key))
        with notes.call("set"):
            notes.count(store.set(PageBatch(keys, pages.buffers)))
        choice = chance.random()
        if choice < 0.05:
            with notes.call("clear"), suppress(ClearLaterError):
                store.clear([chance.choice(IDENTITIES)])
        elif choice < 0.2:
            with notes.call("remove"):
                store.remove(chance.sample(KEYS, 24))
        elif choice < 0.5:
            with notes.call("count_leading"):
                store.count_leading(keys)
            empty = HostPages([SIZES[key] for key in keys])
            with notes.call("get"):
                results = store.get(PageBatch(keys, empty.buffers))
            notes.count(results)
            for position, (key, result) in enumerate(zip(keys, results, strict=True)):
                if result is GetResult.HIT and empty.payload(position) != payload(key):
                    channel.send(f"a wrong page, read by a worker as {key.hex()}")
        elif choice < 0.52:
            with notes.call("close"):
                store.close()
            with notes.call("open"):
                store = setting.opened()
        elif choice < 0.55 and setting.layout == "slab":
            # The path may be out of service, if this process was started beside one that was stopped.
            with suppress(TimeoutError):
                follow(setting.place, chance.randrange(len(eviction.POLICIES)))


def only_open(channel: Connection, setting: Setting) -> None:
    """The process that is killed while it makes the index anew."""
    logging.disable(logging.CRITICAL)
    channel.send("opening")
    setting.opened()
    time.sleep(60)


class Crew:
    """The workers of one phase, with their diaries."""

    def __init__(self, setting: Setting, chance: random.Random, findings: Findings) -> None:
        self._setting, self._chance, self._findings = setting, chance, findings
        self._workers: list[tuple[Worker, Path]] = []
        self._under_way: set[str] = set()
        self._stopper: Stopper | None = None
        if setting.stops:
            self._stopper = Stopper(chance.randrange(1 << 30), _LONGEST_PAUSE_BETWEEN_STOPS, self._is_changing)

    def _is_changing(self) -> bool:
        return self._setting.layout == "slab" and is_being_changed(self._setting.place)

    def start_one(self) -> None:
        diary = self._setting.place.parent / f"diary-{self._chance.getrandbits(60):x}"
        what = self._setting, str(diary), self._chance.randrange(1 << 30)
        worker = Worker(work, *what, namespaces=self._setting.namespaces)
        self._workers.append((worker, diary))
        if self._stopper is not None:
            self._stopper.add(worker)

    def wait_until_all_work(self) -> None:
        """Raises WorkerError with what a start said that was refused, TimeoutError."""
        for worker, _ in self._workers:
            worker.answer(LONG)

    def replace_one(self) -> None:
        """Kill one, the oldest or, beside stops, any, sometimes one that is stopped; another comes. Raises as
        ``wait_until_all_work``."""
        chosen = 0
        if self._stopper is not None and self._chance.random() < 0.75:
            running = [n for n, (worker, _) in enumerate(self._workers) if not self._stopper.is_stopped(worker)]
            chosen = self._chance.choice(running or [0])
        self._kill(*self._workers.pop(chosen))
        self._findings.kills += 1
        self.start_one()
        self._workers[-1][0].answer(LONG)

    def end(self) -> None:
        """All go on if they are stopped, work a moment longer, and are killed."""
        if self._stopper is not None:
            self._stopper.close()
            time.sleep(0.1)
            self._findings.stops += self._stopper.stops
            self._findings.stops_amid_a_change += self._stopper.stops_amid_a_change
        for worker, diary in self._workers:
            self._kill(worker, diary)
        self._workers.clear()

    def _kill(self, worker: Worker, diary: Path) -> None:
        findings = self._findings
        if not worker.alive:
            findings.problems["a worker ended by itself"] += 1
        stopped = [] if self._stopper is None else self._stopper.stopped(worker)
        killed = time.monotonic()
        if self._stopper is None:
            worker.kill()
        else:
            self._stopper.kill(worker)
        if self._setting.layout == "pages":
            self._note_under_way()
        notes = Diary(diary)
        findings.note_calls(notes.longest_calls(stopped, killed))
        results = notes.results()
        findings.workers_results += results
        for result in ("get corrupt", "get error", "get timeout", "set error", "set timeout"):
            if results[result]:
                findings.problems[f"{result} in a worker"] += results[result]
        while worker.channel.poll():
            try:
                said = worker.channel.recv()
            except (EOFError, ConnectionResetError):
                break
            if said != "working":
                findings.problems[str(said).partition(" as ")[0]] += 1
        worker.close()
        diary.unlink()

    def _note_under_way(self) -> None:
        """What was killed amid an operation stays in the account until somebody counts."""
        place = self._setting.place
        living = {str(member) for member in living_members(place / "members")}
        dead = account_of(place)["under_way"].keys() - living
        self._findings.kills_under_way += len(dead - self._under_way)
        self._under_way |= dead

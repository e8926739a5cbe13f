"""The file tier under load for a long time, with a disk that fails now and then: nothing wrong, nothing lost, nothing
that grows.

::

    python -m tests.campaigns.soak --seconds 1200 --seed 1 --report build/reports/soak.md
    python -m tests.campaigns.soak --seconds 1200 --namespaces --stops --report build/reports/soak-pods.md
    python -m tests.campaigns.soak --seconds 400 --layout pages --report build/reports/soak-pages.md

Four processes work on one tier of two paths, slabs or page files and packs, whose capacity is a tenth of what they
write. In three of them the disk fails by chance: single calls with EIO and ENOSPC, short transfers, slow reads, and
from time to time a whole path with EIO for a few seconds, so that it goes out of service and comes back. The fourth has
no faults and verifies. The bytes of a page follow from its key. Every second slots (occupied, free, being written) or
files (packs, page files, temporary ones), resident memory and open descriptors, without those of slabs, are noted.

``--namespaces``: each process has PID, host name, /proc, network and IPC of its own, as a pod's container has.
``--stops``: processes are stopped (SIGSTOP) for 0.1 to 4 seconds, some for 20, and go on; no call of another one may
take longer than ``LONGEST_CALL``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import glob
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.testing.conformance.pages import HostPages, page_keys, payload_of
from tests.campaigns import page_insides, slab_insides
from tests.campaigns.reporting import Found, arguments_of, command_of, conduct, report_of
from tests.campaigns.stops import LONGEST_CALL, Diary, Stopper
from tests.campaigns.tier_process import packs_in, problems_of_packs
from tests.rigs.disk_faults import DiskFaults, core_through_python
from tests.rigs.slab_tier import open_slab_tier
from tests.rigs.workers import Worker, WorkerError

WORKERS = 4
CAPACITY = 48 << 20
SIZES = (28_672, 61_440, 126_976, 10_000)
"""Payload bytes: three slot sizes that are full to the brim, and one that is not a whole number of blocks."""
CHAIN = 24
CHAINS = 240
"""All pages together: about ten times the capacity."""
FAULT_RATE = 0.01
OUTAGE_EVERY = 20.0
OUTAGE_SECONDS = 3.0
PAUSE_BETWEEN_STOPS = 4.0
"""Seconds, at most: now and then all must be able to say what they take."""
FILES = {"slab": ("occupied", "free", "pending"), "pages": ("packs", "page files", "temporary")}
"""What is counted all the time, by layout: slots, or files."""
GROWING, MOST_GROWTH = ("resident", "descriptors"), 1.15
LONG = 120.0
"""Seconds in which anything must have come to its end."""


@dataclass
class Sample:
    seconds: float
    files: tuple[int, int, int]
    """As in ``FILES``."""
    resident: int
    descriptors: int


@dataclass
class Findings(Found):
    seconds: float = 0.0
    hits: int = 0
    stored: int = 0
    bytes_written: int = 0
    results: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    outages: int = 0
    returns: int = 0
    stops: int = 0
    stops_amid_a_change: int = 0
    longest: dict[str, float] = field(default_factory=dict)
    """Seconds of the longest call of each kind, of processes that were not stopped themselves."""
    samples: list[Sample] = field(default_factory=list)
    growth: dict[str, tuple[float, float]] = field(default_factory=dict)
    packs: Counter[str] = field(default_factory=Counter)
    """At the end."""


def open_tier(root: Path, layout: str) -> SpreadStore:
    return open_slab_tier(root / "a", root / "b", capacity=CAPACITY, layout=layout)


class Chains:
    """What is written and read: chains of pages, a few of them asked for much more often than the others."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def next(self) -> tuple[list[bytes], int]:
        number = min(int(self._chance.paretovariate(0.6)) - 1, CHAINS - 1) if self._chance.random() < 0.5 else None
        number = self._chance.randrange(CHAINS) if number is None else number
        return page_keys(CHAIN, f"chain-{number}"), SIZES[number % len(SIZES)]


def exchange(store: SpreadStore, chains: Chains, counts: Counter[str], notes: Diary) -> None:
    """Ask for a chain, and write what is missing, as SGLang does."""
    keys, size = chains.next()
    with notes.call("count_leading"):
        leading = store.count_leading(keys)
    pages = HostPages([(size // 2, size - size // 2)] * len(keys))
    if leading:
        with notes.call("get"):
            results = store.get(PageBatch(keys[:leading], pages.buffers[:leading]))
        for position, result in enumerate(results):
            counts[f"get {result.value}"] += 1
            if result is GetResult.HIT and pages.payload(position) != payload_of(keys[position], size):
                counts["WRONG"] += 1
    for position in range(len(keys)):
        pages.write(position, payload_of(keys[position], size))
    with notes.call("set"):
        stored = store.set(PageBatch(keys, pages.buffers))
    for result in stored:
        counts[f"set {result.value}"] += 1
        counts["bytes written"] += size * (result.value == "stored")


@contextlib.contextmanager
def slow_reads(chance: random.Random) -> Iterator[None]:
    real = os.preadv

    def preadv(*arguments: object) -> int:
        if chance.random() < 0.002:
            time.sleep(0.05)
        return real(*arguments)  # type: ignore[arg-type]

    os.preadv = preadv  # type: ignore[assignment]
    try:
        with core_through_python():
            yield
    finally:
        os.preadv = real


def work(channel: Connection, root: str, diary: str, seed: int, faulty: bool, layout: str) -> None:
    """One process. Says when it is ready, is told until when to work, reports when it is asked, and at the end."""
    logging.disable(logging.CRITICAL)
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    chains = Chains(seed)
    notes = Diary(Path(diary))
    with notes.call("open"):
        store = open_tier(Path(root), layout)
    faults = DiskFaults(root, seed=seed, rate=FAULT_RATE, errors=(errno.EIO, errno.ENOSPC), calls=("preadv", "pwritev"))
    injected: Counter[str] = Counter()
    channel.send("ready")
    until = channel.recv()
    outage_at = time.monotonic() + chance.random() * OUTAGE_EVERY
    while time.monotonic() < until:
        if channel.poll():
            channel.recv()
            channel.send((resident_bytes(), open_descriptors()))
        if not faulty:
            exchange(store, chains, counts, notes)
            continue
        with slow_reads(chance), faults:
            exchange(store, chains, counts, notes)
        if time.monotonic() >= outage_at:
            outage_at = time.monotonic() + OUTAGE_EVERY
            path = Path(root) / chance.choice("ab")
            with DiskFaults(path, seed=seed, rate=1.0, errors=(errno.EIO,), short=False) as dead:
                end = time.monotonic() + OUTAGE_SECONDS
                while time.monotonic() < min(end, until):
                    exchange(store, chains, counts, notes)
            injected.update(dead.injected)
    injected.update(faults.injected)
    wait_for_return = time.monotonic() + 30
    while store.out_of_service() and time.monotonic() < wait_for_return:
        time.sleep(0.1)
    counts["path out at the end"] = len(store.out_of_service())
    snapshot = store.metrics.snapshot()
    for event in ("path_out_of_service", "path_back_in_service"):
        counts[event] = sum(amount for (name, _), amount in snapshot.items() if name == event)
    with notes.call("close"):
        store.close()
    channel.send(("done", counts, injected))


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_descriptors() -> int:
    """Without those of slabs, one for each file that is there: how many slabs there are changes all the time."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(descriptor))
    return len(targets) - len({target for target in targets if target.endswith((".slab", ".headers"))})


def files(root: Path, layout: str) -> tuple[int, int, int]:
    """As in ``FILES``, over both paths."""
    if layout == "pages":
        names = ("*/pages/*/*/*.pack", "*/pages/*/*/*.page", "*/tmp/*")
        packs, alone, temporary = (len(glob.glob(f"{root}/{each}")) for each in names)
        return packs, alone, temporary
    total: Counter[str] = Counter()
    for path in (root / "a", root / "b"):
        total.update(slab_insides.slots_by_state(path))
    return total["pages"], total["free"], total["pending"]


def run(
    seconds: float,
    seed: int,
    interval: float = 1.0,
    *,
    namespaces: bool = False,
    stops: bool = False,
    layout: str = "slab",
) -> Findings:
    findings = Findings()
    root = Path(tempfile.mkdtemp(prefix="hicache-soak-"))
    try:
        # Held open by this process all the time, so that a look costs nothing and nobody is the last to leave.
        with contextlib.ExitStack() as looking:
            watcher = open_tier(root, layout)
            looking.callback(watcher.close)
            _soak(root, seconds, seed, interval, namespaces, stops, layout, findings)
            _look_at_the_end(root, layout, findings)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return findings


class _Process:
    """One worker, as this process knows it."""

    def __init__(self, root: Path, number: int, seed: int, namespaces: bool, layout: str) -> None:
        self._diary = root / f"diary-{number}"
        faulty = number < WORKERS - 1
        what = str(root), str(self._diary), seed * 1000 + number, faulty, layout
        self.worker = Worker(work, *what, namespaces=namespaces)
        self.ended = False
        self._asked = False

    def ask(self) -> None:
        """For memory and descriptors, unless it has not answered yet."""
        if not self.ended and not self._asked:
            self.worker.channel.send("report")
            self._asked = True

    def answer(self, within: float, findings: Findings) -> tuple[int, int] | None:
        """Memory and descriptors; None if it is stopped, or has come to its end."""
        if self.ended:
            return None
        try:
            message = self.worker.answer(within if self.worker.alive else 0)
        except TimeoutError:
            return None
        except WorkerError as error:
            findings.problems[f"a process that ended: {error}"] += 1
            self.ended = True
            return None
        if message[0] == "done":
            self.ended = True
            _add(findings, message[1], message[2])
            return None
        self._asked = False
        return message[0], message[1]

    def note_calls(self, stopper: Stopper | None, findings: Findings) -> None:
        stopped = [] if stopper is None else stopper.stopped(self.worker)
        for kind, seconds in Diary(self._diary).longest_calls(stopped).items():
            findings.longest[kind] = max(findings.longest.get(kind, 0.0), seconds)
            if seconds > LONGEST_CALL:
                findings.problems[f"a call of {kind} that took longer than {LONGEST_CALL:g} s"] += 1


def _soak(
    root: Path,
    seconds: float,
    seed: int,
    interval: float,
    namespaces: bool,
    stops: bool,
    layout: str,
    findings: Findings,
) -> None:
    processes = [_Process(root, number, seed, namespaces, layout) for number in range(WORKERS)]
    stopper: Stopper | None = None
    begun = time.monotonic()
    try:
        # Together, however long the start takes: what is compared are quarters of the time in which all work.
        for process in processes:
            process.worker.answer(LONG)
        begun = time.monotonic()
        for process in processes:
            process.worker.channel.send(begun + seconds)
        if stops:
            stopper = Stopper(
                seed,
                PAUSE_BETWEEN_STOPS,
                lambda: layout == "slab" and any(map(slab_insides.is_being_changed, (root / "a", root / "b"))),
            )
            for process in processes:
                stopper.add(process.worker)
        while not all(process.ended for process in processes):
            now = time.monotonic()
            if now > begun + seconds + LONG:
                findings.problems["a process that did not end"] += sum(not process.ended for process in processes)
                return
            if stopper is not None and now > begun + seconds:
                # Only the last words are waited for.
                stopper.close()
            time.sleep(interval)
            if now < begun + seconds - 1:
                for process in processes:
                    process.ask()
            answers = [process.answer(0.5, findings) for process in processes]
            known = [answer for answer in answers if answer is not None]
            if len(known) == WORKERS:
                resident, descriptors = (sum(each) for each in zip(*known, strict=True))
                findings.samples.append(Sample(time.monotonic() - begun, files(root, layout), resident, descriptors))
    finally:
        findings.seconds = time.monotonic() - begun
        if stopper is not None:
            stopper.close()
            findings.stops, findings.stops_amid_a_change = stopper.stops, stopper.stops_amid_a_change
        for process in processes:
            process.note_calls(stopper, findings)
            process.worker.close()


def _add(findings: Findings, counts: Counter[str], injected: Counter[str]) -> None:
    findings.faults.update(injected)
    findings.hits += counts["get hit"]
    findings.stored += counts["set stored"]
    findings.bytes_written += counts["bytes written"]
    findings.outages += counts["path_out_of_service"]
    findings.returns += counts["path_back_in_service"]
    findings.results.update({name: amount for name, amount in counts.items() if name.startswith(("get", "set"))})
    if counts["get corrupt"]:
        findings.problems["a published page was overwritten"] += counts["get corrupt"]
    if not injected and counts["get error"] + counts["set error"]:
        findings.problems["an error of a disk that did not fail"] += counts["get error"] + counts["set error"]
    if counts["WRONG"]:
        findings.problems["a page with wrong bytes"] += counts["WRONG"]
    if counts["path out at the end"]:
        findings.problems["a path that did not come back"] += counts["path out at the end"]


def _look_at_the_end(root: Path, layout: str, findings: Findings) -> None:
    """All have closed in order: index or account must be sound, no slot lost, and nothing may have grown."""
    used = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    if used > CAPACITY + (1 << 20):
        findings.problems[f"{used} bytes used, {CAPACITY} allowed"] += 1
    for path in (root / "a", root / "b"):
        for fault in slab_insides.faults(path) if layout == "slab" else page_insides.faults(path):
            findings.problems[fault] += 1
        findings.packs.update(packs_in(path))
        if layout == "slab" and slab_insides.slots_by_state(path)["pending"]:
            findings.problems["slots are still pending"] += 1
    if layout == "pages":
        findings.problems.update(problems_of_packs(findings.packs))
    if not findings.samples:
        findings.problems["nothing was sampled"] += 1
        return
    # The first quarter warms up; growth is the mean of the last quarter over that of the second.
    quarter = max(1, len(findings.samples) // 4)
    for name in GROWING:
        values = [getattr(sample, name) for sample in findings.samples]
        early, late = _mean(values[quarter : 2 * quarter] or values), _mean(values[-quarter:])
        findings.growth[name] = (early, late)
        if late > MOST_GROWTH * early + 8:
            findings.problems[f"{name} grew from {early:.0f} to {late:.0f}"] += 1
    totals = {sum(sample.files) for sample in findings.samples[2 * quarter :]}
    findings.growth["files"] = (min(totals, default=0), max(totals, default=0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def plot(findings: Findings, file: Path, layout: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    times = [sample.seconds / 60 for sample in findings.samples]
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 7), sharex=True)
    for number, name in enumerate(FILES[layout]):
        axes[0].plot(times, [sample.files[number] for sample in findings.samples], label=name, linewidth=0.8)
    axes[0].set_ylabel("slots" if layout == "slab" else "files")
    axes[0].legend(loc="center right")
    axes[1].plot(times, [sample.resident / 2**20 for sample in findings.samples], linewidth=0.8)
    axes[1].set_ylabel("MiB resident, 4 processes")
    axes[1].set_ylim(bottom=0)
    axes[2].plot(times, [sample.descriptors for sample in findings.samples], linewidth=0.8)
    axes[2].set_ylabel("descriptors without slabs, 4 processes")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def report(found: Findings, options: argparse.Namespace, took: str) -> str:
    counted, kept = ("slots", "slabs") if options.layout == "slab" else ("files", "page files and packs")
    amid = f"{found.stops}, {found.stops_amid_a_change} of them amid a change of an index"
    written = f"{found.bytes_written / 1e9:.1f} GB, {found.bytes_written / CAPACITY:.0f} times the capacity"
    longest = ", ".join(f"{kind} {longest:.1f} s" for kind, longest in sorted(found.longest.items()))
    resident, descriptors, least_and_most = (found.growth.get(name, (0, 0)) for name in (*GROWING, "files"))
    return report_of(
        "Soak",
        f"{command_of('soak', options)}: {WORKERS} processes on one tier of two paths, {kept}, {CAPACITY >> 20} MiB,"
        f" {took}.",
        [
            ("bytes written", written),
            ("pages stored", found.stored),
            ("pages read and verified", found.hits),
            ("calls made to fail", ", ".join(f"{amount} x {name}" for name, amount in found.faults.most_common())),
            ("paths taken out of service, brought back", f"{found.outages}, {found.returns}"),
            ("processes stopped for a while", amid),
            ("longest call of each kind, without the caller's own stops", longest or "below 0.25 s"),
            (f"{counted}, least and most in the second half", "{:.0f}, {:.0f}".format(*least_and_most)),
            ("packs at the end, pages written in them", f"{found.packs['packs']}, {found.packs['pages']}"),
            (
                "resident memory, second and last quarter",
                "{:.0f}, {:.0f} MiB".format(*(value / 2**20 for value in resident)),
            ),
            ("descriptors without those of slabs, second and last quarter", "{:.0f}, {:.0f}".format(*descriptors)),
            ("problems", found.problems.total()),
        ],
        f"![{counted.capitalize()}, memory and descriptors over time]({_picture(options).name})",
        "Results by page: " + ", ".join(f"{amount} {name}" for name, amount in found.results.most_common()) + ".",
        problems=found.problems,
    )


def _picture(options: argparse.Namespace) -> Path:
    return options.report.with_suffix(".svg") if options.report else Path("soak.svg")


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--namespaces", action="store_true", help="each process in namespaces of its own, as root")
    parser.add_argument("--stops", action="store_true", help="processes are stopped for a while")
    parser.add_argument("--layout", choices=FILES, default="slab")
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)

    def soaked() -> Findings:
        switches = {name: getattr(options, name) for name in ("namespaces", "stops", "layout")}
        findings = run(options.seconds, options.seed, **switches)
        if options.report:
            options.report.parent.mkdir(parents=True, exist_ok=True)
            plot(findings, _picture(options), options.layout)
        return findings

    return conduct(options, soaked, report)


if __name__ == "__main__":
    sys.exit(main())

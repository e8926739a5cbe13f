"""The file tier under load for a long time, with a disk that fails now and then: nothing wrong, nothing lost, nothing
that grows.

::

    python -m tests.campaigns.soak --seconds 1200 --seed 1 --report docs/reports/soak.md

Four processes work on one tier of two paths, slabs, whose capacity is a tenth of what they write. In three of them the
disk fails by chance: single calls with EIO and ENOSPC, short transfers, slow reads, and from time to time a whole path
with EIO for a few seconds, so that it goes out of service and comes back. The fourth has no faults and verifies. The
bytes of a page follow from its key. Every second slots (occupied, free, being written), resident memory and open
descriptors are noted.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import logging
import multiprocessing
import os
import platform
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

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.opening import open_file_tier
from hicache_ext.testing.conformance.pages import HostPages, page_keys, payload_of
from tests.campaigns.slab_insides import faults, slots_by_state
from tests.rigs.disk_faults import DiskFaults, compiled_code_through_python

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
SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Sample:
    seconds: float
    occupied: int
    free: int
    pending: int
    resident: int
    descriptors: int


@dataclass
class Findings:
    seconds: float = 0.0
    hits: int = 0
    stored: int = 0
    bytes_written: int = 0
    results: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    outages: int = 0
    returns: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    growth: dict[str, tuple[float, float]] = field(default_factory=dict)


def open_tier(root: Path) -> SpreadStore:
    paths = [str(root / "a"), str(root / "b")]
    disk = {"type": "file", "path": paths, "capacity": CAPACITY, "layout": "slab", "threads": 2}
    tier = load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"]
    store = open_file_tier("disk", tier)  # type: ignore[arg-type]
    assert isinstance(store, SpreadStore)
    return store


class Chains:
    """What is written and read: chains of pages, a few of them asked for much more often than the others."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def next(self) -> tuple[list[bytes], int]:
        number = min(int(self._chance.paretovariate(0.6)) - 1, CHAINS - 1) if self._chance.random() < 0.5 else None
        number = self._chance.randrange(CHAINS) if number is None else number
        return page_keys(CHAIN, f"chain-{number}"), SIZES[number % len(SIZES)]


def exchange(store: SpreadStore, chains: Chains, counts: Counter[str]) -> None:
    """Ask for a chain, and write what is missing, as SGLang does."""
    keys, size = chains.next()
    leading = store.count_leading(keys)
    pages = HostPages([(size // 2, size - size // 2)] * len(keys))
    if leading:
        results = store.get(PageBatch(keys[:leading], pages.buffers[:leading]))
        for position, result in enumerate(results):
            counts[f"get {result.value}"] += 1
            if result is GetResult.HIT and pages.payload(position) != payload_of(keys[position], size):
                counts["WRONG"] += 1
    for position in range(len(keys)):
        pages.write(position, payload_of(keys[position], size))
    for result in store.set(PageBatch(keys, pages.buffers)):
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
        with compiled_code_through_python():
            yield
    finally:
        os.preadv = real


def work(root: str, seed: int, faulty: bool, channel: Connection) -> None:
    """One process. Says when it is ready, is told until when to work, reports when it is asked, and at the end."""
    logging.disable(logging.CRITICAL)
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    chains = Chains(seed)
    store = open_tier(Path(root))
    faults = DiskFaults(root, seed=seed, rate=FAULT_RATE, errors=(errno.EIO, errno.ENOSPC), calls=("preadv", "pwritev"))
    injected: Counter[str] = Counter()
    channel.send("ready")
    until = channel.recv()
    outage_at = time.monotonic() + chance.random() * OUTAGE_EVERY
    while time.monotonic() < until:
        if channel.poll():
            channel.recv()
            channel.send((resident_bytes(), len(os.listdir("/proc/self/fd"))))
        if not faulty:
            exchange(store, chains, counts)
            continue
        with slow_reads(chance), faults:
            exchange(store, chains, counts)
        if time.monotonic() >= outage_at:
            outage_at = time.monotonic() + OUTAGE_EVERY
            path = Path(root) / chance.choice("ab")
            with DiskFaults(path, seed=seed, rate=1.0, errors=(errno.EIO,), short=False) as dead:
                end = time.monotonic() + OUTAGE_SECONDS
                while time.monotonic() < min(end, until):
                    exchange(store, chains, counts)
            injected.update(dead.injected)
    injected.update(faults.injected)
    wait_for_return = time.monotonic() + 30
    while store.out_of_service() and time.monotonic() < wait_for_return:
        time.sleep(0.1)
    counts["path out at the end"] = len(store.out_of_service())
    snapshot = store.metrics.snapshot()
    for event in ("path_out_of_service", "path_back_in_service"):
        counts[event] = sum(amount for (name, _), amount in snapshot.items() if name == event)
    store.close()
    channel.send(("done", counts, injected))


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slots(root: Path) -> tuple[int, int, int]:
    """(occupied, free, being written) over both paths."""
    total: Counter[str] = Counter()
    for path in (root / "a", root / "b"):
        total.update(slots_by_state(path))
    return total["pages"], total["free"], total["pending"]


def run(seconds: float, seed: int, interval: float = 1.0) -> Findings:
    findings = Findings()
    root = Path(tempfile.mkdtemp(prefix="hicache-soak-"))
    try:
        # Held open by this process all the time, so that a look costs nothing and nobody is the last to leave.
        with contextlib.ExitStack() as looking:
            watcher = open_tier(root)
            looking.callback(watcher.close)
            _soak(root, seconds, seed, interval, findings)
        _look_at_the_end(root, findings)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return findings


def _soak(root: Path, seconds: float, seed: int, interval: float, findings: Findings) -> None:
    processes = []
    for number in range(WORKERS):
        mine, theirs = SPAWN.Pipe()
        faulty = number < WORKERS - 1
        process = SPAWN.Process(target=work, args=(str(root), seed * 1000 + number, faulty, theirs), daemon=True)
        process.start()
        processes.append((process, mine))
    ended: set[int] = set()
    begun = time.monotonic()
    try:
        # Together, however long the start takes: what is compared are quarters of the time in which all work.
        for _, channel in processes:
            if not channel.poll(120) or channel.recv() != "ready":
                raise TimeoutError("a process did not start")
        begun = time.monotonic()
        for _, channel in processes:
            channel.send(begun + seconds)
        deadline = begun + seconds + 120
        while len(ended) < WORKERS:
            if time.monotonic() > deadline:
                findings.problems["a process that did not end"] += WORKERS - len(ended)
                return
            time.sleep(interval)
            resident = descriptors = answers = 0
            for number, (process, channel) in enumerate(processes):
                if number in ended:
                    continue
                if time.monotonic() < begun + seconds - 1:
                    channel.send("report")
                while channel.poll(0.5 if process.is_alive() else 0):
                    message = channel.recv()
                    if message[0] == "done":
                        ended.add(number)
                        _add(findings, message[1], message[2])
                        break
                    resident += message[0]
                    descriptors += message[1]
                    answers += 1
                    break
                else:
                    if not process.is_alive():
                        findings.problems[f"a process that died with {process.exitcode}"] += 1
                        ended.add(number)
            if answers == WORKERS:
                findings.samples.append(Sample(time.monotonic() - begun, *slots(root), resident, descriptors))
    finally:
        findings.seconds = time.monotonic() - begun
        for process, _ in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _add(findings: Findings, counts: Counter[str], injected: Counter[str]) -> None:
    findings.faults.update(injected)
    findings.hits += counts["get hit"]
    findings.stored += counts["set stored"]
    findings.bytes_written += counts["bytes written"]
    findings.outages += counts["path_out_of_service"]
    findings.returns += counts["path_back_in_service"]
    findings.results.update({name: amount for name, amount in counts.items() if name.startswith(("get", "set"))})
    if counts["WRONG"]:
        findings.problems["a page with wrong bytes"] += counts["WRONG"]
    if counts["path out at the end"]:
        findings.problems["a path that did not come back"] += counts["path out at the end"]


def _look_at_the_end(root: Path, findings: Findings) -> None:
    """All have closed in order: the index must be sound, nothing pending, and nothing may have grown."""
    used = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    if used > CAPACITY + (1 << 20):
        findings.problems[f"{used} bytes used, {CAPACITY} allowed"] += 1
    for path in (root / "a", root / "b"):
        for fault in faults(path):
            findings.problems[fault] += 1
        if slots_by_state(path)["pending"]:
            findings.problems["slots are still pending"] += 1
    if not findings.samples:
        findings.problems["nothing was sampled"] += 1
        return
    # The first quarter warms up; growth is the mean of the last quarter over that of the second.
    quarter = max(1, len(findings.samples) // 4)
    for name, tolerated in (("resident", 1.15), ("descriptors", 1.15)):
        values = [getattr(sample, name) for sample in findings.samples]
        early, late = _mean(values[quarter : 2 * quarter] or values), _mean(values[-quarter:])
        findings.growth[name] = (early, late)
        if late > tolerated * early + 8:
            findings.problems[f"{name} grew from {early:.0f} to {late:.0f}"] += 1
    totals = {sample.occupied + sample.free + sample.pending for sample in findings.samples[2 * quarter :]}
    findings.growth["slots"] = (min(totals, default=0), max(totals, default=0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def plot(findings: Findings, file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    times = [sample.seconds / 60 for sample in findings.samples]
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 7), sharex=True)
    for name in ("occupied", "free", "pending"):
        axes[0].plot(times, [getattr(sample, name) for sample in findings.samples], label=name, linewidth=0.8)
    axes[0].set_ylabel("slots")
    axes[0].legend(loc="center right")
    axes[1].plot(times, [sample.resident / 2**20 for sample in findings.samples], linewidth=0.8)
    axes[1].set_ylabel("MiB resident, 4 processes")
    axes[1].set_ylim(bottom=0)
    axes[2].plot(times, [sample.descriptors for sample in findings.samples], linewidth=0.8)
    axes[2].set_ylabel("descriptors, 4 processes")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def report(found: Findings, seed: int, plot_name: str) -> str:
    rows = [
        (
            "bytes written",
            f"{found.bytes_written / 1e9:.1f} GB, {found.bytes_written / CAPACITY:.0f} times the capacity",
        ),
        ("pages stored", f"{found.stored}"),
        ("pages read and verified", f"{found.hits}"),
        ("calls made to fail", ", ".join(f"{amount} x {name}" for name, amount in found.faults.most_common())),
        ("paths taken out of service, brought back", f"{found.outages}, {found.returns}"),
        ("slots, least and most in the second half", "{:.0f}, {:.0f}".format(*found.growth.get("slots", (0, 0)))),
        (
            "resident memory, second and last quarter",
            "{:.0f}, {:.0f} MiB".format(*(value / 2**20 for value in found.growth.get("resident", (0, 0)))),
        ),
        (
            "descriptors, second and last quarter",
            "{:.0f}, {:.0f}".format(*found.growth.get("descriptors", (0, 0))),
        ),
        ("problems", f"{sum(found.problems.values())}"),
    ]
    return "\n".join(
        [
            "# Soak",
            "",
            f"`python -m tests.campaigns.soak --seconds {found.seconds:.0f} --seed {seed}`: {WORKERS} processes on one "
            f"tier of two paths, slabs, {CAPACITY >> 20} MiB, {os.cpu_count()} cores, "
            f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            f"![Slots, memory and descriptors over time]({plot_name})",
            "",
            "Results by page: " + ", ".join(f"{amount} {name}" for name, amount in found.results.most_common()) + ".",
            "",
            "Problems: none." if not found.problems else "Problems:",
            *(f"- {count} x {problem}" for problem, count in found.problems.most_common(20)),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a file to write the report to, besides standard output")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)
    findings = run(options.seconds, options.seed)
    text = report(findings, options.seed, "soak.svg")
    print(text)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text)
        plot(findings, options.report.with_name("soak.svg"))
        print(json.dumps(findings.growth))
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""``hicache-ext bench file``: the file tier against SGLang's HiCacheFile and against what the disk can do.

Timed are the calls alone. Stamping and wiping host pages, checking what was read, writing dirty pages back and dropping
them from the page cache happen between the calls or between the modes.

A first pass also pays for memory that the page cache touches for the first time, and in a virtual machine the host may
take seconds to hand that out: the same pwrites were measured at 0.4 and at 5.8 GB/s. Touching free memory beforehand
did not change that (tried with small and huge pages); rotation, medians and overwrite are what there is against it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hicache_ext.bench.file_contenders import (
    EXISTS_CASES,
    GEOMETRIES,
    HICACHE_FILE,
    MODES,
    Contender,
    FileContender,
    HiCacheFileContender,
    HostBuffers,
    Workplace,
    all_ours,
    all_raw,
    page_keys,
)
from hicache_ext.bench.frame import (
    Baseline,
    Clock,
    LookUps,
    Measured,
    Point,
    Results,
    Sample,
    Stopwatch,
    Throughput,
    Turns,
    add_output_arguments,
    fresh_directory,
    machine_facts,
    positive,
)
from hicache_ext.config.values import format_size, parse_size
from hicache_ext.errors import BenchmarkError
from hicache_ext.packages import need
from hicache_ext.runtime.signals import terminated_in_order

_PAYLOADS = ("32KiB", "128KiB", "1MiB", "4MiB")
_BATCHES_AT_LEAST = 4
_MODES_IN_MINUTES = ("overwrite", "read-warm", "read-cold", "exists")
_BATCHES_IN_MINUTES = 8
_BATCH_BYTES_IN_MINUTES = 32 << 20
"""With --minutes: the modes where none is named, batches per mode, and the largest batch."""
_PACKAGES = ("hicache-ext", "sglang", "torch", "aiofiles", "nixl-cu12", "xxhash")


_TITLES = {
    "write": "write (first pass)",
    "overwrite": "write at capacity (eviction running)",
    "read-warm": "read, page cache warm",
    "read-cold": "read, page cache dropped",
    "mixed": "read and write at once (p50/p99: the reads)",
}
_METHOD = """\
Every contender moves the same pages between the same SGLang host pool and the same file system, in a directory of its
own that is deleted afterwards. Rounds are interleaved, {warm_ups} warm-up round thrown away; the column says how many
were measured, of {rounds} that were asked for: medians, quartiles in brackets. A batch is one call, as SGLang's
controller makes it; p50 and p99 are of a batch of {batch} pages (fewer where a note says so). What was read is
compared byte for byte outside the timed part. Writes end in the page cache, for every contender; dirty pages are
written back between the modes. CPU is this process's. Which pages were read the slab layout writes into its index in
pauses, after the call: that is in no figure of a read. At capacity, half of the bytes written fit. The raw limit is
the best of preadv/pwritev with 1, 2 and 4 threads over one preallocated file: no envelope, no checksum, no index; for
exists it is one os.stat per page. A first pass also pays for the page cache's first touch of its memory, which in a
virtual machine can cost more than all the rest. GB are 10^9 bytes of payload. Ratios above 1 are faster.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("."),
        help="on the disk to measure; everything is written to new directories in it and deleted (default: here)",
    )
    parser.add_argument(
        "--payload",
        action="append",
        metavar="SIZE",
        help=f"bytes of a page; may be repeated (default: {', '.join(_PAYLOADS)})",
    )
    parser.add_argument("--geometry", action="append", choices=GEOMETRIES, help="may be repeated (default: both)")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated (default: all)")
    parser.add_argument(
        "--contender", action="append", metavar="NAME", help="those whose name contains NAME; may be repeated"
    )
    parser.add_argument(
        "--total", metavar="SIZE", help="bytes each mode moves, at least four batches (default: 512MiB)"
    )
    parser.add_argument("--batch", type=positive, help="pages per call (default: 128)")
    parser.add_argument("--threads", type=positive, default=4, help="of contenders that use several (default: 4)")
    parser.add_argument("--rounds", type=positive, help="measured rounds, after one warm-up round (default: 5)")
    parser.add_argument("--chain", type=positive, help="pages asked for in exists (default: 10000)")
    parser.add_argument(
        "--drop-caches", action="store_true", help="empty the whole page cache before cold reads (root)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=positive,
        metavar="N",
        help="end in about so many minutes: fewer bytes, no more rounds than there is time for, "
        f"{', '.join(_MODES_IN_MINUTES)} unless told otherwise; what was not measured is named (14 are "
        "enough for every size and geometry)",
    )
    length.add_argument("--quick", action="store_true", help="seconds: shows that it works, no more")
    add_output_arguments(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured: the arguments with their defaults filled in."""

    payloads: tuple[int, ...]
    geometries: tuple[str, ...]
    modes: tuple[str, ...]
    total: int
    batch: int
    threads: int
    rounds: int
    chain: int
    drop_caches: bool
    minutes: int | None
    warm_ups: int = 1

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Settings:
        quick: bool = arguments.quick
        return cls(
            payloads=tuple(
                parse_size(text, "--payload") for text in arguments.payload or (_PAYLOADS[:1] if quick else _PAYLOADS)
            ),
            geometries=tuple(arguments.geometry or GEOMETRIES),
            modes=tuple(arguments.mode or (MODES if arguments.minutes is None else _MODES_IN_MINUTES)),
            total=parse_size(arguments.total or ("8MiB" if quick else "512MiB"), "--total"),
            batch=arguments.batch or (16 if quick else 128),
            threads=arguments.threads,
            rounds=arguments.rounds or (2 if quick else 5),
            chain=arguments.chain or (400 if quick else 10_000),
            drop_caches=arguments.drop_caches,
            minutes=arguments.minutes,
        )

    def cells(self) -> list[tuple[str, int]]:
        """Geometry and page size of each part of the run."""
        return [(geometry, payload) for geometry in self.geometries for payload in self.payloads]

    def total_of(self, payload: int) -> int:
        """Bytes that each mode moves in pages of this size."""
        if self.minutes is None:
            return self.total
        return min(self.total, _BATCHES_IN_MINUTES * min(self.batch * payload, _BATCH_BYTES_IN_MINUTES))


def run(arguments: argparse.Namespace, rivals: Callable[[Path], Sequence[Contender]] = lambda directory: ()) -> int:
    """Measure, print, write; 0, or 1 when a contender failed or answered wrongly (it then has no figures).

    ``rivals`` are contenders besides ours, SGLang's and the raw limit; its directory is for trying them out.
    """
    settings = Settings.of(arguments)
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise BenchmarkError(f"--directory {directory}: no such directory")
    prepare_sglang()
    machine = machine_facts(directory, _PACKAGES)
    print(f"{machine['cpus']} CPUs, kernel {machine['kernel']}, {machine['file_system']}; Python {machine['python']}")
    started = time.monotonic()
    with terminated_in_order():
        with fresh_directory(directory) as trial:
            sglangs = Contender(HICACHE_FILE, HiCacheFileContender)
            contenders = [*all_ours(trial), sglangs, *rivals(trial), *all_raw()]
        if arguments.contender:
            contenders = [c for c in contenders if any(part in c.name for part in arguments.contender)]
        if not contenders:
            raise BenchmarkError(f"--contender: none of the contenders is called {' or '.join(arguments.contender)}")
        results = _results(contenders)
        _Run(settings, contenders, directory, results).measure()
    hidden = {directory: "DIRECTORY"}
    return results.finish(arguments, "file", "File tier benchmark", machine, settings, _METHOD, hidden, started)


def _results(contenders: Sequence[Contender]) -> Results:
    raw = frozenset(contender.name for contender in contenders if contender.raw)
    baselines = (
        Baseline("HiCacheFile", "ratio_to_hicachefile", frozenset({HICACHE_FILE})),
        Baseline("raw limit", "ratio_to_raw_limit", raw),
    )
    return Results(tuple(contender.name for contender in contenders), baselines)


def transfer_point(mode: str, geometry: str, payload: int) -> Point:
    """Reading or writing pages of ``payload`` bytes."""
    size = format_size(payload)
    return Point(
        mode,
        f"{_TITLES[mode]}: {geometry.upper()}, pages of {size}",
        (("geometry", geometry), ("payload_bytes", payload)),
        Throughput(),
        f"{geometry.upper()}: {_TITLES[mode].partition(' (p50')[0]}",
        size,
        (0, geometry, MODES.index(mode), payload),
    )


def exists_point(case: str, chain: int) -> Point:
    """Asking for a chain of ``chain`` small pages."""
    facts = (("geometry", EXISTS_GEOMETRY), ("payload_bytes", EXISTS_PAYLOAD))
    return Point(case, f"{case}: ms for the whole chain", facts, LookUps(chain), place=(1, EXISTS_CASES.index(case)))


def prepare_sglang() -> None:
    """The benchmark compares with SGLang, over its host pools. Raises ImportError or MissingPackageError without it."""
    need("sglang", "torch")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    from hicache_ext.testing.sglang_cpu import prepare_process

    prepare_process()
    importlib.import_module("sglang.srt.mem_cache.hicache_storage")


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the benchmark; fills ``results``."""

    settings: Settings
    contenders: Sequence[Contender]
    directory: Path
    results: Results

    def measure(self) -> None:
        settings, directory = self.settings, self.directory
        modes = [mode for mode in settings.modes if mode != "exists"]
        cells = settings.cells() if modes else []
        with_exists = "exists" in settings.modes
        minutes = settings.minutes
        clock = Clock(math.inf if minutes is None else 60.0 * minutes, len(cells) + with_exists)
        if with_exists:
            chain = settings.chain
            host = HostBuffers(EXISTS_GEOMETRY, EXISTS_PAYLOAD, STORAGE_BATCH_SIZE)
            self.take_turns(
                f"exists, a chain of {chain} pages",
                {case: exists_point(case, chain) for case in EXISTS_CASES},
                lambda contender: measure_exists(contender, chain, host, directory, settings.threads),
                clock,
            )
        for geometry, payload in cells:
            case = self._fitting_case(geometry, payload)
            host = HostBuffers(geometry, payload, case.batch)
            title = f"{geometry} {format_size(payload)}, {case.batches} batches of {case.batch} pages"
            points = {mode: transfer_point(mode, geometry, payload) for mode in modes}
            self.take_turns(title, points, Bench(case, host, directory, modes, settings.drop_caches).measure, clock)

    def take_turns(
        self, title: str, points: dict[str, Point], measure: Callable[[Contender], Measured], clock: Clock
    ) -> None:
        """``measure`` for each contender that can do one of the modes; for the others the reason is kept."""
        able: dict[str, Callable[[], Measured]] = {}
        for contender in self.contenders:
            reasons = {mode: contender.missing or contender.cannot.get(mode.partition(",")[0]) for mode in points}
            for mode, reason in reasons.items():
                if reason:
                    self.results.leave_out(points[mode], contender.name, reason)
            if not all(reasons.values()):
                able[contender.name] = partial(measure, contender)
        Turns(self.settings.rounds, self.settings.warm_ups, clock, self.results).take(title, points, able)

    def _fitting_case(self, geometry: str, payload: int) -> Case:
        """The case, with smaller batches where memory is short. Raises BenchmarkError where the disk is."""
        batch, short = self.settings.batch, self.settings.minutes is not None
        while short and batch > 1 and batch * payload > _BATCH_BYTES_IN_MINUTES:
            batch //= 2
        short = batch < self.settings.batch
        # Two pools (host and device) of two batches each, next to the pages in the page cache: half of what there is.
        while batch > 1 and (4 + 2 * _BATCHES_AT_LEAST) * batch * payload > _available_memory() // 2:
            batch //= 2
        what = f"{geometry} {format_size(payload)}"
        if batch < self.settings.batch:
            why = "--minutes" if short else "memory is short"
            self.results.note(f"{what}: batches of {batch} pages, not {self.settings.batch}: {why}")
        batches = max(_BATCHES_AT_LEAST, -(-self.settings.total_of(payload) // (batch * payload)))
        case = Case(geometry, payload, batch, batches, self.settings.threads)
        if "overwrite" in self.settings.modes and case.overwrite_capacity < 8 * batch * payload:
            held = case.overwrite_capacity // (batch * payload)
            self.results.note(f"{what}: in overwrite the capacity holds {held} batches; a larger --total is more real")
        need, free = 3 * case.total + (256 << 20), shutil.disk_usage(self.directory).free
        if need > free:
            raise BenchmarkError(f"{what}: needs {need >> 20} MiB of disk, {free >> 20} are free; lower --total")
        return case


def _available_memory() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


# -- what a contender does, and what of it is timed --------------------------------------------------------------------

EXISTS_GEOMETRY = GEOMETRIES[0]
EXISTS_PAYLOAD = 4096
"""Bytes of a page whose presence is asked for: small, because only its name matters."""
STORAGE_BATCH_SIZE = 128
"""Pages SGLang names in one call (cache_controller.py)."""
_EXISTS_REPEATS = 3

_CAPACITY_SHARE = 2
"""In overwrite, the capacity is the bytes written divided by this."""
_COLD = 0.9
"""Share of a read that must come from the disk to be called cold."""
_PAGES_CHECKED = 512
"""Pages looked for after evictions."""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the benchmark: the pages and how many of them."""

    geometry: str
    payload: int
    batch: int
    batches: int
    threads: int

    @property
    def pages(self) -> int:
        return self.batch * self.batches

    @property
    def total(self) -> int:
        """Bytes each mode moves."""
        return self.pages * self.payload

    @property
    def overwrite_capacity(self) -> int:
        return max(self.total // _CAPACITY_SHARE, self.batch * self.payload)


@dataclass(frozen=True, slots=True)
class Bench:
    """One case with its host memory, in a directory; measures one contender at a time."""

    case: Case
    host: HostBuffers
    directory: Path
    modes: Sequence[str]
    drop_caches: bool
    """Empty the machine's whole page cache before cold reads (root only), not only the contender's files'."""

    def measure(self, contender: Contender) -> Measured:
        """Every mode the contender can do, each in a fresh namespace. Raises BenchmarkError for a wrong answer."""
        measured = Measured()
        if any(mode not in ("overwrite", "exists") for mode in self.modes):
            with fresh_directory(self.directory) as directory:
                self._write_and_read(contender, directory, measured)
        if "overwrite" in self.modes and "overwrite" not in contender.cannot:
            with fresh_directory(self.directory) as directory:
                self._overwrite(contender, directory, measured)
        return measured

    def _write_and_read(self, contender: Contender, directory: Path, measured: Measured) -> None:
        case, samples = self.case, measured.samples
        keys = self._keys("first", case.batches)
        more_keys = self._keys("second", case.batches if "mixed" in self.modes else 0)
        pages = len(keys + more_keys) * case.batch
        # Room for every contender's headers, directories and reservations: nothing is evicted here.
        capacity = pages * case.payload * 3 // 2 + pages * 16384 + (64 << 20)
        opened = contender.open(Workplace(directory, self.host, capacity, pages, case.threads))
        try:
            samples["write"] = self._write(contender.name, opened, keys)
            write_back(directory)
            if "read-warm" in self.modes:
                samples["read-warm"] = self._read(contender.name, opened, keys)
            if "read-cold" in self.modes:
                drop_from_page_cache(directory, whole_machine=self.drop_caches)
                before = _bytes_from_disk()
                samples["read-cold"] = self._read(contender.name, opened, keys)
                if (share := (_bytes_from_disk() - before) / case.total) < _COLD:
                    measured.notes.add(
                        f"{contender.name}: the kernel counted only {share:.0%} of the cold read as read from the disk"
                    )
            if "mixed" in self.modes:
                samples["mixed"] = self._read_and_write(contender.name, opened, keys, more_keys)
                self._read(contender.name, opened, more_keys, first_number=case.batches)
        finally:
            opened.close()
        for mode in set(samples) - set(self.modes):
            del samples[mode]

    def _keys(self, name: str, batches: int) -> list[list[str]]:
        keys = page_keys(name, batches * self.case.batch)
        return [keys[begin : begin + self.case.batch] for begin in range(0, len(keys), self.case.batch)]

    def _write(self, name: str, opened: FileContender, keys: Sequence[Sequence[str]]) -> Sample:
        watch = Stopwatch()
        for number, batch in enumerate(keys):
            self.host.stamp(number)
            with watch.call():
                stored = opened.write(batch, self.host.sources)
            _expect(name, "stored", stored, len(batch))
        return watch.sample(self.case.total)

    def _read(
        self, name: str, opened: FileContender, keys: Sequence[Sequence[str]], *, first_number: int = 0
    ) -> Sample:
        watch = Stopwatch()
        for number, batch in enumerate(keys, first_number):
            self.host.wipe()
            with watch.call():
                found = opened.read(batch, self.host.targets)
            _expect(name, "read", found, len(batch))
            self.host.check(number, name)
        return watch.sample(self.case.total)

    def _read_and_write(
        self, name: str, opened: FileContender, keys: Sequence[Sequence[str]], more_keys: Sequence[Sequence[str]]
    ) -> Sample:
        """One thread reads what is stored while another stores more, as SGLang's prefetch and backup threads do.

        The calls of the sample are the reads: those are what a request waits for. What was written is read back and
        checked by the caller, what was read last is checked here.
        """
        failures: list[Exception] = []
        interrupted = threading.Event()

        def write_more() -> None:
            try:
                for number, batch in enumerate(more_keys, self.case.batches):
                    if interrupted.is_set():
                        return
                    self.host.stamp(number)
                    _expect(name, "stored", opened.write(batch, self.host.sources), len(batch))
            except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
                failures.append(error)

        self.host.wipe()
        writer = threading.Thread(target=write_more, name="bench-writer")
        reads: list[float] = []
        cpu, started = time.process_time(), time.perf_counter()
        writer.start()
        try:
            for batch in keys:
                read_started = time.perf_counter()
                found = opened.read(batch, self.host.targets)
                reads.append(time.perf_counter() - read_started)
                _expect(name, "read", found, len(batch))
            writer.join()
        finally:
            interrupted.set()
            writer.join()
        sample = Sample(
            2 * self.case.total, time.perf_counter() - started, time.process_time() - cpu, calls=tuple(reads)
        )
        if failures:
            raise failures[0]
        self.host.check(len(keys) - 1, name)
        return sample

    def _overwrite(self, contender: Contender, directory: Path, measured: Measured) -> None:
        """Write new pages into a full namespace: for each page something older has to go."""
        case = self.case
        capacity = case.overwrite_capacity
        filling = -(-capacity * 5 // (4 * case.payload * case.batch))
        keys = self._keys("first", filling + case.batches)
        opened = contender.open(
            Workplace(directory, self.host, capacity, max(case.batch, capacity // case.payload), case.threads)
        )
        watch = Stopwatch()
        stored = 0
        try:
            for number, batch in enumerate(keys):
                self.host.stamp(number)
                if number < filling:
                    opened.write(batch, self.host.sources)
                    continue
                if number == filling:
                    write_back(directory)
                with watch.call():
                    stored += opened.write(batch, self.host.sources)
            if stored < case.pages:
                # Refusing costs no time: only what was stored counts as work.
                measured.notes.add(f"{contender.name}: overwrite refused {1 - stored / case.pages:.1%} of the pages")
            if stored:
                measured.samples["overwrite"] = watch.sample(stored * case.payload)
            # What is left after evictions, whichever pages the contender chose to keep, must have the right bytes.
            places = [(number, position) for number in range(len(keys)) for position in range(case.batch)]
            found = 0
            self.host.wipe()
            for number, position in places[:: max(1, len(places) // _PAGES_CHECKED)]:
                if opened.read([keys[number][position]], self.host.target(position)) == 1:
                    self.host.check(number, contender.name, position)
                    found += 1
            if not found:
                raise BenchmarkError(f"{contender.name}: nothing can be read of what was written at capacity")
        finally:
            opened.close()


def measure_exists(contender: Contender, chain: int, host: HostBuffers, directory: Path, threads: int) -> Measured:
    """How long the longest stored prefix of a chain of ``chain`` pages takes to find, in each of EXISTS_CASES."""
    measured = Measured()
    keys = page_keys("chain", chain)
    with fresh_directory(directory) as place:
        opened = contender.open(Workplace(place, host, chain * 4 * EXISTS_PAYLOAD + (64 << 20), chain, threads))
        try:
            for begin in range(0, chain, host.batch):
                batch = keys[begin : begin + host.batch]
                _expect(contender.name, "stored", opened.write(batch, host.first_sources(len(batch))), len(batch))
            # The first look-up of all opens things; a server has done that long ago.
            opened.count_leading(page_keys("before", 1))
            for case, expected in zip(EXISTS_CASES, (chain, chain // 2, 0), strict=True):
                names = keys[:expected] + page_keys("absent", chain - expected)
                watch = Stopwatch()
                for _ in range(_EXISTS_REPEATS):
                    with watch.call():
                        found = leading_pages(opened, names)
                    _expect(contender.name, "found", found, expected)
                measured.samples[case] = watch.sample(chain * _EXISTS_REPEATS)
        finally:
            opened.close()
    return measured


def leading_pages(opened: FileContender, keys: Sequence[str]) -> int:
    """The stored prefix of a chain, asked for as SGLang's ``_storage_hit_query`` does: 128 pages at a time."""
    leading = 0
    for begin in range(0, len(keys), STORAGE_BATCH_SIZE):
        batch = keys[begin : begin + STORAGE_BATCH_SIZE]
        found = opened.count_leading(batch)
        leading += found
        if found < len(batch):
            break
    return leading


# -- the page cache ----------------------------------------------------------------------------------------------------


def write_back(directory: Path) -> None:
    """Wait until nothing of this file system is dirty: no mode pays for what was written before it."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def drop_from_page_cache(directory: Path, *, whole_machine: bool = False) -> None:
    """Make the next reads of the files below ``directory`` come from the disk."""
    write_back(directory)
    if whole_machine:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue  # the slab tier's socket
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _bytes_from_disk() -> int:
    """Bytes this process has caused to be read from block devices; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def _expect(name: str, verb: str, pages: int, expected: int) -> None:
    if pages != expected:
        raise BenchmarkError(f"{name} {verb} {pages} pages of {expected}")

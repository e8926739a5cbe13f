"""``hicache-ext bench file``: the file tier against SGLang's HiCacheFile and against what the disk can do."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from hicache_ext.bench.comparison import Baseline, LookUps, Measured, Point, Results, Throughput, Turns
from hicache_ext.bench.file_contenders import (
    EXISTS_CASES,
    HICACHE_FILE,
    MODES,
    Contender,
    HiCacheFileContender,
    all_ours,
)
from hicache_ext.bench.file_memory import GEOMETRIES, HostBuffers
from hicache_ext.bench.file_modes import (
    EXISTS_GEOMETRY,
    EXISTS_PAYLOAD,
    STORAGE_BATCH_SIZE,
    Bench,
    Case,
    measure_exists,
)
from hicache_ext.bench.file_raw import all_raw
from hicache_ext.bench.harness import Clock, available_memory, fresh_directory
from hicache_ext.bench.report import Report, add_output_arguments, machine_facts, positive
from hicache_ext.config.units import format_size, parse_size
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
    report = Report(
        "file",
        "File tier benchmark",
        machine,
        {"settings": asdict(settings), **results.figures()},
        list(results.tables()),
        results.panels(),
        _METHOD.format(**asdict(settings)),
        results.remarks(),
    )
    report.show()
    report.write(arguments, {directory: "DIRECTORY"})
    return results.print_end(time.monotonic() - started)


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
        modes = [mode for mode in self.settings.modes if mode != "exists"]
        cells = self.settings.cells() if modes else []
        with_exists = "exists" in self.settings.modes
        minutes = self.settings.minutes
        clock = Clock(math.inf if minutes is None else 60.0 * minutes, len(cells) + with_exists)
        if with_exists:
            self._measure_exists(clock)
        for geometry, payload in cells:
            self._measure_transfers(geometry, payload, modes, clock)

    def _measure_transfers(self, geometry: str, payload: int, modes: Sequence[str], clock: Clock) -> None:
        case = self._fitting_case(geometry, payload)
        bench = Bench(
            case, HostBuffers(geometry, payload, case.batch), self.directory, modes, self.settings.drop_caches
        )
        title = f"{geometry} {format_size(payload)}, {case.batches} batches of {case.batch} pages"
        self.take_turns(title, {m: transfer_point(m, geometry, payload) for m in modes}, bench.measure, clock)

    def _measure_exists(self, clock: Clock) -> None:
        chain, threads = self.settings.chain, self.settings.threads
        host = HostBuffers(EXISTS_GEOMETRY, EXISTS_PAYLOAD, STORAGE_BATCH_SIZE)
        self.take_turns(
            f"exists, a chain of {chain} pages",
            {case: exists_point(case, chain) for case in EXISTS_CASES},
            lambda contender: measure_exists(contender, chain, host, self.directory, threads),
            clock,
        )

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
        while batch > 1 and (4 + 2 * _BATCHES_AT_LEAST) * batch * payload > available_memory() // 2:
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

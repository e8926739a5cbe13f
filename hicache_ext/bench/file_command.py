"""``hicache-ext bench file``: the file tier against SGLang's HiCacheFile and against what the disk can do."""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_ext.bench.file_report import EXISTS_CASES, MODES, Point, Results, entries, markdown, panels, tables
from hicache_ext.bench.harness import (
    Clock,
    available_memory,
    command_line,
    fresh_directory,
    interleaved,
    machine_facts,
    terminated_in_order,
    today,
)
from hicache_ext.bench.output_files import add_output_arguments, positive, write_outputs
from hicache_ext.config.units import format_size, parse_size
from hicache_ext.errors import BenchmarkError
from hicache_ext.packages import need

if TYPE_CHECKING:
    from hicache_ext.bench.file_contenders import Contender
    from hicache_ext.bench.file_modes import Case, Measured

_GEOMETRIES = ("mha", "mla")
_PAYLOADS = ("32KiB", "128KiB", "1MiB", "4MiB")
_BATCHES_AT_LEAST = 4
_MODES_IN_MINUTES = ("overwrite", "read-warm", "read-cold", "exists")
_BATCHES_IN_MINUTES = 8
_BATCH_BYTES_IN_MINUTES = 32 << 20
"""With --minutes: the modes where none is named, batches per mode, and the largest batch."""
_PACKAGES = ("hicache-ext", "sglang", "torch", "aiofiles", "nixl-cu12", "lmdb", "xxhash")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
    parser.add_argument("--geometry", action="append", choices=_GEOMETRIES, help="may be repeated (default: both)")
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
            geometries=tuple(arguments.geometry or _GEOMETRIES),
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


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; 0, or 1 when a contender failed or answered wrongly (it then has no figures)."""
    settings = Settings.of(arguments)
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise BenchmarkError(f"--directory {directory}: no such directory")
    _prepare_sglang()
    from hicache_ext.bench.file_contenders import all_contenders
    from hicache_ext.bench.file_modes import STAT

    machine = machine_facts(directory, _PACKAGES)
    print(f"{machine['cpus']} CPUs, kernel {machine['kernel']}, {machine['file_system']}; Python {machine['python']}")
    started = time.monotonic()
    with terminated_in_order():
        with fresh_directory(directory) as trial:
            contenders = [*all_contenders(trial), STAT]
        if arguments.contender:
            contenders = [c for c in contenders if any(part in c.name for part in arguments.contender)]
        if not contenders:
            raise BenchmarkError(f"--contender: none of the contenders is called {' or '.join(arguments.contender)}")
        for contender in contenders:
            if contender.missing:
                print(f"  {contender.name}: {contender.missing}")
        results = Results(tuple(c.name for c in contenders), frozenset(c.name for c in contenders if c.raw))
        _Run(settings, contenders, directory, results).measure()
    for table in tables(results):
        print(f"\n{table.text()}")
    print(f"\n{time.monotonic() - started:.0f} s")
    _write(arguments, settings, machine, results)
    for failure in results.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if results.failures else 0


def _write(arguments: argparse.Namespace, settings: Settings, machine: dict[str, Any], results: Results) -> None:
    document = {
        "benchmark": "file",
        "date": today(),
        "command": command_line(),
        "machine": machine,
        "settings": asdict(settings),
        "notes": results.notes,
        "failures": results.failures,
        "results": list(entries(results)),
    }
    write_outputs(
        arguments,
        document,
        lambda command: markdown(document, results, command),
        lambda: panels(results),
        {arguments.directory: "DIRECTORY"},
    )


def _prepare_sglang() -> None:
    """The benchmark compares with SGLang, over its host pools. Raises ImportError or MissingPackageError without it."""
    need("sglang", "torch")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    from hicache_ext.testing.sglang_cpu import prepare_process

    prepare_process()
    import sglang.srt.mem_cache.hicache_storage  # noqa: F401


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
        from hicache_ext.bench.file_contenders import HostBuffers
        from hicache_ext.bench.file_modes import Bench

        case = self._fitting_case(geometry, payload)
        bench = Bench(
            case, HostBuffers(geometry, payload, case.batch), self.directory, modes, self.settings.drop_caches
        )
        title = f"{geometry} {format_size(payload)}, {case.batches} batches of {case.batch} pages"
        self._take_turns(title, {mode: Point(mode, geometry, payload) for mode in modes}, bench.measure, clock)

    def _measure_exists(self, clock: Clock) -> None:
        from hicache_ext.bench import file_modes
        from hicache_ext.bench.file_contenders import HostBuffers

        geometry, payload, chain = file_modes.EXISTS_GEOMETRY, file_modes.EXISTS_PAYLOAD, self.settings.chain
        host = HostBuffers(geometry, payload, file_modes.STORAGE_BATCH_SIZE)
        self._take_turns(
            f"exists, a chain of {chain} pages",
            {case: Point(case, geometry, payload) for case in EXISTS_CASES},
            lambda contender: file_modes.measure_exists(contender, chain, host, self.directory, self.settings.threads),
            clock,
        )

    def _take_turns(
        self, title: str, points: dict[str, Point], measure: Callable[[Contender], Measured], clock: Clock
    ) -> None:
        """The rounds of some points, with progress: all, or those that ``clock`` has time for.

        A contender that fails drops out and is left out.
        """
        clock.begin_point()
        able = self._able(points)
        failed: set[str] = set()
        total = self.settings.warm_ups + self.settings.rounds
        shown = 0
        for round_number, name, counts in interleaved(list(able), self.settings.rounds, self.settings.warm_ups):
            if clock.run_over or (clock.over and round_number not in (1, shown, self.settings.warm_ups + 1)):
                # One round that counts is worth more than a share that is kept to.
                whole = shown - 1 if round_number == shown else shown
                self._end_early(title, points, able, failed, max(0, whole - self.settings.warm_ups))
                break
            if round_number != shown:
                shown = round_number
                print(f"  {title}: round {shown} of {total}{'' if counts else ' (warm-up)'}", flush=True)
            if name in failed:
                continue
            try:
                measured = measure(able[name])
            except (BenchmarkError, OSError) as error:
                failed.add(name)
                self.results.failures.append(f"{title}: {error}")
                for point in points.values():
                    self.results.leave_out(point, name, f"failed: {error}")
                continue
            for note in sorted(measured.notes):
                self.results.note(f"{title.partition(',')[0]}: {note}")
            for mode, sample in measured.samples.items():
                if counts:
                    self.results.add(points[mode], name, sample)

    def _end_early(
        self, title: str, points: dict[str, Point], able: dict[str, Contender], failed: set[str], rounds: int
    ) -> None:
        """Say what is not measured for want of time."""
        what = title.partition(",")[0]
        missing = {
            name
            for name in able.keys() - failed
            for mode, point in points.items()
            if not able[name].cannot.get(mode.partition(",")[0]) and not self.results.samples.get(point, {}).get(name)
        }
        for name in missing:
            for point in points.values():
                self.results.reasons.setdefault(point, {}).setdefault(name, "no time left")
        if len(missing) == len(able.keys() - failed):
            self.results.note(f"{what}: not measured: no time left")
            return
        self.results.note(f"{what}: {rounds} of {self.settings.rounds} rounds for want of time")
        if missing:
            self.results.note(f"{what}: not measured for want of time: {', '.join(sorted(missing))}")

    def _able(self, points: dict[str, Point]) -> dict[str, Contender]:
        """Contenders that can do one of the modes; for the others the reason is kept."""
        able: dict[str, Contender] = {}
        for contender in self.contenders:
            reasons = {mode: contender.missing or contender.cannot.get(mode.partition(",")[0]) for mode in points}
            for mode, reason in reasons.items():
                if reason:
                    self.results.leave_out(points[mode], contender.name, reason)
            if not all(reasons.values()):
                able[contender.name] = contender
        return able

    def _fitting_case(self, geometry: str, payload: int) -> Case:
        """The case, with smaller batches where memory is short. Raises BenchmarkError where the disk is."""
        from hicache_ext.bench.file_modes import Case

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

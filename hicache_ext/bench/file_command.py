"""``hicache-ext bench file``: the file tier against SGLang's HiCacheFile and against what the disk can do."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.bench.harness import (
    BenchmarkError,
    Panel,
    Sample,
    Summary,
    Table,
    available_memory,
    can_plot,
    command_line,
    fresh_directory,
    interleaved,
    machine_facts,
    number,
    plot,
    ratio,
    today,
    write_json,
)
from hicache_ext.config.units import format_size, parse_size

_PAYLOADS = ("32KiB", "128KiB", "1MiB", "4MiB")
_BATCHES_AT_LEAST = 4
_PACKAGES = ("hicache-ext", "sglang", "torch", "aiofiles", "nixl-cu12", "lmdb", "xxhash")
_TITLES = {
    "write": "write (first pass)",
    "overwrite": "write at capacity (eviction running)",
    "read-warm": "read, page cache warm",
    "read-cold": "read, page cache dropped",
    "mixed": "read and write at the same time (p50/p99: the reads)",
}
_METHOD = """\
Every contender moves the same pages between the same SGLang host pool and the same file system, in a directory of its
own that is deleted afterwards; rounds are interleaved, {warm_ups} warm-up round thrown away, {rounds} measured: medians,
quartiles in brackets. A batch is one call, as SGLang's controller makes it. What was read is compared byte for byte
outside the timed part. Writes end in the page cache, for every contender; dirty pages are written back between the
modes. CPU is this process's. "raw limit" is the best of preadv/pwritev with 1, 2 and 4 threads over one preallocated
file: no envelope, no checksum, no index. Ratios above 1 are faster.
"""

Key = tuple[str, int, str]
"""Geometry, payload in bytes, mode (``exists`` cases: payload 0)."""


@dataclass(slots=True)
class Results:
    """Samples by point and contender, and why others are missing."""

    samples: dict[Key, dict[str, list[Sample]]] = field(default_factory=dict)
    reasons: dict[Key, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            print(f"  note: {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one point, with its ratios where there is something to compare with."""

    contender: str
    summary: Summary
    to_sglang: float | None
    to_raw: float | None


def compare(samples: Mapping[str, Sequence[Sample]], sglang: str, raw: Sequence[str]) -> list[Row]:
    """Summaries and ratios of one point; the raw limit is the fastest of the contenders called ``raw``."""
    summaries = {name: Summary.of(taken) for name, taken in samples.items() if taken}
    limit = max(
        (summaries[name] for name in raw if name in summaries), key=lambda summary: summary.rate.median, default=None
    )
    base = summaries.get(sglang)
    return [
        Row(name, summary, ratio(summary, base) if base else None, ratio(summary, limit) if limit else None)
        for name, summary in summaries.items()
    ]


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
        help=f"page size; may be repeated (default: {', '.join(_PAYLOADS)})",
    )
    parser.add_argument("--geometry", action="append", choices=("mha", "mla"), help="default: both")
    parser.add_argument(
        "--mode",
        action="append",
        choices=("write", "overwrite", "read-warm", "read-cold", "mixed", "exists"),
        help="may be repeated (default: all)",
    )
    parser.add_argument(
        "--contender", action="append", metavar="NAME", help="those whose name contains NAME; may be repeated"
    )
    parser.add_argument(
        "--total", metavar="SIZE", help="bytes each mode moves, at least four batches (default: 512MiB)"
    )
    parser.add_argument("--batch", type=_positive, help="pages per call (default: 128)")
    parser.add_argument("--threads", type=_positive, default=4, help="of contenders that use several (default: 4)")
    parser.add_argument("--rounds", type=_positive, help="measured rounds, after one warm-up round (default: 5)")
    parser.add_argument("--chain", type=_positive, help="pages asked for in exists (default: 10000)")
    parser.add_argument(
        "--drop-caches", action="store_true", help="empty the whole page cache before cold reads (root)"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of an hour: shows that it works, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables, without paths of this machine")
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
    warm_ups: int = 1

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Settings:
        quick: bool = arguments.quick
        payloads = arguments.payload or (["32KiB", "128KiB"] if quick else _PAYLOADS)
        return cls(
            payloads=tuple(parse_size(text, "--payload") for text in payloads),
            geometries=tuple(arguments.geometry or ("mha", "mla")),
            modes=tuple(arguments.mode or ("write", "overwrite", "read-warm", "read-cold", "mixed", "exists")),
            total=parse_size(arguments.total or ("4MiB" if quick else "512MiB"), "--total"),
            batch=arguments.batch or (8 if quick else 128),
            threads=arguments.threads,
            rounds=arguments.rounds or (2 if quick else 5),
            chain=arguments.chain or (400 if quick else 10_000),
            drop_caches=arguments.drop_caches,
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; 0. Raises BenchmarkError when a contender answers wrongly or the machine is too small."""
    settings = Settings.of(arguments)
    _prepare_sglang()
    from hicache_ext.bench.file_contenders import all_contenders
    from hicache_ext.bench.file_modes import STAT

    directory: Path = arguments.directory
    if not directory.is_dir():
        raise BenchmarkError(f"--directory {directory}: no such directory")
    machine = machine_facts(directory, _PACKAGES)
    print(f"{machine['cpus']} CPUs, kernel {machine['kernel']}, {machine['file_system']}; Python {machine['python']}")
    started = time.monotonic()
    results = Results()
    with _terminated_in_order():
        with fresh_directory(directory) as trial:
            contenders = [*all_contenders(trial), STAT]
        if arguments.contender:
            contenders = [c for c in contenders if any(part in c.name for part in arguments.contender)]
        if not contenders:
            raise BenchmarkError(f"--contender: none of the contenders is called {arguments.contender}")
        for contender in contenders:
            if contender.missing:
                print(f"  {contender.name}: {contender.missing}")
        _measure(settings, contenders, directory, results)
    raw = [contender.name for contender in contenders if contender.raw]
    tables = list(_tables(results, raw))
    for table in tables:
        print(f"\n{table.text()}")
    print(f"\n{time.monotonic() - started:.0f} s")
    hidden = _paths(arguments)
    if arguments.json:
        write_json(arguments.json, _document(settings, machine, results, raw))
    if arguments.markdown:
        arguments.markdown.write_text(_markdown(settings, machine, results, tables, command_line(hidden=hidden)))
    if arguments.plot:
        if can_plot():
            plot(arguments.plot, _panels(results, raw))
        else:
            print("no plot: matplotlib is not installed")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _prepare_sglang() -> None:
    logging.getLogger("sglang").setLevel(logging.ERROR)
    try:
        from hicache_ext.testing.sglang_cpu import prepare_process

        prepare_process()
        import sglang.srt.mem_cache.hicache_storage  # noqa: F401
    except ImportError as error:
        raise BenchmarkError(f"this benchmark compares with SGLang, over its host pools: {error}") from error


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM ends the run like Ctrl-C does, so that gigabytes of test pages are not left behind."""

    def stop(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _paths(arguments: argparse.Namespace) -> dict[str, str]:
    """The paths of the command line, and what is published in their place."""
    given = {"DIRECTORY": arguments.directory, "FILE.json": arguments.json, "FILE.png": arguments.plot}
    given["FILE.md"] = arguments.markdown
    words = {word.partition("=")[2] or word for word in sys.argv[1:]} | set(sys.argv[1:])
    return {word: name for name, path in given.items() if path for word in words if Path(word) == path}


# -- measuring ---------------------------------------------------------------------------------------------------------


def _measure(settings: Settings, contenders: Sequence[Any], directory: Path, results: Results) -> None:
    from hicache_ext.bench.file_contenders import HostBuffers
    from hicache_ext.bench.file_modes import EXISTS_CASES, EXISTS_GEOMETRY, EXISTS_PAYLOAD, Bench, measure_exists

    by_name = {contender.name: contender for contender in contenders}
    transfer_modes = [mode for mode in settings.modes if mode != "exists"]
    for geometry in settings.geometries if transfer_modes else ():
        for payload in settings.payloads:
            case = _fitting_case(settings, geometry, payload, directory, results)
            host = HostBuffers(geometry, payload, case.batch)
            bench = Bench(case, host, directory, transfer_modes, settings.drop_caches)
            keys = {mode: (geometry, payload, mode) for mode in transfer_modes}
            able = _able(contenders, keys, results)
            title = f"{geometry} {format_size(payload)}, {case.batches} batches of {case.batch}"
            for contender in _rounds(settings, able, title):
                measured = bench.measure(by_name[contender.name])
                _record(contender, measured, keys, results)
    if "exists" in settings.modes:
        keys = {name: (EXISTS_GEOMETRY, 0, name) for name in EXISTS_CASES}
        host = HostBuffers(EXISTS_GEOMETRY, EXISTS_PAYLOAD, 128)
        able = _able(contenders, keys, results)
        for contender in _rounds(settings, able, f"exists, a chain of {settings.chain} pages"):
            measured = measure_exists(by_name[contender.name], settings.chain, host, directory, settings.threads)
            _record(contender, measured, keys, results)


@dataclass(frozen=True, slots=True)
class _Turn:
    name: str
    counts: bool


def _rounds(settings: Settings, able: Sequence[str], title: str) -> Iterator[_Turn]:
    """The turns of one point, with progress."""
    before = 0
    for round_number, name, counts in interleaved(able, settings.rounds, settings.warm_ups):
        if round_number != before:
            kind = "" if counts else " (warm-up)"
            total = settings.rounds + settings.warm_ups
            print(f"  {title}: round {round_number} of {total}{kind}", flush=True)
            before = round_number
        yield _Turn(name, counts)


def _record(turn: _Turn, measured: Any, keys: Mapping[str, Key], results: Results) -> None:
    for note in sorted(measured.notes):
        results.note(note)
    for mode, sample in measured.samples.items():
        if turn.counts:
            results.samples.setdefault(keys[mode], {}).setdefault(turn.name, []).append(sample)


def _able(contenders: Sequence[Any], keys: Mapping[str, Key], results: Results) -> list[str]:
    """Contenders that can do one of the modes; for the others the reason is kept."""
    able: list[str] = []
    for contender in contenders:
        reasons = {mode: contender.missing or contender.cannot.get(mode.partition(",")[0]) for mode in keys}
        for mode, reason in reasons.items():
            if reason:
                results.reasons.setdefault(keys[mode], {})[contender.name] = reason
        if not all(reasons.values()):
            able.append(contender.name)
    return able


def _fitting_case(settings: Settings, geometry: str, payload: int, directory: Path, results: Results) -> Any:
    """The case, with smaller batches where memory is short. Raises BenchmarkError where the disk is."""
    import shutil

    from hicache_ext.bench.file_modes import Case

    batch = settings.batch
    # Two pools (host and device) of two batches each, next to the pages in the page cache: half of what there is.
    while batch > 1 and 4 * batch * payload + 2 * _BATCHES_AT_LEAST * batch * payload > available_memory() // 2:
        batch //= 2
    if batch < settings.batch:
        results.note(f"{geometry} {format_size(payload)}: batches of {batch} pages, not {settings.batch}: memory")
    batches = max(_BATCHES_AT_LEAST, -(-settings.total // (batch * payload)))
    case = Case(geometry, payload, batch, batches, settings.threads)
    if case.overwrite_capacity < 8 * batch * payload and "overwrite" in settings.modes:
        results.note(
            f"{format_size(payload)}: the capacity of overwrite holds only"
            f" {case.overwrite_capacity / (batch * payload):.0f} batches; a larger --total is closer to real use"
        )
    need, free = 3 * case.total + (256 << 20), shutil.disk_usage(directory).free
    if need > free:
        raise BenchmarkError(
            f"{format_size(payload)} pages need {need >> 20} MiB of disk, {free >> 20} MiB are free; lower --total"
        )
    return case


# -- reporting ---------------------------------------------------------------------------------------------------------


def _tables(results: Results, raw: Sequence[str]) -> Iterator[Table]:
    for key, samples in results.samples.items():
        geometry, payload, mode = key
        rows = compare(samples, _sglang(), raw)
        if mode.startswith("exists"):
            headers = ("", "ms", "[quartiles]", "us CPU/key", "x HiCacheFile", "x os.stat")
            yield Table(f"{mode}, ms for the whole chain", headers, tuple(_exists_cells(row, samples) for row in rows))
        else:
            headers = ("", "GB/s", "[quartiles]", "CPU s/GB", "p50 ms", "p99 ms", "x HiCacheFile", "x raw limit")
            title = f"{_TITLES[mode]}: {geometry.upper()}, pages of {format_size(payload)}"
            yield Table(title, headers, tuple(_transfer_cells(row) for row in rows))


def _sglang() -> str:
    from hicache_ext.bench.file_contenders import HICACHE_FILE

    return HICACHE_FILE


def _transfer_cells(row: Row) -> tuple[str, ...]:
    rate = row.summary.rate
    return (
        row.contender,
        number(rate.median / 1e9),
        f"[{number(rate.lower / 1e9)} {number(rate.upper / 1e9)}]",
        number(row.summary.cpu_per_work.median * 1e9),
        number(row.summary.call_p50 * 1e3),
        number(row.summary.call_p99 * 1e3),
        *_ratio_cells(row),
    )


def _exists_cells(row: Row, samples: Mapping[str, Sequence[Sample]]) -> tuple[str, ...]:
    first = samples[row.contender][0]
    chain = first.work / len(first.calls)
    rate = row.summary.rate
    return (
        row.contender,
        number(chain / rate.median * 1e3),
        f"[{number(chain / rate.upper * 1e3)} {number(chain / rate.lower * 1e3)}]",
        number(row.summary.cpu_per_work.median * 1e6),
        *_ratio_cells(row),
    )


def _ratio_cells(row: Row) -> tuple[str, str]:
    to_sglang, to_raw = ("-" if value is None else number(value) for value in (row.to_sglang, row.to_raw))
    return to_sglang, to_raw


def _document(settings: Settings, machine: Mapping[str, Any], results: Results, raw: Sequence[str]) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for key in dict.fromkeys([*results.samples, *results.reasons]):
        point = dict(zip(("geometry", "payload_bytes", "mode"), key, strict=True))
        samples = results.samples.get(key, {})
        for row in compare(samples, _sglang(), raw):
            entries.append(
                {
                    **point,
                    "contender": row.contender,
                    "unit": "keys" if key[2].startswith("exists") else "bytes",
                    "summary": asdict(row.summary),
                    "ratio_to_hicachefile": row.to_sglang,
                    "ratio_to_raw_limit": row.to_raw,
                    "samples": [asdict(sample) for sample in samples[row.contender]],
                }
            )
        for name, reason in results.reasons.get(key, {}).items():
            entries.append({**point, "contender": name, "not_measured": reason})
    return {
        "benchmark": "file",
        "date": today(),
        "command": command_line(),
        "machine": dict(machine),
        "settings": asdict(settings),
        "notes": results.notes,
        "results": entries,
    }


def _markdown(
    settings: Settings, machine: Mapping[str, Any], results: Results, tables: Sequence[Table], command: str
) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    absent = dict.fromkeys(
        f"{name}: {reason}" for reasons in results.reasons.values() for name, reason in reasons.items()
    )
    lines = [
        "# File tier benchmark",
        "",
        f"{today()[:10]}; {machine['cpus']} CPUs ({machine['cpu_model']}), {machine['memory_bytes'] >> 30} GiB of"
        f" memory, {machine['file_system']}, kernel {machine['kernel']}, Python {machine['python']}; {versions}.",
        "",
        f"    {command}",
        "",
        _METHOD.format(warm_ups=settings.warm_ups, rounds=settings.rounds),
        *(f"- {note}" for note in [*results.notes, *absent]),
        "",
        "\n\n".join(table.markdown() for table in tables),
        "",
    ]
    return "\n".join(lines)


def _panels(results: Results, raw: Sequence[str]) -> list[Panel]:
    """A diagram per geometry and mode: GB/s over page sizes; of the raw attempts only the best at each point."""
    panels: dict[tuple[str, str], dict[str, list[tuple[str, float, float, float]]]] = {}
    for (geometry, payload, mode), samples in results.samples.items():
        if mode.startswith("exists"):
            continue
        rows = compare(samples, _sglang(), raw)
        best = max((row for row in rows if row.contender in raw), key=lambda r: r.summary.rate.median, default=None)
        for row in rows:
            if row.contender in raw and row is not best:
                continue
            rate = row.summary.rate
            name = "raw limit" if row is best else row.contender
            point = (format_size(payload), rate.median / 1e9, rate.lower / 1e9, rate.upper / 1e9)
            panels.setdefault((geometry, mode), {}).setdefault(name, []).append(point)
    return [
        Panel(f"{geometry.upper()}: {_TITLES[mode].partition(' (p50')[0]}", "page", "GB/s", lines)
        for (geometry, mode), lines in panels.items()
    ]

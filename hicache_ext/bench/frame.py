"""The frame of every benchmark: interleaved contenders, samples, quartiles, ratios to a baseline, tables, JSON.

Contenders take turns, so that a machine that becomes slower meanwhile makes all of them slower: in each round each of
them once, the order rotated by one from round to round, the first round thrown away.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext.config.values import format_size, parse_size
from hicache_ext.errors import ConfigError, HicacheExtError, MissingPackageError
from hicache_ext.packages import installed_version
from hicache_ext.runtime.commands import JSON_ON_STANDARD_OUTPUT, aligned, print_json
from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.runtime.shown import shown_words

# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One contender's measurement in one mode of one round. ``work`` is in bytes."""

    work: int
    seconds: float
    cpu_seconds: float
    """User and system time of all threads of this process, without later work of the kernel (write-back)."""
    calls: tuple[float, ...]
    """Seconds of each call."""


def interleaved(contenders: Sequence[str], rounds: int) -> Iterator[tuple[int, str, bool]]:
    """Yield (round, contender, whether it counts) in the order in which to measure; the round 1 does not count."""
    for number in range(1, rounds + 2):
        shift = (number - 1) % len(contenders) if contenders else 0
        for contender in [*contenders[shift:], *contenders[:shift]]:
            yield number, contender, number > 1


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """Make an empty directory inside ``parent`` and delete it at the end: no run finds what another one has stored.

    It is absolute, since the path of a tier has to be.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=parent.absolute()) as path:
        yield Path(path)


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median with the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        lower, median, upper = (float(value) for value in np.percentile(values, (25, 50, 75)))
        return cls(median, lower, upper)


def summarized(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return several rounds of one contender in one mode: rates over the rounds, percentiles over all calls, in s."""
    p50, p99 = (float(value) for value in np.percentile([s for sample in samples for s in sample.calls], (50, 99)))
    return {
        "rounds": len(samples),
        "rate": asdict(Quartiles.of([sample.work / sample.seconds for sample in samples])),
        "cpu_per_work": asdict(Quartiles.of([sample.cpu_seconds / sample.work for sample in samples])),
        "call_p50": p50,
        "call_p99": p99,
    }


@dataclass(frozen=True, slots=True)
class Point:
    """One table: a mode of one case, in which contenders are compared."""

    mode: str
    facts: tuple[tuple[str, Any], ...]
    """Its entry in the JSON document, besides the mode."""

    @property
    def title(self) -> str:
        return ", ".join([self.mode, *described(dict(self.facts))])


def described(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield each of the facts of a point as a reader wants it."""
    for key, value in facts.items():
        if key == "threads":
            yield f"{value} thread{'s' * (value != 1)}"
        else:
            yield format_size(value) if key.startswith("payload") else str(value)


@dataclass(slots=True)
class Results:
    """Samples of contenders by point, or why there are none, and their ratios to baselines."""

    contenders: Collection[str]
    """Contenders in the order of the tables."""
    baselines: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Baselines: name -> contenders, of which the fastest counts at each point."""
    found: dict[Point, dict[str, list[Sample] | str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, point: Point, contender: str, sample: Sample) -> None:
        samples = self.found.setdefault(point, {}).setdefault(contender, [])
        assert not isinstance(samples, str), f"{contender} was left out: {samples}"
        samples.append(sample)

    def leave_out(self, point: Point, contender: str, reason: str) -> None:
        """Give the contender no figure at this point, also where it had some already."""
        self.found.setdefault(point, {})[contender] = reason

    def take_turns(
        self,
        title: str,
        points: Mapping[str, Point],
        measure: Mapping[str, Callable[[], Mapping[str, Sample]]],
        rounds: int,
    ) -> None:
        """Call each of ``measure`` once a round; the sample of a mode goes to its point. One that fails drops out.

        It is no failure of the run where a contender lacks a package, or cannot be configured so on this machine.
        """
        failed: set[str] = set()
        shown = 0
        for number, name, counts in interleaved(list(measure), rounds):
            if number != shown:
                shown = number
                print(f"  {title}: round {number} of {rounds + 1}{'' if counts else ' (warm-up)'}", flush=True)
            if name in failed:
                continue
            try:
                samples = measure[name]()
            except (HicacheExtError, OSError, ImportError) as error:
                failed.add(name)
                cannot = isinstance(error, ImportError | MissingPackageError | ConfigError)
                if not cannot:
                    self.failures.append(f"{title}: {name}: {error}")
                for point in points.values():
                    self.leave_out(point, name, str(error) if cannot else f"failed: {error}")
                continue
            for mode, sample in samples.items():
                if counts:
                    self.add(points[mode], name, sample)

    def entries(self, point: Point) -> Iterator[dict[str, Any]]:
        """Yield an entry of the JSON document for every contender at the point, measured or not."""
        of_point = self.found[point]
        place = {"mode": point.mode, **dict(point.facts)}
        taken = {name: found for name in self.contenders if isinstance(found := of_point.get(name), list)}
        summaries = {name: summarized(samples) for name, samples in taken.items()}
        rates = {name: summary["rate"]["median"] for name, summary in summaries.items()}
        bases = {
            f"ratio_to_{baseline.lower().replace(' ', '_')}": max(
                (rates[name] for name in rates if name in names), default=None
            )
            for baseline, names in self.baselines.items()
        }
        for name, samples in taken.items():
            yield {
                **place,
                "contender": name,
                "unit": "bytes",
                "summary": summaries[name],
                **{key: base and rates[name] / base for key, base in bases.items()},
                "samples": [asdict(sample) for sample in samples],
            }
        for name, reason in of_point.items():
            if isinstance(reason, str):
                yield {**place, "contender": name, "not_measured": reason}

    def tables(self) -> Iterator[Table]:
        for point in self.found:
            rows = []
            for entry in self.entries(point):
                if "summary" in entry:
                    summary, rate = entry["summary"], entry["summary"]["rate"]
                    ratios = [value for key, value in entry.items() if key.startswith("ratio_to_")]
                    figures = (
                        number(rate["median"] / 1e9),
                        f"[{number(rate['lower'] / 1e9)} {number(rate['upper'] / 1e9)}]",
                        number(summary["cpu_per_work"]["median"] * 1e9),
                        number(summary["call_p50"] * 1e3),
                        number(summary["call_p99"] * 1e3),
                        *("-" if ratio is None else number(ratio) for ratio in ratios),
                    )
                    rows.append((entry["contender"], str(summary["rounds"]), *figures))
            headers = ("", "rounds", "GB/s", "[quartiles]", "CPU s/GB", "p50 ms", "p99 ms")
            if rows:
                yield Table(point.title, (*headers, *(f"x {name}" for name in self.baselines)), tuple(rows))

    def finish(
        self, arguments: argparse.Namespace, benchmark: str, machine: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> int:
        """Print and write the report. Return the exit code: 1 when a contender failed or nothing was measured."""
        results = [entry for point in self.found for entry in self.entries(point)]
        figures = {"settings": settings, "notes": [], "failures": self.failures, "results": results}
        report(arguments, benchmark, machine, figures, self.tables())
        for text in dict.fromkeys(f"{e['contender']}: {e['not_measured']}" for e in results if "not_measured" in e):
            print(f"not measured: {text}")
        for failure in self.failures:
            print(f"FAILED: {failure}", file=sys.stderr)
        return 1 if self.failures or all("not_measured" in entry for entry in results) else 0


# -- arguments, tables, documents --------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """Parse an argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def add_measuring_arguments(parser: argparse.ArgumentParser, payloads: Sequence[str], total: str) -> None:
    """Add what contenders move, how often, and where the figures go; ``payloads`` and ``total`` are defaults."""
    parser.add_argument(
        "--payload",
        action="append",
        metavar="SIZE",
        help=f"bytes of a page; may be repeated (default: {', '.join(payloads)})",
    )
    parser.add_argument("--total", metavar="SIZE", help=f"bytes each mode moves in a round (default: {total})")
    parser.add_argument("--rounds", type=positive, help="measured rounds, after one warm-up round (default: 5)")
    parser.add_argument("--quick", action="store_true", help="seconds: shows that it works, no more")
    parser.set_defaults(default_payloads=payloads, default_total=total)
    add_json_argument(parser)


def what_to_measure(arguments: argparse.Namespace) -> tuple[list[int], int, int]:
    """Return the bytes of a page, those that a mode moves in a round, and the rounds."""
    quick = arguments.quick
    payloads = arguments.payload or arguments.default_payloads[: 1 if quick else None]
    total = arguments.total or ("4MiB" if quick else arguments.default_total)
    sizes = [parse_size(text, "--payload") for text in payloads]
    return sizes, parse_size(total, "--total"), arguments.rounds or (2 if quick else 5)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=_new_file,
        nargs="?",
        const=JSON_ON_STANDARD_OUTPUT,
        metavar="FILE",
        help="write everything measured; without FILE on standard output, and all else on standard error",
    )


def _new_file(text: str) -> Path:
    """Parse the name of a file to write. It is looked at before anything is measured, and not when it is over."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no directory {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    return path


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title; the first column is left-aligned, the others right."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        rule = tuple("-" * max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True))
        return "\n".join([self.title, *aligned([self.headers, rule, *self.rows], str.rjust)])


def number(value: float) -> str:
    """Format a number to three significant digits."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def report(
    arguments: argparse.Namespace,
    benchmark: str,
    machine: Mapping[str, Any],
    figures: Mapping[str, Any],
    tables: Iterable[Table],
) -> None:
    """Print the tables, and write the document that ``--json`` asks for: ``figures``, and how they came about."""
    for table in tables:
        print(f"\n{table.text()}")
    document = {"benchmark": benchmark, "date": today(), "command": _command_line(), "machine": machine, **figures}
    if arguments.json == JSON_ON_STANDARD_OUTPUT:
        print_json(document)
    elif arguments.json:
        write_json(arguments.json, document)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine_facts(directory: Path, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a reader must know to judge the figures; no names and no paths of the machine."""
    model = [line.partition(":")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": model[0].strip() if model else platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": file_system_of(directory).type,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in packages},
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _command_line() -> str:
    """Return the command line of this process without secrets."""
    return shlex.join([Path(sys.argv[0]).name, *shown_words(sys.argv[1:])])

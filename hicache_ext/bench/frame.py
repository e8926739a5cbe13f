"""What every benchmark shares: contenders in interleaved rounds, statistics, tables, JSON, Markdown, diagrams.

A benchmark measures contenders in turns, so that a machine that becomes slower meanwhile makes all of them slower: each
round every contender once, the order rotated by one from round to round, the first round(s) thrown away.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext.errors import BenchmarkError
from hicache_ext.packages import installed_version, need
from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.runtime.results import JSON_ON_STANDARD_OUTPUT, print_json
from hicache_ext.runtime.shown import shown_words

# -- measuring ---------------------------------------------------------------------------------------------------------

# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """What one contender did in one mode of one round. ``work`` in the mode's unit: bytes, or keys."""

    work: int
    seconds: float
    cpu_seconds: float
    """Of this process, user and system, all threads; without what the kernel does for it later (write-back)."""
    calls: tuple[float, ...]
    """Seconds of each call."""

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.seconds


@dataclass(slots=True)
class Stopwatch:
    """Collects one Sample call by call; what happens between the calls is not in it. For one thread."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    calls: list[float] = field(default_factory=list)

    @contextmanager
    def call(self) -> Iterator[None]:
        cpu = time.process_time()
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self.cpu_seconds += time.process_time() - cpu
        self.seconds += elapsed
        self.calls.append(elapsed)

    def sample(self, work: int) -> Sample:
        return Sample(work, self.seconds, self.cpu_seconds, tuple(self.calls))


def interleaved(contenders: Sequence[str], rounds: int, warm_up_rounds: int = 1) -> Iterator[tuple[int, str, bool]]:
    """(round, contender, whether it counts) in the order in which to measure; rounds are numbered from 1.

    The order of the contenders is rotated by one from round to round.
    """
    for number in range(1, warm_up_rounds + rounds + 1):
        shift = (number - 1) % len(contenders) if contenders else 0
        for contender in [*contenders[shift:], *contenders[:shift]]:
            yield number, contender, number > warm_up_rounds


class Clock:
    """Shares the time of a run among its points."""

    def __init__(self, seconds: float, points: int, now: Callable[[], float] = time.monotonic) -> None:
        """``seconds`` may be infinite."""
        self._now = now
        self._end = now() + seconds
        self._points = points
        self._until = 0.0

    def begin_point(self) -> None:
        now = self._now()
        self._until = now + max(0.0, self._end - now) / max(1, self._points)
        self._points -= 1

    @property
    def over(self) -> bool:
        """The point has had its share."""
        return self._now() >= self._until

    @property
    def run_over(self) -> bool:
        """The whole run has had its time."""
        return self._now() >= self._end


# -- statistics --------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Summary:
    """Several rounds of one contender in one mode."""

    rounds: int
    rate: Quartiles
    """Work per second, over the rounds."""
    cpu_per_work: Quartiles
    """CPU seconds per unit of work, over the rounds."""
    call_p50: float
    call_p99: float
    """Seconds of a call, over all calls of all rounds."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Summary:
        p50, p99 = (float(value) for value in np.percentile([s for sample in samples for s in sample.calls], (50, 99)))
        return cls(
            rounds=len(samples),
            rate=Quartiles.of([sample.rate for sample in samples]),
            cpu_per_work=Quartiles.of([sample.cpu_seconds / sample.work for sample in samples]),
            call_p50=p50,
            call_p99=p99,
        )


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """A new empty directory inside ``parent``, deleted at the end: no run finds what another has stored.

    Absolute, since the path of a tier has to be.
    """
    path = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=parent)).absolute()
    try:
        yield path
    finally:
        # The thread of a contender that was interrupted may still be busy in it for a moment.
        for _ in range(50):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                break
            time.sleep(0.2)
        else:
            print(f"{path} could not be deleted: please do", file=sys.stderr)


# -- reports -----------------------------------------------------------------------------------------------------------

# -- the arguments that name files to write ----------------------------------------------------------------------------


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=new_file,
        nargs="?",
        const=JSON_ON_STANDARD_OUTPUT,
        metavar="FILE",
        help="write everything measured; without FILE on standard output, and all else on standard error",
    )
    parser.add_argument("--plot", type=_picture, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument(
        "--markdown", type=new_file, metavar="FILE", help="write the tables, without paths of this machine"
    )


def new_file(text: str) -> Path:
    """An argument that names a file to write. Looked at before anything is measured, and not when it is over."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no directory {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    return path


def _picture(text: str) -> Path:
    need("matplotlib")
    return new_file(text)


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


# -- tables and diagrams -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title; the first column is left-aligned, the others right."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        widths = [max(len(row[column]) for row in (self.headers, *self.rows)) for column in range(len(self.headers))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (self.headers, tuple("-" * width for width in widths), *self.rows)
        ]
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        rule = ("---", *("---:" for _ in self.headers[1:]))
        lines = ["| " + " | ".join(row) + " |" for row in (self.headers, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines])


def number(value: float) -> str:
    """Three digits that mean something."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


PlotPoint = tuple[str, float, float, float]
"""x, y, lower y, upper y."""


def plot_point(x: str, y: float) -> PlotPoint:
    """A point without scatter."""
    return x, y, y, y


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram, a line for each contender."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[PlotPoint]]


# Okabe and Ito's colours, which the colour-blind tell apart; the shapes help in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_DODGE = 0.05
"""How far neighbouring lines are moved apart, in steps of x, so that equal values do not hide each other."""


def plot(path: Path, panels: Sequence[Panel], title: str, caption: str) -> None:
    """Draw ``panels`` into one PNG, a colour per contender; the x values are names, in the order they come."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows + 1.1), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    contenders = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    handles: dict[str, Any] = {}
    for panel, axis in zip(panels, axes, strict=False):
        names = dict.fromkeys(x for line in panel.lines.values() for x, *_ in line)
        places = {x: place for place, x in enumerate(names)}
        for number_of_line, (name, points) in enumerate(panel.lines.items()):
            index = contenders.index(name)
            moved = (number_of_line - (len(panel.lines) - 1) / 2) * _DODGE
            handles[name] = axis.errorbar(
                [places[x] + moved for x, *_ in points],
                [point[1] for point in points],
                yerr=[[y - low for _, y, low, _ in points], [high - y for _, y, _, high in points]],
                marker=_MARKERS[index % len(_MARKERS)],
                capsize=2,
                color=_COLOURS[index % len(_COLOURS)],
                linestyle="-" if index < len(_COLOURS) else "--",
            )
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0, None))
        axis.set_xticks(range(len(names)), list(names))
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(f"{title}\n{caption}", fontsize=10)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(5, len(handles) or 1))
    figure.savefig(path, dpi=110)


# -- the whole report --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """A run of the benchmark ``name``, whose page is called ``title``."""

    name: str
    title: str
    machine: Mapping[str, Any]
    """See ``machine_facts``."""
    figures: Mapping[str, Any]
    """What the JSON file holds besides the name, the date, the command line and the machine."""
    tables: Sequence[Table]
    panels: Sequence[Panel]
    method: str = ""
    """How it was measured, for the page."""
    notes: Sequence[str] = ()
    summary: str = ""
    """A sentence that stands first on the page."""

    def show(self) -> None:
        for table in self.tables:
            print(f"\n{table.text()}")

    def write(self, arguments: argparse.Namespace, hidden: Mapping[Path, str] | None = None) -> None:
        """Write what ``add_output_arguments`` asked for. The page names neither these files nor what is ``hidden``."""
        if arguments.json:
            document = {"benchmark": self.name, "date": today(), "command": command_line(), "machine": self.machine}
            document.update(self.figures)
            if arguments.json == JSON_ON_STANDARD_OUTPUT:
                print_json(document)
            else:
                write_json(arguments.json, document)
        if arguments.markdown:
            given = {arguments.json: "FILE.json", arguments.plot: "FILE.png", arguments.markdown: "FILE.md"}
            replaced = {**(hidden or {}), **{path: name for path, name in given.items() if path is not None}}
            picture = arguments.plot.name if arguments.plot else None
            arguments.markdown.write_text(self.markdown(command_line(hidden=replaced), picture))
        if arguments.plot:
            plot(arguments.plot, self.panels, self.title, where_and_when(self.machine))

    def markdown(self, command: str, picture: str | None = None) -> str:
        """A page for docs/benchmarks; ``command`` is the command line without paths; ``picture`` lies beside it."""
        versions = ", ".join(f"{name} {version}" for name, version in self.machine["packages"].items() if version)
        lines = [
            f"# {self.title}",
            "",
            *([self.summary, ""] if self.summary else ()),
            f"{where_and_when(self.machine)}, {self.machine['file_system']}, kernel {self.machine['kernel']}, Python"
            f" {self.machine['python']}; {versions}.",
            "",
            f"    {command}",
            "",
            *([f"![{self.title}]({picture})", ""] if picture else ()),
            *([self.method] if self.method else ()),
            *(f"- {note}" for note in self.notes),
            *([""] if self.method or self.notes else ()),
            *(f"{table.markdown()}\n" for table in self.tables),
        ]
        return "\n".join(lines)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine_facts(directory: Path, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a reader must know to judge the figures; no names and no paths of the machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": file_system_of(directory).type,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in packages},
    }


def where_and_when(machine: Mapping[str, Any]) -> str:
    """The line below a picture: today, and what ``machine_facts`` says of the machine."""
    memory = machine["memory_bytes"] >> 30
    return f"{today()[:10]}; {machine['cpus']} CPUs ({machine['cpu_model']}), {memory} GiB of memory"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line(words: Sequence[str] | None = None, hidden: Mapping[Path, str] | None = None) -> str:
    """Return the command line of this process without secrets, each path in ``hidden`` replaced by its word."""
    program, *given = sys.argv if words is None else words
    replaced = [Path(program).name]
    for word in shown_words(given):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        replaced.append(option + equals + (hidden or {}).get(Path(value), value))
    return shlex.join(replaced)


# -- contenders in turns -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Throughput:
    """Bytes per second, in ``size`` bytes."""

    name: str = "GB/s"
    size: float = 1e9
    work: str = "bytes"

    @property
    def headers(self) -> tuple[str, ...]:
        return self.name, "[quartiles]", "CPU s/GB", "p50 ms", "p99 ms"

    def cells(self, summary: Summary) -> tuple[str, ...]:
        rate = summary.rate
        return (
            number(rate.median / self.size),
            f"[{number(rate.lower / self.size)} {number(rate.upper / self.size)}]",
            number(summary.cpu_per_work.median * 1e9),
            number(summary.call_p50 * 1e3),
            number(summary.call_p99 * 1e3),
        )


@dataclass(frozen=True, slots=True)
class LookUps:
    """Milliseconds for a chain of ``chain`` keys."""

    chain: int
    work: str = "keys"

    @property
    def headers(self) -> tuple[str, ...]:
        return "ms", "[quartiles]", "us CPU/key"

    def cells(self, summary: Summary) -> tuple[str, ...]:
        slowest, middle, fastest = (
            number(self.chain / rate * 1e3) for rate in (summary.rate.lower, summary.rate.median, summary.rate.upper)
        )
        return middle, f"[{fastest} {slowest}]", number(summary.cpu_per_work.median * 1e6)


@dataclass(frozen=True, slots=True)
class Point:
    """One table: a mode of one case, in which contenders are compared."""

    mode: str
    title: str
    facts: tuple[tuple[str, Any], ...]
    """Its entry in the JSON file, besides the mode."""
    unit: Throughput | LookUps
    panel: str | None = None
    """The diagram that it is a point of; ``x`` is its name there."""
    x: str = ""
    place: tuple[Any, ...] = ()
    """Tables are sorted by it."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What ratios are to: at each point the fastest of these contenders. In diagrams it stands for all of them."""

    name: str
    key: str
    contenders: frozenset[str]


@dataclass(slots=True)
class Measured:
    """What one contender did in one round: a sample by mode."""

    samples: dict[str, Sample] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one point; for each baseline how many times as fast it is, None where none was measured."""

    contender: str
    summary: Summary
    ratios: tuple[float | None, ...]


@dataclass(slots=True)
class Results:
    """Samples by point and contender, and why others are missing."""

    contenders: tuple[str, ...]
    """In the order of the tables."""
    baselines: tuple[Baseline, ...] = ()
    samples: dict[Point, dict[str, list[Sample]]] = field(default_factory=dict)
    reasons: dict[Point, dict[str, str]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Who could not take part at all, and why."""
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, point: Point, contender: str, sample: Sample) -> None:
        self.samples.setdefault(point, {}).setdefault(contender, []).append(sample)

    def leave_out(self, point: Point, contender: str, reason: str) -> None:
        """The contender has no figure at this point, also where it had some already."""
        self.samples.get(point, {}).pop(contender, None)
        self.reasons.setdefault(point, {})[contender] = reason

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            print(f"  note: {text}", flush=True)

    def points(self) -> list[Point]:
        return sorted(dict.fromkeys([*self.samples, *self.reasons]), key=lambda point: point.place)

    def rows(self, point: Point) -> list[Row]:
        taken = self.samples.get(point, {})
        summaries = {name: Summary.of(taken[name]) for name in self.contenders if taken.get(name)}
        bases = [
            max((s for n, s in summaries.items() if n in b.contenders), key=lambda s: s.rate.median, default=None)
            for b in self.baselines
        ]
        return [
            Row(name, summary, tuple(summary.rate.median / base.rate.median if base else None for base in bases))
            for name, summary in summaries.items()
        ]

    def tables(self) -> Iterator[Table]:
        for point in self.points():
            rows = tuple(
                (
                    row.contender,
                    str(row.summary.rounds),
                    *point.unit.cells(row.summary),
                    *("-" if value is None else number(value) for value in row.ratios),
                )
                for row in self.rows(point)
            )
            if rows:
                ratios = (f"x {baseline.name}" for baseline in self.baselines)
                yield Table(point.title, ("", "rounds", *point.unit.headers, *ratios), rows)

    def figures(self) -> dict[str, Any]:
        """For JSON: one entry for every contender at every point, measured or not."""
        return {"notes": self.notes, "failures": self.failures, "results": list(self._entries())}

    def _entries(self) -> Iterator[dict[str, Any]]:
        for point in self.points():
            place = {"mode": point.mode, **dict(point.facts)}
            for row in self.rows(point):
                yield {
                    **place,
                    "contender": row.contender,
                    "unit": point.unit.work,
                    "summary": asdict(row.summary),
                    **{baseline.key: value for baseline, value in zip(self.baselines, row.ratios, strict=True)},
                    "samples": [asdict(sample) for sample in self.samples[point][row.contender]],
                }
            for name, reason in self.reasons.get(point, {}).items():
                yield {**place, "contender": name, "not_measured": reason}
        for name, reason in self.absent.items():
            yield {"contender": name, "not_measured": reason}

    def remarks(self) -> list[str]:
        """What a reader of the tables must know: the notes, and why contenders are missing there."""
        missing = {f"{name}: {reason}": None for of_point in self.reasons.values() for name, reason in of_point.items()}
        return [*self.notes, *(f"{name}: {reason}" for name, reason in self.absent.items()), *missing]

    def panels(self) -> list[Panel]:
        """The diagrams: throughput over the points of each."""
        panels: dict[str, dict[str, list[PlotPoint]]] = {}
        units: dict[str, str] = {}
        for point in self.points():
            if point.panel is None or not isinstance(point.unit, Throughput):
                continue
            units[point.panel] = point.unit.name
            lines = panels.setdefault(point.panel, {})
            for row in self.rows(point):
                name = row.contender
                for baseline, value in zip(self.baselines, row.ratios, strict=True):
                    if row.contender in baseline.contenders and len(baseline.contenders) > 1:
                        name = baseline.name if value == 1 else ""
                if name:
                    size, rate = point.unit.size, row.summary.rate
                    place = (point.x, rate.median / size, rate.lower / size, rate.upper / size)
                    lines.setdefault(name, []).append(place)
        return [Panel(title, "page", units[title], lines) for title, lines in panels.items()]

    def finish(
        self,
        arguments: argparse.Namespace,
        name: str,
        title: str,
        machine: Mapping[str, Any],
        settings: Any,
        method: str,
        hidden: Mapping[Path, str] | None,
        started: float,
    ) -> int:
        """Print and write the report. Return the exit code: 1 when a contender failed or nothing was measured.

        ``settings`` is a dataclass, whose fields ``method`` names; ``started`` on the monotonic clock.
        """
        facts = asdict(settings)
        figures = {"settings": facts, **self.figures()}
        tables, panels = list(self.tables()), self.panels()
        report = Report(name, title, machine, figures, tables, panels, method.format(**facts), self.remarks())
        report.show()
        report.write(arguments, hidden)
        for absent, reason in self.absent.items():
            print(f"not measured: {absent}: {reason}")
        print(f"\n{time.monotonic() - started:.0f} s")
        for failure in self.failures:
            print(f"FAILED: {failure}", file=sys.stderr)
        return 1 if self.failures or not self.samples else 0


@dataclass(frozen=True, slots=True)
class Turns:
    """How contenders take turns: so many rounds, or those that ``clock`` has time for."""

    rounds: int
    warm_ups: int
    clock: Clock
    results: Results

    def take(self, title: str, points: Mapping[str, Point], able: Mapping[str, Callable[[], Measured]]) -> None:
        """Measure each of ``able`` once a round; a mode's samples go to its point. One that fails drops out."""
        self.clock.begin_point()
        failed: set[str] = set()
        total, shown = self.warm_ups + self.rounds, 0
        for round_number, name, counts in interleaved(list(able), self.rounds, self.warm_ups):
            if self.clock.run_over or (self.clock.over and round_number not in (1, shown, self.warm_ups + 1)):
                # One round that counts is worth more than a share that is kept to.
                whole = shown - 1 if round_number == shown else shown
                self._end_early(title, points, able.keys() - failed, max(0, whole - self.warm_ups))
                break
            if round_number != shown:
                shown = round_number
                print(f"  {title}: round {shown} of {total}{'' if counts else ' (warm-up)'}", flush=True)
            if name in failed:
                continue
            try:
                measured = able[name]()
            except (BenchmarkError, OSError) as error:
                failed.add(name)
                self.results.failures.append(f"{title}: {name}: {error}")
                for point in points.values():
                    self.results.leave_out(point, name, f"failed: {error}")
                continue
            for note in sorted(measured.notes):
                self.results.note(f"{title.partition(',')[0]}: {note}")
            for mode, sample in measured.samples.items():
                if counts:
                    self.results.add(points[mode], name, sample)

    def _end_early(self, title: str, points: Mapping[str, Point], names: set[str], rounds: int) -> None:
        """Say what is not measured for want of time."""
        results, what, missing = self.results, title.partition(",")[0], set()
        for point in points.values():
            for name in names:
                if not results.samples.get(point, {}).get(name) and name not in results.reasons.get(point, {}):
                    results.reasons.setdefault(point, {})[name] = "no time left"
                    missing.add(name)
        if missing == names:
            results.note(f"{what}: not measured: no time left")
            return
        results.note(f"{what}: {rounds} of {self.rounds} rounds for want of time")
        if missing:
            results.note(f"{what}: not measured for want of time: {', '.join(sorted(missing))}")

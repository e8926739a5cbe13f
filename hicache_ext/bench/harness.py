"""What every benchmark shares: interleaved rounds, statistics, tables, JSON and plots.

A benchmark measures contenders in turns, so that a machine that becomes slower meanwhile makes all of them slower: each
round every contender once, the order rotated by one from round to round, the first round(s) thrown away.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext.runtime.file_systems import file_system_of

_DELETE_ATTEMPTS = 50


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
class Spread:
    """A median with the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        lower, median, upper = (float(value) for value in np.percentile(values, (25, 50, 75)))
        return cls(median, lower, upper)


@dataclass(frozen=True, slots=True)
class Summary:
    """Several rounds of one contender in one mode."""

    rounds: int
    rate: Spread
    """Work per second, over the rounds."""
    cpu_per_work: Spread
    """CPU seconds per unit of work, over the rounds."""
    call_p50: float
    call_p99: float
    """Seconds of a call, over all calls of all rounds."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Summary:
        p50, p99 = (float(value) for value in np.percentile([s for sample in samples for s in sample.calls], (50, 99)))
        return cls(
            rounds=len(samples),
            rate=Spread.of([sample.rate for sample in samples]),
            cpu_per_work=Spread.of([sample.cpu_seconds / sample.work for sample in samples]),
            call_p50=p50,
            call_p99=p99,
        )


def ratio(summary: Summary, base: Summary) -> float:
    """How many times as fast: above 1 is faster than ``base``. The ratio of the medians the table prints."""
    return summary.rate.median / base.rate.median


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """SIGTERM ends the run like Ctrl-C does, so that neither servers nor gigabytes of test pages are left behind."""

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


# -- the place of a run ------------------------------------------------------------------------------------------------


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """A new empty directory inside ``parent``, deleted at the end: no run finds what another has stored.

    Absolute, since the path of a tier has to be.
    """
    path = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=parent)).absolute()
    try:
        yield path
    finally:
        _delete(path)


def _delete(directory: Path) -> None:
    """Delete a directory in which an interrupted contender's thread may still be busy for a moment."""
    for _ in range(_DELETE_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.2)
    print(f"{directory} could not be deleted: please do", file=sys.stderr)


def machine_facts(directory: Path, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a reader must know to judge the figures; no names and no paths of the machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": file_system_of(directory).type,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line(words: Sequence[str] | None = None, hidden: Mapping[Path, str] | None = None) -> str:
    """The command line of this process; each path in ``hidden`` replaced by its word, for what is published."""
    program, *given = sys.argv if words is None else words
    replaced = [Path(program).name]
    for word in given:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        replaced.append(option + equals + (hidden or {}).get(Path(value), value))
    return shlex.join(replaced)


# -- what comes out ----------------------------------------------------------------------------------------------------


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


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: for each contender (x, y, lower y, upper y) by point."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[str, float, float, float]]]


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(path: Path, panels: Sequence[Panel]) -> None:
    """Draw ``panels`` into one PNG, a colour per contender; the x values are names, in the order they come."""
    # Not import statements: the type checker must accept them with and without the package.
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False)
    contenders = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: f"C{index % 10}" for index, name in enumerate(contenders)}
    for panel, axis in zip(panels, axes.flat, strict=False):
        for name, points in panel.lines.items():
            middle = [point[1] for point in points]
            errors = [[y - low for _, y, low, _ in points], [high - y for _, y, _, high in points]]
            axis.errorbar(
                [x for x, *_ in points], middle, yerr=errors, marker="o", capsize=2, label=name, color=colours[name]
            )
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0, None))
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=min(5, len(handles) or 1))
    figure.tight_layout(rect=(0, 0.06 if rows > 1 else 0.12, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

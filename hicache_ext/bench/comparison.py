"""Contenders that do the same thing in turns: what is measured of them, and the tables, figures and diagrams of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_ext.bench.harness import Clock, Sample, Summary, interleaved, ratio
from hicache_ext.bench.report import Panel, PlotPoint, Table, number
from hicache_ext.errors import BenchmarkError


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
    """One contender at one point; a ratio for each baseline, None where there is nothing to compare with."""

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
            Row(name, summary, tuple(ratio(summary, base) if base else None for base in bases))
            for name, summary in summaries.items()
        ]

    def tables(self) -> Iterator[Table]:
        for point in self.points():
            if rows := self.rows(point):
                yield Table(
                    point.title,
                    ("", "rounds", *point.unit.headers, *(f"x {baseline.name}" for baseline in self.baselines)),
                    tuple((r.contender, str(r.summary.rounds), *point.unit.cells(r.summary), *_cells(r)) for r in rows),
                )

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

    def print_end(self, seconds: float) -> int:
        """The last words on the terminal, and the exit code: 1 when a contender failed or nothing was measured."""
        for name, reason in self.absent.items():
            print(f"not measured: {name}: {reason}")
        print(f"\n{seconds:.0f} s")
        for failure in self.failures:
            print(f"FAILED: {failure}", file=sys.stderr)
        return 1 if self.failures or not self.samples else 0


def _cells(row: Row) -> tuple[str, ...]:
    return tuple("-" if value is None else number(value) for value in row.ratios)


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

"""What the pool benchmark found: ratios, tables, JSON, markdown, diagrams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_ext.bench.harness import Panel, Sample, Summary, Table, number, ratio
from hicache_ext.config.units import format_size

_HEADERS = ("", "rounds", "MB/s", "[quartiles]", "CPU s/GB", "p50 ms", "p99 ms", "x own client")

_METHOD = """\
Each tier against its engine's own client in the same run: the same pages, between host memory of this process and a
server that is another process, over loopback. Rounds are interleaved, {warm_ups} warm-up round thrown away; the
column says how many were measured, of {rounds} that were asked for: medians, quartiles in brackets. A batch of
{batch} pages is one call; with several threads each makes its own calls at the same time. What was read is compared
byte for byte outside the timed part. The engines' own clients do without header and checksum, and without the copy
into host memory where they receive into buffers of their own; redis-py sends from memoryviews, without a copy. Bare
sockets send the bytes of the requests and look at nothing, on as many connections as our tier: what the server itself
can do. Raw Mooncake through memory of its own moves a page as one buffer and copies it once, as our tier does. Ratios
are to neither. CPU is this process's, not the server's. MB are 10^6 bytes of payload. The ratio is to the best of the
engine's own clients at that point; above 1 is faster. Client and server share the machine's CPUs.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: one engine, one direction, pages of one size, some client threads."""

    engine: str
    mode: str
    payload: int
    threads: int

    @property
    def title(self) -> str:
        plural = "s" if self.threads > 1 else ""
        return f"{self.engine}, {self.mode}: pages of {format_size(self.payload)}, {self.threads} thread{plural}"


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one point; ``to_own`` is its ratio to the best of the engine's own clients."""

    contender: str
    summary: Summary
    to_own: float | None


@dataclass(slots=True)
class Results:
    """Samples by point and contender, and why others are missing."""

    ours: frozenset[str]
    floors: frozenset[str] = frozenset()
    samples: dict[Point, dict[str, list[Sample]]] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    """(engine, contender) -> why it has no figures; the contender is "" for a whole engine."""
    failures: list[str] = field(default_factory=list)
    shortened: list[str] = field(default_factory=list)
    """Points with fewer rounds than asked for, and why."""

    def add(self, point: Point, contender: str, sample: Sample) -> None:
        self.samples.setdefault(point, {}).setdefault(contender, []).append(sample)

    def leave_out(self, engine: str, contender: str, reason: str) -> None:
        """The contender has no figure, also where it had some already."""
        self.reasons[engine, contender] = reason
        for point, taken in self.samples.items():
            if point.engine == engine:
                taken.pop(contender, None)

    def rows(self, point: Point) -> list[Row]:
        summaries = {name: Summary.of(taken) for name, taken in self.samples[point].items() if taken}
        own = [summary for name, summary in summaries.items() if name not in self.ours | self.floors]
        base = max(own, key=lambda summary: summary.rate.median, default=None)
        return [Row(name, summary, ratio(summary, base) if base else None) for name, summary in summaries.items()]


def tables(results: Results) -> Iterator[Table]:
    for point in results.samples:
        if rows := results.rows(point):
            yield Table(point.title, _HEADERS, tuple(_cells(row) for row in rows))


def _cells(row: Row) -> tuple[str, ...]:
    rate = row.summary.rate
    return (
        row.contender,
        str(row.summary.rounds),
        number(rate.median / 1e6),
        f"[{number(rate.lower / 1e6)} {number(rate.upper / 1e6)}]",
        number(row.summary.cpu_per_work.median * 1e9),
        number(row.summary.call_p50 * 1e3),
        number(row.summary.call_p99 * 1e3),
        "-" if row.to_own is None else number(row.to_own),
    )


def entries(results: Results) -> Iterator[dict[str, Any]]:
    """For JSON: one entry for every contender at every point, then those that have none."""
    for point in results.samples:
        place = asdict(point)
        for row in results.rows(point):
            yield {
                **place,
                "contender": row.contender,
                "summary": asdict(row.summary),
                "ratio_to_own_client": row.to_own,
                "samples": [asdict(sample) for sample in results.samples[point][row.contender]],
            }
    for (engine, contender), reason in results.reasons.items():
        yield {"engine": engine, "contender": contender or None, "not_measured": reason}


def absent(results: Results) -> list[str]:
    """Why engines and contenders are missing."""
    return [f"{engine}{', ' + name if name else ''}: {reason}" for (engine, name), reason in results.reasons.items()]


def markdown(document: Mapping[str, Any], results: Results, command: str) -> str:
    """A page for docs/benchmarks; ``command`` is the command line without paths."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    lines = [
        "# Pool benchmark",
        "",
        f"{document['date'][:10]}; {machine['cpus']} CPUs ({machine['cpu_model']}), {machine['memory_bytes'] >> 30} GiB"
        f" of memory, kernel {machine['kernel']}, Python {machine['python']}; {versions}.",
        "",
        f"    {command}",
        "",
        _METHOD.format(**document["settings"]),
        *(f"- {reason}" for reason in [*absent(results), *results.shortened]),
        "",
        *(f"{table.markdown()}\n" for table in tables(results)),
    ]
    return "\n".join(lines)


def panels(results: Results) -> list[Panel]:
    """A diagram per engine, direction and number of threads: MB/s over page sizes."""
    lines: dict[str, dict[str, list[tuple[str, float, float, float]]]] = {}
    for point in results.samples:
        for row in results.rows(point):
            rate = row.summary.rate
            place = (format_size(point.payload), rate.median / 1e6, rate.lower / 1e6, rate.upper / 1e6)
            title = f"{point.engine}: {point.mode}, {point.threads} thread(s)"
            lines.setdefault(title, {}).setdefault(row.contender, []).append(place)
    return [Panel(title, "page", "MB/s", of_contender) for title, of_contender in lines.items()]

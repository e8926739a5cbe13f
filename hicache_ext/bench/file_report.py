"""What the file benchmark found: ratios, tables, JSON, markdown, diagrams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_ext.bench.harness import Panel, Sample, Summary, Table, number, ratio
from hicache_ext.config.units import format_size

HICACHE_FILE = "SGLang HiCacheFile"
"""The contender that the others are compared with."""
TRANSFER_MODES = ("write", "overwrite", "read-warm", "read-cold", "mixed")
EXISTS_CASES = ("exists, all", "exists, half", "exists, first missing")
MODES = (*TRANSFER_MODES, "exists")

_TITLES = {
    "write": "write (first pass)",
    "overwrite": "write at capacity (eviction running)",
    "read-warm": "read, page cache warm",
    "read-cold": "read, page cache dropped",
    "mixed": "read and write at once (p50/p99: the reads)",
}
_MEASURED = ("", "rounds")
_TRANSFER_HEADERS = (*_MEASURED, "GB/s", "[quartiles]", "CPU s/GB", "p50 ms", "p99 ms", "x HiCacheFile", "x raw limit")
_EXISTS_HEADERS = (*_MEASURED, "ms", "[quartiles]", "us CPU/key", "x HiCacheFile", "x os.stat")

_METHOD = """\
Every contender moves the same pages between the same SGLang host pool and the same file system, in a directory of its
own that is deleted afterwards. Rounds are interleaved, {warm_ups} warm-up round thrown away; the column says how many
were measured, of {rounds} that were asked for: medians, quartiles in brackets. A batch is one call, as SGLang's
controller makes it; p50 and p99 are of a batch of {batch} pages (fewer where a note says so). What was read is
compared byte for byte outside the timed part. Writes end in the page cache, for every contender; dirty pages are
written back between the modes. CPU is this process's. Which pages were read the slab layout writes into its index in
pauses, after the call: that is in no figure of a read. At capacity, half of the bytes written fit. The raw limit is
the best of preadv/pwritev with 1, 2 and 4 threads over one preallocated file: no envelope, no checksum, no index.
"Raw and checksum" makes and compares our checksums besides, and is what is left to anything in Python that checks
what it returns; "raw, O_DIRECT" goes past the page cache, without the kernel's reading ahead. Neither counts as the
raw limit. A first pass also pays for the page cache's first touch of its memory, which in a virtual machine can cost
more than all the rest. GB are 10^9 bytes of payload. Ratios above 1 are faster.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: a mode with pages of one kind."""

    mode: str
    geometry: str
    payload: int
    """Bytes of a page."""

    @property
    def is_exists(self) -> bool:
        return self.mode in EXISTS_CASES

    @property
    def title(self) -> str:
        if self.is_exists:
            return f"{self.mode}: ms for the whole chain"
        return f"{_TITLES[self.mode]}: {self.geometry.upper()}, pages of {format_size(self.payload)}"

    def place(self) -> tuple[bool, str, int, int]:
        """Where its table stands among the others."""
        return self.is_exists, self.geometry, [*TRANSFER_MODES, *EXISTS_CASES].index(self.mode), self.payload


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one point, with its ratios where there is something to compare with."""

    contender: str
    summary: Summary
    to_sglang: float | None
    to_raw: float | None


@dataclass(slots=True)
class Results:
    """Samples by point and contender, and why others are missing."""

    contenders: tuple[str, ...]
    """In the order of the tables."""
    raw: frozenset[str]
    """Those whose fastest is the raw limit."""
    samples: dict[Point, dict[str, list[Sample]]] = field(default_factory=dict)
    reasons: dict[Point, dict[str, str]] = field(default_factory=dict)
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
        return sorted(dict.fromkeys([*self.samples, *self.reasons]), key=Point.place)

    def rows(self, point: Point) -> list[Row]:
        """Summaries and ratios of one point."""
        taken = self.samples.get(point, {})
        summaries = {name: Summary.of(taken[name]) for name in self.contenders if taken.get(name)}
        attempts = [summary for name, summary in summaries.items() if name in self.raw]
        limit = max(attempts, key=lambda summary: summary.rate.median, default=None)
        base = summaries.get(HICACHE_FILE)
        return [
            Row(name, summary, ratio(summary, base) if base else None, ratio(summary, limit) if limit else None)
            for name, summary in summaries.items()
        ]


def tables(results: Results) -> Iterator[Table]:
    for point in results.points():
        rows = results.rows(point)
        if not rows:
            continue
        if point.is_exists:
            sample = results.samples[point][rows[0].contender][0]
            chain = sample.work // len(sample.calls)
            yield Table(point.title, _EXISTS_HEADERS, tuple(_exists_cells(row, chain) for row in rows))
        else:
            yield Table(point.title, _TRANSFER_HEADERS, tuple(_transfer_cells(row) for row in rows))


def _transfer_cells(row: Row) -> tuple[str, ...]:
    rate = row.summary.rate
    return (
        row.contender,
        str(row.summary.rounds),
        number(rate.median / 1e9),
        f"[{number(rate.lower / 1e9)} {number(rate.upper / 1e9)}]",
        number(row.summary.cpu_per_work.median * 1e9),
        number(row.summary.call_p50 * 1e3),
        number(row.summary.call_p99 * 1e3),
        *_ratio_cells(row),
    )


def _exists_cells(row: Row, chain: int) -> tuple[str, ...]:
    rate = row.summary.rate
    return (
        row.contender,
        str(row.summary.rounds),
        number(chain / rate.median * 1e3),
        f"[{number(chain / rate.upper * 1e3)} {number(chain / rate.lower * 1e3)}]",
        number(row.summary.cpu_per_work.median * 1e6),
        *_ratio_cells(row),
    )


def _ratio_cells(row: Row) -> tuple[str, str]:
    to_sglang, to_raw = ("-" if value is None else number(value) for value in (row.to_sglang, row.to_raw))
    return to_sglang, to_raw


def entries(results: Results) -> Iterator[dict[str, Any]]:
    """For JSON: one entry for every contender at every point, measured or not."""
    for point in results.points():
        place = {"mode": point.mode, "geometry": point.geometry, "payload_bytes": point.payload}
        for row in results.rows(point):
            yield {
                **place,
                "contender": row.contender,
                "unit": "keys" if point.is_exists else "bytes",
                "summary": asdict(row.summary),
                "ratio_to_hicachefile": row.to_sglang,
                "ratio_to_raw_limit": row.to_raw,
                "samples": [asdict(sample) for sample in results.samples[point][row.contender]],
            }
        for name, reason in results.reasons.get(point, {}).items():
            yield {**place, "contender": name, "not_measured": reason}


def markdown(document: Mapping[str, Any], results: Results, command: str) -> str:
    """A page for docs/benchmarks; ``command`` is the command line without paths."""
    machine, settings = document["machine"], document["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    lines = [
        "# File tier benchmark",
        "",
        f"{document['date'][:10]}; {machine['cpus']} CPUs ({machine['cpu_model']}), {machine['memory_bytes'] >> 30} GiB"
        f" of memory, {machine['file_system']}, kernel {machine['kernel']}, Python {machine['python']}; {versions}.",
        "",
        f"    {command}",
        "",
        _METHOD.format(**settings),
        *(f"- {note}" for note in [*results.notes, *_absent(results)]),
        "",
        *(f"{table.markdown()}\n" for table in tables(results)),
    ]
    return "\n".join(lines)


def _absent(results: Results) -> list[str]:
    """Why contenders are missing in tables where a reader would look for them."""
    found: dict[str, None] = {}
    for point in results.points():
        for name, reason in results.reasons.get(point, {}).items():
            if name not in results.raw:
                found[f"{name}: {reason}"] = None
    return list(found)


def panels(results: Results) -> list[Panel]:
    """A diagram per geometry and mode: GB/s over page sizes; of the raw attempts only the best at each point."""
    lines: dict[tuple[str, str], dict[str, list[tuple[str, float, float, float]]]] = {}
    for point in results.points():
        if point.is_exists:
            continue
        for row in results.rows(point):
            name = "raw limit" if row.contender in results.raw else row.contender
            if name == "raw limit" and row.to_raw != 1:
                continue
            rate = row.summary.rate
            place = (format_size(point.payload), rate.median / 1e9, rate.lower / 1e9, rate.upper / 1e9)
            lines.setdefault((point.geometry, point.mode), {}).setdefault(name, []).append(place)
    return [
        Panel(f"{geometry.upper()}: {_TITLES[mode].partition(' (p50')[0]}", "page", "GB/s", of_contender)
        for (geometry, mode), of_contender in lines.items()
    ]

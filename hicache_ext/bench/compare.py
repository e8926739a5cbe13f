"""``hicache-ext bench compare``: two JSON files of the same benchmark, row by row, and what else differs.

A benchmark is added by a function in ``READERS``: from its document to rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import Quartiles, Table, number
from hicache_ext.config.values import format_size
from hicache_ext.errors import ConfigError
from hicache_ext.runtime.results import print_json
from hicache_ext.runtime.whole_file import json_in

_FIGURES = (
    *("benchmark", "notes", "failures", "results", "measurements", "pools", "rows", "shares", "shortened"),
    *("submit", "rates", "pipeline", "interference", "checked_cases"),
)
"""Keys of documents that are no facts of the machine and of the run."""
_ALIKE = ("workload", "flush")
"""Facts without which figures of two files do not mean the same."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A row of both files. ``ratio`` above 1: the second file is better; ``least`` and ``most`` by the quartiles."""

    row: str
    unit: str
    first: float
    second: float
    ratio: float
    least: float | None
    most: float | None
    within_spread: bool
    """Whether the quartiles of both overlap: the difference may be chance."""

    @classmethod
    def of(cls, name: str, first: Row, second: Row) -> Ratio:
        def ratio(one: float, other: float) -> float:
            above, below = (other, one) if first.more_is_better else (one, other)
            return above / below if below else math.inf

        bounds = [ratio(a, b) for a in first.quartiles for b in second.quartiles]
        least, most = min(bounds, default=None), max(bounds, default=None)
        within = least is not None and most is not None and least <= 1 <= most
        value = ratio(first.value, second.value)
        return cls(name, first.unit, first.value, second.value, value, least, most, within)

    def cells(self) -> tuple[str, ...]:
        spread = "" if self.least is None or self.most is None else f"[{number(self.least)} {number(self.most)}]"
        told = "within the spread" if self.within_spread else ""
        return self.row, number(self.first), number(self.second), self.unit, number(self.ratio), spread, told


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json", help="what a benchmark wrote with --json")
    parser.add_argument("second", type=Path, metavar="B.json", help="another run of it; ratios above 1: B is better")
    parser.add_argument(
        "--fail-below",
        type=_share,
        metavar="RATIO",
        help="end with 1 where a ratio is smaller, or a row of A is not in B",
    )
    parser.set_defaults(run=run)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0, such as 0.9")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Print what differs and the ratios; 0, or 1 as ``--fail-below`` says. Raises ConfigError for unlike files."""
    first, second = read_measured(arguments.first), read_measured(arguments.second)
    if first.benchmark != second.benchmark:
        problem = f"is of the benchmark {second.benchmark!r}, and {str(arguments.first)!r} of {first.benchmark!r}"
        raise ConfigError(str(arguments.second), problem, "two files of the same benchmark")
    differs = list(_differences(_facts(first), _facts(second)))
    for what, one, other in differs:
        if what.partition(".")[0] in _ALIKE:
            problem = f"was measured with another load: {what} is {other}, and {one} in {str(arguments.first)!r}"
            raise ConfigError(str(arguments.second), problem, "runs with the same load")
    if not first.rows.keys() & second.rows.keys():
        problem = f"has no row in common with {str(arguments.first)!r}"
        raise ConfigError(str(arguments.second), problem, "files in which the same was measured")
    ratios = [Ratio.of(name, row, second.rows[name]) for name, row in first.rows.items() if name in second.rows]
    only_first = [name for name in first.rows if name not in second.rows]
    only_second = [name for name in second.rows if name not in first.rows]
    least = arguments.fail_below
    below = [] if least is None else [ratio.row for ratio in ratios if ratio.ratio < least]
    failed = least is not None and bool(below or only_first)
    if arguments.json:
        print_json(
            {
                "benchmark": first.benchmark,
                "differs": [{"what": what, "first": one, "second": other} for what, one, other in differs],
                "rows": list(map(asdict, ratios)),
                "only_first": only_first,
                "only_second": only_second,
                "fail_below": least,
                "below": below,
                "failed": failed,
            }
        )
        return int(failed)
    print(f"A: {arguments.first}, {first.document.get('date', 'no date')}")
    print(f"B: {arguments.second}, {second.document.get('date', 'no date')}")
    for what, one, other in differs:
        print(f"  {what}: {one} | {other}")
    headers = ("", "A", "B", "", "B to A", "by quartiles", "")
    title = f"\n{first.benchmark}: ratios above 1: B is better"
    print(Table(title, headers, tuple(ratio.cells() for ratio in ratios)).text())
    for name in only_first:
        print(f"only in A: {name}")
    for name in only_second:
        print(f"only in B: {name}")
    for name in below:
        print(f"BELOW {least:g}: {name}")
    return int(failed)


def _facts(measured: Measured) -> Mapping[str, Any]:
    """Return what a document says besides its figures: machine, versions, date, settings."""
    return {key: value for key, value in measured.document.items() if key not in _FIGURES}


def _differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key path, value in the first, value in the second) of what is not equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            yield from _differences(one.get(key), other.get(key), f"{place}.{key}" if place else str(key))
    elif one != other:
        yield place, one, other


# -- files of benchmarks as rows ---------------------------------------------------------------------------------------

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one contender."""

    name: str
    value: float
    unit: str
    more_is_better: bool
    quartiles: tuple[float, ...] = ()
    """The lower and the upper one, where several measurements are behind it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A file of a benchmark: its rows by name, in their order, and the rest of the document."""

    benchmark: str
    document: Document
    rows: Mapping[str, Row]


def read_measured(file: Path) -> Measured:
    """Raises ConfigError where it is no file of a benchmark, or of one that is not known."""
    try:
        # A figure that is no number is left out, and no fault of the file.
        document = json_in(file.read_bytes(), number=float)
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(str(file), "is not JSON") from None
    name = document.get("benchmark") if isinstance(document, dict) else None
    if not isinstance(name, str) or name not in READERS:
        problem = "is no figures of a benchmark" if not isinstance(name, str) else f"is of the benchmark {name!r}"
        raise ConfigError(str(file), problem, f"what a benchmark wrote with --json: {', '.join(READERS)}")
    try:
        rows = list(READERS[name](document))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise ConfigError(str(file), f"its figures are not those of the benchmark {name!r}") from None
    by_name: dict[str, Row] = {}
    for row in rows:
        # What is not a number above nothing cannot be divided by.
        if math.isfinite(row.value) and row.value > 0:
            # With a number where several rows have this name (two arms of one name): none is lost.
            names = chain([row.name], (f"{row.name} ({n})" for n in count(2)))
            by_name[next(name for name in names if name not in by_name)] = row
    return Measured(name, document, by_name)


def _contenders(document: Document) -> Iterator[Row]:
    """``bench file`` and ``bench pool``: work per second, quartiles over rounds."""
    for entry in document["results"]:
        if "summary" not in entry:
            continue
        facts = [
            f"{value} threads" if key == "threads" else format_size(value) if key.startswith("payload") else str(value)
            for key, value in entry.items()
            if key not in ("contender", "unit", "summary", "samples") and not key.startswith("ratio_to")
        ]
        rate = entry["summary"]["rate"]
        yield Row(
            ", ".join([*facts, entry["contender"]]),
            float(rate["median"]),
            f"{entry.get('unit', 'bytes')}/s",
            True,
            (float(rate["lower"]), float(rate["upper"])),
        )


def _conversations(document: Document) -> Iterator[Row]:
    """``bench multiturn``: first tokens by turn, quartiles over users; output of the whole run."""
    for arm in document["results"]:
        for place, turn in enumerate(arm["turns"], 1):
            name = f"{arm['arm']}, first token of turn {place}"
            yield _spread(name, turn["time_to_first_token"], "s", more_is_better=False)
        yield Row(f"{arm['arm']}, output", float(arm["output_tokens_per_second"]), "tokens/s", more_is_better=True)


def _calibrations(document: Document) -> Iterator[Row]:
    """``bench kernels``: seconds a layer."""
    for measured in document["measurements"]:
        where = ", ".join(str(value) for key, value in measured.items() if key != "seconds")
        for engine, seconds in measured["seconds"].items():
            yield Row(f"{where}, {engine}", float(seconds), "s", more_is_better=False)


def _copies(document: Document) -> Iterator[Row]:
    """``benchmarks.bench_kernels``."""
    for cost in document["submit"]:
        case = cost["case"]
        name = f"submit, {case['layout']}, {case['layers']} layers of {case['pages']} pages, {cost['engine']}"
        yield Row(name, float(cost["layers_us"]), "us", more_is_better=False)
    for rate in document["rates"]:
        values = [str(value) for key, value in rate.items() if key not in ("bytes_per_second", "submit_seconds")]
        yield Row(f"copy, {', '.join(values)}", float(rate["bytes_per_second"]), "bytes/s", more_is_better=True)
    for found in document["pipeline"]:
        name = f"pipeline, {found['contender']}"
        yield Row(name, float(found["together_seconds"]), "s", more_is_better=False)


def _prefetches(document: Document) -> Iterator[Row]:
    """``benchmarks.bench_prefetch``: when the last request's pages were in, quartiles over rounds."""
    for pool in document["pools"]:
        for name, rounds in pool["rounds"].items():
            last = [max(played["done"]) for played in rounds]
            yield _spread(f"{pool['parallel']} at once, {name}, last request", last, "s", more_is_better=False)


def _doors(document: Document) -> Iterator[Row]:
    """``benchmarks/bench_linker.py``: first tokens and the pauses of another request, quartiles over rounds."""
    for what, found in (("first token", document["seconds"]), ("longest pause of another request", document["pauses"])):
        for arm, seconds in found.items():
            yield _spread(f"{arm}, {what}", seconds, "s", more_is_better=False)


def _bounces(document: Document) -> Iterator[Row]:
    """``benchmarks/bounce.py``."""
    for row in document["rows"]:
        for key, value in row.items():
            if key != "page":
                exists = key.startswith("exists")
                name = f"{row['page']}, {key.replace('_', ', ')}"
                yield Row(name, float(value), "us" if exists else "GB/s", more_is_better=not exists)


def _shares(document: Document) -> Iterator[Row]:
    """``benchmarks/replay_trace.py``: which share of the uses was a hit."""
    for title, policies in document["shares"].items():
        for policy, shares in policies.items():
            for capacity, share in zip(document["capacities"], shares, strict=True):
                yield Row(f"{title}, {capacity} blocks, {policy}", float(share), "of uses", more_is_better=True)


def _spread(name: str, values: Sequence[float], unit: str, *, more_is_better: bool) -> Row:
    quartiles = Quartiles.of(values)
    return Row(name, quartiles.median, unit, more_is_better, (quartiles.lower, quartiles.upper))


READERS: Mapping[str, Callable[[Document], Iterator[Row]]] = {
    "file": _contenders,
    "pool": _contenders,
    "multiturn": _conversations,
    "kernels": _calibrations,
    "copy engines": _copies,
    "prefetch": _prefetches,
    "linker": _doors,
    "bounce": _bounces,
    "replay": _shares,
}
"""By the key ``benchmark`` of the document."""

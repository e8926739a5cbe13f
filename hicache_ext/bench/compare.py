"""``hicache-ext bench compare``: two JSON files of the same benchmark, row by row, and what else differs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import Quartiles, Table, described, number
from hicache_ext.errors import ConfigError
from hicache_ext.runtime.commands import print_json
from hicache_ext.runtime.whole_file import json_in

_FIGURES = ("notes", "failures", "results", "measurements")
"""Keys of documents that are not facts of the machine or the run."""
_ALIKE = ("workload", "flush")
"""Facts without which figures of two files do not mean the same."""

Document = Mapping[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json", help="what a benchmark wrote with --json")
    parser.add_argument("second", type=Path, metavar="B.json", help="another run of it; ratios above 1: B is better")
    parser.add_argument(
        "--fail-below",
        type=_share,
        metavar="RATIO",
        help="end with 1 where a ratio is smaller, or a row of A is not in B",
    )


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
    (first, first_rows), (second, second_rows) = _read(arguments.first), _read(arguments.second)
    second_file, benchmark = str(arguments.second), first["benchmark"]
    if benchmark != second["benchmark"]:
        problem = f"is of the benchmark {second['benchmark']!r}, and {str(arguments.first)!r} of {benchmark!r}"
        raise ConfigError(second_file, problem, "two files of the same benchmark")
    differs = [found for found in _differences(first, second) if found[0].partition(".")[0] not in _FIGURES]
    for what, one, other in differs:
        if what.partition(".")[0] in _ALIKE:
            problem = f"was measured with another load: {what} is {other}, and {one} in {str(arguments.first)!r}"
            raise ConfigError(second_file, problem, "runs with the same load")
    if not first_rows.keys() & second_rows.keys():
        problem = f"has no row in common with {str(arguments.first)!r}"
        raise ConfigError(second_file, problem, "files in which the same was measured")
    rows = [_ratio(name, row, second_rows[name]) for name, row in first_rows.items() if name in second_rows]
    only_first = [name for name in first_rows if name not in second_rows]
    only_second = [name for name in second_rows if name not in first_rows]
    least = arguments.fail_below
    below = [] if least is None else [row["row"] for row in rows if row["ratio"] < least]
    failed = least is not None and bool(below or only_first)
    if arguments.json:
        print_json(
            {
                "benchmark": benchmark,
                "differs": [{"what": what, "first": one, "second": other} for what, one, other in differs],
                "rows": rows,
                "only_first": only_first,
                "only_second": only_second,
                "fail_below": least,
                "below": below,
                "failed": failed,
            }
        )
        return int(failed)
    print(f"A: {arguments.first}, {first.get('date', 'no date')}")
    print(f"B: {arguments.second}, {second.get('date', 'no date')}")
    for what, one, other in differs:
        print(f"  {what}: {one} | {other}")
    headers = ("", "A", "B", "", "B to A", "by quartiles", "")
    print(Table(f"\n{benchmark}: ratios above 1: B is better", headers, tuple(map(_cells, rows))).text())
    for label, names in (("only in A", only_first), ("only in B", only_second), (f"BELOW {least}", below)):
        for name in names:
            print(f"{label}: {name}")
    return int(failed)


def _differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key path, value in the first, value in the second) of what is not equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            yield from _differences(one.get(key), other.get(key), f"{place}.{key}" if place else str(key))
    elif one != other:
        yield place, one, other


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one contender."""

    name: str
    value: float
    unit: str
    more_is_better: bool
    quartiles: tuple[float, ...] = ()
    """Lower and upper quartile, if there were several measurements."""


def _ratio(name: str, first: Row, second: Row) -> dict[str, Any]:
    """Compare a row of both files. ``ratio`` above 1: the second file is better; ``least``, ``most`` by quartiles."""

    def ratio(one: float, other: float) -> float:
        above, below = (other, one) if first.more_is_better else (one, other)
        return above / below if below else math.inf

    bounds = [ratio(a, b) for a in first.quartiles for b in second.quartiles]
    return {
        "row": name,
        "unit": first.unit,
        "first": first.value,
        "second": second.value,
        "ratio": ratio(first.value, second.value),
        "least": min(bounds, default=None),
        "most": max(bounds, default=None),
        # The quartiles of both overlap: the difference may be chance.
        "within_spread": bool(bounds) and min(bounds) <= 1 <= max(bounds),
    }


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    spread = "" if row["least"] is None else f"[{number(row['least'])} {number(row['most'])}]"
    first, second, ratio = (number(row[key]) for key in ("first", "second", "ratio"))
    return row["row"], first, second, row["unit"], ratio, spread, "within the spread" if row["within_spread"] else ""


# -- files of benchmarks as rows ---------------------------------------------------------------------------------------


def _read(file: Path) -> tuple[Document, dict[str, Row]]:
    """Return the document and its rows by name. Raises ConfigError where it is not of a benchmark of ``READERS``."""
    try:
        # A figure that is no number is left out, and no fault of the file.
        document = json_in(file.read_bytes(), number=float)
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(str(file), "is not JSON") from None
    name = document.get("benchmark") if isinstance(document, dict) else None
    if not isinstance(name, str) or name not in READERS:
        problem = f"is of the benchmark {name!r}" if isinstance(name, str) else "is no figures of a benchmark"
        raise ConfigError(str(file), problem, f"what a benchmark wrote with --json: {', '.join(READERS)}")
    try:
        rows = list(READERS[name](document))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise ConfigError(str(file), f"its figures are not those of the benchmark {name!r}") from None
    # What is not a number above nothing cannot be divided by.
    return document, {row.name: row for row in rows if math.isfinite(row.value) and row.value > 0}


def _contenders(document: Document) -> Iterator[Row]:
    """Yield the work per second in ``bench file`` and ``bench pool``, quartiles over rounds."""
    for entry in document["results"]:
        if "summary" in entry:
            own = ("contender", "unit", "summary", "samples")
            facts = {key: value for key, value in entry.items() if key not in own and not key.startswith("ratio_to")}
            name, rate = ", ".join([*described(facts), entry["contender"]]), entry["summary"]["rate"]
            spread = float(rate["lower"]), float(rate["upper"])
            yield Row(name, float(rate["median"]), f"{entry.get('unit', 'bytes')}/s", True, spread)


def _conversations(document: Document) -> Iterator[Row]:
    """Yield the first tokens of ``bench multiturn`` by turn, quartiles over users, and the output of the whole run."""
    for arm in document["results"]:
        for place, turn in enumerate(arm["turns"], 1):
            first = Quartiles.of(turn["time_to_first_token"])
            name = f"{arm['arm']}, first token of turn {place}"
            yield Row(name, first.median, "s", False, (first.lower, first.upper))
        yield Row(f"{arm['arm']}, output", float(arm["output_tokens_per_second"]), "tokens/s", more_is_better=True)


def _calibrations(document: Document) -> Iterator[Row]:
    """Yield the seconds a layer of ``bench kernels``."""
    for measured in document["measurements"]:
        where = ", ".join(str(value) for key, value in measured.items() if key != "seconds")
        for engine, seconds in measured["seconds"].items():
            yield Row(f"{where}, {engine}", float(seconds), "s", more_is_better=False)


READERS: Mapping[str, Callable[[Document], Iterator[Row]]] = {
    "file": _contenders,
    "pool": _contenders,
    "multiturn": _conversations,
    "kernels": _calibrations,
}
"""Readers of rows, by the document's key ``benchmark``."""

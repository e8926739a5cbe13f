"""``hicache-ext bench compare``: two JSON files of the same benchmark, row by row, and what else differs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hicache_ext.bench.compare_rows import Measured, Row, read_measured
from hicache_ext.bench.report import Table, number
from hicache_ext.errors import ConfigError
from hicache_ext.runtime.results import print_json

_NOT_FACTS = ("benchmark", "notes", "failures", "results", "measurements", "pools", "rows", "shares", "shortened")
_ALSO_NOT_FACTS = ("submit", "rates", "pipeline", "interference", "checked_cases")
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

    @classmethod
    def of(cls, name: str, first: Row, second: Row) -> Ratio:
        least = most = None
        if None not in (first.lower, first.upper, second.lower, second.upper):
            bounds = [_ratio(a, b, first) for a in (first.lower, first.upper) for b in (second.lower, second.upper)]
            least, most = min(bounds), max(bounds)
        ratio = _ratio(first.value, second.value, first)
        return cls(name, first.unit, first.value, second.value, ratio, least, most)

    @property
    def within_spread(self) -> bool:
        """Whether the quartiles of both overlap: the difference may be chance."""
        return self.least is not None and self.most is not None and self.least <= 1 <= self.most

    def cells(self) -> tuple[str, ...]:
        spread = "" if self.least is None or self.most is None else f"[{number(self.least)} {number(self.most)}]"
        told = "within the spread" if self.within_spread else ""
        return self.row, number(self.first), number(self.second), self.unit, number(self.ratio), spread, told


def _ratio(first: float | None, second: float | None, row: Row) -> float:
    above, below = (second, first) if row.more_is_better else (first, second)
    return (above or 0.0) / below if below else math.inf


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
    _refuse_unlike(arguments, first, second)
    differs = list(_differences(_facts(first), _facts(second)))
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
                "rows": [{**asdict(ratio), "within_spread": ratio.within_spread} for ratio in ratios],
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


def _refuse_unlike(arguments: argparse.Namespace, first: Measured, second: Measured) -> None:
    """Raises ConfigError."""
    if first.benchmark != second.benchmark:
        problem = f"is of the benchmark {second.benchmark!r}, and {str(arguments.first)!r} of {first.benchmark!r}"
        raise ConfigError(str(arguments.second), problem, "two files of the same benchmark")
    for what, one, other in _differences(_facts(first), _facts(second)):
        if what.partition(".")[0] in _ALIKE:
            problem = f"was measured with another load: {what} is {other}, and {one} in {str(arguments.first)!r}"
            raise ConfigError(str(arguments.second), problem, "runs with the same load")
    if not first.rows.keys() & second.rows.keys():
        problem = f"has no row in common with {str(arguments.first)!r}"
        raise ConfigError(str(arguments.second), problem, "files in which the same was measured")


def _facts(measured: Measured) -> Mapping[str, Any]:
    """What is said beside the figures: machine, versions, date, settings."""
    facts = measured.document.items()
    return {key: value for key, value in facts if key not in (*_NOT_FACTS, *_ALSO_NOT_FACTS)}


def _differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key path, value in the first, value in the second) of what is not equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            yield from _differences(one.get(key), other.get(key), f"{place}.{key}" if place else str(key))
    elif one != other:
        yield place, one, other

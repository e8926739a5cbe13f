"""What a benchmark wrote as JSON, as rows that two files of the same benchmark can be compared by.

A benchmark is added by a function in ``READERS``: from its document to rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from hicache_ext.bench.harness import Quartiles
from hicache_ext.config.units import format_size
from hicache_ext.errors import ConfigError
from hicache_ext.runtime.whole_file import json_in

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one contender. Quartiles where several measurements are behind it."""

    name: str
    value: float
    unit: str
    more_is_better: bool
    lower: float | None = None
    upper: float | None = None


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
            by_name[_unused(row.name, by_name)] = row
    return Measured(name, document, by_name)


def _unused(name: str, taken: Collection[str]) -> str:
    """``name``, with a number where several rows have it (two arms of one name): none is lost."""
    return next(text for text in chain([name], (f"{name} ({n})" for n in count(2))) if text not in taken)


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
            more_is_better=True,
            lower=float(rate["lower"]),
            upper=float(rate["upper"]),
        )


def _conversations(document: Document) -> Iterator[Row]:
    """``bench multiturn``: first tokens by turn, quartiles over users; output of the whole run."""
    for arm in document["results"]:
        for number, turn in enumerate(arm["turns"], 1):
            name = f"{arm['arm']}, first token of turn {number}"
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
        name = f"copy, {_facts(rate, 'bytes_per_second', 'submit_seconds')}"
        yield Row(name, float(rate["bytes_per_second"]), "bytes/s", more_is_better=True)
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
    return Row(name, quartiles.median, unit, more_is_better, quartiles.lower, quartiles.upper)


def _facts(entry: Document, *without: str) -> str:
    return ", ".join(str(value) for key, value in entry.items() if key not in without)


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

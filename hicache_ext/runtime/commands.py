"""Code common to commands: printing the result, which is one JSON document under ``--json``; tables; orderly
termination by signals."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from hicache_ext.runtime.shown import shown_text

JSON_ON_STANDARD_OUTPUT = Path("-")
"""Value of a ``--json [FILE]`` option that was given no file."""

_STANDARD_OUTPUT: ContextVar[TextIO | None] = ContextVar("_STANDARD_OUTPUT", default=None)


@contextmanager
def standard_output_of(arguments: object) -> Iterator[None]:
    """If the parsed arguments request JSON on standard output, send all other output inside the block to standard
    error, except ``print_json`` of this thread."""
    if getattr(arguments, "json", None) not in (True, JSON_ON_STANDARD_OUTPUT):
        yield
        return
    token = _STANDARD_OUTPUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _STANDARD_OUTPUT.reset(token)


def print_json(value: object, *, in_one_line: bool = False) -> None:
    """Print a document on standard output. Numbers that JSON lacks (NaN, infinities) become null."""
    text = json.dumps(_with_numbers_of_json(value), indent=None if in_one_line else 1, allow_nan=False)
    print(text, file=_STANDARD_OUTPUT.get() or sys.stdout, flush=True)


def _with_numbers_of_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _with_numbers_of_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_numbers_of_json(item) for item in value]
    return value


_LONGEST_CELL = 1000


def aligned(rows: Sequence[tuple[str, ...]], justify: Callable[[str, int], str], between: str = "  ") -> list[str]:
    """Format rows of equal length as lines, each cell by ``shown_text``. The first cell of a row is left-aligned;
    ``justify`` aligns the others: ``str.ljust`` or ``str.rjust``."""
    rows = [tuple(shown_text(cell, _LONGEST_CELL) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [between.join([row[0].ljust(widths[0]), *map(justify, row[1:], widths[1:])]).rstrip() for row in rows]


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does. A signal that is ignored (nohup) stays ignored.

    Works in the main thread only; in others it changes nothing.
    """

    def stop(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

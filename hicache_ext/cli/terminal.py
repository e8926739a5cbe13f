"""What commands print: tables, spans of time, and progress on a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

_PROGRESS_INTERVAL = 0.1


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of equal length, the first one the heading, in aligned columns."""
    print("\n".join(aligned(rows, str.ljust)))


def print_json(value: object) -> None:
    """What ``--json`` prints."""
    print(json.dumps(value, indent=1))


def aligned(rows: Sequence[tuple[str, ...]], justify: Callable[[str, int], str]) -> list[str]:
    """Rows of equal length as lines; ``justify`` is ``str.ljust`` or ``str.rjust``."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(justify, row, widths)).rstrip() for row in rows]


def rough_span(seconds: float) -> str:
    """A span of time in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


class Progress:
    """A bar on standard error where that is a terminal; ``what`` says what is counted."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._shown = 0.0

    def show(self, done: int, total: int) -> None:
        """Draw it, at most some times a second."""
        if self._terminal and total and (done == total or time.monotonic() - self._shown >= _PROGRESS_INTERVAL):
            self._shown = time.monotonic()
            bar = "#" * (30 * done // total)
            print(f"\r[{bar:30}] {done}/{total} {self._what}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Go to the next line."""
        if self._shown:
            print(file=sys.stderr)

"""What commands print: examples and exit codes below their help, results, tables, spans of time, progress."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hicache_ext.runtime.commands import aligned, print_json

_WRONG_INPUT = "wrong usage, wrong configuration, or a package is missing"
Argument = Callable[[Any], object]
"""Adds itself, or several, to a parser or a group."""


def argument(*names: str, **facts: Any) -> Argument:
    """Declare what ``add_argument`` takes."""
    return lambda parser: parser.add_argument(*names, **facts)


def one_of(*arguments: Argument) -> Argument:
    """Declare arguments of which exactly one has to be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group(required=True)
        for each in arguments:
            each(group)

    return add


def command(
    *arguments: Argument, examples: Sequence[str], problem: str, nothing: str = ""
) -> Callable[[Callable[[argparse.Namespace], int]], Callable[[argparse.ArgumentParser], None]]:
    """Make of the function that runs a command, which returns the exit code, what completes its parser.

    ``examples`` are what may follow its name; ``problem`` says when it ends with 1 ("": never), ``nothing`` when it
    ends with 2, besides wrong input. ``--json`` is added where ``arguments`` have none.
    """
    wrong = ", ".join(filter(None, (_WRONG_INPUT, nothing)))
    codes = ["0 done", *([f"1 {problem}"] if problem else []), f"2 {wrong}", "130 interrupted"]

    def declared(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.ArgumentParser], None]:
        def configure(parser: argparse.ArgumentParser) -> None:
            for each in arguments:
                each(parser)
            if "--json" not in parser._option_string_actions:
                parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
            told = {"examples:": [f"{parser.prog} {words}".rstrip() for words in examples], "exit codes:": codes}
            parser.epilog = "\n\n".join("\n  ".join([title, *lines]) for title, lines in told.items())
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            parser.set_defaults(run=run)

        return configure

    return declared


def show(arguments: argparse.Namespace, document: object, lines: Iterable[str]) -> None:
    """Print the result of a command: ``document`` with ``--json``, else ``lines``."""
    if arguments.json:
        print_json(document)
    elif text := "\n".join(lines):
        print(text)


_PROGRESS_INTERVAL = 0.1


def fitted(rows: Sequence[tuple[str, ...]], justify: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Rows of equal length, the first one the heading, as lines of aligned columns.

    On a terminal that is too narrow for them the headings stand at the left, and rows one below the other.
    """
    lines = aligned(rows, justify)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    if max(map(len, lines)) <= width:
        return lines
    blocks = [aligned(list(zip(rows[0], row, strict=True)), str.ljust) for row in rows[1:]]
    return [line for block in blocks for line in (*block, "")][:-1]


def rough_span(seconds: float) -> str:
    """A span of time in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give what shows how many of ``what`` are done, of how many, on standard error where that is a terminal."""
    shown = 0.0

    def show(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and (done == total or time.monotonic() - shown >= _PROGRESS_INTERVAL):
            shown = time.monotonic()
            print(f"\r{done}/{total} {what}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print(file=sys.stderr)  # also after Ctrl-C

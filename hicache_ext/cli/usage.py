"""What every command has beside its own arguments: examples and exit codes below its help, and ``--json``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

from hicache_ext.runtime.results import print_json

_WRONG_INPUT = "wrong usage, wrong configuration, or a package is missing"


def describe(
    parser: argparse.ArgumentParser,
    *,
    examples: Sequence[str],
    run: Callable[[argparse.Namespace], int] | None = None,
    success: str = "done",
    problem: str = "it could not be done",
) -> None:
    """Complete the parser of a command. ``success`` and ``problem`` say when it ends with 0 and with 1 ("": never).

    ``run`` is left out where the parser has one; ``--json`` is added where it has none.
    """
    if run is not None:
        parser.set_defaults(run=run)
    if "--json" not in parser._option_string_actions:
        parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    codes = [f"0 {success}", *([f"1 {problem}"] if problem else []), f"2 {_WRONG_INPUT}", "130 interrupted"]
    lines = ["examples:", *(f"  {example}" for example in examples), "", "exit codes:", *(f"  {c}" for c in codes)]
    parser.epilog = "\n".join(lines)


def show(arguments: argparse.Namespace, document: object, lines: Iterable[str]) -> None:
    """Print the result of a command: ``document`` with ``--json``, else ``lines``."""
    if arguments.json:
        print_json(document)
    elif text := "\n".join(lines):
        print(text)

"""The files a benchmark leaves: the arguments that name them, and writing them at the end of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.bench.harness import Panel, can_plot, command_line, plot, write_json


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables, without paths of this machine")


def write_outputs(
    arguments: argparse.Namespace,
    document: Mapping[str, Any],
    markdown: Callable[[str], str],
    panels: Callable[[], Sequence[Panel]],
    hidden: Mapping[Path, str] | None = None,
) -> None:
    """Write what was asked for: ``document`` as JSON, the page that ``markdown`` makes around a command line in which
    paths are replaced (those of the files themselves, and those in ``hidden``), and the diagrams."""
    if arguments.json:
        write_json(arguments.json, document)
    if arguments.markdown:
        given = {arguments.json: "FILE.json", arguments.plot: "FILE.png", arguments.markdown: "FILE.md"}
        replaced = {**(hidden or {}), **{path: name for path, name in given.items() if path is not None}}
        arguments.markdown.write_text(markdown(command_line(hidden=replaced)))
    if arguments.plot:
        if can_plot():
            plot(arguments.plot, panels())
        else:
            print("no plot: matplotlib is not installed")


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value

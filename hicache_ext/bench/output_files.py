"""The files a benchmark leaves: the arguments that name them, and writing them at the end of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.bench.harness import Panel, command_line, plot, write_json
from hicache_ext.packages import need


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=_plot_file, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument(
        "--markdown", type=new_file, metavar="FILE", help="write the tables, without paths of this machine"
    )


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
        plot(arguments.plot, panels())


def new_file(text: str) -> Path:
    """An argument that names a file to write. Looked at before anything is measured, and not when it is over."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no directory {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    return path


def _plot_file(text: str) -> Path:
    need("matplotlib")
    return new_file(text)


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value

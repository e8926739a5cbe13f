"""What a benchmark says: tables on the terminal, all figures as JSON, a page of Markdown, diagrams."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.packages import installed_version, need
from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.runtime.results import JSON_ON_STANDARD_OUTPUT, print_json
from hicache_ext.runtime.shown import shown_words

# -- the arguments that name files to write ----------------------------------------------------------------------------


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=new_file,
        nargs="?",
        const=JSON_ON_STANDARD_OUTPUT,
        metavar="FILE",
        help="write everything measured; without FILE on standard output, and all else on standard error",
    )
    parser.add_argument("--plot", type=_plot_file, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument(
        "--markdown", type=new_file, metavar="FILE", help="write the tables, without paths of this machine"
    )


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


# -- tables and diagrams -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title; the first column is left-aligned, the others right."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        widths = [max(len(row[column]) for row in (self.headers, *self.rows)) for column in range(len(self.headers))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (self.headers, tuple("-" * width for width in widths), *self.rows)
        ]
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        rule = ("---", *("---:" for _ in self.headers[1:]))
        lines = ["| " + " | ".join(row) + " |" for row in (self.headers, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines])


def number(value: float) -> str:
    """Three digits that mean something."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


PlotPoint = tuple[str, float, float, float]
"""x, y, lower y, upper y."""


def plot_point(x: str, y: float) -> PlotPoint:
    """A point without scatter."""
    return x, y, y, y


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram, a line for each contender."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[PlotPoint]]


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


# Okabe and Ito's colours, which the colour-blind tell apart; the shapes help in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_DODGE = 0.05
"""How far neighbouring lines are moved apart, in steps of x, so that equal values do not hide each other."""


def plot(path: Path, panels: Sequence[Panel], title: str, caption: str) -> None:
    """Draw ``panels`` into one PNG, a colour per contender; the x values are names, in the order they come."""
    # Not import statements: the type checker must accept them with and without the package.
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    height = 3.8 * rows + 1.1
    figure, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, height), squeeze=False)
    contenders = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    for panel, axis in zip(panels, axes.flat, strict=False):
        _draw(axis, panel, contenders)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.suptitle(title, y=1 - 0.12 / height, fontsize=13)
    figure.text(0.5, 1 - 0.5 / height, caption, ha="center", va="center", fontsize=8, color="0.35")
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=min(5, len(handles) or 1))
    lines = -(-len(handles) // 5)
    figure.tight_layout(rect=(0, (0.12 + 0.25 * lines) / height, 1, 1 - 0.6 / height))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, panel: Panel, contenders: Sequence[str]) -> None:
    places = {x: number for number, x in enumerate(dict.fromkeys(x for line in panel.lines.values() for x, *_ in line))}
    for number_of_line, (name, points) in enumerate(panel.lines.items()):
        index = contenders.index(name)
        moved = (number_of_line - (len(panel.lines) - 1) / 2) * _DODGE
        axis.errorbar(
            [places[x] + moved for x, *_ in points],
            [point[1] for point in points],
            yerr=[[y - low for _, y, low, _ in points], [high - y for _, y, _, high in points]],
            marker=_MARKERS[index % len(_MARKERS)],
            capsize=2,
            label=name,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle="-" if index < len(_COLOURS) else "--",
        )
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0, None))
    axis.set_xticks(list(places.values()), list(places))
    axis.grid(alpha=0.3)


# -- the whole report --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """A run of the benchmark ``name``, whose page is called ``title``."""

    name: str
    title: str
    machine: Mapping[str, Any]
    """See ``machine_facts``."""
    figures: Mapping[str, Any]
    """What the JSON file holds besides the name, the date, the command line and the machine."""
    tables: Sequence[Table]
    panels: Sequence[Panel]
    method: str = ""
    """How it was measured, for the page."""
    notes: Sequence[str] = ()
    summary: str = ""
    """A sentence that stands first on the page."""

    def show(self) -> None:
        for table in self.tables:
            print(f"\n{table.text()}")

    def write(self, arguments: argparse.Namespace, hidden: Mapping[Path, str] | None = None) -> None:
        """Write what ``add_output_arguments`` asked for. The page names neither these files nor what is ``hidden``."""
        if arguments.json:
            document = {"benchmark": self.name, "date": today(), "command": command_line(), "machine": self.machine}
            document.update(self.figures)
            if arguments.json == JSON_ON_STANDARD_OUTPUT:
                print_json(document)
            else:
                write_json(arguments.json, document)
        if arguments.markdown:
            given = {arguments.json: "FILE.json", arguments.plot: "FILE.png", arguments.markdown: "FILE.md"}
            replaced = {**(hidden or {}), **{path: name for path, name in given.items() if path is not None}}
            picture = arguments.plot.name if arguments.plot else None
            arguments.markdown.write_text(self.markdown(command_line(hidden=replaced), picture))
        if arguments.plot:
            plot(arguments.plot, self.panels, self.title, where_and_when(self.machine))

    def markdown(self, command: str, picture: str | None = None) -> str:
        """A page for docs/benchmarks; ``command`` is the command line without paths; ``picture`` lies beside it."""
        versions = ", ".join(f"{name} {version}" for name, version in self.machine["packages"].items() if version)
        lines = [
            f"# {self.title}",
            "",
            *([self.summary, ""] if self.summary else ()),
            f"{where_and_when(self.machine)}, {self.machine['file_system']}, kernel {self.machine['kernel']}, Python"
            f" {self.machine['python']}; {versions}.",
            "",
            f"    {command}",
            "",
            *([f"![{self.title}]({picture})", ""] if picture else ()),
            *([self.method] if self.method else ()),
            *(f"- {note}" for note in self.notes),
            *([""] if self.method or self.notes else ()),
            *(f"{table.markdown()}\n" for table in self.tables),
        ]
        return "\n".join(lines)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine_facts(directory: Path, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a reader must know to judge the figures; no names and no paths of the machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": file_system_of(directory).type,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in packages},
    }


def where_and_when(machine: Mapping[str, Any]) -> str:
    """The line below a picture: today, and what ``machine_facts`` says of the machine."""
    memory = machine["memory_bytes"] >> 30
    return f"{today()[:10]}; {machine['cpus']} CPUs ({machine['cpu_model']}), {memory} GiB of memory"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_line(words: Sequence[str] | None = None, hidden: Mapping[Path, str] | None = None) -> str:
    """The command line of this process, without secrets; each path in ``hidden`` replaced by its word, for what is
    published."""
    program, *given = sys.argv if words is None else words
    replaced = [Path(program).name]
    for word in shown_words(given):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        replaced.append(option + equals + (hidden or {}).get(Path(value), value))
    return shlex.join(replaced)

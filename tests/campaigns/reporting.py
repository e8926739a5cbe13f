"""What all campaigns have in common: their arguments, what they find, and their report, printed and kept."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hicache_ext.bench.frame import Table, today

_MOST_PROBLEMS = 30


@dataclass
class Found:
    """What a campaign saw; ``problems`` is what must not be."""

    problems: Counter[str] = field(default_factory=Counter)
    stories: list[str] = field(default_factory=list)
    """Of each case with problems: what was done to it, and what was seen."""

    def note_case(self, kind: str, story: Sequence[str], problems: Counter[str], details: Iterable[str]) -> None:
        """Count the problems of one case of a ``kind``, and print its ``story``, if there are any."""
        self.problems.update({f"{kind}: {problem}": count for problem, count in problems.items()})
        if problems:
            lines = [*story, *(f"  seen: {count} x {problem}" for problem, count in problems.items())]
            lines += [f"    {line}" for text in details for line in text.splitlines()]
            self.stories.append("\n".join(lines))
            print(f"{self.stories[-1]}\n", flush=True)


_Found = TypeVar("_Found", bound=Found)


def arguments_of(document: str | None) -> argparse.ArgumentParser:
    """The arguments of any campaign, described by the first line of its ``document``."""
    parser = argparse.ArgumentParser(description=(document or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a file to write the report to, besides standard output")
    return parser


def conduct(
    options: argparse.Namespace,
    run: Callable[[], _Found],
    report: Callable[[_Found, argparse.Namespace, str], str],
) -> int:
    """Run a campaign, publish its report, and return its exit status. ``report`` gets how long it took and where."""
    begun = time.monotonic()
    found = run()
    place = f"{os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    publish(report(found, options, f"{time.monotonic() - begun:.0f} s on {place}, {today()[:10]}"), options.report)
    return 1 if found.problems else 0


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command that repeats a campaign."""
    words = [f"`python -m tests.campaigns.{name}"]
    for option, value in vars(options).items():
        if option != "report" and value is not None and value is not False:
            given = () if value is True else value if isinstance(value, list) else (value,)
            words += [f"--{option.replace('_', '-')}", *map(str, given)]
    return " ".join(words) + "`"


def report_of(title: str, what: str, rows: Iterable[tuple[str, object]], *texts: str, problems: Counter[str]) -> str:
    """Return a report: what was done, a table of what was counted, paragraphs, and the problems."""
    table = [f"| {name} | {value} |" for name, value in rows]
    paragraphs = [line for text in texts for line in (text, "")]
    lines = [f"# {title}", "", what, "", "| | |", "|---|---|", *table, "", *paragraphs, *problem_lines(problems)]
    return "\n".join(lines)


def publish(text: str, report: Path | None) -> None:
    """Print a report, and write it to the file ``report``, if there is one."""
    print(text)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text)


def problem_lines(problems: Counter[str]) -> list[str]:
    """What was seen that must not be, the most frequent first; the end of a report."""
    return [
        "Problems: none." if not problems else "Problems:",
        *(f"- {count} x {problem}" for problem, count in problems.most_common(_MOST_PROBLEMS)),
        "",
    ]


def markdown(table: Table) -> str:
    """Return the table as a report has it."""
    rule = ("---", *("---:" for _ in table.headers[1:]))
    lines = ["| " + " | ".join(row) + " |" for row in (table.headers, rule, *table.rows)]
    return "\n".join([f"### {table.title}", "", *lines])


def where_and_when(machine: Mapping[str, Any]) -> str:
    """Return the line below a picture: today, and what ``machine_facts`` says of the machine."""
    memory = machine["memory_bytes"] >> 30
    return f"{today()[:10]}; {machine['cpus']} CPUs ({machine['cpu_model']}), {memory} GiB of memory"

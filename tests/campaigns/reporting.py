"""The end of a campaign: its report, printed and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import Table, today

_MOST_PROBLEMS = 30


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

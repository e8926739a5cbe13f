"""The end of a campaign: its report, printed and kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

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

"""Lists as the repository shows them, for the site: Python-Markdown asks for more than GitHub does.

There a list needs an empty line before it, and what belongs to an item has to be indented by four columns for each
level; else a numbered list begins anew behind a block of code. Here both are put in, and nothing else is changed.
"""

from __future__ import annotations

import re

_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)])( +)(?=\S)")
_FENCE = re.compile(r" *(`{3,}|~{3,})")
_LEVEL = 4


def with_plain_lists(text: str) -> str:
    """``text`` with every list in a form that both understand."""
    lines: list[str] = []
    columns: list[int] = []
    """Of each item around the line: where its content begins."""
    fence = ""
    blank = True
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        if fence:
            lines.append(_moved(line, columns))
            found = _FENCE.match(line)
            if found and found[1].startswith(fence) and not line[found.end() :].strip("`~ "):
                fence = ""
            blank = False
            continue
        if not line.strip():
            lines.append("")
            blank = True
            continue
        item = _ITEM.match(line)
        number = item[2][:-1] if item else ""
        if item and number not in ("", "1") and not blank and indent >= (columns[-1] if columns else 0):
            # A number at the beginning of a line of prose; the site would begin a list inside of an item.
            line = line.replace(number, f"{number}\\", 1) if columns else line
            item = None
        in_list = bool(columns)
        # A line that goes on with a paragraph may stand further left than the item that it belongs to.
        if item or blank or line.lstrip().startswith(("#", "|")) or _FENCE.match(line):
            while columns and indent < columns[-1]:
                columns.pop()
        if item and indent < (columns[-1] if columns else 0) + _LEVEL:
            if not in_list and not blank and lines:
                lines.append("")
            lines.append(" " * (_LEVEL * len(columns)) + line.lstrip(" "))
            columns.append(item.end())
        else:
            lines.append(_moved(line, columns))
            if opened := _FENCE.match(line):
                fence = opened[1]
        blank = False
    return "\n".join(lines)


def _moved(line: str, columns: list[int]) -> str:
    """A line of the innermost item, indented as the site wants it."""
    if not columns or not line.strip():
        return line
    indent = len(line) - len(line.lstrip(" "))
    return " " * (_LEVEL * len(columns) + max(0, indent - columns[-1])) + line.lstrip(" ")

"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of equal length, the first one the heading, in aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows of equally many cells, the first one the heading, in columns as wide as they need to be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

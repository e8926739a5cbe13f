"""Tables in documents that tests make: a row is what a test has seen, and the committed table must say the same.

A table stands between ``<!-- made by NAME -->`` and ``<!-- end -->``; its rows are found by their first cells. With
``HICACHE_EXT_WRITE_TABLES=1`` in the environment the tests write what they have seen, instead of comparing it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

VARIABLE = "HICACHE_EXT_WRITE_TABLES"


DOCUMENTS = Path(__file__).parents[2] / "docs"


class OutcomeTable:
    """``keys``: how many cells of a row say what it is about."""

    def __init__(self, document: Path, name: str, keys: int = 1) -> None:
        self._document = document
        self._begin = f"<!-- made by {name} -->"
        self._keys = keys

    def saw(self, *cells: str) -> None:
        """Raises AssertionError where the document has no such row, or one that says something else."""
        row = f"| {' | '.join(cells)} |"
        about = f"| {' | '.join(cells[: self._keys])} |"
        with self._document.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before, begin, rest = file.read().partition(f"{self._begin}\n")
            assert begin, f"{self._document.name} has no line {self._begin}"
            table, _, after = rest.partition("<!-- end -->")
            rows = table.splitlines()
            if not os.environ.get(VARIABLE):
                known = [line for line in rows if line.startswith(about)]
                assert known == [row], f"{self._document.name} says {known}, seen was {row}; {VARIABLE}=1 writes it"
                return
            rows = [*rows[:2], *sorted([line for line in rows[2:] if not line.startswith(about)] + [row])]
            file.seek(0)
            file.write(f"{before}{begin}{chr(10).join(rows)}\n<!-- end -->{after}")
            file.truncate()

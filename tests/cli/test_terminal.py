"""Tables on terminals of any width."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from hicache_ext.cli.output import fitted, progress

ROWS = [("name", "pages", "bytes"), ("first", "1", "10 B"), ("second", "2", "20 B"), ("third", "3", "30 B")]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((columns, 24)))


def test_without_a_terminal_a_row_is_a_line_however_long() -> None:
    assert fitted([("a" * 500, "b"), ("c", "d")]) == ["a" * 500 + "  b", "c" + " " * 501 + "d"]


def test_a_table_that_fits_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, 22)
    assert fitted(ROWS)[1] == "first   1      10 B"


def test_many_rows_stand_one_below_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch, 14)
    lines = fitted(ROWS)
    assert lines[:4] == ["name   first", "pages  1", "bytes  10 B", ""]
    assert len(lines) == 11 and max(map(len, lines)) <= 14


@pytest.mark.parametrize("columns", [10, 20, 40, 120])
def test_progress_stays_in_one_line(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, columns)
    with progress("pages") as told:
        told(7, 7)
    line = capsys.readouterr().err.strip()
    assert line.endswith("7/7 pages") and len(line) <= columns

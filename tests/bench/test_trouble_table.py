"""The short form of ``python -m benchmarks.trouble``: three rows over the contenders that need no server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trouble.clients import LIMIT
from benchmarks.trouble.report import BEGIN, END, tables, write_report
from tests.rigs.loop_file_systems import missing_for
from tests.rigs.workers import missing_for_namespaces

ROOT = Path(__file__).parents[2]
ROWS = ("one bit flipped", "file cut", "another prompt's page in its place")
OURS = "ours, slabs"

pytestmark = pytest.mark.sglang


def measured(contenders: Sequence[str], rows: Sequence[str], figures: Path) -> Any:
    words = ["--quick", "--contenders", ";".join(contenders), "--rows", ";".join(rows)]
    command = [sys.executable, "-m", "benchmarks.trouble", *words, "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(figures.read_text())


def test_damaged_pages_are_never_served_by_us_and_the_table_says_what_others_do(tmp_path: Path) -> None:
    document = measured(("SGLang file", OURS), ROWS, tmp_path / "trouble.json")
    for row in ROWS:
        cells = document["results"][row][OURS]
        assert cells["asked"] == 16
        assert cells["wrong"] == cells["raised"] == 0, (row, cells)
        if row != "file cut":  # which takes along what lies behind it in the same file
            assert cells["lost"] == 0, (row, cells)
    theirs = document["results"]["one bit flipped"]["SGLang file"]
    assert theirs["wrong"] == 8, "SGLang's file backend has a checksum now: mend docs/trouble.md and README.md"
    report = tmp_path / "report.md"
    report.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_report(report, document)
    assert "**8 of 16 wrong**" in report.read_text() and "old" not in report.read_text()
    assert report.read_text().startswith("before\n") and report.read_text().endswith("after\n")


@pytest.mark.slow
@pytest.mark.thorough
def test_what_was_synced_survives_power_cuts_and_containers_share_one_bound(tmp_path: Path) -> None:
    if lacking := missing_for("ext4") or missing_for_namespaces():
        pytest.skip(f"missing: {lacking}")
    ours = (OURS, "ours, page files")
    results = measured(ours, ("power cut", "a second container"), tmp_path / "trouble.json")["results"]
    for name in ours:
        cut, container = results["power cut"][name], results["a second container"][name]
        assert (cut["wrong"], cut["lost"], cut["good"], cut["asked"]) == (0, 0, 128, 640), (name, cut)
        assert (container["wrong"], container["beyond"], container["raised"]) == (0, 0, 0), (name, container)


def test_a_cell_that_was_not_measured_says_why() -> None:
    machine = {"cpus": 1, "cpu_model": "x", "kernel": "6", "file_system": "ext4", "packages": {"sglang": "1"}}
    day = {"date": "2026-11-26T00:00:00"}
    results = {
        "pool frozen": {
            "SGLang mooncake": {**day, "wrong": 0, "asked": 8, "waited": LIMIT, "raised": 2, "note": "OSError"},
            "ours, S3": {"date": "2026-11-27T00:00:00", "not_run": "missing: s3rver"},
        }
    }
    shown = tables({"machine": machine, "results": results})
    assert shown.startswith("Measured 2026-11-26 to 2026-11-27 on 1 x x")
    row = next(line for line in shown.splitlines() if line.startswith("| pool frozen"))
    assert "0 wrong, raised 2 times, **waits for ever** (over 120 s)" in row
    assert "(missing: s3rver)" in row and "(not run)" in row

"""The report of the tier that slows: written to its end."""

from __future__ import annotations

import json
from pathlib import Path

from hicache_ext.bench.frame import machine_facts
from tests.campaigns.pull_or_recompute import ADAPTIVE, PULL, RECOMPUTE, Step, _report, _table


def test_the_report_has_its_table_and_its_figures(tmp_path: Path) -> None:
    names = (RECOMPUTE, PULL, ADAPTIVE)
    steps = [
        Step(share, share, dict.fromkeys(names, 1.0), {name: [1.0, 2.0, 3.0] for name in names}, [True, False, True])
        for share in (0.0, 1.0, 0.0)
    ]
    file = tmp_path / "report.md"
    _report(file, 7, _table(steps), steps, machine_facts(tmp_path, ("sglang", "torch")))
    assert "| adaptive / recompute |" in file.read_text()
    assert json.loads(file.with_suffix(".json").read_text())["steps"][1]["seconds"][PULL] == [1.0, 2.0, 3.0]

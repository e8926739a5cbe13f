"""The picture of the dashboard: every panel of its first rows has a place in it, whatever Prometheus answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.campaigns.dashboard_picture import Series, draw
from tests.watching.queries import panels


@pytest.mark.thorough
@pytest.mark.parametrize("values", [[0.0, 1.0], [math.nan, 1.0], [0.0], []])
def test_panels_are_drawn_with_values_with_gaps_and_without(values: list[float], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="missing: matplotlib")
    points = [(float(at), value) for at, value in enumerate(values)]
    states = [(at, 0.0 if math.isnan(value) else value) for at, value in points]
    shown = {
        panel["title"]: [Series("pool get", states if panel["type"] == "stat" else points)] if points else []
        for panel in panels()
    }
    draw(tmp_path / "dashboard.png", shown, "yesterday")
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")

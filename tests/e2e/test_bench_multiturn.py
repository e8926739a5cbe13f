"""``benchmarks.bench_multiturn --arm``: servers made for the run, their pages restored after each flush."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_multiturn import main

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_an_arm_that_the_benchmark_starts_restores_from_storage_and_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "storage").mkdir()
    words = ["--arm", "ours", "--model-path", str(tiny_model), "--users", "1", "--turns", "2", "--flush"]
    places = ["--directory", str(tmp_path / "storage"), "--logs", str(tmp_path), "--json", str(tmp_path / "r.json")]
    assert main([*words, *places, "--page-size", "16", "--", "--max-total-tokens", "4096"]) == 0
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert result["arm"] == "ours"
    assert all(cached["storage"] >= 256 for cached in result["turns"][1]["cached"])
    assert "max_total_num_tokens=4096" in (tmp_path / "ours.log").read_text()
    assert list((tmp_path / "storage").iterdir()) == []

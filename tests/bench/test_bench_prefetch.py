"""A small run of the prefetch benchmark: every byte is checked, and table and JSON come out."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.sglang]


def test_a_small_run_writes_everything(tmp_path, monkeypatch, capsys):
    from benchmarks import bench_prefetch

    report = tmp_path / "prefetch.json"
    small = ["--requests", "4", "--tokens", "320", "--rounds", "1", "--page-bytes", "8192", "--buffer", "1600000"]
    near = ["--latency", "2", "--tick", "2", "--parallel", "8"]
    monkeypatch.setattr(sys, "argv", ["bench_prefetch.py", *small, *near, "--json", str(report)])
    assert bench_prefetch.main() == 0
    assert capsys.readouterr().out.count("4 requests of 20 pages") == 1
    (pool,) = json.loads(report.read_text())["pools"]
    assert list(pool["rounds"]) == ["prefetch", "prefetch and promotion", "no prefetch", "HiCacheFile"]
    (played,) = pool["rounds"]["prefetch"]
    # Whatever was ahead of the read was used: nobody aborted.
    assert played["prefetch useful"] == played["prefetch fetched"] > 0
    assert 0 < pool["aborted"]["most_held"] <= pool["aborted"]["buffer"] == 200_000
    assert pool["aborted"]["held_after"] == 0

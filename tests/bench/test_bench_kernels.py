"""The kernel benchmark where there is no GPU: submit cost, the reduced check, and what it says about the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_kernels
from benchmarks.kernels.report import OUTSTANDING
from benchmarks.kernels.submit import LAYOUTS, SubmitCase, measure
from hicache_ext.bench import kernels
from hicache_ext.cli.main import main
from hicache_ext.kernels.calibration import Calibration, Measurement, read_calibration
from hicache_ext.kernels.engine import Direction


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_submits_every_run_of_every_layer(layout: str) -> None:
    case = SubmitCase(layout, layers=3, pages=8, page_size=4)
    runs = case.layers * 2 * case.pages
    descriptors = {cost.engine: cost.descriptors for cost in measure(case, rounds=2)}
    rows = case.page_size if layout == "page_first" else 1
    assert descriptors == {"batched_dma": runs * rows, "Python loop": runs * rows}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_measures_submission_and_says_that_the_rest_is_outstanding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "LAYOUTS", ("page_first_direct",))
    figures = tmp_path / "kernels.json"
    assert bench_kernels.main(["--quick", "--json", str(figures)]) == 0
    assert OUTSTANDING in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert found["gpu"] is None and found["rates"] == []
    assert found["checked_cases"]["triton (interpreted)"] == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_calibration_without_a_gpu_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--calibrate"]) == 1
    assert capsys.readouterr().err == "a calibration needs a CUDA device; this machine has none\n"


def test_what_was_measured_is_shown_written_and_kept_for_servers_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"sglang": 2e-4, "batched_dma": 1e-4}
    measured = Measurement(Direction.LOAD, "page_first_direct", 65536, 1 << 20, "cpu", seconds)
    found = Calibration("a GPU", "570", "today", (measured,))
    monkeypatch.setattr(kernels, "calibrate", lambda *_: found)
    kept, figures = tmp_path / "hicache_ext" / "kernels" / "a-gpu.json", tmp_path / "kernels.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "kernels", "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "1MiB in runs of 64KiB" in printed and "a GPU, driver 570" in printed
    assert json.loads(figures.read_text())["measurements"][0]["seconds"] == {"sglang": 2e-4, "batched_dma": 1e-4}
    assert not kept.exists()
    assert main(["bench", "kernels", "--calibrate"]) == 0
    assert read_calibration(kept).measurements == found.measurements
    (table,) = kernels._tables(found.measurements)
    assert table.headers == ("", "sglang", "batched_dma") and table.rows == (("1MiB in runs of 64KiB", "200", "100"),)

"""Which engine is chosen, and the calibration that decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_ext.errors import CalibrationError, CopyError
from hicache_ext.kernels.calibration import (
    Calibration,
    Measurement,
    calibration_file,
    read_calibration,
    write_calibration,
)
from hicache_ext.kernels.engine import CopyEngine, Direction, Operation, ReferenceEngine
from hicache_ext.kernels.geometry import page_tokens
from hicache_ext.kernels.selection import ENGINES, Selector
from hicache_ext.runtime.metrics import TierMetrics
from tests.kernels.stacks import plain_memory

SMALL = Measurement(Direction.LOAD, "page_first_direct", 4096, 1 << 20, "cpu", {})
LARGE = replace(SMALL, run_bytes=65536, bytes_per_layer=1 << 24)


def calibration(*measurements: Measurement) -> Calibration:
    return Calibration("GPU", "driver", "date", measurements)


FIGURES = calibration(
    replace(SMALL, seconds={"sglang": 10e-6, "triton": 5e-6, "batched_dma": 40e-6}),
    replace(LARGE, seconds={"sglang": 100e-6, "triton": 90e-6, "batched_dma": 50e-6}),
)


def test_the_fastest_of_the_nearest_measurement_is_chosen() -> None:
    assert FIGURES.fastest(SMALL, ENGINES) == "triton"
    assert FIGURES.fastest(replace(SMALL, run_bytes=6000), ENGINES) == "triton"
    assert FIGURES.fastest(replace(LARGE, run_bytes=48000), ENGINES) == "batched_dma"


def test_the_baseline_stays_where_nothing_is_clearly_faster() -> None:
    close = calibration(replace(SMALL, seconds={"sglang": 10e-6, "triton": 9.8e-6}))
    assert close.fastest(SMALL, ENGINES) == "sglang"


def test_the_fastest_is_one_of_the_engines_that_exist() -> None:
    """One was given up after others had calibrated with it."""
    former = calibration(replace(SMALL, seconds={"sglang": 10e-6, "triton": 5e-6, "rectangle_dma": 4e-6}))
    assert former.fastest(SMALL, ENGINES) == "triton"
    assert former.fastest(SMALL, ["batched_dma"]) == "sglang"


def test_nothing_is_concluded_from_figures_of_something_else_or_without_the_baseline() -> None:
    for other in (
        replace(SMALL, direction=Direction.BACK_UP),
        replace(SMALL, layout="page_first"),
        replace(SMALL, indices="device"),
    ):
        assert FIGURES.fastest(other, ENGINES) is None
    assert calibration(replace(SMALL, seconds={"triton": 1e-6})).fastest(SMALL, ENGINES) is None
    assert calibration().fastest(SMALL, ENGINES) is None


def test_a_calibration_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gpu.json"
    write_calibration(path, FIGURES)
    assert read_calibration(path) == FIGURES
    assert [entry.name for entry in path.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{}",
            "[]",
            '{"version": 2}',
            "[" * 200_000,
            '{"version": Infinity}',
            '{"version": 1, "measurements": 5}',
        ),
        '{"version": 1, "gpu": "x", "driver": "y", "date": "z", "measurements": [{}]}',
    ],
)
def test_a_file_that_is_no_calibration_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"gpu\.json is not a calibration: "):
        read_calibration(path)
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_calibration(tmp_path / "absent.json")


def test_impossible_seconds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    for value in (0.0, -1.0, float("nan"), float("inf")):
        write_calibration(path, calibration(replace(SMALL, seconds={"sglang": value})))
        with pytest.raises(CalibrationError):
            read_calibration(path)


def test_each_gpu_model_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_file("NVIDIA H200") == tmp_path / "hicache_ext" / "kernels" / "nvidia-h200.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration_file("../A 100!").parent == tmp_path / ".cache" / "hicache_ext" / "kernels"
    assert calibration_file("../A 100!").name == "a-100.json"


# -- choosing ----------------------------------------------------------------------------------------------------------


class Picky(ReferenceEngine):
    """An engine that refuses everything."""

    name = "triton"

    def refusal(self, operation: Operation) -> str | None:
        return "picky"


def operation() -> Operation:
    memory = plain_memory()
    return Operation(memory.stack, Direction.LOAD, page_tokens([1, 2], 4), page_tokens([3, 4], 4))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stack's device be a GPU, as far as the selection can see."""
    monkeypatch.setattr("hicache_ext.kernels.geometry.LayerStack.device", torch.device("cuda", 0))


def chosen(selector: Selector, load: Operation) -> tuple[str | None, str]:
    """The engine's name, and what was counted."""
    engine = selector.choose(load)
    (((_, counted), _),) = selector._metrics.snapshot().items()
    return engine and engine.name, counted


def selecting(makers: Mapping[str, Callable[[], CopyEngine]], **how: Any) -> Selector:
    return Selector(makers, metrics=TierMetrics("test"), **how)


def test_on_the_cpu_it_is_the_reference() -> None:
    assert chosen(selecting({"reference": ReferenceEngine}), operation()) == ("reference", "reference: cpu")


def test_on_a_gpu_it_is_sglangs_own_path_until_there_is_a_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    load = operation()
    here = Measurement.of(load, {})
    on_a_gpu(monkeypatch)
    makers = {"triton": ReferenceEngine}
    assert chosen(selecting(makers), load) == (None, "sglang: not_calibrated")
    faster = calibration(replace(here, seconds={"sglang": 2.0, "triton": 1.0}))
    assert chosen(selecting(makers, calibration=faster), load) == ("reference", "reference: calibrated")
    slower = calibration(replace(here, seconds={"sglang": 1.0, "triton": 2.0}))
    assert chosen(selecting(makers, calibration=slower), load) == (None, "sglang: calibrated")
    assert chosen(selecting(makers, calibration=FIGURES), load)[1].endswith(": calibrated")
    assert chosen(selecting(makers, calibration=calibration()), load) == (None, "sglang: not_measured")


def test_a_configured_engine_serves_what_it_can_and_sglangs_own_path_the_rest() -> None:
    assert chosen(selecting({"triton": Picky}, engine="triton"), operation()) == (None, "sglang: picky")
    assert chosen(selecting({"triton": Picky}, engine="sglang"), operation()) == (None, "sglang: configured")
    assert chosen(selecting({"triton": ReferenceEngine}, engine="triton"), operation())[0] is not None

    def missing() -> ReferenceEngine:
        raise CopyError("no driver")

    assert chosen(selecting({"triton": missing}, engine="triton"), operation()) == (None, "sglang: unavailable")

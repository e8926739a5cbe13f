"""What ``hicache-ext bench kernels`` runs: the benchmark of the copies, or the calibration that picks among them."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hicache_ext.bench import kernel_gpu
from hicache_ext.bench.harness import machine_facts, today
from hicache_ext.bench.kernel_calibrate import calibrate as measure_engines
from hicache_ext.bench.kernel_check import check_engines
from hicache_ext.bench.kernel_report import OUTSTANDING, KernelResults, markdown, panels, tables
from hicache_ext.bench.kernel_submit import LAYOUTS, SubmitCase, measure
from hicache_ext.bench.output_files import write_outputs
from hicache_ext.config import KernelsConfig
from hicache_ext.kernels.calibration import calibration_file, write_calibration

_PACKAGES = ("hicache-ext", "torch", "triton", "sglang", "numpy")


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured."""

    rounds: int
    repeats: int
    segments: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, *, quick: bool) -> Settings:
        if quick:
            return cls(rounds=5, repeats=2, segments=(4096, 65536), counts=(64, 1024))
        return cls(rounds=50, repeats=7, segments=kernel_gpu.SEGMENTS, counts=kernel_gpu.COUNTS)


def calibrate() -> int:
    """Measure which engine is fastest, and write it where servers look."""
    config = KernelsConfig().with_environment()
    calibration = measure_engines(config, lambda line: print(line, flush=True))
    path = config.calibration or calibration_file(calibration.gpu)
    write_calibration(path, calibration)
    print(f"{len(calibration.measurements)} measurements of {calibration.gpu} written to {path}")
    return 0


def measure_all(arguments: argparse.Namespace) -> int:
    """Measure, print, write."""
    settings = Settings.of(quick=arguments.quick)
    results = KernelResults()
    document: dict[str, Any] = {
        "benchmark": "kernels",
        "date": today(),
        "machine": machine_facts(Path("."), _PACKAGES),
        "gpu": kernel_gpu.gpu_facts() if torch.cuda.is_available() else None,
        "settings": {"rounds": settings.rounds, "repeats": settings.repeats},
    }
    _on_cpu(settings, results)
    if document["gpu"]:
        _on_gpu(settings, results)
    for table in tables(results):
        print(f"\n{table.text()}")
    if not document["gpu"]:
        print(f"\n{OUTSTANDING}")
    write_outputs(
        arguments,
        {**document, **results.entries()},
        lambda command: markdown(document, results, command),
        lambda: panels(results),
    )
    return 0


def _on_cpu(settings: Settings, results: KernelResults) -> None:
    for layout in LAYOUTS:
        _progress(f"CPU submit cost, {layout}")
        results.submits += measure(SubmitCase(layout), settings.rounds)
    _progress("every engine against the reference")
    results.checks = dict(check_engines())


def _on_gpu(settings: Settings, results: KernelResults) -> None:
    started = time.monotonic()
    _progress("rates")
    results.rates += kernel_gpu.rates(settings.segments, settings.counts, settings.repeats)
    _progress(f"work beside copies ({time.monotonic() - started:.0f} s so far)")
    results.interferences += kernel_gpu.interferences()
    _progress(f"pipeline ({time.monotonic() - started:.0f} s so far)")
    results.pipelines += kernel_gpu.pipelines()


def _progress(text: str) -> None:
    print(f"- {text}", flush=True)

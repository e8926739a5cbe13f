"""``hicache-ext bench kernels``: the copies between GPU and host memory, and the calibration that picks among them."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hicache_ext.bench import kernel_gpu
from hicache_ext.bench.harness import (
    BenchmarkError,
    can_plot,
    command_line,
    machine_facts,
    plot,
    today,
    write_json,
)
from hicache_ext.bench.kernel_check import check_engines
from hicache_ext.bench.kernel_report import OUTSTANDING, KernelResults, markdown, panels, tables
from hicache_ext.bench.kernel_submit import LAYOUTS, SubmitCase, measure
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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure for about a minute which engine is fastest on this GPU, and let the server use it",
    )
    parser.add_argument("--quick", action="store_true", help="a minute instead of 20: shows that it works, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables, without paths of this machine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, or the calibration; the exit code."""
    if arguments.plot and not can_plot():
        raise BenchmarkError("--plot needs matplotlib: pip install 'hicache-ext[bench]'")
    return _calibrate() if arguments.calibrate else _measure(arguments)


def _calibrate() -> int:
    from hicache_ext.bench.kernel_calibrate import calibrate

    config = KernelsConfig().with_environment()
    calibration = calibrate(config, lambda line: print(line, flush=True))
    path = config.calibration or calibration_file(calibration.gpu)
    write_calibration(path, calibration)
    print(f"{len(calibration.measurements)} measurements of {calibration.gpu} written to {path}")
    return 0


def _measure(arguments: argparse.Namespace) -> int:
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
    if arguments.json:
        write_json(arguments.json, {**document, **results.entries()})
    if arguments.plot:
        plot(arguments.plot, panels(results))
    if arguments.markdown:
        hidden = {path: f"FILE{path.suffix}" for path in (arguments.json, arguments.plot, arguments.markdown) if path}
        arguments.markdown.write_text(markdown(document, results, command_line(hidden=hidden)))
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

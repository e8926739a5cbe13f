"""Copies between GPU and host memory at length: submit cost, rates, work beside copies, a pipeline of 32 layers.

In one command on a machine with a GPU (about 20 minutes; without one, what can be measured on the CPU)::

    python -m benchmarks.bench_kernels --json kernels.json

``hicache-ext bench kernels`` measures only what chooses among the engines.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.kernels import gpu
from benchmarks.kernels.check import check_engines
from benchmarks.kernels.report import OUTSTANDING, KernelResults, tables
from benchmarks.kernels.submit import LAYOUTS, SubmitCase, measure
from hicache_ext.bench.frame import add_json_argument, machine_facts, report
from hicache_ext.cli.main import without_traceback
from hicache_ext.runtime.commands import standard_output_of


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
        return cls(rounds=50, repeats=7, segments=gpu.SEGMENTS, counts=gpu.COUNTS)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute instead of 20: shows that it works, no more")
    add_json_argument(parser)
    arguments = parser.parse_args(words)
    with standard_output_of(arguments):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    settings = Settings.of(quick=arguments.quick)
    results = KernelResults()
    facts = gpu.gpu_facts() if torch.cuda.is_available() else None
    _on_cpu(settings, results)
    if facts:
        _on_gpu(settings, results)
    machine = machine_facts(Path("."), ("hicache-ext", "torch", "triton", "sglang", "numpy"))
    told = {"rounds": settings.rounds, "repeats": settings.repeats}
    figures = {"gpu": facts, "settings": told, **results.entries()}
    report(arguments, "copy engines", machine, figures, tables(results))
    if facts is None:
        print(f"\n{OUTSTANDING}")
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
    results.rates += gpu.rates(settings.segments, settings.counts, settings.repeats)
    _progress(f"work beside copies ({time.monotonic() - started:.0f} s so far)")
    results.interferences += gpu.interferences()
    _progress(f"pipeline ({time.monotonic() - started:.0f} s so far)")
    results.pipelines += gpu.pipelines()


def _progress(text: str) -> None:
    print(f"- {text}", flush=True)


if __name__ == "__main__":
    sys.exit(without_traceback(main))

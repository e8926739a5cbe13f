"""``hicache-ext bench kernels``: every copy engine beside SGLang's own path, and the calibration that picks among them.

What needs torch is imported when it runs: the parser needs this module.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_ext.bench.frame import Panel, Report, Table, add_output_arguments, machine_facts, number, plot_point
from hicache_ext.config import KernelsConfig
from hicache_ext.config.values import format_size

if TYPE_CHECKING:
    from hicache_ext.kernels.calibration import Measurement

_PACKAGES = ("hicache-ext", "torch", "triton", "sglang", "numpy")
_METHOD = """\
Microseconds per layer from the call until the last byte is there, submission included, medians: every engine of this
machine and SGLang's own path ("sglang"), on SGLang's own pools, pages in random order. An engine is chosen where it is
clearly faster than SGLang's path.
"""
_SECONDS, _QUICK_SECONDS = 60.0, 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate", action="store_true", help="let servers use what was measured, from their next start on"
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of a minute: shows that it works, no more"
    )
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; with ``--calibrate`` also where servers look."""
    from hicache_ext.bench.kernel_calibrate import calibrate
    from hicache_ext.kernels.calibration import calibration_file, write_calibration

    config = KernelsConfig().with_environment()
    seconds = _QUICK_SECONDS if arguments.quick else _SECONDS
    found = calibrate(config, lambda line: print(line, flush=True), seconds)
    tables, panels = _drawn(found.measurements)
    measured = [
        {**asdict(measurement.situation), "seconds": dict(measurement.seconds)} for measurement in found.measurements
    ]
    report = Report(
        "kernels",
        f"Copy engines on {found.gpu}, driver {found.driver}",
        machine_facts(Path("."), _PACKAGES),
        {"gpu": found.gpu, "driver": found.driver, "measurements": measured},
        tables,
        panels,
        _METHOD,
    )
    report.show()
    report.write(arguments)
    if arguments.calibrate:
        path = config.calibration or calibration_file(found.gpu)
        write_calibration(path, found)
        print(f"{len(found.measurements)} measurements of {found.gpu} written to {path}")
    return 0


def _drawn(measurements: Sequence[Measurement]) -> tuple[list[Table], list[Panel]]:
    """A table and a diagram for each direction, layout and place of the indices."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        where = measurement.situation
        indices = "indices on the CPU" if where.indices_on_cpu else "indices on the GPU"
        groups.setdefault(f"{where.direction}: {where.layout}, {indices}", []).append(measurement)
    tables, panels = [], []
    for title, group in groups.items():
        names = list(dict.fromkeys(name for measurement in group for name in measurement.seconds))
        sizes = [
            f"{format_size(m.situation.bytes_per_layer)} in runs of {format_size(m.situation.run_bytes)}" for m in group
        ]
        rows = [
            (size, *(number(m.seconds[name] * 1e6) if name in m.seconds else "-" for name in names))
            for size, m in zip(sizes, group, strict=True)
        ]
        tables.append(Table(f"{title}: us per layer", ("", *names), tuple(rows)))
        lines = {
            name: [plot_point(s, m.seconds[name] * 1e6) for s, m in zip(sizes, group, strict=True) if name in m.seconds]
            for name in names
        }
        panels.append(Panel(title, "layer", "us", lines))
    return tables, panels

"""``hicache-ext bench kernels``: the copies between GPU and host memory, and the calibration that picks among them.

The arguments alone: everything else (``kernel_run.py``) needs torch.
"""

from __future__ import annotations

import argparse

from hicache_ext.bench.output_files import add_output_arguments


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure for about a minute which engine is fastest on this GPU, and let the server use it",
    )
    parser.add_argument("--quick", action="store_true", help="a minute instead of 20: shows that it works, no more")
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, or the calibration; the exit code."""
    from hicache_ext.bench import kernel_run

    return kernel_run.calibrate() if arguments.calibrate else kernel_run.measure_all(arguments)

"""``hicache-ext bench kernels``: every copy engine beside SGLang's own path, and the calibration that picks among them.

The arguments alone: everything else (kernel_run.py) needs torch.
"""

from __future__ import annotations

import argparse

from hicache_ext.bench.report import add_output_arguments


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--calibrate", action="store_true", help="let servers use what was measured, from their next start on"
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of a minute: shows that it works, no more"
    )
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; the exit code."""
    from hicache_ext.bench import kernel_run

    return kernel_run.run(arguments)

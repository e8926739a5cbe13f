"""``hicache-ext bench``: measure on your own machine. One benchmark per action; ``benchmarks/`` has them as scripts."""

from __future__ import annotations

import argparse

from hicache_ext.bench import file_command, kernel_command, multiturn_command, pool_command


def configure(parser: argparse.ArgumentParser) -> None:
    """Add a sub-command for each benchmark."""
    actions = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    help_line = "the file tier against SGLang's HiCacheFile and the raw disk"
    file_command.configure(actions.add_parser("file", help=help_line, description=help_line))
    help_line = "the pool tiers (Mooncake, Redis, object stores) against their engines' own clients"
    pool_command.configure(actions.add_parser("pool", help=help_line, description=help_line))
    help_line = "copies between GPU and host memory, and the calibration that picks among them"
    kernel_command.configure(actions.add_parser("kernels", help=help_line, description=help_line))
    help_line = "multi-turn conversations against servers and disaggregated pairs"
    multiturn_command.configure(actions.add_parser("multiturn", help=help_line, description=help_line))

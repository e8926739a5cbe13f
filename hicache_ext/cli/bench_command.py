"""``hicache-ext bench``: measure on your own machine, one benchmark per action."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from hicache_ext.bench import compare, file, multiturn, pool
from hicache_ext.bench.frame import add_json_argument
from hicache_ext.cli.output import command

_FAILED = "something could not be measured, or a contender answered wrongly"


def bench_command(parser: argparse.ArgumentParser) -> None:
    """Add a sub-command for each benchmark."""
    actions = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    def add(
        name: str,
        configure: Callable[[argparse.ArgumentParser], None],
        run: Callable[[argparse.Namespace], int],
        help_line: str,
        *examples: str,
        problem: str = _FAILED,
    ) -> None:
        complete = command(configure, examples=examples, problem=problem)(run)
        complete(actions.add_parser(name, help=help_line, description=help_line))

    words = "the file tier against SGLang's HiCacheFile and the raw disk"
    add("file", file.configure, file.run, words, "--directory /mnt/nvme0 --json file.json")
    words = "the pool tiers (Mooncake, Redis, object stores) of a configuration"
    add("pool", pool.configure, pool.run, words, "hicache.yaml --json pool.json")
    words = "copies between GPU and host memory, and the calibration that picks among them"
    add("kernels", _configure_kernels, _measure_kernels, words, "--calibrate")
    endpoints = "--endpoint ours=http://127.0.0.1:30000 --endpoint plain=http://127.0.0.1:30001 --json multiturn.json"
    words = "multi-turn conversations with servers that run"
    add("multiturn", multiturn.configure, multiturn.run, words, endpoints)
    worse = "a row is below --fail-below, or was measured in the first file alone"
    files = "before.json after.json"
    words = "two JSON files of the same benchmark, row by row"
    add("compare", compare.configure, compare.run, words, files, f"{files} --fail-below 0.9", problem=worse)


def _configure_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calibrate", action="store_true", help="let servers use it from their next start on")
    parser.add_argument("--quick", action="store_true", help="seconds: shows that it works, no more")
    add_json_argument(parser)


def _measure_kernels(arguments: argparse.Namespace) -> int:
    from hicache_ext.bench import kernels  # torch

    return kernels.run(arguments)

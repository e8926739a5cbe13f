"""``hicache-ext bench``: measure on your own machine, one benchmark per action."""

from __future__ import annotations

import argparse

from hicache_ext.bench import compare, file, multiturn, pool
from hicache_ext.bench.frame import add_json_argument
from hicache_ext.cli.output import describe

_FAILED = "something could not be measured, or a contender answered wrongly"


def configure_bench(parser: argparse.ArgumentParser) -> None:
    """Add a sub-command for each benchmark."""
    actions = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    def add(name: str, help_line: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=help_line, description=help_line)

    action = add("file", "the file tier against SGLang's HiCacheFile and the raw disk")
    file.configure(action)
    describe(action, examples=["hicache-ext bench file --directory /mnt/nvme0 --json file.json"], problem=_FAILED)
    action = add("pool", "the pool tiers (Mooncake, Redis, object stores) of a configuration")
    pool.configure(action)
    describe(action, examples=["hicache-ext bench pool hicache.yaml --json pool.json"], problem=_FAILED)
    action = add("kernels", "copies between GPU and host memory, and the calibration that picks among them")
    action.add_argument(
        "--calibrate", action="store_true", help="let servers use what was measured, from their next start on"
    )
    action.add_argument(
        "--quick", action="store_true", help="seconds instead of a minute: shows that it works, no more"
    )
    add_json_argument(action)
    describe(action, examples=["hicache-ext bench kernels --calibrate"], run=_measure_kernels, problem=_FAILED)
    action = add("multiturn", "multi-turn conversations with servers that run")
    multiturn.configure(action)
    describe(
        action,
        examples=[
            "hicache-ext bench multiturn --endpoint ours=http://127.0.0.1:30000 "
            "--endpoint plain=http://127.0.0.1:30001 --json multiturn.json"
        ],
        problem=_FAILED,
    )
    action = add("compare", "two JSON files of the same benchmark, row by row")
    compare.configure(action)
    describe(
        action,
        examples=[
            "hicache-ext bench compare before.json after.json",
            "hicache-ext bench compare before.json after.json --fail-below 0.9",
        ],
        problem="a row is below --fail-below, or was measured in the first file alone",
    )


def _measure_kernels(arguments: argparse.Namespace) -> int:
    from hicache_ext.bench import kernels  # torch

    return kernels.run(arguments)

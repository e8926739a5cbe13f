"""``hicache-ext plan``: what disks and a pool of a given size would do for these requests, before they are bought."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hicache_ext.cli.output import command, show
from hicache_ext.config import check_document, parse_size
from hicache_ext.config.render import as_yaml, launch_lines
from hicache_ext.errors import ConfigError, RecordingError
from hicache_ext.plan.fleet import ROUTERS, Fleet
from hicache_ext.plan.model import PEAK_TFLOPS, ModelSize, estimated, given_size, read_model
from hicache_ext.plan.report import POOL_NODE, configuration, page_of, plan_of, pool_nodes
from hicache_ext.plan.traces import Trace, generate, parse_workload, read_trace

_FILE = "hicache.yaml"
_PRICES = {
    "--price-node-hour": "of the GPUs of a node for an hour, in your currency",
    "--price-disk": "of a terabyte of disk",
    "--price-pool": "of a terabyte of the pool",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    requests = parser.add_argument_group("what is asked for")
    requests.add_argument(
        "trace", metavar="TRACE", nargs="?", help="a recording, a directory of them, or JSON lines of Mooncake's form"
    )
    requests.add_argument("--workload", metavar="KEY=VALUE,...", help="instead: rate=2,turns=6,think=90s,...")
    requests.add_argument("--block-tokens", metavar="N", help="tokens of a block of JSON lines (default 512)")
    model = parser.add_argument_group("by which model")
    model.add_argument("--model", metavar="PATH", help="its config.json, or the directory with it")
    model.add_argument("--token-bytes", metavar="SIZE", help="instead: bytes of a token's KV, all ranks together")
    model.add_argument("--tp", metavar="N", default="1", help="tensor parallel ranks (default 1)")
    model.add_argument("--page-size", metavar="N", default="64", help="tokens of a page (default 64)")
    model.add_argument("--dtype", metavar="DTYPE", help="of the KV cache (default: the model's)")
    fleet = parser.add_argument_group("on which nodes")
    fleet.add_argument("--nodes", metavar="N", default="1", help="that share the requests (default 1)")
    fleet.add_argument("--disk", metavar="SIZE", default="0", help="of the file tier of each node, e.g. 4TB")
    fleet.add_argument("--pool", metavar="SIZE", default="0", help="of the pool that all nodes share")
    fleet.add_argument("--router", choices=ROUTERS, default="session", help="what spreads requests (%(default)s)")
    fleet.add_argument("--no-promotion", action="store_true", help="what comes from the pool is not kept on the disk")
    fleet.add_argument("--decode-writes", action="store_true", help="decode nodes write what they generate to the pool")
    fleet.add_argument("--hints", action="store_true", help="and prefill nodes bring it to their disks at once")
    worth = parser.add_argument_group("what it is worth")
    worth.add_argument("--prefill-rate", metavar="TOKENS", help="per second on a node, as measured")
    worth.add_argument("--gpu", metavar="NAME", help=f"instead: an estimate for {', '.join(PEAK_TFLOPS)}")
    worth.add_argument("--gpus", metavar="N", help="of a node (default: --tp)")
    worth.add_argument("--disk-speed", metavar="SIZE", default="0", help="that a node reads from its disks in a second")
    worth.add_argument("--pool-speed", metavar="SIZE", default="0", help="that a node reads from the pool in a second")
    worth.add_argument("--dwpd", metavar="X", default="0", help="drive writes a day that the disks are made for")
    worth.add_argument("--busy-hours", metavar="H", default="24", help="of a day with traffic as here (default 24)")
    worth.add_argument("--years", metavar="Y", default="3", help="after which hardware is written off (default 3)")
    for option, what in _PRICES.items():
        worth.add_argument(option, metavar="PRICE", default="0", help=what)


@command(
    _arguments,
    examples=(
        "trace.jsonl --model /models/llama --disk 4TB --gpu h100",
        "/var/lib/hicache-recordings --model /models/llama --nodes 4 --disk 4TB --pool 20TB",
        "--workload rate=2,turns=6,think=90s --token-bytes 128KiB --disk 2TB --json",
    ),
    problem="the trace cannot be read",
)
def plan_command(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError, RecordingError."""
    for option, parse in _NUMBERS.items():
        name = option[2:].replace("-", "_")
        if (text := getattr(arguments, name)) is not None:
            setattr(arguments, name, parse(text, option))
    model, disk, pool = _model(arguments), arguments.disk, arguments.pool
    if arguments.hints and not arguments.decode_writes:
        raise ConfigError("--hints", "they tell of what decode nodes write", "with --decode-writes")
    if arguments.decode_writes and not pool:
        raise ConfigError("--decode-writes", "decode nodes write to a pool, and there is none", "with --pool SIZE")
    trace = _trace(arguments)
    block_bytes = model.token_bytes * trace.block_tokens
    for option, size in (("--disk", disk), ("--pool", pool)):
        if 0 < size < block_bytes:
            problem = f"{size} bytes hold no block of {trace.block_tokens} tokens"
            raise ConfigError(option, problem, f"{block_bytes} or more")
    fleet = Fleet(
        nodes=arguments.nodes,
        near=disk // block_bytes,
        pool=pool // block_bytes,
        router=arguments.router,
        promote=not arguments.no_promotion,
        decode=arguments.decode_writes,
        hints=arguments.hints,
    )
    plan = plan_of(arguments, trace, model, _rate(arguments, model), fleet)
    document = configuration(disk, pool)
    launch: list[str] = []
    yaml = "# nothing to configure: neither --disk nor --pool\n"
    if disk or pool:
        checked = check_document(document)
        parts = launch_lines(_FILE, checked.hicache_ext.role)
        launch = [f"--page-size {arguments.page_size}" if part.startswith("--page-size ") else part for part in parts]
        launch[1:1] = [f"--tp-size {arguments.tp}"] if arguments.tp > 1 else []
        if arguments.dtype is not None:
            flag = "--kv-cache-dtype" if arguments.dtype.startswith("fp8") else "--dtype"
            launch.insert(1, f"{flag} {arguments.dtype}")
        yaml = as_yaml(document)
        if pool:
            count = pool_nodes(pool)
            kind = f"{count} servers of a cluster ({POOL_NODE // 10**9} GB each at most: assumed)"
            kind = kind if count > 1 else "one server"
            yaml = f"# the pool: {kind}, maxmemory {-(-pool // count)}, maxmemory-policy allkeys-lru\n{yaml}"
    plan |= {"configuration": document if launch else None, "launch": launch}
    show(arguments, plan, page_of(plan, launch, yaml))
    return 0


def _trace(arguments: argparse.Namespace) -> Trace:
    if (arguments.trace is None) == (arguments.workload is None):
        raise ConfigError("TRACE", "one of TRACE and --workload is needed", "a recording, or --workload rate=2")
    if arguments.workload is not None:
        trace = generate(parse_workload(arguments.workload))
    else:
        trace = read_trace(Path(arguments.trace), arguments.block_tokens)
    if not len(trace.blocks):
        raise RecordingError(trace.name, "has no request that is as long as a block")
    return trace


def _model(arguments: argparse.Namespace) -> ModelSize:
    if (arguments.model is None) == (arguments.token_bytes is None):
        raise ConfigError("--model", "one of --model and --token-bytes is needed", "--model PATH of a config.json")
    if arguments.model is not None:
        return read_model(Path(arguments.model), tp=arguments.tp, dtype=arguments.dtype)
    if not arguments.token_bytes:
        raise ConfigError("--token-bytes", "a token takes some bytes", "a size such as 128KiB")
    return given_size(arguments.token_bytes, arguments.tp)


def _rate(arguments: argparse.Namespace, model: ModelSize) -> tuple[float, str] | None:
    if arguments.prefill_rate is not None and arguments.gpu is not None:
        raise ConfigError("--gpu", "cannot be combined with --prefill-rate", "one of them")
    if arguments.prefill_rate == 0:
        raise ConfigError("--prefill-rate", "is 0", "tokens per second, above 0")
    if arguments.prefill_rate is not None:
        return arguments.prefill_rate, "as given"
    return None if arguments.gpu is None else estimated(arguments.gpu, arguments.gpus or arguments.tp, model)


def _whole(text: str, option: str, most: int = 1 << 20) -> int:
    if not text.isdecimal() or not text.isascii() or not 1 <= int(text) <= most:
        raise ConfigError(option, f"{text!r} is not accepted", f"a whole number from 1 to {most}")
    return int(text)


def _size(text: str, option: str) -> int:
    return parse_size(int(text) if text.isdecimal() and text.isascii() else text, option)


def _number(text: str, option: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MOST:
        raise ConfigError(option, f"{text!r} is not accepted", f"a number from 0 to {_MOST:g}")
    return number


_MOST = 1e15
_NUMBERS: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys(("--tp", "--page-size", "--gpus", "--block-tokens"), _whole),
    "--nodes": partial(_whole, most=65536),
    **dict.fromkeys(("--disk", "--pool", "--token-bytes", "--disk-speed", "--pool-speed"), _size),
    **dict.fromkeys(("--dwpd", "--busy-hours", "--years", "--prefill-rate", *_PRICES), _number),
}
"""Options that are numbers, which are read when all options are known: then each mistake is a sentence."""

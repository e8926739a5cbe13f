"""``hicache-ext plan``: what disks and a pool of a given size would do for these requests, before they are bought."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from hicache_ext.cli.output import describe, show
from hicache_ext.config import check_document, parse_size
from hicache_ext.config.render import as_yaml, launch_lines
from hicache_ext.errors import ConfigError, RecordingError
from hicache_ext.plan.fleet import ROUTERS, Fleet
from hicache_ext.plan.model import PEAK_TFLOPS, ModelSize, PrefillRate, estimated, given_size, read_model
from hicache_ext.plan.report import POOL_NODE, Asked, Hardware, configuration, page_of, plan_of, pool_nodes
from hicache_ext.plan.traces import Trace, generate, parse_workload, read_trace

_FILE = "hicache.yaml"
_PRICES = {
    "--price-node-hour": "of the GPUs of a node for an hour, in your currency",
    "--price-disk": "of a terabyte of disk",
    "--price-pool": "of a terabyte of the pool",
}


def configure_plan(parser: argparse.ArgumentParser) -> None:
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
    fleet.add_argument("--disk", metavar="SIZE", help="of the file tier of each node, e.g. 4TB")
    fleet.add_argument("--pool", metavar="SIZE", help="of the pool that all nodes share")
    fleet.add_argument("--router", choices=ROUTERS, default="session", help="what spreads requests (%(default)s)")
    fleet.add_argument("--no-promotion", action="store_true", help="what comes from the pool is not kept on the disk")
    fleet.add_argument("--decode-writes", action="store_true", help="decode nodes write what they generate to the pool")
    fleet.add_argument("--hints", action="store_true", help="and prefill nodes bring it to their disks at once")
    worth = parser.add_argument_group("what it is worth")
    worth.add_argument("--prefill-rate", metavar="TOKENS", help="per second on a node, as measured")
    worth.add_argument("--gpu", metavar="NAME", help=f"instead: an estimate for {', '.join(PEAK_TFLOPS)}")
    worth.add_argument("--gpus", metavar="N", help="of a node (default: --tp)")
    worth.add_argument("--disk-speed", metavar="SIZE", help="that a node reads from its disks in a second")
    worth.add_argument("--pool-speed", metavar="SIZE", help="that a node reads from the pool in a second")
    worth.add_argument("--dwpd", metavar="X", help="drive writes a day that the disks are made for")
    worth.add_argument("--busy-hours", metavar="H", default="24", help="of a day with traffic as here (default 24)")
    worth.add_argument("--years", metavar="Y", default="3", help="after which hardware is written off (default 3)")
    for option, what in _PRICES.items():
        worth.add_argument(option, metavar="PRICE", help=what)
    describe(
        parser,
        "trace.jsonl --model /models/llama --disk 4TB --gpu h100",
        "/var/lib/hicache-recordings --model /models/llama --nodes 4 --disk 4TB --pool 20TB",
        "--workload rate=2,turns=6,think=90s --token-bytes 128KiB --disk 2TB --json",
        run=run,
        problem="the trace cannot be read",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError, RecordingError."""
    given = _asked(arguments)
    plan = plan_of(given)
    disk = arguments.disk if given.hardware.disk else None
    document = configuration(disk, given.hardware.pool)
    launch: list[str] = []
    yaml = "# nothing to configure: neither --disk nor --pool\n"
    if given.hardware.disk or given.hardware.pool:
        checked = check_document(document)
        parts = launch_lines(_FILE, checked.hicache_ext.role)
        launch = [f"--page-size {given.page_size}" if part.startswith("--page-size ") else part for part in parts]
        launch[1:1] = [f"--tp-size {given.tp}"] if given.tp > 1 else []
        if arguments.dtype is not None:
            flag = "--kv-cache-dtype" if arguments.dtype.startswith("fp8") else "--dtype"
            launch.insert(1, f"{flag} {arguments.dtype}")
        yaml = as_yaml(document)
        if pool := given.hardware.pool:
            count = pool_nodes(pool)
            kind = f"{count} servers of a cluster ({POOL_NODE // 10**9} GB each at most: assumed)"
            kind = kind if count > 1 else "one server"
            yaml = f"# the pool: {kind}, maxmemory {-(-pool // count)}, maxmemory-policy allkeys-lru\n{yaml}"
    plan |= {"configuration": document if launch else None, "launch": launch}
    show(arguments, plan, page_of(plan, launch, yaml))
    return 0


def _asked(arguments: argparse.Namespace) -> Asked:
    tp = _whole(arguments, "--tp")
    model = _model(arguments, tp)
    hardware = Hardware(
        nodes=_whole(arguments, "--nodes", 65536),
        disk=_size(arguments, "--disk"),
        pool=_size(arguments, "--pool"),
        dwpd=_number(arguments, "--dwpd"),
        disk_speed=_size(arguments, "--disk-speed"),
        pool_speed=_size(arguments, "--pool-speed"),
        busy_hours=_number(arguments, "--busy-hours", 24.0),
        price_node_hour=_number(arguments, "--price-node-hour"),
        price_disk_tb=_number(arguments, "--price-disk"),
        price_pool_tb=_number(arguments, "--price-pool"),
        years=_number(arguments, "--years") or 3.0,
    )
    if arguments.hints and not arguments.decode_writes:
        raise ConfigError("--hints", "they tell of what decode nodes write", "with --decode-writes")
    if arguments.decode_writes and not hardware.pool:
        raise ConfigError("--decode-writes", "decode nodes write to a pool, and there is none", "with --pool SIZE")
    trace = _trace(arguments)
    block_bytes = model.token_bytes * trace.block_tokens
    for option, size in (("--disk", hardware.disk), ("--pool", hardware.pool)):
        if 0 < size < block_bytes:
            problem = f"{size} bytes hold no block of {trace.block_tokens} tokens"
            raise ConfigError(option, problem, f"{block_bytes} or more")
    fleet = Fleet(
        nodes=hardware.nodes,
        near=hardware.disk // block_bytes,
        pool=hardware.pool // block_bytes,
        router=arguments.router,
        promote=not arguments.no_promotion,
        decode=arguments.decode_writes,
        hints=arguments.hints,
    )
    return Asked(trace, model, _whole(arguments, "--page-size"), tp, hardware, _rate(arguments, model, tp), fleet)


def _trace(arguments: argparse.Namespace) -> Trace:
    if (arguments.trace is None) == (arguments.workload is None):
        raise ConfigError("TRACE", "one of TRACE and --workload is needed", "a recording, or --workload rate=2")
    if arguments.workload is not None:
        trace = generate(parse_workload(arguments.workload))
    else:
        blocks = _whole(arguments, "--block-tokens") if arguments.block_tokens is not None else None
        trace = read_trace(Path(arguments.trace), blocks)
    if not len(trace.blocks):
        raise RecordingError(trace.name, "has no request that is as long as a block")
    return trace


def _model(arguments: argparse.Namespace, tp: int) -> ModelSize:
    if (arguments.model is None) == (arguments.token_bytes is None):
        raise ConfigError("--model", "one of --model and --token-bytes is needed", "--model PATH of a config.json")
    if arguments.model is not None:
        return read_model(Path(arguments.model), tp=tp, dtype=arguments.dtype)
    if not (size := _size(arguments, "--token-bytes")):
        raise ConfigError("--token-bytes", "a token takes some bytes", "a size such as 128KiB")
    return given_size(size, tp)


def _rate(arguments: argparse.Namespace, model: ModelSize, tp: int) -> PrefillRate | None:
    if arguments.prefill_rate is not None and arguments.gpu is not None:
        raise ConfigError("--gpu", "cannot be combined with --prefill-rate", "one of them")
    if arguments.prefill_rate is not None:
        rate = _number(arguments, "--prefill-rate")
        if not rate:
            raise ConfigError("--prefill-rate", "is 0", "tokens per second, above 0")
        return PrefillRate(rate, "as given")
    if arguments.gpu is None:
        return None
    return estimated(arguments.gpu, tp if arguments.gpus is None else _whole(arguments, "--gpus"), model)


def _value(arguments: argparse.Namespace, option: str) -> str | None:
    value: str | None = getattr(arguments, option[2:].replace("-", "_"))
    return value


def _whole(arguments: argparse.Namespace, option: str, most: int = 1 << 20) -> int:
    value = _value(arguments, option) or ""
    if not value.isdecimal() or not value.isascii() or not 1 <= int(value) <= most:
        raise ConfigError(option, f"{value!r} is not accepted", f"a whole number from 1 to {most}")
    return int(value)


def _size(arguments: argparse.Namespace, option: str) -> int:
    value = _value(arguments, option)
    if value is None:
        return 0
    return parse_size(int(value) if value.isdecimal() and value.isascii() else value, option)


def _number(arguments: argparse.Namespace, option: str, most: float = 1e15) -> float:
    value = _value(arguments, option)
    if value is None:
        return 0.0
    parse: Callable[[str], float] = float
    try:
        number = parse(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise ConfigError(option, f"{value!r} is not accepted", f"a number from 0 to {most:g}")
    return number

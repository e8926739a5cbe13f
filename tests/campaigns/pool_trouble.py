"""A pool that is killed, frozen, filled, slowed and cut off under a real SGLang server with load, as a time line.

    python -m tests.campaigns.pool_trouble --engine redis --report build/reports/pool-trouble.md

Two servers of the same configuration, a disk tier, one of them with a pool behind it: Redis, Mooncake or an object
store (trouble_engines.py), reached over a link that can be made slow and bad. Both hold the same conversations
(trouble_load.py). What is asked while the pool is in trouble should cost what it costs without a pool, once the first
deadline is over, no first token should ever wait much longer than it does on the other server, the answers should be
the same, and the pool should come back without a restart.

Writes the report, and beside it a JSON file with every request. Needs the engine's server.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import yaml

from hicache_ext.cli.main import main as command
from hicache_ext.cli.server_commands import Samples, read_samples
from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.tier import READ_TIMEOUT
from hicache_ext.runtime.commands import terminated_in_order
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.small_model import arguments_to_serve, make_small_model
from tests.campaigns.pool_trouble_report import write_report
from tests.campaigns.trouble_engines import ENGINES, Engine, Happening
from tests.campaigns.trouble_load import ANSWER_TOKENS, WITH_POOL, WITHOUT, Conversations, Run, TimeLine
from tests.rigs.tiny_model import make_tiny_model

PAGE_SIZE = 16
_HISTORY = 144
"""Tokens of each history."""
_THRESHOLD = 64
"""Tokens; SGLang asks storage for no less. Two cores compute the histories of half a run: they must be short."""
_SEEDING_THREADS = 4
_WARM_UP_REQUESTS = 6
_LONGEST_EXPECTED_RECOVERY = 40.0
"""The longest pause between two probes of a breaker is 30 s, and then calls come back over 5 s."""
_LONGEST_DRAIN = 120.0


def run(arguments: argparse.Namespace, directory: Path) -> TimeLine:
    """The whole time line. Raises ServerError or RuntimeError when a server does not come up."""
    if arguments.tiny:
        model, given = make_tiny_model(directory / "model"), ()
    else:
        model = make_small_model(directory / "model")
        given = (*arguments_to_serve(), "--max-total-tokens", "8192")
    line = TimeLine(timeout=READ_TIMEOUT, tokens=_HISTORY)
    conversations = Conversations(arguments.seed, _HISTORY)
    with ExitStack() as stack:
        pool = stack.enter_context(ENGINES[arguments.engine](directory))
        happenings = _chosen(pool, arguments.only)
        servers = _start_servers(stack, model, given, directory, pool)
        _seed(servers, directory, conversations, _histories_needed(arguments, len(happenings)))
        pool.filled()
        before = read_samples(servers[WITH_POOL].get("/metrics"))
        running = Run(servers, conversations, line, arguments.period)
        stack.callback(running.close)
        running.recovery(arguments.healthy)
        for happening in happenings:
            print(f"{running.now():.0f} s: {happening.name}", flush=True)
            happening.begin()
            running.phase(happening.name, arguments.trouble)
            happening.end()
            running.recovery(arguments.healthy)
        time.sleep(2)  # metrics are exported once a second
        line.counters = _grown(before, read_samples(servers[WITH_POOL].get("/metrics")))
        line.engine, line.remarks = pool.title, list(pool.remarks)
        if conversations.ran_out:
            line.remarks.append(
                f"**The last {conversations.ran_out} users who come back have nothing in the pool**: recoveries took "
                "longer than was computed for beforehand."
            )
        for server in servers.values():
            assert "is answered as a miss" not in server.log_file.read_text(), "a call raised"
    return line


def _chosen(pool: Engine, names: Sequence[str] | None) -> list[Happening]:
    known = {happening.name: happening for happening in pool.happenings}
    if names and not set(names) <= set(known):
        raise SystemExit(f"this engine has these troubles: {', '.join(known)}")
    return [known[name] for name in names or known]


def _start_servers(
    stack: ExitStack, model: Path, server_arguments: Sequence[str], directory: Path, pool: Engine
) -> dict[str, SglangServer]:
    """Both at once; they differ in the pool and in the directory of their disk tier."""
    servers: dict[str, SglangServer] = {}
    for name, tiers in ((WITH_POOL, {"pool": pool.tier}), (WITHOUT, {})):
        place = directory / name.replace(" ", "-")
        place.mkdir()
        disk = {"type": "file", "path": str(place / "nvme"), "capacity": "8GiB", "layout": "pages"}
        config = place / "hicache.yaml"
        settings = {**ExtraConfig.around({"tiers": {"nvme": disk, **tiers}}), "prefetch_threshold": _THRESHOLD}
        config.write_text(yaml.safe_dump(settings))
        servers[name] = SglangServer(
            model,
            log_file=place / "server.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{config}",
            extra_arguments=("--enable-metrics", *server_arguments),
            environment=pool.environment,
        )
        stack.callback(servers[name].stop)
    with ThreadPoolExecutor(2) as starting:
        list(starting.map(lambda server: server.start(), servers.values()))
    return servers


def _seed(servers: dict[str, SglangServer], directory: Path, conversations: Conversations, count: int) -> None:
    """Histories of an earlier day: in the pool, and nowhere else."""
    print(f"computing {count} histories for the pool", flush=True)
    # A server's first requests take seconds.
    for _ in range(_WARM_UP_REQUESTS):
        servers[WITHOUT].generate(conversations.new(), ANSWER_TOKENS)
    server = servers[WITH_POOL]
    known = [conversations.new() for _ in range(count)]
    with ThreadPoolExecutor(_SEEDING_THREADS) as threads:
        list(threads.map(lambda history: server.generate(history, 1), known))
    conversations.add_known(known)
    server.flush_cache()
    _wait_until_written(server)
    assert not command(["clear", str(directory / WITH_POOL.replace(" ", "-") / "nvme"), "--all", "--yes"])


def _wait_until_written(server: SglangServer) -> None:
    """The pool is written in the background, behind the disk."""
    deadline = time.monotonic() + _LONGEST_DRAIN
    time.sleep(2)  # metrics are exported once a second
    while waiting := read_samples(server.get("/metrics")).total("hicache_ext_queue_pages", tier="pool"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{waiting:g} pages still wait to be written to the pool")
        time.sleep(0.5)


def _histories_needed(arguments: argparse.Namespace, happenings: int) -> int:
    # The breaker's pauses between probes double: after a short trouble the next one comes soon.
    healthy = min(_LONGEST_EXPECTED_RECOVERY, arguments.trouble + 10) + arguments.healthy
    return round((happenings * (arguments.trouble + healthy) + arguments.healthy) / arguments.period) + 2


def _grown(before: Samples, after: Samples) -> dict[str, float]:
    """What the pool's counters grew by."""
    grown = {}
    for event in ("get", "corrupt", "rejected", "breaker", "breaker_probe", "timeout"):
        name = f"hicache_ext_{event}_total"
        old = before.by("reason", name, tier="pool")
        for reason, value in sorted(after.by("reason", name, tier="pool").items()):
            if value - old.get(reason, 0.0):
                grown[f"{event} {reason}".strip()] = value - old.get(reason, 0.0)
    return grown


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="redis")
    parser.add_argument("--only", nargs="+", metavar="TROUBLE", help="these and no others (default: all of the engine)")
    parser.add_argument("--trouble", type=float, default=20.0, help="seconds of each trouble (default: %(default)s)")
    parser.add_argument("--healthy", type=float, default=8.0, help="seconds after each recovery (default: %(default)s)")
    parser.add_argument("--period", type=float, default=3.0, help="seconds from burst to burst (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of SmolLM2-135M")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="FILE.md; FILE.json beside it")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    begun = time.monotonic()
    with (
        terminated_in_order(),
        tempfile.TemporaryDirectory(prefix="hce-trouble-") as directory,
    ):
        line = run(arguments, Path(directory))
    text, well = write_report(line, arguments, time.monotonic() - begun)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())

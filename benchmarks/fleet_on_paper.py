"""A study of fleets on paper: where a pool beats larger disks, and what promotion, writes of decode nodes and hints do.

``python -m benchmarks.fleet_on_paper --nodes 4 64 1024 --report build/fleet.md``

Every fleet has the same requests for each node: ``--chat`` describes those of one node. Disks are given as parts of the
different blocks of a node's share. ``--check`` replays a small workload through real file tiers and a real Redis
instead, and compares: hits and bytes must be equal, seconds are predicted from the costs of another workload.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import numpy.typing as npt

from benchmarks.real_fleet import Replayed, costs, features, nodes_of, replay
from benchmarks.replay_trace import multi_turn
from hicache_ext.cli.main import without_traceback
from hicache_ext.plan.fleet import (
    HINTED,
    NEAR,
    POOL,
    ROUTERS,
    WRITTEN_NEAR,
    WRITTEN_POOL,
    Fleet,
    Outcome,
    routed,
    simulate,
)
from hicache_ext.plan.traces import Chat, Request, Trace, generate, made_of, parse_workload

CHAT = "rate=0.2,turns=5,think=40s,systems=200,system=2048,first=4096,question=512,answer=512,span=10m"
_PAGE = 64 * 1024
_CHECKED = (
    ("two nodes at random, promotion", Fleet(nodes=2, near=None, pool=None, router="random")),
    ("three by session, no promotion", Fleet(nodes=3, near=None, pool=None, router="session", promote=False)),
    ("two by prefix", Fleet(nodes=2, near=None, pool=None, router="prefix")),
    ("two with disks alone", Fleet(nodes=2, near=None, router="session")),
    ("two with a pool alone", Fleet(nodes=2, pool=None, router="session")),
)


def fleets(nodes: int, share: int) -> Iterator[tuple[str, Fleet]]:
    """Names and fleets. ``share``: blocks of a disk of 1x, a quarter of what a node's requests ever write."""
    for router in ROUTERS:
        one = Fleet(nodes=nodes, near=share, router=router)  # type: ignore[arg-type]
        yield f"{router}: disks 1x", one
        yield f"{router}: disks 2x", replace(one, near=2 * share)
        yield f"{router}: disks 4x", replace(one, near=4 * share)
        yield f"{router}: disks 1x, a pool as large as all of them", replace(one, pool=share * nodes)
        yield (
            f"{router}: disks 1x, that pool, no promotion",
            replace(one, pool=share * nodes, promote=False),
        )
        yield f"{router}: a pool of 2x alone", replace(one, near=0, pool=2 * share * nodes)
    decode = Fleet(nodes=nodes, near=share, pool=share * nodes, router="session", decode=True)
    yield "session: disks 1x, that pool, decode nodes write", decode
    yield "session: the same with hints", replace(decode, hints=True)


def study(nodes: Sequence[int], chat: Chat, only: str, report: Callable[[list[str]], None]) -> None:
    """``only``: fleets whose names have this in them. ``report`` is given the lines so far after each fleet."""
    lines: list[str] = []
    for count in nodes:
        trace = generate(replace(chat, rate=chat.rate * count))
        share = max(1, trace.distinct // count // 4)
        found = simulate(trace, Fleet(near=None)).hit_share
        routes: dict[str, npt.NDArray[np.int32]] = {}
        lines += [
            f"## {count:,} nodes",
            "",
            f"{len(trace):,} requests, {int(trace.offsets[-1]):,} blocks of {trace.block_tokens} tokens, "
            f"{trace.distinct:,} different ones; 1x is {share:,} blocks. One cache without limit for all: {found:.1%}.",
            "",
            "| router and storage | hits | disk | pool | written to disks, blocks a request | to the pool | seconds |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name, fleet in fleets(count, share):
            if only not in name:
                continue
            if fleet.router not in routes:
                routes[fleet.router] = routed(trace, count, fleet.router)
            started = time.perf_counter()
            outcome = simulate(trace, fleet, routes[fleet.router])
            seconds = time.perf_counter() - started
            lines.append(_row(name, outcome, len(trace), seconds))
            print(lines[-1], flush=True)
            report(lines)
        lines.append("")


def _row(name: str, outcome: Outcome, requests: int, seconds: float) -> str:
    written = outcome.totals[[WRITTEN_NEAR, WRITTEN_POOL]] / requests
    brought = f" ({outcome.totals[HINTED] / requests:.2f} by hints)" if outcome.totals[HINTED] else ""
    shares = f"{outcome.hit_share:.3f} | {outcome.share(NEAR):.3f} | {outcome.share(POOL):.3f}"
    return f"| {name} | {shares} | {written[0]:.2f}{brought} | {written[1]:.2f} | {seconds:.1f} |"


# -- against real tiers ------------------------------------------------------------------------------------------------


def check(requests: int) -> list[str]:
    """Rows of the table of agreement."""
    from tests.rigs.redis_servers import RedisServer

    def workload(seed: int, count: int = requests) -> Trace:
        """Of different seeds they have no page in common."""
        chains = multi_turn(count, seed, documents=0.1)
        return made_of(f"multi-turn {seed}", map(Request, range(len(chains)), chains), 512)

    def real(trace: Trace, fleet: Fleet) -> Replayed:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place, RedisServer(Path(place)) as redis:
            url = redis.url if fleet.pool != 0 else None
            with nodes_of(fleet, Path(place), url, "8GiB") as stores:
                # Files grow and connections open.
                replay(workload(99, requests // 4), fleet, stores, _PAGE)
                return replay(trace, fleet, stores, _PAGE)

    known, new = workload(8), workload(3)
    lines = [
        "| fleet | hits of all requests | bytes | seconds: predicted / measured |",
        "|---|---|---|---:|",
    ]
    for name, fleet in _CHECKED:
        measured = real(known, fleet)
        one = costs(known, simulate(known, fleet).per_request, measured.seconds)
        paper, done = simulate(new, fleet), real(new, fleet)
        hits = np.array_equal(done.hits, paper.per_request[:, [NEAR, POOL]])
        predicted = float((features(new, paper.per_request) @ one).sum())
        ratio = predicted / float(done.seconds.sum())
        told = "equal" if hits else "NOT equal"
        lines.append(f"| {name} | {told} | {_bytes(paper, done)} | {ratio:.2f} |")
        print(lines[-1], flush=True)
    return lines


def _bytes(paper: Outcome, done: Replayed) -> str:
    columns = {
        ("near", "get"): NEAR,
        ("pool", "get"): POOL,
        ("near", "set"): WRITTEN_NEAR,
        ("pool", "set"): WRITTEN_POOL,
    }
    expected = {key: int(paper.totals[column]) * _PAGE for key, column in columns.items()}
    return "equal" if all(expected[key] == moved for key, moved in done.bytes.items()) else "NOT equal"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--chat", default=CHAT, help="the requests of one node (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="fleets whose names have this in them")
    parser.add_argument("--check", type=int, metavar="REQUESTS", help="compare with real tiers instead")
    parser.add_argument("--report", type=Path, help="write the tables here")
    options = parser.parse_args(arguments)
    words = shlex.join(sys.argv[1:] if arguments is None else arguments)
    facts = {"command": f"python -m benchmarks.fleet_on_paper {words}", "date": time.strftime("%Y-%m-%d")}
    facts |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version()}

    def report(lines: list[str]) -> None:
        if options.report is not None:
            heading = ["# Fleets on paper", "", *(f"- {name}: `{value}`" for name, value in facts.items()), ""]
            options.report.write_text("\n".join([*heading, *lines]).rstrip("\n") + "\n")

    if options.check:
        report(check(options.check))
    else:
        study(options.nodes, parse_workload(options.chat), options.only, report)
    return 0


if __name__ == "__main__":
    sys.exit(without_traceback(main))

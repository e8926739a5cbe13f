"""Replays generated workloads, or a trace, through the file tier's index, which follows the best of its candidates, and
through one that is held to each candidate.

``python -m benchmarks.policies`` replays the seeds that took no part in any choice (``--tuned``: the others); with a
TRACE that one instead. Capacities are 1/300, 1/30, 1/6 and 1/2 of the blocks, at least 64, unless given. ``--change
PNG`` draws how the index adapts to another workload, and prints its hits by those of the candidate that serves most
from then on, in the first capacity of inserted pages, in the second one, up to the fourth and the eighth, and in all.

Columns: ``tier`` follows; then, with ``--held``, the tier held to each candidate, all through the index; LRU that frees
the tails of chains first, as SGLang and vLLM do, and the optimum, page by page, as in replay_trace.py; the tier's hits
by those of either. With ``--curve --json`` also hits at
half, once, twice and four times the capacity, as the tier's miniatures say and as replays through the index have them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import replay_trace, workloads
from hicache_ext import native
from hicache_ext.cli.main import without_traceback
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.path_store import Served
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex

Requests = Sequence[Sequence[int]]
PARTS = (300, 30, 6, 2)
_LEAST_SLOTS = 64
_SHOWN = 12
"""Capacities of inserted pages after a change."""


class Tier:
    """A replay through the index: what it served, and what it knew at the end. With ``policy`` it is held to that."""

    def __init__(self, requests: Requests, capacity: int, policy: int | None = None) -> None:
        self.served: Served | None = None
        self.switches = 0
        self.inserts: list[int] = []
        """After each request."""
        self.by_request = list(replay_trace.served_by_the_index(requests, capacity, self._look, policy))
        self.hits = sum(self.by_request)

    def _look(self, index: SlabIndex) -> None:
        self.served = index.served()
        self.switches = int(index.memory.small[index_words.SWITCHES])
        self.inserts.append(index.inserts)


def rows(
    title: str, requests: Requests, capacities: Sequence[int], *, held: bool, curve: bool
) -> Iterator[dict[str, object]]:
    uses = sum(map(len, requests))
    for capacity in capacities:
        tier = Tier(requests, capacity)
        row: dict[str, object] = {"workload": title, "capacity": capacity, "tier": tier.hits / uses}
        for policy, name in enumerate(eviction.POLICIES if held else ()):
            row[name] = Tier(requests, capacity, policy).hits / uses
        lru, best = replay_trace.lru_tails_first(requests, capacity), replay_trace.optimum(requests, capacity)
        row |= {"LRU": lru / uses, "optimum": best / uses, "switches": tier.switches}
        row |= {"of LRU": tier.hits / max(1, lru), "of optimum": tier.hits / max(1, best)}
        if curve and tier.served is not None:
            said = [hits / tier.served.uses for hits in tier.served[1:]]
            real = [
                tier.hits / uses if part == 2 else Tier(requests, max(1, capacity * part // 2)).hits / uses
                for part in (1, 2, 4, 8)
            ]
            row |= {"curve": said, "replayed": real}
        yield row


def after_change(title: str, requests: Requests, capacity: int) -> dict[str, object]:
    """What is served around a change of workload half way, by the tier, by each candidate alone and by LRU, in half
    capacities of pages that the tier inserts."""
    tier = Tier(requests, capacity)
    served = {"tier": tier.by_request}
    served |= {name: Tier(requests, capacity, policy).by_request for policy, name in enumerate(eviction.POLICIES)}
    served["LRU"] = list(replay_trace.served_by_lru(requests, capacity))
    uses, moments = np.array([len(request) for request in requests]), np.array(tier.inserts)
    half = len(requests) // 2
    since = (moments - moments[half - 1]) / capacity
    steps = np.searchsorted(since, np.arange(-2, min(_SHOWN, since[-1]) + 0.25, 0.5), side="right")
    shares = {
        name: [float(np.sum(hits[first:last]) / uses[first:last].sum()) for first, last in pairwise(steps)]
        for name, hits in served.items()
    }
    best = max(eviction.POLICIES, key=lambda name: sum(served[name][half:]))
    of_best = {}
    for first, last in ((0, 1), (1, 2), (2, 4), (4, 8), (0, float("inf"))):
        of = (since > first) & (since <= last) & (np.arange(len(uses)) >= half)
        of_best[f"{first}-{last}"] = float(np.sum(tier.by_request, where=of) / max(1, np.sum(served[best], where=of)))
    return {"workload": title, "capacity": capacity, "best since": best, "of best": of_best, "shares": shares}


def draw_changes(path: Path, changes: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> None:
    """``after_change`` of several workloads; of another checkout (``before``) the tier alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6 * len(changes) / 2), layout="constrained")
    for axes, row in zip(figure.subplots(len(changes) // 2, 2, squeeze=False).flat, changes, strict=True):
        for name, shares in row["shares"].items():
            look = {"color": "black", "linewidth": 2.5} if name == "tier" else {"linewidth": 1}
            axes.plot(-1.75 + 0.5 * np.arange(len(shares)), shares, label=name, **look)
        for other in before:
            if (other["workload"], other["capacity"]) == (row["workload"], row["capacity"]):
                shares = other["shares"]["tier"]
                axes.plot(-1.75 + 0.5 * np.arange(len(shares)), shares, "k:", label="tier, before", linewidth=2)
        axes.axvspan(0, 1, alpha=0.15)
        axes.set_title(f"{row['workload']}: {row['capacity']:,} blocks", fontsize=9)
        axes.set(xlabel="capacities of inserted pages since the change", ylabel="share of uses served")
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path)


def cost(slots: int, calls: int = 300) -> tuple[float, float]:
    """Seconds of a write of 128 pages in the index of a full tier, without I/O: with the miniatures, and without."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    requests = [[128 * number + place for place in range(128)] for number in range(slots // 128 + 2 * calls)]
    for request in requests:
        for block in request:
            replay_trace.key_of(block)
    learns = SlabIndex._learn
    started, number = time.perf_counter(), 0

    def look(index: SlabIndex) -> None:
        nonlocal started, number
        now, view = time.perf_counter(), index.view()
        if number >= len(requests) - 2 * calls:
            seconds[bool(number % 2)].append(now - started)
        number += 1
        # In turns, so that both see the same machine.
        index._view = replace(view, sampled=index_words.sampled_of(view.capacity) if number % 2 else 0)
        SlabIndex._learn = learns if number % 2 else lambda *_: None  # type: ignore[method-assign]
        started = time.perf_counter()

    try:
        for _ in replay_trace.served_by_the_index(requests, slots, look):
            pass
    finally:
        SlabIndex._learn = learns  # type: ignore[method-assign]
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay workloads through the index and each of its policies.")
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines with hash_ids instead of generated workloads")
    parser.add_argument("--capacity", type=int, nargs="+", help="blocks (default: 1/300, 1/30 and 1/6 of all)")
    parser.add_argument("--family", nargs="+", choices=list(workloads.FAMILIES), default=list(workloads.FAMILIES))
    parser.add_argument("--requests", type=int, default=10_000, help="of a workload (default: %(default)s)")
    parser.add_argument("--tuned", action="store_true", help="the seeds that constants were chosen on")
    parser.add_argument("--seed", type=int, nargs="+", help="other seeds")
    parser.add_argument("--held", action="store_true", help="also replay the tier held to each candidate")
    parser.add_argument("--curve", action="store_true", help="also replay the other capacities of the curve")
    parser.add_argument("--json", type=Path, help="add the rows to this file, one in a line")
    parser.add_argument("--change", type=Path, help="draw how the index adapts to another workload (needs matplotlib)")
    parser.add_argument("--before", type=Path, help="what --change --json wrote in another checkout: drawn, too")
    parser.add_argument("--cost", type=int, nargs="+", metavar="SLOTS", help="time writes into tiers of so many slots")
    options = parser.parse_args(arguments)
    if native.core() is None:
        print("without the native core nothing follows anything", file=sys.stderr)
        return 1
    for slots in options.cost or ():
        with_them, without = cost(slots)
        print(f"{slots:,} slots: {1e6 * without:.0f} us a write of 128 pages, {1e6 * (with_them - without):+.1f} us")
    if options.cost:
        return 0
    if options.change is not None:
        changes: list[dict[str, Any]] = []
        for title, made in workloads.CHANGES.items():
            requests = made(options.requests, (options.seed or workloads.REPORTED)[0])
            blocks = len({block for request in requests for block in request})
            changes += [after_change(title, requests, blocks // part) for part in PARTS[1:]]
        for row in changes:
            print(f"| {row['workload']} | {row['capacity']:,} | {row['best since']} |", end="")
            print("".join(f" {share:.3f} |" for share in row["of best"].values()))
        if options.json:
            options.json.write_text("".join(json.dumps(row) + "\n" for row in changes))
        lines = options.before.read_text().splitlines() if options.before else ()
        draw_changes(options.change, changes, [json.loads(line) for line in lines])
        return 0
    if options.trace is not None:
        chosen = [("trace", lambda: replay_trace.read_trace(options.trace))]
    else:
        seeds = options.seed or (workloads.TUNED_ON if options.tuned else workloads.REPORTED)
        chosen = [
            (f"{family} {seed}", lambda family=family, seed=seed: workloads.FAMILIES[family](options.requests, seed))
            for family in options.family
            for seed in seeds
        ]
    held = eviction.POLICIES if options.held else ()
    heads = ["workload", "capacity", "tier", *held, "LRU", "optimum", "switches", "of LRU", "of optimum"]
    of_lru: list[float] = []
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for title, make in chosen:
        requests = make()
        blocks = len({block for request in requests for block in request})
        capacities = options.capacity or [max(_LEAST_SLOTS, blocks // part) for part in PARTS]
        for row in rows(title, requests, capacities, held=options.held, curve=options.curve):
            of_lru.append(float(str(row["of LRU"])))
            cells = [f"{row[head]:.4f}" if isinstance(row[head], float) else f"{row[head]}" for head in heads]
            print("| " + " | ".join(cells) + " |", flush=True)
            if options.json:
                with options.json.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
    print(f"of LRU: mean {statistics.fmean(of_lru):.3f}, least {min(of_lru):.3f}, of {len(of_lru)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(without_traceback(main))

"""Replays generated workloads, or a trace, through the file tier's index, which follows the best of its candidates, and
through one that is held to each candidate.

``python -m benchmarks.policies`` replays the seeds that took no part in any choice (``--seed`` others); with a TRACE
that one instead. Capacities are 1/300, 1/30, 1/6 and 1/2 of the blocks, at least 64, unless given.

Columns: ``tier`` follows; then, with ``--held``, the tier held to each candidate, all through the index; LRU that frees
the tails of chains first, as SGLang and vLLM do, and the optimum, page by page, as in replay_trace.py; the tier's hits
by those of either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import replay_trace, workloads
from hicache_ext import native
from hicache_ext.cli.main import without_traceback
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex

Requests = Sequence[Sequence[int]]
PARTS = (300, 30, 6, 2)
_LEAST_SLOTS = 64


class Tier:
    """A replay through the index: what it served, and what it knew at the end. With ``policy`` it is held to that."""

    def __init__(self, requests: Requests, capacity: int, policy: int | None = None) -> None:
        self.served: tuple[int, ...] = ()
        self.switches = 0
        self.by_request = list(replay_trace.served_by_the_index(requests, capacity, self._look, policy))
        self.hits = sum(self.by_request)

    def _look(self, index: SlabIndex) -> None:
        self.served = index.served()
        self.switches = int(index.memory.small[index_words.SWITCHES])


def rows(title: str, requests: Requests, capacities: Sequence[int], *, held: bool) -> Iterator[dict[str, object]]:
    uses = sum(map(len, requests))
    for capacity in capacities:
        tier = Tier(requests, capacity)
        row: dict[str, object] = {"workload": title, "capacity": capacity, "tier": tier.hits / uses}
        for policy, name in enumerate(eviction.POLICIES if held else ()):
            row[name] = Tier(requests, capacity, policy).hits / uses
        lru, best = replay_trace.lru_tails_first(requests, capacity), replay_trace.optimum(requests, capacity)
        row |= {"LRU": lru / uses, "optimum": best / uses, "switches": tier.switches}
        row |= {"of LRU": tier.hits / max(1, lru), "of optimum": tier.hits / max(1, best)}
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay workloads through the index and each of its policies.")
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines with hash_ids instead of generated workloads")
    parser.add_argument("--capacity", type=int, nargs="+", help="blocks (default: 1/300, 1/30 and 1/6 of all)")
    parser.add_argument("--family", nargs="+", choices=list(workloads.FAMILIES), default=list(workloads.FAMILIES))
    parser.add_argument("--requests", type=int, default=10_000, help="of a workload (default: %(default)s)")
    parser.add_argument("--seed", type=int, nargs="+", default=workloads.REPORTED, help="(default: %(default)s)")
    parser.add_argument("--held", action="store_true", help="also replay the tier held to each candidate")
    parser.add_argument("--json", type=Path, help="add the rows to this file, one in a line")
    options = parser.parse_args(arguments)
    if native.core() is None:
        print("without the native core nothing follows anything", file=sys.stderr)
        return 1
    if options.trace is not None:
        chosen = [("trace", lambda: replay_trace.read_trace(options.trace))]
    else:
        chosen = [
            (f"{family} {seed}", lambda family=family, seed=seed: workloads.FAMILIES[family](options.requests, seed))
            for family in options.family
            for seed in options.seed
        ]
    held = eviction.POLICIES if options.held else ()
    heads = ["workload", "capacity", "tier", *held, "LRU", "optimum", "switches", "of LRU", "of optimum"]
    of_lru: list[float] = []
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for title, make in chosen:
        requests = make()
        blocks = len({block for request in requests for block in request})
        capacities = options.capacity or [max(_LEAST_SLOTS, blocks // part) for part in PARTS]
        for row in rows(title, requests, capacities, held=options.held):
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

"""What admission costs in hits and saves in writes: a trace, or generated workloads, through the real index.

``python -m benchmarks.admission TRACE`` replays JSON lines with ``hash_ids`` (Mooncake's published traces),
``--generated 11 12`` the families of workloads.py with these seeds. Each request is looked up and its leading run read;
all pages behind are offered in batches of 128, as SGLang does, to ``AdmissionPolicy``, and what that wants goes into
the index of a slab directory (replay_trace.py), which evicts as the tier does. "all" writes everything that is offered.
``--decode-node`` asks instead what the admission of a decode node would do to conversations over a shared pool.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import workloads
from benchmarks.replay_trace import CAPACITIES, IDENTITY, Requests, index_of, key_of, leading_run, read_trace, store
from hicache_ext.cli.main import without_traceback
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiering.admission import AdmissionPolicy

_BATCH = 128
_REQUESTS = 6000
_PARTS = (300, 30, 6)
"""Capacities of generated workloads: these parts of their blocks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    served: int
    written: int


def replay(requests: Requests, capacity: int, policy: AdmissionPolicy | None) -> Outcome:
    """``policy``: None writes everything."""
    served = written = 0
    with index_of(capacity) as index:
        portion = max(1, min(_BATCH, capacity // 4))
        for request in requests:
            keys = _keys(request)
            found = index.locate(keys)
            present = set(found.positions.tolist())
            leading = leading_run(range(len(keys)), present)
            served += leading
            index.note_hits(found, keys, len(found))
            wanted = list(range(leading, len(keys)))
            if policy is not None:
                wanted = list(_wanted(policy, keys, leading))
            missing = [position for position in wanted if position not in present]
            written += len(missing)
            for first in range(0, len(missing), portion):
                store(index, keys, missing[first : first + portion])
    return Outcome(served, written)


def _wanted(policy: AdmissionPolicy, keys: PageKeys, leading: int) -> Iterator[int]:
    policy.continuations.looked_up(keys, leading)
    if leading:
        policy.read(keys.words[:leading])
    for first in range(leading, len(keys), _BATCH):
        wanted, _ = policy.offered(keys.words[first : first + _BATCH])
        yield from (first + np.flatnonzero(wanted)).tolist()


def _keys(request: Sequence[int]) -> PageKeys:
    return PageKeys.of_joined(IDENTITY, b"".join([key_of(block)[len(IDENTITY) :] for block in request]))


def row(title: str, requests: Requests, capacity: int) -> None:
    everything = replay(requests, capacity, None)
    policy = AdmissionPolicy(lambda: float(capacity))
    learned = replay(requests, capacity, policy)
    uses = sum(map(len, requests))
    print(
        f"| {title} | {capacity:,} | {everything.served / uses:.4f} | {learned.served / uses:.4f} "
        f"| {learned.served / max(1, everything.served):.3f} | {everything.written:,} | {learned.written:,} "
        f"| {learned.written / max(1, everything.written):.3f} |",
        flush=True,
    )


def decode_row(seed: int, part: int) -> None:
    """Conversations whose answers a decode node offers to the pool (LRU), once each; the prefill node writes all pages
    of prompts. Half of what a turn adds is the answer before it; conversations that end have an answer, too."""
    requests = workloads.FAMILIES["conversations"](_REQUESTS, seed)
    ended: dict[int, int] = {}
    answers: list[list[int]] = []
    for number, request in enumerate(requests):
        before = next((place for place in range(len(request) - 1, -1, -1) if request[place] in ended), None)
        if before is not None:
            added = request[before + 1 :]
            answers[ended.pop(request[before])] = list(added[: (len(added) + 1) // 2])
        ended[request[-1]] = number
        answers.append([-8 * number - place for place in range(1, 4)])
    capacity = len({block for request in requests for block in request}) // part
    uses = sum(map(len, requests))
    for decode in ("all", "learned", "nothing"):
        pool: OrderedDict[int, None] = OrderedDict()
        policy = AdmissionPolicy(lambda: float(capacity))
        served = written = 0
        for request, answer in zip(requests, answers, strict=True):
            served += leading_run(range(len(request)), {at for at, block in enumerate(request) if block in pool})
            offered = list(answer) if decode == "all" else []
            if decode == "learned":
                wanted, _ = policy.offered(_keys(answer).words)
                offered = [block for block, is_wanted in zip(answer, wanted, strict=True) if is_wanted]
            written += sum(block not in pool for block in offered)
            for block in (*request, *offered):
                pool[block] = pool.pop(block, None)
                if len(pool) > capacity:
                    pool.popitem(last=False)
        print(f"| conversations, {seed} | {capacity:,} | {decode} | {served / uses:.4f} | {written:,} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay requests with and without admission.")
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines with hash_ids")
    parser.add_argument("--capacity", type=int, nargs="+", default=CAPACITIES, help="blocks, for the trace")
    parser.add_argument("--generated", type=int, nargs="+", default=[], metavar="SEED", help="seeds of workloads.py")
    parser.add_argument("--family", nargs="+", choices=list(workloads.FAMILIES), default=list(workloads.FAMILIES))
    parser.add_argument("--decode-node", type=int, nargs="+", default=[], metavar="SEED", help="seeds of conversations")
    options = parser.parse_args(arguments)
    if options.decode_node:
        print("| workload | capacity | a decode node writes | hits | written by it |")
        print("|---|---|---|---|---|")
        for seed in options.decode_node:
            for part in _PARTS:
                decode_row(seed, part)
        return 0
    print("| workload | capacity | hits, all | learned | ratio | writes, all | learned | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    if options.trace is not None:
        if not options.trace.is_file():
            print(f"{options.trace}: not there, nothing to replay", file=sys.stderr)
        else:
            trace = read_trace(options.trace)
            for capacity in options.capacity:
                row("trace", trace, capacity)
    for family in options.family if options.generated else ():
        for seed in options.generated:
            requests = workloads.FAMILIES[family](_REQUESTS, seed)
            blocks = len({block for request in requests for block in request})
            for part in _PARTS:
                row(f"{family}, {seed}", requests, max(60, blocks // part))
    return 0


if __name__ == "__main__":
    sys.exit(without_traceback(main))

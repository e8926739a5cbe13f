"""Replays recorded agent sessions through the file tier's index, with the hints of an oracle and without.

``python -m benchmarks.agent_hints TRACE ...``: one JSON object per line with ``timestamp``, ``hash_ids`` and
``session``. The recorded sessions ran one after another; here so many run simultaneously, each with its own pauses. The
oracle says what an agent can know, with each request: ``retain`` until the session's next one, if there is one;
``supersede`` of the request before; with the last one ``demote``, but for the pages that another session has had before
(the system prompt). Which leases count is asked of pins.py; everything else is the index itself. ``--half``: every
other session alone, to tune on one half and to report on the other.

Columns: the share of page uses that are served without hints, with each kind alone, with both, and by the clairvoyant
optimum (replay_trace.py); how much of the gap between the first and the optimum retain, supersede and both close.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import replay_trace
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.pins import Pin, counting_leases
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import hashes_of

_PARTS = (30, 6)
_PINNED_PART = 2


class Oracle:
    """Hints of all sessions of a trace, and what the tier makes of them."""

    def __init__(self, lines: Sequence[dict[str, Any]], capacity: int, kinds: str) -> None:
        self._lines, self._capacity, self._kinds = lines, capacity, kinds
        self._next: dict[int, float] = {}
        """By number of a request: when its session's next one comes."""
        following: dict[str, float] = {}
        for number in reversed(range(len(lines))):
            if (session := lines[number]["session"]) in following:
                self._next[number] = following[session]
            following[session] = lines[number]["timestamp"]
        self._leases: dict[str, Pin] = {}
        self._before: dict[str, Sequence[int]] = {}
        self._owners: dict[int, str] = {}
        self._shared: set[int] = set()
        self._number = 0
        self._spared = np.empty(0, np.int64)

    def hits(self) -> int:
        requests = [line["hash_ids"] for line in self._lines]
        return sum(
            replay_trace.served_by_the_index(requests, self._capacity, self._follow, None, lambda _: self._spared)
        )

    def _follow(self, index: SlabIndex) -> None:
        """After each request: it is stored, and its hints are followed."""
        line, until = self._lines[self._number], self._next.get(self._number)
        request, session = line["hash_ids"], line["session"]
        self._number += 1
        for block in request:
            if self._owners.setdefault(block, session) != session:
                self._shared.add(block)
        self._leases.pop(session, None)
        if "supersede" in self._kinds:
            self._demote(index, set(self._before.get(session, ())) - set(request))
            if until is None:
                self._demote(index, set(request) - self._shared)
            self._before[session] = request
        if "retain" in self._kinds:
            if until is not None:
                hashes = tuple(replay_trace.key_of(block)[16:] for block in request)
                self._leases[session] = Pin("@", line["timestamp"], until, hashes)
            self._spared = self._honoured(index)

    def _demote(self, index: SlabIndex, blocks: set[int]) -> None:
        hashes = {replay_trace.key_of(block)[16:] for block in blocks}
        leased = {page_hash for lease in self._leases.values() for page_hash in lease.hashes}
        index.demote(sorted(hashes - leased))

    def _honoured(self, index: SlabIndex) -> np.ndarray:
        slots = sum(slab.slots * slab.slot_size for slab in index.view().slabs.values())
        kept = counting_leases(self._leases.values(), index.occupied_by, slots // _PINNED_PART, 0, frozenset())
        return np.unique(hashes_of(PageKeys.of_joined(bytes(16), b"".join(kept)).words)) if kept else self._spared[:0]


def run_together(lines: Sequence[dict[str, Any]], concurrent: int) -> list[dict[str, Any]]:
    """The requests in the order in which they come when a session begins as soon as one of so many has ended."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        sessions.setdefault(line["session"], []).append(line)
    free = [0.0] * concurrent
    moved: list[tuple[float, int, dict[str, Any]]] = []
    for requests in sessions.values():
        place = free.index(min(free))
        shift = free[place] - requests[0]["timestamp"]
        times = [request["timestamp"] + shift for request in requests]
        moved += [
            (time, len(moved), {**request, "timestamp": time}) for time, request in zip(times, requests, strict=True)
        ]
        free[place] = moved[-1][0] + 1.0
    return [request for _, _, request in sorted(moved, key=lambda one: one[:2])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--half", type=int, choices=(0, 1))
    arguments = parser.parse_args()
    print("trace                       sessions   slots  without  retain  supersede    both  optimum  closed by each")
    for trace, concurrent in itertools.product(arguments.traces, arguments.concurrent):
        recorded = [json.loads(line) for line in trace.read_text().splitlines() if line.strip()]
        names = list(dict.fromkeys(line["session"] for line in recorded))
        names = names if arguments.half is None else names[arguments.half :: 2]
        lines = run_together([line for line in recorded if line["session"] in names], concurrent)
        requests = [line["hash_ids"] for line in lines]
        uses, blocks = sum(map(len, requests)), len({block for request in requests for block in request})
        for part in _PARTS:
            capacity = max(64, blocks // part)
            served = [
                Oracle(lines, capacity, kinds).hits() / uses
                for kinds in ("", "retain", "supersede", "retain supersede")
            ]
            best = replay_trace.optimum(requests, capacity) / uses
            gap = best - served[0] or math.nan
            closed = "  ".join(f"{(share - served[0]) / gap:6.2f}" for share in served[1:])
            shares = "  ".join(f"{share:7.3f}" for share in (*served, best))
            print(f"{trace.stem[:28]:28s} {concurrent:7d}  {capacity:6d}  {shares}  {closed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

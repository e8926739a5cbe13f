"""Replays recorded agent sessions through the file tier's index, with the hints of an oracle and without.

``python -m benchmarks.agent_hints TRACE ...``: one JSON object per line with ``timestamp``, ``hash_ids`` and
``session``. The recorded sessions ran one after another; here so many run simultaneously, each with its own pauses. The
oracle says what an agent can know, with each request: ``retain`` until the session's next one, if there is one;
``supersede`` of the request before; with the last one ``demote``, but for the pages that another session has had before
(the system prompt). Leases have a fifth of the capacity, the oldest first, as in pins.py; everything else is the index
itself.

Columns: the share of page uses that are served without hints, with each kind alone, with both, and by the clairvoyant
optimum (replay_trace.py); how much of the gap between the first and the optimum the hints close.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import replay_trace
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import hashes_of

_PARTS = (30, 6, 3)
_LEASED_PART = 5


class Oracle:
    """Hints of all sessions of a trace, and what the tier makes of them."""

    def __init__(self, requests: Sequence[Sequence[int]], sessions: Sequence[str], capacity: int, kinds: str) -> None:
        self._requests, self._sessions, self._kinds = requests, sessions, kinds
        self._budget = capacity // _LEASED_PART
        self._last = {session: number for number, session in enumerate(sessions)}
        self._leases: dict[str, Sequence[int]] = {}
        self._before: dict[str, Sequence[int]] = {}
        self._owners: dict[int, str] = {}
        self._shared: set[int] = set()
        self._number = 0
        self._spared = np.empty(0, np.int64)

    def hits(self, capacity: int) -> int:
        spared = replay_trace.served_by_the_index(self._requests, capacity, self._follow, None, lambda _: self._spared)
        return sum(spared)

    def _follow(self, index: SlabIndex) -> None:
        """After each request: it is stored, and its hints are followed."""
        request, session = self._requests[self._number], self._sessions[self._number]
        is_last = self._last[session] == self._number
        self._number += 1
        for block in request:
            if self._owners.setdefault(block, session) != session:
                self._shared.add(block)
        if "supersede" in self._kinds:
            self._demote(index, set(self._before.get(session, ())) - set(request))
            if is_last:
                self._demote(index, set(request) - self._shared)
            self._before[session] = request
        if "retain" in self._kinds:
            if is_last:
                self._leases.pop(session, None)
            else:
                self._leases[session] = request
            self._spared = self._honoured()

    def _demote(self, index: SlabIndex, blocks: set[int]) -> None:
        leased = {block for lease in self._leases.values() for block in lease}
        index.demote([replay_trace.key_of(block)[16:] for block in sorted(blocks - leased)])

    def _honoured(self) -> np.ndarray:
        named = dict.fromkeys(block for lease in self._leases.values() for block in lease)
        kept = b"".join([replay_trace.key_of(block)[16:] for block in itertools.islice(named, self._budget)])
        return np.unique(hashes_of(PageKeys.of_joined(bytes(16), kept).words)) if kept else self._spared[:0]


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
        moved += [(request["timestamp"] + shift, len(moved), request) for request in requests]
        free[place] = moved[-1][0] + 1.0
    return [request for _, _, request in sorted(moved, key=lambda one: one[:2])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    print("trace                       sessions   slots  without  retain  supersede    both  optimum  of the gap")
    for trace, concurrent in itertools.product(arguments.traces, arguments.concurrent):
        recorded = [json.loads(line) for line in trace.read_text().splitlines() if line.strip()]
        lines = run_together(recorded, concurrent)
        requests, sessions = [line["hash_ids"] for line in lines], [line["session"] for line in lines]
        uses, blocks = sum(map(len, requests)), len({block for request in requests for block in request})
        for part in _PARTS:
            capacity = max(64, blocks // part)
            served = [
                Oracle(requests, sessions, capacity, kinds).hits(capacity) / uses
                for kinds in ("", "retain", "supersede", "retain supersede")
            ]
            best = replay_trace.optimum(requests, capacity) / uses
            closed = (served[-1] - served[0]) / (best - served[0]) if best > served[0] else float("nan")
            shares = "  ".join(f"{share:7.3f}" for share in (*served, best))
            print(f"{trace.stem[:28]:28s} {concurrent:7d}  {capacity:6d}  {shares}  {closed:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Replays recorded agent sessions through the file tier's index, with the hints of an oracle and without.

``python -m benchmarks.agent_hints TRACE ...``: one JSON object per line with ``timestamp``, ``hash_ids`` and
``session``. The recorded sessions ran one after another; here so many run simultaneously, each with its own pauses. The
oracle says what an agent can know, with each request: ``retain`` until the session's next one, if there is one;
``supersede`` of the request before, of which those pages are demoted that the session will not use again; with the last
one ``demote``; but for pages that another session has had before (the system prompt). Which leases count is asked of
pins.py; everything else is the index itself. ``--half``: every other session alone, to tune on one half and to report
on the other. ``--ttl``: all say the same seconds, as an agent does that does not know. ``--every-other``: only those
sessions say anything, and the columns are about the others.

Columns: the share of page uses that are served without hints, with each kind alone, with both, and by the clairvoyant
optimum (replay_trace.py); how much of the gap between the first and the optimum retain, supersede and both close.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import replay_trace
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.pins import Pin, count_after, kept_pages
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import hashes_of

_PARTS = (30, 6)
_PINNED_PART = 2


class Oracle:
    """Hints of all sessions of a trace, and what the tier makes of them."""

    def __init__(
        self,
        lines: Sequence[dict[str, Any]],
        capacity: int,
        kinds: str,
        ttl: float | None = None,
        silent: Set[str] = frozenset(),
    ) -> None:
        """``silent``: sessions that say nothing."""
        self._lines, self._capacity, self._kinds = lines, capacity, kinds
        self._ttl, self._silent = ttl, silent
        self._next: dict[int, float] = {}
        """By number of a request: when its session's next one comes."""
        self._later: dict[int, frozenset[int]] = {}
        """By number of a request: what its session uses after it."""
        following: dict[str, float] = {}
        used: dict[str, frozenset[int]] = {}
        for number in reversed(range(len(lines))):
            session = lines[number]["session"]
            if session in following:
                self._next[number] = following[session]
            self._later[number] = used.get(session, frozenset())
            following[session] = lines[number]["timestamp"]
            used[session] = self._later[number] | set(lines[number]["hash_ids"])
        self._leases: dict[str, Pin] = {}
        self._before: dict[str, Sequence[int]] = {}
        self._owners: dict[int, str] = {}
        self._shared: set[int] = set()
        self._number = 0
        self._kept: frozenset[bytes] = frozenset()
        self._count_when = 0

    def served(self) -> list[int]:
        """Blocks served of each request."""
        requests = [line["hash_ids"] for line in self._lines]
        return list(replay_trace.served_by_the_index(requests, self._capacity, self._follow, None, self._spared))

    def _follow(self, index: SlabIndex) -> None:
        """After each request: it is stored, and its hints are followed."""
        self._lease()
        line = self._lines[self._number]
        request, session = line["hash_ids"], line["session"]
        for block in request:
            if self._owners.setdefault(block, session) != session:
                self._shared.add(block)
        if "supersede" in self._kinds and session not in self._silent:
            # An agent knows what it dropped, and a router which prompts others share.
            dead = set(self._before.get(session, ())) - set(request)
            if self._number not in self._next:
                dead |= set(request)
            self._demote(index, dead - self._later[self._number] - self._shared)
            self._before[session] = request
        self._number += 1

    def _demote(self, index: SlabIndex, blocks: set[int]) -> None:
        hashes = {replay_trace.key_of(block)[16:] for block in blocks}
        leased = {page_hash for lease in self._leases.values() for page_hash in lease.hashes}
        index.demote(sorted(hashes - leased))

    def _lease(self) -> None:
        line = self._lines[self._number]
        self._leases.pop(line["session"], None)
        until = self._next.get(self._number)
        if until is not None and "retain" in self._kinds and line["session"] not in self._silent:
            until = until if self._ttl is None else max(until, line["timestamp"] + 1000 * self._ttl)
            hashes = tuple(replay_trace.key_of(block)[16:] for block in line["hash_ids"])
            self._leases[line["session"]] = Pin("@", line["timestamp"], until, hashes)

    def _spared(self, index: SlabIndex) -> np.ndarray:
        """Before each write for a request, whose own lease counts already: as pins.py has it."""
        self._lease()
        if index.inserts >= self._count_when:
            slots = sum(slab.slots * slab.slot_size for slab in index.view().slabs.values())
            limit = slots // _PINNED_PART
            _, self._kept, looked_up = kept_pages(list(self._leases.values()), index.occupied_by, limit)
            self._count_when = index.inserts + count_after(looked_up)
        words = PageKeys.of_joined(bytes(16), b"".join(self._kept)).words
        return np.unique(hashes_of(words))


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
    parser.add_argument("--ttl", type=float)
    parser.add_argument("--every-other", action="store_true")
    arguments = parser.parse_args()
    print("trace                       sessions   slots  without  retain  supersede    both  optimum  closed by each")
    for trace, concurrent in itertools.product(arguments.traces, arguments.concurrent):
        recorded = [json.loads(line) for line in trace.read_text().splitlines() if line.strip()]
        names = list(dict.fromkeys(line["session"] for line in recorded))
        names = names if arguments.half is None else names[arguments.half :: 2]
        lines = run_together([line for line in recorded if line["session"] in names], concurrent)
        requests = [line["hash_ids"] for line in lines]
        blocks = len({block for request in requests for block in request})
        silent = frozenset(names[1::2] if arguments.every_other else ())
        told = [number for number, line in enumerate(lines) if not silent or line["session"] in silent]
        uses = sum(len(requests[number]) for number in told)
        for part in _PARTS:
            capacity = max(64, blocks // part)
            kinds = "", "retain", "supersede", "retain supersede"
            of_each = [Oracle(lines, capacity, kind, arguments.ttl, silent).served() for kind in kinds]
            of_each.append(list(replay_trace.served_by_the_optimum(requests, capacity)))
            *served, best = [sum(found[number] for number in told) / uses for found in of_each]
            gap = best - served[0] or math.nan
            closed = "  ".join(f"{(share - served[0]) / gap:6.2f}" for share in served[1:])
            shares = "  ".join(f"{share:7.3f}" for share in (*served, best))
            print(f"{trace.stem[:28]:28s} {concurrent:7d}  {capacity:6d}  {shares}  {closed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

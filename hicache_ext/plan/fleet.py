"""A fleet on paper: nodes with caches of their own, a pool that they share, a router.

A request goes to one node. What its cache or the pool has of the leading run is read, the rest is computed and written
to both. Everything happens in the order of the requests, each at one moment: writes that wait and reads that are late
are not simulated. Caches keep what was used last: those of nodes the tails of chains less long than their heads, as the
file tier's first candidate does (eviction.py), the pool each block by itself, as Redis does.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from hicache_ext.plan.traces import Trace

Router = Literal["random", "session", "prefix"]
ROUTERS: tuple[str, ...] = get_args(Router)
NEAR, POOL, COMPUTED, WRITTEN_NEAR, WRITTEN_POOL, HINTED = range(6)
_BALANCE = 1.25
"""A router by prefix passes a node over that has had this many times its share of blocks."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Capacities in blocks of the trace; None is without limit, 0 is none."""

    nodes: int = 1
    near: int | None = 0
    """Of each node."""
    pool: int | None = 0
    router: Router = "session"
    promote: bool = True
    """What comes from the pool is kept near, too."""
    decode: bool = False
    """Decode nodes write what they generate to the pool."""
    hints: bool = False
    """And the node that will be asked next brings it near."""


@dataclass(slots=True)
class Outcome:
    """Blocks by request and in sum; columns are NEAR to HINTED."""

    fleet: Fleet
    per_request: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int32]
    totals: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.totals = self.per_request.sum(axis=0)

    @property
    def written_by_node(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.nodes, self.per_request[:, WRITTEN_NEAR], self.fleet.nodes).astype(np.int64)

    @property
    def uses(self) -> int:
        return int(self.totals[[NEAR, POOL, COMPUTED]].sum())

    def share(self, *columns: int) -> float:
        """Of all blocks asked for."""
        return float(self.totals[list(columns)].sum()) / self.uses if self.uses else 0.0

    @property
    def hit_share(self) -> float:
        return self.share(NEAR, POOL)


Cache = OrderedDict[int, None]
"""The blocks in a cache, the one used longest ago first."""


def simulate(trace: Trace, fleet: Fleet, nodes: npt.NDArray[np.int32] | None = None) -> Outcome:
    """``nodes``: what ``routed`` says, where that is known already.

    Raises ValueError for hints without decode nodes, or without a pool. Some ten million blocks of requests take ten
    seconds.
    """
    if fleet.hints and not (fleet.decode and fleet.pool != 0):
        raise ValueError("hints tell of what decode nodes write to a pool")
    nodes = routed(trace, fleet.nodes, fleet.router) if nodes is None else nodes
    most_near, most_pool = (trace.distinct if most is None else most for most in (fleet.near, fleet.pool))
    of_nodes, pool = [Cache() for _ in range(fleet.nodes)], Cache()
    generated = _generated(trace) if fleet.decode else {}
    per_request = np.zeros((len(trace), HINTED + 1), np.int64)
    for request, (chain, node) in enumerate(zip(trace.chains(), nodes.tolist(), strict=True)):
        near, run = of_nodes[node], 0
        # As a look-up: the leading run, each page wherever it is.
        for block in chain:
            if block not in near and block not in pool:
                break
            run += 1
        read, computed = (chain, []) if run == len(chain) else (chain[:run], chain[run:])
        from_pool = [block for block in read if block not in near] if pool else []
        written_near = written_pool = hinted = 0
        if most_near:
            kept = chain if fleet.promote or not from_pool else [block for block in read if block in near] + computed
            written_near = _use(near, reversed(kept), most_near)
        if most_pool:
            written_pool = _use(pool, from_pool, most_pool) + _use(pool, computed, most_pool)
        if answer := generated.get(request):
            written_pool += _use(pool, [block for block in answer if block not in pool], most_pool)
            if fleet.hints and most_near:
                hinted = _use(near, [block for block in reversed(answer) if block not in near], most_near)
        counts = run - len(from_pool), len(from_pool), len(computed), written_near + hinted, written_pool, hinted
        per_request[request] = counts
    return Outcome(fleet, per_request, nodes)


def _use(cache: Cache, blocks: Iterable[int], most: int) -> int:
    """Use these blocks, one after the other, and evict what is too much then; how many were not there."""
    before = len(cache)
    for block in blocks:
        cache[block] = None
        cache.move_to_end(block)
    written = len(cache) - before
    while len(cache) > most:
        cache.popitem(last=False)
    return written


def routed(trace: Trace, nodes: int, router: Router) -> npt.NDArray[np.int32]:
    """The node of each request."""
    if nodes == 1:
        return np.zeros(len(trace), np.int32)
    if router == "random":
        return np.random.default_rng(1).integers(0, nodes, len(trace)).astype(np.int32)
    if router == "session":
        # By chance and for good, as a hash of a name would be.
        of_session = np.random.default_rng(1).integers(0, nodes, len(trace)).astype(np.int32)
        return of_session[sessions(trace)]
    return _by_prefix(trace, nodes)


def sessions(trace: Trace) -> npt.NDArray[np.int64]:
    """The conversation of each request: as the trace says, or else it goes on with one whose prompt it begins with, by
    whole blocks.

    A prompt that different ones begin with is no conversation that goes on, but a system prompt of strangers."""
    if trace.session is not None:
        return trace.session
    whole = np.minimum(np.diff(trace.offsets), trace.prompt // trace.block_tokens).tolist()
    following: dict[int, int] = {}
    shared: set[int] = set()
    for chain, length in zip(trace.chains(), whole, strict=True):
        for block, after in itertools.pairwise(chain[:length]):
            if following.setdefault(block, after) != after:
                shared.add(block)
    ends: dict[int, int] = {}
    """Last whole block of a prompt, where nobody had it before -> its session."""
    seen: set[int] = set()
    found = np.zeros(len(trace), np.int64)
    count = 0
    for number, (chain, length) in enumerate(zip(trace.chains(), whole, strict=True)):
        session = next((ends[block] for block in reversed(chain) if block in ends), None)
        if session is None:
            session, count = count, count + 1
        found[number] = session
        if length and chain[length - 1] not in seen and chain[length - 1] not in shared:
            ends[chain[length - 1]] = session
        seen.update(chain)
    return found


def _by_prefix(trace: Trace, nodes: int) -> npt.NDArray[np.int32]:
    """The node that had the longest prefix last, unless it has had too much; else the one that has had least."""
    last: dict[int, int] = {}
    load = np.zeros(nodes, np.int64)
    total = 0
    found = np.zeros(len(trace), np.int32)
    for number, chain in enumerate(trace.chains()):
        node = next((last[block] for block in reversed(chain) if block in last), -1)
        if node < 0 or load[node] > _BALANCE * (total / nodes) + len(chain):
            node = int(load.argmin())
        load[node] += len(chain)
        total += len(chain)
        found[number] = node
        last.update(dict.fromkeys(chain, node))
    return found


def _generated(trace: Trace) -> dict[int, list[int]]:
    """The blocks of the conversation's next prompt that the answer of a request fills."""
    generated: dict[int, list[int]] = {}
    before: dict[int, int] = {}
    of_session = sessions(trace).tolist()
    for number, chain in enumerate(trace.chains()):
        earlier = before.get(of_session[number])
        before[of_session[number]] = number
        if earlier is not None:
            # Whole blocks alone; the last one of a prompt may be a part, and is another block when it is filled.
            prompt, answer = int(trace.prompt[earlier]), int(trace.output[earlier])
            generated[earlier] = chain[prompt // trace.block_tokens : (prompt + answer) // trace.block_tokens]
    return generated

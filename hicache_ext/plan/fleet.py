"""A simulated fleet: nodes with caches of their own, a pool that they share, and a router.

Each request goes to one node. The leading run that its cache or the pool holds is read; the rest is computed and
written to both. Requests are simulated in order, each in an instant: queued writes and late reads are not modelled.
All caches are LRU. A node's cache frees the tails of chains first, like the file tier's first candidate (eviction.py);
the pool treats every block alike, like Redis.
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
"""A prefix router skips a node that has received this many times its share of blocks."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Capacities are in blocks of the trace; None means unlimited, 0 means absent."""

    nodes: int = 1
    near: int | None = 0
    """Capacity of each node's own cache."""
    pool: int | None = 0
    router: Router = "session"
    promote: bool = True
    """Whether blocks read from the pool are also kept in the node's cache."""
    decode: bool = False
    """Whether decode nodes write what they generate to the pool."""
    hints: bool = False
    """Whether the node that gets the next request also fetches it into its cache."""


@dataclass(slots=True)
class Outcome:
    """Blocks per request, and their totals; the columns are NEAR to HINTED."""

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
        """Return the share of all requested blocks that falls to these columns."""
        return float(self.totals[list(columns)].sum()) / self.uses if self.uses else 0.0

    @property
    def hit_share(self) -> float:
        return self.share(NEAR, POOL)


Cache = OrderedDict[int, None]
"""The blocks in a cache, least recently used first."""


def simulate(trace: Trace, fleet: Fleet, nodes: npt.NDArray[np.int32] | None = None) -> Outcome:
    """Simulate ``trace`` on ``fleet``. ``nodes``: the result of ``routed``, if the caller has it already.

    Raises ValueError for hints without decode nodes or without a pool. Ten million requested blocks take about ten
    seconds.
    """
    if fleet.hints and not (fleet.decode and fleet.pool != 0):
        raise ValueError("hints tell of what decode nodes write to a pool")
    nodes = routed(trace, fleet.nodes, fleet.router) if nodes is None else nodes
    most_near, most_pool = (trace.distinct if most is None else most for most in (fleet.near, fleet.pool))
    node_caches, pool = [Cache() for _ in range(fleet.nodes)], Cache()
    generated = _generated(trace) if fleet.decode else {}
    per_request = np.zeros((len(trace), HINTED + 1), np.int64)
    for request, (chain, node) in enumerate(zip(trace.chains(), nodes.tolist(), strict=True)):
        near, run = node_caches[node], 0
        # Like a lookup: the leading run, each page from wherever it is.
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
    """Touch these blocks in order, then evict the excess. Return how many of them were absent."""
    before = len(cache)
    for block in blocks:
        cache[block] = None
        cache.move_to_end(block)
    written = len(cache) - before
    while len(cache) > most:
        cache.popitem(last=False)
    return written


def routed(trace: Trace, nodes: int, router: Router) -> npt.NDArray[np.int32]:
    """Return the node that serves each request."""
    if nodes == 1:
        return np.zeros(len(trace), np.int32)
    if router == "random":
        return np.random.default_rng(1).integers(0, nodes, len(trace)).astype(np.int32)
    if router == "session":
        # Random but sticky, like a hash of the session's name.
        node_of_session = np.random.default_rng(1).integers(0, nodes, len(trace)).astype(np.int32)
        return node_of_session[sessions(trace)]
    return _by_prefix(trace, nodes)


def sessions(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the conversation of each request: the trace's own, or else the one whose prompt, in whole blocks, this
    request begins with.

    A prompt that diverging requests begin with is a system prompt shared by strangers, not a conversation."""
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
    """Last whole block of a prompt, if no earlier request had it -> its session."""
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
    """Choose the node that last had the longest prefix, unless it is overloaded; otherwise the least loaded one."""
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
    """Return, by request, the blocks of the conversation's next prompt that its answer fills."""
    generated: dict[int, list[int]] = {}
    before: dict[int, int] = {}
    session_of = sessions(trace).tolist()
    for number, chain in enumerate(trace.chains()):
        earlier = before.get(session_of[number])
        before[session_of[number]] = number
        if earlier is not None:
            # Whole blocks only: a partial last block of a prompt becomes a different block once it is filled.
            prompt, answer = int(trace.prompt[earlier]), int(trace.output[earlier])
            generated[earlier] = chain[prompt // trace.block_tokens : (prompt + answer) // trace.block_tokens]
    return generated

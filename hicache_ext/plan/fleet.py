"""A fleet on paper: nodes with caches of their own, a pool that they share, a router; by the tiers' own policy code.

A request goes to one node. What its cache or the pool has of the leading run is read, the rest is computed and written
to both. Everything happens in the order of the requests, each at one moment: writes that wait and reads that are late
are not simulated.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.errors import HicacheExtError
from hicache_ext.native import address
from hicache_ext.plan.traces import Trace
from hicache_ext.storage.tiers.file import eviction

POLICIES = (*eviction.POLICIES, "lru")
"""The file tier's candidates; least recently used, as of a pool that goes by it."""
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
    near_policy: str = POLICIES[0]
    """One of ``POLICIES``."""
    pool_policy: str = "lru"


_STATE_WORDS, _WRITTEN = 7, 4


class _Replay(native.Arguments):
    function = "hicache_replay"
    _fields_ = native.words(
        "offsets request_count blocks nodes node_count near_capacity near_ghosts near_policy"
        " pool_capacity pool_ghosts pool_policy promotes hints ahead out states"
    )


@dataclass(slots=True)
class Outcome:
    """Blocks by request and in sum; columns are NEAR to HINTED."""

    fleet: Fleet
    per_request: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int32]
    states: npt.NDArray[np.int64]
    """Of the cache of each node, and of the pool: ``struct state`` of native/plan.c."""
    totals: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.totals = self.per_request.sum(axis=0)

    @property
    def written_by_node(self) -> npt.NDArray[np.int64]:
        return self.states[:-1, _WRITTEN]

    @property
    def uses(self) -> int:
        return int(self.totals[[NEAR, POOL, COMPUTED]].sum())

    def share(self, *columns: int) -> float:
        """Of all blocks asked for."""
        return float(self.totals[list(columns)].sum()) / self.uses if self.uses else 0.0

    @property
    def hit_share(self) -> float:
        return self.share(NEAR, POOL)


def simulate(trace: Trace, fleet: Fleet, nodes: npt.NDArray[np.int32] | None = None) -> Outcome:
    """``nodes``: what ``routed`` says, where that is known already.

    Raises ValueError for hints without decode nodes, or without a pool; HicacheExtError without the native core: Python
    would take a hundred times as long; OSError where memory is short.
    """
    if fleet.hints and not (fleet.decode and fleet.pool != 0):
        raise ValueError("hints tell of what decode nodes write to a pool")
    reason = native.why_not()
    core = native.core() if reason is None else None
    if core is None:
        raise HicacheExtError(f"a plan needs the native core: {reason}; {native.REMEDY}")
    nodes = np.ascontiguousarray(routed(trace, fleet.nodes, fleet.router) if nodes is None else nodes, np.int32)
    near, pool = _cache(fleet.near, fleet.near_policy, trace), _cache(fleet.pool, fleet.pool_policy, trace)
    ahead = _generated(trace) if fleet.decode else np.zeros((len(trace), 3), np.int64)
    out, states = np.zeros((len(trace), 6), np.int64), np.zeros((fleet.nodes + 1, _STATE_WORDS), np.int64)
    requests = address(trace.offsets), len(trace), address(trace.blocks), address(nodes), fleet.nodes
    found = address(ahead), address(out), address(states)
    failed = core(_Replay(*requests, *near, *pool, fleet.promote, fleet.hints, *found))
    if failed:
        raise OSError(-failed, os.strerror(-failed), "a fleet of this size")
    return Outcome(fleet, out, nodes, states)


def _cache(given: int | None, policy: str, trace: Trace) -> tuple[int, int, int]:
    """Capacity, ghosts and policy of caches. Beyond all blocks of the trace there is nothing more to hold."""
    capacity = trace.distinct if given is None else min(given, trace.distinct)
    ghosts = 0 if policy == "lru" or not capacity else eviction.ghost_limit(capacity)
    return capacity, ghosts, POLICIES.index(policy)


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


def _generated(trace: Trace) -> npt.NDArray[np.int64]:
    """Per request, which blocks of the conversation's next prompt its answer fills: first and last position in
    ``trace.blocks``, and where that prompt begins."""
    ahead = np.zeros((len(trace), 3), np.int64)
    before: dict[int, int] = {}
    of_session = sessions(trace)
    lengths = np.diff(trace.offsets)
    for number in range(len(trace)):
        earlier = before.get(int(of_session[number]))
        before[int(of_session[number])] = number
        if earlier is None:
            continue
        tokens = int(trace.prompt[earlier] + trace.output[earlier])
        begin = int(trace.offsets[number])
        # Whole blocks alone; the last one of a prompt may be a part, and is another block when it is filled.
        first = min(int(lengths[number]), int(trace.prompt[earlier]) // trace.block_tokens)
        last = min(int(lengths[number]), tokens // trace.block_tokens)
        if last > first:
            ahead[earlier] = (begin + first, begin + last, begin)
    return ahead

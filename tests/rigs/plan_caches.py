"""What ``hicache_replay`` (native/plan.c) does, in Python: caches of many nodes and a pool, page by page.

The policy is the tiers' own: the priorities are those of ranks.py, by any of its candidates. A cache
keeps to one of them.

A cache is column ``n`` of the arrays of ``Caches``. Its pages are in slots; a binary heap orders them by (priority,
block), a hash table finds them. What is remembered of evicted pages (ghosts) is a ring, oldest first, and a table.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.plan import fleet
from hicache_ext.plan.fleet import Fleet
from hicache_ext.plan.traces import Trace
from hicache_ext.storage.tiers.file import eviction
from tests.rigs.ranks import MAX_HITS, RENEWAL_SHIFT, learned, priority_of, reuse_distance

Words = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]

LRU: Final = len(eviction.POLICIES)

COUNT, INSERTS, DISTANCE_SUM, REUSES, WRITTEN, EVICTED, RING_FIRST, RING_LAST, GHOSTS = range(9)
"""Words of a cache: pages in it; the clock; pages ever written and evicted; its ring of ghosts."""
STATE_WORDS = 9

_MULTIPLIER = 0x9E3779B1


class Caches(NamedTuple):
    """Arrays [cache, ...]. Zeros are pages of memory that nobody pays for before they are used."""

    state: Words
    block: Numbers
    priority: Words
    used: Words
    hits: Words
    heap: Numbers
    place: Numbers
    """Slot -> its place in the heap."""
    table: Numbers
    """Slot + 1, or 0."""
    ghost_block: Numbers
    """Block + 1, or 0 for one that was forgotten."""
    ghost_used: Words
    ghost_hits: Words
    ghost_table: Numbers
    """Place in the ring + 1, or 0."""


def simulated(trace: Trace, of: Fleet) -> tuple[Words, Words]:
    """``per_request`` and ``states`` of ``simulate``."""
    near, pool = (fleet._cache(given, "lru", trace)[0] for given in (of.near, of.pool))
    caches = new_caches(of.nodes if near else 1, max(1, near), ghosts=None if near else 0)
    shared = new_caches(1, max(1, pool), ghosts=None if pool else 0)
    policies = [fleet.POLICIES.index(policy) for policy in (of.near_policy, of.pool_policy)]
    settings = np.array((near > 0, pool > 0, *policies, of.promote, of.hints), np.int64)
    ahead = fleet._generated(trace) if of.decode else np.zeros((len(trace), 3), np.int64)
    out, states = np.zeros((len(trace), 6), np.int64), np.zeros((of.nodes + 1, STATE_WORDS), np.int64)
    nodes = fleet.routed(trace, of.nodes, of.router)
    replay(trace.offsets, trace.blocks, nodes, caches, shared, settings, ahead, 0, len(trace), out)
    if near:
        states[:-1] = caches.state
    if pool:
        states[-1] = shared.state
    return out, np.delete(states, (RING_FIRST, RING_LAST), axis=1)


def new_caches(count: int, capacity: int, *, ghosts: int | None = None) -> Caches:
    """``count`` empty caches of ``capacity`` pages each. ``ghosts``: as the policy says, unless given."""
    limit = eviction.ghost_limit(capacity) if ghosts is None else ghosts
    table, ghost_table = _power_of_two(2 * capacity), _power_of_two(4 * max(1, limit))
    ring = max(1, 2 * limit)
    return Caches(
        np.zeros((count, STATE_WORDS), np.int64),
        np.zeros((count, capacity), np.int32),
        np.zeros((count, capacity), np.int64),
        np.zeros((count, capacity), np.int64),
        np.zeros((count, capacity), np.int64),
        np.zeros((count, capacity), np.int32),
        np.zeros((count, capacity), np.int32),
        np.zeros((count, table), np.int32),
        np.zeros((count, ring), np.int32),
        np.zeros((count, ring), np.int64),
        np.zeros((count, ring), np.int64),
        np.zeros((count, ghost_table), np.int32),
    )


def _power_of_two(least: int) -> int:
    return 1 << max(1, (least - 1).bit_length())


def _bucket(block: int, mask: int) -> int:
    mixed = (int(block) * _MULTIPLIER) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) & mask


def find(caches: Caches, n: int, block: int) -> int:
    """The slot of a page, or -1."""
    table = caches.table[n]
    mask = len(table) - 1
    at = _bucket(block, mask)
    while table[at]:
        slot = table[at] - 1
        if caches.block[n, slot] == block:
            return int(slot)
        at = (at + 1) & mask
    return -1


def _enter(table: Numbers, names: Numbers, shift: int, block: int, number: int) -> None:
    mask = len(table) - 1
    at = _bucket(block, mask)
    while table[at]:
        at = (at + 1) & mask
    table[at] = number + 1


def _leave(table: Numbers, names: Numbers, shift: int, block: int, number: int) -> None:
    """Close the gap: what follows moves up (Knuth, 6.4 R). ``names[i] - shift`` is the block of entry ``i``."""
    mask = len(table) - 1
    at = _bucket(block, mask)
    while table[at] != number + 1:
        at = (at + 1) & mask
    gap = at
    while True:
        at = (at + 1) & mask
        if not table[at]:
            break
        home = _bucket(names[table[at] - 1] - shift, mask)
        if ((at - home) & mask) >= ((at - gap) & mask):
            table[gap] = table[at]
            gap = at
    table[gap] = 0


def _is_before(caches: Caches, n: int, one: int, other: int) -> bool:
    a, b = caches.priority[n, one], caches.priority[n, other]
    return bool(a < b or (a == b and caches.block[n, one] < caches.block[n, other]))


def _sift(caches: Caches, n: int, at: int, count: int) -> None:
    """Put the slot at a place of the heap where it belongs."""
    heap, place = caches.heap[n], caches.place[n]
    slot = heap[at]
    while at:
        above = (at - 1) >> 1
        if not _is_before(caches, n, slot, heap[above]):
            break
        heap[at] = heap[above]
        place[heap[at]] = at
        at = above
    while True:
        below = 2 * at + 1
        if below >= count:
            break
        if below + 1 < count and _is_before(caches, n, heap[below + 1], heap[below]):
            below += 1
        if not _is_before(caches, n, heap[below], slot):
            break
        heap[at] = heap[below]
        place[heap[at]] = at
        at = below
    heap[at] = slot
    place[slot] = at


def _remember(caches: Caches, n: int, slot: int) -> None:
    """A ghost of the page in a slot."""
    state, ring = caches.state[n], len(caches.ghost_block[n])
    limit = ring >> 1
    if not limit:
        return
    if state[RING_LAST] - state[RING_FIRST] == ring:
        _compact(caches, n)
    at = state[RING_LAST] % ring
    state[RING_LAST] += 1
    caches.ghost_block[n, at] = caches.block[n, slot] + 1
    caches.ghost_used[n, at] = caches.used[n, slot]
    caches.ghost_hits[n, at] = caches.hits[n, slot]
    _enter(caches.ghost_table[n], caches.ghost_block[n], 1, caches.block[n, slot], at)
    state[GHOSTS] += 1
    if state[GHOSTS] > limit:
        at = state[RING_FIRST] % ring
        while not caches.ghost_block[n, at]:
            state[RING_FIRST] += 1
            at = state[RING_FIRST] % ring
        _forget(caches, n, at)


def _forget(caches: Caches, n: int, at: int) -> None:
    _leave(caches.ghost_table[n], caches.ghost_block[n], 1, caches.ghost_block[n, at] - 1, at)
    caches.ghost_block[n, at] = 0
    caches.state[n, GHOSTS] -= 1


def _compact(caches: Caches, n: int) -> None:
    """The ring without what was forgotten in it."""
    state, ring = caches.state[n], len(caches.ghost_block[n])
    to = state[RING_FIRST]
    for number in range(state[RING_FIRST], state[RING_LAST]):
        at = number % ring
        name = caches.ghost_block[n, at]
        if not name:
            continue
        new = to % ring
        if new != at:
            _leave(caches.ghost_table[n], caches.ghost_block[n], 1, name - 1, at)
            caches.ghost_block[n, new] = name
            caches.ghost_used[n, new] = caches.ghost_used[n, at]
            caches.ghost_hits[n, new] = caches.ghost_hits[n, at]
            caches.ghost_block[n, at] = 0
            _enter(caches.ghost_table[n], caches.ghost_block[n], 1, name - 1, new)
        to += 1
    state[RING_LAST] = to


def _ghost_of(caches: Caches, n: int, block: int) -> int:
    table, mask = caches.ghost_table[n], len(caches.ghost_table[n]) - 1
    at = _bucket(block, mask)
    while table[at]:
        if caches.ghost_block[n, table[at] - 1] == block + 1:
            return int(table[at] - 1)
        at = (at + 1) & mask
    return -1


def _rank(caches: Caches, n: int, policy: int, hits: int, is_new: bool, depth: int, before: int) -> int:
    """The priority of a page used now. ``before``: that of the page before it, or -1."""
    state, capacity = caches.state[n], len(caches.block[n])
    distance = reuse_distance(capacity, state[DISTANCE_SUM], state[REUSES])
    return int(_bounded(priority_of(policy, capacity, state[INSERTS], distance, hits, is_new, depth), before))


def _bounded(priority: int, before: int) -> int:
    return priority if before < 0 else max(0, min(priority, before - 1))


def _learn(caches: Caches, n: int, distance: int) -> None:
    state = caches.state[n]
    state[DISTANCE_SUM], state[REUSES] = learned(state[DISTANCE_SUM], state[REUSES], max(0, distance))


def insert(caches: Caches, n: int, policy: int, block: int, depth: int, before: int) -> int:
    """Write a page that is absent; its priority."""
    state, capacity = caches.state[n], len(caches.block[n])
    if state[COUNT] >= capacity:
        slot = caches.heap[n, 0]
        _leave(caches.table[n], caches.block[n], 0, caches.block[n, slot], slot)
        if policy != LRU:
            _remember(caches, n, slot)
        state[EVICTED] += 1
        at = 0
    else:
        slot = state[COUNT]
        at = state[COUNT]
        state[COUNT] += 1
        caches.heap[n, at] = slot
    state[INSERTS] += 1
    state[WRITTEN] += 1
    hits = 0
    if policy != LRU:
        ghost = _ghost_of(caches, n, block)
        if ghost >= 0:
            _learn(caches, n, state[INSERTS] - caches.ghost_used[n, ghost])
            hits = min(caches.ghost_hits[n, ghost] + 1, MAX_HITS)
            _forget(caches, n, ghost)
        priority = _rank(caches, n, policy, hits, True, depth, before)
    else:
        priority = state[INSERTS]
    caches.block[n, slot] = block
    caches.priority[n, slot] = priority
    caches.used[n, slot] = state[INSERTS]
    caches.hits[n, slot] = hits
    _enter(caches.table[n], caches.block[n], 0, block, slot)
    _sift(caches, n, at, state[COUNT])
    return int(priority)


def use(caches: Caches, n: int, policy: int, slot: int, depth: int, before: int) -> int:
    """A page that is there is used; its priority."""
    state, capacity = caches.state[n], len(caches.block[n])
    priority = caches.priority[n, slot]
    if policy == LRU:
        state[INSERTS] += 1
        new = state[INSERTS]
    else:
        distance = reuse_distance(capacity, state[DISTANCE_SUM], state[REUSES])
        if caches.used[n, slot] < state[INSERTS] - (min(capacity, distance) >> RENEWAL_SHIFT):
            _learn(caches, n, state[INSERTS] - caches.used[n, slot])
            caches.hits[n, slot] = min(caches.hits[n, slot] + 1, MAX_HITS)
            caches.used[n, slot] = state[INSERTS]
        new = _bounded(max(priority, _rank(caches, n, policy, caches.hits[n, slot], False, depth, -1)), before)
    if new != priority:
        caches.priority[n, slot] = new
        _sift(caches, n, caches.place[n, slot], state[COUNT])
    return int(new)


def replay(
    offsets: Words,
    blocks: Numbers,
    nodes: Numbers,
    near: Caches,
    pool: Caches,
    settings: Words,
    ahead: Words,
    first: int,
    last: int,
    out: Words,
) -> None:
    """Requests ``first`` to ``last`` through the caches of their nodes and the pool.

    ``settings``: whether nodes have caches of their own, whether there is a pool, the policies of both, whether what
    comes from the pool is kept near, whether hints bring what decode nodes write near.
    ``ahead``: per request, first and last position in ``blocks`` of what a decode node writes to the pool when it has
    ended (equal: nothing). ``out``: per request, pages that came from near, from the pool, that were computed, written
    near and written to the pool, and those that hints brought near.
    """
    has_near, has_pool = settings[0], settings[1]
    near_policy, pool_policy = settings[2], settings[3]
    promotes, hints = settings[4], settings[5]
    for request in range(first, last):
        n = nodes[request]
        begin, end = offsets[request], offsets[request + 1]
        # As a look-up: the leading run, each page wherever it is.
        run = begin
        while run < end:
            if not (has_near and find(near, n, blocks[run]) >= 0) and not (
                has_pool and find(pool, 0, blocks[run]) >= 0
            ):
                break
            run += 1
        before = -1
        pool_before = -1
        for at in range(begin, end):
            block, depth = blocks[at], at - begin
            was_near = False
            if has_near:
                slot = find(near, n, block)
                was_near = slot >= 0
                if was_near:
                    before = use(near, n, near_policy, slot, depth, before)
                elif at >= run or promotes:
                    before = insert(near, n, near_policy, block, depth, before)
                    out[request, 3] += 1
                else:
                    before = -1
            if at < run:
                out[request, 0 if was_near else 1] += 1
            else:
                out[request, 2] += 1
            if has_pool:
                slot = find(pool, 0, block)
                if slot < 0:
                    # Of the run, a page that is near alone: nobody writes it again.
                    if at >= run:
                        pool_before = insert(pool, 0, pool_policy, block, depth, pool_before)
                        out[request, 4] += 1
                    else:
                        pool_before = -1
                elif not was_near or at >= run:
                    pool_before = use(pool, 0, pool_policy, slot, depth, pool_before)
                else:
                    pool_before = priority_in(pool, slot)
        for at in range(ahead[request, 0], ahead[request, 1]):
            block, depth = blocks[at], at - ahead[request, 2]
            if has_pool and find(pool, 0, block) < 0:
                insert(pool, 0, pool_policy, block, depth, -1)
                out[request, 4] += 1
            if hints and has_near and find(near, n, block) < 0:
                insert(near, n, near_policy, block, depth, -1)
                out[request, 3] += 1
                out[request, 5] += 1


def priority_in(caches: Caches, slot: int) -> int:
    return int(caches.priority[0, slot])

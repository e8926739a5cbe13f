"""Replays requests, each the chain of prefix blocks of a prompt, through eviction policies: how many uses each serves.

A request looks up its chain: the leading run of present blocks is served; every block after the first missing one is
written (a present one beyond a gap counts as used, not as served). A cache is empty at first, and first uses count.

Policies:
  ours         the file tier's policy (eviction_policy.py), with its ghost list
  ours, index  the tier itself, through its index
  LRU          blocks used in chain order: the heads of a chain are its oldest blocks
  LRU tails    of the blocks of one request the tail is the oldest
  optimum      clairvoyant: Belady's MIN with bypass. Of the blocks cached and just used it drops the one whose next use
               is farthest, of one request the deepest; a block that is never used again is not kept. As every use of a
               block is a use of all blocks before it, what it holds is always a set of whole prefixes: the exact
               maximum, with the prefix condition, of any policy that may also refuse to keep a block.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import json
import random
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.eviction_policy import Clock, Ghost, PageByPage, Rank
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.shapes import SlotReferences
from tests.rigs.bare_index import new_index_in

Requests = Sequence[Sequence[int]]
_SLOT_SIZE = 132 * 1024
"""A slot of a page of 128 KiB: fifteen in a group of neighbours that are evicted together."""
IDENTITY = bytes(16)
_NONE = np.empty(0, np.int64)
CAPACITIES = (1_000, 10_000, 50_000)


# -- policies ------------------------------------------------------------------------------------------------------


def leading_run(request: Sequence[int], cached: Iterable[int]) -> int:
    present = 0
    for block in request:
        if block not in cached:
            break
        present += 1
    return present


class OurCache:
    """The tier's policy over a heap of priorities, which stands for the index's ordered database."""

    def __init__(self, capacity: int) -> None:
        self.policy = PageByPage(capacity)
        self.clock = Clock()
        self.ranks: dict[int, Rank] = {}
        self.renewals = 0
        self.uses = 0
        self._order: list[tuple[int, int]] = []
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._ghost_limit = eviction.ghost_limit(capacity)

    def request(self, request: Sequence[int]) -> int:
        served = leading_run(request, self.ranks)
        before: Rank | None = None
        for depth, block in enumerate(request):
            rank = self.ranks.get(block)
            if rank is None:
                if len(self.ranks) >= self.policy.capacity:
                    self._evict()
                ghost = self._ghosts.pop(block, None)
                self.clock, rank = self.policy.inserted(self.clock, depth, before, ghost)
                self._put(block, rank)
            else:
                self.uses += 1
                renewed = self.policy.renewed(self.clock, rank, depth, before)
                if renewed is not None:
                    self.renewals += 1
                    self.clock, rank = renewed
                    self._put(block, rank)
            before = rank
        return served

    def _put(self, block: int, rank: Rank) -> None:
        self.ranks[block] = rank
        heapq.heappush(self._order, (rank.priority, block))

    def _evict(self) -> None:
        while True:
            priority, block = heapq.heappop(self._order)
            rank = self.ranks.get(block)
            if rank is not None and rank.priority == priority:
                break
        del self.ranks[block]
        self._ghosts[block] = Ghost.of(rank)
        if len(self._ghosts) > self._ghost_limit:
            self._ghosts.popitem(last=False)


def ours(requests: Requests, capacity: int) -> int:
    return sum(map(OurCache(capacity).request, requests))


def ours_in_the_index(requests: Requests, capacity: int) -> int:
    """What the tier does, through its index: slots, groups of neighbours, ghosts forgotten together, the policy of now;
    everything but I/O."""
    return sum(served_by_the_index(requests, capacity))


def served_by_the_index(
    requests: Requests,
    capacity: int,
    look: Callable[[SlabIndex], object] | None = None,
    policy: int | None = None,
    spared: Callable[[SlabIndex], np.ndarray] = lambda _: _NONE,
    tenancies: Callable[[SlabIndex], Iterator[np.ndarray | None]] = lambda _: itertools.repeat(None),
) -> Iterator[int]:
    """Blocks served of each request by a tier with so many slots. ``look`` is called after each. With ``policy`` the
    tier keeps to this candidate (``eviction.POLICIES``), whatever serves most. ``spared``: HASH of the leased pages,
    sorted; ``tenancies``: for whom each request is."""
    with index_of(capacity) as index:
        if policy is not None:
            index.memory.header[index_words.POLICY] = policy
            index.memory.small[index_words.NEXT] = eviction.MAX_PRIORITY
        # A batch of SGLang's is a small part of a real tier.
        portion = max(1, min(128, capacity // 16))
        for request, tenancy in zip(requests, tenancies(index), strict=False):
            keys = [key_of(block) for block in request]
            found = index.locate(keys)
            present = set(found.positions.tolist())
            served = leading_run(range(len(keys)), present)
            index.note_hits(found, keys, len(found))
            missing = [position for position in range(len(keys)) if position not in present]
            for first in range(0, len(missing), portion):
                if not store(index, keys, missing[first : first + portion], spared(index), tenancy):
                    break
            yield served
            if look is not None:
                look(index)


@contextmanager
def index_of(capacity: int) -> Iterator[SlabIndex]:
    """The index of an empty tier with so many slots."""
    with tempfile.TemporaryDirectory() as directory, new_index_in(Path(directory), capacity * _SLOT_SIZE) as index:
        slab = index.begin_slab(_SLOT_SIZE, lambda _: capacity)
        assert slab is not None
        index.finish_slab(slab)
        index.register([IDENTITY])
        yield index


@functools.cache
def key_of(block: int) -> bytes:
    """Evenly spread, as SGLang's page hashes are."""
    return IDENTITY + hashlib.sha256(str(block).encode()).digest()


def store(
    index: SlabIndex,
    keys: Sequence[bytes],
    positions: Sequence[int],
    spared: np.ndarray = _NONE,
    tenancy: np.ndarray | None = None,
) -> bool:
    """Whether all were stored, so that what follows may be."""
    ticket, rows, some = index.next_ticket(), np.empty(0, np.int64), np.ones(1)
    before = keys[positions[0] - 1] if tenancy is None and positions[0] > 0 else None
    is_patient = tenancy is None and index.bound_behind(before, 0) == index_words.NO_PAGE
    while len(rows) < len(positions) and (len(some) or is_patient):
        left = len(positions) - len(rows)
        some, *_ = index.take(_SLOT_SIZE, left, ticket, 0, spared, evicting=True, tenancy=tenancy, before=before)
        rows = np.concatenate([rows, some])
    ones = np.ones(len(rows), np.int64)
    taken = SlotReferences(*index.places_of(rows), ones, np.array(positions[: len(rows)], np.int64), rows)
    tenant = 0 if tenancy is None else int(tenancy[index_words.WRITER])
    index.publish(ticket, keys, taken, taken, 0, 1, tenant)
    return len(rows) == len(positions) or tenancy is not None


def lru(requests: Requests, capacity: int) -> int:
    cached: OrderedDict[int, None] = OrderedDict()
    served = 0
    for request in requests:
        served += leading_run(request, cached)
        for block in request:
            cached[block] = None
            cached.move_to_end(block)
            if len(cached) > capacity:
                cached.popitem(last=False)
    return served


def lru_tails_first(requests: Requests, capacity: int) -> int:
    cached: OrderedDict[int, None] = OrderedDict()
    served = 0
    for request in requests:
        served += leading_run(request, cached)
        for block in reversed(request):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return served


def optimum(requests: Requests, capacity: int) -> int:
    return sum(served_by_the_optimum(requests, capacity))


def served_by_the_optimum(requests: Requests, capacity: int) -> Iterator[int]:
    """Blocks served of each request."""
    never = len(requests)
    following: list[list[int]] = []
    last: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        following.append([last.get(block, never) for block in requests[number]])
        last.update(dict.fromkeys(requests[number], number))
    following.reverse()
    cached: dict[int, tuple[int, int]] = {}
    order: list[tuple[int, int, int]] = []
    for request, next_uses in zip(requests, following, strict=True):
        yield leading_run(request, cached)
        for depth, (block, next_use) in enumerate(zip(request, next_uses, strict=True)):
            if next_use == never:
                cached.pop(block, None)
            else:
                cached[block] = (-next_use, -depth)
                heapq.heappush(order, (-next_use, -depth, block))
        while len(cached) > capacity:
            next_use, depth, block = heapq.heappop(order)
            if cached.get(block) == (next_use, depth):
                del cached[block]


POLICIES: dict[str, Callable[[Requests, int], int]] = {
    "ours": ours,
    "ours, index": ours_in_the_index,
    "LRU": lru,
    "LRU tails": lru_tails_first,
    "optimum": optimum,
}


# -- workloads -----------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[list[int]]:
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines if line.strip()]


def multi_turn(count: int, seed: int, *, documents: float = 0.0) -> list[list[int]]:
    """Conversations that grow turn by turn behind shared system prompts; ``documents`` is the share of requests that
    scan a long prompt once and never again."""
    chance = random.Random(seed)
    fresh = iter(range(1 << 60))
    systems = [[next(fresh) for _ in range(chance.randint(2, 8))] for _ in range(10)]
    due: list[tuple[float, int, list[int], int]] = []
    requests: list[list[int]] = []
    moment = 0.0
    while len(requests) < count:
        moment += 1.0
        if chance.random() < documents:
            requests.append([next(fresh) for _ in range(chance.randint(20, 150))])
        elif due and due[0][0] <= moment:
            _, _, chain, turns = heapq.heappop(due)
            chain = chain + [next(fresh) for _ in range(chance.randint(1, 6))]
            requests.append(chain)
            if turns > 1:
                heapq.heappush(due, (moment + chance.lognormvariate(5.0, 1.0), len(requests), chain, turns - 1))
        else:
            system = systems[min(int(chance.expovariate(0.5)), 9)]
            chain = system + [next(fresh) for _ in range(chance.randint(1, 20))]
            requests.append(chain)
            turns = min(int(chance.expovariate(0.3)), 20)
            if turns:
                heapq.heappush(due, (moment + chance.lognormvariate(5.0, 1.0), len(requests), chain, turns))
    return requests


def shifting_hot_set(count: int, seed: int) -> list[list[int]]:
    """Zipf-popular documents, all replaced by others half way: what was hot must go."""
    chance = random.Random(seed)
    fresh = iter(range(1 << 60))
    requests: list[list[int]] = []
    for half in (count // 2, count - count // 2):
        documents = [[next(fresh) for _ in range(chance.randint(5, 40))] for _ in range(800)]
        weights = [1 / (place + 1) for place in range(len(documents))]
        chosen = chance.choices(documents, weights, k=half)
        requests += [[*document, *(next(fresh) for _ in range(chance.randint(1, 5)))] for document in chosen]
    return requests

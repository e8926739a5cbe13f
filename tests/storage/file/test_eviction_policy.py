"""The eviction policy alone, and the replay of traces through it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import replay_trace
from benchmarks.eviction_policy import Clock, Ghost, PageByPage, Rank, after_reuse

# A tree of prompts: every path from the root is a chain, as with prefix hashes.
paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=60)


def chains(branches):
    """Each list of branches as the chain of its prefixes: equal prefixes are equal blocks."""
    return [[hash(tuple(branch[: depth + 1])) for depth in range(len(branch))] for branch in branches]


def documents(count, length, start):
    return [[start + number * length + place for place in range(length)] for number in range(count)]


@given(paths, st.integers(6, 40))
@settings(max_examples=150, deadline=None)
def test_a_head_outranks_its_tail_right_after_a_request_used_both(branches, capacity):
    cache = replay_trace.OurCache(capacity)
    for chain in chains(branches):
        cache.request(chain)
        ranked = [cache.ranks[block].priority for block in chain if block in cache.ranks]
        assert all(head > tail for head, tail in itertools.pairwise(ranked))


@given(st.integers(0, 200), st.integers(0, 7), st.integers(0, 1 << 30), st.integers(1, 1 << 20))
def test_no_page_outranks_the_page_before_it(depth, hits, priority, capacity):
    policy, clock, before = PageByPage(capacity), Clock(inserts=1000), Rank(priority, 0, 0)
    clock, rank = policy.inserted(clock, depth, before, Ghost(0, hits))
    assert rank.priority < before.priority or rank.priority == before.priority == 0
    renewed = policy.renewed(clock, Rank(priority + 10, 0, hits), depth, before)
    assert renewed is not None
    assert renewed[1].priority < before.priority or before.priority == 0


def test_the_deeper_of_two_new_chains_pages_goes_first():
    policy, clock = PageByPage(1000), Clock()
    clock, head = policy.inserted(clock, 0)
    _, tail = policy.inserted(clock, 50)
    assert tail.priority < head.priority


def test_a_second_use_right_after_the_first_writes_nothing():
    policy = PageByPage(1000)
    clock, rank = policy.inserted(Clock(), 0)
    assert policy.renewed(clock, rank, 0) is None


def test_a_use_long_after_the_last_one_raises_the_priority_and_counts():
    policy = PageByPage(1000)
    clock, rank = policy.inserted(Clock(), 0)
    later = Clock(clock.inserts + 500, clock.distance_sum, clock.reuses)
    clock, renewed = policy.renewed(later, rank, 0)
    assert renewed.priority > rank.priority
    assert renewed.hits == 1
    assert clock.reuses == 1


def test_hits_alone_cost_no_writes_once_each_page_was_used_twice():
    """With everything cached nothing is inserted, so the clock stands still."""
    cache = replay_trace.OurCache(100)
    for _ in range(2):
        for chain in documents(5, 10, 0):
            cache.request(chain)
    settled = cache.renewals
    for _ in range(48):
        for chain in documents(5, 10, 0):
            cache.request(chain)
    assert cache.uses == 49 * 50
    assert cache.renewals == settled


def test_a_returning_page_is_worth_more_with_its_ghost():
    policy, clock = PageByPage(1000), Clock(inserts=5000)
    _, stranger = policy.inserted(clock, 0)
    _, known = policy.inserted(clock, 0, None, Ghost(used=1000, hits=0))
    assert known.priority > stranger.priority
    assert (known.hits, stranger.hits) == (1, 0)


def test_a_steady_scan_does_not_displace_what_returns():
    """Five hot chains, 500 scanned pages between two uses of one, 200 slots: nothing survives that long in an LRU."""
    hot, scan = documents(5, 10, 0), documents(2000, 10, 10_000)
    requests = []
    for number in range(200):
        requests += [hot[number % 5], *scan[10 * number : 10 * number + 10]]
    cache = replay_trace.OurCache(200)
    served = [cache.request(request) for request in requests]
    assert replay_trace.lru(requests, 200) == 0
    assert sum(served[len(served) // 2 :]) > 0.95 * 100 * 10


@pytest.mark.parametrize("capacity", [50, 1000])
def test_a_hot_page_that_is_used_no_more_goes_in_the_end(capacity):
    chance = random.Random(1)
    cache = replay_trace.OurCache(capacity)
    hot, fresh = documents(1, 5, 0)[0], documents(80 * capacity, 5, 1000)
    used = 0
    for _ in range(40):
        cache.request(hot)
        for _ in range(chance.randint(1, max(1, capacity // 20))):
            cache.request(fresh[used])
            used += 1
    assert hot[0] in cache.ranks
    limit = 3 * 64 * capacity + capacity
    for chain in fresh[used : used + limit // 5]:
        cache.request(chain)
        if hot[0] not in cache.ranks:
            break
    assert hot[0] not in cache.ranks


def test_the_same_requests_leave_the_same_records():
    requests = replay_trace.multi_turn(300, seed=3, documents=0.2)
    first, second = replay_trace.OurCache(500), replay_trace.OurCache(500)
    assert [first.request(r) for r in requests] == [second.request(r) for r in requests]
    assert (first.clock, first.ranks) == (second.clock, second.ranks)


@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(1, 1 << 20))
def test_the_reuse_distance_stays_within_what_was_measured_and_allowed(distances, capacity):
    policy, clock = PageByPage(capacity), Clock()
    assert policy.reuse_distance(clock) == capacity
    for distance in distances:
        clock = after_reuse(clock, distance)
        assert 0 <= policy.reuse_distance(clock) <= 64 * capacity
    if distances:
        assert policy.reuse_distance(clock) <= max(distances)


def test_the_measured_distance_follows_a_change():
    policy, clock = PageByPage(10_000), Clock()
    for distance in [20_000] * 5000 + [1000] * 20_000:
        clock = after_reuse(clock, distance)
    assert policy.reuse_distance(clock) == pytest.approx(1000, rel=0.1)


def test_a_tier_without_slots_is_refused():
    with pytest.raises(ValueError, match="capacity 0"):
        PageByPage(0)


@pytest.mark.thorough
@given(paths, st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_no_policy_serves_more_than_the_optimum(branches, capacity):
    requests = chains(branches)
    best = replay_trace.optimum(requests, capacity)
    for name, policy in replay_trace.POLICIES.items():
        assert policy(requests, capacity) <= best, name


@given(paths)
@settings(max_examples=50, deadline=None)
def test_every_policy_serves_every_second_use_when_all_fits(branches):
    requests = chains(branches)
    blocks = {block for request in requests for block in request}
    repeated = sum(map(len, requests)) - len(blocks)
    for name, policy in replay_trace.POLICIES.items():
        assert policy(requests, len(blocks)) == repeated, name


def test_lru_by_hand():
    """Capacity 2, chain of 3: in chain order the head is the oldest and goes, so nothing is ever served."""
    assert replay_trace.lru([[1, 2, 3], [1, 2, 3]], 2) == 0
    assert replay_trace.lru_tails_first([[1, 2, 3], [1, 2, 3]], 2) == 2
    assert replay_trace.ours([[1, 2, 3], [1, 2, 3]], 2) == 1
    assert replay_trace.optimum([[1, 2, 3], [1, 2, 3]], 2) == 2


def test_ours_serves_more_than_lru_among_scans():
    requests = replay_trace.multi_turn(1500, seed=7, documents=0.3)
    assert replay_trace.ours(requests, 1000) > 1.2 * replay_trace.lru(requests, 1000)

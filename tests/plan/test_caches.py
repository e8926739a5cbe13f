"""Caches on paper do what the tiers' policy says, page by page."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay_trace import OurCache, lru, multi_turn, served_by_the_index, shifting_hot_set
from hicache_ext import native
from hicache_ext.plan.fleet import (
    COMPUTED,
    NEAR,
    POLICIES,
    POOL,
    ROUTERS,
    WRITTEN_NEAR,
    WRITTEN_POOL,
    Fleet,
    _Replay,
    sessions,
    simulate,
)
from hicache_ext.plan.traces import Trace, generate, made_of, parse_workload, read_trace
from hicache_ext.storage.tiers.file import eviction
from tests.rigs import plan_caches

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
"""Beside the checkout; it is no part of this project."""


def trace_of(chains: list[list[int]]) -> Trace:
    return made_of("test", chains, list(range(len(chains))), 512)


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [1, 7, 300, 3000, 10**6])
@pytest.mark.parametrize("workload", ["multi-turn", "hot set"])
def test_a_node_serves_what_the_tiers_policy_serves_page_by_page(workload: str, capacity: int) -> None:
    chains = multi_turn(1500, 3, documents=0.2) if workload == "multi-turn" else shifting_hot_set(1500, 4)
    trace = trace_of(chains)
    cache = OurCache(capacity)
    served = [cache.request(chain) for chain in list(trace.chains())]
    outcome = simulate(trace, Fleet(near=capacity, near_policy="learned-distance"))
    assert outcome.per_request[:, NEAR].tolist() == served
    if capacity < trace.distinct:
        assert outcome.totals[WRITTEN_NEAR] == cache.clock.inserts == outcome.written_by_node.sum()


@pytest.mark.thorough
@pytest.mark.parametrize("policy", eviction.POLICIES)
def test_a_node_on_paper_serves_about_what_an_index_that_is_held_to_the_same_candidate_serves(policy: str) -> None:
    """The index evicts neighbours together."""
    trace = trace_of(multi_turn(1500, 3, documents=0.2))
    paper = int(simulate(trace, Fleet(near=1000, near_policy=policy)).totals[NEAR])
    real = sum(served_by_the_index(list(trace.chains()), 1000, policy=eviction.POLICIES.index(policy)))
    assert real == pytest.approx(paper, rel=0.03)


def test_ghosts_that_are_forgotten_are_those_of_the_tiers_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    chains = [[chance.randrange(400) for _ in range(3)] for _ in range(4000)]
    trace = trace_of([list(dict.fromkeys(chain)) for chain in chains])
    cache = OurCache(20)
    cache._ghost_limit = 50
    served = [cache.request(chain) for chain in list(trace.chains())]
    monkeypatch.setattr(eviction, "ghost_limit", lambda _: 50)
    outcome = simulate(trace, Fleet(near=20, near_policy="learned-distance"))
    assert outcome.per_request[:, NEAR].tolist() == served
    _, inserts, *_, ghosts = outcome.states[0].tolist()
    assert (inserts, ghosts) == (cache.clock.inserts, 50)


FLEETS = st.builds(
    Fleet,
    nodes=st.integers(1, 3),
    near=st.sampled_from([0, 1, 2, 5, 17, None]),
    pool=st.sampled_from([0, 1, 3, 20, None]),
    router=st.sampled_from(ROUTERS),
    promote=st.booleans(),
    decode=st.booleans(),
    hints=st.booleans(),
    near_policy=st.sampled_from(POLICIES),
    pool_policy=st.sampled_from(POLICIES),
)


def test_the_core_does_what_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the requests, the policies and the sizes: every page of every request, and the state of each cache."""

    @given(FLEETS, st.integers(0, 40), st.integers(1, 60), st.integers(2, 100), st.randoms(use_true_random=False))
    def check(fleet: Fleet, ghosts: int, requests: int, blocks: int, chance: random.Random) -> None:
        monkeypatch.setattr(eviction, "ghost_limit", lambda _: ghosts)
        if fleet.pool == 0 or not fleet.decode:
            fleet = replace(fleet, hints=False)
        chains = []
        for _ in range(requests):
            # Some go on with an earlier one, as conversations do.
            old = chance.choice(chains)[: chance.randrange(12)] if chains and chance.random() < 0.7 else []
            chains.append(list(dict.fromkeys(old + [chance.randrange(blocks) for _ in range(chance.randrange(8))])))
        answers = [chance.randrange(3) * 512 for _ in chains]
        trace = made_of("test", chains, list(range(requests)), 512, output=answers)
        made = simulate(trace, fleet)
        per_request, states = plan_caches.simulated(trace, fleet)
        assert np.array_equal(made.per_request, per_request)
        assert np.array_equal(made.states, states)

    check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_core_does_what_python_does_with_conversations(policy: str) -> None:
    trace = trace_of(multi_turn(150, 9))
    fleet = Fleet(nodes=3, near=60, pool=200, router="random", near_policy=policy, pool_policy=policy)
    made = simulate(trace, fleet)
    per_request, states = plan_caches.simulated(trace, fleet)
    assert np.array_equal(made.per_request, per_request) and np.array_equal(made.states, states)


def test_requests_of_no_node_and_fleets_beyond_all_memory_are_refused() -> None:
    trace = trace_of([[1, 2, 3]] * 4)
    for node in (-1, 2, 1 << 30):
        with pytest.raises(OSError, match="a fleet of this size"):
            simulate(trace, Fleet(nodes=2, near=3), np.array([0, 1, node, 0], np.int32))
    core = native.core()
    assert core is not None
    fields = [name for name, _ in _Replay._fields_]
    for capacity, ghosts in ((1 << 31, 0), (1, 1 << 31), (-1, 0), (1 << 30, 1 << 29)):
        call = _Replay(**dict.fromkeys(fields, 0) | {"node_count": 1 << 16, "near_capacity": capacity})
        call.near_ghosts = ghosts
        assert core(call) == -errno.ENOMEM


def test_a_pool_alone_goes_by_least_recent_use() -> None:
    trace = trace_of(multi_turn(800, 2))
    served = lru(list(trace.chains()), 500)
    assert simulate(trace, Fleet(pool=500)).totals[POOL] == served
    assert simulate(trace, Fleet(near=500, near_policy="lru")).totals[NEAR] == served


def test_what_one_node_has_written_another_finds_in_the_pool_and_keeps_it_with_promotion() -> None:
    trace = trace_of([[1, 2, 3]] * 4)
    nodes = simulate(trace, Fleet(nodes=2, near=None, pool=None, router="random")).nodes
    assert set(nodes.tolist()) == {0, 1}, "chance sends them to both"
    kept = simulate(trace, Fleet(nodes=2, near=None, pool=None, router="random")).totals
    assert kept[[NEAR, POOL, COMPUTED, WRITTEN_NEAR, WRITTEN_POOL]].tolist() == [6, 3, 3, 6, 3]
    left = simulate(trace, Fleet(nodes=2, near=None, pool=None, router="random", promote=False)).totals
    assert left[COMPUTED] == 3 and left[WRITTEN_NEAR] == 3 and left[NEAR] + left[POOL] == 9
    alone = simulate(trace, Fleet(nodes=2, near=None, router="random")).totals
    assert alone[COMPUTED] == 6


def test_what_a_decode_node_writes_is_found_and_with_hints_near() -> None:
    # 1,024 tokens of prompt, 1,024 of answer; the next turn has both and 512 more.
    trace = made_of("t", [[1, 2], [1, 2, 3, 4, 5]], [0, 9], 512, prompt=[1024, 2560], output=[1024, 0])
    assert sessions(trace).tolist() == [0, 0]
    without = simulate(trace, Fleet(near=None, pool=None))
    pool = simulate(trace, Fleet(near=None, pool=None, decode=True))
    hinted = simulate(trace, Fleet(near=None, pool=None, decode=True, hints=True))
    assert [outcome.per_request[1, [NEAR, POOL, COMPUTED]].tolist() for outcome in (without, pool, hinted)] == [
        [2, 0, 3],
        [2, 2, 1],
        [4, 0, 1],
    ]


def test_routers_spread_requests_and_by_session_a_conversation_stays() -> None:
    trace = trace_of(multi_turn(2000, 6))
    by = {
        router: simulate(trace, Fleet(nodes=8, near=2000, router=router)) for router in ("random", "session", "prefix")
    }  # type: ignore[arg-type]
    for outcome in by.values():
        assert set(outcome.nodes.tolist()) == set(range(8))
    of = sessions(trace)
    for session in set(of.tolist()):
        assert len(set(by["session"].nodes[of == session].tolist())) == 1
    assert by["random"].hit_share < by["session"].hit_share <= by["prefix"].hit_share + 0.05


def test_conversations_behind_one_system_prompt_are_different_sessions() -> None:
    trace = trace_of([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [1, 2, 4, 6], [1, 2]])
    assert sessions(trace).tolist()[:4] == [0, 1, 0, 1]


def test_strangers_behind_one_system_prompt_are_no_conversation_although_one_asked_for_nothing_else() -> None:
    # Who talks to whom, counted by hand: the first prompt is the system's alone, and ends where all others go on.
    trace = trace_of([[1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2, 4, 7]])
    assert sessions(trace).tolist() == [0, 1, 2, 1, 3, 2]
    # The third block of each is a part: 1,100 tokens are two whole blocks.
    parts = made_of(
        "t", [[1, 2, 8], [1, 2, 9], [1, 2, 3, 4], [1, 2, 5, 6]], [0, 1, 2, 3], 512, prompt=[1100] * 2 + [2048] * 2
    )
    assert sessions(parts).tolist() == [0, 1, 2, 3]


def test_a_described_workload_says_itself_who_talks_to_whom() -> None:
    trace = generate(
        parse_workload("rate=2,turns=4,think=5s,system=1024,systems=2,first=300,question=200,answer=200,span=10m")
    )
    of = sessions(trace)
    assert int(of.max()) + 1 == pytest.approx(2 * 600, rel=0.15)
    assert np.bincount(of).max() < 40


def test_the_conversation_trace_is_served_as_the_policy_serves_it() -> None:
    if not TRACE.is_file():
        pytest.skip("missing: the conversation trace")
    trace = read_trace(TRACE)
    fleets = [Fleet(near=capacity, near_policy="learned-distance") for capacity in (1000, 10_000, 50_000)]
    shares = [simulate(trace, fleet).hit_share for fleet in fleets]
    assert [round(share, 4) for share in shares] == [0.0852, 0.2344, 0.3559]

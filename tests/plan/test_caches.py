"""Caches on paper do what the tiers' policy says, page by page."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay_trace import OurCache, lru, multi_turn, served_by_the_index, shifting_hot_set
from hicache_ext.plan import cache_code
from hicache_ext.plan.fleet import COMPUTED, NEAR, POOL, WRITTEN_NEAR, WRITTEN_POOL, Fleet, sessions, simulate
from hicache_ext.plan.traces import Trace, made_of, read_trace
from hicache_ext.storage.tiers.file import eviction

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
"""Beside the checkout; it is no part of this project."""


@pytest.fixture(scope="module", autouse=True)
def code_is_compiled_here() -> None:
    pytest.importorskip("numba", reason="missing: numba")
    cache_code.compile_now()


def trace_of(chains: list[list[int]]) -> Trace:
    return made_of("test", chains, list(range(len(chains))), 512)


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [1, 7, 300, 3000, 10**6])
@pytest.mark.parametrize("workload", ["multi-turn", "hot set"])
def test_a_node_serves_what_the_tiers_policy_serves_page_by_page(workload: str, capacity: int) -> None:
    chains = multi_turn(1500, 3, documents=0.2) if workload == "multi-turn" else shifting_hot_set(1500, 4)
    trace = trace_of(chains)
    cache = OurCache(capacity)
    served = [cache.request(chain) for chain in trace.requests()]
    outcome = simulate(trace, Fleet(near=capacity))
    assert outcome.per_request[:, NEAR].tolist() == served
    if capacity < trace.distinct:
        assert outcome.totals[WRITTEN_NEAR] == cache.clock.inserts == outcome.written_by_node.sum()


@pytest.mark.thorough
@pytest.mark.parametrize("policy", eviction.POLICIES)
def test_a_node_on_paper_serves_about_what_an_index_that_is_held_to_the_same_candidate_serves(policy: str) -> None:
    """The index evicts neighbours together."""
    trace = trace_of(multi_turn(1500, 3, documents=0.2))
    paper = int(simulate(trace, Fleet(near=1000, near_policy=policy)).totals[NEAR])
    real = sum(served_by_the_index(trace.requests(), 1000, policy=eviction.POLICIES.index(policy)))
    assert real == pytest.approx(paper, rel=0.03)


def test_ghosts_that_wrap_around_their_ring_are_those_of_the_tiers_policy() -> None:
    chance = random.Random(5)
    chains = [[chance.randrange(400) for _ in range(3)] for _ in range(4000)]
    trace = trace_of([list(dict.fromkeys(chain)) for chain in chains])
    cache = OurCache(20)
    cache._ghost_limit = 50
    served = [cache.request(chain) for chain in trace.requests()]
    near, none = cache_code.new_caches(1, 20, ghosts=50), cache_code.new_caches(1, 1, ghosts=0)
    out, nothing = np.zeros((len(trace), 6), np.int64), np.zeros((len(trace), 3), np.int64)
    settings = np.array([1, 0, 0, 1, 0, 0], np.int64)
    nodes = np.zeros(len(trace), np.int32)
    cache_code.replay(trace.offsets, trace.blocks, nodes, near, none, settings, nothing, 0, len(trace), out)
    assert out[:, NEAR].tolist() == served
    assert near.state[0, cache_code.INSERTS] == cache.clock.inserts and near.state[0, cache_code.GHOSTS] == 50


def test_compiled_and_in_python_are_the_same() -> None:
    trace = trace_of(multi_turn(150, 9))
    fleet = Fleet(nodes=3, near=60, pool=200, router="random")
    compiled = simulate(trace, fleet).per_request
    plain = {name: getattr(cache_code, name) for name in (*cache_code._HELPERS, "replay")}
    try:
        for name, function in plain.items():
            setattr(cache_code, name, getattr(function, "py_func", function))
        assert np.array_equal(simulate(trace, fleet).per_request, compiled)
    finally:
        for name, function in plain.items():
            setattr(cache_code, name, function)


def test_a_pool_alone_goes_by_least_recent_use() -> None:
    trace = trace_of(multi_turn(800, 2))
    served = lru(trace.requests(), 500)
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


def test_the_conversation_trace_is_served_as_the_policy_serves_it() -> None:
    if not TRACE.is_file():
        pytest.skip("missing: the conversation trace")
    trace = read_trace(TRACE)
    shares = [simulate(trace, Fleet(near=capacity)).hit_share for capacity in (1000, 10_000, 50_000)]
    assert [round(share, 4) for share in shares] == [0.0843, 0.2344, 0.3559]

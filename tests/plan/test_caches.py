"""Caches on paper keep what is used last, and those of nodes the tails of chains less long than their heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay_trace import lru, lru_tails_first, multi_turn, served_by_the_index, shifting_hot_set
from hicache_ext.plan.fleet import (
    COMPUTED,
    NEAR,
    POOL,
    WRITTEN_NEAR,
    WRITTEN_POOL,
    Fleet,
    sessions,
    simulate,
)
from hicache_ext.plan.traces import Request, Trace, generate, made_of, parse_workload, read_trace
from hicache_ext.storage.tiers.file.eviction import LAST_USE

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
"""Beside the checkout; it is no part of this project."""


def trace_of(chains: list[list[int]]) -> Trace:
    return made_of("test", map(Request, range(len(chains)), chains), 512)


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [1, 7, 300, 3000, 10**6])
@pytest.mark.parametrize("workload", ["multi-turn", "hot set"])
def test_a_node_serves_what_lru_that_frees_tails_first_serves(workload: str, capacity: int) -> None:
    chains = multi_turn(1500, 3, documents=0.2) if workload == "multi-turn" else shifting_hot_set(1500, 4)
    trace = trace_of(chains)
    outcome = simulate(trace, Fleet(near=capacity))
    assert outcome.totals[NEAR] == lru_tails_first(list(trace.chains()), capacity)
    assert outcome.totals[WRITTEN_NEAR] == outcome.written_by_node.sum() >= outcome.totals[COMPUTED]


@pytest.mark.thorough
def test_a_node_on_paper_serves_about_what_an_index_that_is_held_to_last_use_serves() -> None:
    """The index evicts neighbours together."""
    trace = trace_of(multi_turn(1500, 3, documents=0.2))
    paper = int(simulate(trace, Fleet(near=1000)).totals[NEAR])
    real = sum(served_by_the_index(list(trace.chains()), 1000, policy=LAST_USE))
    assert real == pytest.approx(paper, rel=0.03)


def test_a_pool_alone_goes_by_least_recent_use() -> None:
    trace = trace_of(multi_turn(800, 2))
    served = lru(list(trace.chains()), 500)
    assert simulate(trace, Fleet(pool=500)).totals[POOL] == served


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
    trace = made_of("t", [Request(0, [1, 2], 1024, 1024), Request(9, [1, 2, 3, 4, 5], 2560)], 512)
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
    chains = [[1, 2, 8], [1, 2, 9], [1, 2, 3, 4], [1, 2, 5, 6]]
    parts = made_of("t", map(Request, range(4), chains, [1100, 1100, 2048, 2048]), 512)
    assert sessions(parts).tolist() == [0, 1, 2, 3]


def test_a_described_workload_says_itself_who_talks_to_whom() -> None:
    trace = generate(
        parse_workload("rate=2,turns=4,think=5s,system=1024,systems=2,first=300,question=200,answer=200,span=10m")
    )
    of = sessions(trace)
    assert int(of.max()) + 1 == pytest.approx(2 * 600, rel=0.15)
    assert np.bincount(of).max() < 40


def test_the_conversation_trace_is_served_as_lru_serves_it() -> None:
    if not TRACE.is_file():
        pytest.skip("missing: the conversation trace")
    trace = read_trace(TRACE)
    shares = [simulate(trace, Fleet(near=capacity)).hit_share for capacity in (1000, 10_000, 50_000)]
    assert [round(share, 4) for share in shares] == [0.0445, 0.2116, 0.3546]

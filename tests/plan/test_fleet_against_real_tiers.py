"""The fleet on paper and the real thing: file tiers and a Redis of this machine get the same requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_fleet import nodes_of, replay
from benchmarks.replay_trace import multi_turn
from hicache_ext.plan.fleet import NEAR, POOL, WRITTEN_NEAR, WRITTEN_POOL, Fleet, simulate
from hicache_ext.plan.traces import Request, Trace, made_of
from tests.rigs.redis_servers import RedisServer, redis_program

PAGE = 16 * 1024


@pytest.fixture(scope="module")
def trace() -> Trace:
    chains = multi_turn(150, 3, documents=0.1)
    return made_of("multi-turn", map(Request, range(len(chains)), chains), 512)


@pytest.mark.parametrize(
    "fleet",
    [
        Fleet(nodes=2, near=None, pool=None, router="random"),
        Fleet(nodes=3, near=None, pool=None, router="session", promote=False),
        Fleet(nodes=3, near=None, pool=None, router="prefix"),
        Fleet(nodes=2, near=None, router="random"),
        Fleet(nodes=2, pool=None, router="random"),
    ],
    ids=["promotion", "no promotion", "by prefix", "disks alone", "a pool alone"],
)
def test_hits_of_every_request_and_all_bytes_are_the_same(fleet: Fleet, trace: Trace, tmp_path: Path) -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    paper = simulate(trace, fleet)
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as redis:
        url = redis.url if fleet.pool != 0 else None
        with nodes_of(fleet, tmp_path, url, "1GiB") as stores:
            real = replay(trace, fleet, stores, PAGE)
        pages_in_redis = int(redis.command("DBSIZE").strip().removeprefix(":")) if url else 0
    assert np.array_equal(real.hits, paper.per_request[:, [NEAR, POOL]])
    expected = {
        ("near", "get"): paper.totals[NEAR],
        ("pool", "get"): paper.totals[POOL],
        ("near", "set"): paper.totals[WRITTEN_NEAR],
        ("pool", "set"): paper.totals[WRITTEN_POOL],
    }
    assert real.bytes == {key: pages * PAGE for key, pages in expected.items() if key in real.bytes}
    assert sum(real.bytes.values()) == sum(expected.values()) * PAGE
    if fleet.pool != 0:
        assert pages_in_redis >= paper.totals[WRITTEN_POOL]


def test_a_file_tier_that_evicts_serves_what_the_paper_says_to_a_hundredth(trace: Trace, tmp_path: Path) -> None:
    """The tier evicts neighbours together, and the paper page by page."""
    fleet = Fleet(near=400)
    paper = simulate(trace, fleet)
    assert paper.totals[WRITTEN_NEAR] > 3 * 400
    with nodes_of(fleet, tmp_path, None, 400 * (PAGE + 4096)) as stores:
        real = replay(trace, fleet, stores, PAGE)
    assert real.hits.sum() == pytest.approx(paper.totals[NEAR], abs=0.02 * paper.uses)

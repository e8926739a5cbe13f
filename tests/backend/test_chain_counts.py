"""How much of what SGLang asks for is found and used: figures that must not be 100 % by construction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices

pytestmark = pytest.mark.sglang


def indices(pages: int) -> torch.Tensor:
    return page_indices(PAGE_SIZE, list(range(pages)))


def counts(backend: Any) -> list[tuple[int, int, int]]:
    """Asked, found and used: of what SGLang was answered, then of each tier."""
    stores = [backend._store, *backend._store.tiers]
    return [
        tuple(store.metrics.value("chain_pages", stage) for stage in ("asked", "found", "used")) for store in stores
    ]


@pytest.fixture
def backend(open_backend: Callable[..., Any]) -> Any:
    return open_backend(mha_pools(page_size=PAGE_SIZE).host)


def test_a_chain_counts_with_its_whole_length_however_soon_its_look_up_ends(backend: Any) -> None:
    chain = page_keys(200)
    assert backend.batch_set_v1(chain[:3], indices(3)) == [True] * 3
    assert backend.batch_exists(chain) == 3
    assert backend.batch_get_v1(chain[:3], indices(3)) == [True] * 3
    assert counts(backend) == [(200, 3, 3)] * 2


def test_a_chain_of_which_nothing_is_stored_counts_as_asked(backend: Any) -> None:
    assert backend.batch_exists(page_keys(50)) == 0
    assert counts(backend) == [(50, 0, 0)] * 2


def test_what_sglang_asks_again_counts_again(backend: Any) -> None:
    chain = page_keys(4)
    assert backend.batch_set_v1(chain, indices(4)) == [True] * 4
    for _ in range(2):
        assert backend.batch_exists(chain) == 4
    assert backend.batch_get_v1(chain, indices(4)) == [True] * 4
    assert counts(backend) == [(8, 8, 4)] * 2


def test_what_is_asked_while_the_weights_change_counts_and_is_not_found(backend: Any) -> None:
    chain = page_keys(4)
    assert backend.batch_set_v1(chain, indices(4)) == [True] * 4
    backend.served.suspended = True
    assert backend.batch_exists(chain) == 0
    assert counts(backend) == [(4, 0, 0)] * 2


def test_pages_that_the_pull_rule_holds_back_were_found_and_not_used(open_backend: Callable[..., Any]) -> None:
    pull = {"mode": "fixed", "min_tokens": 1_000_000}
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, {"pd": {"pull": pull}})
    chain = page_keys(4)
    assert backend.batch_set_v1(chain, indices(4)) == [True] * 4
    assert backend.batch_exists(chain) == 0
    asked, found, used = counts(backend)[0]
    assert (asked, used) == (4, 0)
    assert found in (0, 4)  # the rule may not even look


def test_pages_in_several_parts_count_part_by_part(open_backend: Callable[..., Any]) -> None:
    pool = mha_pools(layout="page_head", page_size=PAGE_SIZE).host
    backend = open_backend(pool, tp_lcm_size=2, is_page_first_layout=True)
    chain = page_keys(6)
    parts = len(backend.served.bound["kv"].digests)
    assert parts == 2
    assert backend.batch_set_v1(chain[:4], indices(4)) == [True] * 4
    assert backend.batch_exists(chain) == 4
    assert backend.batch_get_v1(chain[:4], indices(4)) == [True] * 4
    assert counts(backend) == [(12, 8, 8)] * 2


def test_a_recording_says_how_long_all_parts_of_a_page_are(open_backend: Callable[..., Any], tmp_path: Path) -> None:
    pool = mha_pools(layout="page_head", page_size=PAGE_SIZE).host
    record = {"path": str(tmp_path / "recordings")}
    backend = open_backend(pool, {"record": record}, tp_lcm_size=2, is_page_first_layout=True)
    assert backend._recorder._facts()["page_bytes"] == PAGE_SIZE * pool.size_per_token

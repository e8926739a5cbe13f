"""What the decode writer and the pull rule need of the backend, over a real directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiering.pulling import MeasuredStore
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.rigs.faults import FailingStore, SlowStore
from tests.rigs.known_rate import KnownRate

prepare_process()

pytestmark = pytest.mark.sglang

KEYS = page_keys(3)


def indices(*pages: int) -> torch.Tensor:
    return page_indices(PAGE_SIZE, list(pages))


def test_each_page_says_what_became_of_it(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    assert backend.stored(KEYS) == [False] * 3
    assert backend.store_pages(KEYS[:2], indices(0, 1)) == [SetResult.STORED] * 2
    assert backend.store_pages(KEYS, indices(0, 1, 2)) == [SetResult.EXISTS, SetResult.EXISTS, SetResult.STORED]
    assert backend.stored(KEYS) == [True] * 3
    assert backend.stored_leading([KEYS[0], "ab" * 32, KEYS[1]]) == 1
    backend.served.suspended = True
    assert backend.store_pages(KEYS[:1], indices(0)) == [SetResult.REJECTED]
    assert backend.stored(KEYS) == [False] * 3


def test_pages_of_the_decode_writer_are_looked_for_where_it_stores(
    open_backend: Callable[..., Any], tmp_path: Any
) -> None:
    """A decode node may retrieve from nowhere: what it asks is whether prefill nodes will find its pages."""
    tiers = {"pool": {"type": "file", "path": str(tmp_path / "pool"), "capacity": "64MiB"}}
    ours = {"role": "decode", "tiers": tiers, "retrieve_locations": [], "store_locations": ["pool"]}
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours)
    backend.store_pages(KEYS, indices(0, 1, 2))
    assert backend.batch_exists(KEYS) == 0
    assert backend.stored_leading(KEYS) == 3


def test_of_a_pool_without_pages_none_are_in_the_pool_and_nothing_failed(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek V4's KV has no bytes of its own; hints ask for it."""
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    anchor = replace(backend.served.usable("kv"), digests=())
    monkeypatch.setattr(backend.served, "usable", lambda name: anchor)
    assert backend.stored_leading(KEYS) == 0
    assert not any(backend._failures.snapshot().values())


def test_a_failing_store_is_reported_page_by_page_and_never_raises(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    (tier,) = backend._store.arrangement.sync
    tier.inner = FailingStore(tier.inner, set_result=SetResult.TIMEOUT)
    assert backend.store_pages(KEYS, indices(0, 1, 2)) == [SetResult.TIMEOUT] * 3


def test_a_tier_that_slows_is_no_longer_pulled_from_and_comes_back(open_backend: Callable[..., Any]) -> None:
    pull = {"mode": "adaptive", "min_tokens": 0}
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, {"pd": {"pull": pull}})
    backend._pull_rule._probe_interval = 0.0
    backend._pull_rule._compute_cost = KnownRate(2000)
    tier = ability(backend._store.tiers[0], MeasuredStore)
    slow = tier.inner = SlowStore(tier.inner, 0.2)
    slow.active = False

    def wait_until_pulled_from() -> None:
        deadline = time.monotonic() + 60
        while backend.batch_exists(KEYS) != 3:
            assert time.monotonic() < deadline, "the tier was never measured again"
            time.sleep(0.02)

    assert backend.batch_set_v1(KEYS, indices(0, 1, 2)) == [True] * 3
    assert backend.batch_exists(KEYS) == 3
    assert backend.batch_get_v1(KEYS, indices(0, 1, 2)) == [True] * 3
    wait_until_pulled_from()

    slow.active = True
    for _ in range(8):  # what SGLang had under way when the tier slowed
        assert backend.batch_get_v1(KEYS, indices(0, 1, 2)) == [True] * 3
    assert backend.batch_exists(KEYS) == 0

    slow.active = False
    wait_until_pulled_from()

"""What is written back to the nearer tier, and what never is."""

from __future__ import annotations

import threading

import pytest

from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.tiering.background_work import FETCH, READ, IoPriority
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, read_pages, store_pages
from tests.storage.test_tiered import Recording
from tests.waiting import wait_until

SIZE = 1000


@pytest.fixture
def near():
    return Recording(MemoryPageStore("near"))


@pytest.fixture
def middle():
    return Recording(MemoryPageStore("middle"))


@pytest.fixture
def far():
    return Recording(MemoryPageStore("far"))


def open_tiers(near, *outer, promote_to=None, **settings):
    settings.setdefault("prefetch_buffer", 0)
    store = TieredStore(
        [near, *outer], [near, *outer], promote_to=promote_to or near, settings=TieringSettings(**settings)
    )
    store.register_identity(IDENTITY, {"pool": {"segments": [SIZE]}})
    return store


@pytest.fixture
def tiered(near, far):
    store = open_tiers(near, far)
    yield store
    near.hold.set()
    store.close()


def test_pages_found_further_out_are_nearer_afterwards(tiered, near, far):
    keys = page_keys(100)
    store_pages(far.inner, keys)
    assert_hits(tiered, keys)
    assert tiered.wait_until_written(30)
    assert_hits(near.inner, keys)
    assert near.metrics.value("promotion", "stored") == 100


def test_nothing_past_a_gap_is_promoted(tiered, near, far):
    keys = page_keys(10)
    store_pages(far.inner, keys[:4] + keys[5:])
    results, _ = read_pages(tiered, keys)
    assert results.count(GetResult.HIT) == 9
    assert tiered.wait_until_written(30)
    assert set(near.inner.objects) == set(keys[:4])


def test_a_page_of_the_nearer_tier_is_not_written_to_it_again(tiered, near, far):
    keys = page_keys(6)
    store_pages(near.inner, keys[:3])
    store_pages(far.inner, keys)
    near.asked.clear()
    assert_hits(tiered, keys)
    assert tiered.wait_until_written(30)
    assert near.of("set") == [tuple(keys[3:])]


def test_pages_found_nearer_than_the_target_stay_where_they_are(near, middle, far):
    store = open_tiers(near, middle, far, promote_to=middle)
    keys = page_keys(3)
    store_pages(near.inner, keys[:1])
    store_pages(middle.inner, keys[1:2])
    store_pages(far.inner, keys[2:])
    assert_hits(store, keys)
    assert store.wait_until_written(30)
    assert set(near.inner.objects) == {keys[0]} and set(middle.inner.objects) == set(keys[1:])
    assert far.of("set") == []
    store.close()


def test_a_page_two_requests_read_is_promoted_once(tiered, near, far):
    keys = page_keys(8)
    store_pages(far.inner, keys)
    near.hold.clear()
    # Reads of the nearer tier wait as well: the pages are known to be further out, so that it is not asked.
    for _ in range(3):
        assert tiered.count_leading(keys) == 8
        assert_hits(tiered, keys)
    near.hold.set()
    assert tiered.wait_until_written(30)
    assert sum(len(written) for written in near.of("set")) == 8
    assert near.metrics.value("promotion", "waiting") == 16


def test_promotion_is_bounded_and_what_does_not_fit_is_counted(near, far):
    store = open_tiers(near, far, promotion_buffer=3000)
    keys = page_keys(8)
    store_pages(far.inner, keys)
    near.hold.clear()
    store.count_leading(keys)
    assert_hits(store, keys)
    assert near.metrics.value("promotion", "dropped") == 5
    near.hold.set()
    store.close()
    assert len(near.inner.objects) == 3


def test_promotion_steps_aside_for_demand(near, far):
    gate = IoPriority()
    order = []

    def background():
        gate.wait(30, READ)
        order.append("background")

    with gate.entered(READ):
        thread = threading.Thread(target=background)
        thread.start()
        thread.join(0.05)
        order.append("demand")
    thread.join(30)
    assert order == ["demand", "background"]


def test_promotion_steps_aside_for_prefetch_and_prefetch_does_not_for_itself():
    gate = IoPriority()
    order = []

    def promotion():
        gate.wait(30, READ, FETCH)
        order.append("promotion")

    with gate.entered(FETCH):
        thread = threading.Thread(target=promotion)
        thread.start()
        gate.wait(30, READ)
        order.append("another fetch")
        thread.join(0.05)
        order.append("fetched")
    thread.join(30)
    assert order == ["another fetch", "fetched", "promotion"]


def test_endless_demand_does_not_keep_the_background_from_working_for_ever():
    gate = IoPriority()
    waiting = threading.Thread(target=lambda: (gate.wait(0.01, READ), gate.wait(0.01, READ, FETCH)), daemon=True)
    with gate.entered(READ):
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()


def test_removed_and_cleared_pages_are_not_promoted_afterwards(tiered, near, far):
    keys = page_keys(8)
    store_pages(far.inner, keys)
    near.hold.clear()
    tiered.count_leading(keys)
    assert_hits(tiered, keys)
    assert near.entered.acquire(timeout=30)
    tiered.clear(None)
    near.hold.set()
    assert tiered.wait_until_written(30)
    assert not near.inner.objects


def test_pages_that_came_too_late_leave_by_themselves_and_are_nearer_once_their_request_has_computed_them(near, far):
    store = open_tiers(near, far, prefetch_buffer=1 << 20, prefetch_lifetime=0.2)
    keys = page_keys(100)
    store_pages(far.inner, keys)
    assert store.count_leading(keys) == 100
    wait_until(lambda: far.metrics.value("prefetch", "wasted") == 100)
    assert store.metrics.levels()["prefetch_buffer_bytes", ""] == 0
    assert not near.inner.objects
    store_pages(store, keys)
    assert_hits(near.inner, keys)
    store.close()

"""Real Mooncake processes killed, frozen and restarted under the store. Each fault prints what a call cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from hicache_ext.errors import StoreClosedError, StoreSetupError
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.guards.late_open import LateStore
from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    HostPages,
    assert_hits,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.rigs.mooncake_servers import MooncakeServers
from tests.storage.mooncake.conftest import PATIENCE, TIMEOUT, tier_for
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

MIB = 1 << 20
PAGE = [MIB, MIB]
LONGEST_CALL = TIMEOUT + 0.25
"""A call may miss its deadline by a quarter of a second. docs/mooncake.md has what was measured."""
LONGEST_START = 30.0
"""Against hangs only."""


@pytest.fixture
def cluster(network, tmp_path) -> Iterator[MooncakeServers]:
    with MooncakeServers(tmp_path, client_ttl=60) as servers:
        yield servers


@pytest.fixture
def store(cluster) -> Iterator[MooncakeStore]:
    store = open_tier("pool", tier_for(cluster))
    assert isinstance(store, MooncakeStore)
    yield store
    store.close()


def timed(what: str, call: Callable[[], object], longest: float = LONGEST_CALL) -> tuple[object, float]:
    started = time.monotonic()
    answer = call()
    seconds = time.monotonic() - started
    print(f"{what}: {seconds:.2f} s")
    assert seconds < longest
    return answer, seconds


def all_hits(store: MooncakeStore, keys: list[bytes]) -> bool:
    """Whether every page is a hit now; a slow machine may miss a deadline. Fails where a hit is not the page."""
    results, payloads = read_pages(store, keys, PAGE)
    for key, result, payload in zip(keys, results, payloads, strict=True):
        assert result is not GetResult.HIT or payload == payload_of(key, sum(PAGE))
    return set(results) == {GetResult.HIT}


def comes_back(store: MooncakeStore) -> None:
    """Pages can be stored and read again, without any help."""
    attempt = 0

    def works() -> bool:
        nonlocal attempt
        attempt += 1
        keys = page_keys(2, f"back {attempt}")
        return store_pages(store, keys, PAGE) == [SetResult.STORED] * 2 and all_hits(store, keys)

    print(f"back by itself after {wait_until(works):.1f} s")


def store_all(store: MooncakeStore, keys: list[bytes]) -> None:
    wait_until(lambda: all(result.durable for result in store_pages(store, keys, PAGE)))


def no_hit(results: list[GetResult]) -> bool:
    return GetResult.HIT not in results


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_a_lost_master_costs_one_call_and_comes_back(cluster, store, fault):
    keys = page_keys(8)
    store_all(store, keys)
    cluster.kill_master() if fault == "killed" else cluster.freeze_master()
    first, _ = timed(f"master {fault}, first get", lambda: read_pages(store, keys, PAGE)[0])
    assert no_hit(first)
    if store.attached:
        timed(f"master {fault}, second get", lambda: read_pages(store, keys, PAGE)[0])
    assert not store.attached
    for call in (
        lambda: read_pages(store, keys, PAGE)[0] == [GetResult.REJECTED] * 8,
        lambda: store_pages(store, page_keys(8, "new"), PAGE) == [SetResult.REJECTED] * 8,
        lambda: store.contains(keys) == [False] * 8,
        lambda: store.count_leading(keys) == 0,
        lambda: store.clear([IDENTITY]) == 0,
    ):
        # That none of these reaches the library is seen in test_store_without_pool.py.
        answered, _ = timed("later call", call)
        assert answered
    cluster.start_master() if fault == "killed" else cluster.thaw_master()
    comes_back(store)
    # What was cleared while the master was away is gone now that it is back.
    assert store.contains(keys) == [False] * 8


def test_a_master_restarted_empty_is_a_miss_and_fills_again(cluster, store):
    keys = page_keys(8)
    store_all(store, keys)
    cluster.kill_master()
    cluster.start_master()
    results, _ = timed("get after restart", lambda: read_pages(store, keys, PAGE)[0])
    assert no_hit(results)
    comes_back(store)


def test_a_frozen_holder_costs_a_bounded_call_and_late_bytes_never_arrive(cluster, store):
    keys = page_keys(32)
    store_all(store, keys)
    cluster.freeze_holder()
    pages = HostPages([PAGE] * 32)
    results, _ = timed("holder frozen, get of 32 pages of 2 MiB", lambda: store.get(PageBatch(keys, pages.buffers)))
    assert no_hit(results)
    for number in range(32):
        pages.write(number, b"\x5a" * sum(PAGE))
    untouched = pages.snapshot()
    later, _ = timed("holder frozen, later get", lambda: store.get(PageBatch(keys, HostPages([PAGE] * 32).buffers)))
    assert no_hit(later)
    cluster.thaw_holder()
    time.sleep(1)
    assert pages.snapshot() == untouched
    comes_back(store)
    # The pages were whole all the time: nothing was removed for a reason that was the holder's.
    wait_until(lambda: all_hits(store, keys))


def test_a_holder_frozen_while_pages_are_written_leaves_no_half_page(cluster, store):
    cluster.freeze_holder()
    keys = page_keys(8)
    results, _ = timed("holder frozen, set of 8 pages of 2 MiB", lambda: store_pages(store, keys, PAGE))
    assert SetResult.STORED not in results
    cluster.thaw_holder()
    comes_back(store)
    all_hits(store, keys)
    store_all(store, keys)
    wait_until(lambda: all_hits(store, keys))


def test_a_killed_holder_takes_its_pages_along_and_another_serves(network, tmp_path):
    # Until the master forgets the dead one it sends half of the pages there.
    with MooncakeServers(tmp_path, client_ttl=2) as cluster:
        store = open_tier("pool", tier_for(cluster))
        keys = page_keys(8)
        store_all(store, keys)
        cluster.kill_holder()
        results, _ = timed("holder killed, get", lambda: read_pages(store, keys, PAGE)[0])
        assert no_hit(results)
        results, _ = timed("holder killed, set", lambda: store_pages(store, page_keys(8, "new"), PAGE))
        assert SetResult.STORED not in results
        cluster.start_holder()
        comes_back(store)
        store.close()


def test_a_full_pool_rejects_or_evicts_and_what_it_says_it_has_is_right(network, tmp_path):
    with MooncakeServers(tmp_path, segment_bytes=64 * MIB, lease_ms=100) as cluster:
        store = open_tier("pool", tier_for(cluster, timeout=20))
        counts = dict.fromkeys(SetResult, 0)
        for round_number in range(16):
            keys = page_keys(8, f"round {round_number}")
            answers, _ = timed("set of 16 MiB", lambda keys=keys: store_pages(store, keys, PAGE), LONGEST_START)
            for answer in answers:
                counts[answer] += 1
            results, payloads = read_pages(store, keys, PAGE)
            for key, result, payload in zip(keys, results, payloads, strict=True):
                assert result is not GetResult.HIT or payload == payload_of(key, sum(PAGE))
            time.sleep(0.1)
        print({result.value: count for result, count in counts.items()})
        assert counts[SetResult.ERROR] == counts[SetResult.TIMEOUT] == 0
        assert counts[SetResult.STORED] > 16
        too_large = store_pages(store, page_keys(1, "large"), [65 * MIB])
        assert too_large == [SetResult.REJECTED]
        assert store.metrics.value("rejected", "full") > 0
        store.close()


def test_a_required_tier_without_a_master_does_not_start_and_says_why(cluster):
    tier = tier_for(cluster)
    cluster.kill_master()
    with pytest.raises(StoreSetupError, match=f"no Mooncake master answers at {cluster.master}"):
        timed("open without a master", lambda: open_tier("pool", tier), LONGEST_START)


def test_a_tier_that_is_not_required_attaches_when_the_master_comes(cluster):
    tier = tier_for(cluster, required=False)
    cluster.kill_master()

    def open_() -> LateStore:
        return LateStore("pool", "mooncake", lambda: open_tier("pool", tier), first_wait=LONGEST_START, first_pause=0.2)

    opened, _ = timed("open without a master", open_, LONGEST_START)
    try:
        assert store_pages(opened, page_keys(1)) == [SetResult.REJECTED]
        cluster.start_master()
        wait_until(lambda: opened.inner is not None)
        comes_back(opened.inner)
    finally:
        opened.close()


def test_a_frozen_master_does_not_hold_the_start(cluster):
    tier = tier_for(cluster)
    cluster.freeze_master()
    with pytest.raises(StoreSetupError, match="setup with the master"):
        timed("open with a frozen master", lambda: open_tier("pool", tier), LONGEST_START)
    cluster.thaw_master()


def test_a_store_that_is_away_can_be_closed(cluster, store):
    cluster.kill_master()
    for _ in range(3):
        store.contains(page_keys(1))
    assert not store.attached
    timed("close without a master", store.close, LONGEST_START)
    with pytest.raises(StoreClosedError):
        store.contains(page_keys(1))


def test_clear_of_one_prefix_leaves_strangers_alone(cluster, store):
    store._tier = store._attachment.tier = tier_for(cluster, timeout=PATIENCE)
    other = open_tier("pool", tier_for(cluster, timeout=PATIENCE, prefix="hicache.ext"))
    keys = page_keys(4)
    store_pages(store, keys)
    store_pages(other, keys)
    assert store.clear(None) == 1
    assert store.contains(keys) == [False] * 4
    assert_hits(other, keys)
    other.close()


def test_a_sweep_leaves_what_lies_behind_a_gap_without_a_lease(network, tmp_path):
    from tests.storage.mooncake.raw_client import RawClient

    with MooncakeServers(tmp_path, lease_ms=20_000) as cluster:
        store, raw = open_tier("pool", tier_for(cluster, timeout=PATIENCE)), RawClient(cluster)
        keys = page_keys(200)
        store_pages(store, keys[:2] + keys[100:])
        assert store.count_leading(keys) == 2
        leased = {key for key in keys[:2] + keys[100:] if raw.client.remove(raw.name(key)) == -706}
        assert leased == set(keys[:2])
        store.close()
        raw.close()

"""Several stores as one: what is asked of whom, what counts as written, and what goes on when a tier fails."""

from __future__ import annotations

import threading

import pytest

from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    HostPages,
    assert_hits,
    filled,
    page_keys,
    read_pages,
    store_pages,
)
from tests.rigs.faults import FailingStore, PageStoreWrapper, RaisingStore
from tests.waiting import wait_until

NO_PREFETCH = TieringSettings(prefetch_buffer=0)


class Recording(PageStoreWrapper):
    """Remembers what it was asked for; ``hold`` makes reads wait."""

    def __init__(self, inner):
        super().__init__(inner)
        self.asked: list[tuple[str, tuple[bytes, ...]]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Semaphore(0)

    def get(self, batch):
        self.asked.append(("get", tuple(batch.keys)))
        self.entered.release()
        assert self.hold.wait(60)
        return super().get(batch)

    def set(self, batch):
        self.asked.append(("set", tuple(batch.keys)))
        self.entered.release()
        assert self.hold.wait(60)
        return super().set(batch)

    def contains(self, keys):
        self.asked.append(("contains", tuple(keys)))
        return super().contains(keys)

    def count_leading(self, keys):
        self.asked.append(("count_leading", tuple(keys)))
        return super().count_leading(keys)

    def of(self, call):
        return [keys for name, keys in self.asked if name == call]


@pytest.fixture
def near():
    return Recording(MemoryPageStore("near"))


@pytest.fixture
def far():
    return Recording(MemoryPageStore("far"))


@pytest.fixture
def tiered(near, far):
    store = TieredStore([near, far], [near, far], settings=NO_PREFETCH)
    yield store
    near.hold.set()
    far.hold.set()
    store.close()


def test_an_outer_tier_is_asked_only_for_what_the_inner_one_lacks(tiered, near, far):
    keys = page_keys(6)
    store_pages(near.inner, keys[:2])
    store_pages(far.inner, keys)
    assert_hits(tiered, keys)
    assert far.of("get") == [tuple(keys[2:])]


def test_the_leading_run_runs_over_all_tiers(tiered, near, far):
    keys = page_keys(7)
    store_pages(near.inner, [keys[0], keys[2], keys[5]])
    store_pages(far.inner, [keys[1], keys[3], keys[6]])
    assert tiered.count_leading(keys) == 4
    assert tiered.count_leading(keys[4:]) == 0
    assert tiered.contains(keys) == [True] * 4 + [False, True, True]


def test_one_look_up_per_tier_answers_a_chain(tiered, near, far):
    keys = page_keys(40)
    store_pages(near.inner, keys[::2])
    store_pages(far.inner, keys[1::2])
    assert tiered.count_leading(keys) == 40
    assert len(near.asked) == len(far.asked) == 1
    assert far.of("count_leading") == [tuple(keys[1::2])]


def test_pages_seen_further_out_are_read_from_there_while_the_inner_tier_is_read(tiered, near, far):
    tiered.register_identity(IDENTITY, {"pool": {"segments": [100]}})
    keys = page_keys(4)
    store_pages(near.inner, keys[:2])
    store_pages(far.inner, keys[2:])
    assert tiered.count_leading(keys) == 4
    near.hold.clear()
    far.hold.clear()
    answers = []
    reader = threading.Thread(target=lambda: answers.append(read_pages(tiered, keys)))
    reader.start()
    # Both are inside a read at the same time.
    assert near.entered.acquire(timeout=30) and far.entered.acquire(timeout=30)
    near.hold.set()
    far.hold.set()
    reader.join(30)
    assert answers[0][0] == [GetResult.HIT] * 4
    assert near.of("get") == [tuple(keys[:2])] and far.of("get") == [tuple(keys[2:])]


def test_a_page_that_is_gone_where_it_was_seen_is_looked_for_elsewhere(tiered, near, far):
    keys = page_keys(3)
    store_pages(far.inner, keys)
    assert tiered.count_leading(keys) == 3
    far.inner.remove(keys)
    store_pages(near.inner, keys)
    assert_hits(tiered, keys)


def test_a_bad_page_of_the_inner_tier_is_read_from_the_outer(tiered, near, far):
    keys = page_keys(3)
    store_pages(tiered, keys)
    near.inner.objects[keys[1]] = near.inner.objects[keys[1]][:-1] + b"\0"
    assert_hits(tiered, keys)
    assert tiered.get(PageBatch([], [])) == []


def test_why_a_page_is_missing_is_told_even_if_another_tier_just_lacks_it(near, far):
    failing = FailingStore(near, get_result=GetResult.TIMEOUT)
    with_trouble = TieredStore([failing, far], [far], settings=NO_PREFETCH)
    assert read_pages(with_trouble, page_keys(1))[0] == [GetResult.TIMEOUT]
    with_trouble.close()


def test_hits_past_a_gap_are_counted_as_such(tiered, near):
    keys = page_keys(5)
    store_pages(near.inner, [keys[0], keys[1], keys[3], keys[4]])
    assert read_pages(tiered, keys)[0].count(GetResult.HIT) == 4
    assert tiered.metrics.snapshot()["get", "hit"] == 2
    assert tiered.metrics.snapshot()["get", "gap"] == 2
    assert tiered.metrics.snapshot()["get", "miss"] == 1


def chain_pages(store):
    """Asked, found and used, as counted."""
    return tuple(store.metrics.value("chain_pages", stage) for stage in ("asked", "found", "used"))


def test_a_miss_in_one_tier_that_goes_to_the_next_is_counted_in_both(tiered, near, far):
    keys = page_keys(10)
    store_pages(near.inner, keys[:3])
    store_pages(far.inner, keys[3:7])
    assert tiered.count_leading(keys) == 7
    tiered.count_absent(3)
    assert_hits(tiered, keys[:7])
    assert chain_pages(tiered) == (10, 7, 7)
    assert chain_pages(near) == (10, 3, 3)
    assert chain_pages(far) == (7, 4, 4)


def test_pages_that_were_found_and_are_gone_when_they_are_read_were_not_used(tiered, near, far):
    keys = page_keys(4)
    store_pages(near.inner, keys)
    assert tiered.count_leading(keys) == 4
    near.inner.remove(keys[2:])
    assert read_pages(tiered, keys)[0].count(GetResult.HIT) == 2
    assert chain_pages(tiered) == chain_pages(near) == (4, 4, 2)
    assert chain_pages(far) == (0, 0, 0)


def test_pages_behind_a_gap_are_not_used(tiered, near):
    keys = page_keys(5)
    store_pages(near.inner, keys)
    assert tiered.count_leading(keys) == 5
    near.inner.remove([keys[2]])
    read_pages(tiered, keys)
    assert chain_pages(tiered) == (5, 5, 2)


def test_pages_that_are_looked_up_one_by_one_are_no_chain(tiered, near):
    """Of a sliding window SGLang looks up everything and reads the end: as a share that says nothing."""
    keys = page_keys(3)
    store_pages(near.inner, keys)
    assert tiered.contains(keys) == [True] * 3
    assert_hits(tiered, keys)
    assert chain_pages(tiered) == chain_pages(near) == (0, 0, 0)


def test_a_single_tier_counts_what_it_is_asked_for(near):
    single = TieredStore([near], [near])
    keys = page_keys(4)
    store_pages(near.inner, keys[:2])
    assert single.count_leading(keys) == 2
    single.count_absent(2)
    assert_hits(single, keys[:2])
    assert chain_pages(single) == chain_pages(near) == (4, 2, 2)
    single.close()


def test_what_is_fetched_ahead_is_used_when_it_is_read_and_by_the_tier_it_came_from(near, far):
    store = TieredStore([near, far], [near, far])
    keys = page_keys(4)
    store_pages(store, keys)
    near.inner.remove(keys)
    assert store.count_leading(keys) == 4
    assert_hits(store, keys)
    assert chain_pages(store) == (4, 4, 4)
    assert chain_pages(near) == (4, 0, 0)
    assert chain_pages(far) == (4, 4, 4)
    store.close()


def test_a_page_counts_as_written_when_one_tier_has_it(near, far):
    store = TieredStore([near, far], [FailingStore(near), far])
    assert store_pages(store, page_keys(2)) == [SetResult.STORED] * 2
    store.close()


def test_synchronous_tiers_are_written_at_once(tiered, near, far):
    near.hold.clear()
    far.hold.clear()
    writer = threading.Thread(target=lambda: store_pages(tiered, page_keys(2)))
    writer.start()
    assert near.entered.acquire(timeout=30) and far.entered.acquire(timeout=30)
    near.hold.set()
    far.hold.set()
    writer.join(30)
    assert len(near.inner.objects) == len(far.inner.objects) == 2


@pytest.mark.parametrize("call", ["get", "set", "contains", "count_leading"])
def test_a_tier_that_raises_is_an_error_of_that_tier_alone(near, far, call):
    keys = page_keys(3)
    store_pages(far.inner, keys)
    raising = RaisingStore(near, lambda: ConnectionResetError("gone"))
    store = TieredStore([raising, far], [raising, far])
    if call == "get":
        assert_hits(store, keys)
    elif call == "set":
        assert all(result.durable for result in store_pages(store, keys))
    elif call == "contains":
        assert store.contains(keys) == [True] * 3
    else:
        assert store.count_leading(keys) == 3
    assert near.metrics.total("failure") == 1
    raising.active = False
    store.close()


class TestAsync:
    @pytest.fixture
    def store(self, near, far):
        settings = TieringSettings(async_tiers=frozenset({"far"}), prefetch_buffer=0)
        store = TieredStore([near, far], [near, far], settings=settings)
        yield store
        far.hold.set()
        store.close()

    def test_a_write_does_not_wait_for_an_asynchronous_tier(self, store, near, far):
        far.hold.clear()
        keys = page_keys(3)
        assert store_pages(store, keys) == [SetResult.STORED] * 3
        assert len(near.inner.objects) == 3 and not far.inner.objects
        far.hold.set()
        assert store.wait_until_written(30)
        assert set(far.inner.objects) == set(keys)

    def test_what_is_written_later_is_what_host_memory_held_when_it_was_given(self, store, far):
        far.hold.clear()
        keys = page_keys(2)
        pages = filled(keys, [(1000,)] * 2)
        store.set(PageBatch(keys, pages.buffers))
        for number in range(2):
            pages.write(number, b"\0" * 1000)
        far.hold.set()
        assert store.wait_until_written(30)
        assert_hits(far.inner, keys)

    def test_the_synchronous_tier_alone_decides_whether_a_page_is_written(self, near, far):
        settings = TieringSettings(async_tiers=frozenset({"far"}))
        store = TieredStore([near, far], [FailingStore(near), far], settings=settings)
        assert store_pages(store, page_keys(1)) == [SetResult.ERROR]
        store.close()

    def test_a_waiting_page_can_be_read(self, far):
        settings = TieringSettings(async_tiers=frozenset({"far"}), prefetch_buffer=0)
        store = TieredStore([far], [far], settings=settings)
        far.hold.clear()
        keys = page_keys(2)
        assert store_pages(store, keys) == [SetResult.STORED] * 2
        assert store.count_leading(keys) == 2
        assert_hits(store, keys)
        assert far.of("get") == []
        far.hold.set()
        store.close()

    def test_what_does_not_fit_is_dropped_and_counted(self, near, far):
        settings = TieringSettings(async_tiers=frozenset({"far"}), store_buffer=2500)
        store = TieredStore([near, far], [near, far], settings=settings)
        far.hold.clear()
        assert store_pages(store, page_keys(5)) == [SetResult.STORED] * 5
        assert far.metrics.value("dropped_pages", "async") == 3
        assert far.metrics.levels()["queue_bytes", "async"] == 2000
        far.hold.set()
        store.close()
        assert len(far.inner.objects) == 2

    def test_close_drains_what_waits(self, near, far):
        settings = TieringSettings(async_tiers=frozenset({"far"}))
        store = TieredStore([near, far], [near, far], settings=settings)
        keys = page_keys(300)
        store_pages(store, keys)
        store.close()
        assert set(far.inner.objects) == set(keys)

    def test_close_drops_what_cannot_be_written_in_time(self, near, far):
        settings = TieringSettings(async_tiers=frozenset({"far"}), drain=0.0)
        store = TieredStore([near, far], [near, far], settings=settings)
        far.hold.clear()
        store_pages(store, page_keys(200))
        assert far.entered.acquire(timeout=30)
        closer = threading.Thread(target=store.close)
        closer.start()
        (tier,) = store.arrangement.later
        wait_until(lambda: tier.writes._closing)
        far.hold.set()
        closer.join(30)
        assert not closer.is_alive()
        written = len(far.inner.objects)
        assert written + far.metrics.value("dropped_pages", "async") == 200 and written < 200

    def test_a_page_removed_while_it_is_being_written_is_gone(self, store, near, far):
        keys = page_keys(3)
        far.hold.clear()
        store_pages(store, keys)
        assert far.entered.acquire(timeout=30)
        remover = threading.Thread(target=lambda: store.remove(keys[:1]))
        remover.start()
        far.hold.set()
        remover.join(30)
        assert store.wait_until_written(30)
        assert set(far.inner.objects) == set(near.inner.objects) == set(keys[1:])

    def test_clear_does_not_wait_for_a_write_under_way_and_it_is_undone(self, store, near, far):
        keys = page_keys(3)
        far.hold.clear()
        store_pages(store, keys)
        assert far.entered.acquire(timeout=30)
        store.clear(None)
        assert store.contains(keys) == [False] * 3
        far.hold.set()
        assert store.wait_until_written(30)
        assert not far.inner.objects and not near.inner.objects


def test_calls_are_measured_per_tier_and_operation(tiered, near, far):
    store_pages(tiered, page_keys(3))
    read_pages(tiered, page_keys(3))
    tiered.count_leading(page_keys(3))
    assert near.metrics.calls() == {"set": 1, "get": 1, "exists": 1}
    assert set(far.metrics.calls()) == {"set"}


def test_host_memory_is_left_alone_by_everything_in_the_background(near, far):
    settings = TieringSettings(async_tiers=frozenset({"far"}))
    store = TieredStore([near, far], [near, far], promote_to=near, settings=settings)
    keys = page_keys(20)
    store_pages(far.inner, keys)
    pages = HostPages([(1000,)] * 20)
    store.get(PageBatch(keys, pages.buffers))
    before = pages.snapshot()
    store.close()
    assert pages.snapshot() == before


def test_where_nothing_is_read_every_page_is_a_miss():
    store = TieredStore([], [MemoryPageStore("written")])
    keys = page_keys(3)
    assert store_pages(store, keys) == [SetResult.STORED] * 3
    assert read_pages(store, keys)[0] == [GetResult.MISS] * 3
    assert (store.count_leading(keys), store.contains(keys)) == (0, [False] * 3)
    store.close()

"""Pages that move inwards before they are read."""

from __future__ import annotations

import threading

import pytest

from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.tiering.background_work import IoPriority
from hicache_ext.storage.tiering.prefetch import Prefetcher
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    HostPages,
    assert_hits,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.storage.test_tiered import Recording
from tests.waiting import count_fetched, wait_until

SIZE = 1000


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def near():
    return Recording(MemoryPageStore("near"))


@pytest.fixture
def far():
    return Recording(MemoryPageStore("far"))


@pytest.fixture
def open_prefetcher(far, clock):
    opened = []

    def open_(**settings):
        prefetcher = Prefetcher(
            TieringSettings(**{f"prefetch_{key}": value for key, value in settings.items()}),
            IoPriority(),
            far.metrics,
            clock,
        )
        opened.append(prefetcher)
        return prefetcher

    yield open_
    far.hold.set()
    for prefetcher in opened:
        prefetcher.close()


@pytest.fixture
def tiered(near, far):
    settings = TieringSettings(prefetch_buffer=1 << 20)
    store = TieredStore([near, far], [near, far], promote_to=near, settings=settings)
    store.register_identity(IDENTITY, {"pool": {"segments": [SIZE]}})
    yield store
    near.hold.set()
    far.hold.set()
    store.close()


def announce(prefetcher, source, keys):
    prefetcher.announce(keys, source, SIZE)


def take(prefetcher, keys, sizes=(SIZE,)):
    host = HostPages([sizes] * len(keys))
    with prefetcher.reading(keys) as (fetches, _):
        results = [
            None if fetch is None else prefetcher.take(PageBatch([key], [segments]), [fetch])[0]
            for key, fetch, segments in zip(keys, fetches, host.buffers, strict=True)
        ]
    host.assert_guards_intact()
    return results, [host.payload(number) for number in range(len(keys))]


def test_a_hit_of_exists_brings_the_pages_in_before_they_are_read(tiered, near, far):
    keys = page_keys(100)
    store_pages(far.inner, keys)
    assert tiered.count_leading(keys) == 100
    wait_until(lambda: count_fetched(tiered.prefetcher, keys) == 100)
    far.asked.clear()
    assert_hits(tiered, keys)
    assert far.of("get") == []
    assert far.metrics.value("prefetch", "useful") == 100
    assert far.metrics.value("prefetch_bytes", "useful") == 100 * SIZE


def test_prefetched_pages_that_are_read_are_promoted_like_any_other(tiered, near, far):
    keys = page_keys(10)
    store_pages(far.inner, keys)
    tiered.count_leading(keys)
    wait_until(lambda: count_fetched(tiered.prefetcher, keys) == 10)
    assert not near.inner.objects
    assert_hits(tiered, keys)
    assert tiered.wait_until_written(30)
    assert_hits(near.inner, keys)


def test_only_pages_that_are_further_out_are_fetched(tiered, near, far):
    keys = page_keys(10)
    store_pages(near.inner, keys[:6])
    store_pages(far.inner, keys)
    tiered.count_leading(keys)
    wait_until(lambda: count_fetched(tiered.prefetcher, keys) == 4)
    assert {key for keys_asked in far.of("get") for key in keys_asked} == set(keys[6:])
    assert near.of("get") == []


def test_pages_past_the_leading_run_are_not_fetched(tiered, far):
    keys = page_keys(10)
    store_pages(far.inner, keys[:3] + keys[4:])
    assert tiered.count_leading(keys) == 3
    wait_until(lambda: count_fetched(tiered.prefetcher, keys) == 3)
    assert {key for asked in far.of("get") for key in asked} == set(keys[:3])


def test_pages_are_fetched_in_the_order_of_the_chain(open_prefetcher, far):
    prefetcher = open_prefetcher(streams=1)
    keys = page_keys(90)
    store_pages(far.inner, keys)
    announce(prefetcher, far, keys[:50])
    announce(prefetcher, far, keys[50:])
    wait_until(lambda: count_fetched(prefetcher, keys) == 90)
    assert [key for asked in far.of("get") for key in asked] == keys


def test_a_demand_read_joins_a_page_that_is_under_way(tiered, far):
    keys = page_keys(8)
    store_pages(far.inner, keys)
    far.hold.clear()
    tiered.count_leading(keys)
    assert far.entered.acquire(timeout=30)
    answers = []
    reader = threading.Thread(target=lambda: answers.append(read_pages(tiered, keys)))
    reader.start()
    wait_until(lambda: far.metrics.value("prefetch", "joined") > 0)
    far.hold.set()
    reader.join(30)
    assert answers == [([GetResult.HIT] * 8, [payload_of(key, SIZE) for key in keys])]
    # Every page travelled once.
    assert sorted(key for asked in far.of("get") for key in asked) == sorted(keys)


def test_a_demand_read_takes_over_what_is_only_planned(open_prefetcher, far):
    prefetcher = open_prefetcher(streams=1)
    keys = page_keys(64)
    store_pages(far.inner, keys)
    far.hold.clear()
    announce(prefetcher, far, keys)
    assert far.entered.acquire(timeout=30)
    with prefetcher.reading(keys) as (pages, _):
        assert [page is None for page in pages] == [False] * 32 + [True] * 32
        # Nor is it announced again while foreground reads it.
        announce(prefetcher, far, keys)
    far.hold.set()
    wait_until(lambda: count_fetched(prefetcher, keys) == 32)
    prefetcher.close()
    assert [key for asked in far.of("get") for key in asked] == keys[:32]
    assert far.metrics.value("prefetch", "overtaken") == 32


def test_what_the_source_answered_is_not_asked_again_by_who_joined(tiered, near, far):
    keys = page_keys(4)
    store_pages(far.inner, keys)
    far.hold.clear()
    tiered.count_leading(keys)
    assert far.entered.acquire(timeout=30)
    far.inner.objects.clear()
    answers = []
    reader = threading.Thread(target=lambda: answers.append(read_pages(tiered, keys)[0]))
    reader.start()
    wait_until(lambda: far.metrics.value("prefetch", "joined") > 0)
    far.hold.set()
    reader.join(30)
    assert answers == [[GetResult.MISS] * 4]
    assert len(far.of("get")) == 1


def test_the_buffer_is_never_exceeded_and_what_waits_is_fetched_when_there_is_room(open_prefetcher, far):
    prefetcher = open_prefetcher(buffer=5 * SIZE, streams=2)
    keys = page_keys(12)
    store_pages(far.inner, keys)
    announce(prefetcher, far, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 5)
    assert far.metrics.levels()["prefetch_buffer_bytes", ""] == 5 * SIZE
    assert take(prefetcher, keys[:5])[0] == [GetResult.HIT] * 5
    wait_until(lambda: far.metrics.value("prefetch", "fetched") == 10)
    wait_until(lambda: count_fetched(prefetcher, keys[5:10]) == 5)
    assert far.metrics.levels()["prefetch_buffer_bytes", ""] == 5 * SIZE


def test_a_page_nobody_reads_expires_and_is_counted_as_wasted(open_prefetcher, far, clock):
    prefetcher = open_prefetcher(lifetime=30)
    keys = page_keys(6)
    store_pages(far.inner, keys)
    announce(prefetcher, far, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 6)
    assert take(prefetcher, keys[:2])[0] == [GetResult.HIT] * 2
    clock.now = 31
    assert take(prefetcher, keys[2:])[0] == [None] * 4
    assert far.metrics.value("prefetch", "wasted") == 4
    assert far.metrics.value("prefetch_bytes", "wasted") == 4 * SIZE
    assert far.metrics.levels()["prefetch_buffer_bytes", ""] == 0


def test_a_page_is_kept_for_every_request_that_found_it_until_its_room_is_needed(open_prefetcher, far, clock):
    prefetcher = open_prefetcher(buffer=4 * SIZE, lifetime=30)
    keys, others = page_keys(3), page_keys(3, "others")
    for some in (keys, others):
        store_pages(far.inner, some)
    announce(prefetcher, far, keys)
    announce(prefetcher, far, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 3)
    for _ in range(3):
        assert take(prefetcher, keys)[0] == [GetResult.HIT] * 3
    assert count_fetched(prefetcher, keys) == 3
    announce(prefetcher, far, others)
    wait_until(lambda: count_fetched(prefetcher, others) == 3)
    assert count_fetched(prefetcher, keys) == 0
    assert take(prefetcher, others)[0] == [GetResult.HIT] * 3
    clock.now = 31.0
    assert take(prefetcher, others)[0] == [None] * 3
    assert (far.metrics.value("prefetch", "useful"), far.metrics.value("prefetch", "wasted")) == (6, 0)
    assert far.metrics.levels()["prefetch_buffer_bytes", ""] == 0


def test_a_page_that_is_asked_for_twice_in_one_read_is_there_twice(open_prefetcher, far):
    prefetcher = open_prefetcher()
    keys = page_keys(2)
    store_pages(far.inner, keys)
    announce(prefetcher, far, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 2)
    asked = [keys[0], keys[1], keys[0]]
    host = HostPages([[SIZE]] * 3)
    with prefetcher.reading(asked) as (pages, _):
        assert prefetcher.take(PageBatch(asked, host.buffers), pages) == [GetResult.HIT] * 3
    assert [host.payload(number) for number in range(3)] == [payload_of(key, SIZE) for key in asked]
    assert far.metrics.value("prefetch", "useful") == 2


def test_a_page_that_two_tiers_have_is_fetched_from_the_first_that_was_announced(open_prefetcher, near, far):
    prefetcher = open_prefetcher(streams=1)
    keys = page_keys(64)
    for tier in (near, far):
        store_pages(tier.inner, keys)
    far.hold.clear()
    announce(prefetcher, far, keys)
    assert far.entered.acquire(timeout=30)
    announce(prefetcher, near, keys)
    announce(prefetcher, near, [])
    far.hold.set()
    wait_until(lambda: count_fetched(prefetcher, keys) == 64)
    prefetcher.close()
    assert [key for asked in far.of("get") for key in asked] == keys
    assert near.of("get") == []


@pytest.mark.parametrize("leaves", ["source", "pages"])
def test_pages_that_were_announced_twice_and_dropped_are_fetched_when_they_are_found_again(
    open_prefetcher, near, far, leaves
):
    """Those that were only planned were taken for announced ever after, and never fetched again."""
    prefetcher = open_prefetcher(streams=1)
    keys = page_keys(64)
    for tier in (near, far):
        store_pages(tier.inner, keys)
    far.hold.clear()
    announce(prefetcher, far, keys)
    assert far.entered.acquire(timeout=30)
    announce(prefetcher, far, keys)
    if leaves == "source":
        prefetcher.forget_source(far)
    else:
        prefetcher.forget(lambda key: True)
    far.hold.set()
    announce(prefetcher, near, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 64)
    assert take(prefetcher, keys)[0] == [GetResult.HIT] * 64


def test_pages_that_nobody_reads_keep_the_memory_of_no_others(open_prefetcher, far):
    """A reader leaves the last page of each fetch unread: the buffer was full for their lifetime."""
    prefetcher = open_prefetcher(buffer=64 * SIZE, streams=1)
    first, then = page_keys(64, "first"), page_keys(64, "then")
    store_pages(far.inner, first)
    store_pages(far.inner, then)
    announce(prefetcher, far, first)
    wait_until(lambda: count_fetched(prefetcher, first) == 64)
    some = [key for number, key in enumerate(first) if number % 32 != 31]
    assert take(prefetcher, some)[0] == [GetResult.HIT] * 62
    announce(prefetcher, far, then)
    wait_until(lambda: count_fetched(prefetcher, then) == 62)
    assert count_fetched(prefetcher, first) == 2
    assert far.metrics.levels()["prefetch_buffer_bytes", ""] == 64 * SIZE
    # Those left are still read from the buffer.
    assert take(prefetcher, [first[31], first[63]])[1] == [payload_of(key, SIZE) for key in (first[31], first[63])]
    wait_until(lambda: count_fetched(prefetcher, then) == 64)


def test_pages_that_are_missing_or_removed_keep_no_memory(open_prefetcher, far):
    prefetcher = open_prefetcher(buffer=64 * SIZE)
    keys = page_keys(32)
    store_pages(far.inner, keys[:2])
    announce(prefetcher, far, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 2)
    assert far.metrics.levels()["prefetch_buffer_bytes", ""] == 2 * SIZE
    prefetcher.forget({keys[0]}.__contains__)
    assert far.metrics.levels()["prefetch_buffer_bytes", ""] == SIZE


def test_pages_expire_in_their_own_time_whatever_was_fetched_before_them(open_prefetcher, near, far, clock):
    """The second half of a slow tier's pages is fetched after pages of another tier that were announced later."""
    prefetcher = open_prefetcher(lifetime=30, streams=1)
    keys, later = page_keys(64), page_keys(4, "later")
    store_pages(far.inner, keys)
    store_pages(near.inner, later)
    far.hold.clear()
    announce(prefetcher, far, keys)
    assert far.entered.acquire(timeout=30)
    clock.now = 25.0
    announce(prefetcher, near, later)
    wait_until(lambda: count_fetched(prefetcher, later) == 4)
    far.hold.set()
    wait_until(lambda: count_fetched(prefetcher, keys) == 64)
    assert take(prefetcher, keys[:32])[0] == [GetResult.HIT] * 32
    assert prefetcher._drop_expired() == 5.0
    clock.now = 31.0
    assert take(prefetcher, later[:1])[0] == [GetResult.HIT]
    assert count_fetched(prefetcher, keys) == 0
    assert count_fetched(prefetcher, later) == 4


def test_a_shorter_lifetime_is_that_of_what_is_in_the_buffer_too(open_prefetcher, far, clock):
    prefetcher = open_prefetcher(lifetime=3600)
    keys = page_keys(8)
    store_pages(far.inner, keys)
    announce(prefetcher, far, keys[:4])
    wait_until(lambda: count_fetched(prefetcher, keys) == 4)
    prefetcher.configure(TieringSettings(prefetch_lifetime=5))
    announce(prefetcher, far, keys[4:])
    wait_until(lambda: count_fetched(prefetcher, keys) == 8)
    clock.now = 6.0
    assert take(prefetcher, keys)[0] == [None] * 8
    assert far.metrics.value("prefetch", "wasted") == 8


def test_a_staged_page_asked_for_with_another_size_is_no_hit(open_prefetcher, far):
    prefetcher = open_prefetcher()
    keys = page_keys(1)
    store_pages(far.inner, keys)
    announce(prefetcher, far, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 1)
    assert take(prefetcher, keys, sizes=(SIZE - 1,))[0] == [GetResult.REJECTED]


def test_cleared_and_removed_pages_leave_the_buffer(tiered, far):
    keys = page_keys(6)
    store_pages(far.inner, keys)
    tiered.count_leading(keys)
    wait_until(lambda: count_fetched(tiered.prefetcher, keys) == 6)
    tiered.remove(keys[:1])
    assert count_fetched(tiered.prefetcher, keys) == 5
    tiered.clear([IDENTITY])
    assert count_fetched(tiered.prefetcher, keys) == 0
    assert read_pages(tiered, keys)[0] == [GetResult.MISS] * 6


def test_close_cancels_what_is_planned_and_leaves_no_thread(open_prefetcher, far):
    before = set(threading.enumerate())
    prefetcher = open_prefetcher(streams=3)
    keys = page_keys(500)
    store_pages(far.inner, keys)
    far.hold.clear()
    announce(prefetcher, far, keys)
    assert far.entered.acquire(timeout=30)
    closer = threading.Thread(target=prefetcher.close)
    closer.start()
    wait_until(lambda: prefetcher._closing)
    far.hold.set()
    closer.join(30)
    assert set(threading.enumerate()) <= before
    assert len([key for asked in far.of("get") for key in asked]) <= 3 * 32


def test_a_source_that_raises_costs_nothing_but_its_pages(open_prefetcher, far, monkeypatch):
    prefetcher = open_prefetcher(streams=1)
    keys = page_keys(3)
    store_pages(far.inner, keys)
    monkeypatch.setattr(far, "get", lambda batch: 1 / 0)
    announce(prefetcher, far, keys)
    wait_until(lambda: far.metrics.value("prefetch", "failed") == 3)
    monkeypatch.undo()
    announce(prefetcher, far, keys)
    wait_until(lambda: count_fetched(prefetcher, keys) == 3)


def test_a_source_with_too_few_answers_keeps_nobody_waiting(open_prefetcher, far, monkeypatch):
    (key,) = page_keys(1)
    asked, go_on = threading.Event(), threading.Event()

    def get(batch):
        asked.set()
        go_on.wait(30)
        return []

    monkeypatch.setattr(far, "get", get)
    prefetcher = open_prefetcher()
    announce(prefetcher, far, [key])
    assert asked.wait(30)
    with prefetcher.reading([key]) as (pages, _):
        pass
    results = []
    reader = threading.Thread(
        target=lambda: results.extend(prefetcher.take(PageBatch([key], HostPages([[SIZE]]).buffers), pages)),
        daemon=True,
    )
    reader.start()
    go_on.set()
    reader.join(10)
    assert results == [GetResult.ERROR]


def test_a_thread_that_ends_in_an_error_says_so(open_prefetcher, far, monkeypatch, caplog):
    def broken(self, patience, *kinds):
        raise RuntimeError("nobody expects this")

    monkeypatch.setattr(IoPriority, "wait", broken)
    announce(open_prefetcher(), far, page_keys(1))
    wait_until(lambda: "nobody expects this" in caplog.text)


def test_pages_of_unknown_size_are_left_alone(near, far):
    store = TieredStore([near, far], [near, far], promote_to=near)
    keys = page_keys(3)
    store_pages(far.inner, keys)
    assert store.count_leading(keys) == 3
    assert far.of("get") == []
    # Once some have been read or written, the size is known.
    assert_hits(store, keys[:1])
    assert store.count_leading(keys) == 3
    wait_until(lambda: count_fetched(store.prefetcher, keys[1:]) == 2)
    store.close()


def test_without_a_buffer_nothing_is_fetched(near, far):
    store = TieredStore([near, far], [near, far], settings=TieringSettings(prefetch_buffer=0), promote_to=near)
    store.register_identity(IDENTITY, {"pool": {"segments": [SIZE]}})
    before = set(threading.enumerate())
    store_pages(far.inner, page_keys(3))
    assert store.count_leading(page_keys(3)) == 3
    assert set(threading.enumerate()) <= before
    store.close()

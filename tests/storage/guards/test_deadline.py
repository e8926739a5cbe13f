"""The deadline guard: time, memory, and what is left behind."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest

from hicache_ext.errors import StoreClosedError
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.contract.transforming.page_memory import LentMemory
from hicache_ext.storage.guards.pipeline import GuardedStore
from hicache_ext.storage.guards.time_limits import MOST_STUCK_CALLS
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import (
    HostPages,
    assert_hits,
    filled,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.rigs.faults import PageStoreWrapper, RaisingStore
from tests.storage.guards import hung as rig
from tests.storage.guards.hung import KEY, HungStore, ScribblingStore, set_timeout
from tests.waiting import wait_until

TIMEOUT = 0.1
"""Of the calls that are meant to run into it."""
PATIENCE = 60.0
"""Of all others: a loaded machine must not look like a hung store."""
MIB = 1 << 20
HANG_BOUND = 10.0
"""Far above any deadline here: it only tells a deadline from none."""


@pytest.fixture
def hung() -> Iterator[HungStore]:
    store = HungStore(MemoryPageStore())
    yield store
    store.let_go()


def guard(store: PageStoreWrapper, bounce: int = MIB) -> GuardedStore:
    return rig.guard(store, timeout=PATIENCE, bounce_memory=bounce)


def wait_for_late_ends(store: GuardedStore, calls: int) -> None:
    """Wait until the ``calls`` calls left behind have ended: they are counted, then their threads are free."""
    wait_until(lambda: store.metrics.value("late") == calls and store.deadline.stuck_calls == 0)


def test_each_call_of_a_hung_store_ends_and_says_so(hung: HungStore) -> None:
    store = guard(hung)
    store_pages(store, [KEY])
    hung.hang()
    set_timeout(store, TIMEOUT)
    begun = time.monotonic()
    assert read_pages(store, [KEY])[0] == [GetResult.TIMEOUT]
    assert store_pages(store, [KEY]) == [SetResult.TIMEOUT]
    assert store.contains([KEY]) == [False]
    assert store.count_leading([KEY]) == 0
    assert store.remove([KEY]) == 0
    assert time.monotonic() - begun < HANG_BOUND
    assert store.metrics.value("timeout", "get") == 1
    assert store.metrics.value("timeout", "count_leading") == 1
    hung.let_go()
    wait_for_late_ends(store, 5)
    store.close()


def test_a_late_read_touches_no_host_page() -> None:
    inner = ScribblingStore(MemoryPageStore())
    store = guard(inner)
    store_pages(store, [KEY])
    inner.hang()
    set_timeout(store, TIMEOUT)
    pages = HostPages([[1000]], fill=0x77)
    before = pages.snapshot()
    assert store.get(PageBatch([KEY], pages.buffers)) == [GetResult.TIMEOUT]
    assert pages.snapshot() == before
    inner.let_go()
    wait_for_late_ends(store, 1)
    assert pages.snapshot() == before
    store.close()


def test_a_late_write_stores_what_the_pages_held_when_it_was_called(hung: HungStore) -> None:
    store = guard(hung)
    hung.hang()
    set_timeout(store, TIMEOUT)
    pages = filled([KEY], [[600, 400]])
    assert store.set(PageBatch([KEY], pages.buffers)) == [SetResult.TIMEOUT]
    pages.write(0, b"\xee" * 1000)  # SGLang has given the host pages to another request
    hung.let_go()
    wait_for_late_ends(store, 1)
    set_timeout(store, PATIENCE)
    assert_hits(store, [KEY])
    store.close()


def test_pages_that_are_no_hit_leave_the_host_pages_as_they_were() -> None:
    store = guard(PageStoreWrapper(MemoryPageStore()))
    pages = HostPages([[500]], fill=0x77)
    before = pages.snapshot()
    assert store.get(PageBatch([KEY], pages.buffers)) == [GetResult.MISS]
    assert pages.snapshot() == before
    store.close()


def test_too_many_calls_left_behind_are_refused_at_once(hung: HungStore) -> None:
    store = guard(hung)
    hung.hang()
    set_timeout(store, 0.02)
    for _ in range(MOST_STUCK_CALLS):
        assert read_pages(store, [KEY])[0] == [GetResult.TIMEOUT]
    wait_until(lambda: hung.calls == MOST_STUCK_CALLS)
    set_timeout(store, PATIENCE)
    assert read_pages(store, [KEY])[0] == [GetResult.REJECTED]
    assert store_pages(store, [KEY]) == [SetResult.REJECTED]
    assert store.contains([KEY]) == [False]
    assert hung.calls == MOST_STUCK_CALLS
    hung.let_go()
    wait_for_late_ends(store, MOST_STUCK_CALLS)
    assert store_pages(store, [KEY]) == [SetResult.STORED]
    store.close()


def test_calls_left_behind_keep_their_memory_until_they_end(hung: HungStore) -> None:
    store = guard(hung, bounce=MIB)
    keys = page_keys(3)
    hung.hang()
    set_timeout(store, 0.05)
    for key in keys[:2]:
        assert read_pages(store, [key], [400_000])[0] == [GetResult.TIMEOUT]
    wait_until(lambda: hung.waiting == 2)
    set_timeout(store, PATIENCE)
    # Nobody who is in time will give back enough: no waiting.
    assert read_pages(store, keys[2:], [400_000])[0] == [GetResult.REJECTED]
    assert hung.calls == 2
    hung.let_go()
    wait_for_late_ends(store, 2)
    assert store_pages(store, keys, [400_000]) == [SetResult.STORED] * 3
    assert_hits(store, keys, [400_000])
    assert store.deadline.bounce.lent == 0
    store.close()


def test_a_batch_larger_than_the_bounce_memory_goes_through_in_portions() -> None:
    store = guard(PageStoreWrapper(MemoryPageStore()), bounce=MIB)
    keys = page_keys(100)
    assert store_pages(store, keys, [50_000, 3]) == [SetResult.STORED] * 100
    assert_hits(store, keys, [3, 50_000])
    store.close()


def test_a_page_larger_than_the_bounce_memory_waits_until_nothing_is_lent() -> None:
    store = guard(PageStoreWrapper(MemoryPageStore()), bounce=MIB)
    keys, sizes = page_keys(2), [[1000], [MIB + 1]]
    assert store.set(PageBatch(keys, filled(keys, sizes).buffers)) == [SetResult.STORED] * 2
    other = store.deadline.bounce.take([10], 0.0)
    assert other is not None
    set_timeout(store, TIMEOUT)
    pages = HostPages(sizes)
    assert store.get(PageBatch(keys, pages.buffers)) == [GetResult.HIT, GetResult.TIMEOUT]
    store.deadline.bounce.give_back(other)
    set_timeout(store, PATIENCE)
    assert store.get(PageBatch(keys, pages.buffers)) == [GetResult.HIT] * 2
    store.close()


def test_a_store_that_raises_has_failed() -> None:
    store = guard(RaisingStore(MemoryPageStore(), lambda: ConnectionResetError("gone")))
    assert read_pages(store, [KEY])[0] == [GetResult.ERROR]
    assert store_pages(store, [KEY]) == [SetResult.ERROR]
    assert store.contains([KEY]) == [False]
    assert store.deadline.bounce.lent == 0
    store.close()


def test_a_store_with_too_few_answers_has_failed_and_keeps_no_memory() -> None:
    class Short(PageStoreWrapper):
        def get(self, batch: PageBatch) -> list[GetResult]:
            return self.inner.get(batch)[1:]

        def set(self, batch: PageBatch) -> list[SetResult]:
            return []

    store, keys = guard(Short(MemoryPageStore())), page_keys(3)
    assert read_pages(store, keys)[0] == [GetResult.ERROR] * 3
    assert store_pages(store, keys) == [SetResult.ERROR] * 3
    assert store.metrics.value("error", "raised") == 2
    assert store.deadline.bounce.lent == 0
    store.close()


def test_close_does_not_wait_for_a_store_that_hangs(hung: HungStore, caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    store = guard(hung)
    hung.hang()
    set_timeout(store, TIMEOUT)
    assert read_pages(store, [KEY])[0] == [GetResult.TIMEOUT]
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < HANG_BOUND
    # The store's own close() may be late, too.
    assert re.search(r"[12] calls hang in the store", caplog.text)
    with pytest.raises(StoreClosedError):
        store.contains([KEY])
    hung.let_go()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_close_closes_a_store_of_which_many_calls_hang(hung: HungStore) -> None:
    def is_closed() -> bool:
        try:
            hung.inner.contains([KEY])
        except StoreClosedError:
            return True
        return False

    store = guard(hung)
    hung.hang()
    set_timeout(store, 0.02)
    for _ in range(MOST_STUCK_CALLS + 1):
        store.contains([KEY])
    store.close()
    wait_until(is_closed)


def test_eight_threads_share_little_bounce_memory() -> None:
    store = guard(PageStoreWrapper(MemoryPageStore()), bounce=MIB)
    keys = page_keys(40)
    problems: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            for _ in range(5):
                assert all(result.durable for result in store_pages(store, keys[seed:], [20_000]))
                assert_hits(store, keys[seed:], [20_000])
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert store.deadline.bounce.lent == 0
    store.close()


def test_pieces_of_bounce_memory_never_overlap() -> None:
    memory = LentMemory(64 * 4096)
    now = time.monotonic()
    for _ in range(2):  # the second time of what was given back
        held = [(number, memory.take([4096 * (number % 5 + 1), 1], now)) for number in range(10)]
        for number, lease in held:
            assert lease is not None
            for piece in lease.pieces:
                piece[:] = bytes([number]) * piece.nbytes
        for number, lease in held:
            assert lease is not None
            assert b"".join(lease.pieces) == bytes([number]) * (4096 * (number % 5 + 1) + 1)
            memory.give_back(lease)
    assert memory.lent == 0


def test_the_payload_of_every_page_of_a_batch_reaches_its_own_segments() -> None:
    store = guard(PageStoreWrapper(MemoryPageStore()))
    keys = page_keys(6)
    sizes = [[1], [5000, 1], [3, 3, 3], [4096], [1, 4095], [7]]
    store.set(PageBatch(keys, filled(keys, sizes).buffers))
    pages = HostPages(sizes)
    assert store.get(PageBatch(keys, pages.buffers)) == [GetResult.HIT] * 6
    pages.assert_guards_intact()
    assert [pages.payload(n) for n in range(6)] == [payload_of(k, sum(s)) for k, s in zip(keys, sizes, strict=True)]
    store.close()

"""Retry, look-ups that are asked again, concurrency limit, exists budget."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import pytest

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.breaker import BreakerState
from hicache_ext.runtime.call_deadline import answering_at_once
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.guards.pipeline import GuardedStore, plan_guards
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, payload_of, read_pages, store_pages
from tests.rigs.faults import PageStoreWrapper
from tests.storage.guards.hung import KEY, OTHER, Clock, CountingStore, HungStore, PoolConfig, guard
from tests.waiting import wait_until


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hung() -> Iterator[HungStore]:
    store = HungStore(MemoryPageStore())
    yield store
    store.let_go()


# -- retry -------------------------------------------------------------------------------------------------------------


class Flaky(PageStoreWrapper):
    """The first ``failures`` transfers of each page fail; ``batches`` are the keys of each call."""

    def __init__(self, failures: int, result: GetResult = GetResult.ERROR) -> None:
        super().__init__(MemoryPageStore())
        self._left: dict[bytes, int] = {}
        self._failures = failures
        self._result = result
        self.batches: list[Sequence[bytes]] = []

    def _fails(self, key: bytes) -> bool:
        left = self._left.setdefault(key, self._failures if key == KEY else 0)
        self._left[key] = left - 1
        return left > 0

    def get(self, batch: PageBatch) -> list[GetResult]:
        self.batches.append(batch.keys)
        results = super().get(batch)
        return [self._result if self._fails(k) else r for k, r in zip(batch.keys, results, strict=True)]

    def set(self, batch: PageBatch) -> list[SetResult]:
        self.batches.append(batch.keys)
        results = super().set(batch)
        return [SetResult.ERROR if self._fails(k) else r for k, r in zip(batch.keys, results, strict=True)]


def test_only_the_pages_that_failed_are_tried_again(clock: Clock) -> None:
    inner = Flaky(failures=1)
    store = guard(inner, clock=clock, timeout=10.0, retries=2)
    store_pages(inner.inner, [KEY, OTHER])
    results, payloads = read_pages(store, [OTHER, KEY])
    assert results == [GetResult.HIT, GetResult.HIT]
    assert payloads == [payload_of(OTHER, 1000), payload_of(KEY, 1000)]
    assert inner.batches == [[OTHER, KEY], [KEY]]
    assert store.metrics.value("retry", "get") == 1


def test_a_write_that_failed_after_all_had_been_stored_is_durable(clock: Clock) -> None:
    store = guard(Flaky(failures=1), clock=clock, timeout=10.0, retries=1)
    assert store_pages(store, [KEY]) == [SetResult.EXISTS]


def test_retries_are_bounded(clock: Clock) -> None:
    inner = Flaky(failures=100)
    store = guard(inner, clock=clock, timeout=10.0, retries=3)
    assert read_pages(store, [KEY])[0] == [GetResult.ERROR]
    assert len(inner.batches) == 4


def test_no_retry_begins_when_a_quarter_of_the_time_is_gone(clock: Clock) -> None:
    class Slow(Flaky):
        def get(self, batch: PageBatch) -> list[GetResult]:
            clock.sleep(2.6)
            return super().get(batch)

    inner = Slow(failures=1)
    store = guard(inner, clock=clock, timeout=10.0, retries=3)
    assert read_pages(store, [KEY])[0] == [GetResult.ERROR]
    assert len(inner.batches) == 1


@pytest.mark.parametrize("result", [r for r in GetResult if r is not GetResult.ERROR])
def test_answers_are_not_asked_for_twice(clock: Clock, result: GetResult) -> None:
    inner = Flaky(failures=100, result=result)
    store = guard(inner, clock=clock, timeout=10.0, retries=3)
    assert read_pages(store, [KEY])[0] == [result]
    assert len(inner.batches) == 1


# -- what was absent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look_up", ["count_leading", "contains", "get"])
@pytest.mark.parametrize("first", ["count_leading", "contains", "get"])
def test_what_another_server_has_written_is_found_when_sglang_asks_again(first: str, look_up: str) -> None:
    """SGLang asks for a prefix again every 8 scheduling passes, 8 times, which may all be within one second. Every one
    of them used to be answered from what the first one had found."""
    counting = CountingStore(MemoryPageStore())
    store = GuardedStore(counting, plan_guards(PoolConfig()))
    keys = page_keys(32)
    found = {
        "count_leading": lambda: store.count_leading(keys),
        "contains": lambda: sum(store.contains(keys)),
        "get": lambda: read_pages(store, keys)[0].count(GetResult.HIT),
    }
    for asked in range(1, 4):
        assert found[first]() == 0
        assert counting.calls == asked
    store_pages(counting.inner, keys[:20])  # another server
    assert found[look_up]() == 20
    store_pages(counting.inner, keys[20:])
    # Other portions of the chain than the ones asked for before.
    assert store.count_leading(keys[3:]) == 29
    store.close()


# -- concurrency -------------------------------------------------------------------------------------------------------


def test_more_calls_than_the_limit_wait_or_are_refused(hung: HungStore) -> None:
    store = guard(hung, concurrency=2, timeout=0.1)
    store_pages(store, [KEY])
    hung.hang()
    results: list[int] = []
    callers = [threading.Thread(target=lambda: results.append(store.count_leading([KEY]))) for _ in range(2)]
    for caller in callers:
        caller.start()
    wait_until(lambda: hung.waiting == 2)
    assert read_pages(store, [KEY])[0] == [GetResult.REJECTED]
    assert store_pages(store, [KEY]) == [SetResult.REJECTED]
    assert store.contains([KEY]) == [False]
    assert hung.waiting == 2
    assert store.metrics.value("rejected", "concurrency") == 3
    hung.let_go()
    for caller in callers:
        caller.join()
    assert results == [1, 1]
    assert_hits(store, [KEY])


def test_a_caller_that_waits_gets_its_turn(hung: HungStore) -> None:
    store = guard(hung, concurrency=1)
    store_pages(store, [KEY])
    hung.hang()
    results: list[int] = []
    callers = [threading.Thread(target=lambda: results.append(store.count_leading([KEY]))) for _ in range(5)]
    for caller in callers:
        caller.start()
    wait_until(lambda: hung.waiting == 1)
    hung.let_go()
    for caller in callers:
        caller.join()
    assert results == [1] * 5


@pytest.mark.parametrize(
    ("timeout", "learnt", "expected"), [(7200.0, 60.0, 30.0), (10.0, 10.0, 5.0), (math.inf, math.inf, None)]
)
def test_a_call_waits_for_its_turn_for_half_of_its_limit_at_most(
    monkeypatch: pytest.MonkeyPatch, timeout: float, learnt: float, expected: float | None
) -> None:
    store = guard(MemoryPageStore(), concurrency=1, timeout=timeout)
    monkeypatch.setattr(store._reads, "seconds", lambda amount: learnt)
    waited: list[float | None] = []

    def acquire(timeout: float | None = None) -> bool:
        waited.append(timeout)
        return False

    monkeypatch.setattr(store._places, "acquire", acquire)
    assert read_pages(store, [KEY])[0] == [GetResult.REJECTED]
    assert waited == [expected]


@pytest.mark.parametrize("learnt", [True, False])
def test_what_waited_for_its_turn_in_vain_is_no_evidence_against_the_tier(
    monkeypatch: pytest.MonkeyPatch, learnt: bool
) -> None:
    timeout = 3600.0 if learnt else 0.1
    store = guard(MemoryPageStore(), concurrency=1, timeout=timeout, slow_call=0.01, probe_interval=3600.0)
    for limits in (store._reads, store._look_ups):
        monkeypatch.setattr(limits, "seconds", lambda amount: 0.1)
    # Another call has the place.
    assert store._places is not None and store._places.acquire()
    for _ in range(4):
        assert read_pages(store, [KEY])[0] == [GetResult.REJECTED]
        assert store.count_leading([KEY]) == 0
        assert store.contains([KEY]) == [False]
    assert store.breaker.state is BreakerState.CLOSED
    store.close()


# -- exists budget -----------------------------------------------------------------------------------------------------


def test_the_scheduler_gets_what_is_known_and_later_what_was_found(hung: HungStore, clock: Clock) -> None:
    store = guard(hung, clock=clock, exists_budget=0.02)
    keys = page_keys(5)
    store_pages(hung.inner, keys[:3])
    hung.hang()
    with answering_at_once():
        assert store.count_leading(keys) == 0
        assert store.contains(keys) == [False] * 5
    wait_until(lambda: hung.calls == 2)
    hung.let_go()
    wait_until(lambda: hung.waiting == 0)
    wait_until(lambda: store._budget._found)
    hung.hang()
    with answering_at_once():
        assert store.count_leading(keys) == 3
        assert store.contains(keys) == [True, True, True, False, False]
    hung.let_go()
    store.close()


def test_what_is_forgotten_during_a_late_look_up_takes_nothing_else_with_it(hung: HungStore, clock: Clock) -> None:
    """A read that misses some other page used to throw away all that every late look-up found: a slow tier beside a
    busy reader was never found at all."""
    store = guard(hung, clock=clock, exists_budget=0.02)
    *keys, other = page_keys(4)
    store_pages(hung.inner, keys)
    hung.hang()
    with answering_at_once():
        assert store.count_leading(keys) == 0
    wait_until(lambda: hung.waiting == 1)
    store._budget.forget([other, keys[2]])
    hung.let_go()
    wait_until(lambda: store._budget._found)
    hung.hang()
    with answering_at_once():
        assert store.count_leading(keys) == 2
    store._budget.forget()
    hung.let_go()
    wait_until(lambda: hung.waiting == 0)
    store.close()
    assert not store._budget.knows_some


def test_a_store_in_time_answers_the_scheduler_exactly(clock: Clock) -> None:
    store = guard(MemoryPageStore(), clock=clock, exists_budget=10.0)
    keys = page_keys(4)
    store_pages(store, [keys[0], keys[1], keys[3]])
    with answering_at_once():
        assert store.count_leading(keys) == 2
        assert store.contains(keys) == [True, True, False, True]
        assert store.count_leading(keys[3:]) == 1
    store.close()


def test_other_threads_go_straight_through(hung: HungStore) -> None:
    store = guard(hung, exists_budget=0.001)
    store_pages(store, [KEY])
    hung.hang()
    results: list[int] = []
    caller = threading.Thread(target=lambda: results.append(store.count_leading([KEY])))
    caller.start()
    wait_until(lambda: hung.waiting == 1)
    hung.let_go()
    caller.join()
    assert results == [1]
    store.close()


def test_look_ups_of_a_hung_store_do_not_pile_up(hung: HungStore) -> None:
    store = guard(hung, exists_budget=0.001)
    hung.hang()
    with answering_at_once():
        for key in page_keys(50):
            assert store.count_leading([key]) == 0
    assert hung.waiting <= 4
    assert store.metrics.value("exists_budget", "busy") >= 46
    hung.let_go()
    store.close()


def test_what_was_found_is_forgotten_when_it_goes() -> None:
    clock = Clock()
    inner = MemoryPageStore()
    store = guard(inner, clock=clock, exists_budget=10.0)
    first, second, third = page_keys(3)
    store_pages(store, [first, second, third])
    with answering_at_once():
        assert store.count_leading([first, second, third]) == 3
        store.remove([third])
        assert store.count_leading([first, second, third]) == 2
        inner.remove([second])  # evicted, or another process
        assert read_pages(store, [second])[0] == [GetResult.MISS]
        assert store.count_leading([first, second]) == 1
        inner.remove([first])
        clock.sleep(60)
        assert store.count_leading([first]) == 0


def test_what_was_found_is_forgotten_when_all_was_cleared(hung: HungStore) -> None:
    store = guard(hung, exists_budget=10.0)
    store_pages(store, [KEY])
    with answering_at_once():
        assert store.count_leading([KEY]) == 1
        store.clear(None)
        assert store.count_leading([KEY]) == 0
    store.close()


def test_close_ends_its_threads(hung: HungStore) -> None:
    before = set(threading.enumerate())
    store = guard(hung, exists_budget=0.01)
    with answering_at_once():
        store.count_leading([KEY])
    store.close()
    assert set(threading.enumerate()) <= before
    with answering_at_once(), pytest.raises(StoreClosedError):
        store.count_leading([KEY])

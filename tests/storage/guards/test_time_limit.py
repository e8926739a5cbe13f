"""The time that a call gets: configured, or less where earlier calls have shown that less will do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest

from hicache_ext.config import RemoteTierConfig
from hicache_ext.runtime.breaker import BreakerState
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.guards.pipeline import LEAST_READ, LEAST_WRITE, GuardedStore, plan_guards
from hicache_ext.storage.guards.time_limits import LearntLimit
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import HostPages, page_keys, read_pages, store_pages
from tests.rigs.faults import PageStoreWrapper
from tests.storage.guards.hung import KEY, Clock, HungStore, guard
from tests.waiting import ending_within, wait_until

READS, WRITES = 1.0, 5.0
QUICK = 0.002
KEYS = page_keys(4)


class Pool(PageStoreWrapper):
    """Each call takes ``seconds`` on the clock; one that would take longer than it is given ends then, with nothing."""

    def __init__(self, clock: Clock, seconds: float = QUICK) -> None:
        super().__init__(MemoryPageStore())
        self._clock = clock
        self.seconds = seconds
        self.limits: dict[str, float] = {}
        """What the last call of each kind was given; a probe counts as "probe"."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        in_time = self._takes("get" if len(batch) > 1 else "probe")
        return self.inner.get(batch) if in_time else [GetResult.TIMEOUT] * len(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self.inner.set(batch) if self._takes("set") else [SetResult.TIMEOUT] * len(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        in_time = self._takes("look_up" if len(keys) > 1 else "probe")
        return self.inner.contains(keys) if in_time else [False] * len(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self.inner.count_leading(keys) if self._takes("look_up") else 0

    def _takes(self, kind: str) -> bool:
        limit = call_deadline(math.inf) - self._clock.now
        self.limits[kind] = limit
        self._clock.sleep(min(self.seconds, limit))
        return self.seconds < limit


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limited(store: PageStore, clock: Clock, **breaker: float) -> GuardedStore:
    return guard(store, clock=clock, timeout=READS, write_timeout=WRITES, **breaker)


@pytest.fixture
def pool(clock: Clock) -> Pool:
    return Pool(clock)


@pytest.fixture
def store(pool: Pool, clock: Clock) -> Iterator[PageStore]:
    store = limited(pool, clock, probe_interval=0.4, slow_start=3600.0)
    yield store
    store.close()


def settle(store: PageStore) -> None:
    """Enough calls of every kind to learn from."""
    for number in range(10):
        assert store_pages(store, page_keys(4, f"new-{number}")) == [SetResult.STORED] * 4
    store_pages(store, KEYS)
    for _ in range(10):
        assert store.contains(KEYS) == [True] * 4
        assert store.count_leading(KEYS) == 4
        assert read_pages(store, KEYS)[0] == [GetResult.HIT] * 4


def state(store: PageStore) -> BreakerState:
    assert isinstance(store, GuardedStore) and store.breaker is not None
    return store.breaker.state


# -- what is learnt ----------------------------------------------------------------------------------------------------


@pytest.fixture
def limit(clock: Clock) -> LearntLimit:
    return LearntLimit(0.25, clock, 1.0)


def observe(limit: LearntLimit, amount: int, seconds: float, times: int = 10) -> None:
    for _ in range(times):
        limit.observe(amount, seconds)


def test_as_long_as_little_is_known_a_call_gets_what_is_configured(limit: LearntLimit) -> None:
    assert limit.seconds(100) == 1.0
    observe(limit, 100, 0.001, 7)
    assert limit.seconds(100) == 1.0


def test_a_quick_tier_gets_the_least_that_any_gets_and_a_slow_one_four_times_its_slowest_call(
    limit: LearntLimit,
) -> None:
    observe(limit, 100, 0.001)
    assert limit.seconds(100) == 0.25
    limit.observe(100, 0.2)
    assert limit.seconds(100) == pytest.approx(0.8)
    limit.observe(100, 0.6)
    assert limit.seconds(100) == 1.0


def test_small_calls_say_nothing_about_large_ones_and_large_ones_bound_the_small(limit: LearntLimit) -> None:
    observe(limit, 1000, 0.001)
    assert limit.seconds(1_000_000) == 1.0
    observe(limit, 1_000_000, 0.1)
    assert limit.seconds(1_000_000) == limit.seconds(50_000) == pytest.approx(0.4)
    assert limit.seconds(900) == 0.25


def test_a_size_with_few_calls_goes_by_them_and_by_larger_ones(limit: LearntLimit) -> None:
    observe(limit, 1_000_000, 0.02)
    assert limit.seconds(1000) == 0.25
    limit.observe(1000, 0.2)
    assert limit.seconds(1000) == pytest.approx(0.8)


def test_a_call_that_was_cut_raises_the_limit_of_every_size_for_as_long_as_a_slow_one(limit: LearntLimit) -> None:
    observe(limit, 1000, 0.001)
    observe(limit, 1_000_000, 0.02)
    limit.observe_cut(50_000, 0.25)
    assert limit.seconds(1000) == limit.seconds(50_000) == limit.seconds(1_000_000) == 1.0
    observe(limit, 1000, 0.001, 32)
    assert (limit.seconds(1000), limit.seconds(1_000_000)) == (0.25, 1.0)


def test_one_slow_call_is_forgotten_after_32_others(limit: LearntLimit) -> None:
    observe(limit, 100, 0.001)
    limit.observe(100, 0.9)
    assert limit.seconds(100) == 1.0
    observe(limit, 100, 0.001, 32)
    assert limit.seconds(100) == 0.25


def test_a_tier_that_nobody_used_for_minutes_gets_its_whole_timeout_for_its_cold_connections(
    limit: LearntLimit, clock: Clock
) -> None:
    observe(limit, 100, 0.001)
    clock.sleep(301)
    assert limit.seconds(100) == 1.0


# -- what a tier is given ----------------------------------------------------------------------------------------------


def test_a_tier_that_hangs_costs_what_its_calls_have_taken_and_not_the_whole_timeout(
    store: PageStore, pool: Pool, clock: Clock
) -> None:
    settle(store)
    pool.seconds = 3600.0
    began = clock.now
    assert store.count_leading(KEYS) == 0
    assert clock.now - began == LEAST_READ
    for _ in range(100):
        assert read_pages(store, KEYS)[0] == [GetResult.REJECTED] * 4
    wait_until(lambda: store.metrics.value("breaker_probe", "bad") >= 3)
    assert state(store) is BreakerState.OPEN


def test_reads_look_ups_and_writes_learn_apart(store: PageStore, pool: Pool) -> None:
    settle(store)
    pool.seconds = 0.15
    for _ in range(3):
        store.contains(KEYS)
    pool.seconds = QUICK
    store.contains(KEYS)
    read_pages(store, KEYS)
    store_pages(store, page_keys(4, "one more"))
    assert pool.limits == {"look_up": pytest.approx(0.6), "get": LEAST_READ, "set": LEAST_WRITE}


def test_a_write_may_take_longer_than_a_first_token_may_wait(store: PageStore, pool: Pool) -> None:
    pool.seconds = 3.0
    assert store_pages(store, KEYS) == [SetResult.STORED] * 4
    assert pool.limits["set"] == WRITES


def test_absent_pages_and_refused_calls_teach_nothing(store: PageStore, pool: Pool) -> None:
    for _ in range(20):
        read_pages(store, KEYS)
        store.count_leading(KEYS)
    assert (pool.limits["get"], pool.limits["look_up"]) == (READS, READS)


def test_a_hiccup_costs_the_misses_that_it_lasts_and_no_slow_start(store: PageStore, pool: Pool) -> None:
    settle(store)
    pool.seconds = 0.4
    assert read_pages(store, KEYS)[0] == [GetResult.TIMEOUT] * 4
    assert state(store) is BreakerState.OPEN
    pool.seconds = QUICK
    wait_until(lambda: state(store) is BreakerState.CLOSED)
    assert store.metrics.value("breaker", "half_open") == 0
    assert read_pages(store, KEYS)[0] == [GetResult.HIT] * 4


def test_a_tier_that_becomes_slower_is_in_use_again_after_one_call(store: PageStore, pool: Pool) -> None:
    settle(store)
    pool.seconds = 0.4
    assert read_pages(store, KEYS)[0] == [GetResult.TIMEOUT] * 4
    wait_until(lambda: state(store) is BreakerState.CLOSED)
    for _ in range(50):
        assert read_pages(store, KEYS)[0] == [GetResult.HIT] * 4
    assert pool.limits["get"] == READS
    assert store.metrics.value("breaker", "open") == 1


@pytest.mark.parametrize("pages", [2, 40, 128])
def test_a_tier_that_becomes_slower_is_cut_once_and_not_once_for_each_size(
    store: PageStore, pool: Pool, pages: int
) -> None:
    """Reads of sizes that had no calls of their own, and of one that had quick ones."""
    keys = page_keys(128)
    store_pages(store, keys)
    for _ in range(10):
        assert read_pages(store, keys)[0] == [GetResult.HIT] * 128
    pool.seconds = 0.4
    assert read_pages(store, keys[:pages])[0] == [GetResult.TIMEOUT] * pages
    wait_until(lambda: state(store) is BreakerState.CLOSED)
    for some in (2, 20, 40, 128):
        assert read_pages(store, keys[:some])[0] == [GetResult.HIT] * some
    assert store.metrics.value("breaker", "open") == 1


def test_a_large_read_that_takes_its_whole_timeout_leaves_small_ones_their_limit(store: PageStore, pool: Pool) -> None:
    settle(store)
    keys = page_keys(128)
    pool.seconds = 3600.0
    assert read_pages(store, keys)[0] == [GetResult.TIMEOUT] * 128
    assert pool.limits["get"] == READS
    pool.seconds = QUICK
    wait_until(lambda: state(store) is BreakerState.HALF_OPEN)
    assert read_pages(store, KEYS)[0] == [GetResult.HIT] * 4
    assert pool.limits["get"] == LEAST_READ


def test_a_probe_has_the_whole_timeout(store: PageStore, pool: Pool) -> None:
    settle(store)
    pool.seconds = 0.4
    store.count_leading(KEYS)
    wait_until(lambda: "probe" in pool.limits)
    assert pool.limits["probe"] == READS


def test_a_tier_that_hangs_for_as_long_as_the_first_regular_probe_is_waited_for_comes_back_slowly(
    store: PageStore, pool: Pool
) -> None:
    settle(store)
    pool.seconds = 3600.0
    store.count_leading(KEYS)
    wait_until(lambda: store.metrics.value("breaker_probe", "bad") >= 3)
    pool.seconds = QUICK
    wait_until(lambda: state(store) is BreakerState.HALF_OPEN)


def test_a_look_up_that_found_pages_until_it_was_cut_is_no_reason_to_give_the_tier_up(clock: Clock) -> None:
    """An object store that looks 2,000 keys up in more than a second: what it found is read."""

    class Found(PageStoreWrapper):
        def count_leading(self, keys: Sequence[bytes]) -> int:
            clock.sleep(READS)
            return len(keys) * 3 // 4

    store = limited(Found(MemoryPageStore()), clock, slow_call=0.5)
    keys = page_keys(1000)
    for _ in range(20):
        assert store.count_leading(keys) == 750
    assert state(store) is BreakerState.CLOSED
    store.close()


@pytest.mark.parametrize(("pages", "expected"), [(150, BreakerState.CLOSED), (1, BreakerState.OPEN)])
def test_a_large_read_that_is_cut_counts_by_what_came_in_time(clock: Clock, pages: int, expected: BreakerState) -> None:
    size = 1 << 20

    class Cut(PageStoreWrapper):
        def get(self, batch: PageBatch) -> list[GetResult]:
            clock.sleep(READS)
            return [GetResult.HIT] * pages + [GetResult.TIMEOUT] * (len(batch) - pages)

    store = limited(Cut(MemoryPageStore()), clock, probe_interval=3600.0)
    segment = memoryview(bytearray(size))
    batch = PageBatch(page_keys(200), [[segment]] * 200)
    for _ in range(5):
        store.get(batch)
    assert state(store) is expected
    store.close()


def test_a_longer_timeout_does_not_raise_the_least_that_a_call_gets(pool: Pool, clock: Clock) -> None:
    """A pool that hangs costs what its calls have shown to be enough, whatever its timeout."""
    store = guard(pool, clock=clock, timeout=10.0, slow_call=5.0)
    settle(store)
    store_pages(store, page_keys(4, "one more"))
    assert pool.limits == {"look_up": LEAST_READ, "get": LEAST_READ, "set": LEAST_WRITE}


# -- who keeps to it ---------------------------------------------------------------------------------------------------


def _call_of_each_kind(store: PageStore) -> None:
    store.contains([KEY])
    store.count_leading([KEY])
    store.get(PageBatch([KEY], HostPages([[100]]).buffers))
    store.set(PageBatch([KEY], HostPages([[100]]).buffers))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda store: guard(store, timeout=0.02, bounce_memory=1 << 20),
        lambda store: guard(store, timeout=0.02, concurrency=0),
    ],
)
def test_guards_that_wait_end_by_the_limit_of_the_call(wrap: Callable[[PageStore], PageStore]) -> None:
    hung = HungStore(MemoryPageStore())
    hung.hang()
    store = wrap(hung)
    began = time.monotonic()
    _call_of_each_kind(store)
    assert time.monotonic() - began < 1800
    hung.let_go()
    store.close()


def test_no_retry_begins_when_a_quarter_of_the_limit_is_over(clock: Clock) -> None:
    class Failing(PageStoreWrapper):
        calls = 0

        def get(self, batch: PageBatch) -> list[GetResult]:
            self.calls += 1
            clock.sleep(0.2)
            return [GetResult.ERROR] * len(batch)

    failing = Failing(MemoryPageStore())
    store = guard(failing, clock=clock, timeout=0.5, retries=5)
    read_pages(store, [KEY])
    assert failing.calls == 1


def test_the_deadline_guard_tells_the_store_that_it_runs_elsewhere_what_the_limit_is() -> None:
    seen: list[float] = []

    class Asked(PageStoreWrapper):
        def count_leading(self, keys: Sequence[bytes]) -> int:
            seen.append(call_deadline(3600.0) - time.monotonic())
            return 0

    store = guard(Asked(MemoryPageStore()), timeout=60.0, bounce_memory=1 << 20)
    store.count_leading([KEY])
    assert len(seen) == 1 and 0 < seen[0] <= 60.0
    store.close()


def test_a_store_that_nobody_gives_less_has_its_own_timeout() -> None:
    assert call_deadline(3600.0) - time.monotonic() > 1800
    with ending_within(60.0):
        assert call_deadline(3600.0) - time.monotonic() <= 60
        assert call_deadline(1.0) - time.monotonic() <= 1
    assert call_deadline(3600.0) - time.monotonic() > 1800


def test_a_store_that_keeps_its_timeout_is_told_the_limits_of_reads_and_writes_by_default() -> None:
    class TimelyPoolConfig(RemoteTierConfig):
        keeps_timeout: ClassVar[bool] = True

    clock = Clock()
    pool = Pool(clock)
    store = GuardedStore(pool, plan_guards(TimelyPoolConfig(type="pool")), clock=clock)
    store_pages(store, KEYS)
    read_pages(store, KEYS)
    assert pool.limits == {"set": 5.0, "get": 1.0}
    store.close()

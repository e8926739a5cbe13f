"""The circuit breaker: its rules on a fake clock, then the store with its probes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence

import pytest

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import BreakerState, WritePause
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.guards.breaker import _LEARNT, LONGEST_PROBE_INTERVAL, Outcome, TierBreaker
from hicache_ext.storage.guards.pipeline import GuardedStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import HostPages, assert_hits, page_keys, read_pages, store_pages
from tests.rigs.faults import FailingStore, PageStoreWrapper, RaisingStore
from tests.storage.guards.hung import KEY, OTHER, Clock, HungStore, ScribblingStore, guard, set_timeout
from tests.waiting import wait_until

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def changes() -> list[tuple[BreakerState, str]]:
    return []


class Noting(TierBreaker):
    """Notes its changes. No probe of it ever succeeds."""

    def __init__(self, clock: Clock, changes: list[tuple[BreakerState, str]], slow_start: float = 10.0) -> None:
        self._changes = changes
        probes = lambda batch: [GetResult.ERROR], lambda key: False
        super().__init__(MemoryPageStore("none"), *probes, slow_start=slow_start, clock=clock)

    def _changed(self, state: BreakerState, reason: str) -> None:
        self._changes.append((state, reason))


@pytest.fixture
def breaker(clock: Clock, changes: list[tuple[BreakerState, str]]) -> Iterator[TierBreaker]:
    breaker = Noting(clock, changes)
    yield breaker
    assert breaker.close(30)


def call(breaker: TierBreaker, outcome: Outcome) -> bool:
    """One call that ends so; whether it was let through."""
    ticket = breaker.admit()
    if ticket is not None:
        breaker.record(ticket, outcome, outcome.value)
    return ticket is not None


def test_one_timeout_opens(breaker: TierBreaker, changes: list[tuple[BreakerState, str]]) -> None:
    for _ in range(20):
        assert call(breaker, Outcome.GOOD)
    assert call(breaker, Outcome.TIMEOUT)
    assert not call(breaker, Outcome.GOOD)
    assert changes == [(OPEN, "timeout")]


@pytest.mark.parametrize("outcome", [Outcome.SLOW, Outcome.FAILED])
def test_bad_calls_open_when_they_are_half_of_the_recent_ones(breaker: TierBreaker, outcome: Outcome) -> None:
    for _ in range(10):
        call(breaker, Outcome.GOOD)
    for _ in range(4):
        call(breaker, outcome)
        call(breaker, Outcome.UNKNOWN)
    assert breaker.state is CLOSED
    call(breaker, outcome)
    assert breaker.state is OPEN


def test_two_bad_calls_are_too_few_to_judge_by(breaker: TierBreaker) -> None:
    call(breaker, Outcome.FAILED)
    call(breaker, Outcome.FAILED)
    assert breaker.state is CLOSED
    call(breaker, Outcome.FAILED)
    assert breaker.state is OPEN


def test_bad_calls_of_long_ago_do_not_count(breaker: TierBreaker, clock: Clock) -> None:
    for _ in range(9):
        call(breaker, Outcome.FAILED) if breaker.state is CLOSED else None
        clock.sleep(45)
    assert breaker.state is CLOSED


def test_a_recovered_tier_gets_a_growing_share_and_is_then_in_full_use(breaker: TierBreaker, clock: Clock) -> None:
    call(breaker, Outcome.TIMEOUT)
    breaker.recover()
    shares = []
    for _ in range(10):
        shares.append(sum(call(breaker, Outcome.GOOD) for _ in range(100)))
        clock.sleep(1.0)
    assert shares[0] in range(9, 13)
    assert shares == sorted(shares) and shares[-1] in range(85, 95)
    assert breaker.state is HALF_OPEN
    assert all(call(breaker, Outcome.GOOD) for _ in range(100))
    assert breaker.state is CLOSED


def test_the_first_call_after_a_good_probe_goes_through(breaker: TierBreaker) -> None:
    call(breaker, Outcome.TIMEOUT)
    breaker.recover()
    assert call(breaker, Outcome.GOOD)


def test_one_bad_call_amid_the_slow_start_opens_again_and_probes_come_later(breaker: TierBreaker, clock: Clock) -> None:
    intervals = []
    for _ in range(8):
        while not call(breaker, Outcome.SLOW if breaker.state is HALF_OPEN else Outcome.TIMEOUT):
            pass
        assert breaker.state is OPEN
        intervals.append(breaker._first_pause())
        breaker.recover()
    assert intervals == [1, 2, 4, 8, 16, LONGEST_PROBE_INTERVAL, LONGEST_PROBE_INTERVAL, LONGEST_PROBE_INTERVAL]
    clock.sleep(10)
    call(breaker, Outcome.GOOD)
    call(breaker, Outcome.TIMEOUT)
    assert breaker._first_pause() == 1


def test_a_call_that_began_before_the_breaker_opened_says_nothing_about_the_tier_after_it(breaker: TierBreaker) -> None:
    ticket = breaker.admit()
    assert ticket is not None
    call(breaker, Outcome.TIMEOUT)
    breaker.recover()
    breaker.record(ticket, Outcome.TIMEOUT)
    assert breaker.state is HALF_OPEN


def test_without_a_slow_start_a_recovered_tier_is_in_full_use(clock: Clock) -> None:
    breaker = Noting(clock, [], slow_start=0.0)
    call(breaker, Outcome.TIMEOUT)
    breaker.recover()
    assert call(breaker, Outcome.GOOD)
    assert breaker.state is CLOSED
    assert breaker.close(30)


# -- the store ---------------------------------------------------------------------------------------------------------

QUICK = {"probe_interval": 0.02, "slow_start": 0.05}


@pytest.fixture
def hung() -> Iterator[HungStore]:
    store = HungStore(MemoryPageStore())
    yield store
    store.let_go()


def test_a_dead_store_costs_one_deadline_and_comes_back_by_itself(
    hung: HungStore, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    store = guard(hung, timeout=60.0, bounce_memory=1 << 20, **QUICK)
    store_pages(store, [KEY])
    hung.hang()
    set_timeout(store, 0.1)
    assert read_pages(store, [KEY])[0] == [GetResult.TIMEOUT]
    for _ in range(1000):
        assert read_pages(store, [KEY])[0] == [GetResult.REJECTED]
        assert store_pages(store, [KEY]) == [SetResult.REJECTED]
        assert store.contains([KEY]) == [False]
        assert store.count_leading([KEY]) == 0
        assert store.remove([KEY]) == 0
    assert store.describe().details["breaker"] == "open"
    assert store.metrics.value("rejected", "breaker") == 5000
    hung.let_go()
    set_timeout(store, 60.0)
    wait_until(lambda: read_pages(store, [KEY])[0] == [GetResult.HIT] and store.breaker.state is CLOSED)
    assert_hits(store, [KEY])
    assert "tier memory is left out: a call did not end within " in caplog.text
    assert "tier memory answers again after" in caplog.text
    assert "tier memory is in full use again" in caplog.text
    assert store.metrics.value("breaker", "open") >= 1
    store.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_probes_touch_neither_host_pages_nor_the_callers_thread() -> None:
    inner = ScribblingStore(MemoryPageStore())
    seen: set[str] = set()
    reads = inner.get

    def get(batch: PageBatch) -> list[GetResult]:
        seen.add(threading.current_thread().name)
        return reads(batch)

    inner.get = get  # type: ignore[method-assign]
    failing = FailingStore(inner)
    store = guard(failing, **QUICK)
    pages = HostPages([[100]], fill=0x77)
    before = pages.snapshot()
    for _ in range(3):
        assert store.get(PageBatch([KEY], pages.buffers)) == [GetResult.ERROR]
    assert store.breaker.state is OPEN
    failing.active = False
    wait_until(lambda: store.breaker.state is not OPEN)
    assert seen == {"hicache-memory-probe"}
    assert pages.snapshot() == before
    store.close()


def test_a_tier_that_nobody_asks_after_its_recovery_is_in_full_use_when_the_slow_start_is_over() -> None:
    failing = FailingStore(MemoryPageStore())
    store = guard(failing, probe_interval=0.02, slow_start=0.2)
    for _ in range(2):
        failing.active = True
        for _ in range(3):
            store.get(PageBatch([KEY], HostPages([[100]]).buffers))
        assert store.breaker.state is OPEN
        failing.active = False
        wait_until(lambda: store.gauges()["breaker_state"] == 0)
        assert store.breaker.state is CLOSED
    assert store.metrics.value("breaker", "closed") == 2
    store.close()


def test_closing_does_not_sit_out_a_slow_start() -> None:
    failing = FailingStore(MemoryPageStore())
    failing.active = True
    store = guard(failing, probe_interval=0.02, slow_start=3600.0)
    for _ in range(3):
        store.get(PageBatch([KEY], HostPages([[100]]).buffers))
    failing.active = False
    wait_until(lambda: store.breaker.state is HALF_OPEN)
    store.close()
    assert not store.breaker._loop.running


@pytest.mark.parametrize("result", [GetResult.ERROR, GetResult.TIMEOUT, GetResult.REJECTED])
def test_a_probe_without_an_answer_leaves_the_breaker_open(result: GetResult) -> None:
    inner = FailingStore(MemoryPageStore(), get_result=GetResult.TIMEOUT)
    store = guard(inner, **QUICK)
    read_pages(store, [KEY])
    inner.get_result = result
    wait_until(lambda: store.metrics.value("breaker_probe", "bad") >= 2)
    assert store.breaker.state is OPEN
    store.close()


def test_answers_are_no_failures() -> None:
    """A cold cache, a page beyond capacity and a damaged page here and there say that the tier works."""
    inner = MemoryPageStore()
    store = guard(inner, **QUICK)
    keys = page_keys(30)
    for number, key in enumerate(keys):
        assert read_pages(store, [key])[0] == [GetResult.MISS]
        store_pages(store, [key])
        if number % 3 == 0:
            inner.objects[key] = b"damaged"
        assert read_pages(store, [key])[0] == [GetResult.CORRUPT if number % 3 == 0 else GetResult.HIT]
    refusing = guard(FailingStore(inner, set_result=SetResult.REJECTED), **QUICK)
    for key in keys:
        store_pages(refusing, [key])
    assert store.breaker.state is refusing.breaker.state is CLOSED
    store.close()


def test_a_tier_that_returns_garbage_is_left_out_though_it_writes_and_looks_up_well() -> None:
    """Each of its reads costs the transfer of a whole prefix, and the prefix is computed all the same."""
    inner = MemoryPageStore()
    store = guard(inner, probe_interval=60.0)
    keys = page_keys(12)
    store_pages(store, keys)
    damaged = 0
    while store.breaker.state is CLOSED:
        batch = keys[4 * damaged : 4 * damaged + 4]
        assert batch, "it was never left out"
        for key in batch[:2]:  # half of what is read
            inner.objects[key] = b"damaged"
        assert store.contains(batch) == [True] * 4
        assert read_pages(store, batch)[0].count(GetResult.CORRUPT) == 2
        store_pages(store, page_keys(3, f"new-{damaged}"))
        damaged += 1
    assert damaged == 3
    assert read_pages(store, keys)[0] == [GetResult.REJECTED] * 12
    store.close()


def test_after_a_good_probe_the_first_damaged_read_opens_again(breaker: TierBreaker, clock: Clock) -> None:
    call(breaker, Outcome.TIMEOUT)
    breaker.recover()
    ticket = breaker.admit()
    assert ticket is not None
    breaker.record(ticket, Outcome.GOOD)
    breaker.record_read(ticket, True, "damaged")
    assert breaker.state is OPEN


def test_a_damaged_read_that_began_before_the_last_change_says_nothing(breaker: TierBreaker) -> None:
    ticket = breaker.admit()
    assert ticket is not None
    call(breaker, Outcome.TIMEOUT)
    breaker.recover()
    breaker.record_read(ticket, True, "damaged")
    assert breaker.state is HALF_OPEN


def test_damaged_reads_of_long_ago_are_forgotten(breaker: TierBreaker, clock: Clock) -> None:
    for _ in range(4):
        for _ in range(2):
            ticket = breaker.admit()
            assert ticket is not None
            breaker.record_read(ticket, True, "damaged")
        clock.now += 61
    assert breaker.state is CLOSED


def test_a_store_that_raises_is_a_store_that_fails() -> None:
    inner = RaisingStore(MemoryPageStore(), lambda: ConnectionResetError("gone"))
    store = guard(inner, **QUICK)
    assert read_pages(store, [KEY])[0] == [GetResult.ERROR]
    assert store_pages(store, [KEY]) == [SetResult.ERROR]
    assert store.contains([KEY]) == [False]
    assert store.breaker.state is OPEN
    store.close()


@pytest.mark.parametrize("result", [SetResult.ERROR, SetResult.TIMEOUT])
def test_failing_writes_pause_writes_and_nothing_else(
    result: SetResult, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: of a pool over its quota 3 of 60 reads were answered."""
    monkeypatch.setattr("hicache_ext.runtime.breaker.WRITE_PAUSES", Backoff(60.0, 60.0))
    inner = MemoryPageStore()
    store_pages(inner, [KEY])
    failing = FailingStore(inner, set_result=result)
    failing.get, failing.contains = inner.get, inner.contains  # type: ignore[method-assign]
    store = guard(failing, **QUICK)
    for number in range(60):
        store_pages(store, page_keys(1, f"{number}"))
        assert_hits(store, [KEY])
        assert store.contains([KEY]) == [True]
    # What is there is said to be there, once it is known that the store does not hang.
    wait_until(lambda: not store.breaker.examining)
    assert store_pages(store, [KEY, OTHER]) == [SetResult.EXISTS, SetResult.REJECTED]
    assert store.metrics.value("rejected", "paused") >= 57
    assert store.breaker.state is CLOSED and "writes pause" in caplog.text
    assert len([record for record in caplog.records if "writes pause" in record.getMessage()]) == 1
    store.close()


def test_the_pauses_of_writes_grow_and_end_with_the_first_one_that_is_taken(clock: Clock) -> None:
    pause = WritePause(clock)
    assert pause.begin("full") and not pause.begin("full") and pause.reason == "full"
    lengths = []
    for _ in range(8):
        began = clock.now
        while pause.reason:
            clock.now += 0.1
        lengths.append(clock.now - began)
        pause.begin("full")
    assert lengths[0] <= 1.2 and lengths[3] > 3 and max(lengths) <= 30.2
    assert pause.end() and not pause.end() and not pause.reason and not pause.in_doubt


class Refusing(MemoryPageStore):
    """Has pages that somebody wrote, and takes no others while ``refuses``."""

    def __init__(self) -> None:
        super().__init__("far")
        self.refuses = False
        store_pages(self, page_keys(3, "old"))
        self.refuses = True

    def _write(self, batch: PageBatch) -> list[SetResult]:
        if not self.refuses:
            return super()._write(batch)
        results = [SetResult.EXISTS if there else SetResult.ERROR for there in self._has(batch.keys)]
        self.count_errors({"NOPERM": results.count(SetResult.ERROR)})
        return results


def test_pages_that_exist_do_not_say_that_writes_are_taken(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: with a known page in each batch, 2400 pages were refused and nobody said so; with one in every second batch
    the log was flooded."""
    inner = Refusing()
    store = guard(inner, clock=clock, slow_call=0.5, retries=1)
    old = page_keys(3, "old")
    for number in range(600):
        clock.now += 0.5
        store_pages(store, [*old[: number % 4], *page_keys(number % 7, f"{number}")])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "every write fails (NOPERM)" in lines[0] and "writes pause" in lines[1], lines
    assert store.breaker.writes.in_doubt and inner.metrics.levels()["failing", "write"] == 1.0
    inner.refuses = False
    clock.now += 60
    store_pages(store, [*old, *page_keys(1, "new")])
    assert not store.breaker.writes.in_doubt and inner.metrics.levels()["failing", "write"] == 0.0
    store.close()


def test_an_answer_that_cannot_be_judged_is_a_failure_and_not_raised() -> None:
    inner = MemoryPageStore()
    store = guard(inner, slow_call=0.5)
    inner.count_leading = lambda keys: None  # type: ignore[assignment, method-assign, return-value]
    assert store.count_leading([KEY]) == 0
    assert store.metrics.value("error", "raised") == 1
    store.close()


def test_a_write_that_hangs_has_the_tier_probed_before_a_read_pays_for_it(hung: HungStore) -> None:
    store = guard(hung, timeout=0.1, bounce_memory=1 << 20, probe_interval=60.0)
    hung.hang()
    assert store_pages(store, [KEY]) == [SetResult.TIMEOUT]
    wait_until(lambda: store.breaker.state is OPEN)
    assert read_pages(store, [KEY])[0] == [GetResult.REJECTED]
    hung.let_go()
    store.close()


def test_a_store_that_may_hang_is_not_asked_which_pages_it_has(hung: HungStore) -> None:
    """Seen: a second write waited for a second deadline while the probe of the first one was under way."""
    store = guard(hung, timeout=60.0, bounce_memory=1 << 20, probe_interval=60.0)
    hung.hang()
    set_timeout(store, 0.05)
    store._reads.longest = 60.0  # that of the probe
    assert store_pages(store, [KEY]) == [SetResult.TIMEOUT]
    store._look_ups.longest = 60.0
    wait_until(lambda: hung.waiting == 2)
    store.breaker.writes.end()  # as after its time
    assert store_pages(store, [KEY, OTHER]) == [SetResult.REJECTED] * 2
    assert hung.calls == 2 and store.metrics.value("rejected", "paused") == 2
    hung.let_go()
    wait_until(lambda: not store.breaker.examining)
    assert store.contains([KEY]) == [True] and store_pages(store, [KEY]) == [SetResult.EXISTS]
    store.close()


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.TIMEOUT])
def test_a_write_that_was_cut_early_pauses_writes_until_a_probe_is_answered(outcome: Outcome) -> None:
    store = guard(MemoryPageStore(), timeout=5.0, slow_call=0.5)
    breaker = store.breaker
    late = outcome is Outcome.LATE
    breaker.record_write(breaker.admit(), outcome, "a call did not end" + _LEARNT * late)
    wait_until(lambda: not breaker.examining)
    assert store_pages(store, [KEY]) == [SetResult.STORED if late else SetResult.REJECTED]
    store.close()


def test_a_tier_that_is_in_full_use_again_is_written_again(clock: Clock) -> None:
    store = guard(MemoryPageStore(), clock=clock, slow_start=0.0)
    for _ in range(5):
        store.breaker.record_write(store.breaker.admit(), Outcome.FAILED, "failed")
    assert store.breaker.writes.reason
    store.breaker.trip("gone")
    store.breaker.recover()
    assert store.breaker.state is CLOSED and not store.breaker.writes.in_doubt
    store.close()


class Unreachable(TierStore):
    """A medium that cannot be looked at, or cannot be reached for writes."""

    type_name = "unreachable"

    def _read(self, batch: PageBatch) -> list[GetResult]:
        return [GetResult.MISS] * len(batch)

    def _write(self, batch: PageBatch) -> list[SetResult]:
        raise ConnectionRefusedError("nobody there")

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        raise PermissionError(errno.EACCES, "not allowed to ask")

    def _remove(self, keys: Sequence[bytes]) -> int:
        return 0

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        return 0


@pytest.mark.parametrize("look_up", ["contains", "count_leading"])
def test_pages_that_could_not_be_asked_for_are_no_absent_pages(look_up: str, caplog: pytest.LogCaptureFixture) -> None:
    store = guard(Unreachable("far"), probe_interval=60.0)
    for _ in range(3):
        assert getattr(store, look_up)([KEY, OTHER]) in ([False, False], 0)
    assert store.breaker.state is OPEN
    assert "2 of 2 pages could not be looked up (EACCES)" in caplog.text
    store.close()


def test_look_ups_that_failed_are_probed_with_look_ups() -> None:
    """Seen: each good read had the look-ups come back, fail and open it again, with three lines each time."""
    refusals = {"": True}
    inner = Unreachable("far")
    inner._has = lambda keys: [False] * len(keys) if not refusals else Unreachable._has(inner, keys)  # type: ignore[method-assign]
    store = guard(inner, **QUICK, timeout=5.0)
    for _ in range(3):
        store.contains([KEY])
    wait_until(lambda: store.metrics.value("breaker_probe", "bad") >= 3)
    assert store.breaker.state is OPEN and not store.metrics.value("breaker_probe", "good")
    refusals.clear()
    wait_until(lambda: store.breaker.state is CLOSED)
    store.close()


def test_probes_are_no_calls_that_fail() -> None:
    inner = MemoryPageStore("far")
    store = guard(inner, probe_interval=0.01, timeout=5.0)
    inner._read = lambda batch: [GetResult.TIMEOUT] * len(batch)  # type: ignore[method-assign]
    read_pages(store, [KEY])
    wait_until(lambda: store.metrics.value("breaker_probe", "bad") >= 4)
    assert inner.metrics.levels()["failing", "read"] == 0.0
    store.close()


def test_a_connection_that_is_gone_counts_for_readers_too() -> None:
    store = guard(Unreachable("far"), probe_interval=60.0)
    for number in range(3):
        store_pages(store, page_keys(1, f"{number}"))
    assert store.breaker.state is OPEN
    store.close()


def _with_clock(inner: PageStore, clock: Clock, timeout: float = 5.0) -> GuardedStore:
    return guard(inner, clock=clock, timeout=timeout, slow_call=0.5, probe_interval=3600)


class TakingTime(PageStoreWrapper):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(MemoryPageStore())
        self._clock = clock
        self.seconds = seconds

    def get(self, batch: PageBatch) -> list[GetResult]:
        self._clock.sleep(self.seconds)
        return super().get(batch)

    def count_leading(self, keys: list[bytes]) -> int:  # type: ignore[override]
        self._clock.sleep(self.seconds)
        return super().count_leading(keys)


def test_a_pool_of_two_seconds_a_call_is_given_up_after_three_calls(clock: Clock) -> None:
    store = _with_clock(TakingTime(clock, 2.0), clock)
    store.count_leading([KEY])
    read_pages(store, [KEY])
    assert store.breaker.state is CLOSED
    read_pages(store, [KEY])
    assert store.breaker.state is OPEN
    store.close()


def test_a_look_up_that_takes_the_timeout_opens_at_once(clock: Clock) -> None:
    store = _with_clock(TakingTime(clock, 5.0), clock)
    store.count_leading([KEY])
    assert store.breaker.state is OPEN
    store.close()


def test_a_large_read_may_take_the_time_of_its_bytes(clock: Clock) -> None:
    inner = TakingTime(clock, 0.0)
    store = _with_clock(inner, clock)
    store_pages(store, [KEY], [30_000_000])
    inner.seconds = 0.7  # 0.5 s and 0.3 s for the bytes are allowed
    for _ in range(10):
        assert read_pages(store, [KEY], [30_000_000])[0] == [GetResult.HIT]
    assert store.breaker.state is CLOSED
    store.close()


def test_pages_that_arrived_before_the_deadline_speak_for_the_tier() -> None:
    class Half(PageStoreWrapper):
        def get(self, batch: PageBatch) -> list[GetResult]:
            return [*super().get(batch)[:1], GetResult.TIMEOUT]

    store = guard(Half(MemoryPageStore()), **QUICK)
    store_pages(store, [KEY, OTHER])
    assert read_pages(store, [KEY, OTHER])[0] == [GetResult.HIT, GetResult.TIMEOUT]
    assert store.breaker.state is CLOSED
    store.close()


def test_close_ends_the_probes_and_an_open_breaker_then_raises(hung: HungStore) -> None:
    before = set(threading.enumerate())
    store = guard(FailingStore(MemoryPageStore(), get_result=GetResult.TIMEOUT), **QUICK)
    read_pages(store, [KEY])
    store.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(StoreClosedError):
        store.contains([KEY])

"""What waits to be written: it stays while the tier refuses, and what does not fit is refused at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hicache_ext.runtime.background import Backoff
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiering import tier_handle
from hicache_ext.storage.tiering.tier_handle import TierHandle
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from tests.waiting import wait_until

PAGE = 1000


class HeldStore(MemoryPageStore):
    """Pages are there before the call that wrote them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()
        self.go_on = threading.Event()

    def set(self, batch: PageBatch) -> list[SetResult]:
        results = super().set(batch)
        self.written.set()
        assert self.go_on.wait(30)
        return results


class MoodyStore(MemoryPageStore):
    """Answers writes with ``answer`` while there is one, or raises it; ``too_large`` pages never get in."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: SetResult | Exception | None = None
        self.too_large = PAGE + 1
        self.batches: list[int] = []

    def set(self, batch: PageBatch) -> list[SetResult]:
        self.batches.append(len(batch))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return [self.answer] * len(batch)
        fits = [position for position, size in enumerate(batch.sizes) if size < self.too_large]
        results = [SetResult.REJECTED] * len(batch)
        for position, result in zip(fits, super().set(batch.select(fits)), strict=True):
            results[position] = result
        return results


class PausedStore(MemoryPageStore):
    """Refuses what it does not have while writes pause."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.batches = 0

    def set(self, batch: PageBatch) -> list[SetResult]:
        self.batches += 1
        if not self.paused:
            return super().set(batch)
        return [SetResult.EXISTS if there else SetResult.REJECTED for there in self.contains(batch.keys)]


def later(tier: TierHandle, keys: list[bytes], size: int = PAGE) -> list[SetResult]:
    return tier.set_later(PageBatch(keys, [[memoryview(key.ljust(size, b"."))] for key in keys]))


def read(tier: TierHandle, keys: list[bytes], size: int = PAGE) -> list[GetResult]:
    return read_pages(tier, keys, (size,))[0]


@pytest.fixture
def held() -> Iterator[HeldStore]:
    store = HeldStore()
    yield store
    store.go_on.set()


def test_pages_that_are_cleared_while_they_are_written_are_absent_at_once(held: HeldStore) -> None:
    tier = TierHandle(held)
    keys = page_keys(3)
    later(tier, keys)
    assert held.written.wait(30)
    assert held.contains(keys)[0]
    assert tier.clear(None) == 1
    # Written by somebody meanwhile, as it were: the store is asked by this process, too.
    assert read(tier, keys) == [GetResult.MISS] * 3
    assert tier.contains(keys) == [False] * 3
    assert tier.count_leading(keys) == 0
    # The old copy is still on its way: what is written now would be taken for it, and removed.
    assert later(tier, keys) == [SetResult.REJECTED] * 3
    assert tier.set(PageBatch(keys, [[memoryview(bytes(PAGE))]] * 3)) == [SetResult.REJECTED] * 3
    held.go_on.set()
    assert tier.wait_until_written(30)
    assert held.contains(keys) == [False] * 3
    assert later(tier, keys) == [SetResult.STORED] * 3
    tier.close()


def test_a_clear_of_a_long_queue_lets_others_have_their_turn(held: HeldStore) -> None:
    """Look-ups and stores wait for the same lock."""
    tier = TierHandle(held)
    keys = page_keys(3000)
    assert later(tier, keys, 0) == [SetResult.STORED] * 3000
    assert held.written.wait(30)
    looked: list[int] = []
    lock = tier.writes._condition

    class Turns:
        def __enter__(self) -> None:
            lock.__enter__()
            looked.append(0)

        def __exit__(self, *error: Any) -> None:
            lock.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(lock, name)

    def wanted(key: bytes) -> bool:
        looked[-1] += 1
        return True

    tier.writes._condition = Turns()  # type: ignore[assignment]
    assert tier.writes.forget(wanted) == set(keys)
    assert sum(looked) == 3000 and max(looked) <= 1000
    held.go_on.set()
    assert tier.wait_until_written(30)
    tier.close()


@pytest.mark.parametrize("answer", [SetResult.REJECTED, SetResult.ERROR, SetResult.TIMEOUT, OSError("gone")])
def test_pages_wait_while_the_tier_takes_none_and_are_written_when_it_is_back(
    answer: SetResult | Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_handle, "_REFUSED", Backoff(0.01, 0.05))
    store = MoodyStore()
    store.answer = answer
    tier = TierHandle(store)
    keys = page_keys(200)
    assert later(tier, keys) == [SetResult.STORED] * 200
    wait_until(lambda: len(store.batches) > 5)
    assert read(tier, keys) == [GetResult.HIT] * 200
    assert tier.contains(keys) == [True] * 200
    assert tier.count_leading_stored(keys) == 0
    store.answer = None
    assert tier.wait_until_written(30)
    assert store.count_leading(keys) == 200
    assert tier.metrics.total("dropped_pages") == 0
    assert sum("wait for it" in record.getMessage() for record in caplog.records) == 1
    assert len(caplog.records) <= 2
    tier.close()


def test_a_batch_that_is_larger_than_the_queue_is_written_whole_while_the_tier_takes_pages() -> None:
    """Without waiting every batch of large pages would lose its end, however fast the tier is."""
    store = MoodyStore()
    tier = TierHandle(store, settings=TieringSettings(store_buffer=4 * PAGE))
    keys = page_keys(50)
    assert later(tier, keys) == [SetResult.STORED] * 50
    assert tier.wait_until_written(30)
    assert store.count_leading(keys) == 50
    assert tier.metrics.total("dropped_pages") == 0
    tier.close()


def test_a_tier_that_hangs_is_waited_for_once(held: HeldStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_handle, "_FIRST_SPACE_WAIT", 0.05)
    tier = TierHandle(held, settings=TieringSettings(store_buffer=4 * PAGE))
    assert later(tier, page_keys(6)) == [SetResult.STORED] * 4 + [SetResult.REJECTED] * 2
    tier.writes._space_wait = 3600.0
    assert later(tier, page_keys(2, "more")) == [SetResult.REJECTED] * 2
    assert tier.metrics.value("dropped_pages", "async") == 4
    held.go_on.set()
    assert tier.wait_until_written(30)
    assert later(tier, page_keys(30, "after")) == [SetResult.STORED] * 30
    tier.close()


def test_closing_ends_the_wait_for_space(held: HeldStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_handle, "_FIRST_SPACE_WAIT", 3600.0)
    tier = TierHandle(held, settings=TieringSettings(store_buffer=2 * PAGE, drain=0.01))
    results: list[SetResult] = []
    writer = threading.Thread(target=lambda: results.extend(later(tier, page_keys(4))))
    writer.start()
    wait_until(lambda: len(tier.writes) == 2)
    closer = threading.Thread(target=tier.close)
    closer.start()
    writer.join(60)
    assert results == [SetResult.STORED] * 2 + [SetResult.REJECTED] * 2
    held.go_on.set()
    closer.join(60)


def test_what_a_tier_that_refuses_cannot_hold_is_refused_at_once_and_counted() -> None:
    store = MoodyStore()
    store.answer = SetResult.REJECTED
    tier = TierHandle(store, settings=TieringSettings(store_buffer=4 * PAGE))
    later(tier, page_keys(1))
    wait_until(lambda: len(store.batches) > 1)
    tier.writes._space_wait = 3600.0
    assert later(tier, page_keys(6)) == [SetResult.EXISTS] + [SetResult.STORED] * 3 + [SetResult.REJECTED] * 2
    assert later(tier, page_keys(1, "large"), 5 * PAGE) == [SetResult.REJECTED]
    assert tier.metrics.value("dropped_pages", "async") == 3
    store.answer = None
    assert tier.wait_until_written(30)
    assert later(tier, page_keys(4, "after")) == [SetResult.STORED] * 4
    tier.close()


def test_a_page_that_the_tier_never_takes_is_not_in_the_way_of_others_and_is_dropped() -> None:
    store = MoodyStore()
    tier = TierHandle(store)
    large, small = page_keys(3, "large"), page_keys(500)
    store.answer = SetResult.REJECTED
    later(tier, large, 2 * PAGE)
    later(tier, small)
    store.answer = None
    wait_until(lambda: store.count_leading(small) == 500)
    for number in range(tier_handle._MOST_REFUSALS):
        later(tier, page_keys(1, f"more {number}"))
        wait_until(lambda number=number: store.contains(page_keys(1, f"more {number}")) == [True])
    assert tier.wait_until_written(30)
    assert tier.metrics.value("dropped_pages", "async_failed") == 3
    tier.close()


def test_a_page_that_is_not_worth_storing_is_offered_once() -> None:
    """A tier may have an admission of its own."""
    store = MoodyStore()
    store.answer = SetResult.REFUSED
    tier = TierHandle(store)
    later(tier, page_keys(100))
    assert tier.wait_until_written(30)
    assert sum(store.batches) == 100 and tier.metrics.total("dropped_pages") == 0
    tier.close()


def test_pages_that_are_there_already_do_not_say_that_the_tier_takes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While writes pause, each batch has EXISTS for what another server wrote, and REJECTED for the rest."""
    monkeypatch.setattr(tier_handle, "_REFUSED", Backoff(0.01, 0.05))
    store = PausedStore()
    tier = TierHandle(store)
    shared, mine = page_keys(10, "shared"), page_keys(3, "mine")
    store_pages(store, shared)
    store.paused = True
    later(tier, mine)
    for key in shared:
        batches = store.batches
        later(tier, [key])
        wait_until(lambda batches=batches: store.batches > batches)
    assert len(tier.writes) >= 3 and tier.writes._refusals_in_a_row > 0
    store.paused = False
    assert tier.wait_until_written(30)
    assert store.count_leading(mine) == 3 and tier.metrics.total("dropped_pages") == 0
    tier.close()


def test_a_page_that_is_refused_for_long_leaves_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_handle, "_LONGEST_WAIT", 0.2)
    store = MoodyStore()
    store.answer = SetResult.REJECTED
    tier = TierHandle(store)
    later(tier, page_keys(3))
    assert tier.wait_until_written(30)
    assert tier.metrics.value("dropped_pages", "async_failed") == 3
    tier.close()


def test_what_is_lost_at_the_end_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    store = MoodyStore()
    store.answer = SetResult.REJECTED
    tier = TierHandle(store, settings=TieringSettings(drain=0.1))
    later(tier, page_keys(70))
    tier.close()
    tier.close()
    assert tier.metrics.value("dropped_pages", "async") == 70
    assert [record.levelno for record in caplog.records if "dropped at the end" in record.getMessage()] == [
        logging.WARNING
    ]


def test_a_queue_made_smaller_keeps_what_it_has() -> None:
    store = MoodyStore()
    store.answer = SetResult.REJECTED
    tier = TierHandle(store)
    keys = page_keys(10)
    later(tier, keys)
    tier.configure(TieringSettings(store_buffer=2 * PAGE))
    assert later(tier, page_keys(1, "more")) == [SetResult.REJECTED]
    store.answer = None
    assert tier.wait_until_written(30)
    assert store.count_leading(keys) == 10
    tier.close()

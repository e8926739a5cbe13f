"""The PageStore suite over guarded stores: a guard around a healthy store changes nothing that a caller can see."""

from __future__ import annotations

import time

import pytest

from hicache_ext.runtime.call_deadline import answering_at_once
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.guards.late_open import LateStore
from hicache_ext.storage.guards.pipeline import GuardedStore, GuardPlan
from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.storage.guards.hung import guard
from tests.storage.media import Memory, Over, PageFiles, Slabs

pytestmark = pytest.mark.slow

MIB = 1 << 20
LONG = 60.0
"""Seconds that no call here comes near: what is tested is that nothing else changes."""

PLAN = GuardPlan(
    timeout=LONG,
    bounce_memory=64 * MIB,
    retries=2,
    slow_call=LONG,
    concurrency=16,
    exists_budget=LONG,
)


class _OverMemory(PageStoreTests):
    def guard(self, store: PageStore) -> PageStore:
        raise NotImplementedError

    @pytest.fixture
    def medium(self):
        return Over(Memory(), self.guard)


class TestDeadline(_OverMemory):
    def guard(self, store):
        return guard(store, timeout=LONG, bounce_memory=64 * MIB)


class TestDeadlineWithLittleMemory(_OverMemory):
    def guard(self, store):
        """A larger page waits until nothing is lent."""
        return guard(store, timeout=LONG, bounce_memory=4 * MIB)


class TestRetry(_OverMemory):
    def guard(self, store):
        return guard(store, retries=2)


class TestBreaker(_OverMemory):
    def guard(self, store):
        return guard(store, timeout=LONG, slow_call=LONG)


class TestConcurrency(_OverMemory):
    def guard(self, store):
        return guard(store, concurrency=3)


class TestExistsBudget(_OverMemory):
    def guard(self, store):
        return guard(store, exists_budget=LONG)


class _MovesOn(GuardedStore):
    """Its clock moves on by an hour with every removal: what is remembered of pages that another store took away is a
    hint, whose life is over soon."""

    hours = 0

    def __init__(self, inner):
        super().__init__(inner, GuardPlan(exists_budget=LONG), clock=lambda: time.monotonic() + 3600 * _MovesOn.hours)

    def remove(self, keys):
        _MovesOn.hours += 1
        return super().remove(keys)

    def clear(self, digests):
        _MovesOn.hours += 1
        return super().clear(digests)


class TestExistsBudgetOnTheSchedulersThread(TestExistsBudget):
    def guard(self, store):
        return _MovesOn(store)

    @pytest.fixture(autouse=True)
    def _scheduler(self):
        with answering_at_once():
            yield


class TestLateOpen(_OverMemory):
    def guard(self, store):
        return LateStore(store.name, "memory", lambda: store, first_wait=LONG)


def _guarded(store):
    return GuardedStore(store, PLAN)


class TestAllGuards(_OverMemory):
    def guard(self, store):
        return _guarded(store)


class TestGuardedPageFiles(PageStoreTests):
    @pytest.fixture
    def medium(self, tmp_path):
        return Over(PageFiles(tmp_path), _guarded)


class TestGuardedSlabs(PageStoreTests):
    """The index is read on the threads of the deadline guard."""

    @pytest.fixture
    def medium(self, tmp_path):
        return Over(Slabs(tmp_path), _guarded)

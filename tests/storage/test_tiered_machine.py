"""Any order of calls and faults on two tiers with background writes, promotion and prefetch, beside a model.

Whatever happens: a HIT has the page's own bytes, nothing is a HIT or counted in a leading run that was never stored,
host pages are left alone once a call has returned, nothing past a gap is promoted, and close() leaves no thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_ext.storage.prefetch import PrefetchSettings
from hicache_ext.storage.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiered import TieredStore, TieringSettings
from hicache_ext.storage.write_behind import QueueSettings
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    HostPages,
    filled,
    page_key,
    payload_of,
    store_pages,
)
from hicache_ext.testing.faults import PageStoreWrapper
from hicache_ext.testing.memory_store import MemoryPageStore

SEGMENTS = {IDENTITY: (40, 1, 300), OTHER_IDENTITY: (64,)}
KEYS = [page_key(number, identity) for identity in SEGMENTS for number in range(8)]
MODES = ["well", "well", "errors", "timeouts", "raises", "absent", "slow"]

keys_of_calls = st.lists(st.sampled_from(KEYS), max_size=10)


class Faulty(PageStoreWrapper):
    """Does what ``mode`` says; what it holds stays as it is."""

    mode = "well"

    def _disturb(self):
        if self.mode == "slow":
            time.sleep(0.002)
        if self.mode == "raises":
            raise ConnectionResetError("gone")

    def get(self, batch):
        self._disturb()
        if self.mode in ("errors", "timeouts", "absent"):
            # As the contract allows: the memory of a page that is no hit may be half written.
            for segments in batch.buffers:
                segments[0][:1] = b"\xee"
            answer = {"errors": GetResult.ERROR, "timeouts": GetResult.TIMEOUT, "absent": GetResult.MISS}
            return [answer[self.mode]] * len(batch)
        return super().get(batch)

    def set(self, batch):
        self._disturb()
        if self.mode in ("errors", "timeouts", "absent"):
            return [SetResult.ERROR if self.mode == "errors" else SetResult.TIMEOUT] * len(batch)
        return super().set(batch)

    def contains(self, keys):
        self._disturb()
        return [False] * len(keys) if self.mode in ("errors", "absent") else super().contains(keys)

    def count_leading(self, keys):
        self._disturb()
        return 0 if self.mode in ("errors", "absent") else super().count_leading(keys)


class TieredMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.threads = set(threading.enumerate())
        self.near, self.far = Faulty(MemoryPageStore("near")), Faulty(MemoryPageStore("far"))
        self.store = TieredStore(
            [self.near, self.far],
            [self.near, self.far],
            promote_to=self.near,
            settings=TieringSettings(
                async_tiers=frozenset({"far"}),
                store_queue=QueueSettings(capacity=3000),
                promotion_queue=QueueSettings(capacity=1500),
                prefetch=PrefetchSettings(buffer=2000, lifetime=0.02, streams=2),
            ),
        )
        for identity, segments in SEGMENTS.items():
            self.store.register_identity(identity, {"pool": {"segments": list(segments)}})
        self.ever_stored = set()
        self.may_be_near = set()
        self.returned = deque(maxlen=6)

    def teardown(self):
        self._all_well()
        self.store.close()
        self.store.close()
        self._host_pages_are_as_they_were()
        assert set(threading.enumerate()) <= self.threads

    def _all_well(self):
        self.near.mode = self.far.mode = "well"

    def _host_pages_are_as_they_were(self):
        for pages, snapshot in self.returned:
            assert pages.snapshot() == snapshot, "host memory was written after the call had returned"

    def _keep(self, pages):
        pages.assert_guards_intact()
        self.returned.append((pages, pages.snapshot()))

    @rule(keys=keys_of_calls)
    def set_pages(self, keys):
        pages = filled(keys, [SEGMENTS[key[:16]] for key in keys])
        self.may_be_near |= set(keys)
        self.ever_stored |= set(keys)
        results = self.store.set(PageBatch(keys, pages.buffers))
        assert len(results) == len(keys) and all(isinstance(result, SetResult) for result in results)
        # The bytes that were given are copied or written by now: what is in the memory next is not theirs.
        for segments in pages.buffers:
            for segment in segments:
                segment[:] = b"\xdd" * segment.nbytes
        self._keep(pages)

    @rule(keys=keys_of_calls)
    def get_pages(self, keys):
        pages = HostPages([SEGMENTS[key[:16]] for key in keys], fill=0x33)
        results = self.store.get(PageBatch(keys, pages.buffers))
        leading = 0
        assert len(results) == len(keys)
        for number, (key, result) in enumerate(zip(keys, results, strict=True)):
            if result is GetResult.HIT:
                assert key in self.ever_stored
                assert pages.payload(number) == payload_of(key, sum(SEGMENTS[key[:16]]))
                leading += leading == number
        self._keep(pages)
        self.may_be_near |= set(keys[:leading])

    @rule(keys=keys_of_calls)
    def exists(self, keys):
        count = self.store.count_leading(keys)
        assert 0 <= count <= len(keys)
        assert set(keys[:count]) <= self.ever_stored

    @rule(keys=keys_of_calls)
    def contains(self, keys):
        present = self.store.contains(keys)
        assert len(present) == len(keys)
        assert {key for key, known in zip(keys, present, strict=True) if known} <= self.ever_stored

    @rule(keys=keys_of_calls)
    def another_machine_stores_to_the_far_tier(self, keys):
        for key in dict.fromkeys(keys):
            store_pages(self.far.inner, [key], SEGMENTS[key[:16]])
        self.ever_stored |= set(keys)

    @rule(keys=keys_of_calls)
    def the_near_tier_evicts(self, keys):
        self.near.inner.remove(keys)

    @rule(key=st.sampled_from(KEYS), far=st.booleans(), place=st.integers(0, 1 << 16))
    def a_bit_flips(self, key, far, place):
        objects = (self.far if far else self.near).inner.objects
        stored = bytearray(objects.get(key, b""))
        if stored:
            stored[place % len(stored)] ^= 1
            objects[key] = bytes(stored)

    @rule(near=st.sampled_from(MODES), far=st.sampled_from(MODES))
    def tiers_fail_or_recover(self, near, far):
        self.near.mode, self.far.mode = near, far

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def remove(self, keys):
        self._all_well()
        self.store.remove(keys)
        assert self.store.contains(keys) == [False] * len(keys)
        self.ever_stored -= set(keys)
        self.may_be_near -= set(keys)

    @rule(identity=st.sampled_from([None, *SEGMENTS]))
    def clear(self, identity):
        self._all_well()
        self.store.clear(None if identity is None else [identity])
        assert self.store.wait_until_written(30)
        gone = {key for key in KEYS if identity in (None, key[:16])}
        assert not any(self.store.contains(sorted(gone)))
        self.ever_stored -= gone
        self.may_be_near -= gone

    @rule()
    def time_passes(self):
        time.sleep(0.025)

    @rule()
    def settle(self):
        assert self.store.wait_until_written(30)

    @invariant()
    def host_pages_stay(self):
        self._host_pages_are_as_they_were()

    @invariant()
    def only_what_was_stored_or_read_in_a_leading_run_is_near(self):
        assert set(self.near.inner.objects) <= self.may_be_near


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTieredMachine = pytest.mark.slow(TestTieredMachine)

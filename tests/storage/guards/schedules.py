"""Any order of calls and faults over tiers: results honest, host pages left alone, nothing left behind.

Two tiers in one TieredStore, each a faulty store in memory, with or without guards, and with the work in the background
(asynchronous writes, promotion, prefetch) that a schedule draws; deadlines of milliseconds, queues of a few pages. The
truth is what the stores at the bottom hold.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_ext.errors import ClearLaterError
from hicache_ext.page import envelope
from hicache_ext.runtime.breaker import BreakerState
from hicache_ext.runtime.call_deadline import answering_at_once
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.guards.pipeline import GuardedStore, GuardPlan
from hicache_ext.storage.guards.time_limits import Deadline
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import Arrangement as TierArrangement
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, HostPages, page_key
from tests.rigs.faults import PageStoreWrapper
from tests.waiting import wait_until

_KEYS = [page_key(number) for number in range(5)]
_SIZES = (40, 1, 300)
_SIZE = sum(_SIZES)
_REUSED = 0xEE
"""What host pages are filled with once a write of them has returned: it must never be stored."""
_REMEMBERED_READS = 30
_PLAN = GuardPlan(
    timeout=0.008,
    bounce_memory=16 * 4096,
    retries=1,
    slow_call=0.004,
    probe_interval=0.002,
    slow_start=0.004,
    concurrency=3,
    exists_budget=0.002,
)

_LIFETIME = 0.02
"""Of a page fetched ahead, in seconds."""

_keys = st.lists(st.sampled_from(_KEYS), min_size=1, max_size=6)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What stands around and between the two tiers of a schedule."""

    guards: bool
    background_writes: frozenset[str]
    promotes: bool
    prefetches: bool
    ends_badly: bool = False
    """Whether it is closed while faults go on."""

    @property
    def settings(self) -> TieringSettings:
        drain = 0.02 if self.ends_badly else 5.0
        return TieringSettings(
            async_tiers=self.background_writes,
            store_buffer=5 * _SIZE,
            drain=drain,
            promotion_buffer=3 * _SIZE,
            prefetch_buffer=4 * _SIZE if self.prefetches else 0,
            prefetch_lifetime=_LIFETIME,
            prefetch_streams=2,
        )

    def open(self, near: PageStore, far: PageStore) -> TieredStore:
        store = TieredStore(
            [near, far], [near, far], promote_to=near if self.promotes else None, settings=self.settings
        )
        store.register_identity(IDENTITY, {"pool": {"segments": list(_SIZES)}})
        return store


_arrangements = st.builds(
    Arrangement,
    guards=st.sampled_from([True, True, True, False]),
    background_writes=st.sampled_from([frozenset(), frozenset({"far"}), frozenset({"near", "far"})]),
    promotes=st.booleans(),
    prefetches=st.booleans(),
    ends_badly=st.booleans(),
)
_reloads = st.tuples(
    st.sampled_from([frozenset(), frozenset({"far"}), frozenset({"near", "far"})]), st.booleans(), st.booleans()
)
"""Another arrangement: written in the background, promotes, prefetches."""


class Mode(enum.Enum):
    WELL = enum.auto()
    HANGS = enum.auto()
    SLOW = enum.auto()
    FAILS = enum.auto()
    RAISES = enum.auto()
    FAILS_IN_PART = enum.auto()
    DONE_AND_FAILS = enum.auto()
    """Does the work and says that it failed, as when the answer is lost."""


class FaultyStore(PageStoreWrapper):
    """Behaves as ``mode`` says at the moment of the call, and scribbles over the memory of every read."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.mode = Mode.WELL
        self._free = threading.Event()
        self._free.set()

    def become(self, mode: Mode) -> None:
        self.mode = mode
        if mode is Mode.HANGS:
            self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def _begin(self) -> Mode:
        mode = self.mode
        if mode is Mode.HANGS:
            assert self._free.wait(60), "nobody let the store go"
        elif mode is Mode.SLOW:
            time.sleep(0.006)
        elif mode is Mode.RAISES:
            raise ConnectionResetError("gone")
        elif mode is Mode.FAILS:
            self.metrics.add("error", "gone")
        return mode

    def get(self, batch: PageBatch) -> list[GetResult]:
        _scribble(batch)
        mode = self._begin()
        if mode is Mode.FAILS:
            return [GetResult.ERROR] * len(batch)
        results = super().get(batch)
        if mode is Mode.FAILS_IN_PART:
            results[::2] = [GetResult.ERROR] * len(results[::2])
        elif mode is Mode.DONE_AND_FAILS:
            results = [GetResult.ERROR] * len(results)
        for segments, result in zip(batch.buffers, results, strict=True):
            if result is not GetResult.HIT:
                _scribble(PageBatch([b""], [segments]))
        return results

    def set(self, batch: PageBatch) -> list[SetResult]:
        mode = self._begin()
        if mode is Mode.FAILS:
            return [SetResult.ERROR] * len(batch)
        if mode is Mode.FAILS_IN_PART:
            half = range(1, len(batch), 2)
            results = [SetResult.ERROR] * len(batch)
            for position, result in zip(half, super().set(batch.select(half)), strict=True):
                results[position] = result
            return results
        results = super().set(batch)
        return [SetResult.ERROR] * len(batch) if mode is Mode.DONE_AND_FAILS else results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        mode = self._begin()
        return [False] * len(keys) if mode is Mode.FAILS else super().contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        mode = self._begin()
        return 0 if mode is Mode.FAILS else super().count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        mode = self._begin()
        return 0 if mode is Mode.FAILS else super().remove(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        if self._begin() is Mode.FAILS:
            raise ClearLaterError("gone")
        return super().clear(digests)


def _scribble(batch: PageBatch) -> None:
    for segments in batch.buffers:
        for segment in segments:
            segment[:] = b"\x99" * segment.nbytes


_COUNTED = ("timeout", "rejected", "late", "retry", "breaker", "breaker_probe", "exists_budget")
_COUNTED_IN_BACKGROUND = ("promotion", "prefetch", "dropped_pages", "corrupt")


class TiersMachine(RuleBasedStateMachine):
    counts: ClassVar[Counter[str]] = Counter()
    """What the schedules met, for the campaign's report."""

    def __init__(self) -> None:
        super().__init__()
        self.threads_before = set(threading.enumerate())
        self.bottoms = [MemoryPageStore("near"), MemoryPageStore("far")]
        self.faulty = [FaultyStore(bottom) for bottom in self.bottoms]
        self.written: dict[bytes, set[bytes]] = {key: set() for key in _KEYS}
        """Every payload that anybody ever set out to write."""
        self.gone: dict[bytes, set[bytes]] = {key: set() for key in _KEYS}
        """Payloads that were cleared, and that nobody has set out to write since: never read again."""
        self.damaged: set[bytes] = set()
        """Page objects that a bit has flipped in."""
        self.durable: set[bytes] = set()
        """What this process has stored and nobody can have removed: never a MISS again."""
        self.may_be_near: set[bytes] = set()
        """Written there by anybody, or read as part of a leading run."""
        self.removing = False
        """A remove() may still be on its way to a store that hangs."""
        self.returned: deque[tuple[HostPages, list[bytes]]] = deque(maxlen=_REMEMBERED_READS)

    @initialize(keys=_keys, arrangement=_arrangements)
    def begins_with_pages(self, keys: list[bytes], arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self.tiers: list[PageStore] = [
            GuardedStore(store, _PLAN) if arrangement.guards else store for store in self.faulty
        ]
        self.store = arrangement.open(*self.tiers)
        self.background_writes = arrangement.background_writes
        self.quiet = True
        """No other arrangement was in force: its queue may have what a store does not have yet."""
        self.set_pages(keys, 1)

    @rule(reload=_reloads)
    def reload(self, reload: tuple[frozenset[str], bool, bool]) -> None:
        """The same tiers in another way, at any moment: what waits goes on."""
        self.background_writes, promotes, prefetches = reload
        self.quiet = False
        wanted = replace(
            self.arrangement, background_writes=self.background_writes, promotes=promotes, prefetches=prefetches
        )
        near, far = self.store.arrangement.retrieve
        self.store.rearrange(TierArrangement([near, far], [near, far], near if promotes else None, wanted.settings))
        self.counts["reloads"] += 1

    @rule(tier=st.integers(0, 1), mode=st.sampled_from(Mode))
    def fault(self, tier: int, mode: Mode) -> None:
        if mode is Mode.HANGS and not self.arrangement.guards:
            mode = Mode.SLOW  # nothing would end the call
        self.counts[f"store: {mode.name.lower().replace('_', ' ')}"] += 1
        self.faulty[tier].become(mode)

    @rule(tier=st.integers(0, 1))
    def let_go(self, tier: int) -> None:
        self.faulty[tier].let_go()

    @rule(keys=_keys, fill=st.integers(0, 0x80))
    def set_pages(self, keys: list[bytes], fill: int) -> None:
        pages = HostPages([_SIZES] * len(keys), fill=fill)
        self._will_be_written(keys, fill, near=True)
        before = pages.snapshot()
        # A damaged page EXISTS until it is read, and is gone from then on.
        damaged = {key for key in keys if any(bottom.objects.get(key) in self.damaged for bottom in self.bottoms)}
        results = self.store.set(PageBatch(keys, pages.buffers))
        assert len(results) == len(keys) and all(isinstance(result, SetResult) for result in results)
        assert pages.snapshot() == before, "a write changed the pages"
        for key, result in zip(keys, results, strict=True):
            if result.durable and not self.removing and key not in damaged:
                if "near" not in self.background_writes and self.quiet:
                    assert any(key in bottom.objects for bottom in self.bottoms), "STORED, and nobody has it"
                self.durable.add(key)
        for number in range(len(keys)):
            pages.write(number, bytes([_REUSED]) * _SIZE)
        self._returned(pages)

    @rule(keys=_keys)
    def get_pages(self, keys: list[bytes]) -> None:
        for result in self._read(keys):
            self.counts[f"get: {result.value}"] += 1

    def _read(self, keys: list[bytes]) -> list[GetResult]:
        """Read from the tiers; everything that is true of any read is asserted."""
        pages = HostPages([_SIZES] * len(keys), fill=0x77)
        results = self.store.get(PageBatch(keys, pages.buffers))
        assert len(results) == len(keys) and all(isinstance(result, GetResult) for result in results)
        leading = True
        for number, (key, result) in enumerate(zip(keys, results, strict=True)):
            if result is GetResult.HIT:
                assert pages.payload(number) in self.written[key], "a HIT with bytes that nobody wrote"
                assert pages.payload(number) not in self.gone[key], "a HIT with bytes that were cleared"
                if leading:
                    self.may_be_near.add(key)
                continue
            leading = False
            assert result is not GetResult.MISS or key not in self.durable, "MISS, and it was STORED by ourselves"
            if self.arrangement.guards:
                assert pages.payload(number) == b"\x77" * _SIZE, "no HIT, and the host page was touched"
        pages.assert_guards_intact()
        self._returned(pages)
        return results

    @rule(keys=_keys, at_once=st.booleans())
    def look_up(self, keys: list[bytes], at_once: bool) -> None:
        def ask() -> tuple[list[bool], int]:
            return self.store.contains(keys), self.store.count_leading(keys)

        if at_once:
            with answering_at_once():
                present, leading = ask()
        else:
            present, leading = ask()
        assert len(present) == len(keys) and 0 <= leading <= len(keys)
        for key, known in zip(keys, present, strict=True):
            assert not known or self.written[key], "present, and nobody ever wrote it"
        assert all(self.written[key] for key in keys[:leading])

    @rule(keys=_keys)
    def remove(self, keys: list[bytes]) -> None:
        self.durable -= set(keys)
        if self._done_in_full(lambda: self.store.remove(keys)):
            self.counts["removed while all was well"] += 1
            assert self.store.contains(keys) == [False] * len(keys), "removed, and still there"
            assert not any(key in bottom.objects for key in keys for bottom in self.bottoms)
            self.may_be_near -= set(keys)

    @rule(everything=st.booleans())
    def clear(self, everything: bool) -> None:
        self.durable.clear()
        for key in _KEYS:
            self.gone[key] |= self.written[key]
        if self._done_in_full(lambda: self.store.clear(None if everything else [IDENTITY])):
            self.counts["cleared while all was well"] += 1
            assert self.store.wait_until_written(30)
            assert not any(self.store.contains(_KEYS)), "cleared, and still there"
            self.may_be_near.clear()

    def _done_in_full(self, removal: Callable[[], object]) -> bool:
        """Whether a removal reached both stores. On a busy machine even a call of a healthy store may be late."""
        well, refused = self._all_is_well(), self._refused()
        removal()
        done = well and self._refused() == refused
        self.removing = self.removing or not done
        return done

    def _refused(self) -> int:
        return sum(bottom.metrics.total(event) for bottom in self.bottoms for event in ("timeout", "rejected", "error"))

    def _all_is_well(self) -> bool:
        """No fault, and none of the past whose calls are still on their way."""
        return (
            not self.removing
            and all(store.mode is Mode.WELL for store in self.faulty)
            and self.store.wait_until_written(30)
            and all(
                _breaker_state(store) is BreakerState.CLOSED and not _deadline(store).stuck_calls
                for store in self.tiers
                if self.arrangement.guards
            )
        )

    @rule(keys=_keys, tier=st.integers(0, 1), fill=st.integers(0, 0x80))
    def another_process_writes(self, keys: list[bytes], tier: int, fill: int) -> None:
        pages = HostPages([_SIZES] * len(keys), fill=fill)
        self._will_be_written(keys, fill, near=tier == 0)
        self.bottoms[tier].set(PageBatch(keys, pages.buffers))

    @rule(keys=_keys, tier=st.integers(0, 1))
    def another_process_evicts(self, keys: list[bytes], tier: int) -> None:
        self.durable -= set(keys)
        self.bottoms[tier].remove(keys)

    @rule(key=st.sampled_from(_KEYS), tier=st.integers(0, 1), place=st.integers(0, 1 << 16))
    def a_bit_flips(self, key: bytes, tier: int, place: int) -> None:
        objects = self.bottoms[tier].objects
        stored = bytearray(objects.get(key, b""))
        if stored:
            self.durable.discard(key)
            stored[place % len(stored)] ^= 1
            self.damaged.add(bytes(stored))
            objects[key] = bytes(stored)

    @rule()
    def time_passes(self) -> None:
        time.sleep(_LIFETIME * 1.25)

    @rule()
    def all_is_well_again(self) -> None:
        """Faults end: what is stored is read, exactly, without anybody's help."""
        for store in self.faulty:
            store.become(Mode.WELL)
            store.let_go()
        if self.arrangement.guards:
            wait_until(lambda: not any(_deadline(store).stuck_calls for store in self.tiers))
        self.removing = False
        wait_until(self._reads_exactly)
        if self.arrangement.guards:
            wait_until(self._all_closed)

    def _reads_exactly(self) -> bool:
        """Whether every page that a store has is read, and no other. Pages on their way to a store arrive first."""
        assert self.store.wait_until_written(30)
        results = self._read(_KEYS)
        stored = [any(key in bottom.objects for bottom in self.bottoms) for key in _KEYS]
        if [result is GetResult.HIT for result in results] == stored:
            return True
        time.sleep(0.002)
        return False

    def _all_closed(self) -> bool:
        for store in self.tiers:
            pages = HostPages([_SIZES] * len(_KEYS))
            store.get(PageBatch(_KEYS, pages.buffers))
        return all(_breaker_state(store) is BreakerState.CLOSED for store in self.tiers)

    def _will_be_written(self, keys: list[bytes], fill: int, *, near: bool) -> None:
        for key in keys:
            self.written[key].add(bytes([fill]) * _SIZE)
            self.gone[key].discard(bytes([fill]) * _SIZE)
        if near:
            self.may_be_near |= set(keys)

    def _returned(self, pages: HostPages) -> None:
        self.returned.append((pages, pages.snapshot()))

    @invariant()
    def memory_that_was_given_back_is_left_alone(self) -> None:
        for pages, snapshot in self.returned:
            assert pages.snapshot() == snapshot, "host pages changed after the call had returned"

    @invariant()
    def nothing_is_stored_that_nobody_wrote(self) -> None:
        for bottom in self.bottoms:
            for key, stored in list(bottom.objects.items()):
                assert stored[envelope.FIELDS_LENGTH :] in self.written[key] or stored in self.damaged

    @invariant()
    def near_is_only_what_was_written_or_read_in_a_leading_run(self) -> None:
        assert set(self.bottoms[0].objects) <= self.may_be_near, "a page past a gap was promoted"

    def teardown(self) -> None:
        try:
            if self.arrangement.ends_badly:
                self.counts["closed amid faults"] += 1
                begun = time.monotonic()
                self.store.close()
                # Far below the minute for which a store hangs.
                assert time.monotonic() - begun < 20, "a close that waits for a store that hangs"
            else:
                self.all_is_well_again()
                self.nothing_is_stored_that_nobody_wrote()
        finally:
            for store in self.faulty:
                store.become(Mode.WELL)
                store.let_go()
            self.store.close()
            self.store.close()
        wait_until(lambda: set(threading.enumerate()) <= self.threads_before)
        self.memory_that_was_given_back_is_left_alone()
        self.near_is_only_what_was_written_or_read_in_a_leading_run()
        if self.arrangement.guards:
            for store in self.tiers:
                assert _deadline(store).bounce.lent == 0
                assert _deadline(store).stuck_calls == 0
        self.counts["schedules"] += 1
        self.counts["with guards" if self.arrangement.guards else "without guards"] += 1
        for bottom in self.bottoms:
            for (event, reason), amount in bottom.metrics.snapshot().items():
                if event in (*_COUNTED, *_COUNTED_IN_BACKGROUND):
                    self.counts[f"{event} {reason}".strip()] += amount


def _deadline(store: PageStore) -> Deadline:
    assert isinstance(store, GuardedStore) and store.deadline is not None
    return store.deadline


def _breaker_state(store: PageStore) -> BreakerState:
    assert isinstance(store, GuardedStore)
    return store.breaker.state

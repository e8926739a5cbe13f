"""Allocates slots in one slab directory, within its capacity.

Slots are free ones, those of slabs added while the capacity lasts, and those of evicted pages. Slot sizes compete: a
slab whose pages have lower priorities than those evicted of another size is taken away.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hicache_ext.page.envelope import PAGE_HASH_LENGTH
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.tiers.file.path_store import Fullness
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.slab.change import IndexChange
from hicache_ext.storage.tiers.file.slab.directory import INDEX_BYTES_AT_LEAST, INDEX_BYTES_PER_SLOT, SlabDirectory
from hicache_ext.storage.tiers.file.slab.mapped import Words
from hicache_ext.storage.tiers.file.slab.quiet_index import QuietIndex
from hicache_ext.storage.tiers.file.slab.records import Slab
from hicache_ext.storage.tiers.file.slab.shapes import HEADER
from hicache_ext.storage.tiers.file.slab.slot_references import Numbers
from hicache_ext.storage.tiers.file.slab.touches import Touches

_SLABS_AT_CAPACITY = 16
"""A full directory has about this many slabs, unless they would be larger than _LARGEST_SLAB."""
_LARGEST_SLAB = 1 << 30
_SMALLEST_PART_OF_A_SLAB = 4
"""A slot size that has slabs gets no further one smaller than a whole one divided by this."""
_MOST_SLABS_RECLAIMED = 64
"""Slabs of other slot sizes that one write may take away."""
_MOST_EVICTED_AHEAD = 16
"""At most one in so many slots of a full directory is kept free for the next write."""
_INDEX_LOOK_INTERVAL = 1.0
"""Seconds between two checks of the size of the index."""
_DEAD_WRITERS_INTERVAL = 10.0
"""Seconds, at full capacity, between two searches for slots that killed processes were writing."""
_CLOCK_INTERVAL = 1.0
"""Seconds between two values that ``ClockTimes`` keeps, at first."""
_MOST_CLOCK_VALUES = 4096
"""Values kept; beyond that every other one is dropped, and the interval doubles."""


class SlotAllocator:
    """The slabs of one directory. Thread-safe."""

    def __init__(
        self,
        directory: SlabDirectory,
        index: QuietIndex,
        capacity: int,
        pins: PinnedPages,
        touches: Touches,
        metrics: TierMetrics,
        failed: Callable[[OSError], None],
        evicted_age: RecentMean,
    ) -> None:
        """Drops slabs beyond the capacity. Raises lmdb.Error or OSError.

        ``touches`` are written before an eviction. ``failed`` is told errors of the disk, ``evicted_age`` the seconds
        since the last use of evicted pages.
        """
        self._directory = directory
        self._index = index
        self._capacity = capacity
        self._pins = pins
        self._touches = touches
        self._metrics = metrics
        self._failed = failed
        self._evicted_age = evicted_age
        self._clock_times: defaultdict[int, ClockTimes] = defaultdict(ClockTimes)
        """By slot size; used inside changes."""
        self._slabs = {slab.number: slab for slab in directory.index.slabs()}
        # A slab of another slot size that holds colder pages than those evicted here.
        self._colder_slab: Slab | None = None
        self._evicted_since_reclaim = 0
        self._spared_hashes: frozenset[bytes] = frozenset()
        self._spared_words: Words = np.empty(0, np.int64)
        # Slot sizes for which pages had to be evicted.
        self._full: set[int] = set()
        self._looked_for_dead_writers = 0.0
        self._index_size_seen = 0
        self._look_at_index = 0.0
        self._shrink()

    def fullness(self) -> Fullness:
        """Raises lmdb.Error or OSError."""
        pages, used, free = self._directory.index.occupied()
        left = self._capacity - self._occupied(self._directory.index.slabs())
        return Fullness(self._capacity, used, free + max(0, left), pages)

    def resize(self, capacity: int) -> None:
        """Slabs beyond the capacity are dropped at once; pinned pages may take half of the new capacity."""
        self._capacity = capacity
        self._pins.set_limit(capacity // 2)
        self._shrink()

    def make_up_for_index(self) -> None:
        """Drop slabs if the index has grown by more than expected."""
        if time.monotonic() < self._look_at_index:
            return
        self._look_at_index = time.monotonic() + _INDEX_LOOK_INTERVAL
        size = self._index_size()
        if size > self._index_size_seen:
            self._index_size_seen = size
            self._shrink()

    def slab(self, number: int) -> Slab | None:
        """None when it was dropped."""
        slab = self._slabs.get(number)
        if slab is None:
            self._look_at_slabs()
            slab = self._slabs.get(number)
        return slab

    # -- slots -----------------------------------------------------------------------------------------------------

    def take(self, wanted: Mapping[int, Numbers], portion: int) -> dict[int, Words]:
        """Allocate slots for as many of the pages as possible, the first ones first: by slot size, slabs and slots, a
        row each. ``portion``: the number with which they are published. ``wanted``: the pages for each slot size.
        """
        # Read the pins now if due, not inside a change that others wait for.
        self._pins.spared()
        taken: dict[int, Words] = {}
        left = {slot_size: len(pages) for slot_size, pages in wanted.items()}
        for _ in range(_MOST_SLABS_RECLAIMED):
            places = self._index.change(lambda change: self._take(change, left, portion)) or {}  # noqa: B023
            for slot_size, of_size in places.items():
                taken[slot_size] = np.hstack([taken[slot_size], of_size]) if slot_size in taken else of_size
            left = {
                slot_size: missing
                for slot_size, count in left.items()
                if (missing := count - places[slot_size].shape[1] if slot_size in places else count)
            }
            if not left or not self.reclaim_slab(needed=True):
                break
        return taken

    def _take(self, change: IndexChange, wanted: Mapping[int, int], portion: int) -> dict[int, Words]:
        taken: dict[int, Words] = {}
        for slot_size, count in wanted.items():
            self._clock_times[slot_size].note(change.inserts(slot_size), time.time())
            places = change.take_free_slots(slot_size, count, portion)

            def take_more() -> None:
                nonlocal places
                more = change.take_free_slots(slot_size, count - places.shape[1], portion)  # noqa: B023
                places = np.hstack([places, more])

            while places.shape[1] < count and self._add_slab(change, slot_size):
                take_more()
            if places.shape[1] < count and self._time_to_look_for_dead_writers() and change.release_dead_writers():
                take_more()
            if places.shape[1] < count:
                self._full.add(slot_size)
                self._evict(change, slot_size, count - places.shape[1])
                take_more()
            taken[slot_size] = places
            if places.shape[1] < count:
                self._colder_slab = change.colder_slab(slot_size)
        self._count_evicted(change)
        return taken

    def evict_ahead(self, counts: Mapping[int, int]) -> None:
        """At full capacity, free as many slots as are being filled (``counts``, by slot size), for the next write.

        It runs while they are filled: this is work for the processor, that for the disk and memory. And before they are
        published: a page stored now must not be evicted by the same call.
        """

        def evict(change: IndexChange) -> None:
            for slot_size, count in counts.items():
                if slot_size in self._full:
                    wanted = min(count, self._capacity // slot_size // _MOST_EVICTED_AHEAD)
                    self._evict(change, slot_size, wanted - change.free_slots(slot_size, wanted))
                    self._colder_slab = change.colder_slab(slot_size)
            self._count_evicted(change)

        if not self._full.isdisjoint(counts):
            self._index.change(evict)

    def _evict(self, change: IndexChange, slot_size: int, count: int) -> None:
        for keys in self._touches.take():
            change.touch(keys)
        first, before = change.first_victim(slot_size) if count > 0 else None, change.evicted
        change.evict(slot_size, count, self._spared())
        if first is not None:
            # The first victim stands for all: they are next to each other in the order.
            used, written = first
            last_use = self._clock_times[slot_size].when(used) or written
            self._evicted_age.note(max(0.0, time.time() - last_use), change.evicted - before)

    def _spared(self) -> Words:
        """The pinned pages as ``IndexChange.evict`` takes them."""
        hashes = self._pins.spared()
        if hashes is not self._spared_hashes:
            self._spared_hashes = hashes
            self._spared_words = np.unique(np.frombuffer(b"".join(hashes), np.int64)[:: PAGE_HASH_LENGTH // 8])
        return self._spared_words

    def _count_evicted(self, change: IndexChange) -> None:
        self._metrics.add("evicted", "capacity", change.evicted)
        self._evicted_since_reclaim += change.evicted

    def _time_to_look_for_dead_writers(self) -> bool:
        now = time.monotonic()
        due = now - self._looked_for_dead_writers >= _DEAD_WRITERS_INTERVAL
        if due:
            self._looked_for_dead_writers = now
        return due

    # -- slabs -----------------------------------------------------------------------------------------------------

    def reclaim_slab(self, needed: bool) -> bool:
        """Take a slab away from another slot size, so that a model that is gone does not keep its share for ever.

        ``needed``: pages wait for it. Otherwise one slab is taken per as many evictions as it has slots, and only while
        its pages have lower priorities than those evicted here.
        """
        slab, self._colder_slab = self._colder_slab, None
        if slab is None or not (needed or self._evicted_since_reclaim >= slab.slots):
            return False
        self._evicted_since_reclaim = 0
        spared = self._spared()
        if len(spared) and not needed and self._index.change(lambda change: change.holds_any(slab, spared)):
            return False
        return self._drop_slab(slab)

    def _add_slab(self, change: IndexChange, slot_size: int) -> bool:
        """Grow by one slab within the capacity; False when that is used up or the disk is full."""
        used = self._occupied(change.slabs())
        wanted = max(1, min(self._capacity // _SLABS_AT_CAPACITY, _LARGEST_SLAB) // slot_size)
        slots = min(wanted, (self._capacity - used) // (slot_size + HEADER + INDEX_BYTES_PER_SLOT))
        if slots < 1:
            return False
        if slots < wanted // _SMALLEST_PART_OF_A_SLAB and any(slab.slot_size == slot_size for slab in change.slabs()):
            # Or remainders of the capacity would become hundreds of slabs of one slot each.
            return False
        slab = None
        try:
            slab = change.add_slab(slot_size, slots)
            self._directory.create_slab_file(slab)
        except OSError as error:
            self._failed(error)
            if slab is not None:
                change.drop_slab(slab)
            return False
        self._slabs[slab.number] = slab
        return True

    def _drop_slab(self, slab: Slab) -> bool:
        dropped = self._index.change(lambda change: change.drop_slab(slab))
        if dropped:
            self._slabs.pop(slab.number, None)
            # There is space again: a slab is added before the next eviction.
            self._full.clear()
            try:
                self._directory.delete_slab_file(slab)
            except OSError as error:
                self._failed(error)
            self._look_at_slabs()
        return bool(dropped)

    def _shrink(self) -> None:
        """Drop slabs, those with the lowest priorities first, until the rest fits the capacity.

        The capacity may have been lowered, or the index may have grown: killed readers keep their snapshots.
        """
        while True:
            slabs = self._index.slabs()
            if not slabs or self._occupied(slabs) <= self._capacity:
                return
            slab = self._index.change(lambda change: change.colder_slab(slot_size=0)) or slabs[0]
            if not self._drop_slab(slab):
                return

    def _occupied(self, slabs: Sequence[Slab]) -> int:
        """Bytes of disk of slabs and index: the expected size of the index, or its size if that is more."""
        expected = INDEX_BYTES_AT_LEAST + sum(slab.slots * INDEX_BYTES_PER_SLOT for slab in slabs)
        return max(expected, self._index_size()) + sum(slab.size + slab.headers_size for slab in slabs)

    def _index_size(self) -> int:
        """Bytes of the index's files; 0 when they cannot be read."""
        try:
            return self._directory.index.size()
        except OSError as error:
            self._failed(error)
            return 0

    def _look_at_slabs(self) -> None:
        """Learn of slabs added and dropped by any process."""
        slabs = self._index.slabs()
        if slabs is not None:
            self._slabs = {slab.number: slab for slab in slabs}
            self._directory.close_dropped(self._slabs)


class ClockTimes:
    """Maps an eviction clock, which counts inserted pages, to seconds, which operators want: its history, as far as
    this process saw it. One thread at a time."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._times: list[float] = []
        self._interval = _CLOCK_INTERVAL

    def note(self, value: int, now: float) -> None:
        """The clock is at ``value``; ``now`` in wall-clock seconds."""
        if self._times and now - self._times[-1] < self._interval:
            return
        self._values.append(value)
        self._times.append(now)
        if len(self._times) >= _MOST_CLOCK_VALUES:
            self._values, self._times = self._values[::2], self._times[::2]
            self._interval *= 2

    def when(self, value: int) -> float | None:
        """When the clock passed ``value``, rather too early; None before the first note."""
        after = bisect.bisect_right(self._values, value)
        return self._times[after - 1] if after else None

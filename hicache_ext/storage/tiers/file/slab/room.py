"""Room for pages in one slab directory, within its capacity.

Slots are free ones, those of slabs added while the capacity lasts, and those of evicted pages. Slot sizes compete: a
slab with pages that would go before those evicted of another size is taken away.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hicache_ext.page.envelope import PAGE_HASH_LENGTH
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.tiers.file.fullness import Fullness
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.slab.change import IndexChange
from hicache_ext.storage.tiers.file.slab.clock_times import ClockTimes
from hicache_ext.storage.tiers.file.slab.directory import INDEX_BYTES_AT_LEAST, INDEX_BYTES_PER_SLOT, SlabDirectory
from hicache_ext.storage.tiers.file.slab.mapped import Words
from hicache_ext.storage.tiers.file.slab.placed import Numbers
from hicache_ext.storage.tiers.file.slab.quiet_index import QuietIndex
from hicache_ext.storage.tiers.file.slab.records import Slab
from hicache_ext.storage.tiers.file.slab.shapes import HEADER
from hicache_ext.storage.tiers.file.slab.touches import Touches

_SLABS_AT_CAPACITY = 16
"""A full directory has about this many slabs, unless they would be larger than _LARGEST_SLAB."""
_LARGEST_SLAB = 1 << 30
_SMALLEST_PART_OF_A_SLAB = 4
"""A slot size that has slabs gets no other one smaller than this part of a whole one."""
_MOST_SLABS_RECLAIMED = 64
"""Slabs of other slot sizes that one write may take away."""
_MOST_EVICTED_AHEAD = 16
"""Of the slots of a full directory, one in so many at most is kept free for the next write."""
_INDEX_LOOK_INTERVAL = 1.0
"""Seconds between two looks at how large the index has become."""
_DEAD_WRITERS_INTERVAL = 10.0
"""Seconds between two looks, at full capacity, for slots that killed processes were writing."""


class Room:
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

        ``touches`` are written before an eviction; ``failed`` hears of errors of the disk, ``evicted_age`` how many
        seconds ago what is evicted was used.
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

    @property
    def capacity(self) -> int:
        return self._capacity

    def fullness(self) -> Fullness:
        """Raises lmdb.Error or OSError."""
        pages, used, free = self._directory.index.occupied()
        left = self._capacity - self._occupied(self._directory.index.slabs())
        return Fullness(self._capacity, used, free + max(0, left), pages)

    def resize(self, capacity: int) -> None:
        """Slabs beyond the capacity are dropped at once; pinned pages may take half of the new one."""
        self._capacity = capacity
        self._pins.set_limit(capacity // 2)
        self._shrink()

    def make_up_for_index(self) -> None:
        """Drop slabs where the index has grown by more than was expected."""
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
        """Slots for as many pages as there is room for: by slot size, those for the first ones, slabs and slots a row
        each. ``portion`` is what they are published with.

        ``wanted``: the pages that need a slot of each size.
        """
        # A look at the pins, where one is due, is not for inside a change that others wait for.
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

        While they are being filled: this is work for the processor, and that is work for the disk and the memory. And
        before they are published: what is stored now must not be evicted by the same call.
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
            # The first one speaks for all: only those are evicted whose turn is next.
            used, written = first
            last_use = self._clock_times[slot_size].when(used) or written
            self._evicted_age.note(max(0.0, time.time() - last_use), change.evicted - before)

    def _spared(self) -> Words:
        """What ``IndexChange.evict`` takes for the pinned pages."""
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

        ``needed``: pages wait for it. Otherwise one is taken for as many evictions as it has slots, and only while its
        pages would go before those evicted here.
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
            # What slabs of other sizes left over, again and again: slabs of one slot each would be had by the hundred.
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
            # There is room again: a slab is added before the next eviction.
            self._full.clear()
            try:
                self._directory.delete_slab_file(slab)
            except OSError as error:
                self._failed(error)
            self._look_at_slabs()
        return bool(dropped)

    def _shrink(self) -> None:
        """Drop slabs, those with the pages that go first, until what there is fits the capacity.

        The capacity may have been lowered, or the index have grown: killed readers pin what they were looking at.
        """
        while True:
            slabs = self._index.slabs()
            if not slabs or self._occupied(slabs) <= self._capacity:
                return
            slab = self._index.change(lambda change: change.colder_slab(slot_size=0)) or slabs[0]
            if not self._drop_slab(slab):
                return

    def _occupied(self, slabs: Sequence[Slab]) -> int:
        """Bytes of disk of slabs and index: what the index is expected to need, or what it takes if that is more."""
        expected = INDEX_BYTES_AT_LEAST + sum(slab.slots * INDEX_BYTES_PER_SLOT for slab in slabs)
        return max(expected, self._index_size()) + sum(slab.size + slab.headers_size for slab in slabs)

    def _index_size(self) -> int:
        """Bytes of the index's files; 0 when they cannot be looked at."""
        try:
            return self._directory.index.size()
        except OSError as error:
            self._failed(error)
            return 0

    def _look_at_slabs(self) -> None:
        """Learn of slabs added, and let go of those dropped, by whichever process."""
        slabs = self._index.slabs()
        if slabs is not None:
            self._slabs = {slab.number: slab for slab in slabs}
            self._directory.close_dropped(self._slabs)

"""Allocates slots in one slab directory, within its capacity.

It takes free slots, adds slabs while the capacity lasts, and then evicts pages. Slot sizes compete: a slab whose pages
have lower priorities than those evicted from another size is taken away. Files are made and deleted, which is slow,
without holding the lock of the index.

A page that depends on the KV page of the same prefix position (an index key, a state, a draft) is useless without it,
and is evicted with it (``Companions``): docs/decisions/pools-share-a-fate.md.
"""

from __future__ import annotations

import bisect
import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext.errors import IndexBusyError
from hicache_ext.page.identity import KV_POOL
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.pages.tree import load_document
from hicache_ext.storage.tiers.file.path_store import NO_SPACE, NO_SPACE_PAUSES, Fullness
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.index_words import CLOCK_SHIFT, CREATED, NO_PAGE, USED, Words, hashes_of
from hicache_ext.storage.tiers.file.slab.shapes import Numbers, Slab, slots_within

_MISSING_INTERVAL = 10.0
"""Seconds between two attempts to read documents that were missing."""
_AT_ONCE = 256
"""Documents that one call reads at most, because a write waits for them."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The part of an identity's document that says which pages depend on it."""

    model: str
    """The model facts, as JSON."""
    is_kv: bool
    ways: tuple[int, ...]
    """Number of ranks along each parallel coordinate."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Facts | None:
        """Extract the facts from a document; return None if it lacks them."""
        model, pool, shard = (document.get(part) for part in ("model", "pool", "shard"))
        if not (isinstance(model, dict) and isinstance(pool, dict) and isinstance(shard, dict)):
            return None
        try:
            ways = tuple(int(shard[name][1]) for name in sorted(shard))
            return cls(json.dumps(model, sort_keys=True), pool.get("name") == KV_POOL, ways)
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
            # Anybody may have written the document.
            return None

    def needs(self, kv: Facts) -> bool:
        """Return whether pages of this identity are useless without the pages of ``kv`` under the same page hashes."""
        if self.is_kv or not kv.is_kv or self.model != kv.model or len(self.ways) != len(kv.ways):
            return False
        # Any rank: all store the same positions. Replicated pages have one: a latent KV, whose draft may have several.
        return all(own == of_kv or 1 in (own, of_kv) for own, of_kv in zip(self.ways, kv.ways, strict=True))


class Companions:
    """Knows which identities in one directory depend on which KV identities. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[bytes, Facts | None] = {}
        """None for an identity whose document is missing or lacks the facts."""
        self._retried_at = 0.0
        self._dependents: Mapping[bytes, Sequence[bytes]] = {}

    def of(self, identities: Collection[bytes]) -> Mapping[bytes, Sequence[bytes]]:
        """Return, for each KV identity, the identities whose pages need its pages. Each call reads the documents of a
        few new identities. ``identities`` may only grow. Without changes, the same object as before is returned."""
        with self._lock:
            retry = time.monotonic() - self._retried_at >= _MISSING_INTERVAL
            if len(identities) > len(self._known) or retry:
                new = [digest for digest in identities if digest not in self._known]
                if retry:
                    self._retried_at = time.monotonic()
                    new += [digest for digest, facts in self._known.items() if facts is None]
                for digest in new[:_AT_ONCE]:
                    document = load_document(self._path, digest)
                    # Move it behind those that have not had their turn.
                    self._known.pop(digest, None)
                    self._known[digest] = None if document is None else Facts.of(document)
                if new and (found := self._find_dependents()) != self._dependents:
                    self._dependents = found
            return self._dependents

    def _find_dependents(self) -> dict[bytes, list[bytes]]:
        families: defaultdict[str, list[tuple[bytes, Facts]]] = defaultdict(list)
        for digest, facts in self._known.items():
            if facts is not None:
                families[facts.model].append((digest, facts))
        return {
            digest: [other for other, other_facts in family if other_facts.needs(facts)]
            for family in families.values()
            for digest, facts in family
            if facts.is_kv
        }


_SLABS_AT_CAPACITY = 16
"""A full directory has about this many slabs, unless they would be larger than ``_LARGEST_SLAB``."""
_LARGEST_SLAB = 1 << 30
_MOST_LARGEST_SLABS = 1 << 10
"""A directory that would need more slabs of that size gets larger ones."""
_SMALLEST_PART_OF_A_SLAB = 4
"""A slot size that already has slabs gets no new slab smaller than a whole one divided by this."""
_ATTEMPTS = 64
"""Attempts to take slots for one write: slabs it takes from other slot sizes, and portions that it evicts."""
_FILES_INTERVAL = 10.0
"""Seconds between two checks that the files of all slabs exist."""
_HELD_BACK = 10.0
"""Seconds for which writes are rejected, at most, while slabs beyond a lowered capacity have pages being written."""
_CLOCK_INTERVAL = 1.0
"""Initial seconds between two values that ``ClockTimes`` keeps."""
_MOST_CLOCK_VALUES = 4096
"""Values kept at most; at this limit every other one is dropped, and the interval doubles."""


class SlotAllocator:
    """The slabs of one directory. Thread-safe."""

    def __init__(
        self,
        directory: SlabDirectory,
        capacity: int,
        pins: PinnedPages,
        metrics: TierMetrics,
        failed: Callable[[OSError], None],
        note_space: Callable[[OSError | None], object],
        evicted_age: RecentMean,
    ) -> None:
        """``failed`` receives errors of the disk; ``note_space`` the error when a slab finds no room on it, and None
        once one may; ``evicted_age`` the seconds since the last use of evicted pages."""
        self._directory = directory
        self._index = directory.index
        self._companions = Companions(directory.path)
        self._capacity = capacity
        self._pins = pins
        self._metrics = metrics
        self._failed = failed
        self._note_space = note_space
        self._evicted_age = evicted_age
        self._clock_times = ClockTimes()
        """Guarded by ``_times_lock``."""
        self._evicted_since_reclaim: defaultdict[int, int] = defaultdict(int)
        """Evicted pages, by the slot size that needed the room."""
        self._spared_words: dict[bool, tuple[frozenset[bytes], Words]] = {}
        self._full: dict[int, int] = {}
        """Slot sizes for which no slab could be added -> the state of the slabs then (``View.changes``)."""
        self._disk_full_until = 0.0
        """time.monotonic() before which no slab is added."""
        self._times_full = 0
        """Consecutive times that the disk was full."""
        self._pending_changes: deque[Callable[[], None]] = deque()
        """Changes to make to the index as soon as no other process holds it."""
        self._times_lock = threading.Lock()
        self._shrinking = threading.Lock()
        self._is_beyond = False
        """Whether slabs beyond the capacity could not be dropped yet."""
        self._held_back_until = 0.0
        """time.monotonic() before which no slots are taken while there are such slabs."""
        self._files_checked_at = time.monotonic()

    def fullness(self, oldest: int, no_space_since: int) -> tuple[Fullness, Words]:
        """Return the fullness and each tenant's bytes. Reads every slot; ``oldest`` as for ``SlabIndex.locate``."""
        pages, used, free, of_tenants = self._index.occupied(oldest)
        left = self._capacity - _occupied(self._index.all_slabs())
        served = self._index.served()
        return Fullness(self._capacity, used, free + max(0, left), pages, no_space_since, served), of_tenants

    def resize(self, capacity: int) -> None:
        """Drop slabs beyond the new capacity (``shrink``), and let pinned pages take half of it."""
        self._capacity = capacity
        self._full.clear()
        # The disk may have enough room for a lower capacity.
        self._note_space(None)
        self._pins.set_limit(capacity // 2)
        self._held_back_until = time.monotonic() + _HELD_BACK
        self.shrink()

    # -- slots -----------------------------------------------------------------------------------------------------

    def take(
        self,
        wanted: Mapping[int, Numbers],
        ticket: int,
        oldest: int,
        tenancy: Words | None = None,
        before: bytes | None = None,
    ) -> dict[int, Words]:
        """Allocate slots for as many of the pages as possible, in order; return their rows by slot size. ``ticket`` is
        the number with which they are published, ``wanted`` the pages for each slot size; ``tenancy`` and ``before``
        are those of ``SlabIndex.take``. Raises IndexBusyError if the index is held and no slot was taken."""
        while self._pending_changes:
            with suppress(IndexError):
                change = self._pending_changes.popleft()
                try:
                    change()
                except IndexBusyError:
                    self._pending_changes.append(change)
                    raise
        if self._is_beyond and time.monotonic() < self._held_back_until:
            # Calls that never pause would keep a page being written in every slab.
            return dict.fromkeys(wanted, np.empty(0, np.int64))
        taken: dict[int, Words] = {}
        try:
            for slot_size, pages in wanted.items():
                taken[slot_size] = np.empty(0, np.int64)
                self._take(slot_size, len(pages), ticket, oldest, taken, tenancy, before)
        except IndexBusyError:
            if not any(map(len, taken.values())):
                raise
        return taken

    def change(self, change: Callable[[], None]) -> bool:
        """Change the index now, or before the next slots are taken if another process holds it (return False)."""
        try:
            change()
        except IndexBusyError:
            self._pending_changes.append(change)
            return False
        return True

    def _take(
        self,
        slot_size: int,
        wanted: int,
        ticket: int,
        oldest: int,
        taken: dict[int, Words],
        tenancy: Words | None,
        before: bytes | None,
    ) -> None:
        is_below = tenancy is not None and self._index.is_below_share(tenancy)
        spared = self._spared()
        self._index.set_dependents(self._companions.of(self._index.numbers))
        with self._times_lock:
            self._clock_times.note(self._index.inserts, time.time())
        found_full = False
        for _ in range(_ATTEMPTS):
            slabs = self._index.view().changes
            remaining, disk_full = wanted - len(taken[slot_size]), time.monotonic() < self._disk_full_until
            evicting = disk_full or self._full.get(slot_size) == slabs
            request = slot_size, remaining, ticket, oldest, spared
            rows, freed, evicted, dependents = self._index.take(
                *request, evicting=evicting, tenancy=tenancy, for_nobody=is_below, before=before
            )
            if len(rows):
                taken[slot_size] = np.concatenate([taken[slot_size], rows]) if len(taken[slot_size]) else rows
            if len(evicted):
                self._evicted_since_reclaim[slot_size] += len(evicted) + dependents
                self._count_evicted(evicted[0], len(evicted) + dependents)
            if len(rows) == remaining:
                return
            if not evicting:
                if (error := self._add_slab(slot_size, slabs)) is not None:
                    # Evicting pages does not help against a failing device, only against a full one.
                    if error.errno not in NO_SPACE or found_full:
                        return
                    found_full = True
            elif is_below and not len(rows) and not freed:
                # A tenant below its share takes it back even from leased pages of others.
                is_below, spared = False, self._spared(leased=False)
            elif not len(rows) and not freed:
                # On a full disk give up only one slab per pause: others may take the room that it leaves.
                whatever = self._index.bound_behind(before, oldest) == NO_PAGE
                if (disk_full and not found_full) or not self._reclaim(
                    slot_size, oldest, tenancy, needed=True, whatever=whatever
                ):
                    # Nothing is left to evict.
                    return
                self._disk_full_until = 0.0

    def _spared(self, *, leased: bool = True) -> Words:
        """Return the hashes of pinned and, if ``leased``, of leased pages, sorted as ``SlabIndex.take`` wants them."""
        hashes = self._pins.spared(leased=leased)
        known, words = self._spared_words.get(leased, (None, None))
        if words is None or hashes is not known:
            words = np.unique(hashes_of(PageKeys.of_joined(bytes(16), b"".join(hashes)).words))
            self._spared_words[leased] = hashes, words
        return words

    def _count_evicted(self, row: Words, pages: int) -> None:
        """Count evicted pages; ``row``, that of one of them, stands for all, which are about as cold."""
        self._metrics.add("evicted", "capacity", pages)
        used, created = int(row[USED]) >> CLOCK_SHIFT, int(row[CREATED])
        with self._times_lock:
            last_use = (self._clock_times.when(used) if used else None) or created / 1000
        self._evicted_age.note(max(0.0, time.time() - last_use), pages)

    # -- slabs -----------------------------------------------------------------------------------------------------

    def look_after(self, slot_sizes: Sequence[int], oldest: int, tenancy: Words | None = None) -> None:
        """Do the periodic upkeep after a write of pages with slots of these sizes. Raises IndexBusyError."""
        if len(self._index.view().of_size) > 1:
            for slot_size in slot_sizes:
                if self._evicted_since_reclaim[slot_size]:
                    self._reclaim(slot_size, oldest, tenancy, needed=False)
        if time.monotonic() - self._files_checked_at >= _FILES_INTERVAL:
            self._files_checked_at = time.monotonic()
            for slab in list(self._index.view().slabs.values()):
                try:
                    gone = not self._directory.has_files(slab)
                except OSError as error:
                    self._failed(error)
                    return
                if gone:
                    self._drop_slab(slab)
            self.forget_left_slabs()
        if self._is_beyond and not self._shrinking.locked():
            self.shrink()

    def _reclaim(
        self, slot_size: int, oldest: int, tenancy: Words | None, *, needed: bool, whatever: bool = True
    ) -> bool:
        """Take a slab away from another slot size, so that a model that is gone does not keep its share forever.

        If ``needed``, pages wait for it, and it is taken ``whatever`` it is worth. Otherwise a slab is taken once as
        many pages were evicted as it has slots, and only while its pages have lower priorities than those evicted here.
        """
        slots = [slab.slots for slab in self._index.view().slabs.values()]
        if not self._index.rebuilt:
            # Slots not read yet only look cold.
            return False
        evicted = self._evicted_since_reclaim[slot_size]
        if not slots or not (needed or evicted >= min(slots)):
            return False
        spared = self._spared()
        for slab in self._index.colder_slabs(slot_size, oldest, needed=needed and whatever, tenancy=tenancy):
            if needed or (evicted >= slab.slots and not (len(spared) and self._index.holds_any(slab, spared))):
                self._evicted_since_reclaim[slot_size] = 0
                return self._drop_slab(slab)
        return False

    def _add_slab(self, slot_size: int, slabs: int) -> OSError | None:
        """Add one slab if the disk and the capacity have room; return the error of the disk if it failed. A capacity
        that is used up is remembered until the slabs change (``slabs``: ``View.changes``)."""
        whole = max(1, slots_within(self._whole_slab(), slot_size))

        def wanted(there: Sequence[Slab]) -> int:
            slots = min(whole, slots_within(self._capacity - _occupied(there), slot_size))
            if slots < whole // _SMALLEST_PART_OF_A_SLAB and any(slab.slot_size == slot_size for slab in there):
                # Otherwise remainders of the capacity would become hundreds of slabs of one slot each.
                return 0
            return slots

        slab = self._index.begin_slab(slot_size, wanted)
        if slab is None:
            self._full[slot_size] = slabs
            return None
        grew = False
        try:
            self._directory.create_slab_files(slab)
            grew = True
        except OSError as error:
            self._failed(error)
            if error.errno in NO_SPACE:
                self._times_full += 1
                self._disk_full_until = time.monotonic() + NO_SPACE_PAUSES.limit(self._times_full)
                self._note_space(error)
            return error
        finally:
            if not grew:
                self._index.forget_slab(slab)
        self._times_full = 0
        self._note_space(None)
        if not self.change(partial(self._index.finish_slab, slab)):
            raise IndexBusyError("another process holds the index")
        return None

    def _whole_slab(self) -> int:
        """Return the bytes of disk that a slab of full size takes."""
        largest = max(_LARGEST_SLAB, self._capacity // _MOST_LARGEST_SLABS)
        return min(self._capacity // _SLABS_AT_CAPACITY, largest)

    def drop_empty_slabs(self) -> None:
        """Give the room of slabs without pages back to the file system. Raises IndexBusyError."""
        for slab in self._index.empty_slabs():
            # A writer may have put pages there since.
            if self._drop_slab(slab, most_pages=0):
                self._disk_full_until = 0.0
                self._note_space(None)

    def _drop_slab(self, slab: Slab, most_pages: int | None = None) -> bool:
        dropped = self._index.drop_slab(slab, most_pages)
        if dropped:
            self._forget(slab)
        return dropped

    def _forget(self, slab: Slab) -> None:
        try:
            self._directory.close_files()
            self._directory.delete_slab_files(slab)
        except OSError as error:
            # The slab counts towards the capacity until somebody can delete its files.
            self._failed(error)
            return
        self._index.forget_slab(slab)

    def forget_left_slabs(self) -> None:
        """Delete slabs that a process was making or dropping when it died. Raises IndexBusyError."""
        for slab in self._index.left_slabs():
            self._forget(slab)

    def shrink(self) -> None:
        """Drop slabs, those with the lowest priorities first, until the rest fits the capacity. A slab in which a page
        is being written is skipped; if the rest is still too large, it is dropped after later writes."""
        with self._shrinking:
            with suppress(IndexBusyError):
                for slab in self._index.colder_slabs(0, 0, needed=True):
                    if _occupied(self._index.all_slabs()) <= self._capacity:
                        break
                    self._drop_slab(slab)
            self._is_beyond = _occupied(self._index.all_slabs()) > self._capacity


def _occupied(slabs: Sequence[Slab]) -> int:
    """Return the bytes of disk that slabs take."""
    return sum(slab.disk_bytes for slab in slabs)


class ClockTimes:
    """Maps an eviction clock, which counts inserted pages, to seconds, which operators want, from the history that
    this process saw. One thread at a time."""

    def __init__(self) -> None:
        self._known: list[tuple[int, float]] = []
        self._interval = _CLOCK_INTERVAL

    def note(self, value: int, now: float) -> None:
        """Note that the clock shows ``value`` at ``now`` (wall-clock seconds)."""
        if not self._known or now - self._known[-1][1] >= self._interval:
            self._known.append((value, now))
        if len(self._known) >= _MOST_CLOCK_VALUES:
            self._known = self._known[::2]
            self._interval *= 2

    def when(self, value: int) -> float | None:
        """Return when the clock passed ``value``, rounded down; None before the first note."""
        after = bisect.bisect_right(self._known, (value, math.inf))
        return self._known[after - 1][1] if after else None

"""SlabStore: the file tier for local file systems.

Writing: one transaction takes slots (free ones, or those of evicted pages), the pages are written into them, a second
transaction publishes them: a page is found only once it is whole. Reading: one look-up for the batch, then the slots
are read straight into host memory, neighbours in one preadv. A slot may be given to another page between look-up and
read; its envelope then names another page, the index is asked again, and the page is a miss.

Threads: any. The memory of a batch is touched only until the call returns.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb

from hicache_ext import envelope
from hicache_ext.errors import StoreSetupError
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.file.device_errors import Trouble, no_trouble
from hicache_ext.storage.file.directory import BLOCK
from hicache_ext.storage.file.expiry import Sweeper
from hicache_ext.storage.file.io_plan import IoPlan
from hicache_ext.storage.file.parallel import CallGate, Workers
from hicache_ext.storage.file.pins import PinnedPages
from hicache_ext.storage.file.slab.change import IndexChange, Written
from hicache_ext.storage.file.slab.directory import INDEX_BYTES_AT_LEAST, INDEX_BYTES_PER_SLOT, slab_directory
from hicache_ext.storage.file.slab.index import Located
from hicache_ext.storage.file.slab.records import CREATED, Slab
from hicache_ext.storage.file.slab.slot_io import SlotIo, Stored
from hicache_ext.storage.file.slab.touches import Chains, Touches
from hicache_ext.storage.store import GetResult, PageBatch, SetResult, StoreInfo, counted

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_SLABS_AT_CAPACITY = 16
"""A full directory has about this many slabs, unless they would be larger than _LARGEST_SLAB."""
_LARGEST_SLAB = 1 << 30
_SMALLEST_PART_OF_A_SLAB = 4
"""A slot size that has slabs gets no other one smaller than this part of a whole one."""
_LARGEST_RUN = 8 << 20
"""Bytes of neighbouring slots moved by one call: more gives nothing, and starves the other threads."""
_MOST_SLABS_RECLAIMED = 64
"""Slabs of other slot sizes that one write may take away."""
_MOST_EVICTED_AHEAD = 16
"""Of the slots of a full directory, one in so many at most is kept free for the next write."""
_FIELDS = envelope.FIELDS_LENGTH
_SWEEP_BATCH = 4096
"""Pages looked at in one go for their age: a few milliseconds."""
_DEAD_WRITERS_INTERVAL = 10.0
"""Seconds between two looks, at full capacity, for slots that killed processes were writing."""


class SlabStore:
    """PageStore over one slab directory."""

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        capacity: int | None,
        threads: int | None = None,
        plan: IoPlan | None = None,
        ttl: float | None = None,
        metrics: TierMetrics | None = None,
        trouble: Trouble = no_trouble,
    ) -> None:
        """``capacity`` in bytes for all processes together, slabs and index; ``ttl`` in seconds.

        ``trouble`` hears of every error of the disk and the index. Raises StoreSetupError.
        """
        if capacity is None:
            raise StoreSetupError(name, "the slab layout preallocates its files and needs a capacity")
        self._name = name
        self._metrics = metrics or TierMetrics(name)
        self._capacity = capacity
        self._plan = plan or IoPlan()
        self._ttl = ttl
        self._trouble = trouble
        self._threads = threads or self._plan.threads
        # A read through the page cache is mostly work of a processor: more threads only take it from each other.
        processors = len(os.sched_getaffinity(0))
        self._readers = self._threads if self._plan.read == "direct" else min(self._threads, processors)
        # A slab of another slot size that holds colder pages than those evicted here.
        self._colder_slab: Slab | None = None
        self._evicted_since_reclaim = 0
        # Slot sizes for which pages had to be evicted.
        self._full: set[int] = set()
        self._looked_for_dead_writers = 0.0
        self._index_size_seen = 0
        self._cleaners: list[threading.Thread] = []
        self._calls = CallGate(name)
        self._resources = ExitStack()
        try:
            self._directory = self._resources.enter_context(slab_directory(path, name))
            self._index = self._directory.index
            self._io = SlotIo(self._directory, self._plan, self._metrics)
            self._pins = PinnedPages(name, self._directory.path, capacity // 2, self._index.occupied_by)
            self._touches = Touches(name, self._write_touches)
            self._slabs = {slab.number: slab for slab in self._index.slabs()}
            self._shrink()
            self._workers = Workers(f"hicache-{name}", self._threads)
        except BaseException:
            self._resources.close()
            raise
        self._sweeper = None if ttl is None else Sweeper(name, self._directory.path, ttl, self.remove_expired)

    @property
    def name(self) -> str:
        return self._name

    @property
    def metrics(self) -> TierMetrics:
        return self._metrics

    def describe(self) -> StoreInfo:
        return StoreInfo(
            name=self._name,
            type="file",
            shared=False,
            details={
                "layout": "slab",
                "capacity": self._capacity,
                "threads": self._threads,
                "io": str(self._plan),
                "ttl": self._ttl,
            },
        )

    def can_resize(self, capacity: int | None) -> bool:
        return capacity is not None

    def resize(self, capacity: int | None) -> None:
        """Change the capacity of a store in use; slabs beyond it are dropped at once. ``capacity`` is not None."""
        assert capacity is not None
        with self._calls:
            self._capacity = capacity
            self._shrink()

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        try:
            self._directory.save_identity(digest, document)
        except OSError as error:
            logger.warning("tier %s: identity %s not recorded: %s", self._name, digest.hex(), error)

    def close(self) -> None:
        if not self._calls.shut():
            return
        if self._sweeper is not None:
            self._sweeper.close()
        self._workers.close()
        for cleaner in self._cleaners:
            cleaner.join()
        self._touches.close()
        self._resources.close()

    def abandon(self) -> None:
        """``close()`` after the device failed: the index is rebuilt by whoever comes back."""
        self._directory.doubt()
        self._touches.forget()
        self.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = [GetResult.MISS] * len(batch)
        with self._calls:
            self._get(batch, results)
        self._metrics.add_many("get", counted(results))
        self._metrics.add("bytes", "get", batch.bytes_of(GetResult.HIT, results))
        return results

    def _get(self, batch: PageBatch, results: list[GetResult]) -> None:
        """A page whose slot was reused meanwhile is looked up once more."""
        stale = False
        keys: Sequence[bytes] = batch.keys
        wanted: Sequence[int] = range(len(batch))
        for _ in range(2):
            located, worth_a_touch = self._locate(keys, wanted)
            stale = stale or worth_a_touch
            wanted = self._read(batch, located, results)
            if not wanted:
                break
            keys = [batch.keys[position] for position in wanted]
        hits = [key for key, result in zip(batch.keys, results, strict=True) if result is GetResult.HIT]
        if hits:
            # SGLang reads pages of one pool at a time: what is true of the first is true of all.
            self._touches.count(hits[0][: envelope.IDENTITY_LENGTH], len(hits))
        if stale:
            self._touches.note(hits)

    def _read(self, batch: PageBatch, located: list[Located], results: list[GetResult]) -> list[int]:
        """Read and check; the positions whose slot turned out to hold something else."""
        sizes = batch.sizes
        # An object of another length than asked for is not this page; it is not even read.
        doubtful = [(page, "length") for page in located if page.length != _shape(sizes[page.position]).length]
        if doubtful:
            located = [page for page in located if page.length == _shape(sizes[page.position]).length]
        readers = self._readers
        runs = self._runs(batch, located, readers)
        for of_run in self._workers.run(len(runs), lambda n: self._read_run(batch, runs[n], results), readers):
            doubtful += of_run
        moved = []
        for page, reason in doubtful:
            if self._heal(batch, page, reason, results):
                results[page.position] = GetResult.CORRUPT
            elif results[page.position] is not GetResult.HIT:
                results[page.position] = GetResult.MISS
                moved.append(page.position)
        return sorted(moved)

    def _read_run(self, batch: PageBatch, run: list[Located], results: list[GetResult]) -> list[tuple[Located, str]]:
        """One preadv for a run of neighbouring slots; those that do not hold their page, each with the reason."""
        slab = self._slab(run[0].slab)
        if slab is None:
            return [(page, "truncated") for page in run]
        keys, buffers, sizes = batch.keys, batch.buffers, batch.sizes
        headers = [_shape(sizes[page.position]).header for page in run]
        stored = [Stored(header, buffers[page.position]) for page, header in zip(run, headers, strict=True)]
        try:
            read = self._io.read(slab, run[0].slot * slab.slot_size, stored)
        except FileNotFoundError:
            # The slab was dropped meanwhile.
            return [(page, "truncated") for page in run]
        except OSError as error:
            self._count_error(error)
            for page in run:
                results[page.position] = GetResult.ERROR
            return []
        if read.moved != sum([page.length for page in run]):
            # The same, while it was being read.
            return [(page, "truncated") for page in run]
        doubtful: list[tuple[Located, str]] = []
        for page, header, fields in zip(run, headers, read.fields(len(run)), strict=True):
            position = page.position
            key, segments = keys[position], buffers[position]
            if not envelope.is_page(fields, header, key, sizes[position], segments):
                reason = envelope.reason_to_refuse(fields.ljust(header, b"\0"), key, segments)
                if reason is not None:
                    doubtful.append((page, reason))
                    continue
            results[position] = GetResult.HIT
        return doubtful

    def _heal(self, batch: PageBatch, page: Located, reason: str, results: list[GetResult]) -> bool:
        """Remove a page whose slot does not hold it. False when the index says by now that it is elsewhere or gone, or
        when it can be read now: since it was looked up it was evicted and written again, into the same slot."""
        key, where = batch.keys[page.position], (page.slab, page.slot)

        def remove(change: IndexChange) -> bool:
            # Nobody publishes meanwhile: what the index says is in a slot stays there until this has ended.
            if reason != "length" and change.is_at(key, where) and not self._read_run(batch, [page], results):
                return False
            return change.remove(key, where)

        removed = self._change(remove)
        if removed:
            self._metrics.add("corrupt", reason)
            logger.warning("tier %s: page %s was bad (%s) and is removed", self._name, key.hex(), reason)
        return bool(removed)

    def _write_touches(self) -> bool:
        """Write into the index which pages were read; False when there was nothing."""
        taken, uses = self._touches.take(), self._touches.take_uses()

        def write(change: IndexChange) -> None:
            self._touch(change, taken)
            change.add_uses(uses)

        if taken or uses:
            self._change(write)
        return bool(taken or uses)

    @staticmethod
    def _touch(change: IndexChange, chains: Chains) -> None:
        for keys in chains:
            change.touch(keys)

    # -- presence --------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._calls:
            try:
                return self._index.contains(keys, self._oldest())
            except lmdb.Error as error:
                self._count_index_error(error)
                return [False] * len(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            try:
                return self._index.count_leading(keys, self._oldest())
            except lmdb.Error as error:
                self._count_index_error(error)
                return 0

    def _locate(self, keys: Sequence[bytes], positions: Sequence[int]) -> tuple[list[Located], bool]:
        try:
            return self._index.locate(keys, positions, self._oldest())
        except lmdb.Error as error:
            self._count_index_error(error)
            return [], False

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, batch: PageBatch) -> list[SetResult]:
        results = [SetResult.REJECTED] * len(batch)
        with self._calls:
            self._set(batch, results)
        self._metrics.add_many("set", counted(results))
        self._metrics.add("bytes", "set", batch.bytes_of(SetResult.STORED, results))
        return results

    def _set(self, batch: PageBatch, results: list[SetResult]) -> None:
        located, stale = self._locate(batch.keys, range(len(batch)))
        for page in located:
            results[page.position] = SetResult.EXISTS
        if stale:
            # Computed and written once more is used, too.
            self._touches.note([batch.keys[page.position] for page in located])
        known = {page.position for page in located}
        missing = [position for position in range(len(batch)) if position not in known]
        for portion in self._portions(batch, missing):
            self._set_portion(batch, portion, results)
        if missing and self._index.size() > self._index_size_seen:
            self._index_size_seen = self._index.size()
            self._shrink()

    def _portions(self, batch: PageBatch, positions: list[int]) -> list[list[int]]:
        """Cut so that no portion can evict its own pages or leave none to the others."""
        if not positions:
            return []
        sizes = batch.sizes
        slots = {size: _shape(size).slot for size in set(sizes)}
        if len(positions) * max(slots.values()) <= self._capacity // 4:
            return [positions]
        portions: list[list[int]] = []
        filled = 0
        for position in positions:
            need = slots[sizes[position]]
            if not portions or filled + need > self._capacity // 4:
                portions.append([])
                filled = 0
            portions[-1].append(position)
            filled += need
        return portions

    def _set_portion(self, batch: PageBatch, positions: list[int], results: list[SetResult]) -> None:
        # A look at the pins, where one is due, is not for inside a transaction that others wait for.
        self._pins.spared()
        taken: list[Located] = []
        tokens: list[bytes] = []
        rest = positions
        for _ in range(_MOST_SLABS_RECLAIMED):
            answer = self._change(lambda change: self._take_slots(change, batch, rest))  # noqa: B023
            if answer is not None and answer[0]:
                taken += answer[0]
                tokens.append(answer[1])
            done = {page.position for page in taken}
            rest = [position for position in positions if position not in done]
            if not rest or not self._reclaim_slab(needed=True):
                break
        self._metrics.add("rejected", "capacity", len(positions) - len(taken))
        if not taken:
            return
        runs = self._runs(batch, taken, self._threads)
        written: list[Located] = []
        published: dict[int, SetResult] = {}

        def work(number: int) -> SetResult | None:
            if number:
                return self._write_run(batch, runs[number - 1])
            self._evict_ahead(batch, taken)
            return None

        try:
            _, *ended = self._workers.run(1 + len(runs), work)
            for run, result in zip(runs, ended, strict=True):
                if result is SetResult.STORED:
                    written += run
                    continue
                for page in run:
                    results[page.position] = result
        finally:
            published = self._change(lambda change: self._publish(change, batch, tokens, written)) or {}
        for page in written:
            results[page.position] = published.get(page.position, SetResult.ERROR)
        self._reclaim_slab(needed=False)

    def _take_slots(self, change: IndexChange, batch: PageBatch, positions: list[int]) -> tuple[list[Located], bytes]:
        """Slots for as many pages as there is room for: free ones, those of a new slab, those of evicted pages."""
        taken: list[Located] = []
        sizes = batch.sizes
        shapes = {size: _shape(size) for size in set(sizes)}
        by_size: dict[int, list[int]] = {}
        for position in positions:
            by_size.setdefault(shapes[sizes[position]].slot, []).append(position)
        for slot_size, wanted in by_size.items():
            count = len(wanted)
            places = change.take_free_slots(slot_size, count)
            while len(places) < count and self._add_slab(change, slot_size):
                places += change.take_free_slots(slot_size, count - len(places))
            if len(places) < count and self._time_to_look_for_dead_writers() and change.release_dead_writers():
                places += change.take_free_slots(slot_size, count - len(places))
            if len(places) < count:
                self._full.add(slot_size)
                self._touch(change, self._touches.take())
                change.evict(slot_size, count - len(places), self._pins.spared())
                places += change.take_free_slots(slot_size, count - len(places))
            for position, (slab, slot) in zip(wanted, places, strict=False):
                taken.append(Located(slab, slot, shapes[sizes[position]].length, position))
            if len(places) < count:
                self._colder_slab = change.colder_slab(slot_size)
        self._count_evicted(change)
        token = change.pend([(page.slab, page.slot) for page in taken]) if taken else b""
        return taken, token

    def _time_to_look_for_dead_writers(self) -> bool:
        now = time.monotonic()
        due = now - self._looked_for_dead_writers >= _DEAD_WRITERS_INTERVAL
        if due:
            self._looked_for_dead_writers = now
        return due

    def _add_slab(self, change: IndexChange, slot_size: int) -> bool:
        """Grow by one slab within the capacity; False when that is used up or the disk is full."""
        used = self._occupied(change.slabs())
        wanted = max(1, min(self._capacity // _SLABS_AT_CAPACITY, _LARGEST_SLAB) // slot_size)
        slots = min(wanted, (self._capacity - used) // (slot_size + INDEX_BYTES_PER_SLOT))
        if slots < 1:
            return False
        if slots < wanted // _SMALLEST_PART_OF_A_SLAB and any(slab.slot_size == slot_size for slab in change.slabs()):
            # What slabs of other sizes left over, again and again: slabs of one slot each would be had by the hundred.
            return False
        slab = change.add_slab(slot_size, slots)
        try:
            self._directory.create_slab_file(slab)
        except OSError as error:
            self._count_error(error)
            change.drop_slab(slab)
            return False
        self._slabs[slab.number] = slab
        return True

    def _reclaim_slab(self, needed: bool) -> bool:
        """Take a slab away from another slot size, so that a model that is gone does not keep its share for ever.

        ``needed``: pages wait for it. Otherwise one is taken for as many evictions as it has slots, and only while its
        pages would go before those evicted here.
        """
        slab, self._colder_slab = self._colder_slab, None
        if slab is None or not (needed or self._evicted_since_reclaim >= slab.slots):
            return False
        self._evicted_since_reclaim = 0
        spared = self._pins.spared()
        if spared and not needed and self._change(lambda change: change.holds_any(slab, spared)):
            return False
        return self._drop_slab(slab)

    def _drop_slab(self, slab: Slab) -> bool:
        dropped = self._change(lambda change: change.drop_slab(slab))
        if dropped:
            self._slabs.pop(slab.number, None)
            # There is room again: a slab is added before the next eviction.
            self._full.clear()
            try:
                self._directory.delete_slab_file(slab)
            except OSError as error:
                self._count_error(error)
            self._look_at_slabs()
        return bool(dropped)

    def _occupied(self, slabs: Sequence[Slab]) -> int:
        """Bytes of disk of slabs and index: what the index is expected to need, or what it takes if that is more."""
        expected = INDEX_BYTES_AT_LEAST + sum(slab.slots * INDEX_BYTES_PER_SLOT for slab in slabs)
        return max(expected, self._index.size()) + sum(slab.size for slab in slabs)

    def _shrink(self) -> None:
        """Drop slabs, those with the pages that go first, until what there is fits the capacity.

        The capacity may have been lowered, or the index have grown: killed readers pin what they were looking at.
        """
        while True:
            slabs = self._index.slabs()
            if not slabs or self._occupied(slabs) <= self._capacity:
                return
            slab = self._change(lambda change: change.colder_slab(slot_size=0)) or slabs[0]
            if not self._drop_slab(slab):
                return

    def _publish(
        self, change: IndexChange, batch: PageBatch, tokens: list[bytes], written: list[Located]
    ) -> dict[int, SetResult]:
        """Results by position; a position that is missing was not published."""
        # In the order of the batch, which is that of the chain.
        written.sort(key=lambda page: page.position)
        keys = batch.keys
        pages = [
            Written(keys[position], slab, slot, length, position, keys[position - 1] if position else None)
            for slab, slot, length, position in written
        ]
        published = change.publish(tokens, pages, self._oldest())
        if published is None:
            return {}
        return {
            page.position: SetResult.STORED if stored else SetResult.EXISTS
            for page, stored in zip(written, published, strict=True)
        }

    def _evict_ahead(self, batch: PageBatch, taken: Sequence[Located]) -> None:
        """At full capacity, free as many slots as are being filled, for the next write.

        While they are being filled: this is work for the processor, and that is work for the disk and the memory. And
        before they are published: what is stored now must not be evicted by the same call.
        """
        sizes = batch.sizes
        counts = Counter([_shape(sizes[page.position]).slot for page in taken])

        def evict(change: IndexChange) -> None:
            for slot_size, count in counts.items():
                if slot_size in self._full:
                    self._touch(change, self._touches.take())
                    wanted = min(count, self._capacity // slot_size // _MOST_EVICTED_AHEAD)
                    change.evict(slot_size, wanted - change.free_slots(slot_size, wanted), self._pins.spared())
                    self._colder_slab = change.colder_slab(slot_size)
            self._count_evicted(change)

        if not self._full.isdisjoint(counts):
            self._change(evict)

    def _count_evicted(self, change: IndexChange) -> None:
        self._metrics.add("evicted", "capacity", change.evicted)
        self._evicted_since_reclaim += change.evicted

    def _write_run(self, batch: PageBatch, run: list[Located]) -> SetResult:
        """One pwritev for a run of neighbouring slots."""
        fields: list[bytes] = []
        stored: list[Stored] = []
        length = 0
        keys, buffers, sizes = batch.keys, batch.buffers, batch.sizes
        now = int(time.time() * 1000)
        for page in run:
            position = page.position
            segments, size = buffers[position], sizes[position]
            header_length, object_length, _ = _shape(size)
            fields.append(envelope.encode_page(keys[position], segments, size, header_length, now))
            stored.append(Stored(header_length, segments))
            length += object_length
        try:
            slab = self._slab(run[0].slab)
            if slab is None or self._io.write(slab, run[0].slot * slab.slot_size, fields, stored) != length:
                return SetResult.ERROR
        except OSError as error:
            self._count_error(error)
            return SetResult.ERROR
        return SetResult.STORED

    # -- removal ---------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            return self._change(lambda change: sum(change.remove(key) for key in keys)) or 0

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Puts the pages out of reach at once; their slots are freed in the background."""
        with self._calls:
            cleared = self._clear(digests)
            if cleared:
                cleaner = threading.Thread(
                    target=self._free_cleared, args=(cleared,), name=f"hicache-{self._name}-clear", daemon=True
                )
                self._cleaners = [thread for thread in self._cleaners if thread.is_alive()] + [cleaner]
                cleaner.start()
        return len(cleared)

    def _clear(self, digests: Sequence[bytes] | None) -> list[bytes]:
        """The identities that had pages."""

        def clear(change: IndexChange) -> list[bytes]:
            return [digest for digest in (change.identities() if digests is None else digests) if change.clear(digest)]

        cleared: list[bytes] = self._change(clear) or []
        for digest in cleared:
            try:
                self._directory.note_cleared(digest)
            except OSError as error:
                self._count_error(error)
        return cleared

    def _free_cleared(self, digests: Sequence[bytes]) -> None:
        try:
            for digest in digests:
                self._index.free_cleared(digest)
        except lmdb.Error as error:
            self._count_index_error(error)

    def remove_expired(self, stop: threading.Event) -> int:
        """Free the slots of pages older than the ttl, until ``stop``; their number. Raises lmdb.Error."""
        removed = 0
        oldest = self._oldest()
        begin: bytes | None = b"\0"
        while begin is not None and not stop.is_set():
            expired, begin = self._index.expired(oldest, begin, _SWEEP_BATCH)
            if expired:
                with self._index.changing() as change:
                    removed += change.remove_expired(expired, oldest)
            # Others want the interpreter, too.
            stop.wait(0.001)
        self._metrics.add("evicted", "ttl", removed)
        return removed

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _oldest(self) -> bytes:
        """Pages written before this are expired; nothing is without a ttl."""
        return b"" if self._ttl is None else CREATED.pack(max(0, int(time.time() - self._ttl)))

    def _runs(self, batch: PageBatch, pages: list[Located], threads: int) -> list[list[Located]]:
        """Neighbouring slots put together, as long as every thread has something to do."""
        if not pages:
            return []
        longest = max(1, -(-len(pages) // (2 * threads)))
        runs: list[list[Located]] = []
        run: list[Located] = []
        # The place right behind the run. Only full slots have no gap between them.
        following = (-1, -1)
        room = 0
        sizes = batch.sizes
        for page in sorted(pages):
            slab, slot, _, position = page
            _, length, takes = _shape(sizes[position])
            if (slab, slot) == following and len(run) < longest and takes == length <= room:
                run.append(page)
                room -= takes
            else:
                run = [page]
                runs.append(run)
                room = _LARGEST_RUN - takes
            following = (slab, slot + 1) if takes == length else (-1, -1)
        return runs

    def _slab(self, number: int) -> Slab | None:
        slab = self._slabs.get(number)
        if slab is None:
            self._look_at_slabs()
            slab = self._slabs.get(number)
        return slab

    def _look_at_slabs(self) -> None:
        """Learn of slabs added, and let go of those dropped, by whichever process."""
        try:
            self._slabs = {slab.number: slab for slab in self._index.slabs()}
        except lmdb.Error as error:
            self._count_index_error(error)
        else:
            self._directory.close_dropped(self._slabs)

    def _change(self, action: Callable[[IndexChange], _Answer]) -> _Answer | None:
        """``action`` in one write transaction; None when the index cannot be written."""
        try:
            with self._index.changing() as change:
                return action(change)
        except lmdb.Error as error:
            self._count_index_error(error)
            return None

    def _count_error(self, error: OSError) -> None:
        self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
        self._trouble(error)

    def _count_index_error(self, error: Exception) -> None:
        self._metrics.add("error", type(error).__name__)
        logger.error("tier %s: index of %s: %s", self._name, self._directory.path, error)
        self._trouble(error)


class _Shape(NamedTuple):
    """Bytes of a page in a slot."""

    header: int
    length: int
    slot: int


@functools.lru_cache(maxsize=1024)
def _shape(payload: int) -> _Shape:
    """How a page with ``payload`` bytes is stored.

    The header is a whole block where that aligns the payload at no cost in slot size, else the bare fields.
    """
    header = BLOCK if payload % BLOCK == 0 else _FIELDS
    length = header + payload
    return _Shape(header, length, -(-length // BLOCK) * BLOCK)

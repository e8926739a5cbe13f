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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from hicache_ext import envelope
from hicache_ext.errors import StoreSetupError
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.diagnosis import Finding
from hicache_ext.storage.file import vectored
from hicache_ext.storage.file.directory import BLOCK, path_number
from hicache_ext.storage.file.parallel import CallGate, Workers
from hicache_ext.storage.file.slab.directory import (
    INDEX_BYTES_AT_LEAST,
    INDEX_BYTES_PER_SLOT,
    SlabDirectory,
    slab_directory,
)
from hicache_ext.storage.file.slab.index import IndexChange, Place, Slab
from hicache_ext.storage.store import GetResult, PageBatch, SetResult, StoreInfo

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

DEFAULT_THREADS = 4

_SLABS_AT_CAPACITY = 16
"""A full directory has about this many slabs, unless they would be larger than _LARGEST_SLAB."""
_LARGEST_SLAB = 1 << 30
_LARGEST_RUN = 8 << 20
"""Bytes of neighbouring slots moved by one call: more gives nothing, and starves the other threads."""
_MOST_SLABS_RECLAIMED = 64
"""Slabs of other slot sizes that one write may take away."""
_DEAD_WRITERS_INTERVAL = 10.0
"""Seconds between two looks, at full capacity, for slots that killed processes were writing."""


@dataclass(frozen=True, slots=True)
class _Work:
    """One page of a batch and the slot it is read from or written to."""

    position: int
    place: Place


class SlabStore:
    """PageStore over slab directories; pages are spread over the paths by page hash, the capacity evenly."""

    def __init__(self, name: str, paths: Sequence[Path], *, capacity: int | None, threads: int | None = None) -> None:
        """``capacity`` in bytes for all paths and processes together, slabs and index. Raises StoreSetupError."""
        if capacity is None:
            raise StoreSetupError(name, "the slab layout preallocates its files and needs a capacity")
        self._name = name
        self._metrics = TierMetrics(name)
        self._capacity = capacity
        self._threads = threads or DEFAULT_THREADS
        self._resources = ExitStack()
        try:
            self._parts = [
                _SlabPart(self._resources.enter_context(slab_directory(path, name)), capacity // len(paths), self)
                for path in paths
            ]
        except BaseException:
            self._resources.close()
            raise
        self._workers = Workers(f"hicache-{name}", self._threads)
        self._cleaners: list[threading.Thread] = []
        self._calls = CallGate(name)

    @property
    def name(self) -> str:
        return self._name

    @property
    def metrics(self) -> TierMetrics:
        return self._metrics

    @property
    def threads(self) -> int:
        return self._threads

    @property
    def workers(self) -> Workers:
        return self._workers

    def describe(self) -> StoreInfo:
        return StoreInfo(
            name=self._name,
            type="file",
            shared=False,
            details={
                "layout": "slab",
                "paths": [str(part.directory.path) for part in self._parts],
                "capacity": self._capacity,
                "threads": self._threads,
            },
        )

    def diagnose(self) -> Sequence[Finding]:
        from hicache_ext.storage.file.diagnosis import diagnose

        return diagnose(self)

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        for part in self._parts:
            try:
                part.directory.save_identity(digest, document)
            except OSError as error:
                logger.warning("tier %s: identity %s not recorded: %s", self._name, digest.hex(), error)

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = [GetResult.MISS] * len(batch)
        with self._calls:
            for part, positions in self._by_part(batch.keys):
                part.get(batch, positions, results)
        self._metrics.add_many("get", Counter(result.value for result in results))
        self._metrics.add(
            "bytes", "get", sum(batch.payload_bytes(i) for i, r in enumerate(results) if r is GetResult.HIT)
        )
        return results

    def set(self, batch: PageBatch) -> list[SetResult]:
        results = [SetResult.REJECTED] * len(batch)
        with self._calls:
            for part, positions in self._by_part(batch.keys):
                part.set(batch, positions, results)
        self._metrics.add_many("set", Counter(result.value for result in results))
        self._metrics.add(
            "bytes", "set", sum(batch.payload_bytes(i) for i, r in enumerate(results) if r is SetResult.STORED)
        )
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        present = [False] * len(keys)
        with self._calls:
            for part, positions in self._by_part(keys):
                for position, known in zip(positions, part.contains([keys[i] for i in positions]), strict=True):
                    present[position] = known
        return present

    def count_leading(self, keys: Sequence[bytes]) -> int:
        if len(self._parts) == 1:
            with self._calls:
                return self._parts[0].count_leading(keys)
        present = self.contains(keys)
        return present.index(False) if False in present else len(present)

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            return sum(part.remove([keys[i] for i in positions]) for part, positions in self._by_part(keys))

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Puts the pages out of reach at once; their slots are freed in the background."""
        cleared: set[bytes] = set()
        with self._calls:
            for part in self._parts:
                cleared.update(part.clear(digests))
            if cleared:
                cleaner = threading.Thread(
                    target=self._free_cleared, args=(sorted(cleared),), name=f"hicache-{self._name}-clear", daemon=True
                )
                self._cleaners = [thread for thread in self._cleaners if thread.is_alive()] + [cleaner]
                cleaner.start()
        return len(cleared)

    def _free_cleared(self, digests: Sequence[bytes]) -> None:
        for part in self._parts:
            part.free_cleared(digests)

    def close(self) -> None:
        if not self._calls.shut():
            return
        self._workers.close()
        for cleaner in self._cleaners:
            cleaner.join()
        self._resources.close()

    def _by_part(self, keys: Sequence[bytes]) -> Iterable[tuple[_SlabPart, list[int]]]:
        if len(self._parts) == 1:
            return [(self._parts[0], list(range(len(keys))))]
        positions: list[list[int]] = [[] for _ in self._parts]
        for position, key in enumerate(keys):
            positions[path_number(key, len(self._parts))].append(position)
        return [(part, chosen) for part, chosen in zip(self._parts, positions, strict=True) if chosen]


class _SlabPart:
    """One directory of a SlabStore and its share of the capacity."""

    def __init__(self, directory: SlabDirectory, capacity: int, store: SlabStore) -> None:
        self.directory = directory
        self._index = directory.index
        self._capacity = capacity
        self._store = store
        self._metrics = store.metrics
        self._slabs = {slab.number: slab for slab in self._index.slabs()}
        # A slab of another slot size that holds colder pages than those evicted here.
        self._colder_slab: Slab | None = None
        self._evicted_since_reclaim = 0
        self._looked_for_dead_writers = 0.0
        self._index_size_seen = 0
        self._shrink()

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch, positions: list[int], results: list[GetResult]) -> None:
        """Read the pages at ``positions``; a page whose slot was reused meanwhile is looked up once more."""
        stale = False
        for _ in range(2):
            found = self._find([batch.keys[i] for i in positions])
            work = [_Work(i, page.place) for i, page in zip(positions, found, strict=True) if page is not None]
            stale = stale or any(page is not None and page.stale for page in found)
            moved = self._read(batch, work, results)
            if not moved:
                break
            positions = moved
        hits = [batch.keys[i] for i in range(len(batch)) if results[i] is GetResult.HIT]
        if stale and hits:
            self._change(lambda change: change.touch(hits))

    def _read(self, batch: PageBatch, work: list[_Work], results: list[GetResult]) -> list[int]:
        """Read and check; the positions whose slot turned out to hold something else."""
        # An object of another length than asked for is not this page; it is not even read.
        doubtful = [(item, "length") for item in work if item.place.length != _shape(batch.sizes[item.position])[1]]
        for item, _ in doubtful:
            results[item.position] = GetResult.CORRUPT
        runs = self._runs(batch, [item for item in work if item.place.length == _shape(batch.sizes[item.position])[1]])
        for answers in self._store.workers.run(len(runs), lambda n: self._read_run(batch, runs[n])):
            for item, result, reason in answers:
                results[item.position] = result
                if reason is not None:
                    doubtful.append((item, reason))
        moved = [item.position for item, reason in doubtful if not self._heal(batch.keys[item.position], item, reason)]
        for position in moved:
            results[position] = GetResult.MISS
        return moved

    def _read_run(self, batch: PageBatch, run: list[_Work]) -> list[tuple[_Work, GetResult, str | None]]:
        """One preadv for a run of neighbouring slots; per page its result, and why it is not the page."""
        lengths = [_shape(batch.sizes[item.position])[0] for item in run]
        headers = [memoryview(bytearray(length)) for length in lengths]
        buffers: list[memoryview] = []
        for item, header in zip(run, headers, strict=True):
            buffers += [header, *batch.buffers[item.position]]
        slab = self._slab(run[0].place.slab)
        expected = sum(buffer.nbytes for buffer in buffers)
        try:
            read = (
                expected
                if slab is None
                else vectored.read_into(self.directory.descriptor(slab), buffers, run[0].place.slot * slab.slot_size)
            )
        except FileNotFoundError:
            slab = None
        except OSError as error:
            self._count_error(error)
            return [(item, GetResult.ERROR, None) for item in run]
        if slab is None or read != expected:
            # The slab was dropped meanwhile.
            return [(item, GetResult.MISS, "truncated") for item in run]
        answers: list[tuple[_Work, GetResult, str | None]] = []
        for item, header in zip(run, headers, strict=True):
            reason = envelope.reason_to_refuse(header, batch.keys[item.position], batch.buffers[item.position])
            answers.append((item, GetResult.HIT if reason is None else GetResult.CORRUPT, reason))
        return answers

    def _heal(self, key: bytes, item: _Work, reason: str) -> bool:
        """Remove a page whose slot does not hold it; False when the index says by now that it is elsewhere or gone."""
        where = (item.place.slab, item.place.slot)
        removed = self._change(lambda change: change.remove(key, where))
        if removed:
            self._metrics.add("corrupt", reason)
            logger.warning("tier %s: page %s was bad (%s) and is removed", self._store.name, key.hex(), reason)
        return bool(removed)

    # -- presence --------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        try:
            return self._index.contains(keys)
        except lmdb.Error as error:
            self._count_index_error(error)
            return [False] * len(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        try:
            return self._index.count_leading(keys)
        except lmdb.Error as error:
            self._count_index_error(error)
            return 0

    def _find(self, keys: Sequence[bytes]) -> list[Any]:
        try:
            return self._index.find(keys)
        except lmdb.Error as error:
            self._count_index_error(error)
            return [None] * len(keys)

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, batch: PageBatch, positions: list[int], results: list[SetResult]) -> None:
        missing: list[int] = []
        for position, known in zip(positions, self.contains([batch.keys[i] for i in positions]), strict=True):
            if known:
                results[position] = SetResult.EXISTS
            else:
                missing.append(position)
        for portion in self._portions(batch, missing):
            self._set_portion(batch, portion, results)
        if missing and self._index.size() > self._index_size_seen:
            self._index_size_seen = self._index.size()
            self._shrink()

    def _portions(self, batch: PageBatch, positions: list[int]) -> list[list[int]]:
        """Cut so that no portion can evict its own pages or leave none to the others."""
        portions: list[list[int]] = []
        filled = 0
        for position in positions:
            need = _shape(batch.sizes[position])[2]
            if not portions or filled + need > self._capacity // 4:
                portions.append([])
                filled = 0
            portions[-1].append(position)
            filled += need
        return portions

    def _set_portion(self, batch: PageBatch, positions: list[int], results: list[SetResult]) -> None:
        taken: list[_Work] = []
        rest = positions
        for _ in range(_MOST_SLABS_RECLAIMED):
            taken += self._change(lambda change: self._take_slots(change, batch, rest)) or []  # noqa: B023
            done = {item.position for item in taken}
            rest = [position for position in positions if position not in done]
            if not self._reclaim_slab(needed=bool(rest)) or not rest:
                break
        self._metrics.add("rejected", "capacity", len(positions) - len(taken))
        written: dict[int, SetResult] = {}
        try:
            runs = self._runs(batch, taken)
            for run, result in zip(
                runs, self._store.workers.run(len(runs), lambda n: self._write_run(batch, runs[n])), strict=True
            ):
                written.update({item.position: result for item in run})
        finally:
            if taken:
                published = self._change(lambda change: self._publish(change, batch, taken, written))
                if published is None:
                    written = dict.fromkeys(written, SetResult.ERROR)
        for position, result in written.items():
            results[position] = result

    def _take_slots(self, change: IndexChange, batch: PageBatch, positions: list[int]) -> list[_Work]:
        """Slots for as many pages as there is room for: free ones, those of a new slab, those of evicted pages."""
        taken: list[_Work] = []
        by_size: dict[int, list[int]] = {}
        for position in positions:
            by_size.setdefault(_shape(batch.sizes[position])[2], []).append(position)
        for slot_size, wanted in by_size.items():
            keys = [batch.keys[position] for position in wanted]
            places = change.take_free_slots(slot_size, keys)
            while len(places) < len(keys) and self._add_slab(change, slot_size):
                places += change.take_free_slots(slot_size, keys[len(places) :])
            if len(places) < len(keys) and self._time_to_look_for_dead_writers() and change.release_dead_writers():
                places += change.take_free_slots(slot_size, keys[len(places) :])
            if len(places) < len(keys):
                places += change.take_evicted_slots(slot_size, keys[len(places) :])
            for position, (slab, slot) in zip(wanted, places, strict=False):
                taken.append(_Work(position, Place(slab, slot, _shape(batch.sizes[position])[1])))
            if change.evicted or len(places) < len(keys):
                self._colder_slab = change.colder_slab(slot_size)
        self._metrics.add("evicted", "capacity", change.evicted)
        self._evicted_since_reclaim += change.evicted
        return taken

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
        slab = change.add_slab(slot_size, slots)
        try:
            self.directory.create_slab_file(slab)
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
        return self._drop_slab(slab)

    def _drop_slab(self, slab: Slab) -> bool:
        dropped = self._change(lambda change: change.drop_slab(slab))
        if dropped:
            self._slabs.pop(slab.number, None)
            try:
                self.directory.delete_slab_file(slab)
            except OSError as error:
                self._count_error(error)
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
            with self._index.changing() as change:
                slab = change.colder_slab(slot_size=0) or slabs[0]
            if not self._drop_slab(slab):
                return

    def _publish(
        self, change: IndexChange, batch: PageBatch, taken: list[_Work], written: dict[int, SetResult]
    ) -> bool:
        # In the order of the batch, which is that of the chain.
        for item in sorted(taken, key=lambda item: item.position):
            key = batch.keys[item.position]
            before = batch.keys[item.position - 1] if item.position else None
            slot_size = _shape(batch.sizes[item.position])[2]
            if written.get(item.position) is not SetResult.STORED:
                change.give_back(slot_size, item.place.slab, item.place.slot)
            elif not change.publish(key, slot_size, item.place, item.position, before):
                written[item.position] = SetResult.EXISTS
        return True

    def _write_run(self, batch: PageBatch, run: list[_Work]) -> SetResult:
        """One pwritev for a run of neighbouring slots."""
        buffers: list[memoryview] = []
        for item in run:
            segments = batch.buffers[item.position]
            header_length = _shape(batch.sizes[item.position])[0]
            header = envelope.encode_header(batch.keys[item.position], segments, header_length=header_length)
            buffers += [memoryview(header), *segments]
        try:
            slab = self._slab(run[0].place.slab)
            if slab is None:
                return SetResult.ERROR
            offset = run[0].place.slot * slab.slot_size
            if vectored.write_from(self.directory.descriptor(slab), buffers, offset) != sum(b.nbytes for b in buffers):
                return SetResult.ERROR
        except OSError as error:
            self._count_error(error)
            return SetResult.ERROR
        return SetResult.STORED

    # -- removal ---------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes]) -> int:
        return self._change(lambda change: sum(change.remove(key) for key in keys)) or 0

    def clear(self, digests: Sequence[bytes] | None) -> list[bytes]:
        """Put the pages of the identities out of reach; those that had any."""

        def clear(change: IndexChange) -> list[bytes]:
            return [digest for digest in (change.identities() if digests is None else digests) if change.clear(digest)]

        cleared: list[bytes] = self._change(clear) or []
        for digest in cleared:
            try:
                self.directory.note_cleared(digest)
            except OSError as error:
                self._count_error(error)
        return cleared

    def free_cleared(self, digests: Sequence[bytes]) -> None:
        try:
            for digest in digests:
                self._index.free_cleared(digest)
        except lmdb.Error as error:
            self._count_index_error(error)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _runs(self, batch: PageBatch, work: list[_Work]) -> list[list[_Work]]:
        """Neighbouring slots put together, as long as every thread has something to do."""
        if not work:
            return []
        longest = max(1, -(-len(work) // (2 * self._store.threads)))
        runs: list[list[_Work]] = []
        for item in sorted(work, key=lambda item: (item.place.slab, item.place.slot)):
            if runs and len(runs[-1]) < longest and self._follows(batch, runs[-1], item):
                runs[-1].append(item)
            else:
                runs.append([item])
        return runs

    @staticmethod
    def _follows(batch: PageBatch, run: list[_Work], item: _Work) -> bool:
        """Whether ``item`` lies right behind the run, so that one call can move both. Only full slots have no gap."""
        last = run[-1]
        _, length, slot_size = _shape(batch.sizes[last.position])
        return (
            (item.place.slab, item.place.slot) == (last.place.slab, last.place.slot + 1)
            and slot_size == length == _shape(batch.sizes[item.position])[2]
            and (len(run) + 1) * slot_size <= _LARGEST_RUN
        )

    def _slab(self, number: int) -> Slab | None:
        slab = self._slabs.get(number)
        if slab is None:
            self._slabs = {slab.number: slab for slab in self._index.slabs()}
            slab = self._slabs.get(number)
        return slab

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

    def _count_index_error(self, error: Exception) -> None:
        self._metrics.add("error", type(error).__name__)
        logger.error("tier %s: index of %s: %s", self._store.name, self.directory.path, error)


@functools.lru_cache(maxsize=1024)
def _shape(payload: int) -> tuple[int, int, int]:
    """(header length, object length, slot size) in bytes of a page with ``payload`` bytes.

    The header is a whole block where that aligns the payload at no cost in slot size, else the bare fields.
    """
    header = BLOCK if payload % BLOCK == 0 else envelope.FIELDS_LENGTH
    length = header + payload
    return header, length, -(-length // BLOCK) * BLOCK

"""SlabStore: the file tier for local file systems.

Writing: one transaction takes slots (free ones, or those of evicted pages), the pages are written into them, a second
transaction publishes them: a page is found only once it is whole. Reading: one look-up for the batch, then the slots
are read straight into host memory, neighbours in one preadv. A slot may be given to another page between look-up and
read; its seal then is another page's, the index is asked again, and the page is a miss.

Threads: any. The memory of a batch is touched only until the call returns.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, identity_of
from hicache_ext.storage.tiers.file.path_store import Fullness, PathStore
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.slab.allocator import SlotAllocator
from hicache_ext.storage.tiers.file.slab.change import IndexChange
from hicache_ext.storage.tiers.file.slab.directory import slab_directory
from hicache_ext.storage.tiers.file.slab.page_moves import Moving, PageMoves
from hicache_ext.storage.tiers.file.slab.quiet_index import QuietIndex
from hicache_ext.storage.tiers.file.slab.records import Slab
from hicache_ext.storage.tiers.file.slab.shapes import are_of_one_size, sizes_at, slot_size_of
from hicache_ext.storage.tiers.file.slab.slot_io import SlotIo
from hicache_ext.storage.tiers.file.slab.slot_references import NO_SLOTS, Numbers, SlotReference, SlotReferences
from hicache_ext.storage.tiers.file.slab.touches import Touches

logger = logging.getLogger(__name__)

_LARGEST_RUN = 8 << 20
"""Bytes of neighbouring slots moved by one call: more gives nothing, and starves the other threads."""
_PORTIONS = 4
"""A write takes at most this part of the capacity at once."""
_SWEEP_BATCH = 4096
"""Pages looked at in one go for their age: a few milliseconds."""


class SlabStore(PathStore):
    """PageStore over one slab directory. It needs a capacity, which holds for slabs and index."""

    layout = "slab"

    def _open(self, path: Path, evicted_age: RecentMean) -> None:
        if self._capacity is None:
            raise StoreSetupError(self.name, "the slab layout preallocates its files and needs a capacity")
        # What goes through the page cache is mostly work of a processor: more threads only take it from each other.
        processors = len(os.sched_getaffinity(0))
        self._readers, self._writers = (
            self._plan.threads if mode == "direct" else min(self._plan.threads, processors)
            for mode in (self._plan.read, self._plan.write)
        )
        directory = self._resources.enter_context(slab_directory(path, self.name))
        self._directory = directory
        self._index = QuietIndex(self.name, directory, self.metrics, self._trouble)
        self._io = SlotIo(directory, self._plan, self.metrics)
        self._moves = PageMoves(directory, self._plan, self.metrics, self._io)
        self._touches = Touches(self.name, self._write_touches)
        self._resources.callback(self._touches.close)
        pins = PinnedPages(self.name, directory.path, self._capacity // 2, directory.index.occupied_by)
        self._allocator = SlotAllocator(
            directory,
            self._index,
            self._capacity,
            pins,
            self._touches,
            self.metrics,
            self._count_error,
            evicted_age,
        )

    def fullness(self) -> Fullness:
        """Raises lmdb.Error or OSError."""
        with self._calls:
            return self._allocator.fullness()

    def can_resize(self, capacity: int | None) -> bool:
        return capacity is not None

    def resize(self, capacity: int | None) -> None:
        """Slabs beyond the capacity are dropped at once. ``capacity`` is not None."""
        assert capacity is not None
        with self._calls:
            super().resize(capacity)
            self._allocator.resize(capacity)

    def abandon(self) -> None:
        """``close()`` after the device failed: the index is rebuilt by whoever comes back."""
        self._directory.doubt()
        self._touches.forget()
        self.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        """A page whose slot was reused meanwhile is looked up once more."""
        results = [GetResult.MISS] * len(batch.sizes)
        found, stale = self._index.locate(batch.keys, self._oldest())
        elsewhere = self._read_placed(batch, found, results)
        if elsewhere:
            found, also_stale = self._index.locate([batch.keys[position] for position in elsewhere], self._oldest())
            self._read_placed(batch, replace(found, positions=np.array(elsewhere)[found.positions]), results)
            stale = stale or also_stale
        hits: Sequence[bytes] = batch.keys
        count = results.count(GetResult.HIT)
        if count < len(results):
            hits = [key for key, result in zip(hits, results, strict=True) if result is GetResult.HIT]
        if count:
            self._touches.note(identity_of(hits), count, hits if stale else ())
        return results

    def _read_placed(self, batch: PageBatch, found: SlotReferences, results: list[GetResult]) -> list[int]:
        """Read and check; the positions whose slot turned out to hold something else."""
        doubtful: list[tuple[SlotReference, str]] = []
        known = found.known.length
        if known < 0 or not are_of_one_size(batch.sizes) or known != batch.sizes[0]:
            wrong = found.lengths != sizes_at(batch.sizes, found.positions)
            if wrong.any():
                # One of another length than asked for is not this page; it is not even read.
                doubtful = [(page, "length") for page in found.select(wrong).pages()]
                found = found.select(~wrong)
        readers = self._readers
        with self._moves.to_read(batch, found, self._allocator.slab, readers) as moving:
            self._workers.run(moving.threads, moving.move, readers)
        if moving.all_done:
            _fill(results, found.positions, GetResult.HIT)
        else:
            _fill(results, moving.done().positions, GetResult.HIT)
            _fill(results, self._count_failed(moving), GetResult.ERROR)
            runs = self._runs(moving.left().pages(), readers)
            for of_run in self._workers.run(len(runs), lambda n: self._read_run(batch, runs[n], results), readers):
                doubtful += of_run
        elsewhere = []
        for page, reason in doubtful:
            if self._heal(batch, page, reason, results):
                results[page.position] = GetResult.CORRUPT
            elif results[page.position] is not GetResult.HIT:
                results[page.position] = GetResult.MISS
                elsewhere.append(page.position)
        return sorted(elsewhere)

    def _read_run(
        self, batch: PageBatch, run: list[SlotReference], results: list[GetResult]
    ) -> list[tuple[SlotReference, str]]:
        """One preadv for a run of neighbouring slots; those that do not hold their page, each with the reason."""
        slab = self._allocator.slab(run[0].slab)
        if slab is None:
            return [(page, "truncated") for page in run]
        buffers = batch.buffers
        try:
            moved = self._io.read(slab, run[0].slot, [buffers[page.position] for page in run])
        except FileNotFoundError:
            # The slab was dropped meanwhile.
            return [(page, "truncated") for page in run]
        except OSError as error:
            self._count_error(error)
            for page in run:
                results[page.position] = GetResult.ERROR
            return []
        if moved != sum([page.length for page in run]):
            # The same, while it was being read.
            return [(page, "truncated") for page in run]
        doubtful: list[tuple[SlotReference, str]] = []
        for page in run:
            reason = self._reason_to_refuse(slab, page, batch.keys[page.position], buffers[page.position])
            if reason is None:
                results[page.position] = GetResult.HIT
            else:
                doubtful.append((page, reason))
        return doubtful

    def _reason_to_refuse(
        self, slab: Slab, page: SlotReference, key: bytes, segments: Sequence[memoryview]
    ) -> str | None:
        """Why what was just read from a slot is not this page; None when it is."""
        if envelope.page_seal(key, page.length, segments) == self._io.seal(slab, page.slot):
            return None
        try:
            header = self._io.header(slab, page.slot)
        except OSError:
            header = b""
        # The header says what is wrong; where it holds, it is the seal.
        return envelope.reason_to_refuse(header, key, segments) or "seal"

    def _heal(self, batch: PageBatch, page: SlotReference, reason: str, results: list[GetResult]) -> bool:
        """Remove a page whose slot does not hold it. False when the index says by now that it is elsewhere, gone, or of
        another length, or when it can be read now: since it was looked up it was evicted and written again, into the
        same slot."""
        key = batch.keys[page.position]

        def remove(change: IndexChange) -> bool:
            # Nobody publishes meanwhile: what the index says is in a slot stays there until this has ended.
            if not change.is_at(key, page):
                return False
            if reason != "length" and not self._read_run(batch, [page], results):
                return False
            return change.remove(key)

        removed = self._index.change(remove)
        if removed:
            self.metrics.add("corrupt", reason)
            logger.warning("tier %s: page %s was bad (%s) and is removed", self.name, key.hex(), reason)
        return bool(removed)

    def _write_touches(self) -> bool:
        """Write into the index which pages were read; False when there was nothing."""
        taken, uses = self._touches.take(), self._touches.take_uses()

        def write(change: IndexChange) -> None:
            for keys in taken:
                change.touch(keys)
            change.add_uses(uses)

        if taken or uses:
            self._index.change(write)
        return bool(taken or uses)

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._index.contains(keys, self._oldest())

    def _lead(self, keys: Sequence[bytes]) -> int:
        return self._index.count_leading(keys, self._oldest())

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, batch: PageBatch) -> list[SetResult]:
        results = [SetResult.REJECTED] * len(batch)
        found, stale = self._index.locate(batch.keys, self._oldest())
        known = found.positions.tolist()
        for position in known:
            results[position] = SetResult.EXISTS
        if stale:
            # Computed and written once more is used, too.
            self._touches.note(identity_of(batch.keys), 0, [batch.keys[position] for position in known])
        missing = sorted(set(range(len(results))).difference(known)) if known else list(range(len(results)))
        # No portion can evict its own pages or leave none to the others.
        for portion in self._portions(missing, batch.sizes, slot_size_of, _PORTIONS):
            self._set_portion(batch, portion, results)
        if missing:
            self._allocator.make_up_for_index()
        return results

    def _set_portion(self, batch: PageBatch, positions: list[int], results: list[SetResult]) -> None:
        sizes = batch.sizes
        wanted: dict[int, Numbers] = {}
        if are_of_one_size(sizes):
            wanted[slot_size_of(sizes[0])] = np.array(positions)
        else:
            of_size: dict[int, list[int]] = {}
            for position in positions:
                of_size.setdefault(slot_size_of(sizes[position]), []).append(position)
            wanted = {slot_size: np.array(pages) for slot_size, pages in of_size.items()}
        portion = self._directory.index.next_portion()
        places = self._allocator.take(wanted, portion)
        counts = {slot_size: of_size.shape[1] for slot_size, of_size in places.items()}
        self.metrics.add("rejected", "capacity", len(positions) - sum(counts.values()))
        if not any(counts.values()):
            return
        taken = SlotReferences.joined(
            [
                SlotReferences(places[slot_size][0], places[slot_size][1], sizes_at(sizes, at), at)
                for slot_size, count in counts.items()
                for at in [wanted[slot_size][:count]]
            ]
        ).by_position()
        written = NO_SLOTS
        published: list[bool] | None = None
        try:
            with self._moves.to_write(batch, taken, self._allocator.slab, self._writers) as moving:

                def work(number: int) -> None:
                    if number:
                        moving.move()
                    else:
                        self._allocator.evict_ahead(counts)

                self._workers.run(1 + moving.threads, work, self._writers)
            written = taken if moving.all_done else self._finish_writing(batch, moving, results)
        finally:
            published = self._index.change(
                lambda change: change.publish(portion, batch.keys, taken, written, self._oldest())
            )
        if published is None:
            _fill(results, written.positions, SetResult.ERROR)
        elif all(published):
            _fill(results, written.positions, SetResult.STORED)
        else:
            for position, stored in zip(written.positions.tolist(), published, strict=True):
                results[position] = SetResult.STORED if stored else SetResult.EXISTS
        self._allocator.reclaim_slab(needed=False)

    def _finish_writing(self, batch: PageBatch, moving: Moving, results: list[SetResult]) -> SlotReferences:
        """What compiled code did not write; all pages that are written, by position."""
        written = [moving.done()]
        _fill(results, self._count_failed(moving), SetResult.ERROR)
        runs = self._runs(moving.left().pages(), self._writers)
        for run, result in zip(
            runs, self._workers.run(len(runs), lambda n: self._write_run(batch, runs[n])), strict=True
        ):
            if result is SetResult.STORED:
                written.append(SlotReferences.of(run))
            else:
                for page in run:
                    results[page.position] = result
        return SlotReferences.joined(written).by_position()

    def _write_run(self, batch: PageBatch, run: list[SlotReference]) -> SetResult:
        """One pwritev for a run of neighbouring slots."""
        keys, buffers, now = batch.keys, batch.buffers, int(time.time() * 1000)
        pages = [buffers[page.position] for page in run]
        if [sum([segment.nbytes for segment in segments]) for segments in pages] != [page.length for page in run]:
            # A batch that is wrong about its sizes: what is longer than its slot would be in the next one, too.
            return SetResult.ERROR
        headers = [
            envelope.encode_page(keys[page.position], segments, page.length, now)
            for page, segments in zip(run, pages, strict=True)
        ]
        try:
            slab = self._allocator.slab(run[0].slab)
            if slab is None or not self._io.write(slab, run[0].slot, headers, pages):
                return SetResult.ERROR
        except OSError as error:
            self._count_error(error)
            return SetResult.ERROR
        return SetResult.STORED

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        return self._index.change(lambda change: sum(change.remove(key) for key in keys)) or 0

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Puts the pages out of reach at once, for everybody; their slots are freed in the background."""

        def clear(change: IndexChange) -> list[bytes]:
            return [digest for digest in (change.identities() if digests is None else digests) if change.clear(digest)]

        cleared: list[bytes] = self._index.change(clear) or []
        for digest in cleared:
            try:
                self._directory.note_cleared(digest)
            except OSError as error:
                self._count_error(error)
        if cleared:
            self._clearing.clear(cleared, lambda _: self._finish_clearing(cleared))
        return len(cleared)

    def _finish_clearing(self, cleared: Sequence[bytes]) -> None:
        for digest in cleared:
            try:
                self._directory.sync_cleared(digest)
            except OSError as error:
                self._count_error(error)
        self._index.free_cleared(cleared)

    def remove_expired(self, loop: BackgroundLoop) -> int:
        """Frees their slots. Raises lmdb.Error."""
        removed = 0
        oldest = self._oldest()
        begin: int | None = 0
        while begin is not None and not loop.stopping:
            expired, begin = self._directory.index.expired(oldest, begin, _SWEEP_BATCH)
            if len(expired):
                with self._directory.index.changing() as change:
                    removed += change.remove_expired(expired, oldest)
            # Others want the interpreter, too.
            loop.rest(0.001)
        self.metrics.add("evicted", "ttl", removed)
        return removed

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _oldest(self) -> int:
        """Pages written before this (wall-clock seconds) are expired; 0 without a ttl."""
        return 0 if self._ttl is None else max(0, int(time.time() - self._ttl))

    def _runs(self, pages: list[SlotReference], threads: int) -> list[list[SlotReference]]:
        """Neighbouring slots put together, as long as every thread has something to do."""
        if not pages:
            return []
        longest = max(1, -(-len(pages) // (2 * threads)))
        runs: list[list[SlotReference]] = []
        run: list[SlotReference] = []
        # The place right behind the run. Only full slots have no gap between them.
        following = (-1, -1)
        left = 0
        for page in sorted(pages):
            slab, slot, length, _ = page
            takes = slot_size_of(length)
            if (slab, slot) == following and len(run) < longest and takes == length <= left:
                run.append(page)
                left -= takes
            else:
                run = [page]
                runs.append(run)
                left = _LARGEST_RUN - takes
            following = (slab, slot + 1) if takes == length else (-1, -1)
        return runs

    def _count_failed(self, moving: Moving) -> Sequence[int]:
        """The positions of the pages that the disk failed, once what it said is counted."""
        failed = moving.failed()
        for code in failed.values():
            self._count_error(OSError(code, os.strerror(code)))
        return list(failed)


def _fill(results: list[Any], positions: Sequence[int] | npt.NDArray[np.int64], result: Any) -> None:
    """The same result at many positions."""
    if len(positions) == len(results):
        results[:] = [result] * len(results)
    else:
        for position in positions:
            results[position] = result

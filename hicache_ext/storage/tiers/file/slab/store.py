"""SlabStore: the file tier for local file systems.

Writing: one change of the index takes slots (free ones, or those of evicted pages), pages are written into them, and
a second change publishes them, so a page is found only once it is whole. Reading: one lookup for the batch, then the
slots are read straight into host memory, neighbours in one preadv. A slot may be given to another page between lookup
and read; its seal then does not match, the index is queried again, and the page is a miss.

If another process holds the index and is stuck, a write waits one second, once, and is then rejected.

Threads: any. The memory of a batch is accessed only until the call returns.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import ClearLaterError, IndexBusyError, StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, grouped, identities_of
from hicache_ext.storage.tiers.file.path_store import Fullness, PathStore, clear_each
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.allocator import SlotAllocator
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.index import milliseconds
from hicache_ext.storage.tiers.file.slab.index_words import BAD_HEADERS, NO_PAGE, Words, hashes_of
from hicache_ext.storage.tiers.file.slab.page_moves import Moved, SlotIo
from hicache_ext.storage.tiers.file.slab.shapes import (
    KEY,
    Numbers,
    Slab,
    SlabFile,
    SlotReference,
    SlotReferences,
    are_of_one_size,
    read_headers,
    sizes_at,
    slot_size_of,
)

_PORTION = 1 << 13
"""Slots examined and headers read per step, so that no other thread of the process waits for long."""
_FIRST_OF_PAGE_HASH = IDENTITY_LENGTH // 8
_NEVER = np.int64(-1) << 63
"""Stands for an unknown HASH of a slot. A page that really has this HASH has its header read each time."""


logger = logging.getLogger(__name__)

_PUBLISHED = {1: SetResult.STORED, 0: SetResult.EXISTS, -1: SetResult.ERROR}
_NOTES_AWAITED = 1.0
"""Seconds that clear() waits for its notes to be written (not synced): a disk may hang."""
_TICKS = 8
_HEADERS_AT_ONCE = 1 << 12
_PORTIONS = 4
"""A write takes at most the capacity divided by this in one portion."""


class SlabStore(PathStore):
    """PageStore over one slab directory. It needs a capacity."""

    layout = "slab"

    @property
    def no_space_since(self) -> int:
        return int(self._index.memory.header[index_words.NO_SPACE_SINCE])

    @no_space_since.setter
    def no_space_since(self, since: int) -> None:
        self._index.memory.header[index_words.NO_SPACE_SINCE] = since

    def _open(self, path: Path, evicted_age: RecentMean) -> None:
        if self._capacity is None:
            raise StoreSetupError(self.name, "the slab layout preallocates its files and needs a capacity")
        # I/O through the page cache is mostly CPU work: more threads than processors only compete with each other.
        processors = len(os.sched_getaffinity(0))
        self._readers, self._writers = (
            self._plan.threads if mode == "direct" else min(self._plan.threads, processors)
            for mode in (self._plan.read, self._plan.write)
        )
        self._directory = directory = SlabDirectory(path, self.name, self._capacity)
        self._resources.callback(directory.close)
        self._index = directory.index
        if self._ttl is not None:
            self._index.memory.header[index_words.TWICE_TTL] = int(2000 * self._ttl)
        self._io = SlotIo(directory, self._plan, self.metrics, self._workers)
        self._seen: dict[int, tuple[Words, Words]] = {}
        """Slab number -> per slot, HASH of the page whose header was read, and its block hash."""
        pins = self.pins = PinnedPages(
            self.name,
            directory.path,
            self._capacity // 2,
            directory.index.occupied_by,
            lambda: directory.index.inserts,
        )
        self._allocator = SlotAllocator(
            directory, self._capacity, pins, self.metrics, self._count_error, self._note_space, evicted_age
        )
        self._tenant_numbers = {tenants.DEFAULT: 0}
        self._keep_capacity()
        directory.rebuild.tell_of_damage(self._look_over)

    def _keep_capacity(self) -> None:
        """Drop slabs beyond the capacity, which may have been lowered."""
        self._allocator.shrink()

    def fullness(self) -> Fullness:
        with self._calls:
            fullness, taken = self._allocator.fullness(self._oldest(), self.no_space_since)
            if tenants.in_force() is None:
                return fullness
            none, pages = dict.fromkeys(self._tenant_numbers, 0), self._by_name(self._index.tenant_pages)
            return replace(fullness, tenant_pages={**none, **pages}, tenant_bytes={**none, **self._by_name(taken)})

    def _block_hashes(self, digest: bytes) -> Words:
        """Return the block hashes of an identity's pages, reading each page's header once. One thread at a time."""
        slabs, oldest = self._index.view().slabs, self._oldest()
        self._seen = {number: seen for number, seen in self._seen.items() if number in slabs}
        found = [np.empty(0, np.int64)]
        identity = int(self._index.number_of(digest)[0])
        for slab in slabs.values():
            portions = range(0, slab.slots, _PORTION)
            found += [self._blocks(slab, at, min(at + _PORTION, slab.slots), identity, oldest) for at in portions]
        return np.concatenate(found)

    def _blocks(self, slab: Slab, begin: int, end: int, identity: int, oldest: int) -> Words:
        numbers = slab.first_row + np.arange(begin, end)
        rows = self._index.memory.rows[numbers[0] : numbers[-1] + 1]
        # Copy the hashes before the states: a slot's state says PAGE only once everything else is written.
        hashes, states = rows[:, index_words.HASH].copy(), rows[:, index_words.STATE].copy()
        pages = (states & index_words.STATES == index_words.PAGE) & (states >> index_words.NUMBER_SHIFT == identity)
        if not pages.any():
            return np.empty(0, np.int64)
        pages &= self._index.are_found(numbers, oldest)
        seen = self._seen.get(slab.number)
        if seen is None or len(seen[0]) != slab.slots:
            # The table may use this number for another slab.
            seen = self._seen[slab.number] = np.full(slab.slots, _NEVER), np.zeros(slab.slots, np.int64)
        new = np.flatnonzero(pages & (seen[0][begin:end] != hashes))
        if len(new):
            self._read_headers(slab, begin + new, hashes[new], *seen)
        blocks: Words = seen[1][begin:end][pages & (seen[0][begin:end] == hashes)]
        return blocks

    def _read_headers(self, slab: Slab, slots: Words, hashes: Words, known: Words, blocks: Words) -> None:
        """Read the headers of these sorted slots; ``hashes``: of the pages that the index has there."""
        first, last = int(slots[0]), int(slots[-1])
        try:
            with self._directory.opened(slab, SlabFile.HEADERS) as fd:
                headers = read_headers(fd, first, last - first + 1)
        except FileNotFoundError:
            # The slab was dropped meanwhile.
            return
        keys = np.ascontiguousarray(headers[slots - first][:, KEY])
        right = hashes_of(keys) == hashes
        known[slots[right]] = hashes[right]
        blocks[slots[right]] = keys[right, _FIRST_OF_PAGE_HASH].byteswap()

    def _demote(self, hashes: Sequence[bytes]) -> int:
        return self._index.demote(hashes)

    def wait_until_rebuilt(self, timeout: float) -> bool:
        """Wait until the index is complete; return False if it is not in time."""
        return self._directory.rebuild.wait(timeout)

    def can_resize(self, capacity: int | None) -> bool:
        return capacity is not None

    def resize(self, capacity: int | None) -> None:
        """Resize as ``SlotAllocator.resize`` does. ``capacity`` is not None."""
        assert capacity is not None
        with self._calls:
            super().resize(capacity)
            self._allocator.resize(capacity)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        """Read a batch. A page whose slot was reused meanwhile is looked up once more."""
        results = [GetResult.MISS] * len(batch.sizes)
        found = self._index.locate(batch.keys, self._oldest())
        elsewhere = self._read_placed(batch, found, results)
        if elsewhere:
            again = self._index.locate([batch.keys[position] for position in elsewhere], self._oldest())
            again = replace(again, positions=np.array(elsewhere)[again.positions], facts=0)
            self._read_placed(batch, again, results)
            found = SlotReferences.joined([found, again]).by_position()
        count = results.count(GetResult.HIT)
        if count:
            if count < len(found):
                found = found.select([results[position] is GetResult.HIT for position in found.positions.tolist()])
            self._index.note_hits(found, batch.keys, count)
            if tenants.in_force() is not None:
                self.metrics.add_many("tenant_hits", self._by_name(self._index.tenants_of(found.rows)))
        return results

    def _look_at(self, batch: PageBatch) -> list[GetResult]:
        results = [GetResult.MISS] * len(batch.sizes)
        self._read_placed(batch, self._index.locate(batch.keys, self._oldest()), results)
        return results

    def _read_placed(self, batch: PageBatch, found: SlotReferences, results: list[GetResult]) -> list[int]:
        """Read and check pages; return the positions whose slot turned out to hold something else."""
        doubtful: list[tuple[SlotReference, str]] = []
        one_length = found.facts & index_words.ONE_LENGTH and are_of_one_size(batch.sizes)
        if not one_length or found.lengths.item(0) != batch.sizes[0]:
            wrong = found.lengths != sizes_at(batch.sizes, found.positions)
            if wrong.any():
                # A page of another length than requested is a different page, and is not even read.
                doubtful = [(page, "length") for page in found.select(wrong).pages()]
                found = found.select(~wrong)
        readers = self._readers
        moved = self._io.move(batch, found, self._index.slab, readers, into_memory=True)
        _fill(results, moved.done.positions, GetResult.HIT)
        if len(moved.done) < len(found):
            _fill(results, self._count_failed(moved), GetResult.ERROR)
            left = moved.left.pages()
            read = self._workers.run(len(left), lambda n: self._read_page(batch, left[n]), readers)
            for page, result in zip(left, read, strict=True):
                if isinstance(result, GetResult):
                    results[page.position] = result
                else:
                    doubtful.append((page, result))
        elsewhere = []
        for page, reason in doubtful:
            if self._heal(batch, page, reason, results):
                results[page.position] = GetResult.CORRUPT
            elif results[page.position] is not GetResult.HIT:
                results[page.position] = GetResult.MISS
                elsewhere.append(page.position)
        return sorted(elsewhere)

    def _read_page(self, batch: PageBatch, page: SlotReference) -> GetResult | str:
        """Read one page; return HIT or ERROR, or the reason why the slot does not hold it."""
        key, segments, slab = batch.keys[page.position], batch.buffers[page.position], self._index.slab(page.slab)
        try:
            moved = -1 if slab is None else self._io.read(slab, page.slot, segments)
        except FileNotFoundError:
            # The slab was dropped meanwhile.
            moved = -1
        except OSError as error:
            self._count_error(error)
            return GetResult.ERROR
        if slab is None or moved != page.length:
            # The slab was dropped while it was being read.
            return "truncated"
        return self._reason_to_refuse(slab, page, key, segments) or GetResult.HIT

    def _reason_to_refuse(
        self, slab: Slab, page: SlotReference, key: bytes, segments: Sequence[memoryview]
    ) -> str | None:
        """Return why what was just read from a slot is not this page; None if it is."""
        if envelope.page_seal(key, page.length, segments) == self._io.seal(page.row):
            return None
        try:
            header = self._io.header(slab, page.slot)
        except OSError:
            header = b""
        # The header tells what is wrong; if the header is right, the seal is wrong.
        return envelope.reason_to_refuse(header, key, segments) or "seal"

    def _heal(self, batch: PageBatch, page: SlotReference, reason: str, results: list[GetResult]) -> bool:
        """Remove a page whose slot does not hold it. Return False if the index now says that it is elsewhere, gone, or
        of another length, or if it can be read now: since the lookup it was evicted and written again into the same
        slot."""
        key = batch.keys[page.position]
        # Read this before the lookup: a page that comes to this row from here on has another CREATED.
        created = self._index.memory.rows[page.row, index_words.CREATED].item()
        (now,) = self._index.locate([key]).pages() or (None,)
        if now is None or now._replace(position=page.position) != page:
            return False
        if reason != "length" and isinstance(again := self._read_page(batch, page), GetResult):
            results[page.position] = again
            return False
        if not self._forget([key], only=(page.row, created)):
            return False
        self.metrics.add("corrupt", reason)
        words = "tier %s: page %s was bad (%s) and is removed"
        self._log.log(logging.WARNING, "bad", words, self.name, key.hex(), reason)
        self._look_over(page.slab)
        return True

    def _damage_found(self) -> int:
        return super()._damage_found() + int(self._index.memory.header[BAD_HEADERS])

    def _pages_in(self, place: int) -> Iterator[tuple[list[bytes], list[int]]]:
        slab = self._index.slab(place)
        if slab is None:
            return
        for begin in range(0, slab.slots, _HEADERS_AT_ONCE):
            with self._directory.opened(slab, SlabFile.HEADERS) as descriptor:
                headers = read_headers(descriptor, begin, min(_HEADERS_AT_ONCE, slab.slots - begin))
            keys = [key.tobytes() for key in headers[:, KEY]]
            # Headers may belong to pages that are gone; the index says which are there.
            found = self._index.locate(keys, self._oldest())
            found = found.select((found.slabs == place) & (found.slots == found.positions + begin))
            yield [keys[position] for position in found.positions.tolist()], found.lengths.tolist()

    def _forget(
        self, keys: Sequence[bytes], only: tuple[int, int] | None = None, seals: Sequence[bytes] | None = None
    ) -> int:
        """Remove pages, including their headers so that a rebuild does not find them, and return their number. With
        ``only``, remove only the page in that row that was written then; with ``seals``, one for each key, only the
        pages that have them."""
        ticket = self._index.next_ticket()
        try:
            seized = self._index.seize(keys, ticket, seals, only)
        except IndexBusyError:
            return 0
        try:
            for page in seized.pages():
                slab = self._index.slab(page.slab)
                if slab is not None:
                    self._io.erase_header(slab, page.slot)
        except FileNotFoundError:
            # The slab was dropped meanwhile.
            pass
        except OSError as error:
            self._count_error(error)
        finally:
            self._allocator.change(partial(self._index.give_back, seized.rows, ticket))
        return len(seized.positions)

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._index.contains(keys, self._oldest())

    def _lead(self, keys: Sequence[bytes]) -> int:
        return self._index.count_leading(keys, self._oldest())

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_absent(self, batch: PageBatch) -> list[SetResult]:
        results = [SetResult.REJECTED] * len(batch)
        found = self._index.locate(batch.keys, self._oldest())
        known = found.positions.tolist()
        for position in known:
            results[position] = SetResult.EXISTS
        if known:
            # A page that is computed and written again counts as used, too.
            self._index.note_hits(found, batch.keys, 0)
        missing = sorted(set(range(len(results))).difference(known)) if known else list(range(len(results)))
        if not missing:
            return results
        try:
            if min(self._index.register(identities_of(batch.keys)).values()) < 0:
                logger.error("tier %s: no room for more identities; clear some, or restart all servers", self.name)
                self.metrics.add("rejected", "capacity", len(missing))
                return results
            tenancy = None
            for tenancy, positions in self._by_tenant(batch.keys, missing):
                # Portions keep a write from evicting its own pages or taking all slots.
                for portion in self._portions(positions, batch.sizes, slot_size_of, self._capacity, _PORTIONS):
                    if not self._set_portion(batch, portion, results, tenancy):
                        break
            self._allocator.look_after([slot_size_of(size) for size in set(batch.sizes)], self._oldest(), tenancy)
        except IndexBusyError:
            self.metrics.add("rejected", "held", sum(result is SetResult.REJECTED for result in results))
        except OSError as error:
            self._count_error(error)
            for position in missing:
                if results[position] is SetResult.REJECTED:
                    results[position] = SetResult.ERROR
        return results

    def _by_tenant(self, keys: Sequence[bytes], positions: list[int]) -> list[tuple[Words | None, list[int]]]:
        """Group positions by tenant, each with the tenancy for which slots are taken; (None, all) without tenants.
        Raises IndexBusyError."""
        if (known := tenants.in_force()) is None:
            return [(None, positions)]
        limits, numbers = known.limits, self._tenant_numbers
        if new := [name for name in limits if name not in numbers]:
            numbers = self._tenant_numbers = {**numbers, **self._index.number_tenants(new)}
            if lacking := [name for name in new if not numbers[name]]:
                words = "tier %s: tenants %s are taken for %s: the directory has numbers for %d, until all restart"
                logger.warning(words, self.name, ", ".join(lacking), tenants.DEFAULT, tenants.MOST_TENANTS)
        shares = {numbers[name]: limit.share for name, limit in reversed(limits.items())}
        of = grouped([numbers.get(known.owner(keys[at][IDENTITY_LENGTH:]), 0) for at in positions])
        return [(self._index.tenancy(shares, number), [positions[at] for at in some]) for number, some in of.items()]

    def _by_name(self, counts: Words) -> dict[str, int]:
        """Return counts by tenant name from counts by tenant number; tenants not configured here are "other"."""
        names = {number: name for name, number in reversed(self._tenant_numbers.items())}
        found: Counter[str] = Counter()
        for number in np.flatnonzero(counts).tolist():
            found[names.get(number, "other")] += int(counts[number])
        return found

    def _set_portion(
        self, batch: PageBatch, positions: Sequence[int], results: list[SetResult], tenancy: Words | None
    ) -> bool:
        """Write pages. Return False if not all got slots and the page before them is there: later pages would follow a
        gap in the chain. Raises IndexBusyError, OSError."""
        sizes = batch.sizes
        wanted: dict[int, Numbers] = {}
        if are_of_one_size(sizes):
            wanted[slot_size_of(sizes[0])] = np.array(positions)
        else:
            of_size = grouped([slot_size_of(sizes[position]) for position in positions])
            wanted = {slot_size: np.array(positions)[some] for slot_size, some in of_size.items()}
        ticket = self._index.next_ticket()
        before = batch.keys[positions[0] - 1] if tenancy is None and positions[0] > 0 else None
        places = self._allocator.take(wanted, ticket, self._oldest(), tenancy, before)
        tenant = 0
        if tenancy is not None:
            tenant, evicted = int(tenancy[index_words.WRITER]), tenancy[index_words.EVICTED :]
            self.metrics.add_many("tenant_evicted", self._by_name(evicted))
            evicted[:] = 0
        lacking = len(positions) - sum(map(len, places.values()))
        self.metrics.add("rejected", "capacity", lacking)
        goes_on = not lacking or self._index.bound_behind(before, self._oldest()) == NO_PAGE
        parts = []
        for slot_size, rows in places.items():
            at = wanted[slot_size][: len(rows)]
            parts.append(SlotReferences(*self._index.places_of(rows), sizes_at(sizes, at), at, rows))
        taken = SlotReferences.joined(parts).by_position()
        if not len(taken):
            return goes_on
        published: list[int] | None = None
        try:
            moved = self._io.move(batch, taken, self._index.slab, self._writers, into_memory=False)
            written = taken if moved.done is taken else self._finish_writing(batch, moved, results)
            published = self._index.publish(ticket, batch.keys, taken, written, self._oldest(), milliseconds(), tenant)
        finally:
            if published is None:
                self._allocator.change(partial(self._index.give_back, taken.rows, ticket))
        if published.count(1) == len(published):
            _fill(results, written.positions, SetResult.STORED)
        else:
            for position, outcome in zip(written.positions.tolist(), published, strict=True):
                results[position] = _PUBLISHED[outcome]
        return goes_on

    def _finish_writing(self, batch: PageBatch, moved: Moved, results: list[SetResult]) -> SlotReferences:
        """Write what native code did not, and return all pages written, by position."""
        _fill(results, self._count_failed(moved), SetResult.ERROR)
        left, pages = moved.left, moved.left.pages()
        written = self._workers.run(len(pages), lambda n: self._write_page(batch, pages[n]), self._writers)
        are_written = np.array(written, bool)
        _fill(results, left.positions[~are_written], SetResult.ERROR)
        return SlotReferences.joined([moved.done, left.select(are_written)]).by_position()

    def _write_page(self, batch: PageBatch, page: SlotReference) -> bool:
        """Write one page in Python; return whether it was written."""
        segments, slab = batch.buffers[page.position], self._index.slab(page.slab)
        if slab is None or sum([segment.nbytes for segment in segments]) != page.length:
            # The batch is wrong about its sizes: a page longer than its slot would overwrite the next slot.
            return False
        header = envelope.encode_header(batch.keys[page.position], segments, created_ms=milliseconds())
        try:
            return self._io.write(slab, page.slot, header, segments)
        except OSError as error:
            self._count_error(error)
            return False

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        return self._forget(keys)

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        return self._forget(list(copies), seals=list(copies.values()))

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Put the pages out of reach immediately, for all processes. The notes for the next start are written in the
        background, and awaited for a moment; then slabs without pages are deleted. A slab with other pages keeps its
        blocks: a hole in it could not be written once others have filled the disk."""
        moment = milliseconds()
        cleared, had_pages = self._index.clear(digests)
        if cleared:
            self._clearing.clear(cleared, lambda _: self._note_cleared(cleared, moment), _NOTES_AWAITED)
        self._clearing.clear([], lambda _: self._free_disk(moment))
        for _ in range(_TICKS):
            if milliseconds() > moment:
                break
            # Pages written after this call must be newer than the clear, also for a rebuild.
            time.sleep(0.0005)
        return had_pages

    def _free_disk(self, moment: int) -> None:
        """Drop slabs without pages. In other slabs, erase the headers of cleared pages that a rebuild would take for
        newer than the clear at ``moment``. Raises ClearLaterError."""
        ticket = self._index.next_ticket()
        try:
            self._allocator.drop_empty_slabs()
            for slab, rows in self._index.seize_dated_after(moment, ticket):
                try:
                    for row in rows.tolist():
                        with suppress(FileNotFoundError):  # the slab was dropped meanwhile
                            self._io.erase_header(slab, row - slab.first_row)
                finally:
                    self._allocator.change(partial(self._index.give_back, rows, ticket))
        except IndexBusyError as error:
            raise ClearLaterError("another process holds the index") from error
        except OSError as error:
            self._count_error(error)
            raise ClearLaterError(str(error)) from error

    def _note_cleared(self, cleared: Sequence[bytes], moment: int) -> None:
        """Write and sync the notes of a clear. Raises ClearLaterError if the disk has not taken all of them."""
        notes = [partial(self._directory.note_cleared, digest, moment) for digest in cleared]
        syncs = [partial(self._directory.sync_cleared, digest) for digest in cleared]
        try:
            clear_each(lambda work: work(), notes + syncs, self._count_error)
        except OSError as error:
            self._count_error(error)
            raise ClearLaterError(str(error)) from error

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _count_failed(self, moved: Moved) -> Sequence[int]:
        """Count the errors of the disk, and return the positions of the pages that failed."""
        for code in moved.failed.values():
            self._count_error(OSError(code, os.strerror(code)))
        return list(moved.failed)


def _fill(results: list[Any], positions: Sequence[int] | npt.NDArray[np.int64], result: Any) -> None:
    """Set the same result at many positions."""
    if len(positions) == len(results):
        results[:] = [result] * len(results)
    else:
        for position in positions:
            results[position] = result

"""Moves the pages of one call between their slots and host memory in the native core (moves.c).

In Python this would be most of what a page costs, all of it under the GIL, which SGLang's scheduler wants. Pages that
the core does not report as done (not the page requested, a flag that the file system does not know), and pages of
several sizes, are moved one by one by ``SlotIo``, which finds out what is wrong with them.

Pages move in the mode that was planned for the path. O_DIRECT wants memory, lengths and offsets aligned to blocks of
the disk. Slots are; the pages of a host pool mostly are not, unless SGLang allocates it page-aligned (``allocator:
shm``). A page that is not aligned goes through the page cache without staying there, and is counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hicache_ext import native
from hicache_ext.page import envelope
from hicache_ext.page.memory import Addresses, addresses_of
from hicache_ext.runtime import vectored
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.contract.store import PageBatch, key_words
from hicache_ext.storage.tiers.file.devices import RWF_DONTCACHE, IoPlan
from hicache_ext.storage.tiers.file.pages.tree import BLOCK
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.index_words import ROW_WORDS, SEAL
from hicache_ext.storage.tiers.file.slab.shapes import (
    HEADER,
    NO_SLOTS,
    Slab,
    SlabFile,
    SlotReferences,
    are_of_one_size,
    slot_size_of,
)

AT_ONCE = 512 << 10
"""Bytes moved by one system call through the page cache: they must stay in the processor's cache until checked."""
AT_ONCE_DIRECT = 1 << 20
"""Bytes per system call with O_DIRECT: large enough for the disk; other threads use it while these are checked."""
_LEFT = 1
"""Result of a page that was not moved."""
_START = np.frombuffer(bytearray(envelope.PAGE_START), np.int64)

_SEAL = slice(SEAL, SEAL + envelope.SEAL_LENGTH // 8)
ALIGNMENT = 512
"""Smallest block of a disk. If the block is larger, the kernel reports EINVAL, and ``SlotIo`` moves the page."""


Page = Sequence[memoryview]
"""The segments of a payload."""


_MOST_SEGMENTS = IOV_MAX - 1


MOVE_PAGES = native.Struct(
    "move_pages",
    "slabs slots positions opened addresses segments keys start rows results taken into_memory page_count opened_count "
    "segment_count payload slot_size created flags at_once row_count row_words seal_word",
)


class Moved(NamedTuple):
    """Outcome of the pages of one call. ``done`` and ``left`` carry positions in the batch."""

    done: SlotReferences
    """Pages moved; those read were verified."""
    failed: Mapping[int, int]
    """Position of each page that the disk failed -> errno."""
    left: SlotReferences
    """Pages left to be moved one by one."""


class SlotIo:
    """The I/O of one directory. Thread-safe. Raises OSError as the disk does."""

    def __init__(self, directory: SlabDirectory, plan: IoPlan, metrics: TierMetrics, workers: ThreadPool) -> None:
        self._core = native.needed()
        self._directory = directory
        self._plan = plan
        self._metrics = metrics
        self._workers = workers
        self._flags = RWF_DONTCACHE if _knows_flags(directory.home / "lock") else 0
        """Flags for pages that must not stay in the page cache, including those that cannot use O_DIRECT."""

    # These move one page that the core has left, always through the page cache.

    def read(self, slab: Slab, slot: int, page: Page) -> int:
        """Read the payload of a slot; return the number of bytes read."""
        if self._plan.read == "direct":
            self._metrics.add("io", "unaligned", 1)
        with self._directory.opened(slab) as descriptor:
            return vectored.read_into(descriptor, page, slot * slab.slot_size)

    def write(self, slab: Slab, slot: int, header: bytes, page: Page) -> bool:
        """Write a payload into its slot, then its header and seal. Return False if not all of it was written."""
        if self._plan.write == "direct":
            self._metrics.add("io", "unaligned", 1)
        with self._directory.opened(slab) as descriptor:
            moved = vectored.write_from(descriptor, page, slot * slab.slot_size)
        if moved != sum([segment.nbytes for segment in page]):
            return False
        with self._directory.opened(slab, SlabFile.HEADERS) as descriptor:
            if vectored.write_from(descriptor, [memoryview(header)], slot * HEADER) != len(header):
                return False
        # The slot is this writer's: nobody reads its seal yet.
        seal = np.frombuffer(envelope.seal_of(header), np.int64)
        self._directory.index.memory.rows[slab.first_row + slot, _SEAL] = seal
        return True

    def seal(self, row: int) -> bytes:
        """Return the seal that the index has for the page in a row."""
        seal: bytes = self._directory.index.memory.rows[row, _SEAL].tobytes()
        return seal

    def erase_header(self, slab: Slab, slot: int) -> None:
        """Erase the header of a slot."""
        with self._directory.opened(slab, SlabFile.HEADERS) as descriptor:
            vectored.write_from(descriptor, [memoryview(bytes(HEADER))], slot * HEADER)

    def header(self, slab: Slab, slot: int) -> bytes:
        """Return the header of the page in a slot, or as much of it as there is."""
        with self._directory.opened(slab, SlabFile.HEADERS) as descriptor:
            header = bytearray(HEADER)
            return bytes(header[: vectored.read_into(descriptor, [memoryview(header)], slot * HEADER)])

    def move(
        self,
        batch: PageBatch,
        pages: SlotReferences,
        slab_of: Callable[[int], Slab | None],
        threads: int,
        *,
        into_memory: bool,
    ) -> Moved:
        """Move pages of a batch from their slots ``into_memory``, or into their slots, on ``threads`` threads."""
        core, count = self._core, len(pages)
        if not count or not are_of_one_size(batch.sizes):
            return Moved(NO_SLOTS, {}, pages)
        payload, memory = batch.sizes[0], addresses_of(batch.buffers, writable=into_memory)
        if memory is None or len(memory.segment_sizes) > _MOST_SEGMENTS or memory.page_bytes != payload:
            return Moved(NO_SLOTS, {}, pages)
        mode = self._plan.read if into_memory else self._plan.write
        direct = mode == "direct" and payload % BLOCK == 0 and _aligned(memory)
        found, others = pages.by_place(), NO_SLOTS
        numbers = found.slab_numbers()
        slabs = list(filter(None, map(slab_of, numbers)))
        file = SlabFile.DIRECT if direct else SlabFile.SLOTS
        opened, files = self._directory.open_all(slabs, file, headers=not into_memory)
        if len(opened) < len(numbers):
            # Pages of a slab that cannot be opened are left.
            can_be_read = np.isin(found.slabs, opened[:, 0])
            found, others = found.select(can_be_read), found.select(~can_be_read)
            count = len(found.positions)
        if mode == "direct" and not direct:
            self._metrics.add("io", "unaligned", count)
        rows, results = self._directory.index.memory.rows, np.empty(count, np.int64)
        results.fill(_LEFT)
        arrays = (
            found.slabs,
            found.slots,
            found.positions,
            opened,
            memory.pages,
            memory.segment_sizes,
            key_words(batch.keys),
            _START,
            rows,
            results,
            np.zeros(1, np.int64),
        )
        at_once, slot_size = AT_ONCE_DIRECT if direct else AT_ONCE, slot_size_of(payload)
        call = MOVE_PAGES.packed(
            *arrays,
            into_memory,
            count,
            len(opened),
            len(memory.segment_sizes),
            payload,
            slot_size,
            0 if into_memory else int(time.time() * 1000),
            # The flags are for the page cache.
            0 if direct or mode == "buffered" else self._flags,
            at_once,
            len(rows),
            ROW_WORDS,
            SEAL,
        )
        threads = min(threads, -(-count // max(1, at_once // slot_size)))
        self._workers.run(threads, lambda _: core.call(MOVE_PAGES, call, (batch, arrays, files)), threads)
        if not len(others) and not np.count_nonzero(results):
            return Moved(pages, {}, NO_SLOTS)
        failed = results < 0
        codes = dict(zip(found.positions[failed].tolist(), (-results[failed]).tolist(), strict=True))
        left = SlotReferences.joined([found.select(results > 0), others])
        return Moved(found.select(results == 0), codes, left)


def _knows_flags(path: Path) -> bool:
    """Return whether the file system and the kernel support reads that leave nothing in the page cache."""
    try:
        with path.open("rb") as file:
            os.preadv(file.fileno(), [bytearray(1)], 0, RWF_DONTCACHE)
    except OSError:
        return False
    return True


def _aligned(memory: Addresses) -> bool:
    return not ((memory.pages % ALIGNMENT).any() or (memory.segment_sizes % ALIGNMENT).any())

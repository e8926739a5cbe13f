"""Runs of pages moved between slots and host memory, in the mode that was planned for the path.

O_DIRECT wants memory, lengths and offsets aligned to blocks of the disk. Slots are; the pages of a host
pool mostly are not, unless SGLang allocates it page-aligned (``allocator: shm``). A run with a page that is not aligned
goes through the page cache without staying there, and is counted.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from hicache_ext.page import envelope
from hicache_ext.page.memory import address_of
from hicache_ext.runtime import vectored
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.file.device_probe import RWF_DONTCACHE, Mode
from hicache_ext.storage.tiers.file.io_plan import IoPlan
from hicache_ext.storage.tiers.file.pages.scanning import BLOCK
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.shapes import HEADER, Slab, SlabFile
from hicache_ext.storage.tiers.file.slab.slot_code import SEAL

_SEAL = slice(SEAL, SEAL + envelope.SEAL_LENGTH // 8)
_UNKNOWN_FLAG = (errno.EOPNOTSUPP, errno.EINVAL)
ALIGNMENT = 512
"""The smallest block of a disk. Where it is larger the kernel says EINVAL, and the run goes the other way."""


Page = Sequence[memoryview]
"""The segments of a payload."""


class SlotIo:
    """The I/O of one directory. Thread-safe. Raises OSError as the disk does."""

    def __init__(self, directory: SlabDirectory, plan: IoPlan, metrics: TierMetrics) -> None:
        self._directory = directory
        self._direct_reads = plan.read == "direct"
        self._direct_writes = plan.write == "direct"
        self._metrics = metrics
        self.read_flags = _flags(plan.read)
        self.write_flags = _flags(plan.write)

    def read(self, slab: Slab, slot: int, run: Sequence[Page]) -> int:
        """The payloads of neighbouring slots with one preadv: the bytes read. All but the last fill their slots."""
        return self._move(vectored.read_into, slab, slot, run, reading=True)

    def write(self, slab: Slab, slot: int, headers: Sequence[bytes], run: Sequence[Page]) -> bool:
        """Payloads into neighbouring slots with one pwritev, as ``read``, then their headers and seals. False when not
        all of it was written."""
        moved = self._move(vectored.write_from, slab, slot, run, reading=False)
        if moved != sum([segment.nbytes for page in run for segment in page]):
            return False
        together = b"".join(headers)
        with self._directory.opened(slab, SlabFile.HEADERS) as descriptor:
            if vectored.write_from(descriptor, [memoryview(together)], slot * HEADER) != len(together):
                return False
        row = slab.first_row + slot
        sealed = b"".join([envelope.seal_of(header) for header in headers])
        # The slots are this writer's: nobody reads their seals yet.
        rows = self._directory.index.memory.rows
        rows[row : row + len(run), _SEAL] = np.frombuffer(sealed, np.int64).reshape(len(run), -1)
        return True

    def seal(self, row: int) -> bytes:
        """That of the page in a slot, as the index has it."""
        seal: bytes = self._directory.index.memory.rows[row, _SEAL].tobytes()
        return seal

    def erase_header(self, slab: Slab, slot: int) -> None:
        """Have no header say what was in a slot."""
        with self._directory.opened(slab, SlabFile.HEADERS) as descriptor:
            vectored.write_from(descriptor, [memoryview(bytes(HEADER))], slot * HEADER)

    def header(self, slab: Slab, slot: int) -> bytes:
        """That of the page in a slot, or as much of it as there is."""
        with self._directory.opened(slab, SlabFile.HEADERS) as descriptor:
            header = bytearray(HEADER)
            return bytes(header[: vectored.read_into(descriptor, [memoryview(header)], slot * HEADER)])

    def _move(self, move: Callable[..., int], slab: Slab, slot: int, run: Sequence[Page], *, reading: bool) -> int:
        """The bytes that ``move`` moved."""
        buffers, offset = list(itertools.chain(*run)), slot * slab.slot_size
        if self._direct_reads if reading else self._direct_writes:
            if all(map(_is_aligned, run)):
                try:
                    with self._directory.opened(slab, SlabFile.DIRECT) as descriptor:
                        return move(descriptor, buffers, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            self._metrics.add("io", "unaligned", len(run))
        flags = self.read_flags if reading else self.write_flags
        with self._directory.opened(slab) as descriptor:
            try:
                return move(descriptor, buffers, offset, flags)
            except OSError as error:
                if not (flags and error.errno in _UNKNOWN_FLAG):
                    raise
                # A file system, or a kernel, that does not know the flag.
                if reading:
                    self.read_flags = 0
                else:
                    self.write_flags = 0
                return move(descriptor, buffers, offset)


def _flags(mode: Mode) -> int:
    # Also for the runs that cannot be direct.
    return 0 if mode == "buffered" else RWF_DONTCACHE


def _is_aligned(page: Page) -> bool:
    if sum([segment.nbytes for segment in page]) % BLOCK:
        return False
    return not any(
        segment.nbytes % ALIGNMENT or (segment.nbytes and address_of(segment) % ALIGNMENT) for segment in page
    )

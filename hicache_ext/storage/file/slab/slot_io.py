"""Runs of page objects moved between slots and host memory, in the mode that was planned for the path.

O_DIRECT wants memory, lengths and offsets aligned to blocks of the disk. Slots and headers are; the pages of a host
pool mostly are not, unless SGLang allocates it page-aligned (``allocator: shm``). A run with a page that is not aligned
goes through the page cache without staying there, and is counted.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

from hicache_ext import envelope
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.file import vectored
from hicache_ext.storage.file.device_probe import RWF_DONTCACHE, Mode
from hicache_ext.storage.file.directory import BLOCK
from hicache_ext.storage.file.io_plan import IoPlan
from hicache_ext.storage.file.slab.directory import SlabDirectory
from hicache_ext.storage.file.slab.records import Slab
from hicache_ext.storage.page_memory import address_of

_FIELDS = envelope.FIELDS_LENGTH
_PADDING = memoryview(bytes(BLOCK - _FIELDS))
_NOWHERE = memoryview(bytearray(BLOCK - _FIELDS))
ALIGNMENT = 512
"""The smallest block of a disk. Where it is larger the kernel says EINVAL, and the run goes the other way."""


class Stored(NamedTuple):
    """One page object of a run: the length of its header, and the segments of its payload."""

    header: int
    segments: Sequence[memoryview]


class Read(NamedTuple):
    """``moved`` bytes were read; the fields of page ``n``'s header are at ``n * stride`` of ``headers``.

    ``headers`` is the thread's own and is overwritten by its next read.
    """

    moved: int
    headers: memoryview
    stride: int

    def fields(self, pages: int) -> list[bytes]:
        """Those of the first ``pages`` pages."""
        stride, headers = self.stride, self.headers
        if stride == _FIELDS:
            # Copied at once: a page costs a slice of bytes.
            together = bytes(headers[: pages * _FIELDS])
            return [together[begin : begin + _FIELDS] for begin in range(0, pages * _FIELDS, _FIELDS)]
        return [bytes(headers[begin : begin + _FIELDS]) for begin in range(0, pages * stride, stride)]


class SlotIo:
    """The I/O of one directory. Thread-safe."""

    def __init__(self, directory: SlabDirectory, plan: IoPlan, metrics: TierMetrics) -> None:
        self._directory = directory
        self._direct_reads = plan.read == "direct"
        self._direct_writes = plan.write == "direct"
        self._metrics = metrics
        self.read_flags = _flags(plan.read)
        self.write_flags = _flags(plan.write)

    def read(self, slab: Slab, offset: int, run: Sequence[Stored]) -> Read:
        """One preadv, for neighbouring slots. Raises OSError as the disk does."""
        if self._direct_reads:
            headers = _direct_headers(run)
            if headers is not None:
                try:
                    with self._directory.opened(slab, direct=True) as descriptor:
                        moved = vectored.read_into(descriptor, _with_headers(headers, run), offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                else:
                    return Read(moved, headers, BLOCK)
            self._metrics.add("io", "unaligned", len(run))
        headers = _thread_fields(len(run))
        buffers: list[memoryview] = []
        for number, (header_length, segments) in enumerate(run):
            buffers.append(headers[number * _FIELDS : (number + 1) * _FIELDS])
            if header_length > _FIELDS:
                # Nobody reads what is between the fields and the payload: all of it goes to one place, which stays
                # in the processor's cache.
                buffers.append(_NOWHERE)
            buffers.extend(segments)
        with self._directory.opened(slab) as descriptor:
            try:
                moved = vectored.read_into(descriptor, buffers, offset, self.read_flags)
            except OSError as error:
                if not (self.read_flags and error.errno in (errno.EOPNOTSUPP, errno.EINVAL)):
                    raise
                # A file system, or a kernel, that does not know the flag.
                self.read_flags = 0
                moved = vectored.read_into(descriptor, buffers, offset)
        return Read(moved, headers, _FIELDS)

    def write(self, slab: Slab, offset: int, fields: Sequence[bytes], run: Sequence[Stored]) -> int:
        """One pwritev, for neighbouring slots: the bytes written. ``fields`` are those of the headers. Raises OSError
        as the disk does."""
        if self._direct_writes:
            headers = _direct_headers(run)
            if headers is not None:
                for number, of_page in enumerate(fields):
                    headers[number * BLOCK : number * BLOCK + _FIELDS] = of_page
                    headers[number * BLOCK + _FIELDS : (number + 1) * BLOCK] = _PADDING
                try:
                    with self._directory.opened(slab, direct=True) as descriptor:
                        return vectored.write_from(descriptor, _with_headers(headers, run), offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            self._metrics.add("io", "unaligned", len(run))
        buffers: list[memoryview] = []
        for of_page, (header_length, segments) in zip(fields, run, strict=True):
            buffers.append(memoryview(of_page))
            if header_length > _FIELDS:
                buffers.append(_PADDING)
            buffers.extend(segments)
        with self._directory.opened(slab) as descriptor:
            try:
                return vectored.write_from(descriptor, buffers, offset, self.write_flags)
            except OSError as error:
                if not (self.write_flags and error.errno in (errno.EOPNOTSUPP, errno.EINVAL)):
                    raise
                self.write_flags = 0
                return vectored.write_from(descriptor, buffers, offset)


def _flags(mode: Mode) -> int:
    # Also for the runs that cannot be direct.
    return 0 if mode == "buffered" else RWF_DONTCACHE


def _direct_headers(run: Sequence[Stored]) -> memoryview | None:
    """Aligned memory of this thread for the headers of a run; None when a page of it is not aligned."""
    for header_length, segments in run:
        if header_length != BLOCK:
            return None
        for segment in segments:
            if segment.nbytes % ALIGNMENT or (segment.nbytes and address_of(segment) % ALIGNMENT):
                return None
    return _thread_blocks(len(run))


def _with_headers(headers: memoryview, run: Sequence[Stored]) -> list[memoryview]:
    buffers: list[memoryview] = []
    for number, (_, segments) in enumerate(run):
        buffers.append(headers[number * BLOCK : (number + 1) * BLOCK])
        buffers.extend(segments)
    return buffers


class _Scratch(threading.local):
    """Memory of one thread for the headers of one run."""

    def __init__(self) -> None:
        self.fields = memoryview(bytearray(_FIELDS))
        self.blocks = memoryview(b"")


_scratch = _Scratch()


def _thread_fields(pages: int) -> memoryview:
    if _scratch.fields.nbytes < pages * _FIELDS:
        _scratch.fields = memoryview(bytearray(pages * _FIELDS))
    return _scratch.fields


def blocks_of_memory(count: int) -> mmap.mmap:
    """Memory for so many aligned headers. Mapped memory begins at a page border, a bytearray anywhere. Private: a
    forked process has headers of its own."""
    return mmap.mmap(-1, count * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _thread_blocks(pages: int) -> memoryview:
    if _scratch.blocks.nbytes < pages * BLOCK:
        _scratch.blocks = memoryview(blocks_of_memory(pages))
    return _scratch.blocks

"""Runs of page objects moved between slots and host memory, in the mode that was planned for the path.

O_DIRECT wants memory, lengths and offsets aligned to blocks of the disk. Slots and headers are; the pages of a host
pool mostly are not, unless SGLang allocates it page-aligned (``allocator: shm``). A run with a page that is not aligned
goes through the page cache without staying there, and is counted.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hicache_ext import envelope
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.file import vectored
from hicache_ext.storage.file.device_probe import RWF_DONTCACHE, Mode
from hicache_ext.storage.file.directory import BLOCK
from hicache_ext.storage.file.io_plan import IoPlan
from hicache_ext.storage.file.slab.directory import SlabDirectory
from hicache_ext.storage.file.slab.records import Slab

_FIELDS = envelope.FIELDS_LENGTH
_PADDING = memoryview(bytes(BLOCK - _FIELDS))
_NOWHERE = memoryview(bytearray(BLOCK - _FIELDS))
_PORTION = 1088 << 10
"""Bytes read by one call through the page cache, where a page is no larger: eight of 128 KiB and their headers.

They are still in the processor's caches when they are checked: the checksum of 128 KiB takes 2.3 us there, 6.5 where
it has to fetch them. Smaller portions cost more waits for the GIL than that gives. Before writes it gives nothing.
"""
_ALIGNMENT = 512
"""The smallest block of a disk. Where it is larger the kernel says EINVAL, and the run goes the other way."""


class Stored(NamedTuple):
    """One page object of a run: the length of its header, that of all of it, and the segments of its payload."""

    header: int
    length: int
    segments: Sequence[memoryview]


class SlotIo:
    """The I/O of one directory. Thread-safe."""

    def __init__(self, directory: SlabDirectory, plan: IoPlan, metrics: TierMetrics) -> None:
        self._directory = directory
        self._direct_reads = plan.read == "direct"
        self._direct_writes = plan.write == "direct"
        self._metrics = metrics
        self._read_flags = _flags(plan.read)
        self._write_flags = _flags(plan.write)

    def read(self, slab: Slab, offset: int, run: Sequence[Stored]) -> Iterator[list[bytes]]:
        """Fill the segments of neighbouring slots, a portion of them at a time: the fields of the headers of each.

        What a portion filled is to be checked before the next one. Ends early where the file does. Raises OSError as
        the disk does.
        """
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
                    if moved == sum([page.length for page in run]):
                        yield [bytes(headers[begin : begin + _FIELDS]) for begin in range(0, len(run) * BLOCK, BLOCK)]
                    return
            self._metrics.add("io", "unaligned", len(run))
        with self._directory.opened(slab) as descriptor:
            for begin, end, length in _portions(run):
                headers, slices = _thread_fields(end - begin)
                buffers: list[memoryview] = []
                for (header_length, _, segments), fields in zip(run[begin:end], slices, strict=False):
                    buffers.append(fields)
                    if header_length > _FIELDS:
                        # Nobody reads what is between the fields and the payload: all of it goes to one place, which
                        # stays in the processor's cache.
                        buffers.append(_NOWHERE)
                    buffers += segments
                if self._read_buffered(descriptor, buffers, offset, length) != length:
                    return
                # Copied at once: a page costs a slice of bytes.
                together = bytes(headers[: (end - begin) * _FIELDS])
                yield [together[at : at + _FIELDS] for at in range(0, len(together), _FIELDS)]
                offset += length

    def _read_buffered(self, descriptor: int, buffers: Sequence[memoryview], offset: int, length: int) -> int:
        try:
            return vectored.read_into(descriptor, buffers, offset, self._read_flags, length)
        except OSError as error:
            if not (self._read_flags and error.errno in (errno.EOPNOTSUPP, errno.EINVAL)):
                raise
            # A file system, or a kernel, that does not know the flag.
            self._read_flags = 0
            return vectored.read_into(descriptor, buffers, offset, 0, length)

    def write(self, slab: Slab, offset: int, fields: Sequence[bytes], run: Sequence[Stored], length: int) -> int:
        """One pwritev, for neighbouring slots with ``length`` bytes together: the bytes written.

        ``fields`` are those of the headers. Raises OSError as the disk does.
        """
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
        for of_page, (header_length, _, segments) in zip(fields, run, strict=True):
            buffers.append(memoryview(of_page))
            if header_length > _FIELDS:
                buffers.append(_PADDING)
            buffers.extend(segments)
        with self._directory.opened(slab) as descriptor:
            try:
                return vectored.write_from(descriptor, buffers, offset, self._write_flags, length)
            except OSError as error:
                if not (self._write_flags and error.errno in (errno.EOPNOTSUPP, errno.EINVAL)):
                    raise
                self._write_flags = 0
                return vectored.write_from(descriptor, buffers, offset, 0, length)


def _portions(run: Sequence[Stored]) -> Iterator[tuple[int, int, int]]:
    """The run cut in portions of neighbours: where their pages begin and end, and their bytes."""
    begin = length = 0
    for end, page in enumerate(run):
        if length and length + page.length > _PORTION:
            yield begin, end, length
            begin, length = end, 0
        length += page.length
    if run:
        yield begin, len(run), length


def _flags(mode: Mode) -> int:
    # Also for the runs that cannot be direct.
    return 0 if mode == "buffered" else RWF_DONTCACHE


def _direct_headers(run: Sequence[Stored]) -> memoryview | None:
    """Aligned memory of this thread for the headers of a run; None when a page of it is not aligned."""
    for header_length, _, segments in run:
        if header_length != BLOCK:
            return None
        for segment in segments:
            if segment.nbytes % _ALIGNMENT or _address(segment) % _ALIGNMENT:
                return None
    return _thread_blocks(len(run))


def _address(segment: memoryview) -> int:
    address: int = np.frombuffer(segment, dtype=np.uint8).__array_interface__["data"][0] if segment.nbytes else 0
    return address


def _with_headers(headers: memoryview, run: Sequence[Stored]) -> list[memoryview]:
    buffers: list[memoryview] = []
    for number, (_, _, segments) in enumerate(run):
        buffers.append(headers[number * BLOCK : (number + 1) * BLOCK])
        buffers.extend(segments)
    return buffers


class _Scratch(threading.local):
    """Memory of one thread for the headers of one run."""

    def __init__(self) -> None:
        self.fields = memoryview(b"")
        self.slices: list[memoryview] = []
        self.blocks = memoryview(b"")


_scratch = _Scratch()


def _thread_fields(pages: int) -> tuple[memoryview, list[memoryview]]:
    """Memory for the fields of so many headers at least, whole and cut."""
    if len(_scratch.slices) < pages:
        _scratch.fields = fields = memoryview(bytearray(pages * _FIELDS))
        _scratch.slices = [fields[begin : begin + _FIELDS] for begin in range(0, pages * _FIELDS, _FIELDS)]
    return _scratch.fields, _scratch.slices


def _thread_blocks(pages: int) -> memoryview:
    if _scratch.blocks.nbytes < pages * BLOCK:
        # Mapped memory begins at a page border; a bytearray anywhere.
        _scratch.blocks = memoryview(mmap.mmap(-1, pages * BLOCK))
    return _scratch.blocks

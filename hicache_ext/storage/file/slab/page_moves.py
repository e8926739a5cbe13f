"""The pages of one call between their slots and host memory in compiled code (compiled_runs.py), where it is there.

Most of what a page costs in Python is spent here otherwise, and all of it under the GIL, which SGLang's scheduler
wants. What the compiled code does not call done (a page that is not what was asked for, a flag that the file system
does not know), and pages of several sizes, go the way of slot_io.py, which tells what they are.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.envelope import FIELDS_LENGTH, KEY_LENGTH, encode_page, page_start
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.file.device_probe import Mode
from hicache_ext.storage.file.directory import BLOCK
from hicache_ext.storage.file.io_plan import IoPlan
from hicache_ext.storage.file.slab.directory import SlabDirectory
from hicache_ext.storage.file.slab.placed import NONE_PLACED, Placed
from hicache_ext.storage.file.slab.records import Slab
from hicache_ext.storage.file.slab.shapes import Shape, are_of_one_size, shape_of
from hicache_ext.storage.file.slab.slot_io import ALIGNMENT, SlotIo, blocks_of_memory
from hicache_ext.storage.file.vectored import IOV_MAX
from hicache_ext.storage.page_memory import Addresses, addresses_of
from hicache_ext.storage.store import PageBatch, key_words

logger = logging.getLogger(__name__)

_AT_ONCE = 512 << 10
"""Bytes moved by one system call through the page cache: still in the processor's cache when they are checked."""
_AT_ONCE_DIRECT = 2 << 20
_LEAST_PIECE = 1 << 20
"""Bytes that a thread takes at a time, at least."""
_PIECES_PER_THREAD = 3
_HEADERS = 128
"""Headers that a thread has memory for: pages moved by one system call at most."""

_MOST_SEGMENTS = IOV_MAX - 3
_NOT_OF_THE_DISK = (errno.EINVAL, errno.EOPNOTSUPP, errno.EINTR)
"""What a system call says that asked for something the file system does not do."""
_LEFT = 1


class Moving:
    """The pages of one call on their way, in ``pieces`` that any threads may move; a context that keeps their slots
    open. What became of them is asked once all pieces are moved."""

    def __init__(
        self,
        pages: Placed,
        others: Placed,
        results: npt.NDArray[np.int64],
        pages_per_piece: int,
        move_range: Callable[[int, int], None],
        release: Callable[[], None],
    ) -> None:
        """``pages`` are in the order of their places, ``results`` of each 0 when it is moved and right, -errno, or
        else 1; ``others`` cannot be moved here."""
        self.pieces = -(-len(pages) // pages_per_piece)
        self._pages = pages
        self._others = others
        self._results = results
        self._per_piece = pages_per_piece
        self._move_range = move_range
        self._release = release

    def __enter__(self) -> Moving:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def move(self, piece: int) -> None:
        begin = piece * self._per_piece
        self._move_range(begin, min(begin + self._per_piece, len(self._pages)))

    @property
    def all_done(self) -> bool:
        return not len(self._others) and not self._results.any()

    def done(self) -> Placed:
        """The pages that are moved, and those read are what was asked for."""
        return self._pages.select(self._results == 0)

    def failed(self) -> dict[int, int]:
        """The positions of pages that the disk failed, each with its errno."""
        failed = (self._results < 0) & ~self._not_of_the_disk()
        return dict(zip(self._pages.positions[failed].tolist(), (-self._results[failed]).tolist(), strict=True))

    def left(self) -> Placed:
        """The pages left to the other way."""
        left = self._pages.select((self._results > 0) | self._not_of_the_disk())
        return Placed.joined([left, self._others])

    def _not_of_the_disk(self) -> npt.NDArray[np.bool_]:
        return np.isin(-self._results, _NOT_OF_THE_DISK)


class PageMoves:
    """The moves of one directory. Thread-safe."""

    def __init__(self, directory: SlabDirectory, plan: IoPlan, metrics: TierMetrics, io: SlotIo) -> None:
        """``io`` is where the other way begins; it learns which flags the file system knows."""
        self._directory = directory
        self._plan = plan
        self._metrics = metrics
        self._io = io
        self._code = compiled_code()

    def to_read(self, batch: PageBatch, pages: Placed, slab_of: Callable[[int], Slab | None], threads: int) -> Moving:
        """These pages of the batch, from their slots."""
        code = self._code
        if code is None:
            return _nothing_but(pages)
        of_call = _OfCall(True, self._plan.read, self._io.read_flags, code.nowhere.ctypes.data, 0)
        return self._moving(code, code.read, of_call, batch, pages, slab_of, threads)

    def to_write(self, batch: PageBatch, pages: Placed, slab_of: Callable[[int], Slab | None], threads: int) -> Moving:
        """These pages of the batch, into their slots."""
        code = self._code
        if code is None:
            return _nothing_but(pages)
        now = int(time.time() * 1000)
        of_call = _OfCall(False, self._plan.write, self._io.write_flags, code.zeros.ctypes.data, now)
        return self._moving(code, code.write, of_call, batch, pages, slab_of, threads)

    def _moving(
        self,
        code: CompiledCode,
        move: Callable[..., None],
        of_call: _OfCall,
        batch: PageBatch,
        pages: Placed,
        slab_of: Callable[[int], Slab | None],
        threads: int,
    ) -> Moving:
        if not len(pages) or not are_of_one_size(batch.sizes):
            return _nothing_but(pages)
        payload, memory = batch.sizes[0], addresses_of(batch.buffers, writable=of_call.into_memory)
        if memory is None or len(memory.segment_sizes) > _MOST_SEGMENTS or memory.segment_sizes.sum() != payload:
            return _nothing_but(pages)
        shape = shape_of(payload)
        direct = of_call.mode == "direct" and shape.header == BLOCK and _aligned(memory)
        found, others = pages.by_place(), NONE_PLACED
        numbers = set(found.slabs.tolist())
        opened, release = self._directory.open_all(filter(None, map(slab_of, numbers)), direct=direct)
        try:
            if len(opened) < len(numbers):
                # A slab that cannot be opened is left to the other way.
                can_be_read = np.isin(found.slabs, list(opened))
                found, others = found.select(can_be_read), found.select(~can_be_read)
            known = np.array(sorted(opened.items()), np.int64).reshape(-1, 2)
            descriptors = known[np.searchsorted(known[:, 0], found.slabs), 1]
            if of_call.mode == "direct" and not direct:
                self._metrics.add("io", "unaligned", len(found))
            in_order = found.are_all(len(batch))
            positions = found.positions.tolist()
            words = key_words(batch.keys).view(np.uint64)
            arrays = (
                _facts(shape, payload, of_call, direct),
                descriptors,
                found.slots * shape.slot,
                memory.pages if in_order else memory.pages[positions],
                memory.segment_sizes,
                words if in_order else words[positions],
            )
        except BaseException:
            release()
            raise
        shares = threads * (_PIECES_PER_THREAD if threads > 1 else 1)
        per_piece = max(-(-len(found) // shares), min(len(found), _LEAST_PIECE // shape.slot), 1)
        results = np.full(len(found), _LEFT, np.int64)

        def move_range(begin: int, end: int) -> None:
            # Kept by this frame: a thread that the interpreter leaves behind at its end still moves.
            scratch = code.scratch
            headers, state = scratch.blocks if direct else scratch.fields, scratch.state
            move(code.functions, *arrays, headers, scratch.vectors, state.address, results, begin, end)

        return Moving(found, others, results, per_piece, move_range, release)


def _nothing_but(others: Placed) -> Moving:
    return Moving(NONE_PLACED, others, np.empty(0, np.int64), 1, lambda begin, end: None, lambda: None)


class _OfCall(NamedTuple):
    into_memory: bool
    mode: Mode
    flags: int
    filler: int
    created_ms: int


def _facts(shape: Shape, payload: int, of_call: _OfCall, direct: bool) -> npt.NDArray[np.int64]:
    """``facts`` of compiled_runs.py."""
    start = np.frombuffer(page_start(shape.header), np.int64)
    flags, filler, created_ms = of_call.flags, of_call.filler, of_call.created_ms
    stride, at_once = FIELDS_LENGTH, _AT_ONCE
    if direct:
        # The flags are for the page cache.
        stride, at_once, flags = BLOCK, _AT_ONCE_DIRECT, 0
    return np.array([shape.header, payload, shape.slot, *start, created_ms, flags, stride, at_once, filler], np.int64)


def _aligned(memory: Addresses) -> bool:
    return not ((memory.pages % ALIGNMENT).any() or (memory.segment_sizes % ALIGNMENT).any())


class CompiledCode:
    """compiled_runs.py, and what it needs beside the pages."""

    def __init__(self) -> None:
        """Raises ImportError with what is missing."""
        from hicache_ext.storage.file.slab import compiled_runs, foreign

        self.functions = foreign.find_functions()
        self.read = compiled_runs.read_pages
        self.write = compiled_runs.write_pages
        self._at_once = compiled_runs.AT_ONCE
        self.zeros = np.zeros(BLOCK, np.uint8)
        self.nowhere = np.zeros(BLOCK, np.uint8)
        self.scratch = _Scratch(foreign.HashState)
        self._check()

    def _check(self) -> None:
        """Raises ImportError when pages are not what envelope.py makes of them, or are taken for what they are not:
        numba's cache does not notice every change, and a page is read by others."""
        key, now = os.urandom(KEY_LENGTH), int(time.time() * 1000)
        memory = bytearray(os.urandom(5000))
        content, parts = bytes(memory), [memoryview(memory)[:2000], memoryview(memory)[2000:]]
        located = addresses_of([parts], writable=True)
        assert located is not None
        shape, scratch = shape_of(len(content)), self.scratch
        expected = encode_page(key, parts, len(content), shape.header, now) + content
        facts = _facts(shape, len(content), _OfCall(False, "buffered", 0, self.zeros.ctypes.data, now), False)
        file = os.memfd_create("hicache")
        at = np.array([file], np.int64), np.zeros(1, np.int64), *located

        def succeeds(move: Callable[..., None], of_key: bytes, at_once: int) -> bool:
            facts[self._at_once], results = at_once, np.full(1, _LEFT, np.int64)
            arrays = *at, key_words([of_key]).view(np.uint64), scratch.fields, scratch.vectors
            move(self.functions, facts, *arrays, scratch.state.address, results, 0, 1)
            return not results.any()

        try:
            sound = succeeds(self.write, key, _AT_ONCE) and os.pread(file, 2 * len(expected), 0) == expected
            for at_once in (_AT_ONCE, len(content) // 2):
                memory[:] = bytes(len(content))
                sound = sound and succeeds(self.read, key, at_once) and memory == content
                sound = sound and not succeeds(self.read, key[::-1], at_once)
            os.pwrite(file, bytes([content[-1] ^ 1]), len(expected) - 1)
            if not sound or succeeds(self.read, key, _AT_ONCE):
                raise ImportError("its pages are not those of this version: remove the files of numba's cache")
        finally:
            os.close(file)


class _Scratch(threading.local):
    """Memory of one thread."""

    def __init__(self, new_state: Callable[[], Any]) -> None:
        self.state = new_state()
        self.vectors = np.zeros(2 * IOV_MAX, np.int64)
        self.fields = np.zeros(_HEADERS * FIELDS_LENGTH // 8, np.uint64)

    @functools.cached_property
    def blocks(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(blocks_of_memory(_HEADERS), np.uint64)


def compiled_code() -> CompiledCode | None:
    """None where it cannot be had."""
    with _one_compiles:
        return _compiled_code()[0]


def why_not_compiled() -> str | None:
    """Why pages move in Python; None where they do not."""
    with _one_compiles:
        return _compiled_code()[1]


_one_compiles = threading.Lock()


@functools.cache
def _compiled_code() -> tuple[CompiledCode | None, str | None]:
    try:
        return CompiledCode(), None
    except ImportError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in many ways, and pages move without it
        reason = f"{type(error).__name__}: {error}"
    logger.info(
        "the file tier moves its pages in Python, which is slower and holds the GIL (%s): "
        "pip install 'hicache-ext[compiled]'",
        reason,
    )
    return None, reason

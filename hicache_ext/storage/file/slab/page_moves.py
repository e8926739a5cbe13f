"""The pages of one call between their slots and host memory in compiled code (compiled_runs.py), where it is there.

Most of what a page costs in Python is spent here otherwise, and all of it under the GIL, which SGLang's scheduler
wants. What the compiled code does not call done (a page that is not what was asked for, a flag that the file system
does not know), and pages of several sizes, go the way of slot_io.py, which tells what they are.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.envelope import FIELDS_LENGTH, page_start
from hicache_ext.metrics import TierMetrics
from hicache_ext.storage.file.device_probe import Mode
from hicache_ext.storage.file.directory import BLOCK
from hicache_ext.storage.file.io_plan import IoPlan
from hicache_ext.storage.file.slab.directory import SlabDirectory
from hicache_ext.storage.file.slab.index import Located
from hicache_ext.storage.file.slab.records import Slab
from hicache_ext.storage.file.slab.shapes import Shape, shape_of
from hicache_ext.storage.file.slab.slot_io import ALIGNMENT, SlotIo
from hicache_ext.storage.file.vectored import IOV_MAX
from hicache_ext.storage.page_memory import Addresses, addresses_of
from hicache_ext.storage.store import PageBatch

logger = logging.getLogger(__name__)

_AT_ONCE = 512 << 10
"""Bytes moved by one system call through the page cache: still in the processor's cache when they are checked."""
_AT_ONCE_DIRECT = 1 << 20
_LEAST_PIECE = 512 << 10
"""Bytes that a thread takes at a time, at least."""
_PIECES_PER_THREAD = 4
_HEADERS = 128
"""Headers that a thread has memory for: pages moved by one system call at most."""

_MOST_SEGMENTS = IOV_MAX - 3
_NOT_OF_THE_DISK = (errno.EINVAL, errno.EOPNOTSUPP, errno.EINTR)
"""What a system call says that asked for something the file system does not do."""
_LOOK_AGAIN = 1


@dataclass(slots=True)
class Moving:
    """The pages of one call on their way. Its pieces may be moved by any threads; use it as a context, which keeps
    their slots open."""

    pages: list[Located]
    """In the order of their places."""
    results: npt.NDArray[np.int64]
    """Of each page 0 when it is moved and right, -errno, or else 1."""
    pieces: int
    _per_piece: int
    _move_range: Callable[[int, int], None]
    _opened: ExitStack

    def __enter__(self) -> Moving:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def move(self, piece: int) -> None:
        """Move one of ``pieces``."""
        begin = piece * self._per_piece
        self._move_range(begin, min(begin + self._per_piece, len(self.pages)))

    def outcome(self) -> tuple[list[Located], list[tuple[Located, int]], list[Located]]:
        """The pages that are moved, those that failed with their errno, and those that are worth another look."""
        if not self.results.any():
            return self.pages, [], []
        moved: list[Located] = []
        failed: list[tuple[Located, int]] = []
        unclear: list[Located] = []
        for page, result in zip(self.pages, self.results.tolist(), strict=True):
            if result == 0:
                moved.append(page)
            elif result > 0 or -result in _NOT_OF_THE_DISK:
                unclear.append(page)
            else:
                failed.append((page, -result))
        return moved, failed, unclear


class PageMoves:
    """The moves of one directory. Thread-safe."""

    def __init__(self, directory: SlabDirectory, plan: IoPlan, metrics: TierMetrics, io: SlotIo) -> None:
        """``io`` is where the other way begins; it learns which flags the file system knows."""
        self._directory = directory
        self._plan = plan
        self._metrics = metrics
        self._io = io
        self._code = compiled_code()

    def to_read(
        self, batch: PageBatch, pages: Sequence[Located], slab_of: Callable[[int], Slab | None], threads: int
    ) -> Moving | None:
        """These pages of the batch from their slots; None when they cannot be read here."""
        code = self._code
        if code is None:
            return None
        of_call = _OfCall(self._io.read_flags, code.nowhere.ctypes.data, 0)
        return self._begin(code, code.read, self._plan.read, of_call, batch, pages, slab_of, threads)

    def to_write(
        self, batch: PageBatch, pages: Sequence[Located], slab_of: Callable[[int], Slab | None], threads: int
    ) -> Moving | None:
        """These pages of the batch into their slots; None when they cannot be written here."""
        code = self._code
        if code is None:
            return None
        of_call = _OfCall(self._io.write_flags, code.zeros.ctypes.data, int(time.time() * 1000))
        return self._begin(code, code.write, self._plan.write, of_call, batch, pages, slab_of, threads)

    def _begin(
        self,
        code: CompiledCode,
        move: Callable[..., None],
        mode: Mode,
        of_call: _OfCall,
        batch: PageBatch,
        pages: Sequence[Located],
        slab_of: Callable[[int], Slab | None],
        threads: int,
    ) -> Moving | None:
        payload = batch.sizes[0]
        memory = addresses_of(batch.buffers) if batch.sizes.count(payload) == len(batch) else None
        if memory is None or len(memory.segment_sizes) > _MOST_SEGMENTS:
            return None
        shape = shape_of(payload)
        direct = mode == "direct" and shape.header == BLOCK and _aligned(memory)
        opened = ExitStack()
        try:
            descriptors = self._open({page.slab for page in pages}, slab_of, direct, opened)
            found = sorted([page for page in pages if page.slab in descriptors])
            if not found:
                opened.close()
                return None
            if mode == "direct" and not direct:
                self._metrics.add("io", "unaligned", len(found))
            slabs, slots, _, positions = zip(*found, strict=True)
            everything = list(positions) == list(range(len(batch)))
            keys = batch.keys if everything else [batch.keys[position] for position in positions]
            at_once = _AT_ONCE_DIRECT if direct else _AT_ONCE
            arrays = (
                _facts(shape, payload, of_call, BLOCK if direct else FIELDS_LENGTH, at_once),
                np.array([descriptors[slab] for slab in slabs], np.int64),
                np.array(slots, np.int64) * shape.slot,
                memory.pages if everything else memory.pages[list(positions)],
                memory.segment_sizes,
                np.frombuffer(b"".join(keys), np.uint64).reshape(len(found), -1),
            )
        except BaseException:
            opened.close()
            raise
        shares = threads * (_PIECES_PER_THREAD if threads > 1 else 1)
        per_piece = max(-(-len(found) // shares), min(len(found), _LEAST_PIECE // shape.slot), 1)
        results = np.full(len(found), _LOOK_AGAIN, np.int64)

        def move_range(begin: int, end: int) -> None:
            scratch = code.scratch
            headers = scratch.blocks if direct else scratch.fields
            move(code.functions, *arrays, headers, scratch.vectors, scratch.state.address, results, begin, end)

        return Moving(found, results, -(-len(found) // per_piece), per_piece, move_range, opened)

    def _open(
        self, numbers: set[int], slab_of: Callable[[int], Slab | None], direct: bool, opened: ExitStack
    ) -> dict[int, int]:
        """Descriptors of these slabs; those that cannot be opened are left to the other way."""
        descriptors: dict[int, int] = {}
        for number in numbers:
            slab = slab_of(number)
            if slab is not None:
                with suppress(OSError):
                    descriptors[number] = opened.enter_context(self._directory.opened(slab, direct=direct))
        return descriptors


class _OfCall(NamedTuple):
    flags: int
    filler: int
    created_ms: int


def _facts(shape: Shape, payload: int, of_call: _OfCall, stride: int, at_once: int) -> npt.NDArray[np.int64]:
    """``facts`` of compiled_runs.py."""
    start = np.frombuffer(page_start(shape.header), np.int64)
    flags, filler, created_ms = of_call
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
        self.zeros = np.zeros(BLOCK, np.uint8)
        self.nowhere = np.zeros(BLOCK, np.uint8)
        self.scratch = _Scratch(foreign.HashState)


class _Scratch(threading.local):
    """Memory of one thread."""

    def __init__(self, new_state: Callable[[], Any]) -> None:
        self.state = new_state()
        self.vectors = np.zeros(2 * IOV_MAX, np.int64)
        self.fields = np.zeros(_HEADERS * FIELDS_LENGTH // 8, np.uint64)

    @functools.cached_property
    def blocks(self) -> npt.NDArray[np.uint64]:
        # Mapped memory begins at a page border.
        return np.frombuffer(mmap.mmap(-1, _HEADERS * BLOCK), np.uint64)


@functools.cache
def compiled_code() -> CompiledCode | None:
    """None, which is said once, where it cannot be had."""
    try:
        return CompiledCode()
    except ImportError as error:
        logger.info(
            "the file tier moves its pages in Python, which is slower and holds the GIL (%s): pip install numba", error
        )
        return None

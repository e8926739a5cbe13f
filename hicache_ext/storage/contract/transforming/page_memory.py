"""Memory of our own for pages: for transforms, and for calls that cannot be interrupted (guards/time_limits.py).

It is kept for later calls, because new memory costs more than a cipher.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.threads import ThreadPool, run_alone
from hicache_ext.storage.contract.store import StoreInfo, portions

_MOST_LENT = 512 << 20
"""Most bytes lent to all calls in flight; a larger portion waits until nothing is lent."""
_MOST_KEPT = 128 << 20
_ALIGNMENT = 4096
"""Alignment that O_DIRECT requires, in bytes."""
_LONGEST_WAIT = 60.0


@dataclass(eq=False, slots=True)
class Lease:
    """Lent memory; return it with ``LentMemory.give_back``."""

    whole: npt.NDArray[np.uint8]
    pieces: list[memoryview]
    """One piece for each page, aligned to blocks."""
    needed: int
    """Bytes that count as lent; ``whole`` may be somewhat larger."""
    in_use: bool = False
    """A call may still touch it. A call that was left behind gives it back when it ends."""


class LentMemory:
    """Memory for the pages of calls, including calls that outlive their callers. Threads: any."""

    def __init__(self, most: int = _MOST_LENT) -> None:
        """``most``: bytes lent to all calls in flight; a call that needs more waits until nothing is lent."""
        self._most = most
        self._changed = threading.Condition()
        self._lent = 0
        self._stuck = 0
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._own = threading.local()

    @property
    def lent(self) -> int:
        """Return the number of bytes lent now."""
        return self._lent

    def take(self, lengths: Sequence[int], deadline: float) -> Lease | None:
        """Lend a piece for each page; wait while too much is lent, until ``deadline`` (time.monotonic()), then None.

        Returns None immediately if calls left behind hold so much that the others cannot give back enough.
        """
        places, end = [], 0
        for length in lengths:
            places.append(end)
            end += -(-length // _ALIGNMENT) * _ALIGNMENT
        needed = end + _ALIGNMENT
        with self._changed:
            while self._lent and self._lent + needed > self._most:
                left = deadline - time.monotonic()
                if left <= 0 or (self._stuck and self._stuck + needed > self._most):
                    return None
                self._changed.wait(left)
            fitting = [kept for kept in self._kept if needed <= kept.nbytes <= 4 * needed]
            whole = min(fitting, key=len, default=None)
            if whole is None:
                whole = np.empty(needed, np.uint8)
            self._kept = [kept for kept in self._kept if kept is not whole]
            self._lent += needed
        # numpy does not align its memory.
        first, view = -whole.ctypes.data % _ALIGNMENT, whole.data
        pieces = [view[first + at : first + at + length] for at, length in zip(places, lengths, strict=True)]
        return Lease(whole, pieces, needed)

    def leave_behind(self, lease: Lease) -> None:
        """Note that the call that holds ``lease`` goes on without its caller."""
        with self._changed:
            self._stuck += lease.needed
            self._changed.notify_all()

    def give_back(self, lease: Lease, *, stuck: bool = False) -> None:
        """Take memory back. ``stuck``: from a call that was left behind, which may end while it is being left."""
        with self._changed:
            if stuck:
                self._stuck -= lease.needed
            self._lent -= lease.needed
            self._kept.append(lease.whole)
            while sum([kept.nbytes for kept in self._kept]) > _MOST_KEPT:
                del self._kept[0]
            self._changed.notify_all()

    @contextmanager
    def lent_to_call(self, lengths: Sequence[int]) -> Iterator[list[memoryview]]:
        """Lend a piece for each page until the end of the block. Raises TimeoutError."""
        lease = self.take(lengths, call_deadline(_LONGEST_WAIT))
        if lease is None:
            raise TimeoutError("no memory for pages in time")
        try:
            yield lease.pieces
        finally:
            self.give_back(lease)

    def of_thread(self, length: int) -> memoryview:
        """Return memory of this thread, valid until its next call of this method."""
        own: npt.NDArray[np.uint8] | None = getattr(self._own, "memory", None)
        if own is None or own.nbytes < length:
            own = self._own.memory = np.empty(length, np.uint8)
        return own.data[:length]


# -- portions ----------------------------------------------------------------------------------------------------------
#
# Portions decide how many pages are transformed at a time, and by how many threads. Threads: any.


_AROUND = 64 << 10
"""Bytes of overhead around the pages of a portion, added to the payload that it should hold."""
_LEAST_NEAR_PORTION = (4 << 20) + _AROUND
NEAR_PORTION = (8 << 20) + _AROUND
"""Bytes of stored pages that a thread moves at a time to or from a local medium: they stay in the processor's cache
until they are copied. At least half of that if a call has less for each thread."""
_LARGE = 4 << 20
"""Size in bytes from which a page is a portion of its own on a local medium."""
DISK_PORTION = (16 << 20) + _AROUND
"""Portion size for a local medium that bypasses the page cache: a disk is fast when requests are large."""
FAR_PORTION = 64 << 20
"""Portion size for other media: enough to keep their connections busy."""


class Portions:
    """The portions of one store."""

    def __init__(self, info: StoreInfo) -> None:
        """``info``: describes the store below."""
        self._shared = info.shared
        past_the_cache = "direct" in str(info.details.get("io", ""))
        self._bytes = FAR_PORTION if info.shared else DISK_PORTION if past_the_cache else NEAR_PORTION
        self._threads = ThreadPool(f"hicache-{info.name}-transform")
        self._near = not info.shared and not past_the_cache
        """Whether calls of the store below are CPU-bound."""
        processors = len(os.sched_getaffinity(0))
        # Threads that wait for a disk need no processor.
        self._at_once = 4 if past_the_cache else min(4, processors)
        self._alone = self._near and self._at_once >= processors
        """Whether the threads of one call occupy all processors."""

    def of(self, positions: Sequence[int], lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the positions of each portion. ``lengths``: the stored bytes of each of these pages."""
        if not self._near:
            return portions(positions, lengths, self._bytes)
        most = min(self._bytes, max(_LEAST_NEAR_PORTION, -(-sum(lengths) // self._at_once)))
        return portions(positions, [length if length < _LARGE else most for length in lengths], most)

    def run(self, count: int, work: Callable[[int], None]) -> None:
        """Run all portions, some in parallel; re-raise the exception of one once all have ended."""
        # The context carries the deadline of this call.
        contexts = [contextvars.copy_context() for _ in range(count)]
        if self._alone and count >= self._at_once:
            # Otherwise the store below would use its own threads for each portion.
            for context in contexts:
                context.run(run_alone)
        self._threads.run(count, lambda number: contexts[number].run(work, number), self._at_once)

    def each(self, pages: int, work: Callable[[int], Any]) -> list[Any]:
        """Apply ``work`` to all pages of a portion; sequentially on local media, whose portions run in parallel."""
        return self._threads.run(pages, work, self._at_once if self._shared else 1)

    def close(self) -> None:
        self._threads.close()

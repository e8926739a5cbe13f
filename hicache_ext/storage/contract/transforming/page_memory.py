"""Memory of our own for pages: for what transforms them, and for calls that cannot be ended (guards/time_limits.py).

It is kept for the next calls: new memory costs more than a cipher.
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
"""Bytes for the pages of all calls under way; a portion that is larger waits until nothing is lent."""
_MOST_KEPT = 128 << 20
_ALIGNMENT = 4096
"""For O_DIRECT."""
_LONGEST_WAIT = 60.0


@dataclass(eq=False, slots=True)
class Lease:
    """Memory that is lent; return it with ``LentMemory.give_back``."""

    whole: npt.NDArray[np.uint8]
    pieces: list[memoryview]
    """One for each page, aligned to blocks."""
    needed: int
    """Bytes that count as lent; ``whole`` may have some more."""
    in_use: bool = False
    """A call may still touch it. One that was left behind gives it back when it ends."""


class LentMemory:
    """Memory for the pages of calls, also of such as outlive their callers. Threads: any."""

    def __init__(self, most: int = _MOST_LENT) -> None:
        """``most``: bytes lent to all calls under way; to one that needs more, when nothing else is lent."""
        self._most = most
        self._changed = threading.Condition()
        self._lent = 0
        self._stuck = 0
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._own = threading.local()

    @property
    def lent(self) -> int:
        """Bytes lent now."""
        return self._lent

    def take(self, lengths: Sequence[int], deadline: float) -> Lease | None:
        """A piece for each page; waits while much is lent, until ``deadline`` (time.monotonic()), then None.

        None immediately where calls left behind hold so much that the others cannot give back enough.
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
        # The memory of numpy begins anywhere.
        first, view = -whole.ctypes.data % _ALIGNMENT, whole.data
        pieces = [view[first + at : first + at + length] for at, length in zip(places, lengths, strict=True)]
        return Lease(whole, pieces, needed)

    def leave_behind(self, lease: Lease) -> None:
        """The call that holds this goes on without its caller."""
        with self._changed:
            self._stuck += lease.needed
            self._changed.notify_all()

    def give_back(self, lease: Lease, *, stuck: bool = False) -> None:
        """Take memory back. ``stuck``: by the call that was left behind, which may end while it is being left."""
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
        """A piece for each page, until the end of the block. Raises TimeoutError."""
        lease = self.take(lengths, call_deadline(_LONGEST_WAIT))
        if lease is None:
            raise TimeoutError("no memory for pages in time")
        try:
            yield lease.pieces
        finally:
            self.give_back(lease)

    def of_thread(self, length: int) -> memoryview:
        """Memory of this thread, until it asks again."""
        own: npt.NDArray[np.uint8] | None = getattr(self._own, "memory", None)
        if own is None or own.nbytes < length:
            own = self._own.memory = np.empty(length, np.uint8)
        return own.data[:length]


# -- portions ----------------------------------------------------------------------------------------------------------
#
# How many pages are transformed at a time, and by how many threads. Threads: any.


_AROUND = 64 << 10
"""Bytes that stand around the pages of a portion: it holds so much of pages as it says."""
_LEAST_NEAR_PORTION = (4 << 20) + _AROUND
NEAR_PORTION = (8 << 20) + _AROUND
"""Bytes of stored pages that a thread takes at a time to or from a medium of this machine: they stay in the processor's
cache until they are copied. Half of that where a call has no more for each thread."""
_LARGE = 4 << 20
"""A page of so many bytes is a portion of such a medium."""
DISK_PORTION = (16 << 20) + _AROUND
"""The same past the page cache: a disk is fast when it is asked for much at once."""
FAR_PORTION = 64 << 20
"""Of other media: as many as their connections can be busy with."""


class Portions:
    """Those of one store."""

    def __init__(self, info: StoreInfo) -> None:
        """``info``: of the store below."""
        self._shared = info.shared
        past_the_cache = "direct" in str(info.details.get("io", ""))
        self._bytes = FAR_PORTION if info.shared else DISK_PORTION if past_the_cache else NEAR_PORTION
        self._threads = ThreadPool(f"hicache-{info.name}-transform")
        self._near = not info.shared and not past_the_cache
        """Whether a call of the store below is work of a processor."""
        processors = len(os.sched_getaffinity(0))
        # What waits for a disk needs no processor.
        self._at_once = 4 if past_the_cache else min(4, processors)
        self._alone = self._near and self._at_once >= processors
        """Whether the threads of one call are all that there are processors for."""

    def of(self, positions: Sequence[int], lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        """The positions of each portion. ``lengths``: the bytes that are stored of each of these pages."""
        if not self._near:
            return portions(positions, lengths, self._bytes)
        most = min(self._bytes, max(_LEAST_NEAR_PORTION, -(-sum(lengths) // self._at_once)))
        return portions(positions, [length if length < _LARGE else most for length in lengths], most)

    def run(self, count: int, work: Callable[[int], None]) -> None:
        """All portions, some at once; what one of them raises is raised when all have ended."""
        # The context carries the limit of this call.
        contexts = [contextvars.copy_context() for _ in range(count)]
        if self._alone and count >= self._at_once:
            # The store below has threads of its own for a call: these would be for each portion.
            for context in contexts:
                context.run(run_alone)
        self._threads.run(count, lambda number: contexts[number].run(work, number), self._at_once)

    def each(self, pages: int, work: Callable[[int], Any]) -> list[Any]:
        """All pages of a portion. Of a near medium portions are many, and done at once."""
        return self._threads.run(pages, work, self._at_once if self._shared else 1)

    def close(self) -> None:
        self._threads.close()

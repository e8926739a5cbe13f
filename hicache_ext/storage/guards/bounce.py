"""Bounce memory: host memory of a guard, lent to calls that may outlive their callers.

One anonymous mapping: pages are allocated as they are used, and a store that must register memory (RDMA) does it once.
"""

from __future__ import annotations

import mmap
import threading
import time

_ALIGNMENT = 4096


class Lease:
    """One contiguous piece; return it with ``BounceMemory.give_back``."""

    __slots__ = ("length", "memory", "offset")

    def __init__(self, memory: memoryview, offset: int, length: int) -> None:
        self.memory = memory
        self.offset = offset
        self.length = length


class BounceMemory:
    """``size`` bytes, lent in pieces. Threads: any."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.memory = memoryview(mmap.mmap(-1, self.size))
        self._condition = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, self.size)]
        """(offset, length), sorted by offset; adjacent pieces are merged."""
        self._stuck = 0

    @property
    def lent(self) -> int:
        """Bytes lent now."""
        with self._condition:
            return self.size - sum(length for _, length in self._free)

    def take(self, length: int, deadline: float) -> Lease | None:
        """A piece of ``length`` bytes; waits for one until ``deadline`` (monotonic), then None.

        None at once where calls left behind hold so much that the others cannot give back enough.
        """
        wanted = max(_ALIGNMENT, -(-length // _ALIGNMENT) * _ALIGNMENT)
        with self._condition:
            while True:
                for number, (offset, free) in enumerate(self._free):
                    if free >= wanted:
                        self._free[number : number + 1] = [(offset + wanted, free - wanted)] if free > wanted else []
                        return Lease(self.memory[offset : offset + length], offset, wanted)
                left = deadline - time.monotonic()
                if left <= 0 or wanted > self.size - self._stuck:
                    return None
                self._condition.wait(left)

    def mark_stuck(self, lease: Lease) -> None:
        """The call that holds this piece was left behind: nobody waits for it any more."""
        with self._condition:
            self._stuck += lease.length
            self._condition.notify_all()

    def give_back(self, lease: Lease, *, stuck: bool = False) -> None:
        """Take a piece back. ``stuck``: whether it was marked."""
        with self._condition:
            if stuck:
                self._stuck -= lease.length
            self._free.append((lease.offset, lease.length))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for offset, length in self._free:
                if merged and sum(merged[-1]) == offset:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((offset, length))
            self._free = merged
            self._condition.notify_all()

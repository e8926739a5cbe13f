"""Bounce memory: host memory of a guard's own, lent to calls that may outlive their callers.

One anonymous mapping, touched only as far as it is used, so that a store that must register memory (RDMA) does so once.
"""

from __future__ import annotations

import mmap
import threading
import time

_ALIGNMENT = 4096


class Lease:
    """``memory`` is one contiguous piece, given back by ``BounceMemory.give_back``."""

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
        """(offset, length), by offset, no two adjacent."""
        self._stuck = 0

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        with self._condition:
            return self.size - sum(length for _, length in self._free)

    def take(self, length: int, deadline: float) -> Lease | None:
        """A piece of ``length`` bytes, waiting for one until ``deadline`` (monotonic).

        None at the deadline; at once where calls left behind hold so much that nobody else will give back enough.
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
        """The call that holds this piece was left behind: nobody should wait for it."""
        with self._condition:
            self._stuck += lease.length
            self._condition.notify_all()

    def give_back(self, lease: Lease, *, stuck: bool = False) -> None:
        """Take a piece back; ``stuck`` as it was marked."""
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

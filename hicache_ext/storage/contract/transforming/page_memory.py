"""Memory in which pages are transformed. It is kept for the next calls: new memory costs more than the cipher."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from hicache_ext.runtime.call_deadline import call_deadline

_MOST_LENT = 512 << 20
"""Bytes for the pages of all calls under way; a portion that is larger waits until nothing is lent."""
_MOST_KEPT = 128 << 20
_ALIGNMENT = 4096
"""For O_DIRECT."""
_LONGEST_WAIT = 60.0


class PageMemory:
    """Threads: any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lent = 0
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._own = threading.local()

    @contextmanager
    def lent(self, lengths: Sequence[int]) -> Iterator[list[memoryview]]:
        """A piece for each page, aligned to blocks. Waits while much is lent. Raises TimeoutError."""
        places, end = [], 0
        for length in lengths:
            places.append(end)
            end += -(-length // _ALIGNMENT) * _ALIGNMENT
        whole = self._take(end)
        try:
            # The memory of numpy begins anywhere.
            first = -whole.ctypes.data % _ALIGNMENT
            view = whole.data
            yield [view[first + place : first + place + length] for place, length in zip(places, lengths, strict=True)]
        finally:
            self._give_back(whole)

    def of_thread(self, length: int) -> memoryview:
        """Memory of this thread, until it asks again."""
        own: npt.NDArray[np.uint8] | None = getattr(self._own, "memory", None)
        if own is None or own.nbytes < length:
            own = self._own.memory = np.empty(length, np.uint8)
        return own.data[:length]

    def _take(self, length: int) -> npt.NDArray[np.uint8]:
        deadline = call_deadline(_LONGEST_WAIT)
        needed = length + _ALIGNMENT
        with self._changed:
            while self._lent and self._lent + needed > _MOST_LENT:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError("no memory for pages in time")
            fitting = [place for place, kept in enumerate(self._kept) if kept.nbytes >= needed]
            smallest = min(fitting, key=lambda place: self._kept[place].nbytes, default=None)
            if smallest is not None and self._kept[smallest].nbytes <= 4 * needed:
                whole = self._kept.pop(smallest)
            else:
                whole = np.empty(needed, np.uint8)
            self._lent += whole.nbytes
        return whole

    def _give_back(self, whole: npt.NDArray[np.uint8]) -> None:
        with self._changed:
            self._lent -= whole.nbytes
            self._kept.append(whole)
            while sum([kept.nbytes for kept in self._kept]) > _MOST_KEPT:
                del self._kept[0]
            self._changed.notify_all()

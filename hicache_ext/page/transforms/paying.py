"""``codec: auto``: pages are encoded where that makes a page's way to the medium and back shorter.

A page is written and read. Encoded, it saves seconds for each byte that the medium does not move, and costs those of
encoding and decoding, which some threads share:

    saved bytes * (seconds per byte of SETs + of GETs) > (encoding + decoding) / threads

The medium's seconds per byte are learnt from its calls, as the pull rule learns them (runtime/linear_cost.py). What the
codec costs, and saves, is measured on a page of the caller's every ``AGAIN`` seconds. Pages are read in any form.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hicache_ext.page.page_object import gather
from hicache_ext.page.transforms.codec import Codec, PageCodec
from hicache_ext.runtime.linear_cost import LinearCost

AGAIN = 20.0
"""Seconds between two measurements of the codec for pages of one identity: one costs what two pages do."""
_FEWEST = 8
"""Calls of a medium before it is judged: the first ones open connections."""
_THREADS = 4


class PayingCodec:
    """``inner`` where it pays. ``threads``: how many encode at once. Threads: any."""

    def __init__(
        self, inner: Codec, *, threads: int | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._inner = inner
        self.threads = threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self.clock = clock
        self._costs = {"get": LinearCost(), "set": LinearCost()}
        self._calls = 0

    @property
    def label(self) -> bytes:
        """That of ``inner``: what one encodes, the other finds."""
        return self._inner.label

    def for_pages(self, document: Mapping[str, Any], payload: int) -> PageCodec | None:
        pages = self._inner.for_pages(document, payload)
        return None if pages is None else _PayingPages(pages, self)

    def moved(self, call: str, stored_bytes: int, seconds: float) -> None:
        """The medium has moved so many bytes in a ``get`` or ``set`` that took so long, without encoding."""
        self._calls += 1
        if stored_bytes > 0:
            self._costs[call].observe(stored_bytes, seconds)

    def seconds_per_byte(self) -> float | None:
        """Of a byte that is written once and read once. While only one of them was seen, the other is taken to cost as
        much. None as long as too little was seen."""
        if self._calls < _FEWEST:
            return None
        known = [cost for line in self._costs.values() if (cost := line.per_unit()) is not None]
        return 2 * sum(known) / len(known) if known else None


_Measured = tuple[int, float, float]
"""Of one page: bytes that the medium need not store, seconds of encoding and decoding, and when that was."""


class _PayingPages:
    def __init__(self, inner: PageCodec, codec: PayingCodec) -> None:
        self._inner = inner
        self._codec = codec
        self._measured: _Measured | None = None
        self._measuring = threading.Lock()
        self.code = inner.code
        self.rooms = inner.rooms

    def pays(self) -> bool:
        """Also where that is not known, or was long ago: then ``encode`` measures."""
        per_byte, measured = self._codec.seconds_per_byte(), self._measured
        if per_byte is None:
            return False
        return measured is None or self._is_old(measured) or self._gains(measured, per_byte)

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        per_byte, measured = self._codec.seconds_per_byte(), self._measured
        # One thread measures; the others go by what is known.
        if (measured is None or self._is_old(measured)) and self._measuring.acquire(blocking=False):
            try:
                measured = self._measured = self._measure(payload)
            finally:
                self._measuring.release()
        if per_byte is None or measured is None or not self._gains(measured, per_byte):
            return 0
        return self._inner.encode(payload, encoded)

    def _is_old(self, measured: _Measured) -> bool:
        return self._codec.clock() - measured[2] > AGAIN

    def _gains(self, measured: _Measured, per_byte: float) -> bool:
        return measured[0] * per_byte > measured[1] / self._codec.threads

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        self._inner.decode(encoded, payload)

    def _measure(self, payload: memoryview) -> _Measured:
        """As body.py does it, with new memory and copies: they cost a third as much as the codec. Twice, since the
        first time pays for contexts."""
        clock = self._codec.clock
        stored, page = (np.zeros(size, np.uint8).data for size in (self.rooms[-1], payload.nbytes))
        seconds = float("inf")
        for _ in range(2):
            began = clock()
            gather([payload], page)
            encoded = np.empty(self.rooms[-1], np.uint8).data
            length = self._inner.encode(page, encoded)
            if not length:
                return 0, 0.0, clock()
            gather([encoded[:length]], stored[:length])
            whole = np.empty(payload.nbytes, np.uint8).data
            self._inner.decode(stored[:length], whole)
            gather([whole], page)
            seconds = min(seconds, clock() - began)
        room = min(room for room in self.rooms if room >= length)
        return payload.nbytes - room, seconds, clock()

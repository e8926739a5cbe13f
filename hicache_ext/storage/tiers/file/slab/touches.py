"""Uses of pages, noted by reads and written into the index later: a request does not wait for what only ranks pages.

To write a use costs about as much as to write a page. Notes are written before the next eviction of this process, or by
a thread in a pause of the reads, with which it would compete for the GIL. A killed process loses its notes: those pages
rank as if unused.

The hits of an identity, and the time of the last one, are counted here, too, for `hicache-ext ls`. The rank of a page
does not tell them: several uses in a row count as one there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hicache_ext.runtime.background import BackgroundLoop

_QUIET = 0.05
"""Seconds without a note that count as a pause."""
_LONGEST = 1.0
"""Seconds after which notes are written although reads go on."""
_MOST_AT_ONCE = 256
"""Pages in one transaction, which is how long writers may wait."""
_MOST_NOTED = 1 << 16
"""Most pages noted and not yet written; further notes are dropped."""

Chains = list[Sequence[bytes]]


class Uses(NamedTuple):
    """The uses of the pages of one identity."""

    hits: int
    last: float
    """Wall-clock seconds."""

    def and_(self, other: Uses) -> Uses:
        return Uses(self.hits + other.hits, max(self.last, other.last))


class Touches:
    """For one directory. Thread-safe."""

    def __init__(self, name: str, write: Callable[[], bool]) -> None:
        """``write`` takes what is noted (``take``) and writes it; False when there was nothing. It never raises."""
        self._write = write
        self._lock = threading.Lock()
        self._noted: Chains = []
        self._pages = 0
        self._hits: dict[bytes, int] = {}
        self._last: dict[bytes, float] = {}
        self._first_note = self._last_note = 0.0
        self._loop = BackgroundLoop(f"hicache-{name}-touch", self._write_in_a_pause)

    def note(self, identity: bytes, hits: int, chain: Sequence[bytes] = ()) -> None:
        """So many pages of an identity were read. ``chain``: pages of it that were used and may rank higher for it."""
        with self._lock:
            if self._loop.stopping:
                return
            was_empty = not self._noted and not self._hits
            if hits:
                self._hits[identity] = self._hits.get(identity, 0) + hits
                self._last[identity] = time.time()
            if chain and self._pages + len(chain) <= _MOST_NOTED:
                self._noted.append(chain)
                self._pages += len(chain)
            self._last_note = time.monotonic()
            if was_empty:
                self._first_note = self._last_note
            if was_empty or not self._loop.running:
                self._loop.wake(_QUIET)

    def take(self) -> Chains:
        """Take the oldest notes, as many as one transaction may write."""
        with self._lock:
            count = pages = 0
            for keys in self._noted:
                if count and pages + len(keys) > _MOST_AT_ONCE:
                    break
                count, pages = count + 1, pages + len(keys)
            taken, self._noted = self._noted[:count], self._noted[count:]
            self._pages -= pages
            return taken

    def take_uses(self) -> dict[bytes, Uses]:
        """Take what was counted since the last call, by identity."""
        with self._lock:
            hits, last = self._hits, self._last
            self._hits, self._last = {}, {}
        return {identity: Uses(count, last[identity]) for identity, count in hits.items()}

    def forget(self) -> None:
        """Drop all notes."""
        with self._lock:
            self._noted, self._pages, self._hits, self._last = [], 0, {}, {}

    def close(self) -> None:
        """End the thread; everything noted is written before this returns."""
        self._loop.stop()
        while self._write():
            pass

    def _write_in_a_pause(self) -> float:
        wait = min(self._last_note + _QUIET, self._first_note + _LONGEST) - time.monotonic()
        if wait > 0:
            return wait
        while not self._loop.stopping and self._write():
            pass
        return math.inf

"""How many pages are transformed at a time, and by how many threads. Threads: any."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.runtime.threads import ThreadPool, run_alone
from hicache_ext.storage.contract.store import StoreInfo

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

    def of(self, positions: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """The positions of each portion. ``lengths``: the bytes that are stored of each of these pages."""
        portions: list[list[int]] = []
        filled, most = 0, self._bytes
        if self._near:
            most = min(most, max(_LEAST_NEAR_PORTION, -(-sum(lengths) // self._at_once)))
        for position, length in zip(positions, lengths, strict=True):
            if not portions or filled + length > most or (self._near and length >= _LARGE):
                portions.append([])
                filled = 0
            portions[-1].append(position)
            filled += length
        return portions

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

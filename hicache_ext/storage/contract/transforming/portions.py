"""How many pages are transformed at a time, and by how many threads. Threads: any."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.store import StoreInfo

NEAR_PORTION = (4 << 20) + (64 << 10)
"""Bytes of stored pages that a thread takes at a time to or from a medium of this machine: they stay in the processor's
cache until they are copied. A little more than 4 MiB: so much of pages, with what stands around them."""
DISK_PORTION = 4 * NEAR_PORTION
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
        # What waits for a disk needs no processor.
        self._at_once = 4 if past_the_cache else min(4, len(os.sched_getaffinity(0)))

    def of(self, positions: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """The positions of each portion. ``lengths``: the bytes that are stored of each of these pages."""
        portions: list[list[int]] = []
        filled = 0
        for position, length in zip(positions, lengths, strict=True):
            if not portions or filled + length > self._bytes:
                portions.append([])
                filled = 0
            portions[-1].append(position)
            filled += length
        return portions

    def run(self, count: int, work: Callable[[int], None]) -> None:
        """All portions, some at once; what one of them raises is raised when all have ended."""
        # The context carries the limit of this call.
        contexts = [contextvars.copy_context() for _ in range(count)]
        self._threads.run(count, lambda number: contexts[number].run(work, number), self._at_once)

    def each(self, pages: int, work: Callable[[int], Any]) -> list[Any]:
        """All pages of a portion. Of a near medium portions are many, and done at once."""
        return self._threads.run(pages, work, self._at_once if self._shared else 1)

    def close(self) -> None:
        self._threads.close()

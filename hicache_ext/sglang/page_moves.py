"""Pages of SGLang's host pools on their way from and to the store, in place or through copies.

Any thread. ``read`` and ``write`` raise what the store raises after its close, and what a pool raises that is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache_ext.sglang.copied_pages import AnyPages, CopiedPages
from hicache_ext.sglang.host_pool import HostPages
from hicache_ext.sglang.served_pools import BoundPool
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, PageStore, SetResult

_GOOD = (GetResult.HIT, SetResult.STORED, SetResult.EXISTS, SetResult.REFUSED)
"""A page that is not worth storing is no failure: SGLang would end its whole backup, and log it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The sound pages of a call of SGLang's, under the pool that holds them."""

    pool: BoundPool
    pages: AnyPages
    of_first: PageKeys
    """The keys of their first parts."""
    numbers: npt.NDArray[np.int64]
    """Their places in the host pool."""
    owners: list[int] | None
    """Which page of the call each is; None where all are sound, as they mostly are."""

    def owner_of_each(self) -> Sequence[int]:
        """For each part of each of these pages, the page of the call that it belongs to."""
        owners = range(len(self.numbers)) if self.owners is None else self.owners
        parts = len(self.pool.digests)
        return owners if parts == 1 else [page for page in owners for _ in range(parts)]

    def per_page(self, pages: int, moved: list[bool]) -> list[bool]:
        """Which of the ``pages`` of the call went well in all their parts; one that was not sound did not."""
        parts = len(self.pool.digests)
        if self.owners is None and parts == 1:
            return moved
        good = [0] * pages
        for owner, ok in zip(self.owner_of_each(), moved, strict=True):
            good[owner] += ok
        return [count == parts for count in good]


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of each part of the pages asked for, and its bytes."""

    results: list[Any]
    """Of GetResult or of SetResult."""
    sizes: Sequence[int]

    def went_well(self) -> list[bool]:
        """Which parts were read, or are stored as far as that is wanted."""
        return went_well(self.results)

    def bytes_moved(self) -> int:
        moved = self.went_well()
        if SetResult.REFUSED in self.results:
            moved = [result is not SetResult.REFUSED and ok for result, ok in zip(self.results, moved, strict=True)]
        if all(moved):
            return sum(self.sizes)
        return sum([size for size, ok in zip(self.sizes, moved, strict=True) if ok])


def asked_pages(
    pool: BoundPool, pages: AnyPages, keys: Sequence[str], host_indices: torch.Tensor | None
) -> tuple[Asked, str | None]:
    """The sound pages of a call, and what is wrong with the others; None where nothing is."""
    numbers, sound = pages.page_numbers(host_indices, len(keys))
    owners = complaint = None
    if sound is not None:
        given = host_indices.numel() if host_indices is not None else "no"
        wanted = f"{len(keys)} pages of {pages.page_size} in {pool.name}, {sound.sum()} of them sound"
        complaint = f"{given} indices for {wanted}"
        owners = np.flatnonzero(sound).tolist()
        numbers, keys = numbers[sound], [keys[page] for page in owners]
    return Asked(pool, pages, PageKeys.of_hashes(pool.digests[0], keys), numbers, owners), complaint


def read(store: PageStore, asked: Asked) -> Moved:
    """Read pages into their places in the host pool."""
    if isinstance(asked.pages, CopiedPages):
        results = asked.pages.read(asked.of_first, asked.numbers, store.get)
        return Moved(results, [asked.pages.page_bytes] * len(results))
    batch = _in_place(asked, asked.pages)
    return Moved(store.get(batch), batch.sizes)


def write(store: PageStore, asked: Asked) -> Moved:
    """Write pages of the host pool to the store."""
    if isinstance(asked.pages, CopiedPages):
        results = asked.pages.write(asked.of_first, asked.numbers, store.set)
        return Moved(results, [asked.pages.page_bytes] * len(results))
    batch = _in_place(asked, asked.pages)
    return Moved(store.set(batch), batch.sizes)


Move = Callable[[PageStore, Asked], Moved]
"""``read`` or ``write``."""


def went_well(results: list[Any]) -> list[bool]:
    """Which pages were read, or are stored as far as that is wanted."""
    if results and results.count(results[0]) == len(results):
        return [results[0] in _GOOD] * len(results)
    return [result in _GOOD for result in results]


def _in_place(asked: Asked, pages: HostPages) -> PageBatch:
    """The batch of all parts of these pages; the parts of a page stand one after the other."""
    numbers, digests = asked.numbers, asked.pool.digests
    if len(digests) == 1:
        return PageBatch(asked.of_first, pages.memory_of(numbers), [pages.page_bytes] * len(numbers))
    parts = range(len(digests))
    keys = [key for page in zip(*[asked.of_first.under(digest) for digest in digests], strict=True) for key in page]
    buffers = zip(*[pages.memory_of(numbers, part) for part in parts], strict=True)
    sizes = [pages.part_bytes(part) for part in parts] * len(numbers)
    return PageBatch(keys, [segments for page in buffers for segments in page], sizes)

"""From page batches to the library's buffer lists, through memory of the tier.

A call of the library cannot be stopped, so it never gets host memory: the calling thread copies pages to and from
scratch memory, and a late call is left behind with its scratch memory. There an object is one run of bytes, cut in
pieces of the best size: every buffer is a transfer of its own. Over TCP that pays for most of the copy
(docs/decisions/mooncake.md).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hicache_ext.errors import StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.page.memory import address_of
from hicache_ext.storage.tiers.mooncake.engine import Attachment

HEADER_LENGTH = envelope.FIELDS_LENGTH
PIECES = 128
"""Pieces in one call of the library (or one page). For a frozen holder it waits piece by piece, with the memory of the
call."""
SCRATCH_BYTES = 32 * 1024 * 1024
"""Scratch memory of one call; more for a larger page."""
PIECE_BYTES = 352 * 1024
"""Largest piece of an object. Over TCP each piece is a transfer, four at once. Each costs a round trip; with larger
ones the sockets' buffers outgrow the CPU's caches."""
_ALIGNMENT = 4096
COPY_THREADS = 2
"""That move the pages of one portion between host and scratch memory: meanwhile nothing is on the wire."""
ALONE_BYTES = 256 * 1024
"""Pages smaller than that are copied by one thread: two would take the GIL from each other for each of them."""


@dataclass(slots=True)
class Portion:
    """The part of a batch that goes in one call. Lists are in the order of ``positions``."""

    positions: list[int] = field(default_factory=list)
    objects: list[memoryview] = field(default_factory=list)
    """Scratch memory of header and payload."""
    addresses: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)


def portions(payloads: Sequence[int], positions: Sequence[int], scratch: memoryview, most: int) -> Iterator[Portion]:
    """``positions`` in order, at most ``most`` pieces (or one page) in a portion; ``payloads``: the bytes of all pages.

    Each portion uses ``scratch`` anew: finish it before asking for the next. The largest page must fit.
    """
    base = address_of(scratch)
    portion, used, pieces_left = Portion(), 0, most
    for position in positions:
        need = HEADER_LENGTH + payloads[position]
        sizes = _pieces(need)
        if portion.positions and (used + need > scratch.nbytes or len(sizes) > pieces_left):
            yield portion
            portion, used, pieces_left = Portion(), 0, most
        pieces_left -= len(sizes)
        portion.positions.append(position)
        portion.objects.append(scratch[used : used + need])
        portion.addresses.append([base + used + offset for offset in range(0, need, sizes[0])])
        portion.sizes.append(sizes)
        used += need
    if portion.positions:
        yield portion


@functools.lru_cache(maxsize=64)
def _pieces(size: int) -> list[int]:
    """The pieces of an object: all of one length, the last one at most as long."""
    count = -(-size // PIECE_BYTES)
    length = size if count == 1 else -(-size // (count * _ALIGNMENT)) * _ALIGNMENT
    return [min(length, size - offset) for offset in range(0, size, length)]


@dataclass(slots=True)
class Scratch:
    """Memory for one call of the store."""

    pool: ScratchPool
    memory: memoryview
    left_behind: bool = False
    """A call of the library still uses it, and gives it back when it ends (``Attachment.call_bounded``)."""

    def give_back(self) -> None:
        with self.pool.lock:
            self.pool.free.append(self.memory)


class ScratchPool:
    """Scratch memory lent to calls: one region for each call at once. Any thread."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self.lock = threading.Lock()
        self.free: list[memoryview] = []

    @contextlib.contextmanager
    def lent(self, largest_page: int) -> Iterator[Scratch]:
        """Memory for objects with payloads of up to ``largest_page`` bytes."""
        scratch = Scratch(self, self._take(max(SCRATCH_BYTES, HEADER_LENGTH + largest_page)))
        try:
            yield scratch
        finally:
            if not scratch.left_behind:
                scratch.give_back()

    def _take(self, size: int) -> memoryview:
        with self.lock:
            # The region used last is in the CPU's caches.
            for number in reversed(range(len(self.free))):
                if self.free[number].nbytes >= size:
                    return self.free.pop(number)
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages, where the kernel has them: 16 MiB are copied and sent 1.05 to 1.15 times as fast.
        with contextlib.suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        region = memoryview(mapped)
        try:
            self._attachment.register(region)
        except StoreSetupError as error:
            # Its transfers will fail with a code, which is a result; this would not be one.
            self._attachment.log.log(logging.WARNING, "memory", "hicache_ext: %s", error)
        return region

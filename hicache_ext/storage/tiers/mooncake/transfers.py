"""From page batches to the library's buffer lists, through memory of the tier's own.

A call of the library cannot be stopped, so none is given host memory: pages are copied into scratch memory and out of
it by the thread that called the store, and a call that takes too long is left behind with its scratch memory. There an
object is one run of bytes, cut as suits the library: every buffer is a transfer of its own. Measured over TCP that pays
for most of the copy (docs/mooncake.md).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache_ext.errors import StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.storage.tiers.mooncake.attachment import address_of

logger = logging.getLogger(__name__)

HEADER_LENGTH = envelope.FIELDS_LENGTH
FIRST_PIECES = 4
PIECES = 64
"""In one call of the library, or one page. A frozen holder is waited for piece by piece, so the first call is small
where nothing was heard of the holders lately: it decides for how long the tier is out of service."""
SCRATCH_BYTES = 32 * 1024 * 1024
"""Of one call; more where one page is larger."""
PIECE_BYTES = 352 * 1024
"""An object is cut into pieces of at most that. Over TCP each piece is a transfer of its own, four under way at once.
Larger ones let the sockets' buffers outgrow the CPU's caches; each costs a round trip."""
_ALIGNMENT = 4096


@dataclass(slots=True)
class Portion:
    """The part of a batch that goes in one call. Lists are in the order of ``positions``."""

    positions: list[int] = field(default_factory=list)
    objects: list[memoryview] = field(default_factory=list)
    """Scratch memory of header and payload."""
    addresses: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)


def portions(payloads: Sequence[int], positions: Sequence[int], scratch: memoryview, first: int) -> Iterator[Portion]:
    """``positions`` in order, ``first`` pieces in the first portion; ``payloads`` are the bytes of all pages.

    Each portion uses ``scratch`` anew: finish it before asking for the next. The largest page must fit.
    """
    base = address_of(scratch)
    portion, used, room = Portion(), 0, first
    for position in positions:
        need = HEADER_LENGTH + payloads[position]
        sizes = _pieces(need)
        if portion.positions and (used + need > scratch.nbytes or len(sizes) > room):
            yield portion
            portion, used, room = Portion(), 0, PIECES
        room -= len(sizes)
        portion.positions.append(position)
        portion.objects.append(scratch[used : used + need])
        portion.addresses.append([base + used + offset for offset in range(0, need, sizes[0])])
        portion.sizes.append(sizes)
        used += need
    if portion.positions:
        yield portion


@functools.lru_cache(maxsize=64)
def _pieces(size: int) -> list[int]:
    """How an object is cut: pieces of one length and a last one of at most that length."""
    count = -(-size // PIECE_BYTES)
    length = size if count == 1 else -(-size // (count * _ALIGNMENT)) * _ALIGNMENT
    return [min(length, size - offset) for offset in range(0, size, length)]


@dataclass(slots=True)
class Scratch:
    """Memory of the tier that one call of the store uses."""

    memory: memoryview
    left_behind: bool = False
    """A call of the library still uses it: whoever sees that end gives it back."""


class ScratchPool:
    """Scratch memory that calls borrow; as many regions as there were ever calls at once. Any thread."""

    def __init__(self, register: Callable[[Sequence[memoryview]], None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    @contextlib.contextmanager
    def lent(self, largest_page: int) -> Iterator[Scratch]:
        """Room for objects with payloads of up to ``largest_page`` bytes."""
        scratch = Scratch(self._take(max(SCRATCH_BYTES, HEADER_LENGTH + largest_page)))
        try:
            yield scratch
        finally:
            if not scratch.left_behind:
                self.give_back(scratch)

    def give_back(self, scratch: Scratch) -> None:
        with self._lock:
            self._free.append(scratch.memory)

    def _take(self, size: int) -> memoryview:
        with self._lock:
            # The one used last is the one in the caches.
            for number in reversed(range(len(self._free))):
                if self._free[number].nbytes >= size:
                    return self._free.pop(number)
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages, where the kernel has them: 16 MiB are copied and sent 1.05 to 1.15 times as fast.
        with contextlib.suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        region = memoryview(mapped)
        try:
            self._register([region])
        except StoreSetupError as error:
            # Its transfers will fail with a code, which is a result; this would not be one.
            logger.warning("hicache_ext: %s", error)
        return region

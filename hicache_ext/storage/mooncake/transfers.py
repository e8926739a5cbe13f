"""From page batches to the library's buffer lists: portions of a batch, headers, small pages gathered.

Every buffer of an object is a transfer of its own, with a fixed cost and, when its holder is frozen, a wait of its own.
So pages that are small or cut in many segments go through scratch memory of ours as one buffer (a copy costs less than
a transfer there), large ones as they lie in host memory behind a header from scratch memory. A call is given few
transfers at once, which bounds what a frozen holder costs.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ext import envelope
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.mooncake.attachment import address_of
from hicache_ext.storage.store import PageBatch

logger = logging.getLogger(__name__)

HEADER_LENGTH = envelope.FIELDS_LENGTH
GATHER_BYTES = 512 * 1024
"""Payloads up to this size are gathered."""
DIRECT_SEGMENTS = 4
"""Larger pages are gathered, too, when they are cut in more segments than this."""
FIRST_TRANSFERS = 4
FIRST_BYTES = 2 * 1024 * 1024
TRANSFERS = 64
"""Transfers in one call of the library. The first call of a batch is small and made from scratch memory alone, so that
its caller can leave it when a holder is frozen; in a later one each transfer to such a holder is waited for."""
SCRATCH_BYTES = 32 * 1024 * 1024


@dataclass(slots=True)
class Portion:
    """The part of a batch that goes in one call. Lists are in the order of ``positions``."""

    positions: list[int] = field(default_factory=list)
    headers: list[memoryview] = field(default_factory=list)
    gathered: list[memoryview | None] = field(default_factory=list)
    """Scratch memory of the payload, None where it stays in host memory."""
    addresses: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    transfers: int = 0
    first: bool = False

    @property
    def in_scratch(self) -> bool:
        """Whether no host memory takes part."""
        return None not in self.gathered

    def expected(self, number: int) -> int:
        return sum(self.sizes[number])


def portions(
    batch: PageBatch, positions: Sequence[int], scratch: memoryview, known: Callable[[memoryview], bool]
) -> Iterator[Portion]:
    """``positions`` of ``batch`` in order. Each portion uses ``scratch`` anew: finish it before asking for the next.

    ``known`` says whether the library can reach a segment where it lies.
    """
    base = address_of(scratch)
    portion = Portion(first=True)
    used, limit, room = 0, FIRST_TRANSFERS, min(FIRST_BYTES, scratch.nbytes)
    for position in positions:
        segments, payload_bytes = batch.buffers[position], batch.sizes[position]
        better = payload_bytes <= GATHER_BYTES or len(segments) > DIRECT_SEGMENTS or not all(map(known, segments))
        # A page that no scratch memory can hold goes as it lies.
        fits = HEADER_LENGTH + payload_bytes <= scratch.nbytes
        gather = fits and (portion.first or better)
        need = HEADER_LENGTH + (payload_bytes if gather else 0)
        transfers = 1 if gather else 1 + len(segments)
        if portion.positions and (used + need > room or portion.transfers + transfers > limit):
            yield portion
            portion, used, limit, room = Portion(), 0, TRANSFERS, scratch.nbytes
            gather = fits and better
            need = HEADER_LENGTH + (payload_bytes if gather else 0)
            transfers = 1 if gather else 1 + len(segments)
        portion.positions.append(position)
        portion.headers.append(scratch[used : used + HEADER_LENGTH])
        portion.gathered.append(scratch[used + HEADER_LENGTH : used + need] if gather else None)
        direct = [] if gather else [segment for segment in segments if segment.nbytes]
        portion.addresses.append([base + used, *map(address_of, direct)])
        portion.sizes.append([need, *(segment.nbytes for segment in direct)])
        portion.transfers += transfers
        used += need
    if portion.positions:
        yield portion


def gather(source: Sequence[memoryview], target: memoryview) -> None:
    """The concatenation of ``source`` into ``target``."""
    offset = 0
    for segment in source:
        _copy(segment, target[offset : offset + segment.nbytes])
        offset += segment.nbytes


def scatter(source: memoryview, target: Sequence[memoryview]) -> None:
    offset = 0
    for segment in target:
        _copy(source[offset : offset + segment.nbytes], segment)
        offset += segment.nbytes


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy releases the GIL for large copies, slices of memoryviews do not.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


@dataclass(slots=True)
class Scratch:
    """Memory of ours that one call of the store uses."""

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
    def lent(self) -> Iterator[Scratch]:
        scratch = Scratch(self._take())
        try:
            yield scratch
        finally:
            if not scratch.left_behind:
                self.give_back(scratch)

    def give_back(self, scratch: Scratch) -> None:
        with self._lock:
            self._free.append(scratch.memory)

    def _take(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
        region = memoryview(mmap.mmap(-1, SCRATCH_BYTES))
        try:
            self._register([region])
        except StoreSetupError as error:
            # Its transfers will fail with a code, which is a result; this would not be one.
            logger.warning("hicache_ext: %s", error)
        return region

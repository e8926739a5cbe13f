"""The layout of a page in a slab: its payload at the start of a slot, its header (envelope.py, 128 bytes) at the slot's
place in a file of headers beside the slab.

So payloads of neighbouring slots are neighbours on disk, each begins at a block border, and a page of whole blocks
fills its slot. A read does not need the header: the index has the seal of every page. Reasons:
docs/decisions/slab-writes.md.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_ext.page import envelope
from hicache_ext.storage.tiers.file.pages.scanning import BLOCK

HEADER = envelope.FIELDS_LENGTH
"""Bytes of a page's header."""


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab: a file of ``slots`` slots of ``slot_size`` bytes, and a file with the headers of their pages."""

    number: int
    """No two slabs of one index have the same one."""
    slot_size: int
    slots: int
    first_row: int = field(default=0, compare=False)
    """That of slot 0 in the index."""

    @property
    def size(self) -> int:
        """Bytes of slots."""
        return self.slot_size * self.slots

    @property
    def headers_size(self) -> int:
        """Bytes of headers: whole blocks."""
        return -(-HEADER * self.slots // BLOCK) * BLOCK

    @property
    def disk_bytes(self) -> int:
        return self.size + self.headers_size


class SlabFile(enum.Enum):
    """A file of a slab, as it is opened."""

    SLOTS = "slots"
    DIRECT = "slots, with O_DIRECT"
    HEADERS = "headers"


def slots_within(disk_bytes: int, slot_size: int) -> int:
    """The most slots of a slab that takes no more bytes of disk."""
    return max(0, (disk_bytes - BLOCK + 1) // (slot_size + HEADER))


def slot_size_of(payload: int) -> int:
    """Bytes of the slot that a page with ``payload`` bytes takes: whole blocks."""
    return max(1, -(-payload // BLOCK)) * BLOCK


def are_of_one_size(sizes: Sequence[int]) -> bool:
    """Whether these pages, one at least, have the same payload."""
    return sizes.count(sizes[0]) == len(sizes)


def sizes_at(sizes: Sequence[int], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The payload bytes of the pages at ``positions``, from those of all pages."""
    if sizes and are_of_one_size(sizes):
        return np.full(len(positions), sizes[0])
    return np.array(sizes, np.int64)[positions]

"""The layout of a page in a slab: its payload at the start of a slot, its header (envelope.py, 128 bytes) at the slot's
place in a file of headers next to the slab.

Payloads of adjacent slots are therefore adjacent on disk, each begins at a block boundary, and a page of whole blocks
fills its slot. A read does not need the header: the index has the seal of every page. Reasons:
docs/decisions/slabs.md.

``SlotReferences`` holds the pages of a batch and their slots in columns, because Python code that runs per page is
the largest part of what a small page costs.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.page import envelope
from hicache_ext.storage.tiers.file.pages.tree import BLOCK
from hicache_ext.storage.tiers.file.slab.index_words import IN_ORDER, ONE_SLAB

HEADER = envelope.FIELDS_LENGTH
"""Bytes of a page's header."""
HEADER_WORDS = HEADER // 8
KEY, PAYLOAD_LENGTH, CREATED_MS = slice(2, 8), 8, 11
"""Words of a header (docs/page-format.md)."""
_START = np.frombuffer(bytearray(envelope.PAGE_START), np.int64)


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab: a file of ``slots`` slots of ``slot_size`` bytes, and a file with the headers of their pages."""

    number: int
    """Unique within an index."""
    slot_size: int
    slots: int
    first_row: int = field(default=0, compare=False)
    """Row of slot 0 in the index."""

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
    """A file of a slab, and how it is opened."""

    SLOTS = "slots"
    DIRECT = "slots, with O_DIRECT"
    HEADERS = "headers"


def slots_within(disk_bytes: int, slot_size: int) -> int:
    """Return the most slots of a slab that takes at most ``disk_bytes``."""
    return max(0, (disk_bytes - BLOCK + 1) // (slot_size + HEADER))


def slot_size_of(payload: int) -> int:
    """Return the bytes of the slot for a page with ``payload`` bytes: whole blocks."""
    return max(1, -(-payload // BLOCK)) * BLOCK


def are_of_one_size(sizes: Sequence[int]) -> bool:
    """Return whether these pages, at least one, have payloads of the same size."""
    return sizes.count(sizes[0]) == len(sizes)


def sizes_at(sizes: Sequence[int], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the payload bytes of the pages at ``positions``, from those of all pages."""
    if sizes and are_of_one_size(sizes):
        return np.full(len(positions), sizes[0])
    return np.array(sizes, np.int64)[positions]


Numbers = npt.NDArray[np.int64]


class SlotReference(NamedTuple):
    """One page and its slot. A tuple in this order, because pages that are moved one by one are sorted by place."""

    slab: int
    slot: int
    length: int
    """Bytes of the payload."""
    position: int = -1
    """Position in the batch; -1 if it has none."""
    row: int = -1
    """Row in the index; -1 if it has none."""


@dataclass(frozen=True, slots=True)
class SlotReferences:
    """``SlotReference`` of many pages: arrays of the same length."""

    slabs: Numbers
    slots: Numbers
    lengths: Numbers
    positions: Numbers
    rows: Numbers
    facts: int = 0
    """Facts about all of them from ``SlabIndex.locate``: bits of index_words.py."""

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, which: Any) -> SlotReferences:
        """Return the pages that a numpy index selects."""
        return self._of_columns(column[which] for column in self._columns())

    def by_place(self) -> SlotReferences:
        """Return the pages in disk order."""
        if self.facts & IN_ORDER:
            return self
        places = self.slabs << 32 | self.slots
        return self if (places[1:] > places[:-1]).all() else self.select(places.argsort())

    def by_position(self) -> SlotReferences:
        if (self.positions[1:] > self.positions[:-1]).all():
            return self
        return self.select(self.positions.argsort())

    def slab_numbers(self) -> set[int]:
        return {self.slabs.item(0)} if self.facts & ONE_SLAB else set(self.slabs.tolist())

    def pages(self) -> list[SlotReference]:
        return list(map(SlotReference._make, zip(*[column.tolist() for column in self._columns()], strict=True)))

    @classmethod
    def of(cls, pages: Iterable[SlotReference]) -> SlotReferences:
        columns = np.array(list(pages), np.int64).reshape(-1, 5).T
        return cls._of_columns(np.ascontiguousarray(column) for column in columns)

    @classmethod
    def joined(cls, several: Sequence[SlotReferences]) -> SlotReferences:
        return cls._of_columns(
            np.concatenate(columns) for columns in zip(*[one._columns() for one in several], strict=True)
        )

    @classmethod
    def _of_columns(cls, columns: Iterable[Numbers]) -> SlotReferences:
        slabs, slots, lengths, positions, rows = columns
        return cls(slabs, slots, lengths, positions, rows)

    def _columns(self) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        return self.slabs, self.slots, self.lengths, self.positions, self.rows


NO_SLOTS = SlotReferences.of(())


def read_headers(fd: int, begin: int, count: int) -> Numbers:
    """Read ``count`` headers, a row each, from slot ``begin`` on; zeros past the end of the file. Raises OSError."""
    content = bytearray(os.pread(fd, count * HEADER, begin * HEADER))
    content.extend(bytes(count * HEADER - len(content)))
    return np.frombuffer(content, np.int64).reshape(-1, HEADER_WORDS)


CHECK_HEADERS = native.Struct("check_headers", "headers[] start seals valid")


def checked_headers(headers: Numbers) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return the seals of these headers, a row each, and which of them are valid headers of pages."""
    seals, valid = np.zeros((len(headers), 2), np.uint64), np.zeros(len(headers), np.bool_)
    native.needed()(CHECK_HEADERS, headers, _START, seals, valid)
    return seals, valid

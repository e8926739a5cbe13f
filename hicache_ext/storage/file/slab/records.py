"""What the index of a slab directory is made of: its values in memory, and their bytes in LMDB.

========  ================================================  ==========================================================
database  key                                               value
========  ================================================  ==========================================================
pages     generation, page key                              when written, slab, slot, object length, rank
groups    slab, first slot of a group (big-endian)          of each with a page, in order: slot - first, priority, key
order     slot size, lowest priority, slab, first slot      nothing: the first group of a slot size has its next victim
free      slot size, slab, first slot                       a bit per slot of the group: those that may be written
pending   writer, number                                    slab, slot of each slot that its writer may be writing
slabs     slab (big-endian)                                 slot size, number of slots
state     name                                              the clock per slot size, the next slab number, generations,
                                                            the size of the table of ghosts (ghosts.py), the uses of
                                                            each identity
========  ================================================  ==========================================================

Every slot of every slab is in exactly one of ``groups``, ``free`` and ``pending``.

Slots are neighbours in groups: what is evicted together, written together, and noted together. Page keys are hashes, so
each write to ``pages`` copies a leaf of its own, 2 to 4 us apiece; all else is kept out of there, and is written once
per group instead of once per page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from hicache_ext.envelope import KEY_LENGTH
from hicache_ext.storage.file.eviction import RANK_LENGTH

INDEX_VERSION = 4
"""Counts the changes of what is described above. An index of another version is rebuilt from the envelopes."""

GENERATION = struct.Struct(">H")
FIRST_GENERATION = GENERATION.pack(0)
PAGE = struct.Struct(f"<4sIII{RANK_LENGTH}s")
PAGE_COLUMNS = np.dtype(
    [
        ("created", "V4"),
        ("slab", "<u4"),
        ("slot", "<u4"),
        ("length", "<u4"),
        ("priority", "<u8"),
        ("used", "<u8"),
        ("hits", "u1"),
    ]
)
"""The same bytes of many pages, the rank in its parts."""
assert PAGE_COLUMNS.itemsize == PAGE.size
CREATED = struct.Struct(">I")
"""Wall-clock seconds, big-endian and first in ``PAGE``: the value of a younger page is the greater one."""
PLACE = struct.Struct(">II")
HELD = struct.Struct(f">HQ{GENERATION.size + KEY_LENGTH}s")
HELD_COLUMNS = np.dtype([("offset", ">u2"), ("priority", ">u8"), ("key", f"V{GENERATION.size + KEY_LENGTH}")])
"""The same bytes of many slots."""
assert HELD_COLUMNS.itemsize == HELD.size
HELD_PRIORITY = slice(2, 10)
HELD_KEY = slice(10, None)
FREE = struct.Struct(">III")
FREE_SLOTS = struct.Struct(">Q")
ORDER = struct.Struct(">IQII")
SLOT_SIZE = struct.Struct(">I")
PRIORITY = struct.Struct(">Q")
SLAB = struct.Struct("<II")
NUMBER = struct.Struct(">Q")
USES = struct.Struct("<Qd")
"""Pages of an identity that were hit, and the wall-clock seconds of the last time."""
USES_NAME = b"uses"

_GROUP = 2 << 20
"""Bytes of slots in a group."""
_MOST_SLOTS_IN_A_GROUP = 32
"""LMDB gives a record longer than half a page pages of its own, and each change of it new ones."""


def slots_in_group(slot_size: int) -> int:
    """Slots of this size that are one group: the slots n * so many and those behind it."""
    return min(max(1, _GROUP // slot_size), _MOST_SLOTS_IN_A_GROUP)


def slots_of(free: bytes) -> list[int]:
    """The offsets of the free slots of a group, from its value in ``free``."""
    (bits,) = FREE_SLOTS.unpack(free)
    return [offset for offset in range(8 * FREE_SLOTS.size) if bits >> offset & 1]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page object is: ``length`` bytes of it (header and payload) from the start of a slot."""

    slab: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab file: ``slots`` slots of ``slot_size`` bytes."""

    number: int
    slot_size: int
    slots: int

    @property
    def size(self) -> int:
        return self.slot_size * self.slots

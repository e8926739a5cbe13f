"""The parts of the index of a slab directory.

LMDB has what changes rarely:

========  =====================  ======================================================================================
database  key                    value
========  =====================  ======================================================================================
slabs     slab (big-endian)      slot size, number of slots, where its records begin
state     name                   the next slab number, the generation and the uses of each identity, the size of the
                                 table of ghosts (ghosts.py), the last epoch begun (slot_table.py)
========  =====================  ======================================================================================

A write transaction of LMDB is also the lock for the mapped files (slot_table.py): a record per slot, which is the
truth, what follows from the records, and the seal of the page in each slot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from hicache_ext.storage.tiers.file.slab.shapes import HEADER

INDEX_VERSION = 6
"""The version of the format above and of slot_table.py. An index of another version is rebuilt from the headers."""

GENERATION = struct.Struct(">H")
SLOT_SIZE = struct.Struct(">I")
SLAB = struct.Struct("<IIQ")
NUMBER = struct.Struct(">Q")
USES = struct.Struct("<Qd")
"""Pages of an identity that were hit, and when last (wall-clock seconds)."""
USES_NAME = b"uses"
GENERATION_NAME = b"generation"

_GROUP = 2 << 20
"""Bytes of slots in a group."""
_MOST_SLOTS_IN_A_GROUP = 32


def slots_in_group(slot_size: int) -> int:
    """Slots of this size in one group; groups begin at multiples of it."""
    return min(max(1, _GROUP // slot_size), _MOST_SLOTS_IN_A_GROUP)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page is: ``length`` bytes of payload from the start of a slot."""

    slab: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab: a file of ``slots`` slots of ``slot_size`` bytes, and a file with the headers of their pages."""

    number: int
    slot_size: int
    slots: int
    first_record: int = field(default=0, compare=False)
    """The row of the record of slot 0."""

    @property
    def size(self) -> int:
        """Bytes of slots."""
        return self.slot_size * self.slots

    @property
    def headers_size(self) -> int:
        """Bytes of headers."""
        return HEADER * self.slots

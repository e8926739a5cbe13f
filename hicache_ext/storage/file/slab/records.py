"""What the index of a slab directory is made of: its values in memory, and their bytes in LMDB.

========  ================================================  ==========================================================
database  key                                               value
========  ================================================  ==========================================================
pages     generation, page key                              when written, slab, slot, object length, rank
order     slot size, priority, slab, slot (big-endian)      key in pages: the first of a slot size is its next victim
slots     slab, slot (big-endian)                           priority, key in pages: what an occupied slot holds
free      slot size, slab, slot (big-endian)                nothing: a slot that may be written
pending   writer, number                                    slab, slot, page key of each slot that is being written
slabs     slab (big-endian)                                 slot size, number of slots
ghosts    fingerprint of a key in pages                     number, what eviction.py remembers of an evicted page
gone      number (big-endian)                               fingerprints evicted together, in the order of eviction
state     name                                              the clock per slot size, the next slab number, generations
========  ================================================  ==========================================================

Every slot of every slab is in exactly one of ``slots``, ``free`` and ``pending``.

Page keys are hashes, so each write to ``pages`` or ``ghosts`` copies a leaf of its own, 2 to 4 us apiece, where the
databases ordered by place or time cost half a microsecond an entry: what is written per page is kept out of the former.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hicache_ext.envelope import KEY_LENGTH
from hicache_ext.storage.file.eviction import RANK_LENGTH

INDEX_VERSION = 3
"""Counts the changes of what is described above. An index of another version is rebuilt from the envelopes."""

PAGE = struct.Struct(f"<4sIII{RANK_LENGTH}s")
CREATED = struct.Struct(">I")
"""Wall-clock seconds, big-endian and first in ``PAGE``: the value of a younger page is the greater one."""
PLACE = struct.Struct(">II")
PRIORITY = struct.Struct(">Q")
FREE = struct.Struct(">III")
ORDER = struct.Struct(">IQII")
PENDING = struct.Struct(f">II{KEY_LENGTH}s")
SLOT_SIZE = struct.Struct(">I")
SLAB = struct.Struct("<II")
GENERATION = struct.Struct(">H")
FIRST_GENERATION = GENERATION.pack(0)
NUMBER = struct.Struct(">Q")
FINGERPRINT_LENGTH = 8


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

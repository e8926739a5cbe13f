"""Ghosts: facts about recently evicted pages, in a table of fixed size that all processes map.

slot_code.py changes it, under the lock of the index. After a kill or a power loss it may be wrong: then a page ranks
higher or lower than it should, nothing else.

The file: the number of ghosts so far, then one array each of fingerprints, numbers and uses, in sets of ``WAYS``. A
fingerprint belongs to one set; a new ghost replaces the oldest of a full set, which loses a few. Ghosts numbered before
the last ``size`` ones are forgotten: first in, first out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hicache_ext.storage.tiers.file.slab.mapped import WORD, Words, extend, map_words
from hicache_ext.storage.tiers.file.slab.slot_code import WAYS

_HEADER = 4096 // WORD


class GhostTable:
    """The last ``size`` ghosts, nearly all of them."""

    def __init__(self, directory: Path, size: int) -> None:
        """Opens the table in ``directory``, or makes an empty one. Raises OSError."""
        self.size = size
        # Twice as many places as ghosts: sets fill unevenly.
        sets = -(-2 * size // WAYS)
        words = _HEADER + 3 * sets * WAYS
        self.bytes = words * WORD
        self.path = directory / f"ghosts-{size}"
        if self.path.exists() and self.path.stat().st_size != self.bytes:
            # A new file instead of cutting this one: another process may have it mapped.
            self.path.unlink()
        try:
            extend(self.path, words)
            memory = map_words(self.path, words)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        self.remembered: Words = memory[:1]
        """The number of ghosts so far."""
        self.places: Words = memory[_HEADER:].reshape(3, sets, WAYS)
        """Fingerprints, numbers and uses: ``ghosts`` of slot_code.py."""

    @classmethod
    def larger(cls, directory: Path, size: int, smaller: GhostTable | None) -> GhostTable:
        """A table of ``size`` with the ghosts of ``smaller``, whose file is deleted. Raises OSError."""
        # Left by a killed process.
        (directory / f"ghosts-{size}").unlink(missing_ok=True)
        table = cls(directory, size)
        if smaller is not None:
            fingerprints, numbers, uses = smaller.places.reshape(3, -1)
            kept = np.flatnonzero(numbers > 0)
            kept = kept[numbers[kept].argsort()]
            table.remembered[0] = smaller.remembered[0]
            table._place(fingerprints[kept], numbers[kept], uses[kept])
            # Other processes map the larger one with their next change.
            smaller.path.unlink(missing_ok=True)
        return table

    def _place(self, fingerprints: Words, numbers: Words, uses: Words) -> None:
        """Put ghosts into an empty table, the oldest first."""
        columns = self.places.reshape(3, -1)
        while len(fingerprints):
            sets = fingerprints % self.places.shape[1]
            places = sets * WAYS + self.places[1][sets].argmin(axis=1)
            columns[0][places], columns[1][places], columns[2][places] = fingerprints, numbers, uses
            # Of several ghosts for one place the others choose again.
            rest = columns[0][places] != fingerprints
            fingerprints, numbers, uses = fingerprints[rest], numbers[rest], uses[rest]

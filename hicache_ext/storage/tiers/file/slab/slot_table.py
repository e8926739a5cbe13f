"""The part of an index that is mapped: a record per slot and what follows from the records (slot_code.py).

::

    header           words: what this is, CHANGING, EPOCH, BUCKETS, CHANGES; a clock per slot size
    records          a row per slot; those of a slab are neighbours
    seals            a row per slot, as the records: the 16 bytes that bind the payload in it to its page (envelope.py)
    groups           per slab, beginning with the row that its records begin with, its summary and a row per group
    buckets-<n>      the hash table, n words

Reading takes no lock and no system call. One process at a time makes changes, under the index's lock. A process killed
in a change leaves CHANGING set: the next change first makes everything anew from the whole records. That, and a change
of the slabs or of a generation, raises EPOCH: what a process has mapped and cached belongs to one epoch.

After a power loss the index is not used again (directory.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import lmdb
import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import SEAL_LENGTH
from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.mapped import WORD, Words, extend, map_words, sync
from hicache_ext.storage.tiers.file.slab.records import INDEX_VERSION, Slab, slots_in_group
from hicache_ext.storage.tiers.file.slab.slot_code import CLOCK_SIZE, CLOCK_WORDS, GROUP_WORDS, RECORD_WORDS

_FORMAT, _CHANGING, _EPOCH, _BUCKETS, _CHANGES = range(5)
_CLOCKS: Final = 16
"""The first word of the clocks."""
_HEADER: Final = 4096 // WORD
_THIS_FORMAT: Final = 0x68696361 << 8 | INDEX_VERSION
_LEAST_BUCKETS: Final = 1024
_SEAL_WORDS: Final = SEAL_LENGTH // WORD
_ATTEMPTS: Final = 100


Seals = npt.NDArray[np.uint64]
"""A row per slot; the bytes of a row are a page's seal."""


def seal_at(seals: Seals, row: int) -> bytes:
    """Empty where there is no such row."""
    return seals[row].tobytes() if 0 <= row < len(seals) else b""


@dataclass(frozen=True, slots=True)
class View:
    """The slabs of one epoch, and their mapped words."""

    epoch: int
    """What is said here is true until the epoch ends; where it is odd, only now (``SlotTable.begin_epoch``)."""
    slabs: Mapping[int, Slab]
    """By number, sorted."""
    records: Words
    seals: Seals
    groups: Words
    buckets: Words
    rows: Words
    """``slabs`` of slot_code.py."""
    slots: Mapping[int, int]
    """Slot size -> number of slots."""
    capacities: Words
    """By clock: the number of slots of its slot size, at least 1."""
    generations: dict[bytes, Words] = field(default_factory=dict)
    """The generations of identities asked for so far."""

    @property
    def table(self) -> tuple[Words, Words, Words, Words]:
        return self.records, self.groups, self.buckets, self.rows

    @property
    def pages(self) -> Words:
        """The rows that hold a page."""
        return self.rows_in(slot_code.PAGE)

    def rows_in(self, state: int) -> Words:
        """The rows of slots in this state."""
        found = [self.rows_of(slab)[self.states(slab) == state] for slab in self.slabs.values()]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def rows_of(self, slab: Slab) -> Words:
        return np.arange(slab.first_record, slab.first_record + slab.slots)

    def states(self, slab: Slab) -> Words:
        states: Words = self.records[slab.first_record : slab.first_record + slab.slots, slot_code.STATE] & 0xFF
        return states

    @property
    def lowest(self) -> Words:
        """The lowest priority of each slab's pages, NO_PAGE without pages."""
        lowest: Words = self.groups[self.rows[:, slot_code.BASE], slot_code.LOWEST]
        return lowest


class SlotTable:
    """The mapped files in one directory. Threads: any; changes under the lock of the index."""

    def __init__(self, directory: Path, *, new: bool) -> None:
        """Under the lock. Makes the files if ``new``. Raises OSError, lmdb.Error when the files are not valid."""
        self._directory = directory
        header = directory / "header"
        if new:
            for path in directory.glob("buckets-*"):
                path.unlink()
            for path in (header, self._records, self._seals, self._groups):
                path.unlink(missing_ok=True)
            extend(header, _HEADER)
        try:
            self._header = map_words(header, _HEADER)
        except (FileNotFoundError, ValueError) as error:
            raise lmdb.CorruptedError(f"the header of the index: {error}") from error
        if new:
            for path in (self._records, self._seals, self._groups):
                extend(path, 0)
            self._new_buckets(_LEAST_BUCKETS)
            self._header[_FORMAT] = _THIS_FORMAT
        if self._header[_FORMAT] != _THIS_FORMAT:
            raise lmdb.CorruptedError("the header of the index is not what it was")
        # Left by a process that was killed while it replaced the hash table.
        for path in set(directory.glob("buckets-*")) - {self._buckets}:
            path.unlink(missing_ok=True)
        self.clocks: Words = self._header[_CLOCKS:].reshape(-1, CLOCK_WORDS)

    @property
    def epoch(self) -> int:
        return int(self._header[_EPOCH])

    def size(self) -> int:
        """Bytes of disk."""
        others = (self._directory / "header", self._records, self._seals, self._groups)
        # The name of the hash table gives its size; another process may replace the file at any time.
        return sum(path.stat().st_size for path in others) + int(self._header[_BUCKETS]) * WORD

    def sync(self) -> None:
        """To the disk. Raises OSError."""
        for path in self._paths():
            sync(path)

    # -- views -----------------------------------------------------------------------------------------------------

    def view(self, slabs: Mapping[int, Slab], epoch: int) -> View:
        """Map the words of these slabs. Raises OSError, lmdb.Error when they are missing."""
        slabs = dict(sorted(slabs.items()))
        rows = max((slab.first_record + slab.slots + 1 for slab in slabs.values()), default=0)
        numbers = [
            (slab.number, slab.slot_size, slab.slots, slots_in_group(slab.slot_size), slab.first_record)
            for slab in slabs.values()
        ]
        slots: Counter[int] = Counter()
        for slab in slabs.values():
            slots[slab.slot_size] += slab.slots
        capacities = [max(1, slots[size]) for size in self.clocks[:, CLOCK_SIZE].tolist()]
        try:
            return View(
                epoch,
                slabs,
                map_words(self._records, rows * RECORD_WORDS).reshape(-1, RECORD_WORDS),
                map_words(self._seals, rows * _SEAL_WORDS).view(np.uint64).reshape(-1, _SEAL_WORDS),
                map_words(self._groups, rows * GROUP_WORDS).reshape(-1, GROUP_WORDS),
                self._map_buckets(),
                np.array(numbers, np.int64).reshape(-1, slot_code.SLAB_WORDS),
                slots,
                np.array(capacities, np.int64),
            )
        except (FileNotFoundError, ValueError) as error:
            raise lmdb.CorruptedError(f"the records of the index: {error}") from error

    def _map_buckets(self) -> Words:
        for _ in range(_ATTEMPTS):
            number = int(self._header[_BUCKETS])
            with suppress(FileNotFoundError):
                return map_words(self._directory / f"buckets-{number}", number)
            # Another process has just replaced it by a larger one.
        raise FileNotFoundError(f"buckets-{number}")

    # -- changes ---------------------------------------------------------------------------------------------------

    @property
    def was_left_changing(self) -> bool:
        """Whether the last change did not end."""
        return bool(self._header[_CHANGING])

    def begin_change(self) -> None:
        self._header[_CHANGING] = 1

    def end_change(self) -> None:
        self._header[_CHANGES] += 1
        self._header[_CHANGING] = 0

    @property
    def changes(self) -> int:
        """Differs after a change; odd during one."""
        return int(self._header[_CHANGES]) << 1 | int(self._header[_CHANGING] != 0)

    def begin_epoch(self) -> int:
        """Slabs or generations are about to change. Until the change ends (or, after a kill, until the next change) all
        processes read them at each call. Returns the number for ``begin_epoch_in_order``."""
        self._header[_EPOCH] += 1 if self.epoch % 2 == 0 else 2
        return self.epoch

    def begin_epoch_in_order(self, number: int) -> None:
        """They have changed. Under the lock again: another change may have come in between."""
        if self.epoch == number:
            self._header[_EPOCH] = number + 1

    def clock(self, slot_size: int) -> Words:
        """The clock of this slot size, for changes. With too many sizes the last ones share a clock."""
        sizes = self.clocks[:, CLOCK_SIZE].tolist()
        number = next((n for n, size in enumerate(sizes) if size in (0, slot_size)), len(sizes) - 1)
        row: Words = self.clocks[number]
        row[CLOCK_SIZE] = slot_size
        return row

    def allocate(self, slots: int, others: Mapping[int, Slab]) -> int:
        """Allocate the records of a new slab; returns where they begin. Raises OSError, with nothing changed.

        ``others``: the existing slabs."""
        first = 0
        for slab in sorted(others.values(), key=lambda slab: slab.first_record):
            if first + slots + 1 <= slab.first_record:
                break
            first = max(first, slab.first_record + slab.slots + 1)
        extend(self._records, (first + slots + 1) * RECORD_WORDS)
        extend(self._seals, (first + slots + 1) * _SEAL_WORDS)
        extend(self._groups, (first + slots + 1) * GROUP_WORDS)
        wanted = 2 * (slots + sum(slab.slots for slab in others.values()))
        if self._header[_BUCKETS] < wanted:
            self._new_buckets(1 << wanted.bit_length())
        return first

    def _new_buckets(self, number: int) -> None:
        """Replace the hash table by an empty one."""
        path = self._directory / f"buckets-{number}"
        path.unlink(missing_ok=True)
        try:
            extend(path, number)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        before, self._header[_BUCKETS] = int(self._header[_BUCKETS]), number
        if before:
            (self._directory / f"buckets-{before}").unlink(missing_ok=True)

    # -- files -----------------------------------------------------------------------------------------------------

    @property
    def _records(self) -> Path:
        return self._directory / "records"

    @property
    def _seals(self) -> Path:
        return self._directory / "seals"

    @property
    def _groups(self) -> Path:
        return self._directory / "groups"

    @property
    def _buckets(self) -> Path:
        return self._directory / f"buckets-{int(self._header[_BUCKETS])}"

    def _paths(self) -> list[Path]:
        return [self._directory / "header", self._records, self._seals, self._groups, self._buckets]

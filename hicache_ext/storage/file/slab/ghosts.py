"""Ghosts: what is remembered of pages evicted lately, in a table of fixed size that all processes map.

Not in the index, because keys are hashes: to put a page's ghost there and to delete the oldest one copied two leaves
for every page written. The table is changed only inside write transactions of the index, which is its lock. What a kill
or a power loss leaves in it may be wrong: then a page ranks higher or lower than it should, nothing else.

The file: the number of ghosts remembered so far, then one array each of fingerprints, numbers and uses, in sets of
``_WAYS``. A fingerprint names its set; the oldest of a full set makes room. Few are lost to that, while those numbered
before the last ``size`` ones are forgotten exactly: first in, first out.

Where a write to a file that has all its blocks may still find the disk full (file systems that write elsewhere), a
mapped file would be a SIGBUS: there each process has a table of its own, for as long as it lives.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_ext.storage.file.eviction import Ghost
from hicache_ext.storage.file.file_system import file_system_of

_WAYS = 16
_HEADER = 4096
_HITS_BITS = 3
"""``Ghost.hits`` is at most 7."""

_RANK = np.dtype([("priority", "<u8"), ("used", "<u8"), ("hits", "u1")])
"""``Rank.pack()``."""

_Numbers = npt.NDArray[np.uint64]


class GhostTable:
    """The last ``size`` ghosts, nearly all of them. Calls only inside a write transaction of the index."""

    def __init__(self, directory: Path, size: int) -> None:
        """Opens the table in ``directory``, or makes an empty one. Raises OSError."""
        self.size = size
        # Twice as many places as ghosts: sets fill unevenly.
        self._sets = -(-2 * size // _WAYS)
        places = self._sets * _WAYS
        self.bytes = _HEADER + 3 * 8 * places
        self.path = directory / f"ghosts-{size}"
        memory = _mapped(self.path, self.bytes) if overwrites_in_place(directory) else mmap.mmap(-1, self.bytes)
        self._remembered: _Numbers = np.frombuffer(memory, np.uint64, 1)
        planes = np.frombuffer(memory, np.uint64, 3 * places, _HEADER).reshape(3, self._sets, _WAYS)
        self._fingerprints: _Numbers = planes[0]
        self._numbers: _Numbers = planes[1]
        self._uses: _Numbers = planes[2]

    @classmethod
    def larger(cls, directory: Path, size: int, smaller: GhostTable | None) -> GhostTable:
        """A table of ``size`` with the ghosts of ``smaller``, whose file is deleted. Raises OSError."""
        # What a killed process may have left under that name.
        (directory / f"ghosts-{size}").unlink(missing_ok=True)
        table = cls(directory, size)
        if smaller is not None:
            kept = smaller._numbers > 0
            order = np.argsort(smaller._numbers[kept])
            table._remembered[0] = smaller._remembered[0]
            table._place(smaller._fingerprints[kept][order], smaller._numbers[kept][order], smaller._uses[kept][order])
            # Who has it mapped learns of the larger one with its next change.
            smaller.path.unlink(missing_ok=True)
        return table

    def remember(self, full_keys: Sequence[bytes], ranks: bytes) -> None:
        """Keep the ghosts of pages evicted now, in the order of their eviction; their packed ranks in one."""
        numbers = np.arange(1, len(full_keys) + 1, dtype=np.uint64) + self._remembered[0]
        self._remembered[0] += np.uint64(len(full_keys))
        fields = np.frombuffer(ranks, _RANK)
        self._place(_fingerprints_of(full_keys), numbers, fields["used"] << _HITS_BITS | fields["hits"])

    def recall(self, full_keys: Sequence[bytes], limit: int) -> list[Ghost | None]:
        """The ghosts there are of these pages, which are back; not those older than ``limit`` others."""
        fingerprints = _fingerprints_of(full_keys)
        sets = fingerprints % self._sets
        rows, ways = np.nonzero(self._fingerprints[sets] == fingerprints[:, None])
        found: list[Ghost | None] = [None] * len(full_keys)
        oldest = max(0, int(self._remembered[0]) - min(limit, self.size))
        for row, way in zip(rows.tolist(), ways.tolist(), strict=True):
            place = (int(sets[row]), way)
            number, use = int(self._numbers[place]), int(self._uses[place])
            self._fingerprints[place] = self._numbers[place] = 0
            if number > oldest:
                found[row] = Ghost(use >> _HITS_BITS, use & ((1 << _HITS_BITS) - 1))
        return found

    def _place(self, fingerprints: _Numbers, numbers: _Numbers, uses: _Numbers) -> None:
        while len(fingerprints):
            sets = (fingerprints % self._sets).astype(np.int64)
            ages = self._numbers[sets]
            # An older ghost of the same page makes room before any other.
            ages[self._fingerprints[sets] == fingerprints[:, None]] = 0
            places = sets * _WAYS + ages.argmin(axis=1)
            flat = self._fingerprints.reshape(-1)
            flat[places] = fingerprints
            self._numbers.reshape(-1)[places] = numbers
            self._uses.reshape(-1)[places] = uses
            # Of those that wanted the same place the others choose again.
            rest = flat[places] != fingerprints
            if not rest.any():
                break
            fingerprints, numbers, uses = fingerprints[rest], numbers[rest], uses[rest]


def overwrites_in_place(directory: Path) -> bool:
    """Whether blocks that a file has are written where they are, so that they cannot be missing later."""
    return file_system_of(directory).type in ("ext2", "ext3", "ext4", "ramfs", "tmpfs", "xfs")


def _mapped(path: Path, length: int) -> mmap.mmap:
    """The file at ``path``, a new one of zeros where it is not there or of another length. Raises OSError."""
    with contextlib.ExitStack() as open_files:

        def opened(flags: int) -> int:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
            open_files.callback(os.close, fd)
            return fd

        fd = opened(0)
        if os.fstat(fd).st_size == length:
            return mmap.mmap(fd, length)
        try:
            # Another file, and not this one cut: somebody may have it mapped.
            path.unlink()
            fd = opened(os.O_EXCL)
            os.posix_fallocate(fd, 0, length)
            return mmap.mmap(fd, length)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _fingerprints_of(full_keys: Sequence[bytes]) -> _Numbers:
    return np.array([xxhash.xxh3_64_intdigest(key) for key in full_keys], np.uint64)

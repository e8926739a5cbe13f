"""Which page files there are, told again and again (``PageLister``): a directory whose time of change is as it was is
not read again.

A page comes and goes by a change of its directory, so that this time tells of both, whoever did it. Times of change are
coarse: one that is younger than a few seconds says nothing of the next change.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext.storage.tiers.file.modes import FANOUT_NAME, PAGE_NAME
from hicache_ext.storage.tiers.file.pages.tree import ABSENT, PageTree, directories, entries

Words = npt.NDArray[np.int64]

_COARSE = 5.0
"""Seconds. File systems keep times to 2 seconds at worst, and a server's clock may be apart from ours."""
_DIGITS = 16
_NONE: Words = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Read:
    """A directory as it was read last."""

    changed: int
    """Its time of change then, in nanoseconds."""
    settled: bool
    """That time was old enough: what changes after it shows."""
    blocks: Words


class TreeContents:
    """Of one directory of page files. 8 bytes a page, from the first look on. For one thread at a time."""

    def __init__(self, tree: PageTree) -> None:
        self._tree = tree
        self._read: dict[bytes, dict[str, _Read]] = {}
        """By identity and path of a directory."""

    def block_hashes(self, digest: bytes) -> Words:
        """As ``PageLister``. Raises OSError."""
        before, now = self._read.get(digest, {}), {}
        for fan_out in directories(self._tree.pages / digest.hex(), FANOUT_NAME):
            if (read := _read(fan_out.path, before.get(fan_out.path))) is not None:
                now[fan_out.path] = read
        self._read[digest] = now
        return np.concatenate([_NONE, *[read.blocks for read in now.values()]])


def _read(path: str, before: _Read | None) -> _Read | None:
    try:
        changed = os.stat(path, follow_symlinks=False).st_mtime_ns
    except ABSENT:
        return None
    if before is not None and before.settled and before.changed == changed:
        return before
    settled = time.time() - changed / 1e9 > _COARSE
    names = [entry.name for entry in entries(path, PAGE_NAME)]
    return _Read(changed, settled, _blocks_of(names))


def _blocks_of(names: list[str]) -> Words:
    digits = bytes.fromhex("".join([name[:_DIGITS] for name in names]))
    return np.frombuffer(digits, ">i8").astype(np.int64)

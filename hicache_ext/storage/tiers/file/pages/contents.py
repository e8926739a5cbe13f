"""Which pages there are, told again and again (``PageLister``): a directory whose time of change is as it was is not
read again.

A page comes and goes by a change of its directory, so that this time tells of both, whoever did it. Times of change are
coarse: one that is younger than a few seconds says nothing of the next change. Names of packs have only the first bytes
of each hash: the rest is read from each pack once.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH, KEY_LENGTH
from hicache_ext.storage.tiers.file.modes import FILES_NAME
from hicache_ext.storage.tiers.file.pages.tree import ABSENT, PackFile, PageTree, directories, is_alone, keys_in

Words = npt.NDArray[np.int64]

_COARSE = 5.0
"""Seconds. File systems keep times to 2 seconds at worst, and a server's clock may be apart from ours."""
_BLOCK_BYTES = 8
_NONE: Words = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Read:
    """A directory as it was read last."""

    changed: int
    """Its time of change then, in nanoseconds."""
    settled: bool
    """That time was old enough: what changes after it shows."""
    blocks: Words
    packs: dict[str, Words] = field(default_factory=dict)
    """By the id of the pack: its pages, dead ones, too. Not of pages alone: their names say it."""


class TreeContents:
    """Of one directory of page files. 8 bytes a page, 16 of one in a pack, from the first look on. For one
    thread at a time."""

    def __init__(self, tree: PageTree) -> None:
        self._tree = tree
        self._read: dict[bytes, dict[str, _Read]] = {}
        """By identity and path of a directory."""

    def block_hashes(self, digest: bytes) -> Words:
        """As ``PageLister``. Raises OSError."""
        before, now = self._read.get(digest, {}), {}
        for place in directories(self._tree.identity_path(digest), FILES_NAME):
            if (read := self._read_again(place.path, digest, before.get(place.path))) is not None:
                now[place.path] = read
        self._read[digest] = now
        return np.concatenate([_NONE, *[read.blocks for read in now.values()]])

    def _read_again(self, path: str, identity: bytes, before: _Read | None) -> _Read | None:
        try:
            changed = os.stat(path, follow_symlinks=False).st_mtime_ns
        except ABSENT:
            return None
        if before is not None and before.settled and before.changed == changed:
            return before
        settled = time.time() - changed / 1e9 > _COARSE
        known = {} if before is None else before.packs
        packs: dict[str, Words] = {}
        alone: list[bytes] = []
        living = [_NONE]
        for file, found in self._tree.packs_in(path):
            if is_alone(found.pack):
                alone.append(bytes.fromhex(found.pack.id)[:_BLOCK_BYTES])
                continue
            blocks = known.get(found.pack.id)
            if blocks is None:
                try:
                    blocks = _blocks_of_pack(file, identity, found)
                except OSError:
                    # Gone, or renamed meanwhile: the next look finds out.
                    settled = False
                    continue
            packs[found.pack.id] = blocks
            living.append(blocks[found.living])
        return _Read(changed, settled, np.concatenate([*living, _blocks_of(b"".join(alone))]), packs)


def _blocks_of_pack(file: str, identity: bytes, found: PackFile) -> Words:
    """Pages of which the key is not known cannot be read either: they are told as none that anybody asks for."""
    keys = [key or bytes(KEY_LENGTH) for key in keys_in(file, identity, found.pack)]
    return _blocks_of(b"".join([key[IDENTITY_LENGTH:][:_BLOCK_BYTES] for key in keys]))


def _blocks_of(joined: bytes) -> Words:
    return np.frombuffer(joined, ">i8").astype(np.int64)

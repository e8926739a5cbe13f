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
from hicache_ext.storage.tiers.file.modes import BUCKET_NAME, FANOUT_NAME, PAGE_NAME
from hicache_ext.storage.tiers.file.pages.pack_tree import PackFile, keys_in
from hicache_ext.storage.tiers.file.pages.scanning import ABSENT, directories, entries
from hicache_ext.storage.tiers.file.pages.tree import PageTree

Words = npt.NDArray[np.int64]

_COARSE = 5.0
"""Seconds. File systems keep times to 2 seconds at worst, and a server's clock may be apart from ours."""
_BLOCK_BYTES = 8
_DIGITS = 2 * _BLOCK_BYTES
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
    """In a bucket, by the id of the pack: its pages, dead ones, too."""


class TreeContents:
    """Of one directory of page files and packs. 8 bytes a page, 16 of one in a pack, from the first look on. For one
    thread at a time."""

    def __init__(self, tree: PageTree) -> None:
        self._tree = tree
        self._read: dict[bytes, dict[str, _Read]] = {}
        """By identity and path of a directory."""

    def block_hashes(self, digest: bytes) -> Words:
        """As ``PageLister``. Raises OSError."""
        before, now = self._read.get(digest, {}), {}
        for fan_out in directories(self._tree.pages / digest.hex(), FANOUT_NAME):
            if (read := _read_again(fan_out.path, before.get(fan_out.path), None)) is not None:
                now[fan_out.path] = read
        for bucket in directories(self._tree.packs.identity_path(digest), BUCKET_NAME):
            if (read := _read_again(bucket.path, before.get(bucket.path), self._tree)) is not None:
                now[bucket.path] = read
        self._read[digest] = now
        return np.concatenate([_NONE, *[read.blocks for read in now.values()]])


def _read_again(path: str, before: _Read | None, packs: PageTree | None) -> _Read | None:
    """``packs``: given for a bucket."""
    try:
        changed = os.stat(path, follow_symlinks=False).st_mtime_ns
    except ABSENT:
        return None
    if before is not None and before.settled and before.changed == changed:
        return before
    settled = time.time() - changed / 1e9 > _COARSE
    if packs is not None:
        return _read_bucket(path, changed, settled, {} if before is None else before.packs, packs)
    names = [entry.name for entry in entries(path, PAGE_NAME)]
    return _Read(changed, settled, _blocks_of(b"".join([bytes.fromhex(name[:_DIGITS]) for name in names])))


def _read_bucket(path: str, changed: int, settled: bool, known: dict[str, Words], tree: PageTree) -> _Read:
    identity = bytes.fromhex(path.split("/")[-2])
    packs: dict[str, Words] = {}
    living = [_NONE]
    for file, found in tree.packs.packs_in(path):
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
    return _Read(changed, settled, np.concatenate(living), packs)


def _blocks_of_pack(file: str, identity: bytes, found: PackFile) -> Words:
    """Pages of which the key is not known cannot be read either: they are told as none that anybody asks for."""
    keys = [key or bytes(KEY_LENGTH) for key in keys_in(file, identity, found.pack)]
    return _blocks_of(b"".join([key[IDENTITY_LENGTH:][:_BLOCK_BYTES] for key in keys]))


def _blocks_of(joined: bytes) -> Words:
    return np.frombuffer(joined, ">i8").astype(np.int64)

"""Maps pages to packs in memory, by the names of one directory's packs, which are listed again when they have changed.

An identity is listed when it is first looked up: some buckets immediately, the rest in the background. After that, a
lookup that misses a page lists again what other processes may have changed: the set of buckets and the two newest
buckets, each if its mtime has changed. Mtimes are coarse: one younger than a few seconds may hide the next change, so
that such a directory is listed again regardless, for at most a fifth of the time. The other buckets are checked every
half a minute; if a pack is not where it was, its bucket is listed again immediately.

This takes about 60 bytes of memory per page of the identities that were looked up.

``blocks`` returns the pages that are there, in packs and alone. Names of packs have only the first bytes of each hash;
the rest is read from each pack once. A directory whose mtime is unchanged is not read again: every addition or removal
of a page changes it, whoever made it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH, KEY_LENGTH
from hicache_ext.page.pack import Pack
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.pack_index import PackIndex, Place
from hicache_ext.storage.tiers.file.layouts import BUCKET_NAME, FILES_NAME, PACK_NAME
from hicache_ext.storage.tiers.file.pages.tree import (
    ABSENT,
    PackFile,
    PageTree,
    directories,
    file_name,
    is_alone,
    keys_in,
    pack_id_in,
    page_files,
)

PACKS_IN_A_BUCKET = 512
_NEWEST = 2
"""Newest buckets, in which other processes are expected to write."""
_RELIST_PAUSE_FACTOR = 4.0
"""Shortest pause before a listing is repeated without a new mtime, as a multiple of its duration."""
_AT_ONCE = 0.2
"""Seconds that the first listing of an identity may take; the rest is listed in the background."""
_INTERVAL = 30.0
_PAUSE = 0.001
"""Seconds between two buckets that are listed in the background, so that waiters for the lock get it."""
_SETTLED_AGE = 5.0
"""Age in seconds from which an mtime is reliable: granularity is 2 s at worst, and a server's clock may be off."""
_MTIME_LAG = 60.0
"""Seconds. If an entry is younger than the directory's mtime by this, mtimes are not kept: in FUSE, over buckets."""


@dataclass(slots=True)
class _Listed:
    """A directory as it was last listed."""

    changed: int = -1
    """Its mtime then, in nanoseconds; -1: never listed."""
    again_at: float = math.inf
    """Monotonic time at which to list it again even with the same mtime, because that was too young."""
    names: set[str] = field(default_factory=set)


Words = npt.NDArray[np.int64]
_BLOCK_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Read:
    """A directory as ``blocks`` last read it."""

    changed: int
    """Its mtime then, in nanoseconds; -1 if that was too young, so that a later change may not show in it."""
    blocks: Words
    packs: dict[str, bytes]
    """Pack id -> blocks of its pages, including dead ones. Pages alone are left out: their names say it."""


class IdentityPacks:
    """The packs of one identity. Thread-safe. Only ``blocks`` raises OSError; the others know less after an error."""

    def __init__(
        self, tree: PageTree, identity: bytes, loop: BackgroundLoop, note_error: Callable[[OSError], None]
    ) -> None:
        """Listing happens on demand, and in the background on ``loop``."""
        self.index = PackIndex()
        self.refused: set[str] = set()
        """Buckets to which this process may not write."""
        self._identity = identity
        self._path = tree.identity_path(identity)
        self._loop = loop
        self._note_error = note_error
        self._lock = threading.Lock()
        """Held while a directory is listed."""
        self._is_new = True
        """Whether no refresh has finished yet."""
        self._is_complete = False
        """Whether every bucket was listed at least once."""
        self._home = _Listed()
        self._buckets: dict[str, _Listed] = {}
        self._files_lock = threading.Lock()
        self._files: dict[str, tuple[str, int]] = {}
        """Pack id -> its bucket, and the mask of its dead pages."""
        self._version = object()
        """Replaced whenever a bucket was listed, or this process added a pack."""
        self._read: dict[str, _Read] = {}
        """Directory path -> what ``blocks`` has read there."""

    def find(self, keys: Sequence[bytes], *, again: bool = True) -> list[Place | None]:
        """Locate each page by names. ``again``: if one is missing, refresh what other processes have changed."""
        before = self._version
        places = self.index.find(keys)
        if again and None in places:
            self.refresh()
            if self._version is before:
                return places
            places = self.index.find(keys)
        return places

    def find_all(self, key: bytes, *, whole: bool = False) -> list[Place]:
        """Return every place of a page, according to the names. ``whole``: list all buckets first."""
        self.refresh(everything=whole and not self._is_complete)
        return self.index.find_all(key)

    def path(self, pack: Pack) -> tuple[str, int]:
        """Return the path of the pack and the mask of its dead pages, as far as this process knows."""
        bucket, dead = (pack.id[:2], 0) if is_alone(pack) else self._files.get(pack.id, (pack.id[:11], 0))
        return f"{self._path}/{bucket}/{file_name(pack, dead)}", dead

    def look_for(self, pack: Pack) -> bool:
        """List the bucket of a pack that was not found under its path; return whether the pack is there under any
        name."""
        bucket, _ = self._files.get(pack.id, ("", 0))
        if not bucket:
            return False
        with self._lock:
            names = self._list(bucket, force=True)
            if names is None:
                return True
            if not any(pack_id_in(name) == pack.id for name in names):
                self.forget(pack.id)
        return self.index.pack(pack.id) is not None

    def bucket_for_writing(self) -> str:
        """Return the name of the bucket for a new pack. It may not exist yet."""
        newest_first = sorted(self._buckets, reverse=True)
        for bucket in newest_first[:_NEWEST]:
            listed = self._buckets.get(bucket)
            if listed is not None and len(listed.names) < PACKS_IN_A_BUCKET and bucket not in self.refused:
                return bucket
        now = f"{int(time.time() * 1000):011x}"
        # Sort it after all others: new packs are looked up in the newest buckets.
        after = f"{int(newest_first[0], 16) + 1:011x}" if newest_first else now
        return max(now, after) if len(after) == len(now) else now

    def add(self, found: PackFile, bucket: str) -> None:
        """Add a pack that this process has written, or renamed to remove pages from it."""
        self._buckets.setdefault(bucket, _Listed()).names.add(file_name(found.pack, found.dead))
        self._record_pack(found, bucket)
        self._version = object()

    def forget(self, pack_id: str) -> None:
        """Forget a pack that is gone."""
        self._files.pop(pack_id, None)
        self.index.forget(pack_id)

    def _record_pack(self, found: PackFile, bucket: str) -> None:
        """Take over a name. Dead pages stay dead: another thread may have seen a later name of the pack."""
        with self._files_lock:
            dead = self._files.get(found.pack.id, ("", 0))[1] | found.dead
            self._files[found.pack.id] = bucket, dead
        self.index.add(found.pack)
        self.index.forget_pages(found.pack.id, dead)

    def blocks(self) -> Words:
        """Return the blocks of all pages, in packs and alone, as ``PageLister`` does. This keeps 8 bytes of memory per
        page, 16 if it is in a pack, to read nothing twice. For one thread at a time. Raises OSError."""
        self._read = {
            place.path: _read_if_changed(place.path, self._identity, self._read.get(place.path))
            for place in directories(self._path, FILES_NAME)
        }
        return np.concatenate([np.empty(0, np.int64), *[read.blocks for read in self._read.values()]])

    # -- reading names ---------------------------------------------------------------------------------------------

    def refresh(self, *, everything: bool = False) -> None:
        """List what others may have changed: all buckets on first use or, without a time limit, for ``everything``."""
        until = math.inf if everything else time.monotonic() + _AT_ONCE
        most = None if everything or self._is_new else _NEWEST
        try:
            with self._lock:
                self._list_buckets()
        except OSError as error:
            self._note_error(error)
            return
        for position, bucket in enumerate(sorted(self._buckets, reverse=True)[:most]):
            if position >= _NEWEST and (time.monotonic() > until or self._loop.stopping):
                break
            with self._lock:
                self._list(bucket)
            # Pause, so that a call waits for one bucket and not until all are listed in the background.
            if everything:
                self._loop.rest(_PAUSE)
        else:
            self._is_complete = self._is_complete or everything
        self._is_new = False

    def _list_buckets(self) -> None:
        now = _mtime(self._path)
        if not _needs_listing(self._home, now):
            return
        begun = time.monotonic()
        names = [entry.name for entry in directories(self._path, BUCKET_NAME)]
        self._home = _state_after_listing(now, begun, youngest=max(names, default=""))
        for bucket in names:
            self._buckets.setdefault(bucket, _Listed())
        for bucket in self._buckets.keys() - set(names):
            self._list(bucket, force=True)

    def _list(self, bucket: str, *, force: bool = False) -> set[str] | None:
        """List a bucket if it has changed or ``force``; return its names, None if they cannot be read."""
        path, listed = f"{self._path}/{bucket}", self._buckets.get(bucket) or _Listed()
        try:
            now = _mtime(path)
            if not force and not _needs_listing(listed, now):
                return listed.names
            begun = time.monotonic()
            # Packs that this process writes during the listing may not be in it.
            before = listed.names.copy()
            names = {name for name in os.listdir(path) if PACK_NAME.fullmatch(name)}
        except ABSENT:
            names, now = set(), 0
        except OSError as error:
            self._note_error(error)
            return None
        for name in names - before:
            if (found := PackFile.parse(name)) is not None:
                self._record_pack(found, bucket)
            else:
                # The name is damaged: it may begin with the id of a pack that is gone.
                names.discard(name)
        here = set(map(pack_id_in, names))
        for gone in set(map(pack_id_in, before - names)) - here:
            self.forget(gone)
        if now:
            self._buckets[bucket] = _state_after_listing(now, begun, names, youngest=max(names, default="")[:11])
        else:
            self._buckets.pop(bucket, None)
        self._version = object()
        return names


class PackCatalogue:
    """The packs of one directory, identity by identity. Thread-safe."""

    def __init__(self, tier: str, tree: PageTree, note_error: Callable[[OSError], None]) -> None:
        """``note_error`` is called with every error of the disk."""
        self._tree = tree
        self._note_error = note_error
        self._known: dict[bytes, IdentityPacks] = {}
        self._state = threading.Lock()
        self._loop = BackgroundLoop(f"hicache-{tier}-packs", self._refresh_all)

    def close(self) -> None:
        self._loop.stop()

    def of(self, identity: bytes) -> IdentityPacks:
        """Return the packs of an identity, and refresh them in the background from now on."""
        known = self._known.get(identity)
        if known is None:
            with self._state:
                known = IdentityPacks(self._tree, identity, self._loop, self._note_error)
                known = self._known.setdefault(identity, known)
        elif self._loop.running:
            return known
        self._loop.wake()
        return known

    def forget_identity(self, identity: bytes) -> None:
        """Forget an identity that was cleared."""
        with self._state:
            self._known.pop(identity, None)

    def _refresh_all(self) -> float:
        for known in list(self._known.values()):
            known.refresh(everything=True)
        return _INTERVAL


# -- listing pages -----------------------------------------------------------------------------------------------------


def _read_if_changed(path: str, identity: bytes, before: _Read | None) -> _Read:
    changed = _mtime(path)
    if before is not None and before.changed == changed:
        return before
    if not changed or time.time() - changed / 1e9 <= _SETTLED_AGE:
        changed = -1
    known = {} if before is None else before.packs
    packs: dict[str, bytes] = {}
    living: list[bytes] = []
    for entry, found in page_files(path):
        if not found.pack.count:
            continue
        blocks = known.get(found.pack.id)
        if blocks is None:
            try:
                keys = keys_in(entry.path, identity, found.pack)
            except OSError:
                # It is gone or was renamed meanwhile: the next read finds out.
                changed = -1
                continue
            # A page whose key is unknown cannot be read, either: report a block that nobody looks up.
            blocks = b"".join([(key or bytes(KEY_LENGTH))[IDENTITY_LENGTH:][:_BLOCK_BYTES] for key in keys])
        if not is_alone(found.pack):
            packs[found.pack.id] = blocks
        living += [blocks[position * _BLOCK_BYTES :][:_BLOCK_BYTES] for position in found.living]
    return _Read(changed, np.frombuffer(b"".join(living), ">i8").astype(np.int64), packs)


# -- mtimes ------------------------------------------------------------------------------------------------------------


def _mtime(path: str) -> int:
    """Return the mtime of a directory in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(path, follow_symlinks=False).st_mtime_ns
    except ABSENT:
        return 0


def _state_after_listing(changed: int, begun: float, names: set[str] | None = None, youngest: str = "") -> _Listed:
    """Return the state after a listing. ``youngest``: the latest creation time in the names of its entries."""
    ended = time.monotonic()
    settled = time.time() - changed / 1e9 > _SETTLED_AGE and int(youngest or "0", 16) / 1e3 - changed / 1e9 < _MTIME_LAG
    return _Listed(changed, math.inf if settled else ended + _RELIST_PAUSE_FACTOR * (ended - begun), names or set())


def _needs_listing(listed: _Listed, changed: int) -> bool:
    return listed.changed != changed or time.monotonic() >= listed.again_at

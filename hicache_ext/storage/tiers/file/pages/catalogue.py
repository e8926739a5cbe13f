"""Which page is in which pack, in memory: the names of the packs of one directory, read again when they have changed.

An identity is read when it is asked for: some buckets at once, the rest in the background. After that a look-up that
misses a page reads again what others may have changed: the list of buckets and the two newest ones, each if its time of
change is another one. Times of change are coarse: one that is younger than a few seconds says nothing of the next
change, so that such a directory is read again anyway, for at most a fifth of the time. The other buckets are looked at
every half a minute; a pack that is not where it was makes its bucket be read again at once.

About 60 bytes of memory a page, of identities that were asked for.

``blocks`` tells which pages there are, in packs and alone: names of packs have only the first bytes of each hash, and
the rest is read from each pack once. A directory whose time of change is as it was is not read again: pages come and go
by a change of it, whoever did it.
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
"""Buckets in which others are expected to write."""
_REST = 4.0
"""Times the duration of a listing after which it is repeated at the earliest without a new time of change."""
_AT_ONCE = 0.2
"""Seconds that the first look at an identity takes; what is left is read in the background."""
_INTERVAL = 30.0
_PAUSE = 0.001
"""Seconds between two buckets that are read in the background: who waits for the lock gets it."""
_COARSE = 5.0
"""Seconds. File systems keep times to 2 seconds at worst, and a server's clock may be apart from ours."""
_NOT_KEPT = 60.0
"""Seconds. A directory that has something so much younger than its time of change has none: in FUSE, over buckets."""


@dataclass(slots=True)
class _Listed:
    """A directory as it was listed last."""

    changed: int = -1
    """Its time of change then, in nanoseconds; -1: not yet."""
    again_at: float = math.inf
    """When it is listed again although that time is the same, since it was too young: monotonic."""
    names: set[str] = field(default_factory=set)


Words = npt.NDArray[np.int64]
_BLOCK_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Read:
    """A directory as it was read last."""

    changed: int
    """Its time of change then, in nanoseconds; -1 where that was too young: what changed after it may not show."""
    blocks: Words
    packs: dict[str, bytes]
    """By the id of the pack: its pages, dead ones, too. Not of pages alone: their names say it."""


class IdentityPacks:
    """The packs of one identity. Thread-safe. Never raises OSError, but for ``blocks``: it knows less then."""

    def __init__(
        self, tree: PageTree, identity: bytes, loop: BackgroundLoop, note_error: Callable[[OSError], None]
    ) -> None:
        """``loop`` refreshes it in the background."""
        self.index = PackIndex()
        self.refused: set[str] = set()
        """Buckets that this process may not write to."""
        self._identity = identity
        self._path = tree.identity_path(identity)
        self._loop = loop
        self._note_error = note_error
        self._lock = threading.Lock()
        """While a directory is listed."""
        self._is_new = True
        """No look at it has ended yet."""
        self._is_whole = False
        """Every bucket was read once."""
        self._home = _Listed()
        self._buckets: dict[str, _Listed] = {}
        self._learning = threading.Lock()
        self._files: dict[str, tuple[str, int]] = {}
        """By the id of a pack: its bucket, and which of its pages are dead."""
        self._news = object()
        """Another one since a bucket was listed, or had a pack of this process added."""
        self._read: dict[str, _Read] = {}
        """What ``blocks`` has read, by the path of a directory."""

    def find(self, keys: Sequence[bytes], *, again: bool = True) -> list[Place | None]:
        """Where each page is, as far as names tell. ``again``: where one is missing, look what others have changed."""
        before = self._news
        places = self.index.find(keys)
        if again and None in places:
            self.refresh()
            if self._news is before:
                return places
            places = self.index.find(keys)
        return places

    def find_all(self, key: bytes, *, whole: bool = False) -> list[Place]:
        """Every place of a page, as far as names tell, all of which are read for ``whole``."""
        self.refresh(everything=whole and not self._is_whole)
        return self.index.find_all(key)

    def path(self, pack: Pack) -> tuple[str, int]:
        """Where the pack is, and which of its pages are dead there, as far as this process knows."""
        bucket, dead = (pack.id[:2], 0) if is_alone(pack) else self._files.get(pack.id, (pack.id[:11], 0))
        return f"{self._path}/{bucket}/{file_name(pack, dead)}", dead

    def look_for(self, pack: Pack) -> bool:
        """Read the bucket of a pack that was not found under its path; whether the pack is there, under whatever
        name."""
        bucket, _ = self._files.get(pack.id, ("", 0))
        if not bucket:
            return False
        with self._lock:
            names = self._list(bucket, anyway=True)
            if names is None:
                return True
            if not any(pack_id_in(name) == pack.id for name in names):
                self.forget(pack.id)
        return self.index.pack(pack.id) is not None

    def bucket_for_writing(self) -> str:
        """The name of the bucket that a new pack goes to. It may not exist."""
        newest_first = sorted(self._buckets, reverse=True)
        for bucket in newest_first[:_NEWEST]:
            listed = self._buckets.get(bucket)
            if listed is not None and len(listed.names) < PACKS_IN_A_BUCKET and bucket not in self.refused:
                return bucket
        now = f"{int(time.time() * 1000):011x}"
        # Never before the others: new packs are looked for in the newest buckets.
        after = f"{int(newest_first[0], 16) + 1:011x}" if newest_first else now
        return max(now, after) if len(after) == len(now) else now

    def add(self, found: PackFile, bucket: str) -> None:
        """This process has written a pack, or given it the name that takes pages of it away."""
        self._buckets.setdefault(bucket, _Listed()).names.add(file_name(found.pack, found.dead))
        self._learn(found, bucket)
        self._news = object()

    def forget(self, pack_id: str) -> None:
        """A pack is gone."""
        self._files.pop(pack_id, None)
        self.index.forget(pack_id)

    def _learn(self, found: PackFile, bucket: str) -> None:
        """Another thread may have learnt of a later name of the pack: what was dead stays dead."""
        with self._learning:
            dead = self._files.get(found.pack.id, ("", 0))[1] | found.dead
            self._files[found.pack.id] = bucket, dead
        self.index.add(found.pack)
        self.index.forget_pages(found.pack.id, dead)

    def blocks(self) -> Words:
        """The blocks of the pages that are there, in packs and alone, as ``PageLister`` tells them: 8 bytes of memory a
        page, 16 of one in a pack. What was read before is not read again. For one thread at a time. Raises OSError."""
        self._read = {
            place.path: _read_again(place.path, self._identity, self._read.get(place.path))
            for place in directories(self._path, FILES_NAME)
        }
        return np.concatenate([np.empty(0, np.int64), *[read.blocks for read in self._read.values()]])

    # -- reading names ---------------------------------------------------------------------------------------------

    def refresh(self, *, everything: bool = False) -> None:
        """Read again what others may have changed: at first, and for long with ``everything``, in all buckets."""
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
            # A call waits for one bucket, not until all were read in the background.
            if everything:
                self._loop.rest(_PAUSE)
        else:
            self._is_whole = self._is_whole or everything
        self._is_new = False

    def _list_buckets(self) -> None:
        now = _changed(self._path)
        if not _differs(self._home, now):
            return
        begun = time.monotonic()
        names = [entry.name for entry in directories(self._path, BUCKET_NAME)]
        self._home = _listed(now, begun, youngest=max(names, default=""))
        for bucket in names:
            self._buckets.setdefault(bucket, _Listed())
        for bucket in self._buckets.keys() - set(names):
            self._list(bucket, anyway=True)

    def _list(self, bucket: str, *, anyway: bool = False) -> set[str] | None:
        """Read the names in a bucket, if it has changed or ``anyway``; the names, None where they cannot be read."""
        path, listed = f"{self._path}/{bucket}", self._buckets.get(bucket) or _Listed()
        try:
            now = _changed(path)
            if not anyway and not _differs(listed, now):
                return listed.names
            begun = time.monotonic()
            # What this process writes while the names are read may not be among them.
            before = listed.names.copy()
            names = {name for name in os.listdir(path) if PACK_NAME.fullmatch(name)}
        except ABSENT:
            names, now = set(), 0
        except OSError as error:
            self._note_error(error)
            return None
        for name in names - before:
            if (found := PackFile.parse(name)) is not None:
                self._learn(found, bucket)
            else:
                # Damage: it may begin with the id of a pack that is gone.
                names.discard(name)
        here = set(map(pack_id_in, names))
        for gone in set(map(pack_id_in, before - names)) - here:
            self.forget(gone)
        if now:
            self._buckets[bucket] = _listed(now, begun, names, youngest=max(names, default="")[:11])
        else:
            self._buckets.pop(bucket, None)
        self._news = object()
        return names


class PackCatalogue:
    """The packs of one directory, identity by identity. Thread-safe."""

    def __init__(self, tier: str, tree: PageTree, note_error: Callable[[OSError], None]) -> None:
        """``note_error`` hears of every error of the disk."""
        self._tree = tree
        self._note_error = note_error
        self._known: dict[bytes, IdentityPacks] = {}
        self._state = threading.Lock()
        self._loop = BackgroundLoop(f"hicache-{tier}-packs", self._look_at_everything)

    def close(self) -> None:
        self._loop.stop()

    def of(self, identity: bytes) -> IdentityPacks:
        """The packs of an identity, whose names are read in the background from now on."""
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
        """It was cleared."""
        with self._state:
            self._known.pop(identity, None)

    def _look_at_everything(self) -> float:
        for known in list(self._known.values()):
            known.refresh(everything=True)
        return _INTERVAL


# -- which pages there are ---------------------------------------------------------------------------------------------


def _read_again(path: str, identity: bytes, before: _Read | None) -> _Read:
    changed = _changed(path)
    if before is not None and before.changed == changed:
        return before
    if not changed or time.time() - changed / 1e9 <= _COARSE:
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
                # Gone, or renamed meanwhile: the next look finds out.
                changed = -1
                continue
            # A page of which the key is not known cannot be read either: it is told as none that anybody asks for.
            blocks = b"".join([(key or bytes(KEY_LENGTH))[IDENTITY_LENGTH:][:_BLOCK_BYTES] for key in keys])
        if not is_alone(found.pack):
            packs[found.pack.id] = blocks
        living += [blocks[position * _BLOCK_BYTES :][:_BLOCK_BYTES] for position in found.living]
    return _Read(changed, np.frombuffer(b"".join(living), ">i8").astype(np.int64), packs)


# -- times of change ---------------------------------------------------------------------------------------------------


def _changed(path: str) -> int:
    """The time of change of a directory in nanoseconds, 0 where there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_mtime_ns
    except ABSENT:
        return 0


def _listed(changed: int, begun: float, names: set[str] | None = None, youngest: str = "") -> _Listed:
    """``youngest``: when what is in it was made, as its name says."""
    ended = time.monotonic()
    settled = time.time() - changed / 1e9 > _COARSE and int(youngest or "0", 16) / 1e3 - changed / 1e9 < _NOT_KEPT
    return _Listed(changed, math.inf if settled else ended + _REST * (ended - begun), names or set())


def _differs(listed: _Listed, changed: int) -> bool:
    return listed.changed != changed or time.monotonic() >= listed.again_at

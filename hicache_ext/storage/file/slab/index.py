"""Which page is in which slot: the LMDB index of one directory, shared by all processes on it.

LMDB gives what a cache index needs here: look-ups of about half a microsecond without a lock, one writer at a time
across processes, and a killed process that leaves nothing half done (its transaction never happened, its lock is
released). What is stored: records.py; what can be changed: change.py.

Clearing an identity raises its generation: its pages are out of reach at once, and are removed little by little.

Nothing is synced: after a power loss the index may be anything, so it is used again only by the boot that wrote it, or
after every process has closed it in order (then it was synced); otherwise it is rebuilt from the envelopes
(directory.py).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from hicache_ext.envelope import IDENTITY_LENGTH, KEY_LENGTH
from hicache_ext.storage.file.eviction import Rank
from hicache_ext.storage.file.slab.chains import ChainLookups
from hicache_ext.storage.file.slab.change import IndexChange
from hicache_ext.storage.file.slab.ghosts import GhostTable
from hicache_ext.storage.file.slab.placed import NONE_PLACED, Placed
from hicache_ext.storage.file.slab.ranking import Ranking
from hicache_ext.storage.file.slab.records import (
    CREATED,
    FIRST_GENERATION,
    FREE,
    FREE_SLOTS,
    GENERATION,
    HELD,
    INDEX_VERSION,
    NUMBER,
    ORDER,
    PAGE,
    PAGE_COLUMNS,
    PLACE,
    SLAB,
    SLOT_SIZE,
    USES,
    USES_NAME,
    Place,
    Slab,
    slots_of,
)
from hicache_ext.storage.file.slab.touches import Uses
from hicache_ext.storage.file.usage import writer_name
from hicache_ext.storage.store import PageKeys

logger = logging.getLogger(__name__)

_MAP_SIZE = 1 << 38
"""Bytes of address space the index may grow to; the file itself stays as small as its content."""
_MAX_READERS = 1024
_CHANGES_BETWEEN_READER_CHECKS = 8
"""A process killed inside a read transaction pins what it was looking at, and the index grows with every change until
that is noticed: 20 MB within seconds when this was 256."""
_FRESH_USES_KEPT = 0.05
"""Seconds in which other processes' writes do not make a use of a page worth noting that was not before."""
_CLEAR_BATCH = 2048
"""Pages of a cleared identity freed in one transaction: writers wait for no longer than that takes."""

_VERSION = str(INDEX_VERSION).encode()
_SLAB_CHANGES = b"slab changes"
_GHOSTS = b"ghosts"
_HIGHEST = (1 << 64) - 1


class IndexedPage(NamedTuple):
    """What the index tells of a page."""

    key: bytes
    place: Place
    written: int
    """Wall-clock seconds."""


class SlabIndex:
    """The index of one directory. Thread-safe; one per process and directory (LMDB's rule)."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the index in directory ``path``. Raises lmdb.Error or OSError."""
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._data = path / "data.mdb"
        self._ghosts: GhostTable | None = None
        self._environment = lmdb.open(
            str(path),
            map_size=_MAP_SIZE,
            max_dbs=7,
            max_readers=_MAX_READERS,
            # No sync: a power loss is met by the rebuild. Not a writable map, though it would halve the cost of a
            # write: a full disk would then be a SIGBUS, and a stray pointer of SGLang's many native libraries could
            # change the index.
            sync=False,
            metasync=False,
            max_spare_txns=16,
        )
        with self._environment.begin(write=True) as transaction:
            (
                self.pages_db,
                self.groups_db,
                self.order_db,
                self.free_db,
                self.pending_db,
                self.slabs_db,
                self.state_db,
            ) = (
                self._environment.open_db(name, txn=transaction)
                for name in (b"pages", b"groups", b"order", b"free", b"pending", b"slabs", b"state")
            )
            version = transaction.get(b"version", db=self.state_db)
            if version is None and not transaction.stat(self.slabs_db)["entries"]:
                version = _VERSION
                transaction.put(b"version", version, db=self.state_db)
            if version == _VERSION:
                self._open_ghosts(transaction)
        if version != _VERSION:
            self._environment.close()
            raise lmdb.Error("the index was written by another version of hicache_ext")
        self.writer = writer_name().encode()
        self._changes = itertools.count()
        self._portions = itertools.count()
        self._chains = ChainLookups()
        self._fresh_uses: tuple[float, dict[int, int]] = (0.0, {})
        # The slabs as of a number of changes: they are needed by every call and change once in many thousands.
        self._slabs_seen: tuple[bytes | None, dict[int, Slab]] = (b"none seen", {})

    def close(self, *, sync: bool) -> None:
        """Raises lmdb.Error when ``sync`` fails; it is closed all the same."""
        try:
            if sync:
                self._environment.sync(True)
        finally:
            self._environment.close()
            self._ghosts = None

    # -- reading ---------------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes], oldest: bytes = b"") -> tuple[Placed, bool]:
        """Those of these pages that are there, in their order, each with its position in ``keys``; and whether using
        them now is worth a ``touch``. ``oldest`` as for ``contains``."""
        with self._environment.begin(db=self.pages_db) as transaction:
            values: list[Any] = list(map(transaction.get, self.full_keys(transaction, keys)))
            positions = np.arange(len(values))
            if oldest or None in values:
                found = [n for n, value in enumerate(values) if value is not None and value >= oldest]
                positions, values = positions[found], [values[n] for n in found]
            if not values:
                return NONE_PLACED, False
            # Column by column, without a step of Python per page.
            columns = np.frombuffer(b"".join(values), PAGE_COLUMNS)
            slabs, slots, lengths = (columns[name].astype(np.int64) for name in ("slab", "slot", "length"))
            fresh = self._oldest_fresh_uses(transaction, set(slabs.tolist()))
            used = columns["used"]
            stale = int(used.min()) < max(fresh.values()) and any(
                int(used[slabs == slab].min()) < oldest_fresh for slab, oldest_fresh in fresh.items()
            )
        return Placed(slabs, slots, lengths, positions), stale

    def _oldest_fresh_uses(self, transaction: Any, numbers: set[int]) -> dict[int, int]:
        """``Ranking.oldest_fresh_use`` of these slabs, at most so old as not to matter."""
        until, known = self._fresh_uses
        if time.monotonic() >= until or not known.keys() >= numbers:
            slabs = self._slabs_by_number(transaction)
            ranking = Ranking(slabs, transaction, self.state_db)
            known = {number: ranking.oldest_fresh_use(slabs[number].slot_size) for number in numbers}
            self._fresh_uses = (time.monotonic() + _FRESH_USES_KEPT, known)
        return {number: known[number] for number in numbers}

    def find(self, key: bytes) -> Place | None:
        """Where one page is."""
        placed, _ = self.locate([key])
        return Place(*placed.pages()[0][:3]) if placed else None

    def contains(self, keys: Sequence[bytes], oldest: bytes = b"") -> list[bool]:
        """Which pages are there. Those written before ``oldest`` (``CREATED``, packed) are not."""
        with self._environment.begin(db=self.pages_db) as transaction:
            values = map(transaction.get, self.full_keys(transaction, keys))
            return [value is not None and value >= oldest for value in values]

    def count_leading(self, keys: Sequence[bytes], oldest: bytes = b"") -> int:
        with self._environment.begin(db=self.pages_db) as transaction:
            if isinstance(keys, PageKeys) and not oldest:
                generation = self._generation(transaction, keys.identity)
                slabs = self._slabs_by_number(transaction)
                return self._chains.count_leading(transaction, self.pages_db, self.groups_db, slabs, generation, keys)
            values = map(transaction.get, self.full_keys(transaction, keys))
            return sum(1 for _ in takewhile(lambda value: value is not None and value >= oldest, values))

    def expired(self, oldest: bytes, begin: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Of up to ``limit`` entries of ``pages`` from ``begin`` on: the keys of those written before ``oldest``, and
        where to go on, None at the end."""
        found: list[bytes] = []
        with self._environment.begin() as transaction, transaction.cursor(self.pages_db) as cursor:
            if not cursor.set_range(begin):
                return found, None
            for number, (full_key, value) in enumerate(cursor):
                if number == limit:
                    return found, bytes(full_key)
                if value < oldest:
                    found.append(bytes(full_key))
        return found, None

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of slots that the pages under each of these hashes take, over all identities."""
        taken = [0] * len(hashes)
        with self._environment.begin(db=self.pages_db) as transaction:
            slabs = self._slabs_by_number(transaction)
            for identity in self.identities_in(transaction):
                full_keys = self.full_keys(transaction, [identity + page_hash for page_hash in hashes])
                for position, full_key in enumerate(full_keys):
                    value = transaction.get(full_key)
                    if value is not None:
                        taken[position] += slabs[PAGE.unpack(value)[1]].slot_size
        return taken

    def identities_in(self, transaction: Any) -> list[bytes]:
        """Digests that have pages, found or cleared."""
        found: list[bytes] = []
        with transaction.cursor(self.pages_db) as cursor:
            more = cursor.first()
            while more:
                full_key = bytes(cursor.key())
                digest = full_key[GENERATION.size : GENERATION.size + IDENTITY_LENGTH]
                found.append(digest)
                more = cursor.set_range(
                    full_key[: GENERATION.size] + digest + b"\xff" * (KEY_LENGTH - IDENTITY_LENGTH + 1)
                )
        return list(dict.fromkeys(found))

    def full_keys(self, transaction: Any, keys: Sequence[bytes]) -> list[bytes]:
        """The keys in ``pages``: with the generation of their identity in front."""
        if isinstance(keys, PageKeys):
            return keys.behind(self._generation(transaction, keys.identity))
        generations = {
            digest: self._generation(transaction, digest) for digest in {key[:IDENTITY_LENGTH] for key in keys}
        }
        if len(generations) == 1:
            (generation,) = generations.values()
            return [generation + key for key in keys]
        return [generations[key[:IDENTITY_LENGTH]] + key for key in keys]

    def _generation(self, transaction: Any, digest: bytes) -> bytes:
        stored: bytes = transaction.get(b"generation" + digest, db=self.state_db) or FIRST_GENERATION
        return stored

    def size(self) -> int:
        """Bytes of the index's files."""
        return self._data.stat().st_size + (self._ghosts.bytes if self._ghosts else 0)

    def slabs(self) -> list[Slab]:
        with self._environment.begin() as transaction:
            return list(self._slabs_by_number(transaction).values())

    def counts(self) -> dict[str, int]:
        """How many pages, free slots, pending slots and slabs there are, for tools and tests."""
        with self._environment.begin() as transaction:
            free, pending = transaction.cursor(self.free_db), transaction.cursor(self.pending_db)
            return {
                "pages": int(transaction.stat(self.pages_db)["entries"]),
                "free": sum(FREE_SLOTS.unpack(bits)[0].bit_count() for _, bits in free),
                "pending": sum(len(slots) // PLACE.size for _, slots in pending),
                "slabs": int(transaction.stat(self.slabs_db)["entries"]),
            }

    def pages(self) -> Iterator[IndexedPage]:
        """Every page that can be found, identity by identity, as of one moment."""
        with self._environment.begin() as transaction, transaction.cursor(self.pages_db) as cursor:
            for full_key, value in cursor:
                key = bytes(full_key[GENERATION.size :])
                if self.full_keys(transaction, [key]) == [full_key]:
                    created, slab, slot, length, _ = PAGE.unpack(value)
                    yield IndexedPage(key, Place(slab, slot, length), CREATED.unpack(created)[0])

    def uses_of(self, digest: bytes) -> Uses | None:
        """What was read of an identity; None when nothing was."""
        with self._environment.begin() as transaction:
            return self.uses(transaction, digest)

    def uses(self, transaction: Any, digest: bytes) -> Uses | None:
        stored = transaction.get(USES_NAME + digest, db=self.state_db)
        return None if stored is None else Uses(*USES.unpack(stored))

    def check(self) -> list[str]:
        """Every way in which the index contradicts itself, one sentence each; empty when it is sound."""
        faults: list[str] = []
        with self._environment.begin() as transaction:
            slabs = self._slabs_by_number(transaction)
            states: dict[tuple[int, int], str] = {}

            def claim(slab: int, slot: int, state: str) -> None:
                if slab not in slabs or slot >= slabs[slab].slots:
                    faults.append(f"{state} slot {slab}/{slot} is in no slab")
                elif (slab, slot) in states:
                    faults.append(f"slot {slab}/{slot} is both {states[slab, slot]} and {state}")
                states[slab, slot] = state

            def entries(database: Any) -> Any:
                return transaction.cursor(database)

            for where, bits in entries(self.free_db):
                size, slab, first = FREE.unpack(where)
                for offset in slots_of(bits):
                    claim(slab, first + offset, "free")
                if slab in slabs and slabs[slab].slot_size != size:
                    faults.append(f"free slots {slab}/{first} have size {size}, their slab {slabs[slab].slot_size}")
            for _, items in entries(self.pending_db):
                for slab, slot in PLACE.iter_unpack(items):
                    claim(slab, slot, "pending")
            pages = 0
            for place, value in entries(self.groups_db):
                slab, first = PLACE.unpack(place)
                lowest = _HIGHEST
                for offset, priority, key in HELD.iter_unpack(value):
                    pages += 1
                    claim(slab, first + offset, "occupied")
                    lowest = min(lowest, priority)
                    page = transaction.get(key, db=self.pages_db)
                    if page is None or PAGE.unpack(page)[1:3] != (slab, first + offset):
                        faults.append(f"slot {slab}/{first + offset} names a page that is not there")
                    elif Rank.unpack(PAGE.unpack(page)[4]).priority != priority:
                        faults.append(f"slot {slab}/{first + offset} has another priority than its page")
                    elif slab in slabs and PAGE.unpack(page)[3] > slabs[slab].slot_size:
                        faults.append(f"the page in slot {slab}/{first + offset} is longer than it")
                if slab in slabs:
                    order = ORDER.pack(slabs[slab].slot_size, lowest, slab, first)
                    if transaction.get(order, db=self.order_db) is None:
                        faults.append(f"group {slab}/{first} is not where it belongs in the order of eviction")
            groups, ordered, known = (
                int(transaction.stat(db)["entries"]) for db in (self.groups_db, self.order_db, self.pages_db)
            )
            if groups != ordered:
                faults.append(f"{groups} groups, {ordered} in the order of eviction")
            if pages != known:
                faults.append(f"{known} pages, {pages} in slots")
            slots = sum(slab.slots for slab in slabs.values())
            if len(states) != slots:
                faults.append(f"{slots} slots, of which {len(states)} are accounted for")
        return faults

    # -- writing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[IndexChange]:
        """One write transaction: all of it or, when the body raises or the process dies, nothing."""
        if next(self._changes) % _CHANGES_BETWEEN_READER_CHECKS == 0:
            self._environment.reader_check()
        with self._environment.begin(write=True) as transaction:
            change = IndexChange(self, transaction, self._slabs_by_number(transaction))
            yield change
            self._fresh_uses = (0.0, {})
            if change.finish():
                number = transaction.get(_SLAB_CHANGES, db=self.state_db)
                following = int.from_bytes(number or b"", "big") + 1
                transaction.put(_SLAB_CHANGES, following.to_bytes(8, "big"), db=self.state_db)

    def free_cleared(self, digest: bytes) -> int:
        """Free the slots of all pages of older generations of an identity, in short transactions; their number."""
        freed = 0
        while True:
            with self.changing() as change:
                removed = change.remove_cleared(digest, _CLEAR_BATCH)
            freed += removed
            if not removed:
                return freed

    def ghosts(self, transaction: Any, at_least: int = 0) -> GhostTable | None:
        """The table of ghosts, for so many at least, in a write transaction; None when there is none, or no room for
        one."""
        stored = transaction.get(_GHOSTS, db=self.state_db)
        size = NUMBER.unpack(stored)[0] if stored else 0
        table = self._ghosts if self._ghosts is not None and self._ghosts.size == size else None
        try:
            if table is None and size:
                table = GhostTable(self._path, size)
            if at_least > size:
                larger = GhostTable.larger(self._path, at_least, table)
                transaction.put(_GHOSTS, NUMBER.pack(larger.size), db=self.state_db)
                table = larger
        except OSError:
            # Pages rank a little worse without it.
            logger.warning("no room for the ghosts of evicted pages beside the index %s", self._path)
        self._ghosts = table
        return table

    def next_portion(self) -> int:
        """Tells apart what this process is writing at the same time."""
        return next(self._portions)

    def _open_ghosts(self, transaction: Any) -> None:
        table = self.ghosts(transaction)
        # Tables of before a growth, and what a killed process was about to grow into.
        for path in self._path.glob("ghosts-*"):
            if table is None or path != table.path:
                path.unlink(missing_ok=True)

    def _slabs_by_number(self, transaction: Any) -> dict[int, Slab]:
        """The slabs as ``transaction``, in which none has been changed yet, sees them. Not to be modified."""
        changes = transaction.get(_SLAB_CHANGES, db=self.state_db)
        seen, slabs = self._slabs_seen
        if seen != changes:
            with transaction.cursor(self.slabs_db) as cursor:
                slabs = {
                    slab.number: slab
                    for slab in (Slab(SLOT_SIZE.unpack(number)[0], *SLAB.unpack(value)) for number, value in cursor)
                }
            self._slabs_seen = (changes, slabs)
        return slabs

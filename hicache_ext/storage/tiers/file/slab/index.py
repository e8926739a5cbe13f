"""Which page is in which slot: the index of one directory, shared by all processes on it.

What changes with every page is mapped by all processes (slot_table.py): a look-up takes no system call and no lock.
What changes rarely is in LMDB (records.py), which gives transactions and one writer at a time across processes, also
after a kill. Changes: change.py. Reasons: docs/decisions/slab-index.md.

Clearing an identity raises its generation: its pages are out of reach at once and are removed later.

Nothing is synced, so the index may be damaged after a power loss. It is used again only by the boot that wrote it, or
after every process has closed it in order (which syncs it). Otherwise it is rebuilt from the headers of the pages
(directory.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import xxhash

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.access import make_directory, make_tier_directory, open_file
from hicache_ext.runtime.liveness import writer_alive, writer_name
from hicache_ext.storage.contract.store import PageKeys, key_words
from hicache_ext.storage.tiers.file.eviction import Clock, EvictionPolicy
from hicache_ext.storage.tiers.file.slab import lookup, slot_code
from hicache_ext.storage.tiers.file.slab.change import IndexChange
from hicache_ext.storage.tiers.file.slab.ghosts import GhostTable
from hicache_ext.storage.tiers.file.slab.lmdb_file import check_length
from hicache_ext.storage.tiers.file.slab.mapped import Words
from hicache_ext.storage.tiers.file.slab.records import (
    GENERATION,
    GENERATION_NAME,
    INDEX_VERSION,
    NUMBER,
    SLAB,
    SLOT_SIZE,
    USES,
    USES_NAME,
    Place,
    Slab,
)
from hicache_ext.storage.tiers.file.slab.shapes import HEADER
from hicache_ext.storage.tiers.file.slab.slot_references import NO_SLOTS, Known, SlotReferences
from hicache_ext.storage.tiers.file.slab.slot_table import Seals, SlotTable, View
from hicache_ext.storage.tiers.file.slab.touches import Uses

logger = logging.getLogger(__name__)

_MAP_SIZE = 1 << 32
"""Bytes of address space for LMDB; the file is only as large as its content."""
_MAX_READERS = 1024
_CHANGES_BETWEEN_READER_CHECKS = 64
"""A process killed inside a read transaction keeps its snapshot, and LMDB grows with every change until that is
noticed."""
_LOOKS = 4
"""For pages that are not found while the index changes."""
_FRESH_USES_KEPT = 0.05
"""Seconds for which the answer "this use need not be noted" is kept, whatever other processes write."""
_CLEAR_BATCH = 2048
"""Pages of a cleared identity freed in one change, which is how long writers may wait."""
_AT_ONCE = 1 << 16
"""Records copied at once for tools."""

_NO_FRESH_USES: tuple[float, View | None, Words] = (0.0, None, np.empty(0, np.int64))
_VERSION = str(INDEX_VERSION).encode()
_GHOSTS = b"ghosts"
_EPOCH = b"epoch"


class IndexedPage(NamedTuple):
    """The record of a page."""

    key: bytes
    place: Place
    written: int
    """Wall-clock seconds."""


class SlabIndex:
    """The index of one directory. Thread-safe; one per process and directory (LMDB's rule)."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the index in directory ``path``. Raises lmdb.Error or OSError."""
        make_tier_directory(path.parent)
        make_directory(path)
        self._path = path
        self._data = path / "data.mdb"
        self._ghosts: GhostTable | None = None
        for file in (self._data, path / "lock.mdb"):
            # LMDB would make them with the mode of the umask, and as root's where root runs a tool. Existing files are
            # not opened: closing one would drop the locks of an LMDB of this process.
            if not os.path.lexists(file):
                os.close(open_file(file, os.O_RDWR))
        check_length(self._data)
        self._environment = lmdb.open(
            str(path),
            map_size=_MAP_SIZE,
            max_dbs=2,
            max_readers=_MAX_READERS,
            # No sync: after a power loss the index is rebuilt.
            sync=False,
            metasync=False,
            max_spare_txns=16,
        )
        try:
            with self._environment.begin(write=True) as transaction:
                self.slabs_db, self.state_db = (
                    self._environment.open_db(name, txn=transaction) for name in (b"slabs", b"state")
                )
                version = transaction.get(b"version", db=self.state_db)
                self.is_new = version is None and not transaction.stat(self.slabs_db)["entries"]
                if not self.is_new and version != _VERSION:
                    raise lmdb.Error("the index was written by another version of hicache_ext")
                self.table = SlotTable(path, new=self.is_new)
                if self.is_new:
                    transaction.put(b"version", _VERSION, db=self.state_db)
                self._view = self._load(transaction, self.table.epoch)
                self._open_ghosts(transaction)
        except BaseException:
            self._environment.close()
            raise
        self._writer = words_of_writer()
        self._changes = itertools.count()
        self._portions = itertools.count()
        self._known_fresh_uses = _NO_FRESH_USES

    def close(self, *, sync: bool) -> None:
        """Raises lmdb.Error or OSError when ``sync`` fails; the index is closed in any case."""
        try:
            if sync:
                self.table.sync()
                self._environment.sync(True)
        finally:
            self._environment.close()
            self._ghosts = None

    # -- reading ---------------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes], oldest: int = 0) -> tuple[SlotReferences, bool]:
        """The pages found, in the order of ``keys``, each with its position; and whether their use is worth a
        ``touch``. Pages written before ``oldest`` (wall-clock seconds) are not found."""
        words = key_words(keys)
        for view in self._views():
            of, fresh = self.generations(view, keys), self._fresh_uses(view)
            found, facts = lookup.locate(view.records, view.buckets, words, of, oldest, view.rows, fresh)
            if found.shape[1] == len(keys):
                break
        if not found.shape[1]:
            return NO_SLOTS, False
        stale, in_order, length, slab = facts.tolist()
        slabs, slots, lengths, positions = found
        # With the seals of that view: where its rows have changed hands since, a seal is another page's.
        return SlotReferences(slabs, slots, lengths, positions, Known(bool(in_order), length, slab), view.seals), bool(
            stale
        )

    def _fresh_uses(self, view: View) -> Words:
        """For each slab: the use of a page last used before this is worth a ``touch``."""
        until, of_view, fresh = self._known_fresh_uses
        if of_view is not view or time.monotonic() >= until:
            by_size = {
                size: EvictionPolicy(slots).oldest_fresh_use(Clock(*self.table.clock(size)[1:].tolist()))
                for size, slots in view.slots.items()
            }
            fresh = np.array([by_size[slab.slot_size] for slab in view.slabs.values()], np.int64)
            self._known_fresh_uses = (time.monotonic() + _FRESH_USES_KEPT, view, fresh)
        return fresh

    def find(self, key: bytes) -> Place | None:
        """The place of one page."""
        found_slots, _ = self.locate([key])
        return Place(*found_slots.pages()[0][:3]) if found_slots else None

    def contains(self, keys: Sequence[bytes], oldest: int = 0) -> list[bool]:
        """Which pages are found; ``oldest`` as for ``locate``."""
        for view in self._views():
            rows = self.rows(view, keys, oldest)
            if (rows >= 0).all():
                break
        found: list[bool] = (rows >= 0).tolist()
        return found

    def count_leading(self, keys: Sequence[bytes], oldest: int = 0) -> int:
        words = key_words(keys)
        for view in self._views():
            of = self.generations(view, keys)
            leading = lookup.count_leading(view.records, view.buckets, words, of, oldest)
            if leading == len(keys):
                break
        return leading

    def _views(self) -> Iterator[View]:
        """Views to look pages up in, one after the other until all are found. A look-up takes no lock, so a change that
        moves entries of the hash table may hide pages from it that are there: there is another view after a change."""
        for _ in range(_LOOKS):
            before = self.table.changes
            yield self._current()
            if before % 2 == 0 and self.table.changes == before:
                return

    def rows(self, view: View, keys: Sequence[bytes], oldest: int = 0) -> Words:
        """The row of each page, -1 where there is none; ``oldest`` as for ``locate``."""
        return lookup.find(view.records, view.buckets, key_words(keys), self.generations(view, keys), oldest)

    def generations(self, view: View, keys: Sequence[bytes]) -> Words:
        """The generations of ``keys``; a single one where all are of one identity."""
        if isinstance(keys, PageKeys):
            known_word = view.generations.get(keys.identity)
            return self._generation(view, keys.identity) if known_word is None else known_word
        digests = [key[:IDENTITY_LENGTH] for key in keys]
        known = {digest: self._generation(view, digest) for digest in set(digests)}
        if len(known) == 1:
            return known[digests[0]]
        return np.array([known[digest][0] for digest in digests], np.int64)

    def _generation(self, view: View, digest: bytes) -> Words:
        """One word."""
        known = view.generations.get(digest)
        if known is None:
            with self._environment.begin() as transaction:
                known = view.generations[digest] = np.array([self.stored_generation(transaction, digest)])
        return known

    def stored_generation(self, transaction: Any, digest: bytes) -> int:
        stored = transaction.get(GENERATION_NAME + digest, db=self.state_db)
        return 0 if stored is None else int(GENERATION.unpack(stored)[0])

    def expired(self, oldest: int, begin: int, limit: int) -> tuple[Words, int | None]:
        """The rows of pages written before ``oldest`` among up to ``limit`` slots from number ``begin`` on; and where
        to continue, None at the end."""
        view = self._current()
        records = view.records[begin : begin + limit]
        old = (records[:, slot_code.STATE] & 0xFF == slot_code.PAGE) & (records[:, slot_code.OBJECT] >> 32 < oldest)
        following = begin + limit
        return np.flatnonzero(old) + begin, following if following < len(view.records) else None

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of slots that the pages under each of these hashes take, over all identities."""
        view = self._current()
        taken = np.zeros(len(hashes), np.int64)
        for identity in self.identities(view):
            rows = self.rows(view, PageKeys.of_joined(identity, b"".join(hashes)))
            slabs = np.searchsorted(view.rows[:, slot_code.NUMBER], view.records[rows, slot_code.PLACE] >> 32)
            sizes = np.append(view.rows[:, slot_code.SLOT_SIZE], 0)[slabs]
            taken += np.where(rows >= 0, sizes, 0)
        return taken.tolist()

    def identities(self, view: View) -> list[bytes]:
        """Digests that have pages, found or cleared."""
        digests = {
            digest
            for some in _in_portions(view.pages)
            for digest in map(bytes, np.unique(view.records[some, : IDENTITY_LENGTH // 8], axis=0))
        }
        return sorted(digests)

    def size(self) -> int:
        """Bytes of the index's files."""
        return self._data.stat().st_size + self.table.size() + (self._ghosts.bytes if self._ghosts else 0)

    @property
    def seals(self) -> Seals:
        """The seals by row (``Slab.first_record``). A slab that is added or dropped meanwhile may be beyond their end
        or have another's rows. A wrong seal only costs the page: no other page agrees with it."""
        try:
            return self._current().seals
        except (lmdb.Error, OSError):
            return self._view.seals

    def occupied(self) -> tuple[int, int, int]:
        """Pages, the bytes of their slots and headers, and the bytes of free slots: from the summaries."""
        view = self._current()
        slots, sizes = view.rows[:, slot_code.SLOTS], view.rows[:, slot_code.SLOT_SIZE]
        summaries = view.groups[view.rows[:, slot_code.BASE]]
        free = summaries[:, slot_code.FREE_SLOTS]
        pages = slots - free - summaries[:, slot_code.PENDING_SLOTS]
        return int(pages.sum()), int((pages * (sizes + HEADER)).sum()), int((free * sizes).sum())

    def slabs(self) -> list[Slab]:
        return list(self._current().slabs.values())

    def counts(self) -> dict[str, int]:
        """How many pages, free slots, pending slots and slabs there are, for tools and tests."""
        view = self._current()
        names = (("pages", slot_code.PAGE), ("free", slot_code.FREE), ("pending", slot_code.PENDING))
        return {name: len(view.rows_in(state)) for name, state in names} | {"slabs": len(view.slabs)}

    def pages(self) -> Iterator[IndexedPage]:
        """Every page that can be found, by slab."""
        view = self._current()
        for rows in _in_portions(view.pages):
            # The lock: no record changes while it is copied.
            with self._environment.begin(write=True):
                records = view.records[rows]
            records = records[records[:, slot_code.STATE] & 0xFF == slot_code.PAGE]
            for record in records:
                key = record[: slot_code.KEY_WORDS].tobytes()
                stored, place = int(record[slot_code.OBJECT]), int(record[slot_code.PLACE])
                if record[slot_code.STATE] >> 16 == self._generation(view, key[:IDENTITY_LENGTH])[0]:
                    yield IndexedPage(
                        key, Place(place >> 32, place & slot_code.LOW, stored & slot_code.LOW), stored >> 32
                    )

    def uses_of(self, digest: bytes) -> Uses | None:
        """The uses of an identity; None when it was never read."""
        with self._environment.begin() as transaction:
            return self.uses(transaction, digest)

    def uses(self, transaction: Any, digest: bytes) -> Uses | None:
        stored = transaction.get(USES_NAME + digest, db=self.state_db)
        return None if stored is None else Uses(*USES.unpack(stored))

    def check(self) -> list[str]:
        """Every contradiction in the index, one sentence each; empty when it is sound."""
        with self._environment.begin(write=True):
            view = self._current()
            groups, buckets = view.groups.copy(), np.zeros_like(view.buckets)
            records = view.records.copy()
            dropped = slot_code.settle_all(records, groups, buckets, view.rows)
            faults = [f"{dropped} slots whose record cannot be true"] if dropped else []
            if self.table.was_left_changing:
                faults.append("a change has not come to its end")
            entries, pages = int(np.count_nonzero(view.buckets)), len(view.pages)
            if entries != pages:
                faults.append(f"{pages} pages, {entries} in the hash table")
            for slab in view.slabs.values():
                rows = view.rows_of(slab)
                if (records[rows, slot_code.PLACE] != view.records[rows, slot_code.PLACE]).any():
                    faults.append(f"a slot of slab {slab.number} is not where its record says")
                of_slab = slice(slab.first_record, slab.first_record + slab.slots + 1)
                if (groups[of_slab] != view.groups[of_slab]).any():
                    faults.append(f"what is recorded of the groups of slab {slab.number} is not what is in their slots")
                rows = rows[view.states(slab) == slot_code.PAGE]
                keys, generations = view.records[rows, : slot_code.KEY_WORDS], view.records[rows, slot_code.STATE] >> 16
                found = lookup.find(view.records, view.buckets, keys, generations, 0)
                faults += [
                    f"the page in slot {slab.number}/{row - slab.first_record} cannot be found"
                    for row in rows[found != rows].tolist()
                ]
            ordered = sorted(view.slabs.values(), key=lambda slab: slab.first_record)
            for slab, following in itertools.pairwise(ordered):
                if slab.first_record + slab.slots >= following.first_record:
                    faults.append(f"slabs {slab.number} and {following.number} have records in common")
        return faults

    # -- writing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[IndexChange]:
        """One change at a time. When the body raises or the process dies, its unfinished parts do not count."""
        if next(self._changes) % _CHANGES_BETWEEN_READER_CHECKS == 0:
            self._environment.reader_check()
        table = self.table
        with self._environment.begin(write=True) as transaction:
            repaired = self._was_cut_off(transaction)
            view = self._load(transaction, table.epoch) if repaired else self._current(transaction)
            table.begin_change()
            if repaired:
                dropped = slot_code.settle_all(*view.table)
                logger.warning("index %s: a change was cut off; made anew, %d slots freed", self._path, dropped)
            change = IndexChange(self, transaction, view)
            yield change
            self._known_fresh_uses = _NO_FRESH_USES
            changed = repaired or change.slabs_or_generations_changed
            if changed:
                epoch = table.begin_epoch()
                transaction.put(_EPOCH, NUMBER.pack(epoch), db=self.state_db)
            table.end_change()
        if changed:
            # If this fails, the next change does it.
            with suppress(lmdb.Error), self._environment.begin(write=True):
                table.begin_epoch_in_order(epoch)

    def _was_cut_off(self, transaction: Any) -> bool:
        """Whether the last change did not end, or LMDB did not commit it. If all of it is there, closes its epoch."""
        table, epoch = self.table, self.table.epoch
        if table.was_left_changing:
            return True
        if epoch % 2 == 0:
            return False
        stored = transaction.get(_EPOCH, db=self.state_db)
        committed = stored is not None and NUMBER.unpack(stored)[0] == epoch
        if committed:
            table.begin_epoch_in_order(epoch)
        return not committed

    def _current(self, transaction: Any = None) -> View:
        """The view of this epoch. Raises OSError, lmdb.Error."""
        view = self._view
        # First the epoch, then what it counts: a change in between is loaded again by the next call.
        epoch = self.table.epoch
        if view.epoch != epoch or epoch % 2:
            if transaction is None:
                with self._environment.begin() as reading:
                    view = self._load(reading, epoch)
            else:
                view = self._load(transaction, epoch)
            self._view = view
        return view

    def _load(self, transaction: Any, epoch: int) -> View:
        """``epoch`` was read before the transaction began, or the transaction is a change."""
        with transaction.cursor(self.slabs_db) as cursor:
            slabs = [Slab(SLOT_SIZE.unpack(number)[0], *SLAB.unpack(value)) for number, value in cursor]
        return self.table.view({slab.number: slab for slab in slabs}, epoch)

    def free_cleared(self, digest: bytes) -> int:
        """Free the slots of all cleared pages of an identity, in short changes; returns their number."""
        freed = 0
        for rows in _in_portions(self.of_identity(self._current(), digest), _CLEAR_BATCH):
            with self.changing() as change:
                freed += change.remove_cleared(rows, digest)
        return freed

    def of_identity(self, view: View, digest: bytes) -> Words:
        """The rows of all pages of an identity, cleared ones included."""
        first, second = np.frombuffer(digest, np.int64)
        rows = view.pages
        of_it: Words = rows[(view.records[rows, 0] == first) & (view.records[rows, 1] == second)]
        return of_it

    def ghosts(self, transaction: Any, at_least: int = 0) -> GhostTable | None:
        """The table of ghosts, for at least so many, in a change; None when there is none, or no space for one."""
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

    def writer(self, portion: int) -> Words:
        """The words in a slot that this process is writing, for this portion (``next_portion``)."""
        return np.array([*self._writer, portion, 0, 0], np.int64)

    def is_alive(self, writer: Sequence[int]) -> bool:
        """Whether the process with these words (``writer``) may still be running."""
        return words_are_of_living(writer)

    def next_portion(self) -> int:
        """A number for each of the concurrent writes of this process."""
        return next(self._portions)

    def _open_ghosts(self, transaction: Any) -> None:
        table = self.ghosts(transaction)
        # Smaller tables, and larger ones that a killed process was making.
        for path in self._path.glob("ghosts-*"):
            if table is None or path != table.path:
                path.unlink(missing_ok=True)


def words_of_writer() -> tuple[int, int, int]:
    """The words that name this process in a slot that it is writing."""
    host, pid, start = writer_name().rsplit(":", 2)
    return int(pid), int(start) if start.isdigit() else -1, xxhash.xxh3_64_intdigest(host.encode()) >> 1


def words_are_of_living(words: Sequence[int]) -> bool:
    """Whether the process with these words (``words_of_writer``) may still be running."""
    pid, start, of_host = words
    host = writer_name().rsplit(":", 2)[0]
    return of_host == words_of_writer()[2] and writer_alive(f"{host}:{pid}:{start}", 0.0)


def _in_portions(rows: Words, length: int = _AT_ONCE) -> list[Words]:
    return [rows[begin : begin + length] for begin in range(0, len(rows), length)]

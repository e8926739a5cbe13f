"""Which page is in which slot: the LMDB index of one directory, shared by all processes on it.

LMDB gives what a cache index needs here: look-ups of about half a microsecond without a lock, one writer at a time
across processes, and a killed process that leaves nothing half done (its transaction never happened, its lock is
released).

========  ================================================  ==========================================================
database  key                                               value
========  ================================================  ==========================================================
pages     generation, page key                              slab, slot, object length, rank
order     slot size, priority, slab, slot (big-endian)      key in pages: the first of a slot size is its next victim
slots     slab, slot (big-endian)                           key in pages: what an occupied slot holds
free      slot size, slab, slot (big-endian)                nothing: a slot that may be written
pending   slab, slot (big-endian)                           page key, writer: a slot that is being written
slabs     slab (big-endian)                                 slot size, number of slots
ghosts    fingerprint of a key in pages                     number, what eviction.py remembers of an evicted page
gone      number (big-endian)                               fingerprint: the ghosts in the order of eviction
state     name                                              the clock per slot size, the next slab number, generations
========  ================================================  ==========================================================

Every slot of every slab is in exactly one of ``slots``, ``free`` and ``pending``.

Clearing an identity raises its generation: its pages are out of reach at once, and are removed little by little.

Nothing is synced: after a power loss the index may be anything, so it is used again only by the boot that wrote it, or
after every process has closed it in order (then it was synced); otherwise it is rebuilt from the envelopes
(directory.py).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from hicache_ext.envelope import IDENTITY_LENGTH, KEY_LENGTH
from hicache_ext.storage.file.eviction import RANK_LENGTH, Clock, EvictionPolicy, Ghost, Rank
from hicache_ext.storage.file.usage import writer_alive, writer_name

_MAP_SIZE = 1 << 38
"""Bytes of address space the index may grow to; the file itself stays as small as its content."""
_MAX_READERS = 1024
_CHANGES_BETWEEN_READER_CHECKS = 8
"""A process killed inside a read transaction pins what it was looking at, and the index grows with every change until
that is noticed: 20 MB within seconds when this was 256."""

_PAGE = struct.Struct(f"<III{RANK_LENGTH}s")
_PLACE = struct.Struct(">II")
_FREE = struct.Struct(">III")
_ORDER = struct.Struct(">IQII")
_SLOT_SIZE = struct.Struct(">I")
_SLAB = struct.Struct("<II")
_GENERATION = struct.Struct(">H")
_FIRST_GENERATION = _GENERATION.pack(0)
_CLEAR_BATCH = 2048
"""Pages of a cleared identity freed in one transaction: writers wait for no longer than that takes."""
_NUMBER = struct.Struct(">Q")

_BYTES_PER_GHOST = 8192
"""One ghost (about 100 bytes of index) per so many bytes of slots at most: bounds what a small directory spends."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page object is: ``length`` bytes of it (header and payload) from the start of a slot."""

    slab: int
    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Found:
    """A page that is there; ``stale`` when using it now should renew its rank."""

    place: Place
    stale: bool


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab file: ``slots`` slots of ``slot_size`` bytes."""

    number: int
    slot_size: int
    slots: int

    @property
    def size(self) -> int:
        return self.slot_size * self.slots


class SlabIndex:
    """The index of one directory. Thread-safe; one per process and directory (LMDB's rule)."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the index in directory ``path``. Raises lmdb.Error or OSError."""
        path.mkdir(parents=True, exist_ok=True)
        self._data = path / "data.mdb"
        self._environment = lmdb.open(
            str(path),
            map_size=_MAP_SIZE,
            max_dbs=9,
            max_readers=_MAX_READERS,
            # No sync: a power loss is met by the rebuild. Not a writable map: a stray pointer of SGLang's many native
            # libraries must not be able to change the index.
            sync=False,
            metasync=False,
            max_spare_txns=16,
        )
        with self._environment.begin(write=True) as transaction:
            (
                self._pages,
                self._order,
                self._slots,
                self._free,
                self._pending,
                self._slabs,
                self._ghosts,
                self._gone,
                self._state,
            ) = (
                self._environment.open_db(name, txn=transaction)
                for name in (b"pages", b"order", b"slots", b"free", b"pending", b"slabs", b"ghosts", b"gone", b"state")
            )
        self._writer = writer_name().encode()
        self._changes = itertools.count()

    def close(self, *, sync: bool) -> None:
        if sync:
            self._environment.sync(True)
        self._environment.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        """Where each page of a chain is; None for absent ones."""
        with self._environment.begin() as transaction:
            get, pages = transaction.get, self._pages
            values = [get(key, db=pages) for key in self._full_keys(transaction, keys)]
            ranking = Ranking(self, transaction)
            found: list[Found | None] = []
            for value in values:
                if value is None:
                    found.append(None)
                    continue
                slab, slot, length, rank = _PAGE.unpack(value)
                found.append(Found(Place(slab, slot, length), ranking.stale(slab, Rank.unpack(rank))))
        return found

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._environment.begin(db=self._pages) as transaction:
            get = transaction.get
            return [get(key) is not None for key in self._full_keys(transaction, keys)]

    def count_leading(self, keys: Sequence[bytes]) -> int:
        with self._environment.begin(db=self._pages) as transaction:
            get = transaction.get
            for position, key in enumerate(self._full_keys(transaction, keys)):
                if get(key) is None:
                    return position
        return len(keys)

    def _full_keys(self, transaction: Any, keys: Sequence[bytes]) -> Iterator[bytes]:
        """The keys in ``pages``: with the generation of their identity in front."""
        digest, generation = b"", _FIRST_GENERATION
        for key in keys:
            if not key.startswith(digest) or not digest:
                digest = key[:IDENTITY_LENGTH]
                generation = transaction.get(b"generation" + digest, db=self._state) or _FIRST_GENERATION
            yield generation + key

    def size(self) -> int:
        """Bytes of the index's file."""
        return self._data.stat().st_size

    def slabs(self) -> list[Slab]:
        with self._environment.begin() as transaction:
            return self._read_slabs(transaction)

    def counts(self) -> dict[str, int]:
        """Entries of each database, for tools and tests."""
        with self._environment.begin() as transaction:
            return {
                name: int(transaction.stat(db)["entries"])
                for name, db in (
                    ("pages", self._pages),
                    ("free", self._free),
                    ("pending", self._pending),
                    ("slabs", self._slabs),
                )
            }

    def pages(self) -> Iterator[tuple[bytes, Place]]:
        """Every page that can be found, identity by identity, as of one moment."""
        with self._environment.begin() as transaction, transaction.cursor(self._pages) as cursor:
            for full_key, value in cursor:
                key = bytes(full_key[_GENERATION.size :])
                if next(self._full_keys(transaction, [key])) == full_key:
                    yield key, Place(*_PAGE.unpack(value)[:3])

    def check(self) -> list[str]:
        """Every way in which the index contradicts itself, one sentence each; empty when it is sound."""
        faults: list[str] = []
        with self._environment.begin() as transaction:
            slabs = {slab.number: slab for slab in self._read_slabs(transaction)}
            states: dict[tuple[int, int], str] = {}

            def claim(slab: int, slot: int, state: str) -> None:
                if slab not in slabs or slot >= slabs[slab].slots:
                    faults.append(f"{state} slot {slab}/{slot} is in no slab")
                elif (slab, slot) in states:
                    faults.append(f"slot {slab}/{slot} is both {states[slab, slot]} and {state}")
                states[slab, slot] = state

            def entries(database: Any) -> Any:
                return transaction.cursor(database)

            for where, _ in entries(self._free):
                size, slab, slot = _FREE.unpack(where)
                claim(slab, slot, "free")
                if slab in slabs and slabs[slab].slot_size != size:
                    faults.append(f"free slot {slab}/{slot} has size {size}, its slab {slabs[slab].slot_size}")
            for where, _ in entries(self._pending):
                slab, slot = _PLACE.unpack(where)
                claim(slab, slot, "pending")
            for where, key in entries(self._slots):
                slab, slot = _PLACE.unpack(where)
                claim(slab, slot, "occupied")
                value = transaction.get(bytes(key), db=self._pages)
                if value is None or _PAGE.unpack(value)[:2] != (slab, slot):
                    faults.append(f"slot {slab}/{slot} names a page that is not there")
            for key, value in entries(self._pages):
                slab, slot, length, rank = _PAGE.unpack(value)
                if transaction.get(_PLACE.pack(slab, slot), db=self._slots) != key:
                    faults.append(f"page {key.hex()} claims slot {slab}/{slot}, which does not name it")
                elif slab in slabs:
                    size = slabs[slab].slot_size
                    order = _ORDER.pack(size, Rank.unpack(rank).priority, slab, slot)
                    if transaction.get(order, db=self._order) != key or length > size:
                        faults.append(f"page {key.hex()} is not in the order of eviction, or longer than its slot")
            pages, ordered = (int(transaction.stat(db)["entries"]) for db in (self._pages, self._order))
            if pages != ordered:
                faults.append(f"{pages} pages, {ordered} in the order of eviction")
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
            change = IndexChange(self, transaction)
            yield change
            change.finish()

    def free_cleared(self, digest: bytes) -> int:
        """Free the slots of all pages of older generations of an identity, in short transactions; their number."""
        freed = 0
        while True:
            with self.changing() as change:
                removed = change.remove_cleared(digest, _CLEAR_BATCH)
            freed += removed
            if not removed:
                return freed

    def _read_slabs(self, transaction: Any) -> list[Slab]:
        with transaction.cursor(self._slabs) as cursor:
            return [Slab(_SLOT_SIZE.unpack(number)[0], *_SLAB.unpack(value)) for number, value in cursor]


class Ranking:
    """The eviction policy of each slot size, as one transaction sees it: clocks are read once and kept."""

    def __init__(self, index: SlabIndex, transaction: Any) -> None:
        self._index = index
        self._transaction = transaction
        self._slabs = {slab.number: slab for slab in index._read_slabs(transaction)}
        self._policies: dict[int, EvictionPolicy] = {}
        self._clocks: dict[int, Clock] = {}
        self._oldest_fresh: dict[int, int] = {}
        self._changed: set[int] = set()

    def slab(self, number: int) -> Slab:
        return self._slabs[number]

    def slabs(self) -> list[Slab]:
        return list(self._slabs.values())

    def add(self, slab: Slab) -> None:
        self._slabs[slab.number] = slab
        self._policies.pop(slab.slot_size, None)

    def drop(self, slab: Slab) -> None:
        del self._slabs[slab.number]
        self._policies.pop(slab.slot_size, None)

    def inserted(self, slab: int, depth: int, before: Rank | None, ghost: Ghost | None) -> Rank:
        size = self._slabs[slab].slot_size
        clock, rank = self._policy(size).inserted(self._clock(size), depth, before, ghost)
        self._set_clock(size, clock)
        return rank

    def renewed(self, slab: int, rank: Rank, depth: int, before: Rank | None) -> Rank | None:
        size = self._slabs[slab].slot_size
        answer = self._policy(size).renewed(self._clock(size), rank, depth, before)
        if answer is None:
            return None
        self._set_clock(size, answer[0])
        return answer[1]

    def stale(self, slab: int, rank: Rank) -> bool:
        """Whether a use now would be worth an index write."""
        oldest = self._oldest_fresh.get(slab)
        if oldest is None:
            size = self._slabs[slab].slot_size
            oldest = self._oldest_fresh[slab] = self._policy(size).oldest_fresh_use(self._clock(size))
        return rank.used < oldest

    def ghost_limit(self, slot_size: int) -> int:
        policy = self._policy(slot_size)
        return min(policy.ghost_limit, policy.capacity * slot_size // _BYTES_PER_GHOST)

    def save(self) -> None:
        for size in self._changed:
            self._transaction.put(_clock_name(size), self._clocks[size].pack(), db=self._index._state)

    def _policy(self, slot_size: int) -> EvictionPolicy:
        policy = self._policies.get(slot_size)
        if policy is None:
            slots = sum(slab.slots for slab in self._slabs.values() if slab.slot_size == slot_size)
            policy = self._policies[slot_size] = EvictionPolicy(max(1, slots))
        return policy

    def _clock(self, slot_size: int) -> Clock:
        clock = self._clocks.get(slot_size)
        if clock is None:
            stored = self._transaction.get(_clock_name(slot_size), db=self._index._state)
            clock = self._clocks[slot_size] = Clock.unpack(stored)
        return clock

    def _set_clock(self, slot_size: int, clock: Clock) -> None:
        self._clocks[slot_size] = clock
        self._changed.add(slot_size)


class IndexChange:
    """What can be done to the index inside one write transaction."""

    def __init__(self, index: SlabIndex, transaction: Any) -> None:
        # The index and its transactions are one thing in two classes; they share their databases.
        self._index = index
        self._transaction = transaction
        self._ranking = Ranking(index, transaction)
        self._next_ghost: int | None = None
        self.evicted = 0

    def finish(self) -> None:
        """At the end of the transaction."""
        self._ranking.save()

    # -- slots -----------------------------------------------------------------------------------------------------

    def take_free_slots(self, slot_size: int, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Free slots (slab, slot) of this size for the first of ``keys``, as many as there are; pending from now on.

        In order of place: slots taken together lie together and are written together.
        """
        taken: list[tuple[int, int]] = []
        with self._transaction.cursor(self._index._free) as cursor:
            more = cursor.set_range(_SLOT_SIZE.pack(slot_size))
            while more and len(taken) < len(keys):
                size, slab, slot = _FREE.unpack(cursor.key())
                if size != slot_size:
                    break
                taken.append((slab, slot))
                # The cursor moves on to the next entry.
                more = cursor.delete() and bool(cursor.key())
        self._pend(taken, keys)
        return taken

    def take_evicted_slots(self, slot_size: int, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """The slots of the pages of this slot size that go first, for the first of ``keys``; pending from now on."""
        transaction, index = self._transaction, self._index
        taken: list[tuple[int, int]] = []
        with transaction.cursor(index._order) as cursor:
            more = cursor.set_range(_SLOT_SIZE.pack(slot_size))
            while more and len(taken) < len(keys):
                size, _, slab, slot = _ORDER.unpack(cursor.key())
                if size != slot_size:
                    break
                full_key = bytes(cursor.value())
                value = transaction.pop(full_key, db=index._pages)
                self._remember(full_key, Rank.unpack(_PAGE.unpack(value)[3]))
                transaction.delete(_PLACE.pack(slab, slot), db=index._slots)
                taken.append((slab, slot))
                more = cursor.delete() and bool(cursor.key())
        self.evicted += len(taken)
        self._forget_ghosts(slot_size)
        self._pend(taken, keys)
        return taken

    def _remember(self, full_key: bytes, rank: Rank) -> None:
        """Keep a ghost of an evicted page."""
        transaction, index = self._transaction, self._index
        if self._next_ghost is None:
            with transaction.cursor(index._gone) as cursor:
                self._next_ghost = _NUMBER.unpack(cursor.key())[0] + 1 if cursor.last() else 0
        number = _NUMBER.pack(self._next_ghost)
        self._next_ghost += 1
        fingerprint = _fingerprint(full_key)
        transaction.put(fingerprint, number + Ghost.of(rank).pack(), db=index._ghosts)
        transaction.put(number, fingerprint, db=index._gone, append=True)

    def _recall(self, full_key: bytes) -> Ghost | None:
        """The ghost of a page that is back; its number stays in ``gone`` until its turn comes."""
        stored = self._transaction.pop(_fingerprint(full_key), db=self._index._ghosts)
        return None if stored is None else Ghost.unpack(stored[_NUMBER.size :])

    def _forget_ghosts(self, slot_size: int) -> None:
        """Keep no more ghosts than are worth it: the oldest go."""
        transaction, index = self._transaction, self._index
        over = int(transaction.stat(index._gone)["entries"]) - self._ranking.ghost_limit(slot_size)
        with transaction.cursor(index._gone) as cursor:
            more = cursor.first()
            while over > 0 and more:
                number, fingerprint = bytes(cursor.key()), bytes(cursor.value())
                stored = transaction.get(fingerprint, db=index._ghosts)
                # A page evicted a second time has a younger number.
                if stored is not None and stored[: _NUMBER.size] == number:
                    transaction.delete(fingerprint, db=index._ghosts)
                more = cursor.delete() and bool(cursor.key())
                over -= 1

    def colder_slab(self, slot_size: int) -> Slab | None:
        """A slab of another slot size whose first victim would go before the first victim of this one."""
        own = self._first_victim(slot_size)
        coldest = own[1] if own else None
        chosen: Slab | None = None
        for size in {slab.slot_size for slab in self.slabs()} - {slot_size}:
            victim = self._first_victim(size)
            if victim is None:
                # Nothing but free slots: nobody will miss it.
                return next(slab for slab in self.slabs() if slab.slot_size == size)
            if coldest is None or victim[1] < coldest:
                coldest = victim[1]
                chosen = self._ranking.slab(victim[2])
        return chosen

    def give_back(self, slot_size: int, slab: int, slot: int) -> None:
        """A pending slot was not needed, or its write failed."""
        if self._transaction.delete(_PLACE.pack(slab, slot), db=self._index._pending):
            self._transaction.put(_FREE.pack(slot_size, slab, slot), b"", db=self._index._free)

    def publish(self, key: bytes, slot_size: int, place: Place, depth: int, before: bytes | None = None) -> bool:
        """Make a written pending slot the page ``key``; False when another writer was first (the slot is free again).

        ``before`` is the key of the page before it in its chain, ``depth`` its position there, as far as is known.
        False also when the slot is no longer this writer's: its process was taken for dead.
        """
        index, transaction = self._index, self._transaction
        where = _PLACE.pack(place.slab, place.slot)
        if transaction.get(where, db=index._pending) != key + index._writer:
            return False
        full_key = self._full(key)
        if transaction.get(full_key, db=index._pages) is not None:
            self.give_back(slot_size, place.slab, place.slot)
            return False
        transaction.delete(where, db=index._pending)
        ghost = self._recall(full_key)
        entry = None if before is None else self._entry(self._full(before))
        before_rank = None if entry is None else entry[1]
        self._put(full_key, slot_size, place, self._ranking.inserted(place.slab, depth, before_rank, ghost))
        return True

    def adopt(self, key: bytes, slot_size: int, place: Place) -> bool:
        """For the rebuild: a free slot that holds ``key`` becomes its page; False when ``key`` is known already."""
        index, transaction = self._index, self._transaction
        full_key = self._full(key)
        if transaction.get(full_key, db=index._pages) is not None:
            return False
        transaction.delete(_FREE.pack(slot_size, place.slab, place.slot), db=index._free)
        self._put(full_key, slot_size, place, self._ranking.inserted(place.slab, 0, None, None))
        return True

    def remove(self, key: bytes, only: tuple[int, int] | None = None) -> bool:
        """Forget a page and free its slot; with ``only``, if it is (still) in that slot. False when it was not."""
        return self._remove(self._full(key), only)

    def clear(self, digest: bytes) -> bool:
        """Put all pages of an identity out of reach at once; False when it has none."""
        full_key = self._full(digest)
        with self._transaction.cursor(self._index._pages) as cursor:
            if not cursor.set_range(full_key) or not bytes(cursor.key()).startswith(full_key):
                return False
        generation = (_GENERATION.unpack(full_key[: _GENERATION.size])[0] + 1) % (1 << 16)
        self._transaction.put(b"generation" + digest, _GENERATION.pack(generation), db=self._index._state)
        return True

    def remove_cleared(self, digest: bytes, limit: int) -> int:
        """Free the slots of up to ``limit`` pages of older generations of an identity; their number."""
        current = self._full(digest)
        removed = 0
        for generation in range(1 << 16):
            prefix = _GENERATION.pack(generation) + digest
            if prefix >= current:
                break
            with self._transaction.cursor(self._index._pages) as cursor:
                keys: list[bytes] = []
                if cursor.set_range(prefix):
                    for full_key in cursor.iternext(keys=True, values=False):
                        if not full_key.startswith(prefix) or removed + len(keys) >= limit:
                            break
                        keys.append(bytes(full_key))
            for full_key in keys:
                self._remove(full_key, None)
            removed += len(keys)
            if removed >= limit:
                break
        return removed

    def identities(self) -> list[bytes]:
        """Digests that have pages, found or cleared."""
        found: list[bytes] = []
        with self._transaction.cursor(self._index._pages) as cursor:
            more = cursor.first()
            while more:
                full_key = bytes(cursor.key())
                digest = full_key[_GENERATION.size : _GENERATION.size + IDENTITY_LENGTH]
                found.append(digest)
                more = cursor.set_range(
                    full_key[: _GENERATION.size] + digest + b"\xff" * (KEY_LENGTH - IDENTITY_LENGTH + 1)
                )
        return list(dict.fromkeys(found))

    def touch(self, keys: Sequence[bytes]) -> None:
        """The leading pages of a chain were used."""
        before: Rank | None = None
        for depth, key in enumerate(keys):
            full_key = self._full(key)
            entry = self._entry(full_key)
            if entry is None:
                before = None
                continue
            place, rank, slot_size = entry
            renewed = self._ranking.renewed(place.slab, rank, depth, before)
            if renewed is not None:
                self._forget(full_key, slot_size, place, rank)
                self._put(full_key, slot_size, place, renewed)
            before = renewed or rank

    # -- slabs -----------------------------------------------------------------------------------------------------

    def slabs(self) -> list[Slab]:
        return self._ranking.slabs()

    def add_slab(self, slot_size: int, slots: int, number: int | None = None) -> Slab:
        """A new slab, all slots free. Its file must be there before the transaction ends."""
        transaction, index = self._transaction, self._index
        if number is None:
            number = self._next_slab_number()
        slab = Slab(number, slot_size, slots)
        transaction.put(_SLOT_SIZE.pack(number), _SLAB.pack(slot_size, slots), db=index._slabs)
        for slot in range(slots):
            transaction.put(_FREE.pack(slot_size, number, slot), b"", db=index._free)
        self._ranking.add(slab)
        return slab

    def drop_slab(self, slab: Slab) -> bool:
        """Forget a slab with all its pages.

        False, and nothing changed, while one of its slots is being written, or when another process was faster.
        """
        transaction, index = self._transaction, self._index
        if slab not in self.slabs():
            return False
        first = _PLACE.pack(slab.number, 0)
        with transaction.cursor(index._pending) as cursor:
            if cursor.set_range(first) and _PLACE.unpack(cursor.key())[0] == slab.number:
                return False
        for key in self._keys_in(slab.number):
            entry = self._entry(key)
            if entry is not None:
                self._forget(key, slab.slot_size, entry[0], entry[1])
        for slot in range(slab.slots):
            transaction.delete(_FREE.pack(slab.slot_size, slab.number, slot), db=index._free)
        transaction.delete(_SLOT_SIZE.pack(slab.number), db=index._slabs)
        self._ranking.drop(slab)
        return True

    def release_dead_writers(self) -> int:
        """Free the slots that killed processes were writing; their number."""
        transaction, index = self._transaction, self._index
        dead: list[tuple[int, int]] = []
        alive: dict[bytes, bool] = {}
        with transaction.cursor(index._pending) as cursor:
            for where, value in cursor:
                writer = bytes(value[KEY_LENGTH:])
                if writer not in alive:
                    alive[writer] = writer_alive(writer.decode(), 0.0)
                if not alive[writer]:
                    dead.append(_PLACE.unpack(where))
        for slab, slot in dead:
            self.give_back(self._ranking.slab(slab).slot_size, slab, slot)
        return len(dead)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _full(self, key: bytes) -> bytes:
        return next(self._index._full_keys(self._transaction, [key]))

    def _remove(self, full_key: bytes, only: tuple[int, int] | None) -> bool:
        entry = self._entry(full_key)
        if entry is None:
            return False
        place, rank, slot_size = entry
        if only is not None and only != (place.slab, place.slot):
            return False
        self._forget(full_key, slot_size, place, rank)
        self._transaction.put(_FREE.pack(slot_size, place.slab, place.slot), b"", db=self._index._free)
        return True

    def _next_slab_number(self) -> int:
        stored = self._transaction.get(b"next slab", db=self._index._state)
        number = _SLOT_SIZE.unpack(stored)[0] if stored else 0
        self.reserve_slab_numbers(number + 1)
        return number

    def reserve_slab_numbers(self, below: int) -> None:
        """No new slab gets a number under ``below``: a reader may still have the file of an old one open."""
        stored = self._transaction.get(b"next slab", db=self._index._state)
        if stored is None or _SLOT_SIZE.unpack(stored)[0] < below:
            self._transaction.put(b"next slab", _SLOT_SIZE.pack(below), db=self._index._state)

    def _pend(self, places: list[tuple[int, int]], keys: Sequence[bytes]) -> None:
        places.sort()
        for place, key in zip(places, keys, strict=False):
            self._transaction.put(_PLACE.pack(*place), key + self._index._writer, db=self._index._pending)

    def _first_victim(self, slot_size: int) -> tuple[bytes, int, int, int] | None:
        """(key in pages, priority, slab, slot) of the page of this slot size that goes first."""
        with self._transaction.cursor(self._index._order) as cursor:
            if not cursor.set_range(_SLOT_SIZE.pack(slot_size)):
                return None
            size, priority, slab, slot = _ORDER.unpack(cursor.key())
            return (bytes(cursor.value()), priority, slab, slot) if size == slot_size else None

    def _entry(self, key: bytes) -> tuple[Place, Rank, int] | None:
        value = self._transaction.get(key, db=self._index._pages)
        if value is None:
            return None
        slab, slot, length, rank = _PAGE.unpack(value)
        return Place(slab, slot, length), Rank.unpack(rank), self._ranking.slab(slab).slot_size

    def _put(self, key: bytes, slot_size: int, place: Place, rank: Rank) -> None:
        transaction, index = self._transaction, self._index
        transaction.put(key, _PAGE.pack(place.slab, place.slot, place.length, rank.pack()), db=index._pages)
        transaction.put(_ORDER.pack(slot_size, rank.priority, place.slab, place.slot), key, db=index._order)
        transaction.put(_PLACE.pack(place.slab, place.slot), key, db=index._slots)

    def _forget(self, key: bytes, slot_size: int, place: Place, rank: Rank) -> None:
        transaction, index = self._transaction, self._index
        transaction.delete(key, db=index._pages)
        transaction.delete(_ORDER.pack(slot_size, rank.priority, place.slab, place.slot), db=index._order)
        transaction.delete(_PLACE.pack(place.slab, place.slot), db=index._slots)

    def _keys_in(self, slab: int) -> list[bytes]:
        keys = []
        with self._transaction.cursor(self._index._slots) as cursor:
            if cursor.set_range(_PLACE.pack(slab, 0)):
                for where, key in cursor:
                    if _PLACE.unpack(where)[0] != slab:
                        break
                    keys.append(bytes(key))
        return keys


def _clock_name(slot_size: int) -> bytes:
    return b"clock" + _SLOT_SIZE.pack(slot_size)


def _fingerprint(full_key: bytes) -> bytes:
    return xxhash.xxh3_64_digest(full_key)

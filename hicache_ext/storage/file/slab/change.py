"""What can be done to the index of a slab directory inside one write transaction."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from hicache_ext.envelope import PAGE_HASH_LENGTH
from hicache_ext.storage.file.eviction import RANK_LENGTH, Ghost, Rank
from hicache_ext.storage.file.slab.ranking import Ranking
from hicache_ext.storage.file.slab.records import (
    CREATED,
    FINGERPRINT_LENGTH,
    FREE,
    GENERATION,
    NUMBER,
    ORDER,
    PAGE,
    PENDING,
    PLACE,
    PRIORITY,
    SLAB,
    SLOT_SIZE,
    Place,
    Slab,
)
from hicache_ext.storage.file.usage import writer_alive

if TYPE_CHECKING:
    from hicache_ext.storage.file.slab.index import SlabIndex


_GROUP = 2 << 20
"""Bytes of slots, from a border of so many, within which neighbours are evicted together."""


_HIGHEST_PRIORITY = (1 << 64) - 1
_LATEST = (1 << 32) - 1
_RANK_IN_PAGE = PAGE.size - RANK_LENGTH


class Written(NamedTuple):
    """A page whose bytes are in its slot."""

    key: bytes
    place: Place
    depth: int
    """Position in its chain, as far as is known."""
    before: bytes | None
    """The key of the page before it in its chain."""


class IndexChange:
    """Use ``SlabIndex.changing()``."""

    def __init__(self, index: SlabIndex, transaction: Any, slabs: dict[int, Slab]) -> None:
        # The index and its transactions are one thing in several classes; they share their databases.
        self._index = index
        self._transaction = transaction
        self._ranking = Ranking(slabs, transaction, index.state_db)
        self._next_gone: int | None = None
        self._slabs_changed = False
        self.evicted = 0

    def finish(self) -> bool:
        """At the end of the transaction; whether there are other slabs than before."""
        self._ranking.save()
        return self._slabs_changed

    # -- slots -----------------------------------------------------------------------------------------------------

    def take_free_slots(self, slot_size: int, count: int) -> list[tuple[int, int]]:
        """Up to ``count`` free slots (slab, slot) of this size, which the caller puts to use or gives back.

        In order of place: slots taken together lie together and are written together.
        """
        first = SLOT_SIZE.pack(slot_size)
        taken: list[bytes] = []
        with self._transaction.cursor(self._index.free_db) as cursor:
            if cursor.set_range(first):
                for where in itertools.islice(cursor.iternext(keys=True, values=False), count):
                    if not where.startswith(first):
                        break
                    taken.append(where)
        for where in taken:
            self._transaction.delete(where, db=self._index.free_db)
        return [PLACE.unpack(where[SLOT_SIZE.size :]) for where in taken]

    def evict(self, slot_size: int, count: int, spared: frozenset[bytes] = frozenset()) -> None:
        """Free the slots of at least ``count`` pages of this slot size, as long as there are any: those that go first.

        Pages with a hash in ``spared`` stay, unless those are so many that nothing else is left.
        Neighbours of such a page whose turn would come soon go with it: single slots here and there would each need a
        system call of their own (1.6 pages a call in a full directory, where this gives more than five).
        """
        gone: list[tuple[bytes, bytes]] = []
        soon = self._ranking.soon(slot_size)
        may_spare = self._ranking.slots(slot_size) if spared else 0
        while len(gone) < count:
            victim = self._first_victim(slot_size)
            if victim is None:
                break
            priority, slab, slot = victim
            if may_spare and self._spare(slot_size, slab, slot, spared):
                may_spare -= 1
                continue
            self._evict_group(slot_size, slab, slot, priority + soon, gone, spared if may_spare else frozenset())
        self.evicted += len(gone)
        self._remember(gone)
        self._forget_ghosts(slot_size)

    def _spare(self, slot_size: int, slab: int, slot: int, spared: frozenset[bytes]) -> bool:
        """Give the page in this slot, if it is one of ``spared``, the room of as many inserts as there are slots."""
        holds = self._transaction.get(PLACE.pack(slab, slot), db=self._index.slots_db)
        if holds[-PAGE_HASH_LENGTH:] not in spared:
            return False
        full_key = holds[PRIORITY.size :]
        created, _, _, length, stored = PAGE.unpack(self._transaction.get(full_key, db=self._index.pages_db))
        rank = Rank.unpack(stored)
        self._transaction.delete(ORDER.pack(slot_size, rank.priority, slab, slot), db=self._index.order_db)
        later = min(rank.priority + self._ranking.slots(slot_size), _HIGHEST_PRIORITY)
        self._put(full_key, created, slab, slot, length, Rank(later, rank.used, rank.hits))
        return True

    def _evict_group(
        self,
        slot_size: int,
        slab: int,
        slot: int,
        up_to: int,
        gone: list[tuple[bytes, bytes]],
        spared: frozenset[bytes],
    ) -> None:
        """Evict the pages beside a slot, its own included, with priorities ``up_to``; their ghosts go to ``gone``."""
        transaction, index = self._transaction, self._index
        slots = max(1, _GROUP // slot_size)
        first = slot - slot % slots
        end = PLACE.pack(slab, first + slots)
        # Compared and put together as the bytes they are stored as: this runs once per page of every write.
        highest = PRIORITY.pack(min(up_to, _HIGHEST_PRIORITY))
        chosen: list[tuple[bytes, bytes]] = []
        with transaction.cursor(index.slots_db) as cursor:
            cursor.set_range(PLACE.pack(slab, first))
            for where, holds in cursor:
                if where >= end:
                    break
                if holds[: PRIORITY.size] <= highest and not (spared and holds[-PAGE_HASH_LENGTH:] in spared):
                    chosen.append((where, holds))
        pop, delete = transaction.pop, transaction.delete
        pages, order, occupied = index.pages_db, index.order_db, index.slots_db
        size = SLOT_SIZE.pack(slot_size)
        for where, holds in chosen:
            full_key = holds[PRIORITY.size :]
            page = pop(full_key, db=pages)
            gone.append((_fingerprint(full_key), Ghost.pack_evicted(page[_RANK_IN_PAGE:])))
            delete(size + holds[: PRIORITY.size] + where, db=order)
            delete(where, db=occupied)
        self._put_all(index.free_db, [(size + where, b"") for where, _ in chosen])

    def free_slots(self, slot_size: int, at_most: int) -> int:
        """How many slots of this size are free; ``at_most`` when there are more."""
        count = 0
        first = SLOT_SIZE.pack(slot_size)
        with self._transaction.cursor(self._index.free_db) as cursor:
            if cursor.set_range(first):
                for where in itertools.islice(cursor.iternext(keys=True, values=False), at_most):
                    if not where.startswith(first):
                        break
                    count += 1
        return count

    def pend(self, items: Sequence[tuple[int, int, bytes]]) -> bytes:
        """Note that this process is writing these (slab, slot, page key); the answer is the token for ``publish``."""
        token = self._index.writer + NUMBER.pack(self._index.next_portion())
        self._transaction.put(token, b"".join(PENDING.pack(*item) for item in items), db=self._index.pending_db)
        return token

    def give_back(self, slab: int, slot: int) -> None:
        """A slot that was taken is free again."""
        size = self._ranking.slab(slab).slot_size
        self._transaction.put(FREE.pack(size, slab, slot), b"", db=self._index.free_db)

    def publish(self, tokens: Sequence[bytes], pages: Sequence[Written], oldest: bytes = b"") -> list[bool] | None:
        """Make pages of what was pended under ``tokens``, in the order of their chain; the other slots become free.

        False for a page that another writer published first: its slot is free again. None, and nothing is published,
        when the slots are no longer this writer's: its process was taken for dead. ``oldest`` as for ``contains``.
        """
        index, transaction = self._index, self._transaction
        created = CREATED.pack(int(time.time()))
        rest: set[tuple[int, int]] = set()
        for token in tokens:
            items = transaction.pop(token, db=index.pending_db)
            rest.update((slab, slot) for slab, slot, _ in PENDING.iter_unpack(items or b""))
        if not all((page.place.slab, page.place.slot) in rest for page in pages):
            for slab, slot in rest:
                self.give_back(slab, slot)
            return None
        inserted: list[bool] = []
        ordered: list[tuple[bytes, bytes]] = []
        placed: list[tuple[bytes, bytes]] = []
        last_key: bytes | None = None
        last_rank: Rank | None = None
        put, pages_db, ranking = transaction.put, index.pages_db, self._ranking
        full_keys = index.full_keys(transaction, [page.key for page in pages])
        for (key, place, depth, previous), full_key in zip(pages, full_keys, strict=True):
            stored = transaction.get(full_key, db=pages_db)
            if stored is not None and stored < oldest:
                # Expired: this is its successor.
                self._remove(full_key, None)
                stored = None
            if stored is not None:
                inserted.append(False)
                last_key, last_rank = key, Rank.unpack(stored[_RANK_IN_PAGE:])
                continue
            before = last_rank if previous == last_key else self._rank_of(previous)
            size = ranking.slab(place.slab).slot_size
            rank = ranking.inserted(size, depth, before, self._recall(full_key))
            put(full_key, PAGE.pack(created, place.slab, place.slot, place.length, rank.pack()), db=pages_db)
            priority, where = PRIORITY.pack(rank.priority), PLACE.pack(place.slab, place.slot)
            ordered.append((SLOT_SIZE.pack(size) + priority + where, full_key))
            placed.append((where, priority + full_key))
            rest.discard((place.slab, place.slot))
            inserted.append(True)
            last_key, last_rank = key, rank
        self._put_all(index.order_db, ordered)
        self._put_all(index.slots_db, placed)
        for slab, slot in rest:
            self.give_back(slab, slot)
        return inserted

    def adopt(self, key: bytes, place: Place, created_ms: int) -> bool:
        """For the rebuild: a free slot that holds ``key`` becomes its page; False when ``key`` is known already."""
        index, transaction = self._index, self._transaction
        full_key = self._full(key)
        if transaction.get(full_key, db=index.pages_db) is not None:
            return False
        size = self._ranking.slab(place.slab).slot_size
        transaction.delete(FREE.pack(size, place.slab, place.slot), db=index.free_db)
        rank = self._ranking.inserted(size, 0, None, None)
        created = CREATED.pack(min(created_ms // 1000, _LATEST))
        self._put(full_key, created, place.slab, place.slot, place.length, rank)
        return True

    def release_dead_writers(self) -> int:
        """Free the slots that killed processes were writing; their number."""
        dead: list[tuple[bytes, bytes]] = []
        alive: dict[bytes, bool] = {}
        with self._transaction.cursor(self._index.pending_db) as cursor:
            for token, items in cursor:
                writer = bytes(token[: -NUMBER.size])
                if writer not in alive:
                    alive[writer] = writer_alive(writer.decode(), 0.0)
                if not alive[writer]:
                    dead.append((bytes(token), bytes(items)))
        freed = 0
        for token, items in dead:
            self._transaction.delete(token, db=self._index.pending_db)
            for slab, slot, _ in PENDING.iter_unpack(items):
                self.give_back(slab, slot)
                freed += 1
        return freed

    # -- pages -----------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """The leading pages of a chain were used."""
        index, transaction = self._index, self._transaction
        before: Rank | None = None
        for depth, full_key in enumerate(index.full_keys(transaction, keys)):
            value = transaction.get(full_key, db=index.pages_db)
            if value is None:
                before = None
                continue
            created, slab, slot, length, stored = PAGE.unpack(value)
            rank = Rank.unpack(stored)
            size = self._ranking.slab(slab).slot_size
            renewed = self._ranking.renewed(size, rank, depth, before)
            if renewed is not None:
                if renewed.priority != rank.priority:
                    transaction.delete(ORDER.pack(size, rank.priority, slab, slot), db=index.order_db)
                self._put(full_key, created, slab, slot, length, renewed)
            before = renewed or rank

    def remove(self, key: bytes, only: tuple[int, int] | None = None) -> bool:
        """Forget a page and free its slot; with ``only``, if it is (still) in that slot. False when it was not."""
        return self._remove(self._full(key), only)

    def clear(self, digest: bytes) -> bool:
        """Put all pages of an identity out of reach at once; False when it has none."""
        full_key = self._full(digest)
        with self._transaction.cursor(self._index.pages_db) as cursor:
            if not cursor.set_range(full_key) or not bytes(cursor.key()).startswith(full_key):
                return False
        generation = (GENERATION.unpack(full_key[: GENERATION.size])[0] + 1) % (1 << 16)
        self._transaction.put(b"generation" + digest, GENERATION.pack(generation), db=self._index.state_db)
        return True

    def remove_cleared(self, digest: bytes, limit: int) -> int:
        """Free the slots of up to ``limit`` pages of older generations of an identity; their number."""
        current = self._full(digest)
        removed = 0
        for generation in range(1 << 16):
            prefix = GENERATION.pack(generation) + digest
            if prefix >= current:
                break
            with self._transaction.cursor(self._index.pages_db) as cursor:
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
        return self._index.identities_in(self._transaction)

    def remove_expired(self, full_keys: Sequence[bytes], oldest: bytes) -> int:
        """Remove those of these pages that are (still) older than ``oldest``; their number."""
        removed = 0
        for full_key in full_keys:
            value = self._transaction.get(full_key, db=self._index.pages_db)
            if value is not None and value < oldest:
                removed += self._remove(full_key, None)
        return removed

    # -- slabs -----------------------------------------------------------------------------------------------------

    def slabs(self) -> list[Slab]:
        return self._ranking.slabs()

    def add_slab(self, slot_size: int, slots: int, number: int | None = None) -> Slab:
        """A new slab, all slots free. Its file must be there before the transaction ends."""
        transaction, index = self._transaction, self._index
        if number is None:
            number = self._next_slab_number()
        slab = Slab(number, slot_size, slots)
        transaction.put(SLOT_SIZE.pack(number), SLAB.pack(slot_size, slots), db=index.slabs_db)
        self._put_all(index.free_db, [(FREE.pack(slot_size, number, slot), b"") for slot in range(slots)])
        self._ranking.add(slab)
        self._slabs_changed = True
        return slab

    def drop_slab(self, slab: Slab) -> bool:
        """Forget a slab with all its pages.

        False, and nothing changed, while one of its slots is being written, or when another process was faster.
        """
        transaction, index = self._transaction, self._index
        if slab not in self.slabs():
            return False
        with transaction.cursor(index.pending_db) as cursor:
            for _, items in cursor:
                if any(number == slab.number for number, _, _ in PENDING.iter_unpack(items)):
                    return False
        dropped: list[tuple[bytes, bytes]] = []
        with transaction.cursor(index.slots_db) as cursor:
            more = cursor.set_range(PLACE.pack(slab.number, 0))
            while more and PLACE.unpack(cursor.key())[0] == slab.number:
                (priority,) = PRIORITY.unpack_from(cursor.value())
                order = ORDER.pack(slab.slot_size, priority, *PLACE.unpack(cursor.key()))
                dropped.append((order, bytes(cursor.value()[PRIORITY.size :])))
                more = cursor.delete() and bool(cursor.key())
        for order, full_key in dropped:
            transaction.delete(order, db=index.order_db)
            transaction.delete(full_key, db=index.pages_db)
        for slot in range(slab.slots):
            transaction.delete(FREE.pack(slab.slot_size, slab.number, slot), db=index.free_db)
        transaction.delete(SLOT_SIZE.pack(slab.number), db=index.slabs_db)
        self._ranking.drop(slab)
        self._slabs_changed = True
        return True

    def holds_any(self, slab: Slab, hashes: frozenset[bytes]) -> bool:
        """Whether a page of the slab has one of these hashes."""
        with self._transaction.cursor(self._index.slots_db) as cursor:
            if cursor.set_range(PLACE.pack(slab.number, 0)):
                for where, holds in cursor:
                    if PLACE.unpack(where)[0] != slab.number:
                        break
                    if holds[-PAGE_HASH_LENGTH:] in hashes:
                        return True
        return False

    def colder_slab(self, slot_size: int) -> Slab | None:
        """A slab of another slot size whose first victim would go before the first victim of this one."""
        own = self._first_victim(slot_size)
        coldest = own[0] if own is not None else None
        chosen: Slab | None = None
        for size in {slab.slot_size for slab in self.slabs()} - {slot_size}:
            victim = self._first_victim(size)
            if victim is None:
                # Nothing but free slots: nobody will miss it.
                return next(slab for slab in self.slabs() if slab.slot_size == size)
            if coldest is None or victim[0] < coldest:
                coldest = victim[0]
                chosen = self._ranking.slab(victim[1])
        return chosen

    def reserve_slab_numbers(self, below: int) -> None:
        """No new slab gets a number under ``below``: a reader may still have the file of an old one open."""
        stored = self._transaction.get(b"next slab", db=self._index.state_db)
        if stored is None or SLOT_SIZE.unpack(stored)[0] < below:
            self._transaction.put(b"next slab", SLOT_SIZE.pack(below), db=self._index.state_db)

    # -- ghosts ----------------------------------------------------------------------------------------------------

    def _remember(self, gone: list[tuple[bytes, bytes]]) -> None:
        """Keep ghosts (fingerprint, packed) of pages evicted together."""
        if not gone:
            return
        transaction, index = self._transaction, self._index
        if self._next_gone is None:
            with transaction.cursor(index.gone_db) as cursor:
                last = cursor.last()
                self._next_gone = (
                    NUMBER.unpack(cursor.key())[0] + len(cursor.value()) // FINGERPRINT_LENGTH if last else 0
                )
        number = NUMBER.pack(self._next_gone)
        # Numbers count fingerprints, so that the ends of ``gone`` tell how many there are.
        self._next_gone += len(gone)
        self._put_all(index.ghosts_db, [(fingerprint, number + ghost) for fingerprint, ghost in gone])
        transaction.put(number, b"".join(fingerprint for fingerprint, _ in gone), db=index.gone_db, append=True)

    def _recall(self, full_key: bytes) -> Ghost | None:
        """The ghost of a page that is back; its fingerprint stays in ``gone`` until its turn comes."""
        stored = self._transaction.pop(_fingerprint(full_key), db=self._index.ghosts_db)
        return None if stored is None else Ghost.unpack(stored[NUMBER.size :])

    def _forget_ghosts(self, slot_size: int) -> None:
        """Keep no more ghosts than are worth it: those evicted first go, all that were evicted together."""
        transaction, index = self._transaction, self._index
        if self._next_gone is None:
            return
        oldest_kept = self._next_gone - self._ranking.ghost_limit(slot_size)
        with transaction.cursor(index.gone_db) as cursor:
            more = cursor.first()
            while more and NUMBER.unpack(cursor.key())[0] < oldest_kept:
                number, fingerprints = bytes(cursor.key()), bytes(cursor.value())
                for start in range(0, len(fingerprints), FINGERPRINT_LENGTH):
                    fingerprint = fingerprints[start : start + FINGERPRINT_LENGTH]
                    stored = transaction.get(fingerprint, db=index.ghosts_db)
                    # A page evicted a second time has a younger number.
                    if stored is not None and stored.startswith(number):
                        transaction.delete(fingerprint, db=index.ghosts_db)
                more = cursor.delete() and bool(cursor.key())

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _full(self, key: bytes) -> bytes:
        (full_key,) = self._index.full_keys(self._transaction, [key])
        return full_key

    def _put_all(self, database: Any, items: list[tuple[bytes, bytes]]) -> None:
        with self._transaction.cursor(database) as cursor:
            cursor.putmulti(items)

    def _rank_of(self, key: bytes | None) -> Rank | None:
        stored = None if key is None else self._transaction.get(self._full(key), db=self._index.pages_db)
        return None if stored is None else Rank.unpack(stored[_RANK_IN_PAGE:])

    def _remove(self, full_key: bytes, only: tuple[int, int] | None) -> bool:
        index, transaction = self._index, self._transaction
        value = transaction.get(full_key, db=index.pages_db)
        if value is None:
            return False
        _, slab, slot, _, stored = PAGE.unpack(value)
        if only is not None and only != (slab, slot):
            return False
        transaction.delete(full_key, db=index.pages_db)
        size = self._ranking.slab(slab).slot_size
        transaction.delete(ORDER.pack(size, Rank.unpack(stored).priority, slab, slot), db=index.order_db)
        transaction.delete(PLACE.pack(slab, slot), db=index.slots_db)
        self.give_back(slab, slot)
        return True

    def _put(self, full_key: bytes, created: bytes, slab: int, slot: int, length: int, rank: Rank) -> None:
        transaction, index = self._transaction, self._index
        size = self._ranking.slab(slab).slot_size
        transaction.put(full_key, PAGE.pack(created, slab, slot, length, rank.pack()), db=index.pages_db)
        transaction.put(ORDER.pack(size, rank.priority, slab, slot), full_key, db=index.order_db)
        transaction.put(PLACE.pack(slab, slot), PRIORITY.pack(rank.priority) + full_key, db=index.slots_db)

    def _next_slab_number(self) -> int:
        stored = self._transaction.get(b"next slab", db=self._index.state_db)
        number: int = SLOT_SIZE.unpack(stored)[0] if stored else 0
        self.reserve_slab_numbers(number + 1)
        return number

    def _first_victim(self, slot_size: int) -> tuple[int, int, int] | None:
        """(priority, slab, slot) of the page of this slot size that goes first."""
        with self._transaction.cursor(self._index.order_db) as cursor:
            if not cursor.set_range(SLOT_SIZE.pack(slot_size)):
                return None
            size, priority, slab, slot = ORDER.unpack(cursor.key())
            return (priority, slab, slot) if size == slot_size else None


def _fingerprint(full_key: bytes) -> bytes:
    return xxhash.xxh3_64_digest(full_key)

"""The operations on the index of a slab directory inside one change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import lmdb
import numpy as np

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.contract.store import key_words
from hicache_ext.storage.tiers.file.eviction import EvictionPolicy
from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.ghosts import GhostTable
from hicache_ext.storage.tiers.file.slab.mapped import Words
from hicache_ext.storage.tiers.file.slab.records import (
    GENERATION,
    GENERATION_NAME,
    SLAB,
    SLOT_SIZE,
    USES,
    USES_NAME,
    Slab,
)
from hicache_ext.storage.tiers.file.slab.slot_code import LOW, OBJECT, PLACE, PRIORITY, STATE, USED
from hicache_ext.storage.tiers.file.slab.slot_references import SlotReference, SlotReferences
from hicache_ext.storage.tiers.file.slab.slot_table import SlotTable, View
from hicache_ext.storage.tiers.file.slab.touches import Uses

_LATEST = (1 << 31) - 1
_BYTES_PER_GHOST = 8192
"""At most one ghost (about 50 bytes of index) per so many bytes of slots: a bound for small directories."""
_SOON_SHIFT = 4
"""Pages of a chain lie up to 64 steps of capacity / 128 apart (eviction.py): a sixteenth takes eight of them."""
_NO_GHOSTS: Words = np.empty((3, 0, slot_code.WAYS), np.int64)
_NONE_SPARED: Words = np.empty(0, np.int64)


class FoundPage(NamedTuple):
    """A page that a rebuild finds in a slab."""

    key: bytes
    slot: int
    length: int
    """Bytes of payload."""
    created_ms: int
    seal: bytes


class Index(Protocol):
    """What a change uses of the index (index.py), whose databases it shares."""

    table: SlotTable
    slabs_db: Any
    state_db: Any

    def rows(self, view: View, keys: Sequence[bytes]) -> Words: ...
    def generations(self, view: View, keys: Sequence[bytes]) -> Words: ...
    def stored_generation(self, transaction: Any, digest: bytes) -> int: ...
    def identities(self, view: View) -> list[bytes]: ...
    def of_identity(self, view: View, digest: bytes) -> Words: ...
    def uses(self, transaction: Any, digest: bytes) -> Uses | None: ...
    def ghosts(self, transaction: Any, at_least: int = 0) -> GhostTable | None: ...
    def writer(self, portion: int) -> Words: ...
    def is_alive(self, writer: Sequence[int]) -> bool: ...


class IndexChange:
    """Made by ``SlabIndex.changing()``."""

    def __init__(self, index: Index, transaction: Any, view: View) -> None:
        self._index = index
        self._transaction = transaction
        self._view = view
        self.slabs_or_generations_changed = False
        self.evicted = 0

    # -- slots -----------------------------------------------------------------------------------------------------

    def take_free_slots(self, slot_size: int, count: int, portion: int) -> Words:
        """Take up to ``count`` free slots of this size for this process to write: slabs and slots, a row each.
        ``portion``: see ``publish``.

        In order of place, so that slots taken together are neighbours and are written together.
        """
        taken = np.empty((2, count), np.int64)
        done = slot_code.take_free(*self._view.table, slot_size, self._index.writer(portion), taken)
        return taken[:, :done]

    def evict(self, slot_size: int, count: int, spared: Words = _NONE_SPARED) -> None:
        """Evict at least ``count`` pages of this slot size, if there are so many: those of lowest priority.

        Pages whose hashes begin with a word of ``spared`` (sorted) stay, unless nothing else is left. Neighbours of a
        victim whose turn would come soon go with it, so that free slots are neighbours (docs/decisions/slab-writes.md).
        """
        slots = self._view.slots[slot_size]
        ghosts = self._index.ghosts(self._transaction, _ghost_limit(slots, slot_size)) if count > 0 else None
        soon, (places, remembered) = slots >> _SOON_SHIFT, _ghosts_of(ghosts)
        table = self._view.table
        self.evicted += slot_code.evict_pages(*table, slot_size, count, soon, slots, spared, places, remembered)

    def first_victim(self, slot_size: int) -> tuple[int, int] | None:
        """Of the next victim of this slot size: the clock at its last use, and when it was written (wall-clock
        seconds). None without pages."""
        view = self._view
        of_size = np.flatnonzero(view.rows[:, slot_code.SLOT_SIZE] == slot_size)
        lowest = view.lowest[of_size]
        if not len(lowest) or lowest.min() == slot_code.NO_PAGE:
            return None
        _, _, slots, together, base = view.rows[of_size[lowest.argmin()]].tolist()
        groups = view.groups[base + 1 : base + 1 - (-slots // together), slot_code.LOWEST]
        first = int(groups.argmin()) * together
        records = view.records[base + first : base + min(first + together, slots)]
        found = np.flatnonzero((records[:, PRIORITY] == lowest.min()) & (records[:, STATE] & 0xFF == slot_code.PAGE))
        return None if not len(found) else (int(records[found[0], USED]), int(records[found[0], OBJECT]) >> 32)

    def inserts(self, slot_size: int) -> int:
        """The clock of this slot size, in inserted pages."""
        return int(self._index.table.clock(slot_size)[slot_code.INSERTS])

    def free_slots(self, slot_size: int, at_most: int) -> int:
        """How many slots of this size are free; ``at_most`` when there are more."""
        return int(slot_code.count_free(self._view.groups, self._view.rows, slot_size, at_most))

    def give_back(self, portion: int, taken: SlotReferences) -> None:
        """Free slots that were taken."""
        slot_code.give_back(*self._view.table, self._pending(portion, taken))

    def publish(
        self, portion: int, keys: Sequence[bytes], taken: SlotReferences, written: SlotReferences, oldest: int = 0
    ) -> list[bool] | None:
        """Publish pages in slots taken under ``portion``; the other slots taken become free.

        ``keys`` is a chain. By position: ``taken``, its pages for which slots were taken, and ``written``, those whose
        bytes are in their slots. False for a page that another writer published first: its slot becomes free. None, and
        nothing is published, when the slots are no longer this writer's: its process was taken for dead. ``oldest`` as
        for ``locate``.
        """
        view, table = self._view, self._view.table
        rows = self._pending(portion, taken)
        if (rows < 0).any():
            slot_code.give_back(*table, rows)
            return None
        if len(written) < len(taken):
            of_written = np.searchsorted(taken.positions, written.positions)
            slot_code.give_back(*table, np.delete(rows, of_written))
            rows = rows[of_written]
        words, generations = key_words(keys), self._index.generations(view, keys)
        if oldest:
            self.remove_expired(self._index.rows(view, keys), oldest)
        sizes = {view.slabs[number].slot_size for number in set(written.slabs.tolist())}
        now = np.array([min(int(time.time()), _LATEST)])
        for size in sizes:
            chosen = written, rows
            if len(sizes) > 1:
                of_size = np.array([view.slabs[number].slot_size == size for number in written.slabs.tolist()])
                chosen = written.select(of_size), rows[of_size]
            self._describe(words, generations, size, *chosen, now, linked=True)
        published = np.empty(len(rows), np.int64)
        slot_code.publish_pages(*table, rows, published)
        return published.astype(bool).tolist()

    def _describe(
        self,
        words: Words,
        generations: Words,
        slot_size: int,
        pages: SlotReferences,
        rows: Words,
        created: Words,
        *,
        linked: bool,
    ) -> None:
        view, index = self._view, self._index
        slots = view.slots[slot_size]
        ghosts = _ghosts_of(index.ghosts(self._transaction))
        of_size = index.table.clock(slot_size), slots, *ghosts, _ghost_limit(slots, slot_size)
        positions, lengths = np.ascontiguousarray(pages.positions), np.ascontiguousarray(pages.lengths)
        slot_code.describe_pages(
            view.records, view.buckets, words, generations, positions, rows, lengths, created, int(linked), *of_size
        )

    def _pending(self, portion: int, taken: SlotReferences) -> Words:
        """The rows of slots that were taken; -1 for those that are no longer this writer's."""
        rows = np.empty(len(taken), np.int64)
        places = np.stack([taken.slabs, taken.slots])
        slot_code.rows_pending(self._view.records, self._view.rows, self._index.writer(portion), places, rows)
        return rows

    def adopt(self, slab: Slab, pages: Iterable[FoundPage], written: dict[int, Words]) -> int:
        """For the rebuild: free slots of a slab become the pages that they hold; returns the number of new pages.

        Of several pages with one key the newest counts: an older one may be the header of an evicted page, in a slot
        whose next page was being written at a kill. ``written``: for all calls of one rebuild, by slab, when the page
        in each slot was written (ms)."""
        found = list({page.key: page for page in sorted(pages, key=lambda page: page.created_ms)}.values())
        if not found:
            return 0
        view = self._view
        keys = [page.key for page in found]
        first = view.slabs[slab.number].first_record
        rows = np.array([first + page.slot for page in found], np.int64)
        view.seals[rows] = np.frombuffer(b"".join([page.seal for page in found]), np.uint64).reshape(len(rows), -1)
        words, generations = key_words(keys), self._index.generations(view, keys)
        # The pages of a slab are no chain: each counts as written alone.
        pages_found = SlotReferences.of(
            [SlotReference(slab.number, page.slot, page.length, n) for n, page in enumerate(found)]
        )
        created = np.array([min(page.created_ms // 1000, _LATEST) for page in found], np.int64)
        moments = written.setdefault(slab.number, np.zeros(slab.slots, np.int64))
        moments[rows - first] = [page.created_ms for page in found]
        older: list[int] = []
        for row, page in zip(self._index.rows(view, keys).tolist(), found, strict=True):
            place = int(view.records[row, PLACE])
            if row >= 0 and written[place >> 32][place & LOW] < page.created_ms:
                older.append(row)
        replaced = slot_code.forget_pages(*view.table, np.array(older, np.int64))
        self._describe(words, generations, slab.slot_size, pages_found, rows, created, linked=False)
        published = np.empty(len(rows), np.int64)
        return int(slot_code.publish_pages(*view.table, rows, published) - replaced)

    def release_dead_writers(self) -> int:
        """Free the slots that killed processes were writing; returns their number."""
        view = self._view
        if not any(view.groups[slab.first_record, slot_code.PENDING_SLOTS] for slab in view.slabs.values()):
            return 0
        rows = view.rows_in(slot_code.PENDING)
        alive: dict[tuple[int, ...], bool] = {}
        dead: list[int] = []
        for row in rows.tolist():
            writer = tuple(view.records[row, :3].tolist())
            if writer not in alive:
                alive[writer] = self._index.is_alive(writer)
            if not alive[writer]:
                dead.append(row)
        return int(slot_code.give_back(*view.table, np.array(dead, np.int64)))

    # -- pages -----------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """The leading pages of a chain were used."""
        if keys:
            view, index = self._view, self._index
            generations = index.generations(view, keys)
            slot_code.touch_chain(*view.table, key_words(keys), generations, index.table.clocks, view.capacities)

    def add_uses(self, uses: Mapping[bytes, Uses]) -> None:
        """Pages of these identities were hit."""
        for digest, new in uses.items():
            known = self._index.uses(self._transaction, digest)
            added = new if known is None else known.and_(new)
            self._transaction.put(USES_NAME + digest, USES.pack(*added), db=self._index.state_db)

    def is_at(self, key: bytes, page: SlotReference) -> bool:
        """Whether the page is still of that length in that slot."""
        (row,) = self._index.rows(self._view, [key])
        if row < 0:
            return False
        record = self._view.records[row]
        return bool(record[PLACE] == page.slab << 32 | page.slot and record[OBJECT] & LOW == page.length)

    def remove(self, key: bytes) -> bool:
        """Forget a page and free its slot. False when there is none."""
        return bool(slot_code.forget_pages(*self._view.table, self._index.rows(self._view, [key])))

    def clear(self, digest: bytes) -> bool:
        """Put all pages of an identity out of reach at once; False when it has none."""
        index, view = self._index, self._view
        generation = index.stored_generation(self._transaction, digest)
        if not (view.records[index.of_identity(view, digest), STATE] >> 16 == generation).any():
            return False
        following = GENERATION.pack((generation + 1) % (1 << 16))
        self._transaction.delete(USES_NAME + digest, db=index.state_db)
        self._transaction.put(GENERATION_NAME + digest, following, db=index.state_db)
        self.slabs_or_generations_changed = True
        return True

    def remove_cleared(self, rows: Words, digest: bytes) -> int:
        """Free those of these slots whose page is of this identity and cleared; returns their number."""
        rows = self._mapped(rows)
        records = self._view.records[rows]
        generation = self._index.stored_generation(self._transaction, digest)
        first, second = np.frombuffer(digest, np.int64)
        chosen = (records[:, 0] == first) & (records[:, 1] == second) & (records[:, STATE] >> 16 != generation)
        return int(slot_code.forget_pages(*self._view.table, rows[chosen]))

    def identities(self) -> list[bytes]:
        """Digests with pages, cleared ones included."""
        return self._index.identities(self._view)

    def remove_expired(self, rows: Words, oldest: int) -> int:
        """Remove those of these pages (a row may be -1) that are older than ``oldest``; returns their number."""
        old = self._mapped(rows)
        old = old[self._view.records[old, OBJECT] >> 32 < oldest]
        return int(slot_code.forget_pages(*self._view.table, old))

    # -- slabs -----------------------------------------------------------------------------------------------------

    def slabs(self) -> list[Slab]:
        return list(self._view.slabs.values())

    def add_slab(self, slot_size: int, slots: int, number: int | None = None) -> Slab:
        """A new slab, all slots free. Its file must exist before the change ends. Raises OSError, with nothing changed,
        if the disk has no space for its records; lmdb.Error if they cannot be mapped."""
        index, view = self._index, self._view
        first = index.table.allocate(slots, view.slabs)
        if number is None:
            number = self._next_slab_number()
        slab = Slab(number, slot_size, slots, first)
        index.table.clock(slot_size)
        self._transaction.put(SLOT_SIZE.pack(number), SLAB.pack(slot_size, slots, first), db=index.slabs_db)
        self._look_at({**view.slabs, number: slab})
        self._view.records[first : first + slots] = 0
        self._view.seals[first : first + slots] = 0
        if len(self._view.buckets) == len(view.buckets):
            slot_code.settle_new(*self._view.table, number)
        else:
            # A new hash table is empty.
            slot_code.settle_all(*self._view.table)
        return slab

    def drop_slab(self, slab: Slab) -> bool:
        """Forget a slab with all its pages.

        False, with nothing changed, while one of its slots is being written, or if another process dropped it.
        """
        view = self._view
        known = view.slabs.get(slab.number)
        if known != slab or view.groups[known.first_record, slot_code.PENDING_SLOTS]:
            return False
        slot_code.forget_pages(*view.table, view.rows_of(known))
        self._transaction.delete(SLOT_SIZE.pack(slab.number), db=self._index.slabs_db)
        self._look_at({number: other for number, other in view.slabs.items() if number != slab.number})
        return True

    def holds_any(self, slab: Slab, spared: Words) -> bool:
        """Whether a page of the slab is one of ``spared`` (as for ``evict``)."""
        known = self._view.slabs.get(slab.number)
        if known is None:
            return False
        rows = self._view.rows_of(known)[self._view.states(known) == slot_code.PAGE]
        return bool(np.isin(self._view.records[rows, IDENTITY_LENGTH // 8], spared).any())

    def colder_slab(self, slot_size: int) -> Slab | None:
        """A slab of another slot size whose next victim has a lower priority than that of this size."""
        view = self._view
        if not view.slots.keys() - {slot_size}:
            return None
        sizes, lowest = view.rows[:, slot_code.SLOT_SIZE], view.lowest
        coldest = int(lowest[sizes == slot_size].min(initial=slot_code.NO_PAGE))
        chosen: int | None = None
        for other in np.unique(sizes[sizes != slot_size]):
            of_size = np.flatnonzero(sizes == other)
            first = of_size[lowest[of_size].argmin()]
            if lowest[first] == slot_code.NO_PAGE:
                # It has free slots only.
                return view.slabs[int(view.rows[first, slot_code.NUMBER])]
            if lowest[first] < coldest:
                coldest, chosen = int(lowest[first]), int(view.rows[first, slot_code.NUMBER])
        return None if chosen is None else view.slabs[chosen]

    def reserve_slab_numbers(self, below: int) -> None:
        """Give no new slab a number under ``below``: a reader may have the file of an old slab open."""
        stored = self._transaction.get(b"next slab", db=self._index.state_db)
        if stored is None or SLOT_SIZE.unpack(stored)[0] < below:
            self._transaction.put(b"next slab", SLOT_SIZE.pack(below), db=self._index.state_db)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _mapped(self, rows: Words) -> Words:
        """Those of rows looked up before this change that still exist: slabs may be gone."""
        return rows[(rows >= 0) & (rows < len(self._view.records))]

    def _look_at(self, slabs: dict[int, Slab]) -> None:
        try:
            self._view = self._index.table.view(slabs, self._view.epoch)
        except OSError as error:
            # The change cannot go on without the records.
            raise lmdb.Error(f"the records of the index: {error}") from error
        self.slabs_or_generations_changed = True

    def _next_slab_number(self) -> int:
        stored = self._transaction.get(b"next slab", db=self._index.state_db)
        number: int = SLOT_SIZE.unpack(stored)[0] if stored else 0
        self.reserve_slab_numbers(number + 1)
        return number


def _ghost_limit(slots: int, slot_size: int) -> int:
    return min(EvictionPolicy(max(1, slots)).ghost_limit, slots * slot_size // _BYTES_PER_GHOST)


def _ghosts_of(table: GhostTable | None) -> tuple[Words, Words]:
    return (_NO_GHOSTS, np.zeros(1, np.int64)) if table is None else (table.places, table.remembered)

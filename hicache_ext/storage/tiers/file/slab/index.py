"""The index of one directory, shared by all processes on it: it says which page is in which slot.

It is memory (index_memory.py), changed under a lock that is waited for at most a second (``ChangeLock``), in steps none
of which leaves anything to repair. A lookup takes no lock and makes no system call, nor does clearing a known identity:
that raises its generation, which puts its pages out of reach immediately. Reasons: docs/decisions/slabs.md.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import IndexBusyError
from hicache_ext.page.envelope import IDENTITY_LENGTH, SEAL_LENGTH
from hicache_ext.runtime.file_lock import ChangeLock
from hicache_ext.runtime.members import Members
from hicache_ext.storage.contract.store import PageKeys, key_words
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index_memory import (
    LARGEST_NUMBER,
    MOST_SLABS,
    IndexMemory,
)
from hicache_ext.storage.tiers.file.slab.index_words import (
    CLEARED,
    CREATED,
    CURSOR,
    DROPPING,
    FIRST,
    FREE,
    FREE_SLOTS,
    GENERATION,
    HITS,
    LAST,
    MAKING,
    NO_PAGE,
    NO_SLAB,
    OF,
    PENDING,
    READY,
    SCANNING,
    SLAB_CHANGES,
    SLAB_NUMBER,
    SLAB_STATE,
    SLOT_SIZE,
    SLOTS,
    STATE,
    STATES,
    WRITTEN,
    Words,
)
from hicache_ext.storage.tiers.file.slab.shapes import HEADER, NO_SLOTS, Slab, SlotReferences

_GROUP = 2 << 20
"""Bytes of slots that are evicted together."""
_MOST_TOGETHER = 32
_GROUPS = 2048
"""Least number of groups: in a small tier the neighbours of the coldest pages are no colder than others."""
_WORTHLESS = 0.75
"""Part of a slab that must be worth less than another slot size before that size may take the slab. Measured:
docs/decisions/pools-share-a-fate.md."""
_SAMPLED = 1 << 13
"""Slots whose ranks are sampled to estimate how cold the coldest are; up to twice as many in small tables."""
_COLD_PART, _COOL_PART = 768, 96
"""The coldest 768th of all slots is evicted, and so are its neighbours among the coldest 96th, so that free slots are
adjacent. Three times as many make runs a sixth longer, and cost 0.007 of the hits in traffic with loops."""
_STEP = 1 << 12
"""Headers adopted, or sets added, per holding of the lock."""
_MOST_WINDOWS = 8
"""Windows searched for victims before the cold slots are located again."""
_MOST_VICTIMS = 1 << 12
"""Slots freed by one search, under the lock: about a millisecond."""
_LOOKS_IN_VAIN = 8
"""Searches that free nothing before a write gets no slot: mostly they meet pages that must stay."""
_LOOKS_OF_TENANTS = 3
_MOST_LOOKED_AT = 1 << 15
"""Slots searched for victims per holding of the lock: less than a millisecond."""
_MOST_EVENTS = 1 << 8
"""Uses that the miniatures process per holding of the lock."""
_MOST_RANKED = 1 << 12
"""Rows ranked by a new policy per holding of the lock."""
_AT_ONCE = 1 << 16
COLD, COOL, LEFT, WINDOWS = range(4)
"""Indices of what is known of the slots of a size: a group of slots with a page of priority up to COLD loses its pages
up to COOL; LEFT slots are to be freed before both are measured again; from WINDOWS on, the starts of windows with many
cold slots, the best one last."""
EVERY = b""
"""Stands for all identities in place of a digest."""
IN_USE = (READY, SCANNING)
"""SLAB_STATE of the slabs whose pages can be looked up."""
_DEPENDENTS_PER_STEP = 1 << 12
"""Dependents of evicted pages looked up per holding of the lock."""
_COMING_AND_GOING = 4
"""Pages that may come or go while rows are counted, per insert during the count."""
_NO_NUMBERS = np.array([-1])
_NONE: Words = np.empty(0, np.int64)
_NO_ROWS: Words = np.empty((0, index_words.ROW_WORDS), np.int64)


def milliseconds() -> int:
    """Return the wall-clock time in the unit of pages' timestamps."""
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot of the slabs, valid until SLAB_CHANGES changes."""

    changes: int
    slabs: Mapping[int, Slab]
    """Slabs whose pages can be looked up, by number."""
    table: Words
    """``IndexMemory.slab_table``, to which the next three fields refer."""
    by_first: Words
    """The table's rows of these slabs, sorted by FIRST."""
    positions: Words
    """Position in the table of each row of ``by_first``."""
    of_size: Mapping[int, Words]
    """Slot size -> positions in the table, in order of slab number."""
    capacity: int
    """Slots of all sizes, at least 1."""
    ghosts: int
    """Evicted pages worth remembering."""
    sampled: int
    """Number of pages out of SAMPLE + 1 that the miniatures see."""
    rows: int
    """One past the last row in use."""


class SlabIndex:
    """The index of one directory. Thread-safe."""

    def __init__(
        self,
        memory: IndexMemory,
        lock: ChangeLock,
        members: Members,
        cleared_at: Callable[[bytes], int],
        share: Callable[[int], None] = lambda member: None,
    ) -> None:
        """``cleared_at`` returns when an identity was last cleared according to the disk (milliseconds, -1: never); it
        may raise OSError. ``share`` starts giving the memory to processes that ask this member; it is called before a
        member changes anything, also in a forked child. It may raise OSError."""
        self.memory = memory
        self._lock = lock
        self._members = members
        self._share = share
        self._member = 0
        """Id under which this process shares the memory."""
        self._cleared_at = cleared_at
        self._view: View | None = None
        self._known: tuple[int, dict[bytes, int]] = (0, {})
        """Number of identities read so far, and the number of each."""
        self._coldness: dict[tuple[int, int], list[int]] = {}
        """(slot size, writing tenant) -> COLD, COOL, LEFT and WINDOWS, as measured by this process."""
        self._numbers: dict[bytes, Words] = {}
        self._dependents: Mapping[bytes, Sequence[bytes]] = {}
        self._dependent_numbers: Mapping[int, Sequence[int]] = {}
        """Number of a KV identity -> numbers of its dependents."""
        self._tickets = itertools.count(random.getrandbits(62))

    # -- reading ---------------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes], oldest: int = 0) -> SlotReferences:
        """Return the pages found, in the order of ``keys``, each with its position. Pages written before ``oldest``
        (wall-clock milliseconds) are not found."""
        located = np.empty((5, len(keys)), np.int64)
        found = self.memory.table.locate(key_words(keys), self._numbers_of(keys), oldest, self.view().by_first, located)
        if not (count := found >> index_words.FACTS):
            return NO_SLOTS
        slabs, slots, lengths, positions, rows = located[:, :count]
        return SlotReferences(slabs, slots, lengths, positions, rows, found & ((1 << index_words.FACTS) - 1))

    def contains(self, keys: Sequence[bytes], oldest: int = 0) -> list[bool]:
        """Return which pages are found; ``oldest`` as for ``locate``."""
        found = np.zeros(len(keys), bool)
        found[self.locate(keys, oldest).positions] = True
        return found.tolist()

    def count_leading(self, keys: Sequence[bytes], oldest: int = 0) -> int:
        found = self.memory.table.locate(key_words(keys), self._numbers_of(keys), oldest, None, None)
        return found >> index_words.FACTS

    def rows_of(self, keys: Sequence[bytes], oldest: int = 0) -> Words:
        """Return the row of each page, -1 for a miss; ``oldest`` as for ``locate``."""
        found, rows = self.locate(keys, oldest), np.full(len(keys), -1)
        rows[found.positions] = found.rows
        return rows

    def places_of(self, rows: Words) -> tuple[Words, Words]:
        """Return the slab numbers and slots of rows that were taken."""
        by_first = self.view().by_first
        slabs = index_words.slabs_with(by_first, rows)
        if (slabs < 0).any():
            # Somebody took the slab out of the table: it cannot be opened.
            return np.full(len(rows), -1), np.zeros(len(rows), np.int64)
        return by_first[slabs, SLAB_NUMBER], rows - by_first[slabs, FIRST]

    def view(self) -> View:
        view = self._view
        changes = int(self.memory.header[SLAB_CHANGES])
        if view is None or view.changes != changes:
            # Read the counter before the slabs: the next call then sees a change that comes in between.
            view = self._view = self._look(changes)
        return view

    def slab(self, number: int) -> Slab | None:
        """Return the slab with this number; None if it was dropped."""
        return self.view().slabs.get(number)

    def _look(self, changes: int) -> View:
        table = self.memory.slab_table()
        there = np.flatnonzero(np.isin(table[:, SLAB_STATE], IN_USE))
        there = there[table[there, SLAB_NUMBER].argsort()]
        slabs = {slab.number: slab for slab in slabs_of(table[there])}
        sizes = table[there, SLOT_SIZE]
        of_size = {int(size): np.ascontiguousarray(there[sizes == size]) for size in np.unique(sizes)}
        positions = there[table[there, FIRST].argsort()]
        capacity = max(1, int(table[there, SLOTS].sum()))
        ghosts = min(eviction.ghost_limit(capacity), self.memory.ghosts.shape[1] * index_words.WAYS // 2)
        by_first = np.ascontiguousarray(table[positions])
        rows = int((by_first[:, FIRST] + by_first[:, SLOTS]).max(initial=0))
        sampled = index_words.sampled_of(capacity)
        return View(changes, slabs, table, by_first, positions, of_size, capacity, ghosts, sampled, rows)

    def note_hits(self, found: SlotReferences, keys: Sequence[bytes], hits: int) -> None:
        """Count ``hits`` pages that were read. ``found`` are the pages of a chain that were used, which may rank higher
        for it."""
        numbers = self._numbers_of(keys)
        number = int(numbers[0]) if len(numbers) else -1
        if number >= 0 and hits:
            # Concurrent threads may lose a count, which is good enough for people to read.
            identity = self.memory.identities[number]
            identity[HITS] += hits
            identity[LAST] = int(time.time())
        if len(found.rows):
            view = self.view()
            self.memory.table.touch(_by_position(found), view.capacity, view.sampled)
            header, events = self.memory.header, self.memory.events
            # Without writes nobody else would process the events before the ring is full.
            if header[index_words.EVENTS] - header[index_words.LEARNED] >= len(events) // 2:
                with suppress(OSError):
                    if self._lock.try_acquire():
                        try:
                            self._learn(view, max(_MOST_EVENTS, len(found.rows)))
                        finally:
                            self._lock.release()

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the bytes of slots that the pages under each of these page hashes take, over all identities."""
        taken = np.zeros(len(hashes), np.int64)
        by_first = self.view().by_first
        for digest in self.identities() if len(by_first) else ():
            rows = self.rows_of(PageKeys.of_joined(digest, b"".join(hashes)))
            sizes = by_first[np.clip(index_words.slabs_with(by_first, rows), 0, None), SLOT_SIZE]
            taken += np.where(rows >= 0, sizes, 0)
        return taken.tolist()

    def occupied(self, oldest: int = 0) -> tuple[int, int, int, Words]:
        """Return the number of pages, the bytes of their slots and headers, the bytes of free slots, and the bytes of
        each tenant's pages. Reads every row."""
        pages = used = free = 0
        clock, tenants = self.inserts, self.tenant_pages
        of_tenants, taken = np.zeros_like(tenants), np.zeros_like(tenants)
        for slab in self.view().slabs.values():
            found, pending, tenants_of_slab = self._count(slab, oldest)
            pages += found
            used += found * (slab.slot_size + HEADER)
            free += (slab.slots - found - pending) * slab.slot_size
            of_tenants += tenants_of_slab
            taken += tenants_of_slab * (slab.slot_size + HEADER)
        with suppress(OSError):
            # The counts differ a little while pages come and go, and are wrong after a kill.
            differ = np.abs(of_tenants - tenants).max() > _COMING_AND_GOING * (self.inserts - clock)
            has_tenants = self.memory.tenants[1:, index_words.TENANT_NAME].any()
            is_wrong = differ and has_tenants and self.rebuilt and not self._has_left_slabs()
            if is_wrong and self._lock.try_acquire():
                try:
                    of_slabs = [self._count(slab, 0)[2] for slab in self.view().slabs.values()]
                    self.memory.tenants[:, index_words.TENANT_PAGES] = sum(of_slabs, np.zeros_like(tenants))
                finally:
                    self._lock.release()
        return pages, used, free, taken

    def served(self) -> tuple[int, ...]:
        """Return what the miniatures measured, as in ``Fullness``.

        A page that is used all the time is in the sample or not, whatever its share of the uses. Uses that the sample
        lacks or has in excess are therefore counted as hits of such pages (SHARDS-adj, Waldspurger et al. 2015)."""
        small = self.memory.small
        at_scales = index_words.MINIATURE_HITS + index_words.CANDIDATES
        half, twice, four_times = small[at_scales : at_scales + len(index_words.SCALES)].tolist()
        uses = int(small[index_words.EXPECTED] // (index_words.SAMPLE + 1))
        hot = uses - int(small[index_words.USES])
        hits = (max(0, hits + hot) for hits in (half, int(small[index_words.SERVED]), twice, four_times))
        return uses, *hits

    def _count(self, slab: Slab, oldest: int) -> tuple[int, int, Words]:
        """Return how many slots of a slab hold pages that can be found, are PENDING, and belong to each tenant."""
        pages, pending, of_tenants = 0, 0, np.zeros(index_words.TENANTS, np.int64)
        for begin in range(slab.first_row, slab.first_row + slab.slots, _MOST_LOOKED_AT):
            rows = np.arange(begin, min(begin + _MOST_LOOKED_AT, slab.first_row + slab.slots))
            states = self.memory.rows[rows, STATE] & STATES
            pages += int(self.are_found(rows, oldest).sum())
            pending += int((states == PENDING).sum())
            of_tenants += self.tenants_of(rows[states == index_words.PAGE])
        return pages, pending, of_tenants

    def are_found(self, rows: Words, oldest: int) -> npt.NDArray[np.bool_]:
        """Return which of these rows have pages that can be found; ``oldest`` as for ``locate``."""
        ranks = np.empty(len(rows), np.int64)
        self.memory.table.ranks(rows, oldest, None, ranks)
        found: npt.NDArray[np.bool_] = (ranks != index_words.AT_ONCE) & (ranks != NO_PAGE)
        return found

    # -- identities ------------------------------------------------------------------------------------------------

    def identities(self) -> list[bytes]:
        """Return the digests that have had pages since they were last cleared."""
        known = self.numbers
        return sorted(digest for digest, number in known.items() if self.memory.identities[number, WRITTEN])

    def _with_pages(self) -> set[int]:
        """Return the numbers of identities that have pages. Reads every row."""
        found: set[int] = set()
        for slab in self.view().slabs.values():
            states = self.memory.rows[slab.first_row : slab.first_row + slab.slots, STATE]
            states = states[states & STATES == index_words.PAGE]
            current = states[index_words.is_current(self.memory.identities, states)]
            found.update(np.unique(current >> index_words.NUMBER_SHIFT).tolist())
        return found

    def set_dependents(self, dependents: Mapping[bytes, Sequence[bytes]]) -> None:
        """Set which identities depend on each KV identity: once the last KV page under a page hash is evicted, their
        pages under that hash are evicted, too."""
        if dependents is not self._dependents:
            numbers = self.numbers
            self._dependents = dependents
            self._dependent_numbers = {
                numbers[kv]: known
                for kv, others in dependents.items()
                if kv in numbers and (known := [numbers[other] for other in others if other in numbers])
            }

    def clear(self, digests: Sequence[bytes] | None) -> tuple[list[bytes], int]:
        """Put all pages of these identities (None: of all) out of reach immediately. Return the identities whose
        headers may still be on the disk ([EVERY] for all), and how many had pages, for which every row is read. Takes
        no lock, so a write in progress may count or not. Only an identity whose pages a rebuild may still find needs
        the lock; that raises IndexBusyError or OSError."""
        now, cleared, had_pages = milliseconds(), [], 0
        if digests is None:
            # Set this before reading the known identities: register() does both in the opposite order, and a rebuild
            # may still find identities that are not known.
            self.memory.header[index_words.ALL_CLEARED] = now
        known, with_pages = self.numbers, self._with_pages()
        for digest in list(known) if digests is None else digests:
            number = known.get(digest)
            if number is None:
                if self.rebuilt:
                    continue
                number = self.register([digest])[digest]
            # Include identities without published pages: a killed writer may have left headers on the disk.
            cleared.append(digest)
            if number >= 0:
                identity = self.memory.identities[number]
                had_pages += number in with_pages
                identity[WRITTEN] = identity[HITS] = identity[LAST] = 0
                identity[CLEARED] = now
                identity[GENERATION] += 1
        return [EVERY] if digests is None and (cleared or not self.rebuilt) else cleared, had_pages

    def register(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """Return the numbers of identities, assigning new ones where needed; -1 if there is no room for more. Raises
        IndexBusyError, OSError."""
        known = self.numbers
        missing = [digest for digest in dict.fromkeys(digests) if digest not in known]
        # Read the disk before taking the lock.
        cleared = {digest: self._cleared_at(digest) for digest in missing}
        if missing:
            with self._changing():
                known = self.numbers
                for digest in missing:
                    number = int(self.memory.header[index_words.IDENTITIES])
                    if digest not in known and 0 <= number < len(self.memory.identities):
                        identity = self.memory.identities[number]
                        identity[:] = 0
                        identity[:2] = np.frombuffer(digest, np.int64)
                        identity[CLEARED] = cleared[digest]
                        self.memory.header[index_words.IDENTITIES] = number + 1
                        if not self.rebuilt:
                            # A clear() of all did not know this identity.
                            of_all = int(self.memory.header[index_words.ALL_CLEARED])
                            identity[CLEARED] = max(cleared[digest], of_all)
                known = self.numbers
        return {digest: known.get(digest, -1) for digest in digests}

    @property
    def numbers(self) -> dict[bytes, int]:
        """The numbers of all identities. Entries are only added."""
        count = min(int(self.memory.header[index_words.IDENTITIES]), len(self.memory.identities))
        if count > self._known[0]:
            new = self.memory.identities[:count, :2].copy()
            # Make a new dict, because threads may be iterating over the old one.
            self._known = count, {digest.tobytes(): number for number, digest in enumerate(new)}
        return self._known[1]

    def _numbers_of(self, keys: Sequence[bytes]) -> Words:
        """Return the numbers of the identities of ``keys``; a single number if all have the same identity."""
        if isinstance(keys, PageKeys):
            known_number = self._numbers.get(keys.identity)
            return self.number_of(keys.identity) if known_number is None else known_number
        digests = [key[:IDENTITY_LENGTH] for key in keys]
        known = {digest: self.number_of(digest) for digest in set(digests)}
        if len(known) == 1:
            return known[digests[0]]
        return np.array([known[digest][0] for digest in digests], np.int64)

    def number_of(self, digest: bytes) -> Words:
        """Return one word: the number of an identity, -1 if it has none."""
        known = self._numbers.get(digest)
        if known is None:
            number = self.numbers.get(digest)
            if number is None:
                return _NO_NUMBERS
            known = self._numbers[digest] = np.array([number])
        return known

    # -- tenants ---------------------------------------------------------------------------------------------------

    def number_tenants(self, names: Sequence[str]) -> dict[str, int]:
        """Return the numbers of these tenants, which all processes share, assigning new ones where needed; 0, that of
        the default tenant, if there is no room left. Raises IndexBusyError."""
        known, numbers = self.memory.tenants[:, index_words.TENANT_NAME], dict[str, int]()
        with self._changing():
            for name in names:
                word = index_words.tenant_word(name)
                places = [*np.flatnonzero(known[1:] == word), *np.flatnonzero(known[1:] == 0)]
                numbers[name] = int(places[0]) + 1 if places else 0
                if places:
                    known[numbers[name]] = word
        return numbers

    @property
    def tenant_pages(self) -> Words:
        """Approximate number of pages of each tenant, by tenant number."""
        pages: Words = self.memory.tenants[:, index_words.TENANT_PAGES].copy()
        return pages

    def tenancy(self, shares: Mapping[int, float], writer: int) -> Words:
        """Return the words for ``take``: the writing tenant (-1 for nobody), and each tenant's share in slots."""
        words = np.zeros(index_words.TENANCY_WORDS, np.int64)
        capacity = self.view().capacity
        for number, share in shares.items():
            words[number] = int(share * capacity)
        words[index_words.WRITER] = writer
        return words

    def is_below_share(self, tenancy: Words) -> bool:
        """Return whether the writing tenant has fewer pages than its share."""
        writer = int(tenancy[index_words.WRITER])
        return writer >= 0 and bool(self.memory.tenants[writer, index_words.TENANT_PAGES] < tenancy[writer])

    def tenants_of(self, rows: Words) -> Words:
        """Return how many of the pages in these rows belong to each tenant."""
        return _tenants_in(self.memory.rows[rows])

    # -- slots -----------------------------------------------------------------------------------------------------

    def next_ticket(self) -> int:
        """Return a number that identifies a write in progress."""
        return next(self._tickets) & ((1 << 62) - 1)

    def take(
        self,
        slot_size: int,
        wanted: int,
        ticket: int,
        oldest: int,
        spared: Words,
        *,
        evicting: bool,
        tenancy: Words | None = None,
        for_nobody: bool = False,
        before: bytes | None = None,
    ) -> tuple[Words, int, Words, int]:
        """Take slots to write. Return the rows of as many as there are, in disk order as far as possible; when
        ``evicting``, also the number of slots freed, the row words of evicted pages (without those that nobody could
        request any more), and the number of dependents evicted with them. Pages stay that rank at
        ``bound_behind(before)`` or above; if possible, those with a hash in ``spared`` (sorted); always, those of
        other tenants within their shares (``tenancy``; None: no tenants), and with ``for_nobody`` the writer's own,
        too. Raises IndexBusyError."""
        ranked_for = tenancy
        if tenancy is not None and for_nobody:
            ranked_for = tenancy.copy()
            ranked_for[index_words.WRITER] = -1
        rows, done, gone = np.empty(wanted, np.int64), 0, [_NO_ROWS]
        freed = in_vain = 0
        of_size = self._taken_from(slot_size)
        wants_victims = evicting and len(of_size) and int(self.memory.slabs[of_size, FREE_SLOTS].sum()) < wanted
        if wants_victims:
            # Measure now, not while others wait for the lock.
            self._measured(of_size, slot_size, wanted, oldest, ranked_for)
        with self._changing():
            of_size = self._taken_from(slot_size)
            slabs = self.memory.slabs, self.view().table, of_size

            def take_free() -> int:
                return self.memory.table.take_free(*slabs, self._pending, ticket, rows[done:])

            done = take_free()
            # If pages stay because of others' shares, searching longer finds nothing.
            looks = _LOOKS_IN_VAIN if tenancy is None else _LOOKS_OF_TENANTS
            bound = self.bound_behind(before, oldest) if evicting and done < wanted else NO_PAGE
            while evicting and done < wanted and in_vain < looks and len(of_size):
                # Pages that stay may be the coldest: search more and more slots, but take no more of them.
                need = wanted - done
                looked = need << 3 * in_vain
                freed += self._evict(of_size, slot_size, need, looked, oldest, spared, gone, ranked_for, bound)
                got = take_free()
                in_vain = 0 if got else in_vain + 1
                done += got
        pages, dependents = np.concatenate(gone), 0
        if tenancy is not None:
            tenancy[index_words.EVICTED :] += _tenants_in(pages)
        if len(pages):
            hashes, states = (np.ascontiguousarray(pages[:, word]) for word in (index_words.HASH, STATE))
            dependents = self._evict_dependents(hashes, states, oldest)
        return rows[:done], freed, pages, dependents

    def _taken_from(self, slot_size: int) -> Words:
        """Return the positions of the slabs of a size that slots are taken from: all that a rebuild has finished."""
        of_size = self.view().of_size.get(slot_size, _NONE)
        taken_from: Words = of_size[self.memory.slabs[of_size, SLAB_STATE] == READY]
        return taken_from

    def bound_behind(self, before: bytes | None, oldest: int) -> int:
        """Return the rank below which pages may be evicted for the page that follows ``before`` in its chain. It is
        NO_PAGE if ``before`` is None or a miss, or the policy is not last-use: the other policies learn from pages that
        are written and evicted."""
        if before is None or self.memory.header[index_words.POLICY] != eviction.LAST_USE:
            return NO_PAGE
        rows = self.locate([before], oldest).rows
        return int(self.memory.rows[rows[0], index_words.PRIORITY]) if len(rows) else NO_PAGE

    def give_back(self, rows: Words, ticket: int) -> None:
        """Free slots that were taken. Raises IndexBusyError."""
        if len(rows):
            with self._changing():
                self._give_back(rows, ticket)

    def _give_back(self, rows: Words, ticket: int) -> None:
        """Free the slots among these that are still pending under this ticket. Under the lock."""
        words = self.memory.rows
        ours = (words[rows, STATE] == self._pending) & (words[rows, index_words.HASH] == ticket)
        words[rows[ours], STATE] = FREE
        # Others may have become free when their batch was published.
        self._note_free(rows[words[rows, STATE] == FREE])

    def publish(
        self,
        ticket: int,
        keys: Sequence[bytes],
        taken: SlotReferences,
        written: SlotReferences,
        oldest: int,
        now: int,
        tenant: int = 0,
    ) -> list[int]:
        """Publish pages in slots taken under ``ticket``; the other slots taken become free.

        ``keys`` is a chain. ``taken`` are its pages for which slots were taken, ``written`` those whose bytes are in
        their slots, with the headers' ``now``, both in order of position; all belong to one ``tenant``. Return for each
        of ``written`` 1, 0 if another writer published the page first, or -1 if the slot is no longer this writer's.
        Raises IndexBusyError: all slots then stay pending, for ``give_back``.
        """
        words, numbers = key_words(keys), self._numbers_of(keys)
        published = np.empty(len(written), np.int64)
        with self._changing():
            view = self.view()
            count = self.memory.table.publish(
                words,
                numbers,
                np.ascontiguousarray(written.positions),
                np.ascontiguousarray(written.rows),
                np.ascontiguousarray(written.lengths),
                self._pending,
                ticket,
                now,
                oldest,
                view.capacity,
                view.ghosts,
                view.sampled,
                tenant,
                published,
            )
            self._learn(view)
            if count < len(taken):
                self._give_back(taken.rows, ticket)
        return published.tolist()

    def _learn(self, view: View, most: int = _MOST_EVENTS) -> None:
        """Feed recent uses to the miniatures, and rank pages by the policy that they chose: a little of both at a time,
        under the lock."""
        memory = self.memory
        memory.table.learn(view.capacity, view.sampled, most)
        index_words.choose_policy(memory.header, memory.small, memory.entries, view.capacity, view.rows)
        if memory.header[index_words.TO_RANK]:
            memory.table.rank_again(view.capacity, _MOST_RANKED)
            # The coldness must be measured again.
            self._coldness.clear()

    def seize(
        self,
        keys: Sequence[bytes],
        ticket: int,
        seals: Sequence[bytes] | None = None,
        only: tuple[int, int] | None = None,
    ) -> SlotReferences:
        """Forget pages, keep their slots for this process until ``give_back``, and return those that were there. With
        ``seals``, one for each key, seize only pages that have these seals now; with ``only``, a row and a moment
        (CREATED), only the page that was written there then. The lookup is under the lock, so a page that came to a
        slot since the caller looked is not touched. Raises IndexBusyError."""
        with self._changing():
            found = self.locate(keys)
            words = self.memory.rows[found.rows]
            wanted = np.ones(len(words), bool)
            if only is not None:
                wanted = (found.rows == only[0]) & (words[:, index_words.CREATED] == only[1])
            if seals is not None:
                now = np.ascontiguousarray(words[:, index_words.SEAL : index_words.SEAL + SEAL_LENGTH // 8])
                pairs = zip(now, found.positions.tolist(), strict=True)
                wanted &= np.array([seal.tobytes() == seals[position] for seal, position in pairs], bool)
            found = found.select(wanted)
            self._seize(found.rows, ticket)
        return found

    def _seize(self, rows: Words, ticket: int) -> None:
        """Make pages pending under this ticket. Under the lock."""
        self.memory.tenants[:, index_words.TENANT_PAGES] -= self.tenants_of(rows)
        self.memory.rows[rows, STATE] = self._pending
        self.memory.rows[rows, index_words.HASH] = ticket

    def seize_dated_after(self, moment: int, ticket: int) -> Iterator[tuple[Slab, Words]]:
        """Seize the slots of cleared pages dated after ``moment`` (milliseconds) by a clock that was ahead of that of
        their clear; yield the rows of each slab, held until ``give_back``. Reads every slot. Raises IndexBusyError."""
        for slab in self.view().slabs.values():
            for begin in range(slab.first_row, slab.first_row + slab.slots, _AT_ONCE):
                rows = self.memory.rows[begin : min(begin + _AT_ONCE, slab.first_row + slab.slots)]
                if not len(self._cleared_after(rows, moment)):
                    continue
                with self._changing():
                    late = begin + self._cleared_after(rows, moment)
                    self._seize(late, ticket)
                yield slab, late

    def _cleared_after(self, rows: Words, moment: int) -> Words:
        states = rows[:, STATE].copy()
        late = (states & STATES == index_words.PAGE) & (rows[:, CREATED] > moment)
        return np.flatnonzero(late & ~index_words.is_current(self.memory.identities, states))

    def demote(self, hashes: Sequence[bytes]) -> int:
        """Rank the pages under these page hashes, of all identities, below all others until they are used. Return
        their number. Raises IndexBusyError."""
        count = 0
        for digest in self.identities():
            for begin in range(0, len(hashes), _STEP):
                keys = PageKeys.of_joined(digest, b"".join(hashes[begin : begin + _STEP]))
                with self._changing():
                    rows = self.rows_of(keys)
                    self.memory.rows[rows[rows >= 0], index_words.PRIORITY] = 0
                    # The coldness must be measured again.
                    self._coldness.clear()
                count += int((rows >= 0).sum())
        return count

    def free_dead(self) -> int:
        """Free the slots that ended processes were writing, and return their number. Reads every slot. Raises
        IndexBusyError."""
        freed = 0
        for slab in self.view().slabs.values():
            for begin in range(slab.first_row, slab.first_row + slab.slots, _AT_ONCE):
                states = self.memory.rows[begin : min(begin + _AT_ONCE, slab.first_row + slab.slots), STATE]
                if self._are_abandoned(states).any():
                    with self._changing():
                        abandoned = np.flatnonzero(self._are_abandoned(states))
                        states[abandoned] = FREE
                        self._note_free(begin + abandoned)
                    freed += len(abandoned)
        return freed

    @property
    def inserts(self) -> int:
        """Inserted pages of all sizes: the clock by which pages rank."""
        return int(self.memory.header[index_words.INSERTS])

    def _evict(
        self,
        of_size: Words,
        slot_size: int,
        wanted: int,
        need: int,
        oldest: int,
        spared: Words,
        gone: list[Words],
        tenancy: Words | None,
        bound: int,
    ) -> int:
        """Free the coldest slots of a size, searching all slots if there are few, else one window of them; return the
        number freed. ``need`` is how many of the coldest to consider; if it exceeds ``wanted``, only the ``wanted``
        coldest are freed. The rows of the evicted pages are appended to ``gone``. Under the lock."""
        known = self._measured(of_size, slot_size, need, oldest, tenancy)
        total, freed = int(self.view().table[of_size, SLOTS].sum()), 0
        together = slots_in_group(slot_size, total)
        begin = known.pop()
        for rows in self._ranges(of_size, begin, min(total, _MOST_LOOKED_AT), together):
            ranks = self._ranks(rows, oldest, tenancy)
            cold, cool = min(known[COLD], bound - 1), min(known[COOL], bound - 1)
            # If very many are equally cold, the rest is evicted later.
            coldest = np.flatnonzero(are_coldest(ranks, together, cold, cool))[: max(need, _MOST_VICTIMS)]
            coldest = coldest[~self._spare(rows[coldest], ranks[coldest], spared)]
            if need > wanted:
                # Take the coldest, not those of the first rows, which may be warm.
                coldest = coldest[np.argsort(ranks[coldest], kind="stable")[: max(0, wanted - freed)]]
            victims, pages = rows[coldest], self.memory.rows[rows[coldest]]
            self.memory.table.evict(victims, oldest, tenancy)
            gone.append(pages[(victims >= 0) & (ranks[coldest] != index_words.AT_ONCE)])
            self._note_free(victims[victims >= 0])
            freed += int((victims >= 0).sum())
        known[LEFT] = known[LEFT] - freed if freed else 0
        return freed

    def _spare(self, rows: Words, ranks: Words, spared: Words) -> npt.NDArray[np.bool_]:
        """Return which of these slots have pages with a hash in ``spared``, and rank those as if they were used a whole
        capacity of inserts from now. Under the lock."""
        stay: npt.NDArray[np.bool_] = _are_among(self.memory.rows[rows, index_words.HASH], spared)
        stay &= ranks != index_words.AT_ONCE
        if stay.any():
            priorities = self.memory.rows[rows[stay], index_words.PRIORITY]
            now, a_tier_later = eviction.ORIGIN + eviction.TICK * self.inserts, eviction.TICK * self.view().capacity
            later = np.maximum(priorities, now) + a_tier_later
            self.memory.rows[rows[stay], index_words.PRIORITY] = later
        return stay

    def _evict_dependents(self, hashes: Words, states: Words, oldest: int) -> int:
        """Evict the dependents of pages that had these HASH and STATE, are gone and were not cleared; return the number
        evicted. A few are evicted per holding of the lock; if the lock is busy the rest ages out."""
        if not self._dependent_numbers:
            return 0
        count, numbers = 0, states >> index_words.NUMBER_SHIFT
        current = index_words.is_current(self.memory.identities, states)
        with suppress(IndexBusyError):
            for number in self._dependent_numbers.keys() & numbers[current].tolist():
                kv_hashes = hashes[current & (numbers == number)]
                for other in self._dependent_numbers[number]:
                    needed = [kv for kv, others in self._dependent_numbers.items() if other in others]
                    step = max(1, _DEPENDENTS_PER_STEP // (len(needed) + 1))
                    for begin in range(0, len(kv_hashes), step):
                        with self._changing():
                            lost = kv_hashes[begin : begin + step]
                            for kv in needed:
                                lost = lost[self._rows_with(lost, kv) < 0]
                            rows = self._rows_with(lost, other)
                            rows = rows[rows >= 0]
                            count += self.memory.table.evict(rows, oldest, None)
                            self._note_free(rows)
        return count

    def _rows_with(self, hashes: Words, number: int) -> Words:
        """Return the rows of the pages of this identity with these HASHes, -1 for a miss. Under the lock."""
        rows = np.empty(len(hashes), np.int64)
        self.memory.table.find(hashes, number, rows)
        return rows

    def _ranges(self, of_size: Words, begin: int, count: int, together: int) -> Iterator[Words]:
        """Yield the rows of ``count`` slots from the ``begin``-th slot of a size on, in whole groups of each slab."""
        slots, firsts = self.view().table[of_size][:, [SLOTS, FIRST]].T
        ends = slots.cumsum()
        if not ends[-1]:
            return
        begin %= int(ends[-1])
        which = int(np.searchsorted(ends, begin, side="right"))
        slot = begin - int(ends[which] - slots[which])
        slot -= slot % together
        while count > 0:
            end = min(slot + count + -count % together, int(slots[which]))
            yield np.arange(firsts[which] + slot, firsts[which] + end)
            count -= end - slot
            which, slot = (which + 1) % len(of_size), 0

    def _measured(self, of_size: Words, slot_size: int, need: int, oldest: int, tenancy: Words | None) -> list[int]:
        """Return how cold the coldest slots of a size are and where most of them lie, measuring it if it is unknown or
        used up. Needs no lock."""
        # Tenants may evict different pages, so the coldest ones differ, too.
        size_and_writer = slot_size, -1 if tenancy is None else int(tenancy[index_words.WRITER])
        known = self._coldness.get(size_and_writer, [])
        if len(known) > WINDOWS and known[LEFT] > 0:
            return known
        slots, firsts = self.view().table[of_size][:, [SLOTS, FIRST]].T
        ends = slots.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        step = max(1, total // _SAMPLED)
        first = random.randrange(step)
        some = np.arange(first, total, step)
        which = np.searchsorted(ends, some, side="right")
        ranks = self._ranks((firsts + slots - ends)[which] + some, oldest, tenancy)
        known, windows = [0, 0, max(total // _COLD_PART, min(need, total))], [0]
        there = int((ranks != NO_PAGE).sum())
        if there:
            wanted = -(-min(need, total) * len(ranks) // total)
            cold = min(max(len(ranks) // _COLD_PART, wanted, 1), there) - 1
            cool = min(max(len(ranks) // _COOL_PART, wanted, 1), there) - 1
            in_order = np.partition(ranks, sorted({cold, cool}))
            known[COLD], known[COOL] = int(in_order[cold]), int(in_order[cool])
            if total > _MOST_LOOKED_AT:
                places = (np.flatnonzero(ranks <= in_order[cold]) * step + first) // _MOST_LOOKED_AT
                counts = np.bincount(places)
                best = counts.argsort()[-_MOST_WINDOWS:]
                windows = (best[counts[best] > 0] * _MOST_LOOKED_AT).tolist()
        known = self._coldness[size_and_writer] = [*known, *windows]
        return known

    def _ranks(self, rows: Words, oldest: int, tenancy: Words | None) -> Words:
        """Return how cold the slots in these rows are: AT_ONCE, a priority, or NO_PAGE."""
        ranks = np.empty(len(rows), np.int64)
        self.memory.table.ranks(rows, oldest, tenancy, ranks)
        held = np.flatnonzero(ranks == NO_PAGE)
        if len(held):
            ranks[held[self._are_abandoned(self.memory.rows[rows[held], STATE])]] = index_words.AT_ONCE
        return ranks

    def _are_abandoned(self, states: Words) -> npt.NDArray[np.bool_]:
        """Return which of these STATEs are of slots that a process was writing when it ended. Ids are never reused, so
        a dead process stays dead."""
        abandoned: npt.NDArray[np.bool_] = states & STATES == PENDING
        abandoned[abandoned] = ~self._are_alive(states[abandoned] >> 8)
        return abandoned

    def _are_alive(self, members: Words) -> npt.NDArray[np.bool_]:
        ids, of = np.unique(members, return_inverse=True)
        alive: npt.NDArray[np.bool_] = np.array([self._members.is_alive(member) for member in ids.tolist()], bool)[of]
        return alive

    def _note_free(self, rows: Words) -> None:
        """Note that these slots may be free."""
        view = self.view()
        slabs = index_words.slabs_with(view.by_first, rows)
        for at in np.unique(slabs[slabs >= 0]).tolist():
            slab, freed = self.memory.slabs[view.positions[at]], rows[slabs == at]
            # The lowest free slots are taken first: they were used recently, and are in the page cache.
            lowest = int(freed.min() - view.by_first[at, FIRST])
            slab[CURSOR] = lowest if slab[FREE_SLOTS] <= 0 else min(int(slab[CURSOR]), lowest)
            slab[FREE_SLOTS] += len(freed)

    # -- slabs -----------------------------------------------------------------------------------------------------

    def all_slabs(self) -> list[Slab]:
        """Return all slabs that take room, including those being made or dropped."""
        table = self.memory.slab_table()
        return slabs_of(table[table[:, SLAB_STATE] != NO_SLAB])

    def begin_slab(self, slot_size: int, wanted: Callable[[Sequence[Slab]], int]) -> Slab | None:
        """Reserve a place for a new slab, whose files the caller makes. ``wanted`` returns how many slots it may have,
        given the existing slabs. Return None if there is no place. Raises IndexBusyError."""
        with self._changing():
            table = self.memory.slab_table()
            used = table[table[:, SLAB_STATE] != NO_SLAB]
            slots = wanted(slabs := slabs_of(used))
            # Keep numbers unique whatever the shared word says.
            number = max(0, int(self.memory.header[index_words.NEXT_SLAB]), *(1 + slab.number for slab in slabs))
            first = 0
            for other in used[used[:, FIRST].argsort()]:
                if first + slots <= other[FIRST]:
                    break
                first = int(other[FIRST] + other[SLOTS])
            fits = len(used) < MOST_SLABS and 0 < slots <= len(self.memory.rows) - first
            if not fits or number > LARGEST_NUMBER:
                return None
            position = int((table[:, SLAB_STATE] == NO_SLAB).argmax())
            self.memory.slabs[position] = [number, slot_size, slots, first, NO_SLAB, slots, 0, self._members.id]
            self.memory.slabs[position, SLAB_STATE] = MAKING
            self.memory.header[SLAB_CHANGES] += 1
            self.memory.header[index_words.NEXT_SLAB] = number + 1
            return Slab(number, slot_size, slots, first)

    def _sets_wanted(self) -> int:
        return self.memory.sets_for(sum(slab.slots for slab in self.all_slabs()))

    def add_found_slabs(self, found: Sequence[Slab]) -> None:
        """Add slabs found on the disk, for a rebuild. Called before others have the memory."""
        header, first = self.memory.header, 0
        for position, slab in enumerate(found):
            self.memory.slabs[position] = [slab.number, slab.slot_size, slab.slots, first, SCANNING, 0, 0, 0]
            header[index_words.NEXT_SLAB] = max(int(header[index_words.NEXT_SLAB]), slab.number + 1)
            first += slab.slots
        header[SLAB_CHANGES] += 1
        sets = self._sets_wanted()
        header[index_words.SETS] = sets
        header[index_words.REBUILT] = int(not found)

    def finish_slab(self, slab: Slab) -> None:
        """Put a slab whose files exist into use, then add, a few at a time, the sets that its slots want. A second call
        does nothing. Raises IndexBusyError."""
        if self._position(slab, MAKING) >= 0:
            # Nobody else uses these rows yet.
            self.memory.forget_rows(slab.first_row, slab.slots)
            self.memory.rows[slab.first_row : slab.first_row + slab.slots, STATE] = FREE
            with self._changing():
                self._set_state(slab, MAKING, READY)
        wanted = self._sets_wanted()
        for sets in range(max(0, int(self.memory.header[index_words.SETS])), wanted, _STEP):
            with self._changing():
                self.memory.table.add_sets(min(wanted, sets + _STEP))

    def empty_slabs(self) -> list[Slab]:
        """Return the slabs without a page that can be looked up or that a rebuild has still to find. Reads every
        row."""
        table = self.memory.slab_table()
        ready = slabs_of(table[table[:, SLAB_STATE] == READY])
        return [slab for slab in ready if not self._count(slab, 0)[0]]

    def drop_slab(self, slab: Slab, most_pages: int | None = None) -> bool:
        """Take a slab out of use, with its pages. Return False, with nothing changed, while one of its slots is being
        written, if it has more than ``most_pages``, or if another process was first. The caller deletes its files
        before ``forget_slab``. Raises IndexBusyError."""
        with self._changing():
            if most_pages is not None and self._count(slab, 0)[0] > most_pages:
                return False
            states = self.memory.rows[slab.first_row : slab.first_row + slab.slots, STATE]
            if ((states & STATES == PENDING) & ~self._are_abandoned(states)).any():
                return False
            if not (self._set_state(slab, READY, DROPPING) or self._set_state(slab, SCANNING, DROPPING)):
                return False
            gone = self._forget_pages(slab)
        self._evict_dependents(*gone, 0)
        return True

    def forget_slab(self, slab: Slab) -> None:
        """Forget a slab that was dropped or could not be made, once its files are gone. Raises IndexBusyError."""
        with self._changing():
            # Leave its rows alone: they may belong to another slab by now.
            if not self._set_state(slab, DROPPING, NO_SLAB):
                self._set_state(slab, MAKING, NO_SLAB)

    def left_slabs(self) -> list[Slab]:
        """Return the slabs that a process was making or dropping when it died; this process now has to forget them.
        Raises IndexBusyError."""
        if not self._has_left_slabs():
            return []
        with self._changing():
            table = self.memory.slab_table()
            left = np.isin(table[:, SLAB_STATE], (MAKING, DROPPING)) & ~self._are_alive(table[:, OF])
            # Include slabs of our own whose files could not be deleted.
            left |= (table[:, SLAB_STATE] == DROPPING) & (table[:, OF] == self._members.id)
            self.memory.slabs[left, OF] = self._members.id
            for slab in slabs_of(table[left & (table[:, SLAB_STATE] == DROPPING)]):
                self._forget_pages(slab)
            return slabs_of(table[left])

    def _forget_pages(self, slab: Slab) -> tuple[Words, Words]:
        """Make the pages of a dropped slab impossible to find, because its files may stay for long. Return the HASH
        and STATE that they had. Under the lock."""
        rows = self.memory.rows[slab.first_row : slab.first_row + slab.slots]
        pages = np.flatnonzero(rows[:, STATE] & STATES == index_words.PAGE)
        hashes, states = rows[pages, index_words.HASH], rows[pages, STATE]
        of_tenants = self.tenants_of(slab.first_row + pages)
        self.memory.forget_rows(slab.first_row, slab.slots)
        self.memory.tenants[:, index_words.TENANT_PAGES] -= of_tenants
        return hashes, states

    def _has_left_slabs(self) -> bool:
        return bool(np.isin(self.memory.slabs[:, SLAB_STATE], (MAKING, DROPPING)).any())

    def colder_slabs(
        self, slot_size: int, oldest: int, *, needed: bool = False, tenancy: Words | None = None
    ) -> list[Slab]:
        """Return the slabs of other slot sizes most of whose slots (free, or with pages of lower priorities) are worth
        less than any page in slots of this size, the least valuable first. Return all of them if there are no slots of
        this size or a slab is ``needed`` whatever it is worth; but if there are slots of this size, none of which more
        than a quarter stays for a tenant's share."""

        def ranks_of(slab: Words) -> Words:
            rows = np.arange(slab[FIRST], slab[FIRST] + slab[SLOTS], max(1, int(slab[SLOTS]) // _MOST_TOGETHER))
            return self._ranks(rows, oldest, tenancy)

        def worth(slab: Words) -> int:
            # Do not take the rank of the coldest page: the warm ones are lost, too.
            ranks = ranks_of(slab)
            warm = int(len(ranks) * _WORTHLESS)
            return int(np.partition(ranks, warm)[warm])

        def coldest(slab: Words) -> int:
            # Ignore free slots, which come and go with every batch: this size may still want more.
            ranks = ranks_of(slab)
            return int(ranks[ranks != index_words.AT_ONCE].min(initial=NO_PAGE))

        view = self.view()
        own = view.by_first[:, SLOT_SIZE] == slot_size
        others = sorted((worth(slab), int(slab[SLAB_NUMBER])) for slab in view.by_first[~own])
        limit = NO_PAGE if needed else min(map(coldest, view.by_first[own]), default=NO_PAGE)
        # A share keeps nobody from writing pages of a new size.
        whatever = needed and (tenancy is None or not own.any())
        return [view.slabs[number] for rank, number in others if whatever or rank < limit]

    def holds_any(self, slab: Slab, spared: Words) -> bool:
        """Return whether a page of the slab has one of these hashes."""
        rows = self.memory.rows[slab.first_row : slab.first_row + slab.slots]
        return bool(_are_among(rows[rows[:, STATE] & STATES == index_words.PAGE, index_words.HASH], spared).any())

    def _set_state(self, slab: Slab, before: int, after: int) -> bool:
        table, position = self.memory.slabs, self._position(slab, before)
        if position < 0:
            return False
        if after in (READY, DROPPING):
            table[position, OF] = 0 if after == READY else self._members.id
        table[position, SLAB_STATE] = after
        self.memory.header[SLAB_CHANGES] += 1
        return True

    def _position(self, slab: Slab, state: int) -> int:
        """Return the table position of a slab in this SLAB_STATE, -1 if it is not there."""
        table = self.memory.slabs
        there = np.flatnonzero((table[:, SLAB_NUMBER] == slab.number) & (table[:, SLAB_STATE] == state))
        return int(there[0]) if len(there) else -1

    # -- rebuild ---------------------------------------------------------------------------------------------------

    @property
    def rebuilt(self) -> bool:
        """Whether the rebuild has read every slab that was there at the start."""
        return bool(self.memory.header[index_words.REBUILT])

    @property
    def found(self) -> int:
        """Pages found by the rebuild so far."""
        return int(self.memory.header[index_words.FOUND])

    def unknown_slabs(self) -> list[Slab]:
        """Return the slabs that the rebuild has not read, or not to the end."""
        table = self.memory.slab_table()
        return slabs_of(table[table[:, SLAB_STATE] == SCANNING])

    def adopt(
        self, slab: Slab, begin: int, keys: Words, numbers: Words, lengths: Words, created: Words, seals: Words
    ) -> None:
        """Adopt the pages in the slots from ``begin`` on, from their headers; the identity number -1 marks no page.
        Raises IndexBusyError."""
        now = milliseconds()
        for at in range(0, len(keys), _STEP):
            some = slice(at, at + _STEP)
            columns = keys[some], numbers[some], lengths[some], created[some], seals[some]
            first = slab.first_row + begin + at
            with self._changing():
                position = self._position(slab, SCANNING)
                if position < 0:
                    # The slab was dropped meanwhile.
                    return
                states = self.memory.rows[first : first + len(columns[0]), STATE]
                unknown = states & STATES == index_words.UNKNOWN
                found = self.memory.table.adopt(*columns, first, slab.slot_size, now)
                self.memory.slabs[position, FREE_SLOTS] += int((unknown & (states == FREE)).sum())
                self.memory.header[index_words.FOUND] += found

    def end_slab(self, slab: Slab) -> None:
        """Mark a slab, all of whose slots were read, as READY. Raises IndexBusyError."""
        with self._changing():
            self._set_state(slab, SCANNING, READY)

    def end_rebuild(self) -> None:
        self.memory.header[index_words.REBUILT] = 1

    # -- members ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Share the memory from now on. Raises IndexBusyError, OSError."""
        with self._changing():
            # Entering the change lock shares the memory first.
            pass

    @property
    def _pending(self) -> int:
        """STATE of a slot that this process writes."""
        return PENDING | self._member << 8

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock.held() as mine:
            if not mine:
                raise IndexBusyError("another process holds the index")
            if self._member != (member := self._members.id):
                # This runs the first time and in a forked child: others may have no other member to ask.
                self._share(member)
                self._member = member
            yield


def _tenants_in(rows: Words) -> Words:
    """Return how many of these rows belong to each tenant."""
    numbers = rows[:, index_words.LENGTH] >> index_words.TENANT_SHIFT & (index_words.TENANTS - 1)
    return np.bincount(numbers, minlength=index_words.TENANTS)


def _are_among(hashes: Words, others: Words) -> npt.NDArray[np.bool_]:
    """Return which of these are in ``others`` (sorted)."""
    at = others.searchsorted(hashes)
    among: npt.NDArray[np.bool_] = np.append(others, 0)[at] == hashes
    return among & (at < len(others))


def are_coldest(ranks: Words, together: int, cold: int, cool: int) -> npt.NDArray[np.bool_]:
    """Return which slots rank up to ``cool`` in groups with a slot up to ``cold``, so that adjacent slots are freed."""
    lowest = np.minimum.reduceat(ranks, np.arange(0, len(ranks), together))
    of_groups = np.repeat((lowest <= cold) & (lowest != NO_PAGE), together)[: len(ranks)]
    coldest: npt.NDArray[np.bool_] = of_groups & (ranks <= cool) & (ranks != NO_PAGE)
    return coldest


def slots_in_group(slot_size: int, slots: int) -> int:
    """Return how many of ``slots`` slots of this size are evicted together; groups begin at multiples of it."""
    return max(1, min(_GROUP // slot_size, _MOST_TOGETHER, slots // _GROUPS))


def _by_position(found: SlotReferences) -> Words:
    """Return the row of each page of a chain up to the last one found, -1 for a miss."""
    behind = int(found.positions.max()) + 1
    if behind == len(found.rows):
        return np.ascontiguousarray(found.rows)
    rows = np.full(behind, -1, np.int64)
    rows[found.positions] = found.rows
    return rows


def slabs_of(rows: Words) -> list[Slab]:
    """Return the slabs in these rows of the table."""
    return [Slab(*row) for row in rows[:, [SLAB_NUMBER, SLOT_SIZE, SLOTS, FIRST]].tolist()]

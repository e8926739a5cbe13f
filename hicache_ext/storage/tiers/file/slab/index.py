"""Which page is in which slot: the index of one directory, shared by all processes on it.

It is memory (index_memory.py), changed under a lock that is waited for at most a second (``ChangeLock``), by steps none
of which leaves anything to be repaired. A look-up takes no lock and no system call, nor does clearing a known identity:
that raises its generation, and its pages are out of reach at once. Reasons: docs/decisions/slabs.md.
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
"""At least so many: in a small tier the neighbours of the coldest are no colder than others."""
_WORTHLESS = 0.75
"""The part of a slab that has to be worth less than another slot size, before that one may have the slab. Measured:
docs/decisions/pools-share-a-fate.md."""
_SAMPLED = 1 << 13
"""Slots whose ranks are looked at to know how cold the coldest are. Up to twice as many of small tables."""
_COLD_PART, _COOL_PART = 768, 96
"""The coldest 768th of all slots goes, and of its neighbours the coldest 96th: free slots are then neighbours. Three
times as many make runs a sixth longer, and hits beside loops 0.007 fewer."""
_STEP = 1 << 12
"""Headers adopted, or sets added, under the lock at once."""
_MOST_WINDOWS = 8
"""In which victims are looked for before it is measured again where they are."""
_MOST_VICTIMS = 1 << 12
"""Slots freed by one look, under the lock: about a millisecond."""
_LOOKS_IN_VAIN = 8
"""Looks for victims that free nothing, before a write gets no slot: at pages that stay, mostly."""
_LOOKS_OF_TENANTS = 3
_MOST_LOOKED_AT = 1 << 15
"""Slots looked at for victims, under the lock at once: less than a millisecond."""
_MOST_EVENTS = 1 << 8
"""Uses that the miniatures look at, under the lock at once."""
_MOST_RANKED = 1 << 12
"""Rows ranked by another policy, under the lock at once."""
_AT_ONCE = 1 << 16
COLD, COOL, LEFT, WINDOWS = range(4)
"""What is known of the slots of a size: a group of slots with a page of priority up to COLD loses those up to COOL;
slots still to be freed before both are measured again; from here on where windows with many cold slots begin, the best
one last."""
EVERY = b""
"""In place of a digest: all identities."""
IN_USE = (READY, SCANNING)
"""SLAB_STATE of the slabs whose pages can be looked up."""
_AT_ONCE_BESIDE = 1 << 12
"""Pages looked for beside those that went, under the lock at once."""
_COMING_AND_GOING = 4
"""Pages that may come or go while rows are counted, for each insert of that time."""
_NO_NUMBERS = np.array([-1])
_NONE: Words = np.empty(0, np.int64)
_NO_ROWS: Words = np.empty((0, index_words.ROW_WORDS), np.int64)


def milliseconds() -> int:
    """Wall-clock time, as pages carry it."""
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class View:
    """The slabs, until SLAB_CHANGES changes."""

    changes: int
    slabs: Mapping[int, Slab]
    """By number: those whose pages can be looked up."""
    table: Words
    """``IndexMemory.slab_table``, of which the following speak."""
    by_first: Words
    """The same as rows of the table, by FIRST."""
    positions: Words
    """Where each of ``by_first`` is in the table."""
    of_size: Mapping[int, Words]
    """Slot size -> positions in the table, by number."""
    capacity: int
    """Slots of all sizes, at least 1."""
    ghosts: int
    """Evicted pages worth remembering."""
    sampled: int
    """How many pages the miniatures see of SAMPLE + 1."""
    rows: int
    """Behind the last row in use."""


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
        """``cleared_at``: when an identity was cleared last, by the disk (milliseconds, -1: never); may raise
        OSError. ``share``: gives the memory to those who ask this member, from now on; called before a member changes
        anything, also in a child that was forked. May raise OSError."""
        self.memory = memory
        self._lock = lock
        self._members = members
        self._share = share
        self._member = 0
        """The id under which this process shares the memory."""
        self._cleared_at = cleared_at
        self._view: View | None = None
        self._known: tuple[int, dict[bytes, int]] = (0, {})
        """How many identities were looked at, and their numbers."""
        self._coldness: dict[tuple[int, int], list[int]] = {}
        """By slot size and the tenant that writes: COLD, COOL and LEFT of its slots, and WINDOWS. Each process measures
        it for itself."""
        self._numbers: dict[bytes, Words] = {}
        self._companions: Mapping[bytes, Sequence[bytes]] = {}
        self._beside: Mapping[int, Sequence[int]] = {}
        """By number of an identity of KV: the numbers of its companions."""
        self._tickets = itertools.count(random.getrandbits(62))

    # -- reading ---------------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes], oldest: int = 0) -> SlotReferences:
        """The pages found, in the order of ``keys``, each with its position. Pages written before ``oldest``
        (wall-clock milliseconds) are not found."""
        located = np.empty((5, len(keys)), np.int64)
        found = self.memory.table.locate(key_words(keys), self._numbers_of(keys), oldest, self.view().by_first, located)
        if not (count := found >> index_words.FACTS):
            return NO_SLOTS
        slabs, slots, lengths, positions, rows = located[:, :count]
        return SlotReferences(slabs, slots, lengths, positions, rows, found & ((1 << index_words.FACTS) - 1))

    def contains(self, keys: Sequence[bytes], oldest: int = 0) -> list[bool]:
        """Which pages are found; ``oldest`` as for ``locate``."""
        found = np.zeros(len(keys), bool)
        found[self.locate(keys, oldest).positions] = True
        return found.tolist()

    def count_leading(self, keys: Sequence[bytes], oldest: int = 0) -> int:
        found = self.memory.table.locate(key_words(keys), self._numbers_of(keys), oldest, None, None)
        return found >> index_words.FACTS

    def rows_of(self, keys: Sequence[bytes], oldest: int = 0) -> Words:
        """The row of each page, -1 where there is none; ``oldest`` as for ``locate``."""
        found, rows = self.locate(keys, oldest), np.full(len(keys), -1)
        rows[found.positions] = found.rows
        return rows

    def places_of(self, rows: Words) -> tuple[Words, Words]:
        """The slab numbers and slots of rows that were taken."""
        by_first = self.view().by_first
        of = index_words.slabs_with(by_first, rows)
        if (of < 0).any():
            # Of a slab that somebody took out of the table: it cannot be opened.
            return np.full(len(rows), -1), np.zeros(len(rows), np.int64)
        return by_first[of, SLAB_NUMBER], rows - by_first[of, FIRST]

    def view(self) -> View:
        view = self._view
        changes = int(self.memory.header[SLAB_CHANGES])
        if view is None or view.changes != changes:
            # First the number, then what it counts: a change in between is looked at again by the next call.
            view = self._view = self._look(changes)
        return view

    def slab(self, number: int) -> Slab | None:
        """None when it was dropped."""
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
        """So many of these pages were read. ``found``: pages of a chain that were used and may rank higher for it."""
        numbers = self._numbers_of(keys)
        number = int(numbers[0]) if len(numbers) else -1
        if number >= 0 and hits:
            # Of two threads one may be lost: it is for people to look at.
            identity = self.memory.identities[number]
            identity[HITS] += hits
            identity[LAST] = int(time.time())
        if len(found.rows):
            view = self.view()
            self.memory.table.touch(_by_position(found), view.capacity, view.sampled)
            header, events = self.memory.header, self.memory.events
            # Where nothing is written nobody else would look at them before they find no place.
            if header[index_words.EVENTS] - header[index_words.LEARNED] >= len(events) // 2:
                with suppress(OSError):
                    if self._lock.try_acquire():
                        try:
                            self._learn(view, max(_MOST_EVENTS, len(found.rows)))
                        finally:
                            self._lock.release()

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of slots that the pages under each of these page hashes take, over all identities."""
        taken = np.zeros(len(hashes), np.int64)
        by_first = self.view().by_first
        for digest in self.identities() if len(by_first) else ():
            rows = self.rows_of(PageKeys.of_joined(digest, b"".join(hashes)))
            sizes = by_first[np.clip(index_words.slabs_with(by_first, rows), 0, None), SLOT_SIZE]
            taken += np.where(rows >= 0, sizes, 0)
        return taken.tolist()

    def occupied(self, oldest: int = 0) -> tuple[int, int, int, Words]:
        """Pages, the bytes of their slots and headers, and the bytes of free slots; those that each tenant's pages
        take. Looks at every row."""
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
            # While pages come and go the counts differ a little; a kill leaves them wrong.
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
        """What the miniatures say, as ``Fullness`` has it.

        A page that is used all the time is in the sample or not, whatever its share: what the sample has too few or too
        many of is taken for hits of such pages (SHARDS-adj, Waldspurger et al. 2015)."""
        small = self.memory.small
        at_scales = index_words.MINIATURE_HITS + index_words.CANDIDATES
        half, twice, four_times = small[at_scales : at_scales + len(index_words.SCALES)].tolist()
        uses = int(small[index_words.EXPECTED] // (index_words.SAMPLE + 1))
        hot = uses - int(small[index_words.USES])
        hits = (max(0, hits + hot) for hits in (half, int(small[index_words.SERVED]), twice, four_times))
        return uses, *hits

    def _count(self, slab: Slab, oldest: int) -> tuple[int, int, Words]:
        """How many slots of a slab have pages that can be found, are PENDING, and are each tenant's."""
        pages, pending, of_tenants = 0, 0, np.zeros(index_words.TENANTS, np.int64)
        for begin in range(slab.first_row, slab.first_row + slab.slots, _MOST_LOOKED_AT):
            rows = np.arange(begin, min(begin + _MOST_LOOKED_AT, slab.first_row + slab.slots))
            states = self.memory.rows[rows, STATE] & STATES
            pages += int(self.are_found(rows, oldest).sum())
            pending += int((states == PENDING).sum())
            of_tenants += self.tenants_of(rows[states == index_words.PAGE])
        return pages, pending, of_tenants

    def are_found(self, rows: Words, oldest: int) -> npt.NDArray[np.bool_]:
        """Which of these rows have pages that can be found; ``oldest`` as for ``locate``."""
        ranks = np.empty(len(rows), np.int64)
        self.memory.table.ranks(rows, oldest, None, ranks)
        found: npt.NDArray[np.bool_] = (ranks != index_words.AT_ONCE) & (ranks != NO_PAGE)
        return found

    # -- identities ------------------------------------------------------------------------------------------------

    def identities(self) -> list[bytes]:
        """Digests that have had pages since they were cleared last."""
        known = self.numbers
        return sorted(digest for digest, number in known.items() if self.memory.identities[number, WRITTEN])

    def _with_pages(self) -> set[int]:
        """The numbers of identities that have pages. Looks at every row."""
        found: set[int] = set()
        for slab in self.view().slabs.values():
            states = self.memory.rows[slab.first_row : slab.first_row + slab.slots, STATE]
            states = states[states & STATES == index_words.PAGE]
            current = states[index_words.is_current(self.memory.identities, states)]
            found.update(np.unique(current >> index_words.NUMBER_SHIFT).tolist())
        return found

    def go_together(self, companions: Mapping[bytes, Sequence[bytes]]) -> None:
        """From now on the last evicted page of these identities under a page hash takes with it the pages of the others
        under that hash."""
        if companions is not self._companions:
            numbers = self.numbers
            self._companions = companions
            self._beside = {
                numbers[kv]: beside
                for kv, others in companions.items()
                if kv in numbers and (beside := [numbers[other] for other in others if other in numbers])
            }

    def clear(self, digests: Sequence[bytes] | None) -> tuple[list[bytes], int]:
        """Put all pages of these identities (None: of all) out of reach at once; those whose headers may still be on
        the disk ([EVERY] for all), and how many had pages, for which every row is looked at. Without a lock: a write
        that is under way may count or not. With one, and raises IndexBusyError or OSError, for an identity whose pages
        a rebuild may find yet."""
        now, cleared, had_pages = milliseconds(), [], 0
        if digests is None:
            # Before it looks who is known: register() does the same the other way round, and the rebuild has yet to see
            # who else is there.
            self.memory.header[index_words.ALL_CLEARED] = now
        known, with_pages = self.numbers, self._with_pages()
        for digest in list(known) if digests is None else digests:
            number = known.get(digest)
            if number is None:
                if self.rebuilt:
                    continue
                number = self.register([digest])[digest]
            # Also one that nothing was published of: headers of a writer that was killed may be on the disk.
            cleared.append(digest)
            if number >= 0:
                identity = self.memory.identities[number]
                had_pages += number in with_pages
                identity[WRITTEN] = identity[HITS] = identity[LAST] = 0
                identity[CLEARED] = now
                identity[GENERATION] += 1
        return [EVERY] if digests is None and (cleared or not self.rebuilt) else cleared, had_pages

    def register(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """The numbers of identities, new ones where they have none; -1 where there is no place for one. Raises
        IndexBusyError, OSError."""
        known = self.numbers
        missing = [digest for digest in dict.fromkeys(digests) if digest not in known]
        # Read before the lock is taken.
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
                            # clear() did not know of it.
                            of_all = int(self.memory.header[index_words.ALL_CLEARED])
                            identity[CLEARED] = max(cleared[digest], of_all)
                known = self.numbers
        return {digest: known.get(digest, -1) for digest in digests}

    @property
    def numbers(self) -> dict[bytes, int]:
        """The numbers of all identities; they are only added."""
        count = min(int(self.memory.header[index_words.IDENTITIES]), len(self.memory.identities))
        if count > self._known[0]:
            new = self.memory.identities[:count, :2].copy()
            # Another one, because threads may be going through this one.
            self._known = count, {digest.tobytes(): number for number, digest in enumerate(new)}
        return self._known[1]

    def _numbers_of(self, keys: Sequence[bytes]) -> Words:
        """The numbers of the identities of ``keys``; a single one where all are of one identity."""
        if isinstance(keys, PageKeys):
            known_number = self._numbers.get(keys.identity)
            return self.number_of(keys.identity) if known_number is None else known_number
        digests = [key[:IDENTITY_LENGTH] for key in keys]
        known = {digest: self.number_of(digest) for digest in set(digests)}
        if len(known) == 1:
            return known[digests[0]]
        return np.array([known[digest][0] for digest in digests], np.int64)

    def number_of(self, digest: bytes) -> Words:
        """One word: the number of an identity, -1 where it has none."""
        known = self._numbers.get(digest)
        if known is None:
            number = self.numbers.get(digest)
            if number is None:
                return _NO_NUMBERS
            known = self._numbers[digest] = np.array([number])
        return known

    # -- tenants ---------------------------------------------------------------------------------------------------

    def number_tenants(self, names: Sequence[str]) -> dict[str, int]:
        """The numbers that these tenants have for all processes, whoever named them first; 0, that of the default one,
        where there is no place left. Raises IndexBusyError."""
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
        """How many pages each tenant has, by number, about."""
        pages: Words = self.memory.tenants[:, index_words.TENANT_PAGES].copy()
        return pages

    def tenancy(self, shares: Mapping[int, float], writer: int) -> Words:
        """For ``take``: the tenant that writes, -1 for nobody, and the parts of all slots that the tenants have."""
        words = np.zeros(index_words.TENANCY_WORDS, np.int64)
        capacity = self.view().capacity
        for number, share in shares.items():
            words[number] = int(share * capacity)
        words[index_words.WRITER] = writer
        return words

    def is_below_share(self, tenancy: Words) -> bool:
        """Whether the tenant that writes has fewer pages than its share."""
        writer = int(tenancy[index_words.WRITER])
        return writer >= 0 and bool(self.memory.tenants[writer, index_words.TENANT_PAGES] < tenancy[writer])

    def tenants_of(self, rows: Words) -> Words:
        """How many of the pages in these rows are each tenant's."""
        return _tenants_in(self.memory.rows[rows])

    # -- slots -----------------------------------------------------------------------------------------------------

    def next_ticket(self) -> int:
        """A number for each write under way."""
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
        """Take slots to write: the rows of as many as there are, in order of place as far as possible. Where
        ``evicting``, also how many slots were freed for them, the words of the rows of pages that were evicted, not of
        those that nobody could ask for any more, and how many pages beside these went, too. Pages that rank at
        ``bound_behind(before)`` or above stay, those with a hash in ``spared`` (sorted) if they can, those of other
        tenants up to their shares in any case (``tenancy``; None: there are none), and ``for_nobody`` those of the one
        that writes, too. Raises IndexBusyError."""
        ranked_for = tenancy
        if tenancy is not None and for_nobody:
            ranked_for = tenancy.copy()
            ranked_for[index_words.WRITER] = -1
        rows, done, gone = np.empty(wanted, np.int64), 0, [_NO_ROWS]
        freed = in_vain = 0
        of_size = self._taken_from(slot_size)
        wants_victims = evicting and len(of_size) and int(self.memory.slabs[of_size, FREE_SLOTS].sum()) < wanted
        if wants_victims:
            # Now, and not while others wait for the lock.
            self._measured(of_size, slot_size, wanted, oldest, ranked_for)
        with self._changing():
            of_size = self._taken_from(slot_size)
            slabs = self.memory.slabs, self.view().table, of_size

            def take_free() -> int:
                return self.memory.table.take_free(*slabs, self._pending, ticket, rows[done:])

            done = take_free()
            # Where pages stay for others' shares there is nothing to be had by looking on.
            looks = _LOOKS_IN_VAIN if tenancy is None else _LOOKS_OF_TENANTS
            bound = self.bound_behind(before, oldest) if evicting and done < wanted else NO_PAGE
            while evicting and done < wanted and in_vain < looks and len(of_size):
                # Pages that stay may be the coldest: then look at more and more, and take no more.
                need = wanted - done
                looked = need << 3 * in_vain
                freed += self._evict(of_size, slot_size, need, looked, oldest, spared, gone, ranked_for, bound)
                got = take_free()
                in_vain = 0 if got else in_vain + 1
                done += got
        pages, beside = np.concatenate(gone), 0
        if tenancy is not None:
            tenancy[index_words.EVICTED :] += _tenants_in(pages)
        if len(pages):
            hashes, states = (np.ascontiguousarray(pages[:, word]) for word in (index_words.HASH, STATE))
            beside = self._evict_beside(hashes, states, oldest)
        return rows[:done], freed, pages, beside

    def _taken_from(self, slot_size: int) -> Words:
        """Positions of the slabs of a size that slots are taken from: all but those that a rebuild looks at."""
        of_size = self.view().of_size.get(slot_size, _NONE)
        taken_from: Words = of_size[self.memory.slabs[of_size, SLAB_STATE] == READY]
        return taken_from

    def bound_behind(self, before: bytes | None, oldest: int) -> int:
        """The rank that pages must be below to make room for the page behind this one in its chain: NO_PAGE where
        there is none, or it is not there, or the policy is not last-use. Others learn from pages that are written and
        evicted."""
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
        """Free those of these slots that are still pending under this ticket. Under the lock."""
        words = self.memory.rows
        ours = (words[rows, STATE] == self._pending) & (words[rows, index_words.HASH] == ticket)
        words[rows[ours], STATE] = FREE
        # Some may be, of a batch that was published before.
        self._may_be_free(rows[words[rows, STATE] == FREE])

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

        ``keys`` is a chain. By position: ``taken``, its pages for which slots were taken, and ``written``, those whose
        bytes are in their slots, with the headers' ``now``; all are one ``tenant``'s. For each of ``written``: 1; 0 for
        a page that another writer published first; -1 where the slot is no longer this writer's. Raises IndexBusyError:
        then all slots stay pending, for ``give_back``.
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
        """Let the miniatures see what was used, and pages rank by the policy that they have chosen. A little of both at
        a time, under the lock."""
        memory = self.memory
        memory.table.learn(view.capacity, view.sampled, most)
        index_words.choose_policy(memory.header, memory.small, memory.entries, view.capacity, view.rows)
        if memory.header[index_words.TO_RANK]:
            memory.table.rank_again(view.capacity, _MOST_RANKED)
            # How cold the coldest are is to be measured anew.
            self._coldness.clear()

    def seize(
        self,
        keys: Sequence[bytes],
        ticket: int,
        seals: Sequence[bytes] | None = None,
        only: tuple[int, int] | None = None,
    ) -> SlotReferences:
        """Forget pages whose slots stay this process' until ``give_back``; those that were there. With ``seals``, one
        for each key, only pages that have them now; with ``only``, a row and a moment (CREATED), only the page that was
        written there then. They are looked up under the lock: what has come to a slot since somebody looked is not
        touched. Raises IndexBusyError."""
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
        """Take the slots of cleared pages that are dated after ``moment`` (milliseconds), by a clock that was ahead of
        the one of their clear; rows of each slab, until ``give_back``. Looks at every slot. Raises IndexBusyError."""
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
        """Rank the pages under these page hashes, of all identities, below all others until they are used; how many.
        Raises IndexBusyError."""
        count = 0
        for digest in self.identities():
            for begin in range(0, len(hashes), _STEP):
                keys = PageKeys.of_joined(digest, b"".join(hashes[begin : begin + _STEP]))
                with self._changing():
                    rows = self.rows_of(keys)
                    self.memory.rows[rows[rows >= 0], index_words.PRIORITY] = 0
                    # How cold the coldest are is to be measured anew.
                    self._coldness.clear()
                count += int((rows >= 0).sum())
        return count

    def free_dead(self) -> int:
        """Free the slots that processes were writing that have ended; how many. Looks at every slot. Raises
        IndexBusyError."""
        freed = 0
        for slab in self.view().slabs.values():
            for begin in range(slab.first_row, slab.first_row + slab.slots, _AT_ONCE):
                states = self.memory.rows[begin : min(begin + _AT_ONCE, slab.first_row + slab.slots), STATE]
                if self._are_left(states).any():
                    with self._changing():
                        left = np.flatnonzero(self._are_left(states))
                        states[left] = FREE
                        self._may_be_free(begin + left)
                    freed += len(left)
        return freed

    @property
    def inserts(self) -> int:
        """The clock that pages rank by, whatever their size: inserted pages."""
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
        """Free the coldest slots of a size, all where there are few slots, else those in one window of them; how many.
        ``need``: how many of the coldest to look at, where more than are ``wanted`` only until those are free. ``gone``
        gets the rows of the pages that were in them. Under the lock."""
        known = self._measured(of_size, slot_size, need, oldest, tenancy)
        total, freed = int(self.view().table[of_size, SLOTS].sum()), 0
        together = slots_in_group(slot_size, total)
        begin = known.pop()
        for rows in self._ranges(of_size, begin, min(total, _MOST_LOOKED_AT), together):
            ranks = self._ranks(rows, oldest, tenancy)
            cold, cool = min(known[COLD], bound - 1), min(known[COOL], bound - 1)
            # Where very many are equally cold, the rest goes another time.
            coldest = np.flatnonzero(are_coldest(ranks, together, cold, cool))[: max(need, _MOST_VICTIMS)]
            coldest = coldest[~self._spare(rows[coldest], ranks[coldest], spared)]
            if need > wanted:
                # Not those of the first rows: they may be warm.
                coldest = coldest[np.argsort(ranks[coldest], kind="stable")[: max(0, wanted - freed)]]
            victims, pages = rows[coldest], self.memory.rows[rows[coldest]]
            self.memory.table.evict(victims, oldest, tenancy)
            gone.append(pages[(victims >= 0) & (ranks[coldest] != index_words.AT_ONCE)])
            self._may_be_free(victims[victims >= 0])
            freed += int((victims >= 0).sum())
        known[LEFT] = known[LEFT] - freed if freed else 0
        return freed

    def _spare(self, rows: Words, ranks: Words, spared: Words) -> npt.NDArray[np.bool_]:
        """Which of these slots have pages with a hash in ``spared``; they rank from now on as if they were used when as
        many pages as there are slots were inserted. Under the lock."""
        stay: npt.NDArray[np.bool_] = _are_among(self.memory.rows[rows, index_words.HASH], spared)
        stay &= ranks != index_words.AT_ONCE
        if stay.any():
            priorities = self.memory.rows[rows[stay], index_words.PRIORITY]
            now, a_tier_later = eviction.ORIGIN + eviction.TICK * self.inserts, eviction.TICK * self.view().capacity
            later = np.maximum(priorities, now) + a_tier_later
            self.memory.rows[rows[stay], index_words.PRIORITY] = later
        return stay

    def _evict_beside(self, hashes: Words, states: Words, oldest: int) -> int:
        """Evict what is of no use without pages that had these HASH and STATE, as far as they are gone and were not
        cleared; how many. A few at a time under the lock; what it is too late for ages by itself."""
        if not self._beside:
            return 0
        count, numbers = 0, states >> index_words.NUMBER_SHIFT
        current = index_words.is_current(self.memory.identities, states)
        with suppress(IndexBusyError):
            for number in self._beside.keys() & numbers[current].tolist():
                of_kv = hashes[current & (numbers == number)]
                for other in self._beside[number]:
                    needed = [kv for kv, others in self._beside.items() if other in others]
                    step = max(1, _AT_ONCE_BESIDE // (len(needed) + 1))
                    for begin in range(0, len(of_kv), step):
                        with self._changing():
                            lost = of_kv[begin : begin + step]
                            for kv in needed:
                                lost = lost[self._rows_with(lost, kv) < 0]
                            rows = self._rows_with(lost, other)
                            rows = rows[rows >= 0]
                            count += self.memory.table.evict(rows, oldest, None)
                            self._may_be_free(rows)
        return count

    def _rows_with(self, hashes: Words, number: int) -> Words:
        """The rows of the pages of this identity with these HASHes, -1 where there is none. Under the lock."""
        rows = np.empty(len(hashes), np.int64)
        self.memory.table.find(hashes, number, rows)
        return rows

    def _ranges(self, of_size: Words, begin: int, count: int, together: int) -> Iterator[Words]:
        """The rows of ``count`` slots from number ``begin`` on, of all of a size: of each slab, whole groups."""
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
        """How cold the coldest slots of a size are, and where most of them are; measured where that is not known, or
        was used up. Needs no lock."""
        # What may go differs from tenant to tenant, and so do the coldest pages.
        of = slot_size, -1 if tenancy is None else int(tenancy[index_words.WRITER])
        known = self._coldness.get(of, [])
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
        known = self._coldness[of] = [*known, *windows]
        return known

    def _ranks(self, rows: Words, oldest: int, tenancy: Words | None) -> Words:
        """How cold the slots in these rows are: AT_ONCE, a priority, or NO_PAGE."""
        ranks = np.empty(len(rows), np.int64)
        self.memory.table.ranks(rows, oldest, tenancy, ranks)
        held = np.flatnonzero(ranks == NO_PAGE)
        if len(held):
            ranks[held[self._are_left(self.memory.rows[rows[held], STATE])]] = index_words.AT_ONCE
        return ranks

    def _are_left(self, states: Words) -> npt.NDArray[np.bool_]:
        """Which of these are STATEs of slots that processes were writing that have ended. An id is never given again,
        so who is dead stays dead."""
        left: npt.NDArray[np.bool_] = states & STATES == PENDING
        left[left] = ~self._are_alive(states[left] >> 8)
        return left

    def _are_alive(self, members: Words) -> npt.NDArray[np.bool_]:
        ids, of = np.unique(members, return_inverse=True)
        alive: npt.NDArray[np.bool_] = np.array([self._members.is_alive(member) for member in ids.tolist()], bool)[of]
        return alive

    def _may_be_free(self, rows: Words) -> None:
        """Say that some of these slots may be free."""
        view = self.view()
        of_rows = index_words.slabs_with(view.by_first, rows)
        for of in np.unique(of_rows[of_rows >= 0]).tolist():
            slab, some = self.memory.slabs[view.positions[of]], rows[of_rows == of]
            # The first free ones are taken first: they were used lately, and are in the page cache.
            lowest = int(some.min() - view.by_first[of, FIRST])
            slab[CURSOR] = lowest if slab[FREE_SLOTS] <= 0 else min(int(slab[CURSOR]), lowest)
            slab[FREE_SLOTS] += len(some)

    # -- slabs -----------------------------------------------------------------------------------------------------

    def all_slabs(self) -> list[Slab]:
        """Those that are being made or dropped, too: all that take room."""
        table = self.memory.slab_table()
        return slabs_of(table[table[:, SLAB_STATE] != NO_SLAB])

    def begin_slab(self, slot_size: int, wanted: Callable[[Sequence[Slab]], int]) -> Slab | None:
        """A place for a new slab, whose files are to be made; ``wanted`` says how many slots it may have, from the
        slabs there are. None for none. Raises IndexBusyError."""
        with self._changing():
            table = self.memory.slab_table()
            used = table[table[:, SLAB_STATE] != NO_SLAB]
            slots = wanted(slabs := slabs_of(used))
            # No two have one number, whatever the word says.
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
        """Slabs that are there, for a rebuild. Before others have the memory."""
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
        """The files of a slab are there: its slots can be taken, and there are as many sets as the slots want, a few
        at a time. Nothing happens a second time. Raises IndexBusyError."""
        if self._position(slab, MAKING) >= 0:
            # Nobody else looks at them yet.
            self.memory.forget_rows(slab.first_row, slab.slots)
            self.memory.rows[slab.first_row : slab.first_row + slab.slots, STATE] = FREE
            with self._changing():
                self._set_state(slab, MAKING, READY)
        wanted = self._sets_wanted()
        for sets in range(max(0, int(self.memory.header[index_words.SETS])), wanted, _STEP):
            with self._changing():
                self.memory.table.add_sets(min(wanted, sets + _STEP))

    def empty_slabs(self) -> list[Slab]:
        """Those without a page that can be looked up, and without one that a rebuild has yet to find. Looks at every
        row."""
        table = self.memory.slab_table()
        ready = slabs_of(table[table[:, SLAB_STATE] == READY])
        return [slab for slab in ready if not self._count(slab, 0)[0]]

    def drop_slab(self, slab: Slab, most_pages: int | None = None) -> bool:
        """Take a slab out of use, with its pages; False, with nothing changed, while one of its slots is being written,
        if it has more than ``most_pages``, or if another process was first. Its files are to be deleted before
        ``forget_slab``. Raises IndexBusyError."""
        with self._changing():
            if most_pages is not None and self._count(slab, 0)[0] > most_pages:
                return False
            states = self.memory.rows[slab.first_row : slab.first_row + slab.slots, STATE]
            if ((states & STATES == PENDING) & ~self._are_left(states)).any():
                return False
            if not (self._set_state(slab, READY, DROPPING) or self._set_state(slab, SCANNING, DROPPING)):
                return False
            gone = self._forget_pages(slab)
        self._evict_beside(*gone, 0)
        return True

    def forget_slab(self, slab: Slab) -> None:
        """The files of a slab that was dropped, or could not be made, are gone. Raises IndexBusyError."""
        with self._changing():
            # Its rows may be those of another slab by now: they are left alone.
            if not self._set_state(slab, DROPPING, NO_SLAB):
                self._set_state(slab, MAKING, NO_SLAB)

    def left_slabs(self) -> list[Slab]:
        """Those that a process was making or dropping when it died; they are this process' to forget. Raises
        IndexBusyError."""
        if not self._has_left_slabs():
            return []
        with self._changing():
            table = self.memory.slab_table()
            left = np.isin(table[:, SLAB_STATE], (MAKING, DROPPING)) & ~self._are_alive(table[:, OF])
            # Or files that could not be deleted.
            left |= (table[:, SLAB_STATE] == DROPPING) & (table[:, OF] == self._members.id)
            self.memory.slabs[left, OF] = self._members.id
            for slab in slabs_of(table[left & (table[:, SLAB_STATE] == DROPPING)]):
                self._forget_pages(slab)
            return slabs_of(table[left])

    def _forget_pages(self, slab: Slab) -> tuple[Words, Words]:
        """Have no page of a slab that was dropped found any more: its files may stay for long. HASH and STATE that its
        pages had. Under the lock."""
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
        """Slabs of other slot sizes, most of whose slots are worth less than any page in slots of this size: free, or
        with pages of lower priorities; the least worthy first. All of them, where there are no slots of this size or a
        slab is ``needed`` whatever it is worth; but none of which more than a quarter stays for a tenant's share, where
        there are slots of this size."""

        def ranks_of(slab: Words) -> Words:
            rows = np.arange(slab[FIRST], slab[FIRST] + slab[SLOTS], max(1, int(slab[SLOTS]) // _MOST_TOGETHER))
            return self._ranks(rows, oldest, tenancy)

        def worth(slab: Words) -> int:
            # Not that of its coldest page: the warm ones go, too.
            ranks = ranks_of(slab)
            warm = int(len(ranks) * _WORTHLESS)
            return int(np.partition(ranks, warm)[warm])

        def coldest(slab: Words) -> int:
            # Free slots do not say that this size wants none: they come and go with every batch.
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
        """Whether a page of the slab has one of these hashes."""
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
        """Where a slab that is in this SLAB_STATE is in the table; -1 for nowhere."""
        table = self.memory.slabs
        there = np.flatnonzero((table[:, SLAB_NUMBER] == slab.number) & (table[:, SLAB_STATE] == state))
        return int(there[0]) if len(there) else -1

    # -- rebuild ---------------------------------------------------------------------------------------------------

    @property
    def rebuilt(self) -> bool:
        """Whether every slab that was here at the start was looked at."""
        return bool(self.memory.header[index_words.REBUILT])

    @property
    def found(self) -> int:
        """Pages found by the rebuild so far."""
        return int(self.memory.header[index_words.FOUND])

    def unknown_slabs(self) -> list[Slab]:
        """Those that were not looked at, or not to the end."""
        table = self.memory.slab_table()
        return slabs_of(table[table[:, SLAB_STATE] == SCANNING])

    def adopt(
        self, slab: Slab, begin: int, keys: Words, numbers: Words, lengths: Words, created: Words, seals: Words
    ) -> None:
        """The pages in the slots from ``begin`` on, by their headers; a number of an identity of -1 is no page. Raises
        IndexBusyError."""
        now = milliseconds()
        for at in range(0, len(keys), _STEP):
            some = slice(at, at + _STEP)
            columns = keys[some], numbers[some], lengths[some], created[some], seals[some]
            first = slab.first_row + begin + at
            with self._changing():
                position = self._position(slab, SCANNING)
                if position < 0:
                    # Dropped meanwhile.
                    return
                states = self.memory.rows[first : first + len(columns[0]), STATE]
                unknown = states & STATES == index_words.UNKNOWN
                found = self.memory.table.adopt(*columns, first, slab.slot_size, now)
                self.memory.slabs[position, FREE_SLOTS] += int((unknown & (states == FREE)).sum())
                self.memory.header[index_words.FOUND] += found

    def end_slab(self, slab: Slab) -> None:
        """All slots of a slab were looked at. Raises IndexBusyError."""
        with self._changing():
            self._set_state(slab, SCANNING, READY)

    def end_rebuild(self) -> None:
        self.memory.header[index_words.REBUILT] = 1

    # -- members ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Share the memory from now on. Raises IndexBusyError, OSError."""
        with self._changing():
            # Whoever changes anything shares it before.
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
                # At first, and in a child that was forked: others may have nobody else to ask.
                self._share(member)
                self._member = member
            yield


def _tenants_in(rows: Words) -> Words:
    """How many of these rows are each tenant's."""
    numbers = rows[:, index_words.LENGTH] >> index_words.TENANT_SHIFT & (index_words.TENANTS - 1)
    return np.bincount(numbers, minlength=index_words.TENANTS)


def _are_among(hashes: Words, others: Words) -> npt.NDArray[np.bool_]:
    """Which of these are in ``others`` (sorted)."""
    at = others.searchsorted(hashes)
    among: npt.NDArray[np.bool_] = np.append(others, 0)[at] == hashes
    return among & (at < len(others))


def are_coldest(ranks: Words, together: int, cold: int, cool: int) -> npt.NDArray[np.bool_]:
    """Which slots rank up to ``cool`` in groups of which one ranks up to ``cold``: slots become free side by side."""
    lowest = np.minimum.reduceat(ranks, np.arange(0, len(ranks), together))
    of_groups = np.repeat((lowest <= cold) & (lowest != NO_PAGE), together)[: len(ranks)]
    coldest: npt.NDArray[np.bool_] = of_groups & (ranks <= cool) & (ranks != NO_PAGE)
    return coldest


def slots_in_group(slot_size: int, slots: int) -> int:
    """How many of so many slots of this size are evicted together; groups begin at multiples of it."""
    return max(1, min(_GROUP // slot_size, _MOST_TOGETHER, slots // _GROUPS))


def _by_position(found: SlotReferences) -> Words:
    """The row of each page of a chain up to the last one found, -1 where none was."""
    behind = int(found.positions.max()) + 1
    if behind == len(found.rows):
        return np.ascontiguousarray(found.rows)
    rows = np.full(behind, -1, np.int64)
    rows[found.positions] = found.rows
    return rows


def slabs_of(rows: Words) -> list[Slab]:
    """The slabs in these rows of the table."""
    return [Slab(*row) for row in rows[:, [SLAB_NUMBER, SLOT_SIZE, SLOTS, FIRST]].tolist()]

"""The words of an index (index_memory.py): what they mean, and the operations on them, which are C (native/table.c).

All words are int64. ``rows``: a row per slot; what is true. ``sets``: a hash table of the pages, WAYS entries a set.
Nothing has to be made anew after a kill, because nothing follows from anything else:

  - an entry of a set counts only if the row that it names says the same, and is replaced otherwise;
  - a page that no entry names is not found, and its slot is used again when it is cold;
  - how many slots of a slab are free is only a hint where to look for some.

A row says PENDING until all of it is written; one store then makes it a page.

Callers hold the change lock, except those of ``find``, ``count_leading``, ``locate``, ``touch``, ``sample`` and
``count``: they may read words that change, so an answer may be about a page that has just gone or come. What is read
from a slot is checked by its seal. ``numbers``: of identities, one for all pages or one each, -1 for an unknown one.
``oldest``: pages written before it (wall-clock milliseconds) are as good as gone. ``dead``: members that have ended.
``capacity``: slots, of all sizes. Arrays are contiguous words.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.native import Arguments, address, words
from hicache_ext.storage.tiers.file import eviction

Words = npt.NDArray[np.int64]

KEY_WORDS = 6
HASH, STATE, LENGTH, CREATED, SEAL, _SECOND_OF_SEAL, PRIORITY, USED = range(8)
"""Words of a row: hash of the page hash (of a pending slot its ticket); state, see below; payload bytes, and above them
the number of the page's tenant (not in USED, which is written without the lock); when written (wall-clock
milliseconds); two words of seal; rank; what the rank is made of: clock at the last counted use << CLOCK_SHIFT | place
in the chain, up to MOST_DEPTH, << HITS_BITS | uses."""
ROW_WORDS = 8
UNKNOWN, FREE, PENDING, PAGE = range(4)
"""Low bits of STATE. Not yet looked at by a rebuild; free; being written: member << 8; a page: the generation of its
identity << 8 | the number of its identity << 40."""
STATES = 3
NUMBER_SHIFT = 40
GENERATIONS = 0xFFFFFFFF

(
    FORMAT,
    ROWS_MOST,
    GHOST_SETS,
    SETS,
    REMEMBERED,
    NEXT_SLAB,
    SLAB_CHANGES,
    REBUILT,
    FOUND,
    LEVEL,
    ALL_CLEARED,
    IDENTITIES,
    INSERTS,
    DISTANCE_SUM,
    REUSES,
    POLICY,
    TO_RANK,
    EVENTS,
    LEARNED,
    SEEN,
    BAD_HEADERS,
    NO_SPACE_SINCE,
    TWICE_TTL,
) = range(23)
"""Words of the header. SETS: in use; LEVEL: the power of two of which there are so many and up to as many more.
SLAB_CHANGES: counts changes of the slabs. REBUILT: 1 once all slabs were looked at; FOUND: pages found by that.
ALL_CLEARED: what was written up to then (milliseconds) was cleared, of every identity. IDENTITIES: so many are
known. INSERTS, DISTANCE_SUM, REUSES: the clock of eviction.py. POLICY: the candidate of eviction.py that pages rank
by now; TO_RANK: rows before this one may rank by another one yet. EVENTS: so many were noted for the miniatures
(miniatures.py), LEARNED: and so many of them were looked at; SEEN: uses of all pages, in the sample or not, that found
a place. BAD_HEADERS: damaged ones, met by the rebuild. NO_SPACE_SINCE: since when (seconds) no slab finds room on the
disk; or 0. TWICE_TTL: milliseconds, 0 without one: a page is valid as long after the oldest one that is."""
HEADER_WORDS = 64

OF_SIZE, COLD, COOL, LEFT = range(4)
"""Words of a slot size: the size; a group of slots with a page of priority up to COLD loses those up to COOL; slots
still to be freed before both are measured again."""
SIZE_WORDS = 8

SLAB_NUMBER, SLOT_SIZE, SLOTS, FIRST, SLAB_STATE, FREE_SLOTS, CURSOR, OF = range(8)
"""Words of a slab: its number; bytes of a slot; slots; the row of slot 0; below; at least so many slots are free,
perhaps; where free ones are looked for; the member that makes or drops it; of
a slab that is READY, how many slots up to CURSOR were looked at without finding a free one."""
SLAB_WORDS = 8
NO_SLAB, MAKING, READY, SCANNING, DROPPING = range(5)

DIGEST, _SECOND_OF_DIGEST, GENERATION, CLEARED, HITS, LAST, WRITTEN, PAGES = range(8)
"""Words of an identity: two of its digest; its generation; pages written up to then (milliseconds) were cleared; pages
hit, and when last (seconds); whether pages were written since it was cleared; how many there are, about: a kill
may make it wrong."""
IDENTITY_WORDS = 8

TENANT_NAME, TENANT_PAGES = range(2)
"""Words of a tenant: 64 bits of the digest of its name, 0 for none; how many pages it has, of all identities, cleared
ones included; a kill may make it wrong by one. Number 0 is the default tenant."""
TENANTS, TENANT_WORDS, TENANT_SHIFT = 64, 2, 32
EVICTED, WRITER = TENANTS, 2 * TENANTS
"""Of a tenancy, which says for whom slots are taken: behind the slots that are each tenant's share, pages evicted of
each, and the number of the one that writes, -1 for nobody."""
TENANCY_WORDS = WRITER + 1
COUNTS = 4 + TENANTS

WAYS = 16
HITS_BITS = 3
MOST_HITS = (1 << HITS_BITS) - 1
DEPTH_BITS = 16
MOST_DEPTH = (1 << DEPTH_BITS) - 1
CLOCK_SHIFT = HITS_BITS + DEPTH_BITS
SAMPLE = (1 << 20) - 1
"""Bits of HASH that say whether the miniatures see a page."""
HASH_OF_EVENT, MOMENT_OF_EVENT = range(2)
"""Words of an event: HASH of a page that was used or written; the clock << DEPTH_BITS | its place in the chain."""
NO_PAGE = eviction.MAX_PRIORITY
"""The rank of a slot that cannot be taken now."""
AT_ONCE = -1
"""The rank of a slot that is free, or holds what nobody can ask for any more."""

IN_ORDER, ONE_LENGTH, ONE_SLAB, FACTS = 1, 2, 4, 3
"""Facts about all pages that ``locate`` found: their places ascend; they have one payload length; they are in one slab.
So many bits."""

ROW = (1 << 40) - 1
"""The bits of an entry that say its row, plus 1; above them is a tag."""
_LOW = (1 << 32) - 1
LEAST_SETS = 64

# -- of many pages at once -------------------------------------------------------------------------------------------


def tenant_word(name: str) -> int:
    """TENANT_NAME of a tenant that has a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True) | 1


def scrambled(word: Any) -> Any:
    """One word for each word, by shifts alone, of which neither Python nor numpy warns; so in C."""
    word = word ^ (word << 13)
    word = word ^ ((word >> 7) & ((1 << 57) - 1))
    return word ^ (word << 17)


def hashes_of(keys: Words) -> Words:
    """HASH of these keys (``key_words``): page hashes that differ in one word differ here."""
    hashes: Words = np.zeros(len(keys), np.int64)
    for word in range(KEY_WORDS - 4, KEY_WORDS):
        hashes = scrambled(hashes ^ keys[:, word])
    return hashes


def is_current(identities: Words, states: Words) -> npt.NDArray[np.bool_]:
    """Which pages of these STATEs were not cleared."""
    numbers = (states >> NUMBER_SHIFT) & (len(identities) - 1)
    current: npt.NDArray[np.bool_] = (states >> 8) & GENERATIONS == identities[numbers, GENERATION] & GENERATIONS
    return current


def are_valid(header: Words, created: Words, oldest: int) -> npt.NDArray[np.bool_]:
    """Which pages with this CREATED are not expired, as ``is_expired`` in C."""
    valid: npt.NDArray[np.bool_] = created >= oldest
    return valid & (created - oldest <= header[TWICE_TTL]) if oldest > 0 and header[TWICE_TTL] > 0 else valid


def are_remembered(identities: Words, ghosts: Words, keys: Words, numbers: Words) -> npt.NDArray[np.bool_]:
    """Whether each of these pages, none of which is there, is among those that were evicted last (``key_words``, and
    the numbers of their identities)."""
    # Of the part of STATE that says generation and identity. The same number as in C, but for its sign.
    of_identities = (identities[numbers, GENERATION] & GENERATIONS) | numbers << (NUMBER_SHIFT - 8)
    fingerprints = scrambled(hashes_of(keys) ^ of_identities) | 1
    of_sets = (fingerprints >> 1 & _LOW) % ghosts.shape[1]
    remembered: npt.NDArray[np.bool_] = (ghosts[0, of_sets] == fingerprints[:, None]).any(axis=1)
    return remembered


def slabs_with(slabs: Words, rows: Words) -> Words:
    """The positions of the slabs that have these rows; -1 for none. ``slabs``: by FIRST."""
    of = np.searchsorted(slabs[:, FIRST], rows, side="right") - 1
    if len(slabs):
        of[rows >= (slabs[:, FIRST] + slabs[:, SLOTS])[of]] = -1
    return of


# -- what is done in C -------------------------------------------------------------------------------------------------

_LOOKS = 4


def _each_or_one(numbers: Words) -> tuple[int, int]:
    """``numbers`` and ``number`` of a call."""
    return (0, numbers.item()) if len(numbers) == 1 else (address(numbers), 0)


def _address_or_none(tenancy: Words | None) -> int:
    return 0 if tenancy is None else address(tenancy)


def _call(function: str, fields: str) -> type[Arguments]:
    """What a function of native/table.c takes."""
    return type(function, (Arguments,), {"function": function, "_fields_": words(fields)})


Find = _call("hicache_find", "table keys numbers found key_count number oldest")
Locate = _call("hicache_locate", "table keys numbers slabs located key_count number slab_count oldest")
Touch = _call("hicache_touch", "table chain chain_length capacity sampled")
RankAgain = _call("hicache_rank_again", "table capacity most")
Learn = _call("hicache_learn", "table capacity sampled rows most")
GrowSets = _call("hicache_grow_sets", "table wanted")
TakeFree = _call("hicache_take_free", "table slabs known of_size taken of_size_count wanted most pending ticket")
Sample = _call("hicache_sample", "table slabs dead ranks slab_count dead_count rank_count oldest first step tenancy")
Coldest = _call("hicache_coldest", "table dead victims dead_count oldest begin end together cold cool tenancy")
Evict = _call("hicache_evict", "table victims spared dead victim_count spared_count dead_count headroom oldest tenancy")
EvictBeside = _call(
    "hicache_evict_beside",
    "table hashes states beside needed freed "
    "gone_count beside_rows beside_width needed_rows needed_width freed_most oldest",
)
Seize = _call("hicache_seize", "table found found_count pending ticket")
GiveBack = _call("hicache_give_back", "table taken taken_count pending ticket")
Count = _call("hicache_count", "table counts begin end oldest")
Publish = _call(
    "hicache_publish",
    "table keys numbers positions taken lengths published key_count number taken_count pending ticket "
    "created oldest capacity ghost_limit sampled tenant",
)
Adopt = _call("hicache_adopt", "table keys numbers lengths created seals key_count first slot_size now")


class Table(Arguments):
    """Where the words are that native/table.c works on. They stay mapped while somebody holds this, also after
    ``IndexMemory.close``: whoever calls ``core`` with ``address`` does until the call is over."""

    function = "hicache_table"
    _fields_ = words(
        "rows sets header identities ghosts events small entries tenants "
        "row_count set_count identity_count ghost_sets event_count entry_sets"
    )

    def __init__(
        self,
        rows: Words,
        sets: Words,
        header: Words,
        identities: Words,
        ghosts: Words,
        events: Words,
        small: Words,
        entries: Words,
        tenants: Words,
    ) -> None:
        parts = rows, sets, header, identities, ghosts, events, small, entries, tenants
        lengths = len(rows), len(sets), len(identities), ghosts.shape[1], len(events), entries.shape[1]
        super().__init__(*map(address, parts), *lengths)
        self.core = native.needed()
        self.address = ctypes.addressof(self)
        self._parts = parts
        self._header = header

    def _run(self, call: type[Arguments], *rest: int) -> int:
        return self.core.quick(call, self.address, *rest)

    def _looks(self) -> Iterator[None]:
        """Once, and again where entries were moved to a new set meanwhile: some were looked for where they are no
        more."""
        for _ in range(_LOOKS):
            sets = self._header[SETS]
            yield
            if self._header[SETS] == sets:
                return

    def find(self, keys: Words, numbers: Words, oldest: int) -> Words:
        """The row of each page, -1 for nowhere, or written before ``oldest``."""
        rows = np.empty(len(keys), np.int64)
        for _ in self._looks():
            self._find(keys, numbers, oldest, address(rows))
            if (rows >= 0).all():
                break
        return rows

    def count_leading(self, keys: Words, numbers: Words, oldest: int) -> int:
        """How many pages are there, and not written before ``oldest``, before the first one that is not."""
        leading = 0
        for _ in self._looks():
            leading = self._find(keys, numbers, oldest, 0)
            if leading == len(keys):
                break
        return leading

    def _find(self, keys: Words, numbers: Words, oldest: int, found: int) -> int:
        each, of_all = _each_or_one(numbers)
        return self._run(Find, address(keys), each, found, len(keys), of_all, oldest)

    def locate(self, keys: Words, numbers: Words, oldest: int, slabs: Words, slabs_at: int = 0) -> tuple[Words, int]:
        """The pages that are there and not written before ``oldest``: slab numbers, slots, payload lengths, positions
        in ``keys`` and rows, a row each; and the facts about all of them (``IN_ORDER``). ``slabs``: by FIRST;
        ``slabs_at``: their address, where it is known."""
        many, located = len(keys), np.empty((5, len(keys)), np.int64)
        each, of_all = _each_or_one(numbers)
        parts = address(keys), each, slabs_at or address(slabs), address(located)
        count = facts = 0
        for _ in self._looks():
            found = self._run(Locate, *parts, many, of_all, len(slabs), oldest)
            count, facts = found >> FACTS, found & (1 << FACTS) - 1
            if count == many:
                break
        return located[:, :count], facts

    # -- uses ----------------------------------------------------------------------------------------------------------

    def touch(self, capacity: int, chain: Words, sampled: int) -> int:
        """Note a use of the pages in these rows, in the order of their chain; a row may be -1. Returns how many got
        another rank. ``sampled``: how many pages the miniatures see, of SAMPLE + 1."""
        return self._run(Touch, address(chain), len(chain), capacity, sampled)

    def rank_again(self, capacity: int, most: int) -> int:
        """Rank by the policy of now what was ranked by another one, at most so many rows. Returns how many are left."""
        return self._run(RankAgain, capacity, most)

    def learn(self, capacity: int, sampled: int, rows: int, most: int) -> int:
        """Let the miniatures look at up to ``most`` of the uses that were noted, and choose a policy when it is time.
        ``rows``: behind the last one in use. Returns how many they looked at."""
        return self._run(Learn, capacity, sampled, rows, most)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def grow_sets(self, wanted: int) -> int:
        """Use so many sets; returns how many there are."""
        return self._run(GrowSets, wanted)

    def take_free(
        self, slabs: Words, known: Words, of_size: Words, pending: int, ticket: int, most: int, taken: Words
    ) -> int:
        """Make free slots pending, up to the length of ``taken``, which gets their rows, in order of place as far as
        possible. ``known``: this process' copy of ``slabs``, which says where they lie; ``of_size``: the positions in
        both of those to look at. At most so many slots are looked at. Returns the number taken."""
        parts = address(slabs), address(known), address(of_size), address(taken)
        return self._run(TakeFree, *parts, len(of_size), len(taken), most, pending, ticket)

    # ``tenancy``: for whom, TENANCY_WORDS of them; None where there are no tenants.

    def sample(
        self, slabs: Words, first: int, step: int, oldest: int, dead: Words, ranks: Words, tenancy: Words | None = None
    ) -> int:
        """The ranks of every ``step``-th slot of these slabs, from number ``first`` on. Returns how many there are."""
        parts = address(slabs), address(dead), address(ranks)
        numbers = len(slabs), len(dead), len(ranks), oldest, first, step
        return self._run(Sample, *parts, *numbers, _address_or_none(tenancy))

    def coldest(
        self,
        begin: int,
        end: int,
        together: int,
        cold: int,
        cool: int,
        oldest: int,
        dead: Words,
        victims: Words,
        tenancy: Words | None = None,
    ) -> int:
        """Of the rows from ``begin`` to ``end``, in groups of ``together``: those with a rank up to ``cool`` in groups
        that have one up to ``cold`` go into ``victims``, which ends with -1. Returns their number."""
        parts = address(dead), address(victims)
        numbers = len(dead), oldest, begin, end, together, cold, cool
        return self._run(Coldest, *parts, *numbers, _address_or_none(tenancy))

    def evict(
        self, victims: Words, spared: Words, headroom: int, oldest: int, dead: Words, tenancy: Words | None = None
    ) -> int:
        """Free the slots ``victims``, up to a -1, whatever is in them by now that may be taken; ``victims`` keeps those
        that are free then, up to a -1. Pages with a hash in ``spared`` (sorted) get a rank ``headroom`` beyond now
        instead. Returns the number of pages evicted, which does not count those that nobody could ask for."""
        parts = address(victims), address(spared), address(dead)
        numbers = len(victims), len(spared), len(dead), headroom, oldest
        return self._run(Evict, *parts, *numbers, _address_or_none(tenancy))

    def evict_beside(
        self, hashes: Words, states: Words, beside: Words, needed: Words, oldest: int, freed: Words
    ) -> int:
        """Evict what is of no use without pages that are gone, whose HASH and STATE these are: under each hash the
        pages of the identities ``beside[number]``, up to a -1, unless a page of ``needed[their number]``, up to a -1,
        is there. Nothing of pages that were cleared; what was written before ``oldest`` is left to its age. ``freed``
        gets the rows, as many as it has places for. Returns their number."""
        parts = address(hashes), address(states), address(beside), address(needed), address(freed)
        return self._run(EvictBeside, *parts, len(hashes), *beside.shape, *needed.shape, len(freed), oldest)

    def seize(self, found: Words, pending: int, ticket: int) -> int:
        """Make pages pending, for ``give_back`` to free once their headers are gone; a row may be -1, and becomes -1
        where there is no page. Returns their number."""
        return self._run(Seize, address(found), len(found), pending, ticket)

    def give_back(self, taken: Words, pending: int, ticket: int) -> int:
        """Free those of these slots that are still pending under this ticket; a row may be -1. Returns their number."""
        return self._run(GiveBack, address(taken), len(taken), pending, ticket)

    def count(self, begin: int, end: int, oldest: int, counts: Words) -> int:
        """Count the rows from ``begin`` to ``end`` by state, into ``counts``, and the pages of each tenant behind those
        (COUNTS words). Returns the number of pages that can be found."""
        return self._run(Count, address(counts), begin, end, oldest)

    # -- writing pages -------------------------------------------------------------------------------------------------

    def publish(
        self,
        keys: Words,
        numbers: Words,
        positions: Words,
        taken: Words,
        lengths: Words,
        pending: int,
        ticket: int,
        created: int,
        oldest: int,
        capacity: int,
        ghost_limit: int,
        published: Words,
        sampled: int,
        tenant: int = 0,
    ) -> int:
        """Make pages of slots that are written, with their seals: page ``keys[positions[n]]`` is in row ``taken[n]``.
        Pages at consecutive positions are a chain (``PageByPage.inserted`` of the benchmarks). ``published[n]``: 1; 0
        for a page that is there already: its slot becomes free; -1 for a slot that is no longer this writer's.
        ``ghost_limit``: evicted pages worth remembering; ``sampled``: as for ``touch``; ``tenant``: whose pages they
        are. Returns how many slots became free."""
        each, of_all = _each_or_one(numbers)
        parts = address(keys), each, address(positions), address(taken), address(lengths), address(published)
        moments = created, oldest, capacity, ghost_limit, sampled, tenant
        return self._run(Publish, *parts, len(keys), of_all, len(taken), pending, ticket, *moments)

    def adopt(
        self,
        keys: Words,
        numbers: Words,
        lengths: Words,
        created: Words,
        seals: Words,
        first: int,
        slot_size: int,
        now: int,
    ) -> int:
        """For a rebuild: the pages that headers tell of, in the slots from row ``first`` on that are still UNKNOWN; a
        number of -1, one each, is no page. Of several pages with one key the newest counts. They rank by their age at
        ``now`` (milliseconds), below all that is written from now on. Returns the number of pages found, less those
        they replace."""
        parts = address(keys), address(numbers), address(lengths), address(created), address(seals)
        return self._run(Adopt, *parts, len(keys), first, slot_size, now)

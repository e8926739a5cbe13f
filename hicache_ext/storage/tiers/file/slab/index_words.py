"""The words of an index (index_memory.py): what they mean, and the operations on them, which are C (native/table.c).

All words are int64. ``rows`` has a row per slot and is authoritative. ``sets`` is a hash table of the pages, WAYS
entries per set. Nothing needs repair after a kill, because no part must agree with another:

  - an entry of a set counts only if the row that it names agrees, and is replaced otherwise;
  - a page that no entry names is not found, and its slot is reused when it is cold;
  - the number of free slots of a slab is only a hint where to look for some.

A row says PENDING until all of it is written; one store then makes it a page.

Callers hold the change lock, except those of ``locate``, ``touch`` and ``ranks``: they may read changing words,
so an answer may be about a page that has just gone or come. The seal checks what is read from a slot.
``numbers``: numbers of identities, one for all pages or one each, -1 for an unknown one.
``oldest``: pages written before it (wall-clock milliseconds) are as good as gone.
``capacity``: slots of all sizes. Arrays are contiguous words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext import native
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
) = range(22)
"""Words of the header. SETS: sets in use. SLAB_CHANGES: counts changes of the slabs. REBUILT: 1 once all slabs were
read; FOUND: pages found by that. ALL_CLEARED: pages of any identity written up to then (milliseconds) were cleared.
IDENTITIES: number of known ones. INSERTS, DISTANCE_SUM, REUSES: the clock of eviction.py. POLICY: the candidate of
eviction.py that pages rank by now; TO_RANK: rows before this one may still rank by another one. EVENTS: number of uses
noted for the miniatures; LEARNED: number of those processed; SEEN: uses of all pages, in the sample or not, that found
a place. BAD_HEADERS: damaged headers met by the rebuild. NO_SPACE_SINCE: when (seconds) slabs began to find no room on
the disk; or 0. TWICE_TTL: milliseconds, 0 without one: a page is valid as long after the oldest one that is."""
HEADER_WORDS = 64

SLAB_NUMBER, SLOT_SIZE, SLOTS, FIRST, SLAB_STATE, FREE_SLOTS, CURSOR, OF = range(8)
"""Words of a slab: its number; bytes of a slot; slots; the row of slot 0; its state, see below; a hint of how many
slots are free; the slot where the search for free ones starts; the member that makes or drops it."""
SLAB_WORDS = 8
NO_SLAB, MAKING, READY, SCANNING, DROPPING = range(5)

DIGEST, _SECOND_OF_DIGEST, GENERATION, CLEARED, HITS, LAST, WRITTEN = range(7)
"""Words of an identity: two of its digest; its generation; the time (milliseconds) up to which its pages were cleared;
hits, and the time of the last (seconds); whether pages were written since it was cleared."""
IDENTITY_WORDS = 8

TENANT_NAME, TENANT_PAGES = range(2)
"""Words of a tenant: 64 bits of the digest of its name, 0 for none; how many pages it has, of all identities, cleared
ones included; a kill may make it wrong by one. Number 0 is the default tenant."""
TENANTS, TENANT_WORDS, TENANT_SHIFT = 64, 2, 32
WRITER, EVICTED = TENANTS, TENANTS + 1
"""Words of a tenancy, which says for whom slots are taken: after each tenant's share in slots, the number of the
writer, -1 for nobody; then the pages evicted from each tenant."""
TENANCY_WORDS = EVICTED + TENANTS

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
"""Rank of a slot that cannot be taken now."""
AT_ONCE = -1
"""Rank of a slot that is free, or holds a page that nobody can request any more."""

IN_ORDER, ONE_LENGTH, ONE_SLAB, FACTS = 1, 2, 4, 3
"""Facts about all pages that ``locate`` found, in the lowest FACTS bits of its result, below their number: their places
ascend; they have one payload length; they are in one slab."""

ROW = (1 << 40) - 1
"""Bits of an entry that hold its row plus 1; above them is a tag."""
_LOW = (1 << 32) - 1
LEAST_SETS = 64

# -- miniatures --------------------------------------------------------------------------------------------------------
#
# Caches of a sample of the pages, one for each candidate of eviction.py, and which of them serves most. A page is in
# the sample by its hash, whatever its chain, and a miniature has the same share of the slots, so it serves about the
# share of uses that a tier under this policy would (Waldspurger et al., Cache Modeling and Optimization using Miniature
# Simulations, 2017). What their words mean: native/table.c; what was measured: docs/decisions/eviction.md.

CANDIDATES = len(eviction.POLICIES)
SCALES = (1, 4, 8)
"""Capacities (halves of the tier's) of the miniatures after the candidates, which give the current policy's curve."""
SAMPLED_SLOTS = 1 << 12
"""Maximum slots of a miniature at the tier's capacity."""
ENTRY_WORDS, SMALL_WORDS = 3, 128
HELD = 2
"""Word of an entry that holds two bits for each miniature."""
SCORES, MINIATURE_HITS, USES, SERVED, EXPECTED, NEXT, SWITCHES, SETS_USED = 8, 16, *range(24, 30)
LATELY, NEXT_STOCK, LAST_SCORES, NOISE, LAST_NOISE = 32, 43, 48, 64, 96
"""Positions in the words ``small``: fading sums of each candidate's hits, in 65,536ths; hits of each miniature; uses
seen; hits of the policy in force at each use; the sample's share of the uses of all pages, times SAMPLE + 1; the clock
at the next comparison; changes of policy; sets of entries in use; hits of each candidate since the last comparison; the
clock at which all pages that are there count as kept; SCORES over a short time; for each two candidates, squares of the
difference of their hits between two comparisons, summed like SCORES and like LAST_SCORES."""

_HALF = 45426
"""65,536ths of log(2)."""
_HORIZON, _MOST_CAPACITIES = 4, 8
"""Capacities, or reuse distances if longer, after which a hit counts half."""
_COMPARISONS, _LEAST_INSERTS, _MOST_BETWEEN = 16, 256, 1 << 20
"""Comparisons per capacity; least inserted pages between two, because the pages of a request are one event; most hits
counted between two, so that sums of squares fit a word."""
_LAST, _LEAST_LAST = 8, 4
"""Comparisons after which a hit counts half in LAST_SCORES: half a capacity of them, or the least in small tiers."""
_LEAST_LEAD_SHIFT, _LEAST_SIGNIFICANCE, _LEAST_LAST_SIGNIFICANCE, _BACK = 4, 5, 8, 8
"""Another candidate must lead by 1/16 of the hits in the long run, because a change costs about that much, and its lead
squared must exceed the significance times the noise, for all scores or for the last ones alone. For LAST_USE any lead
and an eighth of that noise are enough: no tier may serve less than plain LRU for long."""
_LEAST_SLOTS = 96
"""A tier with fewer slots keeps its policy: it hardly holds one chain, and what it evicts depends on the size of
batches, which miniatures do not know."""
_STOCK = 4
"""Capacities after which all pages that are there count as kept."""


@np.errstate(over="ignore")
def choose_policy(header: Words, small: Words, entries: Words, capacity: int, rows: int) -> None:
    """Compare the candidates when it is time, and switch to one that is better by more than chance, either recently,
    which shows a change of workload, or in the long run. ``rows``: one past the last row in use. Under the lock.

    The difference of two candidates between two comparisons is taken as their noise: one request makes one difference,
    however many pages it has."""
    inserts = header[INSERTS]
    if inserts < small[NEXT]:
        return
    step = max(_LEAST_INSERTS, capacity // _COMPARISONS)
    small[NEXT] = inserts + step
    distance_sum, reuses = header[[DISTANCE_SUM, REUSES]].tolist()
    distance = eviction.reuse_distance(capacity, distance_sum, reuses)
    horizon = _HORIZON * max(capacity, min(distance, _MOST_CAPACITIES * capacity), _COMPARISONS * step)
    last_horizon = max(_LAST * (capacity // _COMPARISONS), _LEAST_LAST * step)
    lately = np.minimum(small[LATELY : LATELY + CANDIDATES], _MOST_BETWEEN)
    small[LATELY : LATELY + CANDIDATES] = 0
    more = np.subtract.outer(lately, lately).ravel()
    for scores, noise, after in ((SCORES, NOISE, horizon), (LAST_SCORES, LAST_NOISE, last_horizon)):
        fading = _HALF * step // after
        hits, differences = small[scores : scores + CANDIDATES], small[noise : noise + CANDIDATES**2]
        hits += (lately << 16) - (hits * fading >> 16)
        differences += more * more - (differences * (2 * fading) >> 16)
    now = int(header[POLICY]) if 0 <= header[POLICY] < CANDIDATES else 0
    best = now
    if capacity >= _LEAST_SLOTS:
        best = _leader(small, LAST_SCORES, LAST_NOISE, _LEAST_LAST_SIGNIFICANCE, now)
        if best == now:
            best = _leader(small, SCORES, NOISE, _LEAST_SIGNIFICANCE, now)
    if best == now and inserts < small[NEXT_STOCK]:
        return
    small[SWITCHES] += best != now
    small[NEXT_STOCK] = inserts + _STOCK * capacity
    header[POLICY] = best
    if best != now or best == eviction.KEEP_FIRST:
        header[TO_RANK] = rows
    # A page that is there, new or used, has the lower of its two bits set.
    held = entries[HELD, : max(0, int(small[SETS_USED]))]
    held |= (held & 0x555) << 1


def _leader(small: Words, scores: int, noise: int, least_significance: int, now: int) -> int:
    """Return the best candidate that leads by more than chance and is not behind recently; else the current one."""
    words = small.tolist()
    best, current_score, recent_score = now, words[scores + now], words[LAST_SCORES + now]
    for candidate in range(CANDIDATES):
        score = words[scores + candidate]
        lead, chance = score - current_score >> 16, least_significance * words[noise + CANDIDATES * candidate + now]
        least_lead = (words[SCORES + now] >> 16 + _LEAST_LEAD_SHIFT) + 1
        if lead > current_score >> 17:
            # Plain LRU serves nothing of a loop: each further pass before the switch is lost.
            chance //= 2
        if candidate == eviction.LAST_USE:
            least_lead, chance = 1, chance // _BACK
        is_behind = words[LAST_SCORES + candidate] < recent_score
        if score > words[scores + best] and not is_behind and lead > least_lead and lead * lead > chance:
            best = candidate
    return best


def sampled_of(capacity: int) -> int:
    """Return how many of SAMPLE + 1 pages the miniatures of a tier with ``capacity`` slots see."""
    return min(SAMPLE + 1, max(1, SAMPLED_SLOTS * (SAMPLE + 1) // capacity))


# -- batches of pages -------------------------------------------------------------------------------------------------


def tenant_word(name: str) -> int:
    """Return the TENANT_NAME of a named tenant."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True) | 1


def scrambled(word: Any) -> Any:
    """Hash each word using shifts only, which cause no overflow warnings in Python or numpy; C does the same."""
    word = word ^ (word << 13)
    word = word ^ ((word >> 7) & ((1 << 57) - 1))
    return word ^ (word << 17)


def hashes_of(keys: Words) -> Words:
    """Return the HASH of each key (``key_words``); page hashes that differ in one word have different HASHes."""
    hashes: Words = np.zeros(len(keys), np.int64)
    for word in range(KEY_WORDS - 4, KEY_WORDS):
        hashes = scrambled(hashes ^ keys[:, word])
    return hashes


def is_current(identities: Words, states: Words) -> npt.NDArray[np.bool_]:
    """Return which pages with these STATEs were not cleared."""
    numbers = (states >> NUMBER_SHIFT) & (len(identities) - 1)
    current: npt.NDArray[np.bool_] = (states >> 8) & GENERATIONS == identities[numbers, GENERATION] & GENERATIONS
    return current


def are_remembered(identities: Words, ghosts: Words, keys: Words, numbers: Words) -> npt.NDArray[np.bool_]:
    """Return which of these missing pages (``key_words``, and the numbers of their identities) are remembered as
    recently evicted."""
    # The part of STATE with generation and identity: the same number as in C, except for its sign.
    of_identities = (identities[numbers, GENERATION] & GENERATIONS) | numbers << (NUMBER_SHIFT - 8)
    fingerprints = scrambled(hashes_of(keys) ^ of_identities) | 1
    of_sets = (fingerprints >> 1 & _LOW) % ghosts.shape[1]
    remembered: npt.NDArray[np.bool_] = (ghosts[0, of_sets] == fingerprints[:, None]).any(axis=1)
    return remembered


def slabs_with(slabs: Words, rows: Words) -> Words:
    """Return the positions of the slabs that contain these rows; -1 for none. ``slabs`` is sorted by FIRST."""
    of = np.searchsorted(slabs[:, FIRST], rows, side="right") - 1
    if len(slabs):
        of[rows >= (slabs[:, FIRST] + slabs[:, SLOTS])[of]] = -1
    return of


# -- operations in C ---------------------------------------------------------------------------------------------------


STRUCTS = [
    native.Struct(
        "table",
        "rows[] sets[] identities[] events[] header small tenants ghosts ghost_sets entries entry_sets",
    )
]
"""The struct of the table, then those that the functions take."""


def _function(name: str, fields: str) -> Callable[..., int]:
    """Return a method of ``Table`` that calls this function of native/table.c, which documents it. The arguments are
    the fields of the function's struct after ``table``; for those with ``[]`` an array, or None."""
    STRUCTS.append(call := native.Struct(name, f"table {fields}"))

    def method(table: Table, *arguments: Any) -> int:
        return table.core(call, table.address, *arguments)

    return method


class Table:
    """The addresses of the words that native/table.c works on. They stay mapped while somebody holds this, even after
    ``IndexMemory.close``; a caller holds it until its call is over."""

    def __init__(self, *parts: Words, ghosts: Words, entries: Words) -> None:
        """``parts`` are the arrays of the first fields."""
        self.core = native.needed()
        words = np.frombuffer(STRUCTS[0].packed(*parts, ghosts, ghosts.shape[1], entries, entries.shape[1]), np.int64)
        self.address = native.address(words)
        self._parts = *parts, ghosts, entries, words

    locate = _function("locate", "keys[] numbers[] oldest slabs[] located[]")
    touch = _function("touch", "chain[] capacity sampled")
    rank_again = _function("rank_again", "capacity most")
    learn = _function("learn", "capacity sampled most")
    add_sets = _function("add_sets", "wanted")
    take_free = _function("take_free", "slabs[] known[] of_size[] pending ticket taken[]")
    ranks = _function("ranks", "rows[] oldest tenancy[] ranks[]")
    evict = _function("evict", "victims[] oldest tenancy[]")
    find = _function("find", "hashes[] number rows[]")
    publish = _function(
        "publish",
        "keys[] numbers[] positions[] taken[] lengths[] pending ticket "
        "created oldest capacity ghost_limit sampled tenant published[]",
    )
    adopt = _function("adopt", "keys[] numbers[] lengths[] created[] seals[] first slot_size now")

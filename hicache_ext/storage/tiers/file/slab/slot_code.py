"""The words of an index (index_memory.py): what they mean, and how they are changed in plain Python, page by page.

It does what native/table.c does, to the bit; index_words.py has one or the other, and says what each operation is for.
Looking up is in lookup.py.

All words are int64. ``rows``: a row per slot; what is true. ``sets``: a hash table of the pages, WAYS entries a set.
Nothing has to be made anew after a kill, because nothing follows from anything else:

  - an entry of a set counts only if the row that it names says the same, and is replaced otherwise;
  - a page that no entry names is not found, and its slot is used again when it is cold;
  - how many slots of a slab are free is only a hint where to look for some.

Callers hold the change lock, except those of ``find``, ``locate``, ``touch``, ``sample`` and ``count``: they may read
words that change, so an answer may be about a page that has just gone or come. What is read from a slot is checked by
its seal.

Whoever has the memory may write anything into it, and C checks no bounds. So a word that becomes a position or a length
is read once, and used only where it lies in its part: ``len`` of an argument is this process' own.

A row says PENDING until all of it is written; one store then makes it a page.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.storage.tiers.file import eviction

Words = npt.NDArray[np.int64]


class Parts(Protocol):
    """The words of an index (``IndexMemory``)."""

    rows: Words
    sets: Words
    header: Words
    identities: Words
    slabs: Words
    ghosts: Words
    events: Words


KEY_WORDS = 6
HASH, STATE, LENGTH, CREATED, SEAL, _SECOND_OF_SEAL, PRIORITY, USED = range(8)
"""Words of a row: hash of the page hash (of a pending slot its ticket); state, see below; payload bytes; when written
(wall-clock milliseconds); two words of seal; rank; what the rank is made of: clock at the last counted use <<
CLOCK_SHIFT | place in the chain, up to MOST_DEPTH, << HITS_BITS | uses."""
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
) = range(22)
"""Words of the header. SETS: in use; LEVEL: the power of two of which there are so many and up to as many more.
SLAB_CHANGES: counts changes of the slabs. REBUILT: 1 once all slabs were looked at; FOUND: pages found by that.
ALL_CLEARED: what was written up to then (milliseconds) was cleared, of every identity. IDENTITIES: so many are
known. INSERTS, DISTANCE_SUM, REUSES: the clock of eviction.py. POLICY: the candidate of eviction.py that pages rank
by now; TO_RANK: rows before this one may rank by another one yet. EVENTS: so many were noted for the miniatures
(miniatures.py), LEARNED: and so many of them were looked at; SEEN: uses of all pages, in the sample or not, that found
a place. BAD_HEADERS: damaged ones, met by the rebuild. NO_SPACE_SINCE: since when (seconds) no slab finds room on the
disk; or 0."""
HEADER_WORDS = 64

OF_SIZE, COLD, COOL, LEFT = range(4)
"""Words of a slot size: the size; a group of slots with a page of priority up to COLD loses those up to COOL; slots
still to be freed before both are measured again."""
SIZE_WORDS = 8

SLAB_NUMBER, SLOT_SIZE, SLOTS, FIRST, SLAB_STATE, FREE_SLOTS, CURSOR, OF = range(8)
"""Words of a slab: its number; bytes of a slot; slots; the row of slot 0; below; at least so many slots are free,
perhaps; where free ones are looked for; the member that makes or drops it; how many slots a rebuild has looked at; of
a slab that is READY, how many slots up to CURSOR were looked at without finding a free one."""
SLAB_WORDS = 8
NO_SLAB, MAKING, READY, SCANNING, DROPPING = range(5)

DIGEST, _SECOND_OF_DIGEST, GENERATION, CLEARED, HITS, LAST, WRITTEN, PAGES = range(8)
"""Words of an identity: two of its digest; its generation; pages written up to then (milliseconds) were cleared; pages
hit, and when last (seconds); whether pages were written since it was cleared; how many there are, about: a kill
may make it wrong."""
IDENTITY_WORDS = 8

WAYS = 16
HITS_BITS = 3
MOST_HITS = (1 << HITS_BITS) - 1
DEPTH_BITS = 16
MOST_DEPTH = (1 << DEPTH_BITS) - 1
CLOCK_SHIFT = HITS_BITS + DEPTH_BITS
SAMPLE = (1 << 20) - 1
"""Bits of HASH that say whether the miniatures see a page."""
_SAMPLE_SHIFT = 24
HASH_OF_EVENT, MOMENT_OF_EVENT = range(2)
"""Words of an event: HASH of a page that was used or written; the clock << DEPTH_BITS | its place in the chain."""
NO_PAGE = eviction.MAX_PRIORITY
"""The rank of a slot that cannot be taken now."""
AT_ONCE = -1
"""The rank of a slot that is free, or holds what nobody can ask for any more."""

IN_ORDER, ONE_LENGTH, ONE_SLAB, FACTS = 1, 2, 4, 3
"""Facts about all pages that ``locate`` found: their places ascend; they have one payload length; they are in one slab.
So many bits."""

ROW_BITS = 40
ROW = (1 << ROW_BITS) - 1
TAG = (1 << 23) - 1
_LOW = (1 << 32) - 1
LEAST_SETS = 64

# -- hashes and sets ---------------------------------------------------------------------------------------------------
#
# Linear hashing: sets are added one by one, and a set that is added takes its entries from one other set.


# ``scrambled``, ``hash_words``, ``mixed``, ``state_for`` and ``is_current`` take arrays, too: lookup.py uses them.


def scrambled(word: Any) -> Any:
    """One word for each word, by shifts alone: neither Python nor numpy warns of them."""
    word = word ^ (word << 13)
    word = word ^ ((word >> 7) & ((1 << 57) - 1))
    return word ^ (word << 17)


def hash_words(first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """HASH of the words of a page hash: page hashes that differ in one word differ here."""
    return scrambled(scrambled(scrambled(scrambled(first) ^ second) ^ third) ^ fourth)


def hash_of(words: Words, of: int) -> int:
    """HASH of a key."""
    hashed: int = hash_words(words[of, 2], words[of, 3], words[of, 4], words[of, 5])
    return hashed


def mixed(hashed: Any, number: Any) -> Any:
    """Of a page: its low bits, which every bit of the key has a part in, choose the set; its high bits are the tag."""
    word = scrambled(hashed ^ (number << 7))
    word = word ^ ((word >> 32) & _LOW)
    word = word ^ ((word >> 16) & ((1 << 48) - 1))
    return word ^ ((word >> 8) & ((1 << 56) - 1))


def is_current(identities: Words, state: Any) -> Any:
    """Whether a page of this STATE was not cleared."""
    number = (state >> NUMBER_SHIFT) & (len(identities) - 1)
    return (state >> 8) & GENERATIONS == identities[number, GENERATION] & GENERATIONS


def state_for(memory: Parts, number: Any) -> Any:
    """The STATE of a page of this identity that was not cleared."""
    return PAGE | (memory.identities[number, GENERATION] & GENERATIONS) << 8 | number << NUMBER_SHIFT


def _mixed_of(memory: Parts, row: int) -> int:
    """``mixed`` of the page in a row."""
    word: int = mixed(memory.rows[row, HASH], memory.rows[row, STATE] >> NUMBER_SHIFT)
    return word


def _set_of(memory: Parts, word: int) -> int:
    """``word``: ``mixed``. LEVEL may be one step behind SETS or ahead of it, which makes no difference to the sets
    there are."""
    level = memory.header[LEVEL]
    at = word & (2 * level - 1)
    if at >= memory.header[SETS]:
        at = word & (level - 1)
    return int(at if 0 <= at < len(memory.sets) else 0)


def _entry(word: int, row: int) -> int:
    return ((word >> ROW_BITS) & TAG) << ROW_BITS | (row + 1)


def _row_of(memory: Parts, hashed: int, number: int, state: int) -> int:
    """The row of a page; -1 when there is none."""
    rows, sets = memory.rows, memory.sets
    word = mixed(hashed, number)
    at = _set_of(memory, word)
    tag = (word >> ROW_BITS) & TAG
    for way in range(WAYS):
        entry = sets[at, way]
        if entry >> ROW_BITS == tag:
            row = (entry & ROW) - 1
            if 0 <= row < len(rows) and rows[row, STATE] == state and rows[row, HASH] == hashed:
                return int(row)
    return -1


def _leave(memory: Parts, row: int) -> None:
    """Remove the entry of a page."""
    sets = memory.sets
    at = _set_of(memory, _mixed_of(memory, row))
    for way in range(WAYS):
        if sets[at, way] & ROW == row + 1:
            sets[at, way] = 0


def _free_page(memory: Parts, row: int) -> None:
    """Forget a page, which has its entry still, and free its slot."""
    _leave(memory, row)
    _uncount(memory, memory.rows[row, STATE])
    memory.rows[row, STATE] = FREE


def _uncount(memory: Parts, state: int) -> None:
    """One page of this STATE less."""
    identities = memory.identities
    if is_current(identities, state):
        identities[(state >> NUMBER_SHIFT) & (len(identities) - 1), PAGES] -= 1


def _enter(memory: Parts, word: int, row: int) -> int:
    """Add the entry of a page (``word``: ``mixed``). In a full set the page with the lowest priority goes. Returns how
    many did: 0 mostly."""
    rows, sets = memory.rows, memory.sets
    at = _set_of(memory, word)
    chosen, lowest, lost = -1, NO_PAGE, -1
    for way in range(WAYS):
        other = (sets[at, way] & ROW) - 1
        stale = other < 0 or other >= len(rows) or rows[other, STATE] & STATES != PAGE
        if not stale:
            stale = other == row or _entry(_mixed_of(memory, other), other) != sets[at, way]
        priority = AT_ONCE if stale else rows[other, PRIORITY]
        if chosen < 0 or priority < lowest:
            chosen, lowest, lost = way, priority, -1 if stale else other
    sets[at, chosen] = _entry(word, row)
    if lost < 0:
        return 0
    _uncount(memory, rows[lost, STATE])
    rows[lost, STATE] = FREE
    return 1


def grow_sets(memory: Parts, wanted: int) -> int:
    """Use so many sets. An entry is in its new set before it leaves the old one; a look-up that finds nothing looks
    again if SETS has changed. Returns the number of sets."""
    rows, sets, header = memory.rows, memory.sets, memory.header
    for new in range(max(1, header[SETS]), min(wanted, len(sets))):
        level = header[LEVEL]
        if new >= 2 * level:
            header[LEVEL] = level = 2 * level
        old, moved = new - level, 0
        if not 0 <= old < new:
            break
        for way in range(WAYS):
            sets[new, way] = 0
        for way in range(WAYS):
            row = (sets[old, way] & ROW) - 1
            if 0 <= row < len(rows) and _mixed_of(memory, row) & (2 * level - 1) == new:
                sets[new, moved] = sets[old, way]
                moved += 1
        header[SETS] = new + 1
        for way in range(WAYS):
            row = (sets[old, way] & ROW) - 1
            for other in range(moved):
                if row >= 0 and (sets[new, other] & ROW) - 1 == row:
                    sets[old, way] = 0
    return int(header[SETS])


# -- uses --------------------------------------------------------------------------------------------------------------


def is_sampled(hashed: int, sampled: int) -> bool:
    """Whether the miniatures see a page with this HASH, where they see so many of SAMPLE + 1."""
    return bool((hashed >> _SAMPLE_SHIFT) & SAMPLE < sampled)


def _note(memory: Parts, hashed: int, inserts: int, depth: int, sampled: int) -> bool:
    """Note a use for the miniatures if they see this page. Of two at the same moment one may be lost. Returns whether
    it counts: what finds no place does not, whether it would have been seen or not."""
    header, events = memory.header, memory.events
    noted = header[EVENTS]
    if noted - header[LEARNED] >= len(events):
        return False
    if is_sampled(hashed, sampled):
        events[noted % len(events), HASH_OF_EVENT] = hashed
        events[noted % len(events), MOMENT_OF_EVENT] = inserts << DEPTH_BITS | min(depth, MOST_DEPTH)
        header[EVENTS] = noted + 1
    return True


def _used(clock: int, depth: int, hits: int) -> int:
    """USED."""
    return clock << CLOCK_SHIFT | min(depth, MOST_DEPTH) << HITS_BITS | hits


def touch(memory: Parts, capacity: int, chain: Words, sampled: int) -> int:
    rows, header = memory.rows, memory.header
    changed, seen, before, leads = 0, 0, -1, True
    inserts, policy = header[INSERTS], header[POLICY]
    for depth in range(len(chain)):
        row = chain[depth]
        if row < 0 or row >= len(rows) or rows[row, STATE] & STATES != PAGE:
            before, leads = -1, False
            continue
        seen += leads and _note(memory, rows[row, HASH], inserts, depth, sampled)
        distance = eviction.reuse_distance(capacity, header[DISTANCE_SUM], header[REUSES])
        priority, word = rows[row, PRIORITY], rows[row, USED]
        used, place, hits = word >> CLOCK_SHIFT, (word >> HITS_BITS) & MOST_DEPTH, word & MOST_HITS
        if used < inserts - (min(capacity, distance) >> eviction.RENEWAL_SHIFT):
            summed, reuses = eviction.learned(header[DISTANCE_SUM], header[REUSES], max(0, inserts - used))
            header[DISTANCE_SUM], header[REUSES] = summed, reuses
            distance = eviction.reuse_distance(capacity, summed, reuses)
            hits, used = min(hits + 1, eviction.MAX_HITS), inserts
        priority = max(priority, eviction.priority_of(policy, capacity, inserts, distance, hits, False, depth))
        if before >= 0:
            priority = max(0, min(priority, before - 1))
        word = _used(used, place, hits)
        if priority != rows[row, PRIORITY] or word != rows[row, USED]:
            rows[row, PRIORITY], rows[row, USED] = priority, word
            changed += 1
        before = priority
    if sampled > 0:
        header[SEEN] += seen
    return changed


def rank_again(memory: Parts, capacity: int, most: int) -> int:
    rows, header = memory.rows, memory.header
    behind = min(header[TO_RANK], len(rows))
    begin = max(0, behind - most)
    distance = eviction.reuse_distance(capacity, header[DISTANCE_SUM], header[REUSES])
    for row in range(begin, behind):
        word = rows[row, USED]
        if rows[row, STATE] & STATES == PAGE and word >> CLOCK_SHIFT > 0:
            clock, depth, hits = word >> CLOCK_SHIFT, (word >> HITS_BITS) & MOST_DEPTH, word & MOST_HITS
            ranked = eviction.priority_of(header[POLICY], capacity, clock, distance, hits, False, depth)
            rows[row, PRIORITY] = max(0, ranked)
    header[TO_RANK] = begin
    return int(begin)


# -- ghosts: facts about pages that were evicted -----------------------------------------------------------------------
#
# ``ghosts[0]``, ``ghosts[1]`` and ``ghosts[2]``: fingerprints, numbers and uses, in sets of WAYS.


def _fingerprint(hashed: int, state: int) -> int:
    """Of a page of a generation of an identity; never 0."""
    fingerprint: int = scrambled(hashed ^ (state >> 8)) | 1
    return fingerprint


def _remember(memory: Parts, row: int) -> None:
    """Remember the evicted page of this row. It replaces its own older ghost, or else the oldest of its set."""
    rows, header, ghosts = memory.rows, memory.header, memory.ghosts
    if ghosts.shape[1] == 0:
        return
    header[REMEMBERED] += 1
    fingerprint = _fingerprint(rows[row, HASH], rows[row, STATE])
    of_set = (fingerprint >> 1 & _LOW) % ghosts.shape[1]
    chosen = 0
    for way in range(WAYS):
        if ghosts[0, of_set, way] == fingerprint:
            chosen = way
            break
        if ghosts[1, of_set, way] < ghosts[1, of_set, chosen]:
            chosen = way
    ghosts[0, of_set, chosen] = fingerprint
    ghosts[1, of_set, chosen] = header[REMEMBERED]
    ghosts[2, of_set, chosen] = rows[row, USED]


def _recall(memory: Parts, hashed: int, state: int, oldest: int) -> int:
    """Remove the ghost of this page; returns its USED, -1 without a ghost newer than ``oldest``."""
    ghosts = memory.ghosts
    if ghosts.shape[1] == 0:
        return -1
    fingerprint = _fingerprint(hashed, state)
    of_set = (fingerprint >> 1 & _LOW) % ghosts.shape[1]
    for way in range(WAYS):
        if ghosts[0, of_set, way] == fingerprint:
            number, uses = ghosts[1, of_set, way], ghosts[2, of_set, way]
            ghosts[0, of_set, way] = ghosts[1, of_set, way] = 0
            return uses if number > oldest else -1
    return -1


# -- slots -------------------------------------------------------------------------------------------------------------


def take_free(memory: Parts, known: Words, of_size: Words, pending: int, ticket: int, most: int, taken: Words) -> int:
    rows, table = memory.rows, memory.slabs
    done, looked = 0, 0
    for which in range(len(of_size)):
        slab = of_size[which]
        free, slots, first = table[slab, FREE_SLOTS], known[slab, SLOTS], known[slab, FIRST]
        if free <= 0 or table[slab, SLAB_STATE] != READY:
            continue
        at, before, looked_at = table[slab, CURSOR], done, table[slab, OF]
        left = slots - looked_at if 0 <= looked_at <= slots else slots
        while left > 0 and done < len(taken) and looked < most:
            if at >= slots or at < 0:
                at = 0
            row = first + at
            if rows[row, STATE] == FREE:
                rows[row, HASH] = ticket
                rows[row, STATE] = pending
                taken[done] = row
                done += 1
                left = slots
            at += 1
            left -= 1
            looked += 1
        table[slab, CURSOR] = at
        table[slab, OF] = slots - left if left > 0 else 0
        # A free slot that is not counted is found with the coldest.
        table[slab, FREE_SLOTS] = max(0, free - (done - before)) if left > 0 else 0
        if done == len(taken) or looked >= most:
            break
    return done


def _rank(memory: Parts, row: int, oldest: int, dead: Words) -> int:
    rows = memory.rows
    state = rows[row, STATE]
    kind = state & STATES
    if kind == PAGE:
        if not is_current(memory.identities, state) or rows[row, CREATED] < oldest:
            return AT_ONCE
        return int(max(0, min(rows[row, PRIORITY], NO_PAGE - 1)))
    if kind == PENDING:
        for one in dead:
            if state >> 8 == one:
                return AT_ONCE
        return NO_PAGE
    return AT_ONCE if kind == FREE else NO_PAGE


def evict(
    memory: Parts,
    victims: Words,
    spared: Words,
    headroom: int,
    oldest: int,
    dead: Words,
) -> int:
    rows, header = memory.rows, memory.header
    pages, kept = 0, 0
    for position in range(len(victims)):
        row = victims[position]
        if row < 0:
            break
        rank = _rank(memory, row, oldest, dead)
        if rank == NO_PAGE:
            continue
        if rank != AT_ONCE:
            if rows[row, HASH] in spared:
                raised = max(rank, eviction.ORIGIN + eviction.TICK * header[INSERTS]) + eviction.TICK * headroom
                rows[row, PRIORITY] = raised if raised < NO_PAGE - 1 else NO_PAGE - 1
                continue
            _remember(memory, row)
            pages += 1
        if rows[row, STATE] & STATES == PAGE:
            _free_page(memory, row)
        rows[row, STATE] = FREE
        victims[kept] = row
        kept += 1
    if kept < len(victims):
        victims[kept] = -1
    return pages


def evict_beside(
    memory: Parts,
    hashes: Words,
    states: Words,
    beside: Words,
    needed: Words,
    oldest: int,
    freed: Words,
) -> int:
    rows, identities = memory.rows, memory.identities
    count = 0
    for of in range(len(hashes)):
        state = states[of]
        number = (state >> NUMBER_SHIFT) & (len(identities) - 1)
        if state & STATES != PAGE or number >= len(beside) or not is_current(identities, state):
            continue
        hashed = hashes[of]
        for way in range(beside.shape[1]):
            other = beside[number, way]
            if other < 0 or count == len(freed):
                break
            row = _row_of(memory, hashed, other, state_for(memory, other))
            if row < 0 or rows[row, CREATED] < oldest:
                continue
            lost = other < len(needed)
            for place in range(needed.shape[1]):
                if not lost or needed[other, place] < 0:
                    break
                leader = needed[other, place]
                lost = _row_of(memory, hashed, leader, state_for(memory, leader)) < 0
            if lost:
                _remember(memory, row)
                _free_page(memory, row)
                freed[count] = row
                count += 1
    return count


def seize(memory: Parts, found: Words, pending: int, ticket: int) -> int:
    rows = memory.rows
    count = 0
    for position in range(len(found)):
        row = found[position]
        if row < 0 or rows[row, STATE] & STATES != PAGE:
            found[position] = -1
            continue
        _free_page(memory, row)
        rows[row, HASH] = ticket
        rows[row, STATE] = pending
        count += 1
    return count


def give_back(memory: Parts, taken: Words, pending: int, ticket: int) -> int:
    rows = memory.rows
    count = 0
    for row in taken:
        if row >= 0 and rows[row, STATE] == pending and rows[row, HASH] == ticket:
            rows[row, STATE] = FREE
            count += 1
    return count


# -- writing pages -----------------------------------------------------------------------------------------------------


def _make_page(memory: Parts, row: int, hashed: int, number: int, state: int) -> int:
    """The first store makes the row a page. Returns how many pages its entry has cost."""
    memory.rows[row, STATE] = state
    lost = _enter(memory, mixed(hashed, number), row)
    memory.identities[number, WRITTEN] = 1
    memory.identities[number, PAGES] += 1
    return lost


def publish(
    memory: Parts,
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
) -> int:
    rows, header = memory.rows, memory.header
    oldest_ghost = max(0, header[REMEMBERED] - ghost_limit)
    inserts, distance_sum, reuses = header[INSERTS], header[DISTANCE_SUM], header[REUSES]
    distance = eviction.reuse_distance(capacity, distance_sum, reuses)
    policy, moment, seen = header[POLICY], inserts, 0
    highest = NO_PAGE - 1
    freed = 0
    for of in range(len(taken)):
        row, key = taken[of], positions[of]
        number = numbers[key if len(numbers) > 1 else 0]
        if of == 0 or key == 0 or positions[of - 1] != key - 1:
            highest = NO_PAGE - 1
            if key > 0:
                before_number = numbers[key - 1 if len(numbers) > 1 else 0]
                before_state = state_for(memory, before_number)
                before = _row_of(memory, hash_of(keys, key - 1), before_number, before_state)
                # Without it nobody can ask for this page.
                highest = max(0, rows[before, PRIORITY] - 1) if before >= 0 else 0
        if rows[row, STATE] != pending or rows[row, HASH] != ticket or number < 0:
            published[of] = -1
            continue
        hashed, state = hash_of(keys, key), state_for(memory, number)
        there = _row_of(memory, hashed, number, state)
        if there >= 0 and rows[there, CREATED] >= oldest:
            published[of] = 0
            rows[row, STATE] = FREE
            freed += 1
            highest = max(0, rows[there, PRIORITY] - 1)
            continue
        if there >= 0:
            _free_page(memory, there)
            freed += 1
        inserts += 1
        hits = 0
        ghost = _recall(memory, hashed, state, oldest_ghost)
        if ghost >= 0:
            distance_sum, reuses = eviction.learned(distance_sum, reuses, max(0, inserts - (ghost >> CLOCK_SHIFT)))
            distance = eviction.reuse_distance(capacity, distance_sum, reuses)
            hits = min((ghost & MOST_HITS) + 1, eviction.MAX_HITS)
        seen += _note(memory, hashed, moment, key, sampled)
        priority = max(0, min(highest, eviction.priority_of(policy, capacity, inserts, distance, hits, True, key)))
        rows[row, HASH], rows[row, LENGTH], rows[row, CREATED] = hashed, lengths[of], created
        rows[row, PRIORITY], rows[row, USED] = priority, _used(inserts, key, hits)
        freed += _make_page(memory, row, hashed, number, state)
        published[of] = 1
        highest = max(0, priority - 1)
    if sampled > 0:
        header[SEEN] += seen
    header[INSERTS], header[DISTANCE_SUM], header[REUSES] = inserts, distance_sum, reuses
    return freed


def adopt(
    memory: Parts,
    keys: Words,
    numbers: Words,
    lengths: Words,
    created: Words,
    seals: Words,
    first: int,
    slot_size: int,
    now: int,
) -> int:
    rows, identities = memory.rows, memory.identities
    found = 0
    for of in range(len(keys)):
        row, number = first + of, numbers[of]
        if rows[row, STATE] != UNKNOWN:
            continue
        # Before it is known whether the page was cleared: a clear meanwhile leaves it a generation that is over.
        state = state_for(memory, max(0, number))
        if number < 0 or lengths[of] < 0 or lengths[of] > slot_size or created[of] <= identities[number, CLEARED]:
            rows[row, STATE] = FREE
            continue
        hashed = hash_of(keys, of)
        there = _row_of(memory, hashed, number, state)
        if there >= 0:
            if rows[there, CREATED] >= created[of]:
                rows[row, STATE] = FREE
                continue
            _free_page(memory, there)
            found -= 1
        rows[row, HASH], rows[row, LENGTH], rows[row, CREATED] = hashed, lengths[of], created[of]
        rows[row, SEAL], rows[row, _SECOND_OF_SEAL] = seals[of, 0], seals[of, 1]
        rows[row, PRIORITY] = max(0, eviction.ORIGIN - max(0, now - created[of]))
        rows[row, USED] = 0
        found += 1 - _make_page(memory, row, hashed, number, state)
    return found

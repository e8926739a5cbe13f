"""The operations on the mapped words of an index (slot_table.py), page by page: compiled where numba is there.

All words are int64. ``records``: a row per slot. ``groups``: per slab, from row ``BASE`` on, its summary and then a row
per group of neighbouring slots. ``buckets``: a hash table of the pages. ``slabs``: a row per slab, by number.

Records are the truth; the rest follows from them (``settle_all``) and is updated here. Callers hold the index's lock,
except those of ``find`` and ``locate``: they may read words that change, so an answer may be about a page that has just
gone or come. What is read from a slot is checked by its seal.

A record is free or pending until all of it is written: ``describe_pages`` writes it, and another call,
``publish_pages``, makes it a page. No compiler moves a store from one call to the other.
"""

from __future__ import annotations

import numpy as np

from hicache_ext.runtime.jit import helper, kernel
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.slab.mapped import Words

KEY_WORDS = 6
OBJECT, STATE, PRIORITY, USED, HASH, PLACE = range(KEY_WORDS, KEY_WORDS + 6)
"""Words of a record behind the page key (identity, page hash): when written (wall-clock seconds) << 32 | payload bytes;
state | hits << 8 | generation << 16; rank; hash of the key; slab << 32 | slot."""
RECORD_WORDS = PLACE + 1
FREE, PENDING, PAGE = range(3)
"""States. In a pending slot the key words name its writer, and OBJECT is BEING_WRITTEN."""
BEING_WRITTEN = -1

LOWEST, FREE_SLOTS, PENDING_SLOTS = range(3)
"""Words of a group: the lowest priority of its pages; a bit for each free slot; a bit for each pending slot. Words of a
summary: the lowest priority; the numbers of free and of pending slots."""
GROUP_WORDS = 3
NO_PAGE = eviction.MAX_PRIORITY
"""The lowest priority of a group or slab without pages."""

NUMBER, SLOT_SIZE, SLOTS, TOGETHER, BASE = range(5)
"""Words of a slab: TOGETHER slots make a group; its records begin at row BASE."""
SLAB_WORDS = 5

CLOCK_SIZE, INSERTS, DISTANCE_SUM, REUSES = range(4)
"""Words of a clock (eviction.py): the slot size, and ``Clock``."""
CLOCK_WORDS = 4

WAYS = 16
"""Places in a set of ghosts (ghosts.py)."""
HITS_BITS = 3

STALE, IN_ORDER, LENGTH, SLAB = range(4)
"""Facts about all pages that ``locate`` found: 1 when the use of one is worth a note; 1 when their places ascend; the
payload length and the slab of all, SEVERAL where they differ."""
SEVERAL = -1

LOW = (1 << 32) - 1
"""The lower half of a word."""
_POSITIVE = (1 << 63) - 1
TAG = (1 << 31) - 1
"""The bits of a hash in an entry of the hash table."""

_reuse_distance = helper(eviction.reuse_distance)
_learned = helper(eviction.learned)
_priority_of = helper(eviction.priority_of)


# -- the hash table ----------------------------------------------------------------------------------------------------
#
# Open addressing with linear probing, at most half full. No loop goes around more than once: a damaged table may have
# no empty place. An entry is the low 31 bits of the hash, then the row + 1. Removing an entry moves those behind it
# that would no longer be found.


@helper
def _hash_of(words: Words, row: int) -> int:
    """Page hashes are uniform; folding helps those of tests, and keys that differ in one byte."""
    mixed = words[row, 0] ^ words[row, 1] ^ words[row, 2] ^ words[row, 3] ^ words[row, 4] ^ words[row, 5]
    mixed &= _POSITIVE
    mixed ^= mixed >> 32
    mixed ^= mixed >> 16
    return int(mixed ^ (mixed >> 8))


@helper
def _has_key(records: Words, row: int, words: Words, of: int, generation: int) -> bool:
    """Whether a slot holds the page with this key."""
    state = records[row, STATE]
    same = state & 0xFF == PAGE and state >> 16 == generation
    for word in range(KEY_WORDS - 1, -1, -1):  # noqa: SIM110 - all() of a generator is not compiled
        if not same or records[row, word] != words[of, word]:
            return False
    return True


@helper
def _row_of(records: Words, buckets: Words, words: Words, of: int, generation: int) -> int:
    """The row of the page with this key; -1 when there is none."""
    mask = len(buckets) - 1
    wanted = _hash_of(words, of)
    tag = wanted & TAG
    at = wanted & mask
    for _ in range(len(buckets)):
        entry = buckets[at]
        if entry == 0:
            return -1
        if entry >> 32 == tag:
            row = int(entry & LOW) - 1
            if 0 <= row < len(records) and _has_key(records, row, words, of, generation):
                return row
        at = (at + 1) & mask
    return -1


@helper
def _enter(buckets: Words, wanted: int, row: int) -> None:
    mask = len(buckets) - 1
    at = wanted & mask
    for _ in range(len(buckets)):
        if buckets[at] == 0:
            buckets[at] = (wanted & TAG) << 32 | (row + 1)
            return
        at = (at + 1) & mask


@helper
def _leave(records: Words, buckets: Words, row: int) -> None:
    mask = len(buckets) - 1
    at = records[row, HASH] & mask
    hole = -1
    for _ in range(len(buckets)):
        if buckets[at] == 0:
            return
        if buckets[at] & LOW == row + 1:
            hole = at
            break
        at = (at + 1) & mask
    if hole < 0:
        return
    for _ in range(len(buckets)):
        at = (at + 1) & mask
        entry = buckets[at]
        if entry == 0:
            break
        # An entry moves into the hole unless its home is behind the hole.
        home = (entry >> 32) & mask
        if (at - home) & mask >= (at - hole) & mask:
            buckets[hole] = entry
            hole = at
    buckets[hole] = 0


# -- slabs and groups --------------------------------------------------------------------------------------------------


@helper
def _index_of_slab(slabs: Words, number: int) -> int:
    """The row of a slab in ``slabs``; -1 when there is none."""
    low, high = 0, len(slabs)
    while low < high:
        middle = (low + high) // 2
        if slabs[middle, NUMBER] < number:
            low = middle + 1
        else:
            high = middle
    return low if low < len(slabs) and slabs[low, NUMBER] == number else -1


@helper
def _row_at(slabs: Words, number: int, slot: int) -> int:
    """The row of a slot; -1 when it is in no slab."""
    slab = _index_of_slab(slabs, number)
    if slab < 0 or slot < 0 or slot >= slabs[slab, SLOTS]:
        return -1
    return int(slabs[slab, BASE] + slot)


@helper
def _settle_group(records: Words, groups: Words, slabs: Words, slab: int, group: int) -> None:
    """Recompute the row of a group, and its part of the summary, from its records."""
    together, base = slabs[slab, TOGETHER], slabs[slab, BASE]
    first = group * together
    lowest, free, pending = NO_PAGE, 0, 0
    free_count, pending_count = 0, 0
    for offset in range(min(together, slabs[slab, SLOTS] - first)):
        state = records[base + first + offset, STATE] & 0xFF
        if state == PAGE:
            lowest = min(lowest, records[base + first + offset, PRIORITY])
        elif state == PENDING:
            pending |= 1 << offset
            pending_count += 1
        else:
            free |= 1 << offset
            free_count += 1
    row = base + 1 + group
    free_before, pending_before = 0, 0
    for offset in range(together):
        free_before += groups[row, FREE_SLOTS] >> offset & 1
        pending_before += groups[row, PENDING_SLOTS] >> offset & 1
    groups[row, LOWEST], groups[row, FREE_SLOTS], groups[row, PENDING_SLOTS] = lowest, free, pending
    groups[base, FREE_SLOTS] += free_count - free_before
    groups[base, PENDING_SLOTS] += pending_count - pending_before


@helper
def _first_lowest(groups: Words, begin: int, end: int) -> int:
    """The first of these rows with the lowest priority; there is at least one row."""
    found = begin
    for row in range(begin + 1, end):
        if groups[row, LOWEST] < groups[found, LOWEST]:
            found = row
    return found


@helper
def _settle_lowest(groups: Words, slabs: Words, slab: int) -> None:
    """Recompute the lowest priority of a slab from its groups."""
    base = slabs[slab, BASE]
    end = base + 1 + -(-slabs[slab, SLOTS] // slabs[slab, TOGETHER])
    groups[base, LOWEST] = groups[_first_lowest(groups, base + 1, end), LOWEST]


@helper
def _settle_rows(records: Words, groups: Words, slabs: Words, rows: Words) -> None:
    """Recompute the groups and slabs of these slots; those of neighbours once. A row may be -1.

    A row may be in no slab, or its record may be damaged: every value is checked before it is used as an index."""
    slab, group, number = -1, -1, -1
    for row in rows:
        if row < 0:
            continue
        number = records[row, PLACE] >> 32
        if slab < 0 or slabs[slab, NUMBER] != number:
            if slab >= 0:
                _settle_lowest(groups, slabs, slab)
            slab, group = _index_of_slab(slabs, number), -1
        if slab < 0 or row < slabs[slab, BASE] or row >= slabs[slab, BASE] + slabs[slab, SLOTS]:
            continue
        of_row = (row - slabs[slab, BASE]) // slabs[slab, TOGETHER]
        if of_row != group:
            group = of_row
            _settle_group(records, groups, slabs, slab, group)
    if slab >= 0:
        _settle_lowest(groups, slabs, slab)


_TABLE = "int64[:, ::1], int64[:, ::1], int64[::1], int64[:, ::1]"
"""``records, groups, buckets, slabs``"""


@helper
def _settle_slab(records: Words, groups: Words, buckets: Words, slabs: Words, slab: int) -> int:
    """``settle_all`` for one slab, none of whose pages is in ``buckets``."""
    base, slots = slabs[slab, BASE], slabs[slab, SLOTS]
    dropped = 0
    for slot in range(slots):
        row = base + slot
        records[row, PLACE] = slabs[slab, NUMBER] << 32 | slot
        state = records[row, STATE] & 0xFF
        if state == FREE:
            records[row, STATE] = FREE
            continue
        true = records[row, HASH] == _hash_of(records, row)
        records[row, PRIORITY] = max(0, min(records[row, PRIORITY], NO_PAGE - 1))
        if state == PAGE:
            length = records[row, OBJECT] & LOW
            generation = records[row, STATE] >> 16
            true = true and records[row, OBJECT] >= 0 and length <= slabs[slab, SLOT_SIZE]
            true = true and _row_of(records, buckets, records, row, generation) < 0
        else:
            true = true and state == PENDING and records[row, OBJECT] == BEING_WRITTEN
        if not true:
            records[row, STATE] = FREE
            dropped += 1
        elif state == PAGE:
            _enter(buckets, records[row, HASH], row)
    number = -(-slots // slabs[slab, TOGETHER])
    for group in range(number + 1):
        groups[base + group, LOWEST] = NO_PAGE
        groups[base + group, FREE_SLOTS] = groups[base + group, PENDING_SLOTS] = 0
    for group in range(number):
        _settle_group(records, groups, slabs, slab, group)
    _settle_lowest(groups, slabs, slab)
    return dropped


@kernel(f"int64({_TABLE})")
def settle_all(records: Words, groups: Words, buckets: Words, slabs: Words) -> int:
    """Rebuild groups and buckets from the records. Slots with an impossible record become free; returns their
    number."""
    for at in range(len(buckets)):
        buckets[at] = 0
    dropped = 0
    for slab in range(len(slabs)):
        dropped += _settle_slab(records, groups, buckets, slabs, slab)
    return dropped


@kernel(f"int64({_TABLE}, int64)")
def settle_new(records: Words, groups: Words, buckets: Words, slabs: Words, number: int) -> int:
    """``settle_all`` for one slab whose slots are all free."""
    slab = _index_of_slab(slabs, number)
    return _settle_slab(records, groups, buckets, slabs, slab) if slab >= 0 else 0


@helper
def _row_behind(records: Words, buckets: Words, words: Words, of: int, generation: int, before: int) -> int:
    """``_row_of``, trying the record behind row ``before`` first (-1: none). Pages written together are neighbours, and
    the next record is in the processor's cache, where the hash table is not."""
    following = before + 1
    if 0 < following < len(records) and _has_key(records, following, words, of, generation):
        return following
    return _row_of(records, buckets, words, of, generation)


# -- looking up --------------------------------------------------------------------------------------------------------


@kernel("int64(int64[:, ::1], int64[::1], int64[:, ::1], int64[::1], int64, int64[::1], int64)")
def find(
    records: Words, buckets: Words, keys: Words, generations: Words, oldest: int, rows: Words, leading: int
) -> int:
    """``rows[n]``: where the page ``keys[n]`` is, -1 for nowhere, or written before ``oldest``. One generation for all,
    or one each. With ``leading`` up to the first -1. The number of pages looked up and, but for the last one then,
    found."""
    row = -1
    for of in range(len(keys)):
        row = _row_behind(records, buckets, keys, of, generations[of if len(generations) > 1 else 0], row)
        there = row >= 0 and records[row, OBJECT] >> 32 >= oldest
        rows[of] = row if there else -1
        if leading != 0 and not there:
            return of
    return len(keys)


@kernel(
    "int64(int64[:, ::1], int64[::1], int64[:, ::1], int64[::1], int64, int64[:, ::1], int64[::1], int64[:, ::1], "
    "int64[::1])"
)
def locate(
    records: Words,
    buckets: Words,
    keys: Words,
    generations: Words,
    oldest: int,
    slabs: Words,
    fresh: Words,
    located: Words,
    found: Words,
) -> int:
    """Find the pages that are present and not written before ``oldest``. Slab, slot, payload length and position in
    ``keys`` go into the rows of ``located``, facts about all of them into ``found`` (see STALE). ``fresh[n]``: of the
    slab in row ``n``. Returns the number of pages found."""
    count, row = 0, -1
    stale, in_order, length, only, last = 0, 1, SEVERAL, SEVERAL, -1
    for of in range(len(keys)):
        row = _row_behind(records, buckets, keys, of, generations[of if len(generations) > 1 else 0], row)
        if row < 0:
            continue
        stored, place = records[row, OBJECT], records[row, PLACE]
        if stored >> 32 < oldest:
            continue
        located[0, count] = place >> 32
        located[1, count] = place & LOW
        located[2, count] = stored & LOW
        located[3, count] = of
        slab = _index_of_slab(slabs, place >> 32)
        if slab >= 0 and records[row, USED] < fresh[slab]:
            stale = 1
        if place <= last:
            in_order = 0
        if count == 0:
            length, only = stored & LOW, place >> 32
        if length != stored & LOW:
            length = SEVERAL
        if only != place >> 32:
            only = SEVERAL
        last = place
        count += 1
    found[STALE], found[IN_ORDER], found[LENGTH], found[SLAB] = stale, in_order, length, only
    return count


# -- ghosts ------------------------------------------------------------------------------------------------------------
#
# ``ghosts[0]``, ``ghosts[1]`` and ``ghosts[2]``: fingerprints, numbers and uses, in sets of WAYS.


@helper
def _fingerprint(hashed: int, generation: int) -> int:
    return hashed ^ (generation << 40) ^ 1 << 62


@helper
def _remember(records: Words, row: int, ghosts: Words, remembered: Words) -> None:
    """Remember the evicted page of this row. It replaces its own older ghost, or else the oldest of its set."""
    if ghosts.shape[1] == 0:
        return
    remembered[0] += 1
    state = records[row, STATE]
    fingerprint = _fingerprint(records[row, HASH], state >> 16)
    of_set = fingerprint % ghosts.shape[1]
    chosen = 0
    for way in range(WAYS):
        if ghosts[0, of_set, way] == fingerprint:
            chosen = way
            break
        if ghosts[1, of_set, way] < ghosts[1, of_set, chosen]:
            chosen = way
    ghosts[0, of_set, chosen] = fingerprint
    ghosts[1, of_set, chosen] = remembered[0]
    ghosts[2, of_set, chosen] = records[row, USED] << HITS_BITS | (state >> 8 & 0xFF)


@helper
def _recall(hashed: int, generation: int, ghosts: Words, oldest: int) -> int:
    """Remove the ghost of this page; returns its uses, -1 without a ghost newer than ``oldest``."""
    if ghosts.shape[1] == 0:
        return -1
    fingerprint = _fingerprint(hashed, generation)
    of_set = fingerprint % ghosts.shape[1]
    for way in range(WAYS):
        if ghosts[0, of_set, way] == fingerprint:
            number, uses = ghosts[1, of_set, way], ghosts[2, of_set, way]
            ghosts[0, of_set, way] = ghosts[1, of_set, way] = 0
            return uses if number > oldest else -1
    return -1


# -- slots -------------------------------------------------------------------------------------------------------------


@kernel(f"int64({_TABLE}, int64, int64[::1], int64[:, ::1])")
def take_free(
    records: Words, groups: Words, buckets: Words, slabs: Words, slot_size: int, writer: Words, taken: Words
) -> int:
    """Make free slots of this size pending, in order of place, up to the columns of ``taken``: slabs and slots, a row
    of ``taken`` each. ``writer``: the key words of a pending slot. Returns their number."""
    done, count = 0, taken.shape[1]
    for slab in range(len(slabs)):
        base, together = slabs[slab, BASE], slabs[slab, TOGETHER]
        if slabs[slab, SLOT_SIZE] != slot_size or groups[base, FREE_SLOTS] == 0 or done == count:
            continue
        for group in range(-(-slabs[slab, SLOTS] // together)):
            free = groups[base + 1 + group, FREE_SLOTS]
            if free == 0:
                continue
            for offset in range(min(together, slabs[slab, SLOTS] - group * together)):
                row = base + group * together + offset
                # The record decides, too: a wrong bit must not cost a page.
                if free >> offset & 1 and done < count and records[row, STATE] & 0xFF == FREE:
                    records[row, OBJECT] = BEING_WRITTEN
                    for word in range(KEY_WORDS):
                        records[row, word] = writer[word]
                    records[row, HASH] = _hash_of(records, row)
                    records[row, STATE] = PENDING
                    taken[0, done] = slabs[slab, NUMBER]
                    taken[1, done] = group * together + offset
                    done += 1
            _settle_group(records, groups, slabs, slab, group)
            if done == count:
                break
    return done


@kernel("int64(int64[:, ::1], int64[:, ::1], int64, int64)")
def count_free(groups: Words, slabs: Words, slot_size: int, at_most: int) -> int:
    """How many slots of this size are free; ``at_most`` when there are more."""
    count = 0
    for slab in range(len(slabs)):
        if slabs[slab, SLOT_SIZE] == slot_size:
            count += groups[slabs[slab, BASE], FREE_SLOTS]
    return min(count, at_most)


@helper
def _raised(priority: int, by: int) -> int:
    return priority + by if priority < NO_PAGE - 1 - by else NO_PAGE - 1


@helper
def _spared(records: Words, row: int, spared: Words) -> int:
    """Whether the page has one of the hashes whose first words are in ``spared``, sorted."""
    low, high = 0, len(spared)
    while low < high:
        middle = (low + high) // 2
        if spared[middle] < records[row, 2]:
            low = middle + 1
        else:
            high = middle
    return low < len(spared) and spared[low] == records[row, 2]


@kernel(f"int64({_TABLE}, int64, int64, int64, int64, int64[::1], int64[:, :, ::1], int64[::1])")
def evict_pages(
    records: Words,
    groups: Words,
    buckets: Words,
    slabs: Words,
    slot_size: int,
    count: int,
    soon: int,
    headroom: int,
    spared: Words,
    ghosts: Words,
    remembered: Words,
) -> int:
    """Evict at least ``count`` pages of this size, if there are so many: those with the lowest priority, each with the
    pages of its group whose priority is at most ``soon`` above. Returns their number.

    ``spared``: see ``_spared``. The priority of such a page is raised by ``headroom`` instead, at most once per slot.
    """
    gone = 0
    may_spare = headroom if len(spared) > 0 else 0
    while gone < count:
        slab, lowest = -1, NO_PAGE
        for candidate in range(len(slabs)):
            if slabs[candidate, SLOT_SIZE] == slot_size and groups[slabs[candidate, BASE], LOWEST] < lowest:
                slab, lowest = candidate, groups[slabs[candidate, BASE], LOWEST]
        if slab < 0:
            break
        base, together, slots = slabs[slab, BASE], slabs[slab, TOGETHER], slabs[slab, SLOTS]
        group = _first_lowest(groups, base + 1, base + 1 + -(-slots // together)) - base - 1
        first = base + group * together
        end = min(first + together, base + slots)
        if may_spare > 0:
            # The page with the lowest priority.
            victim = -1
            for row in range(first, end):
                if victim < 0 and records[row, STATE] & 0xFF == PAGE and records[row, PRIORITY] == lowest:
                    victim = row
            if victim >= 0 and _spared(records, victim, spared):
                records[victim, PRIORITY] = _raised(lowest, headroom)
                may_spare -= 1
                _settle_group(records, groups, slabs, slab, group)
                _settle_lowest(groups, slabs, slab)
                continue
        before = gone
        for row in range(first, end):
            if records[row, STATE] & 0xFF != PAGE or records[row, PRIORITY] > _raised(lowest, soon):
                continue
            if may_spare > 0 and _spared(records, row, spared):
                continue
            _leave(records, buckets, row)
            _remember(records, row, ghosts, remembered)
            records[row, STATE] = FREE
            gone += 1
        _settle_group(records, groups, slabs, slab, group)
        _settle_lowest(groups, slabs, slab)
        if gone == before and groups[base + 1 + group, LOWEST] == lowest:
            # No page where there must be one: the summary is wrong.
            break
    return gone


@helper
def _free_slots(records: Words, groups: Words, buckets: Words, slabs: Words, rows: Words, state: int) -> int:
    """Free those of these slots that are in this state; returns their number. A row may be -1."""
    freed = 0
    for row in rows:
        if row >= 0 and records[row, STATE] & 0xFF == state:
            if state == PAGE:
                _leave(records, buckets, row)
            records[row, STATE] = FREE
            freed += 1
    _settle_rows(records, groups, slabs, rows)
    return freed


@kernel(f"int64({_TABLE}, int64[::1])")
def forget_pages(records: Words, groups: Words, buckets: Words, slabs: Words, rows: Words) -> int:
    """Free the slots of these pages; returns their number. A row may be -1."""
    return _free_slots(records, groups, buckets, slabs, rows, PAGE)


@kernel(f"int64({_TABLE}, int64[::1])")
def give_back(records: Words, groups: Words, buckets: Words, slabs: Words, rows: Words) -> int:
    """Free those of these slots that are pending; returns their number. A row may be -1."""
    return _free_slots(records, groups, buckets, slabs, rows, PENDING)


# -- writing pages -----------------------------------------------------------------------------------------------------


@kernel("int64(int64[:, ::1], int64[:, ::1], int64[::1], int64[:, ::1], int64[::1])")
def rows_pending(records: Words, slabs: Words, writer: Words, places: Words, rows: Words) -> int:
    """Set ``rows`` to the rows of these places (slab, slot: a row each), -1 for those not pending for this writer.
    Returns the number of the others."""
    count = 0
    for of in range(places.shape[1]):
        row = _row_at(slabs, places[0, of], places[1, of])
        if row >= 0 and records[row, STATE] & 0xFF != PENDING:
            row = -1
        for word in range(KEY_WORDS):
            if row >= 0 and records[row, word] != writer[word]:
                row = -1
        rows[of] = row
        count += row >= 0
    return count


@kernel(
    "void(int64[:, ::1], int64[::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64, "
    "int64[::1], int64, int64[:, :, ::1], int64[::1], int64)"
)
def describe_pages(
    records: Words,
    buckets: Words,
    keys: Words,
    generations: Words,
    positions: Words,
    rows: Words,
    lengths: Words,
    created: Words,
    linked: int,
    clock: Words,
    capacity: int,
    ghosts: Words,
    remembered: Words,
    ghost_limit: int,
) -> None:
    """Write the records of pages of one slot size, which stay pending: page ``keys[positions[n]]`` is in slot
    ``rows[n]`` and was written at ``created[n]`` (one value: all at that time). Pages at consecutive positions are a
    chain (``PageByPage.inserted``); without ``linked``, each page is a chain of its own."""
    oldest = max(0, remembered[0] - ghost_limit)
    inserts, distance_sum, reuses = clock[INSERTS], clock[DISTANCE_SUM], clock[REUSES]
    distance = _reuse_distance(capacity, distance_sum, reuses)
    highest = NO_PAGE - 1
    for of in range(len(rows)):
        row, key = rows[of], positions[of]
        depth = key if linked != 0 else 0
        generation = generations[key if len(generations) > 1 else 0]
        if of == 0 or depth == 0 or positions[of - 1] != depth - 1:
            highest = NO_PAGE - 1
            before = -1
            if depth > 0:
                of_before = generations[depth - 1 if len(generations) > 1 else 0]
                before = _row_of(records, buckets, keys, depth - 1, of_before)
            if before >= 0:
                highest = max(0, records[before, PRIORITY] - 1)
        for word in range(KEY_WORDS):
            records[row, word] = keys[key, word]
        records[row, HASH] = _hash_of(keys, key)
        records[row, OBJECT] = created[of if len(created) > 1 else 0] << 32 | lengths[of]
        inserts += 1
        hits = 0
        ghost = _recall(records[row, HASH], generation, ghosts, oldest)
        if ghost >= 0:
            distance_sum, reuses = _learned(distance_sum, reuses, max(0, inserts - (ghost >> HITS_BITS)))
            distance = _reuse_distance(capacity, distance_sum, reuses)
            hits = min((ghost & ((1 << HITS_BITS) - 1)) + 1, eviction.MAX_HITS)
        priority = max(0, min(highest, _priority_of(capacity, inserts, distance, hits, depth)))
        records[row, PRIORITY], records[row, USED] = priority, inserts
        records[row, STATE] = PENDING | hits << 8 | generation << 16
        highest = max(0, priority - 1)
    clock[INSERTS], clock[DISTANCE_SUM], clock[REUSES] = inserts, distance_sum, reuses


@kernel(f"int64({_TABLE}, int64[::1], int64[::1])")
def publish_pages(records: Words, groups: Words, buckets: Words, slabs: Words, rows: Words, published: Words) -> int:
    """Make pages of the records of ``describe_pages``. ``published[n]`` is 0 for a page that exists already: its slot
    becomes free. Returns the number of the others."""
    count = 0
    for of in range(len(rows)):
        row = rows[of]
        state = records[row, STATE]
        if _row_of(records, buckets, records, row, state >> 16) >= 0:
            published[of] = 0
            records[row, STATE] = FREE
        else:
            published[of] = 1
            _enter(buckets, records[row, HASH], row)
            records[row, STATE] = state - PENDING + PAGE
            count += 1
    _settle_rows(records, groups, slabs, rows)
    return count


@kernel(f"int64({_TABLE}, int64[:, ::1], int64[::1], int64[:, ::1], int64[::1])")
def touch_chain(
    records: Words,
    groups: Words,
    buckets: Words,
    slabs: Words,
    keys: Words,
    generations: Words,
    clocks: Words,
    capacities: Words,
) -> int:
    """Note a use of the leading pages of a chain (``PageByPage.renewed``); returns how many got another rank.
    ``clocks``: a row per slot size; ``capacities``: the slots of each."""
    changed = 0
    before = -1
    rows = np.empty(len(keys), np.int64)
    for depth in range(len(keys)):
        generation = generations[depth if len(generations) > 1 else 0]
        row = _row_of(records, buckets, keys, depth, generation)
        rows[depth] = -1
        if row < 0:
            before = -1
            continue
        slab = _index_of_slab(slabs, records[row, PLACE] >> 32)
        if slab < 0:
            before = -1
            continue
        of = 0
        while of < len(clocks) - 1 and clocks[of, CLOCK_SIZE] != slabs[slab, SLOT_SIZE]:
            of += 1
        inserts, capacity = clocks[of, INSERTS], capacities[of]
        distance = _reuse_distance(capacity, clocks[of, DISTANCE_SUM], clocks[of, REUSES])
        priority, used = records[row, PRIORITY], records[row, USED]
        hits = records[row, STATE] >> 8 & 0xFF
        if used < inserts - (min(capacity, distance) >> eviction.RENEWAL_SHIFT):
            summed, reuses = _learned(clocks[of, DISTANCE_SUM], clocks[of, REUSES], max(0, inserts - used))
            clocks[of, DISTANCE_SUM], clocks[of, REUSES] = summed, reuses
            distance = _reuse_distance(capacity, summed, reuses)
            hits, used = min(hits + 1, eviction.MAX_HITS), inserts
            priority = max(priority, _priority_of(capacity, inserts, distance, hits, depth))
        if before >= 0:
            priority = max(0, min(priority, before - 1))
        if priority != records[row, PRIORITY] or used != records[row, USED]:
            records[row, PRIORITY], records[row, USED] = priority, used
            records[row, STATE] = records[row, STATE] >> 16 << 16 | hits << 8 | PAGE
            rows[depth] = row
            changed += 1
        before = priority
    if changed > 0:
        _settle_rows(records, groups, slabs, rows)
    return changed

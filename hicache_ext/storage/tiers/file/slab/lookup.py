"""Pages looked up in the words of an index, and the coldest slots found there, by numpy for all of them at once: the
plain way of index_words.py, which says what each function does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory
from hicache_ext.storage.tiers.file.slab.slot_code import (
    AT_ONCE,
    CREATED,
    FIRST,
    FREE,
    HASH,
    IN_ORDER,
    LENGTH,
    NO_PAGE,
    ONE_LENGTH,
    ONE_SLAB,
    PAGE,
    PENDING,
    PRIORITY,
    SETS,
    SLAB_NUMBER,
    SLOTS,
    STATE,
    STATES,
    Words,
)

_LOW = (1 << 32) - 1
_FIRST_PORTION = 64
_PORTION = 4096
"""Keys of a chain that numpy looks up at once: a chain that ends early costs no more than that."""


def find(memory: IndexMemory, keys: Words, numbers: Words, oldest: int) -> Words:
    found = np.full(len(keys), -1, np.int64)
    known = np.flatnonzero(np.broadcast_to(numbers, len(keys)) >= 0)
    if not len(known):
        return found
    of = np.broadcast_to(numbers, len(keys))[known]
    hashes, states = hashes_of(keys[known]), slot_code.state_for(memory, of)
    mixed = slot_code.mixed(hashes, of)
    sets, level = memory.header[[SETS, slot_code.LEVEL]]
    at = mixed & ((level << 1) - 1)
    at = np.where(at < sets, at, mixed & (level - 1))
    at[(at < 0) | (at >= len(memory.sets))] = 0
    entries = memory.sets[at]
    same = entries >> slot_code.ROW_BITS == ((mixed >> slot_code.ROW_BITS) & slot_code.TAG)[:, None]
    rows = (entries & slot_code.ROW) - 1
    same &= (rows >= 0) & (rows < len(memory.rows))
    which, way = np.nonzero(same)
    candidates = rows[which, way]
    content = memory.rows[candidates]
    right = (content[:, STATE] == states[which]) & (content[:, HASH] == hashes[which]) & (content[:, CREATED] >= oldest)
    found[known[which[right]]] = candidates[right]
    return found


def count_leading(memory: IndexMemory, keys: Words, numbers: Words, oldest: int) -> int:
    done, portion = 0, _FIRST_PORTION
    while done < len(keys):
        some = slice(done, done + portion)
        rows = find(memory, keys[some], numbers[some] if len(numbers) > 1 else numbers, oldest)
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            return done + int(missing[0])
        done += len(rows)
        portion = _PORTION
    return len(keys)


def locate(memory: IndexMemory, keys: Words, numbers: Words, oldest: int, slabs: Words) -> tuple[Words, int]:
    rows = find(memory, keys, numbers, oldest)
    of = slabs_with(slabs, rows)
    positions = np.flatnonzero(of >= 0)
    rows, of = rows[positions], of[positions]
    numbers_of_slabs, slots, lengths = slabs[of, SLAB_NUMBER], rows - slabs[of, FIRST], memory.rows[rows, LENGTH]
    places = numbers_of_slabs << 32 | slots
    facts = IN_ORDER if (places[1:] > places[:-1]).all() else 0
    facts |= ONE_LENGTH if (lengths == lengths[:1]).all() else 0
    facts |= ONE_SLAB if (numbers_of_slabs == numbers_of_slabs[:1]).all() else 0
    return np.stack([numbers_of_slabs, slots, lengths, positions, rows]), facts


def hashes_of(keys: Words) -> Words:
    """HASH of these keys (``key_words``)."""
    hashes: Words = slot_code.hash_words(*(keys[:, word] for word in range(2, slot_code.KEY_WORDS)))
    return hashes


def are_remembered(memory: IndexMemory, keys: Words, numbers: Words) -> npt.NDArray[np.bool_]:
    """Whether each of these pages, none of which is there, is among those that were evicted last (``key_words``, and
    the numbers of their identities)."""
    fingerprints = slot_code.scrambled(hashes_of(keys) ^ (slot_code.state_for(memory, numbers) >> 8)) | 1
    if not memory.ghosts.shape[1]:
        return np.zeros(len(keys), np.bool_)
    of_sets = (fingerprints >> 1 & _LOW) % memory.ghosts.shape[1]
    remembered: npt.NDArray[np.bool_] = (memory.ghosts[0, of_sets] == fingerprints[:, None]).any(axis=1)
    return remembered


def slabs_with(slabs: Words, rows: Words) -> Words:
    """The positions of the slabs that have these rows; -1 for none. ``slabs``: by FIRST."""
    of = np.searchsorted(slabs[:, FIRST], rows, side="right") - 1
    if len(slabs):
        of[rows >= (slabs[:, FIRST] + slabs[:, SLOTS])[of]] = -1
    return of


def coldest(
    memory: IndexMemory,
    begin: int,
    end: int,
    together: int,
    cold: int,
    cool: int,
    oldest: int,
    dead: Words,
    victims: Words,
) -> int:
    ranks = _ranks(memory, memory.rows[begin:end], oldest, dead)
    padded = np.full(-(-len(ranks) // together) * together, NO_PAGE)
    padded[: len(ranks)] = ranks
    by_group = padded.reshape(-1, together)
    lowest = by_group.min(axis=1)
    chosen = (by_group <= cool) & (by_group != NO_PAGE) & ((lowest <= cold) & (lowest != NO_PAGE))[:, None]
    found = np.flatnonzero(chosen.ravel()) + begin
    victims[: len(found)] = found
    victims[len(found)] = -1
    return len(found)


def sample(memory: IndexMemory, slabs: Words, first: int, step: int, oldest: int, dead: Words, ranks: Words) -> int:
    count, skipped = 0, first
    for slab in slabs.tolist():
        if skipped < slab[SLOTS]:
            some = _ranks(memory, memory.rows[slab[FIRST] + skipped : slab[FIRST] + slab[SLOTS] : step], oldest, dead)
            some = some[: len(ranks) - count]
            ranks[count : count + len(some)] = some
            count += len(some)
            skipped += step * (-(-(slab[SLOTS] - skipped) // step))
        skipped -= slab[SLOTS]
    return count


def count(memory: IndexMemory, begin: int, end: int, oldest: int, counts: Words) -> int:
    rows = memory.rows[begin:end]
    counts += np.bincount(rows[:, STATE] & STATES, minlength=4)
    ranks = _ranks(memory, rows, oldest, np.empty(0, np.int64))
    return int(((rows[:, STATE] & STATES == PAGE) & (ranks != AT_ONCE)).sum())


def _ranks(memory: IndexMemory, rows: Words, oldest: int, dead: Words) -> Words:
    states = rows[:, STATE].copy()
    kinds = states & STATES
    of_page = np.clip(rows[:, PRIORITY], 0, NO_PAGE - 1)
    of_page[~slot_code.is_current(memory.identities, states) | (rows[:, CREATED] < oldest)] = AT_ONCE
    ranks = np.where(kinds == PAGE, of_page, NO_PAGE)
    ranks[(kinds == FREE) | ((kinds == PENDING) & np.isin(states >> 8, dead))] = AT_ONCE
    return ranks

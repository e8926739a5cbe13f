"""The code of the index, which is C: against a look at every row, whatever the words say, ended in the middle of any
step, and beside look-ups in other threads."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.eviction_policy import Clock, PageByPage, Rank
from hicache_ext import native
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex, are_coldest
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory, Table, new_index
from hicache_ext.storage.tiers.file.slab.index_words import (
    CLOCK_SHIFT,
    FREE,
    NO_PAGE,
    PAGE,
    PENDING,
    PRIORITY,
    STATE,
    STATES,
    USED,
    WAYS,
    Words,
)
from hicache_ext.storage.tiers.file.slab.shapes import Slab
from tests.rigs import miniatures as reference
from tests.rigs.bare_index import new_index_in
from tests.rigs.ranks import ORIGIN, TICK
from tests.storage.file.indexes import (
    CAPACITY,
    LARGE,
    SMALL,
    A,
    B,
    add_slab,
    assert_no_slot_lost,
    join,
    key_of,
    keys_of,
    members_of,
    publish,
    remove,
    store,
    take,
)

SIZES = (4096, 65_536, 1 << 20)
SLABS = ((3, 4096, 170, 100), (5, 65_536, 33, 0), (6, 1 << 20, 7, 40), (9, 4096, 65, 300))
"""Number, slot size, slots, first row: neither the rows nor the numbers in order."""
ROWS, SETS_MOST, IDENTITIES = 512, 96, 4
TIMES = 400


@dataclass
class World:
    """All words of a small index; few sets, so that some are full."""

    rows: Words = field(default_factory=lambda: np.zeros((ROWS, index_words.ROW_WORDS), np.int64))
    sets: Words = field(default_factory=lambda: np.zeros((SETS_MOST, WAYS), np.int64))
    header: Words = field(default_factory=lambda: np.zeros(index_words.HEADER_WORDS, np.int64))
    identities: Words = field(default_factory=lambda: np.zeros((IDENTITIES, index_words.IDENTITY_WORDS), np.int64))
    slabs: Words = field(default_factory=lambda: np.zeros((4, index_words.SLAB_WORDS), np.int64))
    ghosts: Words = field(default_factory=lambda: np.zeros((3, 16, WAYS), np.int64))
    events: Words = field(default_factory=lambda: np.zeros((32, 2), np.int64))
    small: Words = field(default_factory=lambda: np.zeros(index_words.SMALL_WORDS, np.int64))
    entries: Words = field(default_factory=lambda: np.zeros((index_words.ENTRY_WORDS, 8, WAYS), np.int64))
    tenants: Words = field(default_factory=lambda: np.zeros((index_words.TENANTS, index_words.TENANT_WORDS), np.int64))
    known: Words | None = None
    """A copy of the slabs, which is believed; else they are."""

    def __post_init__(self) -> None:
        if self.header[index_words.SETS]:
            return
        self.header[index_words.SETS] = 8
        for position, (number, size, slots, first) in enumerate(SLABS):
            self.slabs[position] = [number, size, slots, first, index_words.READY, slots, 0, 0]
            self.rows[first : first + slots, STATE] = FREE

    @property
    def table(self) -> Table:
        parts = self.rows, self.sets, self.identities, self.events, self.header, self.small, self.tenants
        return Table(*parts, ghosts=self.ghosts, entries=self.entries)

    @property
    def words(self) -> list[Words]:
        of_tables = self.rows, self.sets, self.header, self.identities
        return [*of_tables, self.slabs, self.ghosts, self.events, self.small, self.entries, self.tenants]

    @property
    def believed(self) -> Words:
        return self.slabs if self.known is None else self.known

    @property
    def by_first(self) -> Words:
        return np.ascontiguousarray(self.believed[self.believed[:, index_words.FIRST].argsort()])

    def copy(self) -> World:
        return World(*[words.copy() for words in self.words])


def chain(rng: random.Random, count: int = 40) -> Words:
    begin = rng.randrange(5) * 60 + rng.randrange(30)
    return np.random.default_rng(1).integers(-(1 << 63), 1 << 63, (400, 6), np.int64)[begin : begin + count].copy()


def find(world: Any, keys: Words, numbers: Words, oldest: int) -> Words:
    """The row of each page, -1 for nowhere."""
    of_all, located = np.array([[0, 4096, ROWS, 0, index_words.READY, 0, 0, 0]]), np.empty((5, len(keys)), np.int64)
    count = world.table.locate(keys, numbers, oldest, of_all, located) >> index_words.FACTS
    rows = np.full(len(keys), -1)
    rows[located[3, :count]] = located[4, :count]
    return rows


def give_back(world: Any, taken: Words, pending: int, ticket: int) -> None:
    rows = taken[taken >= 0]
    of_ticket = (world.rows[rows, STATE] == pending) & (world.rows[rows, index_words.HASH] == ticket)
    world.rows[rows[of_ticket], STATE] = FREE


def remove_rows(world: Any, rows: Words) -> None:
    """As the index seizes pages and gives their slots back."""
    there = rows[rows >= 0]
    tenants = world.rows[there, index_words.LENGTH] >> index_words.TENANT_SHIFT & (index_words.TENANTS - 1)
    np.subtract.at(world.tenants[:, index_words.TENANT_PAGES], tenants, 1)
    world.rows[there, STATE] = FREE


Step = Callable[[Any], None]


def random_step(rng: random.Random, now: int) -> Step:
    """A few calls as the index makes them."""
    of = rng.randrange(3)
    of_size = np.array([position for position, slab in enumerate(SLABS) if slab[1] == SIZES[of]])
    slots = sum(SLABS[position][2] for position in of_size)
    keys, oldest = chain(rng), rng.choice([0, 0, max(0, now - 30)])
    numbers = np.array([rng.randrange(IDENTITIES)]) if rng.random() < 0.7 else np.arange(40) % 5 - 1
    one = np.array([abs(int(numbers[0])) % IDENTITIES])
    member, ticket, count = rng.choice([55, 77]), rng.randrange(3), rng.randint(1, 40)
    pending = PENDING | member << 8
    seed = rng.randrange(1 << 30)
    tenant = (0, 0, 1, 63)[seed % 4]
    tenancy = (None, None, *(np.full(index_words.TENANCY_WORDS, share) for share in (0, 5, 63)))[seed % 5]

    def write(world: Any) -> None:
        taken = np.full(count, -1)
        done = world.table.take_free(world.slabs, world.believed, of_size, pending, ticket, taken)
        some = np.random.default_rng(seed).random(done) < 0.9
        rows, at = taken[:done][some].copy(), np.sort(np.random.default_rng(seed).permutation(40)[:done])[some].copy()
        of_keys = keys, one, at, rows, at + 1000, pending, ticket, now, oldest
        world.table.publish(*of_keys, slots, 100, half, tenant, np.zeros(len(rows), np.int64))
        give_back(world, taken, pending, ticket)

    def leave_pending(world: Any) -> None:
        world.table.take_free(world.slabs, world.believed, of_size, pending, 99, np.full(5, -1))

    def evict(world: Any) -> None:
        slabs = world.believed[of_size]
        firsts, counts = slabs[:, index_words.FIRST], slabs[:, index_words.SLOTS]
        rows = [np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        ranks = [np.zeros(len(some), np.int64) for some in rows]
        for some, receives in zip(rows, ranks, strict=True):
            world.table.ranks(some, oldest, tenancy, receives)
        sample = np.sort(np.concatenate(ranks)[seed % 3 :: 3])
        cold, cool = (int(sample[min(len(sample) - 1, at)]) for at in (4, 12))
        for some, known in zip(rows, ranks, strict=True):
            victims = some[are_coldest(known, 8, cold, cool)]
            world.table.evict(victims, oldest, tenancy)
            slab_of = world.slabs[of_size]
            slab_of[:, index_words.FREE_SLOTS] += 3
            world.slabs[of_size] = slab_of

    def look(world: Any) -> None:
        world.table.locate(keys, numbers, oldest, world.by_first, np.empty((5, len(keys)), np.int64))
        world.table.locate(keys, numbers, oldest, None, None)

    def use(world: Any) -> None:
        world.table.touch(find(world, keys, one, 0), 275, half)

    def learn(world: Any) -> None:
        world.table.learn(rng_capacity, half, 20)
        index_words.choose_policy(world.header, world.small, world.entries, rng_capacity, ROWS)
        world.table.rank_again(275, 90)

    def follow(world: Any) -> None:
        policy = seed % index_words.CANDIDATES
        world.header[index_words.POLICY], world.header[index_words.TO_RANK] = policy, ROWS

    def evict_beside(world: Any) -> None:
        # As after pages of a second identity have gone.
        rows, some = np.empty(len(keys) - seed % 30, np.int64), index_words.hashes_of(keys)[seed % 30 :]
        count = world.table.find(some, int(one[0]), rows)
        assert count == np.count_nonzero(rows >= 0)
        world.table.evict(rows[rows >= 0], oldest, None)

    def forget(world: Any) -> None:
        remove_rows(world, find(world, keys, one, 0)[seed % 30 :])

    def grow(world: Any) -> None:
        world.table.add_sets(min(SETS_MOST, int(world.header[index_words.SETS])) + 1)

    def clear(world: Any) -> None:
        identity = world.identities[one[0]]
        identity[index_words.GENERATION] += 1
        identity[index_words.CLEARED] = now

    def find_again(world: Any) -> None:
        first, size, many = 480, SIZES[0], 30
        # As if slabs were dropped: their pages are counted off.
        begun = world.rows[first : first + many]
        of_tenants = begun[begun[:, STATE] & STATES == PAGE, index_words.LENGTH] >> 32 & 63
        np.subtract.at(world.tenants[:, index_words.TENANT_PAGES], of_tenants, 1)
        world.rows[first : first + many, STATE] = index_words.UNKNOWN
        random_words = np.random.default_rng(seed)
        created = random_words.integers(0, now + 5, many)
        of_keys = keys[:many].copy(), random_words.integers(-1, IDENTITIES, many), np.arange(many), created
        world.table.adopt(*of_keys, random_words.integers(0, 99, (many, 2)), first, size, now)

    half, rng_capacity = 1 << 19, rng.choice([12, 40, 40, 40])
    often = [write, write, write, write, look, use, learn, learn, follow]
    return rng.choice([*often, leave_pending, evict, evict, evict_beside, forget, grow, clear, find_again])


# -- what it answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_miniatures_learn_what_their_reference_does(seed: int) -> None:
    rng, world, switches = random.Random(seed), World(), 0
    for now in range(1, TIMES):
        random_step(rng, now)(world)
        other, capacity, most = world.copy(), rng.choice([12, 40]), rng.choice([3, 20, 40])
        assert world.table.learn(capacity, 1 << 19, most) == reference.learn(other, capacity, 1 << 19, most)
        for one, of_reference in zip(world.words, other.words, strict=True):
            assert np.array_equal(one, of_reference)
        switches += int(world.header[index_words.TO_RANK] > 0)
    assert switches > 3
    assert world.small[index_words.USES] > 100


@pytest.mark.parametrize("seed", range(4))
def test_look_ups_and_ranks_are_those_of_the_rows(seed: int) -> None:
    """Whatever was done before: by a look at every row, with no table that leads to some."""
    rng, world, found_some, most = random.Random(100 + seed), World(), 0, 0
    for now in range(1, TIMES // 2):
        random_step(rng, now)(world)
        keys, oldest = chain(rng), rng.choice([0, max(0, now - 30)])
        numbers = np.array([rng.randrange(IDENTITIES)]) if rng.random() < 0.7 else np.arange(40) % 5 - 1
        many = np.broadcast_to(numbers, 40)
        by_row = [row_of(world, *page, oldest) for page in zip(keys, many, strict=True)]
        assert find(world, keys, numbers, oldest).tolist() == by_row
        assert find_by_hash(world, keys, numbers) == [row_of(world, *page, 0) for page in zip(keys, many, strict=True)]
        leading = world.table.locate(keys, numbers, oldest, None, None) >> index_words.FACTS
        assert leading == [*by_row, -1].index(-1)
        assert_located(world, keys, numbers, oldest, by_row)
        assert_ranked(world, rng, oldest)
        pages = np.flatnonzero(world.rows[: SLABS[-1][3] + SLABS[-1][2], STATE] & STATES == PAGE)
        assert np.isin(pages + 1, world.sets & index_words.ROW).all(), "each page has an entry"
        found_some += max(by_row) >= 0
        most = max(most, int((world.rows[:, STATE] & STATES == PAGE).sum()))
    assert found_some > 20 and most > 100


def find_by_hash(world: World, keys: Words, numbers: Words) -> list[int]:
    hashes, found = index_words.hashes_of(keys), np.full(len(keys), -1)
    for number in set(numbers[numbers >= 0].tolist()):
        rows = np.empty(len(keys), np.int64)
        world.table.find(hashes, number, rows)
        found = np.where(np.broadcast_to(numbers, len(keys)) == number, rows, found)
    return found.tolist()


def row_of(world: World, key: Words, number: int, oldest: int) -> int:
    state = PAGE | int(world.identities[number, index_words.GENERATION]) << 8 | int(number) << index_words.NUMBER_SHIFT
    (hashed,) = index_words.hashes_of(key[None])
    rows = world.rows
    of_key = (rows[:, index_words.HASH] == hashed) & (rows[:, STATE] == state)
    (row,) = np.flatnonzero(of_key & (rows[:, index_words.CREATED] >= oldest)).tolist() or (-1,)
    return row if number >= 0 else -1


def assert_located(world: World, keys: Words, numbers: Words, oldest: int, by_row: list[int]) -> None:
    located = np.empty((5, len(keys)), np.int64)
    facts = world.table.locate(keys, numbers, oldest, world.by_first, located)
    expected = [
        (slab, row - first, int(world.rows[row, index_words.LENGTH]) & 0xFFFFFFFF, position, row)
        for position, row in enumerate(by_row)
        for slab, _, slots, first in SLABS
        if first <= row < first + slots
    ]
    assert located[:, : facts >> index_words.FACTS].T.tolist() == [list(page) for page in expected]
    if expected:
        places = [page[:2] for page in expected]
        assert bool(facts & index_words.IN_ORDER) == (places == sorted(places))
        assert bool(facts & index_words.ONE_LENGTH) == (len({page[2] for page in expected}) == 1)
        assert bool(facts & index_words.ONE_SLAB) == (len({page[0] for page in expected}) == 1)


def assert_ranked(world: Any, rng: random.Random, oldest: int) -> None:
    cold, cool = rng.choice([-1, 1 << 40]), rng.choice([-1, (1 << 40) + 100])
    begin, together = rng.randrange(300), rng.choice([1, 2, 8, 32])
    of_row = [rank_of(world, row, oldest) for row in range(ROWS)]
    groups = [range(at, min(at + together, begin + 130)) for at in range(begin, begin + 130, together)]
    expected = [
        row
        for group in groups
        if min(of_row[row] for row in group) <= cold
        for row in group
        if of_row[row] <= cool and of_row[row] != NO_PAGE
    ]
    rows, ranks = np.arange(begin, begin + 130), np.zeros(130, np.int64)
    world.table.ranks(rows, oldest, None, ranks)
    assert ranks.tolist() == of_row[begin : begin + 130]
    assert rows[are_coldest(ranks, together, cold, cool)].tolist() == expected
    pages = world.rows[:, STATE] & STATES == PAGE
    tenants = world.rows[pages, index_words.LENGTH] >> 32 & 63
    of_tenants = np.bincount(tenants, minlength=index_words.TENANTS)
    assert world.tenants[:, index_words.TENANT_PAGES].tolist() == of_tenants.tolist()


def rank_of(world: World, row: int, oldest: int) -> int:
    words = [int(word) for word in world.rows[row]]
    kind, state = words[STATE] & STATES, words[STATE] >> 8
    if kind == PAGE:
        generation = int(world.identities[state >> 32, index_words.GENERATION])
        is_there = state & index_words.GENERATIONS == generation and words[index_words.CREATED] >= oldest
        return words[PRIORITY] if is_there else -1
    return -1 if kind == FREE else NO_PAGE


# -- ghosts, and where free slots are looked for -----------------------------------------------------------------------

OURS = PENDING | 55 << 8
NONE = np.zeros(0, np.int64)


def put(world: World, keys: Words, *, ghosts: int = 100) -> Words:
    """Write pages into the first slab; their rows."""
    rows, published = np.full(len(keys), -1), np.zeros(len(keys), np.int64)
    world.table.take_free(world.slabs, world.slabs, np.array([0]), OURS, 1, rows)
    of_pages = np.array([0]), np.arange(len(keys)), rows, np.full(len(keys), 1000)
    world.table.publish(keys, *of_pages, OURS, 1, 1000, 0, 170, ghosts, 0, 0, published)
    assert (published == 1).all()
    return rows


def evict(world: World, rows: Words) -> None:
    assert world.table.evict(rows.copy(), 0, None) == len(rows)
    world.slabs[0, index_words.FREE_SLOTS] += len(rows)


def uses(world: World, rows: Words) -> list[int]:
    return [int(word) & index_words.MOST_HITS for word in world.rows[rows, USED]]


def test_a_ghost_counts_once() -> None:
    world, keys = World(), chain(random.Random(1), 1)
    evict(world, put(world, keys))
    rows = put(world, keys)
    assert uses(world, rows) == [1]
    remove_rows(world, rows)
    world.slabs[0, index_words.FREE_SLOTS] += 1
    assert uses(world, put(world, keys)) == [0]


def test_a_page_that_many_were_evicted_after_is_not_remembered() -> None:
    world, keys = World(), chain(random.Random(1), 3)
    evict(world, put(world, keys))
    assert uses(world, put(world, keys, ghosts=2)) == [0, 1, 1]


def test_the_oldest_ghosts_of_a_full_set_go() -> None:
    world, keys = World(ghosts=np.zeros((3, 1, WAYS), np.int64)), chain(random.Random(1), WAYS + 4)
    evict(world, put(world, keys))
    assert sorted(world.ghosts[1, 0].tolist()) == list(range(5, WAYS + 5))


def test_a_page_has_one_ghost_although_a_rebuild_brought_it_back() -> None:
    world, keys = World(), chain(random.Random(1), 1)
    for _ in range(2):
        world.rows[480, STATE] = index_words.UNKNOWN
        of_page = np.array([0]), np.array([1000]), np.array([1000]), np.zeros((1, 2), np.int64)
        assert world.table.adopt(keys, *of_page, 480, 4096, 2000) == 1
        evict(world, np.array([480]))
    assert np.count_nonzero(world.ghosts[0]) == 1
    assert world.ghosts[1].max() == 2


def test_a_slab_that_wrongly_says_it_has_free_slots_is_looked_through_once() -> None:
    world, taken = World(), np.full(5, -1)
    world.rows[100:270, STATE] = OURS
    world.rows[150, STATE] = FREE
    assert world.table.take_free(world.slabs, world.slabs, np.array([0]), OURS, 1, taken) == 1
    assert (taken[0], world.slabs[0, index_words.FREE_SLOTS]) == (150, 0)


# -- ranks of single pages ---------------------------------------------------------------------------------------------


def test_a_use_never_makes_a_page_colder_and_counts_only_as_long_as_the_chain_is_whole() -> None:
    world, keys = World(), chain(random.Random(1), 4)
    rows = put(world, keys)
    world.rows[rows[0], PRIORITY] = pinned = 1 << 60
    world.header[index_words.INSERTS] += 500
    used = rows.copy()
    used[1] = -1
    assert world.table.touch(used, 170, index_words.SAMPLE + 1) == 3
    assert world.rows[rows[0], PRIORITY] == pinned
    now = ORIGIN + TICK * int(world.header[index_words.INSERTS])
    assert world.rows[rows[2:], PRIORITY].tolist() == [now - 2, now - 3]
    assert world.header[[index_words.EVENTS, index_words.SEEN]].tolist() == [1, 1]


def test_what_is_written_behind_a_page_that_is_there_ranks_below_it() -> None:
    world, keys = World(), chain(random.Random(1), 2)
    (there,) = put(world, keys[:1])
    world.rows[there, PRIORITY] = 5
    rows, published = np.full(2, -1), np.zeros(2, np.int64)
    world.table.take_free(world.slabs, world.slabs, np.array([0]), OURS, 1, rows)
    of_pages = np.array([0]), np.arange(2), rows, np.full(2, 1000)
    assert world.table.publish(keys, *of_pages, OURS, 1, 1000, 0, 170, 100, 0, 0, published) == 1
    assert published.tolist() == [0, 1]
    assert world.rows[rows, STATE].tolist()[0] == FREE
    assert world.rows[rows[1], PRIORITY] == 4


EXTREMES = [
    0,
    1,
    2,
    3,
    7,
    15,
    16,
    511,
    512,
    ROWS + 1,
    1 << 20,
    1 << 31,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    -1,
    -2,
    -(1 << 63),
]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_words_say_c_ends_and_writes_nowhere_else(seed: int) -> None:
    """With the address sanitizer it reads nowhere else either."""
    rng, canary, beside, answered = random.Random(1000 + seed), 0x5EED, 64, 0
    sound = World()
    for now in range(1, TIMES):
        random_step(rng, now)(sound)
        padded = [np.pad(part.ravel(), beside, constant_values=canary) for part in sound.words]
        damaged = World(
            *[words[beside:-beside].reshape(part.shape) for words, part in zip(padded, sound.words, strict=True)]
        )
        known = sound.slabs.copy()
        for part in rng.sample(damaged.words, rng.randint(1, 3)):
            words = part.ravel()  # no copy
            for _ in range(rng.choice([1, 10, len(words)])):
                words[rng.randrange(len(words))] = rng.choice([*EXTREMES, rng.getrandbits(63) - (1 << 62)])
        damaged.known = known
        for _ in range(5):
            random_step(rng, now)(damaged)
            answered += 1
        for words in padded:
            assert (words[:beside] == canary).all() and (words[-beside:] == canary).all()
    assert answered == 5 * (TIMES - 1)


def test_a_thread_in_a_call_keeps_the_words_of_an_index_that_is_closed(tmp_path: Path) -> None:
    """One that a timeout left behind: an address alone would be that of nothing, or of something else."""
    memory = IndexMemory(new_index(CAPACITY))
    memory.rows[:100, STATE] = FREE
    call, rows, ranks = memory.table.ranks, np.arange(200), np.zeros(200, np.int64)
    memory.close()
    assert call(rows, 0, None, ranks) == 200
    assert np.count_nonzero(ranks == index_words.AT_ONCE) == 100
    with pytest.raises(AttributeError):
        memory.table.ranks(rows, 0, None, ranks)


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_pages_rank_as_the_policy_says(tmp_path: Path, seed: int) -> None:
    """Written as a chain, then used now and again, step by step."""
    rng, capacity = random.Random(seed), 300
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index, SMALL, capacity)
        index.memory.header[index_words.POLICY] = eviction.LEARNED_DISTANCE
        policy, keys = PageByPage(capacity), keys_of(range(40))
        index.memory.header[index_words.INSERTS : index_words.REUSES + 1] = start = rng.randrange(500), 70_000, 100
        clock, expected, before = Clock(*start), [], None
        store(index, keys)
        for depth in range(40):
            clock, before = policy.inserted(clock, depth, before)
            expected.append(before)
        assert ranks(index, keys) == expected
        for other in range(1, 6):
            some = keys_of(range(1000 * other, 1000 * other + rng.randint(1, 60)))
            store(index, some)
            before = None
            for depth in range(len(some)):
                clock, before = policy.inserted(clock, depth, before)
            before = None
            found = index.locate(keys)
            index.note_hits(found, keys, len(found))
            for depth in range(40):
                clock, before = policy.renewed(clock, expected[depth], depth, before) or (clock, expected[depth])
                expected[depth] = before
            assert ranks(index, keys) == expected
            assert Clock(*index.memory.header[index_words.INSERTS : index_words.REUSES + 1].tolist()) == clock
        assert max(rank.hits for rank in expected) > 0


def ranks(index: SlabIndex, keys: Any) -> list[Rank]:
    rows = index.memory.rows[index.rows_of(keys)]
    return [Rank(int(row[PRIORITY]), int(row[USED]) >> CLOCK_SHIFT, int(row[USED]) & 7) for row in rows]


# -- an end in the middle ----------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for a SIGKILL: nothing is done afterwards."""


_FUSE = """
__attribute__((weak, visibility("default"))) long hicache_stores_left = -1;
static inline int hicache_may_store(void)
{
    return hicache_stores_left < 0 || (hicache_stores_left > 0 && hicache_stores_left--);
}
#define __atomic_store_n(at, value, order) (hicache_may_store() ? (void)(*(at) = (value)) : (void)0)
"""


@pytest.fixture(scope="module")
def fused_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core, which makes no store any more once its fuse has burnt down."""
    if shutil.which("gcc") is None:
        pytest.skip("missing: gcc")
    place = tmp_path_factory.mktemp("fused")
    (place / "fuse.h").write_text(_FUSE)
    sources = sorted(Path(native.__file__).parent.glob("*.c"))
    flags = ["-std=gnu11", "-O1", "-fwrapv", "-shared", "-fPIC", "-fvisibility=hidden"]
    version = [f"-DHICACHE_VERSION={native.sources_version()}", "-include", str(place / "fuse.h")]
    subprocess.run(["gcc", *flags, *version, *map(str, sources), "-o", str(place / "core.so")], check=True)
    return place / "core.so"


class Fuse:
    """Burns down by one with each store, of C and of Python."""

    def __init__(self, library: Path) -> None:
        self._left = ctypes.c_long.in_dll(ctypes.CDLL(str(library)), "hicache_stores_left")

    @property
    def left(self) -> int:
        return self._left.value

    @left.setter
    def left(self, stores: int) -> None:
        self._left.value = stores

    def burn(self) -> None:
        if self.left == 0:
            raise KilledError
        if self.left > 0:
            self.left -= 1

    def call(self, core: native.Core, *arguments: Any) -> int:
        """``Core()``, from which a process that has died does not return."""
        result = _CALL(core, *arguments)
        if self.left == 0:
            raise KilledError
        return result


_CALL = native.Core.__call__


class Fused(np.ndarray):
    """Words of which each store burns the fuse; those that come after its end are not made."""

    fuse: Fuse | None = None

    def __array_finalize__(self, of: Any) -> None:
        self.fuse = getattr(of, "fuse", None)

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.fuse is not None:
            self.fuse.burn()
        super().__setitem__(where, value)


def fuse_words(index: SlabIndex, fuse: Fuse) -> None:
    memory = index.memory
    for name in ("rows", "sets", "header", "identities", "slabs", "ghosts", "tenants"):
        words = getattr(memory, name).view(Fused)
        words.fuse = fuse
        setattr(memory, name, words)


def _publish(index: SlabIndex) -> None:
    ticket, rows, _ = take(index, 12, evict=False)
    publish(index, ticket, keys_of(range(15, 27)), rows, now=3000, oldest=2000, tenant=2)


def _evict(index: SlabIndex) -> None:
    take(index, 30)


def _remove(index: SlabIndex) -> None:
    remove(index, keys_of(range(2, 8)))


def _grow(index: SlabIndex) -> None:
    header = index.memory.header
    index.memory.table.add_sets(int(header[index_words.SETS]) + 5)


def _drop(index: SlabIndex) -> None:
    slab = index.view().slabs[9]
    if index.drop_slab(slab):
        index.forget_slab(slab)


def _adopt(index: SlabIndex) -> None:
    (slab,) = index.unknown_slabs()
    words = keys_of(range(14, 26)).words.copy()
    facts = np.zeros(12, np.int64), np.full(12, 1000), 994 + np.arange(12), np.ones((12, 2), np.int64)
    index.adopt(slab, 0, words, *facts)
    index.end_slab(slab)


def prepared(index: SlabIndex) -> None:
    index.add_found_slabs([Slab(7, SMALL, 12)])
    index.register([A])
    index.memory.header[index_words.SETS] = 2
    for _ in range(2):
        slab = index.begin_slab(SMALL, lambda _: 24)
        assert slab is not None
        index.finish_slab(slab)
    store(index, keys_of(range(20)), evict=False)
    for number in range(100, 108):
        store(index, [key_of(number)], evict=False)
    store(index, keys_of(range(12, 18), B), evict=False)
    index.set_dependents({A: [B]})


def assert_counts_are_put_right(index: SlabIndex, most: int) -> None:
    """A kill costs two pages at most, or those that were removed together or in a slab that was being dropped, and the
    next look mends it."""
    index.memory.header[index_words.REBUILT] = 1
    assert int(np.abs(index.tenant_pages - _walked(index)).sum()) <= most
    index.number_tenants(["team"])
    for slab in index.left_slabs():  # first: what is forgotten of them is counted off
        index.forget_slab(slab)
    index.occupied()
    assert index.tenant_pages.tolist() == _walked(index).tolist()


def _walked(index: SlabIndex) -> Words:
    walked = np.zeros(index_words.TENANTS, np.int64)
    for slab in index.view().slabs.values():
        rows = index.memory.rows[slab.first_row : slab.first_row + slab.slots]
        lengths = rows[rows[:, STATE] & STATES == PAGE, index_words.LENGTH]
        walked += np.bincount(lengths >> 32 & 63, minlength=index_words.TENANTS)
    return walked


@pytest.mark.parametrize("action", [_publish, _evict, _remove, _grow, _drop, _adopt])
def test_a_process_that_dies_at_any_store_leaves_nothing_to_repair(
    tmp_path: Path, fused_core: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[[SlabIndex], None]
) -> None:
    """No wrong row is found, every page can be stored and found again, and no slot stays taken."""
    fuse = Fuse(fused_core)
    monkeypatch.setattr(native, "LIBRARY", fused_core)
    monkeypatch.setattr(native.Core, "__call__", lambda core, *arguments: fuse.call(core, *arguments))
    for step in range(5000):
        with new_index_in(tmp_path, CAPACITY) as index:
            members = members_of(index)
            prepared(index)
            join(index, 2)
            fuse_words(index, fuse)
            fuse.left = step
            died = False
            try:
                action(index)
            except KilledError:
                died = True
            fuse.left = -1
            join(index, 1)
            members.dead.add(2)
            assert_sound(index)
            assert_counts_are_put_right(index, {_drop: 24, _remove: 6}.get(action, 2))
            if action is _adopt and index.unknown_slabs():
                _adopt(index)
                assert index.unknown_slabs() == []
                assert_sound(index)
            assert_all_slots_are_used_again(index)
        if not died:
            break
    assert not died
    assert step > 3


def test_an_expired_page_that_a_kill_left_behind_hides_no_newer_one(tmp_path: Path) -> None:
    """A page said to be there already, which could not be read."""
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index)
        chain = keys_of(range(3))
        store(index, chain, now=1000)
        rows = index.rows_of(chain)
        # Killed after the entry of the second page was removed, and before its slot was free.
        index.memory.sets[(index.memory.sets & index_words.ROW) == rows[1] + 1] = 0
        index.memory.rows[rows[[0, 2]], index_words.CREATED] = 3000
        assert store(index, chain, now=3000, oldest=2000, evict=False) == [0, 1, 0]
        assert index.count_leading(chain, 2000) == len(index.locate(chain, 2000)) == 3


def assert_sound(index: SlabIndex) -> None:
    keys = [*keys_of(range(30)), *keys_of(range(100, 108))]
    found = index.locate(keys)
    hashes = index_words.hashes_of(np.frombuffer(bytearray(b"".join(keys)), np.int64).reshape(-1, 6))
    rows = index.memory.rows[found.rows]
    assert (rows[:, index_words.HASH] == hashes[found.positions]).all()
    assert (rows[:, index_words.LENGTH] & 0xFFFFFFFF == 1000).all()
    assert set(rows[:, index_words.CREATED].tolist()) <= {1000, 3000, *range(990, 1010)}
    assert len(set(found.rows.tolist())) == len(found)
    assert_no_slot_lost(index)


def assert_all_slots_are_used_again(index: SlabIndex) -> None:
    keys = keys_of(range(30))
    # With sets enough for all pages: a full one loses some.
    add_slab(index, SMALL, 40)
    assert set(store(index, keys)) <= {0, 1}
    assert index.count_leading(keys) == 30
    for slab in index.left_slabs():
        index.forget_slab(slab)
    ready = [slab for slab in index.view().slabs.values() if slab not in index.unknown_slabs()]
    slots = sum(slab.slots for slab in ready)
    assert len(take(index, slots)[1]) == slots


# -- beside changes ----------------------------------------------------------------------------------------------------


def test_look_ups_beside_changes_find_every_page_that_is_there(tmp_path: Path) -> None:
    """While sets are added, and others are written, evicted and removed."""
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index, LARGE, 3000)
        kept = keys_of(range(400))
        store(index, kept, LARGE, evict=False)
        index.memory.rows[index.rows_of(kept), PRIORITY] = 1 << 60
        ended, missed, looks = threading.Event(), [], [0, 0]

        def look(of: int) -> None:
            while not ended.is_set():
                if index.count_leading(kept) != 400 or not all(index.contains(list(kept)[of::2])):
                    missed.append("looked for")
                if len(index.locate(kept)) != 400:
                    missed.append("located")
                looks[of] += 1

        threads = [threading.Thread(target=look, args=(of,)) for of in range(2)]
        for thread in threads:
            thread.start()
        number = 0
        while number < 15 or min(looks) < 4:
            others = keys_of(range(10_000 + 50 * number, 10_050 + 50 * number))
            store(index, others, LARGE)
            header = index.memory.header
            index.memory.table.add_sets(int(header[index_words.SETS]) + 37)
            remove(index, others[::3])
            number += 1
        ended.set()
        for thread in threads:
            thread.join()
        assert missed == []

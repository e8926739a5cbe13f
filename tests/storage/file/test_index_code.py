"""The code of the index: in C and in Python, whatever the words say, ended in the middle of any step, and beside
look-ups in other threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.eviction_policy import Clock, PageByPage, Rank
from hicache_ext import native
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.slab import index_words, lookup, miniatures, slot_code
from hicache_ext.storage.tiers.file.slab.index import SlabIndex, new_index_in
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory, Table, new_index
from hicache_ext.storage.tiers.file.slab.slot_code import (
    CLOCK_SHIFT,
    FREE,
    PAGE,
    PENDING,
    PRIORITY,
    STATE,
    STATES,
    USED,
    WAYS,
    Words,
)
from tests.rigs import miniatures as reference
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
    without_core,
)

SIZES = (4096, 65_536, 1 << 20)
SLABS = ((3, 4096, 170, 100), (5, 65_536, 33, 0), (6, 1 << 20, 7, 40), (9, 4096, 65, 300))
"""Number, slot size, slots, first row: neither the rows nor the numbers in order."""
ROWS, SETS_MOST, IDENTITIES = 512, 96, 4
TIMES = 400


@dataclass
class World:
    """All words of a small index; few sets, so that some are full."""

    rows: Words = field(default_factory=lambda: np.zeros((ROWS, slot_code.ROW_WORDS), np.int64))
    sets: Words = field(default_factory=lambda: np.zeros((SETS_MOST, WAYS), np.int64))
    header: Words = field(default_factory=lambda: np.zeros(slot_code.HEADER_WORDS, np.int64))
    identities: Words = field(default_factory=lambda: np.zeros((IDENTITIES, slot_code.IDENTITY_WORDS), np.int64))
    slabs: Words = field(default_factory=lambda: np.zeros((4, slot_code.SLAB_WORDS), np.int64))
    ghosts: Words = field(default_factory=lambda: np.zeros((3, 16, WAYS), np.int64))
    events: Words = field(default_factory=lambda: np.zeros((32, 2), np.int64))
    small: Words = field(default_factory=lambda: np.zeros(miniatures.SMALL_WORDS, np.int64))
    entries: Words = field(default_factory=lambda: np.zeros((miniatures.ENTRY_WORDS, 8, WAYS), np.int64))
    known: Words | None = None
    """A copy of the slabs, which is believed; else they are."""

    def __post_init__(self) -> None:
        if self.header[slot_code.SETS]:
            return
        self.header[slot_code.SETS] = self.header[slot_code.LEVEL] = 8
        for position, (number, size, slots, first) in enumerate(SLABS):
            self.slabs[position] = [number, size, slots, first, slot_code.READY, slots, 0, 0]
            self.rows[first : first + slots, STATE] = FREE

    @property
    def table(self) -> Table:
        of_tables = self.rows, self.sets, self.header, self.identities, self.ghosts
        return Table(*of_tables, self.events, self.small, self.entries)

    @property
    def words(self) -> list[Words]:
        of_tables = self.rows, self.sets, self.header, self.identities
        return [*of_tables, self.slabs, self.ghosts, self.events, self.small, self.entries]

    @property
    def believed(self) -> Words:
        return self.slabs if self.known is None else self.known

    @property
    def by_first(self) -> Words:
        return np.ascontiguousarray(self.believed[self.believed[:, slot_code.FIRST].argsort()])

    def copy(self) -> World:
        return World(*[words.copy() for words in self.words])


def chain(rng: random.Random, count: int = 40) -> Words:
    begin = rng.randrange(5) * 60 + rng.randrange(30)
    return np.random.default_rng(1).integers(-(1 << 63), 1 << 63, (400, 6), np.int64)[begin : begin + count].copy()


Code = ModuleType | SimpleNamespace
IN_C: Code = index_words
PLAIN: Code = SimpleNamespace(**{**vars(slot_code), **vars(lookup), "learn": reference.learn})
Step = Callable[[Any, Any], list[Any]]


def random_step(rng: random.Random, now: int) -> Step:
    """One call as the index makes it, and what it answers."""
    of = rng.randrange(3)
    of_size = np.array([position for position, slab in enumerate(SLABS) if slab[1] == SIZES[of]])
    slots = sum(SLABS[position][2] for position in of_size)
    keys, oldest = chain(rng), rng.choice([0, 0, max(0, now - 30)])
    numbers = np.array([rng.randrange(IDENTITIES)]) if rng.random() < 0.7 else np.arange(40) % 5 - 1
    one = np.array([abs(int(numbers[0])) % IDENTITIES])
    member, ticket, count = rng.choice([55, 77]), rng.randrange(3), rng.randint(1, 40)
    pending, dead = PENDING | member << 8, np.array(rng.choice([[], [77], [3, 77]]), np.int64)
    seed = rng.randrange(1 << 30)

    def write(code: Any, world: Any) -> list[Any]:
        taken = np.full(count, -1)
        done = code.take_free(world, world.believed, of_size, pending, ticket, rng_most, taken)
        some = np.random.default_rng(seed).random(done) < 0.9
        rows, at = taken[:done][some].copy(), np.sort(np.random.default_rng(seed).permutation(40)[:done])[some].copy()
        published = np.zeros(len(rows), np.int64)
        of_keys = keys, one, at, rows, at + 1000, pending, ticket, now, oldest
        freed = code.publish(world, *of_keys, slots, 100, published, half)
        return [done, taken, freed, published, code.give_back(world, taken, pending, ticket)]

    def leave_pending(code: Any, world: Any) -> list[Any]:
        taken = np.full(5, -1)
        return [code.take_free(world, world.believed, of_size, pending, 99, rng_most, taken), taken]

    def evict(code: Any, world: Any) -> list[Any]:
        ranks = np.zeros(500, np.int64)
        slabs = np.ascontiguousarray(world.believed[of_size])
        done = code.sample(world, slabs, seed % 3, 3, oldest, dead, ranks)
        cold, cool = (int(np.sort(ranks[:done])[min(done - 1, at)]) for at in (4, 12))
        spared = np.unique(lookup.hashes_of(keys[: seed % 3]))
        answers: list[Any] = [done, ranks]
        for slab in slabs:
            begin = int(slab[slot_code.FIRST])
            end = begin + int(slab[slot_code.SLOTS])
            victims = np.zeros(end - begin + 1, np.int64)
            found = code.coldest(world, begin, end, 8, cold, cool, oldest, dead, victims)
            answers += [found, victims[: found + 1].copy()]
            answers += [code.evict(world, victims, spared, slots, oldest, dead), victims]
            slab_of = world.slabs[of_size]
            slab_of[:, slot_code.FREE_SLOTS] += 3
            world.slabs[of_size] = slab_of
        return answers

    def look(code: Any, world: Any) -> list[Any]:
        of_keys = keys, numbers, oldest
        located, facts = code.locate(world, *of_keys, world.by_first)
        return [code.find(world, *of_keys), code.count_leading(world, *of_keys), located, facts]

    def use(code: Any, world: Any) -> list[Any]:
        return [code.touch(world, 275, code.find(world, keys, one, 0), half)]

    def learn(code: Any, world: Any) -> list[Any]:
        return [code.learn(world, rng_capacity, half, ROWS, 20), code.rank_again(world, 275, 90)]

    def follow(_: Any, world: Any) -> list[Any]:
        world.header[slot_code.POLICY], world.header[slot_code.TO_RANK] = seed % miniatures.CANDIDATES, ROWS
        return []

    def evict_beside(code: Any, world: Any) -> list[Any]:
        # As after pages of a second identity have gone.
        states = np.full(len(keys), slot_code.PAGE | int(one[0]) << slot_code.NUMBER_SHIFT)
        states |= (world.identities[one[0], slot_code.GENERATION] & slot_code.GENERATIONS) << 8
        beside, freed = np.full((IDENTITIES, 2), -1), np.zeros(seed % 40, np.int64)
        needed = np.full((IDENTITIES, 2), -1)
        beside[one[0], : seed % 3] = np.delete(np.arange(IDENTITIES), one[0])[: seed % 3]
        needed[:, 0], needed[seed % IDENTITIES, 1] = one[0], seed % IDENTITIES
        of_pages = lookup.hashes_of(keys), states, beside, needed, oldest
        return [code.evict_beside(world, *of_pages, freed), freed]

    def forget(code: Any, world: Any) -> list[Any]:
        some = code.find(world, keys, one, 0)[seed % 30 :].copy()
        answers = [code.seize(world, some, pending, ticket), some.copy()]
        return [*answers, code.give_back(world, some, pending, ticket)]

    def grow(code: Any, world: Any) -> list[Any]:
        return [code.grow_sets(world, min(SETS_MOST, int(world.header[slot_code.SETS])) + 1)]

    def clear(_: Any, world: Any) -> list[Any]:
        identity = world.identities[one[0]]
        identity[slot_code.GENERATION] += 1
        identity[slot_code.CLEARED] = now
        return []

    def find_again(code: Any, world: Any) -> list[Any]:
        first, size, many = 480, SIZES[0], 30
        world.rows[first : first + many, STATE] = slot_code.UNKNOWN
        random_words = np.random.default_rng(seed)
        created = random_words.integers(0, now + 5, many)
        of_keys = keys[:many].copy(), random_words.integers(-1, IDENTITIES, many), np.arange(many), created
        seals = random_words.integers(0, 99, (many, 2))
        return [code.adopt(world, *of_keys, seals, first, size, now)]

    def count_all(code: Any, world: Any) -> list[Any]:
        counts = np.zeros(4, np.int64)
        return [code.count(world, 0, ROWS, oldest, counts), counts]

    half, rng_capacity = 1 << 19, rng.choice([12, 40, 40, 40])
    rng_most = rng.choice([3, 50, 4096])
    often = [write, write, write, write, look, use, learn, learn, follow]
    return rng.choice([*often, leave_pending, evict, evict, evict_beside, forget, grow, clear, find_again, count_all])


in_c = pytest.mark.skipif(native.core() is None, reason="missing: the native core")


# -- in C and in Python ------------------------------------------------------------------------------------------------


@in_c
@pytest.mark.parametrize("seed", range(4))
def test_c_and_python_agree_to_the_bit(seed: int) -> None:
    """Processes with the native core and without it may use one directory."""
    rng, left, right, names, most = random.Random(seed), World(), World(), set(), 0
    for now in range(1, TIMES):
        step = random_step(rng, now)
        names.add(step.__name__)
        for answer, other in zip(step(IN_C, left), step(PLAIN, right), strict=True):
            assert np.array_equal(answer, other), step.__name__
        for one, other in zip(left.words, right.words, strict=True):
            assert np.array_equal(one, other), step.__name__
        most = max(most, int((left.rows[:, STATE] & STATES == PAGE).sum()))
    assert len(names) == 13
    assert most > 100


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


@in_c
@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_words_say_c_ends_and_writes_nowhere_else(seed: int) -> None:
    """With the address sanitizer it reads nowhere else either."""
    rng, canary, beside, answered = random.Random(1000 + seed), 0x5EED, 64, 0
    sound = World()
    for now in range(1, TIMES):
        random_step(rng, now)(IN_C, sound)
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
            random_step(rng, now)(IN_C, damaged)
            answered += 1
        for words in padded:
            assert (words[:beside] == canary).all() and (words[-beside:] == canary).all()
    assert answered == 5 * (TIMES - 1)


@in_c
def test_a_thread_in_a_call_keeps_the_words_of_an_index_that_is_closed(tmp_path: Path) -> None:
    """One that a timeout left behind: an address alone would be that of nothing, or of something else."""
    memory = IndexMemory(new_index(CAPACITY))
    memory.rows[:100, STATE] = FREE
    table, core, counts = memory.table, native.core(), np.zeros(4, np.int64)
    memory.close()
    assert core is not None
    core(index_words.Count(table.address, native.address(counts), 0, 65_536, 0))
    assert counts[FREE] == 100
    with pytest.raises(AttributeError):
        index_words.count(memory, 0, 1, 0, counts)


@in_c
@pytest.mark.parametrize("seed", range(4))
def test_numpy_answers_what_c_does(seed: int) -> None:
    rng, world, found_some = random.Random(100 + seed), World(), 0
    for now in range(1, TIMES // 2):
        random_step(rng, now)(IN_C, world)
        seed_of_step = rng.randrange(1 << 30)
        in_c = looked_up(world, random.Random(seed_of_step), now)
        with without_core():
            plain = looked_up(world, random.Random(seed_of_step), now)
        for one, other in zip(in_c, plain, strict=True):
            assert np.array_equal(one, other)
        found_some += int((in_c[0] >= 0).any())
    assert found_some > 20


def looked_up(world: World, rng: random.Random, now: int) -> list[Any]:
    keys, oldest = chain(rng), rng.choice([0, max(0, now - 30)])
    numbers = np.array([rng.randrange(IDENTITIES)]) if rng.random() < 0.7 else np.arange(40) % 5 - 1
    dead, victims = np.array(rng.choice([[], [77]]), np.int64), np.zeros(ROWS + 1, np.int64)
    cold, cool = rng.choice([-1, 1 << 40]), rng.choice([-1, (1 << 40) + 100])
    begin, step, together = rng.randrange(300), rng.randint(1, 5), rng.choice([1, 2, 8, 32])
    ranks, counts, first = np.full(rng.choice([20, 400]), -9), np.zeros(4, np.int64), rng.randrange(step)
    many = index_words.coldest(world, begin, begin + 130, together, cold, cool, oldest, dead, victims)
    return [
        index_words.find(world, keys, numbers, oldest),
        index_words.count_leading(world, keys, numbers, oldest),
        *index_words.locate(world, keys, numbers, oldest, world.by_first),
        *(many, victims[: many + 1].copy()),
        *(index_words.sample(world, world.by_first, first, step, oldest, dead, ranks), ranks),
        *(index_words.count(world, 0, ROWS, oldest, counts), counts),
    ]


@in_c
def test_numpy_leaves_out_only_uses_of_pages_that_were_used_just_now(
    tmp_path: Path,
) -> None:
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index, LARGE, 64)
        keys = keys_of(range(64))
        store(index, keys, LARGE)
        for _ in range(3):
            store(index, keys_of(range(1000, 1010)), LARGE)
            remove(index, keys_of(range(1000, 1010)))
            before = index.memory.rows.copy(), index.memory.header.copy()
            found = index.locate(keys)
            index.note_hits(found, keys, len(found))
            after = index.memory.rows.copy(), index.memory.header.copy()
            index.memory.rows[:], index.memory.header[:] = before
            with without_core():
                index.note_hits(found, keys, len(found))
            assert np.array_equal(index.memory.rows, after[0])
            # Nor does numpy note uses for the miniatures, which nobody would look at.
            assert np.array_equal(index.memory.header[: slot_code.EVENTS], after[1][: slot_code.EVENTS])
        assert not np.array_equal(before[0][:, USED], after[0][:, USED])


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_pages_rank_as_the_policy_says(tmp_path: Path, seed: int) -> None:
    """Written as a chain, then used now and again, step by step."""
    rng, capacity = random.Random(seed), 300
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index, SMALL, capacity)
        index.memory.header[slot_code.POLICY] = eviction.LEARNED_DISTANCE
        policy, keys = PageByPage(capacity), keys_of(range(40))
        index.memory.header[slot_code.INSERTS : slot_code.REUSES + 1] = start = rng.randrange(500), 70_000, 100
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
            assert Clock(*index.memory.header[slot_code.INSERTS : slot_code.REUSES + 1].tolist()) == clock
        assert max(rank.hits for rank in expected) > 0


def ranks(index: SlabIndex, keys: Any) -> list[Rank]:
    rows = index.memory.rows[index.rows_of(keys)]
    return [Rank(int(row[PRIORITY]), int(row[USED]) >> CLOCK_SHIFT, int(row[USED]) & 7) for row in rows]


# -- an end in the middle ----------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for a SIGKILL: nothing is done afterwards."""


class Fuse:
    """Burns down by one with each store."""

    def __init__(self) -> None:
        self.left = -1

    def burn(self) -> None:
        if self.left == 0:
            raise KilledError
        self.left -= 1


class Fused(np.ndarray):
    """Words of which each store burns the fuse; those that come after its end are not made."""

    fuse: Fuse | None = None

    def __array_finalize__(self, of: Any) -> None:
        self.fuse = getattr(of, "fuse", None)

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.fuse is not None:
            self.fuse.burn()
        super().__setitem__(where, value)


def fused(index: SlabIndex) -> Fuse:
    fuse, memory = Fuse(), index.memory
    for name in ("rows", "sets", "header", "identities", "sizes", "slabs", "ghosts"):
        words = getattr(memory, name).view(Fused)
        words.fuse = fuse
        setattr(memory, name, words)
    return fuse


def _publish(index: SlabIndex) -> None:
    ticket, rows, _ = take(index, 12, evict=False)
    publish(index, ticket, keys_of(range(15, 27)), rows, now=3000, oldest=2000)


def _evict(index: SlabIndex) -> None:
    take(index, 30)


def _remove(index: SlabIndex) -> None:
    remove(index, keys_of(range(2, 8)))


def _grow(index: SlabIndex) -> None:
    index_words.grow_sets(index.memory, int(index.memory.header[slot_code.SETS]) + 5)


def _drop(index: SlabIndex) -> None:
    slab = index.view().slabs[9]
    if index.drop_slab(slab):
        index.forget_slab(slab)


def _adopt(index: SlabIndex) -> None:
    (slab,) = index.unknown_slabs()
    words = keys_of(range(14, 26)).words.copy()
    facts = np.zeros(12, np.int64), np.full(12, 1000), 994 + np.arange(12), np.ones((12, 2), np.int64)
    begin = index.looked_at(slab)
    index.adopt(slab, begin, words[begin:], *(fact[begin:] for fact in facts))
    index.end_slab(slab)


def prepared(index: SlabIndex) -> None:
    index.add_found_slabs([(7, SMALL, 12)])
    index.register([A])
    index.memory.header[[slot_code.SETS, slot_code.LEVEL]] = 2
    for _ in range(2):
        slab = index.begin_slab(SMALL, lambda _: 24)
        assert slab is not None
        index.finish_slab(slab)
    store(index, keys_of(range(20)), evict=False)
    for number in range(100, 108):
        store(index, [key_of(number)], evict=False)
    store(index, keys_of(range(12, 18), B), evict=False)
    index.go_together({A: [B]})


@pytest.mark.parametrize("action", [_publish, _evict, _remove, _grow, _drop, _adopt])
def test_a_process_that_dies_at_any_store_leaves_nothing_to_repair(
    tmp_path: Path, action: Callable[[SlabIndex], None]
) -> None:
    """No wrong row is found, every page can be stored and found again, and no slot stays taken."""
    with without_core():
        for step in range(5000):
            with new_index_in(tmp_path, CAPACITY) as index:
                members = members_of(index)
                prepared(index)
                join(index, 2)
                fuse = fused(index)
                fuse.left = step
                died = False
                try:
                    action(index)
                except KilledError:
                    died = True
                fuse.left = -1
                join(index, 1)
                members.dead.add(2)
                index._dead(anew=True)
                assert_sound(index)
                if action is _adopt and index.unknown_slabs():
                    _adopt(index)
                    assert index.unknown_slabs() == []
                    assert_sound(index)
                assert_all_slots_are_used_again(index)
            if not died:
                break
        assert not died
        assert step > 5


def test_an_expired_page_that_a_kill_left_behind_hides_no_newer_one(tmp_path: Path) -> None:
    """A page said to be there already, which could not be read."""
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index)
        chain = keys_of(range(3))
        store(index, chain, now=1000)
        rows = index.rows_of(chain)
        # Killed after the entry of the second page was removed, and before its slot was free.
        index.memory.sets[(index.memory.sets & slot_code.ROW) == rows[1] + 1] = 0
        index.memory.rows[rows[[0, 2]], slot_code.CREATED] = 3000
        assert store(index, chain, now=3000, oldest=2000, evict=False) == [0, 1, 0]
        assert index.count_leading(chain, 2000) == len(index.locate(chain, 2000)) == 3


def assert_sound(index: SlabIndex) -> None:
    keys = [*keys_of(range(30)), *keys_of(range(100, 108))]
    found = index.locate(keys)
    hashes = lookup.hashes_of(np.frombuffer(bytearray(b"".join(keys)), np.int64).reshape(-1, 6))
    rows = index.memory.rows[found.rows]
    assert (rows[:, slot_code.HASH] == hashes[found.positions]).all()
    assert (rows[:, slot_code.LENGTH] == 1000).all()
    assert set(rows[:, slot_code.CREATED].tolist()) <= {1000, 3000, *range(990, 1010)}
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


@pytest.mark.parametrize("code", ["native", "plain"])
def test_look_ups_beside_changes_find_every_page_that_is_there(tmp_path: Path, code: str) -> None:
    """While sets are added, and others are written, evicted and removed."""
    with nullcontext() if code == "native" else without_core(), new_index_in(tmp_path, CAPACITY) as index:
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
            index_words.grow_sets(index.memory, int(index.memory.header[slot_code.SETS]) + 37)
            remove(index, others[::3])
            number += 1
        ended.set()
        for thread in threads:
            thread.join()
        assert missed == []

"""What is done to the mapped words: the same compiled and plain, the ranks of the eviction policy, and nothing outside
the arrays whatever is in them."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import mmap
import os
import random
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.eviction_policy import Ghost, PageByPage, Rank
from hicache_ext.runtime import jit
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.eviction import Clock
from hicache_ext.storage.tiers.file.slab import lookup, slot_code
from hicache_ext.storage.tiers.file.slab.mapped import Words
from hicache_ext.storage.tiers.file.slab.slot_code import (
    FREE,
    GROUP_WORDS,
    HASH,
    KEY_WORDS,
    OBJECT,
    PAGE,
    PLACE,
    PRIORITY,
    RECORD_WORDS,
    STATE,
    USED,
    WAYS,
)

SIZES = (4096, 65_536, 1 << 20)
SLABS = ((3, 4096, 70, 32, 100), (5, 65_536, 33, 32, 0), (6, 1 << 20, 7, 2, 40), (9, 4096, 5, 32, 506))
"""Number, slot size, slots, slots in a group, first record: neither the records nor the numbers in order."""
ROWS = 512
"""Rows of records, groups and sets of ghosts: whole pages of memory each."""
BUCKETS = 512
SETS = 32
TIME_LIMIT = 60


@dataclass
class World:
    """All arrays that kernels work on."""

    records: Words = field(default_factory=lambda: np.zeros((ROWS, RECORD_WORDS), np.int64))
    groups: Words = field(default_factory=lambda: np.zeros((ROWS, GROUP_WORDS), np.int64))
    buckets: Words = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    ghosts: Words = field(default_factory=lambda: np.zeros((3, SETS, WAYS), np.int64))
    clocks: Words = field(default_factory=lambda: np.array([[size, 0, 0, 0] for size in SIZES], np.int64))
    remembered: Words = field(default_factory=lambda: np.zeros(1, np.int64))

    def __post_init__(self) -> None:
        self.slabs = np.array(SLABS, np.int64)
        self.capacities = np.array([self.slots(size) for size in SIZES], np.int64)

    @property
    def table(self) -> tuple[Words, Words, Words, Words]:
        return self.records, self.groups, self.buckets, self.slabs

    @property
    def mapped(self) -> list[Words]:
        """What other processes can write."""
        return [self.records, self.groups, self.buckets, self.ghosts, self.clocks, self.remembered]

    def slots(self, slot_size: int) -> int:
        return sum(slots for _, size, slots, _, _ in SLABS if size == slot_size)

    def copy(self) -> World:
        return World(*[words.copy() for words in self.mapped])


def chain(keys: list[int]) -> Words:
    """Keys of which many share the low bits of their hash, so that the hash table has to look further."""
    words = np.zeros((len(keys), KEY_WORDS), np.int64)
    words[:, 0] = [key % 3 for key in keys]
    words[:, 2] = [(key & 7) | (key >> 3) << 40 for key in keys]
    words[:, 5] = [(key % 3 - 1) << 62 for key in keys]
    return words


def plain_copies() -> tuple[ModuleType, ModuleType]:
    """slot_code and lookup as they are where nothing is compiled."""

    def copy_of(module: ModuleType) -> ModuleType:
        assert module.__spec__ is not None and module.__spec__.loader is not None
        copied = importlib.util.module_from_spec(module.__spec__)
        module.__spec__.loader.exec_module(copied)
        return copied

    code, lookups = copy_of(slot_code), copy_of(lookup)
    lookups.slot_code = code  # type: ignore[attr-defined]
    return code, lookups


Step = Callable[[ModuleType, World], list[Any]]


def random_step(rng: random.Random) -> Step:
    """One call as the index makes it, with what it answers."""
    slot_size = rng.choice(SIZES)
    positions = sorted(rng.sample(range(40), rng.randint(1, 24)))
    keys = chain([rng.randrange(4) * 100 + n for n in range(40)])
    generations = np.array([rng.randrange(2) for _ in range(rng.choice([1, 40]))])
    writer = np.array([rng.randrange(3), 7, 7, 7, 0, 0])
    count, now, linked = rng.randint(1, 30), rng.randrange(100), rng.randrange(2)
    spared = np.unique(keys[rng.sample(range(40), rng.choice([0, 6])), 2])
    rows = np.array([rng.randrange(-1, ROWS) for _ in range(20)])
    oldest = rng.choice([0, now])

    def write(code: ModuleType, world: World) -> list[Any]:
        taken = np.zeros((2, len(positions)), np.int64)
        done = code.take_free(*world.table, slot_size, writer, taken)
        pending = np.zeros(done, np.int64)
        found = code.rows_pending(world.records, world.slabs, writer, np.ascontiguousarray(taken[:, :done]), pending)
        of, clock = np.array(positions)[:done], world.clocks[SIZES.index(slot_size)]
        lengths, created = np.full(done, 1000) + of, np.array([now])
        ghosts = world.ghosts, world.remembered, 300
        described = pending[pending >= 0]
        of, lengths = of[pending >= 0], lengths[pending >= 0]
        code.describe_pages(
            world.records, world.buckets, keys, generations, of, described, lengths, created, linked, clock,
            world.slots(slot_size), *ghosts,
        )  # fmt: skip
        published = np.zeros(len(described), np.int64)
        return [taken, found, pending, code.publish_pages(*world.table, described, published), published]

    def take(code: ModuleType, world: World) -> list[Any]:
        taken = np.zeros((2, count), np.int64)
        return [code.take_free(*world.table, slot_size, writer, taken), taken]

    def touch(code: ModuleType, world: World) -> list[Any]:
        return [code.touch_chain(*world.table, keys, generations, world.clocks, world.capacities)]

    def evict(code: ModuleType, world: World) -> list[Any]:
        room = world.slots(slot_size)
        ghosts = world.ghosts, world.remembered
        return [code.evict_pages(*world.table, slot_size, count, room >> 4, room, spared, *ghosts)]

    def forget(code: ModuleType, world: World) -> list[Any]:
        found = np.zeros(len(keys), np.int64)
        code.find(world.records, world.buckets, keys, generations, 0, found, 0)
        return [found, code.forget_pages(*world.table, found[positions])]

    def give_back(code: ModuleType, world: World) -> list[Any]:
        return [code.give_back(*world.table, rows), code.forget_pages(*world.table, rows)]

    def look(code: ModuleType, world: World) -> list[Any]:
        found, leading = np.zeros(len(keys), np.int64), np.full(len(keys), -1)
        placed, said = np.zeros((4, len(keys)), np.int64), np.zeros(4, np.int64)
        fresh = np.arange(len(SLABS)) * 20
        return [
            code.find(world.records, world.buckets, keys, generations, oldest, found, 0),
            code.find(world.records, world.buckets, keys, generations, oldest, leading, 1),
            code.locate(world.records, world.buckets, keys, generations, oldest, world.slabs, fresh, placed, said),
            code.count_free(world.groups, world.slabs, slot_size, count),
            *(found, leading, placed, said),
        ]

    def settle(code: ModuleType, world: World) -> list[Any]:
        return [code.settle_all(*world.table)]

    return rng.choice([write, write, write, write, take, touch, touch, evict, forget, give_back, look, settle])


def fill_with_garbage(world: World, rng: random.Random) -> None:
    """Some words of some arrays, or all of them: any bits, small numbers, the extremes."""
    random_words = np.random.default_rng(rng.randrange(1 << 32))
    for words in world.mapped:
        kind = rng.choice(["any", "small", "extreme", "ones", "bytes"])
        garbage = {
            "any": lambda of: random_words.integers(-(1 << 63), 1 << 63, of.shape, np.int64),
            "small": lambda of: random_words.integers(-3, ROWS + 3, of.shape, np.int64),
            "extreme": lambda of: random_words.choice([-(1 << 63), (1 << 63) - 1, -1, 0, 1], of.shape),
            "ones": lambda of: np.full(of.shape, -1),
            "bytes": lambda of: np.full(of.shape, 0xA5A5A5A5A5A5A5A5 - (1 << 64)),
        }[kind](words)
        chosen = random_words.random(words.shape) < rng.choice([0, 0.05, 0.5, 1])
        words[chosen] = garbage[chosen]
    # States that are none would mostly be free slots.
    for row in rng.sample(range(ROWS), rng.choice([0, ROWS // 2])):
        world.records[row, STATE] = world.records[row, STATE] & ~0xFF | rng.choice([FREE, 1, PAGE])
        if rng.random() < 0.5:
            world.records[row, PLACE] = rng.choice(SLABS)[0] << 32 | rng.randrange(80)


def settled() -> World:
    world = World()
    slot_code.settle_all(*world.table)
    return world


# -- compiled and plain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [False, True])
def test_compiled_and_plain_code_agree_to_the_bit(garbage: bool) -> None:
    """Processes with numba and without it may use one directory."""
    assert jit.is_compiled(slot_code.find)
    plain, plain_lookup = plain_copies()
    assert not hasattr(plain.find, "py_func")
    rng = random.Random(11)
    left, right = settled(), settled()
    done = 0
    for number in range(250):
        if garbage and number % 10 == 0:
            fill_with_garbage(left, rng)
            right = left.copy()
        step = random_step(rng)
        with np.errstate(over="ignore"):
            answers, expected = step(slot_code, left), step(plain, right)
        for answer, other in zip(answers, expected, strict=True):
            assert np.array_equal(answer, other), step.__name__
        for one, other in zip(left.mapped, right.mapped, strict=True):
            assert np.array_equal(one, other), step.__name__
        done += answers[0] is not None
        keys = chain([rng.randrange(500) for _ in range(60)])
        generations = np.array([rng.randrange(2) for _ in range(rng.choice([1, 60]))])
        look_up = left.records, left.buckets, keys, generations, rng.choice([0, 50])
        assert np.array_equal(lookup.find(*look_up), plain_lookup.find(*look_up))
        assert lookup.count_leading(*look_up) == plain_lookup.count_leading(*look_up)
        of_slabs = left.slabs, np.arange(len(SLABS)) * 20
        for one, other in zip(
            lookup.locate(*look_up, *of_slabs), plain_lookup.locate(*look_up, *of_slabs), strict=True
        ):
            assert np.array_equal(one, other)
    assert done == 250
    if not garbage:
        assert np.count_nonzero(left.records[:, STATE] & 0xFF == PAGE) > 20


def test_an_entry_of_no_row_is_nowhere_where_nothing_is_mapped() -> None:
    _, plain = plain_copies()
    keys = chain([9, 10])
    buckets = np.zeros(8, np.int64)
    for of in range(2):
        wanted = int(slot_code._hash_of(keys, of))
        buckets[wanted & 7] = (wanted & (1 << 31) - 1) << 32
    assert buckets.any()
    arguments = np.zeros((0, RECORD_WORDS), np.int64), buckets, keys, np.zeros(1, np.int64), 0
    assert plain.find(*arguments).tolist() == lookup.find(*arguments).tolist() == [-1, -1]


# -- words that lie ----------------------------------------------------------------------------------------------------


def guarded(words: Words) -> Words:
    """A copy that ends, and where it is whole pages of memory begins, where nothing can be read or written."""
    page = mmap.PAGESIZE
    size = -(-words.nbytes // page) * page
    memory = np.frombuffer(mmap.mmap(-1, size + 2 * page), np.int64)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    for begin in (memory.ctypes.data, memory.ctypes.data + page + size):
        assert mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(page), 0) == 0
    end = (page + size) // 8
    copied: Words = memory[end - words.size : end].reshape(words.shape)
    copied[:] = words
    return copied


def in_a_child(action: Callable[[], None]) -> int:
    """How a process ended that did this: 0, or as os.waitpid says. It may not take for ever."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            faulthandler.disable()
            signal.alarm(TIME_LIMIT)
            action()
            status = 0
        except BaseException:  # noqa: BLE001 - pytest must not go on in the child
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def assert_settled(world: World) -> None:
    """Nothing changes when all is made anew, and pages are found where they are."""
    again = world.copy()
    assert slot_code.settle_all(*again.table) == 0
    for _, _, slots, _, base in SLABS:
        for column in (STATE, PLACE):
            assert np.array_equal(
                world.records[base : base + slots, column], again.records[base : base + slots, column]
            )
        assert np.array_equal(world.groups[base : base + slots + 1], again.groups[base : base + slots + 1])
    rows = np.concatenate([np.arange(base, base + slots) for _, _, slots, _, base in SLABS])
    pages = rows[world.records[rows, STATE] & 0xFF == PAGE]
    keys, generations = world.records[pages, :KEY_WORDS], world.records[pages, STATE] >> 16
    assert lookup.find(world.records, world.buckets, keys, generations, 0).tolist() == pages.tolist()
    assert np.count_nonzero(world.buckets) == len(pages)
    fresh = np.zeros(len(SLABS), np.int64)
    found, _ = lookup.locate(world.records, world.buckets, keys, generations, 0, world.slabs, fresh)
    assert found.shape[1] == len(pages)


def run_on_garbage(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        world = settled()
        for _ in range(5):
            random_step(rng)(slot_code, world)
        fill_with_garbage(world, rng)
        world = World(*[guarded(words) for words in world.mapped])
        for _ in range(8):
            random_step(rng)(slot_code, world)
        slot_code.settle_all(*world.table)
        assert_settled(world)
        for _ in range(8):
            random_step(rng)(slot_code, world)
        assert_settled(world)


def test_a_word_outside_an_array_ends_the_process() -> None:
    """What the next test relies on."""
    assert in_a_child(lambda: ctypes.string_at(guarded(np.zeros(512, np.int64)).ctypes.data - 1, 1)) != 0
    assert in_a_child(lambda: ctypes.string_at(guarded(np.zeros(12, np.int64)).ctypes.data + 96, 1)) != 0


@pytest.mark.parametrize("seed", range(6))
def test_garbage_neither_hangs_nor_leads_outside_the_arrays_and_is_settled(seed: int) -> None:
    """The files may hold anything, and what is compiled checks no index by itself."""
    assert in_a_child(lambda: run_on_garbage(seed)) == 0


def write_pages(world: World, keys: Words, slot_size: int = SIZES[0]) -> Words:
    """A chain, all of it at once; its rows."""
    count, writer = len(keys), np.array([1, 2, 3, 4, 0, 0])
    taken, rows, published = np.zeros((2, count), np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    assert slot_code.take_free(*world.table, slot_size, writer, taken) == count
    assert slot_code.rows_pending(world.records, world.slabs, writer, taken, rows) == count
    slot_code.describe_pages(
        world.records, world.buckets, keys, np.zeros(1, np.int64), np.arange(count), rows, np.full(count, 1000),
        np.array([77]), 1, world.clocks[SIZES.index(slot_size)], world.slots(slot_size), world.ghosts,
        world.remembered, 300,
    )  # fmt: skip
    assert slot_code.publish_pages(*world.table, rows, published) == count
    return rows


def test_a_page_that_says_that_its_slot_is_in_another_slab_leaves_that_one_alone() -> None:
    world = settled()
    rows = write_pages(world, chain(list(range(10))))
    world.records[rows[3], PLACE] = 5 << 32 | 3
    groups = world.groups[:34].copy()
    assert slot_code.forget_pages(*world.table, rows[3:4]) == 1
    assert np.array_equal(world.groups[:34], groups)


def test_pages_with_the_highest_priority_there_can_be_are_evicted_all_the_same() -> None:
    """What is added to a priority must not become negative: then nothing would be old enough ever."""
    world = settled()
    rows = write_pages(world, chain(list(range(75))))
    world.records[rows, PRIORITY] = slot_code.NO_PAGE - 1
    slot_code.settle_all(*world.table)
    spared = np.unique(world.records[rows[:3], 2])
    ghosts = world.ghosts, world.remembered
    assert slot_code.evict_pages(*world.table, SIZES[0], 1, 4, 75, spared, *ghosts) >= 1
    assert (world.records[rows, PRIORITY] == slot_code.NO_PAGE - 1).all()


def test_a_page_of_before_time_began_is_no_page() -> None:
    """It would be found by those who ask whether it is there, and by nobody who wants to read it."""
    world = settled()
    rows = write_pages(world, chain([1, 2]))
    world.records[rows[0], OBJECT] |= -1 << 63
    assert slot_code.settle_all(*world.table) == 1
    assert_settled(world)


def test_a_slot_that_is_said_to_be_free_and_holds_a_page_is_not_taken() -> None:
    world = settled()
    rows = write_pages(world, chain(list(range(10))))
    world.groups[[101, 507], slot_code.FREE_SLOTS] = -1
    taken = np.zeros((2, 75), np.int64)
    assert slot_code.take_free(*world.table, SIZES[0], np.zeros(6, np.int64), taken) == 65
    assert (world.records[rows, STATE] & 0xFF == PAGE).all()


# -- ranks -------------------------------------------------------------------------------------------------------------


def random_clock(rng: random.Random, capacity: int) -> Clock:
    reuses = rng.choice([0, 1, 100, 2047, 2048, eviction.MAX_REUSES])
    mean = rng.choice([0, 1, capacity // 3, capacity, 70 * capacity])
    return Clock(rng.randrange(1 << rng.choice([4, 20, 50])), mean * min(reuses, 2048), reuses)


def rank_of(record: Words) -> Rank:
    return Rank(int(record[PRIORITY]), int(record[USED]), int(record[STATE]) >> 8 & 0xFF)


@pytest.mark.parametrize("seed", range(20))
def test_pages_written_rank_as_the_policy_says(seed: int) -> None:
    """With ghosts and without, behind a page that is there and behind none."""
    rng = random.Random(seed)
    world = settled()
    capacity = rng.choice([1, 5, 64, 1000, 1 << 30])
    clock = random_clock(rng, capacity)
    world.clocks[0, 1:] = clock
    before = rng.choice([None, 1, 9])
    # Spread evenly: no ghost has to make room for another.
    keys = np.random.default_rng(seed).integers(0, 1 << 62, (70, KEY_WORDS))
    first = 0
    rank: Rank | None = None
    if before is not None:
        rows = write_pages(world, keys[: before + 1])
        rank = Rank(rng.choice([0, 1, 1 << 40, (1 << 40) + clock.inserts]), 0, 0)
        world.records[rows[before], PRIORITY] = rank.priority
        world.clocks[0, 1:] = clock
        first = before + 1
    ghosts: list[Ghost | None] = []
    for of in range(first, 70):
        ghosts.append(None if rng.random() < 0.5 else Ghost(rng.randrange(clock.inserts + 1), rng.randrange(8)))
        if ghosts[-1] is not None:
            record = np.zeros((1, RECORD_WORDS), np.int64)
            record[0, HASH], record[0, USED] = slot_code._hash_of(keys, of), ghosts[-1].used
            record[0, STATE] = PAGE | ghosts[-1].hits << 8
            slot_code._remember(record, 0, world.ghosts, world.remembered)
    count = 70 - first
    slot_code.describe_pages(
        world.records, world.buckets, keys, np.zeros(1, np.int64), np.arange(first, 70), np.arange(count) + 200,
        np.ones(count, np.int64), np.array([77]), 1, world.clocks[0], capacity, world.ghosts, world.remembered, 300,
    )  # fmt: skip
    written = world.records[200 : 200 + count]
    expected = []
    for depth, ghost in enumerate(ghosts, first):
        clock, rank = PageByPage(capacity).inserted(clock, depth, rank, ghost)
        expected.append(rank)
    assert Clock(*world.clocks[0, 1:].tolist()) == clock
    assert [rank_of(record) for record in written] == expected
    assert any(ghosts) and (written[:, STATE] & 0xFF == slot_code.PENDING).all()


@pytest.mark.parametrize("seed", range(20))
def test_pages_used_rank_as_the_policy_says(seed: int) -> None:
    """Step by step, and of several sizes, each with its own clock."""
    rng = random.Random(seed)
    world = settled()
    keys = chain(list(range(60)))
    rows = np.empty(60, np.int64)
    # A gap is no page before the next one.
    rows[:30], rows[31:] = write_pages(world, keys[:30]), write_pages(world, keys[31:], SIZES[1])
    clocks = {}
    for of, size in enumerate(SIZES):
        clocks[size] = random_clock(rng, world.slots(size))
        world.clocks[of, 1:] = clocks[size]
    changed, before, expected = 0, None, []
    for depth in range(60):
        if depth == 30:
            before = None
            continue
        size = SIZES[0] if depth < 30 else SIZES[1]
        clock = clocks[size]
        used = rng.choice([clock.inserts, rng.randrange(clock.inserts + 1), max(0, clock.inserts - rng.randrange(20))])
        rank = Rank((1 << 40) + rng.randrange(-100, 100) + used, used, rng.randrange(8))
        row = world.records[rows[depth]]
        row[PRIORITY], row[USED], row[STATE] = rank.priority, used, PAGE | rank.hits << 8
        renewed = PageByPage(world.slots(size)).renewed(clock, rank, depth, before)
        changed += renewed is not None
        clocks[size], before = renewed or (clock, rank)
        expected.append(before)
    slot_code.settle_all(*world.table)
    assert slot_code.touch_chain(*world.table, keys, np.zeros(1, np.int64), world.clocks, world.capacities) == changed
    assert [rank_of(world.records[row]) for n, row in enumerate(rows) if n != 30] == expected
    assert [Clock(*row[1:]) for row in world.clocks.tolist()] == list(clocks.values())
    assert_settled(world)

"""The operations on the words of an index: in C (native/table.c) or, where that was not built, in Python and numpy.

One function each, which says what it does; slot_code.py and lookup.py are the plain way. Callers hold the change lock,
except those of ``find``, ``count_leading``, ``locate``, ``touch``, ``sample`` and ``count``. ``numbers``: of
identities, one for all pages or one each, -1 for an unknown one. ``oldest``: pages written before it (wall-clock
milliseconds) are as good as gone. ``dead``: members that have ended. ``capacity``: slots, of all sizes. Arrays are
contiguous words.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hicache_ext import native
from hicache_ext.native import Arguments, Core, address, words
from hicache_ext.storage.tiers.file.slab import lookup, slot_code
from hicache_ext.storage.tiers.file.slab.index_memory import IndexMemory
from hicache_ext.storage.tiers.file.slab.slot_code import FACTS, SETS, Words

_LOOKS = 4


def _run(core: Core, memory: IndexMemory, call: type[Arguments], *rest: int) -> int:
    # Held until the call is over: the words stay mapped, whoever closes the index meanwhile.
    table = memory.table
    return core.quick(call, table.address, *rest)


# -- looking up --------------------------------------------------------------------------------------------------------


class Find(Arguments):
    function = "hicache_find"
    _fields_ = words("table keys numbers found key_count number oldest")


class Locate(Arguments):
    function = "hicache_locate"
    _fields_ = words("table keys numbers slabs located key_count number slab_count oldest")


def _looks(memory: IndexMemory) -> Iterator[None]:
    """Once, and again where entries were moved to a new set meanwhile: some were looked for where they are no more."""
    for _ in range(_LOOKS):
        sets = memory.header[SETS]
        yield
        if memory.header[SETS] == sets:
            return


def find(memory: IndexMemory, keys: Words, numbers: Words, oldest: int) -> Words:
    """The row of each page, -1 for nowhere, or written before ``oldest``."""
    rows = np.empty(len(keys), np.int64)
    for _ in _looks(memory):
        if (core := native.core()) is None:
            rows = lookup.find(memory, keys, numbers, oldest)
        else:
            _find(core, memory, keys, numbers, oldest, address(rows))
        if (rows >= 0).all():
            break
    return rows


def count_leading(memory: IndexMemory, keys: Words, numbers: Words, oldest: int) -> int:
    """How many pages are there, and not written before ``oldest``, before the first one that is not."""
    leading = 0
    for _ in _looks(memory):
        if (core := native.core()) is None:
            leading = lookup.count_leading(memory, keys, numbers, oldest)
        else:
            leading = _find(core, memory, keys, numbers, oldest, 0)
        if leading == len(keys):
            break
    return leading


def _find(core: Core, memory: IndexMemory, keys: Words, numbers: Words, oldest: int, found: int) -> int:
    each, of_all = _each_or_one(numbers)
    return _run(core, memory, Find, address(keys), each, found, len(keys), of_all, oldest)


def _each_or_one(numbers: Words) -> tuple[int, int]:
    """``numbers`` and ``number`` of a call."""
    return (0, numbers.item()) if len(numbers) == 1 else (address(numbers), 0)


def locate(
    memory: IndexMemory, keys: Words, numbers: Words, oldest: int, slabs: Words, slabs_at: int = 0
) -> tuple[Words, int]:
    """The pages that are there and not written before ``oldest``: slab numbers, slots, payload lengths, positions in
    ``keys`` and rows, a row each; and the facts about all of them (``slot_code.IN_ORDER``). ``slabs``: by FIRST;
    ``slabs_at``: their address, where it is known."""
    for _ in _looks(memory):
        if (core := native.core()) is None:
            located, facts = lookup.locate(memory, keys, numbers, oldest, slabs)
        else:
            many, located = len(keys), np.empty((5, len(keys)), np.int64)
            each, of_all = _each_or_one(numbers)
            parts = address(keys), each, slabs_at or address(slabs), address(located)
            facts = _run(core, memory, Locate, *parts, many, of_all, len(slabs), oldest)
            count, facts = facts >> FACTS, facts & (1 << FACTS) - 1
            located = located if count == many else located[:, :count]
        if located.shape[1] == len(keys):
            break
    return located, facts


# -- uses --------------------------------------------------------------------------------------------------------------


class Touch(Arguments):
    function = "hicache_touch"
    _fields_ = words("table chain chain_length capacity sampled")


class RankAgain(Arguments):
    function = "hicache_rank_again"
    _fields_ = words("table capacity most")


class Learn(Arguments):
    function = "hicache_learn"
    _fields_ = words("table capacity sampled rows most")


def touch(memory: IndexMemory, capacity: int, chain: Words, sampled: int) -> int:
    """Note a use of the pages in these rows, in the order of their chain; a row may be -1. Returns how many got another
    rank. ``sampled``: how many pages the miniatures see (``slot_code.is_sampled``), 0 where nobody looks at them."""
    if (core := native.core()) is None:
        # A step of Python per page costs more than the rest of a look-up, and changes nothing of pages used just now.
        if (memory.rows[chain, slot_code.USED] >> slot_code.CLOCK_SHIFT == memory.header[slot_code.INSERTS]).all():
            return 0
        return slot_code.touch(memory, capacity, chain, sampled)
    return _run(core, memory, Touch, address(chain), len(chain), capacity, sampled)


def rank_again(memory: IndexMemory, capacity: int, most: int) -> int:
    """Rank by the policy of now what was ranked by another one, at most so many rows. Returns how many are left."""
    if (core := native.core()) is None:
        return slot_code.rank_again(memory, capacity, most)
    return _run(core, memory, RankAgain, capacity, most)


def learn(memory: IndexMemory, capacity: int, sampled: int, rows: int, most: int) -> int:
    """Let the miniatures look at up to ``most`` of the uses that were noted, and choose a policy when it is time.
    ``rows``: behind the last one in use. Returns how many they looked at: without C, none."""
    core = native.core()
    return 0 if core is None else _run(core, memory, Learn, capacity, sampled, rows, most)


# -- slots -------------------------------------------------------------------------------------------------------------


class GrowSets(Arguments):
    function = "hicache_grow_sets"
    _fields_ = words("table wanted")


class TakeFree(Arguments):
    function = "hicache_take_free"
    _fields_ = words("table slabs known of_size taken of_size_count wanted most pending ticket")


class Sample(Arguments):
    function = "hicache_sample"
    _fields_ = words("table slabs dead ranks slab_count dead_count rank_count oldest first step")


class Coldest(Arguments):
    function = "hicache_coldest"
    _fields_ = words("table dead victims dead_count oldest begin end together cold cool")


class Evict(Arguments):
    function = "hicache_evict"
    _fields_ = words("table victims spared dead victim_count spared_count dead_count headroom oldest")


class EvictBeside(Arguments):
    function = "hicache_evict_beside"
    _fields_ = words(
        "table hashes states beside needed freed "
        "gone_count beside_rows beside_width needed_rows needed_width freed_most oldest"
    )


class Seize(Arguments):
    function = "hicache_seize"
    _fields_ = words("table found found_count pending ticket")


class GiveBack(Arguments):
    function = "hicache_give_back"
    _fields_ = words("table taken taken_count pending ticket")


class Count(Arguments):
    function = "hicache_count"
    _fields_ = words("table counts begin end oldest")


def grow_sets(memory: IndexMemory, wanted: int) -> int:
    """Use so many sets; returns how many there are."""
    if (core := native.core()) is None:
        return slot_code.grow_sets(memory, wanted)
    return _run(core, memory, GrowSets, wanted)


def take_free(
    memory: IndexMemory, known: Words, of_size: Words, pending: int, ticket: int, most: int, taken: Words
) -> int:
    """Make free slots pending, up to the length of ``taken``, which gets their rows, in order of place as far as
    possible. ``known``: this process' copy of the slabs, which says where they lie; ``of_size``: the positions in both
    of those to look at. At most so many slots are looked at. Returns the number taken."""
    if (core := native.core()) is None:
        return slot_code.take_free(memory, known, of_size, pending, ticket, most, taken)
    parts = address(memory.slabs), address(known), address(of_size), address(taken)
    return _run(core, memory, TakeFree, *parts, len(of_size), len(taken), most, pending, ticket)


def sample(memory: IndexMemory, slabs: Words, first: int, step: int, oldest: int, dead: Words, ranks: Words) -> int:
    """The ranks of every ``step``-th slot of these slabs, from number ``first`` on. Returns how many there are."""
    if (core := native.core()) is None:
        return lookup.sample(memory, slabs, first, step, oldest, dead, ranks)
    parts = address(slabs), address(dead), address(ranks)
    return _run(core, memory, Sample, *parts, len(slabs), len(dead), len(ranks), oldest, first, step)


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
    """Of the rows from ``begin`` to ``end``, in groups of ``together``: those with a rank up to ``cool`` in groups that
    have one up to ``cold`` go into ``victims``, which ends with -1. Returns their number."""
    if (core := native.core()) is None:
        return lookup.coldest(memory, begin, end, together, cold, cool, oldest, dead, victims)
    parts = address(dead), address(victims)
    return _run(core, memory, Coldest, *parts, len(dead), oldest, begin, end, together, cold, cool)


def evict(memory: IndexMemory, victims: Words, spared: Words, headroom: int, oldest: int, dead: Words) -> int:
    """Free the slots ``victims``, up to a -1, whatever is in them by now that may be taken; ``victims`` keeps those
    that are free then, up to a -1. Pages with a hash in ``spared`` (sorted) get a rank ``headroom`` beyond now instead.
    Returns the number of pages evicted, which does not count those that nobody could ask for."""
    if (core := native.core()) is None:
        return slot_code.evict(memory, victims, spared, headroom, oldest, dead)
    parts = address(victims), address(spared), address(dead)
    return _run(core, memory, Evict, *parts, len(victims), len(spared), len(dead), headroom, oldest)


def evict_beside(
    memory: IndexMemory, hashes: Words, states: Words, beside: Words, needed: Words, oldest: int, freed: Words
) -> int:
    """Evict what is of no use without pages that are gone, whose HASH and STATE these are: under each hash the pages of
    the identities ``beside[number]``, up to a -1, unless a page of ``needed[their number]``, up to a -1, is there.
    Nothing of pages that were cleared; what was written before ``oldest`` is left to its age. ``freed`` gets the rows,
    as many as it has places for. Returns their number."""
    if (core := native.core()) is None:
        return slot_code.evict_beside(memory, hashes, states, beside, needed, oldest, freed)
    parts = address(hashes), address(states), address(beside), address(needed), address(freed)
    return _run(core, memory, EvictBeside, *parts, len(hashes), *beside.shape, *needed.shape, len(freed), oldest)


def seize(memory: IndexMemory, found: Words, pending: int, ticket: int) -> int:
    """Make pages pending, for ``give_back`` to free once their headers are gone; a row may be -1, and becomes -1 where
    there is no page. Returns their number."""
    if (core := native.core()) is None:
        return slot_code.seize(memory, found, pending, ticket)
    return _run(core, memory, Seize, address(found), len(found), pending, ticket)


def give_back(memory: IndexMemory, taken: Words, pending: int, ticket: int) -> int:
    """Free those of these slots that are still pending under this ticket; a row may be -1. Returns their number."""
    if (core := native.core()) is None:
        return slot_code.give_back(memory, taken, pending, ticket)
    return _run(core, memory, GiveBack, address(taken), len(taken), pending, ticket)


def count(memory: IndexMemory, begin: int, end: int, oldest: int, counts: Words) -> int:
    """Count the rows from ``begin`` to ``end`` by state, into ``counts``. Returns the number of pages that can be
    found."""
    if (core := native.core()) is None:
        return lookup.count(memory, begin, end, oldest, counts)
    return _run(core, memory, Count, address(counts), begin, end, oldest)


# -- writing pages -----------------------------------------------------------------------------------------------------


class Publish(Arguments):
    function = "hicache_publish"
    _fields_ = words(
        "table keys numbers positions taken lengths published key_count number taken_count pending ticket "
        "created oldest capacity ghost_limit sampled"
    )


class Adopt(Arguments):
    function = "hicache_adopt"
    _fields_ = words("table keys numbers lengths created seals key_count first slot_size now")


def publish(
    memory: IndexMemory,
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
    """Make pages of slots that are written, with their seals: page ``keys[positions[n]]`` is in row ``taken[n]``. Pages
    at consecutive positions are a chain (``PageByPage.inserted`` of the benchmarks). ``published[n]``: 1; 0 for a page
    that is there already: its slot becomes free; -1 for a slot that is no longer this writer's. ``ghost_limit``:
    evicted pages worth remembering; ``sampled``: as for ``touch``. Returns how many slots became free."""
    if (core := native.core()) is None:
        of_keys = keys, numbers, positions, taken, lengths, pending, ticket, created, oldest
        return slot_code.publish(memory, *of_keys, capacity, ghost_limit, published, sampled)
    each, of_all = _each_or_one(numbers)
    parts = address(keys), each, address(positions), address(taken), address(lengths), address(published)
    moments = created, oldest, capacity, ghost_limit, sampled
    return _run(core, memory, Publish, *parts, len(keys), of_all, len(taken), pending, ticket, *moments)


def adopt(
    memory: IndexMemory,
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
    ``now`` (milliseconds), below all that is written from now on. Returns the number of pages found, less those they
    replace."""
    if (core := native.core()) is None:
        return slot_code.adopt(memory, keys, numbers, lengths, created, seals, first, slot_size, now)
    parts = address(keys), address(numbers), address(lengths), address(created), address(seals)
    return _run(core, memory, Adopt, *parts, len(keys), first, slot_size, now)

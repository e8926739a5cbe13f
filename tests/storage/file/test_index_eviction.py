"""Which pages an index evicts, and that a write gets slots as long as there is a page that may go."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ext.storage.tiers.file.slab import index as index_module
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import CURSOR, FREE_SLOTS, PRIORITY, REMEMBERED, USED
from hicache_ext.storage.tiers.file.slab.shapes import Slab
from tests.rigs.ranks import ORIGIN, TICK
from tests.storage.file.indexes import (
    LARGE,
    MIDDLE,
    NOTHING,
    SMALL,
    A,
    B,
    add_slab,
    assert_no_slot_lost,
    hash_words,
    key_of,
    keys_of,
    members_of,
    present,
    publish,
    store,
    take,
)


def fill_with_heads(index: SlabIndex, count: int, slot_size: int = SMALL, first: int = 0) -> list[bytes]:
    """Pages that are no chain: each is warmer than the one before."""
    keys = list(keys_of(range(first, first + count)))
    for key in keys:
        assert store(index, [key], slot_size, evict=False) == [1]
    return keys


def gone(index: SlabIndex, keys: list[bytes]) -> list[int]:
    there = set(present(index, keys))
    return [position for position in range(len(keys)) if position not in there]


def test_the_coldest_pages_go_first_and_no_others(index: SlabIndex) -> None:
    add_slab(index, LARGE, 20)
    keys = fill_with_heads(index, 20, LARGE)
    assert take(index, 3, LARGE)[2] == 3
    assert gone(index, keys) == [0, 1, 2]


def test_the_page_before_is_looked_up_only_for_an_eviction(index: SlabIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    add_slab(index, SMALL, 8)
    keys, looked_for = keys_of(range(4)), list[bytes | None]()
    store(index, keys)
    bound_behind = index.bound_behind
    monkeypatch.setattr(index, "bound_behind", lambda *of: looked_for.append(of[0]) or bound_behind(*of))
    rows, *_ = index.take(SMALL, 4, index.next_ticket(), 0, NOTHING, evicting=True, before=keys[3])
    assert (len(rows), looked_for) == (4, [])
    rows, _, evicted, _ = index.take(SMALL, 4, index.next_ticket(), 0, NOTHING, evicting=True, before=keys[3])
    assert len(rows) == len(evicted) == 0
    assert looked_for[0] == keys[3]


def test_in_a_small_tier_the_coldest_go_alone(index: SlabIndex) -> None:
    slots = 2 * index_module._COLD_PART
    add_slab(index, SMALL, slots)
    keys = fill_with_heads(index, slots)
    index.memory.rows[index.rows_of([keys[100]]), PRIORITY] = 1
    assert take(index, 1)[2] == 2
    assert gone(index, keys) == [0, 100]


def test_cold_neighbours_go_together_and_warm_ones_between_them_stay(
    index: SlabIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_GROUPS", 1)
    slots = index_module._COOL_PART * 32
    add_slab(index, SMALL, slots)
    keys = list(keys_of(range(slots)))
    store(index, keys, evict=False)
    priorities = index.memory.rows[index.rows_of(keys), PRIORITY]
    priorities[:] = 10_000 + np.arange(slots)
    priorities[96:128] = 500 + np.arange(32)
    priorities[100] = 20_000
    priorities[101] = 1
    index.memory.rows[index.rows_of(keys), PRIORITY] = priorities
    _, rows, evicted = take(index, 1)
    assert gone(index, keys) == [position for position in range(96, 128) if position != 100]
    assert evicted == 31
    assert len(rows) == 1
    # The next writes have neighbours, and nobody else is evicted for them.
    _, rows, evicted = take(index, 30)
    assert rows.tolist() == [row for row in range(97, 128) if row != 100]
    assert evicted == 0


def test_a_take_that_does_not_evict_leaves_all_pages(index: SlabIndex) -> None:
    add_slab(index, SMALL, 20)
    keys = fill_with_heads(index, 20)
    _, rows, evicted = take(index, 5, evict=False)
    assert (len(rows), evicted) == (0, 0)
    assert gone(index, keys) == []


def test_a_threshold_that_was_measured_when_slots_were_free_is_measured_again(index: SlabIndex) -> None:
    """A write got no slot, although every page of a full table might have gone."""
    add_slab(index, SMALL, 50)
    store(index, keys_of(range(13)), evict=False)
    ticket, rows, _ = take(index, 1)
    assert len(rows) == 1
    index.give_back(rows, ticket)
    take(index, 37, evict=False)
    assert len(take(index, 1)[1]) == 1


def test_a_pinned_victim_stays_and_is_out_of_the_way_for_as_long_as_a_tier_lasts(index: SlabIndex) -> None:
    add_slab(index, LARGE, 20)
    keys = fill_with_heads(index, 20, LARGE)
    row = index.rows_of(keys)[1]
    assert take(index, 3, LARGE, spared=hash_words(keys[1:2]))[2] == 3
    assert gone(index, keys) == [0, 2, 3]
    assert index.memory.rows[row, PRIORITY] == ORIGIN + TICK * (index.inserts + 20)


@pytest.mark.parametrize("pinned", [1, 30, 50])
def test_pinned_pages_stay_and_a_write_gets_its_slots_all_the_same(index: SlabIndex, pinned: int) -> None:
    """With the coldest pages all pinned, a write got none."""
    add_slab(index, SMALL, 100)
    keys = fill_with_heads(index, 100)
    spared = hash_words(keys[:pinned])
    for _ in range(3):
        assert len(take(index, 10, spared=spared)[1]) == 10
    assert not set(range(pinned)) & set(gone(index, keys))


def test_where_all_pages_are_pinned_none_goes(index: SlabIndex) -> None:
    add_slab(index, SMALL, 40)
    keys = fill_with_heads(index, 40)
    _, rows, evicted = take(index, 5, spared=hash_words(keys))
    assert (len(rows), evicted) == (0, 0)
    assert gone(index, keys) == []


def test_a_pin_that_is_lifted_lets_its_page_go(index: SlabIndex) -> None:
    add_slab(index, LARGE, 8)
    keys = fill_with_heads(index, 8, LARGE)
    take(index, 4, LARGE, spared=hash_words(keys[:4]))
    assert gone(index, keys) == [4, 5, 6, 7]
    assert len(take(index, 4, LARGE)[1]) == 4
    assert present(index, keys) == []


def test_expired_pages_go_first_and_do_not_count_as_evicted(index: SlabIndex) -> None:
    add_slab(index, SMALL, 64)
    old, young = list(keys_of(range(30))), list(keys_of(range(30, 64)))
    store(index, young, now=2000, evict=False)
    store(index, old, now=1000, evict=False)
    index.memory.rows[index.rows_of(old), PRIORITY] += 1 << 30
    _, rows, evicted = take(index, 30, oldest=1500)
    assert (len(rows), evicted) == (30, 0)
    assert present(index, young) == list(range(34))


def test_cleared_pages_go_first_and_do_not_count_as_evicted(index: SlabIndex) -> None:
    add_slab(index, SMALL, 64)
    cleared, kept = list(keys_of(range(30), B)), list(keys_of(range(34)))
    store(index, kept, evict=False)
    store(index, cleared, evict=False)
    remembered = int(index.memory.header[REMEMBERED])
    index.clear([B])
    _, rows, evicted = take(index, 30)
    assert (len(rows), evicted) == (30, 0)
    assert present(index, kept) == list(range(34))
    assert index.memory.header[REMEMBERED] == remembered
    assert_no_slot_lost(index)


def test_slots_of_a_dead_writer_go_first_those_of_a_live_one_never(index: SlabIndex) -> None:
    add_slab(index, SMALL, 40)
    members = members_of(index)
    index.join()
    members.id = 2
    index.join()
    take(index, 10, evict=False)
    members.id = 3
    index.join()
    _, of_live, _ = take(index, 10, evict=False)
    members.id = 1
    keys = fill_with_heads(index, 20)
    members.dead.add(2)
    _, rows, evicted = take(index, 10)
    assert (len(rows), evicted) == (10, 0)
    assert gone(index, keys) == []
    _, rows, _ = take(index, 30)
    assert len(rows) == 20
    assert not set(rows.tolist()) & set(of_live.tolist())


def test_the_tail_of_a_chain_written_now_can_be_the_next_victim(index: SlabIndex) -> None:
    """One-time chains pass through a full cache without displacing it."""
    add_slab(index, LARGE, 100)
    heads = fill_with_heads(index, 60, LARGE)
    chain = list(keys_of(range(1000, 1040)))
    store(index, chain, LARGE, evict=False)
    rows = index.rows_of(chain)
    assert (np.diff(index.memory.rows[rows, PRIORITY]) < 0).all()
    take(index, 10, LARGE)
    assert gone(index, heads) != []
    index.memory.rows[index.rows_of(heads[10:]), PRIORITY] += 1 << 20
    take(index, 10, LARGE)
    assert 39 in gone(index, chain)
    assert 0 not in gone(index, chain)


def test_a_page_evicted_and_written_again_is_known_by_its_ghost(index: SlabIndex) -> None:
    add_slab(index, LARGE, 4)
    keys = fill_with_heads(index, 4, LARGE)
    found = index.locate([keys[0]])
    store(index, [key_of(10)], LARGE)
    assert gone(index, keys) == [0]
    store(index, [keys[0]], LARGE)
    (row,) = index.rows_of([keys[0]])
    assert index.memory.rows[row, USED] & 7 == 1
    other = index.memory.rows[index.rows_of([key_of(10)]), USED]
    assert other & 7 == 0
    assert len(found) == 1


def test_a_ghost_of_before_a_clear_is_that_of_another_page(index: SlabIndex) -> None:
    add_slab(index, LARGE, 1)
    store(index, [key_of(1)], LARGE)
    store(index, [key_of(2)], LARGE)
    index.clear([A])
    store(index, [key_of(1)], LARGE)
    (row,) = index.rows_of([key_of(1)])
    assert index.memory.rows[row, USED] & 7 == 0


def test_sizes_evict_their_own_pages_only(index: SlabIndex) -> None:
    add_slab(index, SMALL, 20)
    add_slab(index, MIDDLE, 20)
    small, middle = fill_with_heads(index, 20), fill_with_heads(index, 20, MIDDLE, first=100)
    assert len(take(index, 20)[1]) == 20
    assert gone(index, middle) == []
    assert present(index, small) == []
    assert len(take(index, 3, MIDDLE)[1]) == 3
    assert len(gone(index, middle)) in (3, 4)


def test_more_slot_sizes_than_rows_for_them_share_the_last_one(index: SlabIndex) -> None:
    for number in range(20):
        add_slab(index, 4096 * (number + 1), 3)
        store(index, keys_of(range(10 * number, 10 * number + 3)), 4096 * (number + 1))
    for number in range(20):
        assert present(index, keys_of(range(10 * number, 10 * number + 3))) == [0, 1, 2]
        assert store(index, [key_of(1000 + number)], 4096 * (number + 1)) == [1]


# -- large tables ------------------------------------------------------------------------------------------------------


@pytest.fixture
def large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of more than 256 slots are large."""
    monkeypatch.setattr(index_module, "_MOST_LOOKED_AT", 256)


@pytest.mark.usefixtures("large_tables")
def test_a_write_gets_slots_though_the_coldest_pages_are_far_from_the_hand(index: SlabIndex) -> None:
    """It got none, and so did the next ones, until the hand had come there."""
    add_slab(index, SMALL, 3000)
    index.register([A])
    for begin in range(0, 3000, 500):
        store(index, keys_of(range(begin, begin + 500)), evict=False)
    priorities = index.memory.rows[:3000, PRIORITY]
    priorities[:] = (1 << 41) + np.random.default_rng(1).permutation(3000)
    priorities[1500:1600] = np.arange(100)
    _, rows, evicted = take(index, 20)
    assert len(rows) == 20
    assert evicted < 300


@pytest.mark.usefixtures("large_tables")
def test_the_hand_comes_by_every_page_of_a_large_table(index: SlabIndex) -> None:
    add_slab(index, SMALL, 1500)
    add_slab(index, SMALL, 1500)
    keys = list(keys_of(range(3000)))
    for begin in range(0, 3000, 250):
        store(index, keys[begin : begin + 250], evict=False)
    index.memory.rows[index.rows_of(keys), PRIORITY] = 100_000 + np.arange(3000)
    for begin in range(0, 3000, 100):
        assert store(index, keys_of(range(10_000 + begin, 10_000 + begin + 100))) == [1] * 100
        new = index.rows_of(keys_of(range(10_000 + begin, 10_000 + begin + 100)))
        index.memory.rows[new[new >= 0], PRIORITY] = 200_000 + begin
    # First in, first out, about.
    old, new = present(index, keys), present(index, list(keys_of(range(10_000, 13_000))))
    assert len(new) > 2 * len(old)
    assert len(new) + len(old) > 2800
    assert_no_slot_lost(index)


@pytest.mark.usefixtures("large_tables")
def test_the_slots_of_a_second_large_slab_are_found_behind_a_full_first_one(index: SlabIndex) -> None:
    """They never were: each look ended in the first slab, and further slabs were added, all empty."""
    add_slab(index, SMALL, 700)
    add_slab(index, SMALL, 700)
    assert len(take(index, 1400, evict=False)[1]) == 1400
    assert len(take(index, 1, evict=False)[1]) == 0


@pytest.mark.usefixtures("large_tables")
def test_a_free_slot_behind_many_that_are_not_is_found(index: SlabIndex) -> None:
    add_slab(index, SMALL, 2000)
    ticket, rows, _ = take(index, 2000, evict=False)
    index.give_back(rows[1500:1501], ticket)
    index.memory.slabs[0, [CURSOR, FREE_SLOTS]] = 1501, 1
    assert take(index, 3, evict=False)[1].tolist() == [1500]


@pytest.mark.usefixtures("large_tables")
def test_a_rebuild_under_way_does_not_keep_a_write_looking_for_its_free_slots(index: SlabIndex) -> None:
    index.add_found_slabs([Slab(0, SMALL, 40)])
    (slab,) = index.unknown_slabs()
    assert slab is not None
    index.memory.slabs[0, FREE_SLOTS] = 5
    index.memory.rows[:20, index_words.STATE] = index_words.FREE
    # Nor, in a full directory, evicting for ever with the lock in its hand.
    for evict in (False, True):
        assert len(take(index, 3, evict=evict)[1]) == 0
    add_slab(index, SMALL, 5)
    assert len(take(index, 9)[1]) == 5


@pytest.mark.usefixtures("large_tables")
def test_a_slab_whose_dropper_was_killed_before_it_said_so_keeps_nobody_evicting(index: SlabIndex) -> None:
    add_slab(index, SMALL, 20)
    fill_with_heads(index, 20)
    index.memory.slabs[0, index_words.SLAB_STATE] = index_words.DROPPING
    assert len(take(index, 3)[1]) == 0


def test_a_slab_of_colder_pages_of_another_size_is_the_one_to_give_up(index: SlabIndex) -> None:
    cold, warm = add_slab(index, MIDDLE, 20), add_slab(index, SMALL, 20)
    fill_with_heads(index, 20, MIDDLE)
    fill_with_heads(index, 20, SMALL, first=100)
    index.memory.rows[warm.first_row : warm.first_row + 20, PRIORITY] += 1 << 20
    assert index.colder_slabs(SMALL, 0) == [cold]
    assert index.colder_slabs(MIDDLE, 0) == []
    assert index.holds_any(cold, hash_words([key_of(3)]))
    assert not index.holds_any(warm, hash_words([key_of(3)]))
    assert not index.holds_any(warm, NOTHING)


def test_ranks_come_from_the_published_chain(index: SlabIndex) -> None:
    """A page behind one that is there ranks below it, in whatever call it was written."""
    add_slab(index, SMALL, 20)
    chain = keys_of(range(6))
    store(index, chain[:3])
    index.register([A])
    ticket, rows, _ = take(index, 6)
    assert publish(index, ticket, chain, rows) == [0, 0, 0, 1, 1, 1]
    priorities = index.memory.rows[index.rows_of(chain), PRIORITY]
    assert (np.diff(priorities) < 0).all()

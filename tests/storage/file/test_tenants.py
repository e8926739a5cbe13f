"""Tenants in the index of slabs: shares that hold beside a crawler, are lent while they are not used, and are the same
for all processes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks import tenants as fairness
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import Words
from tests.storage.file.indexes import (
    LARGE,
    MIDDLE,
    SMALL,
    A,
    B,
    add_slab,
    assert_no_slot_lost,
    key_of,
    keys_of,
    members_of,
    present,
    remove,
    store,
    take,
)

TEAM, CRAWLER = 1, 2


def walked(index: SlabIndex) -> list[int]:
    """The pages of each tenant, by a look at every row."""
    rows = index.memory.rows
    pages = rows[rows[:, index_words.STATE] & index_words.STATES == index_words.PAGE]
    return np.bincount(pages[:, index_words.LENGTH] >> 32 & 63, minlength=64).tolist()


def for_(index: SlabIndex, writer: int, team: float = 0.5, crawler: float = 0.0) -> Words:
    return index.tenancy({TEAM: team, CRAWLER: crawler}, writer)


def write(index: SlabIndex, numbers: range, tenancy: Words, slot_size: int = SMALL) -> int:
    """One by one; how many got a slot."""
    done = 0
    for number in numbers:
        done += len(store(index, [key_of(number)], slot_size, tenancy=tenancy))
    return done


def test_a_crawler_costs_a_tenant_little_more_than_its_share_alone() -> None:
    """And without shares a lot, or this would show nothing."""
    shown = fairness.figures(400, 1600)
    assert shown["with shares"] >= 0.98 * shown["alone in its share"]
    assert shown["without"] <= 0.8 * shown["alone in its share"]
    assert shown["lent the rest"] >= 0.99 * shown["alone in all"] > 1.02 * shown["alone in its share"]


def test_nobody_evicts_another_tenant_below_its_share_not_in_one_batch_either(index: SlabIndex) -> None:
    add_slab(index, SMALL, 100)
    assert write(index, range(80), for_(index, TEAM)) == 80
    assert write(index, range(1000, 1020), for_(index, CRAWLER)) == 20
    # All that is lent is called back at once; nothing more is.
    tenancy = for_(index, CRAWLER)
    _, rows, evicted = take(index, 90, tenancy=tenancy)
    team, crawler, _ = tenancy[index_words.EVICTED :][[TEAM, CRAWLER, 0]]
    assert (len(rows), evicted) == (team + crawler, 50) == (50, 50)
    assert len(present(index, keys_of(range(80)))) == index.tenant_pages[TEAM] == 50
    assert_no_slot_lost(index)


def test_a_tenant_within_its_share_evicts_others_before_itself_and_itself_before_nothing(index: SlabIndex) -> None:
    add_slab(index, SMALL, 100)
    write(index, range(10), for_(index, TEAM))
    write(index, range(1000, 1090), for_(index, CRAWLER))
    # The crawler's pages are newer.
    assert write(index, range(10, 50), for_(index, TEAM)) == 40
    assert len(present(index, keys_of(range(50)))) == 50
    assert len(present(index, keys_of(range(1000, 1090)))) == 50
    # At its share, in a full tier whose other half is another's.
    shares = for_(index, TEAM, 0.5, 0.5)
    assert write(index, range(50, 60), shares) == 10
    assert index.tenant_pages[[TEAM, CRAWLER]].tolist() == [50, 50]
    assert write(index, range(5000, 5001), for_(index, 0, 0.5, 0.5)) == 0


def test_what_nobody_can_ask_for_any_more_goes_first_whose_ever_it_was(index: SlabIndex) -> None:
    add_slab(index, SMALL, 100)
    store(index, keys_of(range(10), B), tenancy=for_(index, TEAM))
    write(index, range(90), for_(index, CRAWLER))
    index.clear([B])
    assert index.tenant_pages[TEAM] == 10
    assert write(index, range(2000, 2010), for_(index, CRAWLER)) == 10
    assert index.tenant_pages[[TEAM, CRAWLER]].tolist() == [0, 100]


def test_a_page_that_was_leased_goes_like_others_once_the_lease_is_over(index: SlabIndex) -> None:
    add_slab(index, SMALL, 100)
    shares = 0.5, 0.5
    write(index, range(50), for_(index, TEAM, *shares))
    write(index, range(1000, 1050), for_(index, CRAWLER, *shares))
    leased = keys_of(range(5))
    spared = np.unique(index_words.hashes_of(PageKeys.of_joined(A, b"".join(key[16:] for key in leased)).words))
    for number in range(50, 150):
        store(index, [key_of(number)], spared=spared, tenancy=for_(index, TEAM, *shares))
    assert len(present(index, leased)) == 5
    rows = index.rows_of(leased)
    assert (index.memory.rows[rows, index_words.PRIORITY] < 1 << 61).all()
    for number in range(150, 600):
        store(index, [key_of(number)], tenancy=for_(index, TEAM, *shares))
    assert present(index, leased) == []


def test_pages_of_a_new_size_find_room_whatever_is_within_shares(index: SlabIndex) -> None:
    add_slab(index, SMALL, 64)
    write(index, range(32), for_(index, TEAM, 0.5, 0.5))
    write(index, range(1000, 1032), for_(index, CRAWLER, 0.5, 0.5))
    for writer in (0, TEAM, CRAWLER):
        assert len(index.colder_slabs(MIDDLE, 0, needed=True, tenancy=for_(index, writer, 0.5, 0.5))) == 1


def test_a_slab_that_another_size_wants_keeps_what_is_within_a_share(index: SlabIndex) -> None:
    add_slab(index, SMALL, 64)
    add_slab(index, MIDDLE, 4)
    write(index, range(60), for_(index, TEAM, 0.95))
    write(index, range(1000, 1004), for_(index, CRAWLER), MIDDLE)
    for needed in (False, True):
        assert index.colder_slabs(MIDDLE, 0, needed=needed, tenancy=for_(index, CRAWLER, 0.95)) == []
    assert len(index.colder_slabs(MIDDLE, 0, needed=True, tenancy=for_(index, CRAWLER, 0.5))) == 1
    assert len(index.colder_slabs(0, 0, needed=True)) == 2


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_the_rows_whatever_was_done(index: SlabIndex, seed: int) -> None:
    chance = random.Random(seed)
    members_of(index)
    slabs = [add_slab(index, SMALL, 40), add_slab(index, SMALL, 60), add_slab(index, LARGE, 10)]
    for _ in range(150):
        begin, count = chance.randrange(300), chance.randint(1, 20)
        keys = keys_of(range(begin, begin + count), chance.choice([A, B]))
        shares = {number: chance.choice([0.0, 0.2]) for number in (0, 1, 2, 63)}
        do = chance.randrange(10)
        if do < 6:
            store(index, keys, chance.choice([SMALL, LARGE]), tenancy=index.tenancy(shares, chance.choice([0, 1, 63])))
        elif do < 8:
            remove(index, keys)
        elif do == 8:
            index.clear([chance.choice([A, B])])
        elif len(slabs) > 1 and chance.random() < 0.3 and index.drop_slab(slab := slabs.pop()):
            index.forget_slab(slab)
        assert index.tenant_pages.tolist() == walked(index)
    assert sum(walked(index)) > 10


def test_a_wrong_count_is_put_right_by_a_look_and_not_while_pages_come(
    index: SlabIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_slab(index, SMALL, 100)
    write(index, range(50), for_(index, TEAM))
    index.memory.tenants[TEAM, index_words.TENANT_PAGES] += 2
    index.occupied()
    assert index.tenant_pages[TEAM] == 52, "without tenants nobody counts under the lock"
    index.number_tenants(["team"])
    index.memory.tenants[[TEAM, 7], index_words.TENANT_PAGES] = -3, 1 << 60
    index.occupied()
    assert index.tenant_pages.tolist() == walked(index)
    index.memory.tenants[TEAM, index_words.TENANT_PAGES] += 2
    clocks = iter([10, 11])
    monkeypatch.setattr(SlabIndex, "inserts", property(lambda _: next(clocks)))
    index.occupied()
    assert index.tenant_pages[TEAM] == 52


def test_processes_that_name_tenants_in_another_order_agree(index: SlabIndex) -> None:
    """Up to as many as there are numbers for; the others are default's."""
    numbers = index.number_tenants(["a", "b", "c"])
    other = SlabIndex(index.memory, index._lock, index._members, lambda _: -1)
    assert other.number_tenants(["c", "d", "a"]) == {"c": numbers["c"], "d": 4, "a": numbers["a"]}
    assert index.number_tenants(["d"]) == {"d": 4}
    assert sorted(numbers.values()) == [1, 2, 3]
    many = index.number_tenants([f"t{number}" for number in range(70)])
    assert sorted(many.values())[:11] == [0] * 11
    assert len(set(many.values())) == 60


def test_damaged_numbers_and_counts_cost_no_more_than_slots(index: SlabIndex) -> None:
    chance = random.Random(1)
    add_slab(index, SMALL, 100)
    for _ in range(100):
        write(index, range(some := chance.randrange(10_000), some + 5), for_(index, chance.choice([0, 1, 63])))
        words = chance.choice([index.memory.tenants.ravel(), index.memory.rows[:100, index_words.LENGTH]])
        words[chance.randrange(len(words))] = chance.choice([-1, 1 << 62, -(1 << 63), (1 << 63) - 1])
        assert len(index.tenants_of(np.arange(100))) == index_words.TENANTS
        for page in index.locate(keys_of(range(50))).pages():
            assert 0 <= page.length < 1 << 32
    index.occupied()
    assert index.tenant_pages.tolist() == walked(index)
    assert_no_slot_lost(index)

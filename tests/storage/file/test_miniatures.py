"""The miniatures: which policy a tier follows, and what they say of other capacities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import replay_trace, workloads
from benchmarks.policies import Tier
from hicache_ext.storage.tiers.file import eviction
from hicache_ext.storage.tiers.file.path_store import Fullness, gauges_of_paths
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import CLOCK_SHIFT, DISTANCE_SUM, PRIORITY, REUSES, USED
from tests.rigs import miniatures, ranks
from tests.rigs.bare_index import new_index_in
from tests.rigs.miniatures import is_sampled
from tests.storage.file.indexes import CAPACITY, SMALL, add_slab, keys_of, store
from tests.storage.file.test_index_code import World

Requests = list[list[int]]


def shares(requests: Requests, capacity: int) -> list[float]:
    """At half, one, two and four times the capacity, each by a replay."""
    uses = sum(map(len, requests))
    return [Tier(requests, capacity * halves // 2).hits / uses for halves in (1, 2, 4, 8)]


def policy_after(requests: Requests, capacity: int) -> list[int]:
    policies: list[int] = []

    def look(index: SlabIndex) -> None:
        policies.append(int(index.memory.header[index_words.POLICY]))

    list(replay_trace.served_by_the_index(requests, capacity, look))
    return policies


def test_a_tier_follows_the_candidate_that_serves_most() -> None:
    """Documents by their popularity: those that were asked for twice are worth more than those asked for last."""
    requests = workloads.documents(3000, 1)
    policies = policy_after(requests, 600)
    assert policies[0] == eviction.LAST_USE
    assert policies[-1] == eviction.LEARNED_DISTANCE
    assert Tier(requests, 600).hits > 1.1 * replay_trace.lru_tails_first(requests, 600)


def test_a_tier_keeps_a_part_of_a_loop_that_is_larger_than_it_and_lets_it_go_when_it_is_over() -> None:
    """Plain LRU never has a page of it when it comes again."""
    loop = [[1000 * text + place for place in range(10)] for text in range(300)]
    chats = [[1_000_000 + block for block in chain] for chain in workloads.conversations(1500, 1)]
    tier = Tier(8 * loop + chats, 1000)
    served = sum(tier.by_request[: 8 * len(loop)])
    assert replay_trace.lru_tails_first(8 * loop, 1000) == 0
    assert served > 0.55 * replay_trace.optimum(8 * loop, 1000)
    assert tier.hits - served > 0.97 * replay_trace.lru_tails_first(chats, 1000)


def test_conversations_that_fit_are_served_as_by_lru() -> None:
    requests = workloads.conversations(3000, 1)
    assert Tier(requests, 6000).hits > 0.995 * replay_trace.lru_tails_first(requests, 6000)


def test_a_policy_that_is_followed_from_now_on_ranks_the_pages_that_are_there(tmp_path: Path) -> None:
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index, SMALL, 200)
        keys = keys_of(range(100))
        store(index, keys)
        for other in range(1, 4):
            store(index, keys_of(range(1000 * other, 1000 * other + 20)))
        found = index.locate(keys)
        index.note_hits(found, keys, len(found))
        index.memory.header[[index_words.POLICY, index_words.TO_RANK]] = eviction.LEARNED_DISTANCE, 200
        store(index, keys_of(range(9000, 9001)))
        assert index.memory.header[index_words.TO_RANK] == 0
        rows = index.memory.rows[index.rows_of(keys)]
        clocks = (rows[:, USED] >> CLOCK_SHIFT).tolist()
        assert (rows[:, USED] & 7 == 1).all()
        distance = eviction.reuse_distance(200, *index.memory.header[[DISTANCE_SUM, REUSES]].tolist())
        learned = eviction.LEARNED_DISTANCE, 200
        expected = [ranks.priority_of(*learned, clocks[n], distance, 1, False, n) for n in range(100)]
        assert rows[:, PRIORITY].tolist() == expected


def test_ranking_again_goes_on_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows with every write, and by whichever process writes."""
    monkeypatch.setattr("hicache_ext.storage.tiers.file.slab.index._MOST_RANKED", 50)
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index, SMALL, 200)
        store(index, keys_of(range(150)))
        index.memory.header[[index_words.POLICY, index_words.TO_RANK]] = eviction.LEARNED_DISTANCE, 200
        for left in (150, 100, 50, 0, 0):
            store(index, keys_of(range(9000 + left, 9001 + left)))
            assert index.memory.header[index_words.TO_RANK] == left


@pytest.mark.thorough
@pytest.mark.parametrize("family", sorted(workloads.FAMILIES.keys() - {"scans"}))
def test_the_curve_is_within_two_points_of_replays(family: str) -> None:
    """Half a tier may have chosen another policy, or earlier, than this one, whose policy the curve has."""
    requests = workloads.FAMILIES[family](3000, 11)
    capacity = len({block for request in requests for block in request}) // 12
    uses, *served = Tier(requests, capacity).served
    said, replayed = [hits / uses for hits in served], shares(requests, capacity)
    assert said[0] == pytest.approx(replayed[0], abs=0.04)
    assert said[1:] == pytest.approx(replayed[1:], abs=0.02)


def test_the_curve_is_right_in_a_tier_that_is_a_tenth_full_and_read_more_than_written() -> None:
    """What is used is learnt although hardly anything is written: every second chain is one of three."""
    chains = [[1000 * chat + place for place in range(60)] for chat in range(20)]
    requests = [chains[number % 3] if number % 2 else chains[number // 2 % 20] for number in range(1200)]
    uses, *served = Tier(requests, 12_000).served
    assert [hits / uses for hits in served] == pytest.approx(shares(requests, 12_000), abs=0.02)


def after_comparisons(leads: list[int], capacity: int = 4096, between: list[int] | None = None) -> int:
    """The policy followed when the last candidate had so many hits more than the others between two comparisons each,
    who had about a thousand, or as many as ``between`` says."""
    world = World()
    header, small = world.header, world.small
    for lead, hits in zip(leads, between or [1000] * len(leads), strict=True):
        small[index_words.LATELY : index_words.LATELY + index_words.CANDIDATES] = hits
        small[index_words.LATELY + index_words.CANDIDATES - 1] += lead
        header[index_words.INSERTS] = small[index_words.NEXT]
        world.entries[:] = 0
        index_words.choose_policy(header, small, world.entries, capacity, 0)
    return int(header[index_words.POLICY])


def test_a_lead_that_chance_explains_is_not_followed_and_one_of_the_same_size_that_is_steady_is() -> None:
    last = index_words.CANDIDATES - 1
    assert after_comparisons([80] * 20) == last
    assert after_comparisons([400, -360] * 10) == eviction.LAST_USE
    assert after_comparisons([400] + [0] * 19) == eviction.LAST_USE


def test_a_lead_of_late_is_followed_within_a_capacity_whatever_was_true_for_long() -> None:
    last = index_words.CANDIDATES - 1
    assert after_comparisons([80] * 200) == last
    assert after_comparisons([80] * 200 + [-100] * 12) != last
    assert after_comparisons([80] * 200 + [400, -440] * 6) == last


def test_the_long_run_takes_nobody_back_who_is_behind_of_late() -> None:
    last = index_words.CANDIDATES - 1
    assert after_comparisons([100] * 200 + [-100] * 20) != last
    assert after_comparisons([100] * 200 + [-100] * 20 + [-1] * 20) != last


def test_a_lead_of_less_than_a_sixteenth_is_not_worth_a_change() -> None:
    assert after_comparisons([60] * 200) == eviction.LAST_USE
    assert after_comparisons([65] * 200) != eviction.LAST_USE


def test_a_large_lead_while_little_is_served_is_not_worth_what_a_change_costs() -> None:
    """A scan that only just fits again: half as much more of hardly anything, and then all that was served before is
    served no more."""
    assert after_comparisons([0] * 50 + [10] * 20, between=[1000] * 50 + [20] * 20) == eviction.LAST_USE


def test_a_tier_that_hardly_holds_a_chain_keeps_to_its_policy() -> None:
    assert after_comparisons([500] * 50, capacity=95) == eviction.LAST_USE
    assert after_comparisons([500] * 50, capacity=96) != eviction.LAST_USE


def test_a_page_behind_one_that_is_missing_is_no_hit_where_the_miniatures_see_all_pages() -> None:
    for sampled, expected in ((index_words.SAMPLE + 1, 0), (index_words.SAMPLE, 5)):
        world = World(entries=np.zeros((index_words.ENTRY_WORDS, 64, index_words.WAYS), np.int64))
        for head in (-5, -6):
            chain = [[head, 0], *([-10_000 - place, place] for place in range(1, 6))]
            world.header[index_words.EVENTS], world.header[index_words.LEARNED] = len(chain), 0
            world.events[: len(chain)] = chain
            world.table.learn(64, sampled, len(chain))
        hits = world.small[miniatures.HITS : miniatures.HITS + miniatures.MINIATURES]
        assert (hits == expected).all()


@pytest.mark.thorough
def test_a_page_that_every_request_uses_does_not_bend_the_curve_whether_it_is_in_the_sample_or_not() -> None:
    """It is a quarter of all uses."""
    for hot in (1, 2, 3, 4):
        fresh = iter(range(100, 1 << 30))
        requests = [[-hot, next(fresh), next(fresh), next(fresh)] for _ in range(12_000)]
        uses, _, served, *_ = Tier(requests, 8192).served
        assert served / uses == pytest.approx(0.25, abs=0.02)


def test_counts_that_a_kill_left_wrong_are_right_after_some_writes(tmp_path: Path) -> None:
    with new_index_in(tmp_path, CAPACITY) as index:
        add_slab(index, SMALL, 64)
        for begin in range(0, 640, 16):
            store(index, keys_of(range(begin, begin + 16)))
        small = index.memory.small
        small[: miniatures.MINIATURES] = 10_000
        for begin in range(5000, 5640, 16):
            store(index, keys_of(range(begin, begin + 16)))
        slots = [64] * index_words.CANDIDATES + [32, 128, 256]
        assert (small[: miniatures.MINIATURES] <= 1.1 * np.array(slots)).all()


def test_a_miniature_of_a_large_tier_sees_a_share_of_the_pages(tmp_path: Path) -> None:
    assert index_words.sampled_of(index_words.SAMPLED_SLOTS) == index_words.SAMPLE + 1
    assert index_words.sampled_of(index_words.SAMPLED_SLOTS << 8) == (index_words.SAMPLE + 1) >> 8
    hashes = np.random.default_rng(1).integers(-(1 << 63), 1 << 63, 100_000)
    sampled = index_words.sampled_of(index_words.SAMPLED_SLOTS << 5)
    seen = sum(is_sampled(int(hashed), sampled) for hashed in hashes)
    assert seen == pytest.approx(100_000 / 32, rel=0.1)


def test_paths_count_by_their_uses_and_one_that_nobody_looks_at_does_not() -> None:
    paths = [
        Fullness(100, 1, 1, 1, served=(1000, 100, 200, 300, 400)),
        Fullness(100, 1, 1, 1, served=(3000, 0, 0, 0, 400)),
        Fullness(100, 1, 1, 1),
    ]
    gauges = gauges_of_paths(paths)
    assert gauges["hit_share_at_half"] == 0.025
    assert gauges["hit_share_at_four_times"] == 0.2
    assert "hit_share_at_half" not in gauges_of_paths(paths[2:])

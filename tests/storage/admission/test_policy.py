"""Which pages are written at their first request: by what became of others like them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks import admission, workloads
from hicache_ext.storage.tiering.admission import AdmissionPolicy, choose
from hicache_ext.storage.tiering.reuse import EDGES, Curves, Experience, Firsts
from tests.storage.admission.pages import run


def learned(capacity: float = 2000.0) -> AdmissionPolicy:
    """Has seen that runs of three pages return soon and often, and runs of forty never."""
    policy = AdmissionPolicy(lambda: capacity)
    for number in range(600):
        policy.offered(run(f"long {number}", 40).words)
        for short in range(5):
            policy.offered(run(f"short {number}/{short}", 3).words)
        for before in range(1, 6):
            policy.read(run(f"short {number - before}/{before}", 3).words)
    return policy


def wanted(policy: AdmissionPolicy, name: str, count: int, **where: int) -> list[bool]:
    return policy.offered(run(name, count, **where).words)[0].tolist()


def test_everything_is_written_until_one_life_of_the_tier_was_seen() -> None:
    policy = AdmissionPolicy(lambda: 20_000.0)

    for number in range(400):
        assert all(wanted(policy, f"long {number}", 40))


def test_everything_is_written_where_the_capacity_is_not_known() -> None:
    policy = learned(float("inf"))

    assert all(wanted(policy, "new", 40))


def test_pages_like_those_that_never_return_are_refused() -> None:
    assert not any(wanted(learned(), "new", 40))


def test_pages_like_those_that_return_are_written_at_once() -> None:
    assert all(wanted(learned(), "new", 3))


def test_what_was_refused_is_written_when_it_is_asked_for_again() -> None:
    policy = learned()
    assert not any(wanted(policy, "new", 40))

    assert all(wanted(policy, "new", 40))


@pytest.mark.thorough
def test_no_page_is_written_behind_one_that_was_refused() -> None:
    policy, chance = learned(), random.Random(1)

    for number in range(300):
        offered = wanted(policy, f"{number % 37}", chance.randint(1, 128), first=chance.randint(0, 3))
        assert offered == sorted(offered, reverse=True)


def test_a_run_of_several_calls_that_was_refused_is_refused_to_its_end() -> None:
    policy = learned()
    assert not any(wanted(policy, "new", 128))

    # By itself a run of three pages is written.
    assert not any(wanted(policy, "new", 3, first=128))
    assert all(wanted(policy, "another", 3))


def test_another_run_after_a_full_call_is_told_by_its_look_up() -> None:
    policy = learned()
    for number in range(30):
        policy.offered(run(f"system {number}", 1).words)
    assert not any(wanted(policy, "new", 128))
    other = run("other", 3)
    policy.continuations.looked_up([*run("system", 1), *other], 1)

    policy.offered(other.words)

    assert all(policy.offered(other.words)[0])


def test_ranks_decide_alike() -> None:
    ranks = [AdmissionPolicy(lambda: 500.0) for _ in range(2)]
    chance = random.Random(2)
    for number in range(1500):
        name, count = f"{chance.randint(0, number)}", chance.randint(1, 60)
        one, other = (
            policy.offered(run(name, count, identity=bytes([rank] * 16)).words)[0] for rank, policy in enumerate(ranks)
        )
        assert one.tolist() == other.tolist()
    assert ranks[0].admitted is not None


def test_the_memory_of_a_policy_is_bounded() -> None:
    policy = AdmissionPolicy(lambda: 1000.0)
    for number in range(3000):
        policy.continuations.looked_up([*run(f"{number}", 1), *run(f"after {number}", 1)], 1)
        policy.offered(run(f"{number}", 100).words)

    assert sum(bits.nbytes for bits in policy._firsts._filters) == 4 << 20
    assert len(policy.experience._slots) <= len(policy.experience._class)
    assert len(policy.continuations._kinds) <= 4096 and len(policy.continuations._followed) <= 16384


# -- its parts ---------------------------------------------------------------------------------------------------------


def test_firsts_are_remembered_for_as_many_pages_as_promised() -> None:
    firsts = Firsts(bits=1 << 16, full=1 << 12)
    asked = run("asked", 100)
    assert not firsts.note(asked.words).any()
    firsts.note(run("others", (1 << 12) - 200).words)
    firsts.note(run("more", (1 << 12) - 200).words)

    assert firsts.note(asked.words).all()


def test_few_pages_are_taken_for_others() -> None:
    firsts = Firsts(bits=1 << 16, full=1 << 12)
    firsts.note(run("others", 1 << 12).words)

    assert firsts.note(run("never", 2000).words).mean() < 0.02


def test_firsts_of_pools_are_apart() -> None:
    firsts = Firsts()
    firsts.note(run("a page", 5).words)

    assert not firsts.note(run("a page", 5, identity=bytes(16)).words).any()


def test_curves_say_how_many_pages_have_not_come_back() -> None:
    experience, chance = Experience(2, finest=0), random.Random(3)
    back: dict[int, int] = {}
    for moment in range(20_000):
        if (name := back.pop(moment, None)) is not None:
            experience.used([(name, 0)], np.array([1]))
        # A third returns after 300 pages.
        experience.used([(moment, 0)], np.array([0]))
        if chance.random() < 1 / 3:
            back[moment + 300] = moment
        experience.pass_time(1)

    left = experience.curves().left[0]

    assert np.interp(250, EDGES, left) == pytest.approx(1.0, abs=0.02)
    assert np.interp(400, EDGES, left) == pytest.approx(2 / 3, abs=0.03)


def test_a_full_sample_follows_fewer_pages_for_longer() -> None:
    experience = Experience(1, sample=256, finest=0)
    for number in range(4000):
        words = run(f"{number}", 1).words
        for page in experience.sampled(words).tolist():
            experience.used([(int(words[page, 2]), int(words[page, 5]))], np.array([0]))
        experience.pass_time(1)
        if number % 500 == 499:
            experience.thin_out(3000)

    assert experience.horizon > 1500


def _curves(shares: list[float], rates: list[float]) -> Curves:
    """Classes of which a share returns after 100 pages, and the rest never."""
    left = np.ones((len(shares), len(EDGES)))
    left[:, EDGES > 100] = 1 - np.array(shares)[:, None]
    return Curves(np.array(rates), left)


def test_a_class_that_brings_next_to_nothing_is_refused() -> None:
    admitted, _, _ = choose(_curves([0.8, 0.001, 0.5], [0.3, 0.5, 0.2]), 2, 1e9, 0.985)

    assert admitted.tolist() == [True, False, True]


def test_where_less_than_a_tenth_of_the_writes_would_be_saved_everything_is_written() -> None:
    for rate, refuses in ((0.03, False), (0.5, True)):
        admitted, _, _ = choose(_curves([0.8, 0.001, 0.5], [0.3, rate, 0.2]), 2, 1e9, 0.985)
        assert admitted.tolist() == [True, not refuses, True]


def test_a_budget_gives_up_the_classes_first_that_are_read_least() -> None:
    curves = _curves([0.8, 0.3, 0.1, 0.5], [0.2, 0.2, 0.4, 0.2])
    everything, _, most = choose(curves, 3, 1e9, None)
    assert everything.all()

    some, _, writes = choose(curves, 3, 1e9, None, most_writes=0.7 * most)

    assert some.tolist() == [True, True, False, True]
    assert writes <= 0.7 * most


# -- whole workloads ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "part", "hits", "writes"),
    [("documents", 30, 0.98, 0.9), ("scans", 6, 0.95, 1.0), ("conversations", 30, 0.97, 0.98)],
)
def test_hits_stay_and_writes_do_not(family: str, part: int, hits: float, writes: float) -> None:
    requests = workloads.FAMILIES[family](3000, 11)
    capacity = len({block for request in requests for block in request}) // part

    everything = admission.replay(requests, capacity, None)
    some = admission.replay(requests, capacity, AdmissionPolicy(lambda: float(capacity)))

    assert some.served >= hits * everything.served
    assert some.written <= writes * everything.written

"""Admission under those who do not know it: many threads, clocks that jump, ranks that differ, restarts."""

from __future__ import annotations

import random
import threading
import time

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import ConfigError
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.contract.tenants import DEFAULT
from hicache_ext.storage.tiering.admission import Admission, AdmissionSettings, WriteBudget
from hicache_ext.storage.tiers.memory import MemoryPageStore
from tests.storage.admission.pages import run

PAGE = 1000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bounded(MemoryPageStore):
    def gauges(self) -> dict[str, float]:
        return {"capacity_bytes": 500.0 * PAGE}


class Rank:
    """One rank's gate, in front of a disk that never fails."""

    def __init__(self, rank: int, settings: AdmissionSettings, clock: Clock) -> None:
        self.identity = bytes([rank] * 16)
        self.gate = Admission(settings, Bounded(), clock)
        self.stored: set[bytes] = set()

    def offer(self, name: str, count: int) -> list[bool]:
        """Which pages of a request that is new to the tier it writes."""
        keys = run(name, count, identity=self.identity)

        def write(batch: PageBatch) -> list[SetResult]:
            self.stored.update(key[16:] for key in batch.keys)
            return self.gate.written(batch, [SetResult.STORED] * len(batch))

        results = self.gate.write(PageBatch(keys, [()] * count, [PAGE] * count), write)
        return [result is SetResult.STORED for result in results]


@pytest.mark.thorough
@pytest.mark.parametrize("learned", [False, True])
def test_ranks_whose_clocks_run_apart_hardly_differ_in_what_a_budget_lets_through(learned: bool) -> None:
    """They are called at other moments, but about as often: a page that one of them lacks is of no use to the other."""
    clocks, chance = [Clock(), Clock()], random.Random(1)
    settings = AdmissionSettings(learned=learned, budget=5.0 * PAGE, writers=1)
    ranks = [Rank(rank, settings, clock) for rank, clock in enumerate(clocks)]
    moment, offered = 1000.0, 0
    for number in range(6000):
        moment += chance.expovariate(1.5)
        count = chance.randint(1, 128)
        offered += count
        name = f"{chance.randint(0, number) if number % 2 else number}"
        for rank, clock in zip(ranks, clocks, strict=True):
            clock.now = max(clock.now, moment + chance.uniform(0.0, 0.1))
            rank.offer(name, count)
    one, other = (rank.stored for rank in ranks)

    assert len(one) < 0.95 * offered
    assert len(one ^ other) < 0.02 * len(one | other)


def test_a_clock_that_stands_jumps_or_goes_back_never_gives_more_than_an_hour() -> None:
    clock = Clock()
    budget = WriteBudget(10.0, clock)
    budget.written(36_000)
    for jump in (-500.0, 500.0, -1e9, 1e9, 0.0):
        clock.now += jump
        assert budget.left_for(DEFAULT) <= 36_000
    # After all these jumps time goes on as it does.
    budget.written(round(budget.left_for(DEFAULT)))
    clock.now += 60
    assert 590 <= budget.left_for(DEFAULT) <= 610


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    clock = Clock()
    budget = WriteBudget(10.0, clock)
    clock.now -= 1000

    assert budget.left_for(DEFAULT) == 36_000


def test_threads_that_write_read_and_look_up_at_once_leave_the_counts_right() -> None:
    gate = Admission(AdmissionSettings(learned=True, budget=1e12, writers=1), Bounded())
    errors: list[BaseException] = []
    written = [0] * 6

    def work(thread: int) -> None:
        try:
            for number in range(150):
                keys = run(f"{thread % 3}/{number}", 40)
                results = gate.write(
                    PageBatch(keys, [()] * 40, [PAGE] * 40),
                    lambda batch: gate.written(batch, [SetResult.STORED] * len(batch)),
                )
                assert len(results) == 40
                written[thread] += results.count(SetResult.STORED)
                gate.looked_up(keys, 20)
                gate.read(keys, [GetResult.HIT] * 40)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    gate._learn_reads()
    counts = {reason: count for (event, reason), count in gate._tier.metrics.snapshot().items() if event == "admission"}
    assert not errors
    assert sum(counts.values()) == 6 * 150 * 40
    assert sum(count for reason, count in counts.items() if reason.startswith("admitted")) == sum(written)
    assert gate.policy.experience.clock == 2 * 6 * 150 * 40
    assert len(gate.policy.experience._slots) + len(gate.policy.experience._free) == len(gate.policy.experience._class)


def test_a_page_that_is_named_twice_in_one_call_is_one_page() -> None:
    gate = Admission(AdmissionSettings(learned=True, budget=None, writers=1), Bounded())
    keys = [*run("pages", 64), *run("pages", 64)]

    gate.read(keys, [GetResult.HIT] * 128)
    gate._learn_reads()

    experience = gate.policy.experience
    assert len(experience._slots) + len(experience._free) == len(experience._class)


def test_more_pages_than_are_ever_followed_may_come_in_one_call() -> None:
    gate = Admission(AdmissionSettings(learned=True, budget=None, writers=1), Bounded())
    for number in range(2):
        keys = run(f"{number}", 50_000)
        gate.write(PageBatch(keys, [()] * 50_000, [PAGE] * 50_000), lambda batch: [SetResult.STORED] * len(batch))

    experience = gate.policy.experience
    assert len(experience._slots) + len(experience._free) == len(experience._class)


def test_after_a_restart_everything_is_written_for_one_life_of_the_tier_at_most() -> None:
    clock = Clock()
    settings = AdmissionSettings(learned=True, budget=None, writers=1)
    before = Rank(0, settings, clock)
    for number in range(400):
        before.offer(f"before {number}", 40)
    assert not any(before.offer("new", 40))

    after = Rank(0, settings, clock)
    written = sum(sum(after.offer(f"after {number}", 40)) for number in range(400))

    # A life is 500 pages; choices are made from 8,192 pages on.
    assert written <= 8192 + 40


@pytest.mark.parametrize(
    "budget", [0, "0", "0B/day", "0.1B/day", "-1GiB/day", "nan/day", "inf/day", "1GiB/0s", "1GiB/day/day"]
)
def test_a_budget_of_nothing_or_nonsense_is_one_sentence(budget: str) -> None:
    tier = {"type": "file", "path": "/near", "capacity": "1GiB", "write_budget": budget}

    with pytest.raises(ConfigError, match=r"^hicache_ext\.tiers\.near\.write_budget: .*; allowed: a size per day"):
        load_config(ExtraConfig.around({"tiers": {"near": tier}}))


def test_time_is_taken_from_a_clock_that_no_administrator_sets() -> None:
    assert WriteBudget(1.0)._now is time.monotonic

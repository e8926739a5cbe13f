"""Admission in front of tiers: what SGLang hears, what a budget leaves, and that a mistake costs no page."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, TierConfig, load_config
from hicache_ext.config.tier import parse_budget
from hicache_ext.runtime.call_deadline import answering_at_once
from hicache_ext.storage.contract.reports import reported
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.tenants import DEFAULT
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.admission import Admission, AdmissionSettings, WriteBudget
from hicache_ext.storage.tiering.reload import admission_of
from hicache_ext.storage.tiering.tier_handle import TierHandle
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import Arrangement, TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, filled, read_pages, store_pages
from tests.storage.admission.pages import run
from tests.storage.media import Memory, Over

LEARNED = AdmissionSettings(learned=True, budget=None, writers=1)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusing(tier: TierHandle, pages: Sequence[bytes]) -> None:
    """Its admission does not want these pages."""
    tier.admit_by(LEARNED)
    assert tier.admission is not None
    unwanted = {key[16:] for key in pages}

    def offered(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wanted = np.array([row.tobytes()[16:] not in unwanted for row in words])
        return wanted, np.zeros(len(words), np.bool_)

    tier.admission.policy.offered = offered  # type: ignore[method-assign]


@pytest.fixture
def tier() -> TierHandle:
    return TierHandle(MemoryPageStore())


def counted(tier: PageStore) -> dict[str, int]:
    counts = tier.metrics.snapshot().items()
    return {reason: count for (event, reason), count in counts if event == "admission" and count}


def admitting(store: PageStore) -> PageStore:
    handle = TierHandle(store)
    handle.admit_by(LEARNED)
    return handle


class TestAdmission(PageStoreTests):
    """The PageStore suite: a tier whose capacity is not known stores everything."""

    @pytest.fixture
    def medium(self) -> Over:
        return Over(Memory(), admitting)


def test_pages_that_are_not_wanted_are_refused_and_the_others_stored(tier: TierHandle) -> None:
    keys = list(run("pages", 5))
    refusing(tier, keys[1:3])

    assert [result.value for result in store_pages(tier, keys)] == ["stored", "refused", "refused", "stored", "stored"]
    assert tier.contains(keys) == [True, False, False, True, True]
    assert_hits(tier, [keys[0], keys[3], keys[4]])
    assert counted(tier) == {"admitted_first": 3, "refused_first": 2}


def test_all_parts_of_a_page_share_its_fate(tier: TierHandle) -> None:
    one, other = run("pages", 3), run("pages", 3, identity=bytes([7] * 16))
    keys = [key for page in zip(one, other, strict=True) for key in page]
    refusing(tier, [one[1]])

    results = store_pages(tier, keys)

    assert [result is SetResult.STORED for result in results] == [True, True, False, False, True, True]


def test_a_mistake_of_admission_costs_no_page_and_one_line(
    tier: TierHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier.admit_by(LEARNED)
    assert tier.admission is not None

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    for name in ("offered", "read"):
        monkeypatch.setattr(tier.admission.policy, name, broken)
    keys = list(run("pages", 5))

    with caplog.at_level(logging.WARNING):
        assert store_pages(tier, keys) == [SetResult.STORED] * 5
        assert_hits(tier, keys)
    assert len(caplog.records) == 1


def test_promoted_pages_go_past_admission(tier: TierHandle) -> None:
    keys = list(run("pages", 3))
    refusing(tier, keys)

    written = tier.write_queued(PageBatch(keys, filled(keys, [[100]] * 3).buffers))

    assert written == [SetResult.STORED] * 3


def test_pages_that_are_refused_are_not_queued(tier: TierHandle) -> None:
    keys = list(run("pages", 3))
    refusing(tier, keys)

    results = tier.set_later(PageBatch(keys, filled(keys, [[100]] * 3).buffers))

    assert results == [SetResult.REFUSED] * 3 and not len(tier.writes)


def test_a_page_counts_as_stored_where_one_tier_of_several_admits_it() -> None:
    near, far = TierHandle(MemoryPageStore("near")), TierHandle(MemoryPageStore("far"))
    keys = list(run("pages", 2))
    refusing(near, keys)
    refusing(far, keys[1:])
    store = TieredStore.__new__(TieredStore)
    store._begin(Arrangement([near, far], [near, far], None, TieringSettings()))

    assert store_pages(store, keys) == [SetResult.STORED, SetResult.REFUSED]
    store.close()


def test_a_look_up_does_not_wait_for_a_decision(tier: TierHandle) -> None:
    store = TieredStore.__new__(TieredStore)
    store._begin(Arrangement([tier], [tier], None, TieringSettings()))
    tier.admit_by(LEARNED)
    assert tier.admission is not None
    system, turn = run("system", 4), run("turn", 4)
    store_pages(store, system)

    with tier.admission._lock, answering_at_once():
        assert store.count_leading([*system, *turn]) == 4

    assert tier.admission.policy.continuations.kind(int(turn.words[0, 2])) != 0
    store.close()


def test_a_read_waits_for_no_decision_and_what_waits_of_it_is_bounded(tier: TierHandle) -> None:
    tier.admit_by(LEARNED)
    assert tier.admission is not None
    keys = run("pages", 10)
    store_pages(tier, keys)

    with tier.admission._lock:
        read_pages(tier, keys, [1000])
    for _ in range(1000):
        tier.admission.read(keys, [GetResult.HIT] * 10)

    assert len(tier.admission._reads) < 64


def test_reads_tell_what_returns(tier: TierHandle) -> None:
    tier.admit_by(LEARNED)
    assert tier.admission is not None
    keys = run("pages", 100)
    store_pages(tier, keys)

    pages = filled(keys, [[1000]] * 100)
    assert tier.get(PageBatch(keys, pages.buffers)) == [GetResult.HIT] * 100
    store_pages(tier, run("more", 1))

    assert tier.admission.policy.experience.clock == 201
    assert tier.admission.policy.experience._ended.sum() > 0


class Bounded(MemoryPageStore):
    """Says that it holds 2,000 pages of 100 bytes at most."""

    def gauges(self) -> dict[str, float]:
        return {"capacity_bytes": 200_000.0}


def test_a_tier_learns_from_what_goes_through_it() -> None:
    tier = TierHandle(Bounded())
    tier.admit_by(LEARNED)
    for number in range(500):
        store_pages(tier, run(f"long {number}", 40), [100])
        for short in range(5):
            store_pages(tier, run(f"short {number}/{short}", 3), [100])
        for before in range(1, min(6, number + 1)):
            read_pages(tier, run(f"short {number - before}/{before - 1}", 3), [100])

    assert store_pages(tier, run("a long one", 40), [100]) == [SetResult.REFUSED] * 40
    assert store_pages(tier, run("a short one", 3), [100]) == [SetResult.STORED] * 3
    assert store_pages(tier, run("a long one", 40), [100]) == [SetResult.STORED] * 40


def test_series_are_there_before_the_first_page(tier: TierHandle) -> None:
    tier.admit_by(LEARNED)

    (report,) = reported([tier])

    assert {reason for event, reason in report.snapshot() if event == "admission"} == {
        *("admitted_first", "admitted_again", "refused_first", "refused_behind", "refused_budget")
    }


def _tier(**settings: object) -> TierConfig:
    tiers = {"near": {"type": "file", "path": "/near", "capacity": "1GiB", **settings}}
    return load_config(ExtraConfig.around({"tiers": tiers})).tiers["near"]


def test_ranks_share_the_budget_and_the_capacity() -> None:
    assert admission_of(_tier(admission="learned", write_budget="400MB/s"), "prefill", 4) == AdmissionSettings(
        learned=True, budget=1e8, writers=4
    )


def test_a_reload_keeps_how_many_ranks_share_the_budget(tmp_path: Path) -> None:
    def configured(budget: str) -> HicacheExtConfig:
        disk = {"type": "file", "path": str(tmp_path / "near"), "capacity": "64MiB", "layout": "pages"}
        return load_config(ExtraConfig.around({"tiers": {"near": {**disk, "write_budget": budget}}}))

    store = open_tiers(configured("400MB/s"), writers=4)
    with closing(store):
        for budget in ("400MB/s", "800MB/s"):
            store.reload(configured(budget))
            (tier,) = store.tiers
            assert isinstance(tier, TierHandle)
            admission = tier.admission
            assert admission is not None
            assert admission.settings == AdmissionSettings(False, parse_budget(budget) / 4, writers=4)


def test_a_tier_that_writes_everything_has_no_admission() -> None:
    assert admission_of(_tier(), "both") is None


def test_a_decode_node_learns_nothing_and_keeps_its_budget() -> None:
    assert admission_of(_tier(admission="learned"), "decode") is None
    settings = admission_of(_tier(admission="learned", write_budget="3.456TB/day"), "decode", 4)
    assert settings == AdmissionSettings(learned=False, budget=1e7, writers=4)


# -- the budget --------------------------------------------------------------------------------------------------------


def test_what_may_be_saved_up_is_an_hour() -> None:
    clock = Clock()
    budget = WriteBudget(10.0, clock)
    clock.now += 100_000

    assert budget.left_for(DEFAULT) == 36_000


@pytest.mark.thorough
def test_hours_of_writes_stay_within_the_budget_and_what_was_saved() -> None:
    clock = Clock()
    tier = TierHandle(MemoryPageStore())
    # 50 pages a second may be written, and three times as many come.
    gate = Admission(AdmissionSettings(learned=False, budget=50_000.0, writers=1), tier, clock)
    stored = 0

    def write(batch: PageBatch) -> list[SetResult]:
        return gate.written(batch, [SetResult.STORED] * len(batch))

    for number in range(12_500):
        clock.now += 0.8
        keys = run(f"{number}", 127)
        stored += gate.write(PageBatch(keys, [()] * 127, [1000] * 127), write).count(SetResult.STORED)

    assert 50 * 10_000 <= stored <= 50 * (10_000 + 3600) + 127


def test_where_the_budget_ends_heads_are_stored_and_tails_are_not() -> None:
    clock = Clock()
    tier = TierHandle(MemoryPageStore())
    tier.admission = Admission(AdmissionSettings(learned=False, budget=1.0, writers=1), tier, clock)

    results = store_pages(tier, run("pages", 6))

    # 3,600 bytes were saved up, pages have a thousand.
    assert results == [SetResult.STORED] * 3 + [SetResult.REFUSED] * 3
    assert counted(tier) == {"admitted_first": 3, "refused_budget": 3}


def test_promotions_count_for_the_budget_though_nothing_holds_them_up() -> None:
    clock = Clock()
    tier = TierHandle(MemoryPageStore())
    tier.admission = Admission(AdmissionSettings(learned=False, budget=1.0, writers=1), tier, clock)
    promoted = list(run("promoted", 5))
    assert tier.write_queued(PageBatch(promoted, filled(promoted, [[1000]] * 5).buffers)) == [SetResult.STORED] * 5

    assert store_pages(tier, run("pages", 1)) == [SetResult.REFUSED]
    clock.now += 2500
    assert store_pages(tier, run("pages", 1)) == [SetResult.STORED]

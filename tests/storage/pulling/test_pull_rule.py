"""Pull or recompute: decided by what was measured, explained, and never by a guess where nothing was measured."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from hicache_ext.config.model import PullConfig
from hicache_ext.runtime.linear_cost import LinearCost
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.tiering import pulling
from hicache_ext.storage.tiering.pulling import PROBE_INTERVAL, PULLED, Asked, MeasuredStore, PullRule, SizedCost
from tests.rigs.known_rate import KnownRate
from tests.waiting import wait_until

MIB = 2**20


class FakeTier:
    """A tier of which only reads and look-ups matter here."""

    def __init__(self, name: str, results: GetResult = GetResult.HIT) -> None:
        self.name = name
        self.metrics = TierMetrics(name)
        self.result = results
        self.reads: list[int] = []
        self.read = threading.Event()

    def get(self, batch: PageBatch) -> list[GetResult]:
        self.reads.append(len(batch))
        if len(self.reads) >= 2:
            self.read.set()
        return [self.result] * len(batch)

    def contains(self, keys: list[bytes]) -> list[bool]:
        return [True] * len(keys)

    def count_leading(self, keys: list[bytes]) -> int:
        return len(keys)


class SlowLookUps(FakeTier):
    """Look-ups take ``seconds``; ``askers`` are the threads that have waited for one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seconds = 0.0
        self.askers: set[str] = set()

    def count_leading(self, keys: list[bytes]) -> int:
        if self.seconds:
            self.askers.add(threading.current_thread().name)
        time.sleep(self.seconds)
        return len(keys)


def cost(start_up: float, per_unit: float) -> LinearCost:
    line = LinearCost()
    for amount in (1, 10, 100, 1000, 10_000):
        line.observe(amount, start_up + amount * per_unit)
    return line


def compute_cost(start_up: float, per_token: float) -> SizedCost:
    known = SizedCost()
    for amount in (1, 10, 100, 1000, 10_000) * 2:
        known.observe(amount, start_up + amount * per_token)
    return known


def rule_of(
    *tiers: MeasuredStore,
    compute: SizedCost | None = None,
    mode: str = "adaptive",
    probe_interval: float = PROBE_INTERVAL,
    prefill_rate: float | None = None,
    **settings: Any,
) -> PullRule:
    config = PullConfig(**{"mode": mode, "min_tokens": 64, **settings})
    known = KnownRate(prefill_rate) if prefill_rate is not None else compute
    rule = PullRule(config, known or SizedCost())
    rule._probe_interval = probe_interval
    return rule


def tier_with(start_up: float, per_byte: float, name: str = "pool") -> MeasuredStore:
    tier = MeasuredStore(FakeTier(name))  # type: ignore[arg-type]
    for size in (MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        tier.read_cost.observe(size, start_up + size * per_byte)
    return tier


def test_a_line_is_learnt_and_follows_a_tier_that_slows() -> None:
    line = cost(0.010, 0.001)
    assert line.predict(500) == pytest.approx(0.510, rel=0.01)
    for amount in (10, 100, 1000, 10, 100, 1000, 10, 100, 1000, 10, 100, 1000):
        line.observe(amount, 0.1 + amount * 0.01)
    assert line.predict(500) == pytest.approx(5.1, rel=0.1)


def test_what_a_long_prefix_costs_is_not_worn_away_by_many_short_ones() -> None:
    known = SizedCost()
    assert known.predict(100) is None
    known.observe(2048, 0.5)
    assert known.predict(4096) == 0.5  # the cheap side, until it was tried
    assert known.predict(1024) == 0.25
    for _ in range(100):
        known.observe(16, 0.020)
    assert known.predict(2048) == 0.5
    assert known.predict(1032) == pytest.approx(0.26)
    assert known.predict(4080) == pytest.approx(0.98)
    assert known.saved_by(2048) == pytest.approx(0.48)  # the rest takes its 20 ms either way
    assert known.saved_by(16) == 0.020


def test_too_high_a_figure_for_computing_is_found_out() -> None:
    now = 0.0
    known = SizedCost(lambda: now)
    known.observe(2048, 10.0)  # the first batch of its size
    tier = tier_with(1.0, 0.0)
    rule = rule_of(tier, compute=known)
    assert rule.decide(2048, MIB, {tier: 128}) not in PULLED
    known.observe(2048, 0.5)
    known.observe(2048, 0.5)
    assert known.predict(2048) == pytest.approx(1.355)
    known.observe(2048, 0.9)
    assert known.predict(2048) == pytest.approx(1.0365)  # falls fast
    known.observe(2048, 5.0)
    assert known.predict(2048) == pytest.approx(2.22555)  # rises slowly
    fast = tier_with(0.8, 0.0)
    rule = rule_of(fast, compute=known)
    assert rule.decide(2048, MIB, {fast: 128}) in PULLED
    now = 3600.0
    assert rule.decide(2048, MIB, {fast: 128}) == "not_cheaper_enough"  # computed once, which measures it
    known.observe(2048, 2.2)
    assert rule.decide(2048, MIB, {fast: 128}) in PULLED


def test_equal_amounts_give_the_dear_side() -> None:
    line = LinearCost()
    assert line.predict(5) is None
    for _ in range(3):
        line.observe(100, 0.5)
    assert line.predict(10) == pytest.approx(0.5)
    assert line.predict(200) == pytest.approx(1.0)


def test_what_was_not_measured_is_pulled() -> None:
    fresh = MeasuredStore(FakeTier("pool"))  # type: ignore[arg-type]
    assert rule_of(fresh, prefill_rate=1000.0).decide(1024, MIB, {fresh: 64}) == "unmeasured"
    slow = tier_with(9, 9)
    assert rule_of(slow).decide(1024, MIB, {slow: 64}) in PULLED  # the prefill rate is not known


def test_short_prefixes_are_computed_and_fixed_mode_measures_nothing() -> None:
    slow = tier_with(100, 1)
    assert rule_of(slow, mode="fixed").decide(63, MIB, {slow: 4}) not in PULLED
    assert rule_of(slow, mode="fixed").decide(64, MIB, {slow: 4}) in PULLED


def test_a_fast_tier_is_pulled_from_and_a_slow_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    compute = compute_cost(0.0, 0.001)  # 1,000 tokens a second
    fast, slow = tier_with(0.001, 1e-9), tier_with(0.5, 1e-6)
    assert rule_of(fast, compute=compute).decide(1024, 16 * MIB, {fast: 64}) in PULLED
    with caplog.at_level(logging.DEBUG, logger="hicache_ext"):
        assert rule_of(slow, compute=compute).decide(1024, 16 * MIB, {slow: 64}) == "dearer"
    assert "1024 tokens: reading them takes 17" in caplog.text


@pytest.mark.parametrize("slowness", [1e-9, 1e-8, 3e-8, 5e-8, 6e-8, 7e-8, 1e-7, 1e-6])
def test_no_decision_is_expected_to_cost_more_than_computing(slowness: float) -> None:
    compute = compute_cost(0.002, 0.001)
    tier = tier_with(0.001, slowness)
    rule = rule_of(tier, compute=compute)
    is_pulled = rule.decide(1024, 16 * MIB, {tier: 64}) in PULLED
    chosen = rule._read_seconds(16 * MIB, {tier: 64}) if is_pulled else compute.saved_by(1024)
    assert chosen is not None
    assert chosen <= 1.05 * (0.002 + 1.024)


def test_after_a_slow_phase_a_pull_must_be_clearly_cheaper() -> None:
    tier = tier_with(0.0, 2e-7)
    rule = rule_of(tier, prefill_rate=1000.0)
    assert rule.decide(1000, 4_400_000, {tier: 60}) in PULLED  # 0.88 s against 1 s
    assert rule.decide(1000, 6_000_000, {tier: 60}) == "dearer"
    assert rule.decide(1000, 4_500_000, {tier: 60}) == "not_cheaper_enough"
    assert rule.decide(1000, 3_500_000, {tier: 60}) in PULLED
    assert rule.decide(1000, 4_400_000, {tier: 60}) in PULLED
    assert rule.decide(1000, 4_800_000, {tier: 60}) == "not_cheaper_enough"


def test_each_tier_counts_for_the_pages_it_has() -> None:
    near, far = tier_with(0.0, 1e-9, "near"), tier_with(0.0, 1e-6, "far")
    rule = rule_of(near, far, prefill_rate=1000.0)
    assert rule.decide(1024, 16 * MIB, {near: 64}) in PULLED
    assert rule.decide(1024, 16 * MIB, {far: 64}) not in PULLED
    assert rule._read_seconds(16 * MIB, {near: 32, far: 32}) == pytest.approx(8 * MIB * 1.001e-6, rel=0.01)


def test_a_store_measures_hits_and_trouble_and_not_misses() -> None:
    inner = FakeTier("pool", GetResult.MISS)
    tier = MeasuredStore(inner)  # type: ignore[arg-type]
    batch = PageBatch([b"k"], [[memoryview(bytearray(100))]])
    tier.get(batch)
    assert tier.read_cost.predict(100) is None
    inner.result = GetResult.TIMEOUT
    tier.get(batch)
    assert tier.read_cost.predict(100) is not None
    tier.contains([b"lost"])
    asked = Asked(6, 16, 100, 1, lambda tier: asked.found[tier] < 3)
    token = pulling._asked.set(asked)
    tier.contains([b"a", b"b"])
    tier.count_leading([b"a"])
    assert asked.found == {tier: 3} and not asked.not_asked
    assert tier.count_leading([b"a", b"b", b"c"]) == 0
    assert tier.contains([b"a", b"b", b"c"]) == [False] * 3
    assert asked.found == {tier: 3} and list(asked.not_asked) == [tier]
    pulling._asked.reset(token)
    assert tier.count_leading([b"a", b"b", b"c"]) == 3


def test_an_unused_tier_is_measured_in_the_background_and_used_again(caplog: pytest.LogCaptureFixture) -> None:
    inner = FakeTier("pool")
    tier = MeasuredStore(inner)  # type: ignore[arg-type]
    for size in (100, 10_000):
        tier.read_cost.observe(size, 10.0)
    rule = rule_of(tier, prefill_rate=1000.0, probe_interval=0.0)

    def keys(count: int) -> list[bytes]:
        return [bytes([number]) * 48 for number in range(count)]

    with caplog.at_level(logging.DEBUG, logger="hicache_ext.storage.tiering.pulling"):
        assert ask(rule, tier, keys) == 0
    assert "1024 tokens are recomputed: dearer" in caplog.text
    assert inner.read.wait(60)
    wait_until(lambda: ask(rule, tier, keys) == 64)
    assert inner.reads[:2] == [1, 32]
    assert rule.metrics.value("decision", "dearer") >= 1
    assert rule.metrics.value("tokens", "recomputed") >= 1024
    assert rule.metrics.value("tokens", "pulled") == 1024


def ask(rule: PullRule, tier: MeasuredStore, keys: Callable[[int], list[bytes]]) -> int:
    """SGLang's question about 64 pages of 16 tokens, as the backend puts it."""
    with rule.looking_up(64, 16, 100) as asked:
        found = 0 if asked is None else tier.count_leading(keys(64))
    return 0 if asked is None else rule.pages_to_pull(asked, found, keys)


def test_a_tier_whose_look_ups_alone_cost_too_much_is_not_asked_until_a_probe_says_otherwise() -> None:
    inner = SlowLookUps("pool")
    tier = MeasuredStore(inner)  # type: ignore[arg-type]
    rule = rule_of(tier, prefill_rate=10_000.0, probe_interval=0.0)  # 102 ms for 1,024 tokens

    def keys(count: int) -> list[bytes]:
        return [bytes([number]) * 48 for number in range(count)]

    tier.read_cost.observe(100, 1e-6)
    inner.seconds = 0.4
    assert ask(rule, tier, keys) == 64  # what was not measured yet is asked
    assert ask(rule, tier, keys) == 0
    assert rule.metrics.value("decision", "not_asked") == 1
    wait_until(lambda: len(inner.askers) == 2)
    inner.seconds = 0.0
    wait_until(lambda: ask(rule, tier, keys) == 64)
    assert inner.askers == {threading.current_thread().name, "hicache-ext-pull-probe"}


def test_a_tier_that_was_probed_is_not_kept_once_a_reload_has_removed_it() -> None:
    inner = SlowLookUps("pool")
    tier = MeasuredStore(inner)  # type: ignore[arg-type]
    rule = rule_of(tier, prefill_rate=10_000.0, probe_interval=0.0)
    tier.read_cost.observe(100, 1e-6)
    inner.seconds = 0.4
    for _ in range(2):
        ask(rule, tier, lambda count: [bytes([number]) * 48 for number in range(count)])
    wait_until(lambda: rule.metrics.value("probe", "pool") == 1 and not rule._prober.running)
    removed = weakref.ref(inner)
    del inner, tier
    gc.collect()
    assert removed() is None


def test_one_probe_after_the_recovery_of_a_tier_is_enough_to_pull_again() -> None:
    """In the report of 2026-11-21 two of three requests after the recovery were computed, 901 ms against 647."""
    inner = FakeTier("pool")
    tier = MeasuredStore(inner)  # type: ignore[arg-type]
    rule = rule_of(tier, prefill_rate=1000.0, probe_interval=0.0)  # 1.02 s for 1,024 tokens
    for _ in range(20):  # a long slow phase
        for pages in (1, 32):
            tier.read_cost.observe(100 * pages, 1.8)
        tier.look_up_cost.observe(64, 1.8)

    def keys(count: int) -> list[bytes]:
        return [bytes([number]) * 48 for number in range(count)]

    assert ask(rule, tier, keys) == 0
    wait_until(lambda: len(inner.reads) == 2 and not rule._prober.running)
    assert rule.metrics.value("probe", "pool") == 1
    assert ask(rule, tier, keys) == 64


def test_a_probe_of_a_tier_whose_look_up_alone_is_too_dear_ends_there() -> None:
    """A probe that is still waiting for a slow tier would keep the next one from seeing that it is fast again."""
    inner = SlowLookUps("pool")
    tier = MeasuredStore(inner)  # type: ignore[arg-type]
    rule = rule_of(tier, prefill_rate=100_000.0, probe_interval=0.0)  # 10 ms for 1,024 tokens
    tier.read_cost.observe(6400, 0.2)
    for _ in range(20):
        tier.look_up_cost.observe(64, 0.2)
    inner.seconds = 0.2

    def keys(count: int) -> list[bytes]:
        return [bytes([number]) * 48 for number in range(count)]

    assert ask(rule, tier, keys) == 0
    wait_until(lambda: rule.metrics.value("probe", "pool") == 1 and not rule._prober.running)
    assert inner.askers == {"hicache-ext-pull-probe"} and not inner.reads


def test_a_probe_looks_up_what_the_request_would_have_since_less_says_too_much_of_a_long_round_trip() -> None:
    inner = SlowLookUps("pool")
    tier = MeasuredStore(inner)  # type: ignore[arg-type]
    rule = rule_of(tier, prefill_rate=1000.0, probe_interval=0.0)  # 1.02 s for 1,024 tokens
    tier.read_cost.observe(6400, 1e-6)
    for _ in range(20):
        tier.look_up_cost.observe(64, 1.8)
    inner.seconds = 0.3  # in proportion, half as many keys would stand for 0.6 s, and a quarter for 1.2 s

    def keys(count: int) -> list[bytes]:
        return [bytes([number]) * 48 for number in range(count)]

    assert ask(rule, tier, keys) == 0
    wait_until(lambda: len(inner.reads) == 2 and not rule._prober.running)
    assert tier.look_up_cost.predict(64) == pytest.approx(0.3, rel=0.3)


def test_a_chain_that_is_looked_up_in_portions_is_judged_as_a_whole() -> None:
    near, far = tier_with(0.02, 1e-9, "near"), tier_with(0.02, 1e-9, "far")  # 20 ms to start a read
    near.look_up_cost.observe(64, 0.001)
    far.look_up_cost.observe(64, 0.001)
    rule = rule_of(near, far, prefill_rate=10_000.0)  # 13 ms for the 8 pages of the first portion, 102 ms for all
    keys = [bytes([number]) for number in range(64)]
    with rule.looking_up(64, 16, 100) as asked:
        assert near.count_leading(keys[:8]) == 8
        assert near.count_leading(keys[8:]) == 56
        # All but nothing is left for the other tier to have.
        assert far.count_leading(keys[63:]) == 0
    assert asked is not None
    assert rule.pages_to_pull(asked, 64, lambda count: keys[:count]) == 64


def test_a_short_prefix_costs_no_look_up() -> None:
    tier = MeasuredStore(FakeTier("pool"))  # type: ignore[arg-type]
    rule = rule_of(tier, prefill_rate=1000.0)
    with rule.looking_up(3, 16, 100) as asked:
        assert asked is None
    assert rule.metrics.value("decision", "short") == 1


def test_two_surprises_in_a_row_end_what_was_learnt_and_one_does_not() -> None:
    line = LinearCost()
    for _ in range(20):
        line.observe(100, 0.010)
    line.observe(100, 0.050)
    assert line.predict(100) == pytest.approx(0.022, rel=0.01)
    line.observe(100, 0.050)
    assert line.predict(100) == pytest.approx(0.050)
    for amount in (1, 32):
        line.observe(amount, 0.001)
    assert line.predict(100) == pytest.approx(0.001, rel=0.01)

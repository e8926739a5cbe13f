"""Tenants: whose a request is, whose the pages are that are written, and stores that follow."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.page.hashes import namespace_seed, namespaced_extra_key, page_hashes
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract import tenancy, tenants
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.contract.tenancy import Tenants
from hicache_ext.storage.contract.tenants import DEFAULT, Tenant
from hicache_ext.storage.serving.kv_hints import KvHints, said_by
from hicache_ext.storage.tiering.admission import Admission, AdmissionSettings, WriteBudget
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.storage.tiers.file import pins
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from tests.waiting import wait_until

PAGE = 16
PROMPT = list(range(160))
LIMITS = {"team-a": Tenant(0.5, 60.0), "b": Tenant(0.25, 0.0)}
MIB = 1 << 20
SIZES = (128 << 10,)


@pytest.fixture
def owners() -> Iterator[Tenants]:
    tenancy.put_in_force(LIMITS)
    known = tenants.in_force()
    assert known is not None
    yield known
    tenancy.put_in_force(None)


# -- whose it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "extra_key", "cache_salt", "expected"),
    [
        (None, "team-a", None, "team-a"),
        (None, "team-a/user-7", None, "team-a"),
        (None, None, "b:session", "b"),
        (None, ["team-a", "other"], None, "team-a"),
        (None, namespaced_extra_key("team-a", "0f" * 16), None, "team-a"),
        (None, namespaced_extra_key("team-a/x", "0f" * 16), None, "team-a"),
        (None, namespaced_extra_key("team-a" + "0f" * 16), None, DEFAULT),
        (None, None, "team-a" + "0f" * 16, DEFAULT),
        (None, "0f" * 16, "b", "b"),
        (None, "nobody", "b", "b"),
        (None, "team-ab", None, DEFAULT),
        (None, "", [], DEFAULT),
        (None, None, None, DEFAULT),
        ("b", "team-a", None, "b"),
        ("nobody", "team-a", None, "team-a"),
        (7, {"team-a": 1}, 3.5, DEFAULT),
        (["b"], [["b"]], "/b", DEFAULT),
        (DEFAULT, "team-a", None, DEFAULT),
    ],
)
def test_whose_a_request_is(owners: Tenants, said: Any, extra_key: Any, cache_salt: Any, expected: str) -> None:
    assert owners.tenant_of(said, extra_key, cache_salt) == expected


def test_names_that_look_like_an_adapter_s_digest_are_names(owners: Tenants) -> None:
    for name in ("0f" * 16, "org-" + "0f" * 16):
        owners.limits = {DEFAULT: Tenant(), name: Tenant(0.5)}
        assert owners.tenant_of(None, name, None) == owners.tenant_of(None, f"{name}/x", None) == name


def test_100_000_hostile_requests_are_default_s_and_leave_no_text_of_theirs(owners: Tenants) -> None:
    chance = random.Random(1)
    texts = ["team-a" + "x" * 70, "x" * 1_000_000, "\0", "team-a\n", "TEAM-A", "../team-a", "b" * 65, "\ud800"]
    others = [None, 1, 1.5, [], [None], {}, b"team-a", ("",), object()]
    for _ in range(100_000):
        said, key, salt = (chance.choice(texts + others) for _ in range(3))
        assert owners.tenant_of(said, key, salt) == DEFAULT
    with mock.patch.object(owners._loop, "wake"):
        taken = [owners.offer("b", [0] * 60_000, "b", None, PAGE) for _ in range(500)]
        assert not owners.offer("b", [0] * 60_000, "b", None, PAGE)
    assert 0 < sum(taken) < 80
    owners._waiting.append(("b", ["no", "tokens"], None, None, 2))
    owners._waiting.append(("b", [1 << 40, 2], "\ud800", None, 1))
    owners._waiting_tokens += 4
    owners._note_waiting()
    assert owners._waiting_tokens == 0
    assert set(owners._owners.values()) == {"b"}


def test_what_others_write_behind_a_tenant_s_page_is_not_its(owners: Tenants) -> None:
    """One system prompt for all: who names no tenant is not the one that came first."""
    hashes = page_hashes([*PROMPT, *range(640)], PAGE, namespace_seed(None, None))
    shared, names = len(PROMPT) // PAGE, [page_hash.hex() for page_hash in hashes]
    owners.note(hashes[:shared], "team-a")
    assert owners.offer(DEFAULT, [*PROMPT, *range(640)], None, None, PAGE)
    wait_until(lambda: hashes[-1][:8] in owners._owners, "the prompt is noted")
    owners.follow(names[:shared], [*names[shared:], "ab" * 32])
    assert {owners.owner(page_hash) for page_hash in hashes[shared:]} == {DEFAULT}
    assert owners.owner(bytes.fromhex("ab" * 32)) == DEFAULT
    assert {owners.owner(page_hash) for page_hash in hashes[:shared]} == {"team-a"}


def test_pages_of_a_tenant_that_is_none_any_more_are_the_next_one_s(owners: Tenants) -> None:
    owners.note([b"1" * 32], "team-a")
    owners.limits = {DEFAULT: Tenant(), "team-x": Tenant(0.4)}
    assert owners.owner(b"1" * 32) == DEFAULT
    owners.note([b"1" * 32], "team-x")
    assert owners.owner(b"1" * 32) == "team-x"


def test_pages_of_a_prompt_are_noted_on_another_thread_and_what_follows_them_is_theirs(owners: Tenants) -> None:
    assert owners.offer("team-a", PROMPT, "team-a", None, PAGE)
    hashes = page_hashes([*PROMPT, *range(64)], PAGE, namespace_seed("team-a", None))
    wait_until(lambda: owners.owner(hashes[9]) == "team-a", "the prompt is noted")
    names = [page_hash.hex() for page_hash in hashes]
    owners.follow(names[:10], names[10:12])
    owners.follow(None, names[11:13])
    assert [owners.owner(page_hash) for page_hash in hashes] == ["team-a"] * 13 + [DEFAULT]
    owners.note(hashes, "b")
    assert [owners.owner(page_hash) for page_hash in hashes[12:]] == ["team-a", "b"]
    owners.follow(["not a hash"], ["", "zz", None, 7, names[0]])  # type: ignore[list-item]
    hidden = [page_hash[::-1] for page_hash in hashes]
    owners.rename(hashes, hidden)
    assert [owners.owner(page_hash) for page_hash in hidden] == ["team-a"] * 13 + ["b"]


def test_no_more_pages_are_known_than_there_is_room_for(owners: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "_MOST_KNOWN", 100)
    pages = [number.to_bytes(8, "little") * 4 for number in range(1000)]
    owners.note(pages, "b")
    assert len(owners._owners) + len(owners._older) <= 100
    assert [owners.owner(page) for page in pages[-50:]] == ["b"] * 50
    assert owners.owner(pages[0]) == DEFAULT


def test_without_tenants_nothing_is_asked() -> None:
    assert tenants.in_force() is None


# -- stores ------------------------------------------------------------------------------------------------------------


def of(owners: Tenants, tenant: str, prefix: str, count: int) -> list[bytes]:
    keys = page_keys(count, prefix)
    owners.note([key[16:] for key in keys], tenant)
    return keys


def slab(path: Path) -> SlabStore:
    return SlabStore("disk", path, capacity=8 * MIB)


def test_a_store_keeps_shares_and_counts_pages_hits_and_evictions_by_tenant(owners: Tenants, tmp_path: Path) -> None:
    store = slab(tmp_path)
    try:
        team = of(owners, "team-a", "a", 20)
        assert store_pages(store, team, SIZES) == [SetResult.STORED] * 20
        for begin in range(0, 600, 10):
            store_pages(store, page_keys(600, "crawled")[begin : begin + 10], SIZES)
        assert sum(store.contains(team)) == 20
        read_pages(store, team[:5], SIZES)
        counted = store.fullness().tenant_pages
        assert counted is not None and counted["team-a"] == 20 and counted[DEFAULT] > 20 and counted["b"] == 0
        assert store.metrics.value("tenant_hits", "team-a") == 5
        assert store.metrics.value("tenant_evicted", "team-a") == 0
        assert store.metrics.value("tenant_evicted", DEFAULT) == store.metrics.value("evicted", "capacity") > 400
        # A batch of several tenants' pages.
        mixed = [*of(owners, "b", "b", 3), *page_keys(3, "late"), *of(owners, "team-a", "more", 3)]
        assert store_pages(store, mixed, SIZES) == [SetResult.STORED] * 9
        counted = store.fullness().tenant_pages
        assert counted is not None and (counted["team-a"], counted["b"]) == (23, 3)
    finally:
        store.close()


@pytest.fixture
def leasing(owners: Tenants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlabStore]:
    """A store that sees leases at once; nine tenths of it are a team's."""
    monkeypatch.setattr(pins, "_LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(pins, "_PAUSE", 0)
    owners.limits = {DEFAULT: Tenant(), "team-a": Tenant(0.9)}
    store = slab(tmp_path)
    yield store
    store.close()


def test_a_tenant_gets_its_share_back_from_pages_that_another_has_leased(
    owners: Tenants, leasing: SlabStore, tmp_path: Path
) -> None:
    pinned, leased = page_keys(3, "pinned"), page_keys(60, "crawled")
    store_pages(leasing, [*pinned, *leased], SIZES)
    pins.add_pin(tmp_path, "system", [key[16:] for key in pinned], None)
    pins.add_lease(tmp_path, [key[16:] for key in leased], 600.0, "crawler")
    for begin in range(0, 600, 10):
        store_pages(leasing, page_keys(600, "more")[begin : begin + 10], SIZES)
    held = sum(leasing.contains(leased))
    assert held > 20 and all(leasing.contains(pinned)), "as much as leases may keep"
    team = of(owners, "team-a", "a", 200)
    for begin in range(0, 200, 10):
        store_pages(leasing, team[begin : begin + 10], SIZES)
    capacity = 8 * MIB // (SIZES[0] + 4096)
    assert sum(leasing.contains(team)) >= 0.8 * capacity
    assert sum(leasing.contains(leased)) < held and all(leasing.contains(pinned))


def test_a_tenant_below_its_share_takes_what_nobody_has_leased_first(
    owners: Tenants, leasing: SlabStore, tmp_path: Path
) -> None:
    small, leased, others = (31 << 10,), page_keys(40, "leased"), page_keys(213, "others")
    store_pages(leasing, leased, small)
    pins.add_lease(tmp_path, [key[16:] for key in leased], 600.0, "")
    for begin in range(0, 213, 8):
        store_pages(leasing, others[begin : begin + 8], small)
    team = of(owners, "team-a", "a", 32)
    for begin in range(0, 32, 8):
        store_pages(leasing, team[begin : begin + 8], small)
    assert all(leasing.contains(leased)) and all(leasing.contains(team)) and not all(leasing.contains(others))


def test_two_stores_of_other_names_and_order_share_one_account(owners: Tenants, tmp_path: Path) -> None:
    first = slab(tmp_path)
    store_pages(first, of(owners, "team-a", "a", 4), SIZES)
    tenancy.put_in_force({"c": Tenant(0.1), "b": Tenant(0.2), "team-a": Tenant(0.4)})
    second = slab(tmp_path)
    try:
        store_pages(second, of(owners, "c", "c", 2), SIZES)
        pages = [store.fullness().tenant_pages for store in (first, second)]
        assert pages[1] == {"team-a": 4, "b": 0, "c": 2, DEFAULT: 0}
        assert pages[0] == {"team-a": 4, "b": 0, "other": 2, DEFAULT: 0}
    finally:
        first.close()
        second.close()


def test_a_rebuilt_tier_has_pages_of_nobody(owners: Tenants, tmp_path: Path) -> None:
    store = slab(tmp_path)
    keys = of(owners, "team-a", "a", 4)
    store_pages(store, keys, SIZES)
    store.close()
    again = slab(tmp_path)
    try:
        assert again.wait_until_rebuilt(30)
        assert sum(again.contains(keys)) == 4
        assert again.fullness().tenant_pages == {DEFAULT: 4}
    finally:
        again.close()


def test_the_pages_of_all_paths_are_told_together(owners: Tenants, tmp_path: Path) -> None:
    metrics = TierMetrics("disk")
    paths = [tmp_path / "x", tmp_path / "y"]
    store = SpreadStore("disk", paths, lambda path, trouble: SlabStore("disk", path, capacity=8 * MIB), metrics)
    try:
        store_pages(store, of(owners, "b", "b", 12), SIZES)
        store._look()
        assert metrics.levels()["tenant_pages", "b"] == 12
        assert metrics.levels()["tenant_bytes", "b"] == store._look()["used_bytes"] > 12 * SIZES[0]
        assert metrics.levels()["tenant_bytes", "team-a"] == 0
    finally:
        store.close()


def test_page_files_say_once_that_they_have_no_shares(
    owners: Tenants, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store = PageFileStore("disk", tmp_path, capacity=None)
    store_pages(store, of(owners, "b", "b", 2), SIZES)
    store.close()
    assert sum("tenants share nothing out" in record.getMessage() for record in caplog.records) == 1


# -- write budgets -----------------------------------------------------------------------------------------------------

WRITES = {"team-a": Tenant(0.5), "b": Tenant(0.25)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def budget(owners: Tenants) -> WriteBudget:
    """Ten bytes a second, 36,000 saved."""
    owners.limits = {DEFAULT: Tenant(), **WRITES}
    return WriteBudget(10.0, Clock())


def test_a_crawler_spends_what_is_nobody_s_and_never_what_others_have_saved(budget: WriteBudget) -> None:
    names = (DEFAULT, "team-a", "b")
    assert [budget.left_for(name) for name in names] == [9_000, 27_000, 18_000]
    budget.written(9_000)
    assert [budget.left_for(name) for name in names] == [0, 18_000, 9_000]
    # Those that do not write have saved their part of the hour: all that comes is lent.
    budget._now.now = 60.0  # type: ignore[attr-defined]
    assert [budget.left_for(name) for name in names] == [600, 18_600, 9_600]
    budget.written(600)
    assert [budget.left_for(name) for name in names] == [0, 18_000, 9_000]
    # A tenant that writes spends its own first, then what is nobody's, and gets its share of what comes.
    budget.written(18_000, "team-a")
    budget._now.now = 160.0  # type: ignore[attr-defined]
    assert [budget.left_for(name) for name in names] == [500, 1_000, 9_500]
    budget.written(700, "team-a")
    assert [budget.left_for(name) for name in names] == [300, 300, 9_300]


def test_what_a_tenant_writes_past_its_budget_it_pays_back_itself(budget: WriteBudget) -> None:
    """Promotions are written whatever the budget says."""
    budget.written(40_000, "b")
    assert budget.left_for("b") == 18_000 - 40_000
    assert (budget.left_for("team-a"), budget.left_for(DEFAULT)) == (18_000, 0)
    assert budget.left_for(DEFAULT) + sum(budget._own.values()) == -4_000
    budget.written(1_000, DEFAULT)
    budget._now.now = 100.0  # type: ignore[attr-defined]
    assert budget.left_for("team-a") == 18_000 and budget.left_for(DEFAULT) == -250


def test_shares_of_all_are_lent_while_nobody_writes_for_them_and_no_debt_is_another_s_gain(owners: Tenants) -> None:
    halves = {name: Tenant(0.5) for name in ("team-a", "b")}
    owners.limits, clock = {DEFAULT: Tenant(), **halves}, Clock()
    budget, written = WriteBudget(10.0, clock), 0
    for _ in range(1_000):
        clock.now += 60
        if (size := int(budget.left_for(DEFAULT))) > 0:
            budget.written(size)
            written += size
    assert written > 0.95 * 10 * clock.now and budget.left_for("b") == 18_000
    budget.written(100_000, "team-a")
    clock.now += 7_200
    assert budget.left_for(DEFAULT) <= 36_000 / 12 and budget.to_spend > 0


@pytest.mark.parametrize("seed", range(3))
def test_in_any_order_the_budget_is_kept_and_each_tenant_gets_its_share(owners: Tenants, seed: int) -> None:
    owners.limits, clock, chance = {DEFAULT: Tenant(), **WRITES}, Clock(), random.Random(seed)
    budget, written, wanted = WriteBudget(10.0, clock), Counter[str](), Counter[str]()
    for _ in range(5_000):
        clock.now += chance.random() * 20
        name = chance.choice([DEFAULT] * 10 + ["team-a", "b"])
        size = chance.randint(1, 2_000 if name == DEFAULT else 200)
        wanted[name] += size
        if size <= budget.left_for(name):
            budget.written(size, name)
            written[name] += size
        assert budget.left_for(DEFAULT) > -1e-3 and min(budget._own.values()) > -1e-3
    assert sum(written.values()) <= 10 * (3_600 + clock.now) + 1
    # Less than their shares.
    assert (written["team-a"], written["b"]) == (wanted["team-a"], wanted["b"])
    assert written[DEFAULT] < 0.2 * wanted[DEFAULT]


def test_a_tier_refuses_a_crawler_what_it_writes_for_a_team(owners: Tenants) -> None:
    settings = AdmissionSettings(learned=False, budget=1.0, writers=1)
    tier = MemoryPageStore()
    gate = Admission(settings, tier, Clock())

    def offer(keys: list[bytes]) -> list[SetResult]:
        batch = PageBatch(keys, [()] * len(keys), [100] * len(keys))
        return gate.write(batch, lambda some: gate.written(some, [SetResult.STORED] * len(some)))

    # 900 bytes are nobody's, 1,800 the team's.
    assert offer(page_keys(20, "crawled")).count(SetResult.STORED) == 9
    assert offer(page_keys(20, "more")).count(SetResult.STORED) == 0
    # Behind a prompt that others have, too.
    assert offer([*page_keys(4, "shared"), *of(owners, "team-a", "a", 10)]).count(SetResult.STORED) == 14
    assert tier.metrics.value("tenant_refused", DEFAULT) == 31
    assert tier.metrics.value("tenant_refused", "team-a") == 0


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_tenant_s_leases_end_after_its_longest_and_refused_ones_are_counted_by_tenant(owners: Tenants) -> None:
    leased: list[float] = []

    class Disk:
        def lease_pages(self, hashes: Any, seconds: float, namespace: str) -> int:
            leased.append(seconds)
            return len(hashes)

        def end_leases(self, hashes: Any) -> int:
            return 0

        def demote_pages(self, hashes: Any) -> int:
            return 0

    hints = KvHints(3600.0, lambda: [Disk()], lambda: PAGE, lambda hashes: {}, None)  # type: ignore[list-item]
    retain = {"hints": [{"action_type": "retain", "payload": {"ttl_seconds": 9999}}]}
    for tenant, key in ((None, "team-a"), (None, "x"), ("b", "x")):
        said = said_by(None, {"hicache_ext": {**retain, "tenant": tenant}})
        assert said is not None
        hints.follow(said, PROMPT, b"", owners.tenant_of(said.tenant, key, None))
    assert leased == [60.0, 3600.0]
    assert hints.metrics.value("tenant_refused", "b") == 1
    assert hints.metrics.value("page", "retained") == 20
    hints.close(1.0)


def test_a_reload_changes_shares_and_names(tmp_path: Path) -> None:
    def config(configured: Any) -> Any:
        disk = {"type": "file", "path": str(tmp_path / "disk"), "capacity": "8MiB"}
        return load_config(ExtraConfig.around({"tiers": {"disk": disk}, "tenants": configured}))

    store = ReloadableStore(config({"a": {"share": "20%"}}))
    try:
        known = tenants.in_force()
        assert known is not None and known.limits["a"].share == 0.2
        assert store.reload(config({"a": {"share": "30%"}, "b": {}})) == ["new tenants"]
        assert tenants.in_force() is known
        assert (known.limits["a"].share, set(known.limits)) == (0.3, {"a", "b", DEFAULT})
        store.reload(config(None))
        assert tenants.in_force() is None
    finally:
        store.close()
        tenancy.put_in_force(None)

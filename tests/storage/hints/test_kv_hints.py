"""What requests say about KV: understood or ignored, never believed, and done on a thread of its own."""

from __future__ import annotations

import logging
import os
import random
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hicache_ext.page.hashes import namespace_seed, page_hashes
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.serving import kv_hints
from hicache_ext.storage.serving.kv_hints import Action, KvHints, said_by
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.pins import add_pin, read_pins
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import IDENTITY, store_pages
from tests.waiting import wait_until

PAGE_SIZE = 16
PROMPT = array("q", range(160))
SIZES = (31 << 10,)


def envelope(*actions: Any, version: str = "0.1", message_id: Any = "message") -> Any:
    made = [SimpleNamespace(action_id="a", action_version="1.0", payload={}) for _ in actions]
    for one, (kind, payload) in zip(made, actions, strict=True):
        one.action_type, one.payload = kind, payload
    return SimpleNamespace(protocol_version=version, message_id=message_id, actions=made)


def custom(*hints: Any, **more: Any) -> dict[str, Any]:
    return {"hicache_ext": {"hints": list(hints), **more}}


# -- what a request says -----------------------------------------------------------------------------------------------


def test_a_request_that_says_nothing_says_none() -> None:
    assert said_by(None, None) is said_by(None, {"other": 1}) is said_by(None, {"hicache_ext": 3}) is None


@pytest.mark.parametrize("prefix", ["kv.", ""])
def test_both_ways_say_the_same(prefix: str) -> None:
    actions = [
        ("retain", {"ttl_seconds": 600}, Action("retain", ttl_seconds=600.0)),
        ("release", {}, Action("release")),
        ("prefetch", {"to": "prefill"}, Action("prefetch", to_prefill=True)),
        ("demote", {"from_token": 32}, Action("demote", from_token=32)),
        ("supersede", {"message_id": "before"}, Action("supersede", message_id="before")),
        ("priority", {"priority": -2}, None),
    ]
    by_envelope = said_by(envelope(*[(prefix + kind, payload) for kind, payload, _ in actions]), None)
    listed = [{"action_type": prefix + kind, "payload": payload} for kind, payload, _ in actions]
    assert by_envelope == said_by(None, custom(*listed, message_id="message"))
    assert by_envelope is not None
    assert by_envelope.actions == [action for _, _, action in actions if action is not None]
    assert (by_envelope.store, by_envelope.no_store, by_envelope.priority) == (True, False, -2)
    assert by_envelope.message_id == "message"
    assert by_envelope.understood == [kind for kind in kv_hints.TYPES if kind != "no_store"]
    assert not +by_envelope.ignored
    private = said_by(envelope((prefix + "no_store", {})), None), said_by(None, custom({"action_type": "no_store"}))
    assert [(said.store, said.no_store, said.understood) for said in private if said] == [
        (False, True, ["no_store"])
    ] * 2


def test_nothing_is_remembered_or_told_of_a_request_of_which_nothing_is_kept() -> None:
    kinds = ("retain", "release", "demote", "supersede", "prefetch", "no_store")
    for to in ("here", "prefill"):
        payload = {"message_id": "before", "to": to}
        said = said_by(None, custom(*[{"action_type": kind, "payload": payload} for kind in kinds], message_id="m"))
        assert said is not None and said.no_store and said.message_id == ""
        assert [action.type for action in said.actions] == ["release", "prefetch"][: 1 + (to == "here")]
        assert said.ignored == Counter(refused=4 + (to == "prefill"))


def test_of_leases_and_prefetches_the_last_one_of_a_request_counts() -> None:
    retain = [{"action_type": "retain", "payload": {"ttl_seconds": seconds}} for seconds in (1, 2, 3)]
    prefetch = [{"action_type": "prefetch", "payload": {"tokens": [number]}} for number in range(3)]
    said = said_by(None, custom(*retain, {"action_type": "release"}, *prefetch))
    assert said is not None and said.ignored == Counter(refused=4)
    assert said.actions == [
        Action("retain", ttl_seconds=3.0),
        Action("release"),
        Action("prefetch", tokens=array("I", [2])),
    ]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ({"action_type": "kv.fetch"}, "unknown"),
        ({"action_type": "kv.retain", "action_version": "2.0"}, "unknown"),
        ({"action_type": "kv.retain", "payload": {"ttl_seconds": float("inf")}}, "malformed"),
        ({"action_type": "kv.retain", "payload": {"ttl_seconds": float("nan")}}, "malformed"),
        ({"action_type": "kv.retain", "payload": {"ttl_seconds": True}}, "malformed"),
        ({"action_type": "kv.retain", "payload": {"ttl_seconds": 0}}, "malformed"),
        ({"action_type": "kv.retain", "payload": {"ttl_seconds": 10**400}}, "malformed"),
        ({"action_type": "kv.demote", "payload": {"from_token": -1}}, "malformed"),
        ({"action_type": "kv.demote", "payload": {"from_token": 1.5}}, "malformed"),
        ({"action_type": "kv.supersede", "payload": {"message_id": "x" * 129}}, "malformed"),
        ({"action_type": "kv.supersede"}, "malformed"),
        ({"action_type": "kv.prefetch", "payload": {"to": ["prefill"]}}, "malformed"),
        ({"action_type": "kv.prefetch", "payload": {"tokens": "0, 1"}}, "malformed"),
        ({"action_type": "kv.prefetch", "payload": {"tokens": [1.5] * 16}}, "malformed"),
        ({"action_type": "kv.prefetch", "payload": {"tokens": [-1]}}, "malformed"),
        ({"action_type": "kv.prefetch", "payload": {"tokens": [1 << 32]}}, "malformed"),
        ({"action_type": "kv.prefetch", "payload": {"tokens": ["x" * 100_000]}}, "malformed"),
        ({"action_type": "kv.prefetch", "payload": {"tokens": [0] * ((1 << 17) + 1)}}, "malformed"),
        ({"action_type": "kv.priority", "payload": {"priority": "high"}}, "malformed"),
        ({"action_type": "kv.release", "payload": [1]}, "malformed"),
        ({"action_type": ["kv.release"]}, "malformed"),
        ("kv.release", "malformed"),
    ],
)
def test_what_is_not_understood_is_ignored_and_the_rest_is_not(action: Any, reason: str) -> None:
    said = said_by(None, custom(action, {"action_type": "release"}))
    assert said is not None
    assert (said.actions, said.ignored) == ([Action("release")], Counter({reason: 1}))


def test_actions_beyond_the_limit_and_envelopes_of_other_versions_are_ignored() -> None:
    said = said_by(None, custom(*[{"action_type": "release"}] * 1000))
    assert said is not None and len(said.actions) == 16 and said.ignored["malformed"] == 984
    said = said_by(envelope(*[("kv.release", {})] * 20), None)
    assert said is not None and len(said.actions) == 16 and said.ignored["malformed"] == 4
    said = said_by(envelope(("kv.no_store", {}), version="0.2"), None)
    assert said is not None and said.store and said.ignored["unknown"] == 1


_LEAVES = (
    *(None, True, False, 0, -1, 1 << 70, 0.5, float("inf"), float("nan"), "", "kv.retain", "retain", "0.1", "1.0"),
    *("secret-text", "x" * 5000, "\udcff", b"bytes", [], {}, (), object()),
)
_KEYS = (
    "hints",
    "message_id",
    "store",
    "priority",
    "action_type",
    "action_version",
    "payload",
    "ttl_seconds",
    "tokens",
)


def anything(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 3 or kind < 0.5:
        return chance.choice(_LEAVES)
    if kind < 0.7:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(20))]
    return {chance.choice((*_KEYS, *kv_hints.TYPES)): anything(chance, depth + 1) for _ in range(chance.randrange(5))}


MALFORMED = int(os.environ.get("HICACHE_EXT_MALFORMED_HINTS", "5000"))
"""100,000 take two minutes."""


def test_malformed_envelopes_raise_nothing_and_say_nothing_in_logs_and_labels(
    caplog: pytest.LogCaptureFixture, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    hints = opened()
    monkeypatch.setattr(hints._loop, "wake", lambda: None)
    chance = random.Random(40)
    for _ in range(MALFORMED):
        made = SimpleNamespace(
            protocol_version=chance.choice(("0.1", "0.1", anything(chance))),
            message_id=anything(chance),
            actions=anything(chance),
        )
        if isinstance(made.actions, list):
            made.actions = [
                SimpleNamespace(
                    action_type=chance.choice((*kv_hints.TYPES, anything(chance))),
                    action_version=chance.choice(("1.0", anything(chance))),
                    payload=anything(chance),
                )
                for _ in made.actions
            ]
        params = chance.choice((None, anything(chance), {"hicache_ext": anything(chance)}))
        said = said_by(chance.choice((None, made)), params)
        if said is not None:
            hints.offer(said, PROMPT, chance.choice((None, "secret-text")), None)
            hints._act_on_waiting()
    assert "secret-text" not in caplog.text and "xxxxx" not in caplog.text
    known = {*kv_hints.TYPES, *kv_hints.IGNORED, "retained", "released", "demoted", "present", "fetched", "absent"}
    assert {reason for _, reason in hints.metrics.snapshot()} <= known
    assert hints.metrics.value("ignored", "malformed") > MALFORMED / 10


# -- what is done about it ---------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SpreadStore]:
    def open_path(path: Path, trouble: Any) -> SlabStore:
        return SlabStore("disk", path, capacity=4 << 20, trouble=trouble)

    store = SpreadStore("disk", [tmp_path / "disk"], open_path, TierMetrics("disk"))
    yield store
    store.close()


@pytest.fixture
def opened(disk: SpreadStore) -> Iterator[Any]:
    made: list[KvHints] = []

    def open_(lease: float = 3600.0, tiers: Sequence[Any] | None = None, **ways: Any) -> KvHints:
        ways = {"bring_inward": lambda hashes: {"fetched": len(hashes)}, "tell_prefill": None} | ways
        made.append(KvHints(lease, lambda: [disk] if tiers is None else tiers, lambda: PAGE_SIZE, **ways))
        return made[-1]

    yield open_
    for hints in made:
        hints.close(5.0)


def tell(hints: KvHints, *actions: Any, tokens: Sequence[int] = PROMPT, salt: str | None = None, **more: Any) -> None:
    """Follow them on this thread."""
    said = said_by(envelope(*actions, **more), None)
    assert said is not None
    with mock.patch.object(hints._loop, "wake"):
        hints.offer(said, tokens, None, salt)
    hints._act_on_waiting()


def leases(disk: SpreadStore) -> list[Any]:
    return [pin for pin in read_pins(disk._parts[0].path) if pin.is_lease]


def test_retain_leases_all_whole_pages_of_the_prompt_and_release_ends_that(opened: Any, disk: SpreadStore) -> None:
    hints = opened(lease=60.0)
    add_pin(disk._parts[0].path, "operator", page_hashes(PROMPT, PAGE_SIZE), None)
    tell(hints, ("kv.retain", {"ttl_seconds": 9999}), tokens=PROMPT[:-3], salt="tenant")
    (lease,) = leases(disk)
    assert list(lease.hashes) == page_hashes(PROMPT, PAGE_SIZE, namespace_seed(None, "tenant"))[:9]
    assert lease.until - lease.created == pytest.approx(60.0)
    # Of another tenant; then of a later turn of this one.
    tell(hints, ("kv.release", {}), tokens=PROMPT[:-3])
    assert leases(disk)
    tell(hints, ("kv.release", {}), salt="tenant")
    assert not leases(disk)
    assert [pin.name for pin in read_pins(disk._parts[0].path)] == ["operator"]
    assert hints.metrics.value("page", "retained") == 9


def test_with_a_lease_of_none_nothing_is_done_but_what_the_scheduler_does(opened: Any, disk: SpreadStore) -> None:
    hints = opened(lease=0.0)
    tell(hints, ("kv.retain", {"ttl_seconds": 9}))
    tell(hints, ("kv.no_store", {}), message_id=None)
    assert not leases(disk) and hints._loop._thread is None
    assert hints.metrics.value("ignored", "refused") == 1 and hints.metrics.value("action", "no_store") == 1


def stored(disk: SpreadStore, hashes: Sequence[bytes]) -> list[bytes]:
    keys = [IDENTITY + page_hash for page_hash in hashes]
    store_pages(disk, keys, SIZES)
    return keys


def test_supersede_demotes_what_this_prompt_does_not_share_and_nobody_elses(opened: Any, disk: SpreadStore) -> None:
    hints, branch = opened(), PROMPT[:80] + array("q", range(1000, 1080))
    old, new = (page_hashes(tokens, PAGE_SIZE) for tokens in (PROMPT, branch))
    keys = stored(disk, old + new[5:])
    tell(hints, message_id="first")
    tell(hints, ("kv.supersede", {"message_id": "first"}), salt="another", message_id="guessed")
    assert hints.metrics.value("page", "demoted") == 0
    tell(hints, ("kv.supersede", {"message_id": "first"}), tokens=branch, message_id="second")
    assert hints.metrics.value("page", "demoted") == 5
    index = disk.parts[0]._index
    ranks = index.memory.rows[index.rows_of(keys), 6]
    assert [rank == 0 for rank in ranks] == [False] * 5 + [True] * 5 + [False] * 5


def test_prefetch_goes_inward_or_to_the_prefill_nodes_if_there_are_any(opened: Any) -> None:
    told: list[Any] = []
    hints = opened(tell_prefill=told.append)
    tell(hints, ("kv.prefetch", {}))
    tell(hints, ("kv.prefetch", {"tokens": list(range(48))}))
    assert hints.metrics.value("page", "fetched") == 10 + 3
    tell(hints, ("kv.prefetch", {"tokens": [1.5] * 16}))
    assert hints.metrics.value("ignored", "malformed") == 1
    tell(hints, ("kv.prefetch", {"to": "prefill"}))
    assert told == [[page_hash.hex() for page_hash in page_hashes(PROMPT, PAGE_SIZE)]]
    tell(alone := opened(), ("kv.prefetch", {"to": "prefill"}))
    assert alone.metrics.value("ignored", "unsupported") == 1


def test_a_slow_or_failing_store_holds_up_nobody_and_what_is_too_many_is_dropped(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        inner = None

        def lease_pages(self, hashes: Any, seconds: float, namespace: str) -> int:
            assert go_on.wait(60)
            raise OSError("secret-text")

        end_leases = demote_pages = lease_pages

    go_on = threading.Event()
    hints = opened(tiers=[Broken()])
    said = said_by(envelope(("kv.retain", {})), None)
    for _ in range(400):
        hints.offer(said, PROMPT, None, None)
    assert hints.metrics.value("ignored", "dropped") >= 400 - 256 - 1
    go_on.set()
    wait_until(lambda: not hints._waiting, "all hints are tried")
    wait_until(lambda: hints.metrics.value("ignored", "failed") + hints.metrics.value("ignored", "dropped") == 400, "")
    assert "OSError" in caplog.text and "secret-text" not in caplog.text


def test_long_keys_count_among_what_waits(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hints, said = opened(), said_by(envelope(("kv.retain", {})), None)
    monkeypatch.setattr(hints._loop, "wake", lambda: None)
    for _ in range(3):
        hints.offer(said, PROMPT, "key" * 500_000, "salt" * 100_000)
    assert len(hints._waiting) == 2 and hints.metrics.value("ignored", "dropped") == 1


def test_a_tier_that_hides_its_names_is_told_the_hidden_ones(opened: Any, disk: SpreadStore) -> None:
    class Hiding(TransformedStore):
        def __init__(self) -> None:
            self.inner = disk

        def names_of(self, hashes: Sequence[bytes]) -> list[bytes]:
            return [page_hash[::-1] for page_hash in hashes]

    tell(opened(tiers=[Hiding()]), ("kv.retain", {}))
    assert list(leases(disk)[0].hashes) == [page_hash[::-1] for page_hash in page_hashes(PROMPT, PAGE_SIZE)]


def test_what_is_remembered_of_messages_is_bounded(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_hints, "_MOST_MESSAGES", 5)
    monkeypatch.setattr(kv_hints, "_MOST_REMEMBERED", 35)
    hints = opened()
    for number in range(20):
        tell(hints, message_id=str(number))
    assert [message for _, message in hints._messages] == ["17", "18", "19"] and hints._remembered == 30

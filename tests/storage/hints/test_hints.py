"""Hints: left on a real board, found once, bounded, and never believed further than which pages to look for."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import StoreError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract import abilities
from hicache_ext.storage.contract.abilities import LONGEST_HINT, MOST_PAGES_OF_A_HINT, HintBoard, board_among
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import DelegatingStore
from hicache_ext.storage.serving import hints as sender_module
from hicache_ext.storage.serving.hints import HintReceiver, HintSender, decode, encode
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.file import hints as file_hints
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.waiting import wait_until

SCOPE = b"s" * 16
HASHES = [f"{number:064x}" for number in range(1, 8)]


class MemoryBoard:
    def __init__(self) -> None:
        self.hints: list[bytes] = []
        self.trouble: Exception | None = None
        self.looked_at = threading.Event()
        """Somebody has looked for the first time: what is left from now on is new to them."""

    def post_hint(self, hint: bytes) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.hints.append(hint)

    def read_hints(self, since: int | None) -> tuple[int, list[bytes]]:
        if self.trouble is not None:
            raise self.trouble
        seen = len(self.hints)
        if since is None:
            self.looked_at.set()
            return seen, []
        return seen, self.hints[since:seen]


# -- the boards of real engines ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.slow)])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The document of a tier that two processes could open."""
    if request.param == "file":
        return {"type": "file", "path": str(tmp_path / "pool"), "capacity": "64MiB", "layout": "pages"}
    server = request.getfixturevalue("redis_server")
    server.command("FLUSHALL")
    return {"type": "redis", "url": server.url, "timeout": "30s"}


@pytest.fixture
def boards(tier: Any) -> Iterator[list[HintBoard]]:
    config = load_config(ExtraConfig.around({"tiers": {"pool": tier}}))
    stores = [open_tier("pool", config.tiers["pool"]) for _ in range(2)]
    yield [board_among([DelegatingStore(store)], "pool") for store in stores]
    for store in stores:
        store.close()


def test_what_one_node_leaves_another_finds_once_and_in_order(boards: list[HintBoard]) -> None:
    writer, reader = boards
    writer.post_hint(b"before anybody looked")
    since, hints = reader.read_hints(None)
    assert hints == []
    assert reader.read_hints(since)[1] == []
    for number in range(3):
        writer.post_hint(b"hint %d" % number)
    since, hints = reader.read_hints(since)
    assert hints == [b"hint 0", b"hint 1", b"hint 2"]
    writer.post_hint(b"hint 3")
    since, hints = reader.read_hints(since)
    assert hints == [b"hint 3"]
    assert reader.read_hints(since)[1] == []


def test_a_board_keeps_the_newest_and_leaves_out_what_is_too_long(
    boards: list[HintBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_hints, abilities):
        monkeypatch.setattr(module, "KEPT_HINTS", 5)
        monkeypatch.setattr(module, "LONGEST_HINT", 100)
    writer, reader = boards
    since, _ = reader.read_hints(None)
    for number in range(20):
        writer.post_hint(b"hint %d" % number)
    since, hints = reader.read_hints(since)
    assert hints == [b"hint %d" % number for number in range(15, 20)]
    writer.post_hint(b"x" * 101)
    writer.post_hint(b"x" * 100)
    assert reader.read_hints(since)[1] == [b"x" * 100]


def test_strangers_files_on_a_directory_are_no_hints(tmp_path: Path) -> None:
    config = load_config(
        ExtraConfig.around({"tiers": {"pool": {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}}})
    )
    store = open_tier("pool", config.tiers["pool"])
    board = board_among([store], "pool")
    since, _ = board.read_hints(None)
    board.post_hint(b"ours")
    hints = tmp_path / "hints"
    (hints / "README").write_text("x")
    name = f"{time.time_ns():020d}-stranger"
    os.symlink("/etc/hostname", hints / f"{name}-1.hint")
    (hints / f"{name}-2.hint").mkdir()
    os.mkfifo(hints / f"{name}-3.hint")
    assert board.read_hints(since)[1] == [b"ours"]
    store.close()


@pytest.mark.slow
def test_a_redis_that_is_gone_is_said_and_nothing_else(redis_server: RedisServer, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "own") as server:
        config = load_config(ExtraConfig.around({"tiers": {"pool": {"type": "redis", "url": server.url}}}))
        store = open_tier("pool", config.tiers["pool"])
        board = board_among([store], "pool")
        server.stop()
        with pytest.raises(StoreError):
            board.post_hint(b"x")
        with pytest.raises(StoreError):
            board.read_hints(None)
        store.close()


def test_a_store_without_a_board_is_named() -> None:
    with pytest.raises(StoreError, match=r"'memory'.*carries no hints"):
        board_among([MemoryPageStore("memory")], "memory")
    with pytest.raises(StoreError, match=r"'pool'.*not in use"):
        board_among([], "pool")


# -- what a hint says --------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20))
def test_a_hint_comes_back_as_it_was(page_hashes: list[bytes]) -> None:
    data = encode(SCOPE, 1_700_000_000.125, page_hashes)
    assert decode(data) == (SCOPE, 1_700_000_000.125, page_hashes)
    assert decode(data[:-1]) is None
    assert decode(data + b"x") is None


def test_the_longest_hint_fits_a_board_and_a_longer_one_is_none() -> None:
    hint = SCOPE, 1.0, [bytes(32)] * MOST_PAGES_OF_A_HINT
    assert decode(encode(*hint)) == hint and len(encode(*hint)) <= LONGEST_HINT
    assert decode(encode(SCOPE, 1.0, [bytes(32)] * (MOST_PAGES_OF_A_HINT + 1))) is None


@given(st.binary(max_size=300))
def test_anything_else_is_no_hint(data: bytes) -> None:
    assert decode(data) is None


# -- sending and following ---------------------------------------------------------------------------------------------


def test_a_sender_never_waits_and_counts_what_it_could_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "MOST_PAGES_OF_A_HINT", 5)
    board, metrics = MemoryBoard(), TierMetrics("test")
    sender = HintSender(lambda: board, lambda: SCOPE, metrics)
    board.trouble = StoreError("away")
    sender.announce(HASHES)
    wait_until(lambda: metrics.value("hint", "failed") == 1)
    board.trouble = None
    sender.announce(HASHES)
    wait_until(lambda: metrics.value("hint", "sent") == 1)
    assert metrics.value("hint", "too_long") == 2
    sent = decode(board.hints[0])
    assert sent is not None
    assert [page_hash.hex() for page_hash in sent[2]] == HASHES[:5]
    sender.close(5)


def test_a_hint_waits_until_its_pages_are_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is written in the background has taken them, and nobody else finds them yet."""
    monkeypatch.setattr(sender_module, "MOST_PAGES_OF_A_HINT", 5)
    board, metrics, present = MemoryBoard(), TierMetrics("test"), [0]
    looked: list[int] = []

    def in_pool(hashes: Sequence[str]) -> int:
        looked.append(len(hashes))
        return present[0]

    sender = HintSender(lambda: board, lambda: SCOPE, metrics, in_pool)
    sender.announce(HASHES)
    wait_until(lambda: len(looked) >= 2)
    assert not board.hints
    present[0] = 5
    wait_until(lambda: metrics.value("hint", "sent") == 1)
    monkeypatch.setattr(sender_module, "_PAGES_AWAITED", 0.0)
    present[0] = 2
    sender.announce(HASHES)
    wait_until(lambda: metrics.value("hint", "sent") == 2)
    sent = decode(board.hints[1])
    assert sent is not None and len(sent[2]) == 2
    present[0] = 0
    sender.announce(HASHES)
    wait_until(lambda: metrics.value("hint", "absent") == 1)
    sender.close(5)


def receive(board: MemoryBoard, bring: Callable[[Sequence[bytes]], dict[str, int]]) -> HintReceiver:
    return HintReceiver(lambda: board, bring, lambda: SCOPE, 0.01)


def test_a_receiver_follows_what_is_well_formed_fresh_and_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "MOST_PAGES_OF_A_HINT", 10)
    board, followed = MemoryBoard(), []
    receiver = receive(board, lambda hashes: followed.append(list(hashes)) or {"fetched": len(hashes)})
    board.trouble = StoreError("away")
    wait_until(lambda: receiver.metrics.value("board", "failed") > 0)
    board.trouble = None
    assert board.looked_at.wait(60)
    now = time.time()
    page_hashes = tuple(bytes.fromhex(page_hash) for page_hash in HASHES)
    board.hints += [
        b"nonsense",
        encode(SCOPE, now, page_hashes * 2),
        encode(b"o" * 16, now, page_hashes),
        encode(SCOPE, now - 3600, page_hashes),
        encode(SCOPE, now + 3600, page_hashes),
        encode(SCOPE, now, page_hashes),
    ]
    wait_until(lambda: receiver.metrics.value("page", "fetched") == 7)
    assert receiver.metrics.value("hint", "received") == 1
    counted = {reason: receiver.metrics.value("hint", reason) for reason in ("malformed", "other_model", "stale")}
    assert counted == {"malformed": 2, "other_model": 1, "stale": 2}
    assert followed == [list(page_hashes)]
    receiver.close(5)


def test_a_hint_whose_pages_cannot_be_had_does_not_end_the_receiver() -> None:
    board, calls = MemoryBoard(), []

    def bring(hashes: Sequence[bytes]) -> dict[str, int]:
        calls.append(hashes)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return {}

    receiver = receive(board, bring)
    assert board.looked_at.wait(60)
    hint = encode(SCOPE, time.time(), [bytes(32)])
    board.hints.append(hint)
    wait_until(lambda: receiver.metrics.value("hint", "failed") == 1)
    board.hints.append(hint)
    wait_until(lambda: len(calls) == 2)
    receiver.close(5)


def test_pages_come_inward_up_to_the_first_gap_and_once() -> None:
    near, middle, far = MemoryPageStore("near"), MemoryPageStore("middle"), MemoryPageStore("far")
    keys = page_keys(200)
    store_pages(near, keys[:10])
    store_pages(middle, keys[10:20])
    store_pages(far, keys[20:150] + keys[151:])
    store = TieredStore([near, middle, far], [far], promote_to=near, settings=TieringSettings(prefetch_buffer=0))
    store.register_identity(keys[0][:16], {"pool": {"segments": [1000]}})
    assert store.bring_inward(keys) == Counter(present=10, fetched=140, absent=50)
    assert store.wait_until_written(30)
    assert set(near.objects) == set(keys[:150])
    assert_hits(near, keys[:150])
    assert store.bring_inward(keys[:150]) == Counter(present=150)
    store.close()


def test_without_a_nearer_tier_nothing_is_brought() -> None:
    far = MemoryPageStore("far")
    store = TieredStore([far], [far])
    keys = page_keys(3)
    store.register_identity(keys[0][:16], {"pool": {"segments": [1000]}})
    assert store.bring_inward(keys) == Counter(dropped=3)
    assert store.bring_inward([]) == Counter()
    store.close()

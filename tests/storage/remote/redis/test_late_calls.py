"""A call that has no time left says nothing about the nodes it has not asked; a replica that hangs costs a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hicache_ext.config import Secret
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.tiers.redis import page_calls
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_key, page_keys, read_pages, store_pages
from tests.rigs.redis_servers import SentinelPair
from tests.storage.remote.redis.conftest import PREFIX, set_timeout
from tests.waiting import wait_until

# -- nodes that are not to blame -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_call_without_time_takes_no_node_down(server, open_store) -> None:
    """Seen: another node's, or another caller's, hang had used up the time, and this node was said to be down."""
    store = open_store(server, connections=1)
    (node,) = store._topology.nodes
    call = page_calls.PageCall(page_key("one"), b"name")
    talk = partial(page_calls.ask_integers, word=b"EXISTS")
    for idle in (True, False):
        if not idle:
            node._connections.drop()
        call.finish(None)
        store._run([call], talk, time.monotonic() - 0.01, GetResult)
        assert call.result is GetResult.TIMEOUT and call.reason == "timeout"
        store._documents[page_key("one")[:16]] = b"{}"
        store._documents_saved.clear()
        store._save_identities([page_key("one")[:16]], time.monotonic() - 0.01)
        assert node.up


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[SentinelPair]:
    # The Sentinels go on naming a replica that hangs.
    with SentinelPair(tmp_path, down_after_ms=60_000) as pair:
        for server in (pair.primary, pair.replica):
            pair.ask(server, "CONFIG", "SET", "requirepass", "")
        yield pair


@pytest.fixture
def reader(pair: SentinelPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisPageStore]:
    """With 16 pages that the replica has, too."""
    monkeypatch.setenv("SENTINELS", pair.SENTINEL_PASSWORD)
    tier = RedisTierConfig(
        url=pair.url, prefix=PREFIX, sentinel_password=Secret("env", "SENTINELS"), read_replicas=True, timeout=30
    )
    store = RedisPageStore("pool", tier)
    store_pages(store, page_keys(16))
    assert pair.ask(pair.primary, "WAIT", "1", "10000").startswith(":1")
    wait_until(lambda: any(node.up for nodes in store._topology._replicas.values() for node in nodes), "the replica")
    yield store
    store.close()


@pytest.mark.slow
def test_a_replica_that_hangs_costs_one_deadline_and_no_primary(pair: SentinelPair, reader: RedisPageStore) -> None:
    """Seen: every second read lasted until its deadline, for as long as the replica hung, and then the primary, which
    had no time left to answer, was said to be down."""
    keys = page_keys(16)
    for _ in range(4):
        assert_hits(reader, keys)
    set_timeout(reader, 0.3)
    (primary,) = reader._topology.nodes
    pair.replica.freeze()
    late = 0
    try:
        for _ in range(12):
            results, _ = read_pages(reader, keys)
            late += results != [GetResult.HIT] * 16
            assert primary.up
        assert late <= 1
    finally:
        pair.replica.thaw()


@pytest.mark.slow
@pytest.mark.parametrize("clears", [True, False])
def test_a_page_that_was_removed_does_not_come_back_from_a_replica_that_lags(
    pair: SentinelPair, reader: RedisPageStore, clears: bool
) -> None:
    """Seen: every second read of a cleared page was a hit again."""
    keys = page_keys(16)
    pair.ask(pair.replica, "REPLICAOF", "127.0.0.1", "1")
    if clears:
        reader.clear(None)
        assert reader._clearing.wait(30)
    else:
        assert reader.remove(keys) == 16
    for _ in range(6):
        assert read_pages(reader, keys)[0] == [GetResult.MISS] * 16

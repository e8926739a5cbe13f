"""A reader whose path damages pages: nobody else loses one. A copy that is bad in the server goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from hicache_ext.storage.contract import bad_pages
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, payload_of, read_pages, store_pages
from tests.rigs.redis_servers import RedisServer
from tests.rigs.trouble_proxy import Trouble, TroubleProxy
from tests.storage.remote.redis.conftest import PATIENCE, DamagedPath, RawValues, tier_for

# Real servers.
pytestmark = pytest.mark.slow

PAGE = [20_000, 12_768]
PAGES = 300


def read_until(store, keys: Sequence[bytes], enough: Callable[[], bool]) -> None:
    """Read all pages again and again until it is enough; no answer may be a wrong page."""
    deadline = time.monotonic() + 60
    while not enough():
        assert time.monotonic() < deadline, store.metrics.snapshot()
        results, payloads = read_pages(store, keys, PAGE)
        for key, result, payload in zip(keys, results, payloads, strict=True):
            assert result is not GetResult.HIT or payload == payload_of(key, sum(PAGE))


def test_a_reader_with_a_damaged_path_removes_no_good_page(server, open_store):
    store, keys = open_store(server), page_keys(PAGES)
    store_pages(store, keys, PAGE)
    with TroubleProxy(server.port, flipped=0.08) as proxy:
        reader = open_store(proxy)
        proxy.trouble = Trouble.FLIPPED
        read_until(reader, keys, lambda: reader.metrics.value("suspect", "good") > 100)
        proxy.trouble = Trouble.NONE
        left = store.contains(keys).count(True)
        print(f"{PAGES - left} of {PAGES} good pages removed; {reader.metrics.snapshot()}")
        assert left == PAGES
        assert_hits(store, keys, PAGE)
        # The reader has nothing against them either, once its path is whole.
        read_until(reader, keys, lambda: reader.wait_until_examined(PATIENCE) and reader.count_leading(keys) == PAGES)
        assert_hits(reader, keys, PAGE)


def test_a_cluster_loses_no_good_page_to_a_damaged_path(empty_cluster, open_store, monkeypatch):
    store, keys = open_store(*empty_cluster.servers), page_keys(PAGES)
    store_pages(store, keys, PAGE)
    path = DamagedPath(monkeypatch, tier_for(*empty_cluster.servers), 0.08)
    reader = RedisPageStore("pool", path.tier)
    read_until(reader, keys, lambda: reader.metrics.value("suspect", "good") > 50)
    reader.close()
    left = store.contains(keys).count(True)
    print(f"{PAGES - left} of {PAGES} good pages removed; {reader.metrics.snapshot()}")
    assert left == PAGES
    assert_hits(store, keys, PAGE)


@pytest.fixture(params=["one server", "cluster"])
def servers(request) -> list[RedisServer]:
    if request.param == "cluster":
        return request.getfixturevalue("empty_cluster").servers
    return [request.getfixturevalue("empty_server")]


@pytest.fixture
def raw(servers) -> Iterator[RawValues]:
    raw = RawValues(*servers)
    yield raw
    raw.close()


def test_a_page_that_is_bad_in_the_server_is_removed_and_can_be_written_again(servers, raw, open_store):
    store, keys = open_store(*servers), page_keys(6)
    store_pages(store, keys, PAGE)
    for key in keys[::2]:
        raw.write(key, raw.read(key)[:-1] + b"\0")
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT, GetResult.HIT] * 3
    assert store.wait_until_examined(PATIENCE)
    assert sorted(raw.keys()) == sorted(keys[1::2])
    assert store.metrics.value("suspect", "removed") == 3
    assert store_pages(store, keys, PAGE) == [SetResult.STORED, SetResult.EXISTS] * 3
    assert_hits(store, keys, PAGE)


def test_one_of_two_readers_has_a_damaged_path_and_a_bad_page_goes_all_the_same(server, open_store):
    good_reader, keys, raw = open_store(server), page_keys(40), RawValues(server)
    store_pages(good_reader, keys, PAGE)
    with TroubleProxy(server.port, flipped=0.2) as proxy:
        bad_reader = open_store(proxy)
        proxy.trouble = Trouble.FLIPPED
        raw.write(keys[7], raw.read(keys[7])[:-1] + b"\0")
        read_until(bad_reader, keys, lambda: bad_reader.metrics.value("suspect", "removed") == 1)
        proxy.trouble = Trouble.NONE
        assert sorted(raw.keys()) == sorted(keys[:7] + keys[8:])
        assert store_pages(good_reader, keys, PAGE).count(SetResult.STORED) == 1
        assert_hits(good_reader, keys, PAGE)
    raw.close()


def test_a_write_over_a_copy_of_another_length_replaces_it_when_it_is_bad_and_only_then(server, open_store):
    store, raw = open_store(server), RawValues(server)
    bad, other_size = page_keys(2)
    store_pages(store, [bad, other_size], [100])
    raw.write(bad, raw.read(bad)[:-1])
    # No reader of this identity expects it, and yet it is a page as whole as any.
    assert store_pages(store, [bad, other_size], [60]) == [SetResult.STORED, SetResult.REJECTED]
    assert_hits(store, [bad], [60])
    assert_hits(store, [other_size], [100])
    assert store.metrics.value("rejected", "suspect") == 1
    raw.close()


def test_a_page_read_with_a_wrong_expectation_is_not_removed(server, open_store):
    store, keys = open_store(server), page_keys(1)
    store_pages(store, keys, [100])
    assert read_pages(store, keys, [99])[0] == [GetResult.CORRUPT]
    assert store.wait_until_examined(PATIENCE)
    assert_hits(store, keys, [100])


def test_more_than_a_few_bad_pages_a_minute_stay_and_this_is_said_once(servers, raw, open_store, caplog, monkeypatch):
    monkeypatch.setattr(bad_pages, "MOST_REMOVED", 5)
    store, keys = open_store(*servers), page_keys(40)
    store_pages(store, keys, PAGE)
    for key in keys:
        raw.write(key, raw.read(key)[:-1] + b"\0")
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT] * 40
    assert store.wait_until_examined(PATIENCE)
    assert len(raw.keys()) == 35
    assert store.metrics.value("suspect", "removed") == 5
    assert store.metrics.value("suspect", "withheld") == 35
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(loud) == 1 and "BAD PAGES" in loud[0].getMessage()
    # Nothing is promised meanwhile that could not be read; what went can be written again.
    assert store.contains(keys) == [False] * 40
    results = store_pages(store, keys, PAGE)
    assert (results.count(SetResult.STORED), results.count(SetResult.REJECTED)) == (5, 35)
    # Later it goes on.
    monkeypatch.setattr(bad_pages, "MOST_REMOVED", 100)
    monkeypatch.setattr(store._bad_pages._budget, "_paused_until", time.monotonic())
    assert store_pages(store, keys, PAGE).count(SetResult.STORED) == 35
    assert_hits(store, keys, PAGE)

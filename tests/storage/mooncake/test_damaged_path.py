"""A reader whose memory or network card damages pages: nobody else loses one. A copy that is bad in the pool goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from hicache_ext.storage.contract import bad_pages
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, payload_of, read_pages, store_pages
from tests.storage.mooncake.conftest import PATIENCE, DamagingClient, open_with, tier_for
from tests.storage.mooncake.raw_client import RawClient

pytestmark = pytest.mark.slow

PAGE = [20_000, 12_768]
PAGES = 300


@pytest.fixture(scope="module")
def client(servers) -> Iterator[RawClient]:
    client = RawClient(servers)
    yield client
    client.close()


@pytest.fixture
def store(open_quickly, client) -> Iterator[MooncakeStore]:
    client.empty()
    store = open_quickly()
    yield store
    store.close()


@pytest.fixture
def damaging(client) -> DamagingClient:
    return DamagingClient(client.client)


@pytest.fixture
def reader(servers, client, damaging) -> Iterator[MooncakeStore]:
    """Reads with the damaging client."""
    reader = open_with(damaging, tier_for(servers, timeout=PATIENCE))
    yield reader
    reader.close()


def read_until(store: MooncakeStore, keys: Sequence[bytes], enough: Callable[[], bool]) -> None:
    """Read all pages again and again until it is enough; no answer may be a wrong page."""
    deadline = time.monotonic() + 120
    while not enough():
        assert time.monotonic() < deadline, store.metrics.snapshot()
        results, payloads = read_pages(store, keys, PAGE)
        for key, result, payload in zip(keys, results, payloads, strict=True):
            assert result is not GetResult.HIT or payload == payload_of(key, sum(PAGE))


@pytest.mark.thorough
def test_a_reader_with_a_damaged_path_removes_no_good_page(store, reader, damaging):
    keys = page_keys(PAGES)
    store_pages(store, keys, PAGE)
    damaging.flipped = 0.08
    read_until(reader, keys, lambda: reader.metrics.value("suspect", "good") > 100)
    damaging.flipped = 0.0
    left = store.contains(keys).count(True)
    print(f"{PAGES - left} of {PAGES} good pages removed; {reader.metrics.snapshot()}")
    assert left == PAGES
    assert_hits(store, keys, PAGE)
    # The reader has nothing against them either, once its path is whole.
    read_until(reader, keys, lambda: reader.wait_until_examined(PATIENCE) and reader.count_leading(keys) == PAGES)


def test_a_page_that_is_bad_in_the_pool_is_removed_and_can_be_written_again(store, client):
    keys = page_keys(6)
    store_pages(store, keys, PAGE)
    for key in keys[::2]:
        client.write(key, client.read(key)[:-1] + b"\0")
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT, GetResult.HIT] * 3
    assert store.wait_until_examined(PATIENCE)
    assert sorted(client.keys()) == sorted(keys[1::2])
    assert store_pages(store, keys, PAGE) == [SetResult.STORED, SetResult.EXISTS] * 3
    assert_hits(store, keys, PAGE)


def test_one_of_two_readers_has_a_damaged_path_and_a_bad_page_goes_all_the_same(store, reader, damaging, client):
    keys = page_keys(40)
    store_pages(store, keys, PAGE)
    client.write(keys[7], client.read(keys[7])[:-1] + b"\0")
    damaging.flipped = 0.2
    read_until(reader, keys, lambda: reader.metrics.value("suspect", "removed") == 1)
    damaging.flipped = 0.0
    assert sorted(client.keys()) == sorted(keys[:7] + keys[8:])
    assert store_pages(store, keys, PAGE).count(SetResult.STORED) == 1
    assert_hits(store, keys, PAGE)


def test_more_than_a_few_bad_pages_a_minute_stay_and_this_is_said_once(store, client, caplog, monkeypatch):
    monkeypatch.setattr(bad_pages, "MOST_REMOVED", 3)
    keys = page_keys(12)
    store_pages(store, keys, PAGE)
    for key in keys:
        client.write(key, client.read(key)[:-1] + b"\0")
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT] * 12
    assert store.wait_until_examined(PATIENCE)
    assert len(client.keys()) == 9
    assert (store.metrics.value("suspect", "removed"), store.metrics.value("suspect", "withheld")) == (3, 9)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    results = store_pages(store, keys, PAGE)
    assert (results.count(SetResult.STORED), results.count(SetResult.REJECTED)) == (3, 9)

"""A reader whose path damages objects: nobody else loses a page. An object that is bad in the store goes."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hicache_ext.page.pack import PACK_BYTES, SMALL, Pack, new_id, pack_length
from hicache_ext.storage.contract import bad_pages
from hicache_ext.storage.contract.bad_pages import Stored, Verdict
from hicache_ext.storage.contract.pack_index import Place
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.object import examination
from hicache_ext.storage.tiers.object import store as object_store
from hicache_ext.storage.tiers.object.client import Requests
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, payload_of, read_pages, store_pages
from tests.rigs.s3_server import S3Server
from tests.storage.remote.object.bucket import RawBucket, s3_client
from tests.storage.remote.object.fault_proxy import FaultProxy
from tests.storage.remote.object.test_object_faults import PATIENCE, through, tier

# Real servers.
pytestmark = pytest.mark.slow

PAGE = [20_000, 12_768]
PAGES = 300


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port).serving() as proxy:
        yield proxy


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(6)


@pytest.fixture
def raw(s3_server: S3Server, prefix: str) -> RawBucket:
    return RawBucket(s3_client(s3_server, prefix))


@pytest.fixture
def open_store(s3_server: S3Server, prefix: str) -> Iterator[Callable[[int], ObjectPageStore]]:
    """Opens stores that see the bucket at a port of this machine."""
    opened: list[ObjectPageStore] = []

    def open_one(port: int) -> ObjectPageStore:
        def client() -> Any:
            return through(port, s3_server.bucket, prefix)

        opened.append(ObjectPageStore("cold", tier(), client))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def reader(proxy: FaultProxy, open_store: Callable[[int], ObjectPageStore]) -> ObjectPageStore:
    """Sees the bucket through the proxy."""
    return open_store(proxy.port)


@pytest.fixture
def store(s3_server: S3Server, open_store: Callable[[int], ObjectPageStore]) -> ObjectPageStore:
    return open_store(s3_server.port)


def read_until(store: ObjectPageStore, keys: Sequence[bytes], enough: Callable[[], bool]) -> None:
    """Read all pages again and again until it is enough; no answer may be a wrong page."""
    deadline = time.monotonic() + 120
    while not enough():
        assert time.monotonic() < deadline, store.metrics.snapshot()
        results, payloads = read_pages(store, keys, PAGE)
        for key, result, payload in zip(keys, results, payloads, strict=True):
            assert result is not GetResult.HIT or payload == payload_of(key, sum(PAGE))


@pytest.mark.thorough
def test_a_reader_with_a_damaged_path_removes_no_good_page(
    store: ObjectPageStore, reader: ObjectPageStore, proxy: FaultProxy
) -> None:
    keys = page_keys(PAGES)
    store_pages(store, keys, PAGE)
    proxy.flipped = 0.2
    proxy.break_with("flip")
    read_until(reader, keys, lambda: reader.metrics.value("suspect", "good") > 30)
    proxy.break_with("")
    left = store.contains(keys).count(True)
    print(f"{PAGES - left} of {PAGES} good pages removed; {reader.metrics.snapshot()}")
    assert left == PAGES
    assert_hits(store, keys, PAGE)
    # The reader has nothing against them either, once its path is whole.
    read_until(reader, keys, lambda: reader.wait_until_examined(PATIENCE) and reader.count_leading(keys) == PAGES)


@pytest.mark.parametrize("fault", ["same place", "same flip"])
def test_a_path_that_damages_the_same_byte_every_time_removes_no_good_page(
    store: ObjectPageStore, reader: ObjectPageStore, proxy: FaultProxy, fault: str
) -> None:
    keys = page_keys(3)
    for key in keys:
        # A pack each.
        store_pages(store, [key], PAGE)
    proxy.break_with(fault)
    assert read_pages(reader, keys, PAGE)[0] == [GetResult.CORRUPT] * 3
    assert reader.wait_until_examined(PATIENCE)
    assert reader.metrics.value("suspect", "removed") == 0
    assert reader.metrics.value("suspect", "denied") == (3 if fault == "same flip" else 0)
    assert_hits(store, keys, PAGE)


def test_a_page_that_is_bad_in_the_store_is_removed_and_can_be_written_again(
    store: ObjectPageStore, raw: RawBucket
) -> None:
    keys = page_keys(6)
    store_pages(store, keys, PAGE)
    for key in keys[::2]:
        raw.write(key, (raw.read(key) or b"")[:-1] + b"\0")
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT, GetResult.HIT] * 3
    assert store.wait_until_examined(PATIENCE)
    assert sorted(raw.keys()) == sorted(keys[1::2])
    assert store_pages(store, keys, PAGE) == [SetResult.STORED, SetResult.EXISTS] * 3
    assert_hits(store, keys, PAGE)


def test_a_page_that_rotted_under_the_store_stays_and_the_next_write_replaces_it(
    store: ObjectPageStore, s3_server: S3Server, prefix: str
) -> None:
    """The ETag is that of the page as it was written: the store has no part in this, and may be right."""
    keys = page_keys(1)
    store_pages(store, keys, PAGE)
    (file,) = (s3_server.directory / s3_server.bucket / prefix).rglob("*.pack._S3rver_object")
    stored = bytearray(file.read_bytes())
    stored[1000] ^= 1
    file.write_bytes(stored)
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT]
    assert store.wait_until_examined(PATIENCE)
    assert store.metrics.value("suspect", "denied") == 1
    assert file.exists() and store.contains(keys) == [False]
    assert store_pages(store, keys, PAGE) == [SetResult.STORED]
    assert_hits(store, keys, PAGE)


def test_a_bad_page_of_a_pack_goes_alone_and_another_process_finds_the_new_copy(
    store: ObjectPageStore, raw: RawBucket, open_store: Callable[[int], ObjectPageStore], s3_server: S3Server
) -> None:
    keys = page_keys(6)
    store_pages(store, keys, PAGE)
    raw.write(keys[3], (raw.read(keys[3]) or b"")[:-1] + b"\0")
    other = open_store(s3_server.port)
    assert read_pages(store, keys, PAGE)[0].count(GetResult.HIT) == 5
    assert store.wait_until_examined(PATIENCE)
    assert sorted(raw.keys()) == sorted(keys[:3] + keys[4:])
    assert other.contains(keys) == [True] * 3 + [False] + [True] * 2
    assert store_pages(store, keys, PAGE) == [SetResult.EXISTS] * 3 + [SetResult.STORED] + [SetResult.EXISTS] * 2
    for each in (store, other):
        assert_hits(each, keys, PAGE)
    # What is left of the pack and the new one go with their last pages, and their tombstones with them.
    assert other.remove(keys[1:]) == 5
    assert store.remove(keys) == 1
    assert raw.names("packs") == []


def test_a_pack_that_is_cut_costs_the_pages_behind_the_cut(store: ObjectPageStore, raw: RawBucket) -> None:
    keys = page_keys(5)
    store_pages(store, keys, PAGE)
    (pack,) = raw.packs()
    raw.put(pack.name, (raw.get(pack.name) or b"")[: 2 * pack.page_bytes + 100])
    assert store.contains(keys) == [True] * 2 + [False] * 3
    assert read_pages(store, keys, PAGE)[0] == [GetResult.HIT] * 2 + [GetResult.CORRUPT] * 3
    assert store.wait_until_examined(PATIENCE)
    assert store.metrics.value("suspect", "removed") == 3
    assert store_pages(store, keys, PAGE) == [SetResult.EXISTS] * 2 + [SetResult.STORED] * 3
    assert_hits(store, keys, PAGE)


def test_who_expects_another_length_replaces_no_good_page(
    store: ObjectPageStore, open_store: Callable[[int], ObjectPageStore], s3_server: S3Server, raw: RawBucket
) -> None:
    """Each of its writes used to add a newer copy, which everybody else then found to be bad."""
    wrong, key = open_store(s3_server.port), page_keys(1)[0]
    assert store_pages(store, [key], PAGE) == [SetResult.STORED]
    before = raw.names("packs")
    for _ in range(3):
        assert store_pages(wrong, [key], [5000]) == [SetResult.REJECTED]
        assert_hits(store, [key], PAGE)
    assert raw.names("packs") == before
    stored = raw.read(key) or b""
    raw.write(key, stored[:-1] + bytes([stored[-1] ^ 1]))
    assert store_pages(wrong, [key], [5000]) == [SetResult.STORED]
    assert_hits(wrong, [key], [5000])


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Most bytes of each read of an examination."""
    asked: list[int] = []
    real = examination.read_object

    def noted(requests: Requests, client: Any, name: str, offset: int, most: int) -> Stored:
        asked.append(most)
        return real(requests, client, name, offset, most)

    for module in (examination, object_store):
        monkeypatch.setattr(module, "read_object", noted)
    return asked


@pytest.mark.parametrize("pages", [1, 4])
def test_what_arrived_of_a_bad_page_is_not_read_again_for_the_comparison(
    store: ObjectPageStore, raw: RawBucket, read_again: list[int], pages: int
) -> None:
    keys, payload = page_keys(pages), SMALL if pages == 1 else SMALL // 8
    store_pages(store, keys, [payload])
    (pack,) = raw.packs()
    at = pages // 2
    raw.write(keys[at], (raw.read(keys[at]) or b"")[:-1] + b"\0")
    assert read_pages(store, keys, [payload])[0][at] is GetResult.CORRUPT
    assert store.wait_until_examined(PATIENCE)
    assert store.metrics.value("suspect", "removed") == 1
    # The page twice, and everything else of its pack once.
    assert sum(read_again) == pack_length(pages, pack.page_bytes) + pack.page_bytes


def test_more_than_a_pack_can_have_is_not_read(store: ObjectPageStore, read_again: list[int]) -> None:
    """Whoever may write names says what a pack has, and whoever is on the way says how long an object is."""
    pack = Pack(new_id(5), SMALL - 1, bytes(6 * 64))
    assert pack_length(pack.count, pack.page_bytes) > 2 * PACK_BYTES
    requests, bad = store._requests, Stored(4, memoryview(b"page"))
    assert len(examination.whole_pack(requests, requests.client, "packs/none", Place(pack, 1), bad)) == 0
    assert read_again == []


def test_one_of_two_readers_has_a_damaged_path_and_a_bad_page_goes_all_the_same(
    store: ObjectPageStore, reader: ObjectPageStore, proxy: FaultProxy, raw: RawBucket
) -> None:
    keys = page_keys(40)
    store_pages(store, keys, PAGE)
    raw.write(keys[7], (raw.read(keys[7]) or b"")[:-1] + b"\0")
    proxy.flipped = 0.2
    proxy.break_with("flip")
    read_until(reader, keys, lambda: reader.metrics.value("suspect", "removed") == 1)
    proxy.break_with("")
    assert sorted(raw.keys()) == sorted(keys[:7] + keys[8:])
    assert store_pages(store, keys, PAGE).count(SetResult.STORED) == 1
    assert_hits(store, keys, PAGE)


def test_a_copy_that_came_between_the_second_look_and_the_removal_stays(
    store: ObjectPageStore, raw: RawBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = keys = page_keys(1)
    store_pages(store, keys, PAGE)
    good = raw.read(key) or b""
    raw.write(key, good[:-1] + b"\0")
    real = ObjectPageStore.remove_bad

    def raced(store: ObjectPageStore, key: bytes, bad: Stored) -> Verdict | None:
        raw.write(key, good)
        return real(store, key, bad)

    monkeypatch.setattr(ObjectPageStore, "remove_bad", raced)
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT]
    assert store.wait_until_examined(PATIENCE)
    assert store.metrics.value("suspect", "good") == 1
    assert_hits(store, keys, PAGE)


def test_more_than_a_few_bad_pages_a_minute_stay_and_this_is_said_once(
    store: ObjectPageStore, raw: RawBucket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_pages, "MOST_REMOVED", 3)
    keys = page_keys(12)
    store_pages(store, keys, PAGE)
    for key in keys:
        raw.write(key, (raw.read(key) or b"")[:-1] + b"\0")
    assert read_pages(store, keys, PAGE)[0] == [GetResult.CORRUPT] * 12
    assert store.wait_until_examined(PATIENCE)
    assert len(raw.keys()) == 9
    assert (store.metrics.value("suspect", "removed"), store.metrics.value("suspect", "withheld")) == (3, 9)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    results = store_pages(store, keys, PAGE)
    assert (results.count(SetResult.STORED), results.count(SetResult.REJECTED)) == (3, 9)

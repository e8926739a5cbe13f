"""A store that fails, hangs, lies or goes away: no exception, no wrong byte, bounded in time, and back by itself."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import obstore.store
import pytest

from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    HostPages,
    assert_hits,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.rigs.s3_server import ACCESS_KEY, S3Server
from tests.storage.remote.object.bucket import RawBucket, s3_client
from tests.storage.remote.object.fault_proxy import FaultProxy
from tests.waiting import ending_within, wait_until

# Real servers.
pytestmark = pytest.mark.slow

PATIENCE = 30.0
"""Seconds a call may take where nothing hangs: a loaded machine must not look like a fault."""
TIMEOUT = 1.0
"""Of the calls that are meant to run into it."""
BOUND = 10 * TIMEOUT
"""Against hangs only: a loaded machine may be late."""


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


def tier(**settings: int) -> ObjectTierConfig:
    return ObjectTierConfig(url="s3://test", timeout=PATIENCE, **settings)


def through(port: int, bucket: str, prefix: str) -> obstore.store.S3Store:
    return obstore.store.S3Store(
        bucket,
        prefix=prefix,
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id=ACCESS_KEY,
        secret_access_key=ACCESS_KEY,
        region="us-east-1",
        client_options={"allow_http": True, "timeout": timedelta(seconds=PATIENCE)},
        retry_config={
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=PATIENCE),
            "backoff": {
                "init_backoff": timedelta(milliseconds=10),
                "max_backoff": timedelta(milliseconds=50),
                "base": 2,
            },
        },
    )


@pytest.fixture
def store(proxy: FaultProxy, s3_server: S3Server, prefix: str) -> Iterator[ObjectPageStore]:
    client = through(proxy.port, s3_server.bucket, prefix)
    store = ObjectPageStore("cold", tier(concurrency=4), lambda: client)
    yield store
    proxy.released.set()
    proxy.break_with("")
    store.close()


def test_a_failing_server_is_an_error_counted_by_reason_and_forgotten(
    store: ObjectPageStore, proxy: FaultProxy
) -> None:
    keys = page_keys(6)
    store_pages(store, keys)
    proxy.break_with("500")
    begun = time.monotonic()
    assert set(read_pages(store, keys)[0]) <= {GetResult.ERROR, GetResult.TIMEOUT}
    assert {result.durable for result in store_pages(store, page_keys(3, "new"))} == {False}
    assert store.contains(keys) == [False] * 6
    assert store.count_leading(keys) == 0
    assert store.remove(keys) == 0
    assert store.clear([IDENTITY]) == 0
    assert time.monotonic() - begun < 6 * BOUND
    assert store.metrics.value("error", "http_5xx") > 0
    # What clear() was told while the store was down is done when it is back.
    assert store.wait_until_cleared(0) is False
    proxy.break_with("")
    wait_until(lambda: store.wait_until_cleared(1))
    store_pages(store, keys)
    assert_hits(store, keys)


def test_a_page_of_any_size_is_in_a_pack(store: ObjectPageStore, raw: RawBucket) -> None:
    keys = page_keys(2)
    assert store_pages(store, keys, [5 << 20]) == [SetResult.STORED] * 2
    assert [(pack.page_bytes, len(pack.hashes)) for pack in raw.packs()] == [((5 << 20) + 128, 1)] * 2
    assert store.count_leading(keys) == 2
    assert_hits(store, keys, [5 << 20])
    raw.write(keys[0], (raw.read(keys[0]) or b"")[:-1] + b"\0")
    assert read_pages(store, keys, [5 << 20])[0] == [GetResult.CORRUPT, GetResult.HIT]
    assert store.wait_until_examined(PATIENCE)
    assert store.metrics.value("suspect", "removed") == 1
    assert store_pages(store, keys, [5 << 20]) == [SetResult.STORED, SetResult.EXISTS]
    assert store.remove(keys) == 2
    assert raw.names("packs") == []


def test_a_server_that_fails_once_costs_a_retry_and_no_page(store: ObjectPageStore, proxy: FaultProxy) -> None:
    keys = page_keys(4)
    store_pages(store, keys)
    proxy.break_with("500", times=1)
    assert_hits(store, keys)


def test_slow_down_is_retried_and_counted_when_it_lasts(store: ObjectPageStore, proxy: FaultProxy) -> None:
    keys = page_keys(2)
    store_pages(store, keys)
    proxy.break_with("slow down", times=2)
    assert_hits(store, keys)
    proxy.break_with("slow down")
    assert set(read_pages(store, keys)[0]) <= {GetResult.ERROR, GetResult.TIMEOUT}
    assert store.metrics.value("error", "slow_down") > 0


def test_a_hanging_server_costs_one_deadline_and_leaves_memory_alone(store: ObjectPageStore, proxy: FaultProxy) -> None:
    keys = page_keys(12)
    store_pages(store, keys, [2000])
    proxy.break_with("hang")
    store._requests.timeout = TIMEOUT
    pages = HostPages([[2000]] * 12, fill=0x5A)
    begun = time.monotonic()
    results = store.get(PageBatch(keys, pages.buffers))
    assert time.monotonic() - begun < BOUND
    assert set(results) == {GetResult.TIMEOUT}
    before = pages.snapshot()
    assert store_pages(store, page_keys(2, "new")) == [SetResult.TIMEOUT] * 2
    assert store.count_leading(keys) == 0
    store._requests.timeout = PATIENCE
    proxy.break_with("")
    proxy.released.set()
    wait_until(lambda: read_pages(store, keys, [2000])[0] == [GetResult.HIT] * 12)
    assert pages.snapshot() == before


def test_a_hanging_server_costs_the_limit_of_the_call_where_that_is_less(
    store: ObjectPageStore, proxy: FaultProxy
) -> None:
    keys = page_keys(12)
    store_pages(store, keys, [2000])
    proxy.break_with("hang")
    begun = time.monotonic()
    with ending_within(TIMEOUT):
        assert set(read_pages(store, keys, [2000])[0]) == {GetResult.TIMEOUT}
    # Somebody who remembers what is absent (guards/pipeline.py) must know that nobody could be asked.
    trouble = store.metrics.value("error", "timeout")
    with ending_within(TIMEOUT):
        assert store.count_leading(keys) == 0
    assert store.metrics.value("error", "timeout") > trouble
    with ending_within(TIMEOUT):
        assert store.contains(keys) == [False] * 12
    assert store.metrics.value("error", "timeout") > trouble + 1
    assert time.monotonic() - begun < PATIENCE


def test_a_late_reply_is_dropped(s3_server: S3Server, prefix: str) -> None:
    """The reply arrives after the call has returned: the request goes on, the memory is not its any more."""
    release, arrived = threading.Event(), threading.Event()

    store = ObjectPageStore("cold", tier(), lambda: through(s3_server.port, s3_server.bucket, prefix))
    keys = page_keys(1)
    store_pages(store, keys)
    real = store._requests.obstore

    class Late:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def get(self, *arguments: object, **options: object) -> object:
            reply = real.get(*arguments, **options)
            release.wait(60)
            arrived.set()
            return reply

    store._requests.obstore = Late()
    store._requests.timeout = TIMEOUT
    pages = HostPages([[1000]], fill=0x11)
    assert store.get(PageBatch(keys, pages.buffers)) == [GetResult.TIMEOUT]
    before = pages.snapshot()
    release.set()
    store.close()
    assert arrived.is_set()
    assert pages.snapshot() == before


@pytest.mark.parametrize("fault", ["half", "other", "empty"])
def test_a_lie_is_never_a_hit(store: ObjectPageStore, proxy: FaultProxy, raw: RawBucket, fault: str) -> None:
    keys = page_keys(3)
    store_pages(store, keys)
    proxy.other = raw.read(keys[2]) or b""
    proxy.break_with(fault)
    results, payloads = read_pages(store, keys[:2])
    # Of a range whose length is another one than that of its head, nobody knows which pages it has.
    assert results == [GetResult.ERROR] * 2
    # Checked where it was received: not a byte of it has reached host memory.
    assert payloads == [b"\x77" * 1000] * 2
    assert store.wait_until_examined(PATIENCE)
    proxy.break_with("")
    assert store_pages(store, keys[:2]) == [SetResult.EXISTS] * 2
    assert_hits(store, keys)


def test_a_reply_that_is_cut_is_no_hit_and_the_page_stays(store: ObjectPageStore, proxy: FaultProxy) -> None:
    keys = page_keys(3)
    store_pages(store, keys, [50_000])
    proxy.break_with("cut")
    results, _ = read_pages(store, keys, [50_000])
    assert set(results) <= {GetResult.ERROR, GetResult.TIMEOUT}
    # Cut once, obstore asks for the rest.
    proxy.break_with("cut", times=1)
    assert_hits(store, keys, [50_000])


def test_a_server_that_is_killed_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        client = through(server.port, server.bucket, "tier")
        store = ObjectPageStore("cold", tier(concurrency=4), lambda: client)
        keys = page_keys(20)
        store_pages(store, keys)
        server.kill()
        begun = time.monotonic()
        assert GetResult.HIT not in read_pages(store, keys)[0]
        assert not any(result.durable for result in store_pages(store, page_keys(5, "new")))
        assert store.count_leading(keys) == 0
        assert time.monotonic() - begun < 3 * BOUND
        assert store.metrics.value("error", "connection") > 0
        server.start()
        wait_until(lambda: read_pages(store, keys)[0] == [GetResult.HIT] * 20)
        server.freeze()
        store._requests.timeout = TIMEOUT
        begun = time.monotonic()
        assert GetResult.HIT not in read_pages(store, keys)[0]
        assert time.monotonic() - begun < BOUND
        server.thaw()
        store._requests.timeout = PATIENCE
        wait_until(lambda: read_pages(store, keys)[0] == [GetResult.HIT] * 20)
        store.close()


def test_a_server_killed_between_writes_leaves_whole_packs_or_none(tmp_path: Path) -> None:
    keys = page_keys(2000, "kill")
    with S3Server(tmp_path) as server:
        client = through(server.port, server.bucket, "tier")
        store = ObjectPageStore("cold", tier(concurrency=4), lambda: client)
        writer = threading.Thread(target=store_pages, args=(store, keys, [20_000]))
        writer.start()
        # More than are under way at once, so that some are whole.
        wait_until(lambda: len(list(server.directory.rglob("*.pack._S3rver_object"))) > 8)
        server.kill()
        writer.join()
        server.start()
        results: list[GetResult] = []

        def read() -> bool:
            nonlocal results
            results, payloads = read_pages(store, keys, [20_000])
            for key, result, payload in zip(keys, results, payloads, strict=True):
                assert result is not GetResult.HIT or payload == payload_of(key, 20_000)
            return not {GetResult.ERROR, GetResult.TIMEOUT} & set(results)

        wait_until(read)
        assert GetResult.HIT in results
        wait_until(lambda: all(result.durable for result in store_pages(store, keys, [20_000])))
        wait_until(lambda: read() and set(results) == {GetResult.HIT})
        store.close()

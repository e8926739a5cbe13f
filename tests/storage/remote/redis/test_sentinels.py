"""Sentinels name the primary, also after a failover."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from hicache_ext.config import Secret
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, read_pages, store_pages
from tests.rigs.redis_servers import SentinelPair
from tests.storage.remote.redis.conftest import PATIENCE, PREFIX, Values
from tests.storage.remote.redis.test_bad_days import wait_for_replica
from tests.storage.remote.redis.test_faults import wait_for_hits
from tests.waiting import wait_until

# Real servers.
pytestmark = pytest.mark.slow


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[SentinelPair]:
    with SentinelPair(tmp_path) as pair:
        yield pair


@pytest.fixture
def tier(pair: SentinelPair, tmp_path: Path) -> Callable[..., RedisTierConfig]:
    files = {"servers": pair.PASSWORD, "sentinels": pair.SENTINEL_PASSWORD}
    for name, password in files.items():
        (tmp_path / name).write_text(password)

    def make(**changes: object) -> RedisTierConfig:
        return RedisTierConfig(
            **{
                "url": pair.url,
                "prefix": PREFIX,
                "timeout": PATIENCE,
                "password": Secret("file", str(tmp_path / "servers")),
                "sentinel_password": Secret("file", str(tmp_path / "sentinels")),
                **changes,
            }
        )

    return make


@pytest.fixture
def opened(tier: Callable[..., RedisTierConfig]) -> Iterator[Callable[..., RedisPageStore]]:
    stores: list[RedisPageStore] = []

    def make(**changes: object) -> RedisPageStore:
        stores.append(RedisPageStore("pool", tier(**changes)))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def ports_of(store: RedisPageStore) -> list[int]:
    return [node.endpoint.port for node in store._topology.nodes]


def test_the_primary_that_sentinels_name_is_used_and_followed(pair: SentinelPair, opened) -> None:
    store = opened()
    keys = page_keys(16)
    assert set(store_pages(store, keys)) == {SetResult.STORED}
    assert ports_of(store) == [pair.primary.port]
    wait_for_replica(partial(pair.ask, pair.primary))
    pair.fail_over()
    # At the first refused write, or at the next look.
    wait_until(
        lambda: set(store_pages(store, page_keys(4, "after"))) <= {SetResult.STORED, SetResult.EXISTS}, "a write"
    )
    assert ports_of(store) == [pair.primary.port]
    wait_for_hits(store, keys)


def test_a_primary_that_is_killed_is_replaced_by_the_one_that_sentinels_choose(pair: SentinelPair, opened) -> None:
    store = opened()
    keys = page_keys(16)
    store_pages(store, keys)
    wait_for_replica(partial(pair.ask, pair.primary))
    pair.primary.kill()
    wait_until(lambda: read_pages(store, keys)[0] == [GetResult.HIT] * 16, "reads from the new primary")
    assert ports_of(store) == [pair.replica.port]
    wait_until(
        lambda: set(store_pages(store, page_keys(4, "after"))) <= {SetResult.STORED, SetResult.EXISTS}, "a write"
    )


def test_a_wrong_password_of_the_sentinels_is_one_sentence_without_it(tier, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("no such password")
    with pytest.raises(StoreSetupError) as raised:
        RedisPageStore("pool", tier(sentinel_password=Secret("file", str(tmp_path / "wrong"))))
    assert "login is refused" in str(raised.value) and "no such password" not in str(raised.value)


def test_a_service_that_no_sentinel_knows_is_one_sentence(pair: SentinelPair, tier) -> None:
    urls = [url.replace(pair.SERVICE, "others") for url in pair.url]
    with pytest.raises(StoreSetupError, match="knows no service others"):
        RedisPageStore("pool", tier(url=urls))


def test_connections_have_a_name(pair: SentinelPair, opened) -> None:
    store = opened()
    store_pages(store, page_keys(1))
    assert "name=hicache_ext " in pair.ask(pair.primary, "CLIENT", "LIST")


class _Behind(Values):
    """The primary of a pair, reached through Sentinels."""

    def __init__(self, pair: SentinelPair, **changes: object) -> None:
        pair.ask(pair.primary, "CONFIG", "SET", "requirepass", "")
        super().__init__(pair.primary, url=pair.url, **changes)


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelPair]:
    # The suite fills, freezes and loads its server, and a failover in the middle of it is another test.
    with SentinelPair(tmp_path_factory.mktemp("sentinels"), down_after_ms=60_000) as pair:
        yield pair


class TestRedisBehindSentinels(PageStoreTests):
    @pytest.fixture
    def medium(self, shared_pair: SentinelPair, tmp_path: Path) -> _Behind:
        (tmp_path / "sentinels").write_text(shared_pair.SENTINEL_PASSWORD)
        password = Secret("file", str(tmp_path / "sentinels"))
        return _Behind(shared_pair, sentinel_password=password)


def test_sentinels_that_are_gone_leave_the_primary_in_use(pair: SentinelPair, opened) -> None:
    store = opened()
    keys = page_keys(8)
    store_pages(store, keys)
    for sentinel in pair._sentinels:
        sentinel.kill()
        sentinel.wait()
    store._topology.refresh_soon()
    time.sleep(1.5)
    assert_hits(store, keys)
    assert set(store_pages(store, page_keys(4, "new"))) == {SetResult.STORED}

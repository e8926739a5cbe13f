"""The PageStore suite and the state machine against one Redis server and against a cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.state_machine import StoreUnderTest, page_store_machine
from tests.rigs.redis_servers import RedisCluster, RedisServer
from tests.storage.remote.redis.conftest import DamagedPath, RawValues, settings_for

# Real servers.
pytestmark = pytest.mark.slow


class TestRedisServer(PageStoreTests):
    @pytest.fixture
    def servers(self, empty_server: RedisServer) -> list[RedisServer]:
        return [empty_server]

    @pytest.fixture
    def store(self, servers):
        store = RedisPageStore("pool", settings_for(*servers))
        yield store
        store.close()

    @pytest.fixture
    def damaged_reader(self, store, servers, monkeypatch):
        path = DamagedPath(monkeypatch, settings_for(*servers), 0.5)
        reader = RedisPageStore("pool", path.settings)
        yield reader
        reader.close()

    @pytest.fixture
    def raw(self, servers) -> Iterator[RawValues]:
        raw = RawValues(*servers)
        yield raw
        raw.close()

    @pytest.fixture
    def reopen(self, servers):
        return lambda: RedisPageStore("pool", settings_for(*servers))


class TestRedisServerWithOneConnectionAndLittleInFlight(TestRedisServer):
    @pytest.fixture
    def store(self, servers):
        store = RedisPageStore("pool", settings_for(*servers, connections=1, in_flight=65536))
        yield store
        store.close()


class TestRedisCluster(TestRedisServer):
    @pytest.fixture
    def servers(self, empty_cluster: RedisCluster) -> list[RedisServer]:
        return empty_cluster.servers


_machine_servers: list[RedisServer] = []


def _server_for_machine() -> StoreUnderTest:
    server = _machine_servers[0]
    server.command("FLUSHALL")
    raw = RawValues(server)

    def reopen() -> RedisPageStore:
        return RedisPageStore("pool", settings_for(server))

    return StoreUnderTest(reopen(), dispose=raw.close, raw=raw, reopen=reopen)


TestMachine = page_store_machine(_server_for_machine).TestCase
TestMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True, scope="module")
def _machine_server() -> Iterator[None]:
    """unittest cases take no fixtures."""
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory)) as server:
        _machine_servers.append(server)
        yield
        _machine_servers.clear()

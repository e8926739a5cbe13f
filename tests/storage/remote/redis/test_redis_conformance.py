"""The PageStore suite and the state machine against one Redis server and against a cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext import native
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.tiers.redis import connection
from hicache_ext.testing.conformance.page_store import PageStoreTests
from hicache_ext.testing.conformance.state_machine import page_store_machine
from tests.rigs.redis_servers import RedisCluster, RedisServer
from tests.storage.remote.redis.conftest import Values
from tests.storage.transforms.rig import Transformed

# Real servers.
pytestmark = pytest.mark.slow


class TestRedisServer(PageStoreTests):
    @pytest.fixture
    def medium(self, shared_server: RedisServer) -> Values:
        return Values(shared_server)


class TestRedisServerWithoutTheNativeCore(PageStoreTests):
    @pytest.fixture
    def medium(self, shared_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Values:
        monkeypatch.setattr(native, "LIBRARY", Path("/nowhere"))
        return Values(shared_server)


class TestRedisServerWithOneConnectionAndLittleInFlight(PageStoreTests):
    @pytest.fixture
    def medium(self, shared_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Values:
        monkeypatch.setattr(connection, "MOST_IN_FLIGHT", 65536)
        return Values(shared_server, connections=1)


class TestSealedRedisServer(PageStoreTests):
    @pytest.fixture
    def medium(self, shared_server: RedisServer) -> Transformed:
        return Transformed(Values(shared_server), SealMode.ENCRYPT)


class TestEncodedAndAuthenticatedRedisServer(PageStoreTests):
    @pytest.fixture
    def medium(self, shared_server: RedisServer, tmp_path: Path) -> Transformed:
        return Transformed(Values(shared_server), SealMode.AUTHENTICATE, tmp_path / "shelf")


class TestRedisCluster(PageStoreTests):
    @pytest.fixture
    def medium(self, shared_cluster: RedisCluster) -> Values:
        return Values(*shared_cluster.servers)


_machine_servers: list[RedisServer] = []

TestMachine = page_store_machine(lambda: Values(_machine_servers[0])).TestCase
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

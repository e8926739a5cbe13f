"""Real servers for the tests of the Redis tier, and ways past the store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from hicache_ext.storage.tiers.redis import node
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from tests.rigs.redis_servers import HOST, RedisCluster, RedisServer, redis_program
from tests.storage.media import RawMedium

PREFIX = "test:"
PATIENCE = 30.0
"""Seconds a call may take where nothing is meant to fail: a loaded machine must not look like a fault."""


class RawValues:
    """Page values found by the names that docs/redis.md gives, not by the package's code."""

    def __init__(self, *servers: RedisServer) -> None:
        if len(servers) == 1:
            self._client: Any = redis.Redis(host=HOST, port=servers[0].port)
        else:
            self._client = redis.RedisCluster(host=HOST, port=servers[0].port)

    @staticmethod
    def name(key: bytes) -> bytes:
        return f"{PREFIX}page:{key[:16].hex()}:{key[16:].hex()}".encode()

    def read(self, key: bytes) -> bytes | None:
        return self._client.get(self.name(key))

    def write(self, key: bytes, stored: bytes) -> None:
        self._client.set(self.name(key), stored)

    def keys(self) -> list[bytes]:
        names = [name.decode().split(":") for name in self._client.scan_iter(f"{PREFIX}page:*", count=1000)]
        return [bytes.fromhex(name[-2]) + bytes.fromhex(name[-1]) for name in names]

    def close(self) -> None:
        self._client.close()


def tier_for(*servers: RedisServer, **changes: Any) -> RedisTierConfig:
    return tier_of(*[server.port for server in servers], **changes)


def tier_of(*ports: int, **changes: Any) -> RedisTierConfig:
    urls = [f"redis://{HOST}:{port}" for port in ports]
    return RedisTierConfig(**{"url": urls, "prefix": PREFIX, "timeout": PATIENCE, **changes})


class DamagedPath:
    """Damages a byte of a share of what arrives on the connections of one store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tier: RedisTierConfig, share: float) -> None:
        self.share = share
        self.tier = tier
        self._random = random.Random(0)
        real = node.open_connection

        def open_connection(tier: RedisTierConfig, *others: Any, **options: Any) -> Any:
            connection = real(tier, *others, **options)
            if tier is self.tier:
                reader = connection.reader
                reader._receive_into = self._damaging(reader._receive_into)
                # The native core would receive past the damage.
                monkeypatch.setattr(type(connection), "descriptor", None)
            return connection

        monkeypatch.setattr(node, "open_connection", open_connection)

    def _damaging(self, receive_into: Callable[..., int]) -> Callable[..., int]:
        def damage(buffer: memoryview) -> int:
            count = receive_into(buffer)
            if count > 2000 and self._random.random() < self.share:
                buffer[self._random.randrange(count)] ^= 0x10
            return count

        return damage


class Values(RawMedium):
    """One server, or the servers of a cluster, with their values removed."""

    type = "redis"
    shared = True
    keeps_identities = True
    clears_at_once = False

    def __init__(self, *servers: RedisServer, **changes: Any) -> None:
        self._servers = servers
        self._ports = [server.port for server in servers]
        self._changes = changes
        for server in servers:
            server.command("FLUSHALL")
        self.raw = RawValues(*servers)
        self._patch = pytest.MonkeyPatch()

    def __getstate__(self) -> dict[str, Any]:
        return {"_ports": self._ports, "_changes": self._changes}

    def _tier(self) -> RedisTierConfig:
        return tier_of(*self._ports, **self._changes)

    def open(self) -> RedisPageStore:
        return RedisPageStore("pool", self._tier())

    def open_elsewhere(self) -> RedisPageStore:
        return self.open()

    def open_over_a_damaging_path(self) -> RedisPageStore:
        return RedisPageStore("pool", DamagedPath(self._patch, self._tier(), 0.5).tier)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Every connection is lost, and there are no new ones."""

        def refuse(*others: Any, **options: Any) -> Any:
            raise ConnectionRefusedError("connection refused")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node, "open_connection", refuse)
            for server in self._servers:
                server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        for server in self._servers:
            server.command("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1")
        yield
        for server in self._servers:
            server.command("CONFIG", "SET", "maxmemory", "0")

    def close(self) -> None:
        self._patch.undo()
        self.raw.close()


def set_timeout(store: RedisPageStore, seconds: float) -> None:
    """Of the calls from now on; the store was opened, and finds its nodes, with the timeout it was given."""
    store._tier = store._tier.model_copy(update={"timeout": seconds})


@pytest.fixture(scope="session", autouse=True)
def _needs_redis() -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server")


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def empty_server(shared_server: RedisServer) -> RedisServer:
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
def empty_cluster(shared_cluster: RedisCluster) -> RedisCluster:
    for server in shared_cluster.servers:
        server.command("FLUSHALL")
    return shared_cluster


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def open_store() -> Iterator[Callable[..., RedisPageStore]]:
    """Opens stores over servers, and closes them."""
    opened: list[RedisPageStore] = []

    def open_one(*servers: RedisServer, **changes: Any) -> RedisPageStore:
        opened.append(RedisPageStore("pool", tier_for(*servers, **changes)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()

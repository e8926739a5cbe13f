"""The engines of the pool benchmark: how each one's server is started, and its contenders.

Every contender moves the same pages between host memory of this process and a server that is another process. Ours is
the tier, opened from its configuration; the others are the engine's own client, used in the fastest way it offers, with
nothing around it: no envelope, no checksum, and no copy into host memory where the client has a buffer of its own.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import os
import queue
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache_ext.config import tier_types
from hicache_ext.errors import BenchmarkError, HicacheExtError
from hicache_ext.runtime.vectored import IOV_MAX, after
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.tiers.object.names import page_name

_SEGMENTS = 2
"""Segments of a page, as K and V are."""
_STAMP = 8
REDIS_CONNECTIONS = 4
"""Of the bare sockets: the default of the tier."""
OBJECT_REQUESTS = 32
"""Requests at once of every object contender: the default of the tier."""
_LEASE_MS = 5000
"""As docs/mooncake.md recommends. With the 200 ms of the tests a batch on a busy machine outlives its lease."""
_TIMEOUT = 60.0
"""Seconds a call of ours may take here: a slow machine is measured, not cut off."""


class Pages:
    """Host memory of one client thread: a batch of pages to write, and one to read into."""

    def __init__(self, payload: int, batch: int, seed: int) -> None:
        if payload % (_SEGMENTS * _STAMP):
            raise BenchmarkError(f"a page of {payload} bytes cannot be made: take a multiple of {_SEGMENTS * _STAMP}")
        self.payload = payload
        self.batch = batch
        self.seed = seed
        noise = np.random.default_rng(seed)
        self.sources: npt.NDArray[np.uint8] = noise.integers(0, 256, (batch, payload), np.uint8)
        self.targets: npt.NDArray[np.uint8] = np.zeros((batch, payload), np.uint8)
        self.received: Sequence[Any] | None = None
        """What a client that has buffers of its own has read."""

    def stamp(self, number: int) -> None:
        """Make the pages to write those of batch ``number``."""
        first = (self.seed << 32) + number * self.batch
        self.sources[:, :_STAMP] = np.arange(first, first + self.batch, dtype=np.uint64).view(np.uint8).reshape(-1, 8)

    def segments(self, pages: npt.NDArray[np.uint8]) -> list[list[memoryview]]:
        size = self.payload // _SEGMENTS
        return [[page.data[i * size : (i + 1) * size] for i in range(_SEGMENTS)] for page in pages]

    def check(self, number: int, contender: str) -> None:
        """Raise BenchmarkError unless what was read is, byte for byte, batch ``number``."""
        self.stamp(number)
        received = self.targets if self.received is None else self.received
        for page in range(self.batch):
            if not np.array_equal(np.frombuffer(received[page], np.uint8), self.sources[page]):
                raise BenchmarkError(f"{contender}: page {page} of batch {number} came back with other bytes")


class PoolClient(Protocol):
    """One opened contender; used by several threads at once."""

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Store the pages to write; how many of them are stored."""

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Fetch pages; how many were found."""

    def remove(self, keys: Sequence[bytes]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the tables. ``open`` takes what the engine's server gave and the memory pages will be in."""

    name: str
    engine: str
    open: Callable[[Any, Sequence[Pages]], PoolClient]
    ours: bool = False
    floor: bool = False
    """No client that anybody would use: what the server itself can do, or what a copy costs. Ratios are not to it."""
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: ``serve(directory)`` starts its server and answers what contenders are opened with."""

    name: str
    serve: Callable[[Path], Any]
    contenders: tuple[Contender, ...]
    missing: str | None = None
    """Why its server cannot be started here."""


def all_engines() -> list[Engine]:
    """Every engine, those that cannot take part with the reason."""
    return [_mooncake(), _redis(), _object()]


# -- ours --------------------------------------------------------------------------------------------------------------


class OurClient:
    """A tier of this package."""

    def __init__(self, store: PageStore, memory: Sequence[Pages]) -> None:
        self._store = store

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        return sum(result.durable for result in self._store.set(PageBatch(keys, pages.segments(pages.sources))))

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        results = self._store.get(PageBatch(keys, pages.segments(pages.targets)))
        return sum(result is GetResult.HIT for result in results)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._store.remove(keys)

    def close(self) -> None:
        self._store.close()


def _ours(
    engine: str,
    tier_of: Callable[[Any], dict[str, Any]],
    name: str = "hicache_ext",
    open_store: Callable[[str, Any], PageStore] = open_tier,
) -> Contender:
    """Our tier; ``tier_of`` makes its configuration from what the server gave."""
    model = tier_types().get(engine)
    missing = f"missing: this version has no tier of type {engine}" if model is None else None

    def open_client(place: Any, memory: Sequence[Pages]) -> PoolClient:
        assert model is not None
        tier = model.model_validate({"type": engine, "timeout": _TIMEOUT, **tier_of(place)})
        return OurClient(open_store("bench", tier), memory)

    return Contender(name, engine, open_client, ours=True, missing=missing)


def _package(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"missing: the package {name}"


# -- object stores -----------------------------------------------------------------------------------------------------


def _object() -> Engine:
    from tests.rigs.s3_server import missing_s3_server

    program = missing_s3_server()
    lacking = _package("obstore")
    return Engine(
        "object",
        _serve_s3,
        (
            _ours("object", lambda server: server.tier("ours")),
            Contender("obstore, threads", "object", ObstoreThreads, missing=lacking),
            Contender("obstore, asyncio", "object", ObstoreAsync, missing=lacking),
        ),
        missing=f"missing: {program}" if program else None,
    )


@contextmanager
def _serve_s3(directory: Path) -> Iterator[Any]:
    from tests.rigs.s3_server import S3Server

    with S3Server(directory) as server:
        before = dict(os.environ)
        os.environ.update(server.environment())
        try:
            yield server
        finally:
            os.environ.clear()
            os.environ.update(before)


class _Obstore:
    """What both ways of using obstore share. Objects are named as ours are: servers over files pay for directories."""

    def __init__(self, server: Any, memory: Sequence[Pages]) -> None:
        from tests.rigs.s3_server import ACCESS_KEY, SECRET_KEY

        self.obstore: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
        self.client: Any = stores.S3Store(
            server.bucket,
            prefix="theirs",
            endpoint=server.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def remove(self, keys: Sequence[bytes]) -> None:
        self.obstore.delete(self.client, [page_name(key) for key in keys])

    def close(self) -> None:
        pass


class ObstoreThreads(_Obstore):
    """Synchronous calls on as many threads as ours has."""

    def __init__(self, server: Any, memory: Sequence[Pages]) -> None:
        super().__init__(server, memory)
        self._threads = ThreadPoolExecutor(OBJECT_REQUESTS)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        def put(position: int) -> None:
            self.obstore.put(self.client, page_name(keys[position]), pages.sources[position].data, use_multipart=False)

        return len(list(self._threads.map(put, range(len(keys)))))

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        pages.received = list(
            self._threads.map(lambda key: self.obstore.get(self.client, page_name(key)).bytes(), keys)
        )
        return len(pages.received)

    def close(self) -> None:
        self._threads.shutdown()


class ObstoreAsync(_Obstore):
    """Asynchronous calls, as many at once as ours makes."""

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        async def put(position: int, slots: asyncio.Semaphore) -> None:
            async with slots:
                data = pages.sources[position].data
                await self.obstore.put_async(self.client, page_name(keys[position]), data, use_multipart=False)

        async def put_all() -> int:
            slots = asyncio.Semaphore(OBJECT_REQUESTS)
            return len(await asyncio.gather(*(put(position, slots) for position in range(len(keys)))))

        return asyncio.run(put_all())

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        async def get(key: bytes, slots: asyncio.Semaphore) -> Any:
            async with slots:
                return await (await self.obstore.get_async(self.client, page_name(key))).bytes_async()

        async def get_all() -> list[Any]:
            slots = asyncio.Semaphore(OBJECT_REQUESTS)
            return await asyncio.gather(*(get(key, slots) for key in keys))

        pages.received = asyncio.run(get_all())
        return len(pages.received)


# -- Redis -------------------------------------------------------------------------------------------------------------


def _redis() -> Engine:
    missing = None
    try:
        servers: Any = importlib.import_module("tests.rigs.redis_servers")
    except ModuleNotFoundError:
        missing = "missing: tests.rigs.redis_servers"
    else:
        if servers.redis_program() is None:
            missing = "missing: redis-server"
    return Engine(
        "redis",
        _serve_redis,
        (
            _ours("redis", lambda server: {"url": server.url}),
            Contender("redis-py, MGET and pipelined SET", "redis", RedisPy, missing=_package("redis")),
            Contender("bare sockets, the server's limit", "redis", BareSockets, floor=True),
        ),
        missing=missing,
    )


@contextmanager
def _serve_redis(directory: Path) -> Iterator[Any]:
    servers: Any = importlib.import_module("tests.rigs.redis_servers")
    with servers.RedisServer(directory / "redis") as server:
        yield server


class RedisPy:
    """redis-py: its connection pool gives each thread a connection."""

    def __init__(self, server: Any, memory: Sequence[Pages]) -> None:
        redis: Any = importlib.import_module("redis")
        self._client: Any = redis.Redis(port=server.port)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        with self._client.pipeline(transaction=False) as pipeline:
            for position, key in enumerate(keys):
                pipeline.set(key, pages.sources[position].data)
            return sum(bool(answer) for answer in pipeline.execute())

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        pages.received = self._client.mget(keys)
        return sum(page is not None for page in pages.received or ())

    def remove(self, keys: Sequence[bytes]) -> None:
        self._client.delete(*keys)

    def close(self) -> None:
        self._client.close()


class BareSockets:
    """What the server takes and gives at most: as many connections as ours has, and no look at what comes back."""

    def __init__(self, server: Any, memory: Sequence[Pages]) -> None:
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(REDIS_CONNECTIONS)]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._idle.put(connection)
        self._threads = ThreadPoolExecutor(REDIS_CONNECTIONS)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        def write(connection: socket.socket, share: Sequence[int]) -> None:
            buffers: list[memoryview] = []
            for number in share:
                key = keys[number]
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, pages.payload)
                buffers += [memoryview(head), pages.sources[number].data, memoryview(b"\r\n")]
            while buffers:
                buffers = after(buffers, connection.sendmsg(buffers[:IOV_MAX]))
            _fill(connection, [memoryview(bytearray(len(b"+OK\r\n") * len(share)))])

        return self._shared(len(keys), write)

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        def read(connection: socket.socket, share: Sequence[int]) -> None:
            requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(keys[number]), keys[number]) for number in share]
            connection.sendall(b"".join(requests))
            head, end = memoryview(bytearray(len(b"$%d\r\n" % pages.payload))), memoryview(bytearray(2))
            _fill(connection, [part for number in share for part in (head, pages.targets[number].data, end)])

        return self._shared(len(keys), read)

    def _shared(self, count: int, work: Callable[[socket.socket, Sequence[int]], None]) -> int:
        """``work`` for ``count`` pages, an equal share of them on each connection."""

        def use_one(share: Sequence[int]) -> None:
            connection = self._idle.get()
            work(connection, share)
            self._idle.put(connection)

        cuts = [count * number // REDIS_CONNECTIONS for number in range(REDIS_CONNECTIONS + 1)]
        list(self._threads.map(use_one, (range(a, b) for a, b in itertools.pairwise(cuts) if a < b)))
        return count

    def remove(self, keys: Sequence[bytes]) -> None:
        words = b"".join([b"$%d\r\n%b\r\n" % (len(key), key) for key in keys])
        self._connections[0].sendall(b"*%d\r\n$3\r\nDEL\r\n%b" % (len(keys) + 1, words))
        _fill(self._connections[0], [memoryview(bytearray(len(b":%d\r\n" % len(keys))))])

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()


def _fill(connection: socket.socket, buffers: list[memoryview]) -> None:
    while buffers:
        received = connection.recvmsg_into(buffers[:IOV_MAX])[0]
        if not received:
            raise BenchmarkError("bare sockets: the server closed the connection")
        buffers = after(buffers, received)


# -- Mooncake ----------------------------------------------------------------------------------------------------------


def _mooncake() -> Engine:
    missing = None
    try:
        servers: Any = importlib.import_module("tests.rigs.mooncake_servers")
    except ModuleNotFoundError:
        missing = "missing: tests.rigs.mooncake_servers"
    else:
        if lacking := servers.missing_mooncake():
            missing = f"missing: {lacking}"
    return Engine(
        "mooncake",
        _serve_mooncake,
        (
            _ours("mooncake", _mooncake_tier),
            _ours("mooncake", _mooncake_tier, "hicache_ext, no checksum", _open_mooncake_without_checksum),
            Contender("raw batch_get_into/put_from", "mooncake", RawMooncake),
            Contender("raw, through memory of its own", "mooncake", RawMooncakeCopied, floor=True),
        ),
        missing=missing,
    )


def _mooncake_tier(servers: Any) -> dict[str, Any]:
    return {"master": servers.master, "protocol": "tcp", "local_hostname": "127.0.0.1"}


def _open_mooncake_without_checksum(name: str, tier: Any) -> PageStore:
    """No configuration does that: it is measured to see what the checksum costs."""
    from hicache_ext.storage.tiers.mooncake.attachment import Attachment
    from hicache_ext.storage.tiers.mooncake.engine import Engine
    from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore

    return MooncakeStore(name, tier, Attachment(name, Engine(name, tier), required=True), checksum=False)


@contextmanager
def _serve_mooncake(directory: Path) -> Iterator[Any]:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    network: Any = importlib.import_module("tests.rigs.own_network")
    servers: Any = importlib.import_module("tests.rigs.mooncake_servers")
    with ExitStack() as stack:
        # Mooncake's processes listen on all interfaces.
        stack.enter_context(network.own_network())
        yield stack.enter_context(servers.MooncakeServers(directory, segment_bytes=2 << 30, lease_ms=_LEASE_MS))


class RawMooncake:
    """The multi-buffer calls, straight from and into registered host memory; no envelope, returned sizes only added."""

    def __init__(self, servers: Any, memory: Sequence[Pages]) -> None:
        module: Any = importlib.import_module("mooncake.store")
        self._store: Any = module.MooncakeDistributedStore()
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", servers.master):
            raise BenchmarkError("raw Mooncake: setup failed")
        for pages in memory:
            for array in (pages.sources, pages.targets):
                self._store.register_buffer(array.ctypes.data, array.nbytes)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        places = _addresses(pages.sources)
        answers = self._store.batch_put_from_multi_buffers([key.hex() for key in keys], *places)
        return sum(answer == 0 for answer in answers)

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        places = _addresses(pages.targets)
        answers = self._store.batch_get_into_multi_buffers([key.hex() for key in keys], *places)
        return sum(answer == pages.payload for answer in answers)

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._store.remove(key.hex(), True)

    def close(self) -> None:
        self._store.close()


class RawMooncakeCopied(RawMooncake):
    """The same calls from and into memory of the client's own, one buffer a page, and a copy: what ours cannot do
    without, because a call of the library cannot be stopped."""

    def __init__(self, servers: Any, memory: Sequence[Pages]) -> None:
        super().__init__(servers, ())
        self._own = {id(pages): np.zeros_like(pages.sources) for pages in memory}
        for array in self._own.values():
            self._store.register_buffer(array.ctypes.data, array.nbytes)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        own = self._own[id(pages)]
        np.copyto(own, pages.sources)
        answers = self._store.batch_put_from_multi_buffers([key.hex() for key in keys], *_addresses(own, 1))
        return sum(answer == 0 for answer in answers)

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        own = self._own[id(pages)]
        answers = self._store.batch_get_into_multi_buffers([key.hex() for key in keys], *_addresses(own, 1))
        np.copyto(pages.targets, own)
        return sum(answer == pages.payload for answer in answers)


def _addresses(pages: npt.NDArray[np.uint8], segments: int = _SEGMENTS) -> tuple[list[list[int]], list[list[int]]]:
    size = pages.shape[1] // segments
    starts = [pages.ctypes.data + number * pages.shape[1] for number in range(len(pages))]
    return [[start + i * size for i in range(segments)] for start in starts], [[size] * segments for _ in starts]


@contextmanager
def serving(engine: Engine) -> Iterator[Any]:
    """The engine's server, in a directory of its own. Raises BenchmarkError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as directory, ExitStack() as stack:
        try:
            place = stack.enter_context(engine.serve(Path(directory)))
        except (RuntimeError, OSError, HicacheExtError) as error:
            raise BenchmarkError(f"{engine.name}: {error}") from error
        yield place

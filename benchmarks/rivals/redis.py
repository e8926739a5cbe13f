"""Redis: redis-py, the C++ client in LMCache's wheel, and bare sockets that show what the server can do."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import queue
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.rivals import ours
from hicache_ext.bench.pool import Open, Pages
from hicache_ext.errors import CommandError
from hicache_ext.packages import need
from hicache_ext.runtime.vectored import IOV_MAX, after
from tests.rigs.redis_servers import RedisServer, redis_program

REDIS_CONNECTIONS = 4
"""Of the bare sockets: the default of the tier."""


@contextmanager
def redis_server(directory: Path) -> Iterator[tuple[dict[str, Open], Iterable[str]]]:
    if redis_program() is None:
        raise CommandError("missing: redis-server")
    with RedisServer(directory / "redis") as server:
        own: dict[str, Open] = {
            "redis-py, MGET and pipelined SET": lambda memory: RedisPy(server),
            **{
                f"LMCache's C++ client, {workers} worker{'s' * (workers > 1)}": functools.partial(
                    LMCacheRedis, server, workers=workers
                )
                for workers in (1, 4)
            },
        }
        limit = "bare sockets, the server's limit"
        yield {"hicache_ext": ours("redis", {"url": server.url}), **own, limit: lambda memory: BareSockets(server)}, own


def _redis_py(server: Any) -> Any:
    """Return a client. Raises MissingPackageError."""
    need("redis")
    return importlib.import_module("redis").Redis(port=server.port)


class RedisPy:
    """redis-py: its connection pool gives each thread a connection."""

    def __init__(self, server: Any) -> None:
        self._client = _redis_py(server)

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


def _lmcache_library() -> Path | None:
    """The extension module in LMCache's wheel, found without importing the package, which wants much else."""
    try:
        found = importlib.util.find_spec("lmcache")
    except ImportError:
        return None
    places = [] if found is None else list(found.submodule_search_locations or [])
    return next((path for place in places for path in Path(place).glob("lmcache_redis*.so")), None)


@functools.cache
def _lmcache_redis() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lmcache_redis", _lmcache_library())
    assert spec is not None
    assert spec.loader is not None
    # It is linked against torch's libraries.
    importlib.import_module("torch")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LMCacheRedis:
    """It receives into the caller's memory, a thread and a connection for each worker, and verifies nothing.

    Callers at the same time have a client each, with so many workers each: none waits for what another asked.
    """

    def __init__(self, server: Any, memory: Sequence[Pages], workers: int) -> None:
        if not _lmcache_library():
            raise ImportError("missing: pip install --no-deps lmcache")
        self._port = server.port
        self._workers = workers
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._clients: list[Any] = []
        self._remover = _redis_py(server)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self._moved(keys, pages.sources, "submit_batch_set")

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self._moved(keys, pages.targets, "submit_batch_get")

    def _moved(self, keys: Sequence[bytes], memory: Any, operation: str) -> int:
        client = self._lent()
        getattr(client, operation)([key.hex() for key in keys], [page.data for page in memory])
        while not (ended := client.drain_completions()):
            select.select([client.event_fd()], [], [])
        self._idle.put(client)
        ((_, succeeded, error, _),) = ended
        if not succeeded:
            raise CommandError(f"LMCache's client: {error}")
        return len(keys)

    def _lent(self) -> Any:
        """Threads of a benchmark are new for each batch: they borrow."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            client = _lmcache_redis().LMCacheRedisClient("127.0.0.1", self._port, self._workers, "", "")
            self._clients.append(client)
            return client

    def remove(self, keys: Sequence[bytes]) -> None:
        self._remover.delete(*[key.hex() for key in keys])

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._remover.close()


class BareSockets:
    """What the server takes and gives at most: as many connections as ours has, and no look at what comes back."""

    def __init__(self, server: Any) -> None:
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
            raise CommandError("bare sockets: the server closed the connection")
        buffers = after(buffers, received)

"""Object stores: obstore's own client in both ways it offers, and an S3 server for the run."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rivals import ours
from hicache_ext.bench.pool import Open, Pages
from hicache_ext.errors import CommandError
from tests.rigs.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, missing_s3_server

OBJECT_REQUESTS = 32
"""Requests at once of every contender: the default of the tier."""


@contextmanager
def object_stores(directory: Path) -> Iterator[tuple[dict[str, Open], Iterable[str]]]:
    if program := missing_s3_server():
        raise CommandError(f"missing: {program}")
    with S3Server(directory) as server:
        before = dict(os.environ)
        os.environ.update(server.environment())
        try:
            own: dict[str, Open] = {
                "obstore, threads": lambda memory: ObstoreThreads(server),
                "obstore, asyncio": lambda memory: ObstoreAsync(server),
            }
            yield {"hicache_ext": ours("object", server.tier("ours")), **own}, own
        finally:
            os.environ.clear()
            os.environ.update(before)


def page_name(key: bytes) -> str:
    """In directories of few objects each, as ours are: servers over files pay for them."""
    return f"{key[16:17].hex()}/{key.hex()}"


class _Obstore:
    """What both ways of using obstore share."""

    def __init__(self, server: Any) -> None:
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

    def __init__(self, server: Any) -> None:
        super().__init__(server)
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

"""A second way to the objects of a tier, and several kinds of medium for the conformance suite."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import obstore.store
import pytest

from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from tests.rigs.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.storage.media import RawMedium


class RawBucket:
    """Objects found by the names that docs/object-stores.md gives, not by the package's code."""

    def __init__(self, client: Any, settle: Callable[[], object] = lambda: None) -> None:
        """``settle`` waits until what was cleared is deleted."""
        self._client = client
        self._settle = settle

    def name(self, key: bytes) -> str:
        page_hash = key[16:].hex()
        return f"pages/{key[:16].hex()}/{page_hash[:2]}/{page_hash}.page"

    def read(self, key: bytes) -> bytes | None:
        try:
            return bytes(obstore.get(self._client, self.name(key)).bytes())
        except FileNotFoundError:
            return None

    def write(self, key: bytes, stored: bytes) -> None:
        obstore.put(self._client, self.name(key), stored, use_multipart=False)

    def keys(self) -> list[bytes]:
        self._settle()
        names = [entry["path"] for listed in obstore.list(self._client, "pages") for entry in listed]
        parts = [name.split("/") for name in names]
        return [bytes.fromhex(identity) + bytes.fromhex(page.removesuffix(".page")) for _, identity, _, page in parts]


class Objects(RawMedium):
    """One fresh namespace of an object store."""

    type = "object"
    shared = False
    tier = ObjectTierConfig(url="file:///test", timeout=60.0, concurrency=8)
    keeps_identities = True
    clears_at_once = False

    def __init__(self, client: Callable[[], Any]) -> None:
        self._client = client
        # A store that nobody has any more has let go of its connections.
        self._opened: weakref.WeakSet[ObjectPageStore] = weakref.WeakSet()
        self.raw = RawBucket(client(), self._settle)

    def __reduce__(self) -> tuple[Any, ...]:
        return Objects, (self._client,)

    def open(self) -> PageStore:
        return self._open_over(self._client())

    def _open_over(self, client: Any) -> PageStore:
        store = ObjectPageStore("cold", self.tier, lambda: client)
        self._opened.add(store)
        return store

    def open_elsewhere(self) -> PageStore:
        return self._open_over(obstore.store.MemoryStore())

    def _settle(self) -> None:
        for store in list(self._opened):
            assert store.wait_until_cleared(60)

    @contextmanager
    def failing(self) -> Iterator[None]:
        def fail(*arguments: Any, **options: Any) -> Any:
            raise ConnectionError("connection reset by peer")

        with pytest.MonkeyPatch.context() as patch:
            for call in ("get", "put", "head", "list", "delete"):
                patch.setattr(obstore, call, fail)
            yield

    def close(self) -> None:
        for store in list(self._opened):
            store.close()


class ObjectsInMemory(Objects):
    between_processes = False

    def __init__(self) -> None:
        client = obstore.store.MemoryStore()
        super().__init__(lambda: client)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class ObjectsInADirectory(Objects):
    def __init__(self, directory: Path) -> None:
        super().__init__(partial(obstore.store.LocalStore, directory, mkdir=True))


class ObjectsOnS3(Objects):
    shared = True
    tier = ObjectTierConfig(url="s3://test", timeout=60.0, concurrency=8)

    def __init__(self, client: Callable[[], Any], damaging: Callable[[ExitStack], Any]) -> None:
        """``damaging`` makes a client whose path damages half of what it reads, until the stack ends."""
        super().__init__(client)
        self._damaging = damaging
        self._proxies = ExitStack()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._client, None)

    def open_elsewhere(self) -> PageStore:
        return self.open()

    def open_over_a_damaging_path(self) -> PageStore:
        return self._open_over(self._damaging(self._proxies))

    def close(self) -> None:
        super().close()
        self._proxies.close()


def s3_client(server: S3Server, prefix: str, **options: Any) -> Any:
    return _client_of(server.bucket, server.endpoint, prefix, **options)


def _client_of(bucket: str, endpoint: str, prefix: str, **options: Any) -> Any:
    return obstore.store.S3Store(
        bucket,
        prefix=prefix,
        endpoint=endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True},
        **options,
    )


def objects_on(server: S3Server) -> ObjectsOnS3:
    """A fresh prefix of the server's bucket."""
    # test_object_faults.py needs s3_client.
    from tests.storage.remote.object.fault_proxy import FaultProxy
    from tests.storage.remote.object.test_object_faults import through

    prefix = secrets.token_hex(6)

    def damaging(proxies: ExitStack) -> Any:
        proxy = proxies.enter_context(FaultProxy(server.port).serving())
        client = through(proxy.port, server.bucket, prefix)
        proxy.flipped = 0.5
        proxy.break_with("flip")
        proxies.callback(proxy.break_with, "")
        return client

    return ObjectsOnS3(partial(_client_of, server.bucket, server.endpoint, prefix), damaging)

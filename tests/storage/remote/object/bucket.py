"""A second way to the objects of a tier, and stores over several kinds of medium."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import obstore.store

from hicache_ext.storage.tiers.object.store import ObjectPageStore
from tests.rigs.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


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


class Medium:
    """Stores over one fresh namespace, opened again and again."""

    def __init__(self, client: Callable[[], Any], *, shared: bool = True, timeout: float = 60.0) -> None:
        self._make_client = client
        self._shared = shared
        self._timeout = timeout
        self._opened: list[ObjectPageStore] = []
        self.raw = RawBucket(client(), self._settle)

    def open(self) -> ObjectPageStore:
        store = ObjectPageStore(
            "cold",
            self._make_client(),
            url="test",
            shared=self._shared,
            timeout=self._timeout,
            concurrency=8,
        )
        self._opened.append(store)
        return store

    def _settle(self) -> None:
        for store in self._opened:
            assert store.wait_until_cleared(60)

    def close(self) -> None:
        for store in self._opened:
            store.close()


def s3_client(server: S3Server, prefix: str, **options: Any) -> Any:
    return obstore.store.S3Store(
        server.bucket,
        prefix=prefix,
        endpoint=server.endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True},
        **options,
    )


def s3_medium(server: S3Server) -> Medium:
    prefix = secrets.token_hex(6)
    return Medium(lambda: s3_client(server, prefix))


def directory_medium(directory: Path) -> Medium:
    return Medium(lambda: obstore.store.LocalStore(directory, mkdir=True), shared=False)


def memory_medium() -> Medium:
    client = obstore.store.MemoryStore()
    return Medium(lambda: client, shared=False)

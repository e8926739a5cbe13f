"""A second way to the objects of a tier, and several kinds of medium for the conformance suite."""

from __future__ import annotations

import secrets
import struct
import time
import weakref
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import obstore.store
import pytest
import xxhash

from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from tests.rigs.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from tests.storage.media import RawMedium


class RawPack(NamedTuple):
    """A pack, by its name alone."""

    name: str
    page_bytes: int
    hashes: list[bytes]
    dead: int = 0

    @property
    def id(self) -> str:
        return self.name.split("/")[3][:22]

    def alive(self, position: int) -> bool:
        return not self.dead >> position & 1


class RawBucket:
    """Pages found by the names that docs/object-stores.md gives, not by the package's code."""

    def __init__(self, client: Any, settle: Callable[[], object] = lambda: None) -> None:
        """``settle`` waits until what was cleared is deleted."""
        self._client = client
        self._settle = settle
        self._cut: dict[str, list[bytes]] = {}
        """Keys of packs that were written without the end that tells them."""

    def names(self, prefix: str) -> list[str]:
        return [entry["path"] for listed in obstore.list(self._client, prefix) for entry in listed]

    def packs(self, identity: bytes | None = None) -> list[RawPack]:
        """The newest one first, without those pages that tombstones took away."""
        prefix = "packs" if identity is None else f"packs/{identity.hex()}"
        names = self.names(prefix)
        dead: dict[str, int] = {}
        for name in names:
            if name.endswith(".dead"):
                pack, mask = name.split("/")[3][23:45], name[-21:-5]
                dead[pack] = dead.get(pack, 0) | int(mask, 16)
        packs = []
        for name in names:
            if name.endswith(".pack"):
                _, _, _, *parts = name.removesuffix(".pack").split("/")
                count, page_bytes = parts[0][23:].split("-")[0].split("x")
                letters = "".join(parts).split("-", 3)[3]
                hashes = [urlsafe_b64decode(letters[at : at + 8]) for at in range(0, 8 * int(count), 8)]
                packs.append(RawPack(name, int(page_bytes), hashes, dead.get(parts[0][:22], 0)))
        return sorted(packs, key=lambda pack: pack.id, reverse=True)

    def place(self, key: bytes) -> tuple[RawPack, int] | None:
        for pack in self.packs(key[:16]):
            for position, page_hash in enumerate(pack.hashes):
                if page_hash == xxhash.xxh3_64_digest(key[16:])[:6] and pack.alive(position):
                    return pack, position
        return None

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self._client, name).bytes())
        except FileNotFoundError:
            return None

    def put(self, name: str, stored: bytes) -> None:
        obstore.put(self._client, name, stored, use_multipart=False)

    def delete(self, name: str) -> None:
        obstore.delete(self._client, name)

    def read(self, key: bytes) -> bytes | None:
        place = self.place(key)
        if place is None:
            return None
        pack, position = place
        return (self.get(pack.name) or b"")[position * pack.page_bytes : (position + 1) * pack.page_bytes]

    def write(self, key: bytes, stored: bytes) -> None:
        """In the page's place in its pack where it has that length; otherwise in a pack of its own, and the rest of its
        pack in another one."""
        place = self.place(key)
        if place is None:
            now = f"{time.time_ns() // 10**6:011x}"
            self._put_pack(f"packs/{key[:16].hex()}/{now[:7]}", now, key[:16], [(key[16:], stored)], len(stored))
            return
        pack, position = place
        whole, size = self.get(pack.name) or b"", pack.page_bytes
        if len(stored) == size:
            self.put(pack.name, whole[: position * size] + stored + whole[(position + 1) * size :])
            return
        self.delete(pack.name)
        folder, _, _ = pack.name.partition(f"/{pack.id}")
        # A name says no length that no page has: such an object is one that was cut.
        named = len(stored) if len(stored) >= 128 else size
        self._put_pack(folder, pack.id[:11], key[:16], [(key[16:], stored)], named)
        table = whole[len(pack.hashes) * size :]
        others = [other for other in range(len(pack.hashes)) if other != position and pack.alive(other)]
        pages = [(table[at * 32 : (at + 1) * 32], whole[at * size : (at + 1) * size]) for at in others]
        if pages:
            self._put_pack(folder, pack.id[:11], key[:16], pages, size)

    def _put_pack(
        self, folder: str, time_of_id: str, identity: bytes, pages: Sequence[tuple[bytes, bytes]], page_bytes: int
    ) -> None:
        """``pages``: hash and stored bytes of each. One that is cut has no footer."""
        letters = urlsafe_b64encode(b"".join(xxhash.xxh3_64_digest(page_hash)[:6] for page_hash, _ in pages)).decode()
        parts = "/".join(letters[at : at + 192] for at in range(0, len(letters), 192))
        name = f"{folder}/{time_of_id}-{secrets.token_hex(5)}-{len(pages)}x{page_bytes}-{parts}.pack"
        footer = b"".join(page_hash for page_hash, _ in pages)
        footer += struct.pack("<8sHHIQ16s8s", b"HICAPACK", 1, 0, len(pages), page_bytes, identity, b"")
        footer += xxhash.xxh3_128_digest(footer)
        stored = b"".join(stored for _, stored in pages)
        self._cut[name] = [identity + page_hash for page_hash, _ in pages]
        self.put(name, stored + footer * (len(stored) == len(pages) * page_bytes))

    def keys(self) -> list[bytes]:
        self._settle()
        keys = []
        for pack in self.packs():
            table = (self.get(pack.name) or b"")[len(pack.hashes) * pack.page_bytes :]
            if not table:
                keys += self._cut.get(pack.name, [])
                continue
            identity = bytes.fromhex(pack.name.split("/")[1])
            alive = [position for position in range(len(pack.hashes)) if pack.alive(position)]
            keys += [identity + table[position * 32 : (position + 1) * 32] for position in alive]
        return keys


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

    @contextmanager
    def full(self) -> Iterator[None]:
        def refuse(*arguments: Any, **options: Any) -> Any:
            raise OSError("Server returned non-2xx status code: 507 Insufficient Storage: quota exceeded")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(obstore, "put", refuse)
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

"""Transformed stores for tests: keys, a codec, and what the conformance suite needs to look past them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext.errors import FormatError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms import body
from hicache_ext.page.transforms.forms import Form
from hicache_ext.page.transforms.sealing import Seal, SealKey, SealMode
from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, PageStore, SetResult
from hicache_ext.storage.contract.transforming.known_forms import stored_keys
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, assert_hits, read_pages, store_pages
from hicache_ext.testing.conformance.second_reader import read_page_object, write_page_object
from tests.storage.media import Over

SECRETS = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("old", "new", "theirs")}
AUTHENTICATE, ENCRYPT = SealMode.AUTHENTICATE, SealMode.ENCRYPT


def seal(mode: SealMode, *ids: str) -> Seal:
    """The first one writes."""
    return Seal(mode, tuple(SealKey(id, SECRETS[id]) for id in ids))


SIZES = [700, 324]
"""Bytes of the segments of a page."""


class Attacked:
    """A sealed store over memory, and who may write into that memory."""

    def __init__(self, mode: SealMode, *ids: str, objects: dict[bytes, bytes] | None = None) -> None:
        self.mode = mode
        self.objects: dict[bytes, bytes] = {} if objects is None else objects
        self.ids = ids or ("new",)
        self.store: PageStore = TransformedStore(MemoryPageStore(objects=self.objects), None, seal(mode, *self.ids))

    def stored_key(self, key: bytes) -> bytes:
        return stored_key_of(pages_of(self.store).forms(key[:IDENTITY_LENGTH])[0], key)

    def payload(self, key: bytes) -> bytes:
        """What the medium has for a page, without header and checksum of the medium."""
        return read_page_object(self.objects[self.stored_key(key)]).payload

    def put(self, key: bytes, payload: bytes) -> None:
        stored = self.stored_key(key)
        self.objects[stored] = write_page_object(stored, payload, header_length=128)

    def corrupt(self, reason: str | None = None) -> int:
        metrics = self.store.metrics
        return metrics.total("corrupt") if reason is None else metrics.snapshot().get(("corrupt", reason), 0)

    def assert_refused(self, key: bytes, reason: str | None = None) -> None:
        """Not served, counted, absent, and replaced by the next write."""
        before = self.corrupt(reason)
        results, _ = read_pages(self.store, [key], SIZES)
        assert results == [GetResult.CORRUPT]
        assert self.corrupt(reason) == before + 1
        assert self.store.contains([key]) == [False] and self.store.count_leading([key]) == 0
        assert store_pages(self.store, [key], SIZES) == [SetResult.STORED]
        assert_hits(self.store, [key], SIZES)


class Shelf:
    """A codec for pages that nothing makes smaller: some pages are put on a shelf, and their digest stands for them."""

    paying = None

    def __init__(self, directory: Path, label: bytes = b"shelf") -> None:
        self.directory = directory
        self.label = label

    def for_pages(self, document: Mapping[str, Any], payload: int) -> Shelved | None:
        return Shelved(self.directory, payload) if payload > 128 else None


class Shelved:
    code = 7

    def __init__(self, directory: Path, payload: int) -> None:
        self.directory = directory
        self.payload = payload
        self.rooms = (64, payload // 2)

    def encode(self, payload: memoryview, encoded: memoryview) -> int:
        content = bytes(payload)
        kind = content[0] % 3
        if kind == 2:
            return 0
        digest = hashlib.sha256(content).digest()
        self.directory.mkdir(exist_ok=True)
        (self.directory / digest.hex()).write_bytes(content)
        length = 40 if kind == 0 else 66
        if length > encoded.nbytes:
            return 0
        encoded[:length] = digest.ljust(length, b"\1")
        return length

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        try:
            content = (self.directory / bytes(encoded[:32]).hex()).read_bytes()
        except OSError:
            raise FormatError("shelf") from None
        if len(content) != payload.nbytes:
            raise FormatError("shelf")
        payload[:] = content


class Transformed(Over):
    """The stores over ``inner``, transformed; its objects seen as the plain pages that they hold."""

    def __init__(self, inner: Any, mode: SealMode | None, shelf: Path | None = None, block: int = 1) -> None:
        super().__init__(inner, self._transformed)
        self._mode, self._shelf, self._block = mode, shelf, block

    def _transformed(self, store: PageStore) -> PageStore:
        made = TransformedStore(
            store,
            None if self._shelf is None else Shelf(self._shelf),
            None if self._mode is None else seal(self._mode, "new", "old"),
            block=self._block,
        )
        if self._shelf is not None:
            pages = pages_of(made)
            pages._documents |= {key: {"pool": {"segments": [1000]}} for key in (IDENTITY, OTHER_IDENTITY)}
        return made

    def open_over_a_damaging_path(self) -> PageStore:
        return self._transformed(self.inner.open_over_a_damaging_path())

    def _forms(self, identity: bytes) -> Sequence[Form]:
        return self._reader().forms(identity)

    def _reader(self) -> TransformedStore:
        if not hasattr(self, "_opened"):
            self._opened = self.open()
        return pages_of(self._opened)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    def read(self, key: bytes) -> bytes | None:
        for form in self._forms(key[:IDENTITY_LENGTH]):
            stored_key = stored_key_of(form, key)
            stored = self.inner.read(stored_key)
            if stored is None:
                continue
            if form.plain:
                return stored
            page = read_page_object(stored)
            payload = memoryview(bytearray(int.from_bytes(page.payload[16:24], "little")))
            reason = body.read(
                memoryview(page.payload), stored_key, form, [payload], lambda length: memoryview(bytearray(length))
            )
            assert reason is None, reason
            return write_page_object(key, bytes(payload), header_length=page.header_length, created_ms=page.created_ms)
        return None

    def write(self, key: bytes, stored: bytes) -> None:
        """A good page as another server would write it; all else as it is, in the place of the page."""
        self.inner.write(self._place(key), stored)
        try:
            page = read_page_object(stored)
        except Exception:  # noqa: BLE001 - it is no page
            return
        if (
            page.key != key
            or write_page_object(key, page.payload, header_length=page.header_length, created_ms=page.created_ms)
            != stored
        ):
            return
        store = self.open()
        try:
            store.remove([key])
            content = memoryview(bytearray(page.payload))
            assert store.set(PageBatch([key], [[content]])) == [SetResult.STORED]
        finally:
            store.close()

    def _place(self, key: bytes) -> bytes:
        names = [stored_key_of(form, key) for form in self._forms(key[:IDENTITY_LENGTH])]
        return next((name for name in names if self.inner.read(name) is not None), names[0])

    def keys(self) -> list[bytes]:
        return [self._plain(key) for key in list(self.inner.keys())]

    def _plain(self, stored_key: bytes) -> bytes:
        for identity in (IDENTITY, OTHER_IDENTITY):
            for form in self._forms(identity):
                if form.identity == stored_key[:IDENTITY_LENGTH]:
                    page_hash = stored_key[IDENTITY_LENGTH:]
                    return identity + (shown(form.key, page_hash) if form.hides else page_hash)
        return stored_key

    def close(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.close()
        super().close()


def pages_of(store: PageStore) -> TransformedStore:
    found = ability(store, TransformedStore)
    assert found is not None
    return found


def stored_key_of(form: Form, key: bytes) -> bytes:
    return stored_keys(form, PageKeys.of_joined(key[:IDENTITY_LENGTH], key[IDENTITY_LENGTH:]))[0]


def shown(key: SealKey, hidden: bytes) -> bytes:
    """The page hash behind a hidden one."""
    left, right = np.frombuffer(hidden, np.int64).reshape(2, 2)
    for cipher in reversed(key._hashes):
        mixed = np.frombuffer(cipher.encryptor().update(left.tobytes()), np.int64)
        left, right = right ^ mixed, left
    return left.tobytes() + right.tobytes()


def fresh(length: int) -> memoryview:
    return memoryview(bytearray(length))

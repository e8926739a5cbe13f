"""The memory tier: pages in a dict of this process. Copy this example to write your own tier (docs/write-a-tier.md).

Pages do not outlive the process and are not shared; every other promise of contract/store.py is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hicache_ext.config import TierConfig
from hicache_ext.page.envelope import IDENTITY_LENGTH, seal_of
from hicache_ext.page.page_object import decode_object, encode_object
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.registry import TierType
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult


class MemoryTierConfig(TierConfig):
    """``type: memory``. A key of its own is one more field (docs/write-a-tier.md)."""

    type: Literal["memory"] = "memory"
    keeps_identities = True


class MemoryTier(TierType):
    config = MemoryTierConfig

    def open(self, name: str, tier: MemoryTierConfig) -> MemoryPageStore:
        return MemoryPageStore(name)


class MemoryPageStore(TierStore):
    """``objects``: 48-byte key -> page object; open to tests, which read and damage it there."""

    type_name = "memory"

    def __init__(self, name: str = "memory", *, objects: dict[bytes, bytes] | None = None) -> None:
        super().__init__(name)
        self.objects = {} if objects is None else objects
        self._documents: dict[bytes, dict[str, Any]] = {}
        self._lock = threading.Lock()  # calls come from several threads

    def details(self) -> dict[str, Any]:
        return {"pages": len(self.objects)}

    # One result per page. HIT only for the requested page, intact: decode_object checks it, then copies it.
    def _read(self, batch: PageBatch) -> list[GetResult]:
        with self._lock:
            return [self._read_page(*page) for page in zip(batch.keys, batch.buffers, strict=True)]

    def _read_page(self, key: bytes, segments: Sequence[memoryview]) -> GetResult:
        stored = self.objects.get(key)
        if stored is None:
            return GetResult.MISS
        reason = decode_object(memoryview(stored), key, segments)
        if reason is None:
            return GetResult.HIT
        self.metrics.add("corrupt", reason)
        # Remove exactly the copy that was read, so that the next write replaces it (networks: contract/bad_pages.py).
        if self.objects.get(key) is stored:
            del self.objects[key]
        return GetResult.CORRUPT

    # The first writer wins, and a page appears atomically: here by an assignment, on disk by a rename or a transaction.
    def _write(self, batch: PageBatch) -> list[SetResult]:
        with self._lock:
            return [self._write_page(*page) for page in zip(batch.keys, batch.buffers, strict=True)]

    def _write_page(self, key: bytes, segments: Sequence[memoryview]) -> SetResult:
        if key in self.objects:
            return SetResult.EXISTS
        self.objects[key] = bytes(encode_object(key, segments))
        return SetResult.STORED

    # Presence is not verified: a page may still turn out CORRUPT when it is read.
    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.objects for key in keys]

    # Returns how many pages existed.
    def _remove(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return sum(self.objects.pop(key, None) is not None for key in keys)

    # Removes only the copies that the caller has seen; a newer one stays. A dict has no compare-and-delete.
    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        with self._lock:
            stored = {key: self.objects.get(key) for key in copies}
            same = [key for key, copy in copies.items() if (page := stored[key]) is not None and seal_of(page) == copy]
            for key in same:
                del self.objects[key]
            return len(same)

    # Returns how many identities had pages; None clears all. A slow medium does this by contract/clearing.py.
    def _clear(self, digests: Sequence[bytes] | None) -> int:
        with self._lock:
            keys = [key for key in self.objects if digests is None or key[:IDENTITY_LENGTH] in digests]
            for key in keys:
                del self.objects[key]
            return len({key[:IDENTITY_LENGTH] for key in keys})

    # An ability: code that warms this tier asks which identities it has.
    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        self._documents[digest] = document

    def identities(self) -> dict[bytes, dict[str, Any]]:
        return dict(self._documents)

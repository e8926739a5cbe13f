"""A PageStore in this process's memory: the fast reference that wrappers, tiers and the suites themselves run over."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hicache_ext.errors import StoreClosedError
from hicache_ext.page import envelope
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, StoreInfo


class MemoryPageStore:
    """Page objects in a dict. Keeps every promise of ``contract/store.py`` except that nothing outlives the process.

    ``objects`` (48-byte key -> page object) is open to tests, which read and damage it there.
    """

    def __init__(self, name: str = "memory", *, objects: dict[bytes, bytes] | None = None) -> None:
        self.objects: dict[bytes, bytes] = {} if objects is None else objects
        self.identities: dict[bytes, dict[str, Any]] = {}
        self._name = name
        self._metrics = TierMetrics(name)
        self._lock = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def metrics(self) -> TierMetrics:
        return self._metrics

    def describe(self) -> StoreInfo:
        return StoreInfo(name=self._name, type="memory", shared=False, details={"pages": len(self.objects)})

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        self.identities[digest] = document

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self._lock:
            self._check_open()
            results = [self._get_page(*page) for page in zip(batch.keys, batch.buffers, strict=True)]
        self._metrics.add_many("get", Counter(result.value for result in results))
        return results

    def _get_page(self, key: bytes, segments: Sequence[memoryview]) -> GetResult:
        stored = self.objects.get(key)
        if stored is None:
            return GetResult.MISS
        header, payload = stored[: envelope.FIELDS_LENGTH], memoryview(stored)[envelope.FIELDS_LENGTH :]
        expected = sum(segment.nbytes for segment in segments)
        if len(header) < envelope.FIELDS_LENGTH or payload.nbytes < expected:
            reason: str | None = "truncated"
        elif payload.nbytes > expected:
            reason = "longer"
        else:
            offset = 0
            for segment in segments:
                segment[:] = payload[offset : offset + segment.nbytes]
                offset += segment.nbytes
            reason = envelope.reason_to_refuse(header, key, segments)
        if reason is None:
            return GetResult.HIT
        self._metrics.add("corrupt", reason)
        del self.objects[key]
        return GetResult.CORRUPT

    def set(self, batch: PageBatch) -> list[SetResult]:
        with self._lock:
            self._check_open()
            results = [self._set_page(*page) for page in zip(batch.keys, batch.buffers, strict=True)]
        self._metrics.add_many("set", Counter(result.value for result in results))
        return results

    def _set_page(self, key: bytes, segments: Sequence[memoryview]) -> SetResult:
        if key in self.objects:
            return SetResult.EXISTS
        self.objects[key] = b"".join((envelope.encode_header(key, segments), *segments))
        return SetResult.STORED

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [key in self.objects for key in keys]

    def count_leading(self, keys: Sequence[bytes]) -> int:
        present = self.contains(keys)
        return present.index(False) if False in present else len(present)

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._check_open()
            return sum(self.objects.pop(key, None) is not None for key in keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        with self._lock:
            self._check_open()
            known = {key[: envelope.IDENTITY_LENGTH] for key in self.objects}
            cleared = known if digests is None else known & set(digests)
            for key in [key for key in self.objects if key[: envelope.IDENTITY_LENGTH] in cleared]:
                del self.objects[key]
        return len(cleared)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(self._name)

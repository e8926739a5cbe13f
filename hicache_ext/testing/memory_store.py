"""A PageStore in this process's memory: the fast reference that wrappers, tiers and the suites themselves run over."""

from __future__ import annotations

import errno
import operator
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from hicache_ext.errors import StoreClosedError
from hicache_ext.page import envelope
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, StoreInfo, counted

_T = TypeVar("_T")


class MemoryPageStore:
    """Page objects in a dict. Keeps every promise of ``contract/store.py`` except that nothing outlives the process.

    ``objects`` (48-byte key -> page object) is open to tests, which read and damage it there.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        objects: dict[bytes, bytes] | None = None,
        documents: dict[bytes, dict[str, Any]] | None = None,
    ) -> None:
        """``documents``: those of ``register_identity``, by digest."""
        self.objects: dict[bytes, bytes] = {} if objects is None else objects
        self.documents: dict[bytes, dict[str, Any]] = {} if documents is None else documents
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
        self.documents[digest] = document

    def identities(self) -> dict[bytes, dict[str, Any]]:
        return dict(self.documents)

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self._lock:
            self._check_open()
            results = [
                self._tried(partial(self._get_page, *page), GetResult.ERROR)
                for page in zip(batch.keys, batch.buffers, strict=True)
            ]
        self._metrics.add_many("get", counted(results))
        self._metrics.add("bytes", "get", batch.bytes_of(GetResult.HIT, results))
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
            results = [
                self._tried(partial(self._set_page, *page), SetResult.ERROR)
                for page in zip(batch.keys, batch.buffers, strict=True)
            ]
        self._metrics.add_many("set", counted(results))
        self._metrics.add("bytes", "set", batch.bytes_of(SetResult.STORED, results))
        return results

    def _set_page(self, key: bytes, segments: Sequence[memoryview]) -> SetResult:
        if key in self.objects:
            return SetResult.EXISTS
        self.objects[key] = b"".join((envelope.encode_header(key, segments), *segments))
        return SetResult.STORED

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._check_open()
            return [self._tried(partial(operator.contains, self.objects, key), False) for key in keys]

    def count_leading(self, keys: Sequence[bytes]) -> int:
        present = self.contains(keys)
        return present.index(False) if False in present else len(present)

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            self._check_open()
            return sum(self._tried(partial(self.objects.pop, key, None), None) is not None for key in keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        with self._lock:
            self._check_open()
            return self._tried(partial(self._clear, digests), 0)

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        known = {key[: envelope.IDENTITY_LENGTH] for key in self.objects}
        cleared = known if digests is None else known & set(digests)
        for key in [key for key in self.objects if key[: envelope.IDENTITY_LENGTH] in cleared]:
            del self.objects[key]
        return len(cleared)

    def _tried(self, access: Callable[[], _T], otherwise: _T) -> _T:
        """What ``access`` answers; ``otherwise``, counted, when the medium fails. A dict does not: a test's may."""
        try:
            return access()
        except OSError as error:
            self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
            return otherwise

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(self._name)

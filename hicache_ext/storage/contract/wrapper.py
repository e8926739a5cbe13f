"""The base of every wrapper around a PageStore: it forwards the contract, subclasses override what they change.

Abilities besides the contract are not forwarded: ``ability`` finds them behind wrappers (abilities.py). The two
questions that a tier asks its guards are, so that a tier without guards imports none.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult, StoreInfo


class DelegatingStore:
    """A PageStore that is ``inner`` in every respect."""

    def __init__(self, inner: PageStore) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def metrics(self) -> TierMetrics:
        return self.inner.metrics

    def describe(self) -> StoreInfo:
        return self.inner.describe()

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        self.inner.register_identity(digest, document)

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self.inner.get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self.inner.set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self.inner.count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self.inner.remove(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        return self.inner.clear(digests)

    def close(self) -> None:
        self.inner.close()

    def forget_look_ups(self) -> None:
        """Pages may have come or gone on a way that was not seen: ask the store again."""
        if isinstance(self.inner, DelegatingStore):
            self.inner.forget_look_ups()

    def being_written(self) -> Set[bytes]:
        """Return pages whose write may still reach the store, also after its caller was answered TIMEOUT."""
        return self.inner.being_written() if isinstance(self.inner, DelegatingStore) else frozenset()

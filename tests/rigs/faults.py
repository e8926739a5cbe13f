"""Faults on purpose: PageStores that are slow, fail, raise, lie or drop.

Each wrapper delegates everything to the store it wraps and changes one thing. ``active`` switches it on and off while
a test runs, so that a store can die and come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hicache_ext.storage.contract.store import DelegatingStore, GetResult, PageBatch, PageStore, SetResult


class PageStoreWrapper(DelegatingStore):
    """Delegates to ``inner``; subclasses override what they change."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.active = True
        """False: calls go through unchanged. May be set from any thread, at any time."""


class BeforeEachCall(PageStoreWrapper):
    """Does something before every call that reaches the medium; the base of SlowStore and RaisingStore."""

    def before_call(self) -> None:
        """Overridden: called on the caller's thread before every get, set, contains, count_leading, remove, clear."""
        raise NotImplementedError

    def get(self, batch: PageBatch) -> list[GetResult]:
        self.before_call()
        return super().get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        self.before_call()
        return super().set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.before_call()
        return super().contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        self.before_call()
        return super().count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        self.before_call()
        return super().remove(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        self.before_call()
        return super().clear(digests)


class SlowStore(BeforeEachCall):
    """Every call takes ``seconds`` longer; ``calls`` counts them."""

    def __init__(self, inner: PageStore, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.calls = 0

    def before_call(self) -> None:
        self.calls += 1
        if self.active:
            time.sleep(self.seconds)


class RaisingStore(BeforeEachCall):
    """Every call raises: what no store may do, and what its callers had better survive."""

    def __init__(self, inner: PageStore, error: Callable[[], Exception]) -> None:
        super().__init__(inner)
        self._error = error

    def before_call(self) -> None:
        if self.active:
            raise self._error()


class FailingStore(PageStoreWrapper):
    """Answers trouble without touching the medium; presence is answered as absent."""

    def __init__(
        self,
        inner: PageStore,
        get_result: GetResult = GetResult.ERROR,
        set_result: SetResult = SetResult.ERROR,
    ) -> None:
        super().__init__(inner)
        self.get_result = get_result
        self.set_result = set_result

    def get(self, batch: PageBatch) -> list[GetResult]:
        return [self.get_result] * len(batch) if self.active else super().get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return [self.set_result] * len(batch) if self.active else super().set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys) if self.active else super().contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return 0 if self.active else super().count_leading(keys)


class LyingStore(PageStoreWrapper):
    """Says HIT and gives wrong bytes: one bit of every page is flipped. For tests that must notice."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = super().get(batch)
        if self.active:
            for segments, result in zip(batch.buffers, results, strict=True):
                if result is GetResult.HIT:
                    segments[-1][-1] ^= 1
        return results


class DroppingStore(PageStoreWrapper):
    """Says STORED and stores nothing."""

    def set(self, batch: PageBatch) -> list[SetResult]:
        return [SetResult.STORED] * len(batch) if self.active else super().set(batch)

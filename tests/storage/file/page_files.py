"""Pages in files of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hicache_ext.storage.contract.store import PageStore, SetResult
from hicache_ext.testing.conformance.pages import store_pages


def store_one_by_one(store: PageStore, keys: Iterable[bytes], sizes: Sequence[int] = (1000,)) -> list[SetResult]:
    """``store_pages`` for pages that are to be files of their own: those that are written together are a pack."""
    return [store_pages(store, [key], sizes)[0] for key in keys]

"""A transformed store with the abilities that the store below has, in the words of its callers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.page.transforms.codec import Codec
from hicache_ext.page.transforms.forms import STORED_AS
from hicache_ext.page.transforms.sealing import Seal
from hicache_ext.storage.contract.abilities import IdentityKeeper, PageLister, ability
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.contract.wrapper import DelegatingStore


def transformed(inner: PageStore, codec: Codec | None, seal: Seal | None, *, block: int = 1) -> PageStore:
    """``inner`` with its pages encoded, sealed or both; closing it closes ``inner``."""
    pages = TransformedStore(inner, codec, seal, block=block)
    store: PageStore = pages
    if (keeper := ability(inner, IdentityKeeper)) is not None:
        store = _KeepsIdentities(store, keeper)
    if (lister := ability(inner, PageLister)) is not None:
        store = _ListsPages(store, pages, lister)
    return store


class _KeepsIdentities(DelegatingStore):
    """An ``IdentityKeeper``."""

    def __init__(self, inner: PageStore, keeper: IdentityKeeper) -> None:
        super().__init__(inner)
        self._keeper = keeper

    def identities(self) -> dict[bytes, dict[str, Any]]:
        return {
            digest: document
            for digest, document in self._keeper.identities().items()
            if isinstance(document, dict) and STORED_AS not in document
        }


class _ListsPages(DelegatingStore):
    """A ``PageLister``. Pages whose names are hidden are not listed: their hashes cannot be told from the names."""

    def __init__(self, inner: PageStore, pages: TransformedStore, lister: PageLister) -> None:
        super().__init__(inner)
        self._pages = pages
        self._lister = lister

    def block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        found = [self._lister.block_hashes(form.identity) for form in self._pages.forms(digest) if not form.hides]
        return np.concatenate(found) if found else np.empty(0, np.int64)

"""The tiers in use, exchangeable while SGLang's calls go on.

An arrangement is one TieredStore over handles on tiers. A new one takes over at one moment: calls under way end on the
old one, later calls begin on the new one. A tier that is in both is one store with two holders, and closes when the
last of them lets go of it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.workers import CallGate
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult, StoreInfo
from hicache_ext.storage.contract.wrapper import DelegatingStore

logger = logging.getLogger(__name__)


class SharedStore:
    """A store with several holders."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._holders = 0

    def handle(self) -> PageStore:
        """The store for one more holder, who lets go of it with ``close()``."""
        with self._lock:
            self._holders += 1
        return _Handle(self.store, self._release)

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self.store.close()


class _Handle(DelegatingStore):
    def __init__(self, store: PageStore, release: Callable[[], None]) -> None:
        super().__init__(store)
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


class Arranged(PageStore, Protocol):
    """What an arrangement is made of: a PageStore that names its tiers."""

    @property
    def tiers(self) -> list[PageStore]: ...

    def stored(self, keys: Sequence[bytes]) -> list[bool]: ...

    def count_leading_in_pool(self, keys: Sequence[bytes]) -> int: ...

    def bring_inward(self, keys: Sequence[bytes]) -> Counter[str]: ...

    def count_absent(self, pages: int) -> None: ...


class _Arrangement:
    def __init__(self, store: Arranged) -> None:
        self.store = store
        self.calls = CallGate(store.name)

    def close(self) -> None:
        self.calls.shut()
        self.store.close()


class _Using:
    """The arrangement in force, which stays open until the block ends."""

    __slots__ = ("_arrangement", "_store")

    def __init__(self, store: ExchangeableStore) -> None:
        self._store = store

    def __enter__(self) -> Arranged:
        while True:
            self._arrangement = arrangement = self._store._arrangement
            try:
                arrangement.calls.__enter__()
            except StoreClosedError:
                if arrangement is self._store._arrangement:
                    raise
            else:
                return arrangement.store

    def __exit__(self, *_: object) -> None:
        self._arrangement.calls.__exit__()


class ExchangeableStore:
    """A PageStore over the arrangement that is current. Threads: any; ``exchange`` one at a time."""

    def __init__(self, store: Arranged) -> None:
        self._arrangement = _Arrangement(store)
        self._lock = threading.Lock()
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._closed = False

    @property
    def current(self) -> Arranged:
        """The arrangement in force; for a look, since it may be exchanged the next moment."""
        return self._arrangement.store

    def using(self) -> _Using:
        """The arrangement in force, in a context that keeps it open."""
        return _Using(self)

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys need not be written: every tier that writes go to has them."""
        with self.using() as store:
            return store.stored(keys)

    def count_leading_in_pool(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run that another node finds."""
        with self.using() as store:
            return store.count_leading_in_pool(keys)

    def bring_inward(self, keys: Sequence[bytes]) -> Counter[str]:
        """Promote what the tier for that lacks of ``keys``, before anybody asks for it; pages by what came of them."""
        with self.using() as store:
            return store.bring_inward(keys)

    def count_absent(self, pages: int) -> None:
        """Pages that SGLang asked for and ``count_leading`` was not asked about, or did not find."""
        with self.using() as store:
            store.count_absent(pages)

    def exchange(self, store: Arranged, new_tiers: Sequence[PageStore]) -> None:
        """Put ``store`` in force, after ``new_tiers`` know what was registered; close the old one when it is idle.

        Raises StoreClosedError; the old one then stays in force and ``store`` is not closed.
        """
        old = self._arrangement
        identities: set[bytes] = set()
        while True:
            with self._lock:
                if self._closed:
                    raise StoreClosedError(self.name)
                documents = {key: document for key, document in self._identities.items() if key not in identities}
                if not documents:
                    self._arrangement = _Arrangement(store)
                    break
            # Outside the lock, since these talk to stores and SGLang's scheduler may be about to register more.
            for tier in new_tiers:
                for digest, document in documents.items():
                    tier.register_identity(digest, document)
            identities |= documents.keys()
        try:
            old.close()
        except Exception:
            logger.exception("hicache_ext: closing tiers that are no longer used")

    # -- the contract ----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.current.name

    @property
    def metrics(self) -> TierMetrics:
        return self.current.metrics

    @property
    def tiers(self) -> list[PageStore]:
        return self.current.tiers

    def describe(self) -> StoreInfo:
        return self.current.describe()

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        with self._lock:
            self._identities[digest] = document
        with self.using() as store:
            store.register_identity(digest, document)

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self.using() as store:
            return store.get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        with self.using() as store:
            return store.set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self.using() as store:
            return store.contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        with self.using() as store:
            return store.count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        with self.using() as store:
            return store.remove(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        with self.using() as store:
            return store.clear(digests)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            arrangement = self._arrangement
        arrangement.close()

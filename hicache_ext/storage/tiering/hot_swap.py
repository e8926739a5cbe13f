"""Hot swap: the tiers in force, exchangeable while SGLang's calls go on.

New tiers take over at one moment. Calls under way end on the old ones, which wait for them (``TieredStore.release``); a
call that comes to the old ones too late goes to the new ones.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import PageStore, StoreInfo
from hicache_ext.storage.tiering.tiered import TieredStore

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _of_current(
    method: Callable[Concatenate[TieredStore, _P], _R],
) -> Callable[Concatenate[ExchangeableStore, _P], _R]:
    """The same method of the tiers in force."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: ExchangeableStore, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        while True:
            tiers = self.current
            try:
                answer: _R = getattr(tiers, name)(*args, **kwargs)
            except StoreClosedError:
                if tiers is self.current:
                    raise
            else:
                return answer

    return call


class ExchangeableStore:
    """A PageStore over the tiers in force. Threads: any; ``exchange`` one at a time."""

    def __init__(self, tiers: TieredStore) -> None:
        self.current = tiers
        """For a look: it may be exchanged the next moment."""
        self._lock = threading.Lock()
        self._releasing = threading.Lock()
        """While the old ones end: they have stores in common with those in force, which must not be closed yet."""
        self._identities: dict[bytes, dict[str, Any]] = {}
        self._closed = False

    def exchange(self, tiers: TieredStore, new_tiers: Sequence[PageStore]) -> None:
        """Put ``tiers`` in force, after ``new_tiers`` know what was registered; release the old ones when they are
        idle.

        Raises StoreClosedError; the old ones then stay in force.
        """
        old = self.current
        identities: set[bytes] = set()
        while True:
            with self._lock:
                if self._closed:
                    raise StoreClosedError(self.name)
                documents = {key: document for key, document in self._identities.items() if key not in identities}
                if not documents:
                    self._releasing.acquire()
                    self.current = tiers
                    break
            # Outside the lock, since these talk to stores and SGLang's scheduler may be about to register more.
            for tier in new_tiers:
                for digest, document in documents.items():
                    tier.register_identity(digest, document)
            identities |= documents.keys()
        try:
            old.release()
        except Exception:
            logger.exception("hicache_ext: ending what the tiers of before did in the background")
        finally:
            self._releasing.release()

    # -- the contract, and what TieredStore has beside it ----------------------------------------------------------

    get = _of_current(TieredStore.get)
    set = _of_current(TieredStore.set)
    contains = _of_current(TieredStore.contains)
    count_leading = _of_current(TieredStore.count_leading)
    remove = _of_current(TieredStore.remove)
    clear = _of_current(TieredStore.clear)
    stored = _of_current(TieredStore.stored)
    count_leading_in_pool = _of_current(TieredStore.count_leading_in_pool)
    bring_inward = _of_current(TieredStore.bring_inward)
    count_absent = _of_current(TieredStore.count_absent)
    _register = _of_current(TieredStore.register_identity)

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        with self._lock:
            self._identities[digest] = document
        self._register(digest, document)

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

    def close(self) -> None:
        with self._lock:
            self._closed = True
            tiers = self.current
        with self._releasing:
            tiers.close()

"""Late opening: a tier that could not start is opened in the background as soon as possible, without a restart.

This is for tiers with ``required: false``. Until then everything is REJECTED or absent. What was registered meanwhile
(identities, host memory) is registered with the store before its first page.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.errors import ConfigError, StoreClosedError, StoreSetupError
from hicache_ext.runtime.background import RETRY, BackgroundLoop, Backoff, Retry
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.reports import NOT_REACHED
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult, StoreInfo

logger = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
_CLOSE_WAIT = 10.0


class LateStore:
    """A PageStore that opens itself. Threads: any; the store is opened on a thread of its own."""

    def __init__(
        self,
        name: str,
        type_name: str,
        opener: Callable[[], PageStore],
        *,
        shared: bool = False,
        first_wait: float,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        """Wait up to ``first_wait`` seconds for the first attempt. Raises ConfigError if the attempt does.

        ``shared``: whether the store is shared, which must be known before it is open.
        """
        self._name = name
        self._type = type_name
        self._shared = shared
        self._opener = opener
        self._own_metrics = TierMetrics(name)
        self._lock = threading.Lock()
        self._store: PageStore | None = None
        self._waiting: dict[object, Callable[[PageStore], object]] = {}
        """Registrations and clear() calls to replay before anybody may read from the store."""
        self._last_problem = "it is still being opened"
        self._config_error: ConfigError | None = None
        self._attempted = threading.Event()
        self._reported_not_open = False
        self._loop = BackgroundLoop(f"hicache-{name}-open", self._open, Backoff(first_pause, LONGEST_PAUSE))
        if not self._loop.wake():
            raise StoreSetupError(name, "there is no thread to open it with")
        self._attempted.wait(first_wait)
        if self._config_error is not None:
            raise self._config_error
        if self._store is None:
            self._reported_not_open = True
            logger.warning(
                "hicache_ext: tier %s: %s; going on without it (required: false) and trying again in the background",
                name,
                self._last_problem,
            )

    @property
    def inner(self) -> PageStore | None:
        """The store, once it is open."""
        return self._store

    def _open(self) -> Retry | None:
        try:
            self._take(self._opener())
        except ConfigError as error:
            self._config_error = error
            self._last_problem = str(error)
            logger.error("hicache_ext: tier %s: %s", self._name, error)
        except StoreSetupError as error:
            self._last_problem = error.reason
            return RETRY
        except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may do better
            self._last_problem = repr(error)
            logger.warning("hicache_ext: tier %s: opening it raised %r", self._name, error)
            return RETRY
        finally:
            self._attempted.set()
        return None

    def _take(self, store: PageStore) -> None:
        """Register with ``store`` what was registered here, and put it in service."""
        try:
            done = 0
            while True:
                with self._lock:
                    waiting = list(self._waiting.values())[done:]
                    if not waiting:
                        if self._loop.stopping:
                            break
                        self._store = store
                        if self._reported_not_open:
                            logger.warning("hicache_ext: tier %s is open now and in use", self._name)
                        return
                # Outside the lock: this talks to the store.
                for call in waiting:
                    call(store)
                    done += 1
        except BaseException:
            store.close()
            raise
        store.close()

    # -- the contract ----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._name

    @property
    def metrics(self) -> TierMetrics:
        return self._store.metrics if self._store is not None else self._own_metrics

    def describe(self) -> StoreInfo:
        if self._store is not None:
            return self._store.describe()
        return StoreInfo(self._name, self._type, self._shared, {"state": "not open", "problem": self._last_problem})

    def gauges(self) -> dict[str, float]:
        return dict(NOT_REACHED) if self._store is None else {}

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        store = self._or_later(digest, lambda store: store.register_identity(digest, document))
        if store is not None:
            store.register_identity(digest, document)

    def get(self, batch: PageBatch) -> list[GetResult]:
        store = self._opened(len(batch))
        return [GetResult.REJECTED] * len(batch) if store is None else store.get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        store = self._opened(len(batch))
        return [SetResult.REJECTED] * len(batch) if store is None else store.set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        store = self._opened(len(keys))
        return [False] * len(keys) if store is None else store.contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        store = self._opened(len(keys))
        return 0 if store is None else store.count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        store = self._opened(len(keys))
        return 0 if store is None else store.remove(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Clear the store. If it is not open yet, the clear() is replayed before the store is in use."""
        if self._loop.stopping:
            raise StoreClosedError(self._name)
        wanted = None if digests is None else tuple(digests)
        store = self._or_later(wanted, lambda store: store.clear(wanted))
        return 0 if store is None else store.clear(digests)

    def _or_later(self, what: object, call: Callable[[PageStore], object]) -> PageStore | None:
        """Return the store, or None if it is not open; then queue ``call`` for later, once per ``what``."""
        with self._lock:
            if self._store is None:
                self._waiting[what] = call
            return self._store

    def close(self) -> None:
        """Close the store. An attempt that hangs is not waited for: what it opens is closed when it ends."""
        with self._lock:
            self._loop.stop(0)
            store = self._store
        if store is not None:
            store.close()
        if not self._loop.stop(_CLOSE_WAIT):
            logger.warning("hicache_ext: tier %s: its opening hangs; its thread ends with it", self._name)

    def _opened(self, pages: int) -> PageStore | None:
        if self._loop.stopping:
            raise StoreClosedError(self._name)
        if self._store is None:
            self._own_metrics.add("rejected", "not_open", pages)
        return self._store

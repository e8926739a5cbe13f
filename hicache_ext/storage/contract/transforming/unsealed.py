"""Pages of a sealed tier that were asked for, are missing, and are there without a seal: counted, and never served.

They are of the time before the seal, or of a server without the key. They are looked for on a thread of their own: a
look-up has not the time to ask the medium twice. Threads: any.
"""

from __future__ import annotations

import math
import threading
import time

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import PageKeys, PageStore
from hicache_ext.storage.contract.transforming.known_forms import KnownForms, stored_keys

_AGAIN = 60.0
"""Seconds between two looks for pages of an identity that had none."""
_MOST_AT_ONCE = 256
"""Pages of one call that are looked for."""
_MOST_WAITING = 64
_MOST_REMEMBERED = 1 << 16
_CLOSE_TIMEOUT = 1.0


class UnsealedPages:
    """Those of one store."""

    def __init__(self, inner: PageStore, known: KnownForms) -> None:
        """``known``: the forms of pages that have no seal."""
        self._inner = inner
        self._known = known
        self._lock = threading.Lock()
        self._waiting: list[PageKeys] = []
        self._again: dict[bytes, float] = {}
        """Identity -> when it may be looked at again."""
        self._loop = BackgroundLoop(f"hicache-{inner.name}-unsealed", self._look)

    def forget(self, identity: bytes) -> None:
        """Its document has come."""
        self._known.forget(identity)

    def note(self, missing: PageKeys) -> None:
        """These, of one identity, were asked for and are missing. Returns at once."""
        if not len(missing) or time.monotonic() < self._again.get(missing.identity, 0.0):
            return
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting.append(missing[:_MOST_AT_ONCE])
        self._loop.wake()

    def _look(self) -> float:
        while not self._loop.stopping:
            with self._lock:
                if not self._waiting:
                    break
                keys = self._waiting.pop(0)
            if time.monotonic() < self._again.get(keys.identity, 0.0):
                continue
            try:
                there = self._count(keys)
            except StoreClosedError:
                break
            self._inner.metrics.add("unsealed", "", there)
            if not there:
                if len(self._again) >= _MOST_REMEMBERED:
                    self._again.clear()
                self._again[keys.identity] = time.monotonic() + _AGAIN
        return math.inf

    def _count(self, keys: PageKeys) -> int:
        """How many are there in any form without a seal."""
        there = [False] * len(keys)
        for form in self._known.forms(keys.identity).all:
            present = one_for_each(self._inner.contains(stored_keys(form, keys)), len(keys))
            there = [before or now for before, now in zip(there, present, strict=True)]
        return sum(there)

    def close(self) -> None:
        self._loop.stop(_CLOSE_TIMEOUT)

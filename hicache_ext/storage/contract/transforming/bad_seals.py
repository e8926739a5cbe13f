"""Pages that arrived whole and do not fit their seals: who wrote them has not the key, or a machine has a fault.

They are absent for this process, and a write of the same page takes their place: once the copy was read again and is
still bad, it is removed. From a shared medium so many at most as ``RemovalBudget`` has it, since a reader with a fault
sees bad pages everywhere; then writes of such pages are refused. Threads: any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from hicache_ext.page.transforms import body
from hicache_ext.page.transforms.forms import Form
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract.bad_pages import RemovalBudget
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.contract.transforming.page_memory import PageMemory

logger = logging.getLogger(__name__)

_MOST_KNOWN = 1 << 16
_KEPT_IN_MIND = 30.0
"""Seconds for which such a page is absent: by then another process may have replaced it."""


class BadSeals:
    """Those of one store."""

    def __init__(self, inner: PageStore, memory: PageMemory, *, shared: bool) -> None:
        self._inner = inner
        self._memory = memory
        self._budget = RemovalBudget(inner.name, time.monotonic) if shared else None
        self._seen: dict[bytes, float] = {}
        """Stored key -> when it was read last."""
        self._healing = threading.Lock()
        self._log = LimitedLog(logger, 60.0)

    @property
    def some(self) -> bool:
        return bool(self._seen)

    def note(self, stored_key: bytes, reason: str) -> None:
        """A page was read and refused."""
        self._inner.metrics.add("corrupt", reason)
        words = "tier %s: page %s is refused (%s): made without the key, damaged, or of a missing cipher"
        self._log.log(logging.WARNING, reason, words, self._inner.name, stored_key.hex(), reason)
        if len(self._seen) >= _MOST_KNOWN:
            self._seen.clear()
        self._seen[stored_key] = time.monotonic()

    def hides(self, stored_key: bytes) -> bool:
        seen = self._seen.get(stored_key)
        return seen is not None and time.monotonic() - seen < _KEPT_IN_MIND

    def forget(self, stored_keys: Iterable[bytes]) -> None:
        """These were read whole."""
        for key in stored_keys:
            self._seen.pop(key, None)

    def keep(self, batch: PageBatch, pages: Sequence[tuple[Form, int]]) -> set[int]:
        """The positions of pages that cannot be written, since bad ones keep their places; those of all others are free
        or hold a page. ``pages``: the form of each, and the bytes of its payload."""
        if not self._seen:
            return set()
        suspects = [position for position, key in enumerate(batch.keys) if key in self._seen]
        kept = {at for at in suspects if not self._make_way(batch.keys[at], batch.sizes[at], *pages[at])}
        self._inner.metrics.add("rejected", "suspect", len(kept))
        return kept

    def _make_way(self, stored_key: bytes, length: int, form: Form, payload: int) -> bool:
        with self._healing:
            stored, page = np.empty(length, np.uint8).data, np.empty(payload, np.uint8).data
            (result,) = self._inner.get(PageBatch([stored_key], [[stored]]))
            if result is GetResult.HIT:
                reason = body.read(stored, stored_key, form, [page], self._memory.of_thread)
                if reason == body.SEAL_CIPHER:
                    # It may be good for others.
                    return False
                if reason is not None:
                    if self._budget is not None and not self._budget.take():
                        return False
                    self._inner.remove([stored_key])
            elif result is not GetResult.MISS:
                return False
            self._seen.pop(stored_key, None)
            return True

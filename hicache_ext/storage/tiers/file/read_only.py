"""A tier that is only read, on volumes that cannot be written: serves the pages that inspectors find at its paths.

Nothing is created, locked or changed there, as the stores of both layouts would have to. Pages are listed in the
background, every half minute, or less often if that takes long; lookups and reads use the last list. A page that has
gone meanwhile is a miss. What was cleared or removed stays hidden from this process for as long as it runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache_ext.errors import StoreError, StoreSetupError
from hicache_ext.page.envelope import FIELDS_LENGTH, IDENTITY_LENGTH, decode_header
from hicache_ext.page.page_object import scatter
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.inspector import Inspector, StoredPage, reason_it_is_bad

_LIST_INTERVAL = 30.0
"""Shortest time between two listings, in seconds."""
_LIST_SHARE = 0.05
"""Share of the time that listing may take."""
_FIRST_LISTING = 5.0
"""Seconds that the start waits for the first listing."""
_CLOSE_TIMEOUT = 10.0
"""Seconds that close() waits for a listing in progress: on a hanging volume, it may never end."""


def cannot_be_written(tier: FileTierConfig) -> bool:
    """Return whether this server only reads the tier and all its directories exist but cannot be written."""
    return tier.only_read and all(os.path.isdir(path) and not os.access(path, os.W_OK) for path in tier.path)


class ReadOnlyStore(TierStore):
    """Serves a read-only tier. Thread-safe; pages are read one at a time."""

    type_name = "file"

    def __init__(self, name: str, tier: FileTierConfig) -> None:
        """Start listing the tier's pages. Raises StoreSetupError."""
        super().__init__(name)
        self._paths, self._ttl, self.shared = tier.path, tier.ttl, tier.sharing().shared
        self._reading = threading.Lock()
        self._pages: dict[bytes, tuple[Inspector, StoredPage]] = {}
        """The last list, without entries that turned out to be absent or bad."""
        self._hidden: set[bytes | None] = set()
        """Keys of removed pages and digests of cleared identities; None: everything."""
        try:
            for path in tier.path:
                open_inspector(Path(path))
        except StoreError as error:
            raise StoreSetupError(name, f"{error} (it cannot be written, and this server only reads it)") from error
        self._listed = threading.Event()
        self._listing = BackgroundLoop(f"hicache-{name}-list", self._list)
        self._listing.wake()
        self._listed.wait(_FIRST_LISTING)

    def details(self) -> dict[str, Any]:
        return {"paths": list(self._paths), "read_only": True, "pages": len(self._pages)}

    def diagnose(self) -> Sequence[Finding]:
        seen = f"it cannot be written, and this server only reads its {len(self._pages)} pages"
        return [Finding("path", Level.OK, seen if self._listed.is_set() else f"{seen} (they are still being listed)")]

    def _list(self) -> float | None:
        """List all pages [background]. Opens the inspectors again: servers elsewhere may have added slabs."""
        begun = time.monotonic()
        pages: dict[bytes, tuple[Inspector, StoredPage]] = {}
        for path in self._paths:
            inspector = open_inspector(Path(path))
            for page in inspector.pages():
                if self._listing.stopping:
                    return None
                pages[page.key] = inspector, page
        self._pages = pages
        self._listed.set()
        return max(_LIST_INTERVAL, (time.monotonic() - begun) / _LIST_SHARE)

    def _page(self, key: bytes) -> tuple[Inspector, StoredPage] | None:
        found = self._pages.get(key)
        if found is None or not self._hidden.isdisjoint((None, key, key[:IDENTITY_LENGTH])):
            return None
        # For some pages, only the header tells when they were written, which is never after their last use.
        written = found[1].written or found[1].used
        return None if written is not None and self._is_expired(written) else found

    def _is_expired(self, written: float) -> bool:
        return self._ttl is not None and written + self._ttl < time.time()

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._page(key) is not None for key in keys]

    def _read(self, batch: PageBatch) -> list[GetResult]:
        return [self._read_page(*page) for page in zip(batch.keys, batch.buffers, batch.sizes, strict=True)]

    def _read_page(self, key: bytes, segments: Sequence[memoryview], size: int) -> GetResult:
        found = self._page(key)
        if found is None:
            return GetResult.MISS
        inspector, page = found
        with self._reading:
            content = inspector.read(page)
        result = GetResult.MISS
        if content is not None:
            reason = reason_it_is_bad(page, content)
            if reason is None and len(content) - FIELDS_LENGTH != size:
                reason = "length"
            if reason is not None:
                self.metrics.add("corrupt", reason)
                result = GetResult.CORRUPT
            elif not self._is_expired(decode_header(content).created_ms / 1000):
                scatter(memoryview(content)[FIELDS_LENGTH:], segments)
                return GetResult.HIT
        # Treat it as absent until the next listing.
        self._pages.pop(key, None)
        return result

    def _write(self, batch: PageBatch) -> list[SetResult]:
        return [SetResult.REJECTED] * len(batch)

    def _remove(self, keys: Sequence[bytes]) -> int:
        self._hidden.update(keys)
        return 0

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        self._hidden.update([None] if digests is None else digests)
        return 0

    def _close(self) -> None:
        self._listing.stop(_CLOSE_TIMEOUT)

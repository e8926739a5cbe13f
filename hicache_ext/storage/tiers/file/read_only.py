"""A tier that is only read, on volumes that cannot be written: what the tools see of its directories, served.

Nothing is made, locked or changed there, which the stores of both layouts must do. What is there is listed at the first
look-up and again every half minute; a page that went meanwhile is a miss.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hicache_ext.errors import StoreError, StoreSetupError
from hicache_ext.page.envelope import FIELDS_LENGTH, decode_header
from hicache_ext.page.page_object import scatter
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.inspector import Inspector, StoredPage, reason_it_is_bad

_LISTED_FOR = 30.0
"""Seconds."""


def cannot_be_written(tier: FileTierConfig) -> bool:
    """Whether this server only reads the tier, and may not write to any of its directories, which are there."""
    return tier.only_read and all(os.path.isdir(path) and not os.access(path, os.W_OK) for path in tier.path)


class ReadOnlyStore(TierStore):
    """Threads: any; pages are read one at a time."""

    type_name = "file"

    def __init__(self, name: str, tier: FileTierConfig) -> None:
        """Raises StoreSetupError."""
        super().__init__(name)
        self._paths, self._ttl, self.shared = tier.path, tier.ttl, tier.sharing().shared
        self._lock = threading.Lock()
        self._pages: dict[bytes, tuple[Inspector, StoredPage]] = {}
        self._listed_until = 0.0
        self._inspectors: list[Inspector] = []
        try:
            self._inspectors += [open_inspector(Path(path)) for path in tier.path]
        except StoreError as error:
            self._close()
            raise StoreSetupError(name, f"{error} (it cannot be written, and this server only reads it)") from error

    def details(self) -> dict[str, Any]:
        return {"paths": list(self._paths), "read_only": True, "pages": len(self._pages)}

    def diagnose(self) -> Sequence[Finding]:
        with self._lock:
            pages = len(self._listed())
        return [Finding("path", Level.OK, f"it cannot be written, and this server only reads its {pages} pages")]

    def _listed(self) -> dict[bytes, tuple[Inspector, StoredPage]]:
        """What is there. The lock is held."""
        if time.monotonic() >= self._listed_until:
            self._pages = {page.key: (inspector, page) for inspector in self._inspectors for page in inspector.pages()}
            self._listed_until = time.monotonic() + _LISTED_FOR
        return self._pages

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            pages = self._listed()
            return [key in pages for key in keys]

    def _read(self, batch: PageBatch) -> list[GetResult]:
        return [self._read_page(*page) for page in zip(batch.keys, batch.buffers, batch.sizes, strict=True)]

    def _read_page(self, key: bytes, segments: Sequence[memoryview], size: int) -> GetResult:
        with self._lock:
            inspector, page = self._listed().get(key, (None, None))
            stored = None if inspector is None or page is None else inspector.read(page)
        if stored is None:
            return GetResult.MISS
        reason = reason_it_is_bad(key, stored)
        if reason is None and len(stored.content) - FIELDS_LENGTH != size:
            reason = "length"
        if reason is not None:
            self.metrics.add("corrupt", reason)
            return GetResult.CORRUPT
        if self._ttl is not None and decode_header(stored.content).created_ms / 1000 + self._ttl < time.time():
            return GetResult.MISS
        scatter(memoryview(stored.content)[FIELDS_LENGTH:], segments)
        return GetResult.HIT

    def _write(self, batch: PageBatch) -> list[SetResult]:
        return [SetResult.REJECTED] * len(batch)

    def _remove(self, keys: Sequence[bytes]) -> int:
        return 0

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        raise OSError("it cannot be written, and this server only reads it")

    def _close(self) -> None:
        for inspector in self._inspectors:
            with suppress(OSError):
                inspector.close()

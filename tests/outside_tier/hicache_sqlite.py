"""``type: sqlite``: pages in one SQLite file, for the processes of one machine."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from hicache_ext.config import TierConfig
from hicache_ext.config.schema import Allowed
from hicache_ext.config.values import absolute_path
from hicache_ext.errors import StoreSetupError
from hicache_ext.page.page_object import decode_object, encode_object
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.registry import TierType
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult

_FILE = "an absolute path, such as /mnt/nvme0/pages.db"


class SqliteTierConfig(TierConfig):
    """Pages in one SQLite file."""

    type: Literal["sqlite"] = "sqlite"
    file: Annotated[str, Allowed(_FILE, absolute_path)]
    """the database"""

    def directories(self) -> tuple[str, ...]:
        return (os.path.dirname(self.file),)

    def summary(self) -> str:
        return f"sqlite, {self.file}"


class SqliteTier(TierType):
    config = SqliteTierConfig

    def open(self, name: str, tier: SqliteTierConfig) -> SqlitePageStore:
        try:
            return SqlitePageStore(name, tier.file)
        except (OSError, sqlite3.Error) as error:
            raise StoreSetupError(name, f"{tier.file!r}: {error}") from error


class SqlitePageStore(TierStore):
    type_name = "sqlite"

    def __init__(self, name: str, file: str) -> None:
        super().__init__(name)
        self._lock = threading.Lock()
        os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
        self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._run("PRAGMA journal_mode = WAL")
        self._run("CREATE TABLE IF NOT EXISTS pages (key BLOB PRIMARY KEY, object BLOB NOT NULL)")

    def _run(self, statement: str, values: Sequence[Any] = ()) -> tuple[list[Any], int]:
        """The rows, and how many were changed. One statement is one transaction."""
        with self._lock:
            cursor = self._database.execute(statement, values)
            return cursor.fetchall(), cursor.rowcount

    def _read(self, batch: PageBatch) -> list[GetResult]:
        return [self._read_page(*page) for page in zip(batch.keys, batch.buffers, strict=True)]

    def _read_page(self, key: bytes, segments: Sequence[memoryview]) -> GetResult:
        rows, _ = self._run("SELECT object FROM pages WHERE key = ?", (key,))
        if not rows:
            return GetResult.MISS
        reason = decode_object(memoryview(rows[0][0]), key, segments)
        if reason is None:
            return GetResult.HIT
        self.metrics.add("corrupt", reason)
        # Only the copy that was read: another process may have written a good one meanwhile.
        self._run("DELETE FROM pages WHERE key = ? AND object = ?", (key, rows[0][0]))
        return GetResult.CORRUPT

    def _write(self, batch: PageBatch) -> list[SetResult]:
        return [self._write_page(*page) for page in zip(batch.keys, batch.buffers, strict=True)]

    def _write_page(self, key: bytes, segments: Sequence[memoryview]) -> SetResult:
        _, stored = self._run("INSERT OR IGNORE INTO pages VALUES (?, ?)", (key, encode_object(key, segments)))
        return SetResult.STORED if stored else SetResult.EXISTS

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(self._run("SELECT 1 FROM pages WHERE key = ?", (key,))[0]) for key in keys]

    def _remove(self, keys: Sequence[bytes]) -> int:
        return sum(self._run("DELETE FROM pages WHERE key = ?", (key,))[1] for key in keys)

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        if digests is None:
            digests = [digest for (digest,) in self._run("SELECT DISTINCT substr(key, 1, 16) FROM pages")[0]]
        return sum(self._run("DELETE FROM pages WHERE substr(key, 1, 16) = ?", (digest,))[1] > 0 for digest in digests)

    def _close(self) -> None:
        self._database.close()

"""Slabs of former releases in PATH itself: they count towards the capacity, and are emptied when their room is needed.

Only if no process of such a release is there: each holds an flock on PATH/lock, shared. They are emptied in an order
that leaves that release a directory in which it starts, after a kill at any moment: without ``trust`` it believes no
index, and rebuilds it from the slabs that are left. Its lock, its manifest and its directories stay for it.
Reasons: docs/decisions/versions-beside-each-other.md.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

from hicache_ext.config.units import rounded_size
from hicache_ext.runtime.access import open_file, sync_directory
from hicache_ext.runtime.file_lock import show_progress, try_lock
from hicache_ext.runtime.whole_file import remove_whole
from hicache_ext.storage.tiers.file.manifest import format_and_layout, holds_former_slabs
from hicache_ext.storage.tiers.file.modes import INDEX_FILE, SLAB_FILE

logger = logging.getLogger(__name__)

FATE = "which this release cannot read, and which a server removes when it needs the room"

_SECONDS = 5.0
"""For which their size, or that they are in use, is taken as known."""
_BLOCK = 512


class FormerSlabs:
    """Those in one directory. Thread-safe. Nothing here raises OSError: they are no part of the tier."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = 0
        self._seen_at = self._refused_at = -_SECONDS
        self._emptying = threading.Lock()
        self._warned = False

    def bytes(self) -> int:
        """Bytes of disk that they take, a few seconds old at most; 0 without any. From memory mostly."""
        now = time.monotonic()
        if now - self._seen_at >= _SECONDS:
            self._seen_at = now
            self._bytes = self._counted()
        return self._bytes

    def make_room(self, tier: str) -> int:
        """Remove them all, unless a process of their release is there; returns the bytes of disk that this freed, 0
        where it may not. Logs one line.

        It takes as long as the disk needs to delete them (seconds for TiB): hold no lock that others wait for.
        """
        if time.monotonic() - self._refused_at < _SECONDS or not self._emptying.acquire(blocking=False):
            return 0
        try:
            self._seen_at = -_SECONDS
            return self._empty(tier) if self.bytes() else 0
        except OSError as error:
            self._refuse(tier, str(error))
            return 0
        finally:
            self._seen_at = -_SECONDS
            self._emptying.release()

    def in_words(self) -> str:
        """For tools: what they are and what becomes of them. Empty without any, or without a manifest that tells."""
        try:
            recorded = format_and_layout(self._path)
        except OSError:
            return ""
        if recorded is None or not self.bytes():
            return ""
        return f"{rounded_size(self.bytes())} of slabs of a former release (format {recorded[0]}), {FATE}"

    def _empty(self, tier: str) -> int:
        lock = open_file(self._path / "lock", os.O_RDWR)
        try:
            if not try_lock(lock, fcntl.LOCK_EX):
                self._refuse(tier, "a process of that release is there")
                return 0
            # Durable before the index goes: what is left of an index must not count as closed in order.
            remove_whole(self._path / "trust")
            freed = self._remove("index", INDEX_FILE, lock) + self._remove("slabs", SLAB_FILE, lock)
        finally:
            os.close(lock)
        logger.warning(
            "tier %s: %s: slabs of a former release were removed to make room, %s",
            tier,
            self._path,
            rounded_size(freed),
        )
        return freed

    def _remove(self, folder: str, name: re.Pattern[str], lock: int) -> int:
        """Remove our files in a directory of PATH, durably; returns their bytes of disk."""
        freed = 0
        for file, size in _files(self._path / folder, name):
            os.unlink(file)
            freed += size
            show_progress(lock)
        if freed:
            sync_directory(self._path / folder)
        return freed

    def _refuse(self, tier: str, reason: str) -> None:
        self._refused_at = time.monotonic()
        if not self._warned:
            self._warned = True
            logger.warning(
                "tier %s: %s holds %s of slabs of a former release, which count in the capacity and stay: %s",
                tier,
                self._path,
                rounded_size(self._bytes),
                reason,
            )

    def _counted(self) -> int:
        try:
            if not holds_former_slabs(self._path):
                return 0
            found = [*_files(self._path / "index", INDEX_FILE), *_files(self._path / "slabs", SLAB_FILE)]
            return sum(size for _, size in found)
        except OSError:
            return self._bytes


def _files(directory: Path, name: re.Pattern[str]) -> list[tuple[str, int]]:
    """Our files in a directory, with their bytes of disk. Raises OSError."""
    try:
        with os.scandir(directory) as listing:
            ours = [entry for entry in listing if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: list[tuple[str, int]] = []
    for entry in ours:
        # A process of that release may have removed it since.
        with suppress(FileNotFoundError):
            found.append((entry.path, entry.stat(follow_symlinks=False).st_blocks * _BLOCK))
    return found

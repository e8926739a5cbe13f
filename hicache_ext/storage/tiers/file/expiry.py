"""``ttl``: pages written longer ago are misses, and a thread of its own frees their space.

The age counts from the write (in the envelope), not from the last use (docs/decisions/layout-and-io-auto.md). Readers
refuse expired pages themselves; the thread frees their space before eviction would take good pages. Of several
processes on a directory one at a time does it.

PATH/ttl.json tells tools the ttl of the tier that opened the directory last; nothing else reads it, and it is absent
where that tier had no ttl.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.file_lock import FlockLock
from hicache_ext.runtime.whole_file import read_document, remove_whole, write_whole

logger = logging.getLogger(__name__)

_SWEEPS_PER_TTL = 16
_SHORTEST_INTERVAL = 0.5
_LONGEST_INTERVAL = 600.0


def oldest_valid_ms(ttl: float | None) -> int:
    """Pages created (``created_ms`` of their envelope) before this are expired; 0 without a ttl."""
    return 0 if ttl is None else int((time.time() - ttl) * 1000)


def record_ttl(tier: str, path: Path, ttl: float | None) -> None:
    """For ``recorded_ttl``. Never raises OSError: a tier works without."""
    record = path / "ttl.json"
    try:
        if ttl is None:
            remove_whole(record)
        elif recorded_ttl(path) != ttl:
            write_whole(record, json.dumps({"ttl": ttl}) + "\n")
    except OSError as error:
        logger.warning("tier %s: ttl not recorded in %s: %s", tier, path, error)


def recorded_ttl(path: Path) -> float | None:
    """The ttl of the tier that opened this directory last; None without one, or where none is recorded."""
    try:
        return float((read_document(path / "ttl.json") or {})["ttl"])
    except (ValueError, KeyError, TypeError):
        return None


class Sweeper:
    """Calls ``sweep`` every so often in the background until it is closed."""

    def __init__(self, tier: str, path: Path, ttl: float, sweep: Callable[[BackgroundLoop], int]) -> None:
        """``sweep`` answers how many pages it removed, and ends early when the loop is stopping; may raise OSError."""
        self._tier = tier
        self._path = path
        self._sweep = sweep
        self._interval = max(_SHORTEST_INTERVAL, min(ttl / _SWEEPS_PER_TTL, _LONGEST_INTERVAL))
        self._loop = BackgroundLoop(f"hicache-{tier}-ttl", self._run)
        self._loop.wake(self._interval)

    def close(self) -> None:
        """Waits for a sweep under way, which ends early."""
        self._loop.stop()

    def _run(self) -> float:
        try:
            with _turn(self._path) as mine:
                removed = self._sweep(self._loop) if mine else 0
        except OSError as error:
            logger.warning("tier %s: removing expired pages of %s: %s", self._tier, self._path, error)
            removed = 0
        if removed:
            logger.info("tier %s: %d expired pages of %s removed", self._tier, removed, self._path)
        return self._interval


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Whether no other process is sweeping this directory now."""
    lock = FlockLock(path / "expiry.lock")
    try:
        yield lock.try_acquire()
    finally:
        lock.release()
        lock.close()

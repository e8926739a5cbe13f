"""What one directory of page files needs beside the calls: left-overs removed, and its account put right by a count.

On a thread of its own, of one process at a time, without a lock that a call needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.runtime.members import ID_LIMIT
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.usage import Usage

logger = logging.getLogger(__name__)

_BYTE = ID_LIMIT
"""Of the file of members, which nobody has as its id: one process at a time does this."""
_INTERVAL = 60.0
"""Seconds between two looks at whether a count is needed."""
_SHORT_WORK = 0.005
_LONGEST_REST = 0.2
_WAIT_AT_START = 1.0
_WAIT_AT_END = 5.0
"""Seconds that close() waits: a disk may hold it up, or many files are being removed."""


class Upkeep:
    """Threads: any."""

    def __init__(self, tier: str, directory: PageDirectory, usage: Usage) -> None:
        """Begins. Small directories are in order when it returns; it waits a second at most. Raises OSError."""
        self._tier = tier
        self._directory = directory
        self._usage = usage
        self._turn = OfdLock(directory.members_path, _BYTE)
        self._first = threading.Event()
        self._loop = BackgroundLoop(f"hicache-{tier}-upkeep", self._run)
        if self._loop.wake():
            self._first.wait(_WAIT_AT_START)

    def close(self) -> None:
        """Waits for a count under way, which ends early."""
        if not self._loop.stop(_WAIT_AT_END):
            logger.warning("tier %s: upkeep of %s has not ended yet", self._tier, self._directory.path)
        self._turn.close()

    def _run(self) -> float:
        try:
            if (not self._first.is_set() or self._usage.in_doubt()) and self._turn.try_acquire():
                try:
                    self._put_right()
                finally:
                    self._turn.release()
        except OSError as error:
            logger.warning("tier %s: upkeep of %s: %s", self._tier, self._directory.path, error)
        finally:
            self._first.set()
        return _INTERVAL

    def _put_right(self) -> None:
        self._directory.remove_left_overs()
        if self._loop.stopping or not self._usage.in_doubt():
            return
        begun, before = time.monotonic(), self._usage.used()
        if not self._usage.count(self._parts()):
            return
        took = time.monotonic() - begun
        logger.log(
            logging.INFO if took > _WAIT_AT_START else logging.DEBUG,
            "tier %s: %s was counted in %.1f s: its pages take %d bytes; the account said %d",
            self._tier,
            self._directory.path,
            took,
            self._usage.used(),
            before,
        )

    def _parts(self) -> Iterator[tuple[float, int]]:
        """A walk that leaves the processor to others half of the time."""
        begun = time.monotonic()
        for part in self._directory.occupied_parts():
            yield part
            took = time.monotonic() - begun
            if self._loop.stopping or (took > _SHORT_WORK and not self._loop.rest(min(took, _LONGEST_REST))):
                return
            if took > _SHORT_WORK:
                begun = time.monotonic()

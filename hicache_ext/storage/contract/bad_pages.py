"""Pages of a shared pool that arrived damaged: a page is removed only when its stored copy is shown to be bad.

A network, a proxy, a network card or this machine's memory may damage a page in transit; the page in the pool is then
good. So a read that finds a page damaged makes it a *suspect*: the read answers CORRUPT immediately, the page is absent
for this process, and a thread examines it:

1. It reads the object again, over a new connection, into other memory, split at other offsets. If this copy is the
   page, the stored copy is good, and the damage happened in transit.
2. It removes the object only when two such reads found the same bad bytes and, if the server can compare, only if the
   server's copy has those bytes (``PoolStore.remove_bad``). Damage in transit mostly differs from read to read.
3. It removes at most ``MOST_REMOVED`` pages a minute. More than that needs a person, and is more likely a fault of this
   reader than of the pool: removal pauses, with an error in the log, and resumes later.

A write of a suspect waits for its verdict (``settle``), so that STORED and EXISTS mean readable and no key is poisoned.
Suspects are forgotten after half a minute, or when they are read whole, written or removed.
Measurements, and what was tried: docs/decisions/removing-bad-pages.md.
"""

from __future__ import annotations

import abc
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from hicache_ext.errors import FormatError, NotReadError
from hicache_ext.page import envelope
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.base import TierStore
from hicache_ext.storage.contract.clearing import Clearing

logger = logging.getLogger(__name__)

MOST_REMOVED = 8
"""Bad pages that one tier of one process removes within ``WINDOW`` seconds."""
WINDOW = 60.0
PAUSE = 300.0
"""Seconds without removal after that."""
LONGEST_EXAMINED = 16 << 20
"""Bytes to read again of an object that is longer than both this and the expected page."""
_MOST_SUSPECTS = 4096
_READS = 4
_HIDDEN_SECONDS = 30.0
"""Seconds for which a page without a clear verdict is absent for this process (``PAUSE`` if it is known to be bad)."""
_EXAMINED_AGAIN = 3.0
"""Seconds after which such a page, if it arrives damaged again, may be examined again."""
_SLOW_FAILURE = 1.0
"""A read that failed after at least this many seconds is not retried."""
_REPORT_AGAIN = 60.0
"""Seconds between two equal lines in the log."""
_LONGEST_REST = 0.5
"""Longest pause after an examination. Pauses last as long as examinations, which so use at most half a connection."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored object that was read again."""

    length: int
    data: memoryview
    """The leading bytes of the object; all of them unless it is longer than requested."""
    version: Any = None
    """Whatever identifies this copy to the medium (an ETag)."""


class Verdict(enum.Enum):
    """The result of an examination; the value is its reason in the metrics."""

    GOOD = "good"
    """The stored copy is good: the page was damaged in transit."""
    GONE = "gone"
    REMOVED = "removed"
    """Shown to be bad, and removed."""
    DENIED = "denied"
    """The same bad bytes arrive each time, but the server has others. It stays; a write may replace it."""
    WITHHELD = "withheld"
    """Shown to be bad, but not removed because too many were removed already."""
    UNCLEAR = "unclear"
    """Every read returned different bytes, or none."""

    @property
    def free(self) -> bool:
        """Return whether nothing is stored under the key."""
        return self in (Verdict.REMOVED, Verdict.GONE)


@dataclass(slots=True)
class _Suspect:
    key: bytes
    size: int
    reason: str
    verdict: Verdict | None = None
    """None while it waits to be examined."""
    judged: float = 0.0
    """Time of the verdict."""
    wanted: int = 0
    """Number of writes that wait for the verdict."""


@dataclass(slots=True)
class RemovalBudget:
    """A limit on the rate of removals. Used by one thread at a time."""

    tier: str
    clock: Callable[[], float]
    _removed: deque[float] = field(default_factory=deque)
    _paused_until: float = 0.0

    def take(self) -> bool:
        """Claim one removal and return whether it is allowed now."""
        now = self.clock()
        if now < self._paused_until:
            return False
        if self._paused_until:
            self._paused_until = 0.0
            self._removed.clear()
            logger.warning("tier %s: bad pages are removed again", self.tier)
        while self._removed and self._removed[0] <= now - WINDOW:
            self._removed.popleft()
        if len(self._removed) >= MOST_REMOVED:
            self._paused_until = now + PAUSE
            logger.error(
                "tier %s: MORE THAN %d BAD PAGES IN %.0f s: no more are removed for %.0f s. Look at the pool's disks "
                "and memory, at its writers, and at this machine: a reader with a fault sees bad pages everywhere",
                *(self.tier, MOST_REMOVED, WINDOW, PAUSE),
            )
            return False
        self._removed.append(now)
        return True

    def give_back(self) -> None:
        """Give back the last removal taken, because it was not used."""
        self._removed.pop()


class BadPages:
    """The suspects of one tier. Threads: any; only ``settle``, ``wait`` and ``close`` wait for anything."""

    def __init__(
        self, tier: str, metrics: TierMetrics, medium: PoolStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tier = tier
        self._metrics = metrics
        self._medium = medium
        self._clock = clock
        self._budget = RemovalBudget(tier, clock)
        self._changed = threading.Condition()
        self._suspects: dict[bytes, _Suspect] = {}
        self._loop = BackgroundLoop(f"hicache-{tier}-examine", self._examine_one)
        self._examining = False
        self._closing = False
        self._log = LimitedLog(logger, _REPORT_AGAIN, clock)

    # -- used by calls ---------------------------------------------------------------------------------------------

    def suspect(self, key: bytes, size: int, reason: str) -> None:
        """Note that a read, or its length, showed that the object under ``key`` is not the page of ``size`` bytes."""
        with self._changed:
            if self._closing:
                return
            known = self._suspects.get(key)
            if known is not None and (known.verdict is None or self._clock() < known.judged + _EXAMINED_AGAIN):
                return
            if known is None and len(self._suspects) >= _MOST_SUSPECTS:
                self._dismiss(next(iter(self._suspects)), Verdict.UNCLEAR)
                self._metrics.add("suspect", "forgotten")
            self._suspects[key] = _Suspect(key, size, reason)
            self._start()
        logger.debug("tier %s: page %s arrived damaged (%s)", self._tier, key.hex(), reason)

    @property
    def hides_some(self) -> bool:
        """Return whether ``hides`` may return True for any key."""
        return bool(self._suspects)

    def hides(self, key: bytes) -> bool:
        """Return whether the page is absent for this process because it could not be read."""
        if not self._suspects:
            return False
        with self._changed:
            return self._known(key) is not None

    def clear(self, keys: Iterable[bytes]) -> None:
        """Forget these suspects: they were read whole, written, or removed on purpose."""
        if self._suspects:
            with self._changed:
                for key in keys:
                    self._dismiss(key, Verdict.GONE)

    def _dismiss(self, key: bytes, verdict: Verdict) -> None:
        """Forget a suspect, with the lock held. ``verdict``: the answer for writes that wait for it."""
        suspect = self._suspects.pop(key, None)
        if suspect is not None and suspect.verdict is None:
            suspect.verdict = verdict
            self._changed.notify_all()

    def settle(self, keys: Iterable[bytes], deadline: float) -> Mapping[bytes, Verdict]:
        """Return the verdicts on the suspects among ``keys``, waiting for them until ``deadline`` (time.monotonic()).

        A page without a clear verdict is examined again. A page not examined in time is UNCLEAR.
        """
        if not self._suspects:
            return {}
        with self._changed:
            requested = [suspect for key in dict.fromkeys(keys) if (suspect := self._known(key)) is not None]
            for suspect in requested:
                suspect.verdict = None
                suspect.wanted += 1
            if requested:
                self._start(now=True)
                self._changed.wait_for(
                    lambda: self._closing or all(suspect.verdict is not None for suspect in requested),
                    max(0.0, deadline - time.monotonic()),
                )
            for suspect in requested:
                suspect.wanted -= 1
            return {suspect.key: suspect.verdict or Verdict.UNCLEAR for suspect in requested}

    def wait(self, timeout: float) -> bool:
        """Wait until all suspects are examined; for tools and tests."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._examining, timeout)

    def close(self) -> None:
        """Stop, after waiting for the request in flight, which is bounded by the tier's timeout."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._loop.stop()

    def _known(self, key: bytes) -> _Suspect | None:
        """Return the suspect ``key`` unless its verdict has expired. The lock is held."""
        suspect = self._suspects.get(key)
        if suspect is None or suspect.verdict is None:
            return suspect
        kept = PAUSE if suspect.verdict is Verdict.WITHHELD else _HIDDEN_SECONDS
        if self._clock() < suspect.judged + kept:
            return suspect
        del self._suspects[key]
        return None

    # -- the thread ------------------------------------------------------------------------------------------------

    def _start(self, *, now: bool = False) -> None:
        """Wake the thread, with the lock held. ``now``: a caller waits, so cut short the pause after an examination."""
        if now or not self._examining:
            # If no thread can be started, the page stays absent for this process until one can.
            self._examining = self._loop.wake()

    def _examine_one(self) -> float | None:
        with self._changed:
            waiting = [suspect for suspect in self._suspects.values() if suspect.verdict is None]
            if not waiting:
                self._examining = False
                self._changed.notify_all()
                return None
            suspect = next((suspect for suspect in waiting if suspect.wanted), waiting[0])
        begun = time.monotonic()
        try:
            verdict = self._examine(suspect)
        except BaseException:
            # BaseException, too (a panic inside a client library), because other pages wait to be examined.
            logger.exception("tier %s: examining a page ended in an error that nobody expected", self._tier)
            verdict = Verdict.UNCLEAR
        self._metrics.add("suspect", verdict.value)
        self._log_verdict(suspect, verdict)
        with self._changed:
            suspect.verdict = verdict
            suspect.judged = self._clock()
            if (verdict.free or verdict is Verdict.GOOD) and self._suspects.get(suspect.key) is suspect:
                del self._suspects[suspect.key]
            self._changed.notify_all()
            if any(s.wanted and s.verdict is None for s in self._suspects.values()):
                return 0.0
        return min(_LONGEST_REST, time.monotonic() - begun)

    def _examine(self, suspect: _Suspect) -> Verdict:
        seen: set[tuple[int, bytes]] = set()
        """Length and digest of the bytes of each read."""
        for _ in range(_READS):
            if self._closing:
                break
            begun = time.monotonic()
            try:
                stored = self._medium.read_again(suspect.key, max(suspect.size, LONGEST_EXAMINED))
                if stored is None:
                    return Verdict.GONE
                reason = reason_to_refuse(suspect.key, stored)
                if reason is None:
                    return Verdict.GOOD
                suspect.reason = reason
                copy = stored.length, xxhash.xxh3_128_digest(stored.data)
                if copy not in seen:
                    seen.add(copy)
                    continue
                if not self._budget.take():
                    return Verdict.WITHHELD
                # If no answer comes, the object may have been removed, so the removal stays counted.
                verdict = self._medium.remove_bad(suspect.key, stored)
                if verdict is not Verdict.REMOVED:
                    self._budget.give_back()
            except NotReadError as error:
                logger.debug("tier %s: page %s could not be examined: %s", self._tier, suspect.key.hex(), error)
                if time.monotonic() > begun + _SLOW_FAILURE:
                    break
                continue
            if verdict is not None:
                return verdict
        return Verdict.UNCLEAR

    def _log_verdict(self, suspect: _Suspect, verdict: Verdict) -> None:
        if verdict is Verdict.REMOVED:
            page = suspect.key.hex()
            logger.warning("tier %s: page %s was bad (%s) and is removed", self._tier, page, suspect.reason)
        elif verdict in _MESSAGES:
            self._log.log(logging.WARNING, verdict.value, _MESSAGES[verdict], self._tier)


_MESSAGES = {
    Verdict.GOOD: "tier %s: pages arrive damaged and are good in the pool: look at this machine's memory, network card "
    "and at what is between it and the pool",
    Verdict.DENIED: "tier %s: pages always arrive as the same bad bytes, and the store says that it has others: a "
    "cache on the way, or a disk that changed under the store? They stay; the next write replaces them",
}


def reason_to_refuse(key: bytes, stored: Stored) -> str | None:
    """Return why a stored object is not the page ``key``, whatever length its reader expected; None if it is the page,
    or if the bytes that were read do not decide it."""
    if stored.length < 0:
        return "type"
    try:
        page = envelope.decode_header(stored.data[: envelope.FIELDS_LENGTH])
    except FormatError as error:
        return error.reason
    if len(stored.data) == stored.length:
        # We write headers of the minimum length, but the format allows longer ones.
        place = page.header_length
        return envelope.reason_to_refuse(stored.data[:place], key, [stored.data[place:]])
    if page.key != key:
        return "identity" if page.identity != key[: envelope.IDENTITY_LENGTH] else "page_hash"
    return None if page.header_length + page.payload_length == stored.length else "payload_length"


class PoolStore(TierStore):
    """A TierStore on a medium that several servers reach over a network: cleared pages are hidden and swept
    (clearing.py), and a page that arrived damaged is removed as this module describes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._clearing = Clearing(name, self._part_of)
        self._bad_pages = BadPages(name, self.metrics, self)

    def _part_of(self, key: bytes) -> Hashable:
        """Return the ``part_of`` for ``Clearing``; the default is a single part."""

    # Both are called on the thread of ``BadPages``, and by ``remove_copies`` at the same time; never with a batch's
    # memory.

    @abc.abstractmethod
    def read_again(self, key: bytes, most: int) -> Stored | None:
        """Read the object, or its first ``most`` bytes, over a separate connection and into separate memory.

        Returns None if it is absent. Bounded by the tier's timeout. Raises NotReadError.
        """

    @abc.abstractmethod
    def remove_bad(self, key: bytes, bad: Stored) -> Verdict | None:
        """Remove the object if it is still ``bad``, comparing on the server if possible. Return REMOVED or DENIED, or
        None if the object has been replaced or is gone. Raises NotReadError."""

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        removed = 0
        for key, copy in copies.items():
            try:
                stored = self.read_again(key, LONGEST_EXAMINED)
                if stored is not None and envelope.seal_of(stored.data) == copy:
                    removed += self.remove_bad(key, stored) is Verdict.REMOVED
            except NotReadError as error:
                logger.debug("tier %s: page %s could not be removed: %s", self.name, key.hex(), error)
        return removed

    def wait_until_cleared(self, timeout: float) -> bool:
        """Wait until the cleared pages are removed; for tools and tests."""
        return self._clearing.wait(timeout)

    def wait_until_examined(self, timeout: float) -> bool:
        """Wait until the pages that arrived damaged have been examined; for tools and tests."""
        return self._bad_pages.wait(timeout)


def cut(length: int, at: float) -> Sequence[tuple[int, int]]:
    """Split ``length`` bytes into two pieces, at the fraction ``at`` of their first half, so that damage at a fixed
    offset of every reply hits another offset of the object. Nothing shorter than a header is split."""
    if length < envelope.FIELDS_LENGTH:
        return [(0, length)]
    place = 2 + int((length // 2 - 2) * at)
    return [(0, place), (place, length)]

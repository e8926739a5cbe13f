"""Hints: a decode node tells prefill nodes, over the pool itself, that a conversation's pages are in the pool.

The decode node has a short queue and a thread that posts hints on the board (``HintSender``); a prefill node polls the
board and has the pages fetched to its local tier (``HintReceiver``). docs/pd.md says what they are for. Their format

::

    "HXHINT1\\0"  scope (16)  milliseconds since 1970 (8)  number of pages (4)  page hashes (32 each)

Whoever can write to the pool can write a hint, so it is not trusted: every length is checked, and it only names pages
to look for under the reader's own identity.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from hicache_ext.page.identity import page_hash_bytes
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.abilities import HINTS_LAST, MOST_PAGES_OF_A_HINT, HintBoard

logger = logging.getLogger(__name__)

_MAGIC = b"HXHINT1\0"
_HEAD = struct.Struct("<8s16sQI")
_HASH_LENGTH = 32


def encode(scope: bytes, written: float, page_hashes: Sequence[bytes]) -> bytes:
    """Encode a hint that the first pages of a conversation are in the pool. ``scope``: model and page size,
    ``hint_scope`` of the sending backend; ``written``: seconds since 1970, by the writer's clock."""
    return _HEAD.pack(_MAGIC, scope, int(written * 1000), len(page_hashes)) + b"".join(page_hashes)


def decode(data: bytes) -> tuple[bytes, float, list[bytes]] | None:
    """Return scope, time, page hashes; None unless ``data`` is a hint of at most ``MOST_PAGES_OF_A_HINT`` pages."""
    if len(data) < _HEAD.size:
        return None
    magic, scope, milliseconds, pages = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 0 < pages <= MOST_PAGES_OF_A_HINT or len(data) != _HEAD.size + pages * _HASH_LENGTH:
        return None
    hashes = [data[first : first + _HASH_LENGTH] for first in range(_HEAD.size, len(data), _HASH_LENGTH)]
    return scope, milliseconds / 1000, hashes


_WAITING = 64
"""Limit of hints queued for a slow board; beyond it the oldest is dropped."""
_PAGES_AWAITED = 10.0
"""Seconds a hint waits for its pages to reach the pool; then it names only those that did."""
_PAUSE = 0.1

Board = Callable[[], HintBoard]
"""Returns the board of the current tiers; a reload may change it. Raises StoreError if there is none."""


class HintSender:
    """Sends hints on its own thread. ``announce`` never waits and may be called from any thread.

    ``metrics`` counts under ``hint``: sent, dropped (the queue was full), failed, absent (none of its pages reached
    the pool), too_long (more pages than a hint may name: it names the first ones).
    """

    def __init__(
        self,
        board: Board,
        scope: Callable[[], bytes],
        metrics: TierMetrics,
        in_pool: Callable[[Sequence[str]], int] = len,
    ) -> None:
        """``in_pool`` returns how many of these pages, from the first on, another node finds."""
        self._board = board
        self._scope = scope
        self._metrics = metrics
        self._in_pool = in_pool
        self._waiting: deque[tuple[float, Sequence[str]]] = deque(maxlen=_WAITING)
        self._log = LimitedLog(logger, 60.0)
        self._loop = BackgroundLoop("hicache-ext-hints", self._send_waiting)

    def announce(self, page_hashes: Sequence[str]) -> None:
        """Announce that a conversation's pages, from the first on, are in the pool. The sequence is read later."""
        if len(self._waiting) >= _WAITING:
            self._metrics.add("hint", "dropped")
        self._waiting.append((time.monotonic(), page_hashes))
        self._loop.wake()

    def close(self, timeout: float) -> None:
        """Drop queued hints and end the thread, unless a board holds it for longer than ``timeout``."""
        self._loop.stop(timeout)

    def _send_waiting(self) -> float:
        while self._waiting and not self._loop.stopping:
            announced, page_hashes = self._waiting.popleft()
            try:
                chosen = page_hashes[:MOST_PAGES_OF_A_HINT]
                present = self._in_pool(chosen)
                if present < len(chosen) and time.monotonic() - announced < _PAGES_AWAITED:
                    # Wait, because a tier may still be writing them in the background.
                    self._waiting.append((announced, page_hashes))
                    return _PAUSE
                self._send(chosen[:present], len(page_hashes))
            except Exception as error:  # noqa: BLE001 - whatever a store raises, the next hint may get through
                self._metrics.add("hint", "failed")
                self._log.log(logging.WARNING, "send", "hicache_ext: a hint was not sent: %s", error)
        return math.inf

    def _send(self, chosen: Sequence[str], announced: int) -> None:
        if not chosen:
            self._metrics.add("hint", "absent")
            return
        if announced > MOST_PAGES_OF_A_HINT:
            self._metrics.add("hint", "too_long")
        self._board().post_hint(encode(self._scope(), time.time(), list(map(page_hash_bytes, chosen))))
        self._metrics.add("hint", "sent")


class HintReceiver:
    """Polls for hints on one thread. A hint that is malformed, old, or of another model is counted and ignored.

    ``metrics`` counts ``hint`` received, malformed, stale, other_model; ``board`` failed; ``page`` present,
    fetched, absent, dropped.
    """

    def __init__(
        self,
        board: Board,
        bring_inward: Callable[[Sequence[bytes]], Mapping[str, int]],
        scope: Callable[[], bytes | None],
        interval: float,
    ) -> None:
        self._board = board
        self._bring_inward = bring_inward
        self._scope = scope
        self._interval = interval
        self.metrics = TierMetrics("hints", prefix="hints_")
        self._failures = LimitedLog(logger, 60.0)
        self._since: frozenset[str] | None = None
        """Position on the board after the last poll."""
        self._loop = BackgroundLoop("hicache-ext-hints", self._look)
        self._loop.wake(interval)

    def close(self, timeout: float) -> None:
        """End the thread, unless a store holds it for longer than ``timeout``."""
        self._loop.stop(timeout)

    def _look(self) -> float:
        try:
            self._since, hints = self._board().read_hints(self._since)
        except Exception as error:  # noqa: BLE001 - whatever a store raises, it may be back the next time
            logger.debug("hicache_ext: no hints: %s", error)
            self.metrics.add("board", "failed")
            return self._interval
        for hint in hints:
            if self._loop.stopping:
                break
            try:
                self._take(hint)
            except Exception as error:  # noqa: BLE001 - whatever a store raises, the next hint may be followed
                self.metrics.add("hint", "failed")
                self._failures.log(logging.ERROR, "follow", "hicache_ext: following a hint", exc_info=error)
        return self._interval

    def _take(self, data: bytes) -> None:
        if (hint := decode(data)) is None:
            self.metrics.add("hint", "malformed")
            return
        scope, written, page_hashes = hint
        if scope != self._scope():
            self.metrics.add("hint", "other_model")
        elif abs(time.time() - written) > HINTS_LAST:
            self.metrics.add("hint", "stale")
        else:
            self.metrics.add("hint", "received")
            self.metrics.add_many("page", self._bring_inward(page_hashes))

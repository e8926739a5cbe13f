"""The decode node's side of hints: a short queue and a thread that leaves them on the board."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from hicache_ext.page.identity import page_hash_bytes
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.hint_board import BoardLimits, HintBoard
from hicache_ext.storage.serving.hints.hint import Hint, encode

logger = logging.getLogger(__name__)

_WAITING = 64
"""Hints queued for a slow board; beyond that the oldest is dropped."""
_PAGES_AWAITED = 10.0
"""Seconds for which a hint waits until its pages are in the pool; then it names those that are."""
_PAUSE = 0.1

Board = Callable[[], HintBoard]
"""The board of the tiers in use; a reload may change it. Raises StoreError where there is none."""


class HintSender:
    """``announce`` never waits and may be called from any thread.

    Counted in ``metrics`` under ``hint``: sent, dropped (the queue was full), failed, absent (none of its pages came
    into the pool), too_long (more pages than a hint may name: it names the first ones).
    """

    def __init__(
        self,
        board: Board,
        scope: Callable[[], bytes],
        limits: BoardLimits,
        most_pages: int,
        metrics: TierMetrics,
        in_pool: Callable[[Sequence[bytes]], int] = len,
    ) -> None:
        """``in_pool``: how many of these pages, from the first on, another node finds."""
        self._board = board
        self._scope = scope
        self._limits = limits
        self._most_pages = most_pages
        self._metrics = metrics
        self._in_pool = in_pool
        self._waiting: deque[tuple[float, Sequence[str]]] = deque(maxlen=_WAITING)
        self._log = LimitedLog(logger, 60.0)
        self._loop = BackgroundLoop("hicache-ext-hints", self._send_waiting)

    def announce(self, page_hashes: Sequence[str]) -> None:
        """The pages of a conversation, from the first on, are in the pool. The sequence is read later."""
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
                chosen = tuple(page_hash_bytes(page_hash) for page_hash in page_hashes[: self._most_pages])
                present = self._in_pool(chosen)
                if present < len(chosen) and time.monotonic() - announced < _PAGES_AWAITED:
                    # On their way: a tier that is written in the background.
                    self._waiting.append((announced, page_hashes))
                    return _PAUSE
                self._send(chosen[:present], len(page_hashes))
            except Exception as error:  # noqa: BLE001 - whatever a store raises, the next hint may get through
                self._metrics.add("hint", "failed")
                self._log.log(logging.WARNING, "send", "hicache_ext: a hint was not sent: %s", error)
        return math.inf

    def _send(self, chosen: tuple[bytes, ...], announced: int) -> None:
        if not chosen:
            self._metrics.add("hint", "absent")
            return
        if announced > self._most_pages:
            self._metrics.add("hint", "too_long")
        self._board().post_hint(encode(Hint(self._scope(), time.time(), chosen)), self._limits)
        self._metrics.add("hint", "sent")

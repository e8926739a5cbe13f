"""The prefill node's side of hints: polls the board and has the pages fetched to the local tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.hint_board import BoardLimits
from hicache_ext.storage.serving.hints.hint import decode
from hicache_ext.storage.serving.hints.sender import Board

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 60.0

BringInward = Callable[[Sequence[bytes]], Mapping[str, int]]
"""Fetches the pages of these hashes to the local tier; returns how many were present, fetched, absent, dropped."""


class HintReceiver:
    """One thread. A hint that is malformed, old, or of another model is counted and ignored.

    Counted in ``metrics``: ``hint`` received, malformed, stale, other_model; ``board`` failed; ``page`` present,
    fetched, absent, dropped.
    """

    def __init__(
        self,
        board: Board,
        bring_inward: BringInward,
        scope: Callable[[], bytes | None],
        limits: BoardLimits,
        most_pages: int,
        interval: float,
    ) -> None:
        self._board = board
        self._bring_inward = bring_inward
        self._scope = scope
        self._limits = limits
        self._most_pages = most_pages
        self._interval = interval
        self.metrics = TierMetrics("hints", prefix="hints_")
        self._failures = LimitedLog(logger, _LOG_INTERVAL)
        self._last_log = time.monotonic()
        self._last_logged: dict[str, int] = {}
        self._since: frozenset[str] | None = None
        """What was on the board the last time."""
        self._loop = BackgroundLoop("hicache-ext-hints", self._look)
        self._loop.wake(interval)

    def close(self, timeout: float) -> None:
        """End the thread, unless a store holds it for longer than ``timeout``."""
        self._loop.stop(timeout)
        self._log()

    def _look(self) -> float:
        try:
            self._since, hints = self._board().read_hints(self._since, self._limits)
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
        if time.monotonic() - self._last_log >= _LOG_INTERVAL:
            self._log()
        return self._interval

    def _take(self, data: bytes) -> None:
        hint = decode(data, self._most_pages)
        if hint is None:
            self.metrics.add("hint", "malformed")
        elif hint.scope != self._scope():
            self.metrics.add("hint", "other_model")
        elif abs(time.time() - hint.written) > self._limits.lifetime:
            self.metrics.add("hint", "stale")
        else:
            self.metrics.add("hint", "received")
            self.metrics.add_many("page", self._bring_inward(hint.page_hashes))

    def _log(self) -> None:
        """One line with all counters, if any has changed since the last one."""
        self._last_log = time.monotonic()
        counters = {".".join(filter(None, key)): amount for key, amount in sorted(self.metrics.snapshot().items())}
        if counters != self._last_logged:
            self._last_logged = counters
            logger.info("hicache_ext: hints: %s", counters)

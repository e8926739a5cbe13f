"""The time that a decode node's offload takes on the scheduler thread."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 60.0


class Stopwatch:
    """Scheduler-thread seconds spent in the manager, by step with running requests; for either implementation."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.longest = 0.0
        self._this_step = 0.0
        self._requests = 0
        self._last_log = time.monotonic()

    def add(self, seconds: float, requests: int = 0) -> None:
        self._this_step += seconds
        self._requests += requests

    def step_ends(self) -> None:
        """Count a step in which requests advanced; turns of an idle scheduler do not count."""
        seconds, self._this_step = self._this_step, 0.0
        requests, self._requests = self._requests, 0
        if not requests:
            return
        self.steps += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        if time.monotonic() - self._last_log >= _LOG_INTERVAL:
            self._last_log = time.monotonic()
            self.log()

    def log(self) -> None:
        if self.steps:
            logger.info(
                "hicache_ext: decode offload took the scheduler %.1f us a step on average, %.1f us at most (%d steps)",
                self.seconds / self.steps * 1e6,
                self.longest * 1e6,
                self.steps,
            )

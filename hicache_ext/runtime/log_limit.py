"""Rate-limited log lines for problems that may occur a thousand times a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

_MOST_KINDS = 256


class LimitedLog:
    """Logs each kind of problem immediately, and again after ``pause`` seconds with the number of lines omitted since.

    Threads: any.
    """

    def __init__(
        self, logger: logging.Logger, pause: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._pause = pause
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}
        """Kind -> (time when it was last logged, lines left out since)."""

    def log(self, level: int, kind: str, message: str, *arguments: Any, exc_info: Any = None) -> bool:
        """Log the line unless one of its ``kind`` was logged recently; return whether it was logged."""
        now = self._clock()
        with self._lock:
            last, left_out = self._kinds.pop(kind, (-float("inf"), 0))
            due = now - last >= self._pause
            self._kinds[kind] = (now, 0) if due else (last, left_out + 1)
            if len(self._kinds) > _MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
        if due:
            if left_out:
                message, arguments = f"{message} (%d lines like this were left out)", (*arguments, left_out)
            self._logger.log(level, message, *arguments, exc_info=exc_info)
        return due

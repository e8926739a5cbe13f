"""flock between processes with a bound on the wait.

The holder may be stopped (SIGSTOP, freezer) or hang on its disk. A holder with much to do calls ``show_progress``;
others wait as long as it does, and ``PATIENCE`` seconds more.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

from hicache_ext.runtime.background import Backoff

logger = logging.getLogger(__name__)

PATIENCE = 90.0
"""Seconds without progress of the holder after which a start gives up. NFS shows an mtime up to 60 s late."""
_REPORTED_AFTER = 2.0
_ATTEMPTS = Backoff(0.001, 0.05)


def lock_within(fd: int, operation: int, patience: float, path: Path) -> None:
    """``fcntl.flock(fd, operation)`` on the open file ``path``, for ``patience`` seconds after the last progress.

    Raises TimeoutError with a sentence then, OSError as the file system does.
    """
    begun = seen = time.monotonic()
    last_sign, reported, attempts = _sign(fd), False, 0
    while not try_lock(fd, operation):
        now = time.monotonic()
        if (sign := _sign(fd)) != last_sign:
            last_sign, seen = sign, now
        if now - seen >= patience:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process has held {str(path)!r} for {now - begun:.0f} s and does nothing"
            )
        if not reported and now - begun >= min(_REPORTED_AFTER, patience / 4):
            reported = True
            logger.warning("waiting for %s, which another process holds", path)
        attempts += 1
        time.sleep(_ATTEMPTS.pause(attempts))


def try_lock(fd: int, operation: int) -> bool:
    """``fcntl.flock`` without waiting; False when another process holds it. Raises OSError for anything else."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def show_progress(fd: int) -> None:
    """Show those who wait for the lock on ``fd`` that its holder works. Raises OSError."""
    os.utime(fd)


def _sign(fd: int) -> int:
    return os.fstat(fd).st_mtime_ns

"""Who writes page files into a directory, by the names in its account and in tmp/, and who of them is gone.

A writer is named by the number of its member of the directory (runtime/members.py). Of any other name in the account,
which anybody with access to the directory may have written, only silence tells that it is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hicache_ext.runtime.file_systems import file_system_of

SILENCE = 600.0
"""Seconds without a sign of life."""


class Writers:
    """The writers of one directory. Thread-safe."""

    def __init__(self, path: Path, is_alive: Callable[[int], bool]) -> None:
        """``is_alive``: whether a member may be running."""
        self._is_alive = is_alive
        # Between machines locks hold only where the mount has them (NFS with nolock, Lustre with localflock do not).
        self._silence = 0.0 if file_system_of(path).local else SILENCE

    def is_gone(self, name: str, last_change: float) -> bool:
        """Whether the writer is not running any more. ``last_change``: its last sign of life, wall-clock time."""
        silent_for = time.time() - last_change
        if name.isascii() and name.isdecimal():
            return silent_for >= self._silence and not self._is_alive(int(name))
        return silent_for >= SILENCE

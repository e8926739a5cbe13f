"""Whether other machines have the pages of a tier.

A shared tier is the pool: what a decode node writes there is found by prefill nodes, it is slow enough to be fetched
ahead, and with a nearer tier before it it is written in the background (tier_use.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_ext.runtime.file_systems import file_system_of


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether other machines have the same pages, and why, for people."""

    shared: bool
    reason: str

    def __str__(self) -> str:
        return f"{'shared' if self.shared else 'private'} ({self.reason})"


def sharing_of_directories(paths: Sequence[str]) -> Sharing:
    """Of a tier whose pages may be in any of these directories: all of them must be shared. Asks no server."""
    found = [file_system_of(Path(path)) for path in paths]
    decisive = next((one for one in found if not one.shared), found[0])
    return Sharing(decisive.shared, decisive.reason)

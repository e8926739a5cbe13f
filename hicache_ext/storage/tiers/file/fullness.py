"""How full a file tier is, for those who watch it (storage/contract/reports.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fullness:
    """Of one path, all processes together. Bytes of disk."""

    capacity: int | None
    """None without a limit."""
    used: int
    """What pages take."""
    free: int
    """What can be written before something is evicted, or the disk is full."""
    pages: int


def gauges_of_paths(paths: Sequence[Fullness]) -> dict[str, float]:
    """Of several paths together; none at all hold nothing."""
    capacities = [path.capacity for path in paths]
    known = [capacity for capacity in capacities if capacity is not None]
    return {
        "capacity_bytes": float(sum(known)) if len(known) == len(capacities) else math.nan,
        "used_bytes": float(sum(path.used for path in paths)),
        "free_bytes": float(sum(path.free for path in paths)),
        "pages": float(sum(path.pages for path in paths)),
    }

"""How a tier moves its pages on one path: the mode of reads and of writes, and the number of threads.

``io: auto``: the page cache makes repeated reads fast and takes writes at the speed of memory. But a tier much larger
than memory finds little of itself in it and pushes out what the rest of the host keeps there. So a tier that fits into
a part of the free memory uses the page cache; a larger one goes past it, unless that was measured to be clearly slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hicache_ext.storage.tiers.file.device_probe import Measured, Mode

IoSetting = Literal["auto", "direct", "buffered"]

DEFAULT_THREADS = 4

_SHARE_OF_MEMORY = 1 / 4
"""A tier of at most this share of the free memory goes through the page cache."""
_CLEARLY_SLOWER = 0.7
_WORTH_A_THREAD = 0.8
"""The fewest threads that reach this share of the best rate are used: more cost CPU and gain nothing."""


@dataclass(frozen=True, slots=True)
class IoPlan:
    read: Mode = "buffered"
    write: Mode = "buffered"
    threads: int = DEFAULT_THREADS
    reason: str = "as configured"

    def __str__(self) -> str:
        modes = self.read if self.read == self.write else f"{self.read} reads, {self.write} writes"
        return f"{modes}, {self.threads} threads"


def choose_io(
    setting: IoSetting,
    capacity: int | None,
    threads: int | None,
    measured: Measured,
    *,
    direct_possible: bool,
    free_memory: int | None = None,
) -> IoPlan:
    """The plan for one path. ``capacity`` is that of the whole tier, ``threads`` None to choose.

    ``direct_possible``: whether this layout aligns its pages. The caller checks that "direct" works.
    """
    read: Mode = "buffered"
    write: Mode = "buffered"
    if setting == "direct":
        read = write = "direct"
        reason = "as configured"
    elif setting == "buffered":
        reason = "as configured"
    else:
        memory = memory_free() if free_memory is None else free_memory
        if capacity is not None and capacity <= memory * _SHARE_OF_MEMORY:
            reason = f"the tier fits into a part of the {memory / 1e9:.1f} GB of memory that is free"
        else:
            read, why_read = _past_the_cache(measured, "read", direct_possible)
            write, why_write = _past_the_cache(measured, "write", direct_possible)
            reason = f"larger than a part of the free memory; reads: {why_read}; writes: {why_write}"
    chosen = threads or _enough_threads(measured, read, write)
    return IoPlan(read, write, chosen, reason)


def memory_free() -> int:
    """Bytes that the page cache could take, of the machine or of this process's control group."""
    free = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit))
    except (OSError, ValueError):
        pass
    return free


def _past_the_cache(measured: Measured, direction: Literal["read", "write"], direct_possible: bool) -> tuple[Mode, str]:
    """The fastest mode that bypasses the page cache, or buffered where that is clearly faster; and why."""
    buffered = measured.rate(direction, "buffered")
    modes: tuple[Mode, ...] = ("dontcache", "direct") if direct_possible else ("dontcache",)
    rates = {mode: rate for mode in modes if (rate := measured.rate(direction, mode)) is not None}
    if buffered is None or not rates:
        return "buffered", "no other mode is known to work here"
    best = max(rates, key=lambda mode: rates[mode])
    figures = f"{best} {rates[best] / 1e9:.2f} GB/s, buffered {buffered / 1e9:.2f}"
    return ("buffered" if rates[best] < _CLEARLY_SLOWER * buffered else best), figures


def _enough_threads(measured: Measured, read: Mode, write: Mode) -> int:
    enough = [_fewest(measured.read.get(read)), _fewest(measured.write.get(write))]
    known = [threads for threads in enough if threads is not None]
    return max(known) if known else DEFAULT_THREADS


def _fewest(rates: dict[int, float] | None) -> int | None:
    if not rates or len(rates) < 2:
        return None
    best = max(rates.values())
    return min(threads for threads, rate in rates.items() if rate >= _WORTH_A_THREAD * best)

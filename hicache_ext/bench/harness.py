"""How every benchmark measures: interleaved rounds, statistics, a directory and a clock of its own.

A benchmark measures contenders in turns, so that a machine that becomes slower meanwhile makes all of them slower: each
round every contender once, the order rotated by one from round to round, the first round(s) thrown away.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_DELETE_ATTEMPTS = 50


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """What one contender did in one mode of one round. ``work`` in the mode's unit: bytes, or keys."""

    work: int
    seconds: float
    cpu_seconds: float
    """Of this process, user and system, all threads; without what the kernel does for it later (write-back)."""
    calls: tuple[float, ...]
    """Seconds of each call."""

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.seconds


@dataclass(slots=True)
class Stopwatch:
    """Collects one Sample call by call; what happens between the calls is not in it. For one thread."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    calls: list[float] = field(default_factory=list)

    @contextmanager
    def call(self) -> Iterator[None]:
        cpu = time.process_time()
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self.cpu_seconds += time.process_time() - cpu
        self.seconds += elapsed
        self.calls.append(elapsed)

    def sample(self, work: int) -> Sample:
        return Sample(work, self.seconds, self.cpu_seconds, tuple(self.calls))


def interleaved(contenders: Sequence[str], rounds: int, warm_up_rounds: int = 1) -> Iterator[tuple[int, str, bool]]:
    """(round, contender, whether it counts) in the order in which to measure; rounds are numbered from 1.

    The order of the contenders is rotated by one from round to round.
    """
    for number in range(1, warm_up_rounds + rounds + 1):
        shift = (number - 1) % len(contenders) if contenders else 0
        for contender in [*contenders[shift:], *contenders[:shift]]:
            yield number, contender, number > warm_up_rounds


class Clock:
    """Shares the time of a run among its points."""

    def __init__(self, seconds: float, points: int, now: Callable[[], float] = time.monotonic) -> None:
        """``seconds`` may be infinite."""
        self._now = now
        self._end = now() + seconds
        self._points = points
        self._until = 0.0

    def begin_point(self) -> None:
        now = self._now()
        self._until = now + max(0.0, self._end - now) / max(1, self._points)
        self._points -= 1

    @property
    def over(self) -> bool:
        """The point has had its share."""
        return self._now() >= self._until

    @property
    def run_over(self) -> bool:
        """The whole run has had its time."""
        return self._now() >= self._end


# -- statistics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median with the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        lower, median, upper = (float(value) for value in np.percentile(values, (25, 50, 75)))
        return cls(median, lower, upper)


@dataclass(frozen=True, slots=True)
class Summary:
    """Several rounds of one contender in one mode."""

    rounds: int
    rate: Quartiles
    """Work per second, over the rounds."""
    cpu_per_work: Quartiles
    """CPU seconds per unit of work, over the rounds."""
    call_p50: float
    call_p99: float
    """Seconds of a call, over all calls of all rounds."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Summary:
        p50, p99 = (float(value) for value in np.percentile([s for sample in samples for s in sample.calls], (50, 99)))
        return cls(
            rounds=len(samples),
            rate=Quartiles.of([sample.rate for sample in samples]),
            cpu_per_work=Quartiles.of([sample.cpu_seconds / sample.work for sample in samples]),
            call_p50=p50,
            call_p99=p99,
        )


def ratio(summary: Summary, base: Summary) -> float:
    """How many times as fast: above 1 is faster than ``base``. The ratio of the medians the table prints."""
    return summary.rate.median / base.rate.median


# -- the place of a run ------------------------------------------------------------------------------------------------


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """A new empty directory inside ``parent``, deleted at the end: no run finds what another has stored.

    Absolute, since the path of a tier has to be.
    """
    path = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=parent)).absolute()
    try:
        yield path
    finally:
        _delete(path)


def _delete(directory: Path) -> None:
    """Delete a directory in which an interrupted contender's thread may still be busy for a moment."""
    for _ in range(_DELETE_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.2)
    print(f"{directory} could not be deleted: please do", file=sys.stderr)


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

"""SIGSTOP and SIGCONT to workers at random moments, and how long the calls of the others took meanwhile.

A worker writes what it does into its ``Diary``, a mapped file that is there when the worker is killed, too. The time
for which a worker was stopped itself does not count: ``longest_calls`` takes it away.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hicache_ext.storage.contract.store import GetResult, SetResult
from tests.rigs.workers import Worker

LONGEST_CALL = 15.0
"""Seconds. Who waits for a stopped process waits 1 s, a call may wait a few times, and the machine is busy."""
LONG_STOP = 20.0
"""Seconds of some of the stops: who waits for as long as one of these is found by ``LONGEST_CALL``."""
_MOST_STOPPED = 2
"""Processes at a time: the others have to go on."""
_LONG_STOPS = 0.005
_LONG_STOPS_AMID_A_CHANGE = 0.05
_AIMED = 0.1
"""The share of the stops that are aimed at a change: one in about eighty meets one by chance."""
_SHOTS = 20
_WORTH_A_LINE = 0.25
"""Seconds of a call that is noted by itself."""
_LINES = 500

_KINDS = ("open", "get", "set", "contains", "count_leading", "remove", "clear", "close")
_RESULTS = (
    *(f"get {result.value}" for result in GetResult),
    *(f"set {result.value}" for result in SetResult),
)

Interval = tuple[float, float]
"""Two times of time.monotonic(), which all processes of a machine share."""


class Diary:
    """Of one worker: the results of its calls, the call under way, and the calls that took long."""

    def __init__(self, path: Path) -> None:
        lines = 2 + _LINES
        if not path.exists():
            path.write_bytes(bytes(8 * (len(_RESULTS) + 3 * lines)))
        everything: np.memmap = np.memmap(path, np.float64, "r+")
        self._counts = everything[: len(_RESULTS)]
        # Kind, begin, end. The first line has the number of the others, the second is the call under way.
        self._lines = everything[len(_RESULTS) :].reshape(lines, 3)

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """Around a call."""
        begun = time.monotonic()
        number = _KINDS.index(kind) + 1
        self._lines[1] = number, begun, 0
        try:
            yield
        finally:
            ended = time.monotonic()
            written = int(self._lines[0, 0])
            if ended - begun >= _WORTH_A_LINE and written < _LINES:
                self._lines[2 + written] = number, begun, ended
                self._lines[0, 0] = written + 1
            self._lines[1, 0] = 0

    def count(self, results: Sequence[GetResult] | Sequence[SetResult]) -> None:
        kind = "get" if results and isinstance(results[0], GetResult) else "set"
        for result in results:
            self.count_one(f"{kind} {result.value}")

    def count_one(self, name: str) -> None:
        self._counts[_RESULTS.index(name)] += 1

    def results(self) -> Counter[str]:
        """``get hit``, ``set stored`` and so on: how often, without those that did not occur."""
        return Counter({name: int(count) for name, count in zip(_RESULTS, self._counts, strict=True) if count})

    def longest_calls(self, stopped: Sequence[Interval] = (), until: float | None = None) -> dict[str, float]:
        """Seconds of the longest call of each kind that took long, less those in which the worker was stopped. A call
        under way counts until the time ``until``, by default until now."""
        longest: dict[str, float] = defaultdict(float)
        now = time.monotonic() if until is None else until
        begun_and_not_ended = [] if not self._lines[1, 0] else [(self._lines[1, 0], self._lines[1, 1], now)]
        ended = [tuple(line) for line in self._lines[2 : 2 + int(self._lines[0, 0])]]
        for number, begin, end in ended + begun_and_not_ended:
            kind = _KINDS[int(number) - 1]
            longest[kind] = max(longest[kind], end - begin - _overlap((begin, end), stopped))
        return {kind: seconds for kind, seconds in longest.items() if seconds >= _WORTH_A_LINE}


def _overlap(of: Interval, others: Sequence[Interval]) -> float:
    return sum(max(0.0, min(of[1], end) - max(of[0], begin)) for begin, end in others)


class Stopper:
    """A thread that stops workers for 0.1 to 4 seconds, a few for ``LONG_STOP``, until ``close``."""

    def __init__(self, seed: int, pause: float, is_changing: Callable[[], bool]) -> None:
        """``pause``: seconds between two stops, at most. ``is_changing``: whether somebody is amid a change that does
        not end; those stops hold up others, and are aimed at."""
        self._chance = random.Random(seed)
        self._pause = pause
        self._is_changing = is_changing
        self._lock = threading.Lock()
        self._among: list[Worker] = []
        self._until: dict[Worker, float] = {}
        self._stopped: dict[Worker, list[Interval]] = defaultdict(list)
        self.stops = self.stops_amid_a_change = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stopper")
        self._thread.start()

    def add(self, worker: Worker) -> None:
        with self._lock:
            self._among.append(worker)

    def kill(self, worker: Worker) -> None:
        """SIGKILL to one that may be stopped at this moment; it is stopped no more."""
        with self._lock:
            self._among.remove(worker)
            worker.kill()
            self._note_end(worker)

    def is_stopped(self, worker: Worker) -> bool:
        with self._lock:
            return worker in self._until

    def stopped(self, worker: Worker) -> list[Interval]:
        """When it was stopped, from and to."""
        with self._lock:
            now = time.monotonic()
            return [(begin, min(end, now)) for begin, end in self._stopped[worker]]

    def close(self) -> None:
        """Let all go on."""
        self._end.set()
        self._thread.join()
        with self._lock:
            for worker in list(self._until):
                self._let_go_on(worker)

    def _run(self) -> None:
        next_stop = 0.0
        while not self._end.wait(0.01):
            with self._lock:
                now = time.monotonic()
                for worker in [worker for worker, until in self._until.items() if until <= now]:
                    self._let_go_on(worker)
                if now >= next_stop and len(self._until) < _MOST_STOPPED:
                    self._stop_one()
                    next_stop = now + self._chance.random() * self._pause

    def _stop_one(self) -> None:
        running = [worker for worker in self._among if worker not in self._until]
        if not running:
            return
        worker = self._chance.choice(running)
        # Noted before it is stopped: that takes a moment in which it may or may not run.
        self._stopped[worker].append((time.monotonic(), float("inf")))
        amid_a_change = self._stopped_amid_a_change(worker)
        self.stops += 1
        self.stops_amid_a_change += amid_a_change
        long = self._chance.random() < (_LONG_STOPS_AMID_A_CHANGE if amid_a_change else _LONG_STOPS)
        self._until[worker] = time.monotonic() + (LONG_STOP if long else 0.1 + 3.9 * self._chance.random() ** 2)

    def _stopped_amid_a_change(self, worker: Worker) -> bool:
        """Stop it; whether it is amid a change."""
        if self._until and self._is_changing():
            # Another one is.
            worker.stop()
            return False
        for _ in range(_SHOTS if self._chance.random() < _AIMED else 1):
            worker.go_on()
            time.sleep(0.002 * self._chance.random())
            worker.stop()
            if self._is_changing():
                return True
        return False

    def _let_go_on(self, worker: Worker) -> None:
        worker.go_on()
        self._note_end(worker)

    def _note_end(self, worker: Worker) -> None:
        if self._until.pop(worker, None) is not None:
            begin, _ = self._stopped[worker][-1]
            self._stopped[worker][-1] = begin, time.monotonic()

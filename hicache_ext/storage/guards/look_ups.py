"""Look-ups of SGLang's scheduler, answered without the store where it takes too long: the exists budget.

Decode nodes look pages up on SGLang's scheduler thread, where a store that hangs would stop every request. There a
look-up runs on another thread. What is not known within the budget is answered as absent; what the look-up finds later
is kept for a few seconds for the next one.

Nothing remembers that a page is absent: SGLang asks for a chain again because somebody may have written it meanwhile,
and as often as it schedules, which no number of seconds here could follow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import leading
from hicache_ext.storage.contract.store import PageStore

logger = logging.getLogger(__name__)

_MOST_ENTRIES = 65536
"""About 10 MB."""
_FOUND_LIFE = 5.0
"""Seconds for which a found page is answered as present. A hint only: the read may still miss."""
_MOST_CALLS = 4
"""With so many calls left behind, further look-ups are answered from memory alone."""
_CLOSE_WAIT = 10.0


class RecentKeys:
    """Keys for which a look-up had one answer, for ``life`` seconds after it. Threads: any."""

    def __init__(self, life: float, clock: Callable[[], float]) -> None:
        self._life = life
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: dict[bytes, float] = {}
        """Key -> when it expires, in that order: all entries live equally long."""
        self._look_ups: list[set[bytes]] = []
        """For each look-up under way, the keys forgotten since it began: it may have looked before that."""

    def __len__(self) -> int:
        return len(self._ends)

    def known(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Which of the keys are remembered; None: not one."""
        with self._lock:
            # Keys that are numbers stay numbers as long as nothing is remembered.
            if not self._ends or self._ends.keys().isdisjoint(keys):
                return None
            now = self._clock()
            known = [self._ends.get(key, 0.0) > now for key in keys]
        return known if True in known else None

    @contextmanager
    def look_up(self) -> Iterator[set[bytes]]:
        """Around a look-up; what it yields is for ``remember``."""
        forgotten: set[bytes] = set()
        with self._lock:
            self._look_ups.append(forgotten)
        try:
            yield forgotten
        finally:
            with self._lock:
                # Compared by identity: two look-ups may hold equal sets.
                self._look_ups = [other for other in self._look_ups if other is not forgotten]

    def remember(self, keys: Iterable[bytes], forgotten: set[bytes]) -> None:
        """The answer of a look-up; but nothing of what was forgotten while it was under way."""
        now = self._clock()
        with self._lock:
            if not any(other is forgotten for other in self._look_ups):
                return  # everything was forgotten meanwhile
            for key in keys:
                if key not in forgotten:
                    self._ends.pop(key, None)
                    self._ends[key] = now + self._life
            while self._ends:
                oldest = next(iter(self._ends))
                if len(self._ends) <= _MOST_ENTRIES and self._ends[oldest] > now:
                    break
                del self._ends[oldest]

    def forget(self, keys: Sequence[bytes]) -> None:
        """The answer may be another one now."""
        with self._lock:
            if self._ends:
                for key in keys:
                    self._ends.pop(key, None)
            for forgotten in self._look_ups:
                forgotten.update(keys)

    def forget_all(self) -> None:
        with self._lock:
            self._ends.clear()
            self._look_ups.clear()


class ExistsBudget:
    """Answers the scheduler's look-ups within ``budget`` seconds. Threads: any."""

    def __init__(self, store: PageStore, budget: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._budget = budget
        self.threads = ThreadPool(f"hicache-{store.name}-exists")
        self.found = RecentKeys(_FOUND_LIFE, clock)

    def contains(self, keys: Sequence[bytes], ask: Callable[[list[bytes]], list[bool]]) -> list[bool]:
        known = self._known(keys)
        asked = [key for key, present in zip(keys, known, strict=True) if not present]
        if asked and self._ends_in_time(lambda: [k for k, there in zip(asked, ask(asked), strict=True) if there]):
            known = self._known(keys)
        return known

    def count_leading(self, keys: Sequence[bytes], count: Callable[[list[bytes]], int]) -> int:
        known = leading(self._known(keys))
        asked = list(keys[known:])
        if asked and self._ends_in_time(lambda: asked[: count(asked)]):
            known = leading(self._known(keys))
        return known

    def close(self) -> None:
        if self.threads.close(_CLOSE_WAIT):
            words = "hicache_ext: tier %s: a look-up hangs in the store; its thread ends with it"
            logger.warning(words, self._store.name)

    def _known(self, keys: Sequence[bytes]) -> list[bool]:
        return self.found.known(keys) or [False] * len(keys)

    def _ends_in_time(self, find: Callable[[], list[bytes]]) -> bool:
        """Remember what ``find`` finds, on another thread; whether that ended within the budget."""

        def look() -> None:
            try:
                with self.found.look_up() as forgotten:
                    self.found.remember(find(), forgotten)
            except StoreClosedError:
                pass  # the store was closed during the look-up
            except Exception as error:  # noqa: BLE001 - nobody may be waiting for it any more
                logger.warning("hicache_ext: tier %s: a look-up raised %r", self._store.name, error)

        if self.threads.left_behind >= _MOST_CALLS:
            self._store.metrics.add("exists_budget", "busy")
            return False
        try:
            call = self.threads.start(look)
        except RuntimeError:
            return False
        if call.ended_within(self._budget):
            return True
        self._store.metrics.add("exists_budget", "exceeded")
        return False

"""A tier whose calls are measured for the pull rule, and that is not asked where no answer could pay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_ext.runtime.linear_cost import LinearCost
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore
from hicache_ext.storage.contract.wrapper import DelegatingStore

_COUNTED = (GetResult.HIT, GetResult.TIMEOUT, GetResult.ERROR)

WorthAsking = Callable[[], bool]
"""Whether a look-up can pay."""


@dataclass(slots=True)
class LookUp:
    """The outcome of one thread's look-ups."""

    found: int = 0
    """Keys found."""
    not_asked: int = 0
    """Keys not looked up, because reading them would not have paid."""


class MeasuredStore(DelegatingStore):
    """``inner``, measured: ``read_cost`` in bytes, ``look_up_cost`` in keys.

    ``ask_only_if`` holds for the calling thread's look-ups until ``take_look_up``; all other calls reach ``inner``.
    """

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.read_cost = LinearCost()
        self.look_up_cost = LinearCost()
        self._of_thread = threading.local()
        self._last_probe = -float("inf")

    def get(self, batch: PageBatch) -> list[GetResult]:
        started = time.perf_counter()
        results = self.inner.get(batch)
        seconds = time.perf_counter() - started
        # A failed read counts as if it had delivered: the next one may take as long.
        counted = [size for size, result in zip(batch.sizes, results, strict=True) if result in _COUNTED]
        if counted:
            self.read_cost.observe(sum(counted), seconds)
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if not self._is_worth_asking(len(keys)):
            return [False] * len(keys)
        started = time.perf_counter()
        known = self.inner.contains(keys)
        self._note(len(keys), time.perf_counter() - started, sum(known))
        return known

    def count_leading(self, keys: Sequence[bytes]) -> int:
        if not self._is_worth_asking(len(keys)):
            return 0
        started = time.perf_counter()
        leading = self.inner.count_leading(keys)
        self._note(len(keys), time.perf_counter() - started, leading)
        return leading

    def probed(self) -> None:
        """A background measurement begins."""
        self._last_probe = time.monotonic()

    def age(self) -> float:
        """Seconds since the last measurement or attempt."""
        return min(self.read_cost.age(), time.monotonic() - self._last_probe)

    def ask_only_if(self, worth_asking: WorthAsking) -> None:
        """For the next look-ups of this thread: while ``worth_asking`` is False, keys count as absent."""
        self._of_thread.worth_asking = worth_asking
        self._of_thread.look_up = LookUp()

    def take_look_up(self) -> LookUp:
        """The outcome of this thread's look-ups since ``ask_only_if``; ends its condition."""
        self._of_thread.worth_asking = None
        look_up: LookUp = getattr(self._of_thread, "look_up", LookUp())
        self._of_thread.look_up = LookUp()
        return look_up

    def found_so_far(self) -> int:
        """Keys found by this thread's look-ups since ``ask_only_if``."""
        look_up: LookUp | None = getattr(self._of_thread, "look_up", None)
        return 0 if look_up is None else look_up.found

    def _is_worth_asking(self, keys: int) -> bool:
        worth_asking: WorthAsking | None = getattr(self._of_thread, "worth_asking", None)
        if worth_asking is None or worth_asking():
            return True
        self._of_thread.look_up.not_asked += keys
        return False

    def _note(self, keys: int, seconds: float, found: int) -> None:
        self.look_up_cost.observe(keys, seconds)
        look_up: LookUp | None = getattr(self._of_thread, "look_up", None)
        if look_up is not None:
            look_up.found += found

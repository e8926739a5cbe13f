"""Writing in the background: pages are copied out of host memory into a bounded queue, and a thread writes them.

A queue belongs to a tier (tier_handle.py) and lives as long as it does. Each tier has two: of pages that SGLang stored
in it with the policy ``async``, which wait while the tier refuses or is out; and of pages to be promoted to it, which
do not wait, since the tier that they came from has them still.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.background import BackgroundLoop, Backoff
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import PageBatch, SetResult, counted
from hicache_ext.storage.tiering.background_work import StillWanted, always

if TYPE_CHECKING:
    from hicache_ext.storage.tiering.tier_handle import TierHandle

logger = logging.getLogger(__name__)

_PAGES_AT_ONCE = 64
_REFUSED = Backoff(0.05, 1.0)
"""Seconds before pages that a tier did not take are offered to it again."""
_FORGOTTEN_AT_ONCE = 1000
_COPIED_AT_ONCE = 16 << 20
"""Bytes of a batch that take their space, and are copied, before others have their turn."""
_MOST_REFUSALS = 3
"""How often a tier may answer REJECTED for a page while it stores others: it never takes it, and it is dropped."""
_FIRST_SPACE_WAIT, _SHORTEST_SPACE_WAIT, _LONGEST_SPACE_WAIT = 1.0, 0.25, 5.0
"""Seconds for which an offer waits for space while nothing leaves the queue: twice what the last batch took."""
_QUEUED = {SetResult.STORED: "queued", SetResult.EXISTS: "waiting", SetResult.REJECTED: "dropped"}
_LONGEST_WAIT = 600.0
"""Seconds after its first refusal at which a page is dropped: it must not take the place of others for ever."""


class WriteBehind:
    """Pages to be written to one tier, in order, each key once. Thread-safe. Its thread starts with the first page.

    Counted in the metrics of the tier under the name of the queue: ``dropped_pages``, the levels ``queue_pages`` and
    ``queue_bytes``; in a queue that does not wait, event ``promotion``: queued, waiting (was queued already),
    dropped (queue full, or cleared meanwhile), and then stored, exists or failed. A store that opens late changes its
    metrics then, so they are asked for each time.
    """

    def __init__(self, tier: TierHandle, capacity: int, *, queue: str, waits: bool) -> None:
        """``waits``: pages that the tier refuses stay and are offered to it again."""
        self._tier = tier
        self.capacity = capacity
        """Bytes of payload, for offers that begin from now on. What waits stays, also above a smaller one."""
        self._queue = queue
        self._waits = waits
        self.before_batch: Callable[[], None] = lambda: None
        """Called before each batch is taken; may wait."""
        self._condition = threading.Condition()
        self._waiting: dict[bytes, bytes] = {}
        """Key -> payload, oldest first, including the batch under way."""
        self._bytes = 0
        self._under_way: set[bytes] = set()
        self._refused: dict[bytes, tuple[float, int]] = {}
        """Since when the tier refuses a page, and how often it did while it took others."""
        self._refusals_in_a_row = 0
        self._batches_taken = 0
        self._space_wait = _FIRST_SPACE_WAIT
        self._stalled = False
        """An offer has waited in vain: nobody waits again until the tier has taken something."""
        self._closing = False
        self._deadline = 0.0
        self._loop = BackgroundLoop(f"hicache-{queue}-{tier.name}", self._write_waiting)
        self._log = LimitedLog(logger, 60.0)

    def __len__(self) -> int:
        return len(self._waiting)

    def declare(self) -> None:
        """The queue is in use: its levels are there from now on."""
        with self._condition:
            self._publish_levels()

    def offer(self, batch: PageBatch, positions: Iterable[int], still_wanted: StillWanted = always) -> list[SetResult]:
        """Copy the pages at ``positions`` into the queue: STORED, EXISTS (queued already) or REJECTED (no space, or
        cleared since ``still_wanted``).

        Waits for space only while the tier takes pages: a batch may be larger than the queue, and would always lose its
        end. Of a tier that refuses or hangs it does not wait, but for the moment in which that shows, once.
        """
        batch = batch.select(positions)
        keys, sizes, buffers = list(batch.keys), batch.sizes, list(batch.buffers)
        results = [SetResult.REJECTED] * len(keys)
        done = 0
        while done < len(keys):
            reserved: list[int] = []
            held = 0
            with self._condition:
                for at in range(done, len(keys)):
                    key, size = keys[at], sizes[at]
                    if held >= _COPIED_AT_ONCE:
                        break
                    if key not in self._waiting and self._bytes + size > self.capacity:
                        if reserved:
                            # The queue moves only with what is in it.
                            break
                        self._wait_for_space(size)
                    if key in self._waiting:
                        results[at] = SetResult.REJECTED if key in self._tier.hidden else SetResult.EXISTS
                    elif not self._closing and self._bytes + size <= self.capacity:
                        self._bytes += size
                        held += size
                        reserved.append(at)
                    done = at + 1
            # Outside the lock: clear() and look-ups must not wait while a batch is copied.
            try:
                payloads = [b"".join(buffers[at]) for at in reserved]
            except BaseException:
                with self._condition:
                    self._bytes -= held
                    self._condition.notify_all()
                raise
            with self._condition:
                digests = {keys[at][:IDENTITY_LENGTH] for at in reserved}
                cleared = {digest for digest in digests if not still_wanted(digest)}
                hidden = self._tier.hidden
                for at, payload in zip(reserved, payloads, strict=True):
                    key = keys[at]
                    unwanted = self._closing or key in hidden or key[:IDENTITY_LENGTH] in cleared
                    if unwanted or key in self._waiting:
                        self._bytes -= len(payload)
                        results[at] = SetResult.REJECTED if unwanted else SetResult.EXISTS
                    else:
                        self._waiting[key] = payload
                        results[at] = SetResult.STORED
                if SetResult.STORED in results:
                    self._loop.wake()
                self._publish_levels()
        if not self._waits:
            counts = {word: results.count(result) for result, word in _QUEUED.items() if result in results}
            self._tier.metrics.add_many("promotion", counts)
        if dropped := results.count(SetResult.REJECTED):
            self._tier.metrics.add("dropped_pages", self._queue, dropped)
        return results

    def _wait_for_space(self, size: int) -> None:
        """While the queue moves. The condition is held."""
        capacity = self.capacity
        if not self._waits or size > capacity:
            return
        taken, deadline = self._batches_taken, time.monotonic() + self._space_wait
        while self._bytes + size > capacity and not (self._closing or self._stalled or self._refusals_in_a_row):
            self._loop.wake()
            self._publish_levels()
            self._condition.wait(max(0.0, deadline - time.monotonic()))
            if self._batches_taken != taken:
                taken, deadline = self._batches_taken, time.monotonic() + self._space_wait
            elif time.monotonic() >= deadline:
                self._stalled = True

    def payload(self, key: bytes) -> bytes | None:
        """The page, while it is queued."""
        return self._waiting.get(key)

    def forget(self, wanted: Callable[[bytes], bool]) -> set[bytes]:
        """Drop the pages whose keys are ``wanted``; of those that are being written the store is rid afterwards.
        Returns the keys of both."""
        with self._condition:
            keys = list(self._waiting)
        chosen: set[bytes] = set()
        for first in range(0, len(keys), _FORGOTTEN_AT_ONCE):
            # In portions: others wait for the lock. What comes meanwhile came after.
            with self._condition:
                some = {key for key in keys[first : first + _FORGOTTEN_AT_ONCE] if key in self._waiting and wanted(key)}
                self._tier.hide(some & self._under_way)
                self._drop(some - self._under_way)
            chosen |= some
        with self._condition:
            self._publish_levels()
            self._condition.notify_all()
        return chosen

    def is_writing(self, keys: Iterable[bytes]) -> bool:
        """Whether one of these is on its way to the store."""
        with self._condition:
            return not self._under_way.isdisjoint(keys)

    def wait_until_written(self, timeout: float) -> bool:
        """Whether the queue became empty within ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting, timeout)

    def go_on(self) -> None:
        """The tier may take pages again."""
        if self._waiting:
            self._loop.wake()

    def close(self, deadline: float, longest: float) -> None:
        """Write until ``deadline``, drop and count the rest, end the thread, at ``longest`` in any case (both
        time.monotonic()). Idempotent."""
        with self._condition:
            if not self._closing:
                self._closing = True
                self._deadline = deadline
            self._condition.notify_all()
        self._loop.wake()
        self.wait_until_written(max(0.0, self._deadline - time.monotonic()))
        self._loop.stop(max(0.0, longest - time.monotonic()))
        with self._condition:
            if self._waiting:
                words = "hicache_ext: tier %s: %d pages that waited to be written (%s) were dropped at the end"
                logger.warning(words, self._tier.name, len(self._waiting), self._queue)
                self._tier.metrics.add("dropped_pages", self._queue, len(self._waiting))
            self._waiting.clear()
            self._refused.clear()
            self._bytes = 0
            self._publish_levels()
            self._condition.notify_all()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _write_waiting(self) -> float:
        """Until nothing waits, the tier refuses, or close() has waited long enough: when to come back."""
        while True:
            with self._condition:
                if not self._waiting or (self._closing and time.monotonic() > self._deadline):
                    return math.inf
                closing = self._closing
            if not closing:
                self.before_batch()
            with self._condition:
                # A clear() hides what is under way, and only that: it is one step with the look whether there is one.
                if not self._tier.may_write():
                    return _REFUSED.first
                keys = [key for key, _ in zip(self._waiting, range(_PAGES_AT_ONCE), strict=False)]
                self._under_way = set(keys)
                batch = PageBatch(keys, [[memoryview(self._waiting[key])] for key in keys])
            if keys and not self._write(batch):
                return _REFUSED.limit(self._refusals_in_a_row)

    def _write(self, batch: PageBatch) -> bool:
        """Whether the tier has taken some of the pages, or all that it did not take are dropped."""
        begun = time.monotonic()
        try:
            results = one_for_each(self._tier.write_queued(batch), len(batch))
        except Exception as error:  # noqa: BLE001 - a store that breaks its promise is a store that failed
            words = "hicache_ext: tier %s: writing %d queued pages (%s) raised %r"
            facts = self._tier.name, len(batch), self._queue, error
            self._log.log(logging.WARNING, "raised", words, *facts, exc_info=error)
            results = [SetResult.ERROR] * len(batch)
        if not self._waits:
            written = Counter(result.value if result.durable else "failed" for result in results)
            self._tier.metrics.add_many("promotion", written)
        with self._condition:
            self._under_way.clear()
            # EXISTS says nothing: a tier that takes no pages may have some of them.
            taken = SetResult.STORED in results
            dropped = self._settle(batch.keys, results, taken)
            waits = not taken and any(key in self._waiting for key in batch.keys)
            if taken:
                self._refusals_in_a_row = 0
            elif waits or dropped:
                self._refusals_in_a_row += 1
            if taken or not (waits or dropped):
                self._batches_taken += 1
                self._stalled = False
                seconds = 2 * (time.monotonic() - begun)
                self._space_wait = min(max(_SHORTEST_SPACE_WAIT, seconds), _LONGEST_SPACE_WAIT)
            self._publish_levels()
            self._condition.notify_all()
        if dropped:
            self._tier.metrics.add("dropped_pages", f"{self._queue}_failed", dropped)
        if waits:
            answers = ", ".join(f"{count} {result}" for result, count in counted(results).items())
            words = "hicache_ext: tier %s takes no pages (%s); %d wait for it"
            self._log.log(logging.WARNING, "waits", words, self._tier.name, answers, len(self._waiting))
        return not waits

    def _settle(self, keys: Sequence[bytes], results: Sequence[SetResult], taken: bool) -> int:
        """What becomes of each page of a batch; how many were dropped. The condition is held."""
        now = time.monotonic()
        dropped = 0
        there = (SetResult.STORED, SetResult.EXISTS, SetResult.REFUSED)
        # Those of a write that ended after close() do not wait any more.
        waiting = [(key, result) for key, result in zip(keys, results, strict=True) if key in self._waiting]
        self._drop([key for key, result in waiting if result in there or key in self._tier.hidden])
        for key, result in waiting:
            if key not in self._waiting:
                continue
            since, refusals = self._refused.get(key, (now, 0))
            refusals += taken and result is SetResult.REJECTED
            self._refused[key] = since, refusals
            if not self._waits or refusals >= _MOST_REFUSALS or now - since > _LONGEST_WAIT:
                self._drop([key])
                dropped += 1
            else:
                # Behind the others: a page that the tier never takes must not be in their way.
                self._waiting[key] = self._waiting.pop(key)
        return dropped

    def _drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._bytes -= len(self._waiting.pop(key))
            self._refused.pop(key, None)

    def _publish_levels(self) -> None:
        self._tier.metrics.set_level("queue_pages", self._queue, len(self._waiting))
        self._tier.metrics.set_level("queue_bytes", self._queue, self._bytes)

"""A tier in use, with all the background work that is done for it while it is in use.

Reloads change the order of the tiers; what waits for a tier belongs to its handle and survives the reload:
  - the queue of pages to be written to it, and the queue of pages to be promoted to it (``WriteBehind``);
  - administration: a thread of the handle carries out clear() and register_identity() in order, and retries until they
    succeed; no guard refuses them. The caller need not wait: what is being cleared is hidden from this process;
  - removals: pages whose write was in flight when they were cleared or removed are hidden, and removed again once their
    write has ended, until the store confirms that they are gone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hicache_ext.errors import StoreClosedError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.page_object import scatter
from hicache_ext.runtime.background import RETRY, BackgroundLoop, Backoff, Retry
from hicache_ext.runtime.call_deadline import must_answer_at_once
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.threads import call_within
from hicache_ext.storage.contract.base import leading, one_for_each
from hicache_ext.storage.contract.store import (
    DelegatingStore,
    GetResult,
    PageBatch,
    PageStore,
    SetResult,
    StoreInfo,
    counted,
)
from hicache_ext.storage.tiering.background_work import StillWanted, always, of_identities
from hicache_ext.storage.tiering.tier_use import TieringSettings

if TYPE_CHECKING:
    from hicache_ext.config import TierConfig
    from hicache_ext.storage.tiering.admission import Admission, AdmissionSettings

logger = logging.getLogger(__name__)

ADMINISTRATION_WAIT = 2.0
"""Seconds that clear(), to report what the store had, and register_identity() wait for the store. On SGLang's scheduler
they don't wait."""
_RETRY_PAUSES = Backoff(0.1, 5.0)
_WRITE_POLL = 0.01
"""Seconds before hidden pages whose writes are in flight are checked again."""
_UNKNOWN = ("error", "timeout", "rejected", "failure")
"""Events that a store counts when it does not know whether it has a page."""


@dataclass(eq=False, slots=True)
class Work:
    """One administrative task."""

    carry_out: Callable[[PageStore], int | None]
    clears: bool = False
    digests: set[bytes] | None = None
    """Identities of a clear() that are absent until it is done; None: all."""
    done: threading.Event = field(default_factory=threading.Event)
    answer: int = 0


class TierHandle(DelegatingStore):
    """A PageStore: the tier with its queues and pending work. Threads: any."""

    config: TierConfig
    """Current configuration of the tier, if it was opened from one."""

    def __init__(
        self, store: PageStore, *, bare: PageStore | None = None, settings: TieringSettings | None = None
    ) -> None:
        """``store``: the tier with its wrappers; ``bare``: the tier without. Owns both."""
        super().__init__(store)
        self.bare = bare if bare is not None else store
        self._lock = threading.Lock()
        self.hidden: frozenset[bytes] = frozenset()
        """Pages whose write was in flight when they were cleared or removed: absent until they are removed again."""
        self._work: list[Work] = []
        """Pending tasks. The list and the identities of a clear() are replaced as a whole: calls read them unlocked."""
        self._current: Work | None = None
        """The task that the thread is carrying out."""
        self._closed = False
        self._log = LimitedLog(logger, 60.0)
        self.admission: Admission | None = None
        """Decides which pages are written; None: all."""
        self._settings = settings = settings or TieringSettings()
        self.writes = WriteBehind(self, settings.store_buffer, queue="async", waits=True)
        self.promotions = WriteBehind(self, settings.promotion_buffer, queue="promotion", waits=False)
        self._loop = BackgroundLoop(f"hicache-{store.name}-admin", self._administer_and_remove, _RETRY_PAUSES)

    def admit_by(self, settings: AdmissionSettings | None) -> None:
        """Admit pages by ``settings`` from now on. If they are unchanged, what admission has learnt stays."""
        if settings is None:
            self.admission = None
        elif self.admission is None or self.admission.settings != settings:
            from hicache_ext.storage.tiering.admission import Admission

            self.admission = Admission(settings, self)

    def describe(self) -> StoreInfo:
        info = super().describe()
        if self.admission is None:
            return info
        how = "learned" if self.admission.settings.learned else "within the budget"
        return replace(info, details={**info.details, "admission": how})

    def configure(self, settings: TieringSettings) -> None:
        self._settings = settings
        self.writes.capacity, self.promotions.capacity = settings.store_buffer, settings.promotion_buffer

    # -- pages -----------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = self._get(batch)
        if (admission := self.admission) is not None:
            admission.read(batch.keys, results)
        return results

    def _get(self, batch: PageBatch) -> list[GetResult]:
        if not self._has_pending_work():
            return self.inner.get(batch)
        results, asked, found = [GetResult.MISS] * len(batch), [], 0
        here, buffers = self._queued_and_hidden(batch.keys), list(batch.buffers)
        for position, (key, payload, is_hidden, is_cleared) in enumerate(here):
            if is_hidden or (payload is None and is_cleared):
                continue
            if payload is None:
                asked.append(position)
            elif len(payload) != batch.sizes[position]:
                self.writes.forget({key}.__contains__)
                results[position] = GetResult.CORRUPT
            else:
                scatter(memoryview(payload), buffers[position])
                results[position] = GetResult.HIT
                found += 1
        batch.move_at(asked, self.inner.get, results)
        self.metrics.add("get", "hit", found)
        return results

    def _queued_and_hidden(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes | None, bool, bool]]:
        """Return each key with its payload if it is queued, whether the store's page of that key is being removed, and
        whether a clear() of it is in progress."""
        # The queue first: a page that leaves it meanwhile is in the store.
        queued = [(key, self.writes.payload(key)) for key in keys]
        hidden = self.hidden
        clears = [work.digests for work in self._work if work.clears]
        everything = None in clears
        cleared = frozenset().union(*[digests for digests in clears if digests is not None])
        if clears and not self._loop.running:
            # No thread could be started when the clear() began.
            self._loop.wake()
        return [(key, load, key in hidden, everything or key[:IDENTITY_LENGTH] in cleared) for key, load in queued]

    def set(self, batch: PageBatch) -> list[SetResult]:
        """Write now. A page that is queued EXISTS; one that is being cleared or removed is REJECTED."""
        admission = self.admission
        return self._set(batch) if admission is None else admission.write(batch, self._set)

    def _set(self, batch: PageBatch) -> list[SetResult]:
        if not self._has_pending_work():
            return self._write(batch)
        here = self._queued_and_hidden(batch.keys)
        away = [is_hidden or is_cleared for _, _, is_hidden, is_cleared in here]
        results = [SetResult.REJECTED if gone else SetResult.EXISTS for gone in away]
        absent = [at for at, (_, payload, _, _) in enumerate(here) if payload is None and not away[at]]
        batch.move_at(absent, self._write, results)
        return results

    def _write(self, batch: PageBatch) -> list[SetResult]:
        results = self.inner.set(batch)
        return results if (admission := self.admission) is None else admission.written(batch, results)

    def set_later(self, batch: PageBatch, still_wanted: StillWanted = always) -> list[SetResult]:
        """Write in the background. STORED means that this process finds the page from now on."""
        if self._closed:
            raise StoreClosedError(self.name)
        if (admission := self.admission) is None:
            return self.writes.offer(batch, still_wanted)
        return admission.write(batch, lambda wanted: self.writes.offer(wanted, still_wanted))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if not self._has_pending_work():
            return self.inner.contains(keys)
        here = self._queued_and_hidden(keys)
        stored = self.inner.contains(keys)
        return [
            not is_hidden and (payload is not None or (known and not is_cleared))
            for (_, payload, is_hidden, is_cleared), known in zip(here, stored, strict=True)
        ]

    def count_leading(self, keys: Sequence[bytes]) -> int:
        if not self._has_pending_work():
            return self.count_leading_stored(keys)
        return leading(self.contains(keys))

    def count_leading_stored(self, keys: Sequence[bytes]) -> int:
        """Count the leading run that other processes find: without the pages queued in this one."""
        return self.inner.count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        wanted = set(keys)
        here = self.writes.forget(wanted.__contains__) | self.promotions.forget(wanted.__contains__)
        self._hide_late_writes(wanted.__contains__)
        if not here:
            return self.inner.remove(keys)
        # A page that was both queued and in the store counts once.
        asked = list(dict.fromkeys(keys))
        present = self.inner.contains(asked)
        self.inner.remove(asked)
        return sum(known or key in here for key, known in zip(asked, present, strict=True))

    def _has_pending_work(self) -> bool:
        """Return whether the store's answer must be corrected for pending work. Needs no lock: pages leave a queue only
        once the store has them."""
        return bool(self.hidden or self._clears or len(self.writes) or self._closed)

    @property
    def _clears(self) -> bool:
        """Whether a clear() is pending or in progress."""
        return any(work.clears for work in self._work)

    # -- administration --------------------------------------------------------------------------------------------

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        self.wait_for(self.begin_register(digest, document))

    def begin_register(self, digest: bytes, document: dict[str, Any]) -> Work:
        """Start to register an identity. Does not wait."""
        return self._enqueue(Work(lambda store: store.register_identity(digest, document)))

    def clear(self, digests: Sequence[bytes] | None) -> int:
        return self.wait_for(self.begin_clear(digests))

    def begin_clear(self, digests: Sequence[bytes] | None) -> Work:
        """Hide these identities from this process and queue their removal from the store. Does not wait."""
        wanted = of_identities(digests)
        self._hide_late_writes(wanted)
        queued = self.writes.forget(wanted) | self.promotions.forget(wanted)

        def clear(store: PageStore) -> int:
            # Once the clear() has begun, no identities are merged into it any more.
            return store.clear(None if work.digests is None else list(work.digests))

        work = Work(clear, clears=True, digests=None if digests is None else set(digests))
        # Queued pages are dropped from the queue, not from the store; pages in both are counted once.
        work.answer = len({key[:IDENTITY_LENGTH] for key in queued})
        return self._enqueue(work)

    def wait_for(self, work: Work, deadline: float | None = None) -> int:
        """Return the answer as known by ``deadline`` (time.monotonic()); on SGLang's scheduler, immediately."""
        if not must_answer_at_once():
            work.done.wait(ADMINISTRATION_WAIT if deadline is None else max(0.0, deadline - time.monotonic()))
        return work.answer

    def _enqueue(self, work: Work) -> Work:
        with self._lock:
            if self._closed:
                raise StoreClosedError(self.name)
            last = self._work[-1] if self._work else None
            if last is not None and last is not self._current and last.clears and work.clears:
                # Merge it into one that has not begun: clears of a tier that hangs must not pile up.
                if last.digests is None or work.digests is None:
                    last.digests = None
                else:
                    last.digests = last.digests | work.digests
                last.answer = max(last.answer, work.answer)
                work = last
            else:
                self._work = [*self._work, work]
        if not self._loop.wake() and not must_answer_at_once():
            # No thread could be started: carry it out here, slowly, rather than never.
            self._administer()
        return work

    def _administer_and_remove(self) -> float | Retry | None:
        return self._administer() or self._remove_hidden()

    def _administer(self) -> Retry | None:
        """Carry out pending tasks in order. One that fails is retried before those behind it begin."""
        while self._work:
            with self._lock:
                work = self._current = self._work[0]
            try:
                answer = work.carry_out(self.inner) or 0
            except StoreClosedError:
                answer = 0
            except Exception as error:  # noqa: BLE001 - a store that breaks its promise is asked again
                with self._lock:
                    self._current = None
                words = "hicache_ext: tier %s: a clear() or a new identity is tried again: %r"
                self._log.log(logging.WARNING, "administration", words, self.name, error)
                return RETRY
            with self._lock:
                work.answer = max(work.answer, answer)
                self._work, self._current = self._work[1:], None
            work.done.set()
            self.writes.resume()
        return None

    # -- for the queues --------------------------------------------------------------------------------------------

    def write_queued(self, batch: PageBatch) -> list[SetResult]:
        """Write pages to the store. May raise [the queue's thread]."""
        return self._write(batch)

    def may_write(self) -> bool:
        """Return whether pages may be written now: not while a clear() that came before them is in progress."""
        return not self._clears

    def hide(self, keys: Iterable[bytes]) -> None:
        """Hide pages whose write is in flight; they are removed again after the write."""
        with self._lock:
            before = len(self.hidden)
            self.hidden = self.hidden.union(keys)
            more = len(self.hidden) > before
        if more:
            self._loop.wake()

    # -- removals --------------------------------------------------------------------------------------------------

    def _hide_late_writes(self, wanted: Callable[[bytes], bool]) -> None:
        """Hide pages that may still reach the store although their writes were answered TIMEOUT."""
        self.hide([key for key in self.being_written() if wanted(key)])

    def _remove_hidden(self) -> float | Retry | None:
        """Remove the hidden pages whose writes have ended."""
        hidden = list(self.hidden)
        queues = (self.writes, self.promotions)
        ended = [key for key in hidden if not any(queue.is_writing([key]) for queue in queues)]
        # Checked after the queues: the guards may have left behind a write that was still in a queue then.
        late = self.being_written()
        ended = [key for key in ended if key not in late]
        if ended and not self._is_gone(ended):
            return RETRY
        with self._lock:
            self.hidden = self.hidden.difference(ended)
            left = bool(self.hidden)
        return _WRITE_POLL if left else None

    def _is_gone(self, keys: list[bytes]) -> bool:
        """Remove pages; return whether the store knows that they are gone. It counts an event if it doesn't know."""
        try:
            before = self._unknown()
            self.inner.remove(keys)
            present = self.inner.contains(keys)
        except StoreClosedError:
            return True
        except Exception as error:  # noqa: BLE001 - a store that breaks its promise is asked again
            logger.debug("hicache_ext: tier %s: removing pages raised %r", self.name, error)
            return False
        return not any(present) and self._unknown() == before

    def _unknown(self) -> int:
        return sum(self.metrics.total(event) for event in _UNKNOWN)

    # -- the end ---------------------------------------------------------------------------------------------------

    def wait_until_written(self, timeout: float) -> bool:
        """Return whether all work pending for this tier was done within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for queue in (self.writes, self.promotions):
            if not queue.wait_until_written(max(0.0, deadline - time.monotonic())):
                return False
        while self.hidden or self._work:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def end_by(self, drain: float, longest: float) -> None:
        """Close: write what is queued until ``drain``, and return at ``longest`` at the latest (time.monotonic())."""
        self.writes.close(drain, longest)
        self.promotions.close(drain, longest)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        while (self._work or self.hidden) and time.monotonic() < drain:
            time.sleep(0.001)
        self._loop.stop(max(0.0, longest - time.monotonic()))
        if self._work or self.hidden:
            logger.warning("hicache_ext: tier %s: closed before everything cleared was removed from it", self.name)
        left = max(0.0, longest - time.monotonic())
        try:
            call = call_within(left, f"hicache-{self.name}-close", self.inner.close)
        except RuntimeError:
            self.inner.close()
            return
        if call is None:
            logger.warning("hicache_ext: tier %s did not close in time; its threads end with it", self.name)
        else:
            call.result()

    def close(self) -> None:
        drain = time.monotonic() + self._settings.drain
        self.end_by(drain, drain + 1.0)


# -- queued pages ------------------------------------------------------------------------------------------------------
#
# Pages are copied out of host memory into a bounded queue, and a thread writes them. Each tier has two queues: one of
# pages that SGLang stored in it with the policy ``async``, which wait while the tier refuses or is down; and one of
# pages to be promoted to it, which do not wait, because the tier that they came from still has them.


_BATCH_PAGES = 64
_REFUSED = Backoff(0.05, 1.0)
"""Seconds before pages that a tier did not take are offered to it again."""
_FORGET_CHUNK = 1000
_GATHER_TIME = 0.01
"""Seconds from the first page of an empty queue until writing begins, while the rest is still being copied."""
_MOST_REFUSALS = 3
"""Number of REJECTED answers for a page, while others are stored, after which the page is dropped."""
_FIRST_SPACE_WAIT, _SHORTEST_SPACE_WAIT, _LONGEST_SPACE_WAIT = 1.0, 0.25, 5.0
"""Seconds an offer waits for space while nothing leaves the queue: twice the duration of the last batch."""
_QUEUED = {SetResult.STORED: "queued", SetResult.EXISTS: "waiting", SetResult.REJECTED: "dropped"}
_LONGEST_WAIT = 600.0
"""Seconds after its first refusal at which a page is dropped: it must not take the place of others forever."""


class WriteBehind:
    """Pages to be written to one tier, in order, each key once. Thread-safe. Its thread starts with the first page.

    The tier's metrics count under the name of the queue: ``dropped_pages``, the levels ``queue_pages`` and
    ``queue_bytes``; in a queue that does not wait, event ``promotion``: queued, waiting (was queued already),
    dropped (queue full, or cleared meanwhile), and then stored, exists or failed. The metrics object is looked up each
    time, because a store that opens late replaces it.
    """

    def __init__(self, tier: TierHandle, capacity: int, *, queue: str, waits: bool) -> None:
        """``waits``: whether pages that the tier refuses stay queued and are offered to it again."""
        self._tier = tier
        self.capacity = capacity
        """Bytes of payload. A new value applies to offers that begin later; pages already queued above it stay."""
        self._queue = queue
        self._waits = waits
        self.before_batch: Callable[[], None] = lambda: None
        """Called before each batch is taken from the queue; may wait."""
        self._condition = threading.Condition()
        self._waiting: dict[bytes, bytes] = {}
        """Key -> payload, oldest first, including the batch in flight."""
        self._bytes = 0
        self._under_way: set[bytes] = set()
        self._refused: dict[bytes, tuple[float, int]] = {}
        """Key -> time of the first refusal, and number of refusals while the tier took other pages."""
        self._refusals_in_a_row = 0
        self._space_wait = _FIRST_SPACE_WAIT
        self._space_deadline = 0.0
        """Time (time.monotonic()) after which nobody waits for space, until the tier takes a page again."""
        self._closing = False
        self._deadline = 0.0
        self._loop = BackgroundLoop(f"hicache-{queue}-{tier.name}", self._write_waiting)
        self._log = LimitedLog(logger, 60.0)

    def __len__(self) -> int:
        return len(self._waiting)

    def declare(self) -> None:
        """Publish the levels of the queue, which is in use from now on."""
        with self._condition:
            self._publish_levels()

    def offer(self, batch: PageBatch, still_wanted: StillWanted) -> list[SetResult]:
        """Copy pages into the queue: STORED, EXISTS (queued already) or REJECTED (no space, or cleared since
        ``still_wanted``).

        Waits for space only while the tier takes pages: a batch larger than the queue would otherwise always lose its
        end. For a tier that refuses or hangs it waits only once, until that shows.
        """
        pages = zip(batch.keys, batch.sizes, batch.buffers, strict=True)
        results = [self._offer(key, size, segments, still_wanted) for key, size, segments in pages]
        if SetResult.STORED in results:
            self._loop.wake()
        with self._condition:
            self._publish_levels()
        if not self._waits:
            counts = {word: results.count(result) for result, word in _QUEUED.items() if result in results}
            self._tier.metrics.add_many("promotion", counts)
        if dropped := results.count(SetResult.REJECTED):
            self._tier.metrics.add("dropped_pages", self._queue, dropped)
        return results

    def _offer(self, key: bytes, size: int, segments: Sequence[memoryview], still_wanted: StillWanted) -> SetResult:
        with self._condition:
            refusal = self._refusal(key, size)
        if refusal is not None:
            return refusal
        # Outside the lock, because clear() and look-ups must not wait while a page is copied.
        payload = b"".join(segments)
        with self._condition:
            if (refusal := self._refusal(key, size)) is not None:
                return refusal
            if not still_wanted(key[:IDENTITY_LENGTH]):
                return SetResult.REJECTED
            if not self._waiting:
                self._space_deadline = time.monotonic() + self._space_wait
                self._loop.wake(_GATHER_TIME)
            self._waiting[key] = payload
            self._bytes += size
            return SetResult.STORED

    def _refusal(self, key: bytes, size: int) -> SetResult | None:
        """Return the result of a page that is not to be queued, else None. The condition is held."""
        if key not in self._waiting and self._bytes + size > self.capacity:
            self._wait_for_space(size)
        if key in self._waiting:
            return SetResult.REJECTED if key in self._tier.hidden else SetResult.EXISTS
        if self._closing or self._bytes + size > self.capacity or key in self._tier.hidden:
            return SetResult.REJECTED
        return None

    def _wait_for_space(self, size: int) -> None:
        """Wait for ``size`` bytes while the queue moves. The condition is held."""
        capacity = self.capacity
        if not self._waits or size > capacity:
            return
        while self._bytes + size > capacity and not (self._closing or self._refusals_in_a_row):
            if (left := self._space_deadline - time.monotonic()) <= 0:
                return
            self._loop.wake()
            self._publish_levels()
            self._condition.wait(left)

    def payload(self, key: bytes) -> bytes | None:
        """Return the payload of a queued page, else None."""
        return self._waiting.get(key)

    def forget(self, wanted: Callable[[bytes], bool]) -> set[bytes]:
        """Drop the pages whose keys are ``wanted``; remove those whose write is in flight from the store afterwards.
        Return the keys of both."""
        with self._condition:
            keys = list(self._waiting)
        chosen: set[bytes] = set()
        for first in range(0, len(keys), _FORGET_CHUNK):
            # In chunks, because others wait for the lock. Pages queued meanwhile came after this call and stay.
            with self._condition:
                some = {key for key in keys[first : first + _FORGET_CHUNK] if key in self._waiting and wanted(key)}
                self._tier.hide(some & self._under_way)
                self._drop(some - self._under_way)
            chosen |= some
        with self._condition:
            self._publish_levels()
            self._condition.notify_all()
        return chosen

    def is_writing(self, keys: Iterable[bytes]) -> bool:
        """Return whether a write of one of these is in flight."""
        with self._condition:
            return not self._under_way.isdisjoint(keys)

    def wait_until_written(self, timeout: float) -> bool:
        """Return whether the queue became empty within ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting, timeout)

    def resume(self) -> None:
        """Write again: the tier may take pages now."""
        if self._waiting:
            self._loop.wake()

    def close(self, deadline: float, longest: float) -> None:
        """Write until ``deadline``, drop and count the rest, and end the thread by ``longest`` (both
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
        """Write until the queue is empty, the tier refuses, or the deadline passes; return seconds to the next run."""
        while True:
            with self._condition:
                if not self._waiting or (self._closing and time.monotonic() > self._deadline):
                    return math.inf
                closing = self._closing
            if not closing:
                self.before_batch()
            with self._condition:
                # A clear() hides exactly the batch in flight, so check for one and mark the batch under the same lock.
                if not self._tier.may_write():
                    return _REFUSED.first
                keys = [key for key, _ in zip(self._waiting, range(_BATCH_PAGES), strict=False)]
                self._under_way = set(keys)
                batch = PageBatch(keys, [[memoryview(self._waiting[key])] for key in keys])
            if keys and not self._write(batch):
                return _REFUSED.limit(self._refusals_in_a_row)

    def _write(self, batch: PageBatch) -> bool:
        """Write a batch; return whether the tier has taken some of it, or none of it is queued any more."""
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
            # EXISTS is no evidence: a tier that takes no pages may have some of them.
            taken = SetResult.STORED in results
            dropped = self._settle(batch.keys, results, taken)
            waits = not taken and any(key in self._waiting for key in batch.keys)
            if taken:
                self._refusals_in_a_row = 0
            elif waits or dropped:
                self._refusals_in_a_row += 1
            if taken or not (waits or dropped):
                now = time.monotonic()
                self._space_wait = min(max(_SHORTEST_SPACE_WAIT, 2 * (now - begun)), _LONGEST_SPACE_WAIT)
                self._space_deadline = now + self._space_wait
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
        """Drop or keep each page of a batch by its result; return how many were dropped. The condition is held."""
        now = time.monotonic()
        dropped = 0
        there = (SetResult.STORED, SetResult.EXISTS, SetResult.REFUSED)
        # Pages of a write that ended after close() are no longer queued.
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
                # To the end of the queue: a page that the tier never takes must not block the others.
                self._waiting[key] = self._waiting.pop(key)
        return dropped

    def _drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._bytes -= len(self._waiting.pop(key))
            self._refused.pop(key, None)

    def _publish_levels(self) -> None:
        self._tier.metrics.set_level("queue_pages", self._queue, len(self._waiting))
        self._tier.metrics.set_level("queue_bytes", self._queue, self._bytes)

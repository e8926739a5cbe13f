"""The deadline guard: no call takes longer than its timeout, and what comes late touches no host page.

For stores that cannot end a call themselves (a hung NFS mount, a client library that waits). The call runs on another
thread, with memory of the guard (bounce.py) in place of SGLang's host pages: a read is copied into the host pages only
if it ended in time; a write goes out from a copy. A late call is left behind and keeps its piece of that memory until
it ends. When too many calls are left behind, or they hold too much, further calls are REJECTED at once.
Reasons and cost: docs/decisions/time-limits-of-calls.md.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from hicache_ext.errors import NotBegunError, StoreClosedError, StoreSetupError, TooLateError
from hicache_ext.page.page_object import gather, scatter
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.wrapper import DelegatingStore
from hicache_ext.storage.guards.bounce import BounceMemory, Lease

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_STUCK_CALLS = 8
"""Calls left behind at which further ones are refused: each holds a thread."""
_PORTIONS = 4
"""A batch takes at most this part of the bounce memory at once, so that several calls can have some."""


class DeadlineStore(DelegatingStore):
    """Ends each call of ``inner`` within ``timeout`` seconds, or within its own shorter limit. Threads: any."""

    def __init__(self, inner: PageStore, timeout: float, bounce_memory: int) -> None:
        """``bounce_memory``: bytes. A larger page is REJECTED. Raises StoreSetupError if it cannot be had."""
        super().__init__(inner)
        self._timeout = timeout
        try:
            self._bounce = BounceMemory(bounce_memory)
        except (OSError, OverflowError, ValueError) as error:
            raise StoreSetupError(
                inner.name, f"guards.bounce_memory ({bounce_memory} bytes) is not to be had: {error}", ["set less"]
            ) from error
        self._threads = ThreadPool(f"hicache-{inner.name}-deadline")
        self._calls = CallGate(inner.name)
        self._being_written: dict[int, PageBatch] = {}
        """Writes under way, and those left behind."""
        self._reported_too_large = False

    def being_written(self) -> set[bytes]:
        """Pages whose write may still reach the store, also after its caller was answered TIMEOUT."""
        return {key for batch in list(self._being_written.values()) for key in batch.keys}

    def is_writing(self, keys: Collection[bytes]) -> bool:
        return bool(self._being_written) and not self.being_written().isdisjoint(keys)

    @property
    def stuck_calls(self) -> int:
        """Calls that were left behind and have not ended."""
        return self._threads.left_behind

    # -- pages -----------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self._moved("get", batch, self._get_portion, GetResult.TIMEOUT, GetResult.REJECTED)

    def _get_portion(self, wanted: PageBatch, deadline: float) -> list[GetResult]:
        lease = self._lease(wanted, deadline)
        bounced = PageBatch(wanted.keys, _cut(lease.memory, wanted.sizes))
        answers = self._answered(lambda: self.inner.get(bounced), deadline, lease, [GetResult.ERROR] * len(wanted))
        for answer, segments, (source,) in zip(answers, wanted.buffers, bounced.buffers, strict=True):
            if answer is GetResult.HIT:
                scatter(source, segments)
        self._bounce.give_back(lease)
        return answers

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._moved("set", batch, self._set_portion, SetResult.TIMEOUT, SetResult.REJECTED)

    def _set_portion(self, given: PageBatch, deadline: float) -> list[SetResult]:
        lease = self._lease(given, deadline)
        bounced = PageBatch(given.keys, _cut(lease.memory, given.sizes))
        for segments, (target,) in zip(given.buffers, bounced.buffers, strict=True):
            gather(segments, target)

        def write() -> list[SetResult]:
            try:
                return self.inner.set(bounced)
            finally:
                del self._being_written[id(bounced)]

        self._being_written[id(bounced)] = bounced
        try:
            answers = self._answered(write, deadline, lease, [SetResult.ERROR] * len(given))
        except NotBegunError:
            del self._being_written[id(bounced)]
            raise
        self._bounce.give_back(lease)
        return answers

    def _moved(
        self,
        call: str,
        batch: PageBatch,
        move_portion: Callable[[PageBatch, float], list[T]],
        timed_out: T,
        rejected: T,
    ) -> list[T]:
        results = [timed_out] * len(batch)
        with self._calls:
            deadline = call_deadline(self._timeout)
            try:
                for portion in self._portions(batch, results, rejected):
                    for position, answer in zip(portion, move_portion(batch.select(portion), deadline), strict=True):
                        results[position] = answer
            except TooLateError:
                self._count("timeout", call, results.count(timed_out))
            except NotBegunError:
                results = [rejected if result is timed_out else result for result in results]
                self._count("rejected", "stuck", results.count(rejected))
        return results

    def _portions(self, batch: PageBatch, results: list[T], too_large: T) -> Iterator[list[int]]:
        """Positions, cut so that each portion fits its part of the bounce memory."""
        limit = self._bounce.size // _PORTIONS
        portion: list[int] = []
        filled = 0
        for position, size in enumerate(batch.sizes):
            if size > self._bounce.size:
                results[position] = too_large
                self._say_too_large(size)
                continue
            if portion and filled + size > limit:
                yield portion
                portion, filled = [], 0
            portion.append(position)
            filled += size
        if portion:
            yield portion

    def _lease(self, batch: PageBatch, deadline: float) -> Lease:
        lease = self._bounce.take(sum(batch.sizes), deadline)
        if lease is None:
            raise TooLateError if time.monotonic() >= deadline else NotBegunError
        return lease

    # -- everything else -------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        asked = list(keys)
        return self._answer("contains", lambda: self.inner.contains(asked), [False] * len(asked))

    def count_leading(self, keys: Sequence[bytes]) -> int:
        asked = list(keys)
        return self._answer("count_leading", lambda: self.inner.count_leading(asked), 0)

    def remove(self, keys: Sequence[bytes]) -> int:
        asked = list(keys)
        return self._answer("remove", lambda: self.inner.remove(asked), 0)

    # clear() and register_identity() are carried out past the guards, on a thread of their own (tier_handle.py).

    def close(self) -> None:
        """Waits for calls under way, the store's own close() included, for at most ``timeout`` seconds."""
        if not self._calls.shut():
            return
        deadline = time.monotonic() + self._timeout
        try:
            self._ended(self.inner.close, deadline, most_stuck=None)
        except (TooLateError, NotBegunError):
            logger.warning("hicache_ext: tier %s: did not close within %g s", self.name, self._timeout)
        left = self._threads.close(max(0.0, deadline - time.monotonic()))
        if left:
            logger.warning(
                "hicache_ext: tier %s: %d calls hang in the store; their threads end with them", self.name, left
            )

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _answer(self, call: str, work: Callable[[], T], otherwise: T) -> T:
        with self._calls:
            try:
                return self._ended(work, call_deadline(self._timeout))
            except TooLateError:
                self._count("timeout", call)
            except NotBegunError:
                self._count("rejected", "stuck")
            except StoreClosedError:
                raise
            except Exception as error:  # noqa: BLE001 - a store that breaks its promise is a store that failed
                self._say_raised(error)
            return otherwise

    def _answered(self, work: Callable[[], list[T]], deadline: float, lease: Lease, otherwise: list[T]) -> list[T]:
        """The results of a transfer through ``lease``, ``otherwise`` if it raised; the caller gives the lease back.

        Raises TooLateError and NotBegunError, which settle the lease, and StoreClosedError.
        """
        try:
            return one_for_each(self._ended(work, deadline, lease), len(otherwise))
        except (TooLateError, NotBegunError):
            raise
        except StoreClosedError:
            self._bounce.give_back(lease)
            raise
        except Exception as error:  # noqa: BLE001 - a store that breaks its promise is a store that failed
            self._say_raised(error)
            return otherwise

    def _ended(
        self,
        work: Callable[[], T],
        deadline: float,
        lease: Lease | None = None,
        *,
        most_stuck: int | None = MOST_STUCK_CALLS,
    ) -> T:
        """What ``work`` returns or raises, if it ends by ``deadline``; else TooLateError or NotBegunError."""

        def end_late() -> None:
            if lease is not None:
                self._bounce.give_back(lease, stuck=True)
            self._count("late", "")

        try:
            if most_stuck is not None and self.stuck_calls >= most_stuck:
                raise NotBegunError
            try:
                # The context carries the limit of this call.
                call = self._threads.start(functools.partial(contextvars.copy_context().run, work), end_late)
            except RuntimeError:
                raise NotBegunError from None
        except NotBegunError:
            if lease is not None:
                self._bounce.give_back(lease)
            raise
        if call.ended_within(deadline - time.monotonic()):
            return call.result()
        if lease is not None:
            # The call may end between the lines above and this: both sides only add and subtract.
            self._bounce.mark_stuck(lease)
        raise TooLateError

    def _say_raised(self, error: Exception) -> None:
        self._count("error", "raised")
        logger.warning("hicache_ext: tier %s: a call raised %r", self.name, error)

    def _say_too_large(self, size: int) -> None:
        self._count("rejected", "bounce_memory")
        if not self._reported_too_large:
            self._reported_too_large = True
            logger.warning(
                "hicache_ext: tier %s: a page of %d bytes is larger than guards.bounce_memory (%d); it is refused",
                self.name,
                size,
                self._bounce.size,
            )

    def _count(self, event: str, reason: str, amount: int = 1) -> None:
        if amount:
            self.metrics.add(event, reason, amount)


def _cut(memory: memoryview, sizes: Sequence[int]) -> list[list[memoryview]]:
    """One segment of ``memory`` per page."""
    pages = []
    offset = 0
    for size in sizes:
        pages.append([memory[offset : offset + size]])
        offset += size
    return pages

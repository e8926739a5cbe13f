"""The deadline guard: no call takes longer than its limit, and what comes late touches no host page.

For stores that cannot end a call themselves (a hung NFS mount, a client library that waits). The call runs on another
thread, with *bounce memory* of the guard in place of SGLang's host pages: a read is copied into the host pages only if
it ended in time; a write goes out from a copy. A late call is left behind and keeps its piece of that memory until it
ends. When too many calls are left behind, or they hold too much, further calls are REJECTED immediately.
Reasons and cost: docs/decisions/guards.md.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hicache_ext.errors import NotBegunError, StoreClosedError, TooLateError
from hicache_ext.page.page_object import gather, scatter
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.threads import ThreadPool, call_within
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.transforming.page_memory import Lease, LentMemory
from hicache_ext.storage.guards.time_limits import Call

logger = logging.getLogger(__name__)

R = TypeVar("R", GetResult, SetResult)
T = TypeVar("T")

MOST_STUCK_CALLS = 8
"""Calls left behind at which further ones are refused: each holds a thread."""
_PORTIONS = 4
"""A batch takes at most this part of the bounce memory at a time, so that several calls can have some."""


class Deadline:
    """Ends each call of ``store`` by its own deadline. Threads: any."""

    def __init__(self, store: PageStore, bounce_memory: int) -> None:
        """``bounce_memory``: bytes for all calls under way; a page that is larger waits until they have ended."""
        self._store = store
        self.bounce = LentMemory(bounce_memory)
        self._portion = bounce_memory // _PORTIONS
        self._threads = ThreadPool(f"hicache-{store.name}-deadline")
        self._calls = CallGate(store.name)
        self._being_written: dict[int, PageBatch] = {}
        """Writes under way, and those left behind."""

    def being_written(self) -> set[bytes]:
        """Pages whose write may still reach the store, also after its caller was answered TIMEOUT."""
        return {key for batch in list(self._being_written.values()) for key in batch.keys}

    @property
    def stuck_calls(self) -> int:
        """Calls that were left behind and have not ended."""
        return self._threads.left_behind

    def answer(self, call: Call, work: Callable[[], T], otherwise: T) -> T:
        """What ``work`` returns or raises; ``otherwise`` if it does not end in time."""
        with self._calls:
            try:
                return self._ended(work, call.deadline)
            except TooLateError:
                self._count("timeout", call.name)
            except NotBegunError:
                self._count("rejected", "stuck")
            return otherwise

    def transfer(self, call: Call, batch: PageBatch, move: Callable[[PageBatch], list[R]], kind: type[R]) -> list[R]:
        """``move`` of the batch over bounce memory, portion by portion; what did not end in time is TIMEOUT."""
        results = [kind.TIMEOUT] * len(batch)
        with self._calls:
            try:
                for portion in self._portions_of(batch.sizes):
                    try:
                        answers = self._transfer_portion(call, batch.select(portion), move)
                    except (TooLateError, NotBegunError, StoreClosedError):
                        raise
                    except Exception as error:
                        # A store that breaks its promise loses no page but those of this portion.
                        if len(portion) == len(batch):
                            raise
                        logger.warning("hicache_ext: tier %s: a part of a call raised %r", self._store.name, error)
                        self._store.metrics.add("error", "raised")
                        answers = [kind.ERROR] * len(portion)
                    for position, answer in zip(portion, answers, strict=True):
                        results[position] = answer
            except TooLateError:
                self._count("timeout", call.name, results.count(kind.TIMEOUT))
            except NotBegunError:
                results = [kind.REJECTED if result is kind.TIMEOUT else result for result in results]
                self._count("rejected", "stuck", results.count(kind.REJECTED))
        return results

    def close(self, close_store: Callable[[], None], seconds: float) -> None:
        """Waits for calls under way, the store's own close() included, for at most ``seconds``."""
        if not self._calls.shut():
            return
        name, deadline = self._store.name, time.monotonic() + seconds
        try:
            closing = call_within(seconds, f"hicache-{name}-close", close_store)
        except RuntimeError:
            closing = None
        if closing is None:
            logger.warning("hicache_ext: tier %s: did not close within %g s", name, seconds)
        left = self._threads.close(max(0.0, deadline - time.monotonic()))
        if left:
            logger.warning("hicache_ext: tier %s: %d calls hang in the store; their threads end with them", name, left)
        if closing is not None:
            closing.result()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _transfer_portion(self, call: Call, given: PageBatch, move: Callable[[PageBatch], list[R]]) -> list[R]:
        with self._lent(given, call.deadline) as (lease, bounced):
            if call.name == "set":
                for segments, (target,) in zip(given.buffers, bounced.buffers, strict=True):
                    gather(segments, target)
                self._being_written[id(bounced)] = bounced

            def carry_out() -> list[R]:
                try:
                    return move(bounced)
                finally:
                    self._being_written.pop(id(bounced), None)

            try:
                answers = self._ended(carry_out, call.deadline, lease)
            except NotBegunError:
                self._being_written.pop(id(bounced), None)
                raise
            if call.name == "get":
                read: list[Any] = answers
                for answer, segments, (source,) in zip(read, given.buffers, bounced.buffers, strict=True):
                    if answer is GetResult.HIT:
                        scatter(source, segments)
            return answers

    def _portions_of(self, sizes: Sequence[int]) -> Iterator[Sequence[int]]:
        """Positions, cut so that each portion fits its part of the bounce memory."""
        first, filled = 0, 0
        for position, size in enumerate(sizes):
            if filled and filled + size > self._portion:
                yield range(first, position)
                first, filled = position, 0
            filled += size
        if first < len(sizes):
            yield range(first, len(sizes))

    @contextmanager
    def _lent(self, batch: PageBatch, deadline: float) -> Iterator[tuple[Lease, PageBatch]]:
        """A piece of bounce memory, and the batch over it, a segment for each page."""
        lease = self.bounce.take(batch.sizes, deadline)
        if lease is None:
            raise TooLateError if time.monotonic() >= deadline else NotBegunError
        try:
            yield lease, PageBatch(batch.keys, [[piece] for piece in lease.pieces], batch.sizes)
        finally:
            if not lease.in_use:
                self.bounce.give_back(lease)

    def _ended(self, work: Callable[[], T], deadline: float, lease: Lease | None = None) -> T:
        """What ``work`` returns or raises, if it ends by ``deadline``; else TooLateError or NotBegunError."""

        def end_late() -> None:
            if lease is not None:
                self.bounce.give_back(lease, stuck=True)
            self._count("late", "")

        if self.stuck_calls >= MOST_STUCK_CALLS:
            raise NotBegunError
        try:
            # The context carries the deadline of this call.
            running = self._threads.start(functools.partial(contextvars.copy_context().run, work), end_late)
        except RuntimeError:
            raise NotBegunError from None
        if lease is not None:
            lease.in_use = True
        if not running.ended_within(deadline - time.monotonic()):
            if lease is not None:
                # The call may end between the lines above and this: both sides only add and subtract.
                self.bounce.leave_behind(lease)
            raise TooLateError
        if lease is not None:
            lease.in_use = False
        return running.result()

    def _count(self, event: str, reason: str, amount: int = 1) -> None:
        if amount:
            self._store.metrics.add(event, reason, amount)

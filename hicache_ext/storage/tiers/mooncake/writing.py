"""How pages get into a Mooncake pool.

The master says which holder a page goes to, and nobody else knows before it is there. So while a holder is out some
writes go there, and take as long as the library waits for it. In that time writes are *careful*: small, waited for
briefly, few of them behind their callers at a time. What is left behind goes on, and what went to the other holders is
found there later.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hicache_ext.page import envelope
from hicache_ext.page.copying import gather
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiers.mooncake import engine
from hicache_ext.storage.tiers.mooncake.attachment import Attachment
from hicache_ext.storage.tiers.mooncake.transfers import HEADER_LENGTH, PIECES, Mover, Portion, Scratch, portions

_FULL_ATTEMPTS = 3
_FULL_PAUSE = 0.02
"""Seconds between two attempts of a page for which there was no room: the master evicts meanwhile."""
_NO_SPACE_PAUSE = 1.0
"""Seconds without writes after the pool was full in spite of that."""
_WRITTEN_ELSEWHERE = 0.1
"""Seconds for which pages that another process is writing are waited for, looking every _LOOK_AGAIN."""
_LOOK_AGAIN = 0.005
_SLOW_FAILURE = 0.5
"""A failed transfer that took this long was waited for."""
_CAREFUL = 5.0
"""Seconds of careful writes after one that was late or failed slowly."""
_CAREFUL_PIECES = 16
_CAREFUL_WAIT = 0.25
"""Seconds that a careful write is waited for."""
_MOST_LATE = 4
"""Writes that go on without their callers before no more are begun; fewer than those after which nothing is read."""

_SET_RESULTS = {
    engine.OK: SetResult.STORED,
    engine.EXISTS: SetResult.EXISTS,
    engine.NO_SPACE: SetResult.REJECTED,
    -901: SetResult.TIMEOUT,
}

Exist = Callable[[Any, Sequence[bytes], float], list[bool]]
"""(client, keys, deadline): which of them the master has."""


class Writing:
    """Writes of pages that the pool does not have. Threads: any."""

    def __init__(
        self,
        attachment: Attachment,
        mover: Mover,
        metrics: TierMetrics,
        object_name: Callable[[bytes], str],
        exist: Exist,
        *,
        checksum: bool,
    ) -> None:
        self._attachment = attachment
        self._mover = mover
        self._metrics = metrics
        self._object_name = object_name
        self._exist = exist
        self._checksum = checksum
        self._no_writes_until = 0.0
        self._careful_until = 0.0
        self._late = 0
        """Writes that go on without their callers."""
        self._writing: set[bytes] = set()
        self._writing_ended = threading.Condition()

    def reason_to_wait(self) -> str | None:
        """Why nothing is written now, as a label of ``rejected``."""
        if self._late >= _MOST_LATE:
            return "holder"
        return "full" if time.monotonic() < self._no_writes_until else None

    def write(
        self, client: Any, batch: PageBatch, positions: list[int], deadline: float, results: list[SetResult]
    ) -> None:
        """Write the pages at ``positions``. A page that another thread is writing is waited for instead.

        The library answers a put of an object that somebody else is still writing with success, before it can be read,
        and for 30 s also where its writer has died (put_start_discard_timeout_sec of the master).
        """
        with self._writing_ended:
            mine = [position for position in positions if batch.keys[position] not in self._writing]
            claimed = {batch.keys[position] for position in mine}
            self._writing |= claimed
        try:
            most = _CAREFUL_PIECES if self._careful else PIECES
            with self._mover.scratch.lent(max(batch.sizes)) as scratch:
                for portion in portions(batch.sizes, mine, scratch.memory, most):
                    if not self._write_portion(client, batch, portion, scratch, deadline, results):
                        break
            self._confirm(client, batch, mine, deadline, results)
        finally:
            with self._writing_ended:
                self._writing -= claimed
                self._writing_ended.notify_all()
        others = [position for position in positions if batch.keys[position] not in claimed]
        if others:
            keys = [batch.keys[position] for position in others]
            with self._writing_ended:
                self._writing_ended.wait_for(
                    lambda: self._writing.isdisjoint(keys), max(0.0, deadline - time.monotonic())
                )
            for position, present in zip(others, self._exist(client, keys, deadline), strict=True):
                results[position] = SetResult.EXISTS if present else SetResult.REJECTED

    def _confirm(
        self, client: Any, batch: PageBatch, positions: Sequence[int], deadline: float, results: list[SetResult]
    ) -> None:
        """Reject what the library calls written and nobody can read, also not a moment later.

        A look takes a lease, which keeps a page from eviction, so the first page stands for all: a process that died
        while it wrote the same pages left this one unfinished, and what it had finished before is not written again.
        """
        written = [position for position in positions if results[position].durable]
        if not written or self._exist(client, [batch.keys[written[0]]], deadline)[0]:
            return
        end = min(deadline, time.monotonic() + _WRITTEN_ELSEWHERE)
        while written and time.monotonic() < end:
            time.sleep(_LOOK_AGAIN)
            present = self._exist(client, [batch.keys[position] for position in written], deadline)
            written = [position for position, there in zip(written, present, strict=True) if not there]
        for position in written:
            results[position] = SetResult.REJECTED
            self._metrics.add("rejected", "unconfirmed")

    def _write_portion(
        self,
        client: Any,
        batch: PageBatch,
        portion: Portion,
        scratch: Scratch,
        deadline: float,
        results: list[SetResult],
    ) -> bool:
        """Write the pages of one portion; whether it makes sense to go on."""
        waiting = list(range(len(portion.positions)))
        self._mover.for_each_page(portion, waiting, lambda number: self._prepare(batch, portion, number))
        for attempt in range(1, _FULL_ATTEMPTS + 1):
            keys = [batch.keys[portion.positions[number]] for number in waiting]
            put = functools.partial(
                client.batch_put_from_multi_buffers,
                [self._object_name(key) for key in keys],
                [portion.addresses[number] for number in waiting],
                [portion.sizes[number] for number in waiting],
                self._attachment.engine.replicate_config([key[envelope.IDENTITY_LENGTH :].hex() for key in keys]),
            )
            started = time.monotonic()
            codes = self._put(scratch, put, deadline)
            if isinstance(codes, SetResult):
                for number in waiting:
                    results[portion.positions[number]] = codes
                if codes is SetResult.TIMEOUT:
                    self._metrics.add("error", "timeout", len(waiting))
                else:
                    self._metrics.add("rejected", "holder", len(waiting))
                return False
            for number, code in zip(waiting, codes, strict=True):
                results[portion.positions[number]] = _SET_RESULTS.get(code, SetResult.ERROR)
                self._attachment.report(code)
            waiting = [number for number, code in zip(waiting, codes, strict=True) if code == engine.NO_SPACE]
            for code, count in Counter(codes).items():
                if code not in (engine.OK, engine.EXISTS, engine.NO_SPACE):
                    self._metrics.add("error", engine.reason_of(code), count)
            if any(code in engine.MASTER_LOST for code in codes):
                return False
            if engine.TRANSFER_FAILED in codes and time.monotonic() - started > _SLOW_FAILURE:
                self._begin_to_be_careful()
                return False
            if not waiting:
                return True
            if attempt < _FULL_ATTEMPTS:
                time.sleep(_FULL_PAUSE)
        self._metrics.add("rejected", "full", len(waiting))
        self._no_writes_until = time.monotonic() + _NO_SPACE_PAUSE
        return False

    def _put(self, scratch: Scratch, put: Callable[[], list[int]], deadline: float) -> list[int] | SetResult:
        """The codes of a put; the result of all its pages when it was left behind."""
        careful = self._careful
        if careful:
            deadline = min(deadline, time.monotonic() + _CAREFUL_WAIT)
        codes = self._mover.transferred(
            scratch, put, deadline, explain=self._attachment.master_answers, at_last=lambda: self._count_late(-1)
        )
        if codes is not None:
            return codes
        self._count_late(1)
        self._begin_to_be_careful()
        return SetResult.REJECTED if careful else SetResult.TIMEOUT

    def _count_late(self, more: int) -> None:
        # A late write may end before it is counted as late.
        with self._writing_ended:
            self._late += more

    @property
    def _careful(self) -> bool:
        return time.monotonic() < self._careful_until

    def _begin_to_be_careful(self) -> None:
        self._careful_until = time.monotonic() + _CAREFUL
        self._attachment.log.log(
            logging.WARNING,
            "careful",
            "hicache_ext: tier %s: a holder does not take what is written; writes are small for %g s",
            self._attachment.name,
            _CAREFUL,
        )

    def _prepare(self, batch: PageBatch, portion: Portion, number: int) -> None:
        """Copy a page into scratch memory, behind its header."""
        position, page_object = portion.positions[number], portion.objects[number]
        payload = page_object[HEADER_LENGTH:]
        gather(batch.buffers[position], payload)
        # Of the copy: should the page change meanwhile, the object is still one that can be trusted.
        header = envelope.encode_header(batch.keys[position], [payload], checksum=self._checksum)
        page_object[:HEADER_LENGTH] = header

"""MooncakeStore: PageStore over a Mooncake cluster. One object per page: header and payload (docs/page-format.md).

Every library call uses the tier's own memory and a separate thread, so that the caller can abandon it at its deadline
(engine.py). Object names are ``<prefix>/<identity digest>/<page hash>`` in hex. A read takes a lease in the library,
which protects an object from eviction for a time configured in the master (10 s by default); so does every way to ask
whether it exists.

The master chooses the holder of a page, and no one else knows it before the page is stored. So while a holder is out,
some writes go there and take as long as the library waits for it. During that time writes are *careful*: small, waited
for only briefly, and with few abandoned calls at a time. Abandoned writes go on, and pages that went to other holders
are found there later.
"""

from __future__ import annotations

import functools
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hicache_ext.errors import ClearLaterError, NotReadError, StoreClosedError, StoreSetupError, UnansweredError
from hicache_ext.page import envelope
from hicache_ext.page.memory import address_of
from hicache_ext.page.page_object import decode_object, encode_object
from hicache_ext.runtime.call_deadline import call_deadline
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.contract.bad_pages import PoolStore, Stored, Verdict, cut
from hicache_ext.storage.contract.base import leading_in_portions
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.diagnosis import Finding
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, put_back
from hicache_ext.storage.tiers.mooncake import engine
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
from hicache_ext.storage.tiers.mooncake.engine import (
    ALONE_BYTES,
    COPY_THREADS,
    HEADER_LENGTH,
    PIECE_BYTES,
    PIECES,
    Attachment,
    Portion,
    Scratch,
    ScratchPool,
    portions,
)
from hicache_ext.storage.tiers.mooncake.holders import Holders

_T = TypeVar("_T")

_FIRST_LOOK = 32
_LOOK_GROWTH = 4
_LONGEST_LOOK = 8192
_CLEAR_WAIT = 0.5
"""Maximum seconds that clear() waits: SGLang calls it on the scheduler thread."""

_FULL_ATTEMPTS = 3
_FULL_PAUSE = 0.02
"""Seconds between two attempts to write a page for which there was no space: the master evicts meanwhile."""
_NO_SPACE_PAUSE = 1.0
"""Seconds without writes after the pool was full even after all attempts."""
_WRITTEN_ELSEWHERE = 0.1
"""Maximum seconds to wait for pages that another process is writing, polling every _LOOK_AGAIN seconds."""
_LOOK_AGAIN = 0.005
_SLOW_FAILURE = 0.5
"""Seconds above which a failed transfer must have waited for a holder."""
_CAREFUL = 5.0
"""Seconds of careful writes after one that was late or failed slowly."""
_CAREFUL_PIECES = 16
_CAREFUL_WAIT = 0.25
"""Maximum seconds to wait for a careful write."""
_MOST_LATE = 4
"""Number of late calls at which writes are rejected; lower than the number at which reads are."""

_SET_RESULTS = {
    engine.OK: SetResult.STORED,
    engine.EXISTS: SetResult.EXISTS,
    engine.NO_SPACE: SetResult.REJECTED,
    -901: SetResult.TIMEOUT,
}

_GET_RESULTS = {
    engine.NOT_FOUND: GetResult.MISS,
    engine.NOT_READY: GetResult.MISS,
    engine.LEASE_EXPIRED: GetResult.TIMEOUT,
    -901: GetResult.TIMEOUT,
}
_FAILED = (engine.TRANSFER_FAILED, engine.INVALID_ARGUMENT)
"""Also returned for an object whose size differs from the buffers'."""


class MooncakeStore(PoolStore):
    """PageStore over a Mooncake cluster. Threads: any. Every call ends within the tier's timeout, and only the calling
    thread and threads it waits for touch a batch's memory."""

    type_name = "mooncake"
    shared = True

    def __init__(self, name: str, tier: MooncakeTierConfig, attachment: Attachment) -> None:
        super().__init__(name)
        self._tier = tier
        self._attachment = attachment
        self._holders = Holders(attachment)
        try:
            self._copying = ThreadPool(f"hicache-{name}-copy", COPY_THREADS)
        except RuntimeError as error:
            attachment.close()
            raise StoreSetupError(name, f"no threads: {error}") from None
        self._scratch = ScratchPool(attachment)
        self._identities: set[bytes] = set()
        self._examined = ScratchPool(attachment)
        """Memory for examining bad pages, separate from that of reads."""
        self._no_writes_until = 0.0
        self._careful_until = 0.0
        self._writing: set[bytes] = set()
        self._writing_ended = threading.Condition()

    @property
    def attached(self) -> bool:
        """Whether calls go through; False while the master does not answer."""
        return self._attachment.attached

    def details(self) -> dict[str, Any]:
        return {
            "master": self._tier.master,
            "protocol": self._tier.protocol,
            "devices": self._tier.device_names(),
            "segment_size": self._tier.segment_size,
            "replica_num": self._tier.replica_num,
            "attached": self.attached,
            "holders_out": self._holders.out(),
        }

    def gauges(self) -> dict[str, float]:
        # Only the master knows what the pool holds, and the client does not request it.
        return {"tier_up": float(self.attached)}

    def diagnose(self) -> Sequence[Finding]:
        from hicache_ext.storage.tiers.mooncake.examination import examine

        return examine(self, self._tier, self._attachment)

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        self._identities.add(digest)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        results = [GetResult.REJECTED] * len(batch)
        deadline = self._deadline()
        with self._attachment.client() as client:
            if client is None:
                self.metrics.add("rejected", "away", len(batch))
                return results
            positions = []
            for position in range(len(batch)):
                if self._clearing.hides(batch.keys[position]):
                    results[position] = GetResult.MISS
                elif batch.sizes[position]:
                    positions.append(position)
            if not positions:
                return results
            with self._scratch.lent(max(batch.sizes)) as scratch:
                while positions:
                    positions = self._on_answering_holders(client, batch, positions, deadline, results)
                    # If a key occurs twice in one call, the library fills only the last occurrence's buffers but
                    # returns success for both.
                    once = sorted({batch.keys[position]: position for position in reversed(positions)}.values())
                    portion = next(portions(batch.sizes, once, scratch.memory, PIECES), None)
                    if portion is None or not self._get_portion(client, batch, portion, scratch, deadline, results):
                        break
                    read = set(portion.positions)
                    positions = [position for position in positions if position not in read]
        return results

    def _on_answering_holders(
        self, client: Any, batch: PageBatch, positions: list[int], deadline: float, results: list[GetResult]
    ) -> list[int]:
        """Return those of ``positions`` that can be read, and set the results of the others."""
        if self._holders.all_answer:
            return positions
        keys = [batch.keys[position] for position in positions]
        present, failed = self._ask(client, keys, deadline)
        self.count_errors(failed)
        lost = self._lost(client, keys, present, deadline)
        self.metrics.add("rejected", "holder", sum(key in lost for key in keys))
        # It is unknown which of the pages that were not found are due to the failure.
        absent = GetResult.TIMEOUT if "timeout" in failed else GetResult.ERROR if failed else GetResult.MISS
        readable = []
        for position, key, there in zip(positions, keys, present, strict=True):
            if there and key not in lost:
                results[position] = GetResult.REJECTED
                readable.append(position)
            else:
                results[position] = GetResult.MISS if there else absent
        return readable

    def _get_portion(
        self,
        client: Any,
        batch: PageBatch,
        portion: Portion,
        scratch: Scratch,
        deadline: float,
        results: list[GetResult],
    ) -> bool:
        """Read the pages of one portion; return whether it makes sense to go on."""
        names = [self._object_name(batch.keys[position]) for position in portion.positions]
        lengths = dict(zip(names, map(len, portion.objects), strict=True))
        codes = self._attachment.call_bounded(
            lambda: client.batch_get_into_multi_buffers(names, portion.addresses, portion.sizes),
            deadline,
            scratch,
            explain=lambda: self._holders.look_into(names),
            learn=lambda codes: self._learn(client, lengths, codes),
        )
        if codes is None:
            self.count_errors({"timeout": len(portion.positions)})
            put_back(results, portion.positions, [GetResult.TIMEOUT] * len(portion.positions))
            return False
        whole = [number for number, code in enumerate(codes) if code == len(portion.objects[number])]
        # Copies each page from scratch into host memory if it is the right one.
        reasons = self._for_each_page(portion, batch, whole, decode_object)
        reason_of = dict(zip(whole, reasons, strict=True))
        other_sizes: Mapping[str, int] | None = {}
        if any(code in _FAILED for code in codes):
            other_sizes = self._attachment.call_bounded(lambda: self._learn(client, lengths, codes), deadline)
        for number, (position, code) in enumerate(zip(portion.positions, codes, strict=True)):
            if other_sizes:
                code = other_sizes.get(names[number], code)
            if code >= 0:
                reason = reason_of.get(number, "length")
                results[position] = GetResult.CORRUPT if reason else GetResult.HIT
                if reason:
                    self.metrics.add("corrupt", reason)
                    self._bad_pages.suspect(batch.keys[position], len(portion.objects[number]), reason)
            else:
                results[position] = _GET_RESULTS.get(code, GetResult.ERROR)
                if results[position] is not GetResult.MISS:
                    self.count_errors({engine.reason_of(code): 1})
                self._attachment.report(code)
        self._bad_pages.clear(batch.keys[i] for i in portion.positions if results[i] is GetResult.HIT)
        return other_sizes is not None and not any(code in engine.MASTER_LOST for code in codes)

    def _learn(self, client: Any, lengths: Mapping[str, int], codes: Sequence[int]) -> dict[str, int]:
        """Mark holders as out after a read's failures; return the sizes of objects whose size is unexpected."""
        failed = {name: lengths[name] for name, code in zip(lengths, codes, strict=True) if code in _FAILED}
        return self._holders.learn(client, failed) if failed else {}

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._attachment.client() as client:
            if client is None:
                self.metrics.add("rejected", "away", len(keys))
                return [False] * len(keys)
            return self._contains(client, keys, self._deadline())

    def _lead(self, keys: Sequence[bytes]) -> int:
        """Count leading present pages in growing portions: asking leases pages, which must not happen after a gap."""
        deadline = self._deadline()
        with self._attachment.client() as client:
            if client is None:
                self.metrics.add("rejected", "away", len(keys))
                return 0
            return leading_in_portions(
                keys, lambda some: self._contains(client, some, deadline), _FIRST_LOOK, _LOOK_GROWTH, _LONGEST_LOOK
            )

    def _contains(self, client: Any, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which of the pages can be read. Raises UnansweredError."""
        present, failed = self._ask(client, keys, deadline)
        lost = self._lost(client, keys, present, deadline)
        readable = [there and key not in lost for key, there in zip(keys, present, strict=True)]
        if failed:
            raise UnansweredError(readable, failed.total(), len(keys), failed)
        return readable

    def _lost(self, client: Any, keys: Sequence[bytes], present: Sequence[bool], deadline: float) -> set[bytes]:
        """Return those of the present pages whose holders are out."""
        if self._holders.all_answer:
            return set()
        names = {self._object_name(key): key for key, there in zip(keys, present, strict=True) if there}
        return {names[name] for name in self._holders.lost(client, list(names), deadline)}

    def _exist(self, client: Any, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which of the pages the master reports as present, and count errors."""
        present, failed = self._ask(client, keys, deadline)
        self.count_errors(failed)
        return present

    def _ask(self, client: Any, keys: Sequence[bytes], deadline: float) -> tuple[list[bool], Counter[str]]:
        """Return which of the pages the master reports as present, and the reasons of failures, counted."""
        names = [self._object_name(key) for key in keys]
        # Must precede the call: a page removed meanwhile would be reported present and no longer be a suspect.
        hidden = [self._bad_pages.hides(key) for key in keys]
        codes = self._attachment.call_bounded(lambda: client.batch_is_exist(names), deadline)
        if codes is None:
            return [False] * len(keys), Counter(timeout=len(keys))
        failed = [code for code in codes if code < 0 and code not in (engine.NOT_READY, engine.NOT_FOUND)]
        for code in set(failed):
            self._attachment.report(code)
        present = [
            code == 1 and not absent and not self._clearing.hides(key)
            for key, code, absent in zip(keys, codes, hidden, strict=True)
        ]
        return present, Counter([engine.reason_of(code) for code in failed])

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, batch: PageBatch) -> list[SetResult]:
        with self._attachment.client() as client:
            return self._set(client, batch, self._deadline())

    def _set(self, client: Any, batch: PageBatch, deadline: float) -> list[SetResult]:
        results = [SetResult.REJECTED] * len(batch)
        if client is None:
            self.metrics.add("rejected", "away", len(batch))
            return results
        verdicts = self._bad_pages.settle(batch.keys, (time.monotonic() + deadline) / 2)
        # A put of an existing page sends the payload and then returns the same code as if it had stored it.
        present = self._exist(client, batch.keys, deadline)
        lost = self._lost(client, batch.keys, present, deadline)
        positions: list[int] = []
        first_of: dict[bytes, int] = {}
        for position, key in enumerate(batch.keys):
            self._identities.add(key[: envelope.IDENTITY_LENGTH])
            if key in verdicts and self._bad_pages.hides(key):
                self.metrics.add("rejected", "suspect")
                continue
            if present[position]:
                if key in lost:
                    self.metrics.add("rejected", "holder")
                else:
                    results[position] = SetResult.EXISTS
                continue
            # The master removes by a pattern, which would also remove pages written before it is done.
            is_writable = batch.sizes[position] > 0 and not self._clearing.hides(key)
            if is_writable and first_of.setdefault(key, position) == position:
                positions.append(position)
        is_full = time.monotonic() < self._no_writes_until
        is_slow = self._attachment.late >= _MOST_LATE
        if positions and (is_slow or is_full):
            self.metrics.add("rejected", "holder" if is_slow else "full", len(positions))
        elif positions and self._attachment.attached:
            self._write_absent(client, batch, positions, deadline, results)
        for position, key in enumerate(batch.keys):
            # For a key that occurs twice in a batch the result of the first occurrence counts.
            if first_of.get(key, position) != position and results[first_of[key]].durable:
                results[position] = SetResult.EXISTS
        return results

    def _write_absent(
        self, client: Any, batch: PageBatch, positions: list[int], deadline: float, results: list[SetResult]
    ) -> None:
        """Write the pages at ``positions``; wait for pages that another thread is writing instead.

        For an object that another client is still writing, the library's put returns success before it can be read, and
        does so for up to 30 s if that client has died (put_start_discard_timeout_sec of the master).
        """
        with self._writing_ended:
            mine = [position for position in positions if batch.keys[position] not in self._writing]
            claimed = {batch.keys[position] for position in mine}
            self._writing |= claimed
        try:
            most = _CAREFUL_PIECES if self._careful else PIECES
            with self._scratch.lent(max(batch.sizes)) as scratch:
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
            present = self._exist(client, keys, deadline)
            put_back(results, others, [SetResult.EXISTS if there else SetResult.REJECTED for there in present])

    def _confirm(
        self, client: Any, batch: PageBatch, positions: Sequence[int], deadline: float, results: list[SetResult]
    ) -> None:
        """Reject pages that the library reports as written but that cannot be read, even a moment later.

        A lookup takes a lease, which protects a page from eviction, so only the first page is checked for all: a
        process that died while writing the same pages left this one unfinished; those it finished are not rewritten.
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
            self.metrics.add("rejected", "unconfirmed")

    def _write_portion(
        self,
        client: Any,
        batch: PageBatch,
        portion: Portion,
        scratch: Scratch,
        deadline: float,
        results: list[SetResult],
    ) -> bool:
        """Write the pages of one portion; return whether it makes sense to go on."""
        waiting = list(range(len(portion.positions)))
        # Copies each page into scratch memory after its header.
        self._for_each_page(portion, batch, waiting, lambda whole, key, segments: encode_object(key, segments, whole))
        for attempt in range(1, _FULL_ATTEMPTS + 1):
            keys = [batch.keys[portion.positions[number]] for number in waiting]
            put = functools.partial(
                client.batch_put_from_multi_buffers,
                [self._object_name(key) for key in keys],
                [portion.addresses[number] for number in waiting],
                [portion.sizes[number] for number in waiting],
                self._attachment.replicate_config(),
            )
            started = time.monotonic()
            codes = self._put(scratch, put, deadline)
            if isinstance(codes, SetResult):
                for number in waiting:
                    results[portion.positions[number]] = codes
                if codes is SetResult.TIMEOUT:
                    self.count_errors({"timeout": len(waiting)})
                else:
                    self.metrics.add("rejected", "holder", len(waiting))
                return False
            for number, code in zip(waiting, codes, strict=True):
                results[portion.positions[number]] = _SET_RESULTS.get(code, SetResult.ERROR)
                self._attachment.report(code)
            waiting = [number for number, code in zip(waiting, codes, strict=True) if code == engine.NO_SPACE]
            for code, count in Counter(codes).items():
                if code not in (engine.OK, engine.EXISTS, engine.NO_SPACE):
                    self.count_errors({engine.reason_of(code): count})
            if any(code in engine.MASTER_LOST for code in codes):
                return False
            if engine.TRANSFER_FAILED in codes and time.monotonic() - started > _SLOW_FAILURE:
                self._start_careful_writes()
                return False
            if not waiting:
                return True
            if attempt < _FULL_ATTEMPTS:
                time.sleep(_FULL_PAUSE)
        self.metrics.add("rejected", "full", len(waiting))
        self._no_writes_until = time.monotonic() + _NO_SPACE_PAUSE
        return False

    def _put(self, scratch: Scratch, put: Callable[[], list[int]], deadline: float) -> list[int] | SetResult:
        """Return the codes of a put, or one result for all its pages if the put was abandoned."""
        careful = self._careful
        if careful:
            deadline = min(deadline, time.monotonic() + _CAREFUL_WAIT)
        codes = self._attachment.call_bounded(put, deadline, scratch, explain=self._attachment.master_answers)
        if codes is not None:
            return codes
        self._start_careful_writes()
        return SetResult.REJECTED if careful else SetResult.TIMEOUT

    @property
    def _careful(self) -> bool:
        return time.monotonic() < self._careful_until

    def _start_careful_writes(self) -> None:
        self._careful_until = time.monotonic() + _CAREFUL
        self._attachment.log.log(
            logging.WARNING,
            "careful",
            "hicache_ext: tier %s: a holder does not take what is written; writes are small for %g s",
            self._attachment.name,
            _CAREFUL,
        )

    # -- copies to and from scratch memory -------------------------------------------------------------------------

    def _for_each_page(
        self,
        portion: Portion,
        batch: PageBatch,
        numbers: Sequence[int],
        work: Callable[[memoryview, bytes, Sequence[memoryview]], _T],
    ) -> list[_T]:
        """Copy the portion's pages ``numbers`` by ``work(object, key, segments)``; return the results."""

        def copy(i: int) -> _T:
            position = portion.positions[numbers[i]]
            return work(portion.objects[numbers[i]], batch.keys[position], batch.buffers[position])

        if sum([len(page_object) for page_object in portion.objects]) < ALONE_BYTES * len(portion.objects):
            return [copy(i) for i in range(len(numbers))]
        return self._copying.run(len(numbers), copy)

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        self._bad_pages.clear(keys)
        names = [self._object_name(key) for key in keys]
        deadline = self._deadline()
        with self._attachment.client() as client:
            if client is None:
                self.metrics.add("rejected", "away", len(keys))
                return 0
            codes = self._attachment.call_bounded(lambda: client.batch_remove(names, True), deadline)
            if codes is None:
                self.count_errors({"timeout": len(names)})
                return 0
            for code, count in Counter(codes).items():
                self._attachment.report(code)
                # A page that is still being written does not exist yet.
                if code not in (engine.OK, engine.NOT_FOUND, engine.NOT_READY):
                    self.count_errors({engine.reason_of(code): count})
        return sum(code == engine.OK for code in codes)

    # -- bad copies: one object at a time, for BadPages ------------------------------------------------------------
    #
    # The library manages its connections itself and has no conditional removal. So a page counts as bad if two reads,
    # into different memory and in different pieces, return the same bad bytes. A copy written by another process in the
    # milliseconds before the removal is lost, which costs a miss.

    def read_again(self, key: bytes, most: int) -> Stored | None:
        if self._clearing.hides(key):
            return None
        name = self._object_name(key)
        size = self._call_for_code(lambda client: client.get_size(name))
        if size == engine.NOT_FOUND:
            return None
        if not 0 < size <= most:
            # The library cannot read a part of an object.
            raise NotReadError(engine.reason_of(size) if size < 0 else "length")
        with self._examined.lent(max(0, size - HEADER_LENGTH)) as scratch:
            memory = scratch.memory[:size]
            base = address_of(memory)
            pieces = [
                (place, min(place + PIECE_BYTES, end))
                for begin, end in cut(size, random.random())
                for place in range(begin, end, PIECE_BYTES)
            ]
            places = [base + begin for begin, _ in pieces]
            sizes = [end - begin for begin, end in pieces]
            code = self._call_for_code(
                lambda client: client.batch_get_into_multi_buffers([name], [places], [sizes])[0],
                scratch,
                explain=lambda: self._holders.look_into([name]),
            )
            if code == engine.NOT_FOUND:
                return None
            if code != size:
                raise NotReadError(engine.reason_of(code) if code < 0 else "length")
            return Stored(size, memoryview(bytes(memory)))

    def remove_bad(self, key: bytes, bad: Stored) -> Verdict | None:
        name = self._object_name(key)
        if self._clearing.hides(key) or self._call_for_code(lambda client: client.get_size(name)) != bad.length:
            return None
        # Forced, because the read has just taken a lease.
        code = self._call_for_code(lambda client: client.batch_remove([name], True)[0])
        if code not in (engine.OK, engine.NOT_FOUND):
            raise NotReadError(engine.reason_of(code))
        return Verdict.REMOVED

    def _call_for_code(
        self, call: Callable[[Any], int], scratch: Scratch | None = None, explain: Callable[[], bool] | None = None
    ) -> int:
        """Return the code of one library call; otherwise like ``call_bounded``. Raises NotReadError."""
        try:
            with self._attachment.client() as client:
                if client is None:
                    raise NotReadError("away")
                deadline = time.monotonic() + self._tier.longest_call
                code = self._attachment.call_bounded(lambda: call(client), deadline, scratch, explain=explain)
        except StoreClosedError:
            raise NotReadError("closed") from None
        if code is None:
            raise NotReadError("timeout")
        self._attachment.report(code)
        return code

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Clear identities, or with None every page under the prefix; identities unknown here then count as one."""
        return self._clearing.clear(digests, self._sweep, _CLEAR_WAIT)

    def _sweep(self, cleared: Cleared) -> None:
        """Have the master remove the cleared pages, with one pattern per identity."""
        wanted: list[bytes | None] = [*sorted(self._identities if cleared.digests is None else cleared.digests)]
        if cleared.digests is None:
            wanted.append(None)
        try:
            with self._attachment.client() as client:
                if client is None:
                    raise ClearLaterError("the pool is away")
                for digest in wanted:
                    self._remove_identity(client, digest, cleared)
        except StoreClosedError:
            raise ClearLaterError("closed") from None

    def _remove_identity(self, client: Any, digest: bytes | None, cleared: Cleared) -> None:
        identity = "[0-9a-f]{32}" if digest is None else digest.hex()
        count = client.remove_by_regex(f"^{re.escape(self._tier.prefix)}/{identity}/[0-9a-f]{{64}}$", True)
        if count > 0:
            cleared.found.add(digest or b"")
        elif count < 0:
            reason = engine.reason_of(count)
            self.metrics.add("error", f"clear_{reason}")
            self._attachment.report(count)
            if count in engine.MASTER_LOST:
                raise ClearLaterError(reason)
            self._attachment.log.log(logging.WARNING, "clear", "hicache_ext: tier %s: clear: %s", self.name, reason)

    def _close(self) -> None:
        self._bad_pages.close()
        self._holders.stop()
        # A sweep is a call to the master: pages that cannot be removed now stay. It cannot be interrupted; the
        # attachment waits for it as for any other call.
        self._clearing.close(0, request=0)
        self._attachment.close()
        self._copying.close()

    def _deadline(self) -> float:
        return call_deadline(self._tier.longest_call)

    def _object_name(self, key: bytes) -> str:
        return f"{self._tier.prefix}/{key[: envelope.IDENTITY_LENGTH].hex()}/{key[envelope.IDENTITY_LENGTH :].hex()}"

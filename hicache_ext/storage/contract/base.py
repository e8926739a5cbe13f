"""The base of a tier: the code common to all tiers. Copy tiers/memory.py to begin a new one.

A tier describes itself (``type_name``, ``shared``, ``details``) and implements five hooks: ``_read``, ``_write``,
``_has``, ``_remove`` and ``_clear``. If it needs them, it also implements ``_lead``, ``_register`` and ``_close``.

The base guarantees to the hooks:
  - none is called with nothing to do or after ``_close``; keys to remove and identities to clear contain no duplicates;
  - ``_close`` is called once, when no other hook runs;
  - an exception is logged and counted, and the caller gets an answer that is true whatever has happened;
  - when every call of a kind (reads, writes, look-ups) fails, this is logged with a remedy, at most every ten minutes
    for each reason, and exported (``failing``), whatever the reason.
A failed look-up does not mean that a page is absent: the hook raises (``UnansweredError`` if some pages are known), and
the guards of the tier are told.
The tier guarantees what ``contract/store.py`` requires of a store, and may be called from several threads at a time.
"""

from __future__ import annotations

import abc
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

from hicache_ext.errors import ClearLaterError, StoreClosedError, UnansweredError
from hicache_ext.runtime.call_deadline import is_probe, tell_connection_lost, tell_unanswered
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.diagnosis import Finding
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, StoreInfo, counted
from hicache_ext.storage.contract.trial import try_store

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FAILURES_IN_A_ROW = {"read": 3, "write": 3, "look_up": 2}
"""Consecutive failed calls of a kind before that is reported. Guards retry reads and writes."""
_REPEAT_AFTER = 600.0
"""Seconds between two log lines about the same kind of call and the same reason."""
_KINDS = {"get": "read", "set": "write", "contains": "look_up", "count_leading": "look_up"}
_COSTS = {
    "read": "every read fails (%s): its pages are computed again",
    "write": "every write fails (%s): no new page is kept; what it has is read as before",
    "look_up": "every look-up fails (%s): none of its pages is found",
}
_Result = TypeVar("_Result", GetResult, SetResult)
_reasons: ContextVar[list[str] | None] = ContextVar("hicache_ext_reasons", default=None)
"""The reasons why the medium failed or refused the current call."""


class TierStore(abc.ABC):
    """A PageStore on one medium. Threads: any."""

    type_name: ClassVar[str]
    """The value of ``tiers.<name>.type`` in the configuration."""
    shared: bool = False
    """Other machines see the same pages."""

    def __init__(self, name: str, metrics: TierMetrics | None = None) -> None:
        self.name = name
        self.metrics = metrics or TierMetrics(name)
        self._calls = CallGate(name)
        self._log = LimitedLog(logger)
        self._failed_calls = dict.fromkeys(_COSTS, 0)
        """Failed calls of each kind since the last one that was answered."""
        self._errors = (0, "")
        """Number of errors and reason of the last one, for a call whose own errors are noted on other threads."""
        self._failing_log = LimitedLog(logger, _REPEAT_AFTER)
        for kind in _COSTS:
            self.metrics.set_level("failing", kind, 0.0)

    # -- what a tier writes ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _read(self, batch: PageBatch) -> list[GetResult]:
        """Implement ``get``: return one result for each page, in order."""

    @abc.abstractmethod
    def _write(self, batch: PageBatch) -> list[SetResult]:
        """Implement ``set``: return one result for each page, in order."""

    @abc.abstractmethod
    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        """Implement ``contains``. Raise UnansweredError, or anything else, if the lookup of some pages failed."""

    @abc.abstractmethod
    def _remove(self, keys: Sequence[bytes]) -> int:
        """Implement ``remove``; ``keys`` contains no duplicates."""

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        """Implement ``remove_copies``. Override it if the tier can compare: this may remove a copy that came since."""
        return self._remove(list(copies))

    @abc.abstractmethod
    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Implement ``clear``; ``digests`` contains no duplicates."""

    def _lead(self, keys: Sequence[bytes]) -> int:
        """Implement ``count_leading``. Override it if the tier can stop at the first absent page."""
        try:
            return leading(self._has(keys))
        except UnansweredError as error:
            error.answer = leading(error.answer)
            raise

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:  # noqa: B027 - not every tier needs it
        """Implement ``register_identity``; may raise. Override it in a tier that keeps the documents."""

    def _close(self) -> None:  # noqa: B027 - as above
        """Release what the tier holds."""

    def details(self) -> dict[str, Any]:
        """Return facts for ``describe()``: from memory alone, without secrets, even after ``close()``."""
        return {}

    # -- what callers see ------------------------------------------------------------------------------------------

    def describe(self) -> StoreInfo:
        return StoreInfo(self.name, self.type_name, self.shared, self.details())

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self._moved("get", self._read, batch, GetResult.HIT)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._moved("set", self._write, batch, SetResult.STORED)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._answer(
            "contains", lambda requested: one_for_each(self._has(requested), len(requested)), keys, [False] * len(keys)
        )

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self._answer("count_leading", self._lead, keys, 0)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self._answer("remove", self._remove, list(dict.fromkeys(keys)), 0)

    def remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        """Implement ``RemovesCopies``."""
        return self._answer("remove", self._remove_copies, copies, 0)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        wanted = None if digests is None else list(dict.fromkeys(digests))
        with self._calls:
            if wanted is not None and not wanted:
                return 0
            try:
                return self._clear(wanted)
            except Exception as error:
                self._note_failed_call(error, "clear")
                raise ClearLaterError(f"tier {self.name}: clear() failed: {error}") from error

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        try:
            with self._calls:
                self._register(digest, document)
        except StoreClosedError:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("tier %s: identity %s not recorded: %s", self.name, digest.hex(), error)

    def close(self) -> None:
        if self._calls.shut():
            self._close()

    def diagnose(self) -> Sequence[Finding]:
        """Try a round trip. Override this to report more: reachability, versions, clock, eviction policy. It never
        raises, is bounded by the tier's own timeouts, and is called on a tool's thread, never by SGLang."""
        return try_store(self)

    def count_error(self, error: BaseException, pages: int = 1) -> None:
        """Count ``error`` under ``error/<reason>``, where the reason is the name of its errno if it has one."""
        self.count_errors({error_reason(error): pages}, is_full=isinstance(error, OSError) and error.errno in _NO_SPACE)

    def count_errors(self, reasons: Mapping[str, int], *, words: str = "", is_full: bool = False) -> None:
        """Count pages that the medium failed, by reason. ``words``: the reason for the log. ``is_full``: the medium is
        full, which is not reported as a failure."""
        if reasons:
            self.metrics.add_many("error", reasons)
            if not is_full:
                self.note_refusal(words or max(reasons, key=reasons.__getitem__))

    def note_refusal(self, reason: str) -> None:
        """Note that the medium failed or refused a request; ``reason`` is for the log."""
        self._errors = self._errors[0] + 1, reason
        if (mine := _reasons.get()) is not None:
            mine.append(reason)

    # -- calls of the hooks ------------------------------------------------------------------------------------------

    def _moved(
        self, call: str, hook: Callable[[PageBatch], list[_Result]], batch: PageBatch, moved: _Result
    ) -> list[_Result]:
        """Run ``hook`` on a batch, count its results and return them."""
        pages = len(batch.sizes)
        with self._calls, _noting_reasons() as reasons:
            if pages == 0:
                return []
            errors = self._errors[0]
            try:
                results = one_for_each(hook(batch), pages)
            except Exception as error:  # noqa: BLE001 - whatever a medium or its client library makes of it
                results = [type(moved)[self._result_of_failed_call(error, call, pages)]] * pages
        kind = type(moved)
        unmoved = [results.count(result) for result in (kind.ERROR, kind.TIMEOUT, kind.REJECTED)]
        # A page that EXISTS was not written, so it does not show that writes work.
        if moved in results or (call == "get" and sum(unmoved) < pages):
            self._note_answered(call)
        elif reasons or unmoved[0] + unmoved[1]:
            others = [self._errors[1]] if self._errors[0] != errors else ["error" if unmoved[0] else "timeout"]
            self._note_failing(call, (reasons or others)[-1])
        self.metrics.add_many(call, counted(results))
        self.metrics.add("bytes", call, batch.bytes_of(moved, results))
        return results

    def _result_of_failed_call(self, error: Exception, call: str, pages: int) -> str:
        """Return the name of the result for all pages of a call that raised. A full medium is not an error."""
        if call == "set" and isinstance(error, OSError) and error.errno in _NO_SPACE:
            self.metrics.add("rejected", "capacity", pages)
            return "REJECTED"
        self._note_failed_call(error, call, pages)
        if isinstance(error, ConnectionError):
            tell_connection_lost()
        return "TIMEOUT" if isinstance(error, TimeoutError) else "ERROR"

    def _answer(
        self, call: str, hook: Callable[[Any], _Answer], requested: Collection[bytes] | None, none: _Answer
    ) -> _Answer:
        """Return the hook's answer for ``requested``, or ``none`` if ``requested`` is empty or the medium failed."""
        with self._calls, _noting_reasons() as reasons:
            if requested is not None and not len(requested):
                return none
            pages = 0 if requested is None else len(requested)
            try:
                answer = hook(requested)
            except UnansweredError as error:
                self.count_errors(error.reasons)
                reason = reasons[-1] if reasons else self._errors[1]
                tell_unanswered(error.pages, error.of, reason)
                if error.pages < error.of:
                    self._note_answered(call)
                else:
                    self._note_failing(call, reason)
                return error.answer  # type: ignore[no-any-return]
            except Exception as error:  # noqa: BLE001 - as above
                self._note_failed_call(error, call)
                tell_unanswered(pages, pages, error_reason(error))
                self._note_failing(call, error_reason(error))
                return none
            self._note_answered(call)
            return answer

    def _note_answered(self, call: str) -> None:
        kind = None if is_probe() else _KINDS.get(call)
        if kind is not None and (failed := self._failed_calls[kind]):
            self._failed_calls[kind] = 0
            self.metrics.set_level("failing", kind, 0.0)
            if failed >= _FAILURES_IN_A_ROW[kind]:
                words = "tier %s: %ss work again"
                self._failing_log.log(logging.WARNING, kind, words, self.name, kind.replace("_", "-"))

    def _note_failing(self, call: str, reason: str) -> None:
        kind = None if is_probe() else _KINDS.get(call)
        if kind is None:
            return
        self._failed_calls[kind] += 1
        if self._failed_calls[kind] >= _FAILURES_IN_A_ROW[kind]:
            self.metrics.set_level("failing", kind, 1.0)
            words = (
                f"tier %s: {_COSTS[kind]}; hicache-ext doctor says more, docs/runbook.md#hicachecallsfail what to do"
            )
            self._failing_log.log(logging.WARNING, f"{kind} {reason}", words, self.name, reason)

    def _note_failed_call(self, error: Exception, call: str, pages: int = 1) -> None:
        if isinstance(error, StoreClosedError):
            raise error
        self.count_error(error, pages)
        # A traceback is worth its lines only for errors that no medium makes; at DEBUG, tier authors get all of them.
        in_short = isinstance(error, OSError) and not logger.isEnabledFor(logging.DEBUG)
        # A broken medium fails a thousand times a second, so log lines are limited by kind.
        kind, told = f"{call}: {type(error).__name__}", None if in_short else error
        self._log.log(logging.WARNING, kind, "tier %s: %s: %r", self.name, call, error, exc_info=told)


@contextmanager
def _noting_reasons() -> Iterator[list[str]]:
    reasons: list[str] = []
    token = _reasons.set(reasons)
    try:
        yield reasons
    finally:
        _reasons.reset(token)


def one_for_each(answers: list[_Answer], pages: int) -> list[_Answer]:
    """Return the answers of a hook or a store. Raises ValueError unless there is one for each page, because callers
    pair them with their pages."""
    if len(answers) != pages:
        raise ValueError(f"{len(answers)} answers for {pages} pages")
    return answers


def error_reason(error: BaseException) -> str:
    """Return the reason of ``error`` as a word for the metrics."""
    if isinstance(error, OSError):
        known = errno.errorcode.get(error.errno or 0)
        unknown = f"errno_{error.errno}" if error.errno else "unknown"
        return known or ("timeout" if isinstance(error, TimeoutError) else unknown)
    return "raised"


def leading(present: Sequence[bool | None]) -> int:
    """Return the length of the leading run of present pages."""
    for position, known in enumerate(present):
        if not known:
            return position
    return len(present)


def leading_in_portions(
    keys: Sequence[bytes],
    has: Callable[[Sequence[bytes]], Sequence[bool]],
    portion: int,
    growth: int = 1,
    longest: int = 1 << 20,
) -> int:
    """Return the length of the leading run of present pages. Most chains end early, so the lookup proceeds in portions,
    each ``growth`` times as long as the one before, up to ``longest``."""
    done = 0
    while done < len(keys):
        try:
            present = has(keys[done : done + portion])
        except UnansweredError as error:
            error.answer = done + leading(error.answer)
            raise
        run = leading(present)
        done += run
        if run < len(present):
            break
        portion = min(portion * growth, longest)
    return done

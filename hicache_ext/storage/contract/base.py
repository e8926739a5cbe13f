"""The base of a tier: what every tier repeats, once. Copy tiers/memory.py to begin a new one.

A tier says what it is (``type_name``, ``shared``, ``details``) and writes five hooks: ``_read``, ``_write``, ``_has``,
``_remove`` and ``_clear``. Where it needs them, it writes ``_lead``, ``_register`` and ``_close``, too.

The base guarantees to the hooks:
  - none is called with nothing to do, nor after ``_close``; keys to remove and identities to clear come once each;
  - ``_close`` is called once, when no other hook runs;
  - an exception is logged and counted, and the caller gets an answer that is true whatever has happened.
The tier guarantees what ``contract/store.py`` asks of a store, and may be called from several threads at once.
"""

from __future__ import annotations

import abc
import errno
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from hicache_ext.errors import StoreClosedError
from hicache_ext.runtime.call_gate import CallGate
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.diagnosis import Finding
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, StoreInfo, counted
from hicache_ext.storage.contract.trial import try_store

logger = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_Result = TypeVar("_Result", GetResult, SetResult)


class TierStore(abc.ABC):
    """A PageStore of one medium. Threads: any."""

    type_name: ClassVar[str]
    """As in ``tiers.<name>.type`` of the configuration."""
    shared: bool = False
    """Other machines see the same pages."""

    def __init__(self, name: str, metrics: TierMetrics | None = None) -> None:
        self.name = name
        self.metrics = metrics or TierMetrics(name)
        self._calls = CallGate(name)

    # -- what a tier writes ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _read(self, batch: PageBatch) -> list[GetResult]:
        """As ``get``: one result for each page, in order."""

    @abc.abstractmethod
    def _write(self, batch: PageBatch) -> list[SetResult]:
        """As ``set``: one result for each page, in order."""

    @abc.abstractmethod
    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        """As ``contains``."""

    @abc.abstractmethod
    def _remove(self, keys: Sequence[bytes]) -> int:
        """As ``remove``; no key comes twice."""

    @abc.abstractmethod
    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """As ``clear``; no digest comes twice."""

    def _lead(self, keys: Sequence[bytes]) -> int:
        """As ``count_leading``. For a tier that can stop at the first page that is absent."""
        return leading(self._has(keys))

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:  # noqa: B027 - not every tier needs it
        """As ``register_identity``, and may raise. For a tier that keeps the documents."""

    def _close(self) -> None:  # noqa: B027 - as above
        """Release what the tier holds."""

    def details(self) -> dict[str, Any]:
        """Facts for ``describe()``: from memory alone, no secrets, also after ``close()``."""
        return {}

    # -- what callers see ------------------------------------------------------------------------------------------

    def describe(self) -> StoreInfo:
        return StoreInfo(self.name, self.type_name, self.shared, self.details())

    def get(self, batch: PageBatch) -> list[GetResult]:
        with self._calls:
            if len(batch.sizes) == 0:
                return []
            try:
                results = self._read(batch)
            except Exception as error:  # noqa: BLE001 - whatever a medium or its client library makes of it
                results = self._failed_results(error, "get", GetResult.TIMEOUT, GetResult.ERROR, len(batch.sizes))
        self.metrics.add_many("get", counted(results))
        self.metrics.add("bytes", "get", batch.bytes_of(GetResult.HIT, results))
        return results

    def set(self, batch: PageBatch) -> list[SetResult]:
        with self._calls:
            if len(batch.sizes) == 0:
                return []
            try:
                results = self._write(batch)
            except Exception as error:  # noqa: BLE001 - as for get
                results = self._refused_or_failed(error, len(batch.sizes))
        self.metrics.add_many("set", counted(results))
        self.metrics.add("bytes", "set", batch.bytes_of(SetResult.STORED, results))
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._calls:
            try:
                return self._has(keys) if len(keys) else []
            except Exception as error:  # noqa: BLE001 - as for get
                self._note_failed_call(error, "contains")
                return [False] * len(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            try:
                return self._lead(keys) if len(keys) else 0
            except Exception as error:  # noqa: BLE001 - as for get
                self._note_failed_call(error, "count_leading")
                return 0

    def remove(self, keys: Sequence[bytes]) -> int:
        with self._calls:
            try:
                wanted = list(dict.fromkeys(keys))
                return self._remove(wanted) if wanted else 0
            except Exception as error:  # noqa: BLE001 - as for get
                self._note_failed_call(error, "remove")
                return 0

    def clear(self, digests: Sequence[bytes] | None) -> int:
        with self._calls:
            try:
                wanted = None if digests is None else list(dict.fromkeys(digests))
                return self._clear(wanted) if wanted != [] else 0
            except Exception as error:  # noqa: BLE001 - as for get
                self._note_failed_call(error, "clear")
                return 0

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        try:
            with self._calls:
                self._register(digest, document)
        except StoreClosedError:
            pass
        except Exception as error:  # noqa: BLE001 - as for get
            logger.warning("tier %s: identity %s not recorded: %s", self.name, digest.hex(), error)

    def close(self) -> None:
        if self._calls.shut():
            self._close()

    def diagnose(self) -> Sequence[Finding]:
        """A round trip. A tier that can say more overrides it (``Diagnosable``)."""
        return try_store(self)

    # -- calls whose medium raised -----------------------------------------------------------------------------------

    def count_error(self, error: BaseException, pages: int = 1) -> None:
        """Count ``error`` under ``error/<reason>``: the name of its errno where it has one."""
        self.metrics.add("error", error_reason(error), pages)

    def _refused_or_failed(self, error: Exception, pages: int) -> list[SetResult]:
        """The results of a write that raised. A medium that is full is no error."""
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            self.metrics.add("rejected", "capacity", pages)
            return [SetResult.REJECTED] * pages
        return self._failed_results(error, "set", SetResult.TIMEOUT, SetResult.ERROR, pages)

    def _failed_results(
        self, error: Exception, call: str, timed_out: _Result, failed: _Result, pages: int
    ) -> list[_Result]:
        self._note_failed_call(error, call, pages)
        return [timed_out if isinstance(error, TimeoutError) else failed] * pages

    def _note_failed_call(self, error: Exception, call: str, pages: int = 1) -> None:
        if isinstance(error, StoreClosedError):
            raise error
        self.count_error(error, pages)
        # The place of an error that no medium makes is worth its lines; who writes a tier asks for that of others, too.
        in_short = isinstance(error, OSError) and not logger.isEnabledFor(logging.DEBUG)
        logger.warning("tier %s: %s: %r", self.name, call, error, exc_info=None if in_short else error)


def error_reason(error: BaseException) -> str:
    """A word for the metrics."""
    if isinstance(error, OSError):
        known = errno.errorcode.get(error.errno or 0)
        return known or ("timeout" if isinstance(error, TimeoutError) else "unknown")
    return "raised"


def leading(present: Sequence[bool | None]) -> int:
    """The length of the leading run."""
    for position, known in enumerate(present):
        if not known:
            return position
    return len(present)

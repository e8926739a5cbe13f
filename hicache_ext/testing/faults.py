"""Faults on purpose: PageStores that are slow, fail, raise, lie or drop, and a disk that fails under the file tier.

Each wrapper delegates everything to the store it wraps and changes one thing. ``active`` switches it on and off while
a test runs, so that a store can die and come back.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from hicache_ext.storage.delegating import DelegatingStore
from hicache_ext.storage.store import GetResult, PageBatch, PageStore, SetResult


class PageStoreWrapper(DelegatingStore):
    """Delegates to ``inner``; subclasses override what they change."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.active = True


class BeforeEachCall(PageStoreWrapper):
    """Does something before every call that reaches the medium; the base of SlowStore and RaisingStore."""

    def before_call(self) -> None:
        raise NotImplementedError

    def get(self, batch: PageBatch) -> list[GetResult]:
        self.before_call()
        return super().get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        self.before_call()
        return super().set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.before_call()
        return super().contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        self.before_call()
        return super().count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        self.before_call()
        return super().remove(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        self.before_call()
        return super().clear(digests)


class SlowStore(BeforeEachCall):
    """Every call takes ``seconds`` longer; ``calls`` counts them."""

    def __init__(self, inner: PageStore, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.calls = 0

    def before_call(self) -> None:
        self.calls += 1
        if self.active:
            time.sleep(self.seconds)


class RaisingStore(BeforeEachCall):
    """Every call raises: what no store may do, and what its callers had better survive."""

    def __init__(self, inner: PageStore, error: Callable[[], Exception]) -> None:
        super().__init__(inner)
        self._error = error

    def before_call(self) -> None:
        if self.active:
            raise self._error()


class FailingStore(PageStoreWrapper):
    """Answers trouble without touching the medium; presence is answered as absent."""

    def __init__(
        self,
        inner: PageStore,
        get_result: GetResult = GetResult.ERROR,
        set_result: SetResult = SetResult.ERROR,
    ) -> None:
        super().__init__(inner)
        self.get_result = get_result
        self.set_result = set_result

    def get(self, batch: PageBatch) -> list[GetResult]:
        return [self.get_result] * len(batch) if self.active else super().get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return [self.set_result] * len(batch) if self.active else super().set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys) if self.active else super().contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return 0 if self.active else super().count_leading(keys)


class LyingStore(PageStoreWrapper):
    """Says HIT and gives wrong bytes: one bit of every page is flipped. For tests that must notice."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = super().get(batch)
        if self.active:
            for segments, result in zip(batch.buffers, results, strict=True):
                if result is GetResult.HIT:
                    segments[-1][-1] ^= 1
        return results


class DroppingStore(PageStoreWrapper):
    """Says STORED and stores nothing."""

    def set(self, batch: PageBatch) -> list[SetResult]:
        return [SetResult.STORED] * len(batch) if self.active else super().set(batch)


class DiskFaults:
    """A disk that fails by a seeded schedule: a context manager around calls of the file tier.

    While it is entered, the functions ``CALLS`` of the module ``os`` fail with one of ``errors`` in the share ``rate``
    of their calls on files under ``directory``; reads and writes may instead move fewer bytes than asked (``short``),
    which is no error. Files elsewhere are left alone. ``injected`` counts faults by call and name. One instance at a
    time: it replaces functions of the module ``os``.
    """

    CALLS = ("open", "preadv", "pwritev", "link", "mkdir", "unlink")

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        seed: int = 0,
        rate: float = 0.1,
        errors: Sequence[int] = (errno.EIO, errno.ENOSPC),
        short: bool = True,
        calls: Iterable[str] = CALLS,
    ) -> None:
        self.injected: Counter[str] = Counter()
        self._directory = os.path.realpath(directory)
        self._random = random.Random(seed)
        self._rate = rate
        self._errors = list(errors)
        self._short = short
        self._calls = tuple(calls)
        self._lock = threading.Lock()
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> DiskFaults:
        for call in self._calls:
            self._originals[call] = getattr(os, call)
            setattr(os, call, self._faulty(call, self._originals[call]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call, original in self._originals.items():
            setattr(os, call, original)
        self._originals.clear()

    def _faulty(self, call: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(target: Any, *arguments: Any, **options: Any) -> Any:
            # A link's source is a name under /proc: what matters is where it goes.
            place = arguments[0] if call == "link" else target
            if not self._is_ours(place):
                return original(target, *arguments, **options)
            transfer = call in ("preadv", "pwritev")
            with self._lock:
                fault = self._random.random() < self._rate
                short = transfer and self._short and (not self._errors or self._random.random() < 0.5)
                code = self._random.choice(self._errors) if self._errors else 0
                share = self._random.random()
            if not fault or not (short or code):
                return original(target, *arguments, **options)
            if short:
                self._count(f"{call}:short")
                buffers, *rest = arguments
                return original(target, _first_bytes(buffers, share), *rest, **options)
            self._count(f"{call}:{errno.errorcode[code]}")
            raise OSError(code, os.strerror(code), str(place))

        return faulty

    def _is_ours(self, place: Any) -> bool:
        path = f"/proc/self/fd/{place}" if isinstance(place, int) else os.fspath(place)
        if isinstance(place, int):
            try:
                path = os.readlink(path)
            except OSError:
                return False
        return os.path.abspath(path).startswith(self._directory + "/")

    def _count(self, what: str) -> None:
        with self._lock:
            self.injected[what] += 1


def _first_bytes(buffers: Sequence[memoryview], share: float) -> list[memoryview]:
    """The first ``share`` of ``buffers``, at least one byte."""
    left = max(1, int(share * sum(buffer.nbytes for buffer in buffers)))
    first: list[memoryview] = []
    for buffer in buffers:
        if left <= 0:
            break
        first.append(buffer[:left])
        left -= buffer.nbytes
    return first

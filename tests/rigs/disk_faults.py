"""A disk that fails on purpose under the file tier."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from hicache_ext import native


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
        self._through_python = ExitStack()

    def __enter__(self) -> DiskFaults:
        if not {"preadv", "pwritev"}.isdisjoint(self._calls):
            self._through_python.enter_context(core_through_python())
        for call in self._calls:
            self._originals[call] = getattr(os, call)
            setattr(os, call, self._faulty(call, self._originals[call]))
        return self

    def __exit__(self, *error: object) -> None:
        for call, original in self._originals.items():
            setattr(os, call, original)
        self._originals.clear()
        self._through_python.close()

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


@contextmanager
def core_through_python() -> Iterator[None]:
    """Inside, the native core reads and writes with ``os.preadv`` and ``os.pwritev``, whatever those are at that
    moment, instead of calling the C library."""
    with core_calling(_read_callback, _write_callback):
        yield


@contextmanager
def core_calling(read: Any, write: Any) -> Iterator[None]:
    """Inside, the native core, where there is one, calls these two ``SYSTEM_CALL`` instead of preadv2 and pwritev2."""
    core = native.core()
    if core is None:
        yield
        return
    known = list(core.functions)
    core.functions[-2:] = [ctypes.cast(callback, ctypes.c_void_p).value for callback in (read, write)]
    core.bind()
    try:
        yield
    finally:
        core.functions[:] = known
        core.bind()


def _through(name: str) -> Callable[[int, int, int, int, int], int]:
    def move(fd: int, vectors: int, count: int, offset: int, flags: int) -> int:
        words = (ctypes.c_uint64 * (2 * count)).from_address(vectors)
        buffers = [
            memoryview((ctypes.c_ubyte * words[2 * n + 1]).from_address(words[2 * n])).cast("B") for n in range(count)
        ]
        try:
            return int(getattr(os, name)(fd, buffers, offset, flags))
        except OSError as error:
            ctypes.set_errno(error.errno or errno.EIO)
            return -1

    return move


SYSTEM_CALL = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int, use_errno=True
)
_read_callback, _write_callback = SYSTEM_CALL(_through("preadv")), SYSTEM_CALL(_through("pwritev"))


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

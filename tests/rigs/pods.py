"""A server's process with a slab tier open, in a container of its own if wanted, that does what a test says.

::

    with Pod(path, namespaces=True) as pod:
        pod.do(store_pages, keys)              # a function of a module, called with the pod's store first
        pod.begin(store_pages, keys)           # the same, without waiting; pod.ended() waits and returns what came back
        pod.stop(), pod.go_on()                # SIGSTOP, SIGCONT
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from tests.campaigns.slab_insides import hold
from tests.rigs.disk_faults import core_through_python
from tests.rigs.slab_tier import open_slab_tier
from tests.rigs.workers import Worker

LONG = 60.0
"""Seconds in which anything has to come to its end, on a busy machine."""
_MS_BIND = 0x1000


class Pod(Worker):
    """``refused`` is the sentence of a start that was refused, ``opened_in`` the seconds that opening took."""

    def __init__(
        self,
        path: Path,
        *,
        capacity: int = 64 << 20,
        namespaces: bool = False,
        mounted_at: Path | None = None,
    ) -> None:
        """``mounted_at``: where the container sees the directory ``path``; needs namespaces."""
        super().__init__(_serve, path, capacity, mounted_at, namespaces=namespaces)
        self.refused, self.opened_in = self.answer(LONG)

    def do(self, work: Callable[..., Any], *arguments: Any, within: float = LONG) -> Any:
        """What ``work(store, *arguments)`` returns in the pod. Raises AssertionError with its traceback if it raised,
        TimeoutError if it has not ended."""
        self.begin(work, *arguments)
        return self.ended(within)

    def begin(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.channel.send((work, arguments))

    def ended(self, within: float = LONG) -> Any:
        done, answer = self.answer(within)
        assert done, f"in the pod:\n{answer}"
        return answer

    def lines(self) -> list[str]:
        """What the pod has logged since the last time, warnings and worse."""
        return self.do(_logged)

    def stop_while_it_writes(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Begin ``work``, and stop the pod when it has slots and the first of its bytes are about to be written."""
        self.do(pause_before_writing)
        self.begin(work, *arguments)
        assert self.answer(LONG) == "writing"
        self.stop()
        # It goes on with SIGCONT, and not before.
        self.channel.send("write")

    def hold(self, what: str) -> None:
        """Stop the pod amid a change, a joining or a rebuild of its own (slab_insides.HOLDS)."""
        self.do(_hold, what)
        self.stop()

    def let_go_and_go_on(self) -> None:
        """SIGCONT; what it was amid of comes to its end."""
        self.go_on()
        self.do(_let_go)


def pid_and_host(store: SpreadStore) -> tuple[int, str]:
    return os.getpid(), os.uname().nodename


def close(store: SpreadStore) -> float:
    """Close the store; how many seconds that took."""
    begun = time.monotonic()
    store.close()
    return time.monotonic() - begun


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


_log = _Logged()
_until_the_end = ExitStack()
_held: list[Callable[[], None]] = []
_channel: Connection | None = None
_path: Path | None = None


def _logged(store: SpreadStore) -> list[str]:
    lines, _log.lines = _log.lines, []
    return lines


def _hold(store: SpreadStore, what: str) -> None:
    assert _path is not None
    _held.append(hold(_path, what))  # type: ignore[arg-type]


def _let_go(store: SpreadStore) -> None:
    while _held:
        _held.pop()()


def pause_before_writing(store: SpreadStore) -> None:
    """Before the next write into a slab this process says ``writing``, and waits until it is told to go on."""
    real, first = os.pwritev, threading.Lock()
    _until_the_end.enter_context(core_through_python())

    def pwritev(fd: int, *arguments: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".slab") and first.acquire(blocking=False):
            os.pwritev = real
            assert _channel is not None
            _channel.send("writing")
            _channel.recv()
        return real(fd, *arguments)

    os.pwritev = pwritev  # type: ignore[assignment]


def _serve(channel: Connection, path: Path, capacity: int, mounted_at: Path | None) -> None:
    global _channel, _path
    _channel, _path = channel, path if mounted_at is None else mounted_at
    logging.getLogger().addHandler(_log)
    if mounted_at is not None:
        mounted_at.mkdir(parents=True, exist_ok=True)
        if ctypes.CDLL(None, use_errno=True).mount(bytes(path), bytes(mounted_at), None, _MS_BIND, None) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(mounted_at))
    begun = time.monotonic()
    store: SpreadStore | None = None
    refused = ""
    try:
        store = open_slab_tier(_path, capacity=capacity)
    except StoreSetupError as error:
        refused = str(error)
    channel.send((refused, time.monotonic() - begun))
    _log.lines[:] = [line for line in _log.lines if "root file system" not in line]
    while True:
        try:
            work, arguments = channel.recv()
        except EOFError:
            return
        try:
            channel.send((True, work(store, *arguments)))
        except BaseException:  # noqa: BLE001 - reported by the test
            channel.send((False, traceback.format_exc()))

"""Calls on threads that their callers may leave behind.

A pool of concurrent.futures would not do: it is joined when the interpreter exits, and a call that hangs for ever would
keep the server from stopping.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_IDLE = 8
"""Threads kept waiting for the next call."""


class _State(enum.Enum):
    RUNNING = enum.auto()
    DONE = enum.auto()
    ABANDONED = enum.auto()


class Call(Generic[T]):
    """One call under way on another thread."""

    def __init__(self, work: Callable[[], T], on_late_end: Callable[[], None] | None) -> None:
        self._work = work
        self._on_late_end = on_late_end
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._state = _State.RUNNING
        self._value: T | None = None
        self._error: BaseException | None = None

    def ended_within(self, seconds: float) -> bool:
        """Wait; False leaves the call to itself: its result is then dropped, and ``on_late_end`` is called once."""
        self._done.wait(max(0.0, min(seconds, threading.TIMEOUT_MAX)))
        with self._lock:
            if self._state is _State.RUNNING:
                self._state = _State.ABANDONED
            return self._state is _State.DONE

    def result(self) -> T:
        """What the work returned; raises what it raised. Only after ``ended_within`` was True."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set with DONE

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            self._error = error
        with self._lock:
            late = self._state is _State.ABANDONED
            if not late:
                self._state = _State.DONE
        self._done.set()
        if late and self._on_late_end is not None:
            self._on_late_end()


class CallThreads:
    """Daemon threads that run calls; as many as there are calls at once, some of them kept for the next ones."""

    def __init__(self, name: str, niceness: int = 0) -> None:
        """``niceness`` is added to that of the process, for calls that spin while they wait: work goes first."""
        self._name = name
        self._niceness = niceness
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def start(self, work: Callable[[], T], on_late_end: Callable[[], None] | None = None) -> Call[T]:
        """Begin ``work`` on another thread. Raises RuntimeError when the machine has no thread left, or after close."""
        call = Call(work, on_late_end)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)
            self._calls.put(call)  # type: ignore[arg-type]
        return call

    def close(self, seconds: float) -> int:
        """End the threads; the number of those that were still in a call after ``seconds``. They end with it."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._calls.put(None)
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)

    def _serve(self) -> None:
        if self._niceness:
            # On Linux of this thread alone. A sandbox may forbid it.
            with contextlib.suppress(OSError):
                os.nice(self._niceness)
        while (call := self._calls.get()) is not None:
            try:
                call.run()
            except Exception:
                logger.exception("%s: after a late call", self._name)
            del call  # it holds a batch and its memory
            with self._lock:
                if self._idle >= _MOST_IDLE and not self._closed:
                    self._threads.discard(threading.current_thread())
                    return
                self._idle += 1

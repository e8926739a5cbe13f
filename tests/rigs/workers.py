"""Processes that a test kills, stops and lets go on; in namespaces of its own each is what a pod's container is.

::

    worker = Worker(work, "an argument", namespaces=True)     # work(channel, "an argument") runs in the process
    worker.answer(within=60)                                  # what it has sent
    worker.stop(), worker.go_on(), worker.kill()

In namespaces of its own a process has pid 1, as every other one, a hostname, a network and System V IPC of its own, and
sees no process but itself under /proc. Files are those of the machine. Workers are forked from a process that has
loaded all modules already: loading them takes longer than most of them live. They end with the process that
started them, also when they are stopped.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hicache_ext.errors import HicacheExtError
from tests.rigs.container import is_stopped, namespaces_missing

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.campaigns.imported_beforehand", __name__])

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x20000000,
    0x40000000,
)
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_START = 60.0
"""Seconds that a process may take to run, on a busy machine."""

_numbers = itertools.count(1)


def missing_for_namespaces() -> str | None:
    """What this machine lacks for workers in namespaces, or None; for ``pytest.skip("missing: ...")``."""
    return namespaces_missing("--ipc", "--net")


class WorkerError(Exception):
    """What a worker raised, or that it ended."""


class Worker:
    """One process. Not thread-safe, but for ``stop``, ``go_on`` and ``kill``, which never meet a process of another."""

    def __init__(self, work: Callable[..., None], *arguments: object, namespaces: bool = False) -> None:
        """``work(channel, *arguments)`` must be a function of a module. Raises WorkerError if it cannot be started."""
        number = next(_numbers)
        self.channel, theirs = _CONTEXT.Pipe()
        pids, of_worker = _CONTEXT.Pipe(duplex=False)
        hostname = f"pod-{number}" if namespaces else None
        self._process = _CONTEXT.Process(
            target=_run, args=(work, arguments, theirs, of_worker, hostname), name=f"worker-{number}"
        )
        self._process.start()
        theirs.close()
        of_worker.close()
        try:
            if not pids.poll(_START):
                raise WorkerError("a process did not start")
            self.pid: int = pids.recv()
            # A number may be another process's soon; this stays the worker's.
            self._pidfd = os.pidfd_open(self.pid)
        except (EOFError, ProcessLookupError) as error:
            raise WorkerError("a process ended before it began to work") from error
        finally:
            pids.close()

    def answer(self, within: float) -> Any:
        """The next thing that the worker sent. Raises WorkerError if it raised or ended, TimeoutError after ``within``
        seconds."""
        if not self.channel.poll(within):
            raise TimeoutError(f"process {self.pid} has not answered after {within:g} s")
        try:
            answer = self.channel.recv()
        except (EOFError, ConnectionResetError) as error:
            raise WorkerError(f"process {self.pid} has ended") from error
        if isinstance(answer, WorkerError):
            raise answer
        return answer

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        """SIGSTOP; returns when no thread of it runs any more."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _START
        while self.alive and not is_stopped(self.pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not stop")
            time.sleep(0.001)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone with all its threads. One that has ended already is fine."""
        self._signal(signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        """Kill it, and let go of what it was talked to with."""
        self.kill()
        self.channel.close()
        os.close(self._pidfd)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass


def _run(
    work: Callable[..., None],
    arguments: tuple[object, ...],
    channel: Connection,
    pids: Connection,
    hostname: str | None,
) -> None:
    _end_with_parent()
    if hostname is not None:
        go_into_namespaces(hostname, pids.send)
    else:
        pids.send(os.getpid())
    pids.close()
    try:
        work(channel, *arguments)
    except HicacheExtError as error:
        # As a server would say it; anything else is the test's fault, and multiprocessing prints where.
        channel.send(WorkerError(str(error)))


def go_into_namespaces(hostname: str, told: Callable[[int], object] = lambda pid: None) -> None:
    """Returns in a child that is pid 1 in new namespaces; this process hands its pid on, waits for it and ends as it
    does."""
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    _checked(_libc().unshare(flags))
    socket.sethostname(hostname)
    # What is mounted from now on is not seen outside.
    _checked(_libc().mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    child = os.fork()
    if child:
        # As the outside knows it: this process is still in the outer namespace.
        told(child)
        _, status = os.waitpid(child, 0)
        os._exit(abs(os.waitstatus_to_exitcode(status)))
    _end_with_parent()
    _checked(_libc().mount(b"proc", b"/proc", b"proc", 0, None))


def _end_with_parent() -> None:
    _checked(_libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

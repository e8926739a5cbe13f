"""Contenders in processes of their own: what one call answered, raised or kept its caller waiting for.

Processes are forked from one that has imported everything (preloaded.py), so that each costs no import.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.trouble.contenders import CONTENDERS, Facts, Place
from tests.rigs.s3_server import S3Server
from tests.rigs.workers import go_into_namespaces

LIMIT = 120.0
"""Seconds after which a caller is taken to wait for ever."""
PACKAGES = Path("build/rivals/packages")

_context = multiprocessing.get_context("forkserver")


def start_processes() -> None:
    """Before the first client, once: name what the process that they are forked from imports."""
    import benchmarks

    root = Path(benchmarks.__file__).parents[1]
    paths = [str(root), str(root / PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(S3Server.environment(), PYTHONPATH=os.pathsep.join(paths))
    sys.path.append(str(root / PACKAGES))
    _context.set_forkserver_preload(["benchmarks.trouble.preloaded"])


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one call; ``raised`` is the exception's name and text."""

    value: Any
    seconds: float
    raised: str | None = None
    hung: bool = False


class CannotRun(RuntimeError):
    """A contender does not open here; the message is the reason."""


class Client:
    """One contender in one process; ``container``: in namespaces of its own. One thread at a time."""

    def __init__(self, contender: str, place: Place, facts: Facts | None = None, *, container: bool = False) -> None:
        self._pipe, theirs = _context.Pipe()
        given = (theirs, contender, place, facts or Facts(), container)
        self._process = _context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        self._hung = False
        theirs.close()
        opened = self._answer(LIMIT, time.monotonic())
        if opened.raised or opened.hung:
            self.kill()
            raise CannotRun(opened.raised or "it does not open")

    def call(self, method: str, *arguments: Any, limit: float = LIMIT) -> Answer:
        """Never raises what the contender raises. A client that waits for ever is killed, and answers no more."""
        started = time.monotonic()
        with contextlib.suppress(OSError):
            self._pipe.send((method, arguments))
        if self._hung:
            return Answer(None, limit, hung=True)
        answer = self._answer(limit, started)
        if answer.hung:
            self._hung = True
            self.kill()
        return answer

    def start_writing(self, keys: Sequence[str], pages: Sequence[bytes], batch: int) -> None:
        """Write batch after batch until killed; ``acknowledged`` tells how far it came."""
        self._pipe.send(("write_batches", (list(keys), list(pages), batch)))

    def acknowledged(self) -> list[int]:
        """The numbers of pages whose write was answered well, after ``kill``."""
        numbers: list[int] = []
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll(0.05):
                kind, value, _ = self._pipe.recv()
                numbers += value if kind == "acknowledged" else []
        return numbers

    def _answer(self, limit: float, started: float) -> Answer:
        try:
            if not self._pipe.poll(limit):
                return Answer(None, time.monotonic() - started, hung=True)
            kind, value, seconds = self._pipe.recv()
        except (EOFError, OSError):
            return Answer(None, time.monotonic() - started, raised="its process ended")
        return Answer(None if kind == "raised" else value, seconds, value if kind == "raised" else None)

    def kill(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        if self._process.is_alive():
            self.call("close", limit=10)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _serve(pipe: Any, name: str, place: Place, facts: Facts, container: bool) -> None:
    logging.disable(logging.CRITICAL)
    if container:
        go_into_namespaces(f"pod-{os.getpid()}")
    # A backend may take the thread that opens it for SGLang's scheduler, which never calls it for pages.
    caller = ThreadPoolExecutor(1)
    lock = threading.Lock()

    def say(kind: str, value: Any, started: float) -> None:
        with lock, contextlib.suppress(OSError):
            pipe.send((kind, value, time.monotonic() - started))

    def answered(call: Any, *arguments: Any) -> None:
        started = time.monotonic()
        try:
            value = caller.submit(call, *arguments).result() if started else None
        except BaseException as error:  # noqa: BLE001 - whatever a contender raises is its answer
            say("raised", f"{type(error).__name__}: {error}"[:200], started)
        else:
            say("answered", value, started)

    started = time.monotonic()
    try:
        CONTENDERS[name].load()
        contender = CONTENDERS[name](place, facts)
        contender.open()
    except BaseException as error:  # noqa: BLE001 - whatever a contender raises is its answer
        say("raised", f"{type(error).__name__}: {error}"[:300], started)
        return
    say("answered", None, started)

    def write_batches(keys: Sequence[str], pages: Sequence[bytes], batch: int) -> None:
        for begin in range(0, len(keys), batch):
            moved = contender.write(keys[begin : begin + batch], pages[begin : begin + batch])
            say("acknowledged", [begin + number for number, went in enumerate(moved) if went], time.monotonic())

    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        answered(write_batches if method == "write_batches" else getattr(contender, method), *arguments)
        if method == "close":
            os._exit(0)

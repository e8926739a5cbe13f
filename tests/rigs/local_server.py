"""A server program on this machine, for tests and benchmarks: started, killed, frozen, started again at its port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from hicache_ext.testing.server import free_port
from tests.waiting import wait_until

HOST = "127.0.0.1"


class LocalServer:
    """One process that listens at ``port`` of the loopback address. One thread at a time."""

    def __init__(self, log: Path, *, port: int | None = None, variables: Mapping[str, str] | None = None) -> None:
        """``log``: the file that its words are added to. ``variables``: of its environment, besides those of this
        process."""
        self.port = port or free_port()
        self.log = log
        self._variables = variables or {}
        self._process: subprocess.Popen[bytes] | None = None

    def program(self) -> Sequence[str]:
        """The program and its arguments. Raises RuntimeError where it is not installed."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it answers. Raises OSError while it does not listen."""
        with socket.create_connection((HOST, self.port), timeout=1):
            return True

    def start(self) -> None:
        """Return when it is ready. Raises RuntimeError with its last words if it ends before."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        words, environment = self.program(), {**os.environ, **self._variables}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            wait_until(self._answers, f"{words[0]} at port {self.port}, see {self.log}")
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"a server ended: {self.log.read_text(errors='replace')[-2000:]}")
        try:
            return self.is_ready()
        except OSError:
            return False

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was not started"
        return self._process

    def stop(self) -> None:
        """SIGKILL, as a crash would end it, also when it is frozen."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    kill = stop

    def freeze(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

"""A Python program in a process of its own, or in PID and UTS namespaces of its own, as a container is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
_NAMESPACES = ["unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child"]


def namespaces_missing(*more: str) -> str | None:
    """Why no namespaces can be made here; None if they can. ``more``: options of unshare for further ones."""
    try:
        tried = subprocess.run([*_NAMESPACES, *more, "true"], capture_output=True, check=False, text=True)
    except FileNotFoundError:
        return "no unshare"
    return None if tried.returncode == 0 else f"no namespaces of its own ({tried.stderr.strip()}); run as root"


def is_stopped(pid: int) -> bool:
    """Whether each thread of a process is stopped: one may still be inside a write."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        states = []
        for thread in threads:
            with open(f"/proc/{pid}/task/{thread}/stat") as stat:
                states.append(stat.read().rpartition(")")[2].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        # A thread has just ended, or all have.
        return False
    return all(state in "TtZX" for state in states)


class Program:
    """Runs ``code``. It answers lines: ``ask`` writes one to its stdin and returns the next one of its stdout."""

    def __init__(self, code: str, *arguments: object, contained: bool = False, hostname: str | None = None) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        if hostname is not None:
            command = ["sh", "-c", 'hostname "$0" && exec "$@"', hostname, *command]
        self._process = subprocess.Popen(
            [*_NAMESPACES, *command] if contained else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self._contained = contained

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the program itself, as seen from here."""
        if not self._contained:
            return self._process.pid
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def line(self) -> str:
        """The next line that it prints, without its end; empty once it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def ask(self, question: str) -> str:
        self.tell(question)
        return self.line()

    def tell(self, question: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(PATIENCE)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While it is stopped (SIGSTOP)."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while not is_stopped(pid):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process.poll() is None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, IndexError, FileNotFoundError):
                self._process.kill()
        self._process.wait(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

"""A real SGLang server as a context manager, for end-to-end tests and benchmarks:

    with SglangServer(model, storage_backend="file", log_file=directory / "server.log") as server:
        cold = server.generate([1, 2, 3] * 200)
        server.flush_cache()
        warm = server.generate([1, 2, 3] * 200)
        assert warm.output_ids == cold.output_ids and warm.cached.storage > 0

The server is ``python -m hicache_ext.testing.sglang_cpu``: SGLang as it is on a GPU, the CPU rig elsewhere. It runs in
a session of its own, so that ``SglangServer.stop`` can prove that no process of it is left.
"""

from __future__ import annotations

import getpass
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.errors import ServerError
from hicache_ext.storage.serving.control import DIRECTORY_VARIABLE, runtime_directory
from hicache_ext.testing.client import SglangClient

_HOST = "127.0.0.1"
# Below the range Linux takes the source ports of outgoing connections from, so that no client grabs a port between
# its choice here and the server's bind.
_PORT_RANGE = (20000, 32000)
_LOG_TAIL_LINES = 60
_STOP_TIMEOUT = 90.0
"""Seconds until what has not left by itself is killed."""

_handed_out_ports: dict[int, socket.socket] = {}
"""Each with what keeps other processes of this package from handing it out before its server listens."""
_ports_lock = threading.Lock()


class SglangServer(SglangClient):
    """One SGLang server process tree.

    A subclass may put ``command_prefix`` in front of its command.

    Args:
        model: directory of the model, see ``hicache_ext.testing.small_model.make_small_model``.
        log_file: where standard output and error of all processes go; truncated at start.
        page_size: tokens per page.
        hierarchical_cache: whether HiCache is on; the other cache arguments mean nothing without it.
        storage_backend: ``--hicache-storage-backend``; none if not given.
        extra_config: ``--hicache-storage-backend-extra-config``: a mapping goes inline as JSON, a string as it is
            (``@file`` included).
        extra_arguments: anything else, as on the command line; comes last and therefore wins.
        environment: added to this process's environment.
        start_timeout: seconds until the server has to answer.

    One thread at a time may start and stop; any number may ask (client.py).
    """

    command_prefix: Sequence[str] = ()
    """Words before the command: a debugger, ``unshare``, ``taskset``."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        log_file: str | os.PathLike[str],
        page_size: int = 16,
        hierarchical_cache: bool = True,
        storage_backend: str | None = None,
        extra_config: Mapping[str, Any] | str | None = None,
        extra_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 300,
    ) -> None:
        self.log_file = Path(log_file)
        self.port = free_port()
        super().__init__(f"http://{_HOST}:{self.port}")
        self._start_timeout = start_timeout
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: str | None = None
        self.arguments = [
            *("--model-path", os.fspath(model), "--host", _HOST, "--port", str(self.port)),
            *("--nccl-port", str(free_port()), "--page-size", str(page_size)),
        ]
        if hierarchical_cache:
            self.arguments += [
                *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through"),
                *("--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"),
            ]
        if hierarchical_cache and storage_backend is not None:
            # With a policy that waits, hits are no race.
            self.arguments += ["--hicache-storage-backend", storage_backend]
            self.arguments += ["--hicache-storage-prefetch-policy", "wait_complete"]
            if extra_config is not None:
                inline = extra_config if isinstance(extra_config, str) else json.dumps(dict(extra_config))
                self.arguments += ["--hicache-storage-backend-extra-config", inline]
        self.arguments += extra_arguments

    @property
    def pid(self) -> int:
        """Process id of the server's main process, which is also its session id."""
        return self._running().pid

    def __enter__(self) -> SglangServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ``ServerError``, with no process left behind."""
        if self._process is not None:
            raise ServerError("the server is already started")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._temporary = tempfile.mkdtemp(prefix="hce-")  # short: sockets lie in it
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command_prefix, sys.executable, "-m", "hicache_ext.testing.sglang_cpu", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **_elsewhere(temporary),
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONUNBUFFERED": "1",
                    **self._environment,
                },
                start_new_session=True,
            )
        try:
            self.wait_until_ready(self._start_timeout, self._look_for_its_end)
        except BaseException:
            self.kill()
            raise

    def log_tail(self) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        except OSError as error:
            return f"(no log: {error})"

    def stop(self) -> None:
        """Ask the server to leave, kill what has not left in time; raises ``ServerError`` if anything survives."""
        process = self._process
        if process is None:
            return
        # The main process alone, at first: it drains and ends its children. A scheduler that gets the signal with it
        # looks crashed to it, and costs 5 s of crash diagnostics.
        deadline = time.monotonic() + _STOP_TIMEOUT
        signal_process(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline and (process.poll() is None or session_members(process.pid)):
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the whole process tree, as a power cut would; raises ``ServerError`` if anything survives."""
        process = self._process
        if process is None:
            return
        deadline = time.monotonic() + 60
        while members := session_members(process.pid):
            if time.monotonic() > deadline:
                raise ServerError(f"processes of the server survived SIGKILL: {sorted(members)}")
            for pid in members:
                signal_process(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)
        process.wait()
        self._process = None
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process

    def _look_for_its_end(self) -> None:
        code = self._running().poll()
        if code is not None:
            raise ServerError(f"the server exited with {code} at start:\n{self.log_tail()}")


def _elsewhere(temporary: str) -> dict[str, str]:
    """Variables that have SGLang leave its files in a directory of the server's own: it removes none of its sockets.

    What others look for, or a later server uses again, stays where it is.
    """
    place = Path(tempfile.gettempdir())
    return {
        "TMPDIR": temporary,
        DIRECTORY_VARIABLE: os.fspath(runtime_directory()),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", os.fspath(place / f"torchinductor_{getpass.getuser()}")
        ),
    }


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on and that no living process has got from here before."""
    with _ports_lock:
        for _ in range(1000):
            port = random.randrange(*_PORT_RANGE)
            if port in _handed_out_ports:
                continue
            with socket.socket() as probe:
                try:
                    probe.bind((_HOST, port))
                except OSError:
                    continue
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0hicache_ext.port.{port}")
            except OSError:
                claim.close()
                continue
            _handed_out_ports[port] = claim
            return port
    raise ServerError(f"no free port found between {_PORT_RANGE[0]} and {_PORT_RANGE[1]}")


def session_members(session: int) -> set[int]:
    """Living processes of a session (zombies are not), whoever their parent is by now."""
    members = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the command in parentheses, which may hold anything: state, parent, process group, session.
            state, _, _, entry_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(entry_session) == session and state not in "ZX":
            members.add(int(entry.name))
    return members


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal; one that is gone already is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

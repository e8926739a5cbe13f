"""A Mooncake cluster on this machine: one master, and holder processes that contribute memory segments.

::

    with own_network(), MooncakeServers(directory) as servers:
        ...  # {"type": "mooncake", "master": servers.master}

Mooncake's processes listen on all interfaces at random ports, hence ``own_network`` (own_network.py). Servers can be
killed, frozen and started again one by one, for fault injection.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hicache_ext.testing.server import free_port

MIB = 1 << 20

_HOST = "127.0.0.1"
_START_TIMEOUT = 90.0
_LISTENING = "0A"
"""In the tables of /proc/PID/net."""

_HOLDER = """
import os, sys, threading
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
from mooncake.store import MooncakeDistributedStore
master, segment_bytes, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = MooncakeDistributedStore()
result = store.setup(host, "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master)
print("ready" if result == 0 else f"setup answered {result}", store.get_hostname(), flush=True)
threading.Event().wait()
"""


class MooncakeServersError(RuntimeError):
    """A server did not start; the message ends with what it printed."""


def missing_mooncake() -> str | None:
    """What this machine lacks for a cluster, or None."""
    if _master_program() is None:
        return "mooncake_master (package mooncake-transfer-engine)"
    probe = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        return f"mooncake.store ({(probe.stderr.strip().splitlines() or ['it crashes'])[-1]})"
    return None


class StandbyServers:
    """An etcd, two masters of which one leads, and one holder."""

    def __init__(self, directory: Path, *, segment_bytes: int = 64 * MIB) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._processes: list[subprocess.Popen[str]] = []
        self._masters: dict[int, subprocess.Popen[str]] = {}
        self._etcd_port = free_port()

    @property
    def master(self) -> str:
        return f"etcd://{_HOST}:{self._etcd_port}"

    def __enter__(self) -> StandbyServers:
        try:
            here = f"http://{_HOST}:{self._etcd_port}"
            self._start(
                *("etcd", f"--data-dir={self._directory / 'etcd'}", f"--listen-peer-urls=http://{_HOST}:{free_port()}"),
                *(f"--listen-client-urls={here}", f"--advertise-client-urls={here}"),
            )
            _wait_for(lambda: _accepts(self._etcd_port), "etcd does not answer")
            for _ in range(2):
                self.start_master()
            _wait_for(lambda: self._leading() is not None, "no master leads")
            arguments = [sys.executable, "-c", _HOLDER, self.master, str(self._segment_bytes), _HOST]
            holder = self._start(*arguments, stdout=subprocess.PIPE)
            assert holder.stdout is not None
            if not any(line.startswith("ready ") for line in holder.stdout):
                raise MooncakeServersError("a holder did not start")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start_master(self) -> None:
        port = free_port()
        self._masters[port] = self._start(
            *(_master_program() or "", "--enable_ha=true", f"--etcd_endpoints={_HOST}:{self._etcd_port}"),
            *(f"--rpc_address={_HOST}", f"--rpc_port={port}"),
            *(f"--metrics_host={_HOST}", f"--metrics_port={free_port()}", "--default_kv_lease_ttl=200"),
        )

    def kill_leader(self) -> None:
        leading = self._leading()
        assert leading is not None
        _kill(self._masters.pop(leading))

    def stop(self) -> None:
        for process in self._processes:
            _kill(process)

    def _leading(self) -> int | None:
        """The port of the master that serves: a standby has none."""
        return next((port for port in self._masters if _accepts(port)), None)

    def _start(self, *arguments: str, stdout: int | None = None) -> subprocess.Popen[str]:
        with (self._directory / "servers.log").open("ab") as log:
            process = _started(arguments, log if stdout is None else stdout, log)
        self._processes.append(process)
        return process


def _accepts(port: int, host: str = _HOST) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=1).close()
        return True
    return False


def _started(words: Sequence[str], stdout: Any, stderr: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True, start_new_session=True
    )


def _wait_for(true: Callable[[], bool], trouble: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while not true():
        if time.monotonic() > deadline:
            raise MooncakeServersError(trouble)
        time.sleep(0.05)


class MooncakeServers:
    """One master and ``holders`` holder processes of ``segment_bytes`` each.

    Args:
        directory: for logs.
        lease_ms: how long a read protects an object from eviction and removal.
        client_ttl: seconds without a heartbeat after which the master forgets a client and its segment.
        eviction_high_watermark: share of the memory above which the master evicts.
        master_arguments: further arguments of mooncake_master.
        host: the address of all of them.
        command_prefix: in front of their commands, for a network namespace of their own.

    One thread at a time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        segment_bytes: int = 256 * MIB,
        holders: int = 1,
        lease_ms: int = 200,
        client_ttl: int = 5,
        eviction_high_watermark: float = 0.9,
        master_arguments: Sequence[str] = (),
        host: str = _HOST,
        command_prefix: Sequence[str] = (),
    ) -> None:
        self.directory = Path(directory)
        self.segment_bytes = segment_bytes
        self.master_port = free_port()
        self.metrics_port = free_port()
        self._holder_count = holders
        self._host = host
        self._command_prefix = list(command_prefix)
        self._arguments = [
            *(f"--rpc_address={host}", f"--rpc_port={self.master_port}"),
            *(f"--metrics_host={host}", f"--metrics_port={self.metrics_port}"),
            *(f"--default_kv_lease_ttl={lease_ms}", f"--client_ttl={client_ttl}"),
            f"--eviction_high_watermark_ratio={eviction_high_watermark}",
            *master_arguments,
        ]
        self._master: subprocess.Popen[str] | None = None
        self._holders: list[subprocess.Popen[str]] = []

    @property
    def master(self) -> str:
        """The master's address, host:port."""
        return f"{self._host}:{self.master_port}"

    @property
    def metrics(self) -> str:
        """The address of the master's metrics, host:port."""
        return f"{self._host}:{self.metrics_port}"

    def __enter__(self) -> MooncakeServers:
        try:
            self.start_master()
            for _ in range(self._holder_count):
                self.start_holder()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start_master(self) -> None:
        """Start the master at its port and wait until it answers."""
        program = _master_program()
        if program is None:
            raise MooncakeServersError("mooncake_master is not installed")
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "master.log").open("ab") as log:
            self._master = master = _started([*self._command_prefix, program, *self._arguments], log, log)

        def answers() -> bool:
            if master.poll() is not None:
                raise MooncakeServersError(f"mooncake_master ended\n{self._log()}")
            return _accepts(self.master_port, self._host)

        _wait_for(answers, f"mooncake_master does not answer, see {self.directory / 'master.log'}")

    def start_holder(self) -> None:
        """Start one more holder and wait until its segment is mounted."""
        words = [sys.executable, "-c", _HOLDER, self.master, str(self.segment_bytes), self._host]
        holder = _started([*self._command_prefix, *words], subprocess.PIPE, subprocess.STDOUT)
        self._holders.append(holder)
        said = []
        for line in holder.stdout or ():
            if line.startswith("ready "):
                return
            said.append(line)
        raise MooncakeServersError(f"a holder did not start: {''.join(said)}")

    def kill_master(self) -> None:
        if self._master is not None:
            _kill(self._master)
            self._master = None

    def freeze_master(self) -> None:
        assert self._master is not None
        self._master.send_signal(signal.SIGSTOP)

    def thaw_master(self) -> None:
        assert self._master is not None
        self._master.send_signal(signal.SIGCONT)

    def kill_holder(self, number: int = 0) -> None:
        _kill(self._holders.pop(number))

    def freeze_holder(self, number: int = 0) -> None:
        self._holders[number].send_signal(signal.SIGSTOP)

    def thaw_holder(self, number: int = 0) -> None:
        self._holders[number].send_signal(signal.SIGCONT)

    def holder_pid(self, number: int = 0) -> int:
        return self._holders[number].pid

    def holder_ports(self, number: int = 0) -> set[int]:
        """Where a holder listens; one of them is in the endpoint that the library names for what lies there."""
        process = self._holders[number].pid
        sockets = set()
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
        listening = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                    listening.add(int(fields[1].rpartition(":")[2], 16))
        return listening

    def stop(self) -> None:
        """Kill everything that was started, also what is frozen."""
        while self._holders:
            _kill(self._holders.pop())
        self.kill_master()

    def _log(self) -> str:
        return "\n".join((self.directory / "master.log").read_text(errors="replace").splitlines()[-20:])


def _kill(process: subprocess.Popen[str]) -> None:
    # SIGKILL also ends a process that SIGSTOP holds.
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _master_program() -> str | None:
    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.exists() else shutil.which("mooncake_master")

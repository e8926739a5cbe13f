"""A network of its own for servers that listen on all interfaces: Linux's network namespaces.

::

    with NetworkNamespace() as namespace:
        server = subprocess.Popen([*namespace.command_prefix, "redis-server"])
        socket = namespace.connect(("127.0.0.1", 6379), timeout=5)

Only a loopback interface is in it, so that nothing started there can be reached from outside, and every port is free.
Needs the privilege to make network namespaces (root); :func:`missing_for_namespaces` says what lacks.
"""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

_CLONE_NEWNET = 0x40000000

_R = TypeVar("_R")


def missing_for_namespaces() -> str | None:
    """What this machine lacks to make a network namespace, or None; for ``pytest.skip("missing: ...")``."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"the program {program}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "the privilege to make network namespaces"


class NetworkNamespace:
    """One namespace, alive between ``start`` and ``stop``; it goes with the process that made it."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NetworkNamespace:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Make the namespace. Raises ``OSError`` where that is not permitted."""
        # cat ends when this process does, however it dies: the pipe closes.
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != b"up\n":
            holder.kill()
            raise OSError(f"no network namespace: {holder.communicate()[1].decode(errors='replace').strip()}")
        self._holder = holder

    def stop(self) -> None:
        """Let go of it; processes started in it have to be stopped before."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.communicate()

    @property
    def command_prefix(self) -> list[str]:
        """Put in front of a command, it runs in this namespace, under the same process id."""
        return ["nsenter", f"--net={self._path}", "--"]

    def connect(self, address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        """A TCP connection inside the namespace; the socket may be used by any thread of this process."""
        return self.run(lambda: socket.create_connection(address, timeout))

    def run(self, function: Callable[[], _R]) -> _R:
        """``function()`` by a thread of its own inside the namespace: sockets made there belong there.

        Raises what ``function`` raises of ``OSError``; it must raise nothing else.
        """
        answer: list[_R] = []
        trouble: list[OSError] = []

        def inside() -> None:
            try:
                with open(self._path, "rb") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
                answer.append(function())
            except OSError as error:
                trouble.append(error)

        thread = threading.Thread(target=inside, name="network-namespace")
        thread.start()
        thread.join()
        if trouble:
            raise trouble[0]
        return answer[0]

    @property
    def _path(self) -> str:
        if self._holder is None:
            raise OSError("the network namespace is not started")
        return f"/proc/{self._holder.pid}/ns/net"

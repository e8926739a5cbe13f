"""What listens on all interfaces in a namespace is reached through it and from nowhere else."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.rigs.network_namespace import NetworkNamespace, missing_for_namespaces

LISTENER = """
import socket
listening = socket.create_server(("0.0.0.0", 0))
print(listening.getsockname()[1], flush=True)
while True:
    connection, _ = listening.accept()
    connection.sendall(b"inside")
    connection.close()
"""


def answer_from_here(port: int) -> bytes:
    """What this machine's own network has on ``port``."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as outside:
            outside.settimeout(5)
            return outside.recv(10)
    except OSError:
        return b""


def test_a_server_inside_is_reached_from_inside_only() -> None:
    if missing := missing_for_namespaces():
        pytest.skip(f"missing: {missing}")
    with NetworkNamespace() as namespace:
        command = [*namespace.command_prefix, sys.executable, "-c", LISTENER]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                port = int(server.stdout.readline())
                with namespace.connect(("127.0.0.1", port), timeout=10) as connection:
                    assert connection.recv(10) == b"inside"
                assert answer_from_here(port) != b"inside"
            finally:
                server.kill()
    with pytest.raises(OSError, match="not started"):
        namespace.connect(("127.0.0.1", port))

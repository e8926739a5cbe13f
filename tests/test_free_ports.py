"""Ports of test servers: two processes that start servers at the same time never choose the same one."""

from __future__ import annotations

import subprocess
import sys

from hicache_ext.testing.server import free_port

_ONE_PORT = """
import sys
from hicache_ext.testing import server
server._PORT_RANGE = (int(sys.argv[1]), int(sys.argv[1]) + 1)
try:
    print(server.free_port())
except server.ServerError:
    print("none")
"""


def test_a_port_that_a_living_process_was_given_is_given_to_no_other() -> None:
    def asked_by_another(port: int) -> str:
        words = [sys.executable, "-c", _ONE_PORT, str(port)]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    port = free_port()
    assert asked_by_another(port) == "none"
    # Of a process that has ended it may be had again.
    assert any(asked_by_another(port) == asked_by_another(port) == str(port) for port in range(31_000, 31_020))

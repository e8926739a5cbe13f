"""A cable between this process's own network and another one, which can be made slow and be pulled.

::

    with own_network(), Link() as link:
        server = subprocess.Popen([*link.command_prefix, ...])    # listens at link.there
        link.narrow()

For engines that open connections of their own at ports nobody chose: no proxy can stand in front of them. Needs root.
"""

from __future__ import annotations

import subprocess
import threading
from typing import Self

from tests.rigs.network_namespace import NetworkNamespace

_HERE, _THERE = "hce-here", "hce-there"
_DOWN, _UP = 0.7, 1.3
"""Seconds, of a cable that is pulled and put in again."""


class Link:
    """Between the network of the thread that makes it and one of its own. One thread at a time."""

    here = "10.99.0.1"
    there = "10.99.0.2"

    rate = 1e6
    """Bytes a second each way, while narrow."""

    def __init__(self) -> None:
        self._namespace = NetworkNamespace()
        self._flapping: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def command_prefix(self) -> list[str]:
        """In front of a command, it runs on the other side."""
        return self._namespace.command_prefix

    def __enter__(self) -> Self:
        self._namespace.start()
        # nsenter --net=/proc/PID/ns/net: the process that keeps the namespace.
        there = self.command_prefix[1].split("/")[2]
        _run("ip", "link", "add", _HERE, "type", "veth", "peer", "name", _THERE, "netns", there)
        for prefix, name, address in (([], _HERE, self.here), (self.command_prefix, _THERE, self.there)):
            _run(*prefix, "ip", "address", "add", f"{address}/30", "dev", name)
            _run(*prefix, "ip", "link", "set", name, "up")
        return self

    def __exit__(self, *error: object) -> None:
        self.well()
        _run("ip", "link", "delete", _HERE)
        self._namespace.stop()

    def narrow(self) -> None:
        """``rate`` each way; what comes in faster waits, and is thrown away after 0.4 s."""
        for prefix, name in self._ends():
            limit = (f"{self.rate * 8:.0f}bit", "burst", "64kb", "latency", "400ms")
            _run(*prefix, "tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", *limit)

    def flap(self) -> None:
        """Pulled for 0.7 s of every 2."""
        self._stopped.clear()
        # A thread of this one: it is in the same network.
        self._flapping = threading.Thread(target=self._flap, name="flapping-link")
        self._flapping.start()

    def well(self) -> None:
        """As at the beginning."""
        if self._flapping is not None:
            self._stopped.set()
            self._flapping.join()
            self._flapping = None
        for prefix, name in self._ends():
            subprocess.run([*prefix, "tc", "qdisc", "delete", "dev", name, "root"], check=False, capture_output=True)

    def _ends(self) -> tuple[tuple[list[str], str], ...]:
        return ([], _HERE), (self.command_prefix, _THERE)

    def _flap(self) -> None:
        while not self._stopped.is_set():
            _run("ip", "link", "set", _HERE, "down")
            self._stopped.wait(_DOWN)
            _run("ip", "link", "set", _HERE, "up")
            self._stopped.wait(_UP)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)

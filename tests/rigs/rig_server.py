"""A real SGLang server that campaigns can freeze, measure, and run in a network of its own."""

from __future__ import annotations

import http.client
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from hicache_ext.testing.server import SglangServer, session_members, signal_process
from tests.rigs.network_namespace import NetworkNamespace


class RigServer(SglangServer):
    """``namespace``: the network to run in; this machine's own if not given. The rest as for SglangServer."""

    def __init__(
        self, model: str | os.PathLike[str], *, namespace: NetworkNamespace | None = None, **settings: Any
    ) -> None:
        super().__init__(model, **settings)
        self._namespace = namespace

    def start(self) -> None:
        if self._namespace is not None:
            self.command_prefix = self._namespace.command_prefix
        super().start()

    def stop(self) -> None:
        if self._process is not None:
            self.thaw()
        super().stop()

    def freeze(self) -> None:
        """Stop all its processes where they are, so that an idle server takes nothing from one that is measured."""
        for pid in session_members(self.pid):
            signal_process(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on; does nothing to a server that is not frozen."""
        for pid in session_members(self.pid):
            signal_process(pid, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """What all its processes have used so far, user and system; of threads that have ended, too."""
        ticks = 0
        for pid in session_members(self.pid):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _opener(self) -> urllib.request.OpenerDirector:
        if self._namespace is None:
            return super()._opener()
        return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NamespaceHandler(self._namespace))


class _NamespaceHandler(urllib.request.HTTPHandler):
    """Opens HTTP connections inside a network namespace."""

    def __init__(self, namespace: NetworkNamespace) -> None:
        super().__init__()
        self._namespace = namespace

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, request)

    def _connection(self, host: str, *, timeout: float | None = None, **_: Any) -> http.client.HTTPConnection:
        namespace = self._namespace

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = namespace.connect((self.host, self.port), self.timeout)

        return Connection(host, timeout=timeout)

"""An S3 server of this machine that knows SSE, conditional writes and ETags as Amazon's has them: moto's, in memory."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from hicache_ext.testing.server import free_port

_HOST = "127.0.0.1"
_START_TIMEOUT = 60.0


def missing_moto() -> str | None:
    """What this machine lacks for the server, or None."""
    return None if importlib.util.find_spec("moto") else "moto (pip install 'moto[server]')"


class MotoServer:
    """One server with one bucket; it knows no credentials, and takes all. One thread at a time."""

    def __init__(self, directory: str | os.PathLike[str], *, bucket: str = "hicache") -> None:
        self.bucket = bucket
        self.port = free_port()
        self._log = Path(directory) / "moto.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def __enter__(self) -> MotoServer:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(self.port)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            try:
                socket.create_connection((_HOST, self.port), timeout=1).close()
                break
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise
                time.sleep(0.05)
        request = urllib.request.Request(f"{self.endpoint}/{self.bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

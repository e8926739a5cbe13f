"""An S3 server of this machine that knows SSE, conditional writes and ETags as Amazon's has them: moto's, in memory."""

from __future__ import annotations

import importlib.util
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.rigs.local_server import HOST, LocalServer


def missing_moto() -> str | None:
    """What this machine lacks for the server, or None."""
    return None if importlib.util.find_spec("moto") else "moto (pip install 'moto[server]')"


class MotoServer(LocalServer):
    """One server with one bucket; it knows no credentials, and takes all. One thread at a time."""

    def __init__(self, directory: str | os.PathLike[str], *, bucket: str = "hicache") -> None:
        super().__init__(Path(directory) / "moto.log")
        self.bucket = bucket

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def program(self) -> Sequence[str]:
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]

    def start(self) -> None:
        super().start()
        request = urllib.request.Request(f"{self.endpoint}/{self.bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()

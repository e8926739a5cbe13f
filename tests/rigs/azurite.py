"""Azure Blob Storage on this machine for tests: Azurite, a Node.js program, over a directory.

Its accounts are the first part of the path, as those of gateways are: ``endpoint`` is an endpoint with a path.
``scripts/setup.sh test-all`` installs it into ``.venv/azurite``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlencode

from hicache_ext.testing.server import free_port

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""What Azurite knows, documented by its makers; no secret."""

_HOST = "127.0.0.1"
_VERSION = "2021-12-02"
_START_TIMEOUT = 60.0


def missing_azurite() -> str | None:
    """What this machine lacks for the server, or None."""
    return None if _program() else "azurite (npm install --prefix .venv/azurite azurite@3.35.0)"


def _program() -> str | None:
    beside = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    if beside.exists() and shutil.which("node"):
        return str(beside)
    return shutil.which("azurite-blob")


class Azurite:
    """One server with one container. One thread at a time."""

    def __init__(self, directory: str | os.PathLike[str], *, container: str = "hicache") -> None:
        self.container = container
        self.port = free_port()
        self._directory = Path(directory)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}/{ACCOUNT}"

    def __enter__(self) -> Azurite:
        program = _program()
        assert program is not None, missing_azurite()
        words = ["--blobHost", _HOST, "--blobPort", str(self.port), "--location", str(self._directory)]
        with (self._directory / "azurite.log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, *words, "--silent", "--skipApiVersionCheck", "--disableTelemetry"], stdout=log, stderr=log
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
        self._make_container()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signature(self, permissions: str = "racwdl") -> str:
        """A shared access signature of the container (Azure's service SAS)."""
        first, last, schemes = "2026-01-01T00:00:00Z", "2126-01-01T00:00:00Z", "https,http"
        resource = f"/blob/{ACCOUNT}/{self.container}"
        text = "\n".join([permissions, first, last, resource, "", "", schemes, _VERSION, "c", *[""] * 7])
        facts = {"sv": _VERSION, "st": first, "se": last, "sr": "c", "sp": permissions, "spr": schemes}
        return urlencode({**facts, "sig": _signed(text)})

    def _make_container(self) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        named = "".join(f"{name}:{value}\n" for name, value in headers.items())
        resource = f"/{ACCOUNT}/{ACCOUNT}/{self.container}\nrestype:container"
        # PUT, eleven standard headers that are empty, those of Azure, the resource.
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{_signed('PUT' + chr(10) * 12 + named + resource)}"
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=10)
        path = f"/{ACCOUNT}/{self.container}?restype=container"
        connection.request("PUT", path, headers={**headers, "Content-Length": "0"})
        answer = connection.getresponse()
        assert answer.status == 201, (answer.status, answer.read())
        connection.close()


def _signed(text: str) -> str:
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()

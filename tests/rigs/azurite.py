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
import sys
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlencode

from tests.rigs.local_server import HOST, LocalServer

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""What Azurite knows, documented by its makers; no secret."""

_VERSION = "2021-12-02"


def missing_azurite() -> str | None:
    """What this machine lacks for the server, or None."""
    return None if _program() else "azurite (npm install --prefix .venv/azurite azurite@3.35.0)"


def _program() -> str | None:
    beside = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    if beside.exists() and shutil.which("node"):
        return str(beside)
    return shutil.which("azurite-blob")


class Azurite(LocalServer):
    """One server with one container. One thread at a time."""

    def __init__(self, directory: str | os.PathLike[str], *, container: str = "hicache") -> None:
        super().__init__(Path(directory) / "azurite.log")
        self.container = container

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}/{ACCOUNT}"

    def program(self) -> Sequence[str]:
        program = _program()
        assert program is not None, missing_azurite()
        where = ("--blobHost", HOST, "--blobPort", str(self.port), "--location", str(self.log.parent))
        return [program, *where, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]

    def start(self) -> None:
        super().start()
        self._make_container()

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
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        path = f"/{ACCOUNT}/{self.container}?restype=container"
        connection.request("PUT", path, headers={**headers, "Content-Length": "0"})
        answer = connection.getresponse()
        assert answer.status == 201, (answer.status, answer.read())
        connection.close()


def _signed(text: str) -> str:
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()

"""An S3 server on this machine for tests and benchmarks: s3rver, a Node.js program, over a directory.

::

    with S3Server(directory) as server:
        ...  # {"type": "object", "url": server.url("prefix"), "endpoint": server.endpoint, "allow_http": True, ...}

``scripts/setup.sh test`` installs it into ``.venv/s3rver``. It can be killed and started again on the same port and
directory, for fault injection. It ignores ``If-None-Match``, as some servers in the field do.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hicache_ext.testing.server import free_port

ACCESS_KEY = SECRET_KEY = "S3RVER"
"""What s3rver knows; no secret."""

_HOST = "127.0.0.1"
_START_TIMEOUT = 60.0


class S3ServerError(RuntimeError):
    """The server did not start; the message ends with what it printed."""


def missing_s3_server() -> str | None:
    """What this machine lacks for the server, or None."""
    return None if _program() else "s3rver (npm install --prefix .venv/s3rver s3rver@3.7.1)"


def _program() -> str | None:
    beside = Path(sys.prefix) / "s3rver" / "node_modules" / ".bin" / "s3rver"
    if beside.exists() and shutil.which("node"):
        return str(beside)
    return shutil.which("s3rver")


# What S3 promises and s3rver does not keep: no reader sees half an object, what was written can be read once that was
# answered, and there are no directories. s3rver writes objects and their facts in place, answers before they are there,
# removes empty directories, and ends with an unhandled error when a write was about to use one.
_AS_S3 = """
const fs = require("fs"), http = require("http"), Module = require("module"), { Writable } = require("stream");
let number = 0;
function replace(path, data) {
  const part = `${path}.part${number++}`;
  fs.writeFileSync(part, data);
  fs.renameSync(part, path);
}
const answer = http.Server.prototype.emit;
http.Server.prototype.emit = function (event, request, response) {
  if (event !== "request" || request.method !== "PUT" || !fs.existsSync(__dirname + "/full")) {
    return answer.apply(this, arguments);
  }
  request.resume().on("end", () => {
    response.writeHead(507, { "Content-Type": "application/xml" });
    response.end("<Error><Code>XMinioStorageFull</Code><Message>Storage backend is full.</Message></Error>");
  });
  return true;
};
// As far away as it is told to be: each request is answered so many milliseconds later. Bodies are taken as they come.
const delay = Number(process.env.HICACHE_TEST_S3_DELAY || 0);
if (delay) {
  const { Server } = require("http");
  const emit = Server.prototype.emit;
  Server.prototype.emit = function (event, ...rest) {
    if (event !== "request") return emit.call(this, event, ...rest);
    if (rest[0].method === "PUT") {
      const { end } = rest[1];
      rest[1].end = (...words) => setTimeout(() => end.apply(rest[1], words), delay);
      return emit.call(this, event, ...rest);
    }
    setTimeout(() => emit.call(this, event, ...rest), delay);
    return true;
  };
}
const load = Module._load;
Module._load = function (name) {
  const loaded = load.apply(this, arguments);
  if (name === "fs-extra") {
    loaded.rmdir = async () => {};
    loaded.writeFile = async (path, data) => replace(path, data);
    loaded.createWriteStream = (path) => {
      const chunks = [];
      return new Writable({
        write(chunk, encoding, done) { chunks.push(chunk); done(); },
        final(done) { replace(path, Buffer.concat(chunks)); done(); },
      });
    };
  }
  return loaded;
};
"""


class S3Server:
    """One server with one bucket. One thread at a time."""

    def __init__(self, directory: str | os.PathLike[str], *, bucket: str = "hicache", delay: float = 0.0) -> None:
        """``delay``: seconds that each request takes longer, as if the server were far away."""
        self.bucket = bucket
        self._delay = delay
        self.port = free_port()
        self.directory = Path(directory) / "s3"
        self._log = Path(directory) / "s3rver.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def tier(self, prefix: str, **more: Any) -> dict[str, Any]:
        """A tier of the configuration; the credentials come from HICACHE_TEST_S3_KEY (see ``environment``)."""
        return {
            "type": "object",
            "url": self.url(prefix),
            "endpoint": self.endpoint,
            "allow_http": True,
            "access_key": {"env": "HICACHE_TEST_S3_KEY"},
            "secret_key": {"env": "HICACHE_TEST_S3_KEY"},
            **more,
        }

    @staticmethod
    def environment() -> dict[str, str]:
        """The variables that ``tier`` refers to."""
        return {"HICACHE_TEST_S3_KEY": SECRET_KEY}

    def start(self) -> None:
        """Raises S3ServerError."""
        program = _program()
        if program is None:
            raise S3ServerError(f"missing: {missing_s3_server()}")
        self.directory.mkdir(parents=True, exist_ok=True)
        preload = self._log.with_name("as_s3.js")
        preload.write_text(_AS_S3)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(program, "-s", "-d", str(self.directory), "-a", _HOST, "-p", str(self.port)),
                    *("--configure-bucket", self.bucket),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "NODE_OPTIONS": f"--require {preload}",
                    "HICACHE_TEST_S3_DELAY": str(self._delay * 1e3),
                },
            )
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            try:
                socket.create_connection((_HOST, self.port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise S3ServerError(f"s3rver did not start\n{self._log.read_text()[-2000:]}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def fill(self) -> None:
        """Every PUT is answered as MinIO does when its drives are full, until ``empty``; all else goes on."""
        self._log.with_name("full").touch()

    def empty(self) -> None:
        self._log.with_name("full").unlink()

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.kill()
        self._process = None

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

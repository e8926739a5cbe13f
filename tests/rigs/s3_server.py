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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.rigs.local_server import HOST, LocalServer

ACCESS_KEY = SECRET_KEY = "S3RVER"
"""What s3rver knows; no secret."""


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


class S3Server(LocalServer):
    """One server with one bucket. One thread at a time."""

    def __init__(self, directory: str | os.PathLike[str], *, bucket: str = "hicache") -> None:
        preload = Path(directory) / "as_s3.js"
        super().__init__(Path(directory) / "s3rver.log", variables={"NODE_OPTIONS": f"--require {preload}"})
        self.bucket = bucket
        self.directory = Path(directory) / "s3"
        self._preload = preload

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

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

    def program(self) -> Sequence[str]:
        program = _program()
        if program is None:
            raise RuntimeError(f"missing: {missing_s3_server()}")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._preload.write_text(_AS_S3)
        where = ("-s", "-d", str(self.directory), "-a", HOST, "-p", str(self.port))
        return [program, *where, "--configure-bucket", self.bucket]

    def fill(self) -> None:
        """Every PUT is answered as MinIO does when its drives are full, until ``empty``; all else goes on."""
        self.log.with_name("full").touch()

    def empty(self) -> None:
        self.log.with_name("full").unlink()


class FarS3Server(S3Server):
    """One in memory that costs little, and answers each request ``delay`` seconds late."""

    def __init__(self, directory: str | os.PathLike[str], delay: float = 0.0) -> None:
        super().__init__(directory)
        self._variables = {}
        self._delay = delay

    def program(self) -> Sequence[str]:
        script = Path(__file__).parents[2] / "benchmarks" / "rivals" / "far_s3.js"
        return ["node", str(script), str(self.port), str(self._delay * 1e3)]

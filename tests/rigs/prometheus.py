"""Prometheus and its tool, for tests. Needs Debian's package ``prometheus``; loopback and free ports only."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from hicache_ext.testing.server import free_port
from tests.waiting import wait_until

HOST = "127.0.0.1"


def program(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``; the test is skipped, and fails in CI, where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"missing: {name} (Debian: prometheus)")
    return found


class Prometheus:
    """A server of its own that scrapes ``target`` (host:port) every second and evaluates ``rules`` as often."""

    def __init__(self, directory: Path, target: str, rules: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self._settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "sglang", "static_configs": [{"targets": [target]}]}],
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        server = program("prometheus")
        self._directory.mkdir(parents=True)
        config, log = self._directory / "prometheus.yml", self._directory / "prometheus.log"
        config.write_text(yaml.safe_dump(self._settings))
        words = {
            "config.file": config,
            "storage.tsdb.path": self._directory / "data",
            "web.listen-address": f"{HOST}:{self._port}",
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [server, *[f"--{name}={value}" for name, value in words.items()]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(self._ready, f"prometheus, see {log}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that ``expression`` is now. Raises ValueError with Prometheus' words for one it does not take."""
        answer = self.get("query", query=expression)
        assert answer["resultType"] in ("vector", "scalar"), answer
        return list(answer["result"])

    def get(self, what: str, **parameters: str) -> Any:
        """``data`` of the answer to ``/api/v1/WHAT``."""
        url = f"http://{HOST}:{self._port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"prometheus ended: {(self._directory / 'prometheus.log').read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

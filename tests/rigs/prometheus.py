"""Prometheus and its tool, for tests. Needs Debian's package ``prometheus``; loopback and free ports only."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rigs.local_server import HOST, LocalServer


def program(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``; the test is skipped, and fails in CI, where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"missing: {name} (Debian: prometheus)")
    return found


class Prometheus(LocalServer):
    """A server of its own that scrapes ``target`` (host:port) every second and evaluates ``rules`` as often."""

    def __init__(self, directory: Path, target: str, rules: Path) -> None:
        super().__init__(directory / "prometheus.log")
        self._settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "sglang", "static_configs": [{"targets": [target]}]}],
        }

    def program(self) -> Sequence[str]:
        server, config = program("prometheus"), self.log.with_name("prometheus.yml")
        config.write_text(yaml.safe_dump(self._settings))
        words = {
            "config.file": config,
            "storage.tsdb.path": self.log.with_name("data"),
            "web.listen-address": f"{HOST}:{self.port}",
        }
        return [server, *[f"--{name}={value}" for name, value in words.items()]]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that ``expression`` is now. Raises ValueError with Prometheus' words for one it does not take."""
        answer = self.get("query", query=expression)
        assert answer["resultType"] in ("vector", "scalar"), answer
        return list(answer["result"])

    def get(self, what: str, **parameters: str) -> Any:
        """``data`` of the answer to ``/api/v1/WHAT``."""
        url = f"http://{HOST}:{self.port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def is_ready(self) -> bool:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/-/ready", timeout=5):
            return True

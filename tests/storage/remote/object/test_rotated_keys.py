"""Keys of an S3 tier that are files, and change while a server runs, as a Secret of Kubernetes does."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiers.object import client
from hicache_ext.storage.tiers.object.client import make_client
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from tests.rigs.kubelet import ConfigMapVolume

pytest.importorskip("obstore", reason="missing: the package obstore")

import obstore

PATIENCE = 60.0


class S3WithOneKey:
    """Answers 404 to requests that are signed with ``key``, and 403 to others."""

    def __init__(self, key: str) -> None:
        self.key = key
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                signed = re.search(r"Credential=([^/]*)/", self.headers.get("Authorization", ""))
                self.send_response(404 if signed is not None and signed[1] == outer.key else 403)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_PUT = do_HEAD = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[S3WithOneKey]:
    server = S3WithOneKey("old")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _keys_are_read_at_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "KEYS_LAST", timedelta(seconds=0))


def keys(name: str) -> dict[str, str]:
    return {"access_key": f"{name}\n", "secret_key": f"secret of {name}\n"}


def tier_of(server: S3WithOneKey, directory: Path) -> ObjectTierConfig:
    tier = {
        "type": "object",
        "url": "s3://bucket/pages",
        "endpoint": server.endpoint,
        "allow_http": True,
        "access_key": {"file": str(directory / "access_key")},
        "secret_key": {"file": str(directory / "secret_key")},
    }
    loaded = load_config(ExtraConfig.around({"tiers": {"cold": tier}})).tiers["cold"]
    assert isinstance(loaded, ObjectTierConfig)
    return loaded


def is_let_in(store: object) -> bool:
    try:
        obstore.get(store, "page")
    except FileNotFoundError:
        return True
    except obstore.exceptions.PermissionDeniedError:
        return False
    raise AssertionError("there is no such page")


def test_keys_that_were_exchanged_in_their_files_are_used_without_a_restart(
    server: S3WithOneKey, tmp_path: Path
) -> None:
    volume = ConfigMapVolume(tmp_path / "secret", keys("old"))
    store = make_client("cold", tier_of(server, volume.directory))
    assert is_let_in(store)
    server.key = "new"
    assert not is_let_in(store)
    volume.update(keys("new"))
    deadline = time.monotonic() + PATIENCE
    while not is_let_in(store):
        assert time.monotonic() < deadline, "the new keys are never used"
        time.sleep(0.05)


def test_files_that_cannot_be_read_for_a_moment_leave_the_keys_as_they_were(
    server: S3WithOneKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume = ConfigMapVolume(tmp_path / "secret", keys("old"))
    store = make_client("cold", tier_of(server, volume.directory))
    for name in keys("old"):
        (volume.directory / name).unlink()
    assert is_let_in(store)
    assert "going on with the keys that it had" in caplog.text
    assert "secret of" not in caplog.text


def test_a_start_without_its_keys_is_refused(server: S3WithOneKey, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cold\.access_key: .*there is no such file|cannot be read"):
        make_client("cold", tier_of(server, tmp_path))

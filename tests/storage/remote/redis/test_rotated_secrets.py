"""A password and certificates in files that change while a server runs, as a Secret of Kubernetes does."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from hicache_ext.config import Secret
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.rigs.kubelet import ConfigMapVolume
from tests.rigs.redis_servers import HOST, RedisServer, make_certificates, tls_options
from tests.storage.remote.redis.conftest import tier_for
from tests.storage.remote.redis.test_faults import Bound, wait_for_hits

# Real servers.
pytestmark = pytest.mark.slow

FILES = ("ca.crt", "tls.crt", "tls.key")


def test_a_password_that_was_exchanged_in_its_file_is_used_without_a_restart(tmp_path: Path, open_store) -> None:
    secret = ConfigMapVolume(tmp_path / "secret", {"password": "old\n"})
    with RedisServer(tmp_path / "redis", [("user", "default on >old ~* &* +@all")]) as server:
        store = open_store(server, password=Secret("file", str(secret.directory / "password")))
        keys = page_keys(8)
        store_pages(store, keys)
        # First the server knows both, then the file changes, then the old one goes, then its connections.
        tell(server, "old", "ACL", "SETUSER", "default", ">new")
        secret.update({"password": "new\n"})
        tell(server, "new", "ACL", "SETUSER", "default", "<old")
        assert_hits(store, keys)
        tell(server, "new", "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with Bound():
            wait_for_hits(store, keys)


def test_certificates_that_were_exchanged_in_their_files_are_used_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The authority, the server's certificate and the client's are all others afterwards."""
    made = {name: make_certificates(tmp_path / name) for name in ("old", "new")}
    texts = {name: dict(zip(FILES, (file.read_text() for file in files), strict=True)) for name, files in made.items()}
    volume = ConfigMapVolume(tmp_path / "secret", texts["old"])
    ca, certificate, key = (volume.directory / name for name in FILES)
    server = RedisServer(tmp_path / "tls", tls_options(ca, certificate, key, client_certificates=True), tls=True)
    files = {"tls_ca": str(ca), "tls_certificate": str(certificate), "tls_key": str(key)}
    with server:
        store = RedisPageStore("pool", tier_for(url=f"rediss://{HOST}:{server.port}", **files))
        try:
            keys = page_keys(8)
            store_pages(store, keys)
            assert_hits(store, keys)
            server.stop()
            volume.update(texts["new"])
            server.start()
            with Bound():
                wait_for_hits(store, keys)
            # Amid an exchange a certificate and a key may not fit; what was there before is used.
            volume.update({**texts["new"], "tls.key": texts["old"]["tls.key"]})
            store._topology.nodes[0]._close_idle()
            assert store.contains(keys) == [True] * 8
            (said,) = {record.getMessage() for record in caplog.records if "TLS" in record.getMessage()}
            assert "cannot be used" in said and "going on with those that were there" in said
        finally:
            store.close()


def tell(server: RedisServer, password: str, *command: str) -> None:
    with redis.Redis(port=server.port, password=password) as client:
        client.execute_command(*command)

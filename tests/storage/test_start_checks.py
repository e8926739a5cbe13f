"""A tier at its start, and the doctor, do what serving does: a permission that is missing is named, whichever."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, read_pages, store_pages
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.rigs.s3_server import S3Server, missing_s3_server
from tests.storage.remote.object.bucket import RawBucket
from tests.storage.remote.object.fault_proxy import FaultProxy, kind_of
from tests.storage.remote.object.test_object_faults import through
from tests.storage.remote.object.test_object_faults import tier as object_tier
from tests.storage.remote.redis.conftest import tier_for, tier_of
from tests.storage.remote.redis.fake_server import FakeServer, nothing_here
from tests.waiting import wait_until

KEYS = page_keys(6)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.mark.parametrize("command", ["get", "set", "exists", "strlen", "unlink", "scan"])
def test_a_redis_user_without_a_command_stops_the_start_with_its_name(server: RedisServer, command: str) -> None:
    """Seen: without EXISTS 320 pages were written, none was found, and nothing was said."""
    server.command("ACL", "SETUSER", "default", f"-{command}")
    with pytest.raises(StoreSetupError) as raised:
        RedisPageStore("pool", tier_for(server))
    assert f"{command.upper()} is answered with NOPERM" in str(raised.value) and f"+{command}" in str(raised.value)


@pytest.mark.parametrize("command", ["STRLEN", "EXISTS"])
def test_a_command_that_was_renamed_stops_the_start_with_its_name(tmp_path: Path, command: str) -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    renamed = [("rename-command", f'{command} ""')]
    with RedisServer(tmp_path / "redis", renamed) as server, pytest.raises(StoreSetupError) as raised:
        RedisPageStore("pool", tier_for(server))
    assert f"{command} is answered with unknown command; use a server that has it" in str(raised.value)


@pytest.mark.parametrize("command", ["UNLINK", "SCAN"])
def test_a_command_that_only_removes_may_be_missing_which_is_said(
    tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: no start behind a proxy, of which most know no SCAN."""
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    with RedisServer(tmp_path / "redis", [("rename-command", f'{command} ""')]) as server:
        store = RedisPageStore("pool", tier_for(server))
        store_pages(store, KEYS)
        assert_hits(store, KEYS)
        store.close()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum(f"{command} is answered with unknown command" in line for line in said) == 1


@pytest.mark.parametrize("code", ["LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN", "QUOTA"])
def test_a_refusal_that_passes_stops_no_start_and_is_waited_for(code: str) -> None:
    """Seen: a node that was loading stopped the start, for the whole cluster."""
    with FakeServer(lambda words: f"-{code} later\r\n".encode()) as server:
        store = RedisPageStore("pool", tier_of(server.endpoint.port, cluster=False))
        assert set(store.details()["nodes"].values()) == {"down"}
        server.answer = nothing_here
        wait_until(lambda: set(store.details()["nodes"].values()) == {"up"})
        assert store.contains(KEYS) == [False] * 6
        store.close()


def test_a_redis_tier_that_is_only_read_needs_no_permission_to_write(server: RedisServer) -> None:
    store = RedisPageStore("pool", tier_for(server))
    store_pages(store, KEYS)
    store.close()
    for command in ("set", "unlink", "scan", "strlen"):
        server.command("ACL", "SETUSER", "default", f"-{command}")
    store = RedisPageStore("pool", tier_for(server).not_written())
    assert_hits(store, KEYS)
    assert all(finding.level is not Level.ERROR for finding in store.diagnose())
    store.close()


def test_a_redis_that_takes_no_writes_for_now_is_read_from_the_start_on(server: RedisServer) -> None:
    store = RedisPageStore("pool", tier_for(server))
    store_pages(store, KEYS)
    store.close()
    server.command("CONFIG", "SET", "min-replicas-to-write", "1")
    store = RedisPageStore("pool", tier_for(server))
    assert_hits(store, KEYS)
    assert set(store_pages(store, page_keys(2, "new"))) == {SetResult.ERROR}
    server.command("CONFIG", "SET", "min-replicas-to-write", "0")
    store.close()


def test_what_only_the_doctor_asks_may_be_renamed_or_denied(tmp_path: Path) -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    renamed = [("rename-command", f'{word} ""') for word in ("INFO", "CONFIG", "TIME")]
    with RedisServer(tmp_path / "redis", renamed) as server:
        server.command("ACL", "SETUSER", "default", "-ping")
        store = RedisPageStore("pool", tier_for(server))
        store_pages(store, KEYS)
        assert_hits(store, KEYS)
        findings = store.diagnose()
        assert all(finding.level is not Level.ERROR for finding in findings), findings
        assert {f"{word} is refused" for word in ("TIME", "INFO", "CONFIG GET")} <= {f.seen for f in findings}
        store.close()


# -- objects -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if missing := missing_s3_server():
        pytest.skip(f"missing: {missing}")
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.port).serving() as proxy:
        yield proxy


@pytest.fixture
def client(s3: S3Server, proxy: FaultProxy) -> Callable[[], Any]:
    prefix = secrets.token_hex(4)
    return lambda: through(proxy.port, s3.bucket, prefix)


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("PUT", "write objects (s3:PutObject)"),
        ("LIST", "list objects (s3:ListBucket)"),
        ("HEAD", "look objects up (s3:GetObject)"),
        ("GET", "read objects (s3:GetObject)"),
        ("DELETE", "remove objects (s3:DeleteObject)"),
    ],
)
def test_an_object_store_without_a_permission_stops_the_start_with_its_name_and_nothing_is_left(
    proxy: FaultProxy, client: Callable[[], Any], kind: str, action: str
) -> None:
    proxy.refuses = lambda request: 403 if kind_of(request) == kind else 0
    with pytest.raises(StoreSetupError) as raised:
        ObjectPageStore("cold", object_tier(), client)
    assert action in str(raised.value) and "HTTP 403" in str(raised.value)
    proxy.refuses = lambda request: 0
    assert RawBucket(client()).names("") == []


def test_an_object_tier_that_is_only_read_needs_no_permission_to_write(
    proxy: FaultProxy, client: Callable[[], Any]
) -> None:
    store = ObjectPageStore("cold", object_tier(), client)
    store_pages(store, KEYS, [5000])
    store.close()
    proxy.refuses = lambda request: 403 if kind_of(request) in ("PUT", "DELETE") else 0
    store = ObjectPageStore("cold", object_tier().not_written(), client)
    assert_hits(store, KEYS, [5000])
    assert all(finding.level is not Level.ERROR for finding in store.diagnose())
    store.close()


@pytest.mark.parametrize("status", [413, 429, 503, 507])
def test_an_object_store_that_takes_no_writes_for_now_is_read_from_the_start_on(
    proxy: FaultProxy, client: Callable[[], Any], status: int
) -> None:
    store = ObjectPageStore("cold", object_tier(), client)
    store_pages(store, KEYS, [5000])
    store.close()
    proxy.refuses = lambda request: status if kind_of(request) == "PUT" else 0
    store = ObjectPageStore("cold", object_tier(), client)
    assert_hits(store, KEYS, [5000])
    assert not any(result.durable for result in store_pages(store, page_keys(2, "new"), [5000]))
    proxy.refuses = lambda request: 0
    assert set(store_pages(store, page_keys(2, "new"), [5000])) == {SetResult.STORED}
    store.close()
    proxy.refuses = lambda request: {"PUT": status, "GET": 403}.get(kind_of(request), 0)
    with pytest.raises(StoreSetupError, match="read objects"):
        ObjectPageStore("cold", object_tier(), client)


def test_a_slow_object_store_starts_where_each_request_is_in_time(proxy: FaultProxy, client: Callable[[], Any]) -> None:
    proxy.refuses = lambda request: time.sleep(0.3) or 0
    store = ObjectPageStore("cold", object_tier().model_copy(update={"timeout": 1.0}), client)
    assert store.gauges() == {"tier_up": 1.0}
    store.close()


def test_a_bucket_that_cannot_be_listed_does_not_grow_with_every_start_and_says_what_it_does_not_clear(
    proxy: FaultProxy, client: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: every server wrote its pages once more, none found any, and clear() did nothing."""
    store = ObjectPageStore("cold", object_tier(), client)
    store_pages(store, KEYS, [5000])
    store.close()
    before = RawBucket(client()).names("")
    stores = [ObjectPageStore("cold", object_tier(), client) for _ in range(3)]
    proxy.refuses = lambda request: 403 if kind_of(request) == "LIST" else 0
    for store in stores:
        assert set(store_pages(store, KEYS, [5000])) == {SetResult.ERROR}
        assert store.contains(KEYS) == [False] * 6
        assert store.count_leading(KEYS) == 0
        assert set(read_pages(store, KEYS, [5000])[0]) == {GetResult.ERROR}
        store.clear(None)
        store.close()
    proxy.refuses = lambda request: 0
    assert RawBucket(client()).names("") == before
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("removing cleared pages" in line and "HTTP 403" in line for line in said)
    assert sum("every look-up fails" in line and "HTTP 403" in line for line in said) == 3


def test_the_doctor_names_a_proxy_of_the_environment_and_no_login_of_it(
    client: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectPageStore("cold", object_tier(), client)
    assert "proxy" not in {finding.subject for finding in store.diagnose()}
    monkeypatch.setenv("https_proxy", "http://me:hunter2@proxy.internal:3128")
    (finding,) = [finding for finding in store.diagnose() if finding.subject == "proxy"]
    assert "http://proxy.internal:3128" in finding.seen and "hunter2" not in finding.seen + finding.remedy
    monkeypatch.setenv("no_proxy", "*")
    assert "proxy" not in {finding.subject for finding in store.diagnose()}
    store.close()

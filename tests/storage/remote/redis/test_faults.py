"""Servers that die, freeze, forget, run full, redirect or are replaced; afterwards everything works again by itself."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable

import pytest
import redis

from hicache_ext.config import Secret
from hicache_ext.errors import StoreClosedError, StoreSetupError
from hicache_ext.storage.contract.diagnosis import Level
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.redis.topology import slot_of
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    HostPages,
    assert_hits,
    filled,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.rigs.redis_servers import (
    HOST,
    RedisCluster,
    RedisServer,
    make_certificates,
    tls_options,
    wait_until,
)
from tests.storage.remote.redis.conftest import PATIENCE, RawValues, set_timeout, tier_for

# Real servers.
pytestmark = pytest.mark.slow

MIB = 1 << 20
BOUND = 60.0
"""Seconds within which anything here must have ended: far above every timeout, far below for ever."""


class Bound:
    """Fails when its block takes longer than BOUND."""

    def __enter__(self):
        self._begun = time.monotonic()

    def __exit__(self, *_):
        assert time.monotonic() - self._begun < BOUND


def wait_for_hits(store, keys, sizes=(1000,)) -> None:
    """Writes and reads until all pages are hits: the tier has come back by itself."""

    def back() -> bool:
        store_pages(store, keys, sizes)
        results, payloads = read_pages(store, keys, sizes)
        for key, result, payload in zip(keys, results, payloads, strict=True):
            assert result is not GetResult.HIT or payload == payload_of(key, sum(sizes))
        return results == [GetResult.HIT] * len(keys)

    wait_until(back, "the tier", BOUND)


def test_a_server_killed_while_pages_are_read_costs_pages_and_no_wrong_byte(server, open_store):
    store = open_store(server)
    keys, sizes = page_keys(64), [MIB // 2, MIB // 2]
    source = filled(keys, [sizes] * 64)
    store.set(PageBatch(keys, source.buffers))
    target = HostPages([sizes] * 64)
    killer = threading.Timer(0.005, server.kill)
    killer.start()
    with Bound():
        results = store.get(PageBatch(keys, target.buffers))
        while GetResult.ERROR not in results:
            results = store.get(PageBatch(keys, target.buffers))
    killer.join()
    target.assert_guards_intact()
    for number, result in enumerate(results):
        assert result in (GetResult.HIT, GetResult.ERROR)
        assert result is GetResult.ERROR or target.payload(number) == payload_of(keys[number], MIB)
    # Known to be down: no call waits any more.
    assert read_pages(store, keys[:2])[0] == [GetResult.ERROR] * 2
    assert store_pages(store, keys[:2]) == [SetResult.ERROR] * 2
    assert store.contains(keys) == [False] * 64
    # Restarted, and empty.
    server.start()
    wait_for_hits(store, page_keys(8, "after"))
    assert read_pages(store, keys[:8], sizes)[0] == [GetResult.MISS] * 8


def test_a_server_killed_while_pages_are_written_keeps_none_in_part(server, open_store):
    store = open_store(server)
    keys, sizes = page_keys(64), [MIB]
    killer = threading.Timer(0.005, server.kill)
    killer.start()
    with Bound():
        while SetResult.ERROR not in store_pages(store, keys, sizes):
            store.remove(keys)
    killer.join()
    server.start()
    wait_for_hits(store, keys[:4], sizes)


def test_a_frozen_server_costs_one_deadline_and_then_nothing(server, open_store):
    store = open_store(server)
    keys = page_keys(40)
    wait_for_hits(store, keys)
    set_timeout(store, 1.0)
    server.freeze()
    try:
        with Bound():
            # A connection that is late finds out that another one has missed the deadline.
            first = read_pages(store, keys)[0]
            assert GetResult.TIMEOUT in first and set(first) <= {GetResult.TIMEOUT, GetResult.ERROR}
            for _ in range(50):
                assert read_pages(store, keys)[0] == [GetResult.ERROR] * 40
                assert store.count_leading(keys) == 0
        assert store.metrics.value("error", "down") >= 40
    finally:
        server.thaw()
    set_timeout(store, PATIENCE)
    wait_for_hits(store, keys)


def test_a_large_write_to_a_frozen_server_ends_at_the_deadline(server, open_store):
    store = open_store(server)
    keys = page_keys(16)
    set_timeout(store, 0.5)
    server.freeze()
    try:
        with Bound():
            assert set(store_pages(store, keys, [4 * MIB])) <= {SetResult.TIMEOUT, SetResult.ERROR}
    finally:
        server.thaw()
    set_timeout(store, PATIENCE)
    wait_for_hits(store, keys, [4 * MIB])


def test_idle_connections_that_the_server_ended_cost_nothing(server, open_store):
    store = open_store(server)
    keys = page_keys(30)
    store_pages(store, keys, [100_000])
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    time.sleep(0.05)
    assert_hits(store, keys, [100_000])
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert store.contains(keys) == [True] * 30


def test_a_full_server_rejects_pages_and_takes_them_again_when_there_is_room(server, open_store):
    store = open_store(server)
    few, many = page_keys(4, "few"), page_keys(64, "many")
    store_pages(store, few, [100_000])
    server.command("CONFIG", "SET", "maxmemory", "8mb")
    with Bound():
        results = store_pages(store, many, [MIB])
    # EXISTS: stored by this call, which then looked again at what it had not been told of.
    assert SetResult.REJECTED in results
    assert set(results) <= {SetResult.REJECTED, SetResult.STORED, SetResult.EXISTS}
    assert store.metrics.value("rejected", "memory") == results.count(SetResult.REJECTED)
    assert_hits(store, few, [100_000])
    stored = [key for key, result in zip(many, results, strict=True) if result.durable]
    assert_hits(store, stored, [MIB])
    server.command("CONFIG", "SET", "maxmemory", "0")
    wait_for_hits(store, many, [MIB])


def test_an_evicting_server_stays_within_its_memory(server, open_store):
    server.command("CONFIG", "SET", "maxmemory", "16mb")
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    store = open_store(server)
    rounds = [page_keys(16, f"round {number}") for number in range(4)]
    for keys in rounds:
        assert set(store_pages(store, keys, [MIB // 2])) == {SetResult.STORED}
    # Redis evicts by samples, so that which pages are left is not known, only how many can be.
    results, _ = read_pages(store, [key for keys in rounds for key in keys], [MIB // 2])
    assert set(results) == {GetResult.HIT, GetResult.MISS}
    assert results.count(GetResult.HIT) <= 32


def test_a_look_up_leaves_the_order_of_eviction_alone(server, open_store):
    store = open_store(server)
    key = page_keys(1)
    store_pages(store, key)
    client = redis.Redis(host=HOST, port=server.port)

    def idle_seconds() -> int:
        return client.object("idletime", RawValues.name(key[0]))

    def a_write_begins_it_anew() -> bool:
        store_pages(store, key)
        return idle_seconds() == 0

    wait_until(lambda: idle_seconds() >= 2, "an idle page", BOUND)
    store.contains(key)
    store.count_leading(key)
    assert idle_seconds() >= 2
    wait_until(a_write_begins_it_anew, "a page in use", BOUND)
    client.close()


def test_pages_expire_when_a_ttl_is_set(server, open_store):
    store = open_store(server, ttl=1)
    keys = page_keys(3)
    store.register_identity(IDENTITY, {"model": {"id": "a"}})
    wait_for_hits(store, keys)
    wait_until(lambda: store.contains(keys) == [False] * 3, "expiry", BOUND)


def test_a_read_only_server_rejects_pages_and_comes_back(server, open_store):
    store = open_store(server)
    keys = page_keys(4)
    server.command("REPLICAOF", HOST, "1")
    assert set(store_pages(store, keys)) == {SetResult.REJECTED}
    server.command("REPLICAOF", "NO", "ONE")
    wait_for_hits(store, keys)


def test_another_type_under_a_pages_name_is_replaced(server, open_store):
    store = open_store(server)
    keys = page_keys(2)
    server.command("LPUSH", RawValues.name(keys[0]).decode(), "x")
    server.command("LPUSH", RawValues.name(keys[1]).decode(), "x")
    assert read_pages(store, keys[:1])[0] == [GetResult.CORRUPT]
    assert store_pages(store, keys) == [SetResult.STORED] * 2
    assert_hits(store, keys)


def test_a_good_copy_that_replaced_the_bad_one_is_not_removed(server, open_store, monkeypatch):
    import hicache_ext.storage.tiers.redis.store as module

    store, raw = open_store(server), RawValues(server)
    key = page_keys(1)
    store_pages(store, key)
    good = raw.read(key[0])
    raw.write(key[0], good[:-1] + b"\0")
    real = module.remove_bad
    compared = []

    def raced(connection, name, bad):
        raw.write(key[0], good)
        compared.append(real(connection, name, bad))

    monkeypatch.setattr(module, "remove_bad", raced)
    assert read_pages(store, key)[0] == [GetResult.CORRUPT]
    assert store.wait_until_examined(PATIENCE)
    assert compared == [None]
    assert store.metrics.value("suspect", "good") == 1
    assert_hits(store, key)
    raw.close()


def test_clear_never_touches_a_strangers_key(server, open_store):
    store, other = open_store(server), open_store(server, prefix="test:other:")
    store_pages(store, page_keys(20))
    store_pages(other, page_keys(3))
    store.register_identity(IDENTITY, {"model": {"id": "a"}})
    strangers = ["user:1", "test:mine", "test:page:zz", "test", "xtest:page:" + IDENTITY.hex(), "test:identity:me"]
    for name in strangers:
        server.command("SET", name, "1")
    assert store.clear(None) == 1
    client = redis.Redis(host=HOST, port=server.port, decode_responses=True)
    assert {*client.keys()} == {*strangers, *client.keys("test:other:*")}
    client.close()
    assert_hits(other, page_keys(3))


def test_clearing_a_node_that_is_down_keeps_its_pages_out_of_sight_until_it_is_back(server, open_store):
    store, other = open_store(server), open_store(server)
    keys = page_keys(50)
    store_pages(store, keys)
    set_timeout(store, 0.5)
    server.freeze()
    try:
        read_pages(store, keys)
        assert store.clear([IDENTITY]) == 0
    finally:
        server.thaw()
    with Bound():
        while other.contains(keys[:1]) == [True]:
            assert set(read_pages(store, keys)[0]) <= {GetResult.MISS, GetResult.ERROR, GetResult.TIMEOUT}
            time.sleep(0.02)
    set_timeout(store, PATIENCE)
    wait_for_hits(store, keys)


def test_identity_documents_come_back_after_the_server_has_forgotten_them(server, open_store, monkeypatch):
    import hicache_ext.storage.tiers.redis.store as module

    store = open_store(server)
    store.register_identity(IDENTITY, {"model": {"id": "a/b"}})
    name = f"test:identity:{IDENTITY.hex()}"
    assert "a/b" in server.command("GET", name)
    server.command("FLUSHALL")
    store_pages(store, page_keys(1))
    assert "a/b" not in server.command("GET", name)
    monkeypatch.setattr(module, "_IDENTITY_INTERVAL", 0.0)
    store_pages(store, page_keys(2))
    assert "a/b" in server.command("GET", name)


def test_hostile_identity_documents_hide_no_other_one(server, open_store):
    store = open_store(server)
    store.register_identity(IDENTITY, {"model": {"id": "a/b"}})
    hostile = ["[]", "7", "{", "[" * 100_000, '{"a": "' + "a" * MIB + '"}']
    for number, text in enumerate(hostile):
        server.command("SET", f"test:identity:{number:032x}", text)
    server.command("HSET", f"test:identity:{len(hostile):032x}", "a", "b")
    assert store.identities() == {IDENTITY: {"model": {"id": "a/b"}}}


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_one_sentence(tmp_path, open_store):
    with Bound(), pytest.raises(StoreSetupError, match=r"^tier 'pool' cannot start: redis at .*: Connection refused$"):
        open_store(RedisServer(tmp_path))


def test_a_frozen_server_does_not_hold_up_the_opening(server, open_store):
    server.freeze()
    try:
        with Bound(), pytest.raises(StoreSetupError, match="tier 'pool' cannot start"):
            open_store(server, timeout=0.5)
    finally:
        server.thaw()


def test_a_required_server_that_is_slow_at_the_start_is_waited_for(server, open_store, monkeypatch):
    monkeypatch.setattr("hicache_ext.storage.tiers.redis.connection.SHORT_CALL", 0.2)
    server.freeze()
    thaw = threading.Timer(0.5, server.thaw)
    thaw.start()
    try:
        store = open_store(server)
    finally:
        thaw.join()
    wait_for_hits(store, page_keys(5))


def test_a_tier_that_is_not_required_is_attached_when_its_server_comes_up(tmp_path, open_store):
    server = RedisServer(tmp_path / "late")
    store = open_store(server, required=False)
    keys = page_keys(5)
    assert store_pages(store, keys) == [SetResult.ERROR] * 5
    assert read_pages(store, keys)[0] == [GetResult.ERROR] * 5
    assert [finding.level for finding in store.diagnose() if finding.subject != "pages"] == [Level.ERROR]
    with server:
        wait_for_hits(store, keys)


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Secret]:
    """A reference to a secret of this value."""

    def secret(value: str) -> Secret:
        monkeypatch.setenv("POOL_PASSWORD", value)
        return Secret("env", "POOL_PASSWORD")

    return secret


ACL_USER = (
    "user pages on >hunter2 ~test:* -@all +get +set +strlen +exists +unlink +eval +scan +ping +select +cluster|slots "
    "+info +time +config|get +getrange"
)


def test_a_user_with_few_rights_is_enough(tmp_path, open_store, password):
    options = [("user", "default off"), ("user", ACL_USER.removeprefix("user "))]
    with RedisServer(tmp_path / "acl", options) as server:
        store = open_store(server, username="pages", password=password("hunter2"), database=3)
        keys = page_keys(20)
        store_pages(store, keys)
        assert_hits(store, keys)
        assert read_pages(store, keys[:1], [5])[0] == [GetResult.CORRUPT]
        assert store.clear(None) == 1
        assert store.contains(keys) == [False] * 20
        assert all(finding.level is not Level.ERROR for finding in store.diagnose())


@pytest.mark.parametrize("given", [(), ("password",), ("username", "password")])
def test_a_refused_login_is_a_sentence_without_the_secret(tmp_path, open_store, caplog, password, given):
    known = {"username": "pages", "password": password("swordfish")}
    login = {key: known[key] for key in given}
    with RedisServer(tmp_path / "acl", [("requirepass", "hunter2")]) as server:
        with Bound(), pytest.raises(StoreSetupError) as raised:
            open_store(server, **login)
        assert "login" in str(raised.value) or "NOAUTH" in str(raised.value)
        for secret in ("swordfish", "hunter2"):
            assert secret not in str(raised.value) + repr(tier_for(server, **login)) + caplog.text


@pytest.mark.parametrize("client_certificate", [False, True])
def test_pages_travel_over_tls(tmp_path, client_certificate):
    from hicache_ext.storage.tiers.redis.store import RedisPageStore

    ca, certificate, key = make_certificates(tmp_path / "certificates")
    options = tls_options(ca, certificate, key, client_certificates=client_certificate)
    with RedisServer(tmp_path / "tls", options, tls=True) as server:
        files = {"tls_certificate": str(certificate), "tls_key": str(key)} if client_certificate else {}
        url = f"rediss://{HOST}:{server.port}"
        store = RedisPageStore("pool", tier_for(url=url, tls_ca=str(ca), **files))
        try:
            keys = page_keys(40)
            store_pages(store, keys, [100_000, 33_333])
            assert_hits(store, keys, [100_000, 33_333])
            assert store.contains(keys) == [True] * 40
            assert store.clear(None) == 1
            assert all(finding.level is not Level.ERROR for finding in store.diagnose())
            server.kill()
            assert set(read_pages(store, keys)[0]) == {GetResult.ERROR}
            server.start()
            wait_for_hits(store, keys)
        finally:
            store.close()
        with Bound(), pytest.raises(StoreSetupError, match="certificate"):
            RedisPageStore("pool", tier_for(url=url))
        with Bound(), pytest.raises(StoreSetupError, match="cannot start"):
            RedisPageStore("pool", tier_for(server))


def test_a_unix_socket_serves(tmp_path, open_store):
    with (
        tempfile.TemporaryDirectory(prefix="hce-") as directory,  # a socket's path must be short
        RedisServer(tmp_path / "unix", [("unixsocket", path := f"{directory}/redis.sock")]) as server,
    ):
        store = open_store(server, url=f"unix://{path}")
        store_pages(store, page_keys(10))
        assert_hits(store, page_keys(10))
        assert store.clear(None) == 1


def test_a_single_server_is_refused_where_a_cluster_is_meant(server, open_store):
    with pytest.raises(StoreSetupError, match="is not a cluster"):
        open_store(server, cluster=True)


def test_a_forked_child_may_not_use_the_store(server, open_store):
    store = open_store(server)
    store_pages(store, page_keys(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.contains(page_keys(1))
        except StoreClosedError:
            store.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_hits(store, page_keys(1))


def test_close_waits_for_calls_under_way(server, open_store):
    store = open_store(server)
    keys = page_keys(64)
    results: list[SetResult] = []
    entered = threading.Event()

    def write() -> None:
        batch = PageBatch(keys, filled(keys, [[MIB]] * 64).buffers)
        entered.set()
        try:
            results.extend(store.set(batch))
        except StoreClosedError:
            results.extend([SetResult.STORED] * 64)

    thread = threading.Thread(target=write)
    thread.start()
    entered.wait()
    store.close()
    thread.join()
    assert results == [SetResult.STORED] * 64


def test_a_diagnosis_says_what_an_operator_should_change(server, open_store):
    store = open_store(server)
    seen = {finding.seen: finding for finding in store.diagnose()}
    assert any("maxmemory is not set" in text and seen[text].level is Level.WARNING for text in seen)
    assert any("written, read back" in text for text in seen)
    assert any("clock" in text for text in seen)
    server.command("CONFIG", "SET", "maxmemory", "100mb")
    assert any("noeviction" in finding.seen and finding.remedy for finding in store.diagnose())
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server.command("CONFIG", "SET", "appendonly", "yes")
    assert [finding.seen for finding in store.diagnose() if finding.level is Level.WARNING] == [
        "each write goes to its append-only file, too"
    ]
    assert server.command("DBSIZE") == ":0\r\n"


@pytest.mark.parametrize(
    ("there", "level"), [(100, Level.OK), (103, Level.OK), (98, Level.WARNING), (105, Level.WARNING)]
)
def test_a_late_answer_is_no_clock_that_is_off(monkeypatch, there, level):
    from hicache_ext.storage.tiers.redis import diagnosis

    class Late:
        """Was asked at 100 s and has answered at 103 s."""

        def tell(self, *words):
            return [b"%d" % there, b"0"]

    here = iter([100.0, 103.0])
    monkeypatch.setattr(diagnosis.time, "time", lambda: next(here))
    (finding,) = diagnosis._clock("server", Late())
    monkeypatch.undo()
    assert finding.level is level


# -- cluster -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path):
    """A cluster whose nodes the test may kill."""
    with RedisCluster(tmp_path / "cluster") as cluster:
        yield cluster


def keys_by_server(cluster: RedisCluster, keys: list[bytes]) -> dict[int, list[bytes]]:
    owner = {number: [] for number in range(3)}
    for key in keys:
        slot = slot_of(RawValues.name(key))
        owner[next(n for n in range(3) if 16384 * n // 3 <= slot < 16384 * (n + 1) // 3)].append(key)
    return owner


@pytest.mark.parametrize("loss", ["killed", "frozen"])
def test_a_lost_cluster_node_costs_its_own_pages_only(cluster, open_store, loss):
    store = open_store(*cluster.servers[:2])
    keys = page_keys(90)
    store_pages(store, keys)
    owned = keys_by_server(cluster, keys)
    assert all(owned.values())
    lost = cluster.servers[2]
    if loss == "killed":
        lost.kill()
    else:
        lost.freeze()
    # Long enough for nodes on a loaded machine; the frozen one costs it once.
    set_timeout(store, 10.0)
    try:
        with Bound():
            for _ in range(10):
                results = dict(zip(keys, read_pages(store, keys)[0], strict=True))
                assert {results[key] for key in owned[0] + owned[1]} == {GetResult.HIT}
                assert {results[key] for key in owned[2]} <= {GetResult.ERROR, GetResult.TIMEOUT}
                set_timeout(store, PATIENCE)
                time.sleep(0.1)
            assert set(store_pages(store, page_keys(30, "new"))) >= {SetResult.STORED}

        def only_the_lost_one_is_an_error() -> bool:
            errors = [finding.subject for finding in store.diagnose() if finding.level is Level.ERROR]
            assert f"{HOST}:{lost.port}" in errors
            return set(errors) == {f"{HOST}:{lost.port}"}

        wait_until(only_the_lost_one_is_an_error, "a diagnosis", BOUND)
    finally:
        if loss == "killed":
            lost.start()
        else:
            lost.thaw()
    cluster.wait_until_ok()
    wait_for_hits(store, keys)


def test_a_cluster_node_that_is_busy_goes_down_once_and_comes_back(cluster, open_store):
    """Seen: up and down again twice a second, since its probe asked for a page of another node."""
    store = open_store(*cluster.servers)
    keys = page_keys(60)
    store_pages(store, keys)
    owned = keys_by_server(cluster, keys)
    for number, server in enumerate(cluster.servers[:2]):
        for limit in ("lua-time-limit", "busy-reply-threshold"):
            server.command("CONFIG", "SET", limit, "50")
        before = store.metrics.value("node", "down")
        script = threading.Thread(target=server.command, args=("EVAL", "while true do end", "0"))
        script.start()
        try:
            wait_until(lambda before=before: _read(store, keys) and store.metrics.value("node", "down") > before)
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                _read(store, keys)
                store.contains(keys)
            assert _read(store, keys) == 60 - len(owned[number])
            assert store.metrics.value("node", "down") == before + 1
        finally:
            server.command("SCRIPT", "KILL")
            script.join()
        wait_until(lambda: _read(store, keys) == 60)


def _read(store, keys) -> int:
    return read_pages(store, keys)[0].count(GetResult.HIT)


def test_a_cluster_node_that_is_replaced_by_another_is_found(cluster, open_store):
    store = open_store(cluster.servers[0])
    keys = page_keys(90)
    store_pages(store, keys)
    lost = cluster.servers[2]
    lost_id = lost.command("CLUSTER", "MYID").split("\r\n")[1]
    lost.kill()
    new = cluster.new_server("replacement")
    cluster.servers[2] = new
    new.start()
    for server in cluster.servers[:2]:
        server.command("CLUSTER", "FORGET", lost_id)
    new.command("CLUSTER", "ADDSLOTSRANGE", str(16384 * 2 // 3), "16383")
    new.command("CLUSTER", "SET-CONFIG-EPOCH", "9")
    cluster.meet(cluster.servers[0], new)
    wait_for_hits(store, keys)
    owned = keys_by_server(cluster, keys)
    assert new.command("DBSIZE") == f":{len(owned[2])}\r\n"


@pytest.mark.parametrize("left", [[None] * 16384, None], ids=["no slots", "no cluster"])
def test_a_node_that_has_forgotten_its_cluster_does_not_empty_the_map(left, tmp_path, open_store, monkeypatch):
    """Restarted on an empty disk, a node answers CLUSTER SLOTS with nothing, and may be the first to be asked; or it
    came back as a server of its own."""
    from hicache_ext.storage.tiers.redis.config import Endpoint
    from hicache_ext.storage.tiers.redis.topology import Topology

    with RedisServer(tmp_path / "a") as first, RedisServer(tmp_path / "b") as second:
        halves = [Endpoint(HOST, server.port) for server in (first, second) for _ in range(8192)]
        known = {first.port: halves, second.port: halves}
        asked: list[int] = []

        def map_of(topology, node):
            asked.append(node.endpoint.port)
            return known[node.endpoint.port]

        monkeypatch.setattr(Topology, "_map_of", map_of)
        store = open_store(first, second)
        keys = page_keys(40)
        store_pages(store, keys)
        for forgetful in (first, second):
            known[forgetful.port] = left
            asked.clear()
            store._topology.refresh_soon()
            wait_until(lambda: bool(asked) and known[asked[-1]] == halves, "a look at the map", BOUND)
            time.sleep(0.05)
            assert_hits(store, keys)
            known[forgetful.port] = halves


def test_pages_of_slots_that_move_are_absent_until_the_map_names_their_node(cluster, open_store):
    """ASK while a slot is on its way, and its pages that have left are absent; MOVED has the map looked at."""
    store = open_store(cluster.servers[0])
    keys = page_keys(60)
    store_pages(store, keys)
    moving = keys_by_server(cluster, keys)[0][:4]
    source, target = cluster.servers[0], cluster.servers[1]
    ids = [server.command("CLUSTER", "MYID").split("\r\n")[1] for server in (source, target)]
    for key in moving:
        slot, name = str(slot_of(RawValues.name(key))), RawValues.name(key).decode()
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        source.command("MIGRATE", HOST, str(target.port), name, "0", "5000")
    nodes = store._topology.nodes
    looks = store._topology._last_look
    for _ in range(3):
        assert read_pages(store, keys)[0] == [GetResult.MISS if key in moving else GetResult.HIT for key in keys]
        assert store.contains(keys) == [key not in moving for key in keys]
        assert store.remove(moving) == 0
        assert store_pages(store, keys) == [SetResult.REJECTED if key in moving else SetResult.EXISTS for key in keys]
    assert store.metrics.value("redirect", "ask") > 0
    assert store.metrics.value("rejected", "moving") == 3 * 4
    assert store.metrics.value("node", "down") == store.metrics.value("redirect", "moved") == 0
    assert store._topology.nodes == nodes and store._topology._last_look == looks
    for key in moving:
        slot = str(slot_of(RawValues.name(key)))
        for server in (target, source, cluster.servers[2]):
            server.command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    results, _ = read_pages(store, keys)
    assert set(results) == {GetResult.HIT, GetResult.MISS}
    assert [key for key, result in zip(keys, results, strict=True) if result is GetResult.MISS] == moving
    wait_until(lambda: store.contains(keys) == [True] * len(keys), "a look at the map", BOUND)
    assert_hits(store, keys)
    assert store.metrics.value("redirect", "moved") > 0
    assert store.metrics.value("node", "down") == 0
    moved = store.metrics.value("redirect", "moved")
    time.sleep(1.0)
    assert_hits(store, keys)
    assert store.metrics.value("redirect", "moved") == moved


def test_a_node_that_goes_down_while_no_thread_can_be_had_comes_back(server, open_store, monkeypatch):
    store, start, fails = open_store(server), threading.Thread.start, [True]
    (node,) = store._topology.nodes

    def no_thread(thread):
        if fails and thread.name.endswith("-node"):
            raise RuntimeError("can't start new thread")
        start(thread)

    assert store.contains(page_keys(1)) == [False]
    wait_until(
        lambda: node.up and not any(one.name.endswith("-node") for one in threading.enumerate()), "a rest", BOUND
    )
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    node.mark_down(TimeoutError("slow once"))
    assert not node.up
    fails.clear()
    wait_until(lambda: node.up, "the node", BOUND)


def test_the_node_that_says_that_a_slot_has_moved_is_the_first_that_is_asked_for_the_map(
    empty_cluster, open_store, monkeypatch
):
    """Another one may have lost its fellows, and answers from an old map."""
    store = open_store(empty_cluster.servers[0])
    topology, asked = store._topology, []
    real = topology._map_of
    monkeypatch.setattr(topology, "_map_of", lambda node: (asked.append(node.endpoint), real(node))[1])
    for node in topology.nodes:
        asked.clear()
        topology.refresh_soon(node)
        wait_until(lambda: asked, "a look at the map", BOUND)
        assert asked[0] == node.endpoint
        wait_until(lambda: not topology._refresh_wanted, "the end of the look", BOUND)


def test_a_cluster_has_no_other_database(empty_cluster, open_store):
    with pytest.raises(StoreSetupError, match="only database 0"):
        open_store(empty_cluster.servers[0], database=1)


def test_the_pages_of_one_conversation_are_spread_over_the_cluster(empty_cluster, open_store: Callable):
    store = open_store(empty_cluster.servers[0])
    store_pages(store, page_keys(300))
    counts = [int(server.command("DBSIZE")[1:]) for server in empty_cluster.servers]
    assert sum(counts) == 300 and min(counts) > 50


def test_a_cluster_that_is_taken_for_a_single_server_fails_and_goes_not_up_and_down(empty_cluster, open_store):
    store = open_store(empty_cluster.servers[0], cluster=False)
    downs = store.metrics.value("node", "down")
    for _ in range(5):
        assert store.contains(page_keys(20)) == [False] * 20
    assert store.metrics.value("node", "down") == downs
    assert store.metrics.value("error", "CROSSSLOT") == 100

"""What happens to Redis servers in the field: they become replicas, run full, move, answer late."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis

from hicache_ext import native
from hicache_ext.runtime import breaker
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.redis import node, topology
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, read_pages, store_pages
from tests.rigs.redis_servers import HOST, RedisServer
from tests.storage.remote.redis.conftest import PREFIX, set_timeout, tier_of
from tests.storage.remote.redis.fake_server import FakeServer
from tests.storage.remote.redis.test_faults import Bound, wait_for_hits
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


# -- a server that refuses writes --------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer(tmp_path / "one") as one, RedisServer(tmp_path / "other") as other:
        other.command("REPLICAOF", HOST, str(one.port))
        wait_until(lambda: "master_link_status:up" in other.command("INFO", "replication"))
        yield one, other


def wait_for_replica(ask: Callable[..., str]) -> None:
    """Wait until the replica of the server that ``ask`` asks has all that was written so far. WAIT would not do: it
    waits for the writes of its own connection, and this one has written nothing."""

    def has_all() -> bool:
        facts = ask("INFO", "replication")
        written = re.search(r"master_repl_offset:(\d+)", facts)
        return written is not None and f"state=online,offset={written[1]}," in facts

    wait_until(has_all, "the replica")


def swap(old: RedisServer, new: RedisServer) -> None:
    """A failover: the new one is a primary, and the old one its replica, with all pages."""
    wait_for_replica(lambda *words: old.command(*words))
    new.command("REPLICAOF", "NO", "ONE")
    old.command("REPLICAOF", HOST, str(new.port))
    wait_until(lambda: "master_link_status:up" in old.command("INFO", "replication"))


def test_a_server_that_became_a_replica_is_read_and_its_writes_pause_with_one_line(pair, open_store, caplog) -> None:
    """Seen: each write took the node down, 110 lines a second, and good reads failed between them."""
    one, other = pair
    store = open_store(one)
    keys, new = page_keys(16), page_keys(200, "new")
    store_pages(store, keys)
    swap(one, other)
    caplog.set_level(logging.INFO)
    caplog.clear()
    outcomes: list[SetResult] = []
    began = time.monotonic()
    while time.monotonic() - began < 3:
        outcomes += store_pages(store, [new[len(outcomes) % 200], *keys[:1]])
        assert_hits(store, keys)
    assert set(outcomes[::2]) == {SetResult.REJECTED}
    # What is there is said to be there.
    assert set(outcomes[1::2]) == {SetResult.EXISTS}
    assert [node.up for node in store._topology.nodes] == [True]
    # One of the node, and one of the tier, which tells what to do.
    pause, failing = lines_of(caplog)
    assert "refuses writes (readonly)" in pause and "every write fails (readonly)" in failing
    assert store.metrics.value("rejected", "readonly") == len(outcomes[::2])


def test_the_pauses_of_a_replica_grow_and_end_with_the_first_write_that_is_taken(pair, open_store, monkeypatch) -> None:
    one, other = pair
    monkeypatch.setattr(breaker, "WRITE_PAUSES", node.Backoff(0.2, 1.6))
    store = open_store(one)
    swap(one, other)
    tried = []
    began = time.monotonic()
    while time.monotonic() - began < 3:
        refused = store._topology.nodes[0].writes._refused
        store_pages(store, page_keys(1, f"at {time.monotonic()}"))
        if store._topology.nodes[0].writes._refused > refused:
            tried.append(time.monotonic() - began)
        time.sleep(0.01)
    assert 3 <= len(tried) <= 7
    one.command("REPLICAOF", "NO", "ONE")
    keys = page_keys(8, "again")
    wait_until(lambda: set(store_pages(store, keys)) <= {SetResult.STORED, SetResult.EXISTS})
    assert_hits(store, keys)
    assert not store._topology.nodes[0].writes.in_doubt


def test_a_full_server_says_what_it_has_and_is_asked_for_room_now_and_then(server, open_store) -> None:
    """Seen: while writes paused, what was there was answered REJECTED, and SGLang lost its place."""
    store = open_store(server)
    keys, new = page_keys(8), page_keys(4, "new")
    store_pages(store, keys)
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1")
    try:
        for _ in range(5):
            assert store_pages(store, [*new, *keys]) == [SetResult.REJECTED] * 4 + [SetResult.EXISTS] * 8
            assert_hits(store, keys)
    finally:
        server.command("CONFIG", "SET", "maxmemory", "0")
    wait_until(lambda: set(store_pages(store, new)) <= {SetResult.STORED, SetResult.EXISTS})


# -- names and addresses -----------------------------------------------------------------------------------------------


class Names:
    """What the name ``pool.test`` leads to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[tuple[str, int]] = []
        real = socket.getaddrinfo

        def getaddrinfo(host: str, port: int, *others: object, **options: object) -> list[object]:
            if host != "pool.test":
                return real(host, port, *others, **options)
            kinds = {True: socket.AF_INET6, False: socket.AF_INET}
            found = []
            for address, number in self.addresses:
                tail = (0, 0) if ":" in address else ()
                found.append((kinds[":" in address], socket.SOCK_STREAM, 6, "", (address, number, *tail)))
            return found

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def open(self, **changes: object) -> RedisPageStore:
        return RedisPageStore("pool", tier_of(url="redis://pool.test:1", **changes))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def test_all_addresses_of_a_name_are_tried(server, names: Names) -> None:
    """The first of most names is an IPv6 address, and many servers listen on IPv4 alone."""
    with socket.create_server((HOST, 0)) as closed:
        nobody = closed.getsockname()[1]
    names.addresses = [("::1", server.port), (HOST, nobody), (HOST, server.port)]
    store = names.open()
    try:
        keys = page_keys(8)
        assert set(store_pages(store, keys)) == {SetResult.STORED}
        assert_hits(store, keys)
    finally:
        store.close()


def test_a_name_that_moves_is_followed_while_the_old_server_lives(tmp_path, names: Names, monkeypatch) -> None:
    monkeypatch.setattr(topology, "_NAMES_INTERVAL", 0.1)
    monkeypatch.setattr(topology, "_REFRESH_INTERVAL", 0.1)
    with RedisServer(tmp_path / "old") as old, RedisServer(tmp_path / "new") as new:
        names.addresses = [(HOST, old.port)]
        store = names.open()
        try:
            store_pages(store, page_keys(8))
            names.addresses = [(HOST, new.port)]
            keys = page_keys(1, "moved")
            wait_until(lambda: store_pages(store, [*keys]) == [SetResult.EXISTS] and _keys_of(new) == 1)
            assert_hits(store, keys)
            before = _keys_of(old)
            store_pages(store, page_keys(8, "after"))
            assert _keys_of(old) == before
            assert [node.up for node in store._topology.nodes] == [True]
        finally:
            store.close()


def _keys_of(server: RedisServer) -> int:
    return int(server.command("DBSIZE").strip().removeprefix(":"))


def test_connections_do_not_grow_old(server, open_store, monkeypatch) -> None:
    store = open_store(server)
    keys = page_keys(8)
    store_pages(store, keys)
    opened = store.metrics.value("connection", "opened")
    assert_hits(store, keys)
    assert store.metrics.value("connection", "opened") <= opened + 1
    monkeypatch.setattr(node, "_OLDEST", 0.0)
    for _ in range(3):
        assert_hits(store, keys)
    assert store.metrics.value("connection", "opened") >= opened + 3


# -- many nodes that are gone ------------------------------------------------------------------------------------------


def test_dead_nodes_are_probed_side_by_side(server) -> None:
    """Seen: ten dead nodes of twelve cost six seconds at each look."""
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(10)]
        ports = [listener.getsockname()[1] for listener in silent]
        began = time.monotonic()
        store = RedisPageStore("pool", tier_of(*ports, server.port, required=False))
        try:
            keys = page_keys(4)
            wait_until(lambda: SetResult.STORED in store_pages(store, keys))
            # One second for the first, and one for all others together; one after the other they would take ten.
            assert time.monotonic() - began < 6
        finally:
            store.close()


# -- answers that nobody asked for -------------------------------------------------------------------------------------


class Stray:
    """A server without pages, which sends a reply too many when it is told to."""

    def __init__(self) -> None:
        self.before: dict[bytes, bytes] = {}
        self.stored: dict[bytes, bytes] = {}

    def answer(self, words: list[bytes]) -> bytes:
        if words[0] == b"STRLEN":
            reply = b":%d\r\n" % len(self.stored.get(words[1], b""))
        elif words[0] == b"SET" and b"page" in words[1]:
            self.stored[words[1]] = words[2]
            reply = b"+OK\r\n"
        elif words[0] == b"EXISTS":
            reply = b":%d\r\n" % sum(name in self.stored for name in words[1:])
        elif words[0] == b"GET":
            value = self.stored.get(words[1])
            reply = b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        else:
            reply = b"-ERR unknown command\r\n" if words[0] == b"CLUSTER" else b"+OK\r\n"
        return self.before.pop(words[0], b"") + reply


def open_stray(server: FakeServer, monkeypatch: pytest.MonkeyPatch, way: str) -> RedisPageStore:
    if way == "plain":
        monkeypatch.setattr(native, "LIBRARY", Path("/nowhere"))
    tier = tier_of(server.endpoint.port, cluster=False, connections=1, prefix=PREFIX)
    return RedisPageStore("pool", tier)


@pytest.mark.parametrize("way", ["native", "plain"])
@pytest.mark.parametrize("word", [b"STRLEN", b"SET"])
def test_a_reply_too_many_in_the_middle_of_a_write_makes_no_page_exist(monkeypatch, word: bytes, way: str) -> None:
    """Seen: ``set`` answered EXISTS for a page that was not there."""
    stray = Stray()
    with FakeServer(stray.answer) as server:
        store = open_stray(server, monkeypatch, way)
        try:
            keys = page_keys(4)
            store_pages(store, page_keys(1, "first"))
            stray.before[word] = b":1128\r\n" if word == b"STRLEN" else b"$-1\r\n"
            results = store_pages(store, keys)
            present = dict(zip(keys, store.contains(keys), strict=True))
            for key, result in zip(keys, results, strict=True):
                assert present[key] or not result.durable
        finally:
            store.close()


def send_everywhere(server: FakeServer, reply: bytes) -> None:
    for connection in server.open_sockets():
        # The client has dropped one that it distrusts, and the server may not know yet.
        with contextlib.suppress(OSError):
            connection.sendall(reply)
    time.sleep(0.1)


@pytest.mark.parametrize("way", ["native", "plain"])
def test_a_reply_too_many_on_an_idle_connection_shifts_nothing(monkeypatch, way: str) -> None:
    stray = Stray()
    with FakeServer(stray.answer) as server:
        store = open_stray(server, monkeypatch, way)
        try:
            store_pages(store, page_keys(1, "first"))
            send_everywhere(server, b":1128\r\n")
            keys = page_keys(4)
            assert store.contains(keys) == [False] * 4
            send_everywhere(server, b":1\r\n")
            assert store_pages(store, keys) == [SetResult.STORED] * 4
            assert store.contains(keys) == [True] * 4
        finally:
            store.close()


def test_an_answer_to_a_look_up_with_a_reply_too_many_is_absence(monkeypatch) -> None:
    stray = Stray()
    with FakeServer(stray.answer) as server:
        store = open_stray(server, monkeypatch, "native")
        try:
            store_pages(store, page_keys(1, "first"))
            stray.before[b"EXISTS"] = b":4\r\n"
            assert store.contains(page_keys(4)) == [False] * 4
        finally:
            store.close()


# -- a server that comes and goes---------------------------------------------------------------------------------------


def test_a_server_that_comes_and_goes_leaves_no_descriptor_no_thread_and_few_lines(
    tmp_path, open_store, caplog
) -> None:
    caplog.set_level(logging.INFO)
    server = RedisServer(tmp_path / "redis")
    server.start()
    store = open_store(server)
    keys = page_keys(32)
    wait_for_hits(store, keys)
    caplog.clear()
    descriptors, threads = [], threading.active_count()
    for _ in range(8):
        server.kill()
        for _ in range(20):
            results = store_pages(store, keys)
            assert set(results) <= {SetResult.ERROR, SetResult.EXISTS, SetResult.STORED}
            assert GetResult.CORRUPT not in read_pages(store, keys)[0]
        server.start()
        wait_for_hits(store, keys)
        # Threads that probed end a moment later.
        wait_until(lambda: threading.active_count() <= threads)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    server.stop()
    # The first rounds open what later ones use.
    assert max(descriptors[4:]) <= max(descriptors[:4])
    # Of 8 outages and returns, each kind of line at most once in 10 s.
    assert len(lines_of(caplog)) <= 8


# -- the native talk ---------------------------------------------------------------------------------------------------


def test_a_server_that_ends_amid_replies_costs_no_page_that_a_second_try_can_have(server, open_store) -> None:
    store = open_store(server, connections=2)
    keys = page_keys(64)
    store_pages(store, keys, (100_000,))
    for _ in range(5):
        killer = threading.Timer(0.005, lambda: server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
        killer.start()
        results, _ = read_pages(store, keys, (100_000,))
        killer.join()
        assert GetResult.CORRUPT not in results
    with Bound():
        wait_for_hits(store, keys, (100_000,))


def test_a_call_that_a_slow_server_cuts_ends_at_its_deadline(server, open_store) -> None:
    store = open_store(server)
    keys = page_keys(16)
    store_pages(store, keys, (1_000_000,))
    set_timeout(store, 0.5)
    server.freeze()
    try:
        began = time.monotonic()
        results, _ = read_pages(store, keys, (1_000_000,))
        assert time.monotonic() - began < 0.75
        assert set(results) <= {GetResult.TIMEOUT, GetResult.ERROR}
    finally:
        server.thaw()
    with Bound():
        wait_for_hits(store, keys, (1_000_000,))


# -- clear() on bad days -----------------------------------------------------------------------------------------------


def test_pages_cleared_before_the_server_was_reached_do_not_come_back(server, open_store, monkeypatch) -> None:
    """Seen: there was no node to sweep, the clearing ended well, and old pages were served once the server was up."""
    keys = page_keys(8)
    store_pages(open_store(server), keys)
    back = threading.Event()
    real = node.open_connection

    def refuse(*others: object, **options: object) -> object:
        if not back.is_set():
            raise ConnectionRefusedError("connection refused")
        return real(*others, **options)

    monkeypatch.setattr(node, "open_connection", refuse)
    store = open_store(server, required=False)
    store.clear(None)
    time.sleep(0.5)
    back.set()
    wait_until(lambda: any(one.up for one in store._topology.nodes))
    assert set(read_pages(store, keys)[0]) == {GetResult.MISS}
    wait_until(lambda: _keys_of(server) == 0)
    assert set(store_pages(store, keys)) == {SetResult.STORED}
    assert_hits(store, keys)


def test_long_names_of_strangers_below_the_prefix_keep_no_page_from_being_cleared(server, open_store) -> None:
    """Seen: the answer was too long to be read, and each sweep failed."""
    store = open_store(server)
    store_pages(store, page_keys(8))
    with closing(redis.Redis(host=HOST, port=server.port)) as client:
        client.set(f"{PREFIX}page:" + 9 * 2**20 * "x", b"a stranger's")
        client.set(f"{PREFIX}identity:" + 9 * 2**20 * "x", b"a stranger's")
        assert store.clear(None) == 1
        wait_until(lambda: client.dbsize() == 2)
    assert store._clearing.wait(5.0)

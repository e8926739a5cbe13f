"""A server that cuts, lengthens or swaps what it sends: no wrong byte, no byte beside the page, no error for SGLang."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from hicache_ext.config import Secret
from hicache_ext.errors import ClearLaterError, StoreError, StoreSetupError
from hicache_ext.storage.contract import abilities
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.redis import node
from hicache_ext.storage.tiers.redis import store as store_module
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import Connection, open_connection
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import (
    HostPages,
    filled,
    page_key,
    page_keys,
    payload_of,
)
from hicache_ext.testing.conformance.second_reader import write_page_object
from tests.rigs.small_memory import run_in_small_memory
from tests.storage.remote.redis.conftest import PATIENCE, set_timeout
from tests.storage.remote.redis.fake_server import FakeServer, nothing_here
from tests.waiting import ending_within

SIZES = [40, 30]
KEY = page_key("asked for")


def value_of(key: bytes) -> bytes:
    return write_page_object(key, payload_of(key, sum(SIZES)), header_length=128)


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


GOOD = bulk(value_of(KEY))


def open_store(server: FakeServer, **changes) -> RedisPageStore:
    tier = {"url": f"redis://{server.endpoint}", "connections": 1, "timeout": PATIENCE, **changes}
    with server.honest():
        return RedisPageStore("pool", RedisTierConfig(cluster=False, **tier))


def get(store: RedisPageStore, keys: list[bytes]) -> tuple[list[GetResult], HostPages]:
    pages = HostPages([SIZES] * len(keys), fill=0x77)
    results = store.get(PageBatch(keys, pages.buffers))
    pages.assert_guards_intact()
    return results, pages


def test_a_reply_cut_at_any_byte_is_no_hit_and_the_next_read_is_served():
    cut_at: list[int | None] = [None]

    def answer(words: list[bytes]) -> bytes | None:
        return GOOD if cut_at[0] is None else GOOD[: cut_at[0]]

    with FakeServer(answer) as server:
        store = open_store(server)
        for length in range(len(GOOD)):
            cut_at[0], server.end_after_answer = length, True
            results, _ = get(store, [KEY])
            assert results == [GetResult.ERROR], length
            cut_at[0], server.end_after_answer = None, False
            results, pages = get(store, [KEY])
            assert results == [GetResult.HIT], length
            assert pages.payload(0) == payload_of(KEY, sum(SIZES))
        assert store.metrics.value("error", "connection") == len(GOOD)
        store.close()


@pytest.mark.parametrize(
    ("sent", "result"),
    [
        (b":1\r\n", GetResult.ERROR),
        (b"+OK\r\n", GetResult.ERROR),
        (b"*1\r\n" + GOOD, GetResult.ERROR),
        (b"-ERR something\r\n", GetResult.ERROR),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", GetResult.ERROR),
        (GOOD[:-2] + b"xx", GetResult.ERROR),
        (b"$%d\r\n" % (1 << 29) + bytes(1000), GetResult.CORRUPT),
        (b"$9999999999\r\n", GetResult.ERROR),
        (b"-MOVED 1 127.0.0.1:1\r\n", GetResult.ERROR),
        (b"-ASK 1 127.0.0.1:1\r\n", GetResult.ERROR),
        (b"-MOVED 1 /etc/passwd:1\r\n", GetResult.ERROR),
        (b"-MOVED 99999 :0\r\n", GetResult.ERROR),
        (b"-MOVED 1 127.0.0.1:99999\r\n", GetResult.ERROR),
        (bulk(value_of(KEY) + b"x"), GetResult.CORRUPT),
        (bulk(value_of(KEY)[:-1]), GetResult.CORRUPT),
        (bulk(value_of(KEY)[: -sum(SIZES) // 2]), GetResult.CORRUPT),
        (bulk(b""), GetResult.CORRUPT),
        (bulk(value_of(page_key("another"))), GetResult.CORRUPT),
        (bulk(value_of(KEY)[:-1] + b"\0"), GetResult.CORRUPT),
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", GetResult.CORRUPT),
    ],
)
def test_a_wrong_reply_costs_its_own_page_and_no_other(sent, result):
    first, last = page_keys(2)

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"STRLEN":
            return sent if sent.startswith(b"-") else b":%b\r\n" % sent[1:].partition(b"\r")[0]
        if words[0] == b"GETRANGE":
            return bulk(bytes(int(words[3]) + 1))
        if words[0] != b"GET":
            return b":1\r\n"
        key = bytes.fromhex(words[1].decode()[-64:])
        if key == KEY[16:]:
            return sent
        return bulk(value_of(first if key == first[16:] else last))

    with FakeServer(answer) as server:
        store = open_store(server)
        results, pages = get(store, [first, KEY, last])
        assert results == [GetResult.HIT, result, GetResult.HIT]
        assert (pages.payload(0), pages.payload(2)) == (payload_of(first, 70), payload_of(last, 70))
        assert store.wait_until_examined(PATIENCE)
        removals = [words for words in server.requests if words[0] in (b"EVAL", b"UNLINK")]
        assert [words[0] for words in removals] == ([b"EVAL"] if result is GetResult.CORRUPT else [])
        store.close()


def test_a_value_that_comes_damaged_every_time_in_another_way_is_never_removed():
    replies = 0

    def answer(words: list[bytes]) -> bytes:
        nonlocal replies
        if words[0] != b"GET":
            return b":%d\r\n" % len(value_of(KEY))
        replies += 1
        return bulk(value_of(KEY)[:-2] + replies.to_bytes(2, "big"))

    with FakeServer(answer) as server:
        store = open_store(server)
        results, _ = get(store, [KEY])
        assert results == [GetResult.CORRUPT]
        assert store.wait_until_examined(PATIENCE)
        assert replies > 2
        assert not [words for words in server.requests if words[0] in (b"EVAL", b"UNLINK")]
        assert store.metrics.value("suspect", "unclear") == 1
        assert store.contains([KEY]) == [False]
        keys = [KEY]
        assert store.set(PageBatch(keys, filled(keys, [SIZES]).buffers)) == [SetResult.REJECTED]
        store.close()


def test_a_server_without_scripts_is_asked_to_remove_what_two_connections_found_bad():
    bad = value_of(KEY)[:-1] + b"\0"

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"EVAL":
            return b"-ERR unknown command 'EVAL'\r\n"
        return bulk(bad) if words[0] == b"GET" else b":%d\r\n" % (len(bad) if words[0] == b"STRLEN" else 1)

    with FakeServer(answer) as server:
        store = open_store(server)
        assert get(store, [KEY])[0] == [GetResult.CORRUPT]
        assert store.wait_until_examined(PATIENCE)
        # The keeper's connection served the read; the read once more, the looks, and the removal have their own.
        assert server.connections <= 6
        assert store.metrics.value("suspect", "removed") == 1
        store.close()


def test_more_bytes_than_were_asked_for_close_the_connection():
    with FakeServer(lambda words: GOOD + b"+surplus\r\n") as server:
        store = open_store(server)
        before = server.connections
        for reads in range(3):
            results, _ = get(store, [KEY])
            assert results == [GetResult.HIT]
            # The first read is served by the connection that the start has left.
            assert server.connections == before + reads
        store.close()


def test_replies_in_another_order_are_no_hits():
    keys = page_keys(2)
    other = {key.hex().encode()[-64:]: value_of(keys[1 - number]) for number, key in enumerate(keys)}
    with FakeServer(lambda words: bulk(other[words[1][-64:]]) if words[0] == b"GET" else b":0\r\n") as server:
        store = open_store(server)
        assert get(store, keys)[0] == [GetResult.CORRUPT, GetResult.CORRUPT]
        store.close()


def test_a_server_that_sends_a_byte_now_and_then_is_left_at_the_deadline():
    def answer(words: list[bytes]) -> bytes:
        time.sleep(0.05)
        return GOOD[:3]

    with FakeServer(answer) as server:
        store = open_store(server)
        set_timeout(store, 0.4)
        begun = time.monotonic()
        # Were the deadline begun anew with every byte, it would come after more than a minute.
        assert set(get(store, page_keys(1500))[0]) <= {GetResult.TIMEOUT, GetResult.ERROR}
        assert time.monotonic() - begun < 30
        store.close()


@pytest.mark.parametrize("sent", [b":1\r\n", b"$2\r\nOK\r\n", b"+QUEUED\r\n", b"-ERR no\r\n", b"garbage\r\n"])
def test_a_wrong_answer_to_a_write_is_an_error(sent):
    with FakeServer(lambda words: b":0\r\n" if words[0] == b"STRLEN" else sent) as server:
        store = open_store(server)
        keys = page_keys(1)
        assert store.set(PageBatch(keys, filled(keys, [SIZES]).buffers)) == [SetResult.ERROR]
        store.close()


@pytest.mark.parametrize("sent", [b"+OK\r\n", b"$-1\r\n", b"$0\r\n\r\n", b"garbage\r\n"])
def test_a_wrong_answer_to_the_look_before_a_write_is_an_error(sent):
    with FakeServer(lambda words: sent if words[0] == b"STRLEN" else b"+OK\r\n") as server:
        store = open_store(server)
        keys = page_keys(1)
        assert store.set(PageBatch(keys, filled(keys, [SIZES]).buffers)) == [SetResult.ERROR]
        store.close()


@pytest.mark.parametrize("sent", [b"+OK\r\n", b"$-1\r\n", b"-ERR no\r\n", b"garbage\r\n", None])
def test_a_wrong_answer_to_a_look_up_is_absence(sent):
    with FakeServer(lambda words: sent) as server:
        store = open_store(server)
        keys = page_keys(3)
        assert store.contains(keys) == [False] * 3
        assert store.count_leading(keys) == 0
        assert store.remove(keys) == 0
        assert store.metrics.total("error") > 0
        store.close()


def test_a_read_that_is_cut_ends_by_the_limit_of_its_call_and_what_came_is_a_leading_run(monkeypatch):
    # So that small pages are dealt to all connections.
    monkeypatch.setattr(store_module, "_NATIVE_SHARE", 1)
    """SGLang uses the leading run alone: pages that came behind a gap would have been sent in vain."""
    size, answered = 32 * 1024, 5
    keys = page_keys(40)
    values = {key: bulk(write_page_object(key, payload_of(key, size), header_length=128)) for key in keys}
    go_on = threading.Event()
    on_connection: Counter[int] = Counter()

    def answer(words: list[bytes]) -> bytes | None:
        on_connection[threading.get_ident()] += 1
        if on_connection[threading.get_ident()] > answered:
            go_on.wait(60)
            return None
        return values[bytes.fromhex(words[1].decode().replace("hicache_ext:page:", "").replace(":", ""))]

    with FakeServer(answer) as server:
        store = open_store(server, connections=4)
        pages = HostPages([[size]] * 40, fill=0x77)
        begun = time.monotonic()
        with ending_within(1.0):
            results = store.get(PageBatch(keys, pages.buffers))
        assert time.monotonic() - begun < PATIENCE
        assert results == [GetResult.HIT] * 20 + [GetResult.TIMEOUT] * 20
        assert [pages.payload(number) for number in range(20)] == [payload_of(key, size) for key in keys[:20]]
        go_on.set()
        store.close()


def test_a_server_that_cannot_be_reached_for_whatever_reason_stops_the_start(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("nobody expects this")

    monkeypatch.setattr(node, "open_connection", broken)
    with FakeServer(lambda words: None) as server, pytest.raises(StoreSetupError, match="nobody expects this"):
        open_store(server)


# -- numbers, lists and names without a bound --------------------------------------------------------------------------

OPENED = """
import sys
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.store import RedisPageStore
limit(1024)
for address in sys.argv[1:]:
    try:
        RedisPageStore("pool", RedisTierConfig(url=f"redis://{address}", timeout=20.0)).close()
    except StoreSetupError as error:
        print(error)
    else:
        print("taken")
"""


def cluster_of(answer_to_slots: bytes):
    """Answers for a server that says this to CLUSTER SLOTS."""

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"HELLO":
            return b"%1\r\n$5\r\nproto\r\n:3\r\n"
        return answer_to_slots if words[:2] == [b"CLUSTER", b"SLOTS"] else b"+OK\r\n"

    return answer


def slots(first: int, last: int, host: bytes, port: int) -> bytes:
    return b"*3\r\n:%d\r\n:%d\r\n*2\r\n%b:%d\r\n" % (first, last, bulk(host), port)


NO_MAPS = {
    "a range without end": b"*1\r\n" + slots(0, 10**9, b"127.0.0.1", 1),
    "below 0": b"*1\r\n" + slots(-10, 5, b"127.0.0.1", 1),
    "backwards": b"*1\r\n" + slots(5, 0, b"127.0.0.1", 1),
    "no port": b"*1\r\n" + slots(0, 16383, b"127.0.0.1", 10**9),
    "a path, to which nothing goes by TLS": b"*1\r\n" + slots(0, 16383, b"/run/redis.sock", 1),
    "a long name": b"*1\r\n" + slots(0, 16383, b"a" * 60000, 1),
    "twice": b"*2\r\n" + slots(0, 16383, b"127.0.0.1", 1) * 2,
    "nested": b"*1\r\n" * 20000 + slots(0, 16383, b"127.0.0.1", 1),
    "a list without end": b"*%d\r\n" % 10**9 + bulk(bytes(60000)) * 300,
    "a text without end": b"$%d\r\n" % 10**12 + bytes(64 << 20),
    "a line without end": b"*1\r\n" + b":1" + bytes(64 << 20),
    "many nodes": b"*2500\r\n" + b"".join(slots(n, n, b"node%d" % n, 1) for n in range(2500)),
}


def test_maps_that_no_cluster_has_are_refused_in_a_sentence_and_in_little_memory():
    """Seen: slots up to 10^9 were a list of 8 GB."""
    with ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(cluster_of(answer))) for answer in NO_MAPS.values()]
        said = run_in_small_memory(OPENED, *(server.endpoint for server in servers)).splitlines()
    refused = re.compile("tier 'pool' cannot start: redis at 127.0.0.1:[0-9]+: [a-zA-Z ()]+")
    assert {what: line for what, line in zip(NO_MAPS, said, strict=True) if not refused.fullmatch(line)} == {}


def test_pages_that_are_moved_each_to_another_host_do_not_cost_a_node_each():
    """Seen: 408 threads and 394 descriptors."""
    moved = iter(range(10**9))

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"GET":
            number = next(moved)
            return b"-MOVED %d 127.%d.%d.1:1\r\n" % (number % 16384, number // 250 % 250, number % 250)
        return cluster_of(b"*1\r\n" + slots(0, 16383, *server_of))(words)

    with FakeServer(answer) as server:
        host, port = server.endpoint
        server_of = (host.encode(), port)
        tier = RedisTierConfig(url=f"redis://{server.endpoint}", connections=1, timeout=PATIENCE)
        store = RedisPageStore("pool", tier)
        before, most = threading.active_count(), 0
        for _ in range(5):
            results, _ = get(store, page_keys(64))
            assert set(results) == {GetResult.MISS}
            most = max(most, threading.active_count())
        assert most < before + 40
        assert len(store._topology._nodes) == 1
        store.close()


def test_a_password_goes_to_no_server_that_one_outside_a_cluster_names():
    with FakeServer(lambda words: b"+OK\r\n") as stranger:

        def answer(words: list[bytes]) -> bytes:
            return (
                b"-MOVED 1 %b:%d\r\n" % (stranger.endpoint.host.encode(), stranger.endpoint.port) * (words[0] == b"GET")
                or b"+OK\r\n"
            )

        with FakeServer(answer) as server:
            store = open_store(server, password=Secret("env", "PATH"))
            assert get(store, [KEY])[0] == [GetResult.ERROR]
            store.close()
        assert stranger.connections == 0


def test_pages_of_slots_without_a_node_stay_cleared():
    """Seen: the clearing ended, and they were there again once the slots had a node."""
    with FakeServer(lambda words: b"+OK\r\n") as server:
        host, port = server.endpoint
        map_of_most = cluster_of(b"*1\r\n" + slots(0, 16000, host.encode(), port))
        nothing = b"*2\r\n$1\r\n0\r\n*0\r\n"
        server.answer = lambda words: nothing if words[0] == b"SCAN" else map_of_most(words)
        store = RedisPageStore("pool", RedisTierConfig(url=f"redis://{server.endpoint}", timeout=PATIENCE))
        cleared = Cleared(None, lambda _: None)
        with pytest.raises(ClearLaterError):
            store._sweep(cleared)
        assert cleared.is_finished(server.endpoint)
        store.close()


def test_large_parts_of_a_page_are_sent_without_a_copy(monkeypatch):
    """Seen: the pages of a portion were joined, which takes their memory again."""
    sent = []
    send = Connection.send
    monkeypatch.setattr(Connection, "descriptor", None)
    monkeypatch.setattr(Connection, "send", lambda self, *parts: (sent.extend(parts), send(self, *parts)))
    with FakeServer(nothing_here) as server:
        store = open_store(server)
        pages = HostPages([[1 << 20, 30, 20, 200_000]], fill=0x77)
        assert store.set(PageBatch([KEY], pages.buffers)) == [SetResult.STORED]
        store.close()
    assert [len(part) for part in sent if isinstance(part, memoryview)] == [1 << 20, 200_000]
    assert max(len(part) for part in sent if isinstance(part, bytes)) < 1000
    (written,) = [words[2] for words in server.requests if words[0] == b"SET"]
    assert len(written) == 128 + (1 << 20) + 50 + 200_000


def test_where_one_connection_turned_out_dead_all_that_are_idle_go():
    """A load balancer that forgot them resets each only when it is used."""
    with FakeServer(nothing_here) as server:
        store = open_store(server)
        (one,) = store._topology.nodes
        deadline = time.monotonic() + PATIENCE
        with one.connection(one.requests, deadline) as request, one.connection(one.pages, deadline) as page:
            pass
        with one.connection(one.requests, deadline, fresh=True) as fresh:
            assert fresh not in (request, page)
        assert {fresh} == set(one._idle)
        with one.connection(one.pages, deadline) as again:
            assert again is fresh
        store.close()


def test_commands_beside_the_lanes_have_the_whole_timeout_once_the_connection_is_open(monkeypatch):
    def slow(*others, **options):
        opened = open_connection(*others, **options)
        time.sleep(0.5)
        return opened

    with FakeServer(nothing_here) as server:
        store = open_store(server)
        (one,) = store._topology.nodes
        monkeypatch.setattr(node, "open_connection", slow)
        with one.aside() as connection:
            assert connection.deadline > time.monotonic() + PATIENCE - 0.25
        store.close()


ENTRY = b"*2\r\n$3\r\n9-1\r\n*2\r\n$1\r\nh\r\n"
NO_ENTRIES = {
    "an integer": b"*1\r\n*2\r\n:5\r\n*2\r\n$1\r\nh\r\n$1\r\nx\r\n",
    "a list": b"*1\r\n*2\r\n*0\r\n*2\r\n$1\r\nh\r\n$1\r\nx\r\n",
    "an error": b"*1\r\n*2\r\n-ERR no\r\n*2\r\n$1\r\nh\r\n$1\r\nx\r\n",
    "another text": b"*1\r\n*2\r\n$3\r\n9-x\r\n*2\r\n$1\r\nh\r\n$1\r\nx\r\n",
}


@pytest.mark.parametrize("since", [None, b"1-0"])
@pytest.mark.parametrize("what", NO_ENTRIES)
def test_what_is_no_entry_of_a_stream_is_never_the_last_one_seen(what, since):
    """Seen: every later look ended in a TypeError."""
    with FakeServer(nothing_here) as server:
        store = open_store(server)
        server.answer = lambda words: NO_ENTRIES[what]
        with pytest.raises(StoreError):
            store.read_hints(since)
        server.answer = lambda words: b"*1\r\n" + ENTRY + b":7\r\n"
        assert store.read_hints(b"1-0") == (b"9-1", [])
        store.close()


def test_hints_that_are_too_many_for_one_answer_are_read_one_by_one(monkeypatch):
    """Seen: the same answer was asked for again and again."""
    with FakeServer(nothing_here) as server:
        store = open_store(server)
        entry = ENTRY + bulk(bytes(1 << 20))
        server.answer = lambda words: b"*%b\r\n" % words[-1] + entry * int(words[-1])
        assert store.read_hints(b"1-0") == (b"9-1", [])
        monkeypatch.setattr(abilities, "LONGEST_HINT", 1 << 20)
        server.requests.clear()
        assert store.read_hints(b"1-0") == (b"9-1", [bytes(1 << 20)] * 7)
        assert len(server.requests) == 1
        store.close()

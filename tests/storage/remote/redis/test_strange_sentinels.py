"""Sentinels that hang, answer a byte now and then, or answer what no Sentinel does: the others name the primary."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from tests.storage.remote.redis.conftest import PREFIX
from tests.storage.remote.redis.fake_server import FakeServer
from tests.waiting import wait_until

# A tier waits for those that answer slowly.
pytestmark = [pytest.mark.slow, pytest.mark.thorough]

Answers = Callable[[list[bytes]], bytes | None]


def sentinel_of(*servers: FakeServer) -> Answers:
    """Names the last of ``servers``, a list that a test may change."""

    def answer(words: list[bytes]) -> bytes:
        if words[0] != b"SENTINEL":
            return b"%1\r\n$5\r\nproto\r\n:3\r\n" if words[0] == b"HELLO" else b"+OK\r\n"
        host, port = current[-1].endpoint
        return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%d\r\n" % (len(host), host.encode(), len(str(port)), port)

    current = list(servers)
    answer.current = current  # type: ignore[attr-defined]
    return answer


@contextmanager
def opened(*sentinels: FakeServer, **changes: object) -> Iterator[RedisPageStore]:
    urls = [f"redis+sentinel://{server.endpoint}/pages" for server in sentinels]
    store = RedisPageStore("pool", RedisTierConfig(**{"url": urls, "prefix": PREFIX, "timeout": 10.0, **changes}))
    try:
        yield store
    finally:
        store.close()


def _is_open(connection: socket.socket) -> bool:
    """Whether the other side has not ended it."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_a_name_server_that_hangs_holds_up_no_start_and_no_look(monkeypatch) -> None:
    """Seen: each look took as long as the resolver, and the start ended with "no answer"."""
    ended, asked = threading.Event(), []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *others: object, **options: object) -> list[object]:
        if host != "slow.test":
            return real(host, *others, **options)
        asked.append(host)
        ended.wait(30)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with ExitStack() as stack:
        one, other = (stack.enter_context(FakeServer(lambda words: b"+OK\r\n")) for _ in range(2))
        sound = sentinel_of(one)
        sentinel = stack.enter_context(FakeServer(sound))
        urls = [f"redis+sentinel://{at}/pages" for at in ("slow.test:1", sentinel.endpoint)]
        stack.callback(ended.set)
        store = stack.enter_context(opened(sentinel, url=urls, timeout=6.0, required=True))
        assert_follows(store, sound, one, other)
        assert len(asked) == 1
        ended.set()


def assert_follows(store: RedisPageStore, sentinel: Answers, one: FakeServer, other: FakeServer) -> None:
    """The primary is ``one``, and ``other`` soon after the Sentinel has named it."""
    assert primary_port(store) == one.endpoint.port
    sentinel.current.append(other)  # type: ignore[attr-defined]
    for _ in range(4):
        store._topology.refresh_soon()
        time.sleep(0.6)
    assert primary_port(store) == other.endpoint.port


def primary_port(store: RedisPageStore) -> int:
    (node,) = store._topology.nodes
    return node.endpoint.port


NONSENSE = {
    "no handshake": b"*1\r\n$4\r\nhost\r\n",
    "no port": b"*2\r\n$4\r\nhost\r\n$1\r\nx\r\n",
    "no text": b"*2\r\n$2\r\n\xff\xfe\r\n$4\r\n6379\r\n",
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_sentinel_that_talks_nonsense_is_one_line_and_the_others_are_believed(nonsense: str, caplog) -> None:
    """Seen: no Sentinel was believed any more, and a traceback was logged every half second."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(FakeServer(lambda words: b"+OK\r\n")) for _ in range(2))
        sound = sentinel_of(one)

        def strange(words: list[bytes]) -> bytes | None:
            to_all = nonsense == "no handshake"
            return NONSENSE[nonsense] if to_all or words[0] == b"SENTINEL" else sound(words)

        answers: list[Answers] = [sound, sound, strange]
        store = stack.enter_context(
            opened(*(stack.enter_context(FakeServer(answer)) for answer in answers), required=True)
        )
        assert_follows(store, sound, one, other)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert not any(record.exc_info for record in caplog.records)


def test_a_sentinel_that_answers_a_byte_now_and_then_does_not_hold_up_the_others() -> None:
    """Seen: the keeper waited for it for as long as bytes came, and no failover was followed."""
    ended = threading.Event()
    with ExitStack() as stack:
        one, other = (stack.enter_context(FakeServer(lambda words: b"+OK\r\n")) for _ in range(2))
        sound = sentinel_of(one)
        dripping = FakeServer(lambda words: b"")

        def drip(words: list[bytes]) -> bytes:
            while not ended.wait(0.2):
                for connection in dripping._sockets:
                    connection.sendall(b"+")
            return b"\r\n"

        dripping.answer = drip
        stack.enter_context(dripping)
        stack.callback(ended.set)
        sentinels = [stack.enter_context(FakeServer(sound)), stack.enter_context(FakeServer(sound)), dripping]
        store = stack.enter_context(opened(*sentinels))
        assert primary_port(store) == one.endpoint.port
        threads = threading.active_count()
        sound.current.append(other)  # type: ignore[attr-defined]
        store._topology.refresh_soon()
        wait_until(lambda: primary_port(store) == other.endpoint.port, "the new primary", 10.0)
        for _ in range(6):
            store._topology.refresh_soon()
            time.sleep(0.6)
        # Each question ends before the next one is asked.
        assert threading.active_count() <= threads + 4
        wait_until(lambda: not any(map(_is_open, dripping.open_sockets())), "the end of all questions", 10.0)

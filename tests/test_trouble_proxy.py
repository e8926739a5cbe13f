"""The proxy of the campaigns does to a connection what its name says, and lets go of it."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.rigs.trouble_proxy import Trouble, TroubleProxy

SMALL, LARGE = b"?" * 10, b"x" * 20_000


def echo(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def serve(connection):
    with connection:
        while data := connection.recv(1 << 20):
            connection.sendall(data)


@pytest.fixture
def proxy():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        before = set(threading.enumerate())
        with TroubleProxy(listener.getsockname()[1], delay=0.3) as proxy:
            yield proxy
        left = [thread for thread in set(threading.enumerate()) - before if "serve" not in thread.name]
        assert not [thread for thread in left if thread in proxy._threads]
        listener.shutdown(socket.SHUT_RDWR)


def connected(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def echoed(connection, sent):
    connection.sendall(sent)
    received = b""
    while len(received) < len(sent):
        data = connection.recv(1 << 20)
        if not data:
            raise ConnectionResetError
        received += data
    return received


def test_without_trouble_everything_arrives_as_it_was_sent(proxy):
    with connected(proxy) as connection:
        assert echoed(connection, SMALL) == SMALL and echoed(connection, LARGE) == LARGE


def test_a_slow_call_is_late_and_whole(proxy):
    with connected(proxy) as connection:
        echoed(connection, SMALL)
        proxy.trouble = Trouble.SLOW
        started = time.monotonic()
        assert echoed(connection, SMALL) == SMALL
        assert time.monotonic() - started >= 0.3


def test_large_replies_are_damaged_and_small_ones_are_not(proxy):
    proxy.trouble = Trouble.FLIPPED
    with connected(proxy) as connection:
        assert echoed(connection, SMALL) == SMALL
        damaged = echoed(connection, LARGE)
        assert len(damaged) == len(LARGE)
        assert sum(was != is_now for was, is_now in zip(LARGE, damaged, strict=True)) >= len(LARGE) // 2048
        proxy.trouble = Trouble.NONE
        assert echoed(connection, LARGE) == LARGE


def test_a_narrow_link_is_shared_by_all_connections_and_everything_arrives_whole(proxy):
    proxy.rate, proxy.late = 100_000, 0.1
    proxy.trouble = Trouble.NARROW
    with connected(proxy) as one, connected(proxy) as other, ThreadPoolExecutor(2) as threads:
        started = time.monotonic()
        assert list(threads.map(echoed, (one, other), (LARGE, LARGE))) == [LARGE, LARGE]
        assert time.monotonic() - started >= 2 * len(LARGE) / proxy.rate
        proxy.trouble = Trouble.NONE
        assert echoed(one, LARGE) == LARGE


def test_a_bad_link_changes_bytes_of_any_reply_and_ends_connections(proxy):
    proxy.flipped, proxy.cut = 1.0, 0.0
    proxy.trouble = Trouble.BAD
    with connected(proxy) as connection:
        damaged = echoed(connection, SMALL)
        assert len(damaged) == len(SMALL) and damaged != SMALL
        proxy.cut = 1.0
        with pytest.raises(ConnectionError):
            echoed(connection, SMALL)
    proxy.trouble = Trouble.NONE
    with connected(proxy) as connection:
        assert echoed(connection, LARGE) == LARGE


def test_nonsense_is_as_long_as_what_it_replaces(proxy):
    proxy.trouble = Trouble.NONSENSE
    with connected(proxy) as connection:
        assert echoed(connection, LARGE) != LARGE


def test_a_refusing_proxy_ends_connections_and_takes_none_until_it_is_well_again(proxy):
    with connected(proxy) as connection:
        echoed(connection, SMALL)
        proxy.trouble = Trouble.REFUSING
        with pytest.raises(ConnectionError):
            echoed(connection, SMALL)
        with pytest.raises(ConnectionRefusedError):
            connected(proxy)
    proxy.trouble = Trouble.NONE
    with connected(proxy) as connection:
        assert echoed(connection, LARGE) == LARGE

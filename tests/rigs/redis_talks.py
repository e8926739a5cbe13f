"""Talks of the Redis tier with a server whose replies are all known beforehand, by the native core and in Python.

What the server says is put into a socket pair before the talk begins, in pieces that are received one by one: a receive
does not go on behind a message that carries a descriptor (unix(7)). So no thread is needed, and nothing waits.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_ext.errors import ProtocolError, RefusedError
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.redis import connection as connection_module
from hicache_ext.storage.tiers.redis import page_calls
from hicache_ext.storage.tiers.redis.connection import Connection, page_name
from hicache_ext.testing.conformance.pages import HostPages

NAMES = b"t:page:"
NONCE = b"0123456789abcdef"
ANSWER = b"$16\r\n%b\r\n" % NONCE
CREATED = 1_700_000_000_000
LONGEST_TALK = 10.0
"""Seconds; one that is not hung takes far less than a millisecond."""
GOOD = {GetResult.HIT, GetResult.MISS, SetResult.STORED, SetResult.EXISTS}
"""All that the native core tells."""

_BUFFER = 1 << 20


@dataclass(frozen=True)
class Talked:
    results: list[Any]
    ending: type[Exception] | None
    """What it raised. None: the connection could be used on, if ``is_empty``."""
    is_empty: bool
    sent: bytes
    memory: HostPages


@contextmanager
def known_words() -> Iterator[None]:
    """Nonces and times are those above, so that all replies can be known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_module, "new_nonce", lambda: NONCE)
        patch.setattr(page_calls, "time", SimpleNamespace(time=lambda: CREATED / 1000))
        yield


@contextmanager
def connected(pieces: Sequence[bytes], *, ends: bool = True, patience: float = LONGEST_TALK) -> Iterator[Any]:
    """A connection to a server that has said ``pieces``, and the server's socket. ``ends``: it says nothing more."""
    here, there = socket.socketpair()
    nothing = os.open(os.devnull, os.O_RDONLY)
    with here, there:
        for end in (here, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        there.settimeout(LONGEST_TALK)
        for piece in pieces:
            if piece:
                sent = socket.send_fds(there, [piece], [nothing])
                there.sendall(piece[sent:])
        os.close(nothing)
        if ends:
            there.shutdown(socket.SHUT_WR)
        yield Connection(here, (socket.AF_UNIX, ""), time.monotonic() + patience), there


def talk(way: str, keys: Sequence[bytes], pages: HostPages, pieces: Sequence[bytes], word: str, **how: Any) -> Talked:
    """``word`` "get" or "set" of pages by the ``way`` "native" or "plain"; ``how`` as ``connected``."""
    results: list[Any] = []
    ending: type[Exception] | None = None
    with connected(pieces, **how) as (connection, there):
        move = _natively if way == "native" else _plainly
        try:
            move(connection, keys, pages, word, results)
        except (OSError, ProtocolError, RefusedError) as error:
            ending = type(error)
        is_empty = connection.reader.empty
        connection.close()
        sent = b""
        try:
            while part := there.recv(1 << 20):
                sent += part
        except ConnectionResetError:
            # It left some of what was said.
            pass
    return Talked(results, ending, is_empty, sent, pages)


def _natively(connection: Connection, keys: Sequence[bytes], pages: HostPages, word: str, results: list[Any]) -> None:
    call = page_calls.NativeCall.of(PageBatch(keys, pages.buffers), NAMES, None, write=word == "set")
    assert call is not None
    try:
        call.talk(connection, np.arange(len(keys)))
    finally:
        results += call.results()


def _plainly(connection: Connection, keys: Sequence[bytes], pages: HostPages, word: str, results: list[Any]) -> None:
    calls = [
        page_calls.PageCall(key, page_name(NAMES, key), segments, sum(segment.nbytes for segment in segments))
        for key, segments in zip(keys, pages.buffers, strict=True)
    ]
    try:
        if word == "get":
            page_calls.read_pages(connection, calls)
        else:
            page_calls.write_pages(connection, calls, None)
    finally:
        results += [None if call.result is page_calls.ELSEWHERE else call.result for call in calls]

"""compiled_talk.py with what it needs, and the same for a caller: pages of one connection, from columns.

It is tried on samples and compared with Python first, as the file tier's code is (docs/decisions/compiled-code.md).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import ProtocolError, ServerClosedError
from hicache_ext.page.envelope import KEY_LENGTH, PAGE_START, encode_page
from hicache_ext.page.memory import Addresses, addresses_of
from hicache_ext.runtime.compiled_part import CompiledPart
from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.contract.store import PageBatch, key_words
from hicache_ext.storage.tiers.redis.clients import page_name
from hicache_ext.storage.tiers.redis.connection import command, new_nonce

_CRLF = b"\r\n"
_TEXT = 64 * 1024
_REST = 4096
_MOST_SEGMENTS = (IOV_MAX - 4) // 2
_STORED, _NULL = b"+OK\r\n", b"$-1\r\n"

Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def _text(text: bytes) -> Bytes:
    # Writable: compiled code requires it.
    return np.frombuffer(bytearray(text), np.uint8)


@dataclass(frozen=True, slots=True)
class Columns:
    """The pages of a call, of one size, as compiled code takes them."""

    memory: Addresses
    keys: npt.NDArray[np.uint64]
    names: Bytes
    results: Words
    """LEFT, DONE or OTHERWISE, a word a page."""

    @classmethod
    def of(cls, batch: PageBatch, *, writable: bool) -> Columns | None:
        """None where the pages are of several sizes or too many pieces, or their memory cannot be addressed."""
        if batch.sizes.count(batch.sizes[0]) != len(batch.sizes):
            return None
        memory = addresses_of(batch.buffers, writable=writable)
        if memory is None or len(memory.segment_sizes) > _MOST_SEGMENTS or memory.page_bytes != batch.sizes[0]:
            return None
        words = key_words(batch.keys)
        names = words.view(np.uint8)
        return cls(memory, words.view(np.uint64), names, np.zeros(len(batch), np.int64))


class _Scratch(threading.local):
    """Memory of one thread."""

    def __init__(self, state: Callable[[], Any], own_words: int) -> None:
        self.text = np.zeros(_TEXT, np.uint8)
        self.rest = np.zeros(_REST, np.uint8)
        self.ends = np.zeros(2, np.int64)
        self.vectors = np.zeros(2 * IOV_MAX, np.int64)
        self.header = np.zeros(32, np.uint64)
        self.own = np.zeros(own_words, np.int64)
        self.state = state()

    def reset(self) -> None:
        self.ends[:] = 0
        self.own[:] = 0


class TalkCode:
    """Threads: any."""

    def __init__(self) -> None:
        """Raises ImportError with what is missing."""
        from hicache_ext.runtime import native_calls
        from hicache_ext.storage.tiers.redis import compiled_talk

        self._functions = native_calls.find_functions()
        self._read, self._write = compiled_talk.read_pages, compiled_talk.write_pages
        self._left, self._done, self._otherwise = compiled_talk.LEFT, compiled_talk.DONE, compiled_talk.OTHERWISE
        self._ended, self._closed, self._late = compiled_talk.ENDED, compiled_talk.CLOSED, compiled_talk.LATE
        self._scratch = _Scratch(native_calls.HashState, compiled_talk.OWN_WORDS)
        self._line_end, self._null, self._stored, self._missing = map(_text, (_CRLF, _NULL, _STORED, b":0\r\n"))
        self._start = np.frombuffer(PAGE_START, np.int64).tolist()
        self._check()

    def read(self, descriptor: int, columns: Columns, positions: Words, words: PageWords, limits: Limits) -> None:
        """GET these pages over a socket. Raises TimeoutError, OSError, and ProtocolError for an answer that none
        of theirs has: the connection must be closed then. What ``results`` then calls DONE or OTHERWISE holds."""
        scratch = self._scratch
        scratch.reset()
        status = self._read(
            self._functions,
            self._facts(descriptor, columns, limits),
            positions,
            columns.memory.pages,
            columns.memory.segment_sizes,
            columns.keys,
            columns.names,
            words.get_head,
            words.expected,
            self._null,
            self._line_end,
            scratch.text,
            scratch.rest,
            scratch.ends,
            scratch.vectors,
            scratch.header,
            scratch.own,
            scratch.state.address,
            columns.results,
        )
        self._raise_for(status)

    def write(
        self,
        descriptor: int,
        columns: Columns,
        positions: Words,
        words: PageWords,
        limits: Limits,
        nonce: bytes | None = None,
    ) -> None:
        """STRLEN and SET NX, as ``read``. OTHERWISE: the page was there."""
        scratch = self._scratch
        scratch.reset()
        nonce = new_nonce() if nonce is None else nonce
        status = self._write(
            self._functions,
            self._facts(descriptor, columns, limits),
            positions,
            columns.memory.pages,
            columns.memory.segment_sizes,
            columns.keys,
            columns.names,
            words.length_head,
            words.set_head,
            words.set_tail,
            words.set_end,
            words.there,
            self._missing,
            self._stored,
            self._null,
            _text(command(b"PING", nonce)),
            _text(b"$%d\r\n%b\r\n" % (len(nonce), nonce)),
            self._line_end,
            scratch.text,
            scratch.rest,
            scratch.ends,
            scratch.vectors,
            scratch.header,
            scratch.own,
            scratch.state.address,
            columns.results,
            np.zeros(len(positions), np.int64),
        )
        self._raise_for(status)

    def results(self, columns: Columns, done: Any, otherwise: Any) -> list[Any]:
        """``done``, ``otherwise``, or None for a page without a result."""
        found = columns.results
        if (found == self._done).all():
            return [done] * len(found)
        named = {self._done: done, self._otherwise: otherwise}
        return [named.get(result) for result in found.tolist()]

    def _facts(self, descriptor: int, columns: Columns, limits: Limits) -> Words:
        deadline, created = int(limits.deadline * 1e9), int(time.time() * 1000)
        facts = [descriptor, deadline, columns.memory.page_bytes, *self._start, created, limits.window]
        return np.array(facts, np.int64)

    def _raise_for(self, status: int) -> None:
        if status == self._ended:
            return
        if status < 0:
            raise OSError(-status, os.strerror(-status))
        if status == self._closed:
            raise ServerClosedError
        if status == self._late:
            raise TimeoutError("the deadline has passed")
        raise ProtocolError("an answer that none of these pages has")

    def _check(self) -> None:
        """Raises ImportError if what it sends or accepts is not what Python would: others read these pages."""
        key, memory, nonce = os.urandom(KEY_LENGTH), bytearray(os.urandom(5000)), new_nonce()
        content, parts = bytes(memory), [memoryview(memory)[:2000], memoryview(memory)[2000:]]
        name, words = page_name(b"p:", key), PageWords.of(b"p:", len(content), 7)
        header = encode_page(key, parts, len(content), int(time.time() * 1000))
        value, question = header + content, command(b"PING", nonce)
        answer = b"$%d\r\n%b\r\n" % (len(nonce), nonce)

        def talk(move: Callable[..., None], replies: bytes, *more: bytes) -> tuple[int, bytes]:
            """The result of the page, and what was sent."""
            columns = Columns.of(PageBatch([key], [parts]), writable=True)
            assert columns is not None
            ours, server = socket.socketpair()
            with ours, server:
                server.sendall(replies)
                server.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError, ProtocolError):
                    limits = Limits(time.monotonic() + 5, 1 << 20)
                    move(ours.fileno(), columns, np.zeros(1, np.int64), words, limits, *more)
                ours.close()
                return int(columns.results[0]), b"".join(iter(lambda: server.recv(65536), b""))

        reply = b"$%d\r\n%b\r\n" % (len(value), value)
        memory[:] = bytes(len(content))
        sound = talk(self.read, reply) == (self._done, command(b"GET", name)) and memory == content
        damaged = reply[:-5] + bytes([reply[-5] ^ 1]) + reply[-4:]
        sound = sound and talk(self.read, damaged)[0] == self._left and talk(self.read, _NULL)[0] == self._otherwise
        memory[:] = content
        result, sent = talk(self.write, b":0\r\n" + answer + _STORED + answer, nonce)
        created = int.from_bytes(sent.partition(content)[0][-40:-32], "little")
        value = encode_page(key, parts, len(content), created) + content
        asked = command(b"STRLEN", name) + question + command(b"SET", name, value, b"NX", b"EX", b"7") + question
        sound = sound and (result, sent) == (self._done, asked)
        sound = sound and talk(self.write, b":0\r\n" + answer + _NULL + answer, nonce)[0] == self._left
        sound = sound and talk(self.write, b":0\r\n" + answer + 2 * _STORED + answer, nonce)[0] == self._left
        sound = sound and talk(self.write, b":%d\r\n" % len(value) + answer, nonce)[0] == self._otherwise
        if not sound:
            raise ImportError("its pages are not those of this version: remove the files hicache_ext-*.compiled")


@dataclass(frozen=True, slots=True)
class Limits:
    deadline: float
    """time.monotonic()."""
    window: int
    """Bytes of values that may be under way on the connection."""


@dataclass(frozen=True, slots=True)
class PageWords:
    """What is sent and answered around pages of one size."""

    get_head: Bytes
    length_head: Bytes
    set_head: Bytes
    set_tail: Bytes
    set_end: Bytes
    expected: Bytes
    there: Bytes

    @classmethod
    def of(cls, page_names: bytes, payload: int, ttl: int | None) -> PageWords:
        """``page_names``: ``names.page_prefix`` of the tier."""
        nothing = page_name(page_names, bytes(KEY_LENGTH))
        size, length = len(PAGE_START) + 112 + payload, b"$%d\r\n%b" % (len(nothing), page_names)
        lifetime = [] if ttl is None else [b"EX", b"%d" % ttl]
        behind = b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in (b"NX", *lifetime)])
        return cls(
            get_head=_text(b"*2\r\n$3\r\nGET\r\n" + length),
            length_head=_text(b"*2\r\n$6\r\nSTRLEN\r\n" + length),
            set_head=_text(b"*%d\r\n$3\r\nSET\r\n" % (4 + len(lifetime)) + length),
            set_tail=_text(b"\r\n$%d\r\n" % size),
            set_end=_text(b"\r\n" + behind),
            expected=_text(b"$%d\r\n" % size),
            there=_text(b":%d\r\n" % size),
        )


def _use(code: TalkCode) -> None:
    """Nothing to replace: calls ask for the code."""


part = CompiledPart("redis", f"{__name__}:part", TalkCode, _use)


def talk_code() -> TalkCode | None:
    """As ``CompiledPart.code``."""
    return part.code()

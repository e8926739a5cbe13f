"""The commands on one connection that read, write, find and remove pages.

Each function takes pages as ``PageCall`` and sets their ``result`` one by one, so that if the connection breaks midway,
exactly the pages without a result are retried. ``NativeCall`` handles the exchange with a healthy server without the
GIL.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hicache_ext import native
from hicache_ext.errors import OversizedValueError, ProtocolError, RefusedError, ServerClosedError
from hicache_ext.page import envelope
from hicache_ext.page.memory import Addresses, addresses_of
from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.contract.bad_pages import Stored, Verdict
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult, key_words, portions
from hicache_ext.storage.tiers.redis.connection import (
    Answer,
    Connection,
    ErrorReply,
    command,
    command_of_equals,
    page_name,
)

HEADER_LENGTH = envelope.FIELDS_LENGTH

_MOST_AT_ONCE = 256
"""Maximum pages in one presence request."""
_FEW = 16
"""Groups up to this many pages are split into single pages."""
_LARGE_PIECE = 64 * 1024
"""Pieces with more bytes than this are sent without being copied together."""
_MOST_PIPELINED = 256
"""Maximum requests for pages sent before their replies are received."""
REDIRECTS = {"MOVED": "moved", "ASK": "ask"}
"""Errors of a cluster node when another node owns the slot, and their names in the metrics."""
ELSEWHERE = object()
"""The provisional result of a redirected page; the store replaces it with a final one."""

_REMOVE_IF_SAME = b"""
local length = redis.pcall('STRLEN', KEYS[1])
if type(length) == 'table' then
  if ARGV[1] ~= '-1' or not string.find(length.err, 'WRONGTYPE') then return 0 end
else
  if length ~= tonumber(ARGV[1]) then return 0 end
  local seen = tonumber(ARGV[2])
  if seen > 0 and redis.sha1hex(redis.call('GETRANGE', KEYS[1], 0, seen - 1)) ~= ARGV[3] then return 0 end
end
return redis.call('UNLINK', KEYS[1])
"""
"""The server compares, so that only the copy that was seen is removed: not one written since, nor one damaged only in
transit. Returns 0 also if there is no value."""
_REJECTED = {"OOM": "memory", "READONLY": "readonly"}
"""Write refusals that a healthy server may send, and their names in the metrics. Other refusals count as errors; the
consequences are the same for all."""
_REFUSES_ALL_WRITES = {*_REJECTED.values(), "MISCONF", "NOREPLICAS", "NOPERM"}
"""Refusals that apply to every write, so that no more payload is sent."""
REMOVES = (b"UNLINK", b"SCAN")
"""Commands that are only needed by clear() and the removal of damaged pages."""
WRITES = (b"SET", b"STRLEN", *REMOVES)
"""Commands that are only needed by a tier with writes."""
_WITHOUT_SCRIPTS = frozenset({"NOPERM", "ERR"})
"""Errors of EVAL if the user lacks permission or the server only emulates Redis."""


class PageCall:
    """The request for one page and its result."""

    __slots__ = (
        "key",
        "name",
        "reason",
        "result",
        "seen",
        "segments",
        "size",
    )

    def __init__(self, key: bytes, name: bytes, segments: Sequence[memoryview] = (), payload: int = 0) -> None:
        self.key = key
        self.name = name
        self.segments = segments
        self.size = HEADER_LENGTH + payload
        self.result: Any = None
        """GetResult, SetResult, or the reply's value; None while unknown."""
        self.reason = ""
        """Reason for CORRUPT, REJECTED or ERROR: a word for the metrics."""
        self.seen = False
        """Whether a stored copy was seen that is not this page."""

    def request(self, word: bytes) -> bytes:
        """Encode a command whose only argument is the page's name; a faster ``command``, since every page needs it."""
        return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(word), word, len(self.name), self.name)

    def finish(self, result: Any, reason: str = "") -> None:
        self.result = result
        self.reason = reason


def read_pages(connection: Connection, calls: Sequence[PageCall]) -> None:
    """GET pages into their memory. Raises RefusedError if the server refuses every page."""
    header = memoryview(bytearray(HEADER_LENGTH))
    refused: RefusedError | None = None
    for portion in portions(calls, [call.size for call in calls], connection.window(), _MOST_PIPELINED):
        connection.send(b"".join([call.request(b"GET") for call in portion]))
        for call in portion:
            refused = _read_page(connection, call, header) or refused
    if refused is not None and all(call.result is GetResult.ERROR for call in calls):
        for call in calls:
            call.finish(None)
        raise refused


def _read_page(connection: Connection, call: PageCall, header: memoryview) -> RefusedError | None:
    """Receive one page; return the server's refusal, if any."""
    try:
        length = connection.reader.page_into(header, call.segments)
    except OversizedValueError:
        call.seen = True
        call.finish(GetResult.CORRUPT, "longer")
        raise
    except ProtocolError:
        call.finish(GetResult.ERROR, "protocol")
        raise
    if length is None:
        call.finish(GetResult.MISS)
    elif isinstance(length, ErrorReply):
        if _is_redirect(call, length):
            return None
        if length.code == "WRONGTYPE":
            call.seen = True
            call.finish(GetResult.CORRUPT, "type")
            return None
        call.finish(GetResult.ERROR, length.code)
        return RefusedError(length.code, b"GET")
    else:
        if length != call.size:
            reason: str | None = "truncated" if length < call.size else "longer"
        else:
            reason = envelope.reason_to_refuse(header, call.key, call.segments)
        if reason is None:
            call.finish(GetResult.HIT)
        else:
            call.seen = True
            call.finish(GetResult.CORRUPT, reason)
    return None


def write_pages(connection: Connection, calls: Sequence[PageCall], ttl: int | None, pause: str = "") -> str:
    """SET NX the missing pages. If a copy of another length exists, the page is REJECTED and ``seen``: the caller
    inspects it.

    STRLEN finds existing pages first: it saves sending their payload and renews their recency. Returns why the server
    takes no writes, or "". During a write pause, whose reason is ``pause``, missing pages are REJECTED.
    """
    missing = _pages_missing(connection, calls)
    if pause:
        for call in missing:
            call.finish(SetResult.REJECTED, pause)
        return ""
    try:
        refusal, raced = _set_pages(connection, missing, ttl)
        connection.confirm()
    except BaseException:
        # Unconfirmed results: these pages are retried.
        for call in missing:
            if call.result in (SetResult.STORED, SetResult.EXISTS):
                call.result = None
        raise
    # Usually another writer stored the page. This must be verified, since EXISTS promises that it can be read.
    for call in _pages_missing(connection, raced):
        call.seen = True
        call.finish(SetResult.REJECTED, "suspect")
    # A server that has stored one of the pages takes writes.
    accepts = refusal not in _REFUSES_ALL_WRITES and any(call.result is SetResult.STORED for call in missing)
    return "" if accepts else refusal


def _set_pages(connection: Connection, missing: Sequence[PageCall], ttl: int | None) -> tuple[str, list[PageCall]]:
    """SET NX pages. Return why the server takes no writes, or "", and the pages that existed by the time of the SET."""
    options = [b"NX"] if ttl is None else [b"NX", b"EX", b"%d" % ttl]
    end = b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(option), option) for option in options])
    created_ms = int(time.time() * 1000)
    raced: list[PageCall] = []
    refusal = ""
    for portion in portions(missing, [call.size for call in missing], connection.window(), _MOST_PIPELINED):
        requests: list[bytes | memoryview] = []
        for call in portion:
            header = envelope.encode_header(call.key, call.segments, created_ms=created_ms)
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
                *(3 + len(options), len(call.name)),
                *(call.name, call.size),
            )
            requests += [head, header, *call.segments, end]
        # Join small pieces, but send large ones as they are: a copy would take as much memory again, and the GIL.
        parts = itertools.groupby(requests, lambda piece: memoryview(piece).nbytes > _LARGE_PIECE)
        connection.send(*(piece for large, group in parts for piece in (group if large else [b"".join(group)])))
        for call in portion:
            refusal = _receive_written(connection, call, raced) or refusal
        if refusal in _REFUSES_ALL_WRITES:
            break
    if refusal:
        for call in missing:
            if call.result is None and call not in raced:
                _refuse(call, refusal)
    return refusal, raced


def _pages_missing(connection: Connection, calls: Sequence[PageCall]) -> list[PageCall]:
    missing = []
    refused = []
    for call, reply in zip(calls, _ask(connection, calls, b"STRLEN"), strict=True):
        if _is_redirect(call, reply):
            continue
        if isinstance(reply, ErrorReply) and reply.code != "WRONGTYPE":
            call.finish(SetResult.ERROR, reply.code)
            refused.append(reply.code)
        elif reply == call.size:
            call.finish(SetResult.EXISTS)
        elif isinstance(reply, ErrorReply) or _integer(reply, b"STRLEN"):
            call.seen = True
            call.finish(SetResult.REJECTED, "suspect")
        else:
            missing.append(call)
    if refused and len(refused) == len(calls):
        raise RefusedError(refused[0], b"STRLEN")
    return missing


def _receive_written(connection: Connection, call: PageCall, raced: list[PageCall]) -> str:
    """Receive the reply to one SET; return why the server refused it, or ""."""
    reply = connection.reader.answer()
    if reply == "OK":
        call.finish(SetResult.STORED)
    elif reply is None:
        raced.append(call)
    elif not isinstance(reply, ErrorReply):
        call.finish(SetResult.ERROR, "protocol")
        raise ProtocolError("SET was not answered as Redis does")
    elif not _is_redirect(call, reply):
        refusal = _REJECTED.get(reply.code, reply.code)
        _refuse(call, refusal)
        return refusal
    return ""


def _refuse(call: PageCall, refusal: str) -> None:
    call.finish(SetResult.REJECTED if refusal in _REJECTED.values() else SetResult.ERROR, refusal)


def ask_integers(connection: Connection, calls: Sequence[PageCall], word: bytes) -> None:
    """Send one request without payload per page (EXISTS, UNLINK); its integer reply becomes the result."""
    for call, reply in zip(calls, _ask(connection, calls, word), strict=True):
        if not _is_redirect(call, reply):
            call.finish(_integer(reply, word))


def ask_presence(connection: Connection, calls: Sequence[PageCall], names: Sequence[bytes]) -> None:
    """Send EXISTS for many pages to one server that is not a cluster node; the single call's result is a ``bytearray``
    of ones and zeros. One request covers a group of pages, and only groups that are partly present are split further:
    chains are usually present up to some page and absent after it."""
    (call,) = calls
    present = bytearray(len(names))
    groups = [range(first, min(first + _MOST_AT_ONCE, len(names))) for first in range(0, len(names), _MOST_AT_ONCE)]
    while groups:
        replies = connection.ask([command_of_equals(b"EXISTS", names[group.start : group.stop]) for group in groups])
        requested, groups = groups, []
        for group, reply in zip(requested, replies, strict=True):
            if _is_redirect(call, reply):
                return
            count = _integer(reply, b"EXISTS")
            if count == len(group):
                present[group.start : group.stop] = b"\1" * len(group)
            elif count and len(group) > 1:
                part = 1 if len(group) <= _FEW else len(group) // 2
                groups += [group[at : at + part] for at in range(0, len(group), part)]
    call.finish(present)


def read_again(connection: Connection, name: bytes, most: int) -> Stored | None:
    """Return the first ``most`` bytes of the value ``name``, or None if there is none. Raises RefusedError, also if
    another node owns the slot."""
    (length,) = connection.ask([command(b"STRLEN", name)])
    if isinstance(length, ErrorReply) and length.code == "WRONGTYPE":
        return Stored(-1, memoryview(b""))
    length = _integer(length, b"STRLEN")
    if length == 0 and connection.ask([command(b"EXISTS", name)]) == [0]:
        return None
    data = memoryview(bytearray(min(length, most)))
    beginning = b"GETRANGE", name, b"0", b"%d" % (most - 1)
    connection.send(command(b"GET", name) if length <= most else command(*beginning))
    if connection.reader.page_into(data, []) != len(data):
        raise ProtocolError("not as many bytes as the value has")
    return Stored(length, data)


def remove_bad(connection: Connection, name: bytes, bad: Stored) -> Verdict | None:
    """Remove the value if it is still ``bad``; return None if it is not. Raises RefusedError like ``read_again``."""
    digest = hashlib.sha1(bad.data, usedforsecurity=False).hexdigest().encode()
    numbers = (b"%d" % bad.length, b"%d" % len(bad.data))
    (reply,) = connection.ask([command(b"EVAL", _REMOVE_IF_SAME, b"1", name, *numbers, digest)])
    if isinstance(reply, ErrorReply) and reply.code in _WITHOUT_SCRIPTS:
        # Two reads over two connections returned the same bytes; only the server-side comparison is missing.
        (reply,) = connection.ask([command(b"UNLINK", name)])
    return Verdict.REMOVED if _integer(reply, b"UNLINK") else None


def refused_commands(connection: Connection, name: bytes, *, writes: bool) -> list[RefusedError]:
    """Return which of the commands needed for serving the server refuses. ``name`` must be the name of no page."""
    wanted = [[b"EXISTS", name], [b"GET", name]]
    if writes:
        # UNLINK and SCAN are needed by clear().
        wanted = [[b"SET", name, b"hicache_ext", b"NX", b"EX", b"60"], [b"STRLEN", name], *wanted, [b"UNLINK", name]]
        wanted.append([b"SCAN", b"0", b"MATCH", name, b"COUNT", b"1"])
    refused = []
    for words in wanted:
        connection.send(command(*words))
        reply = connection.reader.answer(lists=True)
        if isinstance(reply, ErrorReply) and reply.code not in ("CLUSTERDOWN", *REDIRECTS):
            code = "unknown command" if reply.line.lower().startswith("err unknown command") else reply.code
            refused.append(RefusedError(code, words[0]))
    return refused


def _ask(connection: Connection, calls: Sequence[PageCall], word: bytes) -> list[Answer]:
    return connection.ask([call.request(word) for call in calls])


def _integer(reply: Answer, word: bytes) -> int:
    if isinstance(reply, ErrorReply):
        raise RefusedError(reply.code, word)
    if not isinstance(reply, int):
        raise ProtocolError("not the integer that was asked for")
    return reply


def _is_redirect(call: PageCall, reply: Answer) -> bool:
    if not isinstance(reply, ErrorReply) or reply.code not in REDIRECTS:
        return False
    call.finish(ELSEWHERE, REDIRECTS[reply.code])
    return True


Talk = Callable[..., str | None]
"""A function of (connection, pages) that exchanges commands for pages on one connection. One that writes also takes
``pause``, and returns why the server takes no writes."""


# -- by the native core (native/talk.c) --------------------------------------------------------------------------------

_MOST_SEGMENTS = IOV_MAX - 3
_LEFT, _DONE, _OTHERWISE = range(3)
_ENDED, _UNEXPECTED, _CLOSED, _LATE = range(4)


TALK_PAGES = native.Struct(
    "talk_pages",
    "addresses segments[] payload keys words results positions[] socket deadline window created question[] "
    "answer_length",
)


@functools.lru_cache(64)
def _page_words(page_names: bytes, payload: int, ttl: int | None) -> tuple[npt.NDArray[np.int64], list[bytes]]:
    """Return ``struct page_words``, the protocol texts around pages of this size, and the texts that it points to."""
    nothing = page_name(page_names, bytes(envelope.KEY_LENGTH))
    size, name = HEADER_LENGTH + payload, b"$%d\r\n%b" % (len(nothing), page_names)
    options = [b"NX"] if ttl is None else [b"NX", b"EX", b"%d" % ttl]
    texts = [
        b"*2\r\n$3\r\nGET\r\n" + name,
        b"*2\r\n$6\r\nSTRLEN\r\n" + name,
        b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options)) + name,
        b"\r\n$%d\r\n" % size,
        b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(option), option) for option in options]),
        b"$%d\r\n" % size,
        b":%d\r\n" % size,
    ]
    words = np.frombuffer(envelope.PAGE_START, np.int64).tolist()
    for text in texts:
        words += native.address(np.frombuffer(text, np.uint8)), len(text)
    return np.array(words, np.int64), texts


class NativeCall:
    """GETs or SETs (``write``) pages of equal size with the native core, as long as the server's replies are normal.

    Threads: several, each with its own connection and pages.
    """

    def __init__(self, core: native.Core, memory: Addresses, batch: PageBatch, words: Any, *, write: bool) -> None:
        self._core = core
        self._write = write
        self._memory = memory
        self._words, self._texts = words
        self._results = np.zeros(len(batch), np.int64)
        self._page_arguments = (
            memory.pages,
            memory.segment_sizes,
            memory.page_bytes,
            key_words(batch.keys),
            self._words,
            self._results,
        )

    @classmethod
    def of(cls, batch: PageBatch, page_names: bytes, ttl: int | None, *, write: bool) -> Self | None:
        """Return a call for the batch, or None if there is no core or it cannot move the pages: their sizes differ,
        they have too many segments, or their memory is not addressable. ``page_names`` is the prefix of their names."""
        core = native.core()
        if core is None or not len(batch) or batch.sizes.count(batch.sizes[0]) != len(batch.sizes):
            return None
        memory = addresses_of(batch.buffers, writable=not write)
        if memory is None or len(memory.segment_sizes) > _MOST_SEGMENTS or memory.page_bytes != batch.sizes[0]:
            return None
        return cls(core, memory, batch, _page_words(page_names, memory.page_bytes, ttl), write=write)

    def talk(self, connection: Connection, positions: npt.NDArray[np.int64]) -> None:
        """GET these pages; or STRLEN, then SET NX the missing ones, if the server answers a question. Raises
        TimeoutError, OSError, and ProtocolError for an unexpected reply: the connection must then be closed, but
        ``results`` remain valid."""
        question, nonce = connection.question() if self._write else (b"", b"")
        if self._write and not question:
            return
        status = self._core(
            TALK_PAGES,
            *self._page_arguments,
            positions,
            connection.descriptor,
            int(connection.deadline * 1e9),
            connection.window(),
            int(time.time() * 1000),
            np.frombuffer(question, np.uint8) if question else None,
            len(b"$%d\r\n%b\r\n" % (len(nonce), nonce)),
        )
        if status < 0:
            raise OSError(-status, os.strerror(-status))
        if status == _CLOSED:
            raise ServerClosedError
        if status == _LATE:
            raise TimeoutError("the deadline has passed")
        if status != _ENDED:
            raise ProtocolError("an answer that none of these pages has")

    def results(self) -> list[Any]:
        """Return HIT or MISS for reads, STORED or EXISTS for writes, and None for pages whose outcome is unknown."""
        done = SetResult.STORED if self._write else GetResult.HIT
        if (self._results == _DONE).all():
            return [done] * len(self._results)
        otherwise = SetResult.EXISTS if self._write else GetResult.MISS
        return [(None, done, otherwise)[result] for result in self._results.tolist()]

"""RESP2, the protocol of Redis and Valkey (redis.io/docs/latest/develop/reference/protocol-spec).

What a server may send is not trusted: every length is bounded before it is used, and anything that is not exactly the
protocol is a ``ProtocolError``, after which the connection must be closed since nobody knows where the next reply
begins. Page values go straight into the memory they are meant for; nothing is written anywhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_ext.errors import OversizedValueError, ProtocolError
from hicache_ext.runtime.vectored import IOV_MAX, after

LONGEST_LINE = 4096
LONGEST_TEXT = 64 * 1024
"""Bytes of a bulk string that is no page: replies to AUTH, PING, EVAL."""
LONGEST_DRAINED = 1 << 20
"""A value of another length than the page's is read and thrown away up to here; a longer one costs the connection."""
LARGEST_VALUE = 512 << 20
"""Redis' own limit (proto-max-bulk-len)."""

_CRLF = b"\r\n"
_BUFFER_SIZE = 16 * 1024
_TAIL = 256
"""Bytes received behind a page: its line end and the head of the next reply, in the same system call."""
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_LENGTH = re.compile(rb"[0-9]{1,10}")
_ERROR_CODE = re.compile(r"[A-Z]{2,20}")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that the server sent. ``line`` may repeat arguments of ours (a password): only ``code`` is shown."""

    line: str

    @property
    def code(self) -> str:
        word = self.line.partition(" ")[0]
        return word if _ERROR_CODE.fullmatch(word) else "ERR"


class Status(bytes):
    """A simple string (+OK): what says that a command was done, where a bulk string of the same text would not."""


_OK = Status(b"OK")

Reply = int | bytes | ErrorReply | None


def new_nonce() -> bytes:
    """A word that a server says only when it is asked to."""
    return os.urandom(8).hex().encode()


def command(*arguments: bytes) -> bytes:
    """One request."""
    words = [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"*%d\r\n%b" % (len(words), b"".join(words))


def command_of_equals(word: bytes, arguments: Sequence[bytes]) -> bytes:
    """One request with arguments of one length; in haste, since there are hundreds."""
    between = b"\r\n$%d\r\n" % len(arguments[0])
    return b"*%d\r\n$%d\r\n%b%b%b\r\n" % (len(arguments) + 1, len(word), word, between, between.join(arguments))


class ReplyReader:
    """Takes replies off a connection, one call per reply, in the order of the requests.

    ``receive_into`` fills buffers with at least one byte and says how many, or raises; its errors come out as they are.
    """

    def __init__(self, receive_into: Callable[[Sequence[memoryview]], int]) -> None:
        self._receive_into = receive_into
        self._buffer = bytearray(_BUFFER_SIZE)
        self._memory = memoryview(self._buffer)
        self._begin = 0
        self._end = 0

    @property
    def empty(self) -> bool:
        """No byte has arrived that no reply has used: so it must be whenever nothing is awaited."""
        return self._begin == self._end

    def reply(self) -> Reply:
        """A reply that is no page and no array."""
        line = self._line()
        if line == b"+OK":
            return _OK
        kind, rest = line[:1], line[1:]
        if kind == b":":
            if not _INTEGER.fullmatch(rest):
                raise ProtocolError("an integer that is none")
            return int(rest)
        if kind == b"+":
            return Status(rest)
        if kind == b"-":
            return _error(rest)
        if kind == b"$":
            length = _length(rest)
            if length is None:
                return None
            if length > LONGEST_TEXT:
                raise OversizedValueError(length)
            text = bytearray(length)
            self._fill([memoryview(text)])
            self._end_of_value()
            return bytes(text)
        raise ProtocolError("a reply of an unexpected type")

    def page_into(self, header: memoryview, segments: Sequence[memoryview]) -> int | ErrorReply | None:
        """A value that should be ``header`` and ``segments``, received into them.

        Answers the value's length; only when it is that of header and segments together do they hold it. A value of
        another length is thrown away, all but its first bytes in ``header``, and ``segments`` are not touched.
        """
        line = self._line()
        if line[:1] == b"-":
            return _error(line[1:])
        if line[:1] != b"$":
            raise ProtocolError("a reply of an unexpected type")
        length = _length(line[1:])
        if length is None:
            return None
        if length == header.nbytes + sum([segment.nbytes for segment in segments]):
            self._fill([header, *segments])
        elif length > LONGEST_DRAINED:
            raise OversizedValueError(length)
        else:
            seen = min(length, header.nbytes)
            self._fill([header[:seen]])
            self._drain(length - seen)
        self._end_of_value()
        return length

    def _line(self) -> bytes:
        searched = self._begin
        while True:
            end = self._buffer.find(_CRLF, searched, self._end)
            if end >= 0:
                line = bytes(self._memory[self._begin : end])
                if len(line) > LONGEST_LINE or b"\r" in line or b"\n" in line:
                    raise ProtocolError("a line that is none")
                self._begin = end + 2
                return line
            if self._end - self._begin > LONGEST_LINE:
                raise ProtocolError("a line without end")
            # A line end may be cut in two.
            searched = max(self._begin, self._end - 1) - self._begin
            self._receive_more()
            searched += self._begin

    def _receive_more(self) -> None:
        """Add at least one byte to the buffer; what is in it moves to its beginning when there is no room behind."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == _BUFFER_SIZE or self._begin > _BUFFER_SIZE // 2:
            kept = bytes(self._memory[self._begin : self._end])
            self._memory[: len(kept)] = kept
            self._begin, self._end = 0, len(kept)
        self._end += self._receive_into([self._memory[self._end :]])

    def _fill(self, targets: Sequence[memoryview]) -> None:
        pending = [target for target in targets if target.nbytes]
        while pending and self._begin < self._end:
            taken = min(pending[0].nbytes, self._end - self._begin)
            pending[0][:taken] = self._memory[self._begin : self._begin + taken]
            self._begin += taken
            pending = after(pending, taken)
        left = sum([target.nbytes for target in pending])
        while pending:
            if len(pending) < IOV_MAX:
                received = self._receive_into([*pending, self._memory[:_TAIL]])
            else:
                received = self._receive_into(pending[:IOV_MAX])
            if received >= left:
                self._begin, self._end = 0, received - left
                return
            left -= received
            pending = after(pending, received)

    def _drain(self, length: int) -> None:
        while length:
            if self._begin == self._end:
                self._receive_more()
            taken = min(length, self._end - self._begin)
            self._begin += taken
            length -= taken

    def _end_of_value(self) -> None:
        while self._end - self._begin < 2:
            self._receive_more()
        if self._memory[self._begin : self._begin + 2] != _CRLF:
            raise ProtocolError("a value that does not end where it should")
        self._begin += 2


def _error(rest: bytes) -> ErrorReply:
    return ErrorReply(rest.decode("utf-8", "replace"))


def _length(rest: bytes) -> int | None:
    if rest == b"-1":
        return None
    if not _LENGTH.fullmatch(rest):
        raise ProtocolError("a length that is none")
    length = int(rest)
    if length > LARGEST_VALUE:
        raise ProtocolError("a length beyond the protocol's limit")
    return length

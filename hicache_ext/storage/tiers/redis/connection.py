"""One logged-in connection to one server, used by one thread at a time."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_ext.errors import LoginError, MaxClientsError, OversizedValueError, ProtocolError, ServerClosedError
from hicache_ext.runtime.vectored import IOV_MAX, after
from hicache_ext.storage.tiers.redis.clients import Address, TlsSettings, login_arguments
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig

# -- resp --------------------------------------------------------------------------------------------------------------
#
# RESP2, the protocol of Redis and Valkey (redis.io/docs/latest/develop/reference/protocol-spec).
#
# What a server may send is not trusted: every length is bounded before it is used, and anything that is not exactly the
# protocol is a ``ProtocolError``, after which the connection must be closed since nobody knows where the next reply
# begins. Page values go straight into the memory they are meant for; nothing is written anywhere else.


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


# -- wire --------------------------------------------------------------------------------------------------------------
#
# A socket whose every operation ends by a deadline: gathered sends, scattered receives, plain or TLS.
#
# Deadlines are points of ``time.monotonic()``. Waiting happens in the kernel without the GIL. One thread at a time.


_TIMER_SLACK = 0.05
"""Seconds by which a socket's timer may be off: to set it for every operation costs a system call each."""
_SHORTEST_TIMER = 0.001
_LEAST_WINDOW = 512 * 1024
_BYTES_A_MICROSECOND = 5000
"""More than a connection carries on the networks of today, in bytes per microsecond of round trip."""
_MIN_RTT = 148
"""Offset of tcpi_min_rtt (microseconds) in struct tcp_info (linux/tcp.h)."""


def remaining(deadline: float) -> float:
    """Seconds left; TimeoutError when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


class Wire:
    """TCP or a Unix socket. Raises TimeoutError at the deadline, and OSError for all else that ends a connection.

    The socket blocks, with the kernel's own timers (SO_RCVTIMEO): Python's timeouts poll before every operation.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(None)
        self._timers = {socket.SO_RCVTIMEO: (0.0, 0.0), socket.SO_SNDTIMEO: (0.0, 0.0)}

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        """Send all of ``buffers``, in order, without joining them."""
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while pending:
            self._set_timer(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(pending[:IOV_MAX])
            except BlockingIOError:
                raise TimeoutError("the server takes no more requests") from None
            pending = after(pending, sent)

    def receive_into(self, buffers: Sequence[memoryview], deadline: float) -> int:
        """Fill ``buffers`` with what has arrived, at least one byte; the number of bytes."""
        self._set_timer(socket.SO_RCVTIMEO, deadline)
        try:
            received = self._socket.recvmsg_into(buffers[:IOV_MAX])[0]
        except BlockingIOError:
            raise TimeoutError("the server does not answer") from None
        if received == 0:
            raise ServerClosedError
        return received

    def close(self) -> None:
        self._socket.close()

    @property
    def descriptor(self) -> int | None:
        """Of a socket whose bytes are the protocol's own: the native core can use it. None under TLS."""
        # Whoever uses it sets timers of its own.
        self._timers = dict.fromkeys(self._timers, (0.0, 0.0))
        return self._socket.fileno()

    def has_something(self) -> bool:
        """Whether anything has come, the end of the connection included. Does not wait."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def window(self) -> int:
        """Bytes to have under way, so that the connection is never idle and what arrives is still in the processor's
        cache when it is received: as many as arrive during a round trip, with some for the server's pauses."""
        if self._socket.family == socket.AF_UNIX:
            return _LEAST_WINDOW
        try:
            facts = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
        except OSError:
            return _LEAST_WINDOW
        if len(facts) < _MIN_RTT + 4:
            return _LEAST_WINDOW
        (microseconds,) = struct.unpack_from("I", facts, _MIN_RTT)
        # All ones: no packet was answered yet.
        return _LEAST_WINDOW + (microseconds * _BYTES_A_MICROSECOND if microseconds != 0xFFFFFFFF else 0)

    def _set_timer(self, option: int, deadline: float) -> None:
        now = time.monotonic()
        left = deadline - now
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        for_deadline, set_at = self._timers[option]
        if for_deadline == deadline and now - set_at < _TIMER_SLACK:
            return
        seconds = max(left, _SHORTEST_TIMER)
        timer = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timer)
        self._timers[option] = (deadline, now)


class TlsWire(Wire):
    """TLS over TCP: OpenSSL decrypts straight into the buffers, a record (16 KiB) at a time."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket: ssl.SSLSocket = connected

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        for buffer in buffers:
            if len(buffer):
                self._socket.settimeout(remaining(deadline))
                self._socket.sendall(buffer)

    def receive_into(self, buffers: Sequence[memoryview], deadline: float) -> int:
        target = next(buffer for buffer in buffers if buffer.nbytes)
        self._socket.settimeout(remaining(deadline))
        received = self._socket.recv_into(target)
        if received == 0:
            raise ServerClosedError
        return received

    @property
    def descriptor(self) -> int | None:
        return None

    def has_something(self) -> bool:
        if self._socket.pending():
            return True
        # Also where a record without content has come, such as a new session ticket: that is read with the next reply,
        # and a connection more is no harm.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))


def connect(
    family: int,
    address: tuple[str, int] | str,
    deadline: float,
    *,
    tls: ssl.SSLContext | None = None,
    server_name: str = "",
) -> Wire:
    """A connection to a resolved address. Raises as ``Wire`` does."""
    raw = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(raw.close)
        raw.settimeout(remaining(deadline))
        raw.connect(address)
        if family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None:
            wire = Wire(raw)
        else:
            raw.settimeout(remaining(deadline))
            wrapped = tls.wrap_socket(raw, server_hostname=server_name or None)
            on_failure.callback(wrapped.close)
            wire = TlsWire(wrapped)
        on_failure.pop_all()
        return wire


_MOST_CLIENTS = "max number of clients reached"
"""What Redis and Valkey say to a connection beyond maxclients, before they end it."""
MOST_IN_FLIGHT = 8 << 20
"""Bytes under way on one connection; as a rule fewer are, by its round trip."""
_SHORT_REQUESTS = 1024
"""Requests without payload that are under way at once: their bytes and replies fit into any socket's buffers."""


class Connection:
    """After any exception but a reply's own error the connection is of no use and must be closed.

    ``deadline`` (time.monotonic()) bounds every operation; whoever takes the connection sets it.
    """

    def __init__(self, wire: Wire, address: Address, deadline: float) -> None:
        self.wire = wire
        self.address = address
        self.opened = time.monotonic()
        self.deadline = deadline
        self.reader = ReplyReader(lambda buffers: wire.receive_into(buffers, self.deadline))
        self._questions = [b"PING", b"ECHO"]
        """What ``confirm`` may ask: a server may refuse either, and answer everything else."""

    def send(self, buffers: Sequence[memoryview | bytes]) -> None:
        self.wire.send(buffers, self.deadline)

    def ask(self, requests: Sequence[bytes]) -> list[Reply]:
        """The replies to short ``requests``, pipelined. Raises ProtocolError where they may belong to others."""
        replies: list[Reply] = []
        if not requests:
            return replies
        question, nonce = self.question()
        for first in range(0, len(requests), _SHORT_REQUESTS):
            portion = requests[first : first + _SHORT_REQUESTS]
            last = first + len(portion) == len(requests)
            self.send([b"".join([*portion, question] if last else portion)])
            replies.extend([self.reader.reply() for _ in portion])
        self._confirm(nonce)
        return replies

    def window(self) -> int:
        """Bytes of values to have under way (``Wire.window``)."""
        return min(MOST_IN_FLIGHT, self.wire.window())

    def confirm(self) -> None:
        """Ask something that only now has this answer. Whatever was answered before counts from here on: had one reply
        too many come, as of an earlier request, each would have been taken for the next one's. Raises ProtocolError."""
        question, nonce = self.question()
        self.send([question])
        self._confirm(nonce)

    def question(self) -> tuple[bytes, bytes]:
        """A request, and the text that nothing else is answered with; empty where the server answers none."""
        if not self._questions:
            return b"", b""
        nonce = new_nonce()
        return command(self._questions[0], nonce), nonce

    def _confirm(self, nonce: bytes) -> None:
        if not nonce:
            return
        reply = self.reader.reply()
        if isinstance(reply, ErrorReply):
            # No permission, or a server that takes no writes (-MISCONF): it says nothing about the other replies.
            self.refused_question()
            self.confirm()
        elif reply != nonce:
            raise ProtocolError("a reply that nothing was asked for")

    def refused_question(self) -> None:
        """The first question that there was is not answered; there may be another one."""
        del self._questions[:1]


def open_connection(
    tier: RedisTierConfig,
    endpoint: Endpoint,
    address: Address,
    tls: TlsSettings | None,
    deadline: float,
    *,
    of_replica: bool = False,
) -> Connection:
    """Connect, log in, choose the database. ``of_replica``: of a cluster's, which has to be asked to answer.

    Raises TimeoutError, OSError (as LoginError, MaxClientsError and ssl.SSLError are), ProtocolError, and ConfigError
    where the secret cannot be read.
    """
    login = login_arguments(tier)
    wire = connect(*address, deadline, tls=None if tls is None else tls.context(), server_name=endpoint.host)
    try:
        connection = Connection(wire, address, deadline)
        steps = [login] if login else []
        if tier.database:
            steps.append([b"SELECT", b"%d" % tier.database])
        if of_replica:
            steps.append([b"READONLY"])
        # One by one: a server that takes no more connections says so once, whatever it is asked.
        for step in [*steps, [b"PING"]]:
            name = step[0].decode()
            connection.send([command(*step)])
            reply = connection.reader.reply()
            if isinstance(reply, ErrorReply):
                if _MOST_CLIENTS in reply.line:
                    raise MaxClientsError
                if name == "PING" and reply.code != "NOAUTH":
                    connection.refused_question()
                    continue
                raise LoginError(name, reply.code)
            if reply not in (b"OK", b"PONG"):
                raise ProtocolError(f"{name} was not answered as Redis does")
        # For people who look at CLIENT LIST. A user need not be allowed to.
        connection.send([command(b"CLIENT", b"SETNAME", b"hicache_ext")])
        connection.reader.reply()
    except BaseException:
        wire.close()
        raise
    return connection

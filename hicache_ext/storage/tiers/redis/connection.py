"""A logged-in connection to one server, used by one thread at a time, and the names of a tier's Redis keys."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import socket
import ssl
import struct
import time
from binascii import hexlify
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_ext.errors import (
    LoginError,
    NodeDownError,
    OversizedValueError,
    ProtocolError,
    RefusedError,
    ServerClosedError,
)
from hicache_ext.page.envelope import IDENTITY_LENGTH, KEY_LENGTH
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.whole_file import FileSignature, file_signature
from hicache_ext.storage.contract.store import key_words
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig

logger = logging.getLogger(__name__)

# -- resp --------------------------------------------------------------------------------------------------------------
#
# RESP2, the protocol of Redis and Valkey (redis.io/docs/latest/develop/reference/protocol-spec).
#
# Replies are not trusted: every length is checked before it is used, and any deviation from the protocol raises
# ``ProtocolError``. The connection must then be closed because the start of the next reply is unknown. Page values are
# received directly into their destination buffers and nowhere else.


LONGEST_LINE = 4096
LONGEST_TEXT = 64 * 1024
"""Maximum bytes of a reply that is neither a page nor a list: replies to AUTH, PING, EVAL."""
LONGEST_DRAINED = 1 << 20
"""Maximum bytes of a value of the wrong length that are read and discarded; a longer one closes the connection."""
LARGEST_VALUE = 512 << 20
"""Redis' default limit (proto-max-bulk-len)."""
MOST_RECEIVED = 8 << 20
"""Maximum bytes of a reply that may be a list: even a fragmented map of 16,384 slots takes less."""
_DEEPEST_LIST = 6

_BUFFER_SIZE = 16 * 1024
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_LENGTH = re.compile(rb"[0-9]{1,10}")
_ERROR_CODE = re.compile(r"[A-Z]{2,20}")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error sent by the server. ``line`` may repeat our arguments (a password), so only ``code`` is shown."""

    line: str

    @property
    def code(self) -> str:
        word = self.line.partition(" ")[0]
        return word if _ERROR_CODE.fullmatch(word) else "ERR"


Answer = int | bytes | str | ErrorReply | list["Answer"] | None
"""A simple string (+OK) is a ``str``: it confirms that a command was executed, whereas a bulk string (``bytes``) with
the same text does not."""


def new_nonce() -> bytes:
    """Return a random word that a server sends only as an echo."""
    return os.urandom(8).hex().encode()


def command(*arguments: bytes) -> bytes:
    """Encode one request."""
    words = [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"*%d\r\n%b" % (len(words), b"".join(words))


def command_of_equals(word: bytes, arguments: Sequence[bytes]) -> bytes:
    """Encode one request whose arguments have equal lengths; optimized for hundreds of arguments."""
    between = b"\r\n$%d\r\n" % len(arguments[0])
    return b"*%d\r\n$%d\r\n%b%b%b\r\n" % (len(arguments) + 1, len(word), word, between, between.join(arguments))


class ReplyReader(io.RawIOBase):
    """Reads replies from a connection, one call per reply, in the order of the requests.

    ``receive_into`` receives at least one byte into a buffer and returns the count; its exceptions propagate unchanged.
    """

    def __init__(self, receive_into: Callable[[memoryview], int]) -> None:
        self._receive_into = receive_into
        self._received = self._used = 0
        self._buffered = io.BufferedReader(self, _BUFFER_SIZE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Receive bytes for the ``BufferedReader``."""
        received = self._receive_into(memoryview(buffer))
        self._received += received
        return received

    @property
    def empty(self) -> bool:
        """Whether replies have consumed every received byte, as must be the case when no reply is pending."""
        return self._used == self._received

    def answer(self, *, lists: bool = False) -> Answer:
        """Receive a reply that is not a page, at most ``LONGEST_TEXT`` bytes, or ``MOST_RECEIVED`` if ``lists``."""
        longest, depth = (MOST_RECEIVED, _DEEPEST_LIST) if lists else (LONGEST_TEXT, 0)
        return self._answer(self._used + longest + LONGEST_LINE, depth)

    def _answer(self, end: int, depth: int) -> Answer:
        line = self._line()
        if self._used > end:
            raise ProtocolError("an answer without end")
        kind, rest = line[:1], line[1:]
        if kind == b"*" and depth:
            # A null list counts as empty.
            return [self._answer(end, depth - 1) for _ in range(_length(rest) or 0)]
        if kind == b":":
            if not _INTEGER.fullmatch(rest):
                raise ProtocolError("an integer that is none")
            return int(rest)
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b"-":
            return _error(rest)
        if kind == b"$":
            length = _length(rest)
            if length is None:
                return None
            if length > end - self._used:
                raise OversizedValueError(length)
            text = bytearray(length)
            self._fill(memoryview(text))
            self._end_of_value()
            return bytes(text)
        raise ProtocolError("a reply of an unexpected type")

    def page_into(self, header: memoryview, segments: Sequence[memoryview]) -> int | ErrorReply | None:
        """Receive a value into ``header`` and ``segments`` and return its length, an error reply, or None for no value.

        They hold the value only if its length equals their total size. A value of another length is discarded except
        for its first bytes, which go into ``header``; ``segments`` are not touched.
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
            for part in (header, *segments):
                self._fill(part)
        elif length > LONGEST_DRAINED:
            raise OversizedValueError(length)
        else:
            seen = min(length, header.nbytes)
            self._fill(header[:seen])
            self._fill(memoryview(bytearray(length - seen)))
        self._end_of_value()
        return length

    def _line(self) -> bytes:
        line = self._buffered.readline(LONGEST_LINE + 2)
        self._used += len(line)
        if line[-2:] != b"\r\n" or b"\r" in line[:-2]:
            raise ProtocolError("a line that is none")
        return line[:-2]

    def _fill(self, target: memoryview) -> None:
        self._used += self._buffered.readinto(target)

    def _end_of_value(self) -> None:
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise ProtocolError("a value that does not end where it should")


def _error(rest: bytes) -> ErrorReply:
    return ErrorReply(rest.decode("utf-8", "replace"))


def _length(rest: bytes) -> int | None:
    if rest == b"-1":
        return None
    if not _LENGTH.fullmatch(rest):
        raise ProtocolError("a length that is none")
    length = int(rest)
    if length > LARGEST_VALUE:
        raise ProtocolError("a length that no value has")
    return length


# -- addresses and logins ---------------------------------------------------------------------------------------------


Address = tuple[int, tuple[str, int] | str]
"""Address family, and (host, port) or the path of a Unix socket."""

SHORT_CALL = 1.0
"""Maximum seconds for an administrative request (topology, node probe), unless the tier's timeout is shorter."""


def short_call(tier: RedisTierConfig) -> float:
    return min(SHORT_CALL, tier.longest_call)


_UNUSABLE_LOG_INTERVAL = 60.0
"""Seconds between two log messages about unusable TLS files."""


TlsContexts = Callable[[], ssl.SSLContext]


def tls_contexts(tier: RedisTierConfig) -> TlsContexts:
    """Return a function that returns the TLS context for the tier's next connection. It reloads the files when one of
    them has changed, and keeps the previous context while they are unusable, as in the middle of a rotation.

    Threads: any. Raises OSError (which includes ssl.SSLError) if the files are unusable at startup.
    """
    log = LimitedLog(logger, _UNUSABLE_LOG_INTERVAL)

    def signature() -> list[FileSignature | None]:
        files = (tier.tls_ca, tier.tls_certificate, tier.tls_key)
        return [None if file is None else file_signature(file) for file in files]

    loaded = signature(), _tls_context(tier)

    def current() -> ssl.SSLContext:
        nonlocal loaded
        if (now := signature()) != loaded[0]:
            try:
                loaded = now, _tls_context(tier)
            except OSError as error:
                words = "tier redis: the exchanged TLS files cannot be used (%s); going on with those that were there"
                log.log(logging.WARNING, "tls", words, error.strerror or error)
        return loaded[1]

    return current


def _tls_context(tier: RedisTierConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tier.tls_ca)
    context.check_hostname = tier.tls_verify == "full"
    context.verify_mode = ssl.CERT_NONE if tier.tls_verify == "none" else ssl.CERT_REQUIRED
    if tier.tls_certificate is not None:
        context.load_cert_chain(tier.tls_certificate, tier.tls_key)
    return context


def resolve(endpoint: Endpoint) -> list[Address]:
    """Return the IPv6 and IPv4 addresses of an endpoint in the resolver's order. Raises OSError.

    Name resolution has no deadline: never call this on a thread that a store's caller waits for.
    """
    if endpoint.is_path:
        return [(socket.AF_UNIX, endpoint.host)]
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (UnicodeError, OverflowError):
        raise OSError(f"{endpoint.host!r} is not the name of a host") from None
    return list(dict.fromkeys((int(family), (str(host), int(port))) for family, _, _, _, (host, port, *_) in found))


# -- connection --------------------------------------------------------------------------------------------------------


_LEAST_WINDOW = 512 * 1024
_BYTES_A_MICROSECOND = 5000
"""Bytes per microsecond of round trip: more than one connection carries on today's networks."""
_MIN_RTT = 148
"""Offset of tcpi_min_rtt (microseconds) in struct tcp_info (linux/tcp.h)."""
MOST_IN_FLIGHT = 8 << 20
"""Maximum bytes in flight on one connection; usually fewer, depending on its round-trip time."""
_SHORT_REQUESTS = 1024
"""Maximum requests without payload in flight: they and their replies fit into any socket's buffers."""


def remaining(deadline: float) -> float:
    """Return the seconds until ``deadline``. Raises TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


class Connection:
    """A connection over TCP, a Unix socket, or TLS. It must be closed after any exception except RefusedError.

    ``deadline`` (time.monotonic()) bounds every operation; the caller that takes the connection sets it. Operations
    raise TimeoutError at the deadline and OSError if the connection ends for another reason.
    """

    def __init__(self, connected: socket.socket, address: Address, deadline: float) -> None:
        self._socket = connected
        self.address = address
        self.opened = time.monotonic()
        self.deadline = deadline
        self.reader = ReplyReader(self._receive_into)
        self._questions = [b"PING", b"ECHO"]
        """Commands that ``confirm`` may use: a server may refuse either one and still answer everything else."""

    def send(self, *requests: bytes | memoryview) -> None:
        for piece in requests:
            self._socket.settimeout(remaining(self.deadline))
            self._socket.sendall(piece)

    def _receive_into(self, buffer: memoryview) -> int:
        self._socket.settimeout(remaining(self.deadline))
        received = self._socket.recv_into(buffer)
        if received == 0:
            raise ServerClosedError
        return received

    def close(self) -> None:
        self._socket.close()

    @property
    def descriptor(self) -> int | None:
        """Descriptor of a plain socket, which the native core can use; None under TLS."""
        if isinstance(self._socket, ssl.SSLSocket):
            return None
        # A blocking socket: the core sets the kernel's socket timeouts to enforce its deadline.
        self._socket.settimeout(None)
        return self._socket.fileno()

    def has_something(self) -> bool:
        """Return whether bytes or the end of the connection have arrived. Does not wait."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        # Under TLS this is also true for a record without payload, such as a new session ticket. It would be read with
        # the next reply, but replacing the connection does no harm.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def window(self) -> int:
        """Return how many bytes of values to keep in flight: what arrives during one round trip, plus a margin for
        pauses of the server. Then the connection never idles, and arriving data is still in the CPU cache when it is
        received."""
        if self._socket.family == socket.AF_UNIX:
            return _LEAST_WINDOW
        try:
            facts = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
        except OSError:
            return _LEAST_WINDOW
        if len(facts) < _MIN_RTT + 4:
            return _LEAST_WINDOW
        (microseconds,) = struct.unpack_from("I", facts, _MIN_RTT)
        # All ones: no packet has been acknowledged yet.
        round_trip = microseconds * _BYTES_A_MICROSECOND if microseconds != 0xFFFFFFFF else 0
        return min(MOST_IN_FLIGHT, _LEAST_WINDOW + round_trip)

    def tell(self, *words: bytes, within: float | None = None) -> Answer:
        """Return the reply to one command, which may be a list. ``within`` sets the deadline, in seconds from now.
        Raises RefusedError."""
        if within is not None:
            self.deadline = time.monotonic() + within
        self.send(command(*words))
        answer = self.reader.answer(lists=True)
        if isinstance(answer, ErrorReply):
            raise RefusedError(answer.code, words[0])
        return answer

    def info(self, *sections: bytes) -> dict[str, str]:
        """Return the fields of INFO; otherwise like ``tell``."""
        text = self.tell(b"INFO", *sections)
        if not isinstance(text, bytes):
            raise ProtocolError("no text")
        lines = text.decode("utf-8", "replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def ask(self, requests: Sequence[bytes]) -> list[Answer]:
        """Pipeline short ``requests`` and return their replies. Raises ProtocolError if replies may be mismatched."""
        replies: list[Answer] = []
        if not requests:
            return replies
        question, nonce = self.question()
        for first in range(0, len(requests), _SHORT_REQUESTS):
            portion = requests[first : first + _SHORT_REQUESTS]
            last = first + len(portion) == len(requests)
            self.send(b"".join([*portion, question] if last else portion))
            replies.extend([self.reader.answer() for _ in portion])
        self._confirm(nonce)
        return replies

    def confirm(self) -> None:
        """Send a request whose reply contains a new nonce. Previous replies count only once it matches: a surplus reply
        from an earlier request would have shifted every reply by one. Raises ProtocolError."""
        question, nonce = self.question()
        self.send(question)
        self._confirm(nonce)

    def question(self) -> tuple[bytes, bytes]:
        """Return a request and the nonce that only its reply contains; both are empty if the server refuses all."""
        if not self._questions:
            return b"", b""
        nonce = new_nonce()
        return command(self._questions[0], nonce), nonce

    def _confirm(self, nonce: bytes) -> None:
        if not nonce:
            return
        reply = self.reader.answer()
        if isinstance(reply, ErrorReply):
            # Missing permission, or a server that refuses writes (-MISCONF): this says nothing about the other replies.
            self.refused_question()
            self.confirm()
        elif reply != nonce:
            raise ProtocolError("a reply that nothing was asked for")

    def refused_question(self) -> None:
        """Drop the question that the server refused; the next one may be answered."""
        del self._questions[:1]


def open_connection(
    tier: RedisTierConfig,
    endpoint: Endpoint,
    addresses: Sequence[Address],
    tls: TlsContexts | None,
    deadline: float,
) -> Connection:
    """Connect to the first address that answers, log in, and select the database.

    Raises the last address's error: TimeoutError, OSError (which includes LoginError and ssl.SSLError), ProtocolError;
    and ConfigError if the secret cannot be read.
    """
    for position, address in enumerate(addresses):
        # The remaining addresses share the remaining time.
        now = time.monotonic()
        until = now + max(0.0, deadline - now) / (len(addresses) - position)
        try:
            return _open(tier, endpoint, address, tls, until)
        except LoginError:
            raise
        except OSError:
            if position + 1 == len(addresses):
                raise
    raise NodeDownError(f"{endpoint} is down")


def _open(
    tier: RedisTierConfig, endpoint: Endpoint, address: Address, tls: TlsContexts | None, until: float
) -> Connection:
    steps: list[list[bytes]] = []
    if tier.password is not None:
        user = [] if tier.username is None else [tier.username.encode()]
        # Revealed for each login so that a changed password takes effect.
        steps.append([b"AUTH", *user, tier.password.reveal().encode()])
    if tier.database:
        steps.append([b"SELECT", b"%d" % tier.database])
    family, place = address
    with contextlib.ExitStack() as on_failure:
        plain = socket.socket(family, socket.SOCK_STREAM)
        on_failure.callback(plain.close)
        plain.settimeout(remaining(until))
        plain.connect(place)
        if family != socket.AF_UNIX:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected = plain
        if tls is not None:
            plain.settimeout(remaining(until))
            connected = tls().wrap_socket(plain, server_hostname=endpoint.host or None)
            on_failure.callback(connected.close)
        connection = Connection(connected, address, until)
        # One by one: a server at its connection limit replies only once, whatever the command.
        for step in [*steps, [b"PING"]]:
            name = step[0].decode()
            connection.send(command(*step))
            reply = connection.reader.answer()
            if isinstance(reply, ErrorReply):
                if name == "PING" and reply.code != "NOAUTH":
                    connection.refused_question()
                    continue
                raise LoginError(name, reply.code)
            if reply not in ("OK", "PONG"):
                raise ProtocolError(f"{name} was not answered as Redis does")
        # For people who read CLIENT LIST. The error of a user without permission is ignored.
        connection.send(command(b"CLIENT", b"SETNAME", b"hicache_ext"))
        connection.reader.answer()
        on_failure.pop_all()
        return connection


# -- names -------------------------------------------------------------------------------------------------------------
#
# The Redis keys of a tier, below its prefix: ``page:<identity>:<page hash>`` and ``identity:<identity>``, in hex.


def page_prefix(prefix: str) -> bytes:
    return prefix.encode() + b"page:"


def page_name(page_names: bytes, key: bytes) -> bytes:
    """Return the Redis key of a page; ``page_names`` is the result of ``page_prefix``. It has no hash tag, so that a
    cluster spreads the pages of one conversation over all nodes."""
    (name,) = page_names_of(page_names, [key])
    return name


def page_names_of(page_names: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Return the ``page_name`` of each key."""
    text = hexlify(key_words(keys).tobytes())
    length, split = 2 * KEY_LENGTH, 2 * IDENTITY_LENGTH
    return [
        page_names + text[first : first + split] + b":" + text[first + split : first + length]
        for first in range(0, len(text), length)
    ]


def page_key(page_names: bytes, name: bytes) -> bytes | None:
    """Return the page key encoded in ``name``; None for a Redis key that is not a page of this tier."""
    rest = name.removeprefix(page_names)
    if rest == name or rest[32:33] != b":" or not is_hex(rest[:32], 32) or not is_hex(rest[33:], 64):
        return None
    return bytes.fromhex((rest[:32] + rest[33:]).decode())


def identity_name(prefix: str, digest: bytes) -> bytes:
    return b"%bidentity:%b" % (prefix.encode(), digest.hex().encode())


def is_hex(text: bytes, length: int) -> bool:
    """Return whether ``text`` consists of exactly ``length`` lower-case hex digits."""
    return len(text) == length and not text.strip(b"0123456789abcdef")

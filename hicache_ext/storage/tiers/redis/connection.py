"""One logged-in connection to one server, used by one thread at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hicache_ext.errors import LoginError, MaxClientsError, ProtocolError
from hicache_ext.storage.tiers.redis.clients import Address, TlsSettings, login_arguments
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.resp import ErrorReply, Reply, ReplyReader, command, new_nonce
from hicache_ext.storage.tiers.redis.wire import Wire, connect

_MOST_CLIENTS = "max number of clients reached"
"""What Redis and Valkey say to a connection beyond maxclients, before they end it."""
_SHORT_REQUESTS = 1024
"""Requests without payload that are under way at once: their bytes and replies fit into any socket's buffers."""


class Connection:
    """After any exception but a reply's own error the connection is of no use and must be closed.

    ``deadline`` (time.monotonic()) bounds every operation; whoever takes the connection sets it.
    """

    def __init__(self, wire: Wire, address: Address, deadline: float) -> None:
        self._wire = wire
        self.address = address
        self.opened = time.monotonic()
        self.deadline = deadline
        self.reader = ReplyReader(lambda buffers: wire.receive_into(buffers, self.deadline))
        self.answers_questions = True
        """Whether the user may ask what ``confirm`` asks."""

    def send(self, buffers: Sequence[memoryview | bytes]) -> None:
        self._wire.send(buffers, self.deadline)

    def ask(self, requests: Sequence[bytes]) -> list[Reply]:
        """The replies to short ``requests``, pipelined. Raises ProtocolError where they may belong to others."""
        replies: list[Reply] = []
        if not requests:
            return replies
        question, answer = self._question()
        for first in range(0, len(requests), _SHORT_REQUESTS):
            portion = requests[first : first + _SHORT_REQUESTS]
            last = first + len(portion) == len(requests)
            self.send([b"".join([*portion, question] if last else portion)])
            replies.extend([self.reader.reply() for _ in portion])
        self._confirm(answer)
        return replies

    def confirm(self) -> None:
        """Ask something that only now has this answer. Whatever was answered before counts from here on: had one reply
        too many come, as of an earlier request, each would have been taken for the next one's. Raises ProtocolError."""
        question, answer = self._question()
        self.send([question])
        self._confirm(answer)

    def _question(self) -> tuple[bytes, bytes]:
        if not self.answers_questions:
            return b"", b""
        nonce = new_nonce()
        return command(b"PING", nonce), nonce

    def _confirm(self, answer: bytes) -> None:
        if not answer:
            return
        reply = self.reader.reply()
        if isinstance(reply, ErrorReply) and reply.code == "NOPERM":
            # A user that may read and write pages need not be allowed to PING.
            self.answers_questions = False
        elif reply != answer:
            raise ProtocolError("a reply that nothing was asked for")

    @property
    def is_stale(self) -> bool:
        """Of an idle connection: it has ended, or something came that nobody asked for."""
        return self._wire.has_something()

    @property
    def descriptor(self) -> int | None:
        """Of the socket, for compiled code; None under TLS."""
        return self._wire.descriptor

    def window(self, most: int) -> int:
        """Bytes of values to have under way (``Wire.window``), ``most`` at most."""
        return min(most, self._wire.window())

    def close(self) -> None:
        self._wire.close()


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
                if name == "PING" and reply.code == "NOPERM":
                    connection.answers_questions = False
                    continue
                raise LoginError(name, reply.code)
            if reply not in (b"OK", b"PONG"):
                raise ProtocolError(f"{name} was not answered as Redis does")
        # For people who look at CLIENT LIST. A user need not be allowed to.
        connection.send([command(b"CLIENT", b"SETNAME", tier.client_name.encode())])
        connection.reader.reply()
    except BaseException:
        wire.close()
        raise
    return connection

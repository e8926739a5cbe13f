"""One logged-in connection to one server, used by one thread at a time."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_ext.errors import LoginError, ProtocolError
from hicache_ext.storage.tiers.redis.clients import TlsSettings, login_arguments
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.resp import ErrorReply, Reply, ReplyReader, command
from hicache_ext.storage.tiers.redis.wire import Wire, connect

_SHORT_REQUESTS = 1024
"""Requests without payload that are under way at once: their bytes and replies fit into any socket's buffers."""


class Connection:
    """After any exception but a reply's own error the connection is of no use and must be closed.

    ``deadline`` (time.monotonic()) bounds every operation; whoever takes the connection sets it.
    """

    def __init__(self, wire: Wire, deadline: float) -> None:
        self._wire = wire
        self.deadline = deadline
        self.reader = ReplyReader(lambda buffers: wire.receive_into(buffers, self.deadline))
        self.used = False
        """Has been idle since an earlier call, so that the server may have ended it for its own reasons."""

    def send(self, buffers: Sequence[memoryview | bytes]) -> None:
        self._wire.send(buffers, self.deadline)

    def ask(self, requests: Sequence[bytes]) -> list[Reply]:
        """The replies to short ``requests``, pipelined."""
        replies: list[Reply] = []
        for first in range(0, len(requests), _SHORT_REQUESTS):
            portion = requests[first : first + _SHORT_REQUESTS]
            self.send([b"".join(portion)])
            replies.extend([self.reader.reply() for _ in portion])
        return replies

    def close(self) -> None:
        self._wire.close()


def open_connection(
    tier: RedisTierConfig,
    endpoint: Endpoint,
    address: tuple[int, tuple[str, int] | str],
    tls: TlsSettings | None,
    deadline: float,
) -> Connection:
    """Connect, log in, choose the database.

    Raises TimeoutError, OSError (LoginError and ssl.SSLError are), ProtocolError, and ConfigError where the secret
    cannot be read.
    """
    login = login_arguments(tier)
    wire = connect(*address, deadline, tls=None if tls is None else tls.context(), server_name=endpoint.host)
    try:
        connection = Connection(wire, deadline)
        steps = [login] if login else []
        if tier.database:
            steps.append([b"SELECT", b"%d" % tier.database])
        steps.append([b"PING"])
        for step, reply in zip(steps, connection.ask([command(*step) for step in steps]), strict=True):
            name = step[0].decode()
            if isinstance(reply, ErrorReply):
                # A user that may read and write pages need not be allowed to PING; that it was understood is enough.
                if name == "PING" and reply.code == "NOPERM":
                    continue
                raise LoginError(name, reply.code)
            if reply not in (b"OK", b"PONG"):
                raise ProtocolError(f"{name} was not answered as Redis does")
    except BaseException:
        wire.close()
        raise
    return connection

"""A TCP proxy in front of a real server that makes the connection bad on purpose, while both ends run.

::

    with RedisServer(directory) as server, TroubleProxy(server.port) as proxy:
        client = redis.Redis(port=proxy.port)
        proxy.trouble = Trouble.SLOW
        ...
        proxy.trouble = Trouble.NONE

Loopback only. For tests and campaigns; it speaks no protocol and works for any.
"""

from __future__ import annotations

import enum
import random
import socket
import threading
import time
from contextlib import suppress
from typing import Self

from hicache_ext.testing.server import free_port

_HOST = "127.0.0.1"
_CHUNK = 1 << 20
_NARROW_CHUNK = 1 << 14
_SMALL_REPLY = 512
"""Replies up to this many bytes stay whole in FLIPPED: numbers and states arrive, pages are damaged."""
_FLIP_EVERY = 2048


class Trouble(enum.Enum):
    """What is done to connections, old and new."""

    NONE = "none"
    SLOW = "slow"
    """Every call takes ``delay`` seconds longer."""
    FLIPPED = "flipped"
    """Bytes of large replies are changed, at least one in 2 KiB: pages arrive damaged. Of all that is received at once,
    the share ``flipped`` is."""
    NONSENSE = "nonsense"
    """Every reply is replaced by as many random bytes."""
    NARROW = "narrow"
    """All connections together get ``rate`` bytes a second each way, and every call is ``late`` seconds later."""
    BAD = "bad"
    """Of what is received at once, of any size, the share ``flipped`` has a byte changed; with the share ``cut`` the
    connection ends."""
    REFUSING = "refusing"
    """Connections are ended, and nothing listens: what a client sees of a server that is not there."""


class TroubleProxy:
    """Forwards connections to a port of this machine. Two threads a connection; any thread may set ``trouble``."""

    def __init__(
        self,
        upstream_port: int,
        *,
        delay: float = 2.0,
        flipped: float = 1.0,
        cut: float = 0.1,
        rate: float = 1e6,
        late: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.port = free_port()
        self.delay = delay
        self.flipped = flipped
        self.cut = cut
        self.rate = rate
        self.late = late
        self._upstream_port = upstream_port
        self._random = random.Random(seed)
        self._trouble = Trouble.NONE
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._free_at = {"requests": 0.0, "replies": 0.0}
        """When what is on its way in that direction has passed a narrow link."""

    @property
    def trouble(self) -> Trouble:
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: Trouble) -> None:
        self._trouble = trouble
        if trouble is Trouble.REFUSING:
            self._stop_listening()
        elif self._listener is None:
            self._listen()

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        self._trouble = Trouble.REFUSING
        self._stop_listening()
        for thread in list(self._threads):
            thread.join()

    def _listen(self) -> None:
        self._listener = socket.create_server((_HOST, self.port))
        self._start(self._accept, self._listener)

    def _stop_listening(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
            connections, self._connections = self._connections, set()
        for open_socket in [listener, *connections]:
            _end(open_socket)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads = [known for known in self._threads if known.is_alive()] + [thread]
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((_HOST, self._upstream_port), timeout=10)
                server.settimeout(None)
            except OSError:
                _end(client)
                continue
            with self._lock:
                if self._listener is not listener:
                    _end(client)
                    _end(server)
                    return
                self._connections |= {client, server}
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answered = threading.Event()
            answered.set()
            self._start(self._carry_requests, client, server, answered)
            self._start(self._carry_replies, server, client, answered)

    def _carry_requests(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        with suppress(OSError):
            while chunk := client.recv(self._most_at_once()):
                # What comes before the answer to what was sent last belongs to the same call.
                if answered.is_set():
                    time.sleep({Trouble.SLOW: self.delay, Trouble.NARROW: self.late}.get(self._trouble, 0))
                answered.clear()
                self._pass_narrow(len(chunk), "requests")
                if self._is_cut():
                    break
                server.sendall(chunk)
        self._forget(client, server)

    def _carry_replies(self, server: socket.socket, client: socket.socket, answered: threading.Event) -> None:
        with suppress(OSError):
            while chunk := server.recv(self._most_at_once()):
                answered.set()
                self._pass_narrow(len(chunk), "replies")
                if self._is_cut():
                    break
                client.sendall(self._spoiled(chunk))
        self._forget(client, server)

    def _most_at_once(self) -> int:
        return _NARROW_CHUNK if self._trouble is Trouble.NARROW else _CHUNK

    def _pass_narrow(self, size: int, direction: str) -> None:
        if self._trouble is not Trouble.NARROW:
            return
        with self._lock:
            self._free_at[direction] = max(self._free_at[direction], time.monotonic()) + size / self.rate
            wait = self._free_at[direction] - time.monotonic()
        until = time.monotonic() + wait
        while self._trouble is Trouble.NARROW and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))

    def _is_cut(self) -> bool:
        return self._trouble is Trouble.BAD and self._random.random() < self.cut

    def _spoiled(self, chunk: bytes) -> bytes:
        if self._trouble is Trouble.NONSENSE:
            return self._random.randbytes(len(chunk))
        if self._trouble is Trouble.BAD and self._random.random() < self.flipped:
            return self._flipped(chunk, len(chunk))
        flips = self._trouble is Trouble.FLIPPED and len(chunk) > _SMALL_REPLY
        return self._flipped(chunk, _FLIP_EVERY) if flips and self._random.random() < self.flipped else chunk

    def _flipped(self, chunk: bytes, every: int) -> bytes:
        """One byte in each ``every`` is another one."""
        spoiled = bytearray(chunk)
        for begin in range(0, len(spoiled), every):
            spoiled[self._random.randrange(begin, min(begin + every, len(spoiled)))] ^= 0x55
        return bytes(spoiled)

    def _forget(self, *connections: socket.socket) -> None:
        with self._lock:
            self._connections -= set(connections)
        for connection in connections:
            _end(connection)


def _end(connection: socket.socket | None) -> None:
    """Close, and wake the thread that waits on it."""
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

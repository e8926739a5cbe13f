"""A server on a socket that answers whatever a test wants: cut, too long, of another type, another page's bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hicache_ext.storage.tiers.redis.config import Endpoint

Answer = bytes | None
"""What is sent for one request; None ends the connection."""


def read_request(file) -> list[bytes] | None:
    """One request as its words; None at the end of the connection."""
    line = file.readline()
    if not line.startswith(b"*"):
        return None
    words = []
    for _ in range(int(line[1:])):
        length = int(file.readline()[1:])
        words.append(file.read(length))
        file.read(2)
    return words


def nothing_here(words: list[bytes]) -> Answer:
    """What an empty server answers."""
    return {b"GET": b"$-1\r\n", b"GETRANGE": b"$0\r\n\r\n", b"SET": b"+OK\r\n", b"AUTH": b"+OK\r\n"}.get(
        words[0], b":0\r\n"
    )


class FakeServer:
    """Answers the login itself and everything else by ``answer(words)``. ``last`` ends a connection after its bytes."""

    def __init__(self, answer: Callable[[list[bytes]], Answer]) -> None:
        self.answer = answer
        self.end_after_answer = False
        self.requests: list[list[bytes]] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @contextmanager
    def honest(self) -> Iterator[None]:
        """Be an empty server inside, as the start of a tier wants it, whose requests do not count."""
        answer, ends = self.answer, self.end_after_answer
        self.answer, self.end_after_answer = nothing_here, False
        yield
        self.answer, self.end_after_answer = answer, ends
        self.requests.clear()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(*self._listener.getsockname())

    def open_sockets(self) -> list[socket.socket]:
        return [connection for connection in self._sockets if connection.fileno() >= 0]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # As servers do: replies to several requests are sent one by one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._sockets.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as file:
                while (words := read_request(file)) is not None:
                    if words[0] == b"PING":
                        pong = b"$%d\r\n%b\r\n" % (len(words[1]), words[1]) if len(words) > 1 else b"+PONG\r\n"
                        connection.sendall(pong)
                        continue
                    if words[0] == b"CLIENT":
                        connection.sendall(b"+OK\r\n")
                        continue
                    self.requests.append(words)
                    answer = self.answer(words)
                    if answer is None:
                        return
                    connection.sendall(answer)
                    if self.end_after_answer:
                        return
        except OSError:
            pass

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()

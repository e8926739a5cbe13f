"""A socket whose every operation ends by a deadline: gathered sends, scattered receives, plain or TLS.

Deadlines are points of ``time.monotonic()``. Waiting happens in the kernel without the GIL. One thread at a time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from hicache_ext.errors import ServerClosedError
from hicache_ext.runtime.vectored import IOV_MAX, after

_TIMER_SLACK = 0.05
"""Seconds by which a socket's timer may be off: to set it for every operation costs a system call each."""
_SHORTEST_TIMER = 0.001
_LEAST_WINDOW = 512 * 1024
_BYTES_A_MICROSECOND = 5000
"""More than a connection carries on the networks of today, in bytes per microsecond of round trip."""
_MIN_RTT = 148
"""Offset of tcpi_min_rtt (microseconds) in struct tcp_info (linux/tcp.h)."""


class Wire(Protocol):
    """Raises TimeoutError once the deadline has passed and OSError for everything else that ends a connection."""

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        """Send all of ``buffers``, in order, without joining them."""

    def receive_into(self, buffers: Sequence[memoryview], deadline: float) -> int:
        """Fill ``buffers`` with what has arrived, at least one byte; the number of bytes."""

    def close(self) -> None: ...

    @property
    def descriptor(self) -> int | None:
        """Of a socket whose bytes are the protocol's own: compiled code can use it. None under TLS."""

    def has_something(self) -> bool:
        """Whether anything has come, the end of the connection included. Does not wait."""

    def window(self) -> int:
        """Bytes to have under way, so that the connection is never idle and what arrives is still in the processor's
        cache when it is received: as many as arrive during a round trip, with some for the server's pauses."""


def remaining(deadline: float) -> float:
    """Seconds left; TimeoutError when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


class PlainWire:
    """TCP or a Unix socket.

    The socket blocks, with the kernel's own timers (SO_RCVTIMEO): Python's timeouts poll before every operation.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(None)
        self._timers = {socket.SO_RCVTIMEO: (0.0, 0.0), socket.SO_SNDTIMEO: (0.0, 0.0)}

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while pending:
            self._set_timer(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._socket.sendmsg(pending[:IOV_MAX])
            except BlockingIOError:
                raise TimeoutError("the server takes no more requests") from None
            pending = after(pending, sent)

    def receive_into(self, buffers: Sequence[memoryview], deadline: float) -> int:
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
        # Whoever uses it sets timers of its own.
        self._timers = dict.fromkeys(self._timers, (0.0, 0.0))
        return self._socket.fileno()

    def has_something(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def window(self) -> int:
        return _window(self._socket)

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


class TlsWire:
    """TLS over TCP: OpenSSL decrypts straight into the buffers, a record (16 KiB) at a time."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected

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

    def close(self) -> None:
        self._socket.close()

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

    def window(self) -> int:
        return _window(self._socket)


def _window(connected: socket.socket) -> int:
    if connected.family == socket.AF_UNIX:
        return _LEAST_WINDOW
    try:
        facts = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
    except OSError:
        return _LEAST_WINDOW
    if len(facts) < _MIN_RTT + 4:
        return _LEAST_WINDOW
    (microseconds,) = struct.unpack_from("I", facts, _MIN_RTT)
    # All ones: no packet was answered yet.
    return _LEAST_WINDOW + (microseconds * _BYTES_A_MICROSECOND if microseconds != 0xFFFFFFFF else 0)


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
        wire: Wire
        if tls is None:
            wire = PlainWire(raw)
        else:
            raw.settimeout(remaining(deadline))
            wrapped = tls.wrap_socket(raw, server_hostname=server_name or None)
            on_failure.callback(wrapped.close)
            wire = TlsWire(wrapped)
        on_failure.pop_all()
        return wire

"""One server of the tier: its connections, and whether it is up.

A node goes down when it cannot be connected to or misses a deadline. From then on calls answer at once for its pages,
and it is tried in the background until it is back: no call waits twice for a node that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator

from hicache_ext.errors import ConfigError, LaneBusyError, NodeDownError, ProtocolError
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker, BreakerState
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.redis.clients import TlsSettings, resolve, short_call
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import Connection, open_connection

logger = logging.getLogger(__name__)

_ATTEMPTS = Backoff(0.1, 2.0)
"""Seconds between two attempts to reach a node that is down."""


class Lane:
    """At most ``limit`` connections to one node. Threads: any."""

    def __init__(self, limit: int, *, keeps: bool = True) -> None:
        """``keeps`` False: every use has a connection of its own, closed after it."""
        self._keeps = keeps
        self._free = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    @contextlib.contextmanager
    def place(self, deadline: float) -> Iterator[None]:
        """The right to one connection; LaneBusyError when none is free in time."""
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LaneBusyError
        try:
            yield
        finally:
            self._free.release()

    def pop(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def push(self, connection: Connection) -> None:
        if not self._keeps:
            connection.close()
            return
        connection.used = True
        with self._lock:
            self._idle.append(connection)

    def drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class Node:
    """Pages and short requests have connections of their own, so that a look-up never waits behind megabytes."""

    def __init__(
        self,
        tier: RedisTierConfig,
        endpoint: Endpoint,
        tls: TlsSettings | None,
        metrics: TierMetrics,
        when_down: Callable[[], None],
    ) -> None:
        """Down until it was reached for the first time: in the background from ``start`` on, or by ``attempt``."""
        self.endpoint = endpoint
        self._tier = tier
        self._tls = tls
        self._metrics = metrics
        self._when_down = when_down
        self.pages = Lane(tier.connections)
        self.requests = Lane(2)
        self.examinations = Lane(1, keeps=False)
        self._address: tuple[int, tuple[str, int] | str] | None = None
        self._tried = threading.Event()
        self._problem: BaseException | None = None
        self._breaker = Breaker(
            f"hicache-{metrics.tier}-node",
            self._reach,
            _ATTEMPTS,
            on_change=self._changed,
            state=BreakerState.OPEN,
        )
        self.writes_rejected_until = 0.0
        """time.monotonic() until when the server is taken to be out of memory."""

    @property
    def up(self) -> bool:
        return self._breaker.up and not self._breaker.closing

    @contextlib.contextmanager
    def connection(self, lane: Lane, deadline: float, *, fresh: bool = False) -> Iterator[Connection]:
        """A connection for the thread that asks; closed instead of kept if anything is raised or left unread.

        ``fresh`` after an idle one turned out to be dead: the other idle ones may be, too. Raises NodeDownError,
        TimeoutError, OSError, ProtocolError.
        """
        if not self.up:
            raise NodeDownError(f"{self.endpoint} is down")
        with lane.place(deadline):
            if fresh:
                lane.drop_idle()
            connection = lane.pop() or self._open(deadline)
            connection.deadline = deadline
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            if self.up and connection.reader.empty:
                lane.push(connection)
            else:
                connection.close()

    def _open(self, deadline: float) -> Connection:
        address = self._address
        if address is None:
            raise NodeDownError(f"{self.endpoint} is down")
        try:
            opened = open_connection(self._tier, self.endpoint, address, self._tls, deadline)
        except (OSError, ProtocolError) as error:
            self.mark_down(error)
            raise
        except ConfigError as error:
            self.mark_down(error)
            raise NodeDownError("the password cannot be read") from None
        self._metrics.add("connection", "opened")
        return opened

    # -- down and up -----------------------------------------------------------------------------------------------

    def mark_down(self, error: BaseException) -> None:
        """Take the node out of service until it has been reached again."""
        if not self._breaker.closing:
            self._breaker.trip(error_words(error))

    def start(self) -> None:
        """Try in the background to reach a node that is down."""
        self._breaker.resume(at_once=True)

    def attempt(self) -> BaseException | None:
        """Try to reach the node within a second, on this thread; why not, or None."""
        return None if self._breaker.probe_now() else self._problem

    def wait_until_tried(self, seconds: float) -> None:
        """Returns once a new node has been tried for the first time, or after ``seconds``."""
        self._tried.wait(seconds)

    def close(self, seconds: float) -> None:
        """Waits so long for an attempt under way."""
        self._breaker.close(seconds)
        self._drop_idle()

    def _reach(self) -> bool:
        try:
            self._address = resolve(self.endpoint)
            deadline = time.monotonic() + short_call(self._tier)
            connection = open_connection(self._tier, self.endpoint, self._address, self._tls, deadline)
        except Exception as error:
            # Kept whatever it is: without a problem the node would pass for one that was reached.
            self._problem = error
            self._tried.set()
            if isinstance(error, (OSError, ProtocolError, ConfigError)):
                return False
            raise
        if self._breaker.closing:
            connection.close()
        else:
            self.pages.push(connection)
        return True

    def _changed(self, state: BreakerState, reason: str) -> None:
        self._tried.set()
        if state is BreakerState.OPEN:
            self._drop_idle()
            self._metrics.add("node", "down")
            logger.warning("redis node %s is down: %s", self.endpoint, reason)
            self._when_down()
        else:
            self._metrics.add("node", "up")
            logger.info("redis node %s is up", self.endpoint)

    def _drop_idle(self) -> None:
        self.pages.drop_idle()
        self.requests.drop_idle()


def error_words(error: BaseException) -> str:
    """What went wrong in a few words that repeat nothing we sent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__

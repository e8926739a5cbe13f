"""One server of the tier: its connections and whether it is up.

A node goes down when a connection to it fails, or when a read or a lookup misses a deadline or is refused. From then on
calls fail immediately for its pages, and a background thread retries until it is back: no call waits twice for a dead
node. A refused write only pauses writes to the node.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from hicache_ext.errors import (
    ConfigError,
    LaneBusyError,
    LoginError,
    NodeDownError,
    ProtocolError,
    RefusedError,
)
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker, BreakerState, WritePause
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig
from hicache_ext.storage.tiers.redis.connection import (
    Address,
    Connection,
    ErrorReply,
    TlsContexts,
    command,
    open_connection,
    resolve,
    short_call,
)

logger = logging.getLogger(__name__)

_ATTEMPTS = Backoff(0.1, 2.0)
"""Seconds between two attempts to reach a node that is down."""
_FIRST_ATTEMPT = 3
"""Maximum wait for the first attempt to reach a node, as a multiple of a short call: name resolution may hang."""
_OLDEST = 300.0
"""Seconds after which an idle connection is replaced: its name, load balancer or password may have changed."""


class Lane:
    """Limits the connections to one node in use to ``limit``. Threads: any."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        """The number of connections that could be taken now."""
        return self._limit - self._taken

    @contextlib.contextmanager
    def place(self, deadline: float) -> Iterator[None]:
        """Reserve one connection. Raises LaneBusyError if none is free by the deadline, or if it has passed."""
        with self._changed:
            is_free = self._changed.wait_for(lambda: self.free > 0, max(0.0, deadline - time.monotonic()))
            if not is_free or time.monotonic() >= deadline:
                # Another waiter may still have time.
                self._changed.notify()
                raise LaneBusyError("every connection is in use")
            self._taken += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken -= 1
                self._changed.notify()


class Node:
    """One server. Pages and short requests use separate connections so that a lookup never waits behind megabytes."""

    def __init__(
        self,
        tier: RedisTierConfig,
        endpoint: Endpoint,
        tls: TlsContexts | None,
        metrics: TierMetrics,
        when_down: Callable[[], None],
    ) -> None:
        """Start in the down state and try to reach the server in the background."""
        self.endpoint = endpoint
        self._tier = tier
        self._tls = tls
        self._metrics = metrics
        self._when_down = when_down
        self.pages = Lane(tier.connections)
        self.requests = Lane(2)
        self._idle: deque[Connection] = deque()
        self._log = LimitedLog(logger)
        self.writes = WritePause()
        self._refused: RefusedError | None = None
        """The refusal of the read or lookup that took the node down."""
        self._refused_name = b""
        """The name that the refused command is retried with."""
        self._addresses: list[Address] = []
        """The addresses of the name; the one that answered comes first."""
        self._created = time.monotonic()
        self._attempted = threading.Event()
        self._problem: BaseException = TimeoutError("no answer in time")
        self._breaker = Breaker(
            f"hicache-{metrics.tier}-node",
            self._reach,
            _ATTEMPTS,
            on_change=self._changed,
            state=BreakerState.OPEN,
        )
        self._breaker.examine("it was not reached yet")

    @property
    def up(self) -> bool:
        return self._breaker.up and not self._breaker.closing

    @contextlib.contextmanager
    def connection(self, lane: Lane, deadline: float, *, fresh: bool = False) -> Iterator[Connection]:
        """Lend a connection to the calling thread; close it if anything is raised or left unread, else keep it.

        ``fresh`` excludes idle connections, after one turned out to be dead. Raises NodeDownError, TimeoutError,
        OSError, ProtocolError.
        """
        if not self.up:
            raise NodeDownError(f"{self.endpoint} is down")
        with lane.place(deadline):
            if fresh:
                # The other idle connections are just as old.
                self._close_idle()
            connection = self._take_idle() or self._open(deadline)
            connection.deadline = deadline
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            if self.up and connection.reader.empty and connection.address in self._addresses:
                self._idle.append(connection)
            else:
                connection.close()

    @contextlib.contextmanager
    def aside(self, seconds: float | None = None) -> Iterator[Connection]:
        """Open a connection outside the lanes for administrative commands, each limited to ``seconds`` or the tier's
        timeout. Raises like ``connection``, and ConfigError."""
        if not self.up:
            raise NodeDownError(f"{self.endpoint} is down")
        seconds = self._tier.longest_call if seconds is None else seconds
        connection = self._connect(time.monotonic() + seconds)
        connection.deadline = time.monotonic() + seconds
        try:
            yield connection
        finally:
            connection.close()

    def _take_idle(self) -> Connection | None:
        """Return the most recently used idle connection; close those that are old, lead elsewhere or have ended."""
        with contextlib.suppress(IndexError):
            while connection := self._idle.pop():
                is_old = time.monotonic() - connection.opened > _OLDEST
                if not is_old and connection.address in self._addresses and not connection.has_something():
                    return connection
                connection.close()
        return None

    def _open(self, deadline: float) -> Connection:
        try:
            opened = self._connect(deadline)
        except (OSError, ProtocolError) as error:
            self.mark_down(error)
            raise
        except ConfigError as error:
            self.mark_down(error)
            raise NodeDownError("the password cannot be read") from None
        self._metrics.add("connection", "opened")
        return opened

    def _connect(self, deadline: float) -> Connection:
        addresses = self._addresses
        opened = open_connection(self._tier, self.endpoint, addresses, self._tls, deadline)
        if opened.address != addresses[0]:
            self._addresses = [opened.address, *(other for other in addresses if other != opened.address)]
        return opened

    def follow_name(self) -> None:
        """Resolve the name again. Connections to addresses that the name no longer has are not reused, even if a server
        still answers there. Name resolution may take long."""
        try:
            found = resolve(self.endpoint)
        except OSError:
            # A failed resolution says nothing about the server.
            return
        known = self._addresses
        self._addresses = sorted(found, key=lambda address: known.index(address) if address in known else len(known))
        if known and known[0] not in found:
            self._log.log(logging.INFO, "moved", "redis node %s has another address now", self.endpoint)

    # -- down and up -----------------------------------------------------------------------------------------------

    def mark_down(self, error: BaseException, name: bytes = b"") -> None:
        """Take the node out of service until it can be reached again and, after a RefusedError, accepts the refused
        command for ``name``."""
        if not self._breaker.closing:
            self._refused, self._refused_name = error if isinstance(error, RefusedError) else None, name
            self._breaker.trip(error_words(error))

    @property
    def why_down(self) -> str:
        """The reason as a word for the metrics."""
        return "down" if self._refused is None else self._refused.code

    def missed_write(self, error: TimeoutError) -> None:
        """Pause writes after one missed its deadline, and check in the background whether the node hangs."""
        self.refused_write("timeout")
        self._breaker.examine(error_words(error))

    def refused_write(self, reason: str) -> None:
        """Pause writes to the node; reads go on."""
        if self.writes.begin(reason):
            words = "redis node %s refuses writes (%s): they pause, and it is read; see docs/redis.md"
            self._log.log(logging.WARNING, f"writes {reason}", words, self.endpoint, reason)

    def took_write(self) -> None:
        if self.writes.end():
            self._log.log(logging.INFO, "writes", "redis node %s takes writes again", self.endpoint)

    def problem(self) -> BaseException | None:
        """Return why the last attempt to reach the node failed, or None if it is up. Waits for the first attempt."""
        self._attempted.wait(max(0.0, self._created + _FIRST_ATTEMPT * short_call(self._tier) - time.monotonic()))
        return None if self.up else self._problem

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` for an attempt in progress, then close the idle connections."""
        self._breaker.close(seconds)
        self._close_idle()

    def _close_idle(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):
            while connection := self._idle.pop():
                connection.close()

    def _reach(self) -> bool:
        try:
            self._addresses = resolve(self.endpoint)
            connection = self._connect(time.monotonic() + short_call(self._tier))
            try:
                if (refused := self._refused) is not None:
                    (reply,) = connection.ask([command(refused.word, self._refused_name)])
                    # A redirect to another node counts as an answer.
                    if isinstance(reply, ErrorReply) and reply.code not in ("MOVED", "ASK"):
                        raise refused
            except BaseException:
                connection.close()
                raise
        except Exception as error:
            # Kept whatever its type: without a problem the node would count as reached.
            self._problem = error
            self._attempted.set()
            if isinstance(error, (OSError, ProtocolError, ConfigError, RefusedError)):
                return False
            raise
        if self._breaker.closing:
            connection.close()
        else:
            self._idle.append(connection)
        return True

    def _changed(self, state: BreakerState, reason: str) -> None:
        self._attempted.set()
        if state is BreakerState.OPEN:
            self._close_idle()
            self._metrics.add("node", "down")
            self._log.log(logging.WARNING, "down", "redis node %s is down: %s", self.endpoint, reason)
            self._when_down()
        else:
            self._refused = None
            self._metrics.add("node", "up")
            self._log.log(logging.INFO, "up", "redis node %s is up", self.endpoint)


def error_words(error: BaseException) -> str:
    """Describe an error briefly for the person who configures the tier, without repeating anything we sent."""
    if isinstance(error, LoginError) and str(error).startswith("SELECT"):
        return f"{error}; a cluster has only database 0"
    if isinstance(error, LoginError):
        # A server at its limit of clients also answers ERR.
        more = ", and its maxclients" if error.code == "ERR" else ""
        return f"the login is refused ({error.code}); check username and password{more}"
    if isinstance(error, RefusedError) and error.code == "NOPERM":
        return f"the user may not use {error.word.decode()}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__

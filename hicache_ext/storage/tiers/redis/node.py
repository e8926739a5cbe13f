"""One server of the tier: its connections, and whether it is up.

A node goes down when it cannot be connected to, or when a read or a look-up misses a deadline or is refused, and also
for pages that nobody has. From then on calls answer at once for its pages, and it is tried in the background until it
is back: no call waits twice for a node that is gone. Writes that it refuses pause writes to it and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hicache_ext.errors import (
    ConfigError,
    LaneBusyError,
    MaxClientsError,
    NodeDownError,
    ProtocolError,
    RefusedError,
    StoreError,
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
    TlsSettings,
    command,
    open_connection,
    resolve,
    short_call,
)

logger = logging.getLogger(__name__)

_ATTEMPTS = Backoff(0.1, 2.0)
"""Seconds between two attempts to reach a node that is down."""
_MOST_CLIENTS_PAUSE = 5.0
"""Seconds until a server that took no more connections is asked for another one."""
_OLDEST = 300.0
"""Seconds after which an idle connection is replaced: a name, a balancer or a password may lead elsewhere by then."""


class Lane:
    """At most ``limit`` connections to one node. Threads: any."""

    def __init__(self, limit: int, *, keeps: bool = True) -> None:
        """``keeps`` False: every use has a connection of its own, closed after it."""
        self.keeps = keeps
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        """How many more could be used now."""
        return self._limit - self._taken

    @contextlib.contextmanager
    def place(self, deadline: float) -> Iterator[None]:
        """The right to one connection; LaneBusyError when none is free in time, also where there is no time."""
        with self._changed:
            is_free = self._changed.wait_for(lambda: self.free > 0, max(0.0, deadline - time.monotonic()))
            if not is_free or time.monotonic() >= deadline:
                # Another one that waits may have time.
                self._changed.notify()
                raise LaneBusyError
            self._taken += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken -= 1
                self._changed.notify()


class _Connections:
    """Those to a node, of all lanes. Threads: any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._in_use = 0

    def take(self, is_good: Callable[[Connection], bool], lane: Lane, until: float = 0.0) -> Connection | None:
        """An idle one, of ``lane`` rather than of another, also one that is given back ``until`` then; those that are
        not good are closed. None where no connection is open, and none becomes idle without waiting. Raises
        LaneBusyError."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._idle or not self._in_use, max(0.0, until - time.monotonic()))
                if not self._idle:
                    if until and self._in_use:
                        raise LaneBusyError
                    return None
                connection = max(reversed(self._idle), key=lambda idle: idle.lane is lane)
                self._idle.remove(connection)
                self._in_use += 1
            if is_good(connection):
                return connection
            self.closed(connection)

    @property
    def none_open(self) -> bool:
        with self._changed:
            return not self._in_use and not self._idle

    def opened(self) -> None:
        with self._changed:
            self._in_use += 1

    def put(self, connection: Connection) -> None:
        with self._changed:
            self._in_use -= 1
            self._idle.append(connection)
            self._changed.notify()

    def closed(self, connection: Connection) -> None:
        """Close one in use."""
        connection.close()
        with self._changed:
            self._in_use -= 1
            self._changed.notify_all()

    def drop(self, lanes: Sequence[Lane | None] | None = None) -> None:
        """Close those that are idle; of ``lanes`` only."""
        with self._changed:
            dropped = [idle for idle in self._idle if lanes is None or idle.lane in lanes]
            self._idle = [idle for idle in self._idle if idle not in dropped]
        for connection in dropped:
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
        *,
        of_replica: bool = False,
    ) -> None:
        """Down until it was reached for the first time: in the background from ``start`` on, or by ``attempt``.

        ``of_replica``: as for ``open_connection``.
        """
        self.of_replica = of_replica
        self.endpoint = endpoint
        self._tier = tier
        self._tls = tls
        self._metrics = metrics
        self._when_down = when_down
        self.pages = Lane(tier.connections)
        self.requests = Lane(2)
        self.examinations = Lane(1, keeps=False)
        self._log = LimitedLog(logger)
        self.writes = WritePause()
        self._refused: RefusedError | None = None
        """The read or look-up that took it down."""
        self._asked_for: Sequence[bytes] = ()
        """Names for which that is asked again."""
        self._connections = _Connections()
        self._addresses: list[Address] = []
        """Those of the name, the one that answered first."""
        self._no_more_until = 0.0
        """time.monotonic() until when the server is taken to have as many connections as it takes."""
        self._tried = threading.Event()
        self._problem: BaseException | None = None
        self._breaker = Breaker(
            f"hicache-{metrics.tier}-node",
            self._reach,
            _ATTEMPTS,
            on_change=self._changed,
            state=BreakerState.OPEN,
        )

    @property
    def up(self) -> bool:
        return self._breaker.up and not self._breaker.closing

    @contextlib.contextmanager
    def connection(self, lane: Lane, deadline: float, *, fresh: bool = False) -> Iterator[Connection]:
        """A connection for the thread that asks; closed instead of kept if anything is raised or left unread.

        ``fresh`` after an idle one turned out to be dead: the lane's other idle ones may be, too. Raises NodeDownError,
        TimeoutError, OSError, ProtocolError.
        """
        if not self.up:
            raise NodeDownError(f"{self.endpoint} is down")
        with lane.place(deadline):
            if fresh:
                self._connections.drop([lane, None])
            takes = lane.keeps and not fresh
            connection = (self._connections.take(self._is_good, lane) if takes else None) or self._open(lane, deadline)
            connection.lane = lane
            connection.deadline, connection.asking = deadline, False
            try:
                yield connection
            except BaseException:
                self._connections.closed(connection)
                raise
            if lane.keeps and self.up and connection.reader.empty and connection.address in self._addresses:
                self._connections.put(connection)
            else:
                self._connections.closed(connection)

    @contextlib.contextmanager
    def aside(self) -> Iterator[Connection]:
        """A connection beside the lanes, for administrative commands, each of which has the tier's timeout. Raises as
        ``connection``, and ConfigError."""
        if not self.up:
            raise NodeDownError(f"{self.endpoint} is down")
        connection = self._opened(time.monotonic() + self._tier.longest_call)
        connection.deadline = time.monotonic() + self._tier.longest_call
        try:
            yield connection
        finally:
            connection.close()

    def _is_good(self, connection: Connection) -> bool:
        """Of an idle one."""
        old = time.monotonic() - connection.opened > _OLDEST
        return not old and connection.address in self._addresses and not connection.has_something()

    def _open(self, lane: Lane, deadline: float) -> Connection:
        """One connection more, or an idle one of another lane where the server takes no more of them."""
        # Where none is open any more, those that ended have made room.
        if time.monotonic() >= self._no_more_until or self._connections.none_open:
            try:
                opened = self._opened(deadline)
            except MaxClientsError:
                self._no_more_until = time.monotonic() + _MOST_CLIENTS_PAUSE
            except (OSError, ProtocolError) as error:
                self.mark_down(error)
                raise
            except ConfigError as error:
                self.mark_down(error)
                raise NodeDownError("the password cannot be read") from None
            else:
                self._connections.opened()
                self._metrics.add("connection", "opened")
                return opened
            self._metrics.add("connection", "refused")
            words = "redis node %s takes no more connections (its maxclients): going on with those that are open"
            self._log.log(logging.WARNING, "maxclients", words, self.endpoint)
        connection = self._connections.take(self._is_good, lane, deadline)
        if connection is None:
            self.mark_down(MaxClientsError())
            raise MaxClientsError
        return connection

    def _opened(self, deadline: float) -> Connection:
        addresses = self._addresses
        opened = open_connection(self._tier, self.endpoint, addresses, self._tls, deadline, of_replica=self.of_replica)
        if opened.address != addresses[0]:
            self._addresses = [opened.address, *(other for other in addresses if other != opened.address)]
        return opened

    def follow_name(self) -> None:
        """Look the name up again: connections to addresses that are no longer its own are not used any more, although
        somebody answers there. Asks a name server, which may take long."""
        try:
            found = resolve(self.endpoint)
        except OSError:
            # No answer says nothing about the server.
            return
        known = self._addresses
        self._addresses = [address for address in known if address in found] + [
            address for address in found if address not in known
        ]
        if known and known[0] not in found:
            self._log.log(logging.INFO, "moved", "redis node %s has another address now", self.endpoint)

    # -- down and up -----------------------------------------------------------------------------------------------

    def mark_down(self, error: BaseException, names: Sequence[bytes] = ()) -> None:
        """Take the node out of service until it has been reached again, and answers for one of ``names`` what it has
        refused."""
        if not self._breaker.closing:
            self._refused, self._asked_for = error if isinstance(error, RefusedError) else None, names
            self._breaker.trip(error_words(error))

    def refuses(self, word: bytes, names: Sequence[bytes], deadline: float) -> bool:
        """Whether a command that was refused is refused for all of ``names``, too. Where it is not, a proxy has lost
        one of its servers, or the refusal has passed."""
        try:
            with self.connection(self.requests, deadline, fresh=True) as connection:
                return _refuses_all(connection, word, names)
        except (OSError, ProtocolError, StoreError):
            return False

    @property
    def why_down(self) -> str:
        """A word for the metrics."""
        return "down" if self._refused is None else self._refused.code

    def missed_write(self, error: TimeoutError) -> None:
        """A write missed its deadline: writes pause, and it is found out in the background whether the node hangs."""
        self.refused_write("timeout")
        self._breaker.examine(error_words(error))

    def refused_write(self, reason: str) -> None:
        """Writes pause; it goes on being read."""
        if self.writes.begin(reason):
            words = "redis node %s refuses writes (%s): they pause, and it is read; see docs/redis.md"
            self._log.log(logging.WARNING, f"writes {reason}", words, self.endpoint, reason)

    def took_write(self) -> None:
        if self.writes.end():
            self._log.log(logging.INFO, "writes", "redis node %s takes writes again", self.endpoint)

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
        self._connections.drop()

    def _reach(self) -> bool:
        try:
            self._addresses = resolve(self.endpoint)
            connection = self._opened(time.monotonic() + short_call(self._tier))
            try:
                if (refused := self._refused) is not None and _refuses_all(connection, refused.word, self._asked_for):
                    raise refused
            except BaseException:
                connection.close()
                raise
        except Exception as error:
            # Kept whatever it is: without a problem the node would pass for one that was reached.
            self._problem = error
            self._tried.set()
            if isinstance(error, (OSError, ProtocolError, ConfigError, RefusedError)):
                return False
            raise
        self._connections.opened()
        if self._breaker.closing:
            self._connections.closed(connection)
        else:
            self._connections.put(connection)
        return True

    def _changed(self, state: BreakerState, reason: str) -> None:
        self._tried.set()
        if state is BreakerState.OPEN:
            self._connections.drop()
            self._metrics.add("node", "down")
            self._log.log(logging.WARNING, "down", "redis node %s is down: %s", self.endpoint, reason)
            self._when_down()
        else:
            self._metrics.add("node", "up")
            self._log.log(logging.INFO, "up", "redis node %s is up", self.endpoint)


def _refuses_all(connection: Connection, word: bytes, names: Sequence[bytes]) -> bool:
    """A node that names another one answers."""
    replies = connection.ask([command(word, name) for name in names])
    return all(isinstance(reply, ErrorReply) and reply.code not in ("MOVED", "ASK") for reply in replies)


def error_words(error: BaseException) -> str:
    """What went wrong in a few words that repeat nothing we sent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__

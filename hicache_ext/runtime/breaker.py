"""A circuit breaker for anything that can go down and come back (a tier, a path, a node, a master).

CLOSED: all calls pass, until somebody calls ``trip``, or ``watch`` finds that the watched thing is gone.
OPEN: no call passes. A probe runs in the background, at growing intervals, until it succeeds.
HALF_OPEN, the slow start: after a good probe, a share of the calls passes that grows over ``slow_start`` seconds, so
that a store that has just come up is not overrun. One bad call opens the breaker again.

A breaker that was tripped *in doubt* is probed almost immediately, and a good probe before the first regular one closes
it without a slow start. The user decides when calls are bad enough to trip (for tiers: storage/guards/breaker.py).

A store that only refuses writes is not down: ``WritePause`` handles that.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable

from hicache_ext.runtime.background import BackgroundLoop, Backoff

logger = logging.getLogger(__name__)

_FIRST_SHARE = 0.1
"""Share of calls that pass at the beginning of the slow start."""
_PAUSE_IN_DOUBT = 0.1
"""Seconds until the first probe in doubt; a client may first have to reconnect."""
WATCH_INTERVAL = 5.0
"""Seconds between two checks of ``watch``."""
WRITE_PAUSES = Backoff(1.0, 30.0)
"""Seconds without writes to a store that refuses them."""


class BreakerState(enum.Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"

    @property
    def level(self) -> float:
        """Return the state as a gauge: the higher, the fewer calls pass."""
        return {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}[self]


class Breaker:
    """A circuit breaker. Threads: any. The probe thread lives while the breaker is not CLOSED, or is watched."""

    def __init__(
        self,
        name: str,
        probe: Callable[[], bool],
        backoff: Backoff,
        *,
        on_change: Callable[[BreakerState, str], None] = lambda state, reason: None,
        slow_start: float = 0.0,
        state: BreakerState = BreakerState.CLOSED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``name``: the thread's name. ``probe``: returns whether the target answers again; an exception means no.

        ``backoff``: pauses between probes; the first pause after opening is longer each time a slow start failed.
        ``on_change(state, reason)`` is called after every change, under no lock, on the thread that made it.
        ``state``: a breaker that begins OPEN is probed from the first use of ``up`` on.
        """
        self._probe = probe
        self._backoff = backoff
        self._on_change = on_change
        self._gone: Callable[[], str | None] | None = None
        self._slow_start = slow_start
        self._clock = clock
        self._lock = threading.Lock()
        self._state = state
        self._recovering_since = 0.0
        self._credit = 0.0
        """Calls that the slow start may let through now."""
        self._opened = 0
        """How often the breaker has opened since it was last closed."""
        self._generation = 0
        """Incremented at each change of state: a call begun before a change says nothing about the time after it."""
        self._in_doubt = False
        self._examined_for = ""
        self._pause = backoff.first
        self._probe_at = 0.0
        self._loop = BackgroundLoop(name, self._step, backoff)

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def up(self) -> bool:
        """Return whether at least some calls may pass. If not, make sure that probes run, because starting the thread
        may have failed before."""
        if (is_open := self._state is BreakerState.OPEN) and not self._loop.running:
            self._loop.wake()
        return not is_open

    @property
    def closing(self) -> bool:
        """Return whether ``close`` was called."""
        return self._loop.stopping

    # -- calls -----------------------------------------------------------------------------------------------------

    def admit(self) -> int | None:
        """Return a ticket for ``trip`` if a call may pass, else None."""
        if self._state is BreakerState.CLOSED:
            return self._generation
        if not self.up:
            return None
        with self._lock:
            if self._state is not BreakerState.HALF_OPEN:
                return None if self._state is BreakerState.OPEN else self._generation
            share = self._share()
            if share < 1:
                self._credit += share
                if self._credit < 1:
                    return None
                self._credit -= 1
                return self._generation
        self._end_slow_start()
        return self.admit()

    def trip(self, reason: str, ticket: int | None = None, *, in_doubt: bool = False) -> bool:
        """Open, and probe in the background. Return False if already open, or if the state changed since ``ticket``."""
        with self._lock:
            if self._state is BreakerState.OPEN or ticket not in (None, self._generation):
                return False
            # A target in its slow start was really down, so a new failure is no hiccup.
            self._in_doubt = in_doubt and self._state is BreakerState.CLOSED
            self._change(BreakerState.OPEN)
            self._opened += 1
            pause = self._pause = self._first_pause()
            self._probe_at = time.monotonic() + pause
        self._on_change(BreakerState.OPEN, reason)
        self._loop.wake(pause)
        return True

    # -- probes ----------------------------------------------------------------------------------------------------

    @property
    def examining(self) -> bool:
        """Return whether a probe of ``examine`` is pending or in flight."""
        return bool(self._examined_for)

    def examine(self, reason: str) -> None:
        """Probe in the background although calls pass; trip for ``reason`` if the probe fails."""
        if self.up:
            self._examined_for = reason
            self._loop.wake()

    def _examined(self) -> None:
        """Handle a successful probe of ``examine``; for subclasses."""

    def watch(self, gone: Callable[[], str | None]) -> None:
        """Call ``gone`` in the background from now on, while CLOSED; it returns the reason to trip, or None."""
        self._gone = gone
        self._loop.wake(WATCH_INTERVAL)

    def _is_good(self) -> bool:
        try:
            return self._probe()
        except Exception:
            logger.exception("hicache_ext: a probe failed")
            return False

    def recover(self) -> None:
        """Leave OPEN, because a probe succeeded."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self.closing:
                return
            slow = self._slow_start > 0 and not self._in_doubt
            if slow:
                self._change(BreakerState.HALF_OPEN)
                self._recovering_since = self._clock()
                self._credit = 1.0  # let the first call pass, so that rarely used targets recover, too
            else:
                self._close()
        self._on_change(BreakerState.HALF_OPEN if slow else BreakerState.CLOSED, "")

    def close(self, seconds: float | None = None) -> bool:
        """Begin no further probe and wait at most ``seconds`` for the current one; return whether it has ended."""
        return self._loop.stop(seconds)

    def _step(self) -> float | None:
        if examined_for := self._examined_for:
            if self._is_good():
                self._examined()
            else:
                self.trip(examined_for)
            self._examined_for = ""
        with self._lock:
            match self._state:
                case BreakerState.CLOSED:
                    left = None
                case BreakerState.HALF_OPEN:
                    left = self._recovering_since + self._slow_start - self._clock()
                case BreakerState.OPEN:
                    left = self._probe_at - time.monotonic()
                    if left <= 0 and self._pause >= self._backoff.first:
                        # No probe succeeded before the first regular one was due, so it is no hiccup.
                        self._in_doubt = False
        if left is None:
            if self._gone is None:
                return None
            if (reason := self._gone()) is not None:
                self.trip(reason)
            return WATCH_INTERVAL
        if left > 0:
            return left
        if self._state is BreakerState.HALF_OPEN:
            # Ends the slow start even if no calls come.
            self._end_slow_start()
        elif self._is_good():
            self.recover()
        else:
            with self._lock:
                self._pause = min(self._backoff.longest, 2 * self._pause)
                self._probe_at = time.monotonic() + self._pause
        return 0.0

    def _end_slow_start(self) -> None:
        with self._lock:
            # The breaker may have opened and recovered since the caller saw the end of the slow start.
            if self._state is not BreakerState.HALF_OPEN or self._share() < 1:
                return
            self._close()
        self._on_change(BreakerState.CLOSED, "")

    # -- under the lock --------------------------------------------------------------------------------------------

    def _first_pause(self) -> float:
        pause = self._backoff.limit(self._opened)
        return min(_PAUSE_IN_DOUBT, pause) if self._in_doubt else pause

    def _close(self) -> None:
        self._change(BreakerState.CLOSED)
        self._opened = 0
        self._in_doubt = False

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._generation += 1
        self._examined_for = ""

    def _share(self) -> float:
        """Return the share of calls that may pass now, in HALF_OPEN."""
        part = (self._clock() - self._recovering_since) / self._slow_start
        return _FIRST_SHARE + (1 - _FIRST_SHARE) * part if part < 1 else 1.0


class WritePause:
    """Pauses writes, for growing intervals, while a store refuses them for whatever reason, until it accepts one. Reads
    and lookups continue. Threads: any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0
        self._refused = 0
        self._reason = ""

    @property
    def reason(self) -> str:
        """Return why nothing may be written now; empty if a write may be tried."""
        return self._reason if self._refused and self._clock() < self._until else ""

    @property
    def in_doubt(self) -> bool:
        """Return whether the last write was refused."""
        return bool(self._refused)

    def begin(self, reason: str) -> bool:
        """Note a refused write; return whether it is the first one since the last accepted write."""
        with self._lock:
            if self.reason:
                # Writes in flight at the same time are refused together and count once.
                return False
            self._refused += 1
            self._reason = reason
            self._until = self._clock() + WRITE_PAUSES.pause(self._refused)
            return self._refused == 1

    def end(self) -> bool:
        """Note an accepted write; return whether it ended a pause."""
        if not self._refused:
            return False
        with self._lock:
            ended, self._refused = self._refused, 0
            return bool(ended)

"""Down, probed, back: one class for whatever can go away and come back (a tier, a path, a node, a master).

CLOSED: all calls go through, until somebody calls ``trip``, or what is watched says that it is gone.
OPEN: no call goes through. A probe runs in the background, more and more seldom, until it succeeds.
HALF_OPEN, the slow start: after a good probe a share of the calls goes through that grows over ``slow_start`` seconds,
so that a store that has just come up is not run over. One bad call opens the breaker again.

A breaker that was tripped *in doubt* is probed at once, and a good probe before the first regular one closes it without
a slow start. When calls are bad enough to trip is the user's own rule (that for tiers: storage/guards/breaker.py).

Who is refused writes is not down: ``WritePause`` keeps score of them.
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
"""Of the calls, at the beginning of the slow start."""
_PAUSE_IN_DOUBT = 0.1
"""Seconds until the first probe in doubt; a client may first have to connect anew."""
WATCH_INTERVAL = 5.0
"""Seconds between two looks of ``watch``."""
WRITE_PAUSES = Backoff(1.0, 30.0)
"""Seconds without writes to a store that refuses them."""


class BreakerState(enum.Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"

    @property
    def level(self) -> float:
        """For a gauge: the higher, the less is asked."""
        return {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}[self]


class Breaker:
    """Threads: any. The thread of the probes lives while the breaker is not CLOSED, or watched."""

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
        """``name`` is that of the thread. ``probe``: whether it answers again; what it raises means no.

        ``backoff``: pauses between probes; the first one of an opening is longer each time a slow start failed.
        ``on_change(state, reason)`` is called after every change, under no lock, on the thread that made it.
        ``state``: one that begins OPEN is probed from the first question on whether it is ``up``.
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
        """Calls that the slow start has still to let through."""
        self._opened = 0
        """How often, since it was last closed."""
        self._generation = 0
        """Raised at each change of state: what began before says nothing about the time after it."""
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
        """Whether calls may go through, some of them at least. Where they may not, there are probes from now on: until
        now there may have been no thread to be had."""
        if (is_open := self._state is BreakerState.OPEN) and not self._loop.running:
            self._loop.wake()
        return not is_open

    @property
    def closing(self) -> bool:
        """``close`` was called."""
        return self._loop.stopping

    # -- calls -----------------------------------------------------------------------------------------------------

    def admit(self) -> int | None:
        """A ticket for ``trip`` if a call may go through, else None."""
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
        """Open, and probe in the background. False when it was open, or closed again since ``ticket`` was given."""
        with self._lock:
            if self._state is BreakerState.OPEN or ticket not in (None, self._generation):
                return False
            # What has just come back was in no doubt before.
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
        """Whether it is being found out if the store hangs."""
        return bool(self._examined_for)

    def examine(self, reason: str) -> None:
        """Probe in the background although calls go through; trip for ``reason`` where the probe fails."""
        if self.up:
            self._examined_for = reason
            self._loop.wake()

    def _examined(self) -> None:
        """The probe of ``examine`` went well."""

    def watch(self, gone: Callable[[], str | None]) -> None:
        """From now on ``gone`` is asked in the background, while CLOSED: the reason to trip, or None."""
        self._gone = gone
        self._loop.wake(WATCH_INTERVAL)

    def _is_good(self) -> bool:
        try:
            return self._probe()
        except Exception:
            logger.exception("hicache_ext: a probe failed")
            return False

    def recover(self) -> None:
        """A probe went well."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self.closing:
                return
            slow = self._slow_start > 0 and not self._in_doubt
            if slow:
                self._change(BreakerState.HALF_OPEN)
                self._recovering_since = self._clock()
                self._credit = 1.0  # the first call goes through, so that what is asked seldom comes back, too
            else:
                self._close()
        self._on_change(BreakerState.HALF_OPEN if slow else BreakerState.CLOSED, "")

    def close(self, seconds: float | None = None) -> bool:
        """Begin no further probe and wait for the one under way, ``seconds`` at most; whether it has ended."""
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
                        # No probe went well for as long as the first regular one is waited for: it is no hiccup.
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
            # Also where nobody asks.
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
            # It may have opened and come back since somebody saw that the slow start was over.
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
        """Of the calls, now, in HALF_OPEN."""
        part = (self._clock() - self._recovering_since) / self._slow_start
        return _FIRST_SHARE + (1 - _FIRST_SHARE) * part if part < 1 else 1.0


class WritePause:
    """Writes rest while a store refuses them, for whatever reason: longer and longer, until one is taken. It is read,
    and looked at, meanwhile. Threads: any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until = 0.0
        self._refused = 0
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why nothing is to be written now; empty where it may be tried."""
        return self._reason if self._refused and self._clock() < self._until else ""

    @property
    def in_doubt(self) -> bool:
        """Whether the last write was refused."""
        return bool(self._refused)

    def begin(self, reason: str) -> bool:
        """A write was refused; whether it is the first one since one was taken."""
        with self._lock:
            if self.reason:
                # Writes that were under way together are refused together.
                return False
            self._refused += 1
            self._reason = reason
            self._until = self._clock() + WRITE_PAUSES.pause(self._refused)
            return self._refused == 1

    def end(self) -> bool:
        """A write was taken; whether that is news."""
        if not self._refused:
            return False
        with self._lock:
            ended, self._refused = self._refused, 0
            return bool(ended)

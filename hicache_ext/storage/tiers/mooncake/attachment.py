"""Holds the Mooncake client, alone: no call reaches the library before setup, after close, or without a master.

States: *attached* (calls go through), *away* (calls are refused at once; it is probed in the background), *closed*.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from hicache_ext.errors import StoreClosedError, StoreSetupError
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.breaker import Breaker, BreakerState
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.tiers.mooncake.engine import MASTER_LOST, OK, Engine

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_ATTEMPTS = Backoff(0.25, 5.0)
"""Seconds between two attempts to get back."""
_PROBE_SECONDS = 1.0
_PROBE_KEY = "hicache_ext/probe"
_LONGEST_REST = 30.0
_NICENESS = 5
"""The library spins while it waits for a transfer, and would keep the thread that makes the transfer off its CPU. Not
more: threads with 10 or 19 kept the GIL for up to 45 or 220 ms (docs/decisions/mooncake.md)."""


class Attachment:
    """The client, or the attempt to get one. Any thread."""

    def __init__(self, name: str, engine: Engine, *, required: bool) -> None:
        """Raises StoreSetupError when the pool cannot be reached and ``required`` is set."""
        self.name = name
        self.engine = engine
        self._condition = threading.Condition()
        self._client: Any = None
        self._master = Breaker(f"hicache-{name}-return", self._try_to_return, _ATTEMPTS, on_change=self._master_changed)
        self._resting_until = 0.0
        self._under_way = 0
        self._abandoned = 0
        """Calls left behind by their callers; they only touch memory of the store."""
        self._closed = False
        self._threads = ThreadPool(f"hicache-{name}-call", niceness=_NICENESS)
        self._memory: list[tuple[int, int]] = []
        """(address, bytes) of memory to register."""
        self._registered: list[int] = []
        self.on_return: Callable[[], None] = lambda: None
        """Called when calls go through again, on the thread that found the master."""
        try:
            self._client = engine.open_client()
        except StoreSetupError as error:
            if required:
                raise
            logger.warning("hicache_ext: %s; going on without it until it answers (required: false)", error)
            self._master.trip(str(error))

    @contextlib.contextmanager
    def client(self, *, resting_too: bool = False) -> Iterator[Any]:
        """The client for one call of the store, or None while it is away. Raises StoreClosedError.

        ``resting_too``: also while it rests because of a holder, for calls that only ask the master.
        """
        with self._condition:
            if self._closed:
                raise StoreClosedError(self.name)
            resting = not resting_too and time.monotonic() < self._resting_until
            client = None if resting or self._abandoned > 0 or not self._master.up else self._client
            self._under_way += 1
        try:
            yield client
        finally:
            with self._condition:
                self._under_way -= 1
                self._condition.notify_all()

    @property
    def attached(self) -> bool:
        free = not self._closed and self._abandoned == 0 and time.monotonic() >= self._resting_until
        return free and self._master.up

    def report(self, code: int) -> None:
        """A call was answered with ``code``: without its master the pool is away until it answers again."""
        if code in MASTER_LOST:
            self._leave(f"the master does not answer ({code})")

    def rest(self, seconds: float) -> None:
        """A transfer failed after ``seconds``: refuse calls for twice as long, so that most calls do not wait."""
        pause = min(2 * seconds, _LONGEST_REST)
        logger.warning("hicache_ext: tier %s: a holder does not answer; resting %.1f s", self.name, pause)
        self._resting_until = time.monotonic() + pause

    def call_bounded(
        self, call: Callable[[], Answer], deadline: float, at_last: Callable[[], None] = lambda: None
    ) -> Answer | None:
        """The answer of ``call``, which uses the client and memory of the tier alone; None at ``deadline``.

        It cannot be stopped: a late call goes on without its caller, and no other call passes until it has ended.
        ``at_last`` is called when a late call no longer uses its memory.
        """
        answers: list[Answer] = []
        started = time.monotonic()
        if started >= deadline:
            at_last()
            return None

        def run() -> Answer:
            answers.append(call())
            return answers[0]

        def end_late() -> None:
            at_last()
            with self._condition:
                self._abandoned -= 1
                self._learn(answers[0] if answers else None, time.monotonic() - started)
                self._condition.notify_all()

        try:
            under_way = self._threads.start(run, end_late)
        except RuntimeError as error:
            logger.warning("hicache_ext: tier %s: %s", self.name, error)
            at_last()
            return None
        if under_way.ended_within(deadline - time.monotonic()):
            return under_way.result()
        # It may end between the line above and these: both sides only add and subtract.
        with self._condition:
            self._abandoned += 1
            self._condition.notify_all()
        logger.warning("hicache_ext: tier %s: no answer in %.1f s", self.name, time.monotonic() - started)
        return None

    def _learn(self, answer: object, seconds: float) -> None:
        """Learn from a call that was left behind, or the next one would wait as long. The condition is held."""
        codes = [code for code in (answer if isinstance(answer, list) else [answer]) if isinstance(code, int)]
        for code in codes:
            self.report(code)
        if any(code < 0 for code in codes):
            self.rest(seconds)

    # -- memory that is moved ----------------------------------------------------------------------------------------

    def register(self, regions: Sequence[memoryview]) -> None:
        """Register memory with the library, each byte once. Raises StoreSetupError."""
        with self._condition:
            if self._closed:
                raise StoreClosedError(self.name)
            for region in regions:
                if region.nbytes == 0:
                    continue
                place = (address_of(region), region.nbytes)
                # The library refuses memory that is registered already.
                if any(_contains(known, place) for known in self._memory):
                    continue
                self._memory.append(place)
                if self._client is not None:
                    self._register(self._client, place)

    def _register(self, client: Any, place: tuple[int, int]) -> None:
        result = client.register_buffer(*place)
        if result != OK:
            raise StoreSetupError(self.name, f"{place[1]} bytes of memory could not be registered (code {result})")
        self._registered.append(place[0])

    # -- away and back ---------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> None:
        with self._condition:
            if not self._closed and self._master.trip(reason):
                logger.warning("hicache_ext: tier %s: %s", self.name, reason)

    def _try_to_return(self) -> bool:
        if not self.engine.master_answers(_PROBE_SECONDS):
            return False
        try:
            returned = self._return()
        except Exception as error:  # noqa: BLE001 - the next attempt may do better
            logger.warning("hicache_ext: tier %s: not back yet: %s", self.name, error)
            return False
        if returned:
            logger.info("hicache_ext: tier %s: the master answers again", self.name)
        return returned

    def _master_changed(self, state: BreakerState, _: str) -> None:
        if state is BreakerState.CLOSED:
            self.on_return()

    def _return(self) -> bool:
        """Attach, or ask the attached client whether its master answers: a frozen master has an open port, too."""
        client = self._client
        if client is None:
            client = self.engine.open_client()
            with self._condition:
                if self._closed:
                    client.close()
                    return True
                try:
                    for place in self._memory:
                        self._register(client, place)
                except StoreSetupError:
                    self._registered.clear()
                    client.close()
                    raise
                self._client = client
        elif client.is_exist(_PROBE_KEY) in MASTER_LOST:
            return False
        return True

    def close(self) -> None:
        """Wait for calls under way, give memory back, close the client. Idempotent.

        Bounded by the tier's timeout: the client of a call that has not ended by then is not closed, which would crash
        the process.
        """
        deadline = time.monotonic() + self.engine.tier.longest_call
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._master.close(0)
            ended = self._condition.wait_for(
                lambda: self._under_way == 0 and self._abandoned == 0, deadline - time.monotonic()
            )
        # It may be inside a probe or a setup.
        ended = self._master.close(max(0.0, deadline - time.monotonic())) and ended
        self._threads.close(max(0.0, deadline - time.monotonic()))
        if not ended:
            logger.warning("hicache_ext: tier %s: a call has not ended; its client stays open", self.name)
        elif self._client is not None:
            for address in self._registered:
                self._client.unregister_buffer(address)
            self._registered.clear()
            self._client.close()
            self._client = None


def address_of(memory: memoryview) -> int:
    """The address of memory that is not empty."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _contains(known: tuple[int, int], place: tuple[int, int]) -> bool:
    return known[0] <= place[0] and place[0] + place[1] <= known[0] + known[1]

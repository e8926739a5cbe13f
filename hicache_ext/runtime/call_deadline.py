"""What the current call may take: by when it must have ended, and whether its caller may wait at all. And what it could
not find out, which the answer of a look-up does not tell.

The calls of a PageStore carry none of it, so these are context variables: guards set the deadline and the store below
reads it, on the thread that was called, before it gives work to other threads. Where no guard has set it, the store's
own timeout counts. SGLang's backend marks the calls of the scheduler's thread, and what is further down reads the mark.
A store that goes on in another thread takes them along with ``contextvars.copy_context().run``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Unanswered:
    """Pages of a look-up that could not be asked for: "absent" and "nobody knows" are answered alike."""

    pages: int = 0
    of: int = 0
    """So many were asked for."""
    reason: str = ""
    connection_lost: bool = False
    """By any kind of call: all others would meet it, too."""
    is_probe: bool = False
    """Nobody else asks: the call is a guard's own."""


_deadline: ContextVar[float] = ContextVar("hicache_ext_call_deadline", default=math.inf)
_at_once: ContextVar[bool] = ContextVar("hicache_ext_answer_at_once", default=False)
_unanswered: ContextVar[Unanswered | None] = ContextVar("hicache_ext_unanswered", default=None)


@contextmanager
def ending_at(deadline: float, unanswered: Unanswered | None = None) -> Iterator[None]:
    """Calls inside end by ``deadline`` (time.monotonic()); replaces a deadline set further out. What look-ups inside
    could not find out is told to ``unanswered``."""
    tokens = _deadline.set(deadline), _unanswered.set(unanswered)
    try:
        yield
    finally:
        _deadline.reset(tokens[0])
        _unanswered.reset(tokens[1])


def tell_unanswered(pages: int, of: int, reason: str) -> None:
    """So many of the pages of the current look-up could not be asked for."""
    told = _unanswered.get()
    if told is not None:
        told.pages, told.of, told.reason = told.pages + pages, told.of + of, reason


def call_deadline(longest: float) -> float:
    """The time.monotonic() by which the current call must have ended: ``longest`` seconds from now at the latest."""
    return min(time.monotonic() + longest, _deadline.get())


def tell_connection_lost() -> None:
    """The current call met a store that is not reached at all."""
    told = _unanswered.get()
    if told is not None:
        told.connection_lost = True


def is_probe() -> bool:
    """Whether the current call is a guard's own."""
    told = _unanswered.get()
    return told is not None and told.is_probe


@contextmanager
def answering_at_once() -> Iterator[None]:
    """Calls inside come from SGLang's scheduler: look-ups end within a guarded tier's exists budget."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def must_answer_at_once() -> bool:
    """Whether the current call comes from SGLang's scheduler, which must not wait for a store."""
    return _at_once.get()

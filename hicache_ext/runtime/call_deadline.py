"""Limits of the current call: its deadline, and whether its caller may wait at all. Also the pages whose presence the
call could not determine, which the result of a lookup does not tell.

The calls of a PageStore carry none of this, so these are context variables: guards set the deadline and the store below
reads it, on the calling thread, before it hands work to other threads. If no guard has set it, the store's own timeout
applies. SGLang's backend marks calls of the scheduler's thread, and lower layers read the mark. A store that continues
on another thread passes the variables on with ``contextvars.copy_context().run``.
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
    """Pages whose lookup failed: the lookup's result does not distinguish "absent" from "unknown"."""

    pages: int = 0
    of: int = 0
    """Number of pages requested."""
    reason: str = ""
    connection_lost: bool = False
    """A call of any kind lost the connection: all others would fail, too."""
    is_probe: bool = False
    """The call is a guard's own probe."""


_deadline: ContextVar[float] = ContextVar("hicache_ext_call_deadline", default=math.inf)
_at_once: ContextVar[bool] = ContextVar("hicache_ext_answer_at_once", default=False)
_unanswered: ContextVar[Unanswered | None] = ContextVar("hicache_ext_unanswered", default=None)


@contextmanager
def ending_at(deadline: float, unanswered: Unanswered | None = None) -> Iterator[None]:
    """Make calls inside the block end by ``deadline`` (time.monotonic()), replacing an outer deadline. Pages that
    lookups inside could not determine are added to ``unanswered``."""
    tokens = _deadline.set(deadline), _unanswered.set(unanswered)
    try:
        yield
    finally:
        _deadline.reset(tokens[0])
        _unanswered.reset(tokens[1])


def tell_unanswered(pages: int, of: int, reason: str) -> None:
    """Report that ``pages`` of the ``of`` pages of the current lookup could not be determined."""
    told = _unanswered.get()
    if told is not None:
        told.pages, told.of, told.reason = told.pages + pages, told.of + of, reason


def call_deadline(longest: float) -> float:
    """Return the time.monotonic() by which the current call must end: ``longest`` seconds from now at the latest."""
    return min(time.monotonic() + longest, _deadline.get())


def tell_connection_lost() -> None:
    """Report that the current call could not reach the store at all."""
    told = _unanswered.get()
    if told is not None:
        told.connection_lost = True


def is_probe() -> bool:
    """Return whether the current call is a guard's own probe."""
    told = _unanswered.get()
    return told is not None and told.is_probe


@contextmanager
def answering_at_once() -> Iterator[None]:
    """Mark calls inside as coming from SGLang's scheduler: lookups end within a guarded tier's exists budget."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def must_answer_at_once() -> bool:
    """Return whether the current call comes from SGLang's scheduler, which must not wait for a store."""
    return _at_once.get()

"""What the current call may take: by when it must have ended, and whether its caller may wait at all.

The calls of a PageStore carry neither, so both are context variables: guards set the deadline and the store below reads
it, on the thread that was called, before it gives work to other threads. Where no guard has set it, the store's own
timeout counts. SGLang's backend marks the calls of the scheduler's thread, and what is further down reads the mark. A
store that goes on in another thread takes both along with ``contextvars.copy_context().run``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_deadline: ContextVar[float] = ContextVar("hicache_ext_call_deadline", default=math.inf)
_at_once: ContextVar[bool] = ContextVar("hicache_ext_answer_at_once", default=False)


@contextmanager
def ending_at(deadline: float) -> Iterator[None]:
    """Calls inside end by ``deadline`` (time.monotonic()); replaces a deadline set further out."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def call_deadline(longest: float) -> float:
    """The time.monotonic() by which the current call must have ended: ``longest`` seconds from now at the latest."""
    return min(time.monotonic() + longest, _deadline.get())


@contextmanager
def answering_at_once() -> Iterator[None]:
    """Calls inside come from SGLang's scheduler: look-ups end within each tier's ``guards.exists_budget``."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def must_answer_at_once() -> bool:
    """Whether the current call comes from SGLang's scheduler, which must not wait for a store."""
    return _at_once.get()

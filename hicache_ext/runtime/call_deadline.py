"""By when the current call must have ended: a guard sets it, the store below reads it.

A context variable, so that the guards in between need not pass it on. A store reads it on the thread that was called,
before it gives work to other threads. Where no guard has set it, the store's own timeout counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLimit:
    """The time that one call has."""

    seconds: float
    deadline: float
    """By time.monotonic()."""
    learnt: bool
    """Shorter than configured, because recent calls of the tier took less (guards/learnt_limit.py)."""


_limit: ContextVar[CallLimit | None] = ContextVar("hicache_ext_call_limit", default=None)


@contextmanager
def ending_within(seconds: float, *, learnt: bool = False) -> Iterator[CallLimit]:
    """Calls inside end within ``seconds``; replaces a limit set further out."""
    limit = CallLimit(seconds, time.monotonic() + seconds, learnt)
    token = _limit.set(limit)
    try:
        yield limit
    finally:
        _limit.reset(token)


def call_limit() -> CallLimit | None:
    """The limit of the current call, if a guard has set one."""
    return _limit.get()


def call_deadline(longest: float) -> float:
    """The time.monotonic() by which the current call must have ended: ``longest`` seconds from now at the latest."""
    limit = _limit.get()
    own = time.monotonic() + longest
    return own if limit is None else min(own, limit.deadline)

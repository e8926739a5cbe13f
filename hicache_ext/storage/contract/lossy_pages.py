"""How many pages of a call came back otherwise than they were written (page/transforms/lossy.py).

Who wants to know of one call, a span of a trace, counts around it. Whatever threads the call uses carry its context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_counted: ContextVar[list[int] | None] = ContextVar("_counted", default=None)


@contextmanager
def counting() -> Iterator[list[int]]:
    """A list that has a number for each part of the calls of its context."""
    counted: list[int] = []
    token = _counted.set(counted)
    try:
        yield counted
    finally:
        _counted.reset(token)


def note(pages: int) -> None:
    """So many pages were restored, but not exactly."""
    counted = _counted.get()
    if counted is not None:
        counted.append(pages)

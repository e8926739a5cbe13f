"""Whether a call is made by SGLang's scheduler, which must not wait for a store.

The backend knows (it is constructed on the scheduler's thread) and says so around a call; the guards far below ask. A
context variable, because a store in between may go on in another thread: ``contextvars.copy_context().run`` takes the
answer along.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_at_once: ContextVar[bool] = ContextVar("hicache_ext_answer_at_once", default=False)


@contextmanager
def answering_at_once() -> Iterator[None]:
    """Calls inside are answered from what is known within the budget of each tier (``guards.exists_budget``)."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def must_answer_at_once() -> bool:
    return _at_once.get()

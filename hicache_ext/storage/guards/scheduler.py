"""Whether the current call comes from SGLang's scheduler, which must not wait for a store.

The backend is constructed on the scheduler's thread; it marks calls of that thread, and guards further down read the
mark. A context variable, because a store in between may continue on another thread:
``contextvars.copy_context().run`` keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_at_once: ContextVar[bool] = ContextVar("hicache_ext_answer_at_once", default=False)


@contextmanager
def answering_at_once() -> Iterator[None]:
    """Look-ups inside end within each tier's ``guards.exists_budget``."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def must_answer_at_once() -> bool:
    return _at_once.get()

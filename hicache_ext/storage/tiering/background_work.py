"""Checks of background work: whether its pages are still wanted, and whether I/O of higher priority is in flight.

``clear()`` and ``remove()`` raise the generation of an identity first. Work in the background takes a *moment* when it
begins, and checks it last, before a page becomes visible: what was cleared or removed since must not come back.

Reads that SGLang waits for come first, then prefetch, then promotion.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hicache_ext.page.envelope import IDENTITY_LENGTH

StillWanted = Callable[[bytes], bool]
"""Tells whether nothing of an identity (by digest) was cleared or removed since a moment."""


class Generations:
    """Generations of identities, raised by clear() and remove(). Threads: any. Checking takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count(1)
        self._newest = 0
        self._all = 0
        """Generation of the last clear() of all identities."""
        self._of: dict[bytes, int] = {}

    def advance(self, digests: Iterable[bytes] | None) -> None:
        """Raise the generation of these identities (None: all), whose pages are about to be cleared or removed."""
        with self._lock:
            newest = next(self._count)
            if digests is None:
                self._all = newest
                self._of.clear()
            else:
                for digest in digests:
                    self._of[digest] = newest
            # Last, because a moment taken from now on counts as later.
            self._newest = newest

    def moment(self) -> StillWanted:
        since = self._newest
        return lambda digest: max(self._all, self._of.get(digest, 0)) <= since


def always(_digest: bytes) -> bool:
    """Serve as a moment for work that nothing can invalidate."""
    return True


def of_identities(digests: Sequence[bytes] | None) -> Callable[[bytes], bool]:
    """Return a test of whether a key is of one of these identities; None: of any."""
    if digests is None:
        return always
    chosen = frozenset(digests)
    return lambda key: key[:IDENTITY_LENGTH] in chosen


READ, FETCH = "read", "fetch"
"""READ: SGLang waits for it. FETCH: a prefetch, for a read that SGLang will wait for."""


class IoPriority:
    """Tracks I/O in flight on far tiers; work of lower priority waits for it.

    Thread-safe. Entering never waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._under_way: dict[object, tuple[str, float]] = {}
        """Operation -> its kind and its begin."""
        self._open_for_good = False

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        """Wrap a READ or a FETCH."""
        this = object()
        with self._condition:
            self._under_way[this] = kind, time.monotonic()
        try:
            yield
        finally:
            with self._condition:
                del self._under_way[this]
                self._condition.notify_all()

    def wait(self, patience: float, *kinds: str) -> None:
        """Return when nothing of these kinds is in flight, or after ``patience`` seconds: on a busy tier background
        work would otherwise never run, although it relieves the tier."""

        def is_over() -> bool:
            # Ignore I/O in flight for longer than that: it hangs, and would delay every batch of others.
            since = time.monotonic() - patience
            under_way = self._under_way.values()
            return self._open_for_good or not any(kind in kinds and begun > since for kind, begun in under_way)

        with self._condition:
            self._condition.wait_for(is_over, patience)

    def close(self) -> None:
        """Release all waiters, because the store is being closed."""
        with self._condition:
            self._open_for_good = True
            self._condition.notify_all()

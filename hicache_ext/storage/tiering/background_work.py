"""What background work asks before it goes on: whether its pages are still wanted, and whether others come first.

``clear()`` and ``remove()`` raise the generation of an identity first. Work in the background takes a *moment* when it
begins, and asks it last, before a page becomes visible: what was cleared or removed since must not come back.

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
"""Whether nothing of an identity (its digest) was cleared or removed since a moment."""


class Generations:
    """Threads: any. To ask takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count(1)
        self._newest = 0
        self._all = 0
        """Generation of the last clear() of everything."""
        self._of: dict[bytes, int] = {}

    def advance(self, digests: Iterable[bytes] | None) -> None:
        """Pages of these identities (None: of all) are about to be cleared or removed."""
        with self._lock:
            newest = next(self._count)
            if digests is None:
                self._all = newest
                self._of.clear()
            else:
                for digest in digests:
                    self._of[digest] = newest
            # Last: who takes a moment from now on began after it.
            self._newest = newest

    def moment(self) -> StillWanted:
        since = self._newest
        return lambda digest: max(self._all, self._of.get(digest, 0)) <= since


def always(_digest: bytes) -> bool:
    """A moment for work that nothing can make void."""
    return True


def of_identities(digests: Sequence[bytes] | None) -> Callable[[bytes], bool]:
    """Whether a key is of one of these identities; None: of any."""
    if digests is None:
        return always
    chosen = frozenset(digests)
    return lambda key: key[:IDENTITY_LENGTH] in chosen


READ, FETCH = "read", "fetch"
"""A read that SGLang waits for; a prefetch, whose read it is going to wait for."""


class IoPriority:
    """Notes what is under way on far tiers; work of lower priority waits for it.

    Thread-safe. Entering never waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._under_way: dict[object, tuple[str, float]] = {}
        """What each is, and when it began."""
        self._open_for_good = False

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        """Around a READ or a FETCH."""
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
        """Return when nothing of these kinds is under way, after ``patience`` seconds in any case: on a busy tier the
        background would otherwise never run, and it is what relieves the tier."""

        def is_over() -> bool:
            # Not for what has been under way for longer than that: it hangs, and would delay each batch of others.
            since = time.monotonic() - patience
            under_way = self._under_way.values()
            return self._open_for_good or not any(kind in kinds and begun > since for kind, begun in under_way)

        with self._condition:
            self._condition.wait_for(is_over, patience)

    def close(self) -> None:
        """Let all waiters go on: the store is being closed."""
        with self._condition:
            self._open_for_good = True
            self._condition.notify_all()

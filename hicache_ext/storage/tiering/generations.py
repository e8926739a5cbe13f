"""What was cleared or removed, and when: background work that began before it must not bring pages back.

``clear()`` and ``remove()`` raise the generation of an identity first. Work in the background takes a *moment* when it
begins, and asks it last, before a page becomes visible.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

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

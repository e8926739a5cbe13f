"""clear() where pages cannot all be removed at once: hidden from this process at once, removed in the background.

Every tier keeps one rule: a write after clear() counts, and a page from before never comes back. ``Clearing`` keeps it
for a tier that can list and remove. What was stored since clear() is visible and kept from the removal; everything else
of the identity is absent to this process until a sweep has removed it. Other processes see the pages go one by one,
which is harmless: they are right pages. A process that ends before that leaves the rest.

A tier lends a sweep for each clear(): it goes over the medium and removes what ``Cleared.old_pages`` gives it. It runs
on the thread of ``Clearing`` and is tried again until it has ended well, one sweep at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hicache_ext.errors import ClearLaterError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.background import RETRY, BackgroundLoop, Backoff, Retry

logger = logging.getLogger(__name__)

_ATTEMPTS = Backoff(0.25, 10.0)
"""Seconds before sweeps that failed are tried again."""
_WRITER_PAUSE = 0.01
"""Seconds before a sweep that met pages under way is repeated."""


@dataclass(eq=False, slots=True)
class Cleared:
    """One clear(): the identities (None: all), and how far the removal is."""

    digests: frozenset[bytes] | None
    sweep: Callable[[Cleared], None]
    """Raises ClearLaterError. Ends early, and then not well, only when the store is closing."""
    found: set[bytes] = field(default_factory=set)
    """Identities that had pages, as far as they were met."""
    closing: bool = False
    """The store is being closed: a sweep ends as soon as it can."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _kept: set[bytes] = field(default_factory=set)
    """Pages stored since."""
    _writing: set[bytes] = field(default_factory=set)
    """Pages under way."""
    _removing: frozenset[bytes] = frozenset()
    """Pages in the removal under way: a writer of one waits until it has ended."""
    _finished: set[Hashable] = field(default_factory=set)
    _skipped: bool = False
    """Pages under way were left out of the sweep."""
    _tried: bool = False

    @contextmanager
    def old_pages(self, keys: Iterable[bytes]) -> Iterator[frozenset[bytes]]:
        """Those of ``keys``, pages of these identities, that are to be removed inside the block."""
        with self._changed:
            met = set(keys) - self._kept
            self.found |= {key[:IDENTITY_LENGTH] for key in met}
            self._removing = frozenset(met - self._writing)
            self._skipped = self._skipped or len(self._removing) < len(met)
        try:
            yield self._removing
        finally:
            with self._changed:
                self._removing = frozenset()
                self._changed.notify_all()

    def finish(self, part: Hashable) -> None:
        """A part of the medium (``part_of``) was swept to its end: nothing is hidden there any more."""
        with self._changed:
            if not self._skipped:
                self._finished.add(part)

    def is_finished(self, part: Hashable) -> bool:
        """The part need not be swept again."""
        return part in self._finished

    def has(self, digest: bytes) -> bool:
        return self.digests is None or digest in self.digests

    def _concerns(self, key: bytes, part: Hashable) -> bool:
        return self.has(key[:IDENTITY_LENGTH]) and part not in self._finished


@dataclass(slots=True)
class Writing:
    """A write of some pages."""

    cleared: frozenset[bytes] = frozenset()
    """Pages whose stored copies, if there are any, were cleared: to be replaced, and no reason to answer EXISTS."""
    stored: set[bytes] = field(default_factory=set)
    """Filled by the writer: pages that are there now."""


class Clearing:
    """The clear() calls of one store. Threads: any."""

    def __init__(self, name: str, part_of: Callable[[bytes], Hashable] = lambda key: None) -> None:
        """``part_of``: the part of the medium that holds a key (a server of a cluster), where parts are swept apart."""
        self._name = name
        self._part_of = part_of
        self._changed = threading.Condition()
        self._waiting: list[Cleared] = []
        self._loop = BackgroundLoop(f"hicache-{name}-clear", self._sweep_all, _ATTEMPTS)

    def clear(self, digests: Sequence[bytes] | None, sweep: Callable[[Cleared], None], seconds: float = 0.0) -> int:
        """Hide the pages of these identities (None: of all) and have them removed; how many identities had pages, as
        far as that is known after ``seconds``."""
        cleared = Cleared(None if digests is None else frozenset(digests), sweep, _changed=self._changed)
        with self._changed:
            self._waiting = [*self._waiting, cleared]
        if not self._loop.wake():
            # No thread to be had: better slow than never.
            self._sweep_all()
        with self._changed:
            self._changed.wait_for(lambda: cleared._tried, seconds)
            return len(cleared.found)

    @property
    def hides_some(self) -> bool:
        """Whether ``hides`` may be true of any key."""
        return bool(self._waiting)

    def hides(self, key: bytes) -> bool:
        """Whether what is stored under ``key`` was cleared."""
        if not self._waiting:
            return False
        with self._changed:
            part = self._part_of(key)
            return any(key not in cleared._kept and cleared._concerns(key, part) for cleared in self._waiting)

    @contextmanager
    def writing(self, keys: Collection[bytes], deadline: float = math.inf) -> Iterator[Writing]:
        """Around a write: keeps the removal off these pages. A clear() that begins meanwhile may remove them.

        Waits for the removal under way of one of them, and for another writer of one: it would take the page that the
        other stores for the cleared copy. Raises TimeoutError at ``deadline`` (time.monotonic()).
        """
        if not self._waiting:
            yield Writing()
            return
        with self._changed:
            # One step with the claim below: no removal takes one of these pages up in between.
            is_free = self._changed.wait_for(
                lambda: all(
                    clear._writing.isdisjoint(keys) and clear._removing.isdisjoint(keys) for clear in self._waiting
                ),
                None if deadline == math.inf else max(0.0, deadline - time.monotonic()),
            )
            if not is_free:
                raise TimeoutError("these pages are being written, or cleared copies of them are being removed")
            parts = {key: self._part_of(key) for key in keys}
            concerned = [
                (cleared, [key for key, part in parts.items() if cleared._concerns(key, part)])
                for cleared in self._waiting
            ]
            for cleared, under_way in concerned:
                cleared._writing.update(under_way)
            writing = Writing(
                frozenset(key for cleared, under_way in concerned for key in under_way if key not in cleared._kept)
            )
        try:
            yield writing
        finally:
            with self._changed:
                for cleared, under_way in concerned:
                    cleared._writing.difference_update(under_way)
                    cleared._kept.update(writing.stored.intersection(under_way))
                self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything cleared is removed; False when it is not in time, or when sweeps fail."""
        with self._changed:
            if self._loop.running:
                self._changed.wait_for(lambda: all(cleared._tried for cleared in self._waiting), timeout)
            return not self._waiting

    def close(self, timeout: float | None = None, *, request: float | None = None) -> None:
        """Let the removal end, for at most ``timeout`` seconds, and the request under way, for at most ``request``
        seconds (None: it ends by itself)."""
        done = self.wait(timeout)
        with self._changed:
            for cleared in self._waiting:
                cleared.closing = True
        self._loop.stop(request)
        if not done:
            logger.warning("tier %s: closed before all cleared pages were removed; some are there still", self._name)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _sweep_all(self) -> float | Retry | None:
        waiting = self._waiting
        ended = [cleared for cleared in waiting if self._is_swept(cleared)]
        with self._changed:
            left = self._waiting = [cleared for cleared in self._waiting if cleared not in ended]
            for cleared in waiting:
                cleared._tried = not cleared._skipped
            self._changed.notify_all()
        if any(cleared._skipped for cleared in left):
            return _WRITER_PAUSE
        return RETRY if left else None

    def _is_swept(self, cleared: Cleared) -> bool:
        with self._changed:
            cleared._skipped = False
        try:
            cleared.sweep(cleared)
        except ClearLaterError as error:
            level = logging.DEBUG if cleared._tried else logging.WARNING
            logger.log(level, "tier %s: removing cleared pages: %s; tried again", self._name, error)
            return False
        except Exception:
            logger.exception("tier %s: removing cleared pages ended in an error that nobody expected", self._name)
            return False
        return not cleared._skipped and not cleared.closing

"""clear() for media that cannot remove all pages in one step: hide them immediately, remove them in the background.

Every tier obeys one rule: a page written after clear() stays, and a page from before never comes back. ``Clearing``
implements it for a tier that can list and remove. Pages stored since clear() are visible and protected from the
removal; all others of the identity are absent to this process until a sweep has removed them. Other processes see pages
disappear one by one, which is harmless because their content is correct. A process that ends early leaves the rest.

A tier supplies a sweep for each clear(): it walks the medium and removes what ``Cleared.old_pages`` yields. Sweeps run
one at a time on the thread of ``Clearing``, and each is retried until it succeeds.
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
"""Seconds before failed sweeps are retried."""
_WRITER_PAUSE = 0.01
"""Seconds before a sweep that found pages being written is repeated."""


@dataclass(eq=False, slots=True)
class Cleared:
    """One clear(): its identities (None: all) and the progress of the removal."""

    digests: frozenset[bytes] | None
    sweep: Callable[[Cleared], None]
    """Removes the old pages; raises ClearLaterError. Ends early, incomplete, only when the store is closing."""
    found: set[bytes] = field(default_factory=set)
    """Identities found to have pages so far."""
    closing: bool = False
    """The store is closing: a sweep must end as soon as it can."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _kept: set[bytes] = field(default_factory=set)
    """Pages stored since clear()."""
    _writing: set[bytes] = field(default_factory=set)
    """Pages being written."""
    _removing: frozenset[bytes] = frozenset()
    """Pages being removed: a writer of one of them waits until the removal has ended."""
    _finished: set[Hashable] = field(default_factory=set)
    _skipped: bool = False
    """The sweep left out pages that were being written."""
    _tried: bool = False

    @contextmanager
    def old_pages(self, keys: Iterable[bytes]) -> Iterator[frozenset[bytes]]:
        """Yield those of ``keys``, pages of these identities, that the block has to remove."""
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
        """Note that a part of the medium (``part_of``) was swept completely: nothing is hidden there any more."""
        with self._changed:
            if not self._skipped:
                self._finished.add(part)

    def is_finished(self, part: Hashable) -> bool:
        """Return whether the part was swept completely and need not be swept again."""
        return part in self._finished

    def has(self, digest: bytes) -> bool:
        return self.digests is None or digest in self.digests

    def _covers(self, key: bytes, part: Hashable) -> bool:
        return self.has(key[:IDENTITY_LENGTH]) and part not in self._finished


@dataclass(slots=True)
class Writing:
    """A write of some pages."""

    cleared: frozenset[bytes] = frozenset()
    """Pages whose stored copies, if any, were cleared: they must be replaced instead of answered EXISTS."""
    stored: set[bytes] = field(default_factory=set)
    """Pages that are stored now; filled by the writer."""


class Clearing:
    """The clear() calls of one store. Threads: any."""

    def __init__(self, name: str, part_of: Callable[[bytes], Hashable] = lambda key: None) -> None:
        """``part_of``: returns the part (a server of a cluster) that holds a key, if parts are swept separately."""
        self._name = name
        self._part_of = part_of
        self._changed = threading.Condition()
        self._waiting: list[Cleared] = []
        self._loop = BackgroundLoop(f"hicache-{name}-clear", self._sweep_all, _ATTEMPTS)

    def clear(self, digests: Sequence[bytes] | None, sweep: Callable[[Cleared], None], seconds: float = 0.0) -> int:
        """Hide the pages of these identities (None: of all) and remove them in the background. Return how many
        identities had pages, as far as known after ``seconds``."""
        cleared = Cleared(None if digests is None else frozenset(digests), sweep, _changed=self._changed)
        with self._changed:
            self._waiting = [*self._waiting, cleared]
        if not self._loop.wake():
            # No thread can be started, so sweep on this one.
            self._sweep_all()
        with self._changed:
            self._changed.wait_for(lambda: cleared._tried, seconds)
            return len(cleared.found)

    @property
    def hides_some(self) -> bool:
        """Return whether ``hides`` may return True for any key."""
        return bool(self._waiting)

    def hides(self, key: bytes) -> bool:
        """Return whether the page stored under ``key`` was cleared."""
        if not self._waiting:
            return False
        with self._changed:
            part = self._part_of(key)
            return any(key not in cleared._kept and cleared._covers(key, part) for cleared in self._waiting)

    @contextmanager
    def writing(self, keys: Collection[bytes], deadline: float = math.inf) -> Iterator[Writing]:
        """Protect these pages from removal during a write. A clear() that begins in the meantime may remove them.

        Waits while one of them is being removed or written by another caller, because this writer would take the
        other's new page for the cleared copy. Raises TimeoutError at ``deadline`` (time.monotonic()).
        """
        if not self._waiting:
            yield Writing()
            return
        with self._changed:
            # Under the same lock as the claim below, so that no removal picks one of these pages in between.
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
                (cleared, [key for key, part in parts.items() if cleared._covers(key, part)])
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
        """Wait until all cleared pages are removed; return False on timeout or if sweeps fail."""
        with self._changed:
            if self._loop.running:
                self._changed.wait_for(lambda: all(cleared._tried for cleared in self._waiting), timeout)
            return not self._waiting

    def close(self, timeout: float | None = None, *, request: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for the removal, then at most ``request`` seconds for the request in flight
        (None: until it ends)."""
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

"""clear() of an object store: out of sight at once, deleted in the background.

A store has no rename of a prefix. Until the last page of a cleared identity is deleted, this process takes its pages
for absent, except those it has stored since; those are kept from the deletion. Other processes see the pages until they
are gone. A process that ends before that leaves the rest, which then is visible again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.object.client import explain
from hicache_ext.storage.tiers.object.names import page_key, page_name, pages_of

logger = logging.getLogger(__name__)

_LISTED_AT_ONCE = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the deletion is tried again after the store has failed."""


@dataclass(slots=True)
class _Cleared:
    """An identity whose old pages are being deleted."""

    times: int = 1
    """How often it was cleared; a pass that began before the last time does not count as the final one."""
    kept: set[bytes] = field(default_factory=set)
    """Pages stored since it was cleared."""
    writing: dict[bytes, int] = field(default_factory=dict)
    """Pages under way, and by how many writers."""
    deleting: frozenset[bytes] = frozenset()
    """Pages in the request under way: a writer of one waits for it."""


class Clearings:
    """All clear() calls of one store. Thread-safe; never raises the store's errors."""

    def __init__(self, tier: str, obstore: Any, client: Any, metrics: TierMetrics) -> None:
        self._tier = tier
        self._obstore = obstore
        self._client = client
        self._metrics = metrics
        self._changed = threading.Condition()
        self._cleared: dict[bytes, _Cleared] = {}
        self._cleaner: threading.Thread | None = None
        self._closing = False
        self._failing = False

    def begin(self, digest: bytes) -> None:
        """Take every page of an identity out of sight and see to it that they are deleted."""
        with self._changed:
            cleared = self._cleared.get(digest)
            if cleared is None:
                self._cleared[digest] = _Cleared()
            else:
                cleared.times += 1
                cleared.kept.clear()
            if self._cleaner is None:
                self._cleaner = threading.Thread(target=self._clean, name=f"hicache-{self._tier}-clear", daemon=True)
                try:
                    self._cleaner.start()
                except RuntimeError:
                    # No thread to be had: out of sight all the same, deleted after the next clear().
                    self._cleaner = None

    def hides(self, key: bytes) -> bool:
        """Whether what is stored under ``key`` was cleared."""
        if not self._cleared:
            return False
        with self._changed:
            cleared = self._cleared.get(key[:IDENTITY_LENGTH])
            return cleared is not None and key not in cleared.kept

    def kept_pages(self, digest: bytes) -> int | None:
        """How many pages were stored since the identity was cleared; None when no deletion is under way."""
        with self._changed:
            cleared = self._cleared.get(digest)
            return None if cleared is None else len(cleared.kept)

    @contextmanager
    def writing(self, key: bytes) -> Iterator[_Write]:
        """Around a write: keeps the deletion off the page."""
        if not self._cleared:
            yield _Write(replaces=False)
            return
        with self._changed:
            cleared = self._cleared.get(key[:IDENTITY_LENGTH])
            if cleared is not None:
                cleared.writing[key] = cleared.writing.get(key, 0) + 1
                self._changed.wait_for(lambda: key not in cleared.deleting)
            write = _Write(replaces=cleared is not None and key not in cleared.kept)
        try:
            yield write
        finally:
            if cleared is not None:
                with self._changed:
                    cleared.writing[key] -= 1
                    if not cleared.writing[key]:
                        del cleared.writing[key]
                    if write.stored:
                        cleared.kept.add(key)

    def forget(self, key: bytes) -> None:
        """The page was removed."""
        if self._cleared:
            with self._changed:
                if cleared := self._cleared.get(key[:IDENTITY_LENGTH]):
                    cleared.kept.discard(key)

    def wait(self, timeout: float) -> bool:
        """Wait until everything cleared is deleted; False when it is not in time, or when the store fails."""
        with self._changed:
            self._changed.wait_for(lambda: not self._cleared or self._failing, timeout)
            return not self._cleared

    def close(self, timeout: float) -> None:
        """Let the deletion end, at most ``timeout`` seconds unless one request takes longer."""
        done = self.wait(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            cleaner = self._cleaner
        if cleaner is not None:
            cleaner.join()
        if not done:
            logger.warning("tier %s: closed before all cleared pages were deleted; some are there still", self._tier)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _clean(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._changed:
                if self._closing or not self._cleared:
                    self._cleaner = None if not self._closing else self._cleaner
                    self._changed.notify_all()
                    return
                digest, cleared = next(iter(self._cleared.items()))
            try:
                self._delete_pages(digest, cleared)
                pause = _FIRST_PAUSE
                self._failing = False
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                failure = explain(error)
                self._metrics.add("error", failure.reason)
                logger.warning("tier %s: deleting cleared pages: %s; tried again", self._tier, failure)
                with self._changed:
                    self._failing = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _delete_pages(self, digest: bytes, cleared: _Cleared) -> None:
        """Delete until a whole listing shows nothing but pages stored since."""
        while not self._closing:
            times, deleted = cleared.times, 0
            for listed in self._obstore.list(self._client, pages_of(digest), chunk_size=_LISTED_AT_ONCE):
                found = {key for entry in listed if (key := page_key(entry["path"])) is not None}
                with self._changed:
                    cleared.deleting = frozenset(found - cleared.kept - cleared.writing.keys())
                try:
                    self._delete(cleared.deleting)
                    deleted += len(cleared.deleting)
                finally:
                    with self._changed:
                        cleared.deleting = frozenset()
                        self._changed.notify_all()
                if self._closing:
                    return
            with self._changed:
                if not deleted and times == cleared.times and not cleared.writing:
                    del self._cleared[digest]
                    self._changed.notify_all()
                    return
                if not deleted and cleared.writing:
                    self._changed.wait(0.01)

    def _delete(self, keys: Sequence[bytes] | frozenset[bytes]) -> None:
        names = [page_name(key) for key in keys]
        if names:
            delete_objects(self._obstore, self._client, names)
            self._metrics.add("cleared", "", len(names))


@dataclass(slots=True)
class _Write:
    """One write of one page."""

    replaces: bool
    """The page has no valid copy: whatever has its name was cleared."""
    stored: bool = False
    """Set by the writer when the page is there."""


def delete_objects(obstore: Any, client: Any, names: Sequence[str]) -> None:
    """Delete objects, by one request for many where the store has that; those that are gone are no error."""
    try:
        obstore.delete(client, list(names))
        return
    except FileNotFoundError:
        pass
    # All but S3 fail on the first that is gone already.
    for name in names:
        try:
            obstore.delete(client, name)
        except FileNotFoundError:
            continue

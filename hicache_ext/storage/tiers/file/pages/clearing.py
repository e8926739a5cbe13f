"""clear() of page files: out of sight at once, deleted in the background."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.usage import Removal, Usage

logger = logging.getLogger(__name__)


class Clearing:
    """Clears identities of one directory. Thread-safe; never raises OSError."""

    def __init__(self, tier: str, directory: PageDirectory, usage: Usage, metrics: TierMetrics) -> None:
        self._tier = tier
        self._directory = directory
        self._usage = usage
        self._metrics = metrics
        self._lock = threading.Lock()
        self._cleaners: list[threading.Thread] = []

    def clear(self, digests: Sequence[bytes] | None) -> set[bytes]:
        """Take all pages of these identities (None: of all) out of sight; the identities that had pages."""
        cleared: set[bytes] = set()
        try:
            wanted = self._directory.known_identities() if digests is None else digests
        except OSError as error:
            self._report(error, "the directory")
            return cleared
        for digest in wanted:
            try:
                with ExitStack() as operation:
                    # Under way before the tree moves: killed from here on, the account is known to be off.
                    removal = operation.enter_context(self._usage.removing())
                    tree = self._directory.detach_identity(digest)
                    if tree is not None:
                        if self._directory.has_pages(tree):
                            cleared.add(digest)
                        self._start_cleaner(tree, removal, operation.pop_all())
            except OSError as error:
                self._report(error, digest.hex())
        return cleared

    def wait(self) -> None:
        """Return when all that was cleared is deleted."""
        with self._lock:
            cleaners = list(self._cleaners)
        for cleaner in cleaners:
            cleaner.join()

    def _start_cleaner(self, tree: Path, removal: Removal, operation: ExitStack) -> None:
        def clean() -> None:
            try:
                with operation:
                    removal.freed = self._directory.delete_detached(tree)
            except OSError as error:
                self._report(error, str(tree))

        cleaner = threading.Thread(target=clean, name=f"hicache-{self._tier}-clear", daemon=True)
        with self._lock:
            try:
                cleaner.start()
            except RuntimeError:
                # No thread to be had: better slow than never.
                clean()
                return
            self._cleaners = [thread for thread in self._cleaners if thread.is_alive()] + [cleaner]

    def _report(self, error: OSError, what: str) -> None:
        self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
        logger.warning("tier %s: clearing %s: %s", self._tier, what, error)

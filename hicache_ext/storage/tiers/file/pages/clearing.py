"""clear() of page files: out of sight at once, deleted in the background."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.runtime.threads import ThreadPool
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
        self._cleaners = ThreadPool(f"hicache-{tier}-clear")

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

    def close(self) -> None:
        """Returns when all that was cleared is deleted."""
        self._cleaners.close()

    def _start_cleaner(self, tree: Path, removal: Removal, operation: ExitStack) -> None:
        def clean() -> None:
            try:
                with operation:
                    removal.freed = self._directory.delete_detached(tree)
            except OSError as error:
                self._report(error, str(tree))

        try:
            self._cleaners.start(clean)
        except RuntimeError:
            # No thread to be had: better slow than never.
            clean()

    def _report(self, error: OSError, what: str) -> None:
        self._metrics.add("error", errno.errorcode.get(error.errno or 0, "unknown"))
        logger.warning("tier %s: clearing %s: %s", self._tier, what, error)

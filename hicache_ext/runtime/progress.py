"""Work that takes long is said before and after: a server logs it, a command shows it on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

progress = logging.getLogger("hicache_ext.progress")
"""Lines of level INFO."""


class _OnStandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Standard output is the command's result, which may be JSON.
        print(record.getMessage(), file=sys.stderr, flush=True)


@contextmanager
def progress_on_standard_error() -> Iterator[None]:
    """For commands, which configure no logging."""
    handler, before = _OnStandardError(), progress.level
    progress.addHandler(handler)
    progress.setLevel(logging.INFO)
    try:
        yield
    finally:
        progress.setLevel(before)
        progress.removeHandler(handler)

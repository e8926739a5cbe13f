"""The directory of this account in which the package keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """``$XDG_CACHE_HOME/hicache_ext``; None for an account without a home directory. It may not exist."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hicache_ext"
    except RuntimeError:
        return None

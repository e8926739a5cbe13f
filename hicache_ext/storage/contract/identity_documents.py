"""Identity documents as a shared medium holds them: whoever may write there may leave anything in their places."""

from __future__ import annotations

from typing import Any

from hicache_ext.runtime.whole_file import parsed

LARGEST_DOCUMENT = 1 << 20
"""Bytes; ours have a few hundred."""
LARGEST_SUM = 16 << 20
"""Bytes of all documents that are read from one medium."""


def document_in(stored: bytes) -> dict[str, Any] | None:
    """The document; None where this is none."""
    return parsed(stored) if len(stored) <= LARGEST_DOCUMENT else None

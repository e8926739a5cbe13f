"""Identity documents as a shared medium holds them: whoever may write there may leave anything in their places."""

from __future__ import annotations

import json
from typing import Any

LARGEST_DOCUMENT = 1 << 20
"""Bytes; ours have a few hundred."""
LARGEST_SUM = 16 << 20
"""Bytes of all documents that are read from one medium."""


def document_in(stored: Any) -> dict[str, Any] | None:
    """The document; None where this is none."""
    try:
        document = json.loads(stored) if len(stored) <= LARGEST_DOCUMENT else None
    except (TypeError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None

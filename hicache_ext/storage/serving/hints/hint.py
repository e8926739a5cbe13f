"""The format of a hint; docs/pd.md says what hints are for.

::

    "HXHINT1\\0"  scope (16)  milliseconds since 1970 (8)  number of pages (4)  page hashes (32 each)

Whoever can write to the pool can write a hint, so it is not trusted: every length is checked, and it only names pages
to look for under the reader's own identity.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_MAGIC = b"HXHINT1\0"
_HEAD = struct.Struct("<8s16sQI")
_HASH_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Hint:
    """The first pages of a conversation are in the pool."""

    scope: bytes
    """Model and page size: ``hint_scope`` of the sending backend."""
    written: float
    """Seconds since 1970, by the writer's clock."""
    page_hashes: tuple[bytes, ...]


def encode(hint: Hint) -> bytes:
    head = _HEAD.pack(_MAGIC, hint.scope, int(hint.written * 1000), len(hint.page_hashes))
    return head + b"".join(hint.page_hashes)


def decode(data: bytes, most_pages: int) -> Hint | None:
    """None for whatever is not exactly a hint of at most ``most_pages`` pages."""
    if len(data) < _HEAD.size:
        return None
    magic, scope, milliseconds, pages = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 0 < pages <= most_pages or len(data) != _HEAD.size + pages * _HASH_LENGTH:
        return None
    hashes = (data[first : first + _HASH_LENGTH] for first in range(_HEAD.size, len(data), _HASH_LENGTH))
    return Hint(scope, milliseconds / 1000, tuple(hashes))


def longest(most_pages: int) -> int:
    """Bytes of a hint of ``most_pages`` pages."""
    return _HEAD.size + most_pages * _HASH_LENGTH

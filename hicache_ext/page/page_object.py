"""A page object as one piece of memory: header and payload, as a tier stores it that keeps both together.

Pure; any thread. The bytes are those of docs/page-format.md, with a header of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_ext.page import envelope
from hicache_ext.page.copying import gather, scatter

HEADER_LENGTH = envelope.FIELDS_LENGTH


def encode_object(key: bytes, segments: Sequence[memoryview]) -> memoryview:
    """The page object of the page ``key``, in memory of its own."""
    whole = np.empty(HEADER_LENGTH + sum([segment.nbytes for segment in segments]), np.uint8).data
    gather(segments, whole[HEADER_LENGTH:])
    # The checksum is of the copy: should the page change meanwhile, the object is still one that can be trusted.
    whole[:HEADER_LENGTH] = envelope.encode_header(key, [whole[HEADER_LENGTH:]])
    return whole


def reason_to_refuse(stored: memoryview, key: bytes, payload_length: int) -> str | None:
    """Why these bytes are not the page ``key`` of that length; None when they are.

    The reasons of ``envelope.reason_to_refuse``, and ``truncated`` and ``longer``.
    """
    if stored.nbytes != HEADER_LENGTH + payload_length:
        return "truncated" if stored.nbytes < HEADER_LENGTH + payload_length else "longer"
    return envelope.reason_to_refuse(stored[:HEADER_LENGTH], key, [stored[HEADER_LENGTH:]])


def decode_object(stored: memoryview, key: bytes, segments: Sequence[memoryview]) -> str | None:
    """Copy the payload into ``segments`` if this is the page ``key`` of that length; why it is not otherwise.

    Checked before it is copied: ``segments`` never hold another page, nor half of one.
    """
    reason = reason_to_refuse(stored, key, sum([segment.nbytes for segment in segments]))
    if reason is None:
        scatter(stored[HEADER_LENGTH:], segments)
    return reason

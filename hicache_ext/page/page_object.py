"""A page object as one piece of memory: header and payload, for tiers that store both together; and copies between a
page's segments and contiguous memory.

Threads: any. docs/page-format.md specifies the bytes; the header has 128 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_ext.page import envelope

HEADER_LENGTH = envelope.FIELDS_LENGTH


def encode_object(key: bytes, segments: Sequence[memoryview], whole: memoryview | None = None) -> memoryview:
    """Make the page object of the page ``key`` in ``whole``, which has exactly its size, or in new memory."""
    if whole is None:
        whole = np.empty(HEADER_LENGTH + sum([segment.nbytes for segment in segments]), np.uint8).data
    gather(segments, whole[HEADER_LENGTH:])
    # The checksum covers the copy, so the object is consistent even if the page changes in the meantime.
    whole[:HEADER_LENGTH] = envelope.encode_header(key, [whole[HEADER_LENGTH:]])
    return whole


def decode_object(stored: memoryview, key: bytes, segments: Sequence[memoryview]) -> str | None:
    """Copy the payload into ``segments`` if this is the page ``key`` of that length. Otherwise return why not: a reason
    of ``envelope.reason_to_refuse``, ``truncated`` or ``longer``.

    The page is checked before the copy, so ``segments`` never hold another page or half of one.
    """
    length = HEADER_LENGTH + sum([segment.nbytes for segment in segments])
    if stored.nbytes != length:
        return "truncated" if stored.nbytes < length else "longer"
    reason = envelope.reason_to_refuse(stored[:HEADER_LENGTH], key, [stored[HEADER_LENGTH:]])
    if reason is None:
        scatter(stored[HEADER_LENGTH:], segments)
    return reason


def gather(source: Sequence[memoryview], target: memoryview) -> None:
    """Copy the concatenation of ``source`` into ``target``."""
    offset = 0
    for segment in source:
        _copy(segment, target[offset : offset + segment.nbytes])
        offset += segment.nbytes


def scatter(source: memoryview, target: Sequence[memoryview]) -> None:
    """Copy ``source`` into ``target``, one segment after the other."""
    offset = 0
    for segment in target:
        _copy(source[offset : offset + segment.nbytes], segment)
        offset += segment.nbytes


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy releases the GIL while it copies; assigning memoryviews would not, and would delay SGLang's scheduler.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

"""A page object as one piece of memory: header and payload, as a tier stores it that keeps both together; and copies
between a page's segments and one run of memory.

Any thread. The bytes are those of docs/page-format.md, with a header of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_ext.page import envelope

HEADER_LENGTH = envelope.FIELDS_LENGTH


def encode_object(key: bytes, segments: Sequence[memoryview], whole: memoryview | None = None) -> memoryview:
    """The page object of the page ``key``: in ``whole``, which has as many bytes, or in memory of its own."""
    if whole is None:
        whole = np.empty(HEADER_LENGTH + sum([segment.nbytes for segment in segments]), np.uint8).data
    gather(segments, whole[HEADER_LENGTH:])
    # The checksum is of the copy: should the page change meanwhile, the object is still one that can be trusted.
    whole[:HEADER_LENGTH] = envelope.encode_header(key, [whole[HEADER_LENGTH:]])
    return whole


def decode_object(stored: memoryview, key: bytes, segments: Sequence[memoryview]) -> str | None:
    """Copy the payload into ``segments`` if this is the page ``key`` of that length; why it is not otherwise: a reason
    of ``envelope.reason_to_refuse``, ``truncated`` or ``longer``.

    Checked before it is copied: ``segments`` never hold another page, nor half of one.
    """
    length = HEADER_LENGTH + sum([segment.nbytes for segment in segments])
    if stored.nbytes != length:
        return "truncated" if stored.nbytes < length else "longer"
    reason = envelope.reason_to_refuse(stored[:HEADER_LENGTH], key, [stored[HEADER_LENGTH:]])
    if reason is None:
        scatter(stored[HEADER_LENGTH:], segments)
    return reason


def gather(source: Sequence[memoryview], target: memoryview) -> None:
    """The concatenation of ``source`` into ``target``."""
    offset = 0
    for segment in source:
        _copy(segment, target[offset : offset + segment.nbytes])
        offset += segment.nbytes


def scatter(source: memoryview, target: Sequence[memoryview]) -> None:
    """``source`` into ``target``, one segment after the other."""
    offset = 0
    for segment in target:
        _copy(source[offset : offset + segment.nbytes], segment)
        offset += segment.nbytes


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy releases the GIL while it copies; assigning memoryviews would not, and delay SGLang's scheduler.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

"""The transforms of one page: from its segments to the bytes that a medium stores, and back.

Pure; any thread. The GIL is not held while pages are copied, sealed and unsealed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hicache_ext.errors import FormatError
from hicache_ext.page.page_object import gather, scatter
from hicache_ext.page.transforms import header as headers
from hicache_ext.page.transforms.codec import PageCodec, Paying
from hicache_ext.page.transforms.forms import Form
from hicache_ext.page.transforms.header import HEADER_LENGTH, RAW, Header
from hicache_ext.page.transforms.sealing import SealKey, SealMode, fastest_cipher

Room = Callable[[int], memoryview]
"""Returns memory of the caller with this many bytes, valid until the next call."""


def encoded(codec: PageCodec, paying: Paying | None, segments: Sequence[memoryview], room: Room) -> memoryview | None:
    """Return the encoded page in new memory; None if it is to be stored unencoded. ``room``: memory for its payload."""
    payload = in_one_piece(segments, room)
    if paying is not None and not paying.pays(codec, payload):
        return None
    target = np.empty(codec.rooms[-1], np.uint8).data
    length = codec.encode(payload, target)
    return target[:length] if 0 < length <= target.nbytes else None


def write(
    stored: memoryview,
    stored_key: bytes,
    form: Form,
    segments: Sequence[memoryview],
    body: memoryview | None,
    salt: bytes,
    room: Room,
) -> None:
    """Fill ``stored`` with a page in this form. ``body``: the encoded page, if the form has a codec."""
    payload = sum([segment.nbytes for segment in segments])
    length = payload if body is None else body.nbytes
    code = RAW if form.codec is None else form.codec.code
    if form.key is None:
        head = Header(code, 0, 0, payload, length)
    else:
        mode = SealMode.ENCRYPT if form.hides else SealMode.AUTHENTICATE
        head = Header(code, mode, fastest_cipher(), payload, length, form.key.id.encode(), salt)
    stored[:HEADER_LENGTH] = head.encode()
    stored[head.end :] = bytes(stored.nbytes - head.end)
    pieces = segments if body is None else [body]
    if form.hides:
        plain = in_one_piece(pieces, room)
    else:
        # The seal covers the copy, so the stored page is consistent even if the page changes in the meantime.
        plain = None
        gather(pieces, stored[HEADER_LENGTH : head.body_end])
    if form.key is not None:
        form.key.seal(head, stored_key, stored, plain)


def read(stored: memoryview, stored_key: bytes, form: Form, segments: Sequence[memoryview], room: Room) -> str | None:
    """Write the page into ``segments`` if ``stored`` is that page in this form. Otherwise return why not; ``segments``
    may then hold any data with a valid seal.

    The reasons are those of ``header.decode``, ``unsealed``, ``seal_form``, ``seal_key``, ``seal_tag`` (not the tag of
    this page), ``seal_cipher`` (not available here), ``payload_length``, and those of codecs.
    """
    payload = sum([segment.nbytes for segment in segments])
    head = _header(stored, form)
    if isinstance(head, str):
        return head
    if head.payload_length != payload:
        return "payload_length"
    body, plain = stored[HEADER_LENGTH : head.body_end], None
    if form.key is not None:
        if form.hides:
            plain = segments[0] if form.codec is None and len(segments) == 1 else room(head.body_length)
        reason = form.key.unseal(head, stored_key, stored, plain)
        if reason is not None:
            if plain is not None:
                # The cipher has written unauthenticated data.
                np.frombuffer(plain, np.uint8).fill(0)
            return reason
        body = body if plain is None else plain
    if form.codec is not None:
        plain = segments[0] if len(segments) == 1 else np.empty(payload, np.uint8).data
        try:
            form.codec.decode(body, plain)
        except FormatError as error:
            return error.reason
        body = plain
    if plain is None or len(segments) != 1:
        scatter(body, segments)
    return None


def reason_it_is_not_sealed(stored: memoryview, stored_key: bytes, form: Form) -> str | None:
    """Return why a stored page is not validly sealed in this form, or None if it is. For tools: does not decode it."""
    head = _header(stored, form)
    if isinstance(head, str):
        return head
    return None if form.key is None else form.key.unseal(head, stored_key, stored)


def is_sealed_with(stored: memoryview, stored_key: bytes, key: SealKey, mode: SealMode) -> bool:
    """Return whether a stored page has a valid seal of this key in this mode, regardless of the form of its name."""
    try:
        head = headers.decode(stored)
    except FormatError:
        return False
    return (head.seal, head.key_id) == (mode, key.id.encode()) and key.unseal(head, stored_key, stored) is None


def _header(stored: memoryview, form: Form) -> Header | str:
    """Return the header of a stored page, or why the page does not have this form."""
    try:
        head = headers.decode(stored)
    except FormatError as error:
        # A page without such a header dates from before the tier had a seal.
        return "unsealed" if form.key is not None and error.reason == "transform" else error.reason
    if head.codec != (RAW if form.codec is None else form.codec.code):
        return "codec"
    if form.key is None:
        return "seal_form" if head.seal else head
    if not head.seal:
        return "unsealed"
    if head.key_id != form.key.id.encode():
        return "seal_key"
    mode = SealMode.ENCRYPT if form.hides else SealMode.AUTHENTICATE
    return head if head.seal == mode else "seal_form"


def in_one_piece(segments: Sequence[memoryview], room: Room) -> memoryview:
    """Return the page's payload as contiguous memory: the segment itself if there is only one, else a copy."""
    if len(segments) == 1:
        return segments[0]
    whole = room(sum([segment.nbytes for segment in segments]))
    gather(segments, whole)
    return whole

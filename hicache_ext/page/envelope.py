"""The envelope: the header in front of every stored page, and the checks that make a stored page a hit.

``docs/page-format.md`` specifies the bytes. A stored page is ``header || payload``. The header is 128 bytes of fields,
little-endian, then zeros up to ``header_length``. Slabs keep headers apart from payloads (slab/shapes.py).

Everything here is pure: no I/O, any thread. Checksums are xxh3-128; xxhash releases the GIL on large buffers.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from hicache_ext.errors import FormatError

MAGIC = b"HICACHEX"
FORMAT_VERSION = 1

FIELDS_LENGTH = 128
"""Length of the fields in bytes; the smallest header_length."""

MAX_HEADER_LENGTH = 65536

_SEALED_LENGTH = 88
"""Number of leading header bytes that depend on the page alone, not on the time of writing."""

SEAL_LENGTH = 16

IDENTITY_LENGTH = 16
PAGE_HASH_LENGTH = 32
KEY_LENGTH = IDENTITY_LENGTH + PAGE_HASH_LENGTH

FLAG_PAYLOAD_CHECKSUM = 1
"""The payload checksum is present. Pages without it are refused."""

# magic, version, flags, header_length, identity, page_hash, payload_length, payload_checksum, created_ms, reserved
_FIELDS = struct.Struct("<8sHHI16s32sQ16sQ16s")
PAGE_START = struct.pack("<8sHHI", MAGIC, FORMAT_VERSION, FLAG_PAYLOAD_CHECKSUM, FIELDS_LENGTH)
"""The first 16 bytes of every page with a checksum and a header of 128 bytes."""
_FIELDS_BEFORE_CHECKSUM = _FIELDS.size

_RESERVED = bytes(16)

Buffer = bytes | bytearray | memoryview
Segments = Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Envelope:
    """The decoded header of one stored page."""

    identity: bytes
    page_hash: bytes
    header_length: int
    payload_length: int
    payload_checksum: bytes | None
    created_ms: int

    @property
    def key(self) -> bytes:
        return self.identity + self.page_hash


def payload_checksum(segments: Segments) -> bytes:
    """Return the xxh3-128 (16 bytes, canonical big-endian form) of the concatenation of ``segments``."""
    if len(segments) == 1:
        return xxhash.xxh3_128_digest(segments[0])
    state = xxhash.xxh3_128(segments[0] if segments else b"")
    for segment in segments[1:]:
        state.update(segment)
    return state.digest()


def encode_header(key: bytes, segments: Segments, *, created_ms: int | None = None) -> bytes:
    """Return the 128-byte header of the page ``key`` (identity digest + page hash, 48 bytes) with payload ``segments``.

    Raises ValueError for a key of another length, which is a programming error.
    """
    if len(key) != KEY_LENGTH:
        raise ValueError(f"a page key has {KEY_LENGTH} bytes, got {len(key)}")
    payload_length = sum([segment.nbytes for segment in segments])
    created_ms = int(time.time() * 1000) if created_ms is None else created_ms
    fields = _sealed(key, payload_length, segments) + created_ms.to_bytes(8, "little") + _RESERVED
    return fields + xxhash.xxh3_128_digest(fields)


def decode_header(header: Buffer) -> Envelope:
    """Decode the envelope in the first bytes of a stored page.

    Raises FormatError with one of the reasons ``short_header``, ``magic``, ``version``, ``header_checksum``,
    ``header_length``. A header of zeros (a hole after a power loss) gives ``magic``.
    """
    if len(header) < FIELDS_LENGTH:
        raise FormatError("short_header", f"{len(header)} bytes")
    fields = bytes(header[:FIELDS_LENGTH])
    magic, version, flags, header_length, identity, page_hash, length, checksum, created_ms, _ = _FIELDS.unpack_from(
        fields
    )
    if magic != MAGIC:
        raise FormatError("magic")
    if fields[_FIELDS_BEFORE_CHECKSUM:] != xxhash.xxh3_128_digest(fields[:_FIELDS_BEFORE_CHECKSUM]):
        raise FormatError("header_checksum")
    # Checksum before version: a flipped bit in the version is damage, not a newer format.
    if version != FORMAT_VERSION:
        raise FormatError("version", f"version {version}, this reader knows {FORMAT_VERSION}")
    if not FIELDS_LENGTH <= header_length <= MAX_HEADER_LENGTH:
        raise FormatError("header_length", str(header_length))
    return Envelope(
        identity=identity,
        page_hash=page_hash,
        header_length=header_length,
        payload_length=length,
        payload_checksum=checksum if flags & FLAG_PAYLOAD_CHECKSUM else None,
        created_ms=created_ms,
    )


def page_seal(key: bytes, payload_length: int, segments: Segments) -> bytes:
    """Return 16 bytes that bind a payload to its page without its header: equal only for the same key, length and
    payload. Equals ``seal_of`` of the page's header."""
    return xxhash.xxh3_128_digest(_sealed(key, payload_length, segments))


def seal_of(fields: Buffer) -> bytes:
    """Return the ``page_seal`` of the page with this header; for other bytes, one that matches no page."""
    return xxhash.xxh3_128_digest(fields[:_SEALED_LENGTH])


def _sealed(key: bytes, payload_length: int, segments: Segments) -> bytes:
    """Return the first 88 bytes of the header of this page."""
    return PAGE_START + key + payload_length.to_bytes(8, "little") + payload_checksum(segments)


def reason_to_refuse(header: Buffer, key: bytes, segments: Segments) -> str | None:
    """Return why the data just read is not the page ``key``, or None if it is.

    ``header``: all bytes read in front of the payload; ``segments``: the memory the payload was read into.
    The reasons are those of ``decode_header`` (``header_length`` also if the payload begins at another offset) and
    ``identity``, ``page_hash``, ``payload_length``, ``no_checksum``, ``checksum``.
    """
    payload_length = sum([segment.nbytes for segment in segments])
    # The fast path for a good page with a header of 128 bytes: one comparison, checksum included.
    if len(header) == FIELDS_LENGTH:
        fields = bytes(header)
        of_fields = xxhash.xxh3_128_digest(fields[:_FIELDS_BEFORE_CHECKSUM])
        is_good = fields.startswith(_sealed(key, payload_length, segments))
        if is_good and fields[_FIELDS_BEFORE_CHECKSUM:] == of_fields:
            return None
    try:
        envelope = decode_header(header)
    except FormatError as error:
        return error.reason
    if envelope.header_length != len(header):
        return "header_length"
    if envelope.identity != key[:IDENTITY_LENGTH]:
        return "identity"
    if envelope.page_hash != key[IDENTITY_LENGTH:]:
        return "page_hash"
    if envelope.payload_length != payload_length:
        return "payload_length"
    if envelope.payload_checksum is None:
        return "no_checksum"
    return None if envelope.payload_checksum == payload_checksum(segments) else "checksum"

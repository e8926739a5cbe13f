"""A second reader and writer of page objects that shares no line with ``hicache_ext.page.envelope``.

The conformance suite looks at stored bytes through it, so that a mistake made twice, in a store's writing and in its
reading, cannot hide. Written from ``docs/page-format.md``: a page object is a header and the payload behind it; numbers
are little-endian. The first 128 bytes of the header are

| offset | size | field |
|---|---|---|
| 0 | 8 | magic ``HICACHEX`` |
| 8 | 2 | format version, 1 |
| 10 | 2 | flags; bit 0: the payload checksum is present |
| 12 | 4 | header length: where the payload begins, 128..65536 |
| 16 | 16 | identity digest |
| 32 | 32 | page hash |
| 64 | 8 | payload length |
| 72 | 16 | xxh3-128 of the payload, big-endian |
| 88 | 8 | time of writing, milliseconds since 1970 |
| 96 | 16 | reserved, zeros |
| 112 | 16 | xxh3-128 of the bytes 0..111, big-endian |

and zeros up to the header length.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

HEADER_FIELDS = 128


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page object taken apart."""

    key: bytes
    payload: bytes
    header_length: int
    created_ms: int


def _checksum(data: bytes) -> bytes:
    return xxhash.xxh3_128_intdigest(data).to_bytes(16, "big")


def read_page_object(stored: bytes) -> StoredPage:
    """Take a page object apart. Raises ValueError with what is wrong, also when the payload checksum is missing."""
    if len(stored) < HEADER_FIELDS:
        raise ValueError(f"only {len(stored)} bytes")
    if stored[0:8] != b"HICACHEX":
        raise ValueError(f"magic {stored[0:8]!r}")
    if stored[112:128] != _checksum(stored[0:112]):
        raise ValueError("header checksum")
    if stored[8:10] != b"\x01\x00":
        raise ValueError(f"version {stored[8:10].hex()}")
    if stored[10:12] != b"\x01\x00":
        raise ValueError(f"flags {stored[10:12].hex()}")
    header_length = int.from_bytes(stored[12:16], "little")
    if not HEADER_FIELDS <= header_length <= 65536 or any(stored[HEADER_FIELDS:header_length]):
        raise ValueError(f"header length {header_length}")
    if any(stored[96:112]):
        raise ValueError("reserved bytes")
    payload = stored[header_length:]
    if len(payload) != int.from_bytes(stored[64:72], "little"):
        raise ValueError(f"payload of {len(payload)} bytes")
    if stored[72:88] != _checksum(payload):
        raise ValueError("payload checksum")
    return StoredPage(stored[16:64], payload, header_length, int.from_bytes(stored[88:96], "little"))


def write_page_object(
    key: bytes,
    payload: bytes,
    *,
    header_length: int = HEADER_FIELDS,
    created_ms: int = 1_700_000_000_000,
    version: int = 1,
    flags: int = 1,
    payload_length: int | None = None,
    payload_checksum: bytes | None = None,
    header_length_field: int | None = None,
) -> bytes:
    """A page object; the keywords from ``version`` on make a wrong one whose header checksum holds all the same."""
    fields = b"".join(
        (
            b"HICACHEX",
            version.to_bytes(2, "little"),
            flags.to_bytes(2, "little"),
            (header_length if header_length_field is None else header_length_field).to_bytes(4, "little"),
            key,
            (len(payload) if payload_length is None else payload_length).to_bytes(8, "little"),
            _checksum(payload) if payload_checksum is None else payload_checksum,
            created_ms.to_bytes(8, "little"),
            bytes(16),
        )
    )
    return (fields + _checksum(fields)).ljust(header_length, b"\0") + payload

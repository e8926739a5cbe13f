"""The header in front of a transformed page's body: the transforms that were applied, and the original length.

    header (80) | body | tag (16, sealed pages only) | zeros up to the stored length

docs/page-format.md specifies the bytes. Pure; any thread.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from hicache_ext.errors import FormatError

MAGIC = b"HICAXFRM"
FORMAT_VERSION = 2

# magic, version, codec, seal, cipher, reserved, payload_length, body_length, key id, salt, reserved
_FIELDS = struct.Struct("<8sHBBB3sQQ16s24s8s")
HEADER_LENGTH = _FIELDS.size
assert HEADER_LENGTH == 80
TAG_LENGTH = 16
SALT_LENGTH = 24
KEY_ID_LENGTH = 16
"""Most bytes of a key's id."""
SHORTEST_SECRET = 32
"""Fewest characters of a key: 128 bits if they are hex digits."""
RAW = 0
"""Codec number of pages without a codec."""
CODEC_NUMBERS = {"lossless": 1, "int8": 2, "fp8": 3}
"""Numbers of the codecs (codec.py)."""
LOSSY_CODECS = ("int8", "fp8")
"""Codecs that change pages. Labels begin with these names."""


class Header(NamedTuple):
    """The fields in front of a body."""

    codec: int
    """``RAW``, or one of ``CODEC_NUMBERS``."""
    seal: int
    """0: none, 1: authenticated, 2: encrypted (sealing.py)."""
    cipher: int
    """0: none, 1: AES-256-GCM, 2: ChaCha20-Poly1305."""
    payload_length: int
    body_length: int
    key_id: bytes = b""
    salt: bytes = bytes(SALT_LENGTH)

    def encode(self) -> bytes:
        return _FIELDS.pack(
            *(MAGIC, FORMAT_VERSION, self.codec, self.seal, self.cipher, b"", self.payload_length, self.body_length),
            *(self.key_id, self.salt, b""),
        )

    @property
    def body_end(self) -> int:
        return HEADER_LENGTH + self.body_length

    @property
    def end(self) -> int:
        """Return the offset at which the zeros begin."""
        return self.body_end + (TAG_LENGTH if self.seal else 0)


def decode(stored: memoryview) -> Header:
    """Decode the header of a stored page and check its lengths against each other and against the stored bytes.

    Raises FormatError with the reasons ``transform`` (not such a header), ``transform_version`` and
    ``transform_length``."""
    if stored.nbytes < HEADER_LENGTH:
        raise FormatError("transform")
    magic, version, codec, seal, cipher, _, payload, body, key_id, salt, _ = _FIELDS.unpack_from(stored)
    if magic != MAGIC:
        raise FormatError("transform")
    if version != FORMAT_VERSION:
        raise FormatError("transform_version", f"version {version}, this reader knows {FORMAT_VERSION}")
    header = Header(codec, seal, cipher, payload, body, key_id.rstrip(b"\0"), salt)
    if header.end > stored.nbytes or (codec == RAW and body != payload):
        raise FormatError("transform_length")
    # Check all bytes: those behind the page and reserved ones must be zeros.
    # Compare as bytes, because comparing a memoryview element by element takes fifty times as long.
    padding = bytes(stored[header.end :])
    if header.encode() != bytes(stored[:HEADER_LENGTH]) or padding != bytes(len(padding)):
        raise FormatError("transform_length", "bytes that are to be zero")
    return header


def is_key_id(text: str) -> bool:
    """Return whether ``text`` is valid as the id of a key, which appears in headers, logs and documents."""
    return (
        1 <= len(text) <= KEY_ID_LENGTH
        and text.isascii()
        and all(letter.isalnum() or letter in "-_." for letter in text)
    )

"""Packs: neighbouring pages of one identity and one size, stored as one object or file; a large page is alone in one.

``docs/page-format.md`` specifies the bytes. A pack is ``page || page || ... || footer``. Each page is a page object,
header and payload, and verifies itself. Page ``i`` begins at ``i`` times the bytes of a page, so a reader needs no
footer: the footer tells tools the whole keys, and that a pack is not cut.

The name of a pack is its index: it says how many pages it has, their size, and a short digest of each page hash. Who
lists names knows what is stored. Another page may have the same digest: the key in the page's header decides.

A page of a pack is taken away by a *tombstone*, an empty object whose name says which pages are dead.

Everything here is pure: no I/O, any thread.
"""

from __future__ import annotations

import re
import secrets
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page.page_object import HEADER_LENGTH, gather

SMALL, LARGEST_PAGE = 4 << 20, 512 << 20
"""Bytes of a stored page: below the first they share a pack, others are alone in one, up to the second."""
PACK_BYTES = 4 << 20
"""A pack has about so many bytes of pages."""
MOST_PAGES = 64
"""Of a pack: names of objects have 1,024 bytes at most."""
HASH_BYTES = 6
"""Of the digest of a page hash in a name: among ten million pages, one absent page in 28 million is taken for one of
them until it is read."""
HASHES_IN_A_COMPONENT = 24
"""Of a name; a component of a path has 255 bytes at most."""

_HASH_LETTERS = HASH_BYTES * 4 // 3
_COMPONENT = _HASH_LETTERS * HASHES_IN_A_COMPONENT
_ID = r"[0-9a-f]{11}-[0-9a-f]{10}"
ID_LENGTH = 22
_PACK = re.compile(rf"({_ID})-([1-9][0-9]?)x([1-9][0-9]{{2,8}})-([A-Za-z0-9_/-]+)\.pack", re.ASCII)
_TOMBSTONE = re.compile(rf"({_ID})-({_ID})-([0-9a-f]{{16}})\.dead", re.ASCII)

MAGIC = b"HICAPACK"
FORMAT_VERSION = 1
# magic, version, reserved, count, bytes of a page, identity, reserved; then XXH3-128 of all that stands before it
_FOOTER_END = struct.Struct("<8sHHIQ16s8s")
_CHECKSUM_LENGTH = 16
FOOTER_END_LENGTH = _FOOTER_END.size + _CHECKSUM_LENGTH
"""Bytes at the end of a pack that say how long its footer is."""


def new_id(milliseconds: int, after: str | None = None) -> str:
    """A name for a pack or a tombstone that nobody else has: ids of later times are greater.

    ``milliseconds`` since 1970, by a clock that all writers share. ``after``: it is greater than this one, too.
    """
    if after is not None:
        milliseconds = max(milliseconds, milliseconds_of(after) + 1)
    return f"{milliseconds:011x}-{secrets.token_hex(5)}"


def milliseconds_of(id: str) -> int:
    """When an id was made, milliseconds since 1970."""
    return int(id[:11], 16)


def short_hash(key: bytes) -> bytes:
    """What a name says of the page ``key``. A digest: leading bytes would do for SHA-256, and not for other keys."""
    return xxhash.xxh3_64_digest(key[envelope.IDENTITY_LENGTH :])[:HASH_BYTES]


def short_numbers(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """The ``short_hash`` of each key, as a number."""
    digests = b"".join([xxhash.xxh3_64_digest(key[envelope.IDENTITY_LENGTH :]) for key in keys])
    return (np.frombuffer(digests, ">u8") >> 8 * (8 - HASH_BYTES)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Pack:
    """What the name of a pack says."""

    id: str
    page_bytes: int
    """Of a stored page: header and payload."""
    hashes: bytes
    """The ``short_hash`` of each page, concatenated."""

    @classmethod
    def of_keys(cls, id: str, page_bytes: int, keys: Sequence[bytes]) -> Pack:
        return cls(id, page_bytes, b"".join(map(short_hash, keys)))

    @property
    def count(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def numbers(self) -> list[int]:
        """Its ``hashes`` as ``short_numbers``."""
        wide = np.zeros((self.count, 8), np.uint8)
        wide[:, -HASH_BYTES:] = np.frombuffer(self.hashes, np.uint8).reshape(-1, HASH_BYTES)
        numbers: list[int] = wide.view(">i8").ravel().tolist()
        return numbers

    @property
    def all_dead(self) -> int:
        """The mask of a tombstone for every page."""
        return (1 << self.count) - 1

    @property
    def name(self) -> str:
        """With a slash after every ``HASHES_IN_A_COMPONENT`` hashes: each part fits into a component of a path."""
        text = urlsafe_b64encode(self.hashes).decode()
        parts = "/".join(text[begin : begin + _COMPONENT] for begin in range(0, len(text), _COMPONENT))
        return f"{self.id}-{self.count}x{self.page_bytes}-{parts}.pack"


def parse_pack(name: str) -> Pack | None:
    """The pack of this name; None for any other name."""
    found = _PACK.fullmatch(name)
    if found is None:
        return None
    count, page_bytes, letters = int(found[2]), int(found[3]), found[4].replace("/", "")
    largest = LARGEST_PAGE if count == 1 else SMALL - 1
    if len(letters) != count * _HASH_LETTERS or not HEADER_LENGTH <= page_bytes <= largest or count > MOST_PAGES:
        return None
    pack = Pack(found[1], page_bytes, urlsafe_b64decode(letters))
    return pack if pack.name == name else None


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What the name of a tombstone says: some pages of a pack are dead."""

    id: str
    pack: str
    """The pack's id."""
    mask: int
    """Bit ``i``: page ``i``."""

    @property
    def name(self) -> str:
        return f"{self.id}-{self.pack}-{self.mask:016x}.dead"


def parse_tombstone(name: str) -> Tombstone | None:
    """The tombstone of this name; None for any other name."""
    found = _TOMBSTONE.fullmatch(name)
    return Tombstone(found[1], found[2], int(found[3], 16)) if found else None


def portions(page_bytes: Sequence[int], most_pages: int = MOST_PAGES, pack_bytes: int = PACK_BYTES) -> list[list[int]]:
    """Which pages of a batch make a pack each: positions, in order. ``page_bytes``: of each stored page.

    Pages of one size, about ``pack_bytes`` a pack, at most ``most_pages``, and packs of one size of about as many.
    """
    alike: dict[int, list[int]] = {}
    for position, size in enumerate(page_bytes):
        alike.setdefault(size, []).append(position)
    found: list[list[int]] = []
    for size, positions in alike.items():
        most = min(most_pages, max(1, (pack_bytes + size // 2) // size))
        packs = -(-len(positions) // most)
        for number in range(packs):
            begin, end = (len(positions) * edge // packs for edge in (number, number + 1))
            found.append(positions[begin:end])
    return found


def pack_length(count: int, page_bytes: int) -> int:
    """Bytes of a whole pack, footer included."""
    return count * page_bytes + count * envelope.PAGE_HASH_LENGTH + FOOTER_END_LENGTH


def gather_pages(pages: Sequence[Sequence[memoryview]]) -> memoryview:
    """Memory for a pack of these pages with their payloads in it; ``seal_pack`` writes what else it has.

    Apart, so that the checksums are computed after the pages were let go of: they are of the copy.
    """
    page_bytes = HEADER_LENGTH + sum([segment.nbytes for segment in pages[0]])
    whole = np.empty(pack_length(len(pages), page_bytes), np.uint8).data
    for number, segments in enumerate(pages):
        gather(segments, whole[number * page_bytes + HEADER_LENGTH : (number + 1) * page_bytes])
    return whole


def seal_pack(whole: memoryview, keys: Sequence[bytes]) -> memoryview:
    """Write headers and footer around the payloads of ``gather_pages``; the pack."""
    page_bytes = (whole.nbytes - pack_length(len(keys), 0)) // len(keys)
    for number, key in enumerate(keys):
        page = whole[number * page_bytes : (number + 1) * page_bytes]
        page[:HEADER_LENGTH] = envelope.encode_header(key, [page[HEADER_LENGTH:]])
    footer = encode_footer(keys, page_bytes)
    whole[whole.nbytes - len(footer) :] = footer
    return whole


def encode_footer(keys: Sequence[bytes], page_bytes: int) -> bytes:
    """What stands behind the pages of a pack."""
    identity = keys[0][: envelope.IDENTITY_LENGTH]
    table = b"".join([key[envelope.IDENTITY_LENGTH :] for key in keys])
    fields = table + _FOOTER_END.pack(MAGIC, FORMAT_VERSION, 0, len(keys), page_bytes, identity, bytes(8))
    return fields + xxhash.xxh3_128_digest(fields)


def decode_footer(footer: bytes | memoryview) -> tuple[list[bytes], int]:
    """The keys of the pages of a pack, in order, and the bytes of a page. Raises FormatError."""
    whole, length = bytes(footer), envelope.PAGE_HASH_LENGTH
    if len(whole) < FOOTER_END_LENGTH:
        raise FormatError("short_footer", f"{len(whole)} bytes")
    magic, version, _, count, page_bytes, identity, _ = _FOOTER_END.unpack_from(whole, len(whole) - FOOTER_END_LENGTH)
    if magic != MAGIC:
        raise FormatError("magic")
    if version != FORMAT_VERSION:
        raise FormatError("version", f"version {version}, this reader knows {FORMAT_VERSION}")
    if not 1 <= count <= MOST_PAGES:
        raise FormatError("count", str(count))
    if len(whole) != count * length + FOOTER_END_LENGTH:
        raise FormatError("short_footer", f"{len(whole)} bytes")
    if whole[-_CHECKSUM_LENGTH:] != xxhash.xxh3_128_digest(whole[:-_CHECKSUM_LENGTH]):
        raise FormatError("footer_checksum")
    return [identity + whole[number * length : (number + 1) * length] for number in range(count)], page_bytes

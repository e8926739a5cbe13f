"""Packs: neighbouring pages of one identity and one size, stored as one object or file; a large page is alone in one.

``docs/page-format.md`` specifies the bytes. A pack is ``page || page || ... || footer``. Each page is a page object,
header and payload, and verifies itself. Page ``i`` begins at ``i`` times the size of a page, so readers need no footer:
the footer tells tools the full keys, and that a pack is not truncated.

The name of a pack is its index: it contains the number of pages, their size, and a short digest of each page hash, so
listing names shows what is stored. Another page may have the same digest: the key in the page's header decides.

A *tombstone* removes pages of a pack: an empty object whose name tells which pages are dead.

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
"""Sizes of stored pages in bytes: pages below the first share packs; others, up to the second, are alone in one."""
PACK_BYTES = 4 << 20
"""Approximate bytes of pages in a pack."""
MOST_PAGES = 64
"""Most pages of a pack, because names of objects have at most 1,024 bytes."""
HASH_BYTES = 6
"""Bytes of a page hash's digest in a name: among ten million pages, one absent page in 28 million is mistaken for one
of them until it is read."""
HASHES_IN_A_COMPONENT = 24
"""Hashes in a component of a name, because a path component has at most 255 bytes."""

_HASH_LETTERS = HASH_BYTES * 4 // 3
_COMPONENT = _HASH_LETTERS * HASHES_IN_A_COMPONENT
_ID = r"[0-9a-f]{11}-[0-9a-f]{10}"
ID_LENGTH = 22
_PACK = re.compile(rf"({_ID})-([1-9][0-9]?)x([1-9][0-9]{{2,8}})-([A-Za-z0-9_/-]+)\.pack", re.ASCII)
_TOMBSTONE = re.compile(rf"({_ID})-({_ID})-([0-9a-f]{{16}})\.dead", re.ASCII)

MAGIC = b"HICAPACK"
FORMAT_VERSION = 1
# magic, version, reserved, count, bytes of a page, identity, reserved; then XXH3-128 of everything before it
_FOOTER_END = struct.Struct("<8sHHIQ16s8s")
_CHECKSUM_LENGTH = 16
FOOTER_END_LENGTH = _FOOTER_END.size + _CHECKSUM_LENGTH
"""Length of the fixed end of a pack, which determines the length of its footer."""


def new_id(milliseconds: int, after: str | None = None) -> str:
    """Return a unique id for a pack or a tombstone; ids made later are greater.

    ``milliseconds``: since 1970, by a clock that all writers share. ``after``: the id is also greater than this one.
    """
    if after is not None:
        milliseconds = max(milliseconds, milliseconds_of(after) + 1)
    return f"{milliseconds:011x}-{secrets.token_hex(5)}"


def milliseconds_of(id: str) -> int:
    """Return the time when an id was made, in milliseconds since 1970."""
    return int(id[:11], 16)


def short_hash(key: bytes) -> bytes:
    """Return the digest of ``key`` in a pack's name. Leading bytes would do for SHA-256, but not for other keys."""
    return xxhash.xxh3_64_digest(key[envelope.IDENTITY_LENGTH :])[:HASH_BYTES]


def short_numbers(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the ``short_hash`` of each key as a number."""
    digests = b"".join([xxhash.xxh3_64_digest(key[envelope.IDENTITY_LENGTH :]) for key in keys])
    return (np.frombuffer(digests, ">u8") >> 8 * (8 - HASH_BYTES)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Pack:
    """The contents of a pack, as its name tells them."""

    id: str
    page_bytes: int
    """Bytes of a stored page: header and payload."""
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
        """Return the ``hashes`` as numbers, like ``short_numbers``."""
        wide = np.zeros((self.count, 8), np.uint8)
        wide[:, -HASH_BYTES:] = np.frombuffer(self.hashes, np.uint8).reshape(-1, HASH_BYTES)
        numbers: list[int] = wide.view(">i8").ravel().tolist()
        return numbers

    @property
    def all_dead(self) -> int:
        """Return the mask of a tombstone for all pages."""
        return (1 << self.count) - 1

    @property
    def name(self) -> str:
        """Return the name, with a slash after every ``HASHES_IN_A_COMPONENT`` hashes to fit path components."""
        text = urlsafe_b64encode(self.hashes).decode()
        parts = "/".join(text[begin : begin + _COMPONENT] for begin in range(0, len(text), _COMPONENT))
        return f"{self.id}-{self.count}x{self.page_bytes}-{parts}.pack"


def parse_pack(name: str) -> Pack | None:
    """Return the pack of this name, or None if it is not a pack's name."""
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
    """A tombstone, as its name describes it: some pages of a pack are dead."""

    id: str
    pack: str
    """The pack's id."""
    mask: int
    """Bit ``i`` is set if page ``i`` is dead."""

    @property
    def name(self) -> str:
        return f"{self.id}-{self.pack}-{self.mask:016x}.dead"


def parse_tombstone(name: str) -> Tombstone | None:
    """Return the tombstone of this name, or None if it is not a tombstone's name."""
    found = _TOMBSTONE.fullmatch(name)
    return Tombstone(found[1], found[2], int(found[3], 16)) if found else None


def portions(page_bytes: Sequence[int], most_pages: int = MOST_PAGES, pack_bytes: int = PACK_BYTES) -> list[list[int]]:
    """Divide the pages of a batch, stored with ``page_bytes`` each, into packs; return the positions in each, in order.

    A pack has pages of one size, about ``pack_bytes`` in total, and at most ``most_pages``. Packs of one page size have
    about the same number of pages."""
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
    """Return the bytes of a whole pack, including the footer."""
    return count * page_bytes + count * envelope.PAGE_HASH_LENGTH + FOOTER_END_LENGTH


def gather_pages(pages: Sequence[Sequence[memoryview]]) -> memoryview:
    """Return memory for a pack of these pages, with their payloads in it; ``seal_pack`` writes the rest.

    The steps are separate so that checksums, which cover the copy, are computed after the pages were released.
    """
    page_bytes = HEADER_LENGTH + sum([segment.nbytes for segment in pages[0]])
    whole = np.empty(pack_length(len(pages), page_bytes), np.uint8).data
    for number, segments in enumerate(pages):
        gather(segments, whole[number * page_bytes + HEADER_LENGTH : (number + 1) * page_bytes])
    return whole


def seal_pack(whole: memoryview, keys: Sequence[bytes]) -> memoryview:
    """Write headers and footer around the payloads of ``gather_pages`` and return the pack."""
    page_bytes = (whole.nbytes - pack_length(len(keys), 0)) // len(keys)
    for number, key in enumerate(keys):
        page = whole[number * page_bytes : (number + 1) * page_bytes]
        page[:HEADER_LENGTH] = envelope.encode_header(key, [page[HEADER_LENGTH:]])
    footer = encode_footer(keys, page_bytes)
    whole[whole.nbytes - len(footer) :] = footer
    return whole


def encode_footer(keys: Sequence[bytes], page_bytes: int) -> bytes:
    """Return the footer, which follows the pages of a pack."""
    identity = keys[0][: envelope.IDENTITY_LENGTH]
    table = b"".join([key[envelope.IDENTITY_LENGTH :] for key in keys])
    fields = table + _FOOTER_END.pack(MAGIC, FORMAT_VERSION, 0, len(keys), page_bytes, identity, bytes(8))
    return fields + xxhash.xxh3_128_digest(fields)


def decode_footer(footer: bytes | memoryview) -> tuple[list[bytes], int]:
    """Return the keys of the pages of a pack, in order, and the bytes of a page. Raises FormatError."""
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

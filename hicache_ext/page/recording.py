"""The file format of recordings: the pages that requests asked storage for, and the tiers that had them. See
docs/plan.md.

A file is ``MAGIC`` and blocks; a block is its length and CRC-32 (little-endian, 32 bits each) and that many bytes. The
first block is JSON, the *header*; each of the others holds whole entries. A file ends where a block is short or
damaged: everything before it is good, even after kill -9.

A page is identified by 8 bytes of a keyed hash of its page hash. A page hash covers all tokens up to its page, so pages
form a tree: an entry names the deepest page already in the file (its number + 1, or 0) and only the pages after it.
An entry, little-endian: microseconds since ``started`` of the header (8 bytes); then 4 bytes each: prompt tokens,
matched tokens (2^32 - 1: unknown), pages requested, pages answered, the deepest page, number of new pages, number of
tiers, pages that each tier had; then 8 bytes for the name of each new page, which gets the next number.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import RecordingError
from hicache_ext.runtime.whole_file import json_in, number_of

VERSION: Final = 1
SUFFIX: Final = ".hxrec"
MAGIC: Final = b"HXREC\0\0" + bytes([VERSION])
MOST_TOKENS: Final = 1 << 31
"""Most tokens of a page or a prompt."""
UNKNOWN: Final = 0xFFFFFFFF
"""Value for an unknown length."""
SALT_BYTES: Final = 16
_PAGE_BYTES: Final = 8
_BLOCK = struct.Struct("<II")
_ENTRY = struct.Struct("<Q7I")
_LONGEST_BLOCK: Final = 64 << 20
_REMEMBERED_PAGES: Final = 1 << 16
"""Pages whose number an encoder remembers; older ones are written again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The pages that one request asked for. ``pages``: page hashes in hexadecimal, the requested ones last."""

    seconds: float
    """Seconds since the recording began."""
    pages: Sequence[str]
    asked: int
    """Number of ``pages`` requested from storage; the entry before them, if any, is the preceding page."""
    answered: int
    """Number of leading pages that storage reported as present."""
    found: Mapping[str, int]
    """Tier -> number of pages it had, nearest tiers first."""
    prompt: int | None = None
    """Tokens of the prompt."""
    matched: int | None = None
    """Tokens of the prompt that were on the device or in host memory."""


class Encoder:
    """Encodes the entries of one file. Not thread-safe."""

    def __init__(self, salt: bytes, tiers: Sequence[str]) -> None:
        self._salt = salt
        self.tiers = tuple(tiers)
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._pages = 0

    def header(self, started: float, facts: Mapping[str, Any]) -> bytes:
        """Return the beginning of a file. ``started``: seconds since 1970."""
        document = {
            "version": VERSION,
            "started": started,
            "tiers": list(self.tiers),
            "salt": hashlib.blake2b(self._salt, digest_size=4).hexdigest(),
            **facts,
        }
        return MAGIC + block(json.dumps(document).encode())

    def entry(self, asked: Asked) -> bytes:
        names = [
            hashlib.blake2b(page.encode(), key=self._salt, digest_size=_PAGE_BYTES).digest() for page in asked.pages
        ]
        known = self._known
        first = len(names)
        while first and names[first - 1] not in known:
            first -= 1
        parent = known[names[first - 1]] + 1 if first else 0
        for name in names[first:]:
            known[name] = self._pages
            self._pages += 1
        while len(known) > _REMEMBERED_PAGES:
            known.popitem(last=False)
        fixed = _ENTRY.pack(
            round(max(0.0, asked.seconds) * 1e6),
            _or_unknown(asked.prompt),
            _or_unknown(asked.matched),
            asked.asked,
            asked.answered,
            parent,
            len(names) - first,
            len(self.tiers),
        )
        counts = struct.pack(f"<{len(self.tiers)}I", *(asked.found.get(tier, 0) for tier in self.tiers))
        return fixed + counts + b"".join(names[first:])


def block(payload: bytes) -> bytes:
    return _BLOCK.pack(len(payload), zlib.crc32(payload)) + payload


def _or_unknown(tokens: int | None) -> int:
    return UNKNOWN if tokens is None else min(max(0, tokens), UNKNOWN - 1)


@dataclass(slots=True, eq=False)
class Entry:
    """One request of a recording that was read. ``found`` is in the order of the header's tiers. The chain is built on
    access, because all chains together may be far larger than their file."""

    moment: float
    """Seconds since 1970."""
    before: Entry | None = field(repr=False)
    """An earlier entry whose chain begins like this one."""
    known: int
    """Number of pages shared with the chain of ``before``."""
    names: npt.NDArray[np.uint64]
    """The salted names of the pages after those."""
    asked: int
    answered: int
    found: tuple[int, ...]
    prompt: int | None
    matched: int | None

    @property
    def length(self) -> int:
        """Return the number of pages in the chain."""
        return self.known + len(self.names)

    @property
    def chain(self) -> npt.NDArray[np.uint64]:
        """Return the salted names of the chain, from the first page known to the file to the last."""
        pieces: list[npt.NDArray[np.uint64]] = []
        entry, left = self, self.length
        while True:
            pieces.append(entry.names[: max(0, left - entry.known)])
            left = min(left, entry.known)
            if entry.before is None:
                return np.concatenate(pieces[::-1])
            entry = entry.before


def read_file(path: Path) -> tuple[dict[str, Any], list[Entry], bool]:
    """Return the header as checked by ``_header``, the entries, and whether the file ends at the end of a block.
    Raises RecordingError if it is not a recording, and OSError."""
    entries: list[Entry] = []
    with path.open("rb") as file:
        if (magic := file.read(len(MAGIC))) != MAGIC:
            if magic[:-1] == MAGIC[:-1]:
                raise RecordingError(path, f"is of version {magic[-1]}, and this release reads version {VERSION}")
            if not MAGIC.startswith(magic):
                raise RecordingError(path, "is no recording")
        blocks = _blocks(file)
        try:
            text = next(blocks)
        except (StopIteration, ValueError):
            # The writer was killed before the header was complete.
            return {"tiers": [], "started": 0.0, "salt": "", "page_size": 0}, entries, False
        header = _header(text, path)
        try:
            entries.extend(_entries(blocks, header["started"], len(header["tiers"])))
        except (ValueError, IndexError, struct.error):
            return header, entries, False
    return header, entries, True


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the payload of each block. Raises ValueError at the first block that is short or damaged."""
    while head := file.read(_BLOCK.size):
        length, checksum = _BLOCK.unpack(head.ljust(_BLOCK.size, b"\xff"))
        payload = file.read(length) if length <= _LONGEST_BLOCK else b""
        if len(head) < _BLOCK.size or len(payload) != length or zlib.crc32(payload) != checksum:
            raise ValueError("a block that was not written whole")
        yield payload


def _header(text: bytes, path: Path) -> dict[str, Any]:
    """Return the checked header. Raises RecordingError if a field is missing or invalid."""
    try:
        header = json_in(text)
        started, tiers = number_of(header["started"]), header["tiers"]
    except (ArithmeticError, ValueError, TypeError, KeyError):
        raise RecordingError(path, "has a header that says nothing") from None
    if not isinstance(tiers, list) or not all(isinstance(name, str) for name in tiers):
        raise RecordingError(path, "has a header whose tiers are no list of names")
    salt, page_size = header.setdefault("salt", ""), header.setdefault("page_size", 0) or 0
    if not isinstance(salt, str):
        raise RecordingError(path, "has a header whose salt is no text")
    if not isinstance(page_size, int) or isinstance(page_size, bool) or not 0 <= page_size <= MOST_TOKENS:
        problem = f"has a header whose page_size is no whole number from 1 to {MOST_TOKENS}"
        raise RecordingError(path, problem)
    return {**header, "started": started, "page_size": page_size}


def _entries(blocks: Iterator[bytes], started: float, tiers: int) -> Iterator[Entry]:
    makers: list[Entry] = []
    """Entries with new pages; ``firsts`` has the numbers of their first new pages."""
    firsts: list[int] = []
    pages = 0
    for payload in blocks:
        at = 0
        while at < len(payload):
            microseconds, prompt, matched, asked, answered, parent, fresh, counts = _ENTRY.unpack_from(payload, at)
            at += _ENTRY.size
            if counts != tiers or parent > pages:
                raise ValueError("another file's entry")
            found = struct.unpack_from(f"<{counts}I", payload, at)
            at += 4 * counts
            names = np.frombuffer(payload, "<u8", fresh, at)
            at += _PAGE_BYTES * fresh
            before, known = None, 0
            if parent:
                maker = bisect_left(firsts, parent) - 1
                before, known = makers[maker], makers[maker].known + parent - firsts[maker]
            if asked > known + fresh:
                raise ValueError("more asked for than there is")
            entry = Entry(
                started + microseconds / 1e6,
                before,
                known,
                names,
                asked,
                answered,
                found,
                None if prompt == UNKNOWN else prompt,
                None if matched == UNKNOWN else matched,
            )
            if fresh:
                makers.append(entry)
                firsts.append(pages)
                pages += fresh
            yield entry

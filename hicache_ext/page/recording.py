"""The file format of recordings: what requests asked storage for, and where it was found. See docs/plan.md.

A file is ``MAGIC`` and blocks; a block is its length and CRC-32 (little-endian, 32 bits each) and that many bytes. The
first block is JSON, the *header*; each other one holds whole entries. A file ends where a block is short or damaged:
what came before it is good, also after kill -9.

Pages are told by 8 bytes of a keyed hash of their page hash. A page hash stands for all tokens up to its page, so pages
form a tree: an entry names the deepest page that the file had before (its number + 1, or 0) and only those that follow.

An entry, little-endian: microseconds since ``started`` of the header (8 bytes); then 4 bytes each: tokens of the
prompt, matched tokens (2^32 - 1: not known), pages asked for, pages answered, the deepest page, how many new pages, how
many tiers, what each tier had; 8 bytes for the name of each new page, which gets the next number.
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
"""Of a page or a prompt."""
UNKNOWN: Final = 0xFFFFFFFF
"""Stands for a length that nobody knew."""
SALT_BYTES: Final = 16
_PAGE_BYTES: Final = 8
_BLOCK = struct.Struct("<II")
_ENTRY = struct.Struct("<Q7I")
_LONGEST_BLOCK: Final = 64 << 20
_REMEMBERED_PAGES: Final = 1 << 16
"""Pages that an encoder knows the number of; older ones are written again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asked for. ``pages``: page hashes in hexadecimal, the asked ones last."""

    seconds: float
    """Since the recording began."""
    pages: Sequence[str]
    asked: int
    """How many of ``pages`` storage was asked for; what stands before is the page before them, where there is one."""
    answered: int
    """How many leading pages storage said it has."""
    found: Mapping[str, int]
    """Tier -> how many of them it had, nearest tiers first."""
    prompt: int | None = None
    """Tokens of the prompt."""
    matched: int | None = None
    """Tokens of it that were on the device or in host memory."""


class Encoder:
    """Entries of one file as bytes. Not thread-safe."""

    def __init__(self, salt: bytes, tiers: Sequence[str]) -> None:
        self._salt = salt
        self.tiers = tuple(tiers)
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._pages = 0

    def header(self, started: float, facts: Mapping[str, Any]) -> bytes:
        """The beginning of a file. ``started``: seconds since 1970."""
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
    """One request of a recording that was read. ``found`` is in the order of the header's tiers. Its chain is made when
    it is asked for: all together may be far larger than their file."""

    moment: float
    """Seconds since 1970."""
    before: Entry | None = field(repr=False)
    """An earlier one, whose chain begins as this one does."""
    known: int
    """By so many pages."""
    names: npt.NDArray[np.uint64]
    """The salted pages that follow."""
    asked: int
    answered: int
    found: tuple[int, ...]
    prompt: int | None
    matched: int | None

    @property
    def length(self) -> int:
        """Of the chain."""
        return self.known + len(self.names)

    @property
    def chain(self) -> npt.NDArray[np.uint64]:
        """Salted pages from the first that the file knows of to the last."""
        pieces: list[npt.NDArray[np.uint64]] = []
        entry, left = self, self.length
        while True:
            pieces.append(entry.names[: max(0, left - entry.known)])
            left = min(left, entry.known)
            if entry.before is None:
                return np.concatenate(pieces[::-1])
            entry = entry.before


def read_file(path: Path) -> tuple[dict[str, Any], list[Entry], bool]:
    """Return the header, with what ``_header`` checks of it, the entries, and whether the file ends where a block does.
    Raises RecordingError for what is no recording, OSError."""
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
            # Killed before the header was whole.
            return {"tiers": [], "started": 0.0, "salt": "", "page_size": 0}, entries, False
        header = _header(text, path)
        try:
            entries.extend(_entries(blocks, header["started"], len(header["tiers"])))
        except (ValueError, IndexError, struct.error):
            return header, entries, False
    return header, entries, True


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield payloads. Raises ValueError at the first block that is short or damaged."""
    while head := file.read(_BLOCK.size):
        length, checksum = _BLOCK.unpack(head.ljust(_BLOCK.size, b"\xff"))
        payload = file.read(length) if length <= _LONGEST_BLOCK else b""
        if len(head) < _BLOCK.size or len(payload) != length or zlib.crc32(payload) != checksum:
            raise ValueError("a block that was not written whole")
        yield payload


def _header(text: bytes, path: Path) -> dict[str, Any]:
    """Raises RecordingError for one with a field that is none."""
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
    """Those with new pages, and the numbers of their first ones."""
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

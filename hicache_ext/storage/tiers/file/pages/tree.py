"""Reads a directory of page files, for stores and tools: names, counts, keys, identities. Changes are in directory.py.

::

    PATH/pages/<identity>/<bucket>/<pack>.pack          small pages that were written together (page/pack.py)
    PATH/pages/<identity>/<bucket>/<pack>.<mask>.pack   the same with dead pages: bit ``i`` is page ``i``
    PATH/pages/<identity>/<2 hex>/<hash>.page           a page alone: a pack of one without a footer, since its name is
                                                        its key

The name of a file says which pages it holds, so that a listing of names is enough to find them. A bucket is a directory
for some hundred packs, named by its creation time. To remove a page from a pack, the pack is renamed. The name of a
page alone follows from its key: it is found without a listing, and the first of two writers wins.

This module creates, changes and locks nothing: read permission is enough.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page import pack as packs
from hicache_ext.page.envelope import IDENTITY_LENGTH, PAGE_HASH_LENGTH
from hicache_ext.page.pack import HASH_BYTES, Pack, milliseconds_of, parse_pack, short_hash
from hicache_ext.page.transforms.forms import STORED_AS
from hicache_ext.runtime.access import opened
from hicache_ext.runtime.members import living_members
from hicache_ext.runtime.whole_file import read_document, write_whole
from hicache_ext.storage.tiers.file.inspector import Inspector, StoredPage
from hicache_ext.storage.tiers.file.layouts import (
    BUCKET_NAME,
    FANOUT_NAME,
    FILES_NAME,
    IDENTITY_NAME,
    PAGE_NAME,
    TEMPORARY_FILE,
    name_in,
)
from hicache_ext.storage.tiers.file.usage import IsGone, gone_writers, no_space_since

BLOCK = 4096
"""Bytes to a multiple of which the space of a file is rounded up."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""Errors that mean that a page is absent, or that something else has the name of its directory."""
MOST_PAGES = packs.HASHES_IN_A_COMPONENT
"""Most pages of a pack in a file, whose name is one component of a path."""
_FAN_OUTS = 256
"""Directories over which the pages alone of one identity are spread."""
_PACK_SUFFIX = ".pack"
_PAGE_SUFFIX = ".page"
_MASK = re.compile(r"[1-9a-f][0-9a-f]{0,5}", re.ASCII)
_NAME_WITHOUT_HASHES = len("01234567890-0123456789-24x4194303-.ffffff.pack")
_COUNT_PARTS = 16
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""Errors of open() if a link or a socket has the name."""
_HASH_OFFSET = 32
"""Offset of the page hash in a header (docs/page-format.md)."""
_PARTS = ("model", "pool", "shard", STORED_AS)
"""Keys of an identity's document."""


def load_document(path: Path, digest: bytes) -> dict[str, Any] | None:
    """Return the facts behind an identity in the directory ``path``; None if they were not recorded.

    Also None for any other content, left by a power loss or written by others.
    """
    document = read_document(path / "identities" / f"{digest.hex()}.json")
    if document is None or not all(isinstance(document.get(part, {}), dict) for part in _PARTS):
        return None
    return document


def save_document(path: Path, digest: bytes, document: dict[str, Any]) -> None:
    """Record the facts behind an identity, if they are missing or damaged by a power loss."""
    if load_document(path, digest) is None:
        text = json.dumps(document, indent=1, sort_keys=True)
        write_whole(path / "identities" / f"{digest.hex()}.json", text)


@dataclass(frozen=True, slots=True)
class PackFile:
    """A file of pages as described by its name."""

    pack: Pack
    dead: int = 0
    """Mask of dead pages: bit ``i`` is set if page ``i`` was removed."""

    @classmethod
    def parse(cls, name: str) -> PackFile | None:
        """Parse the name of a file of pages; return None for any other name."""
        if name.endswith(_PAGE_SUFFIX):
            return cls(alone(bytes.fromhex(name[: -len(_PAGE_SUFFIX)]))) if PAGE_NAME.fullmatch(name) else None
        stem, _, mask = name.removesuffix(_PACK_SUFFIX).partition(".")
        pack = parse_pack(stem + _PACK_SUFFIX)
        if pack is None or pack.count > MOST_PAGES or not name.endswith(_PACK_SUFFIX):
            return None
        if name == pack.name:
            return cls(pack)
        dead = int(mask, 16) if _MASK.fullmatch(mask) else 0
        return cls(pack, dead) if 0 < dead < pack.all_dead else None

    @property
    def living(self) -> list[int]:
        """Positions of the pages that are not dead."""
        return [position for position in range(self.pack.count) if not self.dead >> position & 1]

    @property
    def length(self) -> int:
        """Bytes of the file; 0 if the name does not tell."""
        return file_length(self.pack.count, self.pack.page_bytes)


def alone(page_hash: bytes, page_bytes: int = 0) -> Pack:
    """Return a page alone as a pack of one. ``page_bytes`` 0: only its file tells."""
    return Pack(page_hash.hex(), page_bytes, short_hash_of(page_hash))


def is_alone(pack: Pack) -> bool:
    return len(pack.id) == 2 * PAGE_HASH_LENGTH


def file_length(count: int, page_bytes: int) -> int:
    """Return the bytes of a file of ``count`` pages."""
    return page_bytes if count == 1 else packs.pack_length(count, page_bytes)


def most_pages(directory: str | Path) -> int:
    """Return the most pages of a pack in this directory: some encrypting file systems allow only 143-byte names."""
    try:
        longest = os.pathconf(directory, "PC_NAME_MAX")
    except OSError:
        return MOST_PAGES
    return max(1, min(MOST_PAGES, (longest - _NAME_WITHOUT_HASHES) // (HASH_BYTES * 4 // 3)))


def file_name(pack: Pack, dead: int) -> str:
    """Return the name of the file of a pack with the mask ``dead`` of removed pages."""
    if is_alone(pack):
        return f"{pack.id}{_PAGE_SUFFIX}"
    return f"{pack.name[: -len(_PACK_SUFFIX)]}.{dead:x}{_PACK_SUFFIX}" if dead else pack.name


def pack_id_in(name: str) -> str:
    """Return the id in the name of a pack, valid even if the rest is damaged."""
    return name[: packs.ID_LENGTH]


def occupied(size: int) -> int:
    """Return the bytes of disk that a file of ``size`` bytes takes."""
    return -(-size // BLOCK) * BLOCK


def entries(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as listing:
            yield from (entry for entry in listing if name.fullmatch(entry.name))
    except ABSENT:
        return


def page_files(directory: str) -> Iterator[tuple[os.DirEntry[str], PackFile]]:
    """Yield the tier's files in a fan-out directory or a bucket, with their parsed names. A damaged name of a pack is
    parsed as a pack without pages: such a file is counted, evicted and cleared like others."""
    for entry in entries(directory, name_in(directory)):
        yield entry, PackFile.parse(entry.name) or PackFile(Pack(pack_id_in(entry.name), 0, b""))


def directories(directory: str | Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """Yield matching directories, but no symbolic links, which may lead to other owners' files."""
    return (entry for entry in entries(directory, name) if entry.is_dir(follow_symlinks=False))


class PageTree(Inspector):
    """The page files of one directory. Thread-safe."""

    layout = "pages"

    def __init__(self, path: Path) -> None:
        """Set up paths; read nothing yet."""
        super().__init__(path)
        self.pages_path = path / "pages"
        self._pages_text = str(self.pages_path)
        self.identities = path / "identities"
        self.temporary = path / "tmp"
        self.members_path = path / "members"

    def identity_path(self, identity: bytes) -> str:
        return f"{self._pages_text}/{identity.hex()}"

    def page_path(self, key: bytes) -> str:
        """Return the path of the page alone with this 48-byte key."""
        text = key.hex()
        page_hash = text[2 * IDENTITY_LENGTH :]
        return f"{self._pages_text}/{text[: 2 * IDENTITY_LENGTH]}/{page_hash[:2]}/{page_hash}{_PAGE_SUFFIX}"

    def known_identities(self) -> list[bytes]:
        """Return the digests of the identities with pages here."""
        return [bytes.fromhex(entry.name) for entry in directories(self.pages_path, IDENTITY_NAME)]

    def file_directories(self, name: re.Pattern[str] = FILES_NAME) -> list[str]:
        """Return the paths of all identities' directories that match ``name`` and may hold files of pages."""
        found: list[str] = []
        for identity in directories(self.pages_path, IDENTITY_NAME):
            found += [entry.path for entry in directories(identity.path, name)]
        return found

    # -- for tools -------------------------------------------------------------------------------------------------

    @property
    def no_space_since(self) -> int:
        return no_space_since(self.path)

    def pages(self) -> Iterator[StoredPage]:
        for directory in sorted(self.file_directories()):
            identity = bytes.fromhex(Path(directory).parent.name)
            for file, found in sorted((entry.path, found) for entry, found in page_files(directory)):
                try:
                    status, keys = os.lstat(file), keys_in(file, identity, found.pack)
                except ABSENT:
                    continue
                # Only its header tells when a page alone was written.
                written = None if is_alone(found.pack) else milliseconds_of(found.pack.id) / 1000
                size = status.st_size if is_alone(found.pack) else found.pack.page_bytes
                for position in found.living:
                    # Nobody can look up a page without a key.
                    if (key := keys[position]) is not None:
                        yield StoredPage(key, size, status.st_mtime, written, place=(file, found.pack, position))

    def _content(self, page: StoredPage) -> bytes | None:
        path, pack, position = page.place
        try:
            return _read_at(path, pack, position)
        except ABSENT:
            # The pack may have been renamed because another of its pages was removed.
            for entry, found in page_files(os.path.dirname(path)):
                if found.pack.id == pack.id and not found.dead >> position & 1:
                    return _read_at(entry.path, pack, position)
        return None

    def left_overs(self) -> int:
        living = set(living_members(self.members_path))
        return len(list(self.left_behind(gone_writers(self.path, living.__contains__))))

    # -- counting --------------------------------------------------------------------------------------------------

    def count_pages(self, most: int) -> int:
        """Count the pages by names: an estimate from ``most`` directories of either kind if there are more."""
        count = 0
        for kind in (FANOUT_NAME, BUCKET_NAME):
            all_directories = self.file_directories(kind)
            sample = all_directories if len(all_directories) <= most else random.sample(all_directories, most)
            count += sum(map(_count_pages, sample)) * len(all_directories) // max(1, len(sample))
        return count

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the bytes of disk that the pages under each of these hashes take, over all identities. A whole pack
        counts for its first wanted page, and each other one gets one byte, to show that it is there."""
        taken = [0] * len(hashes)
        identities = self.known_identities() if hashes else []
        positions: dict[bytes, int] = {}
        for position, page_hash in enumerate(hashes):
            positions.setdefault(short_hash_of(page_hash), position)
            for identity in identities:
                try:
                    taken[position] += occupied(os.lstat(self.page_path(identity + page_hash)).st_size)
                except ABSENT:
                    continue
        for bucket in self.file_directories(BUCKET_NAME) if hashes else ():
            for _, found in page_files(bucket):
                wanted = sorted(positions[part] for part in hashes_in(found) if part in positions)
                for number, position in enumerate(wanted):
                    taken[position] += 1 if number else occupied(found.length)
        return taken

    def occupied_parts(self) -> Iterator[tuple[float, int]]:
        """Yield the bytes of disk of all files of pages and their directories, part by part: (share of the directory
        walked by now, bytes of disk in this part).

        A part is all fan-out directories of one name, which hashes fill evenly. Every few parts, it also includes a
        part of the packs, which their ids spread evenly; that takes a walk over all names each time.
        """
        parts_per_pack_part = _FAN_OUTS // _COUNT_PARTS
        for number in range(_FAN_OUTS):
            found = 0
            for identity in directories(self.pages_path, IDENTITY_NAME):
                # Count the identity's own directory once.
                found += BLOCK * (number == 0)
                fan_out = f"{identity.path}/{number:02x}"
                if os.path.isdir(fan_out) and not os.path.islink(fan_out):
                    found += BLOCK + _accounted_bytes(fan_out)
                if number % parts_per_pack_part:
                    continue
                for bucket in directories(identity.path, BUCKET_NAME):
                    found += BLOCK * (number == 0) + _accounted_bytes(bucket.path, f"{number // parts_per_pack_part:x}")
            yield (number + 1) / _FAN_OUTS, found

    def has_pages(self, tree: Path) -> bool:
        """Return whether an identity's directory, wherever it is, holds a page or cannot be read. Stops at the first
        page."""
        try:
            found = (entry for place in directories(tree, FILES_NAME) for entry, _ in page_files(place.path))
            return any(not entry.is_dir(follow_symlinks=False) for entry in found)
        except OSError:
            return True

    def left_behind(self, is_gone: IsGone) -> Iterator[os.DirEntry[str]]:
        """Yield left-overs of dead processes in tmp/: half-written pages, trees being cleared."""
        for entry in list(entries(self.temporary, TEMPORARY_FILE)):
            with suppress(OSError):
                if is_gone(int(entry.name.partition(".")[0]), entry.stat(follow_symlinks=False).st_ctime):
                    yield entry


def hashes_in(found: PackFile) -> list[bytes]:
    """Return the short hashes of the pages that are not dead."""
    return [part for position, part in enumerate(_short_hashes(found.pack)) if not found.dead >> position & 1]


def short_hash_of(page_hash: bytes) -> bytes:
    """Return the short hash by which names identify a page hash, whatever its identity."""
    return short_hash(bytes(IDENTITY_LENGTH) + page_hash)


def keys_in(path: str, identity: bytes, pack: Pack) -> list[bytes | None]:
    """Return the keys of all pages of a pack; None for a page whose key neither the footer nor its own header tells.
    Raises OSError if the pack cannot be opened."""
    if is_alone(pack):
        return [identity + bytes.fromhex(pack.id)]
    try:
        with opened(path) as fd:
            return _keys_in_file(fd, identity, pack)
    except OSError as error:
        if error.errno in _NO_FILE:
            return [None] * pack.count
        raise


def _keys_in_file(fd: int, identity: bytes, pack: Pack) -> list[bytes | None]:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return [None] * pack.count
    begin = pack.count * pack.page_bytes
    with suppress(FormatError):
        keys, _ = packs.decode_footer(_read(fd, packs.pack_length(pack.count, pack.page_bytes) - begin, begin))
        if [short_hash(key) for key in keys] == _short_hashes(pack) and keys[0][:IDENTITY_LENGTH] == identity:
            return list(keys)
    headers = [_read(fd, envelope.FIELDS_LENGTH, n * pack.page_bytes) for n in range(pack.count)]
    # Use damaged headers, too: the name says whether these bytes are the hash.
    found = [identity + header[_HASH_OFFSET : _HASH_OFFSET + PAGE_HASH_LENGTH] for header in headers]
    return [
        key if len(key) == envelope.KEY_LENGTH and short_hash(key) == part else None
        for key, part in zip(found, _short_hashes(pack), strict=True)
    ]


def header_at(path: str, offset: int) -> tuple[bytes | None, os.stat_result | None]:
    """Return the header of a page and the status of its file; None for both if it cannot be read."""
    try:
        with opened(path) as fd:
            return os.pread(fd, envelope.FIELDS_LENGTH, offset), os.fstat(fd)
    except OSError:
        return None, None


def is_expired(created_ms: int, oldest_valid_ms: int) -> bool:
    """Return whether a page was written before ``oldest_valid_ms`` (0: none is) or is dated further ahead of now
    than that is in the past: a clock that was ahead at most doubles a page's ttl."""
    return oldest_valid_ms > 0 and not 0 <= created_ms - oldest_valid_ms <= 2 * (time.time() * 1000 - oldest_valid_ms)


def is_old(path: str, found: PackFile, status: os.stat_result, oldest_valid_ms: int) -> bool:
    """Return whether the pages of a file are expired. Never raises; returns False for an unreadable file."""
    if not oldest_valid_ms or not stat.S_ISREG(status.st_mode):
        return False
    if not is_alone(found.pack):
        return is_expired(milliseconds_of(found.pack.id), oldest_valid_ms)
    if status.st_mtime * 1000 < oldest_valid_ms:
        # The mtime is the time of the last use, which is never before the write.
        return True
    header, _ = header_at(path, 0)
    with suppress(FormatError):
        return header is not None and is_expired(envelope.decode_header(header).created_ms, oldest_valid_ms)
    return False


def _read(fd: int, length: int, offset: int) -> bytes:
    """Read bytes of a file; return none from a bad block."""
    try:
        return os.pread(fd, length, offset)
    except OSError:
        return b""


def accounted_bytes(found: PackFile, status: os.stat_result) -> int:
    """Return the bytes of disk that the account holds for a file: a pack larger than its name says was damaged."""
    return occupied(min(status.st_size, found.length or status.st_size))


def _count_pages(directory: str) -> int:
    if name_in(directory) is PAGE_NAME:
        return sum(1 for _ in entries(directory, PAGE_NAME))
    return sum(len(found.living) for _, found in page_files(directory))


def _accounted_bytes(directory: str, last_digit: str = "") -> int:
    """Return the bytes that the account holds for a directory's files, or those whose ids end in ``last_digit``."""
    total = 0
    for entry, found in page_files(directory):
        if found.pack.id.endswith(last_digit):
            with suppress(OSError):
                total += accounted_bytes(found, entry.stat(follow_symlinks=False))
    return total


def _read_at(path: str, pack: Pack, position: int) -> bytes:
    with opened(path) as fd:
        return os.pread(fd, pack.page_bytes or os.fstat(fd).st_size, position * pack.page_bytes)


def _short_hashes(pack: Pack) -> list[bytes]:
    return [pack.hashes[at : at + HASH_BYTES] for at in range(0, len(pack.hashes), HASH_BYTES)]

"""Reads the packs of one directory: names, counts, keys. Nothing here makes, changes or locks anything.

::

    PATH/packs/<identity>/<bucket>/<pack>.pack             small pages that were written together (page/pack.py)
    PATH/packs/<identity>/<bucket>/<pack>.<mask>.pack      the same with dead pages: bit ``i`` is page ``i``

The name of a pack says what is in it, so that who lists names knows which pages there are. A bucket is a directory for
some hundred packs, named by when it was made. A page of a pack is taken away by a rename of the pack.
"""

from __future__ import annotations

import errno
import os
import random
import re
import stat
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page import pack as packs
from hicache_ext.page.envelope import IDENTITY_LENGTH, PAGE_HASH_LENGTH
from hicache_ext.page.pack import HASH_BYTES, Pack, parse_pack, short_hash
from hicache_ext.storage.tiers.file.modes import BUCKET_NAME, IDENTITY_NAME, PACK_NAME
from hicache_ext.storage.tiers.file.pages.scanning import ABSENT, BLOCK, directories, entries, occupied

MOST_PAGES = packs.HASHES_IN_A_COMPONENT
"""Of a pack in a file: its name is one component of a path."""
_END = ".pack"
_NAME = re.compile(r"(.+?)(?:\.([0-9a-f]{1,6}))?\.pack")
_NAME_WITHOUT_HASHES = len("01234567890-0123456789-24x4194303-.ffffff.pack")
_COUNT_PARTS = 16
_LETTERS = HASH_BYTES * 4 // 3
"""Of a name, for a page."""
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""Errors of open() where a link or a socket has the name."""
_HASH_AT = 32
"""Of the page hash in a header (docs/page-format.md)."""


@dataclass(frozen=True, slots=True)
class PackFile:
    """A pack as its name tells."""

    pack: Pack
    dead: int = 0
    """Bit ``i``: page ``i`` was taken away."""

    @classmethod
    def parse(cls, name: str) -> PackFile | None:
        """None for any other name."""
        found = _NAME.fullmatch(name)
        pack = None if found is None else parse_pack(found[1] + _END)
        if found is None or pack is None or pack.count > MOST_PAGES:
            return None
        dead = int(found[2] or "0", 16)
        # A page has one name only.
        return cls(pack, dead) if dead < pack.all_dead and file_name(pack, dead) == name else None

    @property
    def living(self) -> list[int]:
        """Positions of the pages that are there."""
        return [position for position in range(self.pack.count) if not self.dead >> position & 1]

    @property
    def length(self) -> int:
        return packs.pack_length(self.pack.count, self.pack.page_bytes)


@dataclass(frozen=True, slots=True)
class PackedPage:
    """Where a page was seen."""

    path: str
    found: PackFile
    position: int


def most_pages(directory: str | Path) -> int:
    """Of a pack whose name has room in this directory: some file systems that encrypt have names of 143 bytes."""
    try:
        longest = os.pathconf(directory, "PC_NAME_MAX")
    except OSError:
        return MOST_PAGES
    return max(1, min(MOST_PAGES, (longest - _NAME_WITHOUT_HASHES) // _LETTERS))


def file_name(pack: Pack, dead: int) -> str:
    """The name of the file of a pack, of which the pages ``dead`` were taken away."""
    return f"{pack.name[: -len(_END)]}.{dead:x}{_END}" if dead else pack.name


def is_pack_path(path: str) -> bool:
    """Whether a path, of a page file or a pack, is that of a pack; also one of which the name says nonsense."""
    return path.endswith(_END)


def pack_id_in(name: str) -> str:
    """The id in the name of a pack, which is valid."""
    return name[: packs.ID_LENGTH]


class PackTree:
    """The packs of one directory. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.home = path / "packs"
        self._home_text = str(self.home)

    def identity_path(self, identity: bytes) -> str:
        return f"{self._home_text}/{identity.hex()}"

    def known_identities(self) -> list[bytes]:
        """Digests that have packs here."""
        return [bytes.fromhex(entry.name) for entry in directories(self.home, IDENTITY_NAME)]

    def buckets(self, identity: bytes) -> list[str]:
        """Names of the buckets of an identity, the newest first."""
        found = directories(self.identity_path(identity), BUCKET_NAME)
        return sorted([entry.name for entry in found], reverse=True)

    def all_buckets(self) -> list[str]:
        """Paths of the buckets of all identities."""
        found: list[str] = []
        for identity in directories(self.home, IDENTITY_NAME):
            found += [entry.path for entry in directories(identity.path, BUCKET_NAME)]
        return found

    def packs_in(self, bucket: str) -> Iterator[tuple[str, PackFile]]:
        """(path, pack) of a bucket's packs, by their names."""
        for entry in entries(bucket, PACK_NAME):
            if (found := PackFile.parse(entry.name)) is not None:
                yield entry.path, found

    def pack_files(self, bucket: str) -> Iterator[tuple[str, os.stat_result]]:
        """(path, status) of the packs in a bucket; packs that vanish meanwhile are left out."""
        for entry in entries(bucket, PACK_NAME):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield entry.path, status

    def read_page(self, page: PackedPage) -> bytes | None:
        """A page as it is on disk, header and payload; None if it is gone. Raises OSError."""
        try:
            return _read_at(page.path, page.found, page.position)
        except ABSENT:
            # Renamed, perhaps, because another page of it was taken away.
            for path, found in self.packs_in(os.path.dirname(page.path)):
                if found.pack.id == page.found.pack.id and not found.dead >> page.position & 1:
                    return _read_at(path, found, page.position)
        return None

    def count_pages(self, most: int) -> int:
        """The number of pages in packs, by their names: estimated from ``most`` buckets if there are more."""
        everything = self.all_buckets()
        looked_at = everything if len(everything) <= most else random.sample(everything, most)
        found = sum(_pages_by_name(entry.name) for bucket in looked_at for entry in entries(bucket, PACK_NAME))
        return found * len(everything) // max(1, len(looked_at))

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of disk of the packs that the pages under each of these hashes are in, over all identities. A pack
        counts whole, and once: for the first of its pages."""
        positions: dict[str, int] = {}
        for position, page_hash in enumerate(hashes):
            positions.setdefault(urlsafe_b64encode(short_hash_of(page_hash)).decode(), position)
        taken = [0] * len(hashes)
        for bucket in self.all_buckets() if hashes else ():
            for entry in entries(bucket, PACK_NAME):
                letters = _letters_by_name(entry.name)
                if positions.keys().isdisjoint(letters) or (found := PackFile.parse(entry.name)) is None:
                    continue
                wanted = [positions[letters[n]] for n in found.living if letters[n] in positions]
                if wanted:
                    taken[min(wanted)] += occupied(found.length)
        return taken

    def occupied_part(self, number: int, of: int) -> int:
        """Bytes of disk of one of so many parts of the packs and their directories; each part has its own, which the
        ids of packs spread evenly. Walks all names every ``of // 16`` parts."""
        if number % (of // _COUNT_PARTS):
            return 0
        digit = f"{number // (of // _COUNT_PARTS):x}"
        found = 0
        for identity in directories(self.home, IDENTITY_NAME):
            found += BLOCK * (number == 0)
            for bucket in directories(identity.path, BUCKET_NAME):
                found += BLOCK * (number == 0)
                for entry in entries(bucket.path, PACK_NAME):
                    if pack_id_in(entry.name)[-1] == digit:
                        found += _occupied(entry)
        return found

    def has_packs(self, tree: Path) -> bool:
        """Whether the directory of an identity, wherever it is, holds a pack, or cannot be read."""
        try:
            buckets = directories(tree, BUCKET_NAME)
            return any(next(entries(bucket.path, PACK_NAME), None) is not None for bucket in buckets)
        except OSError:
            return True


def hashes_in(found: PackFile) -> list[bytes]:
    """Short hashes of the pages that are there."""
    hashes = found.pack.hashes
    return [hashes[position * HASH_BYTES : (position + 1) * HASH_BYTES] for position in found.living]


def short_hash_of(page_hash: bytes) -> bytes:
    """What names say of a page of this hash, whatever its identity."""
    return short_hash(bytes(IDENTITY_LENGTH) + page_hash)


def keys_in(path: str, identity: bytes, pack: Pack) -> list[bytes | None]:
    """The keys of all pages of a pack. None for a page of which neither the footer nor its own header tells the key.
    Raises OSError where the pack cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_FILE:
            return [None] * pack.count
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return [None] * pack.count
        begin = pack.count * pack.page_bytes
        try:
            keys, _ = packs.decode_footer(_read(fd, packs.pack_length(pack.count, pack.page_bytes) - begin, begin))
            if [short_hash(key) for key in keys] == _parts(pack) and keys[0][:IDENTITY_LENGTH] == identity:
                return list(keys)
        except FormatError:
            pass
        headers = [_read(fd, envelope.FIELDS_LENGTH, n * pack.page_bytes) for n in range(pack.count)]
        # Also of a damaged header: the name says whether these bytes are the hash.
        found = [identity + header[_HASH_AT : _HASH_AT + PAGE_HASH_LENGTH] for header in headers]
        return [
            key if len(key) == envelope.KEY_LENGTH and short_hash(key) == part else None
            for key, part in zip(found, _parts(pack), strict=True)
        ]
    finally:
        os.close(fd)


def _read(fd: int, length: int, offset: int) -> bytes:
    """Nothing, of a bad block."""
    try:
        return os.pread(fd, length, offset)
    except OSError:
        return b""


def _letters_by_name(name: str) -> list[str]:
    """What the name of a pack says of each page, as it stands there."""
    letters = name[name.find("-", packs.ID_LENGTH + 1) + 1 :].partition(".")[0]
    return [letters[at : at + _LETTERS] for at in range(0, len(letters), _LETTERS)]


def occupied_by_name(name: str) -> int:
    """Bytes of disk that a pack of this name takes, which matches ``PACK_NAME``; 0 where it says nonsense."""
    count, _, page_bytes = name[packs.ID_LENGTH + 1 :].partition("-")[0].partition("x")
    if not (count.isdecimal() and page_bytes.isdecimal()):
        return 0
    return occupied(packs.pack_length(int(count), int(page_bytes)))


def _pages_by_name(name: str) -> int:
    """``len(PackFile.living)`` of a name that is valid, in a tenth of the time."""
    _, *mask, _ = name.split(".")
    return len(_letters_by_name(name)) - (int(mask[0], 16).bit_count() if mask else 0)


def _read_at(path: str, found: PackFile, position: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, found.pack.page_bytes, position * found.pack.page_bytes)
    finally:
        os.close(fd)


def _parts(pack: Pack) -> list[bytes]:
    return [pack.hashes[at : at + HASH_BYTES] for at in range(0, len(pack.hashes), HASH_BYTES)]


def _occupied(entry: os.DirEntry[str]) -> int:
    """What the account has of a pack."""
    try:
        return min(occupied(entry.stat(follow_symlinks=False).st_size), occupied_by_name(entry.name))
    except OSError:
        return 0

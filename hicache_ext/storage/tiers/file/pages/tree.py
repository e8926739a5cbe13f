"""Reads a directory of packs: names, counts, keys. Changes are in directory.py.

::

    PATH/packs/<identity>/<bucket>/<pack>.pack             pages that were written together, or one alone (page/pack.py)
    PATH/packs/<identity>/<bucket>/<pack>.<mask>.pack      the same with dead pages: bit ``i`` is page ``i``

The name of a pack says what is in it, so that who lists names knows which pages there are. A bucket is a directory for
some hundred packs, named by when it was made. A page of a pack is taken away by a rename of the pack.

Nothing here makes, changes or locks anything: read permission is enough.
"""

from __future__ import annotations

import errno
import os
import random
import re
import stat
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page import pack as pack_format
from hicache_ext.page.envelope import IDENTITY_LENGTH, KEY_LENGTH, PAGE_HASH_LENGTH
from hicache_ext.page.pack import HASH_BYTES, Pack, parse_pack, short_hash
from hicache_ext.storage.tiers.file.names import (
    ABSENT,
    BLOCK,
    BUCKET_NAME,
    IDENTITY_NAME,
    PACK_NAME,
    TEMPORARY_FILE,
    directories,
    entries,
    occupied,
)
from hicache_ext.storage.tiers.file.usage import Writers

MOST_PAGES = pack_format.HASHES_IN_A_COMPONENT
"""Of a pack in a file: its name is one component of a path."""
_END = ".pack"
_LARGEST = 10**15 - 1
"""Bytes of a page alone, of which a name has 15 digits."""
_NAME = re.compile(r"(.+?)(?:\.([0-9a-f]{1,6}))?\.pack")
_NAME_WITHOUT_HASHES = len("01234567890-0123456789-24x4194303-.ffffff.pack")
_LETTERS = HASH_BYTES * 4 // 3
"""Of a name, for a page."""
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""Errors of open() where a link or a socket has the name."""
_HASH_AT = 32
"""Of the page hash in a header (docs/page-format.md)."""
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""O_NONBLOCK: opening a pipe that has the name would wait for its writer for ever."""


def open_pack(path: str) -> int:
    """A descriptor to read a pack with. Raises OSError, also for a link or a socket that has its name."""
    return os.open(path, _OPEN_FLAGS)


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
        pack = None if found is None else parse_pack(found[1] + _END, _LARGEST)
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
        return pack_format.pack_length(self.pack.count, self.pack.page_bytes)


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


def pack_id_in(name: str) -> str:
    """The id in the name of a pack, which is valid."""
    return name[: pack_format.ID_LENGTH]


class PackTree:
    """The packs of one directory. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path
        self.packs = path / "packs"
        self._packs_text = str(self.packs)
        self.identities = path / "identities"
        self.temporary = path / "tmp"
        self.members_path = path / "members"

    def identity_path(self, identity: bytes) -> str:
        """The directory of the packs of an identity."""
        return f"{self._packs_text}/{identity.hex()}"

    def known_identities(self) -> list[bytes]:
        """Digests that have packs here."""
        return [bytes.fromhex(entry.name) for entry in directories(self.packs, IDENTITY_NAME)]

    def buckets(self, identity: bytes) -> list[str]:
        """Names of the buckets of an identity, the newest first."""
        found = directories(self.identity_path(identity), BUCKET_NAME)
        return sorted([entry.name for entry in found], reverse=True)

    def all_buckets(self) -> list[str]:
        """Paths of the buckets of all identities."""
        found: list[str] = []
        for identity in directories(self.packs, IDENTITY_NAME):
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
        """The number of pages, by the names of packs: estimated from ``most`` buckets if there are more."""
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

    def count_occupied(self) -> int:
        """Bytes of disk of all packs and their directories; walks everything."""
        return sum(found for _, found in self.occupied_parts())

    def occupied_parts(self) -> Iterator[tuple[float, int]]:
        """``count_occupied`` part by part: (share of the packs walked by now, bytes of disk in this part).

        Walks all names sixteen times, for the packs whose id ends with one digit each time: ids are spread evenly,
        while packs come and go in the newest bucket.
        """
        for number, digit in enumerate("0123456789abcdef"):
            for identity in directories(self.packs, IDENTITY_NAME):
                yield number / 16, BLOCK * (number == 0)
                for bucket in directories(identity.path, BUCKET_NAME):
                    names = entries(bucket.path, PACK_NAME)
                    found = sum(_counted(entry) for entry in names if pack_id_in(entry.name)[-1] == digit)
                    yield number / 16, found + BLOCK * (number == 0)
            yield (number + 1) / 16, 0

    def has_packs(self, tree: Path) -> bool:
        """Whether the directory of an identity, wherever it is, holds a pack, or cannot be read."""
        try:
            buckets = directories(tree, BUCKET_NAME)
            return any(next(entries(bucket.path, PACK_NAME), None) is not None for bucket in buckets)
        except OSError:
            return True

    def left_overs(self, writers: Writers) -> Iterator[os.DirEntry[str]]:
        """Left-overs of dead processes in tmp/: half-written packs, trees being cleared."""
        for entry in list(entries(self.temporary, TEMPORARY_FILE)):
            try:
                last_change = entry.stat(follow_symlinks=False).st_ctime
            except OSError:
                continue
            if writers.is_gone(entry.name.partition(".")[0], last_change):
                yield entry


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
        fd = open_pack(path)
    except OSError as error:
        if error.errno in _NO_FILE:
            return [None] * pack.count
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return [None] * pack.count
        begin = pack.count * pack.page_bytes
        try:
            length = pack_format.pack_length(pack.count, pack.page_bytes) - begin
            keys, _ = pack_format.decode_footer(_read(fd, length, begin))
            if [short_hash(key) for key in keys] == _parts(pack) and keys[0][:IDENTITY_LENGTH] == identity:
                return list(keys)
        except FormatError:
            pass
        headers = [_read(fd, envelope.FIELDS_LENGTH, n * pack.page_bytes) for n in range(pack.count)]
        # Also of a damaged header: the name says whether these bytes are the hash.
        found = [identity + header[_HASH_AT : _HASH_AT + PAGE_HASH_LENGTH] for header in headers]
        return [
            key if len(key) == KEY_LENGTH and short_hash(key) == part else None
            for key, part in zip(found, _parts(pack), strict=True)
        ]
    finally:
        os.close(fd)


def occupied_by_name(name: str) -> int:
    """Bytes of disk that a pack of this name takes, which matches ``PACK_NAME``; 0 where it says nonsense."""
    count, _, page_bytes = name[pack_format.ID_LENGTH + 1 :].partition("-")[0].partition("x")
    if not (count.isdecimal() and page_bytes.isdecimal()):
        return 0
    return occupied(pack_format.pack_length(int(count), int(page_bytes)))


def _read(fd: int, length: int, offset: int) -> bytes:
    """Nothing, of a bad block."""
    try:
        return os.pread(fd, length, offset)
    except OSError:
        return b""


def _read_at(path: str, found: PackFile, position: int) -> bytes:
    fd = open_pack(path)
    try:
        return os.pread(fd, found.pack.page_bytes, position * found.pack.page_bytes)
    finally:
        os.close(fd)


def _letters_by_name(name: str) -> list[str]:
    """What the name of a pack says of each page, as it stands there."""
    letters = name[name.find("-", pack_format.ID_LENGTH + 1) + 1 :].partition(".")[0]
    return [letters[at : at + _LETTERS] for at in range(0, len(letters), _LETTERS)]


def _pages_by_name(name: str) -> int:
    """``len(PackFile.living)`` of a name that is valid, in a tenth of the time."""
    _, *mask, _ = name.split(".")
    return len(_letters_by_name(name)) - (int(mask[0], 16).bit_count() if mask else 0)


def _parts(pack: Pack) -> list[bytes]:
    return [pack.hashes[at : at + HASH_BYTES] for at in range(0, len(pack.hashes), HASH_BYTES)]


def _counted(entry: os.DirEntry[str]) -> int:
    """Bytes of disk that the account has of a pack."""
    try:
        return min(occupied(entry.stat(follow_symlinks=False).st_size), occupied_by_name(entry.name))
    except OSError:
        return 0


# -- which pages there are, told again and again ---------------------------------------------------------------------

Words = npt.NDArray[np.int64]

_COARSE = 5.0
"""Seconds. File systems keep times to 2 seconds at worst, and a server's clock may be apart from ours."""
_BLOCK_BYTES = 8
_NONE: Words = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket as it was read last."""

    changed: int
    """Its time of change then, in nanoseconds."""
    settled: bool
    """That time was old enough: what changes after it shows."""
    blocks: Words
    packs: dict[str, Words]
    """By the id of the pack: its pages, dead ones, too."""


class TreeContents:
    """Which pages one directory has (``PageLister``): a bucket whose time of change is as it was is not read again.

    A page comes and goes by a change of its bucket, so that this time tells of both, whoever did it. Names of packs
    have only the first bytes of each hash: the rest is read from each pack once. 16 bytes a page, from the first look
    on. For one thread at a time.
    """

    def __init__(self, tree: PackTree) -> None:
        self._tree = tree
        self._read: dict[bytes, dict[str, _Bucket]] = {}
        """By identity and path of a bucket."""

    def block_hashes(self, digest: bytes) -> Words:
        """As ``PageLister``. Raises OSError."""
        before, now = self._read.get(digest, {}), {}
        for bucket in directories(self._tree.identity_path(digest), BUCKET_NAME):
            if (read := self._read_again(digest, bucket.path, before.get(bucket.path))) is not None:
                now[bucket.path] = read
        self._read[digest] = now
        return np.concatenate([_NONE, *[read.blocks for read in now.values()]])

    def _read_again(self, identity: bytes, path: str, before: _Bucket | None) -> _Bucket | None:
        try:
            changed = os.stat(path, follow_symlinks=False).st_mtime_ns
        except ABSENT:
            return None
        if before is not None and before.settled and before.changed == changed:
            return before
        settled = time.time() - changed / 1e9 > _COARSE
        packs: dict[str, Words] = {}
        living = [_NONE]
        for file, found in self._tree.packs_in(path):
            blocks = None if before is None else before.packs.get(found.pack.id)
            if blocks is None:
                try:
                    blocks = _blocks_of(file, identity, found.pack)
                except OSError:
                    # Gone, or renamed meanwhile: the next look finds out.
                    settled = False
                    continue
            packs[found.pack.id] = blocks
            living.append(blocks[found.living])
        return _Bucket(changed, settled, np.concatenate(living), packs)


def _blocks_of(file: str, identity: bytes, pack: Pack) -> Words:
    """Pages of which the key is not known cannot be read either: they are told as none that anybody asks for."""
    keys = [key or bytes(KEY_LENGTH) for key in keys_in(file, identity, pack)]
    joined = b"".join([key[IDENTITY_LENGTH:][:_BLOCK_BYTES] for key in keys])
    return np.frombuffer(joined, ">i8").astype(np.int64)

"""Lists a slab directory for tools that only look: no lock, no change, read permission is enough.

Servers may be writing, so the list is approximate. LMDB's file is small and is read until two readings agree; records
and seals are mapped for reading. Where the index cannot be trusted (the machine was restarted before it was closed),
the headers of the pages are listed, as a rebuild would find them. Reasons: docs/decisions/access-to-files.md.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from hicache_ext.errors import StoreError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.directory import cleared_at, is_trusted, pages_in_headers, slabs_by_files
from hicache_ext.storage.tiers.file.slab.index import words_are_of_living
from hicache_ext.storage.tiers.file.slab.lmdb_file import check_length
from hicache_ext.storage.tiers.file.slab.mapped import Words, map_words
from hicache_ext.storage.tiers.file.slab.records import (
    GENERATION,
    GENERATION_NAME,
    INDEX_VERSION,
    SLAB,
    SLOT_SIZE,
    USES,
    USES_NAME,
    Place,
    Slab,
)
from hicache_ext.storage.tiers.file.slab.shapes import HEADER
from hicache_ext.storage.tiers.file.slab.touches import Uses

_PATIENCE = 10.0
"""Seconds in which the index must be between two changes once, with writers on a busy machine."""
_PAUSE = 0.01
_SEAL_WORDS = 2


class ListedPage(NamedTuple):
    """``row``: that of its record, -1 for a page found by its header."""

    key: bytes
    place: Place
    written: float
    """Wall-clock seconds."""
    seal: bytes
    row: int = -1


class SlabListing:
    """One directory, as it was when this was made. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError with a sentence, OSError as the disk does."""
        self._path = path
        self._slot_sizes = {number: slot_size for number, slot_size, _ in slabs_by_files(path)}
        self._index: _Index | None = None
        if is_trusted(path):
            try:
                self._index = _Index(path / "index")
            except (lmdb.Error, ValueError, FileNotFoundError):
                # A server rebuilds it at its start.
                self._index = None

    @property
    def rebuilt_at_start(self) -> bool:
        """Whether the index cannot be used: then headers are listed, also of pages that are gone."""
        return self._index is None

    def pages(self) -> Iterator[ListedPage]:
        if self._index is not None:
            yield from self._index.pages()
        else:
            yield from self._pages_by_headers()

    def uses_of(self, digest: bytes) -> Uses | None:
        return None if self._index is None else self._index.uses.get(digest)

    def read(self, page: ListedPage) -> bytes | None:
        """Header and payload; None when the page is not there any more. Raises OSError."""
        if not self._is_there(page):
            return None
        slot_size = self._slot_sizes.get(page.place.slab)
        if slot_size is None:
            return None
        file = self._path / "slabs" / f"{page.place.slab:08x}-{slot_size}.slab"
        content = _read_at(file.with_suffix(".headers"), HEADER, page.place.slot * HEADER)
        content += _read_at(file, page.place.length, page.place.slot * slot_size)
        return content if self._is_there(page) else None

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of slots that the pages under each of these page hashes take, over all identities."""
        wanted = {page_hash: position for position, page_hash in enumerate(hashes)}
        taken = [0] * len(hashes)
        if wanted:
            for page in self.pages():
                position = wanted.get(page.key[IDENTITY_LENGTH:])
                if position is not None:
                    taken[position] += self._slot_sizes.get(page.place.slab, page.place.length)
        return taken

    def left_overs(self) -> int:
        """Slots that killed processes were writing, and those of cleared pages that are not free yet."""
        return 0 if self._index is None else self._index.left_overs()

    def _is_there(self, page: ListedPage) -> bool:
        return self._index is None or page.row < 0 or self._index.page_in(page.row) == page

    def _pages_by_headers(self) -> Iterator[ListedPage]:
        newest: dict[bytes, ListedPage] = {}
        cleared = functools.cache(functools.partial(cleared_at, self._path))
        for number, slot_size, slots in slabs_by_files(self._path):
            slab = Slab(number, slot_size, slots)
            try:
                fd = os.open(self._path / "slabs" / f"{number:08x}-{slot_size}.headers", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                for pages in pages_in_headers(fd, slab, cleared):
                    for found in pages:
                        written = found.created_ms / 1000
                        if found.key not in newest or newest[found.key].written < written:
                            place = Place(number, found.slot, found.length)
                            newest[found.key] = ListedPage(found.key, place, written, found.seal)
            finally:
                os.close(fd)
        yield from newest.values()


class _Index:
    """A trusted index, as it was at one moment."""

    def __init__(self, path: Path) -> None:
        """Raises lmdb.Error, ValueError or FileNotFoundError where it cannot be read, StoreError and OSError."""
        self.slabs: list[Slab] = []
        self.uses: dict[bytes, Uses] = {}
        self._generations: dict[bytes, int] = {}
        content = _read_settled(path / "data.mdb")
        with open(os.memfd_create("hicache-ext-index", os.MFD_CLOEXEC), "wb", buffering=0) as copy:
            copy.write(content)
            file = f"/proc/self/fd/{copy.fileno()}"
            check_length(Path(file))
            environment = lmdb.open(file, subdir=False, readonly=True, lock=False, create=False, max_dbs=2)
            try:
                self._load(environment)
            finally:
                environment.close()
        rows = max((slab.first_record + slab.slots + 1 for slab in self.slabs), default=0)
        width = slot_code.RECORD_WORDS
        self._records = map_words(path / "records", rows * width, to_change=False).reshape(-1, width)
        self._seals = map_words(path / "seals", rows * _SEAL_WORDS, to_change=False).reshape(-1, _SEAL_WORDS)

    def _load(self, environment: Any) -> None:
        with environment.begin() as transaction:
            slabs, state = (environment.open_db(name, txn=transaction, create=False) for name in (b"slabs", b"state"))
            if transaction.get(b"version", db=state) != str(INDEX_VERSION).encode():
                raise lmdb.VersionMismatchError("the index was written by another version of hicache_ext")
            with transaction.cursor(slabs) as cursor:
                self.slabs = [Slab(SLOT_SIZE.unpack(number)[0], *SLAB.unpack(value)) for number, value in cursor]
            with transaction.cursor(state) as cursor:
                for name, value in cursor:
                    if name.startswith(GENERATION_NAME):
                        self._generations[name.removeprefix(GENERATION_NAME)] = GENERATION.unpack(value)[0]
                    elif name.startswith(USES_NAME):
                        self.uses[name.removeprefix(USES_NAME)] = Uses(*USES.unpack(value))

    def pages(self) -> Iterator[ListedPage]:
        for slab in self.slabs:
            for row in self._rows(slab, slot_code.PAGE):
                page = self.page_in(row)
                if page is not None:
                    yield page

    def page_in(self, row: int) -> ListedPage | None:
        """The page that a slot holds now."""
        record = self._records[row].copy()
        key = record[: slot_code.KEY_WORDS].tobytes()
        state, stored, place = (int(record[word]) for word in (slot_code.STATE, slot_code.OBJECT, slot_code.PLACE))
        if state & 0xFF != slot_code.PAGE or state >> 16 != self._generations.get(key[:IDENTITY_LENGTH], 0):
            return None
        where = Place(place >> 32, place & slot_code.LOW, stored & slot_code.LOW)
        return ListedPage(key, where, float(stored >> 32), self._seals[row].tobytes(), row)

    def left_overs(self) -> int:
        cleared = dead = 0
        for slab in self.slabs:
            cleared += sum(self.page_in(row) is None for row in self._rows(slab, slot_code.PAGE))
            writers = [tuple(self._records[row, :3].tolist()) for row in self._rows(slab, slot_code.PENDING)]
            dead += sum(not words_are_of_living(writer) for writer in writers)
        return cleared + dead

    def _rows(self, slab: Slab, state: int) -> list[int]:
        states: Words = self._records[slab.first_record : slab.first_record + slab.slots, slot_code.STATE] & 0xFF
        return [slab.first_record + int(slot) for slot in np.flatnonzero(states == state)]


def _read_settled(file: Path) -> bytes:
    """A file that others may write, as it was at one moment. Raises StoreError if two readings never agree."""
    content = file.read_bytes()
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        again = file.read_bytes()
        if again == content:
            return content
        content = again
        time.sleep(_PAUSE)
    raise StoreError(f"{str(file)!r} is being changed without a pause; try again")


def _read_at(path: Path, length: int, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)

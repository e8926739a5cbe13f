"""A look at a directory of the file tier from outside, while servers may be using it: for tools.

Knows both layouts. Nothing here goes through the stores: what is reported is what lies on the disk.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from hicache_ext import envelope
from hicache_ext.envelope import IDENTITY_LENGTH
from hicache_ext.errors import FormatError, StoreError
from hicache_ext.storage.file.directory import PageDirectory, check_manifest
from hicache_ext.storage.file.pages import PageFileStore
from hicache_ext.storage.file.slab.directory import slab_directory
from hicache_ext.storage.file.slab.shapes import HEADER
from hicache_ext.storage.file.slab.slot_table import seal_at
from hicache_ext.storage.file.slab.touches import Uses


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One page object on disk. Moments are wall-clock seconds, None where the layout does not tell."""

    key: bytes
    size: int
    used: float | None = None
    written: float | None = None

    @property
    def identity(self) -> bytes:
        return self.key[:IDENTITY_LENGTH]


class StoredObject(NamedTuple):
    content: bytes
    """Header and payload; nothing where something that cannot be read has the page's place."""
    seal: bytes | None = None
    """What the index says of them (docs/page-format.md); None where there is none."""


_NOT_OF_THE_PAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
"""Errors of who reads. Others are of what is read."""


class Inspector(Protocol):
    """One directory, whatever its layout. Not thread-safe; close it."""

    @property
    def layout(self) -> str: ...

    @property
    def path(self) -> Path: ...

    def pages(self) -> Iterator[StoredPage]:
        """Every page, identity by identity."""

    def uses(self, digest: bytes) -> Uses | None:
        """Hits of an identity's pages since it was last cleared; None where none were counted."""

    def read(self, page: StoredPage) -> StoredObject | None:
        """The page object as it is on disk; None when it is gone by now. Raises OSError where that says nothing of the
        page (``_NOT_OF_THE_PAGE``)."""

    def remove(self, keys: list[bytes]) -> int: ...

    def clear(self, digests: list[bytes]) -> None: ...

    def clean_up(self) -> int:
        """Remove what killed processes left behind; how many things that were."""

    def occupied(self) -> int:
        """Bytes of disk that the tier takes."""

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        """Bytes of disk that the pages under each of these page hashes take, over all identities."""

    def close(self) -> None: ...


def open_inspector(path: Path) -> Inspector:
    """Raises StoreError when ``path`` is no directory of the file tier."""
    manifest = path / "hicache_ext.json"
    try:
        layout = json.loads(manifest.read_text())["layout"]
    except (OSError, ValueError, KeyError, TypeError):
        raise StoreError(f"{str(path)!r} is no directory of a file tier: it has no hicache_ext.json") from None
    if layout == "slab":
        # A tier gives up pages of an older format; to look at them is no reason to.
        check_manifest(path, "slab", str(path))
    return SlabInspector(path) if layout == "slab" else PageFileInspector(path)


def reason_it_is_bad(key: bytes, stored: StoredObject) -> str | None:
    """Why a page object is not the page ``key``; None when it is."""
    content, seal = stored
    try:
        header = envelope.decode_header(content)
    except FormatError as error:
        return error.reason
    payload = memoryview(content)[header.header_length :]
    reason = envelope.reason_to_refuse(content[: header.header_length], key, [payload])
    return "seal" if reason is None and seal not in (None, envelope.seal_of(content)) else reason


class PageFileInspector:
    layout = "pages"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory = PageDirectory(path, str(path))
        # Without a capacity of its own it never evicts; what it removes goes through the shared account.
        self._store = PageFileStore(str(path), path, capacity=None, threads=1)

    def pages(self) -> Iterator[StoredPage]:
        for fan_out in sorted(self._directory.fan_out_directories()):
            identity = bytes.fromhex(Path(fan_out).parent.name)
            for file, status in self._directory.page_files(fan_out):
                yield StoredPage(identity + bytes.fromhex(Path(file).stem), status.st_size, used=status.st_mtime)

    def uses(self, digest: bytes) -> Uses | None:
        return None

    def read(self, page: StoredPage) -> StoredObject | None:
        try:
            return StoredObject(Path(self._directory.page_path(page.key)).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NOT_OF_THE_PAGE:
                raise
            # Something that cannot be read has the page's name: no page.
            return StoredObject(b"")

    def remove(self, keys: list[bytes]) -> int:
        return self._store.remove(keys)

    def clear(self, digests: list[bytes]) -> None:
        self._store.clear(digests)

    def clean_up(self) -> int:
        return self._directory.remove_left_overs()

    def occupied(self) -> int:
        return self._store.used_bytes()

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        return self._directory.occupied_by(hashes)

    def close(self) -> None:
        self._store.close()


class SlabInspector:
    layout = "slab"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._resources = ExitStack()
        self._directory = self._resources.enter_context(slab_directory(path, str(path)))

    def pages(self) -> Iterator[StoredPage]:
        for page in self._directory.index.pages():
            yield StoredPage(page.key, HEADER + page.place.length, written=page.written)

    def uses(self, digest: bytes) -> Uses | None:
        return self._directory.index.uses_of(digest)

    def read(self, page: StoredPage) -> StoredObject | None:
        # Looked up anew for every page: since the listing its slot may have been given to another one.
        for _ in range(2):
            place = self._directory.index.find(page.key)
            if place is None:
                return None
            slab = next((slab for slab in self._directory.index.slabs() if slab.number == place.slab), None)
            if slab is None:
                continue
            seal = seal_at(self._directory.seals, slab.first_record + place.slot) or None
            try:
                # Not kept open, as by the directory: this looks at every slab.
                header = _read_at(self._directory.headers_path(slab), HEADER, place.slot * HEADER)
                payload = _read_at(self._directory.slab_path(slab), place.length, place.slot * slab.slot_size)
                stored = StoredObject(header + payload, seal)
            except OSError as error:
                if error.errno in _NOT_OF_THE_PAGE:
                    raise
                # Or dropped, unless it is still there when looked up again.
                stored = StoredObject(b"", seal)
            if self._directory.index.find(page.key) == place:
                return stored
        return None

    def remove(self, keys: list[bytes]) -> int:
        with self._directory.index.changing() as change:
            return sum(change.remove(key) for key in keys)

    def clear(self, digests: list[bytes]) -> None:
        for digest in digests:
            with self._directory.index.changing() as change:
                had_pages = change.clear(digest)
            if had_pages:
                self._directory.note_cleared(digest)
                self._directory.index.free_cleared(digest)

    def clean_up(self) -> int:
        with self._directory.index.changing() as change:
            freed = change.release_dead_writers()
            identities = change.identities()
        return freed + sum(self._directory.index.free_cleared(digest) for digest in identities)

    def occupied(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self.path.rglob("*") if file.is_file())

    def occupied_by(self, hashes: Sequence[bytes]) -> list[int]:
        return self._directory.index.occupied_by(hashes)

    def close(self) -> None:
        self._resources.close()


def _read_at(path: Path, length: int, offset: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)

"""Second ways to what a store holds, for the conformance suite."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.storage.tiers.file.multipath import choose_paths, path_seeds
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pages.tree import PageTree
from hicache_ext.storage.tiers.file.slab.index import milliseconds
from hicache_ext.storage.tiers.file.slab.index_words import SEAL
from hicache_ext.storage.tiers.file.slab.listing import SlabListing
from hicache_ext.storage.tiers.file.slab.shapes import SlotReference, SlotReferences
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.memory import MemoryPageStore


class RawPack(NamedTuple):
    """A pack by its name, as docs/page-format.md and docs/file-tier.md give it."""

    file: Path
    page_bytes: int
    hashes: list[bytes]
    """The first 6 bytes of XXH3-64 of each page hash."""
    dead: int

    @classmethod
    def of(cls, file: Path) -> RawPack:
        stem, _, dead = file.name.removesuffix(".pack").partition(".")
        _, _, shape, letters = stem.split("-", 3)
        joined = base64.urlsafe_b64decode(letters)
        hashes = [joined[begin : begin + 6] for begin in range(0, len(joined), 6)]
        assert int(shape.split("x")[0]) == len(hashes)
        return cls(file, int(shape.split("x")[1]), hashes, int(dead or "0", 16))

    def living(self) -> list[int]:
        return [number for number in range(len(self.hashes)) if not self.dead >> number & 1]

    def page(self, number: int) -> bytes:
        with self.file.open("rb") as opened:
            opened.seek(number * self.page_bytes)
            return opened.read(self.page_bytes)

    def overwrite(self, number: int, stored: bytes) -> None:
        with self.file.open("r+b") as opened:
            opened.seek(number * self.page_bytes)
            opened.write(stored)

    def kill(self, number: int) -> None:
        dead = self.dead | 1 << number
        if dead == (1 << len(self.hashes)) - 1:
            self.file.unlink()
        else:
            name = self.file.name.partition(".")[0]
            self.file.rename(self.file.with_name(f"{name}.{dead:x}.pack"))


class RawFiles:
    """Page files and packs found by the names that the documents give, not by the package's code."""

    def __init__(self, *paths: Path) -> None:
        """Every path holds every page."""
        self._paths = paths

    def _files(self, key: bytes) -> list[Path]:
        page_hash = key[16:].hex()
        return [path / "pages" / key[:16].hex() / page_hash[:2] / f"{page_hash}.page" for path in self._paths]

    def path(self, key: bytes) -> Path:
        return self._files(key)[0]

    def packs(self, path: Path, identity: bytes | None = None) -> list[RawPack]:
        """The newest first."""
        files = path.glob(f"pages/{'*' if identity is None else identity.hex()}/*/*.pack")
        return [RawPack.of(file) for file in sorted(files, key=lambda file: file.name, reverse=True)]

    def places(self, path: Path, key: bytes) -> list[tuple[RawPack, int]]:
        """The packs that have this page, and its position in each; the newest first."""
        part = xxhash.xxh3_64_digest(key[16:])[:6]
        return [
            (pack, number)
            for pack in self.packs(path, key[:16])
            for number in pack.living()
            if pack.hashes[number] == part
        ]

    def read(self, key: bytes) -> bytes | None:
        for pack, number in self.places(self._paths[0], key):
            return pack.page(number)
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: bytes, stored: bytes) -> None:
        """In the place of the page, if it has one where ``stored`` fits exactly; else as a page file."""
        for path, file in zip(self._paths, self._files(key), strict=True):
            places = self.places(path, key)
            if places and places[0][0].page_bytes == len(stored):
                places[0][0].overwrite(places[0][1], stored)
                continue
            for pack, number in places:
                pack.kill(number)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stored)

    def remove(self, key: bytes) -> None:
        for path, file in zip(self._paths, self._files(key), strict=True):
            file.unlink(missing_ok=True)
            for pack, number in self.places(path, key):
                pack.kill(number)

    def keys(self) -> list[bytes]:
        """Of the first path."""
        packed = {
            bytes.fromhex(pack.file.parent.parent.name) + pack.page(number)[32:64]
            for pack in self.packs(self._paths[0])
            for number in pack.living()
        }
        files = self._paths[0].glob("pages/*/*/*.page")
        return [*packed] + [bytes.fromhex(file.parent.parent.name) + bytes.fromhex(file.stem) for file in files]


def stored_keys(directory: Path) -> list[bytes]:
    """Of all pages in a directory of layout ``pages``."""
    return RawFiles(directory).keys()


class RawObjects:
    def __init__(self, store: MemoryPageStore) -> None:
        self._objects = store.objects

    def read(self, key: bytes) -> bytes | None:
        return self._objects.get(key)

    def write(self, key: bytes, stored: bytes) -> None:
        self._objects[key] = stored

    def keys(self) -> list[bytes]:
        return list(self._objects)


class RawSlots:
    """Pages of a SlabStore in the slots of its files; where they are, its index says."""

    def __init__(self, store: SlabStore) -> None:
        self._directory = store._directory

    def _files(self, page: SlotReference) -> list[tuple[Path, int]]:
        """The files of headers and slots, and where in each something of this slot begins."""
        (file,) = (self._directory.home / "slabs").glob(f"{page.slab:08x}-*.slab")
        return [(file.with_suffix(".headers"), page.slot * 128), (file, page.slot * int(file.stem.split("-")[1]))]

    def _find(self, key: bytes) -> SlotReference | None:
        found = self._directory.index.locate([key]).pages()
        return found[0] if found else None

    def read(self, key: bytes) -> bytes | None:
        page = self._find(key)
        if page is None:
            return None
        (headers, at), (slots, offset) = self._files(page)
        return headers.read_bytes()[at : at + 128] + slots.read_bytes()[offset : offset + page.length]

    def write(self, key: bytes, stored: bytes) -> None:
        """As if a writer had published ``stored`` under ``key``; in the page's own slot where it has one. Its seal is
        that of its header where that holds, as a rebuild would have it."""
        header, payload = stored[:128].ljust(128, b"\0"), stored[128:]
        try:
            envelope.decode_header(header)
            seal = envelope.seal_of(header)
        except FormatError:
            seal = bytes(envelope.SEAL_LENGTH)
        index, ticket = self._directory.index, self._directory.index.next_ticket()
        index.register([key[:16]])
        page = self._find(key)
        if page is not None:
            (row,) = index.seize([key], ticket).rows.tolist()
        else:
            if not index.view().slabs:
                # No page was stored here yet.
                slab = index.begin_slab(max(1, -(-len(payload) // 4096)) * 4096, lambda _: 16)
                assert slab is not None
                self._directory.create_slab_files(slab)
                index.finish_slab(slab)
            (size, *_) = index.view().of_size
            (row,) = index.take(size, 1, ticket, 0, np.empty(0, np.int64), evicting=True)[0].tolist()
        (slab_number,), (slot,) = (column.tolist() for column in index.places_of(np.array([row])))
        slot_size = index.view().slabs[slab_number].slot_size
        written = SlotReferences.of([SlotReference(slab_number, slot, min(len(payload), slot_size), 0, row)])
        index.memory.rows[row, SEAL : SEAL + 2] = np.frombuffer(seal, np.int64)
        assert index.publish(ticket, [key], written, written, 0, milliseconds()) == [1]
        for (file, offset), content in zip(
            self._files(written.pages()[0]), (header, payload[:slot_size].ljust(slot_size, b"\0")), strict=True
        ):
            with file.open("r+b") as opened:
                opened.seek(offset)
                opened.write(content)

    def keys(self) -> list[bytes]:
        return [page.key for page in SlabListing(self._directory.path).pages()]


class SpreadRaw:
    """The stored objects of a SpreadStore, each where its path's own raw access finds them."""

    def __init__(self, paths: Sequence[Path], raws: Sequence[RawFiles | RawSlots]) -> None:
        self._seeds = path_seeds([str(path) for path in paths])
        self._raws = raws

    def _raw(self, key: bytes) -> RawFiles | RawSlots:
        (number,) = choose_paths([key], self._seeds, range(len(self._raws)))
        return self._raws[number]

    def read(self, key: bytes) -> bytes | None:
        return self._raw(key).read(key)

    def write(self, key: bytes, stored: bytes) -> None:
        self._raw(key).write(key, stored)

    def keys(self) -> list[bytes]:
        return list(itertools.chain.from_iterable(raw.keys() for raw in self._raws))


def occupied_in(tree: PageTree) -> int:
    """Bytes of disk of all files of pages and their directories."""
    return sum(found for _, found in tree.occupied_parts())


def account_and_walk(store: PageFileStore) -> tuple[int, int]:
    """What the account of a store's directory says, and what a walk over it finds."""
    return store.used_bytes(), occupied_in(store._directory)

"""Second ways to what a store holds, for the conformance suite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.path_choice import PathChoice
from hicache_ext.storage.tiers.file.slab.slot_references import SlotReference, SlotReferences
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.memory import MemoryPageStore


class RawFiles:
    """Page files found by the names that docs and directory.py give, not by the package's code."""

    def __init__(self, *paths: Path) -> None:
        """Every path holds every page."""
        self._paths = paths

    def _files(self, key: bytes) -> list[Path]:
        page_hash = key[16:].hex()
        return [path / "pages" / key[:16].hex() / page_hash[:2] / f"{page_hash}.page" for path in self._paths]

    def path(self, key: bytes) -> Path:
        return self._files(key)[0]

    def read(self, key: bytes) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: bytes, stored: bytes) -> None:
        for file in self._files(key):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stored)

    def keys(self) -> list[bytes]:
        files = self._paths[0].glob("pages/*/*/*.page")
        return [bytes.fromhex(file.parent.parent.name) + bytes.fromhex(file.stem) for file in files]


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

    def _files(self, slab_number: int, slot: int) -> list[tuple[Path, int]]:
        """The files of headers and slots, and where in each something of this slot begins."""
        (file,) = (self._directory.path / "slabs").glob(f"{slab_number:08x}-*.slab")
        return [(file.with_suffix(".headers"), slot * 128), (file, slot * int(file.stem.split("-")[1]))]

    def read(self, key: bytes) -> bytes | None:
        place = self._directory.index.find(key)
        if place is None:
            return None
        (headers, at), (slots, offset) = self._files(place.slab, place.slot)
        return headers.read_bytes()[at : at + 128] + slots.read_bytes()[offset : offset + place.length]

    def write(self, key: bytes, stored: bytes) -> None:
        """As if a writer had published ``stored`` under ``key``; in the page's own slot where it has one. Its seal is
        that of its header where that holds, as a rebuild would have it."""
        header, payload = stored[:128].ljust(128, b"\0"), stored[128:]
        try:
            envelope.decode_header(header)
            seal = envelope.seal_of(header)
        except FormatError:
            seal = bytes(envelope.SEAL_LENGTH)
        index = self._directory.index
        place = index.find(key)
        with index.changing() as change:
            if place is not None:
                slab, slot = place.slab, place.slot
                change.remove(key)
            else:
                slab, slot = -1, -1
            if not change.slabs():
                # No page was stored here yet.
                self._directory.create_slab_file(change.add_slab(max(1, -(-len(payload) // 4096)) * 4096, 16))
            slot_size = next(s.slot_size for s in change.slabs() if slab in (-1, s.number))
            payload, portion = payload[:slot_size], index.next_portion()
            taken = []
            while not taken or slab not in (-1, taken[-1].slab) or slot not in (-1, taken[-1].slot):
                (found,) = change.take_free_slots(slot_size, 1, portion).T.tolist()
                taken.append(SlotReference(*found, len(payload), len(taken)))
            slab, slot = taken[-1][:2]
            written = SlotReferences.of(taken[-1:])
            keys = [bytes(48)] * (len(taken) - 1) + [key]
            assert change.publish(portion, keys, SlotReferences.of(taken), written) == [True]
        first = next(s.first_record for s in index.slabs() if s.number == slab)
        index.seals[first + slot] = np.frombuffer(seal, np.uint64)
        for (file, offset), content in zip(
            self._files(slab, slot), (header, payload.ljust(slot_size, b"\0")), strict=True
        ):
            with file.open("r+b") as opened:
                opened.seek(offset)
                opened.write(content)

    def keys(self) -> list[bytes]:
        return [page.key for page in self._directory.index.pages()]


class SpreadRaw:
    """The stored objects of a SpreadStore, each where its path's own raw access finds them."""

    def __init__(self, paths: Sequence[Path], raws: Sequence[RawFiles | RawSlots]) -> None:
        self._choice = PathChoice([str(path) for path in paths])
        self._raws = raws

    def _raw(self, key: bytes) -> RawFiles | RawSlots:
        (number,) = self._choice.choose([key], range(len(self._raws)))
        return self._raws[number]

    def read(self, key: bytes) -> bytes | None:
        return self._raw(key).read(key)

    def write(self, key: bytes, stored: bytes) -> None:
        self._raw(key).write(key, stored)

    def keys(self) -> list[bytes]:
        return list(itertools.chain.from_iterable(raw.keys() for raw in self._raws))


def account_and_walk(store: PageFileStore) -> tuple[int, int]:
    """What the account of a store's directory says, and what a walk over it finds."""
    return store.used_bytes(), store._directory.count_occupied()

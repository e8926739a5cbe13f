"""Second ways to what a store holds, for the conformance suite."""

from __future__ import annotations

from pathlib import Path

from hicache_ext.storage.file.pages import PageFileStore
from hicache_ext.storage.file.slab.change import Written
from hicache_ext.storage.file.slab.store import SlabStore, _SlabPart
from hicache_ext.testing.memory_store import MemoryPageStore


class RawFiles:
    """Page files found by the names that docs and directory.py give, not by the package's code."""

    def __init__(self, *paths: Path, mirrored: bool = False) -> None:
        """``mirrored``: every path holds every page (tiers), instead of a part (one store's paths)."""
        self._paths = paths
        self._mirrored = mirrored

    def _files(self, key: bytes) -> list[Path]:
        page_hash = key[16:].hex()
        number = int.from_bytes(key[-4:], "little") % len(self._paths)
        paths = self._paths if self._mirrored else self._paths[number : number + 1]
        return [path / "pages" / key[:16].hex() / page_hash[:2] / f"{page_hash}.page" for path in paths]

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
        paths = self._paths[:1] if self._mirrored else self._paths
        files = [file for path in paths for file in path.glob("pages/*/*/*.page")]
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
        self._parts = store._parts

    def _part(self, key: bytes) -> _SlabPart:
        return self._parts[int.from_bytes(key[-4:], "little") % len(self._parts)]

    def _file_and_offset(self, part: _SlabPart, slab_number: int, slot: int) -> tuple[Path, int]:
        (file,) = (part.directory.path / "slabs").glob(f"{slab_number:08x}-*.slab")
        return file, slot * int(file.stem.split("-")[1])

    def read(self, key: bytes) -> bytes | None:
        part = self._part(key)
        place = part.directory.index.find(key)
        if place is None:
            return None
        file, offset = self._file_and_offset(part, place.slab, place.slot)
        return file.read_bytes()[offset : offset + place.length]

    def write(self, key: bytes, stored: bytes) -> None:
        """As if a writer had published ``stored`` under ``key``; in the page's own slot where it has one."""
        part = self._part(key)
        index = part.directory.index
        place = index.find(key)
        with index.changing() as change:
            if place is not None:
                slab, slot = place.slab, place.slot
                change.remove(key)
            else:
                slab, slot = -1, -1
            if not change.slabs():
                # Of several paths this one may have no page yet.
                part.directory.create_slab_file(change.add_slab(-(-len(stored) // 4096) * 4096, 16))
            slot_size = next(s.slot_size for s in change.slabs() if slab in (-1, s.number))
            passed_over = []
            while True:
                (taken,) = change.take_free_slots(slot_size, 1)
                if slab == -1 or taken == (slab, slot):
                    break
                passed_over.append(taken)
            slab, slot = taken
            for other in passed_over:
                change.give_back(*other)
            stored = stored[:slot_size]
            token = change.pend([(slab, slot)])
            assert change.publish([token], [Written(key, slab, slot, len(stored), 0, None)]) == [True]
        file, offset = self._file_and_offset(part, slab, slot)
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(stored.ljust(slot_size, b"\0"))

    def keys(self) -> list[bytes]:
        return [page.key for part in self._parts for page in part.directory.index.pages()]


def account_and_walk(store: PageFileStore) -> tuple[int, int]:
    """What the accounts of a store's directories say, and what walks over them find."""
    return store.used_bytes(), sum(directory.count_occupied() for directory in store._directories)

"""Second ways to what a store holds, for the conformance suite."""

from __future__ import annotations

from pathlib import Path

from hicache_ext.storage.file.pages import PageFileStore
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


def account_and_walk(store: PageFileStore) -> tuple[int, int]:
    """What the accounts of a store's directories say, and what walks over them find."""
    return store.used_bytes(), sum(directory.count_occupied() for directory in store._directories)

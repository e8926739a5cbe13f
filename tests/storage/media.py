"""What the stores of this package stand on, for the conformance suite."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.tiering.tier_use import TieringSettings
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.file.opening import open_file_tier
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.medium import Medium
from tests.rigs.disk_faults import DiskFaults
from tests.storage.raw_access import RawFiles, RawObjects, RawSlots, SpreadRaw

MIB = 1 << 20


class BreakableDict(dict):
    """Memory that fails while ``broken``."""

    broken = False
    full = False

    def _used(name: str) -> Callable[..., Any]:
        def use(self, *arguments):
            if self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.full and name == "__setitem__":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return getattr(dict, name)(self, *arguments)

        return use

    get, pop, __contains__, __iter__ = _used("get"), _used("pop"), _used("__contains__"), _used("__iter__")
    __getitem__, __setitem__, __delitem__ = _used("__getitem__"), _used("__setitem__"), _used("__delitem__")


class RawMedium(Medium):
    """A medium with one of the ways past a store of raw_access.py."""

    raw: Any

    def read(self, key: bytes) -> bytes | None:
        return self.raw.read(key)

    def write(self, key: bytes, stored: bytes) -> None:
        self.raw.write(key, stored)

    def keys(self) -> list[bytes]:
        return self.raw.keys()


class Memory(RawMedium):
    type = "memory"
    shared = False
    between_processes = False
    keeps_identities = True

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = BreakableDict()
        self.documents: dict[bytes, dict[str, Any]] = {}
        self.raw = RawObjects(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # What another process has: memory of its own.
        return type(self), ()

    def open(self) -> PageStore:
        store = MemoryPageStore(objects=self.objects)
        store._documents = self.documents
        return store

    def open_elsewhere(self) -> PageStore:
        return MemoryPageStore()

    @contextmanager
    def failing(self) -> Iterator[None]:
        self.objects.broken = True
        yield
        self.objects.broken = False

    @contextmanager
    def full(self) -> Iterator[None]:
        self.objects.full = True
        yield
        self.objects.full = False


class Over(Medium):
    """The medium of the stores that ``wrap`` makes of those over ``inner``; ``declared`` is what it changes."""

    type, shared = "", False

    def __init__(self, inner: Medium, wrap: Callable[[PageStore], PageStore], **declared: Any) -> None:
        self.inner = inner
        self._wrap = wrap
        for name in _DECLARED:
            setattr(self, name, declared.get(name, getattr(inner, name)))

    def open(self) -> PageStore:
        return self._wrap(self.inner.open())

    def open_elsewhere(self) -> PageStore:
        return self._wrap(self.inner.open_elsewhere())

    def read(self, key: bytes) -> bytes | None:
        return self.inner.read(key)

    def write(self, key: bytes, stored: bytes) -> None:
        self.inner.write(key, stored)

    def keys(self) -> list[bytes]:
        return self.inner.keys()

    def failing(self) -> AbstractContextManager[object]:
        return self.inner.failing()

    def full(self) -> AbstractContextManager[object]:
        return self.inner.full()

    def close(self) -> None:
        self.inner.close()


_DECLARED = (
    "type",
    "shared",
    "between_processes",
    "keeps_identities",
    "writes_later",
    "makes_room_when_full",
    "clears_at_once",
    "killed_writes_end_after",
    "copies",
    "largest_page",
    "start_method",
)


class OfDirectory(RawMedium):
    """Stores over a directory of this machine."""

    type = "file"
    shared = False

    def __init__(self, directory: Path | None = None) -> None:
        """Without a directory: one that ends with the medium."""
        self._own = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="hicache-medium-"))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("raw", "_watching")}

    def open(self) -> PageStore:
        return self.open_in(self.directory)

    def open_in(self, directory: Path) -> PageStore:
        raise NotImplementedError

    def open_elsewhere(self) -> PageStore:
        return self.open_in(self.directory.with_name(f"{self.directory.name}-of-another-machine"))

    def failing(self) -> AbstractContextManager[object]:
        return DiskFaults(self.directory, rate=1.0, errors=[errno.EIO], short=False)

    def full(self) -> AbstractContextManager[object]:
        # Some bytes may still find a place: a write moves fewer than it was given.
        return DiskFaults(self.directory, rate=1.0, errors=[errno.ENOSPC], calls=("pwritev", "link", "mkdir"))

    def close(self) -> None:
        if self._own:
            shutil.rmtree(self.directory)


class PageFiles(OfDirectory):
    makes_room_when_full = True

    def __init__(self, directory: Path | None = None, *, capacity: int | None = None) -> None:
        super().__init__(directory)
        self._capacity = capacity
        self.raw = RawFiles(self.directory)

    def open_in(self, directory: Path) -> PageStore:
        return PageFileStore("disk", directory, capacity=self._capacity)


class Slabs(OfDirectory):
    def __init__(self, directory: Path, store: type[SlabStore] = SlabStore) -> None:
        super().__init__(directory)
        self._store = store
        self._watching: list[SlabStore] = []

    @property
    def raw(self) -> RawSlots:
        if not self._watching:
            self._watching.append(SlabStore("watching", self.directory, capacity=256 * MIB))
        return RawSlots(self._watching[0])

    def open_in(self, directory: Path) -> PageStore:
        return self._store("disk", directory, capacity=256 * MIB)

    def close(self) -> None:
        for store in self._watching:
            store.close()
        super().close()


class TwoPaths(OfDirectory):
    """The file tier as a configuration opens it over two paths."""

    def __init__(self, directory: Path, layout: str, io: str = "buffered") -> None:
        super().__init__(directory)
        self._settings = {"layout": layout, "io": io, "capacity": 512 * MIB, "threads": 4}
        paths = [directory / name for name in _PATHS]
        self._parts = [Slabs(path) if layout == "slab" else PageFiles(path) for path in paths]
        self._paths = paths
        self.makes_room_when_full = layout != "slab"

    @property
    def raw(self) -> SpreadRaw:
        return SpreadRaw(self._paths, [part.raw for part in self._parts])

    def open_in(self, directory: Path) -> PageStore:
        disk = {"type": "file", "path": [str(directory / name) for name in _PATHS], **self._settings}
        return open_file_tier("disk", load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"])

    def close(self) -> None:
        for part in self._parts:
            part.close()
        super().close()


_PATHS = ("a", "b")


class TwoTiers(OfDirectory):
    """Two tiers of page files, each with every page."""

    type = "tiered"
    copies = 2
    makes_room_when_full = True

    def __init__(self, directory: Path | None = None, *, far_in_the_background: bool = False) -> None:
        super().__init__(directory)
        self._later = self.writes_later = far_in_the_background
        self._opened: list[TieredStore] = []
        self.raw = RawFiles(*[self.directory / name for name in _TIERS])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": []}

    def open_in(self, directory: Path) -> PageStore:
        tiers = [PageFileStore(name, directory / name, capacity=None) for name in _TIERS]
        if not self._later:
            return TieredStore(tiers, tiers)
        settings = TieringSettings(async_tiers=frozenset({"far"}))
        self._opened.append(TieredStore(tiers, tiers, promote_to=tiers[0], settings=settings))
        return self._opened[-1]

    def _settle(self) -> None:
        for store in self._opened:
            assert store.wait_until_written(30)

    def read(self, key: bytes) -> bytes | None:
        self._settle()
        return super().read(key)

    def write(self, key: bytes, stored: bytes) -> None:
        self._settle()
        super().write(key, stored)

    def keys(self) -> list[bytes]:
        self._settle()
        return super().keys()


_TIERS = ("near", "far")

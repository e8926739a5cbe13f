"""One directory of slabs: its files, its index, and who may trust that index.

::

    PATH/hicache_ext.json                    what this directory is
    PATH/lock                                held shared by every process that uses the directory
    PATH/trust                               the boot that wrote the index, or that it was closed in order
    PATH/index/                              LMDB and mapped files (index.py), ghosts of evicted pages (ghosts.py)
    PATH/slabs/<number>-<slot size>.slab     slots
    PATH/identities/<identity>.json          the facts behind an identity digest
    PATH/identities/<identity>.cleared       since when pages of an identity count again (milliseconds)
    PATH/pins/                               pinned pages (pins.py)
    PATH/expiry.lock, ttl.json, io_probe.*   see expiry.py, device_probe.py

Within one process all stores over one directory share one index (LMDB's rule) and the files' descriptors.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from hicache_ext import envelope
from hicache_ext.errors import FormatError, StoreSetupError
from hicache_ext.storage.file.directory import DIRECTORY_FORMAT, check_manifest
from hicache_ext.storage.file.file_system import WHY_IN_PLACE, file_system_of
from hicache_ext.storage.file.slab.index import SlabIndex
from hicache_ext.storage.file.slab.records import INDEX_VERSION, Place, Slab
from hicache_ext.storage.file.whole_file import write_whole

_SLAB_NAME = re.compile(r"([0-9a-f]{8})-([0-9]+)\.slab")
_IN_ORDER = f"closed in order, index {INDEX_VERSION}"
_REBUILD_BATCH = 4096

INDEX_BYTES_AT_LEAST = 1 << 20
INDEX_BYTES_PER_SLOT = 1024
"""What the index takes per slot, generously: it counts towards the capacity."""

_open_directories: dict[Path, SlabDirectory] = {}
_open_lock = threading.Lock()
_doubted_paths: set[Path] = set()
"""Directories whose device failed under this process, which could perhaps not note that down."""


@contextmanager
def slab_directory(path: Path, tier: str) -> Iterator[SlabDirectory]:
    """The directory at ``path``, shared within this process, closed with its last user.

    Raises StoreSetupError with a sentence when it cannot be used.
    """
    with _open_lock:
        resolved = path.resolve()
        directory = _open_directories.get(resolved)
        if directory is None:
            directory = _open_directories[resolved] = SlabDirectory(resolved, tier)
        directory.users += 1
    try:
        yield directory
    finally:
        with _open_lock:
            directory.users -= 1
            if directory.users == 0:
                del _open_directories[resolved]
                directory.close()


@dataclass(slots=True)
class _Descriptor:
    """An open slab file. ``dropped``: nobody new uses it, its last user closes it."""

    fd: int
    users: int = 0
    dropped: bool = False


class SlabDirectory:
    """Use ``slab_directory``. Thread-safe."""

    def __init__(self, path: Path, tier: str) -> None:
        self.path = path
        self.users = 0
        self.slabs_path = path / "slabs"
        self.identities = path / "identities"
        self._trust = path / "trust"
        self._descriptors: dict[tuple[int, bool], _Descriptor] = {}
        self._doubted = False
        self._descriptors_lock = threading.Lock()
        self.rebuilt = 0
        file_system = file_system_of(path)
        if not file_system.in_place:
            raise StoreSetupError(
                tier, f"directory {str(path)!r} cannot hold slabs: {file_system.type} {WHY_IN_PLACE}", ["layout: pages"]
            )
        try:
            for directory in (path, self.slabs_path, self.identities):
                directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreSetupError(tier, f"directory {str(path)!r}: {error.strerror or error}") from error
        try:
            self._adopt(tier)
            self.index = self._open_index()
        except (OSError, lmdb.Error) as error:
            os.close(self._lock)
            raise StoreSetupError(tier, f"directory {str(path)!r}: {error}") from error
        except BaseException:
            os.close(self._lock)
            raise

    # -- files -----------------------------------------------------------------------------------------------------

    def create_slab_file(self, slab: Slab) -> None:
        """Make the file of a slab with all its blocks. Raises OSError (ENOSPC) and leaves no file."""
        path = self.slab_path(slab)
        # A file of this number that the index does not know is what a killed process left.
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, slab.size)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)

    def delete_slab_file(self, slab: Slab) -> None:
        """Delete the file of a dropped slab; its blocks are free at once, also while others have it open."""
        path = self.slab_path(slab)
        # Others may have it open for a while: an empty file takes no room.
        os.truncate(path, 0)
        path.unlink()

    def slab_path(self, slab: Slab) -> Path:
        return self.slabs_path / f"{slab.number:08x}-{slab.slot_size}.slab"

    @contextmanager
    def opened(self, slab: Slab, *, direct: bool = False) -> Iterator[int]:
        """A descriptor of the slab's file, with O_DIRECT or without; valid inside, and kept open. Raises OSError."""
        with self._descriptors_lock:
            descriptor = self._use(slab, direct)
        try:
            yield descriptor.fd
        finally:
            self._release([descriptor])

    def open_all(self, slabs: Sequence[Slab], *, direct: bool) -> tuple[dict[int, int], Callable[[], None]]:
        """``opened`` for those of these slabs that can be opened, by number, until the answer's second part is
        called."""
        used: dict[int, _Descriptor] = {}
        with self._descriptors_lock:
            for slab in slabs:
                try:
                    used[slab.number] = self._use(slab, direct)
                except OSError:
                    continue
        return {number: one.fd for number, one in used.items()}, lambda: self._release(used.values())

    def _use(self, slab: Slab, direct: bool) -> _Descriptor:
        which = (slab.number, direct)
        descriptor = self._descriptors.get(which)
        if descriptor is None:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
            descriptor = self._descriptors[which] = _Descriptor(os.open(self.slab_path(slab), flags))
        descriptor.users += 1
        return descriptor

    def _release(self, descriptors: Iterable[_Descriptor]) -> None:
        with self._descriptors_lock:
            for descriptor in descriptors:
                descriptor.users -= 1
                if descriptor.dropped and descriptor.users == 0:
                    os.close(descriptor.fd)

    def close_dropped(self, known: Iterable[int]) -> None:
        """Close the descriptors of slabs that are not among the numbers ``known``, those in use by their last user.

        A number is never given to two slabs. What another process has dropped is found out when one of its new slabs
        is met for the first time, so that few are open in vain at any time.
        """
        numbers = set(known)
        with self._descriptors_lock:
            for which in [which for which in self._descriptors if which[0] not in numbers]:
                descriptor = self._descriptors.pop(which)
                descriptor.dropped = True
                if descriptor.users == 0:
                    os.close(descriptor.fd)

    # -- identities ------------------------------------------------------------------------------------------------

    def save_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        path = self.identities / f"{digest.hex()}.json"
        if not path.exists():
            write_whole(path, json.dumps(document, indent=1, sort_keys=True))

    def note_cleared(self, digest: bytes) -> None:
        """So that a rebuild does not bring cleared pages back."""
        write_whole(self.identities / f"{digest.hex()}.cleared", str(int(time.time() * 1000)))

    def _cleared_at(self, digest: bytes) -> int:
        try:
            return int((self.identities / f"{digest.hex()}.cleared").read_text())
        except (OSError, ValueError):
            return -1

    # -- opening and closing ---------------------------------------------------------------------------------------

    def doubt(self) -> None:
        """The device failed: whoever opens this directory next, alone, rebuilds its index."""
        self._doubted = True
        _doubted_paths.add(self.path)

    def close(self) -> None:
        """Releases everything; the last process out syncs the index and says so. Raises lmdb.Error or OSError when
        that fails."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        try:
            self.index.close(sync=alone and not self._doubted)
            if alone and self._doubted:
                # Where not even that works, this process remembers it.
                with suppress(OSError):
                    self._trust.unlink(missing_ok=True)
            elif alone:
                write_whole(self._trust, _IN_ORDER)
        except BaseException:
            _doubted_paths.add(self.path)
            raise
        finally:
            self.close_dropped(())
            os.close(self._lock)

    def _open_index(self) -> SlabIndex:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Others use it, so it is sound, or is being rebuilt: then this waits for it.
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return SlabIndex(self.path / "index")
        trusted = self._trust.exists() and self._trust.read_text() in (_IN_ORDER, _written_by_this_boot())
        trusted = trusted and self.path not in _doubted_paths
        index = self._open_trusted_index() if trusted else None
        if index is None:
            index = self._rebuild()
        with index.changing() as change:
            change.release_dead_writers()
        self._delete_unknown_files(index)
        write_whole(self._trust, _written_by_this_boot())
        _doubted_paths.discard(self.path)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return index

    def _open_trusted_index(self) -> SlabIndex | None:
        try:
            return SlabIndex(self.path / "index")
        except (OSError, lmdb.Error):
            return None

    def _rebuild(self) -> SlabIndex:
        """A new index from the envelopes in the slabs. Payloads are checked when they are read, as always."""
        for path in (self.path / "index").glob("*"):
            path.unlink()
        index = SlabIndex(self.path / "index")
        for path in sorted(self.slabs_path.iterdir()):
            match = _SLAB_NAME.fullmatch(path.name)
            if match is None:
                continue
            number, slot_size = int(match[1], 16), int(match[2])
            slots = path.stat().st_size // slot_size
            if slots == 0:
                continue
            with index.changing() as change:
                slab = change.add_slab(slot_size, slots, number)
                change.reserve_slab_numbers(number + 1)
            self._adopt_pages(index, slab)
        return index

    def _adopt_pages(self, index: SlabIndex, slab: Slab) -> None:
        with self.opened(slab) as fd:
            self._adopt_pages_of(fd, index, slab)

    def _adopt_pages_of(self, fd: int, index: SlabIndex, slab: Slab) -> None:
        for first in range(0, slab.slots, _REBUILD_BATCH):
            pages: list[tuple[bytes, Place, int]] = []
            for slot in range(first, min(first + _REBUILD_BATCH, slab.slots)):
                header = os.pread(fd, envelope.FIELDS_LENGTH, slot * slab.slot_size)
                try:
                    found = envelope.decode_header(header)
                except FormatError:
                    continue
                length = found.header_length + found.payload_length
                if length <= slab.slot_size and found.created_ms > self._cleared_at(found.identity):
                    pages.append((found.key, Place(slab.number, slot, length), found.created_ms))
            with index.changing() as change:
                self.rebuilt += change.adopt(slab, pages)

    def _delete_unknown_files(self, index: SlabIndex) -> None:
        """Slab files that a process was killed over before, or after, the index knew them."""
        known = {self.slab_path(slab).name for slab in index.slabs()}
        for path in self.slabs_path.iterdir():
            if _SLAB_NAME.fullmatch(path.name) and path.name not in known:
                path.unlink()

    def _adopt(self, tier: str) -> None:
        manifest = self.path / "hicache_ext.json"
        if not manifest.exists():
            write_whole(manifest, json.dumps({"format": DIRECTORY_FORMAT, "layout": "slab"}) + "\n")
        check_manifest(self.path, "slab", tier)


def _written_by_this_boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"boot {boot}, index {INDEX_VERSION}"

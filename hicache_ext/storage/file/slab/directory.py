"""One directory of slabs: its files, its index, and who may trust that index.

::

    PATH/hicache_ext.json                    what this directory is
    PATH/lock                                held shared by every process that uses the directory
    PATH/trust                               the boot that wrote the index, or that it was closed in order
    PATH/index/                              LMDB and mapped files (index.py), ghosts of evicted pages (ghosts.py)
    PATH/slabs/<number>-<slot size>.slab     slots: the payloads of pages
    PATH/slabs/<number>-<slot size>.headers  the headers of those pages, in the order of the slots
    PATH/identities/<identity>.json          the facts behind an identity digest
    PATH/identities/<identity>.cleared       since when pages of an identity count again (milliseconds)
    PATH/pins/                               pinned pages (pins.py)
    PATH/expiry.lock, ttl.json, io_probe.*   see expiry.py, device_probe.py

Within one process all stores over one directory share one index (LMDB's rule) and the files' descriptors.
"""

from __future__ import annotations

import enum
import fcntl
import functools
import json
import logging
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
import numpy as np

from hicache_ext import envelope
from hicache_ext.errors import FormatError, StoreSetupError
from hicache_ext.storage.file.directory import FORMATS, check_manifest, format_and_layout
from hicache_ext.storage.file.file_system import WHY_IN_PLACE, file_system_of
from hicache_ext.storage.file.slab.change import FoundPage
from hicache_ext.storage.file.slab.index import SlabIndex
from hicache_ext.storage.file.slab.mapped import WORD, Words, extend, sync
from hicache_ext.storage.file.slab.records import INDEX_VERSION, Slab
from hicache_ext.storage.file.slab.shapes import HEADER
from hicache_ext.storage.file.slab.slot_table import Seals
from hicache_ext.storage.file.whole_file import write_whole

logger = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"([0-9a-f]{8})-([0-9]+)\.(slab|headers)")
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


class SlabFile(enum.Enum):
    """A file of a slab, as it is opened."""

    SLOTS = "slots"
    DIRECT = "slots, with O_DIRECT"
    HEADERS = "headers"


@dataclass(slots=True)
class _Descriptor:
    """An open file of a slab. ``dropped``: nobody new uses it, its last user closes it."""

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
        self._descriptors: dict[tuple[int, SlabFile], _Descriptor] = {}
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
        """Make the files of a slab with all their blocks. Raises OSError (ENOSPC) and leaves no file."""
        paths = self.slab_paths(slab)
        # A file of this number that the index does not know is what a killed process left.
        for path in paths:
            path.unlink(missing_ok=True)
        try:
            # The headers first: without them slots would be nothing to a rebuild.
            self._complete_headers(slab)
            extend(self.slab_path(slab), slab.size // WORD)
        except OSError:
            for path in paths:
                path.unlink(missing_ok=True)
            raise

    def delete_slab_file(self, slab: Slab) -> None:
        """Delete the files of a dropped slab; their blocks are free at once, also while others have them open."""
        failed: OSError | None = None
        for path in reversed(self.slab_paths(slab)):
            try:
                # Others may have it open for a while: an empty file takes no room.
                os.truncate(path, 0)
                path.unlink()
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def slab_path(self, slab: Slab) -> Path:
        return self.slabs_path / f"{slab.number:08x}-{slab.slot_size}.slab"

    def headers_path(self, slab: Slab) -> Path:
        return self.slab_path(slab).with_suffix(".headers")

    def slab_paths(self, slab: Slab) -> tuple[Path, Path]:
        return self.headers_path(slab), self.slab_path(slab)

    @property
    def seals(self) -> Seals:
        """See ``SlabIndex.seals``."""
        return self.index.seals

    @contextmanager
    def opened(self, slab: Slab, file: SlabFile = SlabFile.SLOTS) -> Iterator[int]:
        """A descriptor of a file of the slab; valid inside, and kept open. Raises OSError."""
        with self._descriptors_lock:
            descriptor = self._use(slab, file)
        try:
            yield descriptor.fd
        finally:
            self._release([descriptor])

    def open_all(self, slabs: Sequence[Slab], file: SlabFile, *, headers: bool) -> tuple[Words, Callable[[], None]]:
        """``opened`` for those of these slabs that can be opened, until the answer's second part is called: a row per
        slab as compiled_runs.py wants it, number, descriptor, that of its headers (-1 without), first record."""
        used: list[_Descriptor] = []
        rows: list[tuple[int, int, int, int]] = []
        with self._descriptors_lock:
            for slab in slabs:
                with suppress(OSError):
                    used.append(self._use(slab, file))
                    fd, of_headers = used[-1].fd, -1
                    if headers:
                        used.append(self._use(slab, SlabFile.HEADERS))
                        of_headers = used[-1].fd
                    rows.append((slab.number, fd, of_headers, slab.first_record))
        return np.array(rows, np.int64).reshape(-1, 4), lambda: self._release(used)

    def _use(self, slab: Slab, file: SlabFile) -> _Descriptor:
        which = (slab.number, file)
        descriptor = self._descriptors.get(which)
        if descriptor is None:
            path = self.headers_path(slab) if file is SlabFile.HEADERS else self.slab_path(slab)
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if file is SlabFile.DIRECT else 0)
            descriptor = self._descriptors[which] = _Descriptor(os.open(path, flags))
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
            try:
                if alone and not self._doubted:
                    # So that the index and what it would be rebuilt from agree.
                    for headers in self.slabs_path.glob("*.headers"):
                        sync(headers)
            finally:
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
        slabs = index.slabs()
        for slab in slabs:
            self._complete_headers(slab)
        self._delete_unknown_files(slabs)
        write_whole(self._trust, _written_by_this_boot())
        _doubted_paths.discard(self.path)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return index

    def _open_trusted_index(self) -> SlabIndex | None:
        """None where it cannot be read, or is not there any more."""
        try:
            index = SlabIndex(self.path / "index")
        except (OSError, lmdb.Error):
            return None
        if not index.is_new:
            return index
        index.close(sync=False)
        return None

    def _rebuild(self) -> SlabIndex:
        """A new index from the headers of the slabs. Payloads are checked when they are read, as always."""
        for path in (self.path / "index").glob("*"):
            path.unlink()
        index = SlabIndex(self.path / "index")
        written: dict[int, Words] = {}
        for path in sorted(self.slabs_path.iterdir()):
            match = _FILE_NAME.fullmatch(path.name)
            if match is None or match[3] != "slab":
                continue
            number, slot_size = int(match[1], 16), int(match[2])
            slots = path.stat().st_size // slot_size
            if slots == 0:
                continue
            with index.changing() as change:
                slab = change.add_slab(slot_size, slots, number)
                change.reserve_slab_numbers(number + 1)
            if self.headers_path(slab).exists():
                with self.opened(slab, SlabFile.HEADERS) as fd:
                    self._adopt_pages(fd, index, slab, written)
        return index

    def _complete_headers(self, slab: Slab) -> None:
        """Make the file of headers, or what is missing of it where somebody has cut it. Raises OSError."""
        extend(self.headers_path(slab), slab.headers_size // WORD)

    def _adopt_pages(self, fd: int, index: SlabIndex, slab: Slab, written: dict[int, Words]) -> None:
        """``fd``: the headers; ``written``: see ``IndexChange.adopt``."""
        cleared_at = functools.cache(self._cleared_at)
        for first in range(0, slab.slots, _REBUILD_BATCH):
            pages: list[FoundPage] = []
            slots = min(_REBUILD_BATCH, slab.slots - first)
            headers = os.pread(fd, slots * HEADER, first * HEADER)
            for slot in range(slots):
                fields = headers[slot * HEADER : (slot + 1) * HEADER]
                try:
                    found = envelope.decode_header(fields)
                except FormatError:
                    continue
                length = found.payload_length
                if length <= slab.slot_size and found.created_ms > cleared_at(found.identity):
                    seal = envelope.seal_of(fields)
                    pages.append(FoundPage(found.key, first + slot, length, found.created_ms, seal))
            with index.changing() as change:
                self.rebuilt += change.adopt(slab, pages, written)

    def _delete_unknown_files(self, slabs: Iterable[Slab]) -> None:
        """All but those of ``slabs``: a process was killed over them before, or after, the index knew them."""
        known = {path.name for slab in slabs for path in self.slab_paths(slab)}
        for path in self.slabs_path.iterdir():
            if _FILE_NAME.fullmatch(path.name) and path.name not in known:
                path.unlink()

    def _adopt(self, tier: str) -> None:
        """Write the manifest, or check it. The pages of the older format are given up, unless others use them."""
        manifest = self.path / "hicache_ext.json"
        current = json.dumps({"format": FORMATS["slab"], "layout": "slab"}) + "\n"
        if not manifest.exists():
            write_whole(manifest, current)
        elif format_and_layout(self.path) == (1, "slab"):
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.warning("tier %s: %s is of format 1: its pages are given up", tier, self.path)
                self._trust.unlink(missing_ok=True)
                self._delete_unknown_files(())
                write_whole(manifest, current)
        check_manifest(self.path, "slab", tier)


def _written_by_this_boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"boot {boot}, index {INDEX_VERSION}"

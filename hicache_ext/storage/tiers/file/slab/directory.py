"""One directory of slabs: its files, its index, and when that index may be trusted.

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
import errno
import fcntl
import functools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from hicache_ext.errors import FormatError, StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.runtime.access import make_directory, make_tier_directory, open_file
from hicache_ext.runtime.file_lock import PATIENCE, lock_within, show_progress, try_lock
from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.runtime.liveness import boot_id
from hicache_ext.runtime.threads import call_within
from hicache_ext.runtime.whole_file import remove_whole, sync_whole, write_whole
from hicache_ext.storage.tiers.file.layout_choice import WHY_IN_PLACE
from hicache_ext.storage.tiers.file.manifest import adopt, check_before_start, is_taken_over, write_manifest
from hicache_ext.storage.tiers.file.modes import INDEX_FILE, SLAB_FILE
from hicache_ext.storage.tiers.file.slab.change import FoundPage
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.mapped import WORD, Words, extend, sync
from hicache_ext.storage.tiers.file.slab.records import INDEX_VERSION, Slab
from hicache_ext.storage.tiers.file.slab.shapes import HEADER
from hicache_ext.storage.tiers.file.slab.slot_table import Seals

logger = logging.getLogger(__name__)

_IN_ORDER = f"closed in order, index {INDEX_VERSION}"
_REBUILD_BATCH = 4096
_MILLISECONDS = re.compile(rb"[0-9]{13}")
_LONGEST_TICK = 10
"""Milliseconds by which the time of a file may lie before the time of the clock: a tick of the kernel."""
_ATTEMPTS = 20
"""To get the lock alone after its holder was killed."""

INDEX_BYTES_AT_LEAST = 1 << 20
INDEX_BYTES_PER_SLOT = 1024
"""An upper estimate of the index per slot; it counts towards the capacity."""

_open_directories: dict[Path, SlabDirectory] = {}
_open_lock = threading.Lock()
_doubted_paths: set[Path] = set()
"""Directories whose device failed under this process, in case that could not be written down."""


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
            check_before_start(path, "slab", tier)
            make_tier_directory(path)
            for directory in (self.identities, self.slabs_path):
                make_directory(directory)
            self._lock = open_file(path / "lock", os.O_RDWR)
        except OSError as error:
            raise StoreSetupError(tier, f"directory {str(path)!r}: {error.strerror or error}") from error
        try:
            self._adopt(tier)
            self.index = self._open_index()
        except (OSError, lmdb.Error) as error:
            os.close(self._lock)
            reason = getattr(error, "strerror", None) or error
            raise StoreSetupError(tier, f"directory {str(path)!r}: {reason}") from error
        except BaseException:
            os.close(self._lock)
            raise

    # -- files -----------------------------------------------------------------------------------------------------

    def create_slab_file(self, slab: Slab) -> None:
        """Make the files of a slab with all their blocks. Raises OSError (ENOSPC) and leaves no file."""
        paths = self.slab_paths(slab)
        # A file of this number that the index does not know was left by a killed process.
        for path in paths:
            path.unlink(missing_ok=True)
        try:
            # The headers first: a rebuild needs them.
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
                # Others may have it open for a while: an empty file takes no space.
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
        """``opened`` for those of these slabs that can be opened, until the returned function is called: a row per slab
        for compiled_runs.py, with number, descriptor, that of its headers (-1: none), first record."""
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
        return np.array(rows, np.int64).reshape(-1, 4), functools.partial(self._release, used)

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
        """Close the descriptors of slabs whose numbers are not in ``known``; those in use are closed by their last
        user.

        No two slabs have one number. Slabs dropped by another process are noticed when one of its new slabs is used for
        the first time, so that few descriptors stay open in vain.
        """
        numbers = set(known)
        with self._descriptors_lock:
            for which in [which for which in self._descriptors if which[0] not in numbers]:
                descriptor = self._descriptors.pop(which)
                descriptor.dropped = True
                if descriptor.users == 0:
                    os.close(descriptor.fd)

    # -- identities ------------------------------------------------------------------------------------------------

    def note_cleared(self, digest: bytes) -> None:
        """Note it, so that a rebuild does not bring cleared pages back. It survives a power loss after
        ``sync_cleared``.

        Two calls, because SGLang's scheduler thread makes this one and must not wait for the disk.
        """
        write_whole(self._cleared_path(digest), str(int(time.time() * 1000)), sync=False)

    def sync_cleared(self, digest: bytes) -> None:
        sync_whole(self._cleared_path(digest))

    def _cleared_path(self, digest: bytes) -> Path:
        return self.identities / f"{digest.hex()}.cleared"

    # -- opening and closing ---------------------------------------------------------------------------------------

    def doubt(self) -> None:
        """The device failed: the next process that opens this directory alone rebuilds its index."""
        self._doubted = True
        _doubted_paths.add(self.path)

    def close(self) -> None:
        """Release everything; the last process syncs the index and marks it as closed in order. Raises lmdb.Error or
        OSError when that fails."""
        try:
            alone = try_lock(self._lock, fcntl.LOCK_EX)
        except OSError:
            alone = False
        try:
            try:
                if alone and not self._doubted:
                    # So that the index agrees with the headers from which it would be rebuilt.
                    for headers in self.slabs_path.glob("*.headers"):
                        sync(headers)
                        show_progress(self._lock)
            finally:
                self.index.close(sync=alone and not self._doubted)
            if alone and self._doubted:
                # If even that fails, this process remembers it.
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
        for _ in range(_ATTEMPTS):
            if try_lock(self._lock, fcntl.LOCK_EX):
                return self._open_index_alone()
            # Others use it, so it is sound, or they are rebuilding it: wait for that.
            lock_within(self._lock, fcntl.LOCK_SH, PATIENCE, self.path / "lock")
            if is_trusted(self.path):
                break
            # The process that rebuilt it was killed.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            time.sleep(random.uniform(0.01, 0.1))
        else:
            # Others use it and have another id of this boot.
            lock_within(self._lock, fcntl.LOCK_SH, PATIENCE, self.path / "lock")
        return self._open_used_index()

    def _open_used_index(self) -> SlabIndex:
        """Open beside other processes. One may be stopped amid a change, for which LMDB would wait for ever: raises
        TimeoutError with a sentence."""
        opened: list[SlabIndex] = []

        def end_late() -> None:
            for index in opened:
                index.close(sync=False)

        call = call_within(
            PATIENCE,
            "hicache-open-index",
            lambda: opened.append(SlabIndex(self.path / "index")),
            end_late,
        )
        if call is None:
            reason = f"another process has held the index in {str(self.path)!r} for {PATIENCE:.0f} s"
            raise TimeoutError(errno.ETIMEDOUT, f"{reason}: stopped amid a change of it, perhaps")
        call.result()
        return opened[0]

    def _open_index_alone(self) -> SlabIndex:
        """Open with the lock for this process alone; the lock is shared afterwards."""
        index = self._open_trusted_index() if self._is_trusted() else None
        if index is None:
            # After a kill amid the rebuild nobody must use what is there.
            remove_whole(self._trust)
            index = self._rebuild()
        # Before the first change: after a power loss a changed index must not count as closed in order.
        self._trust_in_this_boot()
        with index.changing() as change:
            change.release_dead_writers()
        slabs = index.slabs()
        for slab in slabs:
            self._complete_headers(slab)
        self._delete_unknown_files(slabs)
        _doubted_paths.discard(self.path)
        lock_within(self._lock, fcntl.LOCK_SH, PATIENCE, self.path / "lock")
        return index

    def _is_trusted(self) -> bool:
        return is_trusted(self.path) and self.path not in _doubted_paths

    def _trust_in_this_boot(self) -> None:
        if _trust_in(self.path) != _written_by_this_boot():
            write_whole(self._trust, _written_by_this_boot())

    def _open_trusted_index(self) -> SlabIndex | None:
        """The index; None if it cannot be read or is gone."""
        try:
            index = SlabIndex(self.path / "index")
        except (OSError, lmdb.Error):
            return None
        if not index.is_new:
            return index
        index.close(sync=False)
        return None

    def _rebuild(self) -> SlabIndex:
        """A new index from the headers of the slabs. Payloads are checked when they are read."""
        for path in (self.path / "index").glob("*"):
            if INDEX_FILE.fullmatch(path.name):
                path.unlink()
        index = SlabIndex(self.path / "index")
        written: dict[int, Words] = {}
        for number, slot_size, slots in slabs_by_files(self.path):
            with index.changing() as change:
                slab = change.add_slab(slot_size, slots, number)
                change.reserve_slab_numbers(number + 1)
            if self.headers_path(slab).exists():
                with self.opened(slab, SlabFile.HEADERS) as fd:
                    self._adopt_pages(fd, index, slab, written)
        return index

    def _complete_headers(self, slab: Slab) -> None:
        """Make the file of headers, or the missing part of one that was cut. Raises OSError."""
        extend(self.headers_path(slab), slab.headers_size // WORD)

    def _adopt_pages(self, fd: int, index: SlabIndex, slab: Slab, written: dict[int, Words]) -> None:
        """``fd``: the headers; ``written``: see ``IndexChange.adopt``."""
        for pages in pages_in_headers(fd, slab, functools.cache(functools.partial(cleared_at, self.path))):
            with index.changing() as change:
                self.rebuilt += change.adopt(slab, pages, written)
            show_progress(self._lock)

    def _delete_unknown_files(self, slabs: Iterable[Slab]) -> None:
        """Delete all files but those of ``slabs``: left by processes killed while they added or dropped a slab."""
        known = {path.name for slab in slabs for path in self.slab_paths(slab)}
        for path in self.slabs_path.iterdir():
            if SLAB_FILE.fullmatch(path.name) and path.name not in known:
                path.unlink()

    def _adopt(self, tier: str) -> None:
        """Write or check the manifest. Pages of the older format are given up, unless others use them."""
        if is_taken_over(self.path, "slab") and try_lock(self._lock, fcntl.LOCK_EX):
            logger.warning("tier %s: %s is of format 1: its pages are given up", tier, self.path)
            remove_whole(self._trust)
            self._delete_unknown_files(())
            write_manifest(self.path, "slab")
        adopt(self.path, "slab", tier)


def is_trusted(path: Path) -> bool:
    """Whether the index of the directory ``path`` may be used: this boot wrote it, or it was closed in order."""
    return _trust_in(path) in (_IN_ORDER, _written_by_this_boot())


def slabs_by_files(path: Path) -> list[tuple[int, int, int]]:
    """Number, slot size and slots of every slab in the directory ``path``, by name and size of its file. Raises
    OSError."""
    slabs: list[tuple[int, int, int]] = []
    for file in sorted((path / "slabs").iterdir()):
        match = SLAB_FILE.fullmatch(file.name)
        if match is not None and match[3] == "slab" and int(match[2]):
            try:
                slots = file.stat().st_size // int(match[2])
            except FileNotFoundError:
                # Who looks from outside may come while a server drops a slab.
                continue
            slabs += [(int(match[1], 16), int(match[2]), slots)] if slots else []
    return slabs


def cleared_at(path: Path, digest: bytes) -> int:
    """When an identity was cleared (ms): only later pages count. -1: never cleared."""
    file = path / "identities" / f"{digest.hex()}.cleared"
    try:
        content, written = file.read_bytes(), file.stat().st_mtime_ns // 1_000_000
    except OSError:
        return -1
    # A file spoilt by a power loss still has the time at which it was written, at most a tick too early.
    return int(content) if _MILLISECONDS.fullmatch(content) else written + _LONGEST_TICK


def pages_in_headers(fd: int, slab: Slab, cleared: Callable[[bytes], int]) -> Iterator[list[FoundPage]]:
    """The pages in the open file of a slab's headers, in portions; ``cleared``: ``cleared_at`` of a digest.

    A freed slot still has the header of its last page.
    """
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
            if length <= slab.slot_size and found.created_ms > cleared(found.identity):
                seal = envelope.seal_of(fields)
                pages.append(FoundPage(found.key, first + slot, length, found.created_ms, seal))
        yield pages


def _trust_in(path: Path) -> str:
    """The content of the file; empty if it cannot be read."""
    try:
        return (path / "trust").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _written_by_this_boot() -> str:
    return f"boot {boot_id() or 'unknown'}, index {INDEX_VERSION}"

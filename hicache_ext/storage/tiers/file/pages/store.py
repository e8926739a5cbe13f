"""The layout of the file tier for file systems that several machines share: small pages that are written together are
one file, a pack (packs.py); every other page is a pack of one.

No mapped memory, and no index but that of the packs' names in memory: only what NFS, Lustre and 3FS keep their word on,
create, link, rename, unlink, flock. Files of a batch are read and written in parallel by a few threads, straight into
and out of host memory (preadv and pwritev release the GIL). A file gets its name only when it is whole.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import StoreSetupError
from hicache_ext.page.pack import Pack, pack_length
from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.devices import flags_of
from hicache_ext.storage.tiers.file.names import BLOCK, occupied
from hicache_ext.storage.tiers.file.pages.directory import PackDirectory
from hicache_ext.storage.tiers.file.pages.packs import PackRun, Packs
from hicache_ext.storage.tiers.file.pages.tree import TreeContents
from hicache_ext.storage.tiers.file.pages.upkeep import Evictor, Upkeep
from hicache_ext.storage.tiers.file.path_store import NO_SPACE, Fullness, PathStore, oldest_valid_ms
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.usage import Grant, Removal, Usage

logger = logging.getLogger(__name__)

_EVICTION_SHARE = 1 / 16
"""Share of the capacity freed at once, so that the walk is paid for by many batches."""
_NO_SPACE_PAUSE = 1.0
"""Seconds without writes after the file system said that it is full."""

_PORTIONS = 8
"""A write takes at most this part of the capacity at once, so that several processes can have one under way."""
_LOOKS = 3
"""For a page of a pack that others rename or remove meanwhile."""
_BUCKETS_COUNTED = 64
"""Buckets listed to say how many pages there are."""
_COUNT_INTERVAL = 60.0
"""Seconds between two such counts."""

_LEADING_AT_ONCE = 1024


class PageFileStore(PathStore):
    """PageStore over one directory."""

    layout = "pages"
    without_space = f"writes pause for {_NO_SPACE_PAUSE:.0f} s, again and again"
    removes_expired = True

    @property
    def no_space_since(self) -> int:
        return self._usage.no_space_since()

    @no_space_since.setter
    def no_space_since(self, since: int) -> None:
        self._usage.note_no_space(since)

    def _open(self, path: Path, evicted_age: RecentMean) -> None:
        # Headers of 128 bytes exclude O_DIRECT.
        flags = flags_of(self._plan.read), flags_of(self._plan.write)
        self._directory = PackDirectory(path, self.name)
        self._resources.callback(self._directory.close)
        self._open_account()
        self._packs = Packs(
            self.name, self._directory, self._usage, self.metrics, self._count_error, flags, self._look_over
        )
        self._resources.callback(self._packs.close)
        self._pins = PinnedPages(self.name, path, _pin_limit(self._capacity), self._directory.occupied_by)
        self._evictor = Evictor(self._directory, self.metrics, self._pins, evicted_age)
        self._contents = TreeContents(self._directory)
        self._no_writes_until = 0.0
        self._pages = 0
        self._count_pages_at = 0.0

    def _open_account(self) -> None:
        directory = self._directory
        path = directory.path / "usage"
        try:
            self._usage = Usage(path, directory.members, directory.members_path, directory.writers)
            self._resources.callback(self._usage.close)
            self._is_full = bool(self.no_space_since)
            self._resources.callback(Upkeep(self.name, directory, self._usage).close)
        except OSError as error:
            raise StoreSetupError(self.name, f"account {str(path)!r}: {error.strerror or error}") from error

    def _register(self, digest: bytes, document: dict[str, Any]) -> None:
        super()._register(digest, document)
        self._packs.catalogue.prepare(digest)

    def _block_hashes(self, digest: bytes) -> npt.NDArray[np.int64]:
        return self._contents.block_hashes(digest)

    def resize(self, capacity: int | None) -> None:
        """Pages beyond the capacity are evicted by the next write."""
        super().resize(capacity)
        self._pins.set_limit(_pin_limit(capacity))

    def used_bytes(self) -> int:
        """Bytes of disk that pages and reservations take, over all processes."""
        return self._usage.used(self._capacity)

    def fullness(self) -> Fullness:
        """The number of pages is exact in a small directory and estimated in a large one. Raises OSError."""
        with self._calls:
            used, capacity = self.used_bytes(), self._capacity
            if capacity is None:
                disk = os.statvfs(self._directory.path)
                free = disk.f_bavail * disk.f_frsize
            else:
                free = max(0, capacity - used)
            if time.monotonic() >= self._count_pages_at:
                self._pages = self._directory.count_pages(_BUCKETS_COUNTED)
                self._count_pages_at = time.monotonic() + _COUNT_INTERVAL
            return Fullness(capacity, used, free, self._pages, self.no_space_since)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        oldest = oldest_valid_ms(self._ttl)
        runs = self._packs.runs(batch.keys)
        results = [GetResult.MISS] * len(batch)
        read = self._workers.run(len(runs), lambda number: self._get_run(runs[number], batch, oldest))
        for pages, found in zip(runs, read, strict=True):
            for position, result in zip(pages.run.members, found, strict=True):
                results[position] = result
        return results

    def _look_at(self, batch: PageBatch) -> list[GetResult]:
        # What is looked at was asked to be written, or is in a pack that was just read: a use already.
        return self._read(batch)

    def _pages_in(self, place: tuple[bytes, Pack]) -> Iterator[tuple[list[bytes], list[int]]]:
        keys = self._packs.keys_in(*place)
        yield keys, [place[1].page_bytes - HEADER_LENGTH] * len(keys)

    def _get_run(self, pages: PackRun, batch: PageBatch, oldest: int) -> list[GetResult]:
        """Pages that were in a pack, as far as its name told."""
        return [
            self._look_again(batch, position, oldest) if result is None else result
            for position, result in zip(pages.run.members, self._packs.read(pages, batch, oldest), strict=True)
        ]

    def _look_again(self, batch: PageBatch, position: int, oldest: int) -> GetResult:
        """A page that was not where it was expected: its pack was renamed or removed, or is that of another page."""
        one = batch.select([position])
        for _ in range(_LOOKS):
            for pages in self._packs.runs(one.keys, again=False):
                (result,) = self._packs.read(pages, one, oldest)
                if result is not None:
                    return result
        return GetResult.MISS

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        return [found is not None for found in self._packs.find(keys, oldest_valid_ms(self._ttl))]

    def _lead(self, keys: Sequence[bytes]) -> int:
        for first in range(0, len(keys), _LEADING_AT_ONCE):
            present = self._has(keys[first : first + _LEADING_AT_ONCE])
            if False in present:
                return first + present.index(False)
        return len(keys)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_absent(self, batch: PageBatch) -> list[SetResult]:
        sizes = [HEADER_LENGTH + size for size in batch.sizes]
        results = [SetResult.REJECTED] * len(batch)
        missing: dict[bytes, int] = {}
        in_packs = self._packs.find(batch.keys, oldest_valid_ms(self._ttl))
        for pack in {found.path: found for found in in_packs if found is not None}.values():
            self._packs.touch(pack.path, pack.used)
        for position, (key, size, found) in enumerate(zip(batch.keys, sizes, in_packs, strict=True)):
            # A page of another size is none: a newer one counts before it.
            if found is not None and found.page_bytes == size:
                results[position] = SetResult.EXISTS
            else:
                # A page that the batch has twice is written once.
                missing.setdefault(key, position)
        if time.monotonic() < self._no_writes_until:
            self.metrics.add("rejected", "no_space", len(missing))
            return results
        absent = {key: sizes[position] for key, position in missing.items()}
        self._packs.make_way(absent, oldest_valid_ms(self._ttl))
        self._set_missing(batch, sizes, list(missing.values()), results)
        if len(missing) < len(batch):
            for position, key in enumerate(batch.keys):
                if results[position] is SetResult.REJECTED and results[missing.get(key, position)].durable:
                    results[position] = SetResult.EXISTS
        return results

    def _set_missing(self, batch: PageBatch, sizes: list[int], positions: list[int], results: list[SetResult]) -> None:
        """Write the pages at ``positions`` within the capacity, in portions that the capacity can hold."""
        for portion in self._portions(positions, sizes, _room, _PORTIONS):
            packs = self._packs.portions(batch, portion, self._capacity)
            reserved = sum(_room(pack_length(len(pack), sizes[pack[0]])) for pack in packs)
            try:
                grant = self._usage.reserve(reserved, self._capacity, self._evict)
            except OSError as error:
                self._count_error(error)
                for position in portion:
                    results[position] = SetResult.ERROR
                continue
            if grant is not Grant.GRANTED:
                self.metrics.add("rejected", "capacity" if grant is Grant.NO_ROOM else "held", len(portion))
                continue
            stored = 0
            try:
                written = self._workers.run(len(packs), partial(self._set_pack, batch, packs))
                for pack, (result, added) in zip(packs, written, strict=True):
                    stored += added
                    for position in pack:
                        results[position] = result
            finally:
                self._usage.commit(reserved, stored)
            if stored and self._is_full and time.monotonic() >= self._no_writes_until:
                self._is_full = not self._note_space(None)

    def _set_pack(self, batch: PageBatch, packs: Sequence[list[int]], number: int) -> tuple[SetResult, int]:
        """Write the pages at these positions as one pack; their result and the bytes of disk that took."""
        error, added = self._packs.write(batch, packs[number])
        if error is None:
            return SetResult.STORED, added
        return self._failed_write(error), added

    def _failed_write(self, error: OSError) -> SetResult:
        self._count_error(error)
        if error.errno in NO_SPACE:
            now = time.monotonic()
            begins, self._no_writes_until = now >= self._no_writes_until, now + _NO_SPACE_PAUSE
            if begins:
                self._is_full = True
                self._note_space(error)
            return SetResult.REJECTED
        logger.debug("tier %s: writing a pack in %s: %s", self.name, self._directory.packs, error)
        return SetResult.ERROR

    def _evict(self, need: int) -> Iterator[int]:
        return self._evictor.evict(need, int((self._capacity or 0) * _EVICTION_SHARE))

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        return sum(self._removed(partial(self._packs.remove, key)) for key in keys)

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        return sum(self._removed(partial(self._packs.remove_copy, *copy)) for copy in copies.items())

    def _removed(self, remove: Callable[[], bool]) -> bool:
        """Whether a page was there."""
        try:
            return remove()
        except OSError as error:
            self._count_error(error)
            return False

    def remove_expired(self, loop: BackgroundLoop) -> int:
        return self._packs.remove_all_expired(loop, oldest_valid_ms(self._ttl))

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Out of sight immediately, for everybody: the trees of these identities are moved away, then deleted."""
        wanted = self._directory.known_identities() if digests is None else digests
        had_pages, failed = 0, None
        for digest in wanted:
            try:
                had_pages += self._detach(digest)
            except OSError as error:
                # The others are cleared all the same.
                self._count_clearing(error, digest.hex())
                failed = error
        if failed is not None:
            raise failed
        return had_pages

    def _detach(self, digest: bytes) -> bool:
        """Whether the identity had pages. Raises OSError."""
        with ExitStack() as operation:
            # Under way before the tree moves: killed from here on, the account is known to be off.
            removal = operation.enter_context(self._usage.detaching())
            try:
                tree = self._directory.detach_identity(digest)
            finally:
                self._packs.catalogue.forget_identity(digest)
            if tree is None:
                return False
            had_pages = self._directory.has_packs(tree)
            self._clearing.clear([digest], partial(self._delete, tree, removal, operation.pop_all()))
            return had_pages

    def _delete(self, tree: Path, removal: Removal, operation: ExitStack, _: Cleared) -> None:
        try:
            with operation:
                removal.freed += self._directory.delete_detached(tree)
        except OSError as error:
            self._count_clearing(error, str(tree))

    def _count_clearing(self, error: OSError, what: str) -> None:
        self.count_error(error)
        logger.warning("tier %s: clearing %s: %s", self.name, what, error)


def _room(size: int) -> int:
    """Bytes of disk reserved for a file: with its directories in full, corrected by what was really made."""
    return occupied(size) + 2 * BLOCK


def _pin_limit(capacity: int | None) -> int | None:
    return None if capacity is None else capacity // 2

"""The layout of the file tier for file systems that several machines share: small pages that are written together are
one file, a pack (packs.py); every other page is a file of its own.

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
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.devices import flags_of
from hicache_ext.storage.tiers.file.pages import page_file as page_io
from hicache_ext.storage.tiers.file.pages.contents import TreeContents
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.eviction import Evictor
from hicache_ext.storage.tiers.file.pages.packs import PackRun, Packs
from hicache_ext.storage.tiers.file.pages.scanning import ABSENT, BLOCK, occupied
from hicache_ext.storage.tiers.file.pages.single import Found, PageFiles
from hicache_ext.storage.tiers.file.pages.upkeep import Upkeep
from hicache_ext.storage.tiers.file.path_store import NO_SPACE, Fullness, PathStore, oldest_valid_ms
from hicache_ext.storage.tiers.file.pins import PinnedPages
from hicache_ext.storage.tiers.file.usage import Grant, Removal, Usage

logger = logging.getLogger(__name__)

_EVICTION_SHARE = 1 / 16
"""Share of the capacity freed at once, so that the walk is paid for by many batches."""
_NO_SPACE_PAUSE = 1.0
"""Seconds for which a file system that is full is not asked for more: pages take the place of cold ones, or, where
others take what that frees, are not written. Twice as long each time that it has no space again."""
_LONGEST_NO_SPACE_PAUSE = 300.0
_FULL_DISK_SHARE = 1 / 64
"""As ``_EVICTION_SHARE``, where the file system is full before the tier is."""
_GROWN_SHARE = 33 / 32
"""The pages that take more than this part of what they took on a full medium have found new room: a little more fits
whenever files of other sizes are evicted."""
_CLEARED_SHARE = 3 / 4
"""A tier that takes less than this share of what it took on a full file system was cleared."""

_PORTIONS = 8
"""A write takes at most this part of the capacity at once, so that several processes can have one under way."""
_LOOKS = 3
"""For a page of a pack that others rename or remove meanwhile."""
_FAN_OUTS_COUNTED = 64
"""Fan-out directories listed to say how many pages there are: hashes fill all of them evenly."""
_COUNT_INTERVAL = 60.0
"""Seconds between two such counts."""

_LEADING_AT_ONCE = 1024


class PageFileStore(PathStore):
    """PageStore over one directory."""

    layout = "pages"
    without_space = "new pages take the place of cold ones"
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
        self._directory = PageDirectory(path, self.name)
        self._resources.callback(self._directory.close)
        self._open_account()
        common = self.name, self._directory, self._usage, self.metrics, self._count_error, flags
        self._files = PageFiles(*common, self._ttl, self._failed_write)
        self._packs = Packs(*common, self._look_over)
        self._resources.callback(self._packs.close)
        self._pins = PinnedPages(self.name, path, _pin_limit(self._capacity), self._directory.occupied_by)
        self._evictor = Evictor(self._directory, self.metrics, self._pins, evicted_age)
        self._contents = TreeContents(self._directory)
        self._no_writes_until = 0.0
        self._no_growth_until = 0.0
        self._full_pause = 0.0
        self._full_at = 0
        """Bytes that the pages took when the file system was full."""
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
                self._pages = self._directory.count_pages(_FAN_OUTS_COUNTED)
                self._count_pages_at = time.monotonic() + _COUNT_INTERVAL
            return Fullness(capacity, used, free, self._pages, self.no_space_since)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch) -> list[GetResult]:
        oldest = oldest_valid_ms(self._ttl)
        in_packs = self._packs.runs(batch.keys)
        rest = sorted(set(range(len(batch))).difference(*[pages.run.members for pages in in_packs]))

        def read_file(number: int) -> list[GetResult]:
            if number < len(in_packs):
                return self._get_run(in_packs[number], batch, oldest)
            position = rest[number - len(in_packs)]
            return [self._files.get(batch.keys[position], batch.buffers[position])]

        members = [*[pages.run.members for pages in in_packs], *[[position] for position in rest]]
        results = [GetResult.MISS] * len(batch)
        for positions, found in zip(members, self._workers.run(len(members), read_file), strict=True):
            for position, result in zip(positions, found, strict=True):
                results[position] = result
        return results

    def _look_at(self, batch: PageBatch) -> list[GetResult]:
        # What is looked at was asked to be written, or is in a pack that was just read: a use already.
        return self._read(batch)

    def _pages_in(self, place: tuple[bytes, Pack]) -> Iterator[tuple[list[bytes], list[int]]]:
        keys = self._packs.keys_in(*place)
        yield keys, [place[1].page_bytes - page_io.HEADER_LENGTH] * len(keys)

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
        return self._files.get(batch.keys[position], batch.buffers[position])

    # -- presence --------------------------------------------------------------------------------------------------

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        in_packs = self._packs.find(keys, oldest_valid_ms(self._ttl))
        present = [found is not None for found in in_packs]
        rest = [position for position, known in enumerate(present) if not known]
        if rest:
            for position, known in zip(rest, self._files.has([keys[i] for i in rest]), strict=True):
                present[position] = known
        return present

    def _lead(self, keys: Sequence[bytes]) -> int:
        for first in range(0, len(keys), _LEADING_AT_ONCE):
            present = self._has(keys[first : first + _LEADING_AT_ONCE])
            if False in present:
                return first + present.index(False)
        return len(keys)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write_absent(self, batch: PageBatch) -> list[SetResult]:
        sizes = [page_io.object_size(segments) for segments in batch.buffers]
        results = [SetResult.REJECTED] * len(batch)
        missing: dict[bytes, int] = {}
        in_packs = self._packs.find(batch.keys, oldest_valid_ms(self._ttl))
        for pack in {found.path: found for found in in_packs if found is not None}.values():
            self._packs.touch(pack.path, pack.status)
        for position, (key, size, found) in enumerate(zip(batch.keys, sizes, in_packs, strict=True)):
            # A page of another size is none: a newer one counts before it.
            if found is not None and found.page_bytes == size:
                results[position] = SetResult.EXISTS
                continue
            match self._files.find(key, size):
                case Found.PAGE:
                    results[position] = SetResult.EXISTS
                case Found.NOTHING:
                    # A page that the batch has twice is written once.
                    missing.setdefault(key, position)
                case Found.OBSTACLE:
                    self.metrics.add("rejected", "obstacle")
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
        portions = self._portions(positions, sizes, _room, self._limit(), _PORTIONS)
        for number, portion in enumerate(portions):
            left = self._set_portion(batch, sizes, portion, results)
            if left and self._is_kept_small():
                self._note_size()
                left = self._set_portion(batch, sizes, left, results, again=True)
                if left:
                    self._no_writes_until = self._no_growth_until
                    # Nobody can ask for a tail without its head.
                    self.metrics.add("rejected", "no_space", sum(map(len, portions[number + 1 :])))
                    return

    def _limit(self) -> int | None:
        """Bytes that the pages may take now."""
        if not self._is_kept_small():
            return self._capacity
        return min(self._full_at, self._capacity or self._full_at)

    def _set_portion(
        self, batch: PageBatch, sizes: list[int], portion: list[int], results: list[SetResult], *, again: bool = False
    ) -> list[int]:
        """Write some pages; those for which the file system had no space. ``again``: they found none a moment ago."""
        packs, singles = self._packs.portions(batch, portion, self._capacity)
        lengths = [pack_length(len(pack), sizes[pack[0]]) for pack in packs] + [sizes[i] for i in singles]
        reserved = sum(map(_room, lengths))
        kept_small = self._is_kept_small()
        limit, share, least_files = self._limit(), (self._capacity or 0) * _EVICTION_SHARE, 0
        if kept_small:
            share = self._full_at * _FULL_DISK_SHARE
        if again:
            # Others may take what this frees. It may be inodes that are lacking: a file needs one, and a new directory
            # another.
            share, least_files = 0, 2 * len(lengths)
        try:
            grant = self._usage.reserve(
                reserved, limit, lambda need: self._evictor.evict(need, int(share), least_files)
            )
        except OSError as error:
            self._count_error(error)
            for position in portion:
                results[position] = SetResult.ERROR
            return []
        if grant is not Grant.GRANTED:
            is_lacking = kept_small and grant is not Grant.HELD
            if again or not is_lacking:
                reason = "no_space" if is_lacking else "held" if grant is Grant.HELD else "capacity"
                self.metrics.add("rejected", reason, len(portion))
            return portion if is_lacking else []
        stored = 0
        try:
            for position, result, added in self._set_pages(batch, packs, singles):
                results[position] = result
                stored += added
        finally:
            self._usage.commit(reserved, stored)
        left = [position for position in portion if results[position] is SetResult.REJECTED]
        if stored and not left and self._is_full and not self._is_kept_small():
            self._look_for_space()
        return left

    def _is_kept_small(self) -> bool:
        """Whether the file system was full a moment ago."""
        return time.monotonic() < self._no_growth_until

    def _note_size(self) -> None:
        try:
            self._full_at = self.used_bytes()
        except OSError as error:
            self._count_error(error)

    def _look_for_space(self) -> None:
        """Whether a write that went through has shown that there is space again: what eviction freed is none."""
        before = self._full_at
        if not before:
            # Another process or an earlier one found the file system full: from here on it is seen whether pages grow.
            self._note_size()
            return
        try:
            if not _CLEARED_SHARE * before < self.used_bytes() <= _GROWN_SHARE * before:
                self._is_full = not self._note_space(None)
                self._full_pause = 0.0
        except OSError as error:
            self._count_error(error)

    def _set_pages(
        self, batch: PageBatch, packs: list[list[int]], singles: list[int]
    ) -> Iterator[tuple[int, SetResult, int]]:
        """Position, result and bytes of disk of each page; those of a pack are told with its first page."""

        def write_file(number: int) -> tuple[SetResult, int]:
            if number < len(packs):
                return self._set_pack(batch, packs[number])
            position = singles[number - len(packs)]
            return self._files.write(batch.keys[position], batch.buffers[position])

        files = [*packs, *[[position] for position in singles]]
        for members, (result, added) in zip(files, self._workers.run(len(files), write_file), strict=True):
            for position in members:
                yield position, result, added if position == members[0] else 0

    def _set_pack(self, batch: PageBatch, positions: list[int]) -> tuple[SetResult, int]:
        """Write pages as one pack; their result and the bytes of disk that took."""
        error, added = self._packs.write(batch, positions)
        if error is None:
            return SetResult.STORED, added
        return self._failed_write(f"a pack in {self._directory.packs.home}", error), added

    def _failed_write(self, path: str, error: OSError) -> SetResult:
        self._count_error(error)
        if error.errno in NO_SPACE:
            if not self._is_kept_small():
                self._full_pause = min(2 * self._full_pause or _NO_SPACE_PAUSE, _LONGEST_NO_SPACE_PAUSE)
                self._note_size()
                self._no_growth_until = time.monotonic() + self._full_pause
                self._is_full = True
                self._note_space(error)
            return SetResult.REJECTED
        logger.debug("tier %s: writing %s: %s", self.name, path, error)
        return SetResult.ERROR

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        return sum(self._removed(partial(self._packs.remove, key), partial(self._files.remove, key)) for key in keys)

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        return sum(
            self._removed(partial(self._packs.remove_copy, *copy), partial(self._files.remove_copy, *copy))
            for copy in copies.items()
        )

    def _removed(self, *removals: Callable[[], bool]) -> bool:
        """Whether a page was there, in a pack or by itself."""
        was_there = False
        for remove in removals:
            try:
                was_there = remove() or was_there
            except ABSENT:
                continue
            except OSError as error:
                self._count_error(error)
        return was_there

    def remove_expired(self, loop: BackgroundLoop) -> int:
        oldest = oldest_valid_ms(self._ttl)
        return self._files.remove_expired(loop) + self._packs.remove_all_expired(loop, oldest)

    def _clear(self, digests: Sequence[bytes] | None) -> int:
        """Out of sight at once, for everybody: the trees of these identities are moved away, then deleted."""
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
            trees: list[Path] = []
            try:
                for tree in self._directory.detach_identity(digest):
                    trees.append(tree)  # noqa: PERF402 -- what was moved before an error is deleted, too
                return any(self._directory.has_pages(tree) for tree in trees)
            finally:
                self._packs.catalogue.forget_identity(digest)
                if trees:
                    self._clearing.clear([digest], partial(self._delete, trees, removal, operation.pop_all()))

    def _delete(self, trees: Sequence[Path], removal: Removal, operation: ExitStack, _: Cleared) -> None:
        try:
            with operation:
                for tree in trees:
                    removal.freed += self._directory.delete_detached(tree)
        except OSError as error:
            self._count_clearing(error, str(trees[0]))

    def _count_clearing(self, error: OSError, what: str) -> None:
        self.count_error(error)
        logger.warning("tier %s: clearing %s: %s", self.name, what, error)


def _room(size: int) -> int:
    """Bytes of disk reserved for a file: with its directories in full, corrected by what was really made."""
    return occupied(size) + 2 * BLOCK


def _pin_limit(capacity: int | None) -> int | None:
    return None if capacity is None else capacity // 2

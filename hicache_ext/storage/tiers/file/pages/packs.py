"""Finds, reads, writes and removes pages in packs and in files of their own (a page alone, treated as a pack of one).

A pack gets its name only when it is complete. To remove a page, its pack is renamed to a name that says which pages are
dead; a pack is deleted with its last page. A process that finds a pack under the name that it knows therefore knows
which of its pages are there. The name of a page alone follows from its key: the page is not in the catalogue, and
another file may take over its name, so that it is removed only while it still is the file that was looked at.
Reasons: docs/decisions/packs-of-page-files.md.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hicache_ext import native
from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import PACK_BYTES, Pack, encode_footer, milliseconds_of, new_id, portions, short_hash
from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime import vectored
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.base import leading_in_portions
from hicache_ext.storage.contract.pack_index import Place, Run, runs
from hicache_ext.storage.contract.reports import RecentMean
from hicache_ext.storage.contract.store import (
    GetResult,
    PageBatch,
    SetResult,
    by_identity,
    chosen_keys,
    positions_by_identity,
    put_back,
)
from hicache_ext.storage.tiers.file.devices import flags_of
from hicache_ext.storage.tiers.file.layouts import BUCKET_NAME
from hicache_ext.storage.tiers.file.pages.catalogue import IdentityPacks, PackCatalogue
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory, remove_directory, unlink_quietly
from hicache_ext.storage.tiers.file.pages.tree import (
    ABSENT,
    PackFile,
    alone,
    file_name,
    hashes_in,
    header_at,
    is_alone,
    is_expired,
    is_old,
    keys_in,
    most_pages,
    occupied,
    page_files,
    short_hash_of,
)
from hicache_ext.storage.tiers.file.path_store import PathStore
from hicache_ext.storage.tiers.file.usage import Usage

logger = logging.getLogger(__name__)

TOUCH_INTERVAL = 60.0
"""Seconds between two updates of a file's recency (its mtime): eviction needs no finer order."""
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO)
"""Errors of open() for something that this tier cannot have written or may not read."""
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)
"""Errors that say nothing about what is stored."""
_ATTEMPTS = 4
"""Attempts at a pack that other processes rename or remove meanwhile."""
_PACK_SHARE = 64
"""A pack takes at most about one such part of the capacity: packs are evicted whole."""
_MOST_UNREADABLE = 65536
_LEADING_STEP = 1024
_NATIVE_MIN_KEYS = 32
"""Fewest keys for which the native core looks up pages alone. It does not report errors of the disk."""


FIND_PAGE_FILES = native.Struct("find_page_files", "keys[] directory least oldest present")


@dataclass(frozen=True, slots=True)
class FoundPack:
    """A pack that a page is in and can be read from."""

    path: str
    dead: int
    status: os.stat_result
    page_bytes: int
    pages: int
    """Number of its pages that can be read: fewer than it has if it is truncated, too old or not a regular file."""


class PageFiles(PathStore):
    """The part of a store that finds, reads, writes and removes files of pages, without regard to the capacity."""

    def _open(self, path: Path, evicted_age: RecentMean) -> None:
        self._directory = directory = PageDirectory(path, self.name)
        self._resources.callback(directory.close)
        self._usage = Usage(path, directory.members)
        self._resources.callback(self._usage.close)
        self._catalogue = PackCatalogue(self.name, directory, self._count_error)
        self._resources.callback(self._catalogue.close)
        self._most_pages = most_pages(directory.pages_path)
        # Copies, by key and pack, that could not be read, and pages alone that could not be removed: absent until a
        # read succeeds. The next write goes to another pack, or frees the name if that has become possible.
        self._unreadable: set[tuple[bytes, str]] = set()
        # Load it now, so that the first lookup does not wait for it.
        native.core()

    # -- finding ---------------------------------------------------------------------------------------------------

    def _find(self, keys: Sequence[bytes]) -> list[FoundPack | None]:
        """Return the pack from which each page can be read; None for other pages, and for pages alone."""
        found: list[FoundPack | None] = [None] * len(keys)
        for identity, positions in positions_by_identity(keys).items():
            known = self._catalogue.of(identity)
            for attempt in range(_ATTEMPTS):
                places = known.find(chosen_keys(keys, positions), again=attempt == 0)
                packs = {place.pack.id: place.pack for place in places if place is not None}
                statuses = {pack_id: self._status(known, pack) for pack_id, pack in packs.items()}
                moved: list[int] = []
                for position, place in zip(positions, places, strict=True):
                    if place is None:
                        continue
                    status = statuses[place.pack.id]
                    if status is None or status.dead & place.mask:
                        moved.append(position)
                    elif self._is_readable(keys[position], place, status):
                        found[position] = status
                if not moved:
                    break
                # Try again with what the bucket, read again, says now.
                positions = moved
        return found

    def _is_readable(self, key: bytes, place: Place, found: FoundPack) -> bool:
        return place.position < found.pages and (key, place.pack.id) not in self._unreadable

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each page is there, as far as names and mtimes tell. Only its content tells when a page alone
        was written, so that one that is expired but was used recently counts until it is swept."""
        present = [known is not None for known in self._find(keys)]
        rest = [position for position, known in enumerate(present) if not known]
        wanted = [keys[position] for position in rest]
        # In Python, each system call would hand the GIL to a computing thread, for milliseconds each time.
        core = native.core() if len(rest) >= _NATIVE_MIN_KEYS else None
        find_alone = self._find_alone_in_python if core is None else partial(self._find_alone_natively, core)
        for position, known in zip(rest, find_alone(wanted), strict=True):
            present[position] = known and not (self._unreadable and self._failed_alone(keys[position]))
        return present

    def _failed_alone(self, key: bytes) -> bool:
        return (key, alone(key[IDENTITY_LENGTH:]).id) in self._unreadable

    def _lead(self, keys: Sequence[bytes]) -> int:
        return leading_in_portions(keys, self._has, _LEADING_STEP)

    def _find_alone_in_python(self, keys: Sequence[bytes]) -> list[bool]:
        present, failed, oldest = [False] * len(keys), None, self._oldest()
        for number, key in enumerate(keys):
            try:
                status = os.lstat(self._directory.page_path(key))
            except ABSENT:
                continue
            except OSError as error:
                failed = error
                continue
            # The mtime is that of the last use: never before the page was written.
            is_page = stat.S_ISREG(status.st_mode) and status.st_size >= HEADER_LENGTH
            present[number] = is_page and status.st_mtime * 1000 >= oldest
        if failed is not None:
            self._count_error(failed)
        return present

    def _find_alone_natively(self, core: native.Core, keys: Sequence[bytes]) -> list[bool]:
        """Do what ``_find_alone_in_python`` does, in C. Raises OSError if an identity's directory cannot be opened."""
        present, oldest = np.zeros(len(keys), np.bool_), self._oldest()
        for positions, some in by_identity(keys):
            try:
                home = self._directory.identity_path(some.identity)
                directory = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except ABSENT:
                continue
            words, found = some.words, np.zeros(len(some), np.bool_)
            try:
                core(FIND_PAGE_FILES, words, directory, HEADER_LENGTH, -(-oldest // 1000), found)
            finally:
                os.close(directory)
            present[positions] = found
        return list(map(bool, present))

    def _check_alone(self, key: bytes, size: int) -> SetResult | None:
        """Look for a page that is about to be written alone: return EXISTS, counting it as used; REJECTED if something
        else has its name and cannot be removed; None if the name is free now."""
        place, path = Place(alone(key[IDENTITY_LENGTH:], size), 0), self._directory.page_path(key)
        try:
            status = os.lstat(path)
        except OSError:
            return None
        if is_old(path, PackFile(place.pack), status, self._oldest()):
            # If another writer has replaced it meanwhile, the page to be written exists.
            is_free = self._remove_expired_file(key[:IDENTITY_LENGTH], PackFile(place.pack), path, status)
        elif not (is_unreadable := self._failed_alone(key)) and status.st_size == size and stat.S_ISREG(status.st_mode):
            self._touch(path, status)
            return SetResult.EXISTS
        else:
            is_free = self._heal(key, place, "unreadable" if is_unreadable else "length", status)
        return None if is_free else SetResult.REJECTED

    def _pages_in(self, place: tuple[bytes, Pack]) -> Iterator[tuple[list[bytes], list[int]]]:
        identity, pack = place
        known = self._catalogue.of(identity)
        if known.look_for(pack):
            path, dead = known.path(pack)
            keys = keys_in(path, identity, pack)
            known_keys = [key for position in PackFile(pack, dead).living if (key := keys[position]) is not None]
            yield known_keys, [pack.page_bytes - HEADER_LENGTH] * len(known_keys)

    def _status(self, known: IdentityPacks, pack: Pack) -> FoundPack | None:
        """Return the pack's state; None if it does not have the known name any more (its bucket was read again)."""
        path, dead = known.path(pack)
        try:
            status = os.lstat(path)
        except ABSENT:
            known.look_for(pack)
            return None
        except OSError as error:
            self._count_error(error)
            return None
        is_pack = stat.S_ISREG(status.st_mode) and not is_expired(milliseconds_of(pack.id), self._oldest())
        return FoundPack(path, dead, status, pack.page_bytes, status.st_size // pack.page_bytes if is_pack else 0)

    def _runs(self, batch: PageBatch, *, again: bool) -> list[Run]:
        """Group all pages of a batch into runs to read: in packs where names say so, else alone. ``again``: see
        ``IdentityPacks.find``."""
        found: list[Run] = []
        for identity, positions in positions_by_identity(batch.keys).items():
            in_packs = self._catalogue.of(identity).find(chosen_keys(batch.keys, positions), again=again)
            places = [place or _place_alone(batch, i) for i, place in zip(positions, in_packs, strict=True)]
            identity_runs = runs(places, PACK_BYTES)
            found += [Run(run.pack, run.first, [positions[member] for member in run.members]) for run in identity_runs]
        return found

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, batch: PageBatch, attempts: int = _ATTEMPTS) -> list[GetResult]:
        """Read pages. ``attempts``: how often to look again for pages that are not where they were expected."""
        runs = self._runs(batch, again=attempts == _ATTEMPTS)
        found: list[GetResult | None] = [None] * len(batch)
        read = self._workers.run(len(runs), lambda number: self._read_file(runs[number], batch))
        for run, run_results in zip(runs, read, strict=True):
            put_back(found, run.members, run_results)
        results = [result or GetResult.MISS for result in found]
        if attempts and None in found:
            moved = [position for position, result in enumerate(found) if result is None]
            batch.move_at(moved, partial(self._read, attempts=attempts - 1), results)
        return results

    def _read_file(self, run: Run, batch: PageBatch) -> list[GetResult | None]:
        """Read the pages of a run into their memory. None means that a page is not there (any more): look again."""
        pack, count, first = run.pack, len(run.members), batch.keys[run.members[0]]
        known = self._catalogue.of(first[:IDENTITY_LENGTH])
        path, dead = known.path(pack)
        if dead >> run.first & (1 << count) - 1:
            # It was removed after it was found, and another thread has learned of that.
            return [None] * count
        try:
            # O_NONBLOCK: otherwise open() would wait forever for a writer if a pipe has the name.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except ABSENT:
            known.look_for(pack)
            return [GetResult.MISS if is_alone(pack) else None] * count
        except OSError as error:
            if error.errno in _UNREADABLE:
                return self._handle_unusable_file(run, batch, path, "unreadable")
            return self._failed_read(run, batch, path, error)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return self._handle_unusable_file(run, batch, path, "not_a_file", status)
            if is_alone(pack):
                if status.st_size != pack.page_bytes:
                    reason = "truncated" if status.st_size < pack.page_bytes else "longer"
                    return self._handle_unusable_file(run, batch, path, reason, status)
            elif is_expired(milliseconds_of(pack.id), self._oldest()):
                return [GetResult.MISS] * count
            results = self._read_pages(fd, run, batch)
            if GetResult.HIT in results:
                self._touch(fd, status)
            return results
        except OSError as error:
            return self._failed_read(run, batch, path, error)
        finally:
            os.close(fd)

    def _handle_unusable_file(
        self, run: Run, batch: PageBatch, path: str, reason: str, seen: os.stat_result | None = None
    ) -> list[GetResult | None]:
        """Free the name of a page alone if something else has it. A pack's name stays, since nobody else wants it and
        other processes may be able to read it: this process treats its pages as absent and writes them again."""
        first, count = batch.keys[run.members[0]], len(run.members)
        if is_alone(run.pack):
            self._heal(first, Place(run.pack, 0), reason, seen)
            return [GetResult.CORRUPT]
        self.metrics.add("corrupt", reason, count)
        self._catalogue.of(first[:IDENTITY_LENGTH]).index.forget_pages(run.pack.id, (1 << count) - 1 << run.first)
        logger.warning("tier %s: %s cannot be read (%s)", self.name, path, reason)
        return [GetResult.CORRUPT] * count

    def _read_pages(self, fd: int, run: Run, batch: PageBatch) -> list[GetResult | None]:
        page_bytes = run.pack.page_bytes
        one_by_one = [Run(run.pack, run.first + number, [member]) for number, member in enumerate(run.members)]
        if len(run.members) > 1 and any(HEADER_LENGTH + batch.sizes[i] != page_bytes for i in run.members):
            return [self._read_pages(fd, page, batch)[0] for page in one_by_one]
        headers = [bytearray(HEADER_LENGTH) for _ in run.members]
        buffers: list[memoryview] = []
        for header, member in zip(headers, run.members, strict=True):
            buffers += [memoryview(header), *batch.buffers[member]]
        try:
            filled = vectored.read_into(fd, buffers, run.offset, flags_of(self._plan.read))
        except OSError as error:
            if len(run.members) > 1:
                # One bad block must cost only one page.
                return [self._read_pages(fd, page, batch)[0] for page in one_by_one]
            return self._failed_read(run, batch, f"pack {run.pack.id}", error)
        return [
            self._checked(fd, page, batch, header, filled - number * page_bytes)
            for number, (page, header) in enumerate(zip(one_by_one, headers, strict=True))
        ]

    def _checked(self, fd: int, page: Run, batch: PageBatch, header: bytearray, filled: int) -> GetResult | None:
        """Return the result of one page whose header and segments were read; ``filled``: bytes of it that were read."""
        pack, (member,), place = page.pack, page.members, Place(page.pack, page.first)
        key, segments = batch.keys[member], batch.buffers[member]
        reason = _refusal(header, key, segments, filled, pack.page_bytes)
        if reason is None:
            if is_alone(pack) and is_expired(envelope.decode_header(header).created_ms, self._oldest()):
                return GetResult.MISS
            self._unreadable.discard((key, pack.id))
            return GetResult.HIT
        if not is_alone(pack) and _is_another_page(header, key):
            # Its short hash is the same by chance.
            self._catalogue.of(key[:IDENTITY_LENGTH]).index.forget_pages(pack.id, place.mask)
            return None
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        elsewhere = [memoryview(bytearray(segment.nbytes)) for segment in segments]
        second = bytearray(HEADER_LENGTH)
        try:
            filled = vectored.read_into(fd, [memoryview(second), *elsewhere], place.offset, flags_of(self._plan.read))
        except OSError as error:
            return self._failed_read(page, batch, f"pack {pack.id}", error)[0]
        if _refusal(second, key, elsewhere, filled, pack.page_bytes) is None:
            # The damage came from a network, a cache or this machine's memory: the stored page is good, others use it.
            self.metrics.add("suspect", "good")
        else:
            self._heal(key, place, reason, os.fstat(fd))
        return GetResult.CORRUPT

    def _failed_read(self, run: Run, batch: PageBatch, path: str, error: OSError) -> list[GetResult | None]:
        for member in run.members:
            self._count_error(error)
            # Whether one block or the whole device is bad, this page cannot be read: the next write may replace it.
            if error.errno not in _TRANSIENT:
                self._remember_unreadable(batch.keys[member], run.pack)
        logger.debug("tier %s: reading %s: %s", self.name, path, error)
        return [GetResult.ERROR] * len(run.members)

    def _touch(self, file: int | str, status: os.stat_result) -> None:
        """Update the recency of a file of pages."""
        if time.time() - status.st_mtime > TOUCH_INTERVAL:
            try:
                os.utime(file)
            except ABSENT:
                # Another process has renamed or removed it.
                return
            except OSError as error:
                self._count_error(error)

    def _demote(self, hashes: Sequence[bytes]) -> int:
        """Demote files; a pack is demoted as a whole, and only if it holds no other pages."""
        named, demoted = set(map(short_hash_of, hashes)), 0
        for identity in self._directory.known_identities():
            keys = [identity + page_hash for page_hash in hashes]
            packs = {found.path for found in self._find(keys) if found is not None}
            for path in [*packs, *map(self._directory.page_path, keys)]:
                found = PackFile.parse(os.path.basename(path))
                if found is not None and named.issuperset(hashes_in(found)):
                    with suppress(*ABSENT):
                        os.utime(path, (0, 0), follow_symlinks=False)
                        demoted += len(found.living)
        return demoted

    # -- writing ---------------------------------------------------------------------------------------------------

    def _files_of(self, batch: PageBatch, positions: Sequence[int]) -> list[list[int]]:
        """Return the pages to write, grouped by the file they share."""
        most_bytes = PACK_BYTES if self._capacity is None else min(PACK_BYTES, self._capacity // _PACK_SHARE)
        found: list[list[int]] = []
        for members in positions_by_identity(chosen_keys(batch.keys, positions)).values():
            own_positions = [positions[member] for member in members]
            page_bytes = [HEADER_LENGTH + batch.sizes[position] for position in own_positions]
            found += [[own_positions[n] for n in part] for part in portions(page_bytes, self._most_pages, most_bytes)]
        return found

    def _write_file(self, batch: PageBatch, positions: Sequence[int]) -> tuple[SetResult | OSError, int]:
        """Write these pages, all of one identity and size, into one file. Return STORED, EXISTS for a page alone that
        another writer stored first, or the error, which leaves no file behind; and the bytes of disk taken, including
        those of new directories, which may remain after an error.
        """
        keys = [batch.keys[i] for i in positions]
        identity, page_bytes = keys[0][:IDENTITY_LENGTH], HEADER_LENGTH + batch.sizes[positions[0]]
        buffers: list[memoryview] = []
        for key, position in zip(keys, positions, strict=True):
            segments = batch.buffers[position]
            buffers += [memoryview(envelope.encode_header(key, segments)), *segments]
        if len(keys) == 1:
            pack = alone(keys[0][IDENTITY_LENGTH:], page_bytes)
        else:
            pack = Pack.of_keys(new_id(int(time.time() * 1000)), page_bytes, keys)
            buffers.append(memoryview(encode_footer(keys, page_bytes)))
        length = PackFile(pack).length
        known, added = self._catalogue.of(identity), 0
        for attempt in range(1, _ATTEMPTS + 1):
            bucket = pack.id[:2] if is_alone(pack) else known.bucket_for_writing()
            path = f"{self._directory.identity_path(identity)}/{bucket}/{file_name(pack, 0)}"
            try:
                for made in self._directory.create_parent(path):
                    added += made
                if not self._write_whole(path, buffers, length, is_new_name=not is_alone(pack)):
                    return SetResult.EXISTS, added
            except ABSENT as error:
                # clear() or an eviction removed the directory in between.
                if attempt == _ATTEMPTS:
                    return error, added
                self._directory.clear_the_way(path)
            except OSError as error:
                if attempt == _ATTEMPTS or is_alone(pack) or error.errno not in (errno.EACCES, errno.EPERM):
                    return error, added
                # Perhaps another account has made the bucket.
                known.refused.add(bucket)
            else:
                self._unreadable.difference_update((key, pack.id) for key in keys)
                if not is_alone(pack):
                    # Do not use ``known``: the identity may have been cleared meanwhile.
                    self._catalogue.of(identity).add(PackFile(pack), bucket)
                return SetResult.STORED, added + occupied(length)
        raise AssertionError("unreachable")

    def _write_whole(self, path: str, buffers: Sequence[memoryview], length: int, *, is_new_name: bool) -> bool:
        """Write and publish a file; return False if another writer of a name that is not new was first."""
        fd, temp_path = self._directory.open_unpublished()
        published = False
        try:
            if vectored.write_from(fd, buffers, 0, flags_of(self._plan.write)) != length:
                raise OSError(errno.ENOSPC, "short write", path)
            self._directory.publish(temp_path, path, is_new_name=is_new_name)
            published = True
        except FileExistsError:
            if is_new_name:
                raise
        finally:
            os.close(fd)
            if not published:
                unlink_quietly(temp_path)
        return published

    # -- removal ---------------------------------------------------------------------------------------------------

    def _remove(self, keys: Sequence[bytes]) -> int:
        return sum(map(self._remove_page, keys))

    def _remove_copies(self, copies: Mapping[bytes, bytes]) -> int:
        return sum(map(self._remove_page, copies.keys(), copies.values()))

    def _remove_page(self, key: bytes, page_seal: bytes | None = None) -> bool:
        """Remove a page from every pack that it is in and as a page alone; with ``page_seal``, only copies with this
        ``envelope.page_seal``. Return whether there was one. Never raises OSError."""
        identity, removed = key[:IDENTITY_LENGTH], False
        known = self._catalogue.of(identity)
        for place in [*known.find_all(key, whole=True), Place(alone(key[IDENTITY_LENGTH:]), 0)]:
            header, seen = header_at(known.path(place.pack)[0], place.offset)
            if page_seal is None:
                # The name of a page alone must become free, whatever has it.
                is_wanted, seen = header is None or not _is_another_page(header, key), None
            else:
                is_wanted = header is not None and envelope.seal_of(header) == page_seal
            try:
                removed = (is_wanted and self._remove_copy(identity, place, seen)) or removed
            except OSError as error:
                self._count_error(error)
        return removed

    def _make_way(self, sizes: Mapping[bytes, int]) -> None:
        """Remove pages that are about to be written (key -> bytes) from packs from which they cannot be read, because
        readers look into packs first. Never raises OSError."""
        keys = list(sizes)
        for identity, positions in positions_by_identity(keys).items():
            known, wanted = self._catalogue.of(identity), chosen_keys(keys, positions)
            for key, place in zip(wanted, known.find(wanted, again=False), strict=True):
                for each in known.find_all(key) if place is not None else ():
                    found = self._status(known, each.pack)
                    # Keep a copy that another writer may just have stored.
                    if found is None or (found.page_bytes == sizes[key] and self._is_readable(key, each, found)):
                        continue
                    if is_expired(milliseconds_of(each.pack.id), self._oldest()):
                        self._remove_expired_file(identity, PackFile(each.pack, found.dead), found.path, found.status)
                        continue
                    try:
                        self._remove_copy(identity, each)
                    except OSError as error:
                        self._count_error(error)
                        known.index.forget_pages(each.pack.id, each.mask)

    def _heal(self, key: bytes, place: Place, reason: str, seen: os.stat_result | None = None) -> bool:
        """Remove a page that is not the one its name says; return False if it stays.

        ``seen``: status of the file of a page alone; a file that has replaced it since is left alone.
        """
        identity, pack = key[:IDENTITY_LENGTH], place.pack
        known = self._catalogue.of(identity)
        self.metrics.add("corrupt", reason)
        what = f"page {place.position} of {known.path(pack)[0]}"
        is_gone = True
        try:
            self._remove_copy(identity, place, seen)
        except OSError as error:
            self._count_error(error)
            logger.warning("tier %s: %s is bad (%s) and cannot be removed: %s", self.name, what, reason, error)
            if is_alone(pack):
                self._remember_unreadable(key, pack)
                is_gone = False
            else:
                # This process treats it as absent: the page will be written into another pack.
                known.index.forget_pages(pack.id, place.mask)
        else:
            self._unreadable.discard((key, pack.id))
            self._log.log(logging.WARNING, "bad", "tier %s: %s was bad (%s) and is removed", self.name, what, reason)
        if not is_alone(pack):
            self._look_over((identity, pack))
        return is_gone

    def _remove_copy(self, identity: bytes, place: Place, seen: os.stat_result | None = None) -> bool:
        """Remove a page; return whether it was there until now. ``seen``: see ``_heal``. Raises OSError."""
        known, pack = self._catalogue.of(identity), place.pack
        for _ in range(_ATTEMPTS):
            path, dead = known.path(pack)
            if dead & place.mask:
                return False
            dead_after = dead | place.mask
            try:
                if dead_after == pack.all_dead:
                    self._unlink(PackFile(pack), path, seen if is_alone(pack) else None)
                    known.forget(pack.id)
                else:
                    # A recount that lists the bucket now may miss the pack, or see it twice.
                    directory = os.path.dirname(path)
                    with self._usage.detaching():
                        os.rename(path, f"{directory}/{file_name(pack, dead_after)}")
                    known.add(PackFile(pack, dead_after), os.path.basename(directory))
            except ABSENT:
                # Another process has renamed or removed it.
                if not known.look_for(pack):
                    return False
            else:
                return True
        return False

    def _unlink(self, found: PackFile, path: str, seen: os.stat_result | None = None) -> None:
        """Delete a file and account for it. Raises OSError."""
        with self._usage.removing() as removal:
            size = self._directory.remove_page(path, seen)
            # A damaged file must not subtract more from the account than its pack once added.
            removal.freed = occupied(min(size, found.length or size))
            removal.uncertain = found.length not in (0, size)

    def _remove_expired_file(self, identity: bytes, found: PackFile, path: str, status: os.stat_result) -> bool:
        """Delete a file that is older than the ttl; return False if it cannot be removed."""
        try:
            self._unlink(found, path, status if is_alone(found.pack) else None)
        except ABSENT:
            return True
        except OSError as error:
            self._count_error(error)
            return False
        self._catalogue.of(identity).forget(found.pack.id)
        self.metrics.add("evicted", "ttl", len(found.living))
        return True

    def _remove_expired(self, loop: BackgroundLoop) -> int:
        """Delete expired files until ``loop`` is stopped; return the number of their pages."""
        removed = 0
        for place in self._directory.file_directories():
            home, _, name = place.rpartition("/")
            identity, before = bytes.fromhex(home.rpartition("/")[2]), removed
            for entry, found in list(page_files(place)):
                if loop.stopping:
                    return removed
                with suppress(OSError):
                    status = os.lstat(entry.path)
                    if is_old(entry.path, found, status, self._oldest()):
                        removed += len(found.living) * self._remove_expired_file(identity, found, entry.path, status)
            if removed > before and BUCKET_NAME.fullmatch(name):
                with self._usage.removing() as removal:
                    removal.freed = remove_directory(place)
        return removed

    def _remember_unreadable(self, key: bytes, pack: Pack) -> None:
        if len(self._unreadable) >= _MOST_UNREADABLE:
            self._unreadable.clear()
        self._unreadable.add((key, pack.id))


def _place_alone(batch: PageBatch, position: int) -> Place:
    return Place(alone(batch.keys[position][IDENTITY_LENGTH:], HEADER_LENGTH + batch.sizes[position]), 0)


def _refusal(header: bytearray, key: bytes, segments: Sequence[memoryview], filled: int, page_bytes: int) -> str | None:
    """Return the reason why what was read is not the page ``key``; None if it is."""
    if HEADER_LENGTH + sum([segment.nbytes for segment in segments]) != page_bytes:
        return "payload_length"
    if filled < page_bytes:
        return "truncated"
    return envelope.reason_to_refuse(header, key, segments)


def _is_another_page(header: bytes | bytearray, key: bytes) -> bool:
    """Return whether a header belongs to another page of the same identity with the same short hash as ``key``."""
    try:
        found = envelope.decode_header(header).key
    except FormatError:
        return False
    return found != key and found[:IDENTITY_LENGTH] == key[:IDENTITY_LENGTH] and short_hash(found) == short_hash(key)

"""Pages in packs: how they are found, read, written and taken away.

A pack gets its name only when it is whole. A page is taken away by renaming its pack to a name that says which pages
are dead; a pack whose last page goes is deleted. So whoever finds a pack under the name that it knows, knows which of
its pages are there. Reasons: docs/decisions/packs-of-page-files.md.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.page import pack as pack_format
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import PACK_BYTES, SMALL, Pack, encode_footer, milliseconds_of, new_id, short_hash
from hicache_ext.runtime import vectored
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.pack_index import Place, Run, runs
from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.tiers.file.pages.catalogue import PackCatalogue
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.pack_tree import PackFile, file_name, keys_in, most_pages
from hicache_ext.storage.tiers.file.pages.page_file import EXPIRED, HEADER_LENGTH, TOUCH_INTERVAL, UNREADABLE
from hicache_ext.storage.tiers.file.pages.scanning import ABSENT, occupied
from hicache_ext.storage.tiers.file.usage import Usage

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
"""At a pack that others rename or remove meanwhile."""
_SHARE = 64
"""A pack takes at most this part of the capacity: packs are evicted whole."""
_UNHEALED_LIMIT = 65536


@dataclass(frozen=True, slots=True)
class FoundPack:
    """The pack that a page is in and can be read from."""

    path: str
    dead: int
    status: os.stat_result
    page_bytes: int
    pages: int
    """How many of its pages can be read: less than it has where it is cut or too old, or is no file."""


@dataclass(frozen=True, slots=True)
class PackRun:
    """Pages that stand one behind the other in a pack; ``run.members`` are their positions in a batch."""

    identity: bytes
    run: Run

    def place(self, number: int) -> Place:
        return Place(self.run.pack, self.run.first + number)

    def part(self, number: int) -> PackRun:
        """The page ``number`` of the run alone."""
        return PackRun(self.identity, Run(self.run.pack, self.run.first + number, [self.run.members[number]]))


class Packs:
    """The packs of one directory. Thread-safe."""

    def __init__(
        self,
        tier: str,
        directory: PageDirectory,
        usage: Usage,
        metrics: TierMetrics,
        note_error: Callable[[OSError], None],
        flags: tuple[int, int],
        look_over: Callable[[tuple[bytes, Pack]], None],
    ) -> None:
        """``flags``: of preadv2 and of pwritev2. ``look_over`` hears of identity and pack where a page was bad."""
        self._tier = tier
        self._directory = directory
        self._usage = usage
        self._metrics = metrics
        self._note_error = note_error
        self._look_over = look_over
        self._bad_log = LimitedLog(logger)
        self._read_flags, self._write_flags = flags
        self._most_pages = most_pages(directory.packs.home)
        self.catalogue = PackCatalogue(tier, directory.packs, note_error)
        # Pages that could not be read or taken away: absent to callers until a read succeeds.
        self._unhealed: set[tuple[str, int]] = set()

    def close(self) -> None:
        self.catalogue.close()

    # -- finding ---------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], oldest_valid_ms: int) -> list[FoundPack | None]:
        """Where each page is and can be read from; None for other pages."""
        found: list[FoundPack | None] = [None] * len(keys)
        for identity, positions in _by_identity(keys):
            statuses: dict[str, FoundPack | None] = {}
            for attempt in range(_ATTEMPTS):
                moved: list[int] = []
                places = self.catalogue.find([keys[i] for i in positions], again=attempt == 0)
                unhealed = self._unhealed
                for position, place in zip(positions, places, strict=True):
                    if place is None:
                        continue
                    pack, number = place
                    if pack.id not in statuses:
                        statuses[pack.id] = self._status(identity, pack, oldest_valid_ms)
                    status = statuses[pack.id]
                    if status is None or status.dead >> number & 1:
                        moved.append(position)
                    elif number < status.pages and not (unhealed and (pack.id, number) in unhealed):
                        found[position] = status
                if not moved:
                    break
                # What its bucket says now.
                statuses = {pack_id: status for pack_id, status in statuses.items() if status is not None}
                positions = moved
        return found

    def keys_in(self, identity: bytes, pack: Pack) -> list[bytes]:
        """Of the pages in a pack that are there and tell their keys. Raises OSError."""
        for _ in range(_ATTEMPTS):
            path, dead = self.catalogue.path(identity, pack)
            try:
                keys = keys_in(path, identity, pack)
            except ABSENT:
                if self.catalogue.look_for(identity, pack):
                    continue
                break
            return [key for position in PackFile(pack, dead).living if (key := keys[position]) is not None]
        return []

    def _status(self, identity: bytes, pack: Pack, oldest_valid_ms: int) -> FoundPack | None:
        """None: it is not there under the name that was known; its bucket was read again."""
        path, dead = self.catalogue.path(identity, pack)
        try:
            status = os.lstat(path)
        except ABSENT:
            self.catalogue.look_for(identity, pack)
        except OSError as error:
            self._note_error(error)
        else:
            is_pack = stat.S_ISREG(status.st_mode) and milliseconds_of(pack.id) >= oldest_valid_ms
            pages = status.st_size // pack.page_bytes if is_pack else 0
            return FoundPack(path, dead, status, pack.page_bytes, pages)
        return None

    def runs(self, keys: Sequence[bytes], *, again: bool = True) -> list[PackRun]:
        """The pages that are in packs, as far as names tell: to be read run by run."""
        found: list[PackRun] = []
        for identity, positions in _by_identity(keys):
            places = self.catalogue.find([keys[i] for i in positions], again=again)
            for run in runs(places, PACK_BYTES):
                members = [positions[member] for member in run.members]
                found.append(PackRun(identity, Run(run.pack, run.first, members)))
        return found

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, pages: PackRun, batch: PageBatch, oldest_valid_ms: int) -> list[GetResult | None]:
        """Read the pages of a run into their memory. None: the page is not there (any more): look again."""
        identity, pack, count = pages.identity, pages.run.pack, len(pages.run.members)
        path, dead = self.catalogue.path(identity, pack)
        if any(dead & pages.place(number).mask for number in range(count)):
            # Taken away since it was found, as another thread has learned.
            return [None] * count
        try:
            # O_NONBLOCK: opening a pipe that has the name would wait for its writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except ABSENT:
            self.catalogue.look_for(identity, pack)
            return [None] * count
        except OSError as error:
            if error.errno not in UNREADABLE:
                return [self._failed_read(pages.place(number), path, error) for number in range(count)]
            # For others it may be readable: it is absent to this process, and its pages are written anew.
            for number in range(count):
                self._metrics.add("corrupt", "unreadable")
                self.catalogue.forget_page(identity, pages.place(number))
            logger.warning("tier %s: %s cannot be read: %s", self._tier, path, error)
            return [GetResult.CORRUPT] * count
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self._metrics.add("corrupt", "not_a_file", count)
                self._remove_no_pack(identity, pack, path)
                return [GetResult.CORRUPT] * count
            if milliseconds_of(pack.id) < oldest_valid_ms:
                self.remove_expired(identity, PackFile(pack, dead), path, status)
                return [GetResult.MISS] * count
            results = self._read_run(fd, pages, batch)
            if GetResult.HIT in results:
                self.touch(fd, status)
            return results
        except OSError as error:
            return [self._failed_read(pages.place(number), path, error) for number in range(count)]
        finally:
            os.close(fd)

    def _read_run(self, fd: int, pages: PackRun, batch: PageBatch) -> list[GetResult | None]:
        run, page_bytes = pages.run, pages.run.pack.page_bytes
        if len(run.members) > 1 and any(HEADER_LENGTH + batch.sizes[i] != page_bytes for i in run.members):
            return self._read_one_by_one(fd, pages, batch)
        headers = [bytearray(HEADER_LENGTH) for _ in run.members]
        buffers: list[memoryview] = []
        for header, member in zip(headers, run.members, strict=True):
            buffers += [memoryview(header), *batch.buffers[member]]
        try:
            filled = vectored.read_into(fd, buffers, run.offset, self._read_flags)
        except OSError as error:
            if len(run.members) > 1:
                # One bad block is the misfortune of one page.
                return self._read_one_by_one(fd, pages, batch)
            return [self._failed_read(pages.place(0), f"pack {run.pack.id}", error)]
        return [
            self._checked(fd, pages.part(number), batch, header, filled - number * page_bytes)
            for number, header in enumerate(headers)
        ]

    def _read_one_by_one(self, fd: int, pages: PackRun, batch: PageBatch) -> list[GetResult | None]:
        return [self._read_run(fd, pages.part(number), batch)[0] for number in range(len(pages.run.members))]

    def _checked(self, fd: int, page: PackRun, batch: PageBatch, header: bytearray, filled: int) -> GetResult | None:
        """The result of one page whose header and segments were read; ``filled``: bytes of it."""
        identity, place, member = page.identity, page.place(0), page.run.members[0]
        key, segments = batch.keys[member], batch.buffers[member]
        reason = _reason(header, key, segments, filled, place.pack.page_bytes)
        if reason is None:
            self._unhealed.discard((place.pack.id, place.position))
            return GetResult.HIT
        if _is_another_page(header, key):
            # Its short hash is the same.
            self.catalogue.forget_page(identity, place)
            return None
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        elsewhere = [memoryview(bytearray(segment.nbytes)) for segment in segments]
        second = bytearray(HEADER_LENGTH)
        try:
            filled = vectored.read_into(fd, [memoryview(second), *elsewhere], place.offset, self._read_flags)
        except OSError as error:
            return self._failed_read(place, f"pack {place.pack.id}", error)
        if _reason(second, key, elsewhere, filled, place.pack.page_bytes) is None:
            # Damaged on the way here, by a network, a cache or this machine's memory: the page is not ours alone.
            self._metrics.add("suspect", "good")
        else:
            self._heal(identity, place, reason)
        return GetResult.CORRUPT

    def _failed_read(self, place: Place, path: str, error: OSError) -> GetResult:
        self._note_error(error)
        # Whether one block or the whole device is bad, this page cannot be had: the next write may replace it.
        self._remember_unhealed(place)
        logger.debug("tier %s: reading %s: %s", self._tier, path, error)
        return GetResult.ERROR

    def touch(self, file: int | str, status: os.stat_result) -> None:
        """Renew the recency of a pack."""
        if time.time() - status.st_mtime > TOUCH_INTERVAL:
            try:
                os.utime(file)
            except ABSENT:
                # Others have renamed or removed it.
                return
            except OSError as error:
                self._note_error(error)

    # -- writing ---------------------------------------------------------------------------------------------------

    def portions(
        self, batch: PageBatch, positions: Sequence[int], capacity: int | None
    ) -> tuple[list[list[int]], list[int]]:
        """Which pages make a pack each, and which are to be files of their own."""
        alike: dict[tuple[bytes, int], list[int]] = {}
        for position in positions:
            alike.setdefault((batch.keys[position][:IDENTITY_LENGTH], batch.sizes[position]), []).append(position)
        found: list[list[int]] = []
        for (_, payload), pages in alike.items():
            page_bytes = HEADER_LENGTH + payload
            share = self._most_pages if capacity is None else max(1, capacity // _SHARE // page_bytes)
            most = min(self._most_pages, share)
            if payload == 0 or page_bytes >= SMALL:
                most = 1
            found += [[pages[n] for n in part] for part in pack_format.portions([page_bytes] * len(pages), most)]
        return [part for part in found if len(part) > 1], [part[0] for part in found if len(part) == 1]

    def write(self, batch: PageBatch, positions: Sequence[int]) -> tuple[OSError | None, int]:
        """Write a pack of these pages, which are of one identity and one size; why it was not written, and the bytes of
        disk that took, with directories and also when it failed. No pack is left behind then."""
        keys = [batch.keys[i] for i in positions]
        identity, page_bytes = keys[0][:IDENTITY_LENGTH], HEADER_LENGTH + batch.sizes[positions[0]]
        pack = Pack.of_keys(new_id(int(time.time() * 1000)), page_bytes, keys)
        buffers: list[memoryview] = []
        for key, position in zip(keys, positions, strict=True):
            segments = batch.buffers[position]
            buffers += [memoryview(envelope.encode_header(key, segments)), *segments]
        buffers.append(memoryview(encode_footer(keys, page_bytes)))
        length = pack_format.pack_length(len(keys), page_bytes)
        added = 0
        for attempt in range(1, _ATTEMPTS + 1):
            bucket = self.catalogue.bucket_for_writing(identity)
            path = f"{self._directory.packs.identity_path(identity)}/{bucket}/{file_name(pack, 0)}"
            try:
                for made in self._directory.create_parent(path):
                    added += made
                self._write_whole(path, buffers, length)
            except ABSENT as error:
                # clear() or an eviction took the directory away in between.
                if attempt == _ATTEMPTS:
                    return error, added
                self._directory.clear_the_way(path)
            except OSError as error:
                if attempt == _ATTEMPTS or error.errno not in (errno.EACCES, errno.EPERM):
                    return error, added
                # Made by another account, perhaps.
                self.catalogue.refuse(identity, bucket)
            else:
                self.catalogue.add(identity, pack, bucket)
                return None, added + occupied(length)
        raise AssertionError("unreachable")

    def _write_whole(self, path: str, buffers: Sequence[memoryview], length: int) -> None:
        fd, temp_path = self._directory.open_unpublished(path)
        published = False
        try:
            if vectored.write_from(fd, buffers, 0, self._write_flags) != length:
                raise OSError(errno.ENOSPC, "short write", path)
            self._directory.publish_pack(fd, temp_path, path)
            published = True
        finally:
            os.close(fd)
            if not published:
                self._directory.discard(temp_path)

    # -- removal ---------------------------------------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """Take a page out of every pack that it is in; whether it was in one. Raises OSError."""
        identity, removed = key[:IDENTITY_LENGTH], False
        for place in self.catalogue.find_all(key):
            if not self._is_of_another_page(identity, place, key):
                removed = self._take_away(identity, place) or removed
        return removed

    def remove_copy(self, key: bytes, page_seal: bytes) -> bool:
        """Take those copies of a page away that have this ``envelope.page_seal``; whether there was one. Raises
        OSError."""
        identity, removed = key[:IDENTITY_LENGTH], False
        for place in self.catalogue.find_all(key):
            header = self._header(identity, place)
            if header is not None and envelope.seal_of(header) == page_seal:
                removed = self._take_away(identity, place) or removed
        return removed

    def make_way(self, sizes: Mapping[bytes, int], oldest_valid_ms: int) -> None:
        """Of pages that are about to be written, key and bytes, take those away that are there and are not they: a
        reader looks into packs first. Never raises OSError."""
        keys = list(sizes)
        for identity, positions in _by_identity(keys):
            wanted = [keys[position] for position in positions]
            for _ in range(_ATTEMPTS):
                places = zip(wanted, self.catalogue.find(wanted, again=False), strict=True)
                in_the_way = [
                    place
                    for key, place in places
                    if place is not None and self._is_in_the_way(identity, place, sizes[key], oldest_valid_ms)
                ]
                for place in in_the_way:
                    expired = milliseconds_of(place.pack.id) < oldest_valid_ms
                    self._heal(identity, place, EXPIRED if expired else "unreadable")
                if not in_the_way:
                    break

    def _is_in_the_way(self, identity: bytes, place: Place, size: int, oldest_valid_ms: int) -> bool:
        """Whether a page is there that is not one of ``size`` bytes to be read. Another writer may just have stored it:
        that one stays."""
        status = self._status(identity, place.pack, oldest_valid_ms)
        if status is None or status.dead & place.mask:
            return False
        return (
            status.page_bytes != size
            or place.position >= status.pages
            or (place.pack.id, place.position) in self._unhealed
        )

    def _heal(self, identity: bytes, place: Place, reason: str) -> None:
        """Take a page away that is not the page its name says, or too old."""
        if reason == EXPIRED:
            self._metrics.add("evicted", "ttl")
        else:
            self._metrics.add("corrupt", reason)
        what = f"page {place.position} of {self.catalogue.path(identity, place.pack)[0]}"
        try:
            self._take_away(identity, place)
        except OSError as error:
            self._note_error(error)
            # Absent to this process: the page is written into another pack.
            self.catalogue.forget_page(identity, place)
            logger.warning("tier %s: %s is bad (%s) and cannot be removed: %s", self._tier, what, reason, error)
        else:
            self._bad_log.log(
                logging.WARNING, "bad", "tier %s: %s was bad (%s) and is removed", self._tier, what, reason
            )
        self._unhealed.discard((place.pack.id, place.position))
        if reason != EXPIRED:
            self._look_over((identity, place.pack))

    def _take_away(self, identity: bytes, place: Place) -> bool:
        """Whether the page was there until now. Raises OSError."""
        pack = place.pack
        for _ in range(_ATTEMPTS):
            path, dead = self.catalogue.path(identity, pack)
            if dead & place.mask:
                return False
            left = dead | place.mask
            try:
                if left == pack.all_dead:
                    self._unlink(PackFile(pack), path)
                    self.catalogue.forget(identity, pack)
                else:
                    # A count that lists the bucket now may miss the pack, or meet it twice.
                    with self._usage.detaching():
                        os.rename(path, f"{path.rpartition('/')[0]}/{file_name(pack, left)}")
                    self.catalogue.kill(identity, pack, left)
            except ABSENT:
                # Others renamed or removed it.
                if not self.catalogue.look_for(identity, pack):
                    return False
            else:
                return True
        return False

    def _unlink(self, found: PackFile, path: str) -> None:
        """Raises OSError."""
        with self._usage.removing() as removal:
            size = self._directory.remove_page(path)
            # A damaged file must not take more out of the account than its pack once put in.
            removal.freed = occupied(min(size, found.length))
            removal.uncertain = size != found.length

    def remove_expired(self, identity: bytes, found: PackFile, path: str, status: os.stat_result) -> int:
        """Delete a pack that is older than the ttl; the pages that were in it, 0 where it stays."""
        if not stat.S_ISREG(status.st_mode):
            return 0
        try:
            self._unlink(found, path)
        except ABSENT:
            return 0
        except OSError as error:
            self._note_error(error)
            return 0
        self.catalogue.forget(identity, found.pack)
        self._metrics.add("evicted", "ttl", len(found.living))
        return len(found.living)

    def remove_all_expired(self, loop: BackgroundLoop, oldest_valid_ms: int) -> int:
        """Delete the packs written before, until ``loop`` is stopped; how many pages that were."""
        removed, tree = 0, self._directory.packs
        for identity in tree.known_identities():
            for name in tree.buckets(identity):
                bucket = f"{tree.identity_path(identity)}/{name}"
                before = removed
                for path, found in list(tree.packs_in(bucket)):
                    if loop.stopping:
                        return removed
                    if milliseconds_of(found.pack.id) < oldest_valid_ms:
                        with suppress(OSError):
                            removed += self.remove_expired(identity, found, path, os.lstat(path))
                if removed > before:
                    with self._usage.removing() as removal:
                        removal.freed = self._directory.remove_buckets_if_empty([bucket])
        return removed

    def _remove_no_pack(self, identity: bytes, pack: Pack, path: str) -> None:
        """Free the name of a pack that something else has."""
        self.catalogue.forget(identity, pack)
        try:
            self._unlink(PackFile(pack), path)
        except OSError as error:
            self._note_error(error)
        logger.warning("tier %s: %s was no file and is removed", self._tier, path)

    def _is_of_another_page(self, identity: bytes, place: Place, key: bytes) -> bool:
        """Whether the header says so. Raises no OSError: False then."""
        header = self._header(identity, place)
        return header is not None and _is_another_page(header, key)

    def _header(self, identity: bytes, place: Place) -> bytes | None:
        """What stands in front of the page in this place; None where it cannot be read."""
        path = self.catalogue.path(identity, place.pack)[0]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return os.pread(fd, HEADER_LENGTH, place.offset)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _remember_unhealed(self, place: Place) -> None:
        if len(self._unhealed) >= _UNHEALED_LIMIT:
            self._unhealed.clear()
        self._unhealed.add((place.pack.id, place.position))


def _by_identity(keys: Sequence[bytes]) -> Iterator[tuple[bytes, list[int]]]:
    """The positions of the keys of each identity."""
    if len({key[:IDENTITY_LENGTH] for key in keys}) == 1:
        yield keys[0][:IDENTITY_LENGTH], list(range(len(keys)))
        return
    positions: dict[bytes, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key[:IDENTITY_LENGTH], []).append(position)
    yield from positions.items()


def _reason(header: bytearray, key: bytes, segments: Sequence[memoryview], filled: int, page_bytes: int) -> str | None:
    """Why what was read is not the page ``key``; None when it is."""
    if HEADER_LENGTH + sum([segment.nbytes for segment in segments]) != page_bytes:
        return "payload_length"
    if filled < page_bytes:
        return "truncated"
    return envelope.reason_to_refuse(header, key, segments)


def _is_another_page(header: bytes | bytearray, key: bytes) -> bool:
    """Whether a header is that of another page of which names say the same."""
    try:
        found = envelope.decode_header(header).key
    except FormatError:
        return False
    return found != key and found[:IDENTITY_LENGTH] == key[:IDENTITY_LENGTH] and short_hash(found) == short_hash(key)

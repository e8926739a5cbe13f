"""How full one directory of page files is, shared by all processes that write to it.

One small file holds the bytes stored and, per writer process, its operations under way and the bytes reserved for them.
Every change is made under a lock, held for microseconds and waited for at most a second, so the capacity holds for
all ranks and processes together. An operation begins before its first file changes and ends when its last one is
counted; in between its process keeps its part in memory, too, and settles what it could not write as soon as it can.

The account is believed only while processes that use it follow each other without a gap. Whoever comes first counts the
directory anew, beside the work (``count``); so a power loss, a kill, damage and files removed by hand end with a
restart. An account that cannot be read counts as full until then. Reasons: docs/decisions/packs-of-page-files.md.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from hicache_ext.runtime.file_lock import CHANGE_LOCK_BOUND, ChangeLock
from hicache_ext.runtime.file_systems import file_system_of
from hicache_ext.runtime.members import Members
from hicache_ext.storage.tiers.file.layouts import MEMBERS, slab_home

_RECORD_LIMIT = 1 << 20
_EVICTION_BYTE = 0
"""Of the file of members, which nobody has as its id: one process at a time evicts."""
_READS = 3
"""Of a record that is being written, until one is whole."""
SILENCE = 600.0
"""Seconds without a sign of life."""
NO_ROOM, HELD = "capacity", "held"
"""Why a reservation is refused; the second one: another process holds a lock and does nothing."""
IsGone = Callable[[int, float], bool]
"""Of a writer, named by the number of its member of the directory, and of its last sign of life (wall-clock time)."""


def gone_writers(path: Path, is_alive: Callable[[int], bool]) -> IsGone:
    """Return what says whether a writer of the directory ``path`` is not running any more. ``is_alive``: whether a
    member (runtime/members.py) may be running."""
    # Between machines locks hold only where the mount has them (NFS with nolock, Lustre with localflock do not).
    silence = 0.0 if file_system_of(path).local else SILENCE
    return lambda writer, last_change: time.time() - last_change >= silence and not is_alive(writer)


_MOST_BYTES = 1 << 60
"""More is no account: whoever may write the file may write anything."""


class UnderWay(NamedTuple):
    """What one writer process has reserved for operations under way, perhaps for none but removals."""

    reserved: Annotated[int, Field(ge=0, le=_MOST_BYTES)]
    last_change: Annotated[float, Field(allow_inf_nan=False)]
    """Wall-clock time."""


@dataclass(slots=True)
class UsageRecord:
    """The content of the file: as JSON on one line, a checksum before it."""

    stored: Annotated[int, Field(ge=-_MOST_BYTES, le=_MOST_BYTES)] = 0
    """Bytes; without ``counted`` what came and went since the account was lost."""
    under_way: dict[int, UnderWay] = field(default_factory=dict)
    """By the number of the member that writes."""
    recount: bool = False
    """It may be wrong: somebody is to count."""
    counted: bool = True
    counts: int = 0
    """Goes up when a count begins, and when it ends: it is odd in between."""
    users: list[int] = field(default_factory=list)
    """Members for whom the account goes on; the first of them counted, or will."""
    no_space_since: Annotated[int, Field(ge=0)] = 0
    """Since when writes have found no space (wall-clock seconds), or 0."""

    @property
    def reserved(self) -> int:
        return sum(writer.reserved for writer in self.under_way.values())

    def used(self, capacity: int | None) -> int:
        """Bytes that count against the capacity: all of it while nobody knows what is stored."""
        base = 0 if self.counted or capacity is None else capacity
        return max(0, base + self.stored) + self.reserved

    @property
    def in_doubt(self) -> bool:
        """Whether somebody is to count, unless somebody does."""
        return self.recount or not self.counted or self.counts % 2 == 1


_RECORD = TypeAdapter(UsageRecord)


@dataclass(slots=True)
class Removal:
    """The progress of a removal (``Usage.removing``)."""

    freed: int = 0
    uncertain: bool = False
    """A file was not as large as its page: only a recount knows what was counted for it."""


class Usage:
    """The usage record of one directory. Thread-safe; each process opens its own. Calls raise OSError as the disk does.

    No call waits longer than the bounds of ``ChangeLock``.
    """

    def __init__(self, directory: Path, members: Members) -> None:
        """``members``: this process among those that use the directory; it outlives the account.

        Raises TimeoutError where another process holds the account and does nothing.
        """
        self._members = members
        self._is_gone = gone_writers(directory, members.is_alive)
        self._state = threading.Lock()
        # What this process has under way, and what it has still to tell the account.
        self._operations = 0
        self._reserved = 0
        self._unsettled = 0
        self._doubt = False
        path = directory / "usage"
        with ExitStack() as locks:
            # clear() takes it on SGLang's scheduler thread.
            self._lock = ChangeLock(path, 0, f"the account {str(path)!r}", threads=CHANGE_LOCK_BOUND)
            locks.callback(self._lock.close)
            turns = f"the turn to evict from {str(directory)!r}"
            self._evictions = ChangeLock(directory / MEMBERS, _EVICTION_BYTE, turns)
            locks.callback(self._evictions.close)
            self._held = (
                f"another process has held {str(path)!r} for {CHANGE_LOCK_BOUND:g} s and does nothing, stopped perhaps"
            )
            self._lock.check_is_free(self._held)
            with self.locked() as record:
                self._release_dead_writers(record)
                record.users = [user for user in record.users if members.is_alive(user)]
                record.recount = record.recount or not record.users
                record.users.append(members.id)
            self._locks = locks.pop_all()

    @contextmanager
    def locked(self) -> Iterator[UsageRecord]:
        """The record under the lock of all processes, to be changed. Written back with what this process has under way,
        unless the body raised. Raises TimeoutError where another process holds it for longer than the bound."""
        with self._lock.held() as mine:
            if not mine:
                raise TimeoutError(errno.ETIMEDOUT, self._held)
            # The whole directory may have been removed under us.
            self._members.renew()
            record = _record_in(os.pread(self._lock.fd, _RECORD_LIMIT, 0))
            if record is None:
                record = UsageRecord(recount=True, counted=False)
            settled = self._settle(record)
            try:
                yield record
                settled += self._settle(record)
                doubt, self._doubt = self._doubt, False
                record.recount = record.recount or doubt
                self._write(record)
            except BaseException:
                self._doubt = True
                with self._state:
                    self._unsettled += settled
                raise

    def reserve(self, amount: int, capacity: int | None, evict: Callable[[int], int]) -> str | None:
        """Begin an operation that needs ``amount`` bytes within ``capacity``; None, or why there is no room now.

        ``evict(bytes)`` evicts at least that many bytes if it can, and returns how many it has freed. One process at a
        time evicts, without the lock of the account. After None the caller always calls ``commit``.
        """
        try:
            if self._try_to_reserve(amount, capacity, beyond=False) is not None:
                return None
            with self._evictions.held() as mine:
                if not mine:
                    return HELD
                # Another process may have made room meanwhile. If not, what is evicted is for us: reserved before.
                missing = self._try_to_reserve(amount, capacity, beyond=True)
                if missing is None:
                    return NO_ROOM
                is_room = not missing
                try:
                    if missing:
                        self._change(stored=-evict(missing))
                        with self.locked() as record:
                            is_room = capacity is None or record.used(capacity) <= capacity
                finally:
                    if not is_room:
                        self._end(operations=-1, reserved=-amount)
                return None if is_room else NO_ROOM
        except TimeoutError:
            return HELD

    def _try_to_reserve(self, amount: int, capacity: int | None, *, beyond: bool) -> int | None:
        """Reserve; the bytes that are to be evicted first, None where there is no room. ``beyond``: also where there is
        none now, if eviction can make some."""
        begun = False
        try:
            with self.locked() as record:
                missing = 0
                if record.recount and capacity is not None and record.stored > capacity:
                    # It cannot be, and is in doubt: nobody knows what is stored.
                    record.counted, record.stored = False, 0
                if capacity is not None and record.used(capacity) + amount > capacity:
                    self._release_dead_writers(record)
                    # Where others have reserved too much no eviction can help: do not empty the cache for it.
                    if not beyond or record.reserved + amount > capacity:
                        return None
                    missing = record.used(capacity) + amount - capacity
                self._change(operations=1, reserved=amount)
                begun = True
                return missing
        except OSError:
            if begun:
                self._change(operations=-1, reserved=-amount)
            raise

    def commit(self, reserved: int, stored: int) -> None:
        """End an operation: its reservation becomes ``stored`` bytes (less for pages refused or present). Raises
        nothing: what the account cannot be told now it is told later."""
        self._end(operations=-1, reserved=-reserved, stored=stored)

    @contextmanager
    def removing(self) -> Iterator[Removal]:
        """An operation that removes files and notes in ``Removal`` how many bytes of disk that freed.

        It does not need the account: files go although another process holds it, and it is told later.
        """
        removal = Removal()
        self._end(operations=1)
        try:
            yield removal
        finally:
            self._end(operations=-1, stored=-removal.freed, recount=removal.uncertain)

    @contextmanager
    def detaching(self) -> Iterator[Removal]:
        """``removing`` for trees that go out of sight long before their bytes are free: a count in between would be
        wrong, so it is repeated."""
        begun = self._counts()
        with self.removing() as removal:
            try:
                yield removal
            finally:
                removal.uncertain = removal.uncertain or begun is None or begun % 2 == 1 or self._counts() != begun

    def used(self, capacity: int | None = None) -> int:
        """Bytes that count against the capacity, over all processes; the lock is not needed. Raises OSError."""
        record = self._look() or UsageRecord(counted=False)
        with self._state:
            own = self._unsettled
        return max(0, record.used(capacity) + own)

    def no_space_since(self) -> int:
        """As in ``UsageRecord``. Raises OSError."""
        return (self._look() or UsageRecord()).no_space_since

    def in_doubt(self) -> bool:
        """Whether somebody is to count. Raises OSError."""
        record = self._look()
        return record is None or record.in_doubt or bool(self._dead_writers(record))

    def count(self, parts: Iterable[tuple[float, int]]) -> bool:
        """Put the account right by a walk over the directory, while it is in use; False where ``parts`` ended early.
        One process at a time. Raises OSError.

        ``parts`` walks: (share of the directory walked by now, bytes found in this part). Pages come and go meanwhile.
        They are spread evenly over the parts, so of a change the share walked before is missing in what was found.
        """
        with self.locked() as record:
            self._release_dead_writers(record)
            # Odd, also after a count whose process was killed.
            record.counts += 1 + record.counts % 2
            record.recount = False
            before, was_counted = record.stored, record.counted
        found, correction, share = 0, 0.0, 0.0
        for walked, part in parts:
            found += part
            if (seen := self._look()) is not None:
                correction += (seen.stored - before) * (share + walked) / 2
                before = seen.stored
            share = walked
        with self.locked() as record:
            record.counts += record.counts % 2
            if share < 1.0 or record.counted != was_counted:
                record.recount = True
                return False
            record.stored = max(0, found + round(correction + record.stored - before))
            record.counted = True
        return True

    def close(self) -> None:
        """Tell the account what it does not know yet, if it is free. Raises nothing."""
        self._end()
        self._locks.close()

    def _change(self, operations: int = 0, reserved: int = 0, stored: int = 0) -> None:
        with self._state:
            self._operations += operations
            self._reserved += reserved
            self._unsettled += stored

    def _end(self, operations: int = 0, reserved: int = 0, stored: int = 0, recount: bool = False) -> None:
        self._change(operations, reserved, stored)
        self._doubt = self._doubt or recount
        with suppress(OSError), self.locked():
            pass

    def _settle(self, record: UsageRecord) -> int:
        """Put what this process has under way into the record; the bytes that are settled so."""
        own = self._members.id
        with self._state:
            operations, reserved, settled = self._operations, self._reserved, self._unsettled
            self._unsettled = 0
        record.stored += settled
        if record.counted:
            record.stored = max(0, record.stored)
        if operations > 0:
            record.under_way[own] = UnderWay(max(0, reserved), time.time())
        else:
            record.under_way.pop(own, None)
        return settled

    def _dead_writers(self, record: UsageRecord) -> list[int]:
        return [writer for writer, left in record.under_way.items() if self._is_gone(writer, left.last_change)]

    def _release_dead_writers(self, record: UsageRecord) -> None:
        for writer in self._dead_writers(record):
            # How much was published is unknown: to count all of it keeps the capacity.
            record.stored += record.under_way.pop(writer).reserved
            record.recount = True

    def _look(self) -> UsageRecord | None:
        """The record without the lock; None where it cannot be read."""
        for _ in range(_READS):
            record = _record_in(os.pread(self._lock.fd, _RECORD_LIMIT, 0))
            if record is not None:
                return record
        return None

    def _counts(self) -> int | None:
        with suppress(OSError):
            record = self._look()
            return None if record is None else record.counts
        return None

    def _write(self, record: UsageRecord) -> None:
        body = _RECORD.dump_json(record, warnings=False)
        # The newline ends the record: the rest of an earlier, longer one is never read.
        os.pwrite(self._lock.fd, _checksum(body) + b" " + body + b"\n", 0)


def occupied_bytes(directory: Path) -> int:
    """Bytes of disk that count towards the capacity of a directory of the file tier: page files by their record, read
    without its lock; slabs are few files, which are counted. Raises OSError."""
    record = _recorded(directory)
    if record is not None and record.counted:
        return record.used(None)
    total = 0
    for part in (slab_home(directory), directory / "pages", directory / "tmp"):
        for folder, _, names in os.walk(part):
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def no_space_since(directory: Path) -> int:
    """As in the record of a directory of page files, read without its lock; 0 without one. Raises OSError."""
    return (_recorded(directory) or UsageRecord()).no_space_since


def _recorded(directory: Path) -> UsageRecord | None:
    with suppress(FileNotFoundError, PermissionError, IsADirectoryError), (directory / "usage").open("rb") as file:
        return _record_in(file.read(_RECORD_LIMIT))
    return None


def _record_in(raw: bytes) -> UsageRecord | None:
    """None for anything else than a record, whole and undamaged."""
    checksum, _, body = raw.partition(b"\n")[0].partition(b" ")
    if checksum != _checksum(body):
        return None
    with suppress(ValueError):
        return _RECORD.validate_json(body)
    return None


def _checksum(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)

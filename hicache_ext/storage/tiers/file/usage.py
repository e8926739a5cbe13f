"""Accounts for the space of one directory of page files, shared by all processes that write to it.

One small file, the account, holds the bytes stored and, per writer process, the operations in flight and the bytes
reserved for them. Every change is made under a lock, held for microseconds and waited for at most a second, so that the
capacity holds for all ranks and processes together. An operation begins before its first file changes and ends when its
last one is counted; meanwhile its process also keeps its part in memory, and writes what it could not when it can.

The account is trusted only while at least one process uses it without interruption. The first process to use it after a
gap recounts the directory in the background (``count``), so that a restart repairs what a power loss, a kill, damage or
manual removal did. An unreadable account counts as full until then. Reasons: docs/decisions/packs-of-page-files.md.
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
"""Byte of the members file that no member has as its id. Locking it lets one process at a time evict."""
_READS = 3
"""Most attempts to read a complete record while it may be being written."""
SILENCE = 600.0
"""Seconds without a change after which a writer on a shared file system may be considered gone."""
NO_ROOM, HELD = "capacity", "held"
"""Reasons to refuse a reservation. ``HELD``: another process holds a lock and does nothing."""
IsGone = Callable[[int, float], bool]
"""Tells whether a writer is gone, from its member number and the wall-clock time of its last change."""


def gone_writers(path: Path, is_alive: Callable[[int], bool]) -> IsGone:
    """Return a function that tells whether a writer of the directory ``path`` no longer runs. ``is_alive`` tells
    whether a member (runtime/members.py) may be running."""
    # Locks work between machines only if the mount supports them (NFS with nolock, Lustre with localflock do not).
    silence = 0.0 if file_system_of(path).local else SILENCE
    return lambda writer, last_change: time.time() - last_change >= silence and not is_alive(writer)


_MOST_BYTES = 1 << 60
"""Largest plausible number of bytes: anyone who may write the file may have written anything."""


class UnderWay(NamedTuple):
    """Reservation of one writer process for its operations in flight; 0 if all of them are removals."""

    reserved: Annotated[int, Field(ge=0, le=_MOST_BYTES)]
    last_change: Annotated[float, Field(allow_inf_nan=False)]
    """Wall-clock time."""


@dataclass(slots=True)
class UsageRecord:
    """The content of the file: JSON on one line, after a checksum."""

    stored: Annotated[int, Field(ge=-_MOST_BYTES, le=_MOST_BYTES)] = 0
    """Bytes; without ``counted``, only the net change since the account was lost."""
    under_way: dict[int, UnderWay] = field(default_factory=dict)
    """Operations in flight by the number of the member that writes."""
    recount: bool = False
    """The account may be wrong and needs a recount."""
    counted: bool = True
    counts: int = 0
    """Incremented when a count begins and when it ends, so that it is odd in between."""
    users: list[int] = field(default_factory=list)
    """Members that use the account, without a gap between them; the first of them counted, or will."""
    no_space_since: Annotated[int, Field(ge=0)] = 0
    """Time since which writes have found no space (wall-clock seconds), or 0."""

    @property
    def reserved(self) -> int:
        return sum(writer.reserved for writer in self.under_way.values())

    def used(self, capacity: int | None) -> int:
        """Return the bytes that count against the capacity: all of it while it is unknown what is stored."""
        base = 0 if self.counted or capacity is None else capacity
        return max(0, base + self.stored) + self.reserved

    @property
    def in_doubt(self) -> bool:
        """Whether a recount is needed or unfinished."""
        return self.recount or not self.counted or self.counts % 2 == 1


_RECORD = TypeAdapter(UsageRecord)


@dataclass(slots=True)
class Removal:
    """The progress of a removal (``Usage.removing``)."""

    freed: int = 0
    uncertain: bool = False
    """Whether a file did not have the size of its pages: only a recount can tell what was counted for it."""


class Usage:
    """The account of one directory. Thread-safe; each process opens its own. Calls raise the disk's OSError.

    No call waits longer than the bounds of ``ChangeLock``.
    """

    def __init__(self, directory: Path, members: Members) -> None:
        """Open the account. ``members``: the users of the directory, with this process; must outlive the account.

        Raises TimeoutError if another process holds the account and does nothing.
        """
        self._members = members
        self._is_gone = gone_writers(directory, members.is_alive)
        self._state = threading.Lock()
        # Operations of this process in flight, and what it has not yet written to the account.
        self._operations = 0
        self._reserved = 0
        self._unsettled = 0
        self._doubt = False
        path = directory / "usage"
        with ExitStack() as locks:
            # clear() takes this lock on SGLang's scheduler thread.
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
        """Lock the record against all processes and yield it for changes. Write it back, with what this process has in
        flight, unless the body raises. Raises TimeoutError if another process holds it for longer than the bound."""
        with self._lock.held() as acquired:
            if not acquired:
                raise TimeoutError(errno.ETIMEDOUT, self._held)
            # The whole directory may have been removed meanwhile.
            self._members.renew()
            record = _parse_record(os.pread(self._lock.fd, _RECORD_LIMIT, 0))
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
        """Begin an operation that needs ``amount`` bytes within ``capacity``. Return None, or why there is no room now.

        ``evict(bytes)`` evicts at least that many bytes if it can, and returns how many it has freed. One process at a
        time evicts, without holding the account's lock. After None, the caller must always call ``commit``.
        """
        try:
            if self._try_to_reserve(amount, capacity, beyond=False) is not None:
                return None
            with self._evictions.held() as acquired:
                if not acquired:
                    return HELD
                # Another process may have made room meanwhile. If not, reserve before evicting, to get what is freed.
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
        """Reserve; return the bytes that must be evicted first, None if there is no room. ``beyond``: reserve even if
        there is no room now, provided that eviction can make some."""
        begun = False
        try:
            with self.locked() as record:
                missing = 0
                if record.recount and capacity is not None and record.stored > capacity:
                    # Impossible, and a recount is due: nobody knows what is stored.
                    record.counted, record.stored = False, 0
                if capacity is not None and record.used(capacity) + amount > capacity:
                    self._release_dead_writers(record)
                    # If others have reserved too much, eviction cannot help: do not empty the cache in vain.
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
        """End an operation: its reservation becomes ``stored`` bytes (fewer if pages were refused or present). Never
        raises: what cannot be written to the account now is written later."""
        self._end(operations=-1, reserved=-reserved, stored=stored)

    @contextmanager
    def removing(self) -> Iterator[Removal]:
        """Run an operation that removes files and records in the ``Removal`` how many bytes of disk that freed.

        It does not wait for the account: if another process holds it, files are removed and accounted for later.
        """
        removal = Removal()
        self._end(operations=1)
        try:
            yield removal
        finally:
            self._end(operations=-1, stored=-removal.freed, recount=removal.uncertain)

    @contextmanager
    def detaching(self) -> Iterator[Removal]:
        """Run ``removing`` for trees that are out of sight long before their bytes are freed. A count in between would
        be wrong, so it is repeated."""
        begun = self._counts()
        with self.removing() as removal:
            try:
                yield removal
            finally:
                removal.uncertain = removal.uncertain or begun is None or begun % 2 == 1 or self._counts() != begun

    def used(self, capacity: int | None = None) -> int:
        """Return the bytes that count against the capacity, over all processes, without the lock. Raises OSError."""
        record = self._read_unlocked() or UsageRecord(counted=False)
        with self._state:
            own = self._unsettled
        return max(0, record.used(capacity) + own)

    def no_space_since(self) -> int:
        """Return the record's ``no_space_since``. Raises OSError."""
        return (self._read_unlocked() or UsageRecord()).no_space_since

    def in_doubt(self) -> bool:
        """Return whether a recount is needed or unfinished. Raises OSError."""
        record = self._read_unlocked()
        return record is None or record.in_doubt or bool(self._dead_writers(record))

    def count(self, parts: Iterable[tuple[float, int]]) -> bool:
        """Recount the account by a walk over the directory in use; return False if ``parts`` ended early. One process
        at a time. Raises OSError.

        ``parts`` walks and yields (share of the directory walked by now, bytes found in this part). Pages come and go
        meanwhile, spread evenly over the parts, so what was found misses a change's share that was walked before it.
        """
        with self.locked() as record:
            self._release_dead_writers(record)
            # Make it odd, even after a count whose process was killed.
            record.counts += 1 + record.counts % 2
            record.recount = False
            before, was_counted = record.stored, record.counted
        found, correction, share = 0, 0.0, 0.0
        for walked, part in parts:
            found += part
            if (seen := self._read_unlocked()) is not None:
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
        """Write what the account does not have yet, if it is not locked. Never raises."""
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
        """Write what this process has in flight into the record; return the bytes that this settles."""
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
            # How much was published is unknown: counting all of it keeps within the capacity.
            record.stored += record.under_way.pop(writer).reserved
            record.recount = True

    def _read_unlocked(self) -> UsageRecord | None:
        """Read the record without the lock; return None if it cannot be read."""
        for _ in range(_READS):
            record = _parse_record(os.pread(self._lock.fd, _RECORD_LIMIT, 0))
            if record is not None:
                return record
        return None

    def _counts(self) -> int | None:
        with suppress(OSError):
            record = self._read_unlocked()
            return None if record is None else record.counts
        return None

    def _write(self, record: UsageRecord) -> None:
        body = _RECORD.dump_json(record, warnings=False)
        # The newline ends the record: the rest of an earlier, longer one is never read.
        os.pwrite(self._lock.fd, _checksum(body) + b" " + body + b"\n", 0)


def occupied_bytes(directory: Path) -> int:
    """Return the bytes of disk that count towards the capacity of a file tier's directory: for page files from the
    account, read without its lock; for slabs, which are few files, by counting. Raises OSError."""
    record = _read_record_of(directory)
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
    """Return ``no_space_since`` of a directory of page files, read without the lock; 0 if none. Raises OSError."""
    return (_read_record_of(directory) or UsageRecord()).no_space_since


def _read_record_of(directory: Path) -> UsageRecord | None:
    with suppress(FileNotFoundError, PermissionError, IsADirectoryError), (directory / "usage").open("rb") as file:
        return _parse_record(file.read(_RECORD_LIMIT))
    return None


def _parse_record(raw: bytes) -> UsageRecord | None:
    """Parse a record; return None for anything but a complete and undamaged one."""
    checksum, _, body = raw.partition(b"\n")[0].partition(b" ")
    if checksum != _checksum(body):
        return None
    with suppress(ValueError):
        return _RECORD.validate_json(body)
    return None


def _checksum(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)

"""How full one directory of page files is, shared by all processes that write to it.

One small file holds the bytes stored and, per writer process, its operations under way and the bytes reserved for them.
Every change is made under an flock, so the capacity holds for all ranks and processes together. An operation begins
before its first file changes and ends when its last one is counted. A killed writer leaves its operations behind: the
next process that sees it dead counts the reserved bytes as stored (never too few) and marks the directory for a recount
at the next start. Reasons: docs/decisions/page-files.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hicache_ext.runtime import file_lock
from hicache_ext.runtime.access import open_file
from hicache_ext.runtime.liveness import writer_alive, writer_name

_RECORD_LIMIT = 1 << 20


@dataclass(slots=True)
class UnderWay:
    """The operations of one writer process under way."""

    operations: int = 0
    reserved: int = 0
    last_change: float = 0.0
    """Wall-clock time."""


@dataclass(slots=True)
class UsageRecord:
    """The content of the file; ``under_way`` by writer (``writer_name``)."""

    stored: int = 0
    under_way: dict[str, UnderWay] = field(default_factory=dict)
    recount: bool = False

    @property
    def reserved(self) -> int:
        return sum(writer.reserved for writer in self.under_way.values())

    @property
    def total(self) -> int:
        return self.stored + self.reserved


@dataclass(slots=True)
class Removal:
    """The progress of a removal (``Usage.removing``)."""

    freed: int = 0
    uncertain: bool = False
    """A file was not as large as its page: only a recount knows what was counted for it."""


class Usage:
    """The usage record of one directory. Thread-safe; each process opens its own. Calls raise OSError."""

    def __init__(self, path: Path, count_stored: Callable[[Callable[[], None]], int]) -> None:
        """``count_stored`` walks the directory and returns its bytes. It runs under the lock when the record is lost,
        and calls its argument now and then to show progress."""
        self._count_stored = count_stored
        self._thread_lock = threading.Lock()
        self._writer = writer_name()
        self._fd = open_file(path, os.O_RDWR)
        try:
            # A start must not wait for ever for a process that was stopped with the lock.
            file_lock.lock_within(self._fd, fcntl.LOCK_EX, file_lock.PATIENCE, path)
            with self.locked() as record:
                self._release_dead_writers(record)
                # With operations under way a walk would count their bytes twice.
                if record.recount and not record.under_way:
                    record.stored = count_stored(self.show_progress)
                    record.recount = False
        except OSError:
            os.close(self._fd)
            raise

    @contextmanager
    def locked(self) -> Iterator[UsageRecord]:
        """The record under the lock of all processes; written back on leaving, also when the body raised."""
        with self._thread_lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                record = self._read()
                try:
                    yield record
                finally:
                    self._write(record)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def reserve(self, amount: int, capacity: int | None, evict: Callable[[int], int]) -> bool:
        """Begin an operation that needs ``amount`` bytes within ``capacity``; False if they cannot be freed.

        ``evict(bytes)`` evicts at least that many bytes if it can and returns how many it freed. It runs under the
        lock, so that two processes never evict for the same need. After True the caller always calls ``commit``.
        """
        with self.locked() as record:
            if capacity is not None and record.total + amount > capacity:
                self._release_dead_writers(record)
                if record.reserved + amount > capacity:
                    # No eviction can help: do not empty the cache for it.
                    return False
            self._change_own(record, operations=1, reserved=amount)
            if capacity is not None and record.total > capacity:
                # Written before the first file goes: after a kill amid the eviction the record is known to be wrong.
                self._write(record)
                record.stored = max(0, record.stored - evict(record.total - capacity))
                if record.total > capacity:
                    self._change_own(record, operations=-1, reserved=-amount)
                    return False
            return True

    def commit(self, reserved: int, stored: int) -> None:
        """End an operation: its reservation becomes ``stored`` bytes (less for pages refused or present)."""
        with self.locked() as record:
            self._change_own(record, operations=-1, reserved=-reserved)
            record.stored = max(0, record.stored + stored)

    @contextmanager
    def removing(self) -> Iterator[Removal]:
        """An operation that removes files and notes in ``Removal`` how many bytes of disk that freed."""
        removal = Removal()
        with self.locked() as record:
            self._change_own(record, operations=1)
        try:
            yield removal
        finally:
            with self.locked() as record:
                self._change_own(record, operations=-1)
                record.stored = max(0, record.stored - removal.freed)
                record.recount = record.recount or removal.uncertain

    def total(self) -> int:
        with self.locked() as record:
            return record.total

    def show_progress(self) -> None:
        """Show those who wait for the lock that its holder works. Never raises OSError."""
        with suppress(OSError):
            file_lock.show_progress(self._fd)

    def close(self) -> None:
        with self._thread_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _change_own(self, record: UsageRecord, *, operations: int = 0, reserved: int = 0) -> None:
        own = record.under_way.get(self._writer, UnderWay())
        own = UnderWay(own.operations + operations, max(0, own.reserved + reserved), time.time())
        if own.operations > 0:
            record.under_way[self._writer] = own
        else:
            record.under_way.pop(self._writer, None)

    def _release_dead_writers(self, record: UsageRecord) -> None:
        for writer, left in list(record.under_way.items()):
            if writer != self._writer and not writer_alive(writer, left.last_change):
                # How much was published is unknown: to count all of it keeps the capacity.
                record.stored += left.reserved
                record.recount = True
                del record.under_way[writer]

    def _read(self) -> UsageRecord:
        # New, or damaged by a power loss: count the directory.
        return _record_in(os.pread(self._fd, _RECORD_LIMIT, 0)) or UsageRecord(
            stored=self._count_stored(self.show_progress)
        )

    def _write(self, record: UsageRecord) -> None:
        document = {
            "stored": record.stored,
            "under_way": {
                writer: (left.operations, left.reserved, left.last_change) for writer, left in record.under_way.items()
            },
            "recount": record.recount,
        }
        # The newline ends the record: the rest of an earlier, longer one is never read.
        os.pwrite(self._fd, json.dumps(document).encode() + b"\n", 0)


def occupied_bytes(directory: Path) -> int:
    """Bytes of disk that a directory of the file tier takes: page files by their record, read without its lock; slabs
    are few files, which are counted. Raises OSError."""
    with suppress(FileNotFoundError, PermissionError), (directory / "usage").open("rb") as file:
        record = _record_in(file.read(_RECORD_LIMIT))
        if record is not None:
            return record.total
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _record_in(raw: bytes) -> UsageRecord | None:
    try:
        document = json.loads(raw[: raw.index(b"\n")])
        return UsageRecord(
            stored=int(document["stored"]),
            under_way={
                str(writer): UnderWay(int(operations), int(reserved), float(last_change))
                for writer, (operations, reserved, last_change) in document["under_way"].items()
            },
            recount=bool(document["recount"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None

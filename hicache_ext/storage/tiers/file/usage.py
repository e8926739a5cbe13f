"""How full one directory is, agreed between all processes that write to it.

One small file holds the bytes that are stored and, per writer process, what it has under way: operations, and the bytes
reserved for the pages they write. Every change happens under an flock, so the capacity holds for all ranks and
processes together. Whatever adds or removes files is an operation from before its first file until the account knows
about its last. A writer that was killed leaves its operations behind; whoever sees next that it is dead counts the
bytes reserved as stored (never fewer than there are) and marks the directory for a recount at the next start.
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
    """What one writer process has begun and not ended."""

    operations: int = 0
    reserved: int = 0
    last_change: float = 0.0
    """Wall-clock time."""


@dataclass(slots=True)
class UsageRecord:
    """What the file holds; ``under_way`` is keyed by writer (``writer_name``)."""

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
    """What a removal under way (``Usage.removing``) has done so far."""

    freed: int = 0
    uncertain: bool = False
    """The file was not as large as its page is: what was charged for it is known only to a recount."""


class Usage:
    """The account of one directory. Thread-safe; each process opens its own. Calls raise OSError as the disk does."""

    def __init__(self, path: Path, count_stored: Callable[[Callable[[], None]], int]) -> None:
        """``count_stored`` walks the directory and answers its bytes; runs under the lock when the account is lost, and
        calls what it is given now and then."""
        self._count_stored = count_stored
        self._thread_lock = threading.Lock()
        self._writer = writer_name()
        self._fd = open_file(path, os.O_RDWR)
        try:
            # A start must not wait for ever on somebody who was stopped with the lock.
            file_lock.lock_within(self._fd, fcntl.LOCK_EX, file_lock.PATIENCE, path)
            with self.locked() as record:
                self._release_dead_writers(record)
                # Beside operations under way a walk would count twice what they are about to report.
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

    def reserve(self, amount: int, capacity: int | None, make_room: Callable[[int], int]) -> bool:
        """Begin an operation that needs ``amount`` bytes within ``capacity``; False when they cannot be had.

        ``make_room(bytes)`` evicts at least that many bytes if it can and answers how many it freed; it runs under the
        lock, so that two processes never evict for the same need. True is followed by ``commit``, always.
        """
        with self.locked() as record:
            if capacity is not None and record.total + amount > capacity:
                self._release_dead_writers(record)
                if record.reserved + amount > capacity:
                    # No eviction can help: do not throw the cache away for it.
                    return False
            self._change_own(record, operations=1, reserved=amount)
            if capacity is not None and record.total > capacity:
                # On disk before the first file goes: killed amid the eviction, the account must be known to be off.
                self._write(record)
                record.stored = max(0, record.stored - make_room(record.total - capacity))
                if record.total > capacity:
                    self._change_own(record, operations=-1, reserved=-amount)
                    return False
            return True

    def commit(self, reserved: int, stored: int) -> None:
        """End an operation: its reservation becomes ``stored`` bytes (fewer where pages were refused or there)."""
        with self.locked() as record:
            self._change_own(record, operations=-1, reserved=-reserved)
            record.stored = max(0, record.stored + stored)

    @contextmanager
    def removing(self) -> Iterator[Removal]:
        """An operation that removes files and says in ``Removal`` how many bytes of disk that freed."""
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
        """Tell who waits for the lock, which is held, that something is being done. Never raises OSError."""
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
                # How much of it was published is unknown: counting all keeps the promise on capacity.
                record.stored += left.reserved
                record.recount = True
                del record.under_way[writer]

    def _read(self) -> UsageRecord:
        # New, or damaged by a power loss: the directory itself tells.
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
        # The newline ends the record: what an earlier, longer one left behind it is never read.
        os.pwrite(self._fd, json.dumps(document).encode() + b"\n", 0)


def recorded_total(path: Path) -> int | None:
    """Bytes stored and reserved by the account in the file ``path``, which is not locked for it; None where it does not
    say. Raises OSError."""
    with path.open("rb") as file:
        record = _record_in(file.read(_RECORD_LIMIT))
    return None if record is None else record.total


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

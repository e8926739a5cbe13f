"""How full one directory is, agreed between all processes that write to it.

One small file holds the bytes that are stored and, per writer process, the bytes it has reserved for pages under way.
Every change happens under an flock, so the capacity holds for all ranks and processes together. A writer that was
killed leaves its reservation behind; whoever sees next that it is dead counts those bytes as stored (never fewer than
there are) and marks the directory for a recount at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_RECORD_LIMIT = 1 << 20
_FOREIGN_WRITER_SILENCE = 600.0
"""Seconds without a sign of life after which a writer of another machine counts as dead."""


@dataclass(slots=True)
class UsageRecord:
    """What the file holds. ``reserved`` maps a writer to (bytes under way, wall-clock time of its last change)."""

    stored: int = 0
    reserved: dict[str, tuple[int, float]] = field(default_factory=dict)
    recount: bool = False

    @property
    def total(self) -> int:
        return self.stored + sum(amount for amount, _ in self.reserved.values())


class Usage:
    """The account of one directory. Thread-safe; each process opens its own."""

    def __init__(self, path: Path, count_stored: Callable[[], int]) -> None:
        """``count_stored`` walks the directory and answers its bytes; runs under the lock when the account is lost."""
        self._count_stored = count_stored
        self._thread_lock = threading.Lock()
        self._writer = writer_name()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with self.locked() as record:
                self._release_dead_writers(record)
                if record.recount:
                    record.stored = count_stored()
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
        """Reserve ``amount`` bytes within ``capacity``; False when they cannot be had.

        ``make_room(bytes)`` evicts at least that many bytes if it can and answers how many it freed; it runs under the
        lock, so that two processes never evict for the same need.
        """
        with self.locked() as record:
            if capacity is not None:
                if record.total + amount > capacity:
                    self._release_dead_writers(record)
                if record.total + amount > capacity:
                    record.stored = max(0, record.stored - make_room(record.total + amount - capacity))
                if record.total + amount > capacity:
                    return False
            self._add_reservation(record, amount)
            return True

    def commit(self, reserved: int, stored: int) -> None:
        """Turn a reservation into ``stored`` bytes (fewer where pages were refused or were there already)."""
        with self.locked() as record:
            self._add_reservation(record, -reserved)
            record.stored = max(0, record.stored + stored)

    def removed(self, amount: int) -> None:
        if amount:
            with self.locked() as record:
                record.stored = max(0, record.stored - amount)

    def recount(self) -> int:
        with self.locked() as record:
            self._release_dead_writers(record)
            record.stored = self._count_stored()
            record.recount = False
            return record.stored

    def total(self) -> int:
        with self.locked() as record:
            return record.total

    def close(self) -> None:
        with self._thread_lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _add_reservation(self, record: UsageRecord, amount: int) -> None:
        held, _ = record.reserved.get(self._writer, (0, 0.0))
        if held + amount > 0:
            record.reserved[self._writer] = (held + amount, time.time())
        else:
            record.reserved.pop(self._writer, None)

    def _release_dead_writers(self, record: UsageRecord) -> None:
        for writer, (amount, last_change) in list(record.reserved.items()):
            if writer != self._writer and not writer_alive(writer, last_change):
                # How much of it was published is unknown: counting all keeps the promise on capacity.
                record.stored += amount
                record.recount = True
                del record.reserved[writer]

    def _read(self) -> UsageRecord:
        raw = os.pread(self._fd, _RECORD_LIMIT, 0)
        try:
            document = json.loads(raw[: raw.index(b"\n")])
            return UsageRecord(
                stored=int(document["stored"]),
                reserved={str(name): (int(held), float(at)) for name, (held, at) in document["reserved"].items()},
                recount=bool(document["recount"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            # New, or damaged by a power loss: the directory itself tells.
            return UsageRecord(stored=self._count_stored())

    def _write(self, record: UsageRecord) -> None:
        document = {"stored": record.stored, "reserved": record.reserved, "recount": record.recount}
        # The newline ends the record: what an earlier, longer one left behind it is never read.
        os.pwrite(self._fd, json.dumps(document).encode() + b"\n", 0)


def writer_name(pid: int | None = None) -> str:
    """``host:pid:start`` of a process; the start time tells a recycled pid from the writer that had it before."""
    pid = os.getpid() if pid is None else pid
    return f"{socket.gethostname()}:{pid}:{_start_time(pid)}"


def writer_alive(writer: str, last_change: float) -> bool:
    """Whether the process that called itself ``writer`` may still be running."""
    host, _, rest = writer.rpartition(":")[0].rpartition(":")
    if host != socket.gethostname():
        return time.time() - last_change < _FOREIGN_WRITER_SILENCE
    return rest.isdigit() and writer_name(int(rest)) == writer


def _start_time(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    fields = stat.rpartition(")")[2].split()
    # A killed process stays a zombie until its parent looks; it writes no more.
    return "gone" if fields[0] in ("Z", "X") else fields[19]

"""The device below a path: which errors are the device's, how fast it is, and how a tier reads and writes on it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from hicache_ext.runtime import vectored
from hicache_ext.runtime.file_lock import CHANGE_LOCK_BOUND, OfdLock
from hicache_ext.runtime.members import boot_id
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.runtime.whole_file import read_document, write_whole

Trouble = Callable[[Exception], object]
"""Called with every OSError that a store met and handled. Called on any thread; never raises."""

_DEVICE_ERRORS = frozenset(
    (
        errno.EIO,
        errno.EROFS,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOENT,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ESHUTDOWN,
        errno.EUCLEAN,
    )
)
"""Errors of a device, a vanished mount or a broken file system. Not ENOSPC: stores handle a full disk themselves."""


def is_device_error(error: BaseException | None) -> bool:
    """Return whether an error is evidence against the device."""
    return isinstance(error, OSError) and error.errno in _DEVICE_ERRORS


Mode = Literal["buffered", "dontcache", "direct"]

RWF_DONTCACHE = 0x80

_VERSION = 1
_FILE_BYTES = 32 << 20
_BLOCK = 256 << 10
"""Bytes per call: a few small pages in neighbouring slots, or a part of a large one."""
_FILL_SECONDS = 0.06
_FILL_STEP = 8
"""Blocks written between two checks of the clock."""
_CELL_SECONDS = 0.015
_TOTAL_SECONDS = 0.45
_BASE_THREADS = 4
_OTHER_THREADS = (1, 2, 8, 16)
_LOCK_SECONDS = CHANGE_LOCK_BOUND
"""Longest wait for another process's measurement, which takes half of it, unless that process is stopped."""
_DIRECT_BLOCK = 64 << 10
"""Bytes of the O_DIRECT trial; a multiple of every sector size in use."""
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_PROBE_FILE = "io_probe.json"
_LOCK_FILE = "io_probe.lock"


@dataclass(slots=True)
class Measured:
    """Bytes per second by mode and number of threads, without modes that the file system does not support.

    Reads are cold: the page cache holds nothing of what they read. Writes overwrite and include the sync; otherwise a
    mode that only postpones the work would look fast.
    """

    read: dict[Mode, dict[int, float]] = field(default_factory=dict)
    write: dict[Mode, dict[int, float]] = field(default_factory=dict)

    def rate(self, direction: Literal["read", "write"], mode: Mode) -> float | None:
        """Return the rate at the thread count used to compare modes; None for a missing mode or if time ran out."""
        rates: dict[Mode, dict[int, float]] = getattr(self, direction)
        return rates.get(mode, {}).get(_BASE_THREADS)


def measured_device(path: Path) -> Measured:
    """Return the measurement of the existing directory ``path`` in this boot; measure if there is none.

    Raises OSError. The result is empty if nothing can be measured: the file system does not support unnamed files, or
    another process has been measuring for too long.
    """
    facts = {"version": _VERSION, "boot": boot_id() or "unknown", "device": path.stat().st_dev}
    if (stored := _stored_measurement(path, facts)) is not None:
        return stored
    lock = OfdLock(path / _LOCK_FILE)
    try:
        held = lock.acquire(_LOCK_SECONDS)
        if (stored := _stored_measurement(path, facts)) is not None:
            return stored
        if not held:
            return Measured()
        try:
            measured = _Probe(path).measure()
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            measured = Measured()
        write_whole(path / _PROBE_FILE, json.dumps({**facts, **asdict(measured)}, indent=1) + "\n")
        return measured
    finally:
        lock.release()
        lock.close()


def flags_of(mode: Mode) -> int:
    """Return the flags of a mode for preadv2 and pwritev2."""
    return RWF_DONTCACHE if mode == "dontcache" else 0


def takes_direct(path: Path) -> bool:
    """Return whether the file system of the existing directory ``path`` supports O_DIRECT. Never raises.

    Tries one block, since ``measured_device`` may run out of time before it knows. Failures other than "not supported"
    (a full disk) are left to the store.
    """
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with mmap.mmap(-1, _DIRECT_BLOCK) as block:
                os.pwrite(fd, block, 0)
                os.preadv(fd, [block], 0)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno not in _NOT_SUPPORTED
    return True


class _Probe:
    """Makes one measurement. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._deadline = time.monotonic() + _TOTAL_SECONDS
        # Page-aligned for O_DIRECT, with one block per thread.
        self._memory = memoryview(mmap.mmap(-1, _BLOCK * max(*_OTHER_THREADS, _BASE_THREADS)))
        # Do not write zeros: some devices do not store them.
        self._memory[:] = os.urandom(4096) * (self._memory.nbytes // 4096)
        self._pool = ThreadPool("hicache-device-probe")

    def measure(self) -> Measured:
        fd = os.open(self._path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.ExitStack() as open_files:
            open_files.callback(os.close, fd)
            opened: dict[Mode, int] = {"buffered": fd, "dontcache": fd}
            with contextlib.suppress(OSError):
                opened["direct"] = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
                open_files.callback(os.close, opened["direct"])
            blocks = self._fill(fd)
            open_files.callback(self._pool.close)
            measured = Measured()
            # Measure the most important cells first: a slow device leaves no time for all.
            for threads in (_BASE_THREADS, *_OTHER_THREADS):
                for mode, mode_fd in opened.items():
                    for move, rates in ((os.pwritev, measured.write), (os.preadv, measured.read)):
                        if threads != _BASE_THREADS and mode not in rates:
                            continue
                        if time.monotonic() > self._deadline:
                            return measured
                        rate = self._rate(move, mode_fd, flags_of(mode), fd, blocks, threads)
                        if rate is not None:
                            rates.setdefault(mode, {})[threads] = rate
        return measured

    def _fill(self, fd: int) -> int:
        """Write the file once, as far as time allows; return its number of blocks."""
        until = time.monotonic() + _FILL_SECONDS
        blocks = 0
        while blocks < _FILE_BYTES // _BLOCK and (blocks == 0 or time.monotonic() < until):
            vectored.write_from(fd, [self._memory[: _FILL_STEP * _BLOCK]], blocks * _BLOCK)
            os.fdatasync(fd)
            blocks += _FILL_STEP
        return blocks

    def _rate(
        self, move: Callable[..., int], fd: int, flags: int, buffered: int, blocks: int, threads: int
    ) -> float | None:
        """Measure bytes per second for one mode and thread count; None if the file system does not support the mode.

        Moves no block twice: it would be in the page cache the second time. ``buffered``: the file without O_DIRECT.
        """
        numbers = itertools.count()
        if move is os.preadv:
            os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.monotonic()

        def work(thread: int) -> int:
            buffer = self._memory[thread * _BLOCK : (thread + 1) * _BLOCK]
            moved = 0
            for number in numbers:
                if number >= blocks:
                    break
                moved += move(fd, [buffer], number * _BLOCK, flags)
                if time.monotonic() > begun + _CELL_SECONDS:
                    break
            return moved

        try:
            moved: int = sum(self._pool.run(threads, work))
            if move is os.pwritev:
                os.fdatasync(buffered)
        except OSError:
            return None
        return moved / max(time.monotonic() - begun, 1e-9)


def _stored_measurement(path: Path, facts: dict[str, Any]) -> Measured | None:
    """Read a stored measurement; None if it is absent, damaged, or for another boot, device or version."""
    document = read_document(path / _PROBE_FILE) or {}
    if {name: document.get(name) for name in facts} != facts:
        return None
    with contextlib.suppress(ValueError):
        return TypeAdapter(Measured).validate_python({name: document.get(name) for name in ("read", "write")})
    return None


IoSetting = Literal["auto", "direct", "buffered"]

DEFAULT_THREADS = 4

_CACHED_SHARE = 1 / 4
"""A tier of at most this share of the free memory uses the page cache."""
_CLEARLY_SLOWER = 0.7
_WORTH_A_THREAD = 0.8
"""Share of the best rate that is enough: the fewest threads reaching it are used, since more would waste CPU."""


@dataclass(frozen=True, slots=True)
class IoPlan:
    read: Mode = "buffered"
    write: Mode = "buffered"
    threads: int = DEFAULT_THREADS
    reason: str = "as configured"

    def __str__(self) -> str:
        modes = self.read if self.read == self.write else f"{self.read} reads, {self.write} writes"
        return f"{modes}, {self.threads} threads"


def choose_io(
    setting: IoSetting,
    capacity: int | None,
    threads: int | None,
    measured: Measured,
    *,
    direct_possible: bool,
    free_memory: int | None = None,
) -> IoPlan:
    """Return the I/O plan for one path. ``capacity`` is that of the whole tier; ``threads`` None: choose.

    ``direct_possible``: whether this layout aligns its pages. The caller checks that "direct" works.
    """
    read: Mode = "buffered"
    write: Mode = "buffered"
    if setting == "direct":
        read = write = "direct"
        reason = "as configured"
    elif setting == "buffered":
        reason = "as configured"
    else:
        memory = memory_free() if free_memory is None else free_memory
        if capacity is not None and capacity <= memory * _CACHED_SHARE:
            reason = f"the tier fits into a part of the {memory / 1e9:.1f} GB of memory that is free"
        else:
            read, why_read = _uncached_mode(measured, "read", direct_possible)
            write, why_write = _uncached_mode(measured, "write", direct_possible)
            reason = f"larger than a part of the free memory; reads: {why_read}; writes: {why_write}"
    chosen = threads or _enough_threads(measured, read, write)
    return IoPlan(read, write, chosen, reason)


def memory_free() -> int:
    """Return the bytes that the page cache could take, limited by the machine and this process's control group."""
    free = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit))
    except (OSError, ValueError):
        pass
    return free


def _uncached_mode(measured: Measured, direction: Literal["read", "write"], direct_possible: bool) -> tuple[Mode, str]:
    """Return the fastest mode that bypasses the page cache, or buffered if that is clearly faster; and why."""
    buffered = measured.rate(direction, "buffered")
    modes: tuple[Mode, ...] = ("dontcache", "direct") if direct_possible else ("dontcache",)
    rates = {mode: rate for mode in modes if (rate := measured.rate(direction, mode)) is not None}
    if buffered is None or not rates:
        return "buffered", "no other mode is known to work here"
    best = max(rates, key=lambda mode: rates[mode])
    figures = f"{best} {rates[best] / 1e9:.2f} GB/s, buffered {buffered / 1e9:.2f}"
    return ("buffered" if rates[best] < _CLEARLY_SLOWER * buffered else best), figures


def _enough_threads(measured: Measured, read: Mode, write: Mode) -> int:
    enough = [_fewest_threads(measured.read.get(read)), _fewest_threads(measured.write.get(write))]
    known = [threads for threads in enough if threads is not None]
    return max(known) if known else DEFAULT_THREADS


def _fewest_threads(rates: dict[int, float] | None) -> int | None:
    if not rates or len(rates) < 2:
        return None
    best = max(rates.values())
    return min(threads for threads, rate in rates.items() if rate >= _WORTH_A_THREAD * best)

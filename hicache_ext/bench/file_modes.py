"""What the file benchmark makes a contender do, and what of it is timed.

Timed are the calls alone. Stamping and wiping host pages, checking what was read, writing dirty pages back and dropping
them from the page cache happen between the calls or between the modes.

A first pass also pays for memory that the page cache touches for the first time, and in a virtual machine the host may
take seconds to hand that out: the same pwrites were measured at 0.4 and at 5.8 GB/s. Touching free memory beforehand
did not change that (tried with small and huge pages); rotation, medians and overwrite are what there is against it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_ext.bench.comparison import Measured
from hicache_ext.bench.file_contenders import EXISTS_CASES, Contender, FileContender, Workplace
from hicache_ext.bench.file_memory import GEOMETRIES, HostBuffers, page_keys
from hicache_ext.bench.harness import Sample, Stopwatch, fresh_directory
from hicache_ext.errors import BenchmarkError

EXISTS_GEOMETRY = GEOMETRIES[0]
EXISTS_PAYLOAD = 4096
"""Bytes of a page whose presence is asked for: small, because only its name matters."""
STORAGE_BATCH_SIZE = 128
"""Pages SGLang names in one call (cache_controller.py)."""
_EXISTS_REPEATS = 3

_CAPACITY_SHARE = 2
"""In overwrite, the capacity is the bytes written divided by this."""
_COLD = 0.9
"""Share of a read that must come from the disk to be called cold."""
_PAGES_CHECKED = 512
"""Pages looked for after evictions."""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the benchmark: the pages and how many of them."""

    geometry: str
    payload: int
    batch: int
    batches: int
    threads: int

    @property
    def pages(self) -> int:
        return self.batch * self.batches

    @property
    def total(self) -> int:
        """Bytes each mode moves."""
        return self.pages * self.payload

    @property
    def overwrite_capacity(self) -> int:
        return max(self.total // _CAPACITY_SHARE, self.batch * self.payload)


@dataclass(frozen=True, slots=True)
class Bench:
    """One case with its host memory, in a directory; measures one contender at a time."""

    case: Case
    host: HostBuffers
    directory: Path
    modes: Sequence[str]
    drop_caches: bool
    """Empty the machine's whole page cache before cold reads (root only), not only the contender's files'."""

    def measure(self, contender: Contender) -> Measured:
        """Every mode the contender can do, each in a fresh namespace. Raises BenchmarkError for a wrong answer."""
        measured = Measured()
        if any(mode not in ("overwrite", "exists") for mode in self.modes):
            with fresh_directory(self.directory) as directory:
                self._write_and_read(contender, directory, measured)
        if "overwrite" in self.modes and "overwrite" not in contender.cannot:
            with fresh_directory(self.directory) as directory:
                self._overwrite(contender, directory, measured)
        return measured

    def _write_and_read(self, contender: Contender, directory: Path, measured: Measured) -> None:
        case, samples = self.case, measured.samples
        keys = self._keys("first", case.batches)
        more_keys = self._keys("second", case.batches if "mixed" in self.modes else 0)
        pages = len(keys + more_keys) * case.batch
        # Room for every contender's headers, directories and reservations: nothing is evicted here.
        capacity = pages * case.payload * 3 // 2 + pages * 16384 + (64 << 20)
        opened = contender.open(Workplace(directory, self.host, capacity, pages, case.threads))
        try:
            samples["write"] = self._write(contender.name, opened, keys)
            write_back(directory)
            if "read-warm" in self.modes:
                samples["read-warm"] = self._read(contender.name, opened, keys)
            if "read-cold" in self.modes:
                drop_from_page_cache(directory, whole_machine=self.drop_caches)
                before = _bytes_from_disk()
                samples["read-cold"] = self._read(contender.name, opened, keys)
                if (share := (_bytes_from_disk() - before) / case.total) < _COLD:
                    measured.notes.add(
                        f"{contender.name}: the kernel counted only {share:.0%} of the cold read as read from the disk"
                    )
            if "mixed" in self.modes:
                samples["mixed"] = self._read_and_write(contender.name, opened, keys, more_keys)
                self._read(contender.name, opened, more_keys, first_number=case.batches)
        finally:
            opened.close()
        for mode in set(samples) - set(self.modes):
            del samples[mode]

    def _keys(self, name: str, batches: int) -> list[list[str]]:
        keys = page_keys(name, batches * self.case.batch)
        return [keys[begin : begin + self.case.batch] for begin in range(0, len(keys), self.case.batch)]

    def _write(self, name: str, opened: FileContender, keys: Sequence[Sequence[str]]) -> Sample:
        watch = Stopwatch()
        for number, batch in enumerate(keys):
            self.host.stamp(number)
            with watch.call():
                stored = opened.write(batch, self.host.sources)
            _expect(name, "stored", stored, len(batch))
        return watch.sample(self.case.total)

    def _read(
        self, name: str, opened: FileContender, keys: Sequence[Sequence[str]], *, first_number: int = 0
    ) -> Sample:
        watch = Stopwatch()
        for number, batch in enumerate(keys, first_number):
            self.host.wipe()
            with watch.call():
                found = opened.read(batch, self.host.targets)
            _expect(name, "read", found, len(batch))
            self.host.check(number, name)
        return watch.sample(self.case.total)

    def _read_and_write(
        self, name: str, opened: FileContender, keys: Sequence[Sequence[str]], more_keys: Sequence[Sequence[str]]
    ) -> Sample:
        """One thread reads what is stored while another stores more, as SGLang's prefetch and backup threads do.

        The calls of the sample are the reads: those are what a request waits for. What was written is read back and
        checked by the caller, what was read last is checked here.
        """
        failures: list[Exception] = []
        interrupted = threading.Event()

        def write_more() -> None:
            try:
                for number, batch in enumerate(more_keys, self.case.batches):
                    if interrupted.is_set():
                        return
                    self.host.stamp(number)
                    _expect(name, "stored", opened.write(batch, self.host.sources), len(batch))
            except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
                failures.append(error)

        self.host.wipe()
        writer = threading.Thread(target=write_more, name="bench-writer")
        reads: list[float] = []
        cpu, started = time.process_time(), time.perf_counter()
        writer.start()
        try:
            for batch in keys:
                read_started = time.perf_counter()
                found = opened.read(batch, self.host.targets)
                reads.append(time.perf_counter() - read_started)
                _expect(name, "read", found, len(batch))
            writer.join()
        finally:
            interrupted.set()
            writer.join()
        sample = Sample(
            2 * self.case.total, time.perf_counter() - started, time.process_time() - cpu, calls=tuple(reads)
        )
        if failures:
            raise failures[0]
        self.host.check(len(keys) - 1, name)
        return sample

    def _overwrite(self, contender: Contender, directory: Path, measured: Measured) -> None:
        """Write new pages into a full namespace: for each page something older has to go."""
        case = self.case
        capacity = case.overwrite_capacity
        filling = -(-capacity * 5 // (4 * case.payload * case.batch))
        keys = self._keys("first", filling + case.batches)
        opened = contender.open(
            Workplace(directory, self.host, capacity, max(case.batch, capacity // case.payload), case.threads)
        )
        watch = Stopwatch()
        stored = 0
        try:
            for number, batch in enumerate(keys):
                self.host.stamp(number)
                if number < filling:
                    opened.write(batch, self.host.sources)
                    continue
                if number == filling:
                    write_back(directory)
                with watch.call():
                    stored += opened.write(batch, self.host.sources)
            if stored < case.pages:
                # Refusing costs no time: only what was stored counts as work.
                measured.notes.add(f"{contender.name}: overwrite refused {1 - stored / case.pages:.1%} of the pages")
            if stored:
                measured.samples["overwrite"] = watch.sample(stored * case.payload)
            self._check_some_pages(contender.name, opened, keys)
        finally:
            opened.close()

    def _check_some_pages(self, name: str, opened: FileContender, keys: Sequence[Sequence[str]]) -> None:
        """What is left after evictions, whichever pages the contender chose to keep, must have the right bytes."""
        places = [(number, position) for number in range(len(keys)) for position in range(self.case.batch)]
        found = 0
        self.host.wipe()
        for number, position in places[:: max(1, len(places) // _PAGES_CHECKED)]:
            if opened.read([keys[number][position]], self.host.target(position)) == 1:
                self.host.check_page(position, number, name)
                found += 1
        if not found:
            raise BenchmarkError(f"{name}: nothing can be read of what was written at capacity")


def measure_exists(contender: Contender, chain: int, host: HostBuffers, directory: Path, threads: int) -> Measured:
    """How long the longest stored prefix of a chain of ``chain`` pages takes to find, in each of EXISTS_CASES."""
    measured = Measured()
    keys = page_keys("chain", chain)
    with fresh_directory(directory) as place:
        opened = contender.open(Workplace(place, host, chain * 4 * EXISTS_PAYLOAD + (64 << 20), chain, threads))
        try:
            for begin in range(0, chain, host.batch):
                batch = keys[begin : begin + host.batch]
                _expect(contender.name, "stored", opened.write(batch, host.first_sources(len(batch))), len(batch))
            # The first look-up of all opens things; a server has done that long ago.
            opened.count_leading(page_keys("before", 1))
            for case, expected in zip(EXISTS_CASES, (chain, chain // 2, 0), strict=True):
                names = keys[:expected] + page_keys("absent", chain - expected)
                watch = Stopwatch()
                for _ in range(_EXISTS_REPEATS):
                    with watch.call():
                        found = leading_pages(opened, names)
                    _expect(contender.name, "found", found, expected)
                measured.samples[case] = watch.sample(chain * _EXISTS_REPEATS)
        finally:
            opened.close()
    return measured


def leading_pages(opened: FileContender, keys: Sequence[str]) -> int:
    """The stored prefix of a chain, asked for as SGLang's ``_storage_hit_query`` does: 128 pages at a time."""
    leading = 0
    for begin in range(0, len(keys), STORAGE_BATCH_SIZE):
        batch = keys[begin : begin + STORAGE_BATCH_SIZE]
        found = opened.count_leading(batch)
        leading += found
        if found < len(batch):
            break
    return leading


# -- the page cache ----------------------------------------------------------------------------------------------------


def write_back(directory: Path) -> None:
    """Wait until nothing of this file system is dirty: no mode pays for what was written before it."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def drop_from_page_cache(directory: Path, *, whole_machine: bool = False) -> None:
    """Make the next reads of the files below ``directory`` come from the disk."""
    write_back(directory)
    if whole_machine:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                continue  # the slab tier's socket
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _bytes_from_disk() -> int:
    """Bytes this process has caused to be read from block devices; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def _expect(name: str, verb: str, pages: int, expected: int) -> None:
    if pages != expected:
        raise BenchmarkError(f"{name} {verb} {pages} pages of {expected}")

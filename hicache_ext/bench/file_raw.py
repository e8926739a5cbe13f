"""What the disk gives without a store: threads of preadv and pwritev over one file, and one os.stat per page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from hicache_ext.bench.file_contenders import NO_LOOKUP, TRANSFER_MODES, Contender, Workplace
from hicache_ext.bench.file_memory import HostBatch
from hicache_ext.runtime import vectored
from hicache_ext.storage.contract.base import leading

_LARGEST_RUN = 1 << 20
"""Bytes the raw limit moves by one call at most."""
_THREADS = (1, 2, 4)


def all_raw() -> list[Contender]:
    """The attempts whose best is the raw limit."""
    only_lookup = dict.fromkeys(TRANSFER_MODES, "it only answers whether a page is there")
    return [
        *(
            Contender(
                f"raw, {n} thread{'s' if n > 1 else ''}", partial(RawContender, threads=n), cannot=NO_LOOKUP, raw=True
            )
            for n in _THREADS
        ),
        Contender("os.stat", StatContender, cannot=only_lookup, raw=True),
    ]


Run = list[tuple[int, int]]
"""(slot, page) of neighbouring slots, moved by one call."""


class RawContender:
    """Threads of preadv/pwritev over one preallocated file: the same segments, and nothing else.

    No envelope, no checksum, no index but a dictionary, no eviction but writing over the oldest slots.
    """

    def __init__(self, place: Workplace, threads: int, flags: int = 0) -> None:
        self._pages = place.host.pages
        self._payload = place.host.payload
        self._slots = place.pages
        self._slot_of: dict[str, int] = {}
        self._key_in: dict[int, str] = {}
        self._written = 0
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads)
        self._fd = os.open(place.directory / "slots", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        os.posix_fallocate(self._fd, 0, self._slots * self._payload)

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        for key in keys:
            slot = self._written % self._slots
            self._slot_of.pop(self._key_in.get(slot, ""), None)
            self._slot_of[key], self._key_in[slot] = slot, key
            self._written += 1
        return self._transfer(self._write_run, keys, batch)

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        return self._transfer(self._read_run, keys[: leading([key in self._slot_of for key in keys])], batch)

    def _write_run(self, run: Run, segments: list[Sequence[memoryview]]) -> int:
        return vectored.write_from(self._fd, [*chain(*segments)], run[0][0] * self._payload)

    def _read_run(self, run: Run, segments: list[Sequence[memoryview]]) -> int:
        return vectored.read_into(self._fd, [*chain(*segments)], run[0][0] * self._payload)

    def _transfer(
        self,
        move: Callable[[Run, list[Sequence[memoryview]]], int],
        keys: Sequence[str],
        batch: HostBatch,
    ) -> int:
        places = [(self._slot_of[key], page) for key, page in zip(keys, batch.pages, strict=False)]
        share = max(1, -(-len(places) // self._threads))

        def transfer_share(begin: int) -> int:
            done = 0
            for run in self._runs(places[begin : begin + share]):
                done += move(run, self._pages.buffers_of([page for _, page in run]))
            return done // self._payload

        if self._threads == 1:
            return transfer_share(0)
        return sum(self._executor.map(transfer_share, range(0, len(places), share)))

    def _runs(self, places: Sequence[tuple[int, int]]) -> list[Run]:
        """``places`` cut into runs of neighbouring slots, each moved by one call."""
        longest = max(1, _LARGEST_RUN // self._payload)
        runs: list[Run] = []
        for place in places:
            if not runs or len(runs[-1]) == longest or runs[-1][-1][0] + 1 != place[0]:
                runs.append([])
            runs[-1].append(place)
        return runs

    def count_leading(self, keys: Sequence[str]) -> int:
        raise NotImplementedError

    def close(self) -> None:
        self._executor.shutdown()
        os.close(self._fd)


class StatContender:
    """The floor for ``exists`` without an index: one os.stat per page file."""

    def __init__(self, place: Workplace) -> None:
        self._prefix = f"{place.directory}/"

    def write(self, keys: Sequence[str], batch: HostBatch) -> int:
        for key in keys:
            Path(self._prefix + key).touch()
        return len(keys)

    def read(self, keys: Sequence[str], batch: HostBatch) -> int:
        raise NotImplementedError

    def count_leading(self, keys: Sequence[str]) -> int:
        for position, key in enumerate(keys):
            try:
                os.stat(self._prefix + key)
            except FileNotFoundError:
                return position
        return len(keys)

    def close(self) -> None:
        pass

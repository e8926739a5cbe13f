"""Mooncake: the library's own batch calls, straight from host memory and through memory of their own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.rivals import ours
from hicache_ext.bench.pool import SEGMENTS, Open, Pages
from hicache_ext.errors import CommandError
from tests.rigs.mooncake_servers import MooncakeServers, missing_mooncake
from tests.rigs.own_network import own_network

_LEASE_MS = 5000
"""As docs/mooncake.md recommends. With the 200 ms of the tests a batch on a busy machine outlives its lease."""


@contextmanager
def mooncake_servers(directory: Path) -> Iterator[tuple[dict[str, Open], Iterable[str]]]:
    if lacking := missing_mooncake():
        raise CommandError(f"missing: {lacking}")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # Mooncake's processes listen on all interfaces.
    with own_network(), MooncakeServers(directory, segment_bytes=2 << 30, lease_ms=_LEASE_MS) as servers:
        tier = {"master": servers.master, "protocol": "tcp", "local_hostname": "127.0.0.1"}
        raw = "raw batch_get_into/put_from"
        contenders: dict[str, Open] = {
            "hicache_ext": ours("mooncake", tier),
            raw: partial(RawMooncake, servers),
            "raw, through memory of its own": partial(RawMooncakeCopied, servers),
        }
        yield contenders, (raw,)


class RawMooncake:
    """The multi-buffer calls, straight from and into registered host memory; no envelope, returned sizes only added."""

    def __init__(self, servers: Any, memory: Sequence[Pages]) -> None:
        module: Any = importlib.import_module("mooncake.store")
        self._store: Any = module.MooncakeDistributedStore()
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", servers.master):
            raise CommandError("raw Mooncake: setup failed")
        for pages in memory:
            for array in (pages.sources, pages.targets):
                self._store.register_buffer(array.ctypes.data, array.nbytes)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        places = _addresses(pages.sources)
        answers = self._store.batch_put_from_multi_buffers([key.hex() for key in keys], *places)
        return sum(answer == 0 for answer in answers)

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        places = _addresses(pages.targets)
        answers = self._store.batch_get_into_multi_buffers([key.hex() for key in keys], *places)
        return sum(answer == pages.payload for answer in answers)

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._store.remove(key.hex(), True)

    def close(self) -> None:
        self._store.close()


class RawMooncakeCopied(RawMooncake):
    """The same calls from and into memory of the client's own, one buffer a page, and a copy: what ours cannot do
    without, because a call of the library cannot be stopped."""

    def __init__(self, servers: Any, memory: Sequence[Pages]) -> None:
        super().__init__(servers, ())
        self._own = {id(pages): np.zeros_like(pages.sources) for pages in memory}
        for array in self._own.values():
            self._store.register_buffer(array.ctypes.data, array.nbytes)

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        own = self._own[id(pages)]
        np.copyto(own, pages.sources)
        answers = self._store.batch_put_from_multi_buffers([key.hex() for key in keys], *_addresses(own, 1))
        return sum(answer == 0 for answer in answers)

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        own = self._own[id(pages)]
        answers = self._store.batch_get_into_multi_buffers([key.hex() for key in keys], *_addresses(own, 1))
        np.copyto(pages.targets, own)
        return sum(answer == pages.payload for answer in answers)


def _addresses(pages: npt.NDArray[np.uint8], segments: int = SEGMENTS) -> tuple[list[list[int]], list[list[int]]]:
    size = pages.shape[1] // segments
    starts = [pages.ctypes.data + number * pages.shape[1] for number in range(len(pages))]
    return [[start + i * size for i in range(segments)] for start in starts], [[size] * segments for _ in starts]

"""Where contenders keep pages, and how a row damages what lies there: by content, without knowing any layout."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trouble.contenders import PAGE_BYTES, Place
from tests.rigs.mooncake_servers import MooncakeServers
from tests.rigs.redis_servers import RedisServer
from tests.rigs.s3_server import S3Server
from tests.rigs.trouble_proxy import TroubleProxy

NEEDLE = 48
"""Bytes of a page by which it is found; pages are random."""
_SEGMENT = 64 << 20
"""Bytes of Mooncake's memory."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the first bytes of a page lie: in a file, a value of Redis, or the memory of a process."""

    where: Any
    offset: int

    def replace(self, at: int, data: bytes) -> None:
        if isinstance(self.where, Path):
            with open(self.where, "r+b") as file:
                file.seek(self.offset + at)
                file.write(data)
        elif isinstance(self.where, int):
            with open(f"/proc/{self.where}/mem", "r+b", buffering=0) as memory:
                memory.seek(self.offset + at)
                memory.write(data)
        else:
            client, name = self.where
            client.setrange(name, self.offset + at, data)

    def cut(self, at: int) -> None:
        """Nothing is there from ``at`` on; what was cut before is not made longer."""
        if isinstance(self.where, Path):
            os.truncate(self.where, min(self.offset + at, self.where.stat().st_size))
        else:
            client, name = self.where
            client.set(name, client.getrange(name, 0, self.offset + at - 1))

    def become(self, other: Spot, page: bytes) -> None:
        """Be what lies at ``other``: all of it where it is one page, so that it is valid in itself; else the bytes."""
        if isinstance(self.where, Path) and self.where.stat().st_size < 2 * PAGE_BYTES:
            shutil.copyfile(other.where, self.where)
        elif isinstance(self.where, tuple):
            self.where[0].set(self.where[1], other.where[0].get(other.where[1]))
        else:
            self.replace(0, page)


class Medium:
    """One directory, or one server that all rows of a contender share; emptied by ``fresh``."""

    cuts = True
    server: Any = None
    """With ``freeze``, ``thaw`` and ``kill``, where there is one."""
    proxied = False

    def __init__(self, root: Path, stack: ExitStack) -> None:
        """``stack`` ends what is started."""
        self.root = root

    def fresh(self, number: int) -> Place:
        directory = self.root / f"row-{number}" / "pages"
        directory.mkdir(parents=True)
        return Place(str(directory))

    def proxy(self) -> AbstractContextManager[TroubleProxy]:
        raise NotImplementedError

    def find(self, pages: dict[str, bytes], place: Place) -> dict[str, Spot]:
        """Where each page lies that is found."""
        spots: dict[str, Spot] = {}
        for path in Path(place.directory).rglob("*"):
            if path.is_file() and path.stat().st_size >= NEEDLE:
                with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    spots |= _found(content, pages, path)
        return spots


class OfRedis(Medium):
    proxied = True

    def __init__(self, root: Path, stack: ExitStack) -> None:
        super().__init__(root, stack)
        self.server = stack.enter_context(RedisServer(root / "redis"))

    def fresh(self, number: int) -> Place:
        self._client().flushall()
        return Place("", f"127.0.0.1:{self.server.port}")

    def proxy(self) -> AbstractContextManager[TroubleProxy]:
        return TroubleProxy(self.server.port, delay=1.0)

    def _client(self) -> Any:
        import redis

        return redis.Redis(port=self.server.port)

    def find(self, pages: dict[str, bytes], place: Place) -> dict[str, Spot]:
        client, spots = self._client(), dict[str, Spot]()
        for name in client.scan_iter(count=1000):
            if client.type(name) == b"string":
                spots |= _found(client.get(name), pages, (client, name))
        return spots


class OfS3(Medium):
    proxied = True

    def __init__(self, root: Path, stack: ExitStack) -> None:
        super().__init__(root, stack)
        self.server = stack.enter_context(S3Server(root))

    def fresh(self, number: int) -> Place:
        for directory in self.server.directory.glob("*/trouble"):
            shutil.rmtree(directory)
        return Place(str(self.server.directory), f"127.0.0.1:{self.server.port}")

    def proxy(self) -> AbstractContextManager[TroubleProxy]:
        return TroubleProxy(self.server.port, delay=1.0)


class _Holder:
    """The process that holds the pages; the master only knows where they are."""

    def __init__(self, servers: MooncakeServers) -> None:
        self.freeze, self.thaw, self.kill = servers.freeze_holder, servers.thaw_holder, servers.kill_holder
        self.start = servers.start_holder


class OfMooncake(Medium):
    """Pages lie in memory of a holder. Its master does not forget it where heartbeats of a busy machine are late."""

    cuts = False

    def __init__(self, root: Path, stack: ExitStack) -> None:
        super().__init__(root, stack)
        self._servers = stack.enter_context(MooncakeServers(root / "mooncake", segment_bytes=_SEGMENT, client_ttl=30))
        self.server = _Holder(self._servers)

    def fresh(self, number: int) -> Place:
        # Pages of a row are random, and their keys are its own: what others left there is never asked for.
        return Place("", self._servers.master)

    def find(self, pages: dict[str, bytes], place: Place) -> dict[str, Spot]:
        process, spots = self._servers.holder_pid(), dict[str, Spot]()
        with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                if line.split()[1].startswith("rw") and end - begin >= _SEGMENT:
                    with contextlib.suppress(OSError, OverflowError):
                        memory.seek(begin)
                        spots |= _found(memory.read(end - begin), pages, process, begin)
        return spots


def _found(content: Any, pages: dict[str, bytes], where: Any, begin: int = 0) -> dict[str, Spot]:
    offsets = {key: content.find(page[:NEEDLE]) for key, page in pages.items()}
    return {key: Spot(where, begin + offset) for key, offset in offsets.items() if offset >= 0}


def medium_type(kind: str) -> type[Medium]:
    return {"redis": OfRedis, "s3": OfS3, "mooncake": OfMooncake}.get(kind, Medium)


@contextmanager
def medium_of(kind: str, root: Path) -> Iterator[Medium]:
    """Start what this medium needs, and stop it at the end."""
    root.mkdir(parents=True)
    with ExitStack() as stack:
        yield medium_type(kind)(root, stack)

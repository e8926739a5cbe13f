"""The engines of pool_trouble.py: a real server of each kind, and what can go wrong with it.

A *trouble* begins and ends; the pool keeps what it holds over it, and comes back without a restart of anybody else.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rigs.mooncake_servers import MooncakeServers, missing_mooncake
from tests.rigs.network_link import Link
from tests.rigs.own_network import own_network
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.rigs.s3_server import S3Server, missing_s3_server
from tests.rigs.trouble_proxy import Trouble, TroubleProxy

KILLED, FROZEN, REPLICA, FULL, SLOW_LINK, BAD_LINK = (
    *("killed", "frozen", "replica", "full"),
    *("slow link", "bad link"),
)


@dataclass(frozen=True, slots=True)
class Happening:
    """One trouble: how it begins and how it ends."""

    name: str
    begin: Callable[[], None]
    end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Engine:
    """A pool that runs."""

    title: str
    tier: Mapping[str, Any]
    """Of the configuration."""
    happenings: list[Happening]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the servers that use it."""
    filled: Callable[[], None] = lambda: None
    """Called once the pool holds the histories."""
    remarks: tuple[str, ...] = ()
    """What the report has to say."""


def missing(name: str) -> str | None:
    """What this machine lacks for an engine, or None."""
    if name == "redis":
        return None if redis_program() else "redis-server"
    return missing_s3_server() if name == "object" else missing_mooncake()


# -- links -------------------------------------------------------------------------------------------------------------


_BAD = {"flipped": 0.2, "cut": 0.05}
"""Shares, on a bad link."""


def _links(proxy: TroubleProxy) -> list[Happening]:
    def becomes(trouble: Trouble) -> Callable[[], None]:
        return lambda: setattr(proxy, "trouble", trouble)

    well = becomes(Trouble.NONE)
    return [
        Happening(SLOW_LINK, becomes(Trouble.NARROW), well),
        Happening(BAD_LINK, becomes(Trouble.BAD), well),
    ]


def _in_words(proxy: TroubleProxy) -> str:
    return (
        f"*Slow link*: {proxy.rate / 1e6:g} MB/s for all connections together, and every call {proxy.late * 1000:g} ms "
        f"later. *Bad link*: {100 * proxy.flipped:g} % of what arrives at once has a byte changed, with "
        f"{100 * proxy.cut:g} % the connection is cut."
    )


# -- Redis -------------------------------------------------------------------------------------------------------------


@contextmanager
def _redis(directory: Path) -> Iterator[Engine]:
    with RedisServer(directory / "redis") as server, TroubleProxy(server.port, **_BAD) as link:

        def told(*words: str) -> None:
            answer = server.command(*words)
            assert answer.startswith("+OK"), f"{words}: {answer}"

        def kill() -> None:
            server.kill()
            link.trouble = Trouble.REFUSING

        def restart() -> None:
            server.start()
            link.trouble = Trouble.NONE

        def fill() -> None:
            told("CONFIG", "SET", "maxmemory-policy", "noeviction")
            told("CONFIG", "SET", "maxmemory", "1mb")

        yield Engine(
            title="Redis",
            tier={"type": "redis", "url": f"redis://127.0.0.1:{link.port}"},
            happenings=[
                Happening(KILLED, kill, restart),
                Happening(FROZEN, server.freeze, server.thaw),
                Happening(
                    REPLICA,
                    # Of a master that is not there: it goes on answering from what it has, and refuses writes.
                    lambda: told("REPLICAOF", "127.0.0.1", "1"),
                    lambda: told("REPLICAOF", "NO", "ONE"),
                ),
                Happening(FULL, fill, lambda: told("CONFIG", "SET", "maxmemory", "0")),
                *_links(link),
            ],
            # It comes back with what it held.
            filled=lambda: told("SAVE"),
            remarks=(
                "*Replica*: `REPLICAOF` an address where nobody is, the normal end of a failover for the old master: "
                "writes are refused with READONLY, reads go on. *Full*: `maxmemory` below what is stored, "
                "`noeviction`: the same with OOM.",
                _in_words(link),
            ),
        )


# -- object stores -----------------------------------------------------------------------------------------------------


@contextmanager
def _object(directory: Path) -> Iterator[Engine]:
    place = directory / "bucket"
    place.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(S3Server(place))
        link = stack.enter_context(TroubleProxy(server.port, **_BAD))

        def kill() -> None:
            server.kill()
            link.trouble = Trouble.REFUSING

        def restart() -> None:
            server.start()
            link.trouble = Trouble.NONE

        yield Engine(
            title="an S3 server (s3rver)",
            tier=server.tier("pool", endpoint=f"http://127.0.0.1:{link.port}"),
            environment=S3Server.environment(),
            happenings=[
                Happening(KILLED, kill, restart),
                Happening(FROZEN, server.freeze, server.thaw),
                Happening(FULL, server.fill, server.empty),
                *_links(link),
            ],
            remarks=(
                "*Full*: every PUT is answered with 507 XMinioStorageFull, as MinIO does. An object store has no "
                "replicas that refuse writes: *replica* does not apply.",
                _in_words(link),
            ),
        )


# -- Mooncake ----------------------------------------------------------------------------------------------------------

_HOLDERS = 4
_FILL = """
import os, sys
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
assert store.setup(sys.argv[2], "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]) == 0
pinned = ReplicateConfig()
pinned.with_hard_pin = True
written = failed = 0
for size in (16 << 20, 1 << 20, 1 << 16):
    failed = 0
    while failed < 8:
        failed = failed + 1 if store.put(f"filler/{written}", bytes(size), pinned) else 0
        written += 1
print("full", flush=True)
sys.stdin.read()
store.remove_by_regex("^filler/", True)
print("empty", flush=True)
os._exit(0)
"""


@contextmanager
def _mooncake(directory: Path) -> Iterator[Engine]:
    with ExitStack() as stack:
        stack.enter_context(own_network())
        link = stack.enter_context(Link())
        servers = stack.enter_context(
            MooncakeServers(
                directory / "mooncake",
                holders=_HOLDERS,
                segment_bytes=1 << 30,
                lease_ms=5000,
                client_ttl=10,
                host=link.there,
                command_prefix=link.command_prefix,
            )
        )
        filler = _Filler(servers, link)
        stack.callback(filler.stop)
        yield Engine(
            title=f"Mooncake, {_HOLDERS} holders",
            tier={
                "type": "mooncake",
                "master": servers.master,
                "local_hostname": link.here,
                "replica_num": 2,
                "hard_pin": True,
            },
            happenings=[
                Happening(KILLED, servers.kill_holder, servers.start_holder),
                Happening(FROZEN, servers.freeze_holder, servers.thaw_holder),
                Happening(FULL, filler.fill, filler.stop),
                Happening(SLOW_LINK, link.narrow, link.well),
                Happening(BAD_LINK, link.flap, link.well),
            ],
            remarks=(
                f"*Killed*, *frozen*: one of {_HOLDERS} holders. The tier has `replica_num: 2`, so that the histories "
                "outlive it, and `hard_pin: true`, so that they outlive *full*: another client fills what is left of "
                "the pool. Without these the pool would be asked for what it has not. A holder is no replica of "
                "another one: *replica* does not apply.",
                f"Servers and pool are in networks of their own with a cable between them (veth). *Slow link*: "
                f"{link.rate / 1e6:g} MB/s each way. *Bad link*: the cable is pulled for 0.7 s of every 2 s. TCP's "
                "checksums let no changed byte through; what arrives damaged all the same is in "
                "tests/storage/mooncake/test_damaged_path.py.",
            ),
        )


class _Filler:
    """Another client that takes all memory of the pool that is free."""

    def __init__(self, servers: MooncakeServers, link: Link) -> None:
        self._words = [*link.command_prefix, sys.executable, "-c", _FILL, servers.master, link.there]
        self._process: subprocess.Popen[str] | None = None

    def fill(self) -> None:
        self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert any(line == "full\n" for line in iter(self._process.stdout.readline, "")), "the pool was not filled"

    def stop(self) -> None:
        """Give it back."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()


ENGINES = {"redis": _redis, "object": _object, "mooncake": _mooncake}

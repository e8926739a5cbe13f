"""Stores that refuse one kind of call: what they still do is used, and what they refuse is said.

A matrix: store x refusal. For each the reads, the look-ups and the writes of a tier behind its guards are counted, and
the line of the log and the series looked for. Real servers refuse where they can be made to; fakes say what no server
here says, codes that nobody knows included.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.runtime import breaker
from hicache_ext.runtime.background import Backoff
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.contract.store import GetResult, PageStore, SetResult
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore
from hicache_ext.storage.tiers.redis.config import RedisTierConfig
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from tests.rigs.disk_faults import DiskFaults
from tests.rigs.redis_servers import RedisCluster, RedisServer, redis_program
from tests.rigs.s3_server import S3Server, missing_s3_server
from tests.storage.guards.hung import guard
from tests.storage.mooncake.test_store_without_pool import MooncakeTierConfig, RecordingAttachment, RecordingEngine
from tests.storage.remote.object.fault_proxy import FaultProxy, kind_of
from tests.storage.remote.object.test_object_faults import ObjectPageStore, through
from tests.storage.remote.object.test_object_faults import tier as object_tier
from tests.storage.remote.redis.conftest import tier_for
from tests.storage.remote.redis.fake_server import FakeServer
from tests.waiting import wait_until

ROUNDS, PAGES = 10, 6
WRITES, READS, LOOK_UPS = "write", "read", "look_up"


@dataclass
class Medium:
    """One kind of store, and how it refuses things."""

    store: PageStore
    refusing: Callable[[str], AbstractContextManager[None]]
    sizes: tuple[int, ...] = (5000,)


@dataclass(frozen=True)
class Case:
    medium: str
    refusal: str
    """In the words of the medium."""
    kind: str
    reason: str = ""
    """What the line names; empty where the tier is full, which is told otherwise."""

    def __str__(self) -> str:
        return f"{self.medium}-{self.kind}-{self.refusal.replace(' ', '_')}"


CASES = [
    *[
        Case(medium, refusal, WRITES, reason)
        for medium in ("redis", "cluster")
        for refusal, reason in {
            "MISCONF": "MISCONF",
            "NOREPLICAS": "NOREPLICAS",
            "NOPERM set": "NOPERM",
            "NOPERM strlen": "NOPERM",
            "OOM": "",
        }.items()
    ],
    Case("redis", "READONLY", WRITES, "readonly"),
    Case("redis", "PAUSE", WRITES, "timeout"),
    *[Case("odd redis", code, WRITES, code) for code in ("QUOTA", "ERR")],
    *[Case(medium, "NOPERM exists", LOOK_UPS, "NOPERM") for medium in ("redis", "cluster")],
    *[Case(medium, "NOPERM get", READS, "NOPERM") for medium in ("redis", "cluster")],
    *[
        Case(medium, name, WRITES, name)
        for medium in ("slab", "packs")
        for name in ("EROFS", "EFBIG", "EACCES", "EPERM", "EIO", "EL2NSYNC")
    ],
    Case("slab", "growth EACCES", WRITES, "EACCES"),
    Case("slab", "growth EFBIG", WRITES, "EFBIG"),
    *[Case(medium, "reads EIO", READS, "EIO") for medium in ("slab", "packs")],
    *[Case("mooncake", f"put {code}", WRITES, f"code_{-code}") for code in (-1701, -1799, -4242)],
    Case("mooncake", "put -200", WRITES),
    Case("mooncake", "exist -1702", LOOK_UPS, "code_1702"),
    Case("mooncake", "get -1703", READS, "code_1703"),
    *[Case("s3", f"PUT {status}", WRITES, f"(HTTP {status})") for status in (403, 405, 413, 418, 507)],
    Case("s3", "LIST 403", LOOK_UPS, "(HTTP 403)"),
    Case("s3", "GET 403", READS, "(HTTP 403)"),
]


# -- the media ---------------------------------------------------------------------------------------------------------


@contextmanager
def redis_medium(servers: list[RedisServer], **changes: Any) -> Iterator[Medium]:
    store = RedisPageStore("far", tier_for(*servers, timeout=10.0, **changes))

    def tell(*words: str) -> None:
        for server in servers:
            answer = server.command(*words)
            assert not answer.startswith("-"), answer

    @contextmanager
    def refusing(refusal: str) -> Iterator[None]:
        word, _, command = refusal.partition(" ")
        match word:
            case "MISCONF":
                tell("CONFIG", "SET", "save", "3600 100000")
                for server in servers:
                    shutil.rmtree(server.directory)
                    server.command("BGSAVE")
                    wait_until(lambda server=server: "rdb_last_bgsave_status:err" in server.command("INFO"))  # type: ignore[misc]
                yield
                tell("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")
            case "NOREPLICAS":
                tell("CONFIG", "SET", "min-replicas-to-write", "1")
                yield
                tell("CONFIG", "SET", "min-replicas-to-write", "0")
            case "NOPERM":
                tell("ACL", "SETUSER", "default", f"-{command}")
                yield
                tell("ACL", "SETUSER", "default", f"+{command}")
            case "OOM":
                tell("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1")
                yield
                tell("CONFIG", "SET", "maxmemory", "0")
            case "READONLY":
                tell("REPLICAOF", "127.0.0.1", "1")
                yield
                tell("REPLICAOF", "NO", "ONE")
            case "PAUSE":
                tell("CLIENT", "PAUSE", "60000", "WRITE")
                yield
                tell("CLIENT", "UNPAUSE")

    yield Medium(store, refusing)
    store.close()


@contextmanager
def a_redis(directory: Path) -> Iterator[Medium]:
    with RedisServer(directory / "server") as server, redis_medium([server]) as medium:
        yield medium


@contextmanager
def a_cluster(directory: Path) -> Iterator[Medium]:
    with RedisCluster(directory / "cluster") as cluster, redis_medium(list(cluster.servers)) as medium:
        yield medium


@contextmanager
def an_odd_redis(_: Path) -> Iterator[Medium]:
    """Says what no Redis says, where it is asked to write."""
    values: dict[bytes, bytes] = {}
    refusal = SimpleNamespace(code="")

    def answer(words: list[bytes]) -> bytes:
        match words[0]:
            case b"SET":
                if refusal.code and words[1].startswith(b"test:page"):
                    return f"-{refusal.code} tenant 7 may not\r\n".encode()
                values[words[1]] = words[2]
                return b"+OK\r\n"
            case b"GET":
                value = values.get(words[1])
                return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
            case b"STRLEN":
                return b":%d\r\n" % len(values.get(words[1], b""))
            case b"EXISTS":
                return b":%d\r\n" % sum(word in values for word in words[1:])
            case b"UNLINK":
                return b":%d\r\n" % (values.pop(words[1], None) is not None)
            case _:
                return b"-ERR This instance has cluster support disabled\r\n"

    @contextmanager
    def refusing(code: str) -> Iterator[None]:
        refusal.code = code
        yield
        refusal.code = ""

    with FakeServer(answer) as server:
        tier = RedisTierConfig(url=[f"redis://{server.endpoint}"], prefix="test:", cluster=False, timeout=10.0)
        store = RedisPageStore("far", tier)
        yield Medium(store, refusing)
        store.close()


@contextmanager
def a_directory(directory: Path, layout: str) -> Iterator[Medium]:
    place = directory / layout
    tier = FileTierConfig(path=[str(place)], capacity=256 << 20, layout=layout, io="buffered")
    store = open_tier("far", tier)

    @contextmanager
    def refusing(refusal: str) -> Iterator[None]:
        *word, name = refusal.split(" ")
        code = getattr(errno, name)

        def grow(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        with ExitStack() as faults:
            if word == ["growth"]:
                medium.sizes = (70_000,)
                patch = faults.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(SlabDirectory, "create_slab_files", grow)
            else:
                calls = ("preadv",) if word == ["reads"] else ("pwritev",)
                faults.enter_context(DiskFaults(place, rate=1, errors=(code,), short=False, calls=calls))
            yield
        medium.sizes = (5000,)

    medium = Medium(store, refusing)
    yield medium
    store.close()


@contextmanager
def a_mooncake(_: Path) -> Iterator[Medium]:
    tier = MooncakeTierConfig.model_validate({"type": "mooncake", "master": "127.0.0.1:1", "required": False})
    engine = RecordingEngine(tier)
    store = MooncakeStore("far", tier, RecordingAttachment("far", engine))

    @contextmanager
    def refusing(refusal: str) -> Iterator[None]:
        call, code = refusal.split(" ")
        engine.client.codes = {call: int(code)}
        yield
        engine.client.codes = {}

    yield Medium(store, refusing)
    store.close()


@contextmanager
def an_s3(directory: Path) -> Iterator[Medium]:
    if missing := missing_s3_server():
        pytest.skip(f"missing: {missing}")
    with S3Server(directory / "s3") as server, FaultProxy(server.port).serving() as proxy:
        client = through(proxy.port, server.bucket, secrets.token_hex(4))
        store = ObjectPageStore("far", object_tier(concurrency=4), lambda: client)

        @contextmanager
        def refusing(refusal: str) -> Iterator[None]:
            kind, status = refusal.split(" ")

            proxy.refuses = lambda request: int(status) if kind_of(request) == kind else 0
            yield
            proxy.refuses = lambda request: 0

        yield Medium(store, refusing)
        proxy.released.set()
        store.close()


MEDIA: dict[str, Callable[[Path], AbstractContextManager[Medium]]] = {
    "redis": a_redis,
    "cluster": a_cluster,
    "odd redis": an_odd_redis,
    "slab": lambda directory: a_directory(directory, "slab"),
    "packs": lambda directory: a_directory(directory, "pages"),
    "mooncake": a_mooncake,
    "s3": an_s3,
}


# -- the matrix --------------------------------------------------------------------------------------------------------


@pytest.fixture
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    name = request.param
    if name in ("redis", "cluster") and redis_program() is None:
        pytest.skip("missing: redis-server")
    with MEDIA[name](tmp_path) as medium:
        yield medium


@pytest.mark.parametrize(("medium", "case"), [(case.medium, case) for case in CASES], indirect=["medium"], ids=str)
def test_what_a_store_refuses_costs_nothing_else_and_is_said(
    medium: Medium, case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(breaker, "WRITE_PAUSES", Backoff(0.05, 0.2))
    monkeypatch.setattr("hicache_ext.storage.guards.breaker.WRITE_PAUSES", Backoff(0.05, 0.2))
    limit = 0.5 if case.refusal == "PAUSE" else 10.0
    breaker_of = {"slow_call": 10.0, "probe_interval": 0.05, "slow_start": 0.0}
    store = guard(medium.store, timeout=10.0, write_timeout=limit, retries=1, **breaker_of)
    old = page_keys(PAGES, "old")
    assert set(store_pages(store, old, (5000,))) == {SetResult.STORED}
    read: list[GetResult] = []
    found: list[bool] = []
    written: list[SetResult] = []
    with medium.refusing(case.refusal):
        for number in range(ROUNDS):
            written += store_pages(store, page_keys(2, f"{number}"), medium.sizes)
            read += read_pages(store, old, (5000,))[0]
            # A store that does not list finds what this process wrote itself.
            asked = page_keys(PAGES, "of another") if case.refusal == "LIST 403" else old
            found += store.contains(asked)
            if case.kind is LOOK_UPS:
                store.count_leading(asked)
            if case.refusal == "PAUSE":
                time.sleep(0.3)
        failing = store.metrics.levels()
        said = [line for record in caplog.records if " fails (" in (line := record.getMessage())]
    everything = ROUNDS * PAGES
    if case.kind is WRITES:
        assert read.count(GetResult.HIT) == found.count(True) == everything
        assert not any(result.durable for result in written)
    elif case.kind is READS:
        assert GetResult.HIT not in read
    else:
        assert True not in found
    if case.kind is not WRITES:
        # Readers are not kept waiting by a tier that refuses them.
        assert store.metrics.value("breaker", "open") or store.metrics.total("path_out_of_service")
    if case.reason:
        mine = [line for line in said if f"every {case.kind.replace('_', '-')} fails" in line]
        assert len(mine) == 1 and case.reason in mine[0] and "doctor" in mine[0], said
        assert failing["failing", case.kind] == 1.0
    else:
        assert failing["failing", case.kind] == 0.0 and store.metrics.total("rejected")
    # What it takes again is used again, by itself.
    wait_until(lambda: set(store_pages(store, page_keys(2, "after"), (5000,))) <= {SetResult.STORED, SetResult.EXISTS})
    wait_until(lambda: read_pages(store, old, (5000,))[0] == [GetResult.HIT] * PAGES and all(store.contains(old)))
    assert {store.metrics.levels()["failing", kind] for kind in (WRITES, READS, LOOK_UPS)} == {0.0}


def test_six_stores_and_ten_refusals_are_tried() -> None:
    assert len({case.medium for case in CASES}) >= 6
    assert len({case.refusal for case in CASES}) >= 10

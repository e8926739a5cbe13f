"""How many pages are transformed at a time, and by whom."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterator

import pytest

from hicache_ext.runtime.threads import ThreadPool, run_alone
from hicache_ext.storage.contract.store import StoreInfo
from hicache_ext.storage.contract.transforming import page_memory as portions_module
from hicache_ext.storage.contract.transforming.page_memory import Portions

MIB = 1 << 20
DISK = StoreInfo("disk", "file", False, {"io": "direct, 4 threads"})
CACHE = StoreInfo("disk", "file", False, {"io": "buffered, 2 threads"})
POOL = StoreInfo("pool", "redis", True, {})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Portions]:
    monkeypatch.setattr(portions_module.os, "sched_getaffinity", lambda _: {0, 1})
    portions = Portions(request.param)
    yield portions
    portions.close()


@pytest.mark.parametrize(
    ("made", "pages", "length", "counts"),
    [
        (CACHE, 16, MIB, [8, 8]),
        (CACHE, 8, MIB, [4, 4]),
        (CACHE, 4, MIB, [4]),
        (CACHE, 3, 4 * MIB, [1, 1, 1]),
        (CACHE, 64, 32 << 10, [64]),
        (DISK, 32, MIB, [16, 16]),
        (POOL, 64, MIB, [63, 1]),
    ],
    indirect=["made"],
)
def test_portions_are_as_large_as_the_medium_wants_them(
    made: Portions, pages: int, length: int, counts: list[int]
) -> None:
    assert [len(one) for one in made.of(range(pages), [length + 4096] * pages)] == counts


@pytest.mark.parametrize("made", [CACHE], indirect=True)
def test_portions_of_the_page_cache_keep_to_their_threads(made: Portions) -> None:
    """As many are under way as there are processors: the store's own threads would take these from them."""
    threads: list[set[int]] = []
    of_store = ThreadPool("store", 4)

    def move(_: int) -> None:
        used = of_store.run(8, lambda _: time.sleep(0.001) or threading.get_ident())
        threads.append(set(used) - {threading.get_ident()})

    made.run(2, move)
    of_store.close()
    assert threads == [set(), set()]


@pytest.mark.parametrize(("made", "count"), [(CACHE, 1), (DISK, 4), (POOL, 2)], indirect=["made"])
def test_other_portions_have_the_help_of_the_stores_threads(made: Portions, count: int) -> None:
    of_store = ThreadPool("store", 8)

    def move(_: int) -> None:
        together = threading.Barrier(2)
        assert sorted(of_store.run(2, lambda _: together.wait(30))) == [0, 1]

    made.run(count, move)
    of_store.close()


def test_where_processors_are_left_the_stores_threads_help_portions_of_the_page_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portions_module.os, "sched_getaffinity", lambda _: set(range(64)))
    portions, of_store = Portions(CACHE), ThreadPool("store", 8)

    def move(_: int) -> None:
        together = threading.Barrier(2)
        assert sorted(of_store.run(2, lambda _: together.wait(30))) == [0, 1]

    portions.run(4, move)
    of_store.close()
    portions.close()


def test_what_runs_alone_leaves_other_contexts_as_they_are() -> None:
    of_store, together = ThreadPool("store", 2), threading.Barrier(2)
    contextvars.copy_context().run(run_alone)
    assert sorted(of_store.run(2, lambda _: together.wait(30))) == [0, 1]
    of_store.close()

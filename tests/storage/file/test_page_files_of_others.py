"""Page files in one directory with processes of other containers, and with processes that are stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache_ext.cli.main import main
from hicache_ext.errors import StoreSetupError
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_key, page_keys, store_pages
from tests.rigs.container import Program, namespaces_missing
from tests.storage.raw_access import account_and_walk

BOUND = 5.0
"""Seconds, generous: a stopped process may cost one."""
CAPACITY = 1 << 20
PAGE = [8000]

WRITER = """
import os, sys
from pathlib import Path
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.testing.conformance.pages import page_key, store_pages

store = PageFileStore("theirs", Path(sys.argv[1]), capacity=1 << 20)
directory, usage = store._directory, store._usage
print(os.getpid(), flush=True)
for line in sys.stdin:
    command = line.strip()
    if command == "begin a page":
        path = directory.page_path(page_key("theirs"))
        sum(directory.create_parent(path))
        fd, temporary = directory.open_unpublished()
        os.write(fd, b"half")
        print(temporary, flush=True)
    elif command == "end it":
        directory.publish(temporary, path)
        print(True, flush=True)
    elif command == "reserve":
        print(usage.reserve(500_000, 1 << 20, lambda need: []) is None, flush=True)
    elif command == "take the account":
        with usage.locked():
            print("taken", flush=True)
            sys.stdin.readline()
        print("free", flush=True)
    elif command == "evict and wait":
        remove = os.unlink
        def wait(path):
            os.unlink = remove
            print("evicting", flush=True)
            sys.stdin.readline()
            return remove(path)
        os.unlink = wait
        print(store_pages(store, [page_key("one more")], [300_000])[0].name, flush=True)
"""

contained = pytest.mark.skipif(namespaces_missing() is not None, reason=f"missing: {namespaces_missing()}")


@pytest.fixture
def start(place: Path) -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def start_one(**options: str | bool) -> Program:
        program = Program(WRITER, place, **options)  # type: ignore[arg-type]
        running.append(program)
        program.own_pid = program.line()  # type: ignore[attr-defined]
        return program

    yield start_one
    for program in running:
        program.kill()


@contextmanager
def bounded() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < BOUND


# -- containers --------------------------------------------------------------------------------------------------------


@contained
@pytest.mark.parametrize("hostnames", [("node", "node"), ("one", "two")])
def test_a_start_in_another_container_leaves_the_files_of_a_living_writer(start, hostnames) -> None:
    writer = start(contained=True, hostname=hostnames[0])
    temporary = Path(writer.ask("begin a page"))
    other = start(contained=True, hostname=hostnames[1])
    assert other.own_pid == writer.own_pid, "each is the same process of its namespace"
    assert temporary.exists()
    assert writer.ask("end it") == "True"


@pytest.mark.thorough
@contained
def test_gc_on_the_host_leaves_the_files_of_a_living_container(place, start, capsys) -> None:
    writer = start(contained=True)
    temporary = Path(writer.ask("begin a page"))
    with writer.stopped():
        assert main(["gc", str(place)]) == 0
        assert "0 left-overs" in capsys.readouterr().out
        assert temporary.exists()
    assert writer.ask("end it") == "True"


@contained
@pytest.mark.parametrize("hostnames", [("node", "node"), ("one", "two")])
def test_the_files_of_a_killed_container_are_removed_by_the_next_start(start, hostnames) -> None:
    writer = start(contained=True, hostname=hostnames[0])
    temporary = Path(writer.ask("begin a page"))
    writer.kill()
    start(contained=True, hostname=hostnames[1])
    assert not temporary.exists()


@pytest.mark.thorough
@contained
def test_what_a_living_container_has_reserved_is_not_given_away(place, start, open_store) -> None:
    writer = start(contained=True)
    assert writer.ask("reserve") == "True"
    start(contained=True)
    store = open_store(capacity=CAPACITY)
    for number in range(100):
        store_pages(store, [page_key(number)], PAGE)
    assert account_and_walk(store)[1] <= CAPACITY - 500_000
    writer.kill()
    for number in range(100):
        store_pages(store, [page_key(number)], PAGE)
    assert store.metrics.value("evicted", "capacity") > 0


# -- a process that is stopped -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_process_stopped_with_the_account_costs_others_a_second_once(place, start, open_store, caplog) -> None:
    store = open_store(capacity=CAPACITY)
    keys = page_keys(4)
    assert store_pages(store, keys) == [SetResult.STORED] * 4
    writer = start()
    assert writer.ask("take the account") == "taken"
    caplog.set_level(logging.INFO, "hicache_ext")
    caplog.clear()
    with writer.stopped():
        with bounded():
            assert store_pages(store, page_keys(3, prefix="new")) == [SetResult.REJECTED] * 3
        with bounded():
            for number in range(20):
                assert store_pages(store, [page_key(f"new {number}")]) == [SetResult.REJECTED]
            assert_hits(store, keys)
            assert store.used_bytes() > 0
        with bounded():
            assert store.remove(keys[:1]) == 1
        with bounded():
            assert store.clear([IDENTITY]) == 1
            assert store.contains(keys) == [False] * 4
            store._clearing.wait(60)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "nothing is stored until it goes on" in caplog.text
        assert store.metrics.value("rejected", "held") == 23
    assert writer.ask("") == "free"
    assert store_pages(store, keys) == [SetResult.STORED] * 4
    assert account_and_walk(store)[0] == account_and_walk(store)[1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.thorough
def test_opening_and_closing_do_not_wait_for_a_process_stopped_with_the_account(place, start, open_store) -> None:
    store = open_store(capacity=CAPACITY)
    store_pages(store, page_keys(4))
    writer = start()
    assert writer.ask("take the account") == "taken"
    with writer.stopped():
        with bounded(), pytest.raises(StoreSetupError, match="stopped perhaps") as refused:
            open_store(capacity=CAPACITY)
        assert isinstance(refused.value.__cause__, TimeoutError), "the path is tried again"
        assert "\n" not in str(refused.value)
        with bounded():
            store.close()
    assert writer.ask("") == "free"
    assert_hits(open_store(capacity=CAPACITY), page_keys(4))


@pytest.mark.thorough
@pytest.mark.parametrize("second", [(), ("second",)])
def test_a_path_whose_account_is_held_is_tried_again(second, tmp_path, place, start, caplog) -> None:
    from hicache_ext.runtime.metrics import TierMetrics
    from hicache_ext.storage.tiers.file.pages.store import PageFileStore

    writer = start()
    assert writer.ask("take the account") == "taken"
    with writer.stopped(), bounded():
        store = SpreadStore(
            "disk",
            [place, *(tmp_path / name for name in second)],
            lambda path, trouble: PageFileStore("disk", path, capacity=CAPACITY, trouble=trouble),
            TierMetrics("disk"),
            first_probe=0.05,
        )
        assert store.out_of_service() == [place]
    writer.tell("")
    deadline = time.monotonic() + 60
    while store.out_of_service() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.out_of_service() == []
    store.close()


@pytest.mark.thorough
def test_a_process_stopped_amid_an_eviction_holds_up_only_who_needs_room(place, start, open_store, caplog) -> None:
    store = open_store(capacity=CAPACITY)
    keys = page_keys(100)
    for key in keys:
        store_pages(store, [key], PAGE)
    writer = start()
    writer.tell("evict and wait")
    assert writer.line() == "evicting"
    caplog.clear()
    with writer.stopped(), caplog.at_level(logging.INFO, "hicache_ext"):
        with bounded():
            for number in range(20):
                assert store_pages(store, [page_key(f"new {number}")], PAGE) == [SetResult.REJECTED]
            assert_hits(store, keys[-5:], PAGE)
        with bounded():
            assert store.remove(keys[-60:]) >= 40
            # There is room again, beyond what the stopped one waits for.
            assert store_pages(store, [page_key("room")], PAGE) == [SetResult.STORED]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert writer.ask("") == "STORED"
    assert account_and_walk(store)[0] == account_and_walk(store)[1] <= CAPACITY

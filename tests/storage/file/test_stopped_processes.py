"""Slabs beside a process that is stopped (SIGSTOP, ``docker pause``, the freezer), wherever it was at that moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hicache_ext.cli.main import main
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, assert_hits, page_keys, store_pages
from tests.campaigns.slab_insides import HOLDS, Hold, hold
from tests.rigs.pods import LONG, Pod, close
from tests.rigs.slab_tier import open_slab_tier
from tests.rigs.workers import Worker

pytestmark = pytest.mark.slow

CAPACITY = 8 << 20
BOUND = 15.0
"""Seconds of anything beside a stopped process. It is one second each time that somebody is waited for; the machine may
be busy. Without a bound it would be as long as the process is stopped."""
STORED = [SetResult.STORED] * 4
REJECTED = [SetResult.REJECTED] * 4


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def start(place: Path) -> Iterator[Callable[[], Pod]]:
    """Starts servers over ``place``; they end with the test."""
    pods: list[Pod] = []

    def start_one() -> Pod:
        pods.append(Pod(place, capacity=CAPACITY))
        return pods[-1]

    yield start_one
    for pod in pods:
        pod.close()


def pages(name: str, identity: bytes = IDENTITY) -> list[bytes]:
    return page_keys(4, name, identity)


def are_there(store: SpreadStore, keys: list[bytes]) -> bool:
    return store.contains(keys) == [True] * len(keys) and store.count_leading(keys) == len(keys)


def wait_until_in_service(pod: Pod) -> None:
    deadline = time.monotonic() + LONG
    while pod.do(SpreadStore.out_of_service):
        assert time.monotonic() < deadline, "it does not come back"
        time.sleep(0.1)


def clear(store: SpreadStore, identity: bytes) -> int:
    return store.clear([identity])


def hold_and_wait(channel: Connection, place: Path, what: Hold) -> None:
    """A process that is amid something for as long as it lives."""
    hold(place, what)
    channel.send("held")
    time.sleep(2 * LONG)


# -- stopped amid a change of the index --------------------------------------------------------------------------------


def test_beside_one_stopped_amid_a_change_writes_are_rejected_and_work_again_when_it_goes_on(
    start: Callable[[], Pod],
) -> None:
    stopped, other = start(), start()
    stopped.hold("change")
    assert other.do(store_pages, pages("first"), within=BOUND) == REJECTED
    begun = time.monotonic()
    for number in range(20):
        assert other.do(store_pages, pages(str(number)), within=BOUND) == REJECTED
    assert time.monotonic() - begun < BOUND, "each write waits anew"
    stopped.let_go_and_go_on()
    assert other.do(store_pages, pages("first")) == STORED
    other.do(assert_hits, pages("first"))
    assert stopped.do(store_pages, pages("second")) == STORED
    other.do(assert_hits, pages("second"))


def test_beside_one_stopped_amid_a_change_pages_are_found_and_read(start: Callable[[], Pod]) -> None:
    stopped, other = start(), start()
    other.do(store_pages, pages("there"))
    stopped.hold("change")
    assert other.do(are_there, pages("there"), within=BOUND)
    other.do(assert_hits, pages("there"), within=BOUND)


def test_beside_one_stopped_amid_a_change_clear_takes_an_identity_out_of_sight_at_once(
    start: Callable[[], Pod],
) -> None:
    stopped, other = start(), start()
    other.do(store_pages, pages("cleared"))
    other.do(store_pages, pages("kept", OTHER_IDENTITY))
    stopped.hold("change")
    assert other.do(clear, IDENTITY, within=BOUND) == 1
    assert not other.do(are_there, pages("cleared"), within=BOUND)
    assert other.do(are_there, pages("kept", OTHER_IDENTITY), within=BOUND)
    stopped.let_go_and_go_on()
    assert not stopped.do(are_there, pages("cleared"))
    assert stopped.do(store_pages, pages("cleared")) == STORED


def test_that_one_is_stopped_amid_a_change_is_said_in_one_line(start: Callable[[], Pod]) -> None:
    stopped, other = start(), start()
    stopped.hold("change")
    for number in range(5):
        other.do(store_pages, pages(str(number)))
    (line,) = other.lines()
    assert "stopped perhaps; nothing is stored until it goes on" in line


def test_beside_one_stopped_amid_a_change_a_store_closes_within_a_bound(start: Callable[[], Pod]) -> None:
    stopped, other = start(), start()
    other.do(store_pages, pages("there"))
    stopped.hold("change")
    assert other.do(close, within=BOUND) < BOUND


# -- stopped anywhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", HOLDS)
def test_beside_a_stopped_process_a_start_comes_to_its_end_and_the_next_one_works_when_it_goes_on(
    start: Callable[[], Pod], what: Hold
) -> None:
    stopped, other = start(), start()
    other.do(store_pages, pages("there"))
    stopped.hold(what)
    begun = time.monotonic()
    come = start()
    assert time.monotonic() - begun < BOUND
    assert come.opened_in < BOUND
    if come.do(SpreadStore.out_of_service):
        (line,) = come.lines()
        assert "out of service" in line and "does not go on" in line and "\n" not in line
        assert come.do(store_pages, pages("beside"), within=BOUND) == REJECTED
    stopped.let_go_and_go_on()
    wait_until_in_service(come)
    come.do(assert_hits, pages("there"))
    following = start()
    assert following.refused == ""
    following.do(assert_hits, pages("there"))
    assert following.do(store_pages, pages("new")) == STORED
    other.do(assert_hits, pages("new"))


@pytest.mark.parametrize("what", ["joining", "rebuild"])
def test_one_stopped_amid_a_start_does_not_disturb_those_that_work(start: Callable[[], Pod], what: Hold) -> None:
    stopped, other = start(), start()
    stopped.hold(what)
    assert other.do(store_pages, pages("there"), within=BOUND) == STORED
    other.do(assert_hits, pages("there"), within=BOUND)
    assert other.do(clear, IDENTITY, within=BOUND) == 1
    assert other.lines() == []
    assert other.do(close, within=BOUND) < BOUND


def test_a_process_that_is_stopped_amid_nothing_disturbs_nobody(start: Callable[[], Pod]) -> None:
    stopped, other = start(), start()
    stopped.do(store_pages, pages("of the stopped one"))
    stopped.stop()
    assert other.do(store_pages, pages("there"), within=BOUND) == STORED
    come = start()
    assert come.refused == "", "one that lives gives the index"
    come.do(assert_hits, pages("there") + pages("of the stopped one"))
    stopped.go_on()
    stopped.do(assert_hits, pages("there"))


def test_a_start_beside_stopped_processes_alone_says_so_destroys_nothing_and_waits_in_the_background(
    start: Callable[[], Pod], place: Path
) -> None:
    stopped = start()
    stopped.do(store_pages, pages("there"))
    stopped.stop()
    come = start()
    assert come.opened_in < BOUND
    assert come.do(SpreadStore.out_of_service) == [place]
    (line,) = come.lines()
    assert "1 processes use it and none of them gives its index: they are stopped" in line
    assert come.do(clear, OTHER_IDENTITY, within=BOUND) == 0
    stopped.go_on()
    stopped.do(assert_hits, pages("there"))
    wait_until_in_service(come)
    come.do(assert_hits, pages("there"))


def test_gc_beside_stopped_processes_alone_says_so_and_removes_nothing(
    start: Callable[[], Pod], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = start()
    stopped.do(store_pages, pages("there"))
    stopped.stop_while_it_writes(store_pages, pages("being written"))
    assert main(["gc", str(place)]) == 1
    assert "they are stopped" in capsys.readouterr().err
    stopped.go_on()
    assert stopped.ended() == STORED
    stopped.do(assert_hits, pages("there") + pages("being written"))


# -- a rebuild ---------------------------------------------------------------------------------------------------------


def test_beside_a_stopped_rebuild_a_start_does_not_wait_and_the_rebuild_is_taken_over_when_that_process_ends(
    start: Callable[[], Pod], place: Path
) -> None:
    store = open_slab_tier(place, capacity=CAPACITY)
    store_pages(store, pages("there"))
    store.close()
    with Worker(hold_and_wait, place, "rebuild") as rebuilding:
        rebuilding.answer(LONG)
        rebuilding.stop()
        pods = [start(), start()]
        assert [pod.refused for pod in pods] == ["", ""]
        assert max(pod.opened_in for pod in pods) < BOUND
        assert not pods[0].do(are_there, pages("there"), within=BOUND), "somebody else has made the index anew"
        # Whether it can be stored depends on the room that is left; that it is answered does not.
        assert set(pods[0].do(store_pages, pages("new"), within=BOUND)) <= {SetResult.STORED, SetResult.REJECTED}
    deadline = time.monotonic() + LONG
    for pod in pods:
        while not pod.do(are_there, pages("there")):
            assert time.monotonic() < deadline, "nobody goes on with the rebuild"
            time.sleep(0.05)
        pod.do(assert_hits, pages("there"))
        assert pod.do(store_pages, pages("new"))[0].durable

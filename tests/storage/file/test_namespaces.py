"""Slabs of one directory in several containers: equal pids, other host names, networks and mounts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache_ext.cli.main import main
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.testing.conformance.pages import page_keys, payload_of, read_pages, store_pages
from tests.campaigns.slab_insides import faults, slots_by_state
from tests.rigs.pods import LONG, Pod, close, pid_and_host
from tests.rigs.slab_tier import open_slab_tier
from tests.rigs.workers import missing_for_namespaces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(missing_for_namespaces() is not None, reason=f"missing: {missing_for_namespaces()}"),
]

CAPACITY = 8 << 20
SIZES = (60_000, 70_000)
"""Two segments a page; a slot of 128 KiB and a bit holds one."""
WRITTEN = 16
"""Pages of one write: a fourth of the tier."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def start(place: Path) -> Iterator[Callable[..., Pod]]:
    """Starts servers in containers of their own over ``place``; they end with the test."""
    pods: list[Pod] = []

    def start_one(capacity: int = CAPACITY, **options: object) -> Pod:
        pods.append(Pod(place, capacity=capacity, namespaces=True, **options))  # type: ignore[arg-type]
        return pods[-1]

    yield start_one
    for pod in pods:
        pod.close()


def write(store: SpreadStore, keys: list[bytes]) -> list[SetResult]:
    return store_pages(store, keys, SIZES)


def write_other_pages(store: SpreadStore, name: str, count: int) -> int:
    """Write pages nobody has, in batches; how many were stored."""
    keys = page_keys(count, name)
    stored = 0
    for first in range(0, count, WRITTEN):
        stored += write(store, keys[first : first + WRITTEN]).count(SetResult.STORED)
    return stored


def bad_pages(store: SpreadStore, keys: list[bytes]) -> int:
    """How many are neither absent nor right."""
    results, payloads = read_pages(store, keys, SIZES)
    return sum(
        result is not GetResult.MISS and (result is not GetResult.HIT or payload != payload_of(key, sum(SIZES)))
        for key, result, payload in zip(keys, results, payloads, strict=True)
    )


def hits(store: SpreadStore, keys: list[bytes]) -> int:
    """How many pages are there, with their own bytes."""
    assert bad_pages(store, keys) == 0
    return read_pages(store, keys, SIZES)[0].count(GetResult.HIT)


def test_two_containers_with_equal_pids_start_and_each_reads_what_the_other_stored(start: Callable[..., Pod]) -> None:
    one, other = start(), start()
    assert (one.refused, other.refused) == ("", "")
    (pid, host), (other_pid, other_host) = one.do(pid_and_host), other.do(pid_and_host)
    assert pid == other_pid, "the containers must have equal pids, or nothing is shown"
    assert host != other_host
    assert one.do(write, page_keys(8, "one")) == [SetResult.STORED] * 8
    assert other.do(write, page_keys(8, "other")) == [SetResult.STORED] * 8
    assert one.do(hits, page_keys(8, "other")) == 8
    assert other.do(hits, page_keys(8, "one")) == 8
    assert other.do(write, page_keys(8, "one")) == [SetResult.EXISTS] * 8


def test_a_container_and_the_host_share_a_directory(start: Callable[..., Pod], place: Path) -> None:
    pod = start()
    store = open_slab_tier(place, capacity=CAPACITY)
    try:
        assert write(store, page_keys(8, "host")) == [SetResult.STORED] * 8
        assert pod.do(hits, page_keys(8, "host")) == 8
        pod.do(write, page_keys(8, "pod"))
        assert hits(store, page_keys(8, "pod")) == 8
    finally:
        store.close()


def test_containers_that_mount_the_directory_at_different_places_share_it(
    start: Callable[..., Pod], place: Path, tmp_path: Path
) -> None:
    place.mkdir()
    one, other = start(mounted_at=tmp_path / "cache"), start(mounted_at=tmp_path / "var" / "lib" / "cache")
    assert (one.refused, other.refused) == ("", "")
    one.do(write, page_keys(8))
    assert other.do(hits, page_keys(8)) == 8


def test_containers_with_different_capacities_never_take_more_than_the_largest_together(
    start: Callable[..., Pod], place: Path
) -> None:
    large = start(capacity=4 * CAPACITY)
    large.do(write_other_pages, "large", 8 * CAPACITY // sum(SIZES))
    assert CAPACITY < bytes_on_disk(place) <= 4 * CAPACITY
    small = start(capacity=CAPACITY)
    # What is beyond its own capacity goes when it starts, the coldest pages first.
    deadline = time.monotonic() + LONG
    while bytes_on_disk(place) > CAPACITY:
        assert time.monotonic() < deadline, "the smaller capacity is not kept"
        time.sleep(0.05)
    for turn in range(2):
        small.do(write_other_pages, f"small {turn}", CAPACITY // sum(SIZES))
        large.do(write_other_pages, f"large {turn}", 8 * CAPACITY // sum(SIZES))
        assert bytes_on_disk(place) <= 4 * CAPACITY


def bytes_on_disk(place: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file())


def test_the_pages_are_there_when_the_first_container_has_ended_and_another_one_comes(
    start: Callable[..., Pod],
) -> None:
    first, second = start(), start()
    first.do(write, page_keys(8))
    first.kill()
    assert second.do(hits, page_keys(8)) == 8
    second.kill()
    assert start().do(hits, page_keys(8)) == 8


def test_a_writer_stopped_in_a_container_keeps_its_slots_and_damages_nobody_s_pages_when_it_goes_on(
    start: Callable[..., Pod],
) -> None:
    stopped, others = start(), [start(), start()]
    mine = page_keys(WRITTEN, "of the stopped one")
    stopped.stop_while_it_writes(write, mine)
    for number, other in enumerate(others):
        # Four times the capacity: whoever's slots can be had are given away many times.
        assert other.do(write_other_pages, f"of {number}", 4 * CAPACITY // sum(SIZES)) > 0
    stopped.go_on()
    assert set(stopped.ended()) <= {SetResult.STORED, SetResult.EXISTS}, "a live writer was taken for dead"
    for number, other in enumerate(others):
        assert other.do(bad_pages, page_keys(4 * CAPACITY // sum(SIZES), f"of {number}")) == 0
        assert other.do(hits, mine) == WRITTEN
    assert stopped.lines() == []


def test_slots_that_a_killed_container_was_writing_are_used_again(start: Callable[..., Pod], place: Path) -> None:
    other, killed = start(), start()
    killed.stop_while_it_writes(write, page_keys(WRITTEN, "of the killed one"))
    killed.kill()
    # Who has ended is looked for every few seconds.
    deadline = time.monotonic() + LONG
    for attempt in itertools.count():
        other.do(write_other_pages, f"other {attempt}", 4 * CAPACITY // sum(SIZES))
        if not slots_by_state(place)["pending"]:
            break
        assert time.monotonic() < deadline, "slots of a process that has ended are lost"
        time.sleep(0.2)
    assert other.do(write, page_keys(WRITTEN, "of the killed one")) == [SetResult.STORED] * WRITTEN
    assert faults(place) == []


def test_gc_on_the_host_removes_nothing_of_a_living_container(
    start: Callable[..., Pod], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod, _ = start(), start()
    keys = page_keys(8, "there")
    pod.do(write, keys)
    mine = page_keys(WRITTEN, "being written")
    pod.stop_while_it_writes(write, mine)
    assert main(["gc", str(place)]) == 0
    assert capsys.readouterr().out.startswith("0 left-overs of killed processes removed")
    pod.go_on()
    assert pod.ended() == [SetResult.STORED] * WRITTEN
    assert pod.do(hits, keys + mine) == 8 + WRITTEN


def test_a_container_that_starts_while_another_one_closes_finds_its_pages(start: Callable[..., Pod]) -> None:
    pod = start()
    keys = page_keys(8)
    pod.do(write, keys)
    for _ in range(5):
        pod.begin(close)
        following = start()
        assert following.refused == ""
        assert following.do(hits, keys) == 8
        pod.ended()
        pod = following

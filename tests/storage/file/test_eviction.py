"""Capacity: what is refused, what goes, and that nothing can wedge it."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import threading
import time

import pytest

from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.testing.conformance.pages import (
    OTHER_IDENTITY,
    assert_hits,
    page_key,
    page_keys,
    read_pages,
    store_pages,
)
from tests.rigs.disk_faults import DiskFaults
from tests.storage.file.page_files import store_one_by_one
from tests.storage.raw_access import account_and_walk
from tests.waiting import wait_until

PAGE = [8000]
CAPACITY = 160 * 1024


def _disk_usage(place) -> int:
    return 1024 * int(subprocess.check_output(["du", "-sk", place]).split()[0])


def _age(raw, key: bytes, seconds: float) -> None:
    status = raw.path(key).stat()
    os.utime(raw.path(key), (status.st_atime - seconds, status.st_mtime - seconds))


def test_the_page_not_used_for_longest_goes_first(open_store, raw):
    store = open_store(capacity=CAPACITY)
    old, read_again, written_again, new = page_keys(4)
    store_pages(store, [old, read_again, written_again, new], [12_000])
    for age, key in ((3000, old), (4000, read_again), (5000, written_again)):
        _age(raw, key, age)
    assert_hits(store, [read_again], [12_000])
    assert store_pages(store, [written_again], [12_000]) == [SetResult.EXISTS]
    number = 0
    while store.metrics.value("evicted", "capacity") == 0:
        number += 1
        assert store_pages(store, [page_key(f"filler {number}")], [12_000]) == [SetResult.STORED]
    assert store.contains([old, read_again, written_again, new]) == [False, True, True, True]


def test_the_disk_never_holds_more_than_the_capacity(open_store, place):
    store = open_store(capacity=CAPACITY)
    empty = _disk_usage(place)
    for number in range(100):
        assert store_pages(store, [page_key(number)], PAGE) == [SetResult.STORED]
        assert _disk_usage(place) - empty <= CAPACITY
    assert account_and_walk(store)[0] == account_and_walk(store)[1] <= CAPACITY
    assert_hits(store, [page_key(99)], PAGE)


def test_a_batch_larger_than_the_capacity_is_stored_in_part(open_store, place):
    store = open_store(capacity=CAPACITY)
    results = store_pages(store, page_keys(100), PAGE)
    assert set(results) <= {SetResult.STORED, SetResult.REJECTED}
    assert account_and_walk(store)[0] == account_and_walk(store)[1] <= CAPACITY


@pytest.mark.parametrize("capacity", [0, 1, 4096, 8192])
def test_a_capacity_smaller_than_a_page_refuses_it(open_store, capacity):
    store = open_store(capacity=capacity)
    assert store_pages(store, page_keys(3), PAGE) == [SetResult.REJECTED] * 3
    assert store.metrics.value("rejected", "capacity") == 3
    assert read_pages(store, page_keys(3), PAGE)[0] == [GetResult.MISS] * 3


def test_a_page_larger_than_the_capacity_does_not_evict_the_others(open_store):
    store = open_store(capacity=CAPACITY)
    store_pages(store, page_keys(5), PAGE)
    assert store_pages(store, [page_key("huge")], [CAPACITY]) == [SetResult.REJECTED]
    assert_hits(store, page_keys(5), PAGE)


def test_an_undeletable_page_does_not_wedge_eviction(open_store, raw):
    """sgl-project/sglang#31485: the oldest page could not be removed, and nothing was evicted ever after."""
    store = open_store(capacity=CAPACITY)
    stuck = page_key("stuck")
    store_pages(store, [stuck], PAGE)
    _age(raw, stuck, 10_000)
    if os.geteuid() != 0 or subprocess.run(["chattr", "+i", raw.path(stuck)], check=False).returncode:
        pytest.skip("missing: chattr +i (root, and a file system that has it)")
    try:
        for number in range(60):
            assert store_pages(store, [page_key(number)], PAGE) == [SetResult.STORED]
        assert 1 <= store.metrics.value("error", "EPERM") <= 5, "tried again for every page"
        assert_hits(store, [stuck, page_key(59)], PAGE)
        assert account_and_walk(store)[0] == account_and_walk(store)[1]
    finally:
        subprocess.run(["chattr", "-i", raw.path(stuck)], check=True)


def test_a_disk_that_refuses_to_delete_refuses_writes_and_recovers(open_store, place):
    store = open_store(capacity=CAPACITY)
    for number in range(40):
        store_pages(store, [page_key(f"old {number}")], PAGE)
    assert store.metrics.value("evicted", "capacity") > 0
    with DiskFaults(place, rate=1, errors=(errno.EROFS,), calls=("unlink",)):
        results = [store_pages(store, [page_key(number)], PAGE)[0] for number in range(20)]
    assert SetResult.REJECTED in results
    assert set(results) <= {SetResult.STORED, SetResult.REJECTED}
    assert account_and_walk(store)[0] == account_and_walk(store)[1] <= CAPACITY
    assert [store_pages(store, [key], PAGE) for key in page_keys(5)][1:] == [[SetResult.STORED]] * 4


def test_a_walk_that_fails_refuses_the_write_and_raises_nothing(open_store, monkeypatch):
    store = open_store(capacity=CAPACITY)
    for number in range(19):
        store_pages(store, [page_key(number)], PAGE)

    def fail(*_):
        raise OSError(errno.EIO, "directory unreadable")

    monkeypatch.setattr(store._directory, "file_directories", fail)
    assert SetResult.REJECTED in store_pages(store, page_keys(30), PAGE)
    monkeypatch.undo()
    assert store_pages(store, [page_key("after")], PAGE) == [SetResult.STORED]


def test_the_empty_directories_of_old_identities_do_not_crowd_out_the_pages(open_store):
    """Each weight update begins a new identity; 40 of them leave 40 trees of empty directories."""
    store = open_store(capacity=CAPACITY)
    for epoch in range(40):
        identity = epoch.to_bytes(16, "big")
        assert store_pages(store, page_keys(3, identity=identity), PAGE) == [SetResult.STORED] * 3, epoch
    assert_hits(store, page_keys(3, identity=identity), PAGE)
    assert account_and_walk(store)[0] == account_and_walk(store)[1] <= CAPACITY


def test_capacity_is_shared_by_stores_of_one_directory(open_store, place):
    first, second = open_store(capacity=CAPACITY), open_store(capacity=CAPACITY)
    for number in range(40):
        store_pages(first, [page_key(number)], PAGE)
        store_pages(second, [page_key(number, OTHER_IDENTITY)], PAGE)
        assert first.used_bytes() == second.used_bytes() <= CAPACITY
    assert account_and_walk(first)[0] == account_and_walk(first)[1]


def test_a_smaller_capacity_at_the_next_start_is_kept(open_store, place):
    store = open_store(capacity=4 * CAPACITY)
    for number in range(50):
        store_pages(store, [page_key(number)], PAGE)
    store.close()
    smaller = open_store(capacity=CAPACITY)
    assert store_pages(smaller, [page_key("next")], PAGE) == [SetResult.STORED]
    assert account_and_walk(smaller)[0] == account_and_walk(smaller)[1] <= CAPACITY


# -- an account that is wrong, and the count that puts it right --------------------------------------------------------


def _fill(open_store, pages: int = 100) -> None:
    store = open_store(capacity=CAPACITY)
    for number in range(pages):
        store_pages(store, [page_key(f"old {number}")], PAGE)
    store.close()


def _assert_every_key_works_within_the_capacity(store, place) -> None:
    # The start waits a second at most for the count.
    wait_until(lambda: len(set(account_and_walk(store))) == 1)
    assert account_and_walk(store)[0] == account_and_walk(store)[1] <= CAPACITY
    for number in range(60):
        assert store_pages(store, [page_key(number)], PAGE) == [SetResult.STORED]
        assert account_and_walk(store)[1] <= CAPACITY
        assert_hits(store, [page_key(number)], PAGE)
    assert account_and_walk(store)[0] == account_and_walk(store)[1]


@pytest.mark.thorough
@pytest.mark.parametrize("stored", [0, 4096, CAPACITY, 10**15, -5])
def test_an_old_account_that_a_power_loss_brought_back_is_put_right_by_the_start(open_store, place, stored):
    """The account is not synced. It was believed, and the capacity exceeded for good."""
    _fill(open_store)
    (place / "usage").write_text(json.dumps({"stored": stored, "under_way": {}, "recount": False}) + "\n")
    _assert_every_key_works_within_the_capacity(open_store(capacity=CAPACITY), place)


@pytest.mark.parametrize("how", ["missing", "empty", "zeros", "cut", "grown", "garbage", "another's"])
def test_a_damaged_account_is_put_right_by_the_start(open_store, place, how):
    _fill(open_store)
    usage = place / "usage"
    content = usage.read_bytes()
    damaged = {
        "empty": b"",
        "zeros": bytes(len(content)),
        "cut": content[:20],
        "grown": content.replace(b"\n", b" ") + b" " * (3 << 20),
        "garbage": os.urandom(5000),
        "another's": b"PK\x03\x04 years of work\n",
    }
    usage.unlink() if how == "missing" else usage.write_bytes(damaged[how])
    _assert_every_key_works_within_the_capacity(open_store(capacity=CAPACITY), place)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
def test_an_account_damaged_under_a_server_at_work_keeps_to_the_capacity(open_store, place, seed):
    chance = random.Random(seed)
    store = open_store(capacity=CAPACITY)
    for number in range(80):
        assert store_pages(store, [page_key(number)], PAGE) == [SetResult.STORED]
        assert account_and_walk(store)[1] <= CAPACITY
        if chance.random() < 0.2:
            content = bytearray((place / "usage").read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            (place / "usage").write_bytes(content)
    store._usage.count(store._directory.occupied_parts())
    assert account_and_walk(store)[0] == account_and_walk(store)[1]


def test_a_start_does_not_wait_for_a_long_count_and_keeps_to_the_capacity_meanwhile(open_store, place, monkeypatch):
    _fill(open_store)
    (place / "usage").write_bytes(b"")
    may_end = threading.Event()
    occupied_parts = PageDirectory.occupied_parts

    def slow(directory):
        for share, found in occupied_parts(directory):
            if share > 0.5:
                may_end.wait(60)
            yield share, found

    monkeypatch.setattr(PageDirectory, "occupied_parts", slow)
    monkeypatch.setattr("hicache_ext.storage.tiers.file.pages.store._WAIT_AT_START", 0.05)
    store = open_store(capacity=CAPACITY)
    assert store._usage.in_doubt()
    walked = 0
    for number in range(30):
        assert store_pages(store, [page_key(number)], PAGE) == [SetResult.STORED]
        walked = sum(found for _, found in occupied_parts(store._directory))
        assert walked <= CAPACITY
    assert walked > CAPACITY * 3 // 4, "the cache is not emptied because nobody knows how full it is"
    may_end.set()
    wait_until(lambda: not store._usage.in_doubt())
    # Pages came and went meanwhile, in parts that are not alike here: few pages.
    assert abs(store.used_bytes() - account_and_walk(store)[1]) < CAPACITY // 4


def test_in_a_large_directory_the_pages_just_written_stay(open_store, monkeypatch):
    """Of each part of the directory that was looked at everything went, whatever its age."""
    monkeypatch.setattr("hicache_ext.storage.tiers.file.pages.store._SAMPLE", 64)
    capacity = 12 << 20
    store = open_store(capacity=capacity)
    old, new = page_keys(600, prefix="old"), page_keys(150, prefix="new")
    store_one_by_one(store, old, PAGE)
    now = time.time()
    for key in old:
        os.utime(store._directory.page_path(key), (now - 5000, now - 5000))
    store_pages(store, new, PAGE)
    store.resize(store.used_bytes() - (1 << 20))
    assert store_pages(store, [page_key("one more")], PAGE) == [SetResult.STORED]
    assert sum(store.contains(new)) > 140
    assert sum(store.contains(old)) < 600 - (1 << 20) // 8192 + 40

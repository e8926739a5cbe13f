"""ttl and pins as a user of either layout sees them."""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest

from hicache_ext.page import envelope
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.file import pins
from hicache_ext.storage.tiers.file.pages import store as page_files
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import OTHER_IDENTITY, assert_hits, page_keys, read_pages, store_pages

MIB = 1 << 20
SIZES = (31 << 10,)
"""Takes 32 KiB in either layout."""
LONG = 30.0
HOUR = 3600.0


@pytest.fixture(params=[SlabStore, PageFileStore], ids=["slab", "pages"])
def opened(request, tmp_path, monkeypatch):
    """Opens stores over one directory, and closes them."""
    monkeypatch.setattr(pins, "_LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(pins, "_PAUSE", 0)
    monkeypatch.setattr(pins, "_COUNT_INTERVAL", 0.0)
    stores = []

    def open_one(capacity=64 * MIB, **options):
        stores.append(request.param("disk", tmp_path, capacity=capacity, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def clock(monkeypatch):
    """Wall-clock time runs ahead by ``clock[0]`` seconds, also where a use is noted in a file's times."""
    ahead = [0.0]
    real, utime = time.time, os.utime
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    monkeypatch.setattr(os, "utime", lambda file, times=None: utime(file, times or (time.time(), time.time())))
    return ahead


def hits(store, keys):
    return [result is GetResult.HIT for result in read_pages(store, keys, SIZES)[0]]


# -- ttl ---------------------------------------------------------------------------------------------------------------


def test_a_page_is_a_hit_until_it_is_older_than_the_ttl_and_a_miss_from_then_on(opened, clock):
    store = opened(ttl=HOUR)
    keys = page_keys(8)
    store_pages(store, keys, SIZES)
    clock[0] = HOUR - 60
    assert_hits(store, keys, SIZES)
    clock[0] = HOUR + 1
    assert read_pages(store, keys, SIZES)[0] == [GetResult.MISS] * 8
    assert store.contains(keys) == [False] * 8
    assert store.count_leading(keys) == 0
    assert store.metrics.total("corrupt") == 0


def test_an_expired_page_is_written_anew_and_its_age_begins_anew(opened, clock):
    store = opened(ttl=HOUR)
    keys = page_keys(8)
    store_pages(store, keys, SIZES)
    clock[0] = HOUR + 1
    assert store_pages(store, keys, SIZES) == [SetResult.STORED] * 8
    clock[0] = 2 * HOUR - 60
    assert_hits(store, keys, SIZES)


def test_use_does_not_make_a_page_younger(opened, clock):
    store = opened(ttl=HOUR)
    keys = page_keys(4)
    store_pages(store, keys, SIZES)
    clock[0] = HOUR - 60
    assert_hits(store, keys, SIZES)
    clock[0] = HOUR + 60
    assert not any(hits(store, keys))


def test_a_page_that_a_clock_far_ahead_has_dated_is_a_miss_and_is_written_anew(opened, clock):
    store, keys = opened(ttl=HOUR), page_keys(8)
    clock[0] = 24 * HOUR
    store_pages(store, keys, SIZES)
    assert_hits(store, keys, SIZES)
    clock[0] = 0.0
    assert hits(store, keys) == [False] * 8
    assert store.contains(keys) == [False] * 8
    store_pages(store, keys, SIZES)
    assert_hits(store, keys, SIZES)
    assert store.metrics.total("corrupt") == 0


def test_what_a_clock_that_was_ahead_has_dated_stays_away_once_it_is_cleared(opened, clock):
    store, keys, others = opened(), page_keys(8), page_keys(8, identity=OTHER_IDENTITY)
    clock[0] = HOUR
    store_pages(store, [*keys, *others], SIZES)
    clock[0] = 0.0
    store.clear([keys[0][: envelope.IDENTITY_LENGTH]])
    young = page_keys(4, "young")
    store_pages(store, young, SIZES)
    store.close()
    store = opened()
    assert store.contains(keys) == [False] * 8
    assert_hits(store, [*others, *young], SIZES)


def test_a_clock_that_is_slow_by_less_than_the_ttl_loses_no_page_of_others(opened, clock):
    store, keys = opened(ttl=HOUR), page_keys(8)
    clock[0] = HOUR - 60
    store_pages(store, keys, SIZES)
    clock[0] = 0.0
    assert_hits(store, keys, SIZES)
    clock[0] = 2 * HOUR - 120
    assert_hits(store, keys, SIZES)
    clock[0] = 2 * HOUR
    assert hits(store, keys) == [False] * 8


def test_a_ttl_holds_for_pages_written_before_there_was_one(opened, clock):
    keys = page_keys(4)
    store_pages(opened(), keys, SIZES)
    clock[0] = HOUR + 1
    assert_hits(opened(), keys, SIZES)
    assert not any(hits(opened(ttl=HOUR), keys))


def test_expired_pages_leave_their_slots_to_new_ones_and_none_is_evicted(tmp_path, clock):
    store = SlabStore("disk", tmp_path, capacity=4 * MIB, ttl=HOUR)
    fill(store, 1000, "old")
    evicted = store.metrics.value("evicted", "capacity")
    full = store.fullness()
    assert evicted > 0 and full.pages > 64
    clock[0] = HOUR + 60
    empty = store.fullness()
    assert empty.pages == 0 and empty.free > full.used
    young = page_keys(64, "young")
    fill(store, 64, "young")
    assert_hits(store, young, SIZES)
    assert store.metrics.value("evicted", "capacity") == evicted
    store.close()


def test_expired_page_files_are_deleted_without_anybody_asking_for_them(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(page_files, "_LONGEST_SWEEP_INTERVAL", 0.05)
    monkeypatch.setattr(page_files, "_SHORTEST_SWEEP_INTERVAL", 0.05)
    store = PageFileStore("disk", tmp_path, capacity=64 * MIB, ttl=HOUR)
    old, young = page_keys(40, "old"), page_keys(40, "young")
    store_pages(store, old, SIZES)
    clock[0] = HOUR - 60
    store_pages(store, young, SIZES)
    for file in [*tmp_path.rglob("*.page"), *tmp_path.rglob("*.pack")]:
        # The kernel, which gave them their times, does not run ahead; and use does not make the old ones younger.
        os.utime(file)
    clock[0] = HOUR + 60
    deadline = time.monotonic() + LONG
    while store.metrics.value("evicted", "ttl") < len(old):
        assert time.monotonic() < deadline, "expired pages stay"
        time.sleep(0.01)
    assert_hits(store, young, SIZES)
    assert store.metrics.value("evicted", "ttl") == len(old)
    store.close()


def test_an_expired_page_that_another_writer_replaces_meanwhile_exists(tmp_path, monkeypatch):
    first, second = (PageFileStore("disk", tmp_path, capacity=64 * MIB, ttl=HOUR) for _ in range(2))
    try:
        (key,) = page_keys(1)
        store_pages(first, [key], SIZES)
        os.utime(first._directory.page_path(key), (1, 1))
        remove = first._directory.remove_page

        def remove_late(path, seen=None):
            os.unlink(path)
            assert store_pages(second, [key], SIZES) == [SetResult.STORED]
            return remove(path, seen)

        monkeypatch.setattr(first._directory, "remove_page", remove_late)
        assert store_pages(first, [key], SIZES) == [SetResult.EXISTS]
        assert first.metrics.value("rejected", "obstacle") == 0
        assert hits(first, [key]) == [True]
    finally:
        first.close()
        second.close()


def swept(store: PageFileStore) -> float:
    """Once a sweep is due and done: the seconds until the next look."""
    store._sweep_at = 0.0
    return store._keep_up()


def test_a_sweep_leaves_the_next_one_to_whoever_comes_first(clock, tmp_path):
    stores = [PageFileStore("disk", tmp_path, capacity=64 * MIB, ttl=HOUR) for _ in range(2)]
    descriptors = len(os.listdir("/proc/self/fd"))
    for number, store in enumerate([*stores, *stores]):
        store_pages(store, page_keys(4, f"round {number}"), SIZES)
        clock[0] += HOUR + 60
        swept(store)
        assert not [*tmp_path.rglob("*.page"), *tmp_path.rglob("*.pack")]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for store in stores:
        store.close()


def test_a_sweep_of_a_directory_that_is_gone_ends_and_is_repeated(tmp_path):
    store = PageFileStore("disk", tmp_path / "tier", capacity=64 * MIB, ttl=HOUR)
    shutil.rmtree(tmp_path / "tier")
    assert swept(store) > 0
    store.close()


def test_a_rebuilt_index_knows_how_old_pages_are(tmp_path, clock):
    store = SlabStore("disk", tmp_path, capacity=64 * MIB, ttl=HOUR)
    old, young = page_keys(8, "old"), page_keys(8, "young")
    store_pages(store, old, SIZES)
    clock[0] = HOUR - 60
    store_pages(store, young, SIZES)
    store.close()
    clock[0] = HOUR + 60
    store = SlabStore("disk", tmp_path, capacity=64 * MIB, ttl=HOUR)
    assert store.contains(old) == [False] * 8
    assert_hits(store, young, SIZES)
    store.close()


def test_closing_ends_the_sweeper(opened):
    opened(ttl=HOUR).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-disk-upkeep"]


# -- pins --------------------------------------------------------------------------------------------------------------


def fill(store, count, name="filler"):
    for first in range(0, count, 16):
        store_pages(store, page_keys(count, name)[first : first + 16], SIZES)


def test_pinned_pages_outlive_many_times_the_capacity(opened, tmp_path):
    store = opened(capacity=4 * MIB)
    pinned, unpinned = page_keys(16, "pinned"), page_keys(16, "unpinned")
    store_pages(store, pinned, SIZES)
    store_pages(store, unpinned, SIZES)
    add_pin(tmp_path, "prompt", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    fill(store, 1000)
    assert all(hits(store, pinned))
    assert not all(hits(store, unpinned))
    assert store.metrics.total("evicted") > 500


def test_a_pin_holds_for_every_identity_and_for_pages_written_later(opened, tmp_path):
    store = opened(capacity=4 * MIB)
    pinned = page_keys(8, "pinned", OTHER_IDENTITY)
    add_pin(tmp_path, "prompt", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    fill(store, 200)
    store_pages(store, pinned, SIZES)
    fill(store, 1000, "later")
    assert all(hits(store, pinned))


def test_a_pin_survives_a_restart(opened, tmp_path):
    store = opened(capacity=4 * MIB)
    pinned = page_keys(8, "pinned")
    add_pin(tmp_path, "prompt", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    store_pages(store, pinned, SIZES)
    store.close()
    again = opened(capacity=4 * MIB)
    fill(again, 1000)
    assert all(hits(again, pinned))


def test_pins_of_more_than_half_the_capacity_leave_the_other_half_to_the_rest(opened, tmp_path):
    store = opened(capacity=4 * MIB)
    pinned = page_keys(1000, "pinned")
    add_pin(tmp_path, "everything", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    fill(store, 1000, "pinned")
    fill(store, 400)
    last = page_keys(400, "filler")[-16:]
    assert all(hits(store, last)), "new pages find room"
    assert sum(hits(store, pinned)) * 32 << 10 <= 2 * MIB + 256 * 1024


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [(4 * MIB, 16 * MIB), (16 * MIB, 4 * MIB)], ids=["raised", "lowered"])
def test_pins_take_half_of_a_capacity_that_was_changed(opened, tmp_path, before, after):
    store = opened(capacity=before)
    store.resize(after)
    pinned = page_keys(1000, "pinned")
    add_pin(tmp_path, "everything", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    fill(store, 1000, "pinned")
    fill(store, 1000)
    kept = sum(hits(store, pinned)) * 32 << 10
    assert after // 4 <= kept <= after // 2 + 256 * 1024


def test_what_is_unpinned_goes_like_everything_else(opened, tmp_path):
    store = opened(capacity=4 * MIB)
    pinned = page_keys(16, "pinned")
    add_pin(tmp_path, "prompt", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    store_pages(store, pinned, SIZES)
    fill(store, 300)
    assert all(hits(store, pinned))
    pins.remove_pin(tmp_path, "prompt")
    fill(store, 2000, "later")
    assert not any(hits(store, pinned))


def test_a_ttl_holds_for_pinned_pages_too(opened, tmp_path, clock):
    store = opened(ttl=HOUR)
    pinned = page_keys(4, "pinned")
    add_pin(tmp_path, "prompt", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    store_pages(store, pinned, SIZES)
    clock[0] = HOUR + 1
    assert not any(hits(store, pinned))


def test_a_cleared_identity_loses_its_pinned_pages_too(opened, tmp_path):
    store = opened()
    pinned = page_keys(4, "pinned")
    add_pin(tmp_path, "prompt", [key[envelope.IDENTITY_LENGTH :] for key in pinned], None)
    store_pages(store, pinned, SIZES)
    store.clear(None)
    assert not any(hits(store, pinned))

"""Leases and demotions, which requests ask for: honoured by every process, bounded, over at their time."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.tiers.file import pins
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import PinnedPages, add_lease, add_pin, end_leases, read_pins, remove_pin
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import OTHER_IDENTITY, page_keys, read_pages, store_pages

MIB = 1 << 20
SIZES = (31 << 10,)
"""Takes 32 KiB in either layout."""
HASHES = [bytes([number]) * 32 for number in range(40)]
_SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch):
    monkeypatch.setattr(pins, "_LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(pins, "_COUNT_INTERVAL", 0.0)
    monkeypatch.setattr(pins, "_PAUSE", 0)


@pytest.fixture(params=[SlabStore, PageFileStore], ids=["slab", "pages"])
def opened(request, tmp_path):
    stores = []

    def open_one(capacity=4 * MIB, **options):
        stores.append(request.param("disk", tmp_path, capacity=capacity, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def hits(store, keys):
    return [result is GetResult.HIT for result in read_pages(store, keys, SIZES)[0]]


def hashes_of(keys):
    return [key[IDENTITY_LENGTH:] for key in keys]


def fill(store, count, name="filler"):
    keys = page_keys(count, name)
    for first in range(0, count, 16):
        store_pages(store, keys[first : first + 16], SIZES)


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_lease_on_a_longer_prompt_takes_the_place_of_those_on_its_beginnings(tmp_path):
    assert add_lease(tmp_path, HASHES[:3], 60, "a")
    first = read_pins(tmp_path)[0].created
    time.sleep(0.01)
    assert add_lease(tmp_path, HASHES[:5], 120, "a")
    (lease,) = read_pins(tmp_path)
    assert (lease.hashes, lease.namespace) == (tuple(HASHES[:5]), "a")
    assert lease.created > first, "or who renews would stay before all others"
    # One that would end sooner replaces none that holds longer.
    assert add_lease(tmp_path, HASHES[:8], 10, "a")
    assert sorted(len(lease.hashes) for lease in read_pins(tmp_path)) == [5, 8]
    assert end_leases(tmp_path, HASHES[:9]) == 2
    assert read_pins(tmp_path) == [] and end_leases(tmp_path, HASHES) == 0


def test_hints_never_touch_pins_and_no_pin_can_look_like_a_lease(tmp_path):
    add_pin(tmp_path, "operator", HASHES[:5], None)
    add_lease(tmp_path, HASHES[:5], 60, "")
    assert end_leases(tmp_path, HASHES) == 1
    assert [pin.name for pin in read_pins(tmp_path)] == ["operator"]
    add_lease(tmp_path, HASHES[:5], 60, "")
    (name,) = [pin.name for pin in read_pins(tmp_path) if pin.is_lease]
    with pytest.raises(pins.StoreError):
        add_pin(tmp_path, name, HASHES, None)
    assert remove_pin(tmp_path, name), "an operator may end one"


def test_leases_end_without_anybody_and_their_records_go_with_the_next_one(tmp_path, monkeypatch):
    pages = PinnedPages("disk", tmp_path, None, lambda hashes: [1] * len(hashes))
    add_lease(tmp_path, HASHES[:5], 60, "")
    assert pages.spared() == frozenset(HASHES[:5])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 62)
    assert pages.spared() == frozenset() and len(os.listdir(tmp_path / "pins")) == 1
    add_lease(tmp_path, HASHES[5:6], 60, "")
    assert pages.spared() == frozenset(HASHES[5:6]) and len(os.listdir(tmp_path / "pins")) == 1


def test_there_are_at_most_so_many_leases_and_leased_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "_LEAST_LEASED", 4)
    monkeypatch.setattr(pins, "_MOST_LEASED", 12)
    assert [add_lease(tmp_path, [page], 60, "") for page in HASHES[:4]] == [True, True, True, False]
    assert add_lease(tmp_path, HASHES[2:3], 90, ""), "renewed"
    assert add_lease(tmp_path, HASHES[:10], 90, ""), "three became one"
    assert not add_lease(tmp_path, HASHES[20:23], 90, "")


def test_the_first_lease_of_a_namespace_has_room_at_the_cost_of_who_has_the_most(tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "_LEAST_LEASED", 3)
    monkeypatch.setattr(pins, "_MOST_LEASED", 12)
    for number, whose in enumerate(("crowd", "crowd", "other", "crowd")):
        assert add_lease(tmp_path, HASHES[number : number + 1], 60 + 9 * number, whose)
    assert not add_lease(tmp_path, HASHES[10:11], 60, "crowd")
    assert not add_lease(tmp_path, HASHES[10:22], 60, "large"), "more than the others have"
    assert len(read_pins(tmp_path)) == 4, "a refused lease displaces none"
    assert add_lease(tmp_path, HASHES[11:12], 60, "tenant")
    assert [lease.hashes[0] for lease in read_pins(tmp_path)] == [HASHES[0], HASHES[1], HASHES[2], HASHES[11]]
    assert add_lease(tmp_path, HASHES[12:13], 60, "guest")
    assert not add_lease(tmp_path, HASHES[13:14], 60, "late"), "each has one"


def test_leases_have_what_is_left_beside_a_pin_that_does_not_fit():
    sizes = dict.fromkeys(HASHES, 1) | {HASHES[1]: 100}
    held = [pins.Pin("large", 0, None, (HASHES[0], HASHES[1], HASHES[2])), pins.Pin("more", 0, None, (HASHES[3],))]
    held.append(pins.Pin("@a.9.3.team", 0, 9, tuple(HASHES[4:7])))
    pinned, kept, _ = pins.kept_pages(held, lambda hashes: [sizes[one] for one in hashes], 3)
    assert (pinned, kept) == ({HASHES[0]}, {HASHES[0], HASHES[4], HASHES[5]})


def test_one_namespace_cannot_keep_all_leased_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "_LEAST_LEASED", 1)
    monkeypatch.setattr(pins, "_MOST_LEASED", 12)
    assert add_lease(tmp_path, HASHES[:12], 60, "large")
    assert add_lease(tmp_path, HASHES[12:15], 60, "tenant")
    assert not add_lease(tmp_path, HASHES[:12], 60, "large")
    assert [lease.namespace for lease in read_pins(tmp_path)] == ["tenant"]


def test_who_renews_has_no_place_before_others(tmp_path):
    pages = PinnedPages("disk", tmp_path, 50, lambda hashes: [10] * len(hashes))
    for seconds in (60, 120):
        for number in range(2):
            add_lease(tmp_path, HASHES[number : number + 1], seconds, f"squatter{number}")
        time.sleep(0.01)
        add_lease(tmp_path, HASHES[9:10], 60, "tenant")
    assert HASHES[9] in pages.spared()


def test_a_lease_that_holds_is_not_written_again(tmp_path, monkeypatch):
    written = []
    real = pins.write_whole
    monkeypatch.setattr(pins, "write_whole", lambda file, text: written.append(file) or real(file, text))
    for seconds in (60, 60, 30, 70):
        assert add_lease(tmp_path, HASHES[:5], seconds, "")
    assert len(written) == 2 and len(read_pins(tmp_path)) == 1


def test_leases_of_a_clock_that_was_wrong_are_over(tmp_path):
    now = time.time()
    for hashes, created, until in (
        (HASHES[:1], now, now + 2 * 366 * 86400),
        (HASHES[1:2], 0, 99999999999),
        (HASHES[2:3], now + 7200, now + 9000),
    ):
        name = f"@{hashes[0].hex()[:32]}.{int(until)}.1."
        pins._record(tmp_path, pins.Pin(name, created, until, tuple(hashes)))
    assert read_pins(tmp_path) == []
    assert add_lease(tmp_path, HASHES[3:4], 1e15, "")
    (lease,) = read_pins(tmp_path)
    assert lease.hashes == (HASHES[3],) and remove_pin(tmp_path, lease.name)


def test_what_cannot_be_removed_ends_no_other_lease(tmp_path):
    (tmp_path / "pins" / f"@{'0' * 32}.1.1..json").mkdir(parents=True)
    (tmp_path / "pins" / f"@{HASHES[0].hex()[:32]}.{int(time.time()) + 60}.1..json").mkdir()
    assert add_lease(tmp_path, HASHES[3:6], 60, "")
    assert [lease.hashes for lease in read_pins(tmp_path)] == [tuple(HASHES[3:6])]
    assert end_leases(tmp_path, HASHES) == 1 and read_pins(tmp_path) == []


def test_leases_take_what_pins_leave_of_half_the_capacity_and_namespaces_take_turns(tmp_path):
    # Half of the capacity is 20 pages of 10 bytes.
    pages = PinnedPages("disk", tmp_path, 200, lambda hashes: [10] * len(hashes))
    for number in range(10):
        add_lease(tmp_path, HASHES[number * 3 : number * 3 + 3], 60 + number, "crawler")
    assert pages.spared() == frozenset(HASHES[:20]), "what the others do not want is lent"
    add_lease(tmp_path, HASHES[30:40], 300, "tenant")
    assert pages.spared() >= frozenset(HASHES[30:40]) and len(pages.spared()) == 20
    add_pin(tmp_path, "operator", [bytes([200 + number]) * 32 for number in range(15)], None)
    assert len(pages.spared()) == 20 and frozenset(HASHES[:3]) <= pages.spared()


def test_the_prompt_that_is_wanted_soonest_is_kept_whole(tmp_path):
    pages = PinnedPages("disk", tmp_path, 100, lambda hashes: [10] * len(hashes))
    for first, seconds in ((0, 900), (10, 60), (20, 300)):
        add_lease(tmp_path, HASHES[first : first + 6], seconds, "")
    assert pages.spared() == frozenset(HASHES[10:16] + HASHES[20:24])


def test_a_lease_keeps_the_beginning_that_is_there_and_takes_no_room_for_the_rest(tmp_path):
    gone = set(HASHES[4:6])
    pages = PinnedPages("disk", tmp_path, 100, lambda hashes: [10 * (one not in gone) for one in hashes])
    add_lease(tmp_path, HASHES[:10], 60, "")
    add_lease(tmp_path, HASHES[20:30], 120, "")
    assert pages.spared() == frozenset(HASHES[:4] + HASHES[20:26])


def test_pages_that_other_paths_of_a_tier_have_do_not_end_a_lease(tmp_path):
    here = set(HASHES[::7])
    pages = PinnedPages("disk", tmp_path, None, lambda hashes: [10 * (one in here) for one in hashes])
    add_lease(tmp_path, HASHES, 60, "", 4)
    assert pages.spared() == here
    here = set(HASHES[49::50]) | {HASHES[0]}
    assert pages.spared() == {HASHES[0]}


@pytest.mark.parametrize(("pages", "paths"), [(2, 2), (8, 8), (40, 64)])
def test_a_prompt_of_few_pages_is_kept_on_the_path_that_has_one_of_them(tmp_path, pages, paths):
    there = HASHES[pages - 1]
    of_path = PinnedPages("disk", tmp_path, None, lambda hashes: [10 * (one == there) for one in hashes])
    add_lease(tmp_path, HASHES[:pages], 60, "", paths)
    assert of_path.spared() == {there}


def test_counting_takes_a_small_part_of_the_time_however_often_leases_come(tmp_path, monkeypatch):
    now, counts = [0.0], []
    monkeypatch.setattr(pins, "_PAUSE", 20)
    monkeypatch.setattr(pins.time, "monotonic", lambda: now[0])

    def resident(hashes):
        counts.append(len(hashes))
        now[0] += 0.1
        return [1] * len(hashes)

    pages = PinnedPages("disk", tmp_path, None, resident)
    for number in range(1000):
        now[0] += 0.01
        if number % 10 == 0:
            add_lease(tmp_path, HASHES[number % 40 : number % 40 + 1], 60 + number, "")
            pages.look_soon()
        pages.spared()
    assert 3 <= len(counts) <= now[0] / 2


def test_a_directory_that_fails_is_asked_again_after_a_while_only(tmp_path, monkeypatch):
    asked, stored = [], [0]
    monkeypatch.setattr(pins, "_COUNT_INTERVAL", 60.0)

    def resident(hashes):
        asked.append(len(hashes))
        raise OSError(5, "Input/output error")

    add_lease(tmp_path, HASHES, 60, "")
    pages = PinnedPages("disk", tmp_path, None, resident, lambda: stored[0])
    for stored[0] in range(0, 100_000, 100):
        assert pages.spared() == frozenset()
    assert len(asked) == 1


def test_nothing_but_a_lease_has_the_name_of_one_and_no_time_is_a_truth(tmp_path):
    add_pin(tmp_path, "good", HASHES[:1], None)
    document = (tmp_path / "pins" / "good.json").read_text()
    (tmp_path / "pins" / "@junk.json").write_text(document)
    (tmp_path / "pins" / "early.json").write_text(re.sub('"created": [0-9.]+', '"created": true', document))
    assert [pin.name for pin in read_pins(tmp_path)] == ["good"]


def test_leased_pages_are_counted_again_when_pages_were_stored(tmp_path, monkeypatch):
    stored, there = [0], set()
    monkeypatch.setattr(pins, "_LOOK_INTERVAL", 60.0)
    monkeypatch.setattr(pins, "_COUNT_INTERVAL", 60.0)
    add_lease(tmp_path, HASHES, 60, "")
    size = lambda hashes: [10 * (one in there) for one in hashes]  # noqa: E731
    pages = PinnedPages("disk", tmp_path, None, size, lambda: stored[0])
    assert pages.spared() == frozenset()
    there.update(HASHES[:9])
    assert pages.spared() == frozenset(), "nothing was stored"
    stored[0] = 9
    assert pages.spared() == frozenset(HASHES[:9])


def test_only_records_that_changed_are_read_again(tmp_path, monkeypatch):
    reads: list[str] = []
    real = pins._read_pin
    monkeypatch.setattr(pins, "_read_pin", lambda file: reads.append(file.name) or real(file))
    pages = PinnedPages("disk", tmp_path, None, lambda hashes: [1] * len(hashes))
    for number in range(10):
        add_lease(tmp_path, HASHES[number : number + 1], 60, "")
        pages.spared()
    assert len(reads) == 10
    end_leases(tmp_path, HASHES[:1])
    assert pages.spared() == frozenset(HASHES[1:10]) and len(reads) == 10


# -- eviction ----------------------------------------------------------------------------------------------------------


def test_leased_pages_outlive_many_times_the_capacity_and_go_when_the_lease_is_over(opened, tmp_path, monkeypatch):
    store = opened()
    leased = page_keys(16, "leased", OTHER_IDENTITY)
    add_lease(tmp_path, hashes_of(leased), 60, "")
    store_pages(store, leased, SIZES)
    fill(store, 600)
    assert all(hits(store, leased))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 62)
    fill(store, 1000, "later")
    assert not any(hits(store, leased))


def test_leased_pages_of_several_paths_are_kept_from_the_moment_they_are_leased(tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "_LOOK_INTERVAL", 600.0)
    monkeypatch.setattr(pins, "_COUNT_INTERVAL", 600.0)
    paths = [tmp_path / name for name in "abc"]
    metrics = TierMetrics("disk")
    store = SpreadStore("disk", paths, lambda path, trouble: SlabStore("disk", path, capacity=4 * MIB), metrics)
    try:
        fill(store, 300)
        leased = page_keys(96, "leased", OTHER_IDENTITY)
        store_pages(store, leased, SIZES)
        assert store.lease_pages(hashes_of(leased), 60, "") == 96
        fill(store, 900, "later")
        assert all(hits(store, leased))
        assert store.end_leases(hashes_of(leased)) == 1
        fill(store, 900, "even later")
        assert not any(hits(store, leased))
    finally:
        store.close()


def test_where_leased_pages_are_the_coldest_others_do_not_all_go_at_once(tmp_path):
    store = SlabStore("disk", tmp_path, capacity=32 * MIB)
    leased = page_keys(450, "leased", OTHER_IDENTITY)
    for first in range(0, 450, 150):
        store_pages(store, leased[first : first + 150], SIZES)
        add_lease(tmp_path, hashes_of(leased[first : first + 150]), 600, "")
    most, gone = 0, 0
    for number in range(250):
        before = store.fullness().pages
        store_pages(store, page_keys(8, f"filler-{number}"), SIZES)
        gone += before + 8 - store.fullness().pages
        most = max(most, before + 8 - store.fullness().pages)
    assert gone > 500 and most < 64 and all(hits(store, leased))
    store.close()


def test_demoted_pages_go_first_and_leased_ones_are_not_demoted(opened, tmp_path):
    store = opened()
    demoted, leased, others = page_keys(16, "demoted"), page_keys(16, "leased"), page_keys(64, "others")
    for keys in (others[:32], leased, others[32:], demoted):
        store_pages(store, keys, SIZES)
    add_lease(tmp_path, hashes_of(leased), 60, "")
    assert store.demote_pages(hashes_of([*demoted, *leased, *page_keys(3, "absent")])) == 16
    written = 0
    # Without a use, which would end it.
    while any(store.contains(demoted)) and written < 400:
        fill(store, 16, f"filler-{written}")
        written += 16
        assert not any(store.contains(demoted)) or all(store.contains(others)), "others went before them"
    assert written < 100 and all(hits(store, leased))


def test_a_demoted_page_that_is_used_again_is_like_any_other(tmp_path):
    with_use = SlabStore("disk", tmp_path, capacity=4 * MIB)
    keys = page_keys(16, "demoted")
    fill(with_use, 32)
    store_pages(with_use, keys, SIZES)
    with_use.demote_pages(hashes_of(keys))
    fill(with_use, 16, "between")
    assert all(hits(with_use, keys))
    fill(with_use, 48, "more")
    assert all(hits(with_use, keys))
    with_use.close()


# -- processes ---------------------------------------------------------------------------------------------------------


def _lease_and_wait(place: str, keys: list[bytes], seconds: float, held) -> None:
    add_lease(Path(place), hashes_of(keys), seconds, "")
    held.set()
    time.sleep(600)


def test_a_lease_of_a_process_that_was_killed_holds_until_its_time_and_no_longer(opened, tmp_path):
    store, leased, seconds = opened(), page_keys(8, "leased"), 8.0
    store_pages(store, leased, SIZES)
    held = _SPAWN.Event()
    process = _SPAWN.Process(target=_lease_and_wait, args=(str(tmp_path), leased, seconds, held))
    process.start()
    assert held.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (lease,) = read_pins(tmp_path)
    fill(store, 300)
    assert all(hits(store, leased))
    time.sleep(max(0.0, lease.until - time.time()) + 0.1)
    fill(store, 1000, "later")
    assert not any(hits(store, leased))

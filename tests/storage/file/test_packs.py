"""Packs of page files: small pages that were written together are one file, and yet each page stands for itself."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.page import pack as pack_format
from hicache_ext.page.pack import SMALL, Pack, new_id
from hicache_ext.runtime.background import Backoff
from hicache_ext.storage.contract import pack_index
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.inspector import reason_it_is_bad
from hicache_ext.storage.tiers.file.pages import catalogue
from hicache_ext.storage.tiers.file.pages import packs as packs_module
from hicache_ext.storage.tiers.file.pages import store as page_files
from hicache_ext.storage.tiers.file.pages import store as store_module
from hicache_ext.storage.tiers.file.pages.directory import PageDirectory
from hicache_ext.storage.tiers.file.pages.tree import MOST_PAGES, PackFile, file_name
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    page_key,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.rigs.disk_faults import DiskFaults
from tests.storage.raw_access import RawPack, account_and_walk
from tests.waiting import wait_until

KEYS = page_keys(6)
LARGE = [40_000]


@pytest.fixture
def pack(store, place) -> Path:
    """The file of a pack with the pages ``KEYS``."""
    assert store_pages(store, KEYS) == [SetResult.STORED] * 6
    return _packs(place)[0]


def _packs(place: Path) -> list[Path]:
    return sorted(place.glob("pages/*/*/*.pack"), key=lambda file: file.name)


def _page_files(place: Path) -> list[Path]:
    return list(place.glob("pages/*/*/*.page"))


# -- what becomes a pack -----------------------------------------------------------------------------------------------


def test_pages_that_are_written_together_are_one_file(store, place, pack):
    assert _packs(place) == [pack]
    assert not _page_files(place)
    assert_hits(store, KEYS)
    assert_hits(store, [KEYS[4], KEYS[1], KEYS[5], KEYS[0]])


def test_many_pages_are_packs_that_have_about_as_many_each(store, place):
    keys = page_keys(60)
    assert store_pages(store, keys) == [SetResult.STORED] * 60
    assert [len(RawPack.of(file).hashes) for file in _packs(place)] == [20, 20, 20]
    assert_hits(store, keys)


def test_a_page_alone_and_a_page_that_is_not_small_are_files_of_their_own(store, place):
    store_pages(store, [page_key("alone")])
    store_pages(store, page_keys(2), [SMALL])
    assert len(_page_files(place)) == 3
    assert not _packs(place)


def test_pages_of_other_identities_and_other_sizes_are_in_other_packs(store, place):
    keys = page_keys(2) + page_keys(2, identity=OTHER_IDENTITY)
    assert store_pages(store, keys) == [SetResult.STORED] * 4
    assert len(_packs(place)) == 2
    assert_hits(store, keys)


def test_a_page_that_a_batch_has_twice_is_written_once(store, place):
    results = store_pages(store, [KEYS[0], KEYS[1], KEYS[0]])
    assert results == [SetResult.STORED, SetResult.STORED, SetResult.EXISTS]
    assert [len(RawPack.of(file).hashes) for file in _packs(place)] == [2]


def test_a_pack_takes_a_small_part_of_the_capacity(open_store, place):
    """Packs are evicted whole."""
    store = open_store(capacity=64 * 200_000)
    store_pages(store, page_keys(12), LARGE)
    assert {len(RawPack.of(file).hashes) for file in _packs(place)} == {4}


def test_page_files_of_an_older_release_are_read_and_not_written_again(store, place):
    for key in KEYS[:3]:
        store_pages(store, [key])
    assert store_pages(store, KEYS) == [SetResult.EXISTS] * 3 + [SetResult.STORED] * 3
    assert len(_page_files(place)) == 3
    assert_hits(store, KEYS)
    assert store.contains(KEYS) == [True] * 6
    assert store.count_leading(KEYS) == 6


# -- other stores ------------------------------------------------------------------------------------------------------


def test_what_another_store_packs_is_seen_at_once(store, open_store):
    other = open_store()
    for number in range(20):
        keys = page_keys(3, f"round {number}")
        assert other.contains(keys) == [False] * 3
        store_pages(store, keys)
        assert other.contains(keys) == [True] * 3
        assert store_pages(other, keys) == [SetResult.EXISTS] * 3


def test_a_store_finds_what_many_buckets_hold(open_store, place, monkeypatch):
    monkeypatch.setattr(catalogue, "PACKS_IN_A_BUCKET", 2)
    first = open_store()
    rounds = [page_keys(2, f"round {number}") for number in range(9)]
    for keys in rounds:
        store_pages(first, keys)
    assert len(list(place.glob("pages/*/*"))) == 5
    again = open_store()
    for keys in rounds:
        assert_hits(again, keys)


@pytest.fixture
def stored_in_buckets(open_store, monkeypatch):
    """``stored_in_buckets(20)``: the keys of so many packs, each in a bucket of its own, the oldest first."""

    def store_in_buckets(count: int) -> list[list[bytes]]:
        monkeypatch.setattr(catalogue, "PACKS_IN_A_BUCKET", 1)
        first, rounds = open_store(), [page_keys(2, f"round {number}") for number in range(count)]
        for keys in rounds:
            store_pages(first, keys)
        return rounds

    return store_in_buckets


def test_a_store_that_could_read_only_a_part_finds_the_rest_in_the_background(
    open_store, stored_in_buckets, monkeypatch
):
    monkeypatch.setattr(catalogue, "_AT_ONCE", 0.0)
    rounds = stored_in_buckets(9)
    again = open_store()
    everything = [key for keys in rounds for key in keys]
    again.contains(everything)
    deadline = time.monotonic() + 30
    while not all(again.contains(everything)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_look_up_does_not_wait_until_all_was_read_in_the_background(
    open_store, stored_in_buckets, place, monkeypatch
):
    rounds = stored_in_buckets(60)
    assert len(list(place.glob("pages/*/*"))) == 60
    again, listdir, listed = open_store(), os.listdir, list[Any]()

    def slow(path: Any) -> list[str]:
        listed.append(path)
        time.sleep(0.1)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", slow)
    again._catalogue.of(IDENTITY)
    wait_until(lambda: listed)
    assert again.contains(rounds[-1]) == [True, True]
    assert again.contains(page_keys(2, "absent")) == [False, False]
    assert len(listed) < 60, "of one directory for each bucket, and one above them"


def test_a_page_is_removed_while_the_names_are_read_in_the_background(open_store, stored_in_buckets, monkeypatch):
    """Its bucket may not have been read yet: it would come back."""
    monkeypatch.setattr(catalogue, "_AT_ONCE", 0.0)
    rounds = stored_in_buckets(20)
    again, listdir = open_store(), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: time.sleep(0.02) or listdir(path))
    assert again.remove(rounds[0]) == 2
    assert again.contains([*rounds[0], *rounds[-1]]) == [False, False, True, True]


def test_names_are_read_in_the_background_although_no_thread_was_to_be_had_at_first(
    open_store, stored_in_buckets, monkeypatch
):
    monkeypatch.setattr(catalogue, "_AT_ONCE", -1.0)
    rounds = stored_in_buckets(20)
    again = open_store()
    with monkeypatch.context() as patch:
        patch.setattr(again._catalogue._loop, "wake", lambda *_: False)
        assert again.contains(rounds[0]) == [False, False]
    wait_until(lambda: again.contains(rounds[0]) == [True, True])


def test_a_pack_that_somebody_deleted_is_absent_and_written_again(store, pack):
    assert store.contains(KEYS) == [True] * 6
    pack.unlink()
    assert store.contains(KEYS) == [False] * 6
    assert read_pages(store, KEYS)[0] == [GetResult.MISS] * 6
    assert store_pages(store, KEYS) == [SetResult.STORED] * 6
    assert_hits(store, KEYS)


# -- removal -----------------------------------------------------------------------------------------------------------


def test_a_removed_page_takes_no_neighbour_with_it(store, open_store, place, pack):
    other = open_store()
    assert_hits(other, KEYS)
    assert store.remove([KEYS[0], KEYS[3]]) == 2
    for each in (store, other, open_store()):
        assert each.contains(KEYS) == [False, True, True, False, True, True]
        assert read_pages(each, KEYS)[0][::3] == [GetResult.MISS] * 2
        assert_hits(each, [KEYS[1], KEYS[2], KEYS[4], KEYS[5]])
    assert store_pages(other, KEYS) == [
        SetResult.STORED if number in (0, 3) else SetResult.EXISTS for number in range(6)
    ]
    assert_hits(store, KEYS)


def test_two_stores_that_remove_pages_of_one_pack_remove_both(store, open_store, pack):
    other = open_store()
    assert_hits(other, KEYS)
    assert store.remove(KEYS[:2]) == other.remove(KEYS[2:4]) == 2
    assert store.remove(KEYS[:4]) == other.remove(KEYS[:4]) == 0
    assert store.contains(KEYS) == other.contains(KEYS) == [False] * 4 + [True] * 2


def test_the_last_page_takes_the_pack_with_it(store, place, pack):
    assert store.remove(KEYS) == 6
    assert not _packs(place)
    assert account_and_walk(store)[0] == account_and_walk(store)[1]


def test_a_page_that_is_in_two_packs_is_removed_from_both(store, open_store, place, pack):
    """Two servers wrote it at the same moment."""
    copy = pack.with_name(new_id(int(time.time() * 1000)) + pack.name[22:])
    copy.write_bytes(pack.read_bytes())
    assert store.remove(KEYS[:1]) == 1
    assert open_store().contains(KEYS[:2]) == [False, True]


def test_a_file_of_pages_in_the_other_kind_of_directory_is_none(store, place, pack):
    assert store_pages(store, page_keys(1, "alone")) == [SetResult.STORED]
    (page,) = _page_files(place)
    strays = [page.rename(pack.parent / page.name), pack.rename(page.parent / pack.name)]
    assert list(open_inspector(place).pages()) == []
    assert store._directory.count_pages(64) == 0
    assert store.clear(None) == 0
    assert store._clearing.wait(60)
    aside = [file.name for file in place.glob("tmp/*.clear.not-ours-*/*/*")]
    assert sorted(aside) == sorted(stray.name for stray in strays)


def test_clear_takes_packs_and_leaves_what_is_not_ours(store, place, pack):
    (pack.parent / "notes.txt").write_text("years of work")
    (pack.parent.parent / "README").write_text("more of it")
    assert store.clear([IDENTITY]) == 1
    assert store.contains(KEYS) == [False] * 6
    assert store._clearing.wait(60)
    assert not _packs(place)
    kept = [file.name for file in place.glob("tmp/*.clear.not-ours-*/**/*") if file.is_file()]
    assert sorted(kept) == ["README", "notes.txt"]


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_bad_page_goes_and_its_neighbours_stay(store, open_store, place, pack):
    content = bytearray(pack.read_bytes())
    content[2 * 1128 + 500] ^= 4
    pack.write_bytes(content)
    results, _ = read_pages(store, KEYS)
    assert results == [GetResult.HIT] * 2 + [GetResult.CORRUPT] + [GetResult.HIT] * 3
    assert store.metrics.value("corrupt", "checksum") == 1
    assert open_store().contains(KEYS) == [True] * 2 + [False] + [True] * 3
    assert store_pages(store, KEYS[2:3]) == [SetResult.STORED]
    assert_hits(store, KEYS)


def test_a_cut_pack_loses_what_was_cut_and_no_more(store, pack):
    os.truncate(pack, 3 * 1128 + 100)
    assert store.contains(KEYS) == [True] * 3 + [False] * 3
    assert read_pages(store, KEYS)[0] == [GetResult.HIT] * 3 + [GetResult.CORRUPT] * 3
    assert store_pages(store, KEYS) == [SetResult.EXISTS] * 3 + [SetResult.STORED] * 3
    assert_hits(store, KEYS)


@pytest.mark.parametrize("kind", ["directory", "symlink", "pipe", "empty"])
def test_what_has_the_name_of_a_pack_and_is_none_is_never_present_and_never_waited_for(store, place, pack, kind):
    pack.unlink()
    match kind:
        case "directory":
            pack.mkdir()
        case "symlink":
            pack.symlink_to("/nonexistent")
        case "pipe":
            os.mkfifo(pack)
        case "empty":
            pack.touch()
    assert store.contains(KEYS) == [False] * 6
    assert set(read_pages(store, KEYS)[0]) <= {GetResult.CORRUPT, GetResult.MISS}
    assert store_pages(store, KEYS) == [SetResult.STORED] * 6
    assert_hits(store, KEYS)


@pytest.fixture
def alike(monkeypatch) -> bytes:
    """The key of another page of which names say the same as of the third page."""
    other = page_key("alike")
    short_hash = pack_format.short_hash

    def colliding(key: bytes) -> bytes:
        return short_hash(KEYS[2] if key == other else key)

    for module in (pack_format, packs_module):
        monkeypatch.setattr(module, "short_hash", colliding)
    numbers = pack_format.short_numbers
    monkeypatch.setattr(
        pack_index, "short_numbers", lambda keys: numbers([KEYS[2] if key == other else key for key in keys])
    )
    return other


def test_a_page_with_the_short_hash_of_a_packed_one_is_a_miss_and_can_be_stored(store, pack, alike):
    """The header decides."""
    assert read_pages(store, [alike])[0] == [GetResult.MISS]
    assert store.metrics.total("corrupt") == 0
    assert_hits(store, KEYS[:2])
    store_pages(store, [alike, page_key("another")])
    assert_hits(store, [alike, *KEYS[:2]])


def test_a_removal_of_a_page_with_the_short_hash_of_another_removes_nothing(store, pack, alike):
    assert store.remove([alike]) == 0
    assert_hits(store, KEYS)


def test_a_page_that_was_packed_with_another_size_is_written_again(store, pack):
    assert store_pages(store, KEYS[:2], [900]) == [SetResult.STORED] * 2
    assert_hits(store, KEYS[:2], [900])
    assert_hits(store, KEYS[2:])


@pytest.mark.parametrize("kind", ["cut", "link", "another size", "expired"])
def test_a_page_that_is_written_alone_after_its_pack_went_bad_is_read(store, pack, kind, monkeypatch):
    """The bad pack was looked into first: STORED, then CORRUPT."""
    sizes = [900] if kind == "another size" else [1000]
    if kind == "cut":
        os.truncate(pack, 10)
    if kind == "link":
        pack.unlink()
        pack.symlink_to(".")
    if kind == "expired":
        monkeypatch.setattr(store, "_ttl", 3600.0)
        later = time.time() + 7200
        monkeypatch.setattr(time, "time", lambda: later)
    assert store_pages(store, KEYS[:1], sizes) == [SetResult.STORED]
    monkeypatch.setattr(store, "_ttl", None)
    assert_hits(store, KEYS[:1], sizes)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_a_disk_that_fails_at_random_never_gives_a_wrong_page_or_an_exception(store, place, monkeypatch, seed):
    monkeypatch.setattr(store_module, "NO_SPACE_PAUSES", Backoff(0.0, 0.0))
    keys = page_keys(60)
    calls = (*DiskFaults.CALLS, "rename", "lstat", "listdir", "utime")
    with DiskFaults(place, seed=seed, rate=0.2, calls=calls) as faults:
        for _ in range(15):
            for result in store_pages(store, keys, [2000, 500]):
                assert result is not SetResult.TIMEOUT
            results, payloads = read_pages(store, keys, [2000, 500])
            for key, result, payload in zip(keys, results, payloads, strict=True):
                assert result is not GetResult.HIT or payload == payload_of(key, 2500)
            store.remove(keys[::7])
    # By chance a hundred, more or less.
    assert sum(faults.injected.values()) > 50
    assert account_and_walk(store)[0] >= account_and_walk(store)[1]
    assert all(result.durable for result in store_pages(store, keys, [2000, 500]))
    assert_hits(store, keys, [2000, 500])


# -- capacity, age, pins -----------------------------------------------------------------------------------------------


def _fill(store, name: str, rounds: int) -> list[list[bytes]]:
    batches = [page_keys(4, f"{name} {number}") for number in range(rounds)]
    for keys in batches:
        store_pages(store, keys, LARGE)
    return batches


CAPACITY = 64 * 170_000
"""A pack has four pages of 40,000 bytes."""


def test_the_pack_not_used_for_longest_goes_first_and_whole(open_store, place, raw):
    store = open_store(capacity=CAPACITY)
    read, *old = _fill(store, "old", 8)
    for age, keys in zip(range(7200, 0, -600), (read, *old), strict=False):
        os.utime(raw.places(place, keys[0])[0][0].file, (time.time() - age,) * 2)
    assert_hits(store, read[:1], LARGE)
    number = 0
    while not store.metrics.value("evicted", "capacity"):
        _fill(store, f"more {number}", 1)
        number += 1
    assert store.contains(old[0]) == [False] * 4
    assert store.contains(read + old[-1]) == [True] * 8
    used, walked = account_and_walk(store)
    assert used == walked <= CAPACITY


def test_packs_and_page_files_never_take_more_than_the_capacity(open_store):
    store = open_store(capacity=CAPACITY)
    for number in range(150):
        store_pages(store, page_keys(1 + number % 5, f"round {number}"), LARGE)
        assert store.used_bytes() <= CAPACITY
    assert store.metrics.value("evicted", "capacity") > 0
    used, walked = account_and_walk(store)
    assert used == walked


def test_eviction_of_a_large_directory_goes_over_buckets_and_fan_outs(open_store, monkeypatch):
    monkeypatch.setattr(page_files, "_SAMPLE", 4)
    monkeypatch.setattr(catalogue, "PACKS_IN_A_BUCKET", 3)
    store = open_store(capacity=CAPACITY)
    for number in range(150):
        assert SetResult.REJECTED not in store_pages(store, page_keys(1 + number % 5, f"round {number}"), LARGE)
    used, walked = account_and_walk(store)
    assert used == walked <= CAPACITY


def test_a_pack_that_is_larger_than_it_says_goes_first_and_frees_what_the_account_has_of_it(open_store, place):
    """Its size was taken out of an account that had never heard of it: the disk held more than the capacity."""
    store = open_store(capacity=CAPACITY)
    _fill(store, "old", 3)
    blown_up = _packs(place)[-1]
    os.truncate(blown_up, 1 << 30)
    number = 0
    while blown_up.exists():
        _fill(store, f"more {number}", 1)
        number += 1
        assert number < 200
    used, walked = account_and_walk(store)
    assert used == walked <= CAPACITY


def test_a_pinned_page_keeps_its_pack(open_store, place):
    store = open_store(capacity=CAPACITY)
    pinned, other = _fill(store, "old", 2)
    for file in _packs(place):
        os.utime(file, (time.time() - 3600,) * 2)
    add_pin(place, "prompt", [pinned[1][16:]], None)
    _fill(store, "more", 100)
    assert store.contains(pinned) == [True] * 4
    assert store.contains(other) == [False] * 4


def test_a_pin_counts_the_whole_pack_once(store, place, pack):
    taken = store._directory.occupied_by([key[16:] for key in [page_key("other"), *KEYS]])
    assert taken == [0, 8192, 1, 1, 1, 1, 1]


def test_a_pack_older_than_the_ttl_is_absent_and_is_removed(open_store, place, monkeypatch):
    store = open_store(ttl=3600.0)
    long_ago = time.time() - 7200
    monkeypatch.setattr(time, "time", lambda: long_ago)
    store_pages(store, KEYS)
    monkeypatch.undo()
    store_pages(store, page_keys(3, "young"))
    assert store.contains([*KEYS, *page_keys(3, "young")]) == [False] * 6 + [True] * 3
    assert store._remove_expired(store._upkeep) == 6
    assert len(_packs(place)) == 1
    assert store.metrics.value("evicted", "ttl") == 6
    assert account_and_walk(store)[0] == account_and_walk(store)[1]


def test_a_pack_that_is_not_there_any_more_costs_no_other_page(store, place, raw):
    batches = [page_keys(3, f"batch {number}") for number in range(3)]
    for keys in batches:
        store_pages(store, keys)
    raw.places(place, batches[1][0])[0][0].file.unlink()
    everything = [key for keys in batches for key in keys]
    assert read_pages(store, everything)[0] == [GetResult.HIT] * 3 + [GetResult.MISS] * 3 + [GetResult.HIT] * 3


def test_buckets_that_eviction_has_emptied_go(open_store, place, monkeypatch):
    """Each bucket is made for some hundred packs, and never written to again."""
    monkeypatch.setattr(catalogue, "PACKS_IN_A_BUCKET", 2)
    store = open_store(capacity=CAPACITY)
    _fill(store, "more", 200)
    assert all(any(bucket.iterdir()) for bucket in place.glob("pages/*/*"))
    assert account_and_walk(store)[0] == account_and_walk(store)[1]


def test_the_number_of_pages_is_that_of_page_files_and_of_pages_in_packs_that_live(store, place, pack):
    store_pages(store, [page_key("alone")])
    store.remove(KEYS[2:4])
    assert store.fullness().pages == 5


def test_pages_that_come_during_a_look_are_not_told_of_without_their_bytes(open_store, monkeypatch):
    store, count = open_store(), PageDirectory.count_pages

    def late(directory: PageDirectory, fan_outs: int) -> int:
        store_pages(store, KEYS)
        return count(directory, fan_outs)

    monkeypatch.setattr(PageDirectory, "count_pages", late)
    seen = store.fullness()
    assert seen.pages == len(KEYS)
    assert seen.used > 0


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("footer", ["whole", "damaged", "cut"])
def test_an_inspector_lists_and_reads_the_pages_of_packs(store, place, pack, footer):
    store.remove(KEYS[:1])
    (pack,) = _packs(place)
    if footer == "damaged":
        content = bytearray(pack.read_bytes())
        content[-1] ^= 1
        pack.write_bytes(content)
    if footer == "cut":
        os.truncate(pack, 6 * 1128)
    inspector = open_inspector(place)
    pages = list(inspector.pages())
    assert [page.key for page in pages] == KEYS[1:]
    for page in pages:
        stored = inspector.read(page)
        assert stored is not None
        assert reason_it_is_bad(page, stored) is None


def test_an_inspector_names_a_page_that_is_bad_in_a_pack(store, place, pack):
    content = bytearray(pack.read_bytes())
    content[1128 + 200] ^= 1
    pack.write_bytes(content)
    inspector = open_inspector(place)
    bad = [page.key for page in inspector.pages() if reason_it_is_bad(page, inspector.read(page))]
    assert bad == KEYS[1:2]
    assert store.remove(bad) == 1
    assert_hits(store, [KEYS[0], *KEYS[2:]])


# -- names -------------------------------------------------------------------------------------------------------------

_IDS = st.builds(new_id, st.integers(0, 1 << 43))


@given(_IDS, st.integers(128, SMALL - 1), st.integers(1, MOST_PAGES), st.data())
def test_a_name_of_a_file_tells_pack_and_dead_pages(pack_id, page_bytes, count, data):
    hashes = data.draw(st.binary(min_size=6 * count, max_size=6 * count))
    pack = Pack(pack_id, page_bytes, hashes)
    dead = data.draw(st.integers(0, pack.all_dead - 1))
    name = file_name(pack, dead)
    assert len(name) <= 255
    assert "/" not in name
    assert PackFile.parse(name) == PackFile(pack, dead)


@given(st.text(max_size=80))
def test_other_names_are_no_packs(text):
    assert PackFile.parse(text) is None


def test_a_name_that_says_the_same_in_other_letters_is_no_pack(pack):
    name = pack.name
    assert PackFile.parse(name) is not None
    for wrong in (
        name.replace(".pack", ".0.pack"),
        name.replace(".pack", ".3f.pack"),
        name.replace(".pack", ".01.pack"),
    ):
        assert PackFile.parse(wrong) is None, wrong


# -- copies that could not be read -------------------------------------------------------------------------------------


def test_a_copy_that_somebody_else_has_stored_since_stays_and_is_read(
    open_store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once by key alone: one reader's bad moment took good pages of others away."""
    reader, writer = open_store(), open_store()
    store_pages(reader, KEYS)
    with monkeypatch.context() as disk:
        disk.setattr(packs_module.vectored, "read_into", _fails(errno.EIO))
        for store in (reader, writer):
            assert read_pages(store, KEYS)[0] == [GetResult.ERROR] * 6
    assert store_pages(writer, KEYS) == [SetResult.STORED] * 6
    others = _packs(place)
    assert store_pages(reader, KEYS) == [SetResult.EXISTS] * 6
    assert _packs(place) == others
    assert_hits(reader, KEYS)


def test_an_error_that_says_nothing_about_what_is_stored_takes_nothing_away(
    store, place: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(packs_module.vectored, "read_into", _fails(errno.ESTALE))
        assert read_pages(store, KEYS)[0] == [GetResult.ERROR] * 6
    assert store_pages(store, KEYS) == [SetResult.EXISTS] * 6
    assert _packs(place) == [pack]


def _fails(number: int) -> Callable[..., int]:
    def read_into(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return read_into

"""Slots moved with O_DIRECT where memory is aligned, and without it where it is not; descriptors of dropped slabs."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.devices import IoPlan
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, payload_of, store_pages

MIB = 1 << 20
PAGE = 28 << 10
DIRECT = IoPlan(read="direct", write="direct", threads=2)


@pytest.fixture
def opened(tmp_path):
    stores = []

    def open_one(**options):
        stores.append(SlabStore("disk", tmp_path / "tier", capacity=16 * MIB, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def aligned_pages(count: int, shift: int = 0) -> list[list[memoryview]]:
    """Memory of pages with two segments each, all of them ``shift`` bytes behind a border of 4,096."""
    memory = memoryview(mmap.mmap(-1, count * 2 * PAGE + 4096))
    half = PAGE // 2
    return [
        [memory[shift + n * PAGE : shift + n * PAGE + half], memory[shift + n * PAGE + half : shift + (n + 1) * PAGE]]
        for n in range(count)
    ]


def exchange(store, keys, shift=0) -> None:
    """Write the pages, read them back into other memory, and compare."""
    pages = aligned_pages(len(keys), shift)
    for key, (first, second) in zip(keys, pages, strict=True):
        payload = payload_of(key, PAGE)
        first[:], second[:] = payload[: PAGE // 2], payload[PAGE // 2 :]
    assert store.set(PageBatch(keys, pages)) == [SetResult.STORED] * len(keys)
    back = aligned_pages(len(keys), shift)
    assert store.get(PageBatch(keys, back)) == [GetResult.HIT] * len(keys)
    assert [b"".join(segments) for segments in back] == [payload_of(key, PAGE) for key in keys]


def direct_descriptors(place) -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        if _link(name).startswith(str(place)):
            facts = Path(f"/proc/self/fdinfo/{name}").read_text().split()
            count += bool(int(facts[facts.index("flags:") + 1], 8) & os.O_DIRECT)
    return count


def test_aligned_pages_move_with_o_direct(opened, tmp_path):
    store = opened(plan=DIRECT)
    exchange(store, page_keys(40))
    assert store.metrics.value("io", "unaligned") == 0
    assert direct_descriptors(tmp_path) > 0


def test_pages_that_are_not_aligned_move_without_and_are_counted(opened):
    store = opened(plan=DIRECT)
    exchange(store, page_keys(40), shift=64)
    assert store.metrics.value("io", "unaligned") == 80


@pytest.mark.parametrize("mode", ["dontcache", "buffered"])
def test_pages_written_in_one_mode_are_read_in_any_other(opened, mode):
    keys = page_keys(40)
    exchange(opened(plan=IoPlan(read=mode, write=mode)), keys)
    store = opened(plan=DIRECT)
    back = aligned_pages(len(keys))
    assert store.get(PageBatch(keys, back)) == [GetResult.HIT] * len(keys)
    assert [b"".join(segments) for segments in back] == [payload_of(key, PAGE) for key in keys]


def test_a_file_system_that_refuses_direct_io_after_all_costs_nothing_but_the_mode(opened, monkeypatch):
    store = opened(plan=DIRECT)
    real = os.open

    def refuse(path, flags, *rest, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    exchange(store, page_keys(40))
    assert store.metrics.value("io", "unaligned") == 80


@pytest.mark.thorough
def test_descriptors_of_dropped_slabs_are_closed_also_those_that_another_store_dropped(opened, tmp_path):
    one, other = opened(), opened()
    for round_number in range(30):
        # Another slot size each time: slabs of the others are taken away for it.
        size = (12 + 4 * (round_number % 5)) << 10
        for store in (one, other):
            keys = page_keys(600, f"{round_number}-{store is one}")
            for first in range(0, 600, 100):
                store_pages(store, keys[first : first + 100], (size,))
    assert_hits(one, keys[-10:], (size,))
    files = len(list((tmp_path / "tier" / "v3" / "slabs").iterdir()))
    held = [_link(name) for name in os.listdir("/proc/self/fd")]
    assert len([name for name in held if "/slabs/" in name]) <= 2 * files


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""

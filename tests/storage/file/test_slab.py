"""What the slab layout promises beyond the PageStore contract: capacity, sharing, rebuilding, growing."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ext.errors import StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab import allocator
from hicache_ext.storage.tiers.file.slab.directory import SlabDirectory
from hicache_ext.storage.tiers.file.slab.index_words import SEAL
from hicache_ext.storage.tiers.file.slab.shapes import SlotReference
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import IDENTITY, HostPages, page_keys, payload_of, read_pages, store_pages
from tests.campaigns.slab_insides import faults
from tests.rigs.bare_index import counts
from tests.rigs.disk_faults import core_through_python
from tests.waiting import wait_until

MIB = 1 << 20
SIZES = (65_536, 65_536)
SIZE = sum(SIZES)


def open_store(directory: Path, capacity: int = 64 * MIB) -> SlabStore:
    return SlabStore("disk", directory, capacity=capacity)


def occupied(directory: Path) -> int:
    taken = 0
    for file in directory.rglob("*"):
        with suppress(FileNotFoundError):
            taken += file.stat().st_blocks * 512 if file.is_file() else 0
    return taken


def sound(store: SlabStore) -> bool:
    return faults(store._directory.path) == []


def slabs_of(directory: Path) -> Path:
    return directory / "v3" / "slabs"


def place_of(store: SlabStore, key: bytes) -> SlotReference:
    (place,) = store._directory.index.locate([key]).pages()
    return place


def headers_of(store: SlabStore, place: SlotReference) -> Path:
    (headers,) = slabs_of(store._directory.path).glob(f"{place.slab:08x}-*.headers")
    return headers


def assert_right(store: SlabStore, keys: list[bytes], sizes: tuple[int, ...] = SIZES) -> list[GetResult]:
    """Reads; whatever is a hit must be the page."""
    results, payloads = read_pages(store, keys, sizes)
    for key, result, payload in zip(keys, results, payloads, strict=True):
        assert result in (GetResult.HIT, GetResult.MISS)
        assert result is GetResult.MISS or payload == payload_of(key, sum(sizes))
    return results


def test_the_directory_stays_within_its_capacity_while_four_times_as_much_is_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = page_keys(2000)
    for first in range(0, len(keys), 100):
        assert set(store_pages(store, keys[first : first + 100], SIZES)) == {SetResult.STORED}
        assert occupied(tmp_path) <= 64 * MIB
    results = assert_right(store, keys)
    # What is there is what was written last, and it fills the capacity.
    assert results[-300:] == [GetResult.HIT] * 300
    assert results.count(GetResult.HIT) * SIZE > 0.85 * 64 * MIB
    assert sound(store)
    store.close()


def test_a_chain_longer_than_the_tier_leaves_its_beginning_there(tmp_path: Path) -> None:
    """Each part of it took the place of the part before, and then nothing of it was served but what came before that
    one; what was there earlier is colder, and makes room."""
    store = open_store(tmp_path)
    earlier, chain = page_keys(100), page_keys(2000, "long")
    store_pages(store, earlier, SIZES)
    results = store_pages(store, chain, SIZES)
    stored = results.count(SetResult.STORED)
    assert results == [SetResult.STORED] * stored + [SetResult.REJECTED] * (len(chain) - stored)
    assert stored * SIZE > 0.85 * 64 * MIB
    assert assert_right(store, chain).count(GetResult.HIT) == store.count_leading(chain) == stored
    assert GetResult.HIT not in assert_right(store, earlier)
    # And once more, with all that it has before.
    assert set(store_pages(store, chain, SIZES)[stored:]) == {SetResult.REJECTED}
    assert store.count_leading(chain) == stored
    # Another chain has what it needs.
    others = page_keys(200, "other")
    assert set(store_pages(store, others, SIZES)) == {SetResult.STORED}
    assert store.count_leading(others) == 200
    store.close()


def test_a_prompt_that_is_there_in_part_takes_room_from_a_model_that_is_gone(tmp_path: Path) -> None:
    """Its first pages keep the others from their own slots, and not from those of colder pages of another size."""
    store = open_store(tmp_path)
    store_pages(store, page_keys(2000, "gone"), SIZES)
    large = tuple(3 * size for size in SIZES)
    prompt = page_keys(100)
    assert store_pages(store, prompt[:4], large) == [SetResult.STORED] * 4
    assert store_pages(store, prompt, large) == [SetResult.EXISTS] * 4 + [SetResult.STORED] * 96
    store.close()


def test_a_page_written_anew_into_the_slot_it_was_read_from_is_no_corrupt_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted after the look-up, its slot another page's while it is read, and it is back before anybody looks."""
    store = open_store(tmp_path)
    (key,) = page_keys(1)
    store_pages(store, [key], SIZES)
    # The native core reads it first, then the code that tells what is wrong, then the one that would remove it.
    real, reads, bad = os.preadv, [], 2

    def read_too_late(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if sum(buffer.nbytes for buffer in buffers) == 128:
            # The header of the page that is read, to say what is wrong with it.
            return real(fd, buffers, offset, flags)
        reads.append(offset)
        if len(reads) > bad:
            return real(fd, buffers, offset, flags)
        mine = os.pread(fd, SIZE, offset)
        os.pwrite(fd, mine[: len(mine) // 2][::-1] + mine[len(mine) // 2 :], offset)
        try:
            return real(fd, buffers, offset, flags)
        finally:
            os.pwrite(fd, mine, offset)

    with core_through_python():
        monkeypatch.setattr(os, "preadv", read_too_late)
        assert assert_right(store, [key]) == [GetResult.HIT]
    assert len(reads) == bad + 1
    assert store.metrics.total("corrupt") == 0
    assert assert_right(store, [key]) == [GetResult.HIT]
    assert sound(store)
    store.close()


def test_pages_that_are_read_stay_when_others_go(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    wanted, others = page_keys(50, "wanted"), page_keys(3000, "other")
    store_pages(store, wanted, SIZES)
    for first in range(0, len(others), 100):
        store_pages(store, others[first : first + 100], SIZES)
        read_pages(store, wanted, SIZES)
    assert assert_right(store, wanted) == [GetResult.HIT] * 50
    store.close()


def test_of_one_batch_the_tail_goes_before_the_head(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    chain = page_keys(100, "chain")
    store_pages(store, chain, SIZES)
    for first in range(0, 1000, 50):
        store_pages(store, page_keys(50, f"other {first}"), SIZES)
        present = store.contains(chain)
        assert present == sorted(present, reverse=True), "there is a gap in the chain"
        if not all(present) and any(present):
            break
    else:
        pytest.fail("the chain never was partly evicted")
    store.close()


def test_who_comes_when_nobody_is_left_finds_the_pages_by_their_headers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = page_keys(200)
    store_pages(store, keys, SIZES)
    store.remove(keys[:10])
    store.close()
    store = open_store(tmp_path)
    assert assert_right(store, keys) == [GetResult.MISS] * 10 + [GetResult.HIT] * 190
    assert sound(store)
    assert set(store_pages(store, page_keys(300, "new"), SIZES)) == {SetResult.STORED}
    assert sound(store)
    store.close()


def spoil(store: SlabStore, key: bytes, *, seal: bool = False, header: bool = False) -> None:
    place = place_of(store, key)
    if seal:
        store._directory.index.memory.rows[place.row, SEAL] ^= 1
    if header:
        with headers_of(store, place).open("r+b") as file:
            file.seek(place.slot * 128 + 20)
            file.write(b"\xff\xff")


@pytest.mark.parametrize("header", [False, True])
def test_a_page_whose_seal_is_damaged_is_refused_and_written_anew(tmp_path: Path, header: bool) -> None:
    store = open_store(tmp_path)
    keys = page_keys(20)
    store_pages(store, keys, SIZES)
    for key in keys[3:6]:
        spoil(store, key, seal=True, header=header)
    results, _ = read_pages(store, keys, SIZES)
    assert results == [GetResult.HIT] * 3 + [GetResult.CORRUPT] * 3 + [GetResult.HIT] * 14
    assert store.metrics.value("corrupt", "header_checksum" if header else "seal") == 3
    assert store_pages(store, keys, SIZES) == [SetResult.EXISTS] * 3 + [SetResult.STORED] * 3 + [SetResult.EXISTS] * 14
    assert assert_right(store, keys) == [GetResult.HIT] * 20
    assert sound(store)
    store.close()


def test_a_damaged_header_costs_a_rebuild_its_page_and_no_other(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = page_keys(20)
    store_pages(store, keys, SIZES)
    spoil(store, keys[7], header=True)
    assert assert_right(store, keys) == [GetResult.HIT] * 20
    store.close()
    store = open_store(tmp_path)
    assert assert_right(store, keys) == [GetResult.HIT] * 7 + [GetResult.MISS] + [GetResult.HIT] * 12
    assert sound(store)
    store.close()


@pytest.mark.parametrize("earlier", [10_000, 1])
@pytest.mark.parametrize("older", [3, 17, 60])
@pytest.mark.parametrize("newer", [9, 50])
def test_of_several_slots_with_one_page_a_rebuild_takes_the_newest(
    tmp_path: Path, older: int, newer: int, earlier: int
) -> None:
    """The header of a page that was evicted is still there while the next one is written into its slot. ``earlier``: so
    many ms. There are several slabs of 31 slots."""
    store = open_store(tmp_path)
    keys = page_keys(70)
    store_pages(store, keys, SIZES)
    assert len(store._directory.index.view().slabs) > 2
    place, key = place_of(store, keys[older]), keys[newer]
    written_in = place_of(store, key)
    overwritten, written = headers_of(store, place), headers_of(store, written_in)
    store.close()
    created = envelope.decode_header(written.read_bytes()[written_in.slot * 128 :]).created_ms
    with overwritten.open("r+b") as opened:
        opened.seek(place.slot * 128)
        content = memoryview(payload_of(key, SIZE))
        opened.write(envelope.encode_header(key, [content], created_ms=created - earlier))
    store = open_store(tmp_path)
    expected = [GetResult.HIT] * 70
    expected[older] = GetResult.MISS
    assert assert_right(store, keys) == expected
    assert store._directory.index.found == 69
    assert sound(store)
    store.close()


@pytest.mark.parametrize("headers", ["none", "cut", "empty"])
def test_a_slab_whose_headers_were_deleted_or_cut_can_be_written_again(tmp_path: Path, headers: str) -> None:
    store = open_store(tmp_path)
    keys = page_keys(60)
    store_pages(store, keys[:20], SIZES)
    store.close()
    (file,) = slabs_of(tmp_path).glob("*.headers")
    if headers == "none":
        file.unlink()
    else:
        os.truncate(file, 5 * 128 if headers == "cut" else 0)
    store = open_store(tmp_path)
    left = 5 if headers == "cut" else 0
    assert assert_right(store, keys[:20]) == [GetResult.HIT] * left + [GetResult.MISS] * (20 - left)
    assert set(store_pages(store, keys, SIZES)) <= {SetResult.STORED, SetResult.EXISTS}
    assert assert_right(store, keys) == [GetResult.HIT] * 60
    assert sound(store)
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_loss_a_page_is_right_or_a_miss(tmp_path: Path, seed: int) -> None:
    """Blocks of slots and of headers are as they were some time before, each by itself, as a cache leaves them that was
    written back in part."""
    chance = random.Random(seed)
    store = open_store(tmp_path, 8 * MIB)
    size = (20_000,)
    keys = page_keys(600)
    for first in range(0, 300, 30):
        store_pages(store, keys[first : first + 30], size)
    before = {path: path.read_bytes() for path in slabs_of(tmp_path).iterdir()}
    assert len(before) > 10
    for first in range(150, 600, 30):
        store_pages(store, chance.sample(keys[first : first + 30], 25), size)
    store.close()
    for path, content in before.items():
        if path.exists():
            with path.open("r+b") as file:
                for begin in range(0, len(content), 4096):
                    if chance.random() < 0.3:
                        file.seek(begin)
                        file.write(content[begin : begin + 4096])
    store = open_store(tmp_path, 8 * MIB)
    assert sound(store)
    for _ in range(2):
        results, payloads = read_pages(store, keys, size)
        for key, result, payload in zip(keys, results, payloads, strict=True):
            assert result in (GetResult.HIT, GetResult.MISS, GetResult.CORRUPT)
            assert result is not GetResult.HIT or payload == payload_of(key, size[0])
        assert results.count(GetResult.HIT) > 30
    # What was damaged was found by the first read.
    assert GetResult.CORRUPT not in results
    assert store.metrics.total("corrupt") > 10
    assert SetResult.ERROR not in store_pages(store, keys[:60], size)
    assert assert_right(store, keys[:60], size) == [GetResult.HIT] * 60
    assert sound(store)
    store.close()


def test_headers_without_a_slab_are_deleted(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (slabs_of(tmp_path) / "00000007-135168.headers").write_bytes(bytes(4096))
    (slabs_of(tmp_path) / "a stranger's.headers").write_bytes(bytes(4096))
    open_store(tmp_path).close()
    assert [path.name for path in slabs_of(tmp_path).iterdir()] == ["a stranger's.headers"]


def test_no_file_stays_of_a_slab_for_whose_slots_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    real = os.posix_fallocate

    def almost_full(fd: int, offset: int, length: int) -> None:
        if length > MIB:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", almost_full)
    assert store_pages(store, page_keys(10), SIZES) == [SetResult.REJECTED] * 10
    assert list(slabs_of(tmp_path).iterdir()) == []
    monkeypatch.undo()
    wait_until(lambda: store_pages(store, page_keys(10), SIZES) == [SetResult.STORED] * 10)
    assert sound(store)
    store.close()


def test_of_a_dropped_slab_both_files_go_though_one_of_them_fails(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store_pages(store, page_keys(10), SIZES)
    directory = store._directory
    (slab,) = directory.index.all_slabs()
    (slots,) = slabs_of(tmp_path).glob("*.slab")
    slots.unlink()
    slots.mkdir()
    with pytest.raises(IsADirectoryError):
        directory.delete_slab_files(slab)
    assert list(slabs_of(tmp_path).iterdir()) == [slots]
    store.close()


def test_an_error_on_one_header_is_of_that_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    keys = page_keys(20)
    store_pages(store, keys, SIZES)
    spoil(store, keys[3], seal=True)
    real = os.preadv

    def fail(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if sum(buffer.nbytes for buffer in buffers) == 128:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", fail)
    results, _ = read_pages(store, keys, SIZES)
    assert results == [GetResult.HIT] * 3 + [GetResult.CORRUPT] + [GetResult.HIT] * 16
    monkeypatch.undo()
    assert sound(store)
    store.close()


@pytest.mark.parametrize("claimed", [SIZE - 1, SIZE + 1, 16 * SIZE])
def test_a_batch_that_is_wrong_about_its_sizes_writes_nothing(tmp_path: Path, claimed: int) -> None:
    """What is longer than its slot would be in the next one, too."""
    store = open_store(tmp_path)
    keys = page_keys(20)
    store_pages(store, keys[:10], SIZES)
    pages = HostPages([SIZES] * 10)
    assert store.set(PageBatch(keys[10:], pages.buffers, [claimed] * 10)) == [SetResult.ERROR] * 10
    assert assert_right(store, keys) == [GetResult.HIT] * 10 + [GetResult.MISS] * 10
    assert counts(store._directory.index)["pending"] == 0
    store.close()


def test_cleared_pages_do_not_come_back_with_a_rebuild(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = page_keys(50)
    store_pages(store, keys, SIZES)
    assert store.clear([IDENTITY]) == 1
    assert store.contains(keys) == [False] * 50
    store.close()
    store = open_store(tmp_path)
    assert store.contains(keys) == [False] * 50
    store.close()


def test_what_is_written_after_a_clear_stays_while_the_disk_is_freed(tmp_path: Path) -> None:
    """Another writer may be at work in a slab that has just lost its last page."""
    store, other = open_store(tmp_path), open_store(tmp_path)
    for number in range(30):
        keys = page_keys(10, f"after {number}")
        assert set(store_pages(other, keys[:5], SIZES)) == {SetResult.STORED}
        store.clear(None)
        assert set(store_pages(other, keys[5:], SIZES)) == {SetResult.STORED}
        assert other._clearing.wait(30) and store._clearing.wait(30)
        assert store.contains(keys) == [False] * 5 + [True] * 5
        assert GetResult.MISS not in assert_right(store, keys[5:])
    store.clear(None)
    assert store._clearing.wait(30)
    assert list(slabs_of(tmp_path).iterdir()) == []
    assert sound(other)
    store.close()
    other.close()


def test_another_page_size_takes_over_from_one_that_is_no_longer_used(tmp_path: Path) -> None:
    """A model that is gone must not keep its share of the capacity for ever."""
    store = open_store(tmp_path)
    old, new = page_keys(600, "old"), page_keys(4000, "new")
    store_pages(store, old, SIZES)
    sizes = (12_288,)
    for first in range(0, len(new), 100):
        assert SetResult.REJECTED not in store_pages(store, new[first : first + 100], sizes)
        assert occupied(tmp_path) <= 64 * MIB
    assert assert_right(store, new, sizes).count(GetResult.HIT) > 2000
    assert_right(store, old)
    assert sound(store)
    store.close()


def test_two_stores_of_one_process_and_another_process_share_a_directory(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    keys = page_keys(10)
    store_pages(first, keys[:5], SIZES)
    first.close()
    assert second.contains(keys) == [True] * 5 + [False] * 5
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.storage.file.test_slab import *\n"
        "store = open_store(Path(sys.argv[1]))\nkeys = page_keys(10)\n"
        "assert store.contains(keys) == [True] * 5 + [False] * 5\n"
        "store_pages(store, keys, SIZES)\nstore.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert assert_right(second, keys) == [GetResult.HIT] * 10
    second.close()


def test_a_capacity_that_is_raised_is_used_and_one_that_is_lowered_is_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path, 32 * MIB)
    keys = page_keys(1200)
    store_pages(store, keys[:400], SIZES)
    store.close()
    store = open_store(tmp_path, 64 * MIB)
    store_pages(store, keys[400:800], SIZES)
    assert 40 * MIB < occupied(tmp_path) <= 64 * MIB
    store.close()
    store = open_store(tmp_path, 16 * MIB)
    assert occupied(tmp_path) <= 16 * MIB
    assert set(store_pages(store, keys[800:850], SIZES)) == {SetResult.STORED}
    assert occupied(tmp_path) <= 16 * MIB
    assert_right(store, keys)
    assert sound(store)
    store.close()


def test_a_page_larger_than_the_capacity_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, 4 * MIB)
    assert store_pages(store, page_keys(1), (8 * MIB,)) == [SetResult.REJECTED]
    assert sound(store)
    store.close()


def test_a_full_disk_is_a_refused_write_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    keys = page_keys(100)
    store_pages(store, keys[:10], SIZES)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    results = store_pages(store, keys, SIZES)
    monkeypatch.undo()
    assert set(results) <= {SetResult.STORED, SetResult.EXISTS, SetResult.REJECTED}
    assert results[:10] == [SetResult.EXISTS] * 10
    assert_right(store, keys)
    assert sound(store)
    wait_until(lambda: SetResult.REJECTED not in store_pages(store, keys, SIZES))
    store.close()


def test_files_that_cannot_be_looked_at_after_a_write_are_an_error_of_the_disk_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(allocator, "_FILES_INTERVAL", 0.0)
    errors = store.metrics.total("error")

    def fail(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(SlabDirectory, "has_files", fail)
    keys = page_keys(10)
    assert store_pages(store, keys, SIZES) == [SetResult.STORED] * 10
    assert store.metrics.total("error") > errors
    assert assert_right(store, keys) == [GetResult.HIT] * 10
    store.close()


def test_a_slab_that_cannot_be_deleted_counts_towards_the_capacity_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store_pages(store, page_keys(40), SIZES)
    monkeypatch.setattr(allocator, "_FILES_INTERVAL", 0.0)
    errors = store.metrics.total("error")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(SlabDirectory, "delete_slab_files", fail)
        store.resize(2 * MIB)
        assert store.metrics.total("error") > errors
        assert store_pages(store, page_keys(10, "later"), (4096,)) == [SetResult.REJECTED] * 10
    # A write looks for what was left, and the next one has the room.
    store_pages(store, page_keys(10, "later"), (4096,))
    assert store_pages(store, page_keys(10, "later"), (4096,)) == [SetResult.STORED] * 10
    assert occupied(tmp_path) <= 2 * MIB
    assert sound(store)
    store.close()


def test_a_lower_capacity_is_kept_soon_while_pages_are_written_all_the_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, 32 * MIB)
    keys, stop = page_keys(3000), threading.Event()

    def use(seed: int) -> None:
        choice = random.Random(seed)
        while not stop.is_set():
            store_pages(store, choice.sample(keys, 200), (12_000,))

    with ThreadPoolExecutor(4) as threads:
        users = [threads.submit(use, seed) for seed in range(4)]
        try:
            wait_until(lambda: occupied(slabs_of(tmp_path)) > 24 * MIB)
            store.resize(8 * MIB)
            wait_until(lambda: occupied(slabs_of(tmp_path)) <= 8 * MIB)
        finally:
            stop.set()
        for user in users:
            user.result()
    assert sound(store)
    assert store_pages(store, page_keys(3, "later"), (12_000,)) == [SetResult.STORED] * 3
    assert occupied(slabs_of(tmp_path)) <= 8 * MIB
    store.close()


def test_a_slab_with_a_page_under_way_is_dropped_after_a_later_write(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store_pages(store, page_keys(100), SIZES) == [SetResult.STORED] * 100
    index = store._directory.index
    assert len(index.all_slabs()) > 2
    ticket = index.next_ticket()
    rows, *_ = index.take(SIZE, 1, ticket, 0, np.empty(0, np.int64), evicting=True)
    (busy,) = index.places_of(rows)[0].tolist()
    store.resize(2 * MIB)
    assert [slab.number for slab in index.all_slabs()] == [busy]
    assert store_pages(store, page_keys(3, "later"), SIZES) == [SetResult.REJECTED] * 3
    index.give_back(rows, ticket)
    store_pages(store, page_keys(3, "later"), SIZES)
    assert index.all_slabs() == []
    assert store_pages(store, page_keys(3, "later"), SIZES) == [SetResult.STORED] * 3
    assert occupied(slabs_of(tmp_path)) <= 2 * MIB
    store.close()


def test_a_process_that_cannot_have_the_memory_of_an_index_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", fail)
        with pytest.raises(StoreSetupError, match="Too many open files"):
            open_store(tmp_path)
    open_store(tmp_path).close()


def test_a_directory_of_the_other_layout_is_refused_with_a_sentence(tmp_path: Path) -> None:
    PageFileStore("disk", tmp_path / "a", capacity=None).close()
    with pytest.raises(StoreSetupError, match="holds format 2, layout 'pages'"):
        open_store(tmp_path / "a")
    open_store(tmp_path / "b").close()
    with pytest.raises(StoreSetupError, match=r"holds format [23], layout 'slab'"):
        PageFileStore("disk", tmp_path / "b", capacity=None)


def test_an_opening_that_fails_for_want_of_descriptors_leaves_none_and_no_thread(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as beside:
        store_pages(beside, page_keys(3), SIZES)
    # Other tests may have left gaps between descriptors, which would serve below any limit.
    gaps = set(range(max(map(int, os.listdir("/proc/self/fd"))))) - set(map(int, os.listdir("/proc/self/fd")))
    filled = [os.open("/dev/null", os.O_RDONLY) for _ in gaps]
    fds, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The one that listed them is closed by now.
    limit, failed, opened = len(fds) - 1, 0, None
    while opened is None:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            opened = open_store(tmp_path)
        except StoreSetupError:
            failed, limit = failed + 1, limit + 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if opened is None:
            assert set(os.listdir("/proc/self/fd")) <= fds
            assert set(threading.enumerate()) <= threads
    opened.close()
    for fd in filled:
        os.close(fd)
    assert failed > 8


def test_an_index_that_cannot_be_shared_for_want_of_a_thread_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = BackgroundLoop.wake
    with monkeypatch.context() as patched:
        patched.setattr(BackgroundLoop, "wake", lambda loop: loop._name != "hicache-index-sharing" and wake(loop))
        with pytest.raises(StoreSetupError, match="no thread to be had"):
            open_store(tmp_path)
    open_store(tmp_path).close()

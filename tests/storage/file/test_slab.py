"""What the slab layout promises beyond the PageStore contract: capacity, sharing, rebuilding, growing."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache_ext.errors import StoreSetupError
from hicache_ext.page import envelope
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.opening import open_file_tier
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab.compiled_code import compiled_code
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.records import INDEX_VERSION, Slab
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import IDENTITY, HostPages, page_keys, payload_of, read_pages, store_pages
from tests.campaigns import kill_slabs
from tests.rigs.disk_faults import compiled_code_through_python

MIB = 1 << 20
SIZES = (65_536, 65_536)
SIZE = sum(SIZES)


def open_store(directory: Path, capacity: int = 64 * MIB) -> SlabStore:
    return SlabStore("disk", directory, capacity=capacity)


def occupied(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.rglob("*") if file.is_file())


def sound(store: SlabStore) -> bool:
    return store._directory.index.check() == []


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


def test_a_page_written_anew_into_the_slot_it_was_read_from_is_no_corrupt_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted after the look-up, its slot another page's while it is read, and it is back before anybody looks."""
    store = open_store(tmp_path)
    (key,) = page_keys(1)
    store_pages(store, [key], SIZES)
    # Compiled code reads it first, then the code that tells what is wrong, then the one that would remove it.
    real, reads, bad = os.preadv, [], 2 if compiled_code() else 1

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

    with compiled_code_through_python():
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
    for first in range(0, 400, 50):
        store_pages(store, page_keys(50, f"other {first}"), SIZES)
        present = store.contains(chain)
        assert present == sorted(present, reverse=True), "there is a gap in the chain"
        if not all(present) and any(present):
            break
    else:
        pytest.fail("the chain never was partly evicted")
    store.close()


def test_an_index_that_is_lost_is_rebuilt_from_the_envelopes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = page_keys(200)
    store_pages(store, keys, SIZES)
    store.remove(keys[:10])
    store.close()
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "trust").write_text("another boot")
    store = open_store(tmp_path)
    assert assert_right(store, keys)[10:] == [GetResult.HIT] * 190
    assert sound(store)
    assert set(store_pages(store, page_keys(300, "new"), SIZES)) == {SetResult.STORED}
    assert sound(store)
    store.close()


def spoil(store: SlabStore, key: bytes, *, seal: bool = False, header: bool = False) -> None:
    index = store._directory.index
    place = index.find(key)
    assert place is not None
    slab = next(slab for slab in index.slabs() if slab.number == place.slab)
    if seal:
        index.seals[slab.first_record + place.slot] ^= index.seals.dtype.type(1)
    if header:
        with store._directory.headers_path(slab).open("r+b") as file:
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
    (tmp_path / "trust").write_text("another boot")
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
    assert len(store._directory.index.slabs()) > 2
    places = {key: store._directory.index.find(key) for key in keys}
    slabs = {slab.number: store._directory.headers_path(slab) for slab in store._directory.index.slabs()}
    store.close()
    place, key = places[keys[older]], keys[newer]
    written_in = places[key]
    assert place is not None
    assert written_in is not None
    created = envelope.decode_header(slabs[written_in.slab].read_bytes()[written_in.slot * 128 :]).created_ms
    with slabs[place.slab].open("r+b") as opened:
        opened.seek(place.slot * 128)
        content = memoryview(payload_of(key, SIZE))
        opened.write(envelope.encode_header(key, [content], created_ms=created - earlier))
    (tmp_path / "trust").write_text("another boot")
    store = open_store(tmp_path)
    expected = [GetResult.HIT] * 70
    expected[older] = GetResult.MISS
    assert assert_right(store, keys) == expected
    assert store._directory.rebuilt == 69
    assert sound(store)
    store.close()


@pytest.mark.parametrize("rebuild", [True, False])
@pytest.mark.parametrize("headers", ["none", "cut", "empty"])
def test_a_slab_whose_headers_were_deleted_or_cut_can_be_written_again(
    tmp_path: Path, headers: str, rebuild: bool
) -> None:
    store = open_store(tmp_path)
    keys = page_keys(60)
    store_pages(store, keys[:20], SIZES)
    store.close()
    (file,) = (tmp_path / "slabs").glob("*.headers")
    size = file.stat().st_size
    if headers == "none":
        file.unlink()
    else:
        os.truncate(file, 5 * 128 if headers == "cut" else 0)
    if rebuild:
        (tmp_path / "trust").write_text("another boot")
    store = open_store(tmp_path)
    left = 20 if not rebuild else 5 if headers == "cut" else 0
    assert assert_right(store, keys[:20]) == [GetResult.HIT] * left + [GetResult.MISS] * (20 - left)
    assert file.stat().st_size == size
    assert set(store_pages(store, keys, SIZES)) <= {SetResult.STORED, SetResult.EXISTS}
    assert assert_right(store, keys) == [GetResult.HIT] * 60
    assert sound(store)
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_loss_a_page_is_right_or_a_miss(tmp_path: Path, seed: int) -> None:
    """Blocks of slots and of headers are as they were some time before, each by itself, as a cache leaves them that was
    written back in part; the index is not to be trusted."""
    chance = random.Random(seed)
    store = open_store(tmp_path, 8 * MIB)
    size = (20_000,)
    keys = page_keys(600)
    for first in range(0, 300, 30):
        store_pages(store, keys[first : first + 30], size)
    before = {path: path.read_bytes() for path in (tmp_path / "slabs").iterdir()}
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
    (tmp_path / "trust").write_text("another boot")
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


def older_format(place: Path) -> None:
    """As if slabs of format 1 were there."""
    open_store(place).close()
    (place / "hicache_ext.json").write_text(json.dumps({"format": 1, "layout": "slab"}))
    (place / "slabs" / "00000000-135168.slab").write_bytes(bytes(10 * 135168))


def test_slabs_of_the_older_format_are_given_up_by_a_tier_that_has_them_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older_format(tmp_path)
    store = open_store(tmp_path)
    assert caplog.text.count("its pages are given up") == 1
    assert list((tmp_path / "slabs").iterdir()) == []
    keys = page_keys(20)
    assert store_pages(store, keys, SIZES) == [SetResult.STORED] * 20
    store.close()
    store = open_store(tmp_path)
    assert assert_right(store, keys) == [GetResult.HIT] * 20
    assert caplog.text.count("its pages are given up") == 1
    store.close()


def test_slabs_of_the_older_format_stay_while_others_use_them_and_for_who_only_looks(tmp_path: Path) -> None:
    older_format(tmp_path)
    with pytest.raises(StoreSetupError, match="holds format 1, layout 'slab'; this tier writes format 2"):
        open_inspector(tmp_path)
    lock = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH)
    with pytest.raises(StoreSetupError, match="holds format 1, layout 'slab'; this tier writes format 2"):
        open_store(tmp_path)
    os.close(lock)
    assert len(list((tmp_path / "slabs").iterdir())) == 1
    open_store(tmp_path).close()
    assert list((tmp_path / "slabs").iterdir()) == []


def test_headers_without_a_slab_are_deleted(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "slabs" / "00000007-135168.headers").write_bytes(bytes(4096))
    (tmp_path / "slabs" / "a stranger's.headers").write_bytes(bytes(4096))
    open_store(tmp_path).close()
    assert [path.name for path in (tmp_path / "slabs").iterdir()] == ["a stranger's.headers"]


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
    assert list((tmp_path / "slabs").iterdir()) == []
    monkeypatch.undo()
    assert store_pages(store, page_keys(10), SIZES) == [SetResult.STORED] * 10
    assert sound(store)
    store.close()


def test_of_a_dropped_slab_both_files_go_though_one_of_them_fails(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store_pages(store, page_keys(10), SIZES)
    directory = store._directory
    (slab,) = directory.index.slabs()
    directory.slab_path(slab).unlink()
    with pytest.raises(FileNotFoundError):
        directory.delete_slab_file(slab)
    assert list((tmp_path / "slabs").iterdir()) == []
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
    assert store._directory.index.counts()["pending"] == 0
    store.close()


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut"])
def test_a_damaged_index_file_is_rebuilt(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    keys = page_keys(100)
    store_pages(store, keys, SIZES)
    store.close()
    data = tmp_path / "index" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes({"garbage": b"\xa5" * len(whole), "empty": b"", "cut": whole[:5000]}[damage])
    (tmp_path / "trust").write_text("another boot")
    store = open_store(tmp_path)
    assert assert_right(store, keys) == [GetResult.HIT] * 100
    store.close()


@pytest.mark.parametrize("gone", ["all", "data.mdb", "data.mdb empty", "header", "records", "seals", "groups"])
def test_an_index_that_somebody_deleted_is_rebuilt_though_it_was_closed_in_order(tmp_path: Path, gone: str) -> None:
    store = open_store(tmp_path)
    keys = page_keys(100)
    store_pages(store, keys, SIZES)
    store.close()
    assert (tmp_path / "trust").read_text() == f"closed in order, index {INDEX_VERSION}"
    if gone == "all":
        shutil.rmtree(tmp_path / "index")
    elif gone.endswith("empty"):
        os.truncate(tmp_path / "index" / "data.mdb", 0)
    else:
        (tmp_path / "index" / gone).unlink()
    store = open_store(tmp_path)
    assert assert_right(store, keys) == [GetResult.HIT] * 100
    assert store._directory.rebuilt == 100
    assert sound(store)
    store.close()


def test_an_index_of_this_boot_is_trusted_after_a_kill_and_one_of_another_boot_is_not(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store_pages(store, page_keys(10), SIZES)
    store.close()
    for trust, rebuilt in (
        (f"closed in order, index {INDEX_VERSION}", 0),
        ("closed in order, index 1", 10),
        ("another boot", 10),
    ):
        (tmp_path / "trust").write_text(trust)
        store = open_store(tmp_path)
        assert store._directory.rebuilt == rebuilt
        store.close()


def test_cleared_pages_do_not_come_back_with_a_rebuild(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = page_keys(50)
    store_pages(store, keys, SIZES)
    assert store.clear([IDENTITY]) == 1
    assert store.contains(keys) == [False] * 50
    store.close()
    (tmp_path / "trust").write_text("another boot")
    store = open_store(tmp_path)
    assert store.contains(keys) == [False] * 50
    store.close()


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
    import sys

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
    import os

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
    assert SetResult.REJECTED not in store_pages(store, keys, SIZES)
    store.close()


@pytest.mark.parametrize("broken", ["slabs", "size"])
def test_an_index_that_fails_at_the_end_of_a_write_is_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    store = open_store(tmp_path)
    index, errors = store._directory.index, store.metrics.total("error")

    def fail() -> None:
        raise lmdb.CorruptedError("a page of the index") if broken == "slabs" else OSError(5, "Input/output error")

    monkeypatch.setattr(index, broken, fail)
    keys = page_keys(10)
    assert store_pages(store, keys, SIZES) == [SetResult.STORED] * 10
    store.resize(32 * MIB)
    assert store.metrics.total("error") > errors
    monkeypatch.undo()
    assert assert_right(store, keys) == [GetResult.HIT] * 10
    store.resize(2 * MIB)
    assert store_pages(store, page_keys(10, "later"), SIZES)
    assert occupied(tmp_path) <= 2 * MIB
    store.close()


@pytest.mark.parametrize("reads", range(3))
def test_an_index_that_cannot_be_read_at_opening_is_a_tier_that_cannot_be_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """Whichever read of its slabs fails: those of the directory and of the store refuse, later ones are misses."""
    tier = FileTierConfig.model_validate(
        {"type": "file", "path": [str(tmp_path)], "capacity": "64MiB", "layout": "slab", "io": "buffered", "threads": 2}
    )
    open_file_tier("disk", tier).close()
    slabs, left = SlabIndex.slabs, [reads]

    def fail_later(index: SlabIndex) -> list[Slab]:
        if not left[0]:
            raise lmdb.CorruptedError("a page of the index")
        left[0] -= 1
        return slabs(index)

    monkeypatch.setattr(SlabIndex, "slabs", fail_later)
    if reads < 2:
        with pytest.raises(StoreSetupError, match="a page of the index"):
            open_file_tier("disk", tier)
    else:
        open_file_tier("disk", tier).close()


def test_a_directory_of_the_other_layout_is_refused_with_a_sentence(tmp_path: Path) -> None:
    PageFileStore("disk", tmp_path / "a", capacity=None).close()
    with pytest.raises(StoreSetupError, match="holds format 1, layout 'pages'"):
        open_store(tmp_path / "a")
    open_store(tmp_path / "b").close()
    with pytest.raises(StoreSetupError, match="holds format 2, layout 'slab'"):
        PageFileStore("disk", tmp_path / "b", capacity=None)
    assert json.loads((tmp_path / "b" / "hicache_ext.json").read_text()) == {"format": 2, "layout": "slab"}


@pytest.mark.slow
def test_killed_processes_leave_a_sound_index_and_no_wrong_page() -> None:
    findings = kill_slabs.run(kills=30, seed=7)
    assert findings.problems == {}
    assert findings.hits_beside_writers >= kill_slabs.HITS_BESIDE_WRITERS
    assert findings.hits > findings.hits_beside_writers

"""Pages moved by the native core: the same bytes as by page_moves.py and envelope.py, nothing beside them, and no page
that is not what was asked for is ever called done."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext import native
from hicache_ext.page import envelope
from hicache_ext.page.memory import Addresses, PageMemory, addresses_of
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file.devices import IoPlan
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab import page_moves
from hicache_ext.storage.tiers.file.slab.directory import OpenFile
from hicache_ext.storage.tiers.file.slab.index_words import ROW_WORDS, SEAL
from hicache_ext.storage.tiers.file.slab.page_moves import Moved, SlotIo
from hicache_ext.storage.tiers.file.slab.shapes import (
    Slab,
    SlabFile,
    SlotReference,
    SlotReferences,
    checked_headers,
    slot_size_of,
)
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import (
    assert_hits,
    cut,
    page_keys,
    payload_of,
    read_pages,
    store_pages,
)
from tests.campaigns.slab_insides import faults as faults_of_index
from tests.rigs.bare_index import counts
from tests.rigs.disk_faults import SYSTEM_CALL, DiskFaults, core_calling, core_through_python
from tests.test_envelope import GOLDEN_HEADER_WITHOUT_CHECKSUM

MIB = 1 << 20
GUARD = 512
UNTOUCHED = 0xC3
UNTOUCHED_WORD = 0xC3C3C3C3C3C3C3C3
SLOTS = 24
"""In each slab."""


_FLAGS = {file: os.O_RDWR | (os.O_DIRECT if file is SlabFile.DIRECT else 0) for file in SlabFile}


class Slabs:
    """Slabs that nobody has written yet, for pages of one size, in the place of a SlabDirectory."""

    def __init__(self, place: Path, payload: int, numbers: Iterable[int] = (0,), slots: int = SLOTS) -> None:
        place.mkdir(exist_ok=True)
        self.payload, self.slot = payload, slot_size_of(payload)
        self.home = self._place = place
        # The rows of each slab lie between others.
        self._slabs = {
            number: Slab(number, self.slot, slots, 3 + row * (slots + 3)) for row, number in enumerate(numbers)
        }
        rows = np.full((3 + len(self._slabs) * (slots + 3), ROW_WORDS), UNTOUCHED_WORD, np.uint64).view(np.int64)
        self.index = SimpleNamespace(memory=SimpleNamespace(rows=rows))
        self.rows = rows.view(np.uint64)
        self.seals = self.rows[:, SEAL : SEAL + 2]
        for slab in self._slabs.values():
            for file, size in ((SlabFile.SLOTS, slab.size), (SlabFile.HEADERS, slab.headers_size)):
                self.path(slab, file).write_bytes(bytes([UNTOUCHED]) * size)

    def path(self, slab: Slab, file: SlabFile = SlabFile.SLOTS) -> Path:
        return self._place / f"{slab.number}.{'headers' if file is SlabFile.HEADERS else 'slab'}"

    def slab(self, number: int) -> Slab | None:
        return self._slabs.get(number)

    @contextmanager
    def opened(self, slab: Slab, file: SlabFile = SlabFile.SLOTS) -> Iterator[int]:
        descriptor = os.open(self.path(slab, file), _FLAGS[file])
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def open_all(self, slabs: Iterable[Slab], file: SlabFile, *, headers: bool) -> tuple[Any, list[OpenFile]]:
        rows, used = [], []
        for slab in slabs:
            with suppress(OSError):
                used.append(OpenFile(os.open(self.path(slab, file), _FLAGS[file])))
                of_slots, of_headers = used[-1].fd, -1
                if headers:
                    used.append(OpenFile(os.open(self.path(slab, SlabFile.HEADERS), os.O_RDWR)))
                    of_headers = used[-1].fd
                rows.append((slab.number, of_slots, of_headers, slab.first_row))
        return np.array(rows, np.int64).reshape(-1, 4), used

    def slots(self) -> dict[tuple[int, int], tuple[bytes, bytes, bytes]]:
        """What every slot of every slab holds, the header and the seal of its page."""
        return {
            (slab.number, slot): (
                content[slot * self.slot : (slot + 1) * self.slot],
                headers[slot * 128 : (slot + 1) * 128],
                self.seals[slab.first_row + slot].tobytes(),
            )
            for slab in self._slabs.values()
            for content in [self.path(slab).read_bytes()]
            for headers in [self.path(slab, SlabFile.HEADERS).read_bytes()]
            for slot in range(slab.slots)
        }

    def assert_nothing_beside_the_seals(self) -> None:
        inside = {slab.first_row + slot for slab in self._slabs.values() for slot in range(slab.slots)}
        beside = [row for row in range(len(self.seals)) if row not in inside]
        assert (self.seals[beside] == UNTOUCHED_WORD).all()
        assert (np.delete(self.rows, [SEAL, SEAL + 1], axis=1) == UNTOUCHED_WORD).all()

    def flip(self, slab: int, at: int, bit: int = 0, file: SlabFile = SlabFile.SLOTS) -> None:
        with self.path(self._slabs[slab], file).open("r+b") as opened:
            opened.seek(at)
            (byte,) = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << bit]))


class Memory:
    """Memory of pages, each segment between guard bytes, ``shift`` bytes behind a border of 512."""

    def __init__(self, pages: int, sizes: Sequence[int], shift: int = 0) -> None:
        starts = [GUARD + shift]
        for size in list(sizes) * pages:
            starts.append(starts[-1] + -(-size // GUARD) * GUARD + GUARD)
        self._arena = mmap.mmap(-1, starts[-1])
        self._arena.write(b"\xa5" * len(self._arena))
        memory = memoryview(self._arena)
        segments = [memory[begin : begin + size] for begin, size in zip(starts, list(sizes) * pages, strict=False)]
        self.pages = [segments[n * len(sizes) : (n + 1) * len(sizes)] for n in range(pages)]
        self._inside = [(begin, begin + size) for begin, size in zip(starts, list(sizes) * pages, strict=False)]

    def fill(self, page: int, payload: bytes) -> None:
        for segment in self.pages[page]:
            segment[:], payload = payload[: segment.nbytes], payload[segment.nbytes :]

    def payload(self, page: int) -> bytes:
        return b"".join(self.pages[page])

    def assert_guards_intact(self) -> None:
        content = self._arena[:]
        position = 0
        for begin, end in [*self._inside, (len(content), 0)]:
            assert content.count(b"\xa5", position, begin) == begin - position, "bytes beside a segment were changed"
            position = end


def move(slabs: Slabs, batch: PageBatch, placed: SlotReferences, *, write: bool, mode: str = "buffered") -> Moved:
    """Everything that the native core does of a call."""
    return slot_io(slabs, mode).move(batch, placed, slabs.slab, 2, into_memory=not write)


def one_by_one(count: int, work: Callable[[int], object], _: int) -> list[object]:
    return [work(number) for number in range(count)]


def slot_io(slabs: Slabs, mode: str, run: Callable[..., object] = one_by_one) -> SlotIo:
    plan, workers = IoPlan(read=mode, write=mode), SimpleNamespace(run=run)
    return SlotIo(slabs, plan, TierMetrics("disk"), workers)


def all_done(moved: Moved) -> bool:
    return len(moved.done) > 0 and not moved.failed and not len(moved.left)


def write_in_python(slabs: Slabs, batch: PageBatch, placed: SlotReferences, created_ms: int, mode: str) -> None:
    io = slot_io(slabs, mode)
    for page in placed.pages():
        key, segments = batch.keys[page.position], batch.buffers[page.position]
        header = envelope.encode_header(key, segments, created_ms=created_ms)
        assert io.write(slabs.slab(page.slab), page.slot, header, segments)


def assert_read_in_python(slabs: Slabs, batch: PageBatch, placed: SlotReferences, mode: str) -> None:
    io = slot_io(slabs, mode)
    for page in placed.pages():
        key, segments, size = batch.keys[page.position], batch.buffers[page.position], batch.sizes[page.position]
        slab = slabs.slab(page.slab)
        assert io.read(slab, page.slot, segments) == size
        assert io.seal(slab.first_row + page.slot) == envelope.page_seal(key, size, segments)
        assert envelope.reason_to_refuse(io.header(slab, page.slot), key, segments) is None


def place(positions: Sequence[tuple[int, int]], payload: int) -> SlotReferences:
    return SlotReferences.of([SlotReference(slab, slot, payload, n) for n, (slab, slot) in enumerate(positions)])


def one_page(tmp_path: Path, sizes: Sequence[int], shift: int = 0) -> tuple[Slabs, PageBatch, SlotReferences]:
    """A page in slot 3, written by the core, and memory that does not hold it."""
    slabs, placed, keys = Slabs(tmp_path / "slabs", sum(sizes)), place([(0, 3)], sum(sizes)), page_keys(1)
    memory = Memory(1, sizes, shift)
    memory.fill(0, payload_of(keys[0], sum(sizes)))
    assert all_done(move(slabs, PageBatch(keys, memory.pages), placed, write=True))
    return slabs, PageBatch(keys, Memory(1, sizes, shift).pages), placed


# -- the same bytes ----------------------------------------------------------------------------------------------------


@st.composite
def _sizes(draw: st.DrawFn, largest: int) -> list[int]:
    """Of the segments of a page: 16 bytes at least, all of it aligned or not."""
    count = draw(st.integers(1, 40))
    most = max(16, largest // count)
    if draw(st.booleans()):
        sizes = [512 * draw(st.integers(1, max(1, most // 512))) for _ in range(count)]
        sizes[-1] += -sum(sizes) % 4096
        return sizes
    return [draw(st.integers(16 if count == 1 else 1, most)) for _ in range(count - 1)] + [draw(st.integers(16, most))]


_places = st.lists(st.tuples(st.integers(0, 2), st.integers(0, SLOTS - 1)), min_size=1, max_size=14, unique=True)
_alike = given(
    positions=_places
    | st.builds(lambda first, count: [(1, first + n) for n in range(count)], *[st.integers(1, 10)] * 2),
    at_once=st.sampled_from([4096, 8192, 12288, 65536, 512 << 10]),
    mode=st.sampled_from(["buffered", "direct", "dontcache"]),
    shift=st.sampled_from([0, 0, 8, 1]),
    seed=st.integers(0, 1 << 32),
    data=st.data(),
)


def assert_moved_alike(
    directory: Path, sizes: Sequence[int], positions: Sequence[tuple[int, int]], at_once: int, mode: str, shift: int,
    seed: int,
) -> None:  # fmt: skip
    """Written by either way, pages are the same bytes in the same slots, and either way reads them."""
    payload = sum(sizes)
    chance = random.Random(seed)
    keys = [chance.randbytes(48) for _ in positions]
    payloads = [chance.randbytes(payload) for _ in positions]
    source = Memory(len(keys), sizes, shift)
    for page, content in enumerate(payloads):
        source.fill(page, content)
    batch, placed = PageBatch(keys, source.pages), place(positions, payload)
    numbers, slots = {slab for slab, _ in positions}, 2 + max(slot for _, slot in positions)
    ours, others = (Slabs(directory / name, payload, numbers, slots) for name in ("ours", "others"))
    with (
        patch.object(page_moves, "AT_ONCE", at_once),
        patch.object(page_moves, "AT_ONCE_DIRECT", at_once),
    ):
        assert all_done(move(ours, batch, placed, write=True, mode=mode))
        source.assert_guards_intact()
        assert [source.payload(page) for page in range(len(keys))] == payloads
        written = ours.slots()
        created = {envelope.decode_header(written[place][1]).created_ms for place in positions}
        assert len(created) == 1
        write_in_python(others, batch, placed, created.pop(), mode)
        for where, (content, header, seal) in others.slots().items():
            assert written[where][0][:payload] == content[:payload]
            assert written[where][1:] == (header, seal)
            # Between neighbours the rest of a slot may be zeros.
            rest = written[where][0][payload:]
            assert rest.strip(bytes([UNTOUCHED])) == b"" or (where in positions and rest.strip(b"\0") == b"")
        for slabs in (ours, others):
            slabs.assert_nothing_beside_the_seals()
            back = Memory(len(keys), sizes, shift)
            assert all_done(move(slabs, PageBatch(keys, back.pages), placed, write=False, mode=mode))
            assert [back.payload(page) for page in range(len(keys))] == payloads
            back.assert_guards_intact()
    assert_read_in_python(ours, PageBatch(keys, Memory(len(keys), sizes, shift).pages), placed, mode)


_SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}


@settings(max_examples=60, **_SETTINGS)
@_alike
def test_small_pages_are_the_same_bytes_as_those_of_the_python_way(
    tmp_path, positions, at_once, mode, shift, seed, data
):
    assert_moved_alike(tmp_path, data.draw(_sizes(20_000)), positions, at_once, mode, shift, seed)


@pytest.mark.thorough
@pytest.mark.slow
@settings(max_examples=80, **_SETTINGS)
@_alike
def test_pages_up_to_three_megabytes_are_the_same_bytes_as_those_of_the_python_way(
    tmp_path, positions, at_once, mode, shift, seed, data
):
    assert_moved_alike(tmp_path, data.draw(_sizes(3 * MIB)), positions[:4], at_once, mode, shift, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2, 127, 338, 340, 341, 510, 511, 512, 1022, 1023])
@pytest.mark.parametrize("size", [16, 4096])
def test_any_number_of_segments_up_to_the_most_is_moved_and_no_iovec_too_many_is_written(tmp_path, count, size):
    for at_once in (8192, 512 << 10):
        assert_moved_alike(tmp_path, [size] * count, [(0, 5), (0, 6), (0, 7)], at_once, "buffered", 0, count)


@pytest.mark.parametrize("mode", ["buffered", "direct"])
@pytest.mark.parametrize("sizes", [[16], [4096], [2048, 2048], [1, 2, 3]])
def test_more_neighbours_than_a_thread_has_headers_for_are_moved(tmp_path, sizes, mode):
    neighbours = [(0, slot) for slot in range(300)]
    assert_moved_alike(tmp_path, sizes, neighbours, 16 * MIB, mode, 0, 1)


@pytest.mark.parametrize("sizes", [[1000, 24], [9000], [30_000, 10_000]])
def test_threads_share_the_pages_of_a_call_and_leave_none(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(page_moves, "AT_ONCE", 8192)
    slabs, keys = Slabs(tmp_path / "slabs", sum(sizes), (0, 1), 150), page_keys(300)
    placed, counts = place([divmod(n, 150) for n in range(300)], sum(sizes)), []

    def run(count: int, work: Callable[[int], int], at_once: int) -> None:
        assert count == at_once == 4
        with ThreadPoolExecutor(4) as pool:
            counts.append(sum(pool.map(work, range(4))))

    for write in (True, False):
        memory = Memory(300, sizes)
        for page, key in enumerate(keys if write else []):
            memory.fill(page, payload_of(key, sum(sizes)))
        io = slot_io(slabs, "buffered", run)
        assert all_done(io.move(PageBatch(keys, memory.pages), placed, slabs.slab, 4, into_memory=not write))
        assert counts.pop() == 300
        memory.assert_guards_intact()
        assert [memory.payload(page) for page in range(300)] == [payload_of(key, sum(sizes)) for key in keys]


@pytest.mark.parametrize("count", [1024, 1025, 1100])
def test_pages_with_more_segments_are_left_to_the_other_way(tmp_path, count):
    size = 16 * count
    slabs, placed, memory = Slabs(tmp_path / "slabs", size), place([(0, 3)], size), Memory(1, [16] * count)
    for write in (True, False):
        moved = move(slabs, PageBatch(page_keys(1), memory.pages), placed, write=write)
        assert (len(moved.done), moved.left.positions.tolist()) == (0, [0])


@pytest.mark.parametrize("sizes", [[100_000], [30_000, 1, 69_999], [4096] * 20])
@pytest.mark.parametrize("at_once", [1, 128, 4095, 4096, 4097])
def test_however_little_is_moved_at_once_a_large_page_is_read_to_its_end(tmp_path, sizes, at_once):
    assert_moved_alike(tmp_path, sizes, [(0, 1), (0, 2)], at_once, "buffered", 0, 1)


# -- never done --------------------------------------------------------------------------------------------------------


def assert_not_done(slabs: Slabs, batch: PageBatch, placed: SlotReferences, mode: str = "buffered") -> None:
    moved = move(slabs, batch, placed, write=False, mode=mode)
    assert len(moved.done) == 0
    assert moved.left.positions.tolist() == [0]


SHAPES = [
    pytest.param([1000], id="one segment"),
    pytest.param([600, 1, 399], id="segments"),
    pytest.param([8192], id="aligned"),
    pytest.param([20_000, 45_536], id="read in portions"),
]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_a_flipped_bit_is_never_done(tmp_path, monkeypatch, sizes, mode):
    monkeypatch.setattr(page_moves, "AT_ONCE", 16384)
    monkeypatch.setattr(page_moves, "AT_ONCE_DIRECT", 16384)
    slabs, batch, placed = one_page(tmp_path, sizes)
    chance = random.Random(1)
    of_payload = {0, sum(sizes) - 1, sizes[0] - 1, sizes[0] % sum(sizes), *chance.sample(range(sum(sizes)), 30)}
    for at in of_payload:
        bit = chance.randrange(8)
        slabs.flip(0, 3 * slabs.slot + at, bit)
        assert_not_done(slabs, batch, placed, mode)
        slabs.flip(0, 3 * slabs.slot + at, bit)
    seal = slabs.seals[slabs.slab(0).first_row + 3]
    for bit in range(128):
        seal[bit // 64] ^= np.uint64(1 << bit % 64)
        assert_not_done(slabs, batch, placed, mode)
        seal[bit // 64] ^= np.uint64(1 << bit % 64)
    # Nobody looks at the header of a page whose seal holds.
    slabs.flip(0, 3 * 128 + 20, file=SlabFile.HEADERS)
    assert all_done(move(slabs, batch, placed, write=False, mode=mode))


@pytest.mark.parametrize("sizes", SHAPES)
def test_another_key_another_length_another_slot_and_a_cut_slab_are_never_done(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(page_moves, "AT_ONCE", 16384)
    slabs, batch, placed = one_page(tmp_path, sizes)
    (key,) = batch.keys
    for at in range(48):
        other = bytes([*key[:at], key[at] ^ 1, *key[at + 1 :]])
        assert_not_done(slabs, PageBatch([other], batch.buffers), placed)
    for longer in (-1, 1, 4096, -4096):
        if sizes[-1] + longer > 0:
            assert_not_done(slabs, PageBatch([key], Memory(1, [*sizes[:-1], sizes[-1] + longer]).pages), placed)
    assert_not_done(slabs, batch, place([(0, 4)], slabs.payload))
    path = slabs.path(slabs.slab(0))
    for end in (3 * slabs.slot + slabs.payload - 1, 3 * slabs.slot + 1, 3 * slabs.slot, 0):
        os.truncate(path, end)
        assert_not_done(slabs, batch, placed)


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_a_seal_of_anything_else_is_never_done(tmp_path, monkeypatch, sizes, mode):
    """Of another key, another length, another checksum, another version, or none."""
    monkeypatch.setattr(page_moves, "AT_ONCE", 16384)
    monkeypatch.setattr(page_moves, "AT_ONCE_DIRECT", 16384)
    slabs, batch, placed = one_page(tmp_path, sizes)
    header, row = slabs.slots()[0, 3][1], slabs.slab(0).first_row + 3
    for at in range(88):
        changed = bytes([*header[:at], header[at] ^ 0x10, *header[at + 1 :]])
        slabs.seals[row] = np.frombuffer(envelope.seal_of(changed), np.uint64)
        assert_not_done(slabs, batch, placed, mode)
    slabs.seals[row] = np.frombuffer(envelope.seal_of(header), np.uint64)
    assert all_done(move(slabs, batch, placed, write=False, mode=mode))


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("first", [-4, 27, 1 << 40, -(1 << 40)])
def test_a_slab_whose_rows_are_not_there_is_left_and_no_word_beside_them_is_touched(tmp_path, write, first):
    slabs, batch, placed = one_page(tmp_path, [1000])
    known, rows = slabs.slab(0), slabs.rows.copy()
    slabs._slabs[0] = Slab(0, known.slot_size, known.slots, first)
    for _ in range(2):
        moved = move(slabs, batch, placed, write=write)
        assert (len(moved.done), moved.failed, moved.left.positions.tolist()) == (0, {}, [0])
    assert (slabs.rows == rows).all()


def test_only_the_bad_page_of_a_run_is_left(tmp_path):
    slabs, keys = Slabs(tmp_path / "slabs", 1000), page_keys(12)
    placed, memory = place([(0, n) for n in range(12)], 1000), Memory(12, [1000])
    for page, key in enumerate(keys):
        memory.fill(page, payload_of(key, 1000))
    assert all_done(move(slabs, PageBatch(keys, memory.pages), placed, write=True))
    slabs.flip(0, 7 * slabs.slot + 500)
    moved = move(slabs, PageBatch(keys, memory.pages), placed, write=False)
    assert moved.left.positions.tolist() == [7]
    assert moved.done.positions.tolist() == [n for n in range(12) if n != 7]


def test_a_slab_that_is_dropped_between_opening_and_reading_gives_nothing(tmp_path):
    slabs, batch, placed = one_page(tmp_path, [1000])

    def run(_: int, work: Callable[[int], int], __: int) -> None:
        os.truncate(slabs.path(slabs.slab(0)), 0)
        slabs.path(slabs.slab(0)).unlink()
        work(0)

    moved = slot_io(slabs, "buffered", run).move(batch, placed, slabs.slab, 1, into_memory=True)
    assert moved.left.positions.tolist() == [0]


def test_pages_of_slabs_that_are_gone_are_left_and_the_others_are_moved(tmp_path):
    keys = page_keys(4)
    slabs, memory = Slabs(tmp_path / "slabs", 1000, (0, 1)), Memory(4, [1000])
    placed = place([(1, 2), (7, 0), (0, 1), (1, 1)], 1000)
    for write in (True, False):
        moved = move(slabs, PageBatch(keys, memory.pages), placed, write=write)
        assert sorted(moved.done.positions.tolist()) == [0, 2, 3]
        assert moved.left.positions.tolist() == [1]
        gone = move(slabs, PageBatch(keys, memory.pages), place([(7, n) for n in range(4)], 1000), write=write)
        assert (len(gone.done), gone.left.positions.tolist()) == (0, [0, 1, 2, 3])


# -- what the system calls answer --------------------------------------------------------------------------------------


@contextmanager
def answering(monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[..., int]) -> Iterator[None]:
    """``os.preadv`` or ``os.pwritev``, which the core calls, too, inside."""
    real = getattr(os, name)
    with core_through_python(), monkeypatch.context() as patched:
        patched.setattr(os, name, lambda *arguments: answer(real, *arguments))
        yield


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("less", [1, 127, 999])
def test_a_transfer_that_is_cut_short_is_never_done(tmp_path, monkeypatch, sizes, less):
    monkeypatch.setattr(page_moves, "AT_ONCE", 16384)
    slabs, batch, placed = one_page(tmp_path, sizes)
    for name in ("preadv", "pwritev"):
        with answering(monkeypatch, name, lambda real, *arguments: real(*arguments) - less):
            moved = move(slabs, batch, placed, write=name == "pwritev")
            assert (len(moved.done), moved.failed, moved.left.positions.tolist()) == (0, {}, [0])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EFAULT, errno.EBADF])
@pytest.mark.parametrize("sizes", SHAPES)
def test_an_error_of_the_disk_is_told_by_page(tmp_path, monkeypatch, code, sizes):
    monkeypatch.setattr(page_moves, "AT_ONCE", 16384)
    slabs, batch, placed = one_page(tmp_path, sizes)
    for name in ("preadv", "pwritev"):

        def fail(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        with answering(monkeypatch, name, fail):
            moved = move(slabs, batch, placed, write=name == "pwritev")
        assert (len(moved.done), moved.failed, len(moved.left)) == (0, {0: code}, 0)


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        pytest.param(127, {}, id="cut short"),
        pytest.param(0, {}, id="nothing"),
        pytest.param(errno.ENOSPC, {0: errno.ENOSPC}, id="no room"),
        pytest.param(errno.EINVAL, {}, id="a flag"),
    ],
)
def test_a_page_whose_header_is_not_written_is_not_done(tmp_path, monkeypatch, answer, failed):
    slabs, batch, placed = one_page(tmp_path, [1000])

    def write(real: Callable[..., int], fd: int, buffers: list[memoryview], offset: int, flags: int) -> int:
        if sum(buffer.nbytes for buffer in buffers) != 128:
            return real(fd, buffers, offset, flags)
        if answer in (errno.ENOSPC, errno.EINVAL):
            raise OSError(answer, os.strerror(answer))
        return answer

    with answering(monkeypatch, "pwritev", write):
        moved = move(slabs, batch, placed, write=True)
    assert (len(moved.done), moved.failed, len(moved.left)) == (0, failed, 0 if failed else 1)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EINVAL, errno.EOPNOTSUPP])
def test_what_speaks_against_the_call_and_not_the_disk_is_left_to_the_other_way(tmp_path, monkeypatch, code):
    slabs, batch, placed = one_page(tmp_path, [1000])
    for name in ("preadv", "pwritev"):

        def fail(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        with answering(monkeypatch, name, fail):
            moved = move(slabs, batch, placed, write=name == "pwritev")
        assert (len(moved.done), moved.failed, moved.left.positions.tolist()) == (0, {}, [0])


@pytest.mark.parametrize("sizes", SHAPES)
def test_a_failed_call_that_gives_no_reason_is_never_done(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(page_moves, "AT_ONCE", 16384)
    slabs, batch, placed = one_page(tmp_path, sizes)

    @SYSTEM_CALL
    def fail(*_: int) -> int:
        ctypes.set_errno(0)
        return -1

    with core_calling(fail, fail):
        for write in (False, True):
            moved = move(slabs, batch, placed, write=write)
            assert (len(moved.done), moved.failed, moved.left.positions.tolist()) == (0, {}, [0])


@pytest.mark.parametrize("write", [False, True])
def test_flags_of_the_page_cache_are_for_the_page_cache_alone(tmp_path, monkeypatch, write):
    """A file system that does not know RWF_DONTCACHE would else say so for every page that moves with O_DIRECT."""
    slabs, batch, placed = one_page(tmp_path, [8192])

    def no_flags(real: Callable[..., int], fd: int, buffers: list[memoryview], offset: int, flags: int) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(fd, buffers, offset, flags)

    with answering(monkeypatch, "pwritev" if write else "preadv", no_flags):
        assert all_done(move(slabs, batch, placed, write=write, mode="direct"))


@pytest.mark.parametrize("sizes", [[1000], [300, 2, 3794], [9000, 7384]])
def test_a_disk_that_fails_and_stops_halfway_gives_no_wrong_page(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(page_moves, "AT_ONCE", 8192)
    store = SlabStore("disk", tmp_path / "tier", capacity=64 * MIB)
    keys = page_keys(120)
    with DiskFaults(tmp_path, seed=3, rate=0.3, calls=("preadv", "pwritev")) as faults:
        for first in range(0, 120, 12):
            chosen = keys[first : first + 12]
            written = store_pages(store, chosen, sizes)
            results, payloads = read_pages(store, chosen, sizes)
            for key, stored, result, payload in zip(chosen, written, results, payloads, strict=True):
                assert result is not GetResult.CORRUPT
                assert result is not GetResult.HIT or (stored.durable and payload == payload_of(key, sum(sizes)))
    assert faults.injected["preadv:short"] and faults.injected["pwritev:EIO"]
    for key, result, payload in zip(keys, *read_pages(store, keys, sizes), strict=True):
        assert result is GetResult.MISS or (result is GetResult.HIT and payload == payload_of(key, sum(sizes)))
    assert faults_of_index(tmp_path / "tier") == []
    store.close()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_that_may_not_be_written_is_not_written(tmp_path):
    slabs, batch, placed = one_page(tmp_path, [1000, 24])
    constant = bytes(1024)
    shielded = PageBatch(batch.keys, [[memoryview(constant)[:1000], memoryview(constant)[1000:]]])
    moved = move(slabs, shielded, placed, write=False)
    assert (len(moved.done), moved.left.positions.tolist()) == (0, [0])
    assert constant == bytes(1024)
    assert all_done(move(slabs, shielded, placed, write=True))


@pytest.mark.parametrize("claimed", [999, 1001, 8192, 0, 1 << 40])
def test_a_batch_that_is_wrong_about_the_size_of_its_pages_is_left_to_the_other_way(tmp_path, claimed):
    slabs, batch, placed = one_page(tmp_path, [1000])
    wrong = PageBatch(batch.keys, batch.buffers, [claimed])
    for write in (True, False):
        moved = move(slabs, wrong, placed, write=write)
        assert (len(moved.done), moved.left.positions.tolist()) == (0, [0])


def test_empty_segments_of_pages_known_by_address_are_no_trouble(tmp_path, monkeypatch):
    slabs, batch, placed = one_page(tmp_path, [1000, 40_000])
    known = addresses_of(batch.buffers, writable=True)
    (first, second), begin = known.segment_sizes.tolist(), known.pages[0]
    for at_once in (8192, 512 << 10):
        monkeypatch.setattr(page_moves, "AT_ONCE", at_once)
        sizes = np.array([0, first, 0, second, 0], np.int64)
        pages = np.array([[begin[0], begin[0], 0, begin[1], begin[1]]], np.int64)
        memory = PageMemory(Addresses(pages, sizes, int(sizes.sum())), lambda: list(batch.buffers))
        for write in (False, True):
            assert all_done(move(slabs, PageBatch(batch.keys, memory, [41_000]), placed, write=write))
    assert b"".join(batch.buffers[0]) == payload_of(batch.keys[0], 41_000)


def test_threads_come_and_go_each_with_memory_of_its_own(tmp_path):
    sizes = [3000, 2000, 120]
    store = SlabStore("disk", tmp_path / "tier", capacity=64 * MIB, plan=IoPlan(threads=1))
    other = SlabStore("disk", tmp_path / "other", capacity=64 * MIB, plan=IoPlan(threads=1))
    problems: list[BaseException] = []

    def use(number: int) -> None:
        try:
            keys = page_keys(6, f"thread-{number % 8}")
            for one in (store, other):
                assert all(result.durable for result in store_pages(one, keys, sizes))
                assert_hits(one, keys, sizes)
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            problems.append(error)

    for _ in range(6):
        threads = [threading.Thread(target=use, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    store.close()
    other.close()


def test_a_piece_that_raises_leaves_no_slot_taken_and_no_descriptor_in_use(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, "hicache_ext")  # a record of an error keeps its frames
    store = SlabStore("disk", tmp_path / "tier", capacity=64 * MIB)
    keys = page_keys(20)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(native.Core, "call", fail)
        assert store_pages(store, keys) == [SetResult.ERROR] * 20
    assert counts(store._directory.index)["pending"] == 0
    assert store_pages(store, keys) == [SetResult.STORED] * 20
    with monkeypatch.context() as patched:
        patched.setattr(native.Core, "call", fail)
        assert read_pages(store, keys)[0] == [GetResult.ERROR] * 20
    open_files = sum("/slabs/" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    assert open_files == 2
    store._directory.close_files()
    gc.collect()
    open_files = sum("/slabs/" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    assert open_files == 0
    assert_hits(store, keys)
    assert faults_of_index(tmp_path / "tier") == []
    store.close()


def test_pages_in_any_order_are_those_of_their_positions(tmp_path):
    store = SlabStore("disk", tmp_path / "tier", capacity=64 * MIB)
    keys = page_keys(60)
    store_pages(store, keys, cut(5000, 3))
    chosen = random.Random(2).sample(keys + page_keys(5, "absent"), 50)
    results, payloads = read_pages(store, [*chosen, *chosen[:7]], cut(5000, 3))
    for key, result, payload in zip([*chosen, *chosen[:7]], results, payloads, strict=True):
        assert result is (GetResult.HIT if key in keys else GetResult.MISS)
        assert payload == (payload_of(key, 5000) if key in keys else b"\x77" * 5000)
    store.close()


# -- words that others may write, and callers that are wrong -----------------------------------------------------------

_words = st.one_of(
    st.integers(-2, 2 * SLOTS), st.sampled_from([1 << 32, 1 << 51, 1 << 62, (1 << 63) - 1, -(1 << 63), -(1 << 62)])
)


@settings(max_examples=200, **_SETTINGS)
@given(
    places=st.lists(st.tuples(st.integers(-1, 2), _words), min_size=1, max_size=12),
    rows=st.lists(_words, min_size=2, max_size=2),
    at_once=st.sampled_from([1, 4096, 65536]),
    write=st.booleans(),
)
def test_slots_and_rows_that_make_no_sense_are_left_and_no_word_beside_them_is_touched(
    tmp_path, monkeypatch, places, rows, at_once, write
):
    sizes = [1500, 3000]
    slabs = Slabs(tmp_path / "slabs", sum(sizes), (0, 1))
    known = {number: slabs.slab(number) for number in (0, 1)}
    rows_before, slots_before = slabs.rows.copy(), slabs.slots()
    for number, first in enumerate(rows):
        slabs._slabs[number] = Slab(number, slabs.slot, SLOTS, first)
    columns = np.array([[slab, slot, sum(sizes), n, 0] for n, (slab, slot) in enumerate(places)], np.int64).T
    placed = SlotReferences(*map(np.ascontiguousarray, columns))
    keys, memory = page_keys(len(places)), Memory(len(places), sizes)
    with patch.object(page_moves, "AT_ONCE", at_once):
        moved = move(slabs, PageBatch(keys, memory.pages), placed, write=write)
    memory.assert_guards_intact()
    done = {(page.slab, page.slot) for page in moved.done.pages()}
    if not write:
        assert not done
        assert (slabs.rows == rows_before).all()
    # Rows may be any of those there are; slots only those that have one.
    assert all(0 <= rows[slab] + slot < len(slabs.rows) and slot >= 0 for slab, slot in done)
    sealed = {rows[slab] + slot for slab, slot in done} | {
        rows[slab] + slot for slab, slot in places if slab in (0, 1) and 0 <= rows[slab] + slot < len(slabs.rows)
    }
    beside = [row for row in range(len(slabs.rows)) if row not in sealed]
    assert (slabs.rows[beside] == rows_before[beside]).all()
    assert (np.delete(slabs.rows, [SEAL, SEAL + 1], axis=1) == UNTOUCHED_WORD).all()
    slabs._slabs = known
    for where, content in slabs.slots().items():
        assert where in done or content[:2] == slots_before[where][:2] or (write and where in places)


def test_sizes_that_make_no_sense_move_nothing(tmp_path, monkeypatch):
    slabs, batch, placed = one_page(tmp_path, [1000])
    core, made = native.core(), []
    monkeypatch.setattr(native.Core, "call", lambda self, *arguments: made.append(arguments))
    for write in (True, False):
        move(slabs, batch, placed, write=write)
    monkeypatch.undo()
    wrong = [
        *[("segment_count", count) for count in (-1, 0, 1024, 1 << 62)],
        *[("at_once", size) for size in (0, -1, -(1 << 63))],
        *[("slot_size", size) for size in (0, -1, 999, 5097, (1 << 63) - 1, -(1 << 63))],
        *[("payload", size) for size in (-1, 4097, (1 << 63) - 1)],
        ("page_count", 0),
        ("page_count", -1),
    ]
    for call, packed, used in made:
        *_, results, taken = used[1]
        words = np.frombuffer(bytearray(packed), np.int64)
        for name, value in wrong:
            at = call.fields.index(name)
            known, words[at], taken[0] = words[at], value, 0
            assert core.call(call, words.tobytes(), used) == 0
            assert results.tolist() == [1]
            words[at] = known
        taken[0] = 1
        assert core.call(call, packed, used) == 0
        assert results.tolist() == [1]
        taken[0] = 0
        # The slab is closed.
        batch, arrays, files = used
        files.clear()
        assert core.call(call, packed, (batch, arrays)) == 0
        assert results.tolist() == [-errno.EBADF]


# -- headers and files of pages ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["page", "page", "flipped", "zeros", "random", "no checksum"]), max_size=40),
    seed=st.integers(0, 1 << 32),
)
def test_headers_are_checked_as_the_envelope_does(kinds, seed):
    chance, content = random.Random(seed), b""
    for kind in kinds:
        key, payload = chance.randbytes(48), chance.randbytes(50)
        fields = bytearray(envelope.encode_header(key, [memoryview(payload)], created_ms=seed))
        if kind == "no checksum":
            fields[:16] = GOLDEN_HEADER_WITHOUT_CHECKSUM[:16]
            fields[112:] = xxhash.xxh3_128_digest(fields[:112])
        if kind == "flipped":
            fields[chance.randrange(128)] ^= 1 << chance.randrange(8)
        content += {"zeros": bytes(128), "random": chance.randbytes(128)}.get(kind, bytes(fields))
    headers = np.frombuffer(bytearray(content), np.int64).reshape(-1, 16)
    seals, valid = checked_headers(headers)
    assert valid.tolist() == [kind == "page" for kind in kinds]
    of_pages = [envelope.seal_of(header.tobytes()) for header in headers[valid]]
    assert [seal.tobytes() for seal in seals[valid]] == of_pages
    assert not seals[~valid].any()


@pytest.mark.parametrize("ttl", [None, 3600])
def test_page_files_are_found_alike_by_either_way(tmp_path, monkeypatch, ttl):
    store = PageFileStore("disk", tmp_path / "tier", capacity=None, ttl=ttl)
    keys = page_keys(48) + page_keys(8, identity=bytes(15) + b"\7")
    for key in keys[:40] + keys[48:52]:
        assert store._write_file(PageBatch([key], [[memoryview(bytes(100))]]), [0])[0] is SetResult.STORED
    paths = [Path(store._directory.page_path(key)) for key in keys]
    for number, spoil in enumerate(
        [
            lambda path: os.truncate(path, 10),
            lambda path: os.truncate(path, 0),
            lambda path: (path.unlink(), path.mkdir()),
            lambda path: (path.rename(tmp_path / "moved"), path.symlink_to(tmp_path / "moved")),
            lambda path: (path.unlink(), os.mkfifo(path)),
            lambda path: path.unlink(),
            lambda path: os.utime(path, (1000, 1000)),
            lambda path: store._unreadable.add((keys[7], keys[7][16:].hex())),
        ]
    ):
        spoil(paths[number])
    asked = [*keys[48:], *keys[:48], *page_keys(3, identity=bytes(16)), *keys[:9]]
    found = [store.contains(some) for some in (asked, keys[:48], keys[40:48] * 5)]
    monkeypatch.setattr(native, "LIBRARY", Path("/nowhere"))
    assert found == [store.contains(some) for some in (asked, keys[:48], keys[40:48] * 5)]
    assert found[1] == [False] * 6 + [ttl is None, False] + [True] * 32 + [False] * 8
    store.close()

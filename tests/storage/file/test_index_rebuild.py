"""The index made anew from the headers of pages: what is found, what is not, and that it ends."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hicache_ext.errors import StoreError
from hicache_ext.page.envelope import encode_header
from hicache_ext.runtime.access import make_tier_directory
from hicache_ext.runtime.background import Backoff
from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.storage.tiers.file import inspection
from hicache_ext.storage.tiers.file.layouts import slab_home
from hicache_ext.storage.tiers.file.slab import directory as directory_module
from hicache_ext.storage.tiers.file.slab.directory import REBUILDING, SlabDirectory
from hicache_ext.storage.tiers.file.slab.index import SlabIndex, milliseconds
from hicache_ext.storage.tiers.file.slab.index_words import BAD_HEADERS, FREE_SLOTS, Words
from hicache_ext.storage.tiers.file.slab.shapes import Slab
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import page_keys, store_pages
from tests.rigs.bare_index import counts, new_index_in
from tests.storage.file.indexes import SMALL, A, B, key_of, present

PATIENCE = 30.0
CAPACITY = 64 << 20


def header(key: bytes, created: int = 1000, length: int = 100) -> bytes:
    return encode_header(key, [memoryview(bytes(length))], created_ms=created)


def put_slab(place: Path, number: int, headers: Sequence[bytes], slots: int = 0, slot_size: int = SMALL) -> Path:
    """The files of a slab as a server leaves them; b"": a slot without a page."""
    slabs = place / "v3" / "slabs"
    if not slabs.exists():
        make_tier_directory(place)
        slabs.mkdir(parents=True)
    name = f"{number:08x}-{slot_size}"
    content = b"".join(one.ljust(128, b"\0") for one in headers)
    (slabs / f"{name}.headers").write_bytes(content.ljust(4096 * -(-len(content) // 4096), b"\0"))
    (slabs / f"{name}.slab").write_bytes(bytes(slot_size * max(slots, len(headers))))
    return slabs / f"{name}.headers"


@contextmanager
def opened(place: Path, capacity: int = CAPACITY) -> Iterator[SlabDirectory]:
    with closing(SlabDirectory(place, "disk", capacity)) as directory:
        assert directory.rebuild.wait(PATIENCE)
        yield directory


def created_of(index: SlabIndex, key: bytes) -> int:
    (row,) = index.rows_of([key])
    return int(index.memory.rows[row, 3])


def test_slabs_that_are_found_are_placed_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looked at all others, under the lock that all wait for who start: seconds for some thousand slabs."""
    with new_index_in(tmp_path, CAPACITY) as index:
        looks = 0
        slab_table = index.memory.slab_table

        def look() -> Words:
            nonlocal looks
            looks += 1
            return slab_table()

        monkeypatch.setattr(index.memory, "slab_table", look)
        index.add_found_slabs([Slab(number, SMALL, 2) for number in range(4000)])
        assert looks < 4
        assert [slab.first_row for slab in index.unknown_slabs()] == list(range(0, 8000, 2))


def test_what_headers_say_is_found_and_the_other_slots_are_free(place: Path) -> None:
    put_slab(place, 3, [header(key_of(0)), b"", header(key_of(1), 2000), header(key_of(2, B))], slots=10)
    with opened(place) as directory:
        index = directory.index
        assert present(index, [key_of(0), key_of(1), key_of(2, B), key_of(3)]) == [0, 1, 2]
        assert [(page.slab, page.slot, page.length) for page in index.locate([key_of(1)]).pages()] == [(3, 2, 100)]
        assert created_of(index, key_of(1)) == 2000
        assert counts(index) == {"pages": 3, "free": 7, "pending": 0, "unknown": 0, "slabs": 1}
        assert index.found == 3
        assert index.identities() == sorted([A, B])


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_of_several_copies_of_a_page_the_newest_counts(place: Path, newest: int) -> None:
    for number in range(3):
        put_slab(place, number, [b""] * number + [header(key_of(1), 5000 if number == newest else 1000 + number)])
    with opened(place) as directory:
        (page,) = directory.index.locate([key_of(1)]).pages()
        assert page.slab == newest
        assert counts(directory.index)["pages"] == 1
        assert directory.index.found == 1


@pytest.mark.parametrize("at", [0, 5, 16, 40, 63, 64, 90, 111, 112, 127])
def test_a_header_with_a_wrong_byte_is_no_page(place: Path, at: int) -> None:
    spoilt = bytearray(header(key_of(1)))
    spoilt[at] ^= 1
    put_slab(place, 0, [header(key_of(0)), bytes(spoilt), header(key_of(2))])
    with opened(place) as directory:
        assert present(directory.index, [key_of(0), key_of(1), key_of(2)]) == [0, 2]


def test_a_page_longer_than_its_slot_is_none(place: Path) -> None:
    put_slab(place, 0, [header(key_of(0), length=SMALL), header(key_of(1), length=SMALL + 1)])
    with opened(place) as directory:
        assert present(directory.index, [key_of(0), key_of(1)]) == [0]


def test_headers_that_were_cut_are_those_of_no_pages(place: Path) -> None:
    path = put_slab(place, 0, [header(key_of(number)) for number in range(40)])
    with path.open("r+b") as file:
        file.truncate(10 * 128 + 60)
    with opened(place) as directory:
        assert present(directory.index, [key_of(number) for number in range(40)]) == list(range(10))


def test_pages_written_before_their_identity_was_cleared_stay_away(place: Path) -> None:
    moment = milliseconds()
    put_slab(place, 0, [header(key_of(0), moment), header(key_of(1), moment + 1), header(key_of(2, B), 1000)])
    (place / "identities").mkdir()
    (place / "identities" / f"{A.hex()}.cleared").write_text(directory_module._note(moment))
    with opened(place) as directory:
        assert present(directory.index, [key_of(0), key_of(1), key_of(2, B)]) == [1, 2]


def test_all_that_was_cleared_before_anything_was_found_stays_away_after_a_kill(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_slab(place, 0, [header(key_of(0)), header(key_of(1, B))])
    monkeypatch.setattr(directory_module, "_REBUILD_AWAITED", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(directory_module.Rebuild, "_step", lambda _: None)
        store = SlabStore("disk", place, capacity=CAPACITY)
        store.clear(None)
        store.close()
    with opened(place) as directory:
        assert present(directory.index, [key_of(0), key_of(1, B)]) == []


def test_pages_of_an_identity_cleared_while_they_are_looked_for_stay_away(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_slab(place, 0, [header(key_of(number)) for number in range(3)])
    real = SlabIndex.adopt

    def clear_first(index: SlabIndex, *arguments: object) -> None:
        index.clear([A])
        real(index, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlabIndex, "adopt", clear_first)
    with opened(place) as directory:
        assert present(directory.index, [key_of(number) for number in range(3)]) == []
        assert counts(directory.index)["free"] == 3


@pytest.mark.thorough
def test_a_slab_that_cannot_be_read_goes_once_nobody_writes_to_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put_slab(place, 0, [header(key_of(0))])
    drop, asked = SlabIndex.drop_slab, []

    def being_written_at_first(index: SlabIndex, slab: Slab) -> bool:
        asked.append(slab)
        return len(asked) > 1 and drop(index, slab)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(SlabIndex, "drop_slab", being_written_at_first)
    monkeypatch.setattr(directory_module, "read_headers", fail)
    with opened(place) as directory:
        assert len(asked) == 2
        assert directory.index.all_slabs() == []
        assert not path.exists()


def test_it_serves_while_it_runs_and_what_is_not_looked_at_is_nobody_s(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_PORTION", 10)
    monkeypatch.setattr(directory_module, "_REBUILD_AWAITED", 0.0)
    put_slab(place, 0, [header(key_of(number)) for number in range(40)])
    go_on, waiting, real = threading.Event(), threading.Event(), directory_module.read_headers

    def read(fd: int, begin: int, count: int) -> object:
        if begin == 20:
            waiting.set()
            assert go_on.wait(PATIENCE)
        return real(fd, begin, count)

    monkeypatch.setattr(directory_module, "read_headers", read)
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        assert waiting.wait(PATIENCE)
        index = directory.index
        assert not index.rebuilt
        assert present(index, [key_of(number) for number in range(40)]) == list(range(20))
        assert counts(index)["unknown"] == 20
        assert len(index.take(SMALL, 5, 1, 0, index.memory.header[:0], evicting=True)[0]) == 0
        go_on.set()
        assert directory.rebuild.wait(PATIENCE)
        assert counts(index) == {"pages": 40, "free": 0, "pending": 0, "unknown": 0, "slabs": 1}


def test_it_goes_on_where_another_one_was_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "_PORTION", 10)
    monkeypatch.setattr(directory_module, "_REBUILD_AWAITED", 0.0)
    for slab in range(2):
        found = [header(key_of(20 * slab + number)) for number in range(20)]
        put_slab(place, slab, [b"damaged", *found[1:9], b"", *found[10:]])
    real, begins = directory_module.read_headers, []

    def read(fd: int, begin: int, count: int) -> object:
        begins.append(begin)
        if begins == [0, 10, 0, 10]:
            raise RuntimeError("ended in the middle")
        return real(fd, begin, count)

    monkeypatch.setattr(directory_module, "read_headers", read)
    with opened(place) as directory:
        assert begins == [0, 10, 0, 10, 0, 10]
        assert directory.index.found == 36
        # What was looked at twice counts once.
        assert directory.index.memory.header[BAD_HEADERS] == 2
        assert directory.index.memory.slabs[:2, FREE_SLOTS].tolist() == [2, 2]


def test_a_slab_that_cannot_be_read_is_given_up_and_the_others_are_found(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_slab(place, 0, [header(key_of(0))])
    put_slab(place, 1, [header(key_of(1))])
    real, bad = directory_module.read_headers, []

    def read(fd: int, begin: int, count: int) -> object:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"00000000-{SMALL}.headers"):
            bad.append(fd)
            raise OSError(5, "Input/output error")
        return real(fd, begin, count)

    monkeypatch.setattr(directory_module, "read_headers", read)
    with opened(place) as directory:
        assert directory.rebuild.wait(PATIENCE)
        assert len(bad) == directory_module._MOST_FAILURES
        assert present(directory.index, [key_of(0), key_of(1)]) == [1]
        assert [slab.number for slab in directory.index.all_slabs()] == [1]
        assert sorted(path.name for path in (place / "v3" / "slabs").iterdir()) == [
            f"00000001-{SMALL}.headers",
            f"00000001-{SMALL}.slab",
        ]


def test_it_says_when_it_begins_goes_on_and_is_over(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory_module, "_PORTION", 10)
    monkeypatch.setattr(directory_module, "_LOG_INTERVAL", 0.0)
    put_slab(place, 0, [header(key_of(number)) for number in range(20)])
    with caplog.at_level(logging.INFO), opened(place):
        time.sleep(0.01)
    said = [record.getMessage() for record in caplog.records if record.name == directory_module.__name__]
    assert "made anew: 20 slots" in said[0]
    assert "10 of 20 slots, 10 pages" in said[1]
    assert "complete: 20 pages" in said[-1]


def test_a_directory_without_slabs_has_nothing_to_make_anew(place: Path) -> None:
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        assert directory.index.rebuilt


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_process_that_is_short_of_something_deletes_no_slab(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A start with no descriptor left has deleted every slab."""
    put_slab(place, 0, [header(key_of(0))])
    put_slab(place, 1, [header(key_of(1))])
    real, failures = directory_module.read_headers, []

    def read(fd: int, begin: int, count: int) -> object:
        if len(failures) < 9:
            failures.append(fd)
            raise OSError(code, os.strerror(code))
        return real(fd, begin, count)

    monkeypatch.setattr(directory_module, "read_headers", read)
    monkeypatch.setattr(directory_module, "Backoff", lambda *_: Backoff(0.001, 0.001))
    with opened(place) as directory:
        assert directory.rebuild.wait(PATIENCE)
        assert len(failures) == 9
        assert present(directory.index, [key_of(0), key_of(1)]) == [0, 1]


def test_a_clear_that_a_rebuild_did_not_know_of_when_it_registered_the_identity_holds(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rebuild had read the notes, and waited for the lock."""
    put_slab(place, 0, [header(key_of(number)) for number in range(10)])
    registering, cleared = threading.Event(), threading.Event()
    real = directory_module.cleared_at

    def slowly(path: Path, digest: bytes) -> int:
        moment = real(path, digest)
        if threading.current_thread().name.endswith("rebuild") and not registering.is_set():
            registering.set()
            assert cleared.wait(PATIENCE)
        return moment

    monkeypatch.setattr(directory_module, "cleared_at", slowly)
    monkeypatch.setattr(directory_module, "_REBUILD_AWAITED", 0.0)
    store = SlabStore("disk", place, capacity=CAPACITY)
    assert registering.wait(PATIENCE)
    store.clear([A])
    cleared.set()
    assert store._directory.rebuild.wait(PATIENCE)
    assert not any(store.contains([key_of(number) for number in range(10)]))
    store.close()


def test_a_tool_waits_for_a_rebuild_only_as_long_as_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that does it is stopped."""
    monkeypatch.setattr(inspection, "_REBUILD_AWAITED", 0.2)
    store = SlabStore("disk", tmp_path / "tier", capacity=64 << 20)
    store_pages(store, page_keys(20), (5000,))
    store.close()
    with closing(OfdLock(slab_home(tmp_path / "tier") / "lock", REBUILDING)) as held:
        assert held.try_acquire()
        with pytest.raises(StoreError, match="the process that makes its index anew does not go on"):
            inspection.open_editor(tmp_path / "tier")
        held.release()
        with closing(inspection.open_editor(tmp_path / "tier")) as editor:
            assert editor.contains(page_keys(20)) == [True] * 20

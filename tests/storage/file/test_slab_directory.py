"""A directory of slabs: its descriptors, what stands in the place of its files, and that it is noticed when it goes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.storage.tiers.file.layouts import Layout
from hicache_ext.storage.tiers.file.slab import directory as directory_module
from hicache_ext.storage.tiers.file.slab.directory import JOINING, SlabDirectory, SlabFile, cleared_at
from hicache_ext.storage.tiers.file.slab.index import EVERY
from hicache_ext.storage.tiers.file.slab.shapes import Slab
from tests.storage.file.indexes import NOTHING, SMALL, A, B, add_slab, keys_of, present, store
from tests.storage.file.test_index_rebuild import header, key_of, put_slab

PATIENCE = 30.0
CAPACITY = 64 << 20


@pytest.fixture
def directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlabDirectory]:
    monkeypatch.setattr("hicache_ext.storage.tiers.file.slab.directory.OPEN_FILES", 4)
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        yield directory


def made(directory: SlabDirectory, count: int, slots: int = 8) -> list[Slab]:
    slabs = [add_slab(directory.index, SMALL, slots) for _ in range(count)]
    for slab in slabs:
        directory.create_slab_files(slab)
    return slabs


def open_files_of(directory: SlabDirectory) -> int:
    slabs = str(directory.home / "slabs")
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(slabs + "/")
        except FileNotFoundError:
            continue
    return count


# -- descriptors -------------------------------------------------------------------------------------------------------


def test_files_used_longest_ago_are_closed_beyond_the_limit(directory: SlabDirectory) -> None:
    slabs, numbers = made(directory, 6), []
    for slab in slabs:
        with directory.opened(slab) as fd:
            numbers.append(fd)
    assert open_files_of(directory) == 4
    with directory.opened(slabs[5]) as fd:
        assert fd == numbers[5]


def test_a_file_in_use_stays_open_whatever_the_limit(directory: SlabDirectory) -> None:
    slabs = made(directory, 7)
    with directory.opened(slabs[0]) as fd:
        for slab in slabs[1:]:
            with directory.opened(slab):
                pass
        assert os.fstat(fd).st_size == slabs[0].size
    opened, files = directory.open_all(slabs, SlabFile.SLOTS, headers=True)
    assert opened[:, 0].tolist() == [slab.number for slab in slabs]
    assert all(os.fstat(fd).st_size for fd in opened[:, 1:3].ravel().tolist())
    del files
    with directory.opened(slabs[0]):
        assert open_files_of(directory) == 4


def test_files_of_a_dropped_slab_are_closed_by_their_last_user(directory: SlabDirectory) -> None:
    slabs = made(directory, 2)
    with directory.opened(slabs[0]) as fd:
        directory.delete_slab_files(slabs[0])
        directory.close_files()
        assert os.fstat(fd).st_size == 0
        with pytest.raises(FileNotFoundError), directory.opened(slabs[0]):
            pass
    assert open_files_of(directory) == 0


def test_a_file_that_cannot_be_opened_is_left_out_of_many(directory: SlabDirectory) -> None:
    slabs = made(directory, 3)
    directory.delete_slab_files(slabs[1])
    opened, _ = directory.open_all(slabs, SlabFile.SLOTS, headers=True)
    assert opened[:, 0].tolist() == [slabs[0].number, slabs[2].number]


def test_files_have_all_their_blocks_and_none_is_left_of_a_full_disk(
    directory: SlabDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slab,) = made(directory, 1)
    for path in (directory.home / "slabs").iterdir():
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
        assert path.stat().st_mode & 0o777 == 0o600
    assert directory.has_files(slab)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        directory.create_slab_files(Slab(77, SMALL, 8))
    assert not directory.has_files(Slab(77, SMALL, 8))
    assert len(list((directory.home / "slabs").iterdir())) == 2


# -- opening -----------------------------------------------------------------------------------------------------------


def _use(place: str, ready: object, go_on: object) -> None:
    with closing(SlabDirectory(Path(place), "disk", CAPACITY)) as directory:
        add_slab(directory.index)
        store(directory.index, keys_of(range(5)))
        ready.set()  # type: ignore[attr-defined]
        go_on.wait(PATIENCE)  # type: ignore[attr-defined]


def test_a_second_process_has_the_index_of_the_first_and_keeps_it(place: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, go_on = context.Event(), context.Event()
    process = context.Process(target=_use, args=(str(place), ready, go_on))
    process.start()
    assert ready.wait(PATIENCE)
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        assert present(directory.index, keys_of(range(6))) == [0, 1, 2, 3, 4]
        go_on.set()
        process.join(PATIENCE)
        assert present(directory.index, keys_of(range(6))) == [0, 1, 2, 3, 4]
        assert len(list(directory.home.glob("*.sock"))) == 1


def test_an_opening_waits_for_nobody_where_nobody_is(place: Path) -> None:
    """Each opening waited a second for a lock that it held itself."""
    waited = []
    for _ in range(3):
        begun = time.monotonic()
        with closing(SlabDirectory(place, "disk", CAPACITY)):
            pass
        waited.append(time.monotonic() - begun)
    assert min(waited) < 0.9


def test_an_opening_beside_one_that_does_not_go_on_ends_with_a_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SlabDirectory(place, "disk", CAPACITY)):
        pass
    monkeypatch.setattr(directory_module, "_JOINING_BOUND", 0.1)
    stopped = OfdLock(place / "v3" / "lock", JOINING)
    assert stopped.try_acquire()
    with pytest.raises(TimeoutError, match="does not go on"), closing(SlabDirectory(place, "disk", CAPACITY)):
        pass
    stopped.release()
    stopped.close()
    with closing(SlabDirectory(place, "disk", CAPACITY)):
        pass


def test_stores_of_one_process_share_the_index_of_their_directory_until_the_last_one_goes(place: Path) -> None:
    with closing(SlabDirectory(place / ".." / place.name, "disk", CAPACITY)) as second:
        with closing(SlabDirectory(place, "disk", CAPACITY)) as first:
            made(first, 1)
            store(first.index, keys_of(range(3)))
            assert present(second.index, keys_of(range(4))) == [0, 1, 2]
            taken = first.index.take(SMALL, 1, first.index.next_ticket(), 0, NOTHING, evicting=False)[0]
            assert len(taken) == 1 and second.index.free_dead() == 0
        assert present(second.index, keys_of(range(4))) == [0, 1, 2]
        assert second.index.free_dead() == 1
    assert list((place / "v3").glob("*.sock")) == []


def test_a_directory_that_is_made_where_one_was_removed_is_another(place: Path) -> None:
    with closing(SlabDirectory(place, "disk", CAPACITY)) as first:
        store(first.index, keys_of(range(3)))
        shutil.rmtree(place)
        with closing(SlabDirectory(place, "disk", CAPACITY)) as second:
            made(second, 1)
            assert present(second.index, keys_of(range(4))) == []


# -- what others have put there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["members", "lock"])
def test_a_directory_in_the_place_of_a_file_of_ours_is_moved_aside(place: Path, name: str) -> None:
    (place / "v3" / name / "inside").mkdir(parents=True)
    with closing(SlabDirectory(place, "disk", CAPACITY)):
        assert (place / "v3" / name).is_file()
    (moved,) = (place / "v3").glob(f"{name}.not-ours-*")
    assert (moved / "inside").is_dir()


@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_no_directory_in_the_place_of_ours_is_moved_aside(place: Path, what: str) -> None:
    (place / "v3").mkdir(parents=True)
    if what == "file":
        (place / "v3" / "slabs").write_text("somebody's")
    else:
        (place / "elsewhere").mkdir()
        (place / "v3" / "slabs").symlink_to(place / "elsewhere")
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        made(directory, 1)
    assert (place / "v3" / "slabs").is_dir() and not (place / "v3" / "slabs").is_symlink()
    assert len(list((place / "v3").glob("slabs.not-ours-*"))) == 1


@pytest.mark.parametrize(
    "name",
    [
        "ffffffff-4096.slab",
        "00000001-0.slab",
        "00000001-1000.slab",
        f"00000001-{1 << 40}.slab",
        "00000001-99999999999999999999999999.slab",
        "00000002-4096.headers",
        "00000000-8192.slab",
    ],
)
def test_a_slab_with_an_absurd_name_goes_and_the_others_are_served(place: Path, name: str) -> None:
    put_slab(place, 0, [header(key_of(0))])
    (place / "v3" / "slabs" / name).write_bytes(bytes(8192))
    (place / "v3" / "slabs" / "notes.txt").write_text("somebody's")
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        assert directory.rebuild.wait(PATIENCE)
        assert present(directory.index, [key_of(0)]) == [0]
        (slab,) = made(directory, 1)
        assert slab.number < 1 << 31
        assert not (place / "v3" / "slabs" / name).exists()
        assert (place / "v3" / "slabs" / "notes.txt").exists()


def test_numbers_of_slabs_are_not_given_again(place: Path) -> None:
    put_slab(place, 9, [header(key_of(0))])
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        assert made(directory, 1)[0].number == 10


@pytest.mark.parametrize("name", ["somebody.dat", "00000005-4096.slab"])
def test_a_file_longer_than_any_disk_stops_no_start(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index was to be as large as all files there say that they are."""
    real = os.posix_fallocate

    def bounded(fd: int, offset: int, length: int) -> None:
        # Or this test would fill the disk of its machine when it fails.
        assert length < 1 << 30
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", bounded)
    put_slab(place, 0, [header(key_of(0))])
    with (place / "v3" / "slabs" / name).open("wb") as file:
        try:
            file.truncate(1 << 50)
        except OSError:
            file.truncate(1 << 43)
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        assert directory.rebuild.wait(PATIENCE)
        assert present(directory.index, [key_of(0)]) == [0]


# -- when an identity was cleared --------------------------------------------------------------------------------------


def test_a_note_of_a_clear_that_was_spoilt_counts_from_when_it_was_written(directory: SlabDirectory) -> None:
    assert cleared_at(directory.path, A) == -1
    directory.note_cleared(A, 1_700_000_000_000)
    assert cleared_at(directory.path, A) == 1_700_000_000_000
    path = directory.path / "identities" / f"{A.hex()}.cleared"
    # The digits alone might be those of next year: nothing that is stored until then would be found after a start.
    changed = "9" + path.read_text()[1:]
    for content in ("", "12", "x" * 13, "9999999999999", changed):
        path.write_text(content)
        assert abs(cleared_at(directory.path, A) - path.stat().st_mtime * 1000) < 20


def test_a_note_of_an_earlier_clear_that_comes_late_changes_nothing(directory: SlabDirectory) -> None:
    """Of a process that was stopped before it wrote it, while another one cleared again."""
    directory.note_cleared(A, 1_700_000_000_002)
    directory.note_cleared(A, 1_700_000_000_001)
    assert cleared_at(directory.path, A) == 1_700_000_000_002


def test_what_has_the_name_of_a_note_is_moved_aside(directory: SlabDirectory) -> None:
    place = directory.path / "identities" / "all.cleared"
    place.mkdir()
    directory.note_cleared(EVERY, 1_700_000_000_000)
    assert cleared_at(directory.path, A) == 1_700_000_000_000


def test_a_start_beside_a_stopped_process_leaves_no_descriptor(place: Path) -> None:
    with closing(SlabDirectory(place, "disk", CAPACITY)):
        pass
    stopped = OfdLock(place / "v3" / "lock", directory_module.CHANGING)
    assert stopped.try_acquire()
    counts = []
    for _ in range(3):
        with pytest.raises(TimeoutError, match="does not go on"), closing(SlabDirectory(place, "disk", CAPACITY)):
            pass
        counts.append(len(os.listdir("/proc/self/fd")))
    stopped.close()
    assert len(set(counts)) == 1


def test_a_path_that_hangs_while_it_is_opened_holds_up_no_other(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, go_on = threading.Event(), threading.Event()
    real = directory_module.adopt

    def adopt(path: Path, layout: Layout, tier: str) -> None:
        if path.name == "hangs":
            hangs.set()
            assert go_on.wait(PATIENCE)
        real(path, layout, tier)

    def open_it() -> None:
        with closing(SlabDirectory(tmp_path / "hangs", "disk", CAPACITY)):
            pass

    monkeypatch.setattr(directory_module, "adopt", adopt)
    opener = threading.Thread(target=open_it)
    opener.start()
    assert hangs.wait(PATIENCE)
    with closing(SlabDirectory(place, "disk", CAPACITY)) as directory:
        assert directory.index.rebuilt
    go_on.set()
    opener.join()


def test_a_clear_of_all_counts_where_it_is_later_than_that_of_the_identity(directory: SlabDirectory) -> None:
    directory.note_cleared(A, 1_700_000_000_000)
    directory.note_cleared(EVERY, 1_600_000_000_000)
    assert [cleared_at(directory.path, digest) for digest in (A, B)] == [1_700_000_000_000, 1_600_000_000_000]
    directory.note_cleared(EVERY, 1_700_000_000_001)
    assert cleared_at(directory.path, A) == 1_700_000_000_001

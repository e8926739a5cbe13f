"""The memory of an index, and how a process gets it from another one."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import mmap
import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.runtime.members import Members
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiers.file.layouts import slab_home
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index_memory import (
    INDEX_FORMAT,
    IndexMemory,
    IndexSharing,
    new_index,
    remove_left_sockets,
    shared_index,
)
from hicache_ext.storage.tiers.file.slab.listing import SlabListing
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import page_keys, store_pages
from tests.campaigns import scribbles
from tests.rigs.container import Program
from tests.waiting import wait_until

PATIENCE = 30.0
CAPACITY = 16 << 20


@pytest.fixture
def home_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


# -- the memory --------------------------------------------------------------------------------------------------------


def test_an_index_for_ten_terabytes_takes_memory_only_where_it_was_written() -> None:
    fd = new_index(10 << 40)
    other = os.dup(fd)
    memory = IndexMemory(fd)
    assert len(memory.rows) >= 2 * (10 << 40) // 4096
    memory.rows[len(memory.rows) // 2] = 1
    memory.sets[-1] = 1
    assert os.fstat(other).st_size > 100 << 30
    assert os.fstat(other).st_blocks * 512 < 8 << 20
    os.close(other)


def test_nobody_can_cut_the_memory_or_make_it_longer() -> None:
    """What lies behind the end of a mapping ends the process that looks at it."""
    fd = new_index(1 << 20)
    for length in (0, os.fstat(fd).st_size - 4096, os.fstat(fd).st_size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


@pytest.mark.parametrize("word", [index_words.FORMAT, index_words.ROWS_MOST, index_words.GHOST_SETS])
def test_memory_of_another_format_is_refused(word: int) -> None:
    fd = new_index(1 << 20)
    os.pwrite(fd, (INDEX_FORMAT + 1).to_bytes(8, "little"), 8 * word)
    with pytest.raises(ValueError, match="another format"):
        IndexMemory(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_memory_that_is_too_short_is_refused() -> None:
    fd = os.memfd_create("short")
    with pytest.raises(ValueError, match="too short"):
        IndexMemory(fd)


def _plain_file(tmp_path: Path) -> int:
    return os.open(tmp_path / "index", os.O_RDWR | os.O_CREAT)


def _without_seals(_: Path) -> int:
    return os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)


def _of_huge_pages(_: Path) -> int:
    try:
        return os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    except OSError as error:
        pytest.skip(f"missing: huge pages ({error})")


@pytest.mark.parametrize("make", [_plain_file, _without_seals, _of_huge_pages])
def test_what_could_end_the_process_that_looks_at_it_is_not_mapped(tmp_path: Path, make: Callable[[Path], int]) -> None:
    """A file that is cut under its mapping, and memory that is lacking: SIGBUS, in servers and in tools of root."""
    index, fd = new_index(1 << 20), make(tmp_path)
    os.ftruncate(fd, os.fstat(index).st_size + -os.fstat(index).st_size % (2 << 20))
    if make is not _of_huge_pages:
        os.pwrite(fd, os.pread(index, 4096, 0), 0)
        os.ftruncate(fd, os.fstat(index).st_size)
    else:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.close(index)
    with pytest.raises(ValueError, match="not the sealed memory"):
        IndexMemory(fd)


def test_a_tool_does_not_look_at_a_file_that_is_given_for_the_index(tmp_path: Path) -> None:
    SlabStore("disk", tmp_path, capacity=CAPACITY).close()
    home = slab_home(tmp_path)
    home_fd, members = os.open(home, os.O_RDONLY), Members(home / "members")
    index = new_index(CAPACITY)
    file = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.truncate(file, os.fstat(index).st_size)
    os.pwrite(file, os.pread(index, 4096, 0), 0)
    sharing = IndexSharing(home, home_fd, members.id, file)
    assert SlabListing(tmp_path).servers_out_of_reach
    sharing.close()
    members.close()
    os.close(index)
    os.close(home_fd)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (index_words.SLAB_NUMBER, -1),
        (index_words.SLAB_NUMBER, 1 << 31),
        (index_words.SLOT_SIZE, 0),
        (index_words.SLOT_SIZE, 4095),
        (index_words.SLOT_SIZE, 1 << 40),
        (index_words.SLOTS, 0),
        (index_words.SLOTS, -(1 << 62)),
        (index_words.SLOTS, (1 << 63) - 1),
        (index_words.FIRST, -1),
        (index_words.FIRST, 1 << 62),
        (index_words.FIRST, 105),
        (index_words.SLAB_STATE, 99),
    ],
)
def test_a_slab_that_cannot_be_is_not_believed(word: int, value: int) -> None:
    memory = IndexMemory(new_index(1 << 20))
    memory.slabs[:2] = [7, 4096, 10, 100, index_words.READY, 10, 0, 0], [8, 4096, 10, 110, index_words.READY, 10, 0, 0]
    assert memory.slab_table()[:, index_words.SLAB_STATE].sum() == 2 * index_words.READY
    memory.slabs[1, word] = value
    (left,) = np.flatnonzero(memory.slab_table()[:, index_words.SLAB_STATE]).tolist()
    assert left == 0


def test_a_slab_in_the_rows_of_another_one_hides_no_third() -> None:
    """Each slab that was made anew was hidden at once, and one more was made: the disk filled."""
    memory = IndexMemory(new_index(1 << 20))
    for position, (first, slots) in enumerate([(0, 64), (10, 60_000), (64, 10)]):
        memory.slabs[position] = [position, 4096, slots, first, index_words.READY, slots, 0, 0]
    assert np.flatnonzero(memory.slab_table()[:, index_words.SLAB_STATE]).tolist() == [0, 2]


@pytest.mark.slow
def test_whatever_is_written_into_the_index_no_process_ends_and_no_byte_is_wrong() -> None:
    """One word from any member of the group ended every server on the directory. The long form: ``make damages``."""
    found = scribbles.run(rounds=40, seed=9)
    assert found.problems == {}, "\n\n".join(found.stories)
    assert found.rounds == 39 and len(found.parts) > 7
    assert found.reads["HIT"] > 0 and found.writes["STORED"] > 0


def test_the_memory_of_a_closed_store_is_given_back_without_the_garbage_collector(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    others = indexes_open()
    try:
        for _ in range(3):
            store = SlabStore("disk", tmp_path, capacity=CAPACITY)
            store_pages(store, page_keys(5))
            assert indexes_open() == others + 3
            store.close()
            assert indexes_open() == others
    finally:
        gc.enable()


def indexes_open() -> int:
    """Descriptors of indexes of this process: of its own, of its mapping, and the one that it gives away."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("hicache-ext-index" in link for link in links)


def test_the_parts_of_the_memory_do_not_overlap_and_begin_at_pages() -> None:
    memory = IndexMemory(new_index(1 << 30))
    parts = [memory.header, memory.slabs, memory.identities]
    parts += [memory.ghosts, memory.sets, memory.rows]
    begin = memory.header.ctypes.data
    for before, after in itertools.pairwise(parts):
        assert before.ctypes.data + before.nbytes <= after.ctypes.data
        assert (after.ctypes.data - begin) % mmap.PAGESIZE == 0


def test_memory_for_looking_cannot_be_changed() -> None:
    memory = IndexMemory(new_index(1 << 20), to_change=False)
    with pytest.raises(ValueError, match="read-only"):
        memory.rows[0] = 1


# -- from process to process -------------------------------------------------------------------------------------------


def _share(home: str, ready: object, go_on: object) -> None:
    home_fd = os.open(home, os.O_RDONLY)
    fd = new_index(1 << 20)
    memory = IndexMemory(os.dup(fd))
    memory.rows[7] = 70
    sharing = IndexSharing(Path(home), home_fd, 0xABC, fd)
    ready.set()  # type: ignore[attr-defined]
    wait_until(lambda: memory.rows[8, 0] == 80)
    memory.rows[9] = 90
    go_on.wait(PATIENCE)  # type: ignore[attr-defined]
    sharing.close()


def test_a_process_gets_the_memory_of_another_one_and_both_see_what_either_changes(
    tmp_path: Path, home_fd: int
) -> None:
    context = multiprocessing.get_context("spawn")
    ready, go_on = context.Event(), context.Event()
    process = context.Process(target=_share, args=(str(tmp_path), ready, go_on))
    process.start()
    assert ready.wait(PATIENCE)
    fd = shared_index(home_fd, [0xABC], PATIENCE)
    assert fd is not None
    assert not os.get_inheritable(fd)
    memory = IndexMemory(fd)
    assert memory.rows[7, 0] == 70
    memory.rows[8] = 80
    wait_until(lambda: memory.rows[9, 0] == 90)
    go_on.set()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sharing(tmp_path: Path, home_fd: int) -> Iterator[IndexSharing]:
    sharing = IndexSharing(tmp_path, home_fd, 5, new_index(1 << 20))
    yield sharing
    sharing.close()


def is_shared(home_fd: int, members: list[int], seconds: float = PATIENCE) -> bool:
    fd = shared_index(home_fd, members, seconds)
    if fd is not None:
        IndexMemory(fd)
    return fd is not None


@pytest.mark.usefixtures("sharing")
def test_the_socket_is_for_its_owner(tmp_path: Path) -> None:
    status = (tmp_path / "5.sock").lstat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.usefixtures("sharing")
def test_a_member_that_does_not_answer_costs_nothing_while_another_one_does(tmp_path: Path, home_fd: int) -> None:
    """One is stopped, one has no socket, one is somebody else."""
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as gone:
        silent.bind(str(tmp_path / "1.sock"))
        silent.listen(5)
        gone.bind(str(tmp_path / "2.sock"))
        begun = time.monotonic()
        assert is_shared(home_fd, [1, 2, 3, 5])
        assert time.monotonic() - begun < PATIENCE / 2


def test_members_that_do_not_answer_cost_the_bound(tmp_path: Path, home_fd: int) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "1.sock"))
        silent.listen(5)
        begun = time.monotonic()
        assert not is_shared(home_fd, [1], 0.2)
        assert 0.15 < time.monotonic() - begun < PATIENCE
    begun = time.monotonic()
    assert not is_shared(home_fd, [1, 2], PATIENCE)
    assert time.monotonic() - begun < PATIENCE / 2


@pytest.mark.usefixtures("sharing")
def test_a_directory_with_a_path_longer_than_a_socket_s_name_is_shared(tmp_path: Path) -> None:
    home = tmp_path / ("a" * 100) / ("b" * 100)
    home.mkdir(parents=True)
    home_fd = os.open(home, os.O_RDONLY)
    sharing = IndexSharing(home, home_fd, 9, new_index(1 << 20))
    assert is_shared(home_fd, [9])
    sharing.close()
    os.close(home_fd)


def test_sockets_of_the_dead_are_removed_and_nothing_else_is(tmp_path: Path, home_fd: int) -> None:
    for member in (5, 6):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / f"{member:x}.sock"))
    (tmp_path / "a.sock").write_text("a file of somebody")
    (tmp_path / "lock").touch()
    remove_left_sockets(home_fd, [6])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6.sock", "a.sock", "lock"]


def test_a_process_short_of_descriptors_gives_its_index_once_it_has_some(
    tmp_path: Path, home_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never did again, and nobody else could start."""
    real, refused = socket.socket.accept, []

    def accept(self: socket.socket) -> object:
        if len(refused) < 3:
            refused.append(self)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    sharing = IndexSharing(tmp_path, home_fd, 5, new_index(1 << 20))
    assert is_shared(home_fd, [5])
    assert len(refused) == 3
    sharing.close()


@pytest.mark.usefixtures("sharing")
def test_the_index_is_given_to_many(home_fd: int) -> None:
    for _ in range(50):
        assert is_shared(home_fd, [5])


# -- children that were forked -----------------------------------------------------------------------------------------

_FORKING = """
import os, signal, sys
from pathlib import Path
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import page_keys, store_pages

store = SlabStore("disk", Path(sys.argv[1]), capacity=16 << 20)
assert set(store_pages(store, page_keys(5, "parent"))) == {SetResult.STORED}
ready, tell = os.pipe()
child = os.fork()
if not child:
    assert set(store_pages(store, page_keys(5, "child"))) == {SetResult.STORED}
    if sys.argv[2] == "ends":
        store.close()
        os._exit(0)
    os.write(tell, b"x")
    signal.pause()
if sys.argv[2] == "ends":
    assert os.waitpid(child, 0)[1] == 0
else:
    os.read(ready, 1)
print(child, flush=True)
sys.stdin.readline()
"""


def test_a_child_that_wrote_and_outlives_its_parent_gives_its_index_to_others(tmp_path: Path) -> None:
    """It was among the members and had no socket: nobody else could open the directory as long as it lived."""
    with Program(_FORKING, tmp_path, "stays") as program:
        child = int(program.line())
        try:
            program.kill()
            store = SlabStore("disk", tmp_path, capacity=CAPACITY)
            assert all(store.contains(page_keys(5, "parent") + page_keys(5, "child")))
            assert set(store_pages(store, page_keys(5, "other"))) == {SetResult.STORED}
            store.close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_closes_the_store_of_its_parent_does_not_end_the_parent_s_sharing(tmp_path: Path) -> None:
    with Program(_FORKING, tmp_path, "ends") as program:
        assert program.line()
        store = SlabStore("disk", tmp_path, capacity=CAPACITY)
        assert all(store.contains(page_keys(5, "parent") + page_keys(5, "child")))
        store.close()

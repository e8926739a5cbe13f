"""The memory of an index, and how a process gets it from another one."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import multiprocessing
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ext.storage.tiers.file.slab import slot_code
from hicache_ext.storage.tiers.file.slab.index_memory import INDEX_FORMAT, IndexMemory, new_index
from hicache_ext.storage.tiers.file.slab.sharing import IndexSharing, remove_left_sockets, shared_index
from tests.waiting import wait_until

PATIENCE = 30.0


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


@pytest.mark.parametrize("word", [slot_code.FORMAT, slot_code.ROWS_MOST, slot_code.GHOST_SETS])
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


def test_the_parts_of_the_memory_do_not_overlap_and_begin_at_pages() -> None:
    memory = IndexMemory(new_index(1 << 30))
    parts = [memory.header, memory.sizes, memory.members, memory.slabs, memory.identities]
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

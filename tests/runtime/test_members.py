"""Who uses a directory: known by locks that the kernel takes back, in any namespace."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ext.runtime import members as members_module
from hicache_ext.runtime.members import Members, living_members
from tests.rigs.container import Program, namespaces_missing

MEMBER = """
import os, sys
from pathlib import Path
from hicache_ext.runtime.members import Members
members = Members(Path(sys.argv[1]))
print(members.id, os.getpid(), flush=True)
for line in sys.stdin:
    print(members.is_alive(int(line)), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "members"


@pytest.fixture
def members(path: Path) -> Iterator[Members]:
    with_id = Members(path)
    yield with_id
    with_id.close()


def test_a_member_sees_itself_and_the_others_of_its_process(members: Members, path: Path) -> None:
    other = Members(path)
    assert members.id != other.id
    assert members.is_alive(members.id) and members.is_alive(other.id)
    assert living_members(path) == sorted([members.id, other.id])
    other.close()


def test_a_closed_member_is_dead(members: Members, path: Path) -> None:
    other = Members(path)
    gone = other.id
    other.close()
    other.close()
    assert not members.is_alive(gone)
    assert living_members(path) == [members.id]


def test_a_closed_membership_takes_nobody_for_dead(members: Members) -> None:
    own = members.id
    members.close()
    assert members.is_alive(own)
    with pytest.raises(OSError, match="members"):
        _ = members.id


@pytest.mark.parametrize("number", [0, -1, 1 << 40, 1 << 70])
def test_a_number_that_is_no_id_is_nobody(members: Members, number: int) -> None:
    assert not members.is_alive(number)


def test_the_file_stays_empty_and_private(members: Members, path: Path) -> None:
    assert path.stat().st_size == 0
    assert path.stat().st_mode & 0o777 == 0o600


def test_many_members_are_all_found(path: Path) -> None:
    crowd = [Members(path) for _ in range(50)]
    assert living_members(path) == sorted(member.id for member in crowd)
    for member in crowd:
        member.close()
    assert living_members(path) == []


def test_ids_side_by_side_and_at_both_ends_are_found(
    path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = iter([1, 1, 2, (1 << 40) - 1])
    monkeypatch.setattr("hicache_ext.runtime.members._new_id", lambda: next(wanted))
    # The second one finds its first choice taken.
    crowd = [Members(path) for _ in range(3)]
    assert [member.id for member in crowd] == [1, 2, (1 << 40) - 1]
    assert living_members(path) == sorted([members.id, 1, 2, (1 << 40) - 1])
    for member in crowd:
        member.close()


def test_a_tool_that_looks_makes_nothing(path: Path) -> None:
    assert living_members(path) == []
    assert not path.exists()


def test_a_member_of_a_removed_file_joins_the_new_one(members: Members, path: Path) -> None:
    before = members.id
    members.renew()
    assert members.id == before
    path.unlink()
    other = Members(path)
    assert living_members(path) == [other.id] and not members.is_alive(other.id)
    members.renew()
    assert members.id != before
    assert living_members(path) == sorted([members.id, other.id])
    other.close()


def test_a_killed_process_is_dead_at_once_and_a_stopped_one_lives(members: Members, path: Path) -> None:
    with Program(MEMBER, path) as program:
        other = int(program.line().split()[0])
        assert members.is_alive(other)
        with program.stopped():
            assert members.is_alive(other)
        program.kill()
        assert not members.is_alive(other)
        assert living_members(path) == [members.id]


@pytest.mark.skipif(namespaces_missing() is not None, reason=f"missing: {namespaces_missing()}")
def test_processes_with_equal_pids_in_namespaces_of_their_own_see_each_other(members: Members, path: Path) -> None:
    with Program(MEMBER, path, contained=True) as one, Program(MEMBER, path, contained=True, hostname="two") as two:
        (first, first_pid), (second, second_pid) = one.line().split(), two.line().split()
        assert first_pid == second_pid
        assert one.ask(second) == two.ask(first) == one.ask(str(members.id)) == "True"
        assert living_members(path) == sorted([members.id, int(first), int(second)])
        one.kill()
        assert two.ask(first) == "False"
        assert two.ask(second) == "True"


def test_a_lock_that_cannot_be_read_means_alive(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(members_module, "lock_among", broken)
    assert members.is_alive(12345)


def test_a_fork_child_does_not_keep_its_parent_alive(members: Members, path: Path) -> None:
    with Program(_FORKING, path) as program:
        parent, child = map(int, program.line().split()[:2])
        child_pid = int(program.line())
        try:
            assert parent != child
            assert members.is_alive(parent) and members.is_alive(child)
            program.kill()
            assert not members.is_alive(parent)
            assert members.is_alive(child)
        finally:
            os.kill(child_pid, signal.SIGKILL)


_FORKING = """
import os, sys, time
from pathlib import Path
from hicache_ext.runtime.members import Members
members = Members(Path(sys.argv[1]))
parent = members.id
child_pid = os.fork()
if not child_pid:
    assert members.is_alive(parent)
    print(parent, members.id, flush=True)
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_child_that_forgets_its_membership_does_not_keep_its_parent_alive(members: Members, path: Path) -> None:
    with Program(_FORKING_AND_SILENT, path) as program:
        parent, child_pid = map(int, program.line().split())
        try:
            program.kill()
            assert not members.is_alive(parent)
            assert living_members(path) == [members.id]
        finally:
            os.kill(child_pid, signal.SIGKILL)


_FORKING_AND_SILENT = """
import os, sys, time
from pathlib import Path
from hicache_ext.runtime.members import Members
members = Members(Path(sys.argv[1]))
ready, tell = os.pipe()
child_pid = os.fork()
if not child_pid:
    os.write(tell, b"x")
    time.sleep(600)
os.read(ready, 1)
print(members.id, child_pid, flush=True)
time.sleep(600)
"""

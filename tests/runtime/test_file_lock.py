"""Locks between processes and threads that nobody waits for without bound."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ext.runtime.file_lock import ChangeLock, OfdLock
from tests.rigs.container import Program, namespaces_missing

HOLDER = """
import sys
from pathlib import Path
from hicache_ext.runtime.file_lock import OfdLock
lock = OfdLock(Path(sys.argv[1]), 0)
for line in sys.stdin:
    if line == "take\\n":
        print(lock.try_acquire(), flush=True)
    else:
        lock.release()
        print("released", flush=True)
"""
LONG = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def lock(path: Path) -> Iterator[OfdLock]:
    made = OfdLock(path, 0)
    yield made
    made.release()
    made.close()


def test_two_locks_of_one_process_on_one_byte_exclude_each_other(lock: OfdLock, path: Path) -> None:
    other = OfdLock(path, 0)
    assert lock.try_acquire()
    assert not other.try_acquire()
    lock.release()
    assert other.try_acquire()
    other.close()


def test_locks_on_other_bytes_do_not_meet(lock: OfdLock, path: Path) -> None:
    other = OfdLock(path, 1)
    assert lock.try_acquire() and other.try_acquire()
    other.release()
    other.close()


def test_threads_of_one_process_exclude_each_other(lock: OfdLock) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            assert lock.acquire(LONG)
            inside += 1
            most = max(most, inside)
            time.sleep(0.0001)
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_thread_waits_no_longer_than_its_bound(lock: OfdLock) -> None:
    assert lock.try_acquire()
    begun = time.monotonic()
    assert not lock.acquire(0.05)
    assert 0.05 <= time.monotonic() - begun < 5.0


def test_whoever_waits_gets_the_lock_when_it_is_given_back(lock: OfdLock, path: Path) -> None:
    with Program(HOLDER, path) as holder:
        assert holder.ask("take") == "True"
        threading.Timer(0.1, holder.tell, ["release"]).start()
        assert lock.acquire(LONG)


def test_release_without_holding_does_nothing(lock: OfdLock) -> None:
    lock.release()
    assert lock.try_acquire()


def test_a_closed_lock_is_free_and_raises(lock: OfdLock, path: Path) -> None:
    other = OfdLock(path, 0)
    assert other.try_acquire()
    other.release()
    other.close()
    other.close()
    assert lock.try_acquire()
    with pytest.raises(OSError, match="lock"):
        other.try_acquire()


def test_a_lock_closed_while_held_is_free_when_its_holder_releases_it(
    lock: OfdLock, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_ext.runtime.file_lock.CHANGE_LOCK_BOUND", 0.01)
    other = OfdLock(path, 0)
    assert other.try_acquire()
    other.close()
    assert not lock.try_acquire()
    other.release()
    assert lock.try_acquire()


def test_a_killed_holder_frees_the_lock_at_once(lock: OfdLock, path: Path) -> None:
    with Program(HOLDER, path) as holder:
        assert holder.ask("take") == "True"
        assert not lock.try_acquire()
        holder.kill()
        assert lock.try_acquire()


@pytest.mark.skipif(namespaces_missing() is not None, reason=f"missing: {namespaces_missing()}")
def test_containers_with_equal_pids_exclude_each_other(lock: OfdLock, path: Path) -> None:
    with Program(HOLDER, path, contained=True) as one, Program(HOLDER, path, contained=True) as two:
        assert one.ask("take") == "True"
        assert two.ask("take") == "False"
        one.kill()
        assert two.ask("take") == "True"
        assert not lock.try_acquire()


def test_a_fork_child_does_not_keep_the_lock_of_its_parent(lock: OfdLock, path: Path) -> None:
    with Program(_FORKING, path) as program:
        child_pid = int(program.line())
        try:
            assert not lock.try_acquire()
            program.kill()
            assert lock.try_acquire()
        finally:
            os.kill(child_pid, 9)


_FORKING = """
import os, sys, time
from pathlib import Path
from hicache_ext.runtime.file_lock import OfdLock
lock = OfdLock(Path(sys.argv[1]), 0)
assert lock.try_acquire()
if not os.fork():
    lock.release()
    # The parent has it.
    assert not lock.try_acquire()
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_stopped_holder_costs_the_bound_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bound = 0.5
    change = ChangeLock(path, 0, "the index", bound)
    with Program(HOLDER, path) as holder, caplog.at_level(logging.INFO, "hicache_ext"):
        assert holder.ask("take") == "True"
        with holder.stopped():
            begun = time.monotonic()
            assert not change.acquire_to_change()
            assert time.monotonic() - begun >= bound
            begun = time.monotonic()
            for _ in range(1000):
                with change.held() as mine:
                    assert not mine
            # To wait each time would take 500 s.
            assert time.monotonic() - begun < 100 * bound
            assert change._stuck
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "the index has been held for 0.5 s by another process, stopped perhaps" in caplog.text
        assert holder.ask("release") == "released"
        with change.held() as mine:
            assert mine
        assert not change._stuck
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "the index is free again" in caplog.text


def test_threads_that_wait_together_say_once_that_the_lock_is_stuck(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change = ChangeLock(path, 0, "the index", 0.2)
    other = OfdLock(path, 0)
    assert other.try_acquire()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(change.acquire_to_change())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [False] * 8
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    other.release()
    other.close()


def test_a_slow_thread_of_this_process_is_waited_for_and_is_no_stopped_process(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change = ChangeLock(path, 0, "the index", 0.05)
    answers: list[bool] = []

    def work() -> None:
        with change.held() as mine:
            answers.append(mine)
            time.sleep(0.2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4
    assert not change._stuck and not caplog.records


def test_threads_of_this_process_wait_for_each_other_while_another_process_is_stopped(path: Path) -> None:
    change = ChangeLock(path, 0, "the index", 0.05, threads=5.0)
    other = OfdLock(path, 0)
    assert other.try_acquire() and not change.acquire_to_change() and change._stuck
    other.release()
    assert change.acquire(LONG)
    threading.Timer(0.2, change.release).start()
    with change.held() as mine:
        assert mine
    assert not change._stuck
    # Nor without bound.
    change._threads_bound = 0.05
    assert change.acquire(LONG)
    assert not change.acquire_to_change() and not change._stuck
    assert not change.try_acquire()
    change.release()
    other.close()


def test_held_gives_the_lock_back_when_the_body_raises(lock: OfdLock, path: Path) -> None:
    change = ChangeLock(path, 0, "the index")
    with pytest.raises(ZeroDivisionError), change.held() as mine:
        assert 1 / (1 - mine)
    assert lock.try_acquire()
